//! What one client may take of a server, so that it leaves something to the others.
//!
//! A client is whoever shows one certificate; without TLS, whoever comes from one address.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// A client and what it has.
#[derive(Debug, Default)]
pub struct Client {
    connections: AtomicU32,
    regions: AtomicU32,
    pages: AtomicU64,
}

impl Client {
    /// Connections that are open after their hello.
    pub fn connections(&self) -> u32 {
        self.connections.load(Ordering::Relaxed)
    }

    /// Regions that it has made and that are still there.
    pub fn regions(&self) -> u32 {
        self.regions.load(Ordering::Relaxed)
    }

    /// Pages held for it.
    pub fn pages(&self) -> u64 {
        self.pages.load(Ordering::Relaxed)
    }

    /// Counts a connection.
    pub(super) fn connected(&self) {
        self.connections.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts the end of a connection.
    pub(super) fn disconnected(&self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }

    /// Counts a region, unless that would be more than the limit; returns whether it did.
    pub(super) fn take_region(&self, max: u32) -> bool {
        let one_more = |regions: u32| (regions < max).then_some(regions + 1);
        self.regions.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).is_ok()
    }

    /// Counts the end of a region.
    pub(super) fn give_region_back(&self) {
        self.regions.fetch_sub(1, Ordering::Relaxed);
    }

    /// Counts a page, unless that would be more than the limit; returns whether it did.
    pub(super) fn take_page(&self, max: u64) -> bool {
        let one_more = |pages: u64| (pages < max).then_some(pages + 1);
        self.pages.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).is_ok()
    }

    /// Counts pages that are held no more.
    pub(super) fn give_pages_back(&self, pages: u64) {
        self.pages.fetch_sub(pages, Ordering::Relaxed);
    }
}

/// All clients that have something here.
#[derive(Debug, Default)]
pub(super) struct Clients(Mutex<HashMap<String, Arc<Client>>>);

impl Clients {
    /// Returns the client of this certificate or address.
    pub fn get(&self, identity: &str) -> Arc<Client> {
        let mut clients = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(client) = clients.get(identity) {
            return client.clone();
        }
        // Those of whom nothing is left are of no use, and names must not pile up.
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
        one.give_region_back();
        assert!(clients.get("one").take_region(1));
        assert!((0..3).all(|_| one.take_page(3)) && !one.take_page(3));
        one.give_pages_back(2);
        assert_eq!((one.pages(), other.pages()), (1, 0));
    }

    #[test]
    fn clients_that_have_gone_are_forgotten() {
        let clients = Clients::default();
        (0..1000).for_each(|number| drop(clients.get(&number.to_string())));
        assert_eq!(clients.0.lock().unwrap().len(), 1);
    }
}
