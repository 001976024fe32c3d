//! The pager's state of each page: its location, and the MAC of the store's copy.
//!
//! Invariants: a state changes only under the lock of the page's cluster. Only the evictor writes
//! MACs. [`PageState::in_store`] is true if the store's copy has the MAC, wherever the page is now.
//! The table takes twelve bytes a page and eight a cluster, and memory only where pages were
//! touched.

use super::sys::lock::{Guard, MarkedLock};
use super::sys::memory::ZeroedTable;
use crate::page::PageMac;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering::*};

/// The number of pages that are evicted together: a power of two, at most
/// [`crate::page::RUN_PAGES_MAX`].
pub const CLUSTER_PAGES: usize = 32;

/// The location of a page's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum PageLocation {
    /// Never written, or dropped: it reads as zeros.
    Untouched = 0,
    /// Mapped in the region.
    Resident = 1,
    /// In the store only.
    Stored = 2,
    /// In a staging block, being put.
    Evicting = 3,
    /// In a staging block, and in the store.
    Staged = 4,
    /// A handler is fetching it.
    Fetching = 5,
    /// No replica is left, and accesses get SIGBUS.
    Lost = 6,
    /// Mapped in the region, but protected from writes: a copy of it is being put.
    CopyingOut = 7,
}

impl PageLocation {
    /// Returns true if the page is mapped in the region.
    pub fn is_mapped(self) -> bool {
        matches!(self, PageLocation::Resident | PageLocation::CopyingOut)
    }

    fn is_away(self) -> bool {
        matches!(
            self,
            PageLocation::Stored
                | PageLocation::Evicting
                | PageLocation::Staged
                | PageLocation::Fetching
                | PageLocation::Lost
        )
    }
}

/// A page's state in one word; all zeros for a page that was never touched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageState(u32);

const IN_STORE: u32 = 1 << 3;
const BLOCK_SHIFT: u32 = 8;

/// The most staging blocks that a state can name.
pub const BLOCKS_MAX: usize = 1 << (32 - BLOCK_SHIFT);

/// A time, counted in dropped pages. It wraps around.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EvictionStamp(u32);

impl EvictionStamp {
    /// Returns the stamp after this many dropped pages.
    pub fn of(dropped: u32) -> EvictionStamp {
        EvictionStamp(dropped & u32::MAX >> BLOCK_SHIFT)
    }

    /// Returns the number of pages dropped since this stamp.
    pub fn until(self, now: EvictionStamp) -> usize {
        EvictionStamp::of(now.0.wrapping_sub(self.0)).0 as usize
    }
}

impl PageState {
    /// Returns where the page's bytes are.
    pub fn location(self) -> PageLocation {
        match self.0 & 7 {
            0 => PageLocation::Untouched,
            1 => PageLocation::Resident,
            2 => PageLocation::Stored,
            3 => PageLocation::Evicting,
            4 => PageLocation::Staged,
            5 => PageLocation::Fetching,
            6 => PageLocation::Lost,
            _ => PageLocation::CopyingOut,
        }
    }

    /// Returns true if the store's copy matches the page's checksum.
    pub fn in_store(self) -> bool {
        self.0 & IN_STORE != 0
    }

    /// Returns true if both have the same location and block.
    pub fn is_same_location(self, other: PageState) -> bool {
        (self.0 ^ other.0) & !IN_STORE == 0
    }

    /// Returns the stamp of a stored page's drop from memory.
    pub fn stamp(self) -> EvictionStamp {
        EvictionStamp(self.0 >> BLOCK_SHIFT)
    }

    /// Returns the staging block of an evicting or staged page, or the copy's number if the page is being
    /// copied out.
    pub fn block(self) -> u32 {
        self.0 >> BLOCK_SHIFT
    }

    /// Returns the state with another location.
    pub fn at(self, location: PageLocation) -> PageState {
        PageState(self.0 & IN_STORE | location as u32)
    }

