//! The client: a page store whose pages are on several memory servers.
//!
//! [`replicator`], [`repair`] and `availability` decide on replicas, without I/O. [`cluster`] is
//! the [`PageStore`](crate::store::PageStore), and `state` what its threads share. [`reader`] and
//! [`writer`] serve one thread each, over [`link`]s of their own. `control` is the one thread that
//! runs the `monitor`, which watches servers, admits them again and repairs chunks.

pub mod ask;
mod availability;
mod chunk;
pub mod cluster;
mod compression;
pub mod connection;
mod control;
pub mod link;
mod monitor;
mod options;
mod peer;
mod prefetch;
mod prospects;
mod reader;
pub mod repair;
pub mod replicator;
pub mod set;
mod state;
mod writer;
