//! Network memory: the pages of a program in the memory of other machines.
//!
//! [`store`] is the interface: the pager sees a [`PageStore`](store::PageStore) and no servers.
//! Invariant: a page that is read back has exactly the bytes that were written, or the read fails.
//! The owner keeps the MAC that a page had at its eviction, and verifies it at page-in.
#![deny(unsafe_code)]

mod affinity;
pub mod client;
pub mod discovery;
pub mod documents;
mod link_rate;
pub mod page;
pub mod pager;
pub mod preloaded;
pub mod random;
pub mod secret;
pub mod server;
pub mod store;
pub mod threads;
pub mod tls;
pub mod transport;
pub mod wire;
