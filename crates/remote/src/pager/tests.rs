//! The pager while the kernel finds no memory, and while all pages are evicted.

use super::*;
use crate::page::PageRun;
use crate::store::embedded::EmbeddedStore;
use crate::store::{Capacity, PageReader, PageWriter, PutRun, RegionId, StoreError};
use pagetax_core::units::Bytes;
use std::sync::OnceLock;

const MIB: u64 = 1 << 20;
/// The number of refusals: more than the tries of one page, fewer than all tries of a test.
const REFUSALS: usize = 40;

/// A store that refuses puts while it is full, and can make the kernel refuse the pager's next
/// calls.
struct FullStore {
    store: EmbeddedStore,
    is_full: Arc<AtomicBool>,
    pager: Arc<OnceLock<Arc<SharedPager>>>,
}

struct FullWriter(Box<dyn PageWriter>, Arc<AtomicBool>, Arc<OnceLock<Arc<SharedPager>>>);

impl PageWriter for FullWriter {
    fn put(&mut self, region: RegionId, runs: &[PutRun<'_>]) -> Result<(), StoreError> {
        match self.1.load(Relaxed) {
            true => {
                if let Some(shared) = self.2.get() {
                    shared.uffd.refusals.store(REFUSALS, Relaxed);
                }
                Err(StoreError::Full { pages_asked: 1, pages_free: 0 })
            }
            false => self.0.put(region, runs),
        }
    }

    fn discard(&mut self, region: RegionId, runs: &[PageRun]) -> Result<(), StoreError> {
        self.0.discard(region, runs)
    }
}

impl PageStore for FullStore {
    fn describe(&self) -> String {
        "full".into()
    }
    fn capacity(&self) -> Result<Capacity, StoreError> {
        self.store.capacity()
    }
    fn create_region(&self, pages: u64, overcommit: bool) -> Result<RegionId, StoreError> {
        self.store.create_region(pages, overcommit)
    }
    fn drop_region(&self, region: RegionId) -> Result<(), StoreError> {
        self.store.drop_region(region)
    }
    fn reader(&self) -> Result<Box<dyn PageReader>, StoreError> {
        self.store.reader()
    }
    fn writer(&self) -> Result<Box<dyn PageWriter>, StoreError> {
        let writer = self.store.writer()?;
        Ok(Box::new(FullWriter(writer, self.is_full.clone(), self.pager.clone())))
    }
}

fn map(store: Arc<dyn PageStore>, options: PagerOptions) -> Option<RemoteRegion> {
    match RemoteRegion::map(store, 8 * MIB, options) {
        Err(error @ PagerError::Uffd(_)) => {
            println!("SKIP: {error}");
            None
        }
        other => Some(other.unwrap()),
    }
}

/// Checks that an untouched page does not become a lost one.
#[test]
fn a_fresh_page_waits_for_memory() {
    for features in Features::ALL {
        let options = PagerOptions { features, ..PagerOptions::resident(MIB) };
        let store = Arc::new(EmbeddedStore::new(Bytes(64 * MIB)));
        let Some(mut region) = map(store, options) else { return };
        region.shared.uffd.refusals.store(REFUSALS, Relaxed);
        let byte = &mut region.as_mut_slice()[5 * PAGE_BYTES];
        *byte += 1;
        assert_eq!((*byte, region.shared.uffd.refusals.load(Relaxed)), (1, 0));
    }
}

/// Restores pages that are only in their staging blocks, as the store refused them.
#[test]
fn a_page_that_cannot_be_put_back_stays_staged() {
    let (is_full, pager) = (Arc::new(AtomicBool::new(false)), Arc::new(OnceLock::new()));
    let store = EmbeddedStore::new(Bytes(64 * MIB));
    let store = FullStore { store, is_full: is_full.clone(), pager: pager.clone() };
    let Some(mut region) = map(Arc::new(store), PagerOptions::resident(MIB)) else { return };
    pager.set(region.shared.clone()).expect("it is set once");
    let number_all = |region: &mut RemoteRegion, round: u64| {
        let pages = region.as_mut_slice().chunks_exact_mut(PAGE_BYTES);
        for (number, page) in (1u64..).zip(pages) {
            let found = u64::from_le_bytes(page[..8].try_into().unwrap());
            assert_eq!(found, if round == 0 { 0 } else { number << 8 | (round - 1) });
            page[..8].copy_from_slice(&(number << 8 | round).to_le_bytes());
        }
    };
    number_all(&mut region, 0);
    is_full.store(true, Relaxed);
    number_all(&mut region, 1);
    is_full.store(false, Relaxed);
    number_all(&mut region, 2);
    number_all(&mut region, 3);
}

/// Checks that `evict_all` returns only after the evictor has seen an empty region. Otherwise the
/// evictor would take the next page too.
#[test]
fn pages_that_come_after_all_have_left_stay() {
    let store = Arc::new(EmbeddedStore::new(Bytes(64 * MIB)));
    let Some(region) = map(store, PagerOptions::resident(MIB)) else { return };
    let page = &region.as_slice()[5 * PAGE_BYTES];
    let evicting = region.shared.evicting.lock();
    std::thread::scope(|scope| {
        let (done, is_done) = std::sync::mpsc::channel();
        let region = &region;
        scope.spawn(move || {
            region.evict_all();
            std::hint::black_box(*page);
            // The receiver has gone if `evict_all` waited for the evictor.
            let _ = done.send(());
        });
        // The evictor waits for the lock. An evict_all that does not wait for the evictor returns here.
        let _ = is_done.recv_timeout(Duration::from_millis(200));
        drop(evicting);
    });
    while region.shared.is_evicting_all.load(Relaxed) {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(region.counts().evicted_count, 0);
}

/// Checks that no request is lost if the evictor is about to sleep, and that no page is missed that
/// the handler has not recorded yet.
#[test]
fn all_pages_leave_whatever_the_evictor_was_doing() {
    let store = Arc::new(EmbeddedStore::new(Bytes(64 * MIB)));
    let Some(mut region) = map(store, PagerOptions::resident(MIB)) else { return };
    for round in 1..=500u32 {
        let pages = region.as_mut_slice().chunks_exact_mut(PAGE_BYTES);
        // Each round ends at another point of the evictor's round.
        pages
            .take(200 + round as usize)
            .for_each(|page| page[..4].copy_from_slice(&round.to_le_bytes()));
        region.evict_all();
        assert_eq!(region.shared.used(), 0, "round {round}: {:?}", region.counts());
    }
}
