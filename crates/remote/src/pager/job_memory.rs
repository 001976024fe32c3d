//! The network memory of jobs: regions for the machine `host`, which does not know this crate.

use super::{EvictionMethod, Log, PagerCounts, PagerOptions, RemoteRegion, Serving, THREADS};
use crate::store::PageStore;
use crate::store::embedded::EmbeddedStore;
use pagetax_core::network_memory::{NetworkMemory, NetworkRegion};
use pagetax_core::units::Bytes;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

/// The page store of a run, and the log of its pagers.
pub struct JobMemory {
    store: Arc<dyn PageStore>,
    log: Option<Log>,
}

impl JobMemory {
    /// Returns network memory that pages to this store.
    pub fn new(store: Arc<dyn PageStore>, log: Option<Log>) -> JobMemory {
        JobMemory { store, log }
    }

    /// Compresses evicted pages inside this process, at most `room` bytes of them.
    pub fn embedded(room: Bytes, log: Option<Log>) -> JobMemory {
        JobMemory::new(Arc::new(EmbeddedStore::new(room)), log)
    }
}

impl NetworkMemory for JobMemory {
    fn map(
        &self,
        bytes: u64,
        resident_bytes: u64,
        serving: Serving,
    ) -> io::Result<Arc<dyn NetworkRegion>> {
        let options = PagerOptions {
            log: self.log.clone(),
            serving,
            // Only workers touch the region: no device and no system call does.
            eviction_method: EvictionMethod::Cheapest,
            ..PagerOptions::resident(resident_bytes)
        };
        let mapped = RemoteRegion::map(self.store.clone(), bytes, options);
        Ok(Arc::new(mapped.map_err(io::Error::other)?))
    }

    fn thread_names(&self) -> &'static [&'static str] {
        &THREADS
    }

    fn describe(&self) -> String {
        self.store.describe()
    }
}

// SAFETY: the arena is reserved when the region is mapped, at an address that never changes, and is unmapped
// when the region is dropped. Its length is whole pages, at least one. The pager moves pages away and back but
// never changes their bytes; a page that fails its MAC is poisoned, so that it raises SIGBUS. References to the
// bytes are only given out by `as_slice` and `as_mut_slice`, which a `dyn NetworkRegion` does not have.
#[allow(unsafe_code)]
unsafe impl NetworkRegion for RemoteRegion {
    fn start(&self) -> NonNull<u8> {
        NonNull::new(self.as_ptr()).expect("nothing is mapped at 0")
    }

    fn bytes(&self) -> usize {
        self.len()
    }

    fn counts(&self) -> PagerCounts {
        RemoteRegion::counts(self)
    }

    fn page_in_latency(&self) -> Vec<(u64, u64)> {
        RemoteRegion::page_in_latency(self)
    }
}
