//! The store inside this process: pages compressed with LZ4, as zram does, within a limit.
//!
//! Invariant: the bytes of all kept pages and their index together never exceed the limit.

use super::{
    Capacity, PageReader, PageStore, PageWriter, PutRun, RegionId, StoreError, check_discard,
    check_get, check_put,
};
use crate::page::{PAGE_BYTES, PageMac, PageRun};
use lz4_flex::block::{compress_into, decompress_into, get_maximum_output_size};
use pagetax_core::units::Bytes;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// The overhead of a page in bytes: its entry in the index, with the room that a hash table keeps
/// free, and the header of its block.
const ENTRY_BYTES: u64 = 96;

/// A store of compressed pages in this process's memory.
#[derive(Debug)]
pub struct EmbeddedStore {
    shared: Arc<EmbeddedState>,
}

#[derive(Debug)]
struct EmbeddedState {
    limit_bytes: u64,
    used_bytes: AtomicU64,
    pages_held: AtomicU64,
    regions: RwLock<HashMap<RegionId, Arc<EmbeddedRegion>>>,
    next_region: AtomicU64,
}

#[derive(Debug)]
struct EmbeddedRegion {
    pages: u64,
    /// The kept pages by number. A page of [`PAGE_BYTES`] is not compressed; a shorter one is.
    kept: Mutex<HashMap<u64, Arc<[u8]>>>,
}

impl EmbeddedStore {
    /// Returns an empty store that never takes more than `limit`.
    pub fn new(limit: Bytes) -> Self {
        let shared = EmbeddedState {
            limit_bytes: limit.0,
            used_bytes: AtomicU64::new(0),
            pages_held: AtomicU64::new(0),
            regions: RwLock::default(),
            next_region: AtomicU64::new(1),
        };
        EmbeddedStore { shared: Arc::new(shared) }
    }

    /// Returns the memory in use by pages and their index, in bytes.
    pub fn used_bytes(&self) -> u64 {
        self.shared.used_bytes.load(Ordering::Relaxed)
    }
}

impl EmbeddedState {
    fn region(&self, id: RegionId) -> Result<Arc<EmbeddedRegion>, StoreError> {
        let regions = self.regions.read().unwrap_or_else(PoisonError::into_inner);
        regions.get(&id).cloned().ok_or(StoreError::NoRegion(id))
    }

    fn pages_free(&self) -> u64 {
        let used = self.used_bytes.load(Ordering::Relaxed);
        // Until pages show how well they compress, none is assumed to.
        let held = self.pages_held.load(Ordering::Relaxed);
        let page_bytes = match held {
            0 => PAGE_BYTES as u64 + ENTRY_BYTES,
            held => (used / held).max(ENTRY_BYTES),
        };
        self.limit_bytes.saturating_sub(used) / page_bytes
    }

    /// Accounts for `bytes` more, or fails if there is no room.
    fn take(&self, bytes: u64) -> Result<(), StoreError> {
        let fits = |used: u64| used.checked_add(bytes).filter(|mac| *mac <= self.limit_bytes);
        match self.used_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits) {
            Ok(_) => Ok(()),
            Err(used) => {
                let pages_free = self.limit_bytes.saturating_sub(used) / PAGE_BYTES as u64;
                Err(StoreError::Full { pages_asked: 1, pages_free })
            }
        }
    }

    fn give_back(&self, page: &[u8]) {
        self.used_bytes.fetch_sub(page.len() as u64 + ENTRY_BYTES, Ordering::Relaxed);
        self.pages_held.fetch_sub(1, Ordering::Relaxed);
    }
}

