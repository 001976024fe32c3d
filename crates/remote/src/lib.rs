//! Network memory: the pages of a program in the memory of other machines.
//!
//! [`store`] is the seam: the pager sees a [`PageStore`](store::PageStore) and nothing of servers.
//! Invariant: a page read back is the page that was written, to the byte, or an error. The sum that
//! a page had when it was evicted is kept by its owner and checked at page-in, whatever lies
//! between.
#![deny(unsafe_code)]

pub mod client;
pub mod discovery;
pub mod page;
pub mod pager;
mod placement;
pub mod preloaded;
pub mod secret;
pub mod server;
pub mod store;
pub mod threads;
pub mod tls;
pub mod transport;
pub mod wire;