    /// Returns the state with another location and block.
    pub fn in_block(self, location: PageLocation, block: u32) -> PageState {
        PageState(self.0 & IN_STORE | location as u32 | block << BLOCK_SHIFT)
    }

    /// Returns the state of a page that was dropped at this stamp.
    pub fn stored(self, stamp: EvictionStamp) -> PageState {
        PageState(self.0 & IN_STORE | PageLocation::Stored as u32 | stamp.0 << BLOCK_SHIFT)
    }

    /// Returns the state with the store's copy marked valid or stale.
    pub fn with_in_store(self, in_store: bool) -> PageState {
        PageState(self.0 & !IN_STORE | if in_store { IN_STORE } else { 0 })
    }
}

/// Returns the cluster of a page.
pub fn cluster_of(page: usize) -> usize {
    page / CLUSTER_PAGES
}

const QUEUED: u32 = 1;
const REFAULTED: u32 = 2;

/// The marks of clusters, all zeros at first.
pub trait ClusterMarks {
    /// Returns the marks of a cluster.
    fn marks(&self, cluster: usize) -> &AtomicU32;

    /// Marks a cluster as queued for eviction. Returns false if it was queued already.
    fn mark_queued(&self, cluster: usize) -> bool {
        self.marks(cluster).fetch_or(QUEUED, Relaxed) & QUEUED == 0
    }

    /// Marks a cluster as no longer queued.
    fn mark_unqueued(&self, cluster: usize) {
        self.marks(cluster).fetch_and(!QUEUED, Relaxed);
    }

    /// Marks a cluster for a second chance.
    fn mark_refaulted(&self, cluster: usize) {
        self.marks(cluster).fetch_or(REFAULTED, Relaxed);
    }

    /// Returns and clears the mark of a refault.
    fn take_refaulted(&self, cluster: usize) -> bool {
        self.marks(cluster).fetch_and(!REFAULTED, Relaxed) & REFAULTED != 0
    }
}

/// The states of all pages.
#[derive(Debug)]
pub struct PageTable {
    states: ZeroedTable<AtomicU32>,
    macs: ZeroedTable<AtomicU64>,
    clusters: ZeroedTable<MarkedLock>,
    pages: usize,
    /// The number of pages whose bytes are not in the region.
    away: AtomicUsize,
}

impl PageTable {
    /// Creates a table of untouched pages.
    pub fn new(pages: usize) -> io::Result<PageTable> {
        let clusters = pages.div_ceil(CLUSTER_PAGES);
        Ok(PageTable {
            states: ZeroedTable::new(pages)?,
            macs: ZeroedTable::new(pages)?,
            clusters: ZeroedTable::new(clusters)?,
            pages,
            away: AtomicUsize::new(0),
        })
    }

    /// Returns the number of pages.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Returns the number of pages that are staged or stored.
    pub fn away(&self) -> usize {
        self.away.load(Relaxed)
    }

    /// Returns a page's state, which may change at once unless its cluster is locked.
    pub fn peek(&self, page: usize) -> PageState {
        PageState(self.states[page].load(Acquire))
    }

    /// Returns true if pages of one cluster are untouched. Unlike taking the lock, this reads no
    /// memory of the table that was never used.
    ///
    /// A thread that holds the lock may have installed pages, and woken the program, before it
    /// records them here. So pages count as untouched only if the lock is open. It is checked
    /// first, because it opens last.
    pub fn is_untouched(&self, pages: std::ops::Range<usize>) -> bool {
        let is_untouched = |page| self.peek(page).location() == PageLocation::Untouched;
        self.clusters[cluster_of(pages.start)].lock.is_unlocked()
            && pages.into_iter().all(is_untouched)
    }

    /// Returns the checksum of the store's copy.
    pub fn mac(&self, page: usize) -> PageMac {
        PageMac(self.macs[page].load(Relaxed))
    }

    /// Prefetches the table's entries of a page into the CPU's cache, all at once: in a large table
    /// each access waits for memory.
    pub fn prefetch(&self, page: usize) {
        self.clusters.prefetch(cluster_of(page));
        self.states.prefetch(page);
        self.macs.prefetch(page);
    }