impl EmbeddedRegion {
    fn kept(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Arc<[u8]>>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PageStore for EmbeddedStore {
    fn describe(&self) -> String {
        format!("embedded LZ4 store of {}", Bytes(self.shared.limit_bytes))
    }

    fn capacity(&self) -> Result<Capacity, StoreError> {
        let pages_free = self.shared.pages_free();
        let held = self.shared.pages_held.load(Ordering::Relaxed);
        Ok(Capacity { pages_total: held + pages_free, pages_free })
    }

    fn create_region(&self, pages: u64, overcommit: bool) -> Result<RegionId, StoreError> {
        let pages_free = self.shared.pages_free();
        if !overcommit && pages > pages_free {
            return Err(StoreError::Full { pages_asked: pages, pages_free });
        }
        let id = RegionId(self.shared.next_region.fetch_add(1, Ordering::Relaxed));
        let region = Arc::new(EmbeddedRegion { pages, kept: Mutex::default() });
        self.shared.regions.write().unwrap_or_else(PoisonError::into_inner).insert(id, region);
        Ok(id)
    }

    fn drop_region(&self, id: RegionId) -> Result<(), StoreError> {
        let mut regions = self.shared.regions.write().unwrap_or_else(PoisonError::into_inner);
        let region = regions.remove(&id).ok_or(StoreError::NoRegion(id))?;
        drop(regions);
        region.kept().drain().for_each(|(_, page)| self.shared.give_back(&page));
        Ok(())
    }

    fn is_inherited(&self) -> bool {
        true
    }

    fn reader(&self) -> Result<Box<dyn PageReader>, StoreError> {
        Ok(Box::new(EmbeddedReader { shared: self.shared.clone() }))
    }

    fn writer(&self) -> Result<Box<dyn PageWriter>, StoreError> {
        let packed = vec![0; get_maximum_output_size(PAGE_BYTES)];
        Ok(Box::new(EmbeddedWriter { shared: self.shared.clone(), packed }))
    }
}

struct EmbeddedReader {
    shared: Arc<EmbeddedState>,
}

impl PageReader for EmbeddedReader {
    fn get(
        &mut self,
        id: RegionId,
        first: u64,
        macs: &[PageMac],
        into: &mut [u8],
    ) -> Result<(), StoreError> {
        let region = self.shared.region(id)?;
        check_get(region.pages, first, macs, into)?;
        for ((page, mac), into) in (first..).zip(macs).zip(into.chunks_exact_mut(PAGE_BYTES)) {
            let lost = |why: &str| StoreError::PageLost { region: id, page, why: why.into() };
            let kept = region.kept().get(&page).cloned();
            let kept = kept.ok_or_else(|| lost("it was never put"))?;
            if kept.len() == PAGE_BYTES {
                into.copy_from_slice(&kept);
            } else if decompress_into(&kept, into).ok() != Some(PAGE_BYTES) {
                return Err(lost("it does not decompress"));
            }
            if PageMac::of(into) != *mac {
                return Err(lost("its bytes have changed"));
            }
        }
        Ok(())
    }
}

struct EmbeddedWriter {
    shared: Arc<EmbeddedState>,
    packed: Vec<u8>,
}

impl EmbeddedWriter {
    fn put_page(
        &mut self,
        region: &EmbeddedRegion,
        page: u64,
        bytes: &[u8],
    ) -> Result<(), StoreError> {
        let packed = match compress_into(bytes, &mut self.packed) {
            Ok(len) if len < PAGE_BYTES => &self.packed[..len],
            _ => bytes,
        };
        self.shared.take(packed.len() as u64 + ENTRY_BYTES)?;
        self.shared.pages_held.fetch_add(1, Ordering::Relaxed);
        let before = region.kept().insert(page, packed.into());
        if let Some(before) = before {
            self.shared.give_back(&before);
        }
        Ok(())
    }
}

impl PageWriter for EmbeddedWriter {
    fn put(&mut self, id: RegionId, runs: &[PutRun<'_>]) -> Result<(), StoreError> {
        let region = self.shared.region(id)?;
        check_put(region.pages, runs)?;
        for run in runs {
            for (page, bytes) in (run.first..).zip(run.pages.chunks_exact(PAGE_BYTES)) {
                self.put_page(&region, page, bytes)?;
            }
        }
        Ok(())
    }

    fn discard(&mut self, id: RegionId, runs: &[PageRun]) -> Result<(), StoreError> {
        let region = self.shared.region(id)?;
        check_discard(region.pages, runs)?;
        for run in runs {
            let mut kept = region.kept();
            for page in run.first..run.first + run.count {
                if let Some(page) = kept.remove(&page) {
                    self.shared.give_back(&page);
                }
            }
        }
        Ok(())
    }
}
