//! The memory server: lends memory to clients that prove which regions are theirs.
//!
//! [`pool`] decides and remembers, without I/O; [`session`] is one connection's view of it, from
//! request frames to reply frames; [`listen`] moves the bytes: a thread for each connection, blocking.

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