    /// Locks a cluster, and waits for the lock.
    pub fn hold(&self, cluster: usize) -> HeldCluster<'_> {
        HeldCluster { table: self, cluster, _guard: self.clusters[cluster].lock.lock() }
    }
}

impl ClusterMarks for PageTable {
    fn marks(&self, cluster: usize) -> &AtomicU32 {
        &self.clusters[cluster].marks
    }
}

/// A locked cluster: no other thread changes its states.
#[derive(Debug)]
pub struct HeldCluster<'a> {
    table: &'a PageTable,
    cluster: usize,
    _guard: Guard<'a>,
}

impl HeldCluster<'_> {
    /// Returns true if a page is in the cluster.
    pub fn has(&self, page: usize) -> bool {
        cluster_of(page) == self.cluster
    }

    /// Returns the cluster's pages.
    pub fn pages(&self) -> std::ops::Range<usize> {
        let first = self.cluster * CLUSTER_PAGES;
        first..(first + CLUSTER_PAGES).min(self.table.pages)
    }

    /// Returns the state of a page of this cluster.
    pub fn get(&self, page: usize) -> PageState {
        self.table.peek(page)
    }

    /// Changes the state of a page of this cluster.
    ///
    /// # Panics
    /// If the page is in another cluster.
    pub fn set(&self, page: usize, state: PageState) {
        assert!(self.has(page));
        match (self.get(page).location().is_away(), state.location().is_away()) {
            (false, true) => self.table.away.fetch_add(1, Relaxed),
            (true, false) => self.table.away.fetch_sub(1, Relaxed),
            _ => 0,
        };
        self.table.states[page].store(state.0, Release);
    }

    /// Sets the MAC that the store's copy has, or will have.
    pub fn set_mac(&self, page: usize, mac: PageMac) {
        self.table.macs[page].store(mac.0, Relaxed);
    }

    /// Marks the cluster for a second chance: one of its pages was evicted too early.
    pub fn mark_refaulted(&self) {
        self.table.mark_refaulted(self.cluster);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_keeps_what_the_store_has() {
        let state = PageState(0);
        assert_eq!((state.location(), state.in_store()), (PageLocation::Untouched, false));
        let staged = state.with_in_store(true).in_block(PageLocation::Staged, 70_000);
        assert_eq!(
            (staged.location(), staged.in_store(), staged.block()),
            (PageLocation::Staged, true, 70_000)
        );
        let resident = staged.at(PageLocation::Resident);
        assert_eq!(
            (resident.location(), resident.in_store(), resident.block()),
            (PageLocation::Resident, true, 0)
        );
        let (then, now) = (EvictionStamp::of(u32::MAX - 2), EvictionStamp::of(7));
        let stored = staged.stored(then);
        assert_eq!((stored.location(), stored.in_store()), (PageLocation::Stored, true));
        assert_eq!(stored.stamp().until(now), 10);
        for place in [
            PageLocation::Untouched,
            PageLocation::Resident,
            PageLocation::Stored,
            PageLocation::Evicting,
            PageLocation::Staged,
            PageLocation::Fetching,
            PageLocation::Lost,
            PageLocation::CopyingOut,
        ] {
            assert_eq!(state.at(place).location(), place);
        }
    }

    #[test]
    fn a_cluster_is_queued_once() {
        let table = PageTable::new(100).unwrap();
        assert!(table.mark_queued(3) && !table.mark_queued(3));
        table.hold(3).mark_refaulted();
        assert!(table.take_refaulted(3) && !table.take_refaulted(3));
        table.mark_unqueued(3);
        assert!(table.mark_queued(3));
        let held = table.hold(3);
        assert_eq!(held.pages(), 96..100);
        for (place, away) in
            [(PageLocation::Resident, 0), (PageLocation::Evicting, 1), (PageLocation::Stored, 1)]
        {
            held.set(99, PageState(0).at(place));
            assert_eq!(table.away(), away);
        }
    }
}
