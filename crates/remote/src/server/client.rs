//! The counts that limit one client, so that the others get their share.
//!
//! All connections with one certificate are one client. Without TLS, all connections from one
//! address are.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The connections, regions and pages of one client.
#[derive(Debug, Default)]
pub struct Client {
    connections: AtomicU32,
    regions: AtomicU32,
    pages: AtomicU64,
}

impl Client {
    /// Returns the number of its open connections that have sent their hello.
    pub fn connections(&self) -> u32 {
        self.connections.load(Ordering::Relaxed)
    }

    /// Returns the number of its regions.
    pub fn regions(&self) -> u32 {
        self.regions.load(Ordering::Relaxed)
    }

    /// Returns the number of pages that are held for it.
    pub fn pages(&self) -> u64 {
        self.pages.load(Ordering::Relaxed)
    }

    /// Counts a connection that has sent its hello.
    pub(super) fn connected(&self) {
        self.connections.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts the end of a connection.
    pub(super) fn disconnected(&self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }

    /// Counts a region. Returns false, and does not count it, if the client has `max` already.
    pub(super) fn take_region(&self, max: u32) -> bool {
        let one_more = |regions: u32| (regions < max).then_some(regions + 1);
        self.regions.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).is_ok()
    }

    /// Counts the end of a region.
    pub(super) fn release_region(&self) {
        self.regions.fetch_sub(1, Ordering::Relaxed);
    }

    /// Counts pages. Returns false, and does not count them, if the client would have more than `max`.
    pub(super) fn take_pages(&self, count: u64, max: u64) -> bool {
        let more = |pages: u64| (pages + count <= max).then_some(pages + count);
        self.pages.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// Counts pages that are no longer held.
    pub(super) fn release_pages(&self, pages: u64) {
        self.pages.fetch_sub(pages, Ordering::Relaxed);
    }
}

/// The clients that have a connection or a region.
#[derive(Debug, Default)]
pub(super) struct Clients(Mutex<HashMap<String, Arc<Client>>>);

impl Clients {
    /// Returns the client of this certificate or address.
    pub fn get(&self, identity: &str) -> Arc<Client> {
        let mut clients = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(client) = clients.get(identity) {
            return client.clone();
        }
        // Forget clients that have nothing left: the table must not grow for ever.
        clients.retain(|_, client| Arc::strong_count(client) > 1);
        clients.entry(identity.into()).or_default().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_of_one_client_and_are_given_back() {
        let clients = Clients::default();
        let (one, other) = (clients.get("one"), clients.get("other"));
        assert!(one.take_region(1) && !one.take_region(1) && other.take_region(1));
        one.release_region();
        assert!(clients.get("one").take_region(1));
        assert!((0..3).all(|_| one.take_pages(1, 3)) && !one.take_pages(1, 3));
        one.release_pages(2);
        assert_eq!((one.pages(), other.pages()), (1, 0));
    }

    #[test]
    fn clients_that_have_gone_are_forgotten() {
        let clients = Clients::default();
        (0..1000).for_each(|number| drop(clients.get(&number.to_string())));
        assert_eq!(clients.0.lock().unwrap().len(), 1);
    }
}
