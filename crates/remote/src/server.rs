//! The memory server: it lends memory to clients that prove which regions are theirs.
//!
//! [`pool`] decides and keeps the state, without I/O. [`session`] is one connection's view of it,
//! from request frames to reply frames. [`listen`] does the I/O, with a blocking thread for each
//! connection.

pub mod admin;
mod buffers;
pub mod client;
pub mod http;
pub mod index;
pub mod listen;
pub mod metrics;
pub mod pool;
pub mod region;
pub mod session;
pub mod slab;
