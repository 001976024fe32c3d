//! The client's side: a page store whose pages lie on several memory servers.
//!
//! [`replicator`], [`repair`] and `standing` decide where copies are, without I/O; [`cluster`] holds what all
//! threads share and is the [`PageStore`](crate::store::PageStore); [`reader`] and [`writer`] serve
//! one thread each, over [`link`]s of their own; [`control`] is the one thread that watches servers,
//! takes them in again and moves copies.

mod ahead;
pub mod ask;
mod chunk;
pub mod cluster;
pub mod connection;
mod control;
pub mod link;
mod prospects;
mod reader;
pub mod repair;
pub mod replicator;
pub mod set;
mod standing;
mod writer;
