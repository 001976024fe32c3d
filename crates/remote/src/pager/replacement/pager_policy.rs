//! The pager's policy: the decisions of [`super::super::policy`], with an evictor that keeps up with
//! the faults.
//!
//! Differences from the pager: pages that the program never uses are not filled with zeros ahead of it,
//! allocations lie at the addresses of the recording, and one thread waits at a time.

use super::super::options::EvictionMethod;
use super::super::policy::{BlockUse, Readahead, ReadaheadPolicy, StoredPage, VictimQueue};
use super::super::shared::Thresholds;
use super::super::table::{CLUSTER_PAGES, ClusterMarks};
use super::references::References;
use super::{Policy, PolicyCounts};
use crate::page::RUN_PAGES_MAX;
use std::collections::VecDeque;
use std::sync::atomic::AtomicU32;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SimulatedLocation {
    Untouched,
    Resident,
    /// In this staging block.
    Staged(u32),
    /// In the store, and so many pages were dropped before it.
    Stored(u64),
}

/// The resident pages of a cluster that left together.
#[derive(Debug, Default)]
struct Block {
    cluster: u32,
    /// The frames that count against the limit.
    frames: usize,
    uses: BlockUse,
}

#[derive(Debug, Default)]
struct SimulatedCluster {
    first: u32,
    pages: u32,
    marks: AtomicU32,
}

impl ClusterMarks for Vec<SimulatedCluster> {
    fn marks(&self, cluster: usize) -> &AtomicU32 {
        &self[cluster].marks
    }
}

pub(super) struct PagerPolicy<'a> {
    addresses: &'a [u64],
    thresholds: Thresholds,
    locations: Vec<SimulatedLocation>,
    is_changed: Vec<bool>,
    is_zero: Vec<bool>,
    cluster_of: Vec<u32>,
    clusters: Vec<SimulatedCluster>,
    queue: VictimQueue,
    /// The blocks by number; the first is `first_block`, the oldest that is staged.
    blocks: VecDeque<Block>,
    first_block: u32,
    used: usize,
    staged: usize,
    stored: usize,
    dropped: u64,
    made_resident: u64,
    readahead: ReadaheadPolicy,
    counts: PolicyCounts,
}

impl<'a> PagerPolicy<'a> {
    pub fn new(references: &'a References, limit: usize) -> PagerPolicy<'a> {
        let addresses = references.addresses();
        let (mut clusters, mut cluster_of): (Vec<SimulatedCluster>, Vec<u32>) = Default::default();
        let mut last = None;
        for (page, address) in (0..).zip(addresses) {
            let cluster = address / CLUSTER_PAGES as u64;
            if last.replace(cluster) != Some(cluster) {
                clusters.push(SimulatedCluster { first: page, ..SimulatedCluster::default() });
            }
            if let Some(cluster) = clusters.last_mut() {
                cluster.pages += 1;
            }
            cluster_of.push(clusters.len() as u32 - 1);
        }
        PagerPolicy {
            addresses,
            thresholds: Thresholds::of(limit, EvictionMethod::Moved),
            locations: vec![SimulatedLocation::Untouched; addresses.len()],
            is_changed: vec![false; addresses.len()],
            is_zero: vec![false; addresses.len()],
            cluster_of,
            clusters,
            queue: VictimQueue::default(),
            blocks: VecDeque::new(),
            first_block: 0,
            used: 0,
            staged: 0,
            stored: 0,
            dropped: 0,
            made_resident: 0,
            readahead: ReadaheadPolicy::default(),
            counts: PolicyCounts::default(),
        }
    }

    fn free(&self) -> usize {
        self.thresholds.limit.saturating_sub(self.used)
    }

    /// Takes room for at most so many pages, and lets the evictor make more.
    fn take_room(&mut self, wanted: usize) -> usize {
        let taken = wanted.min(self.free());
        self.used += taken;
        if self.free() < self.thresholds.low {
            while self.free() < self.thresholds.high && self.make_room() {}
        }
        taken
    }

    /// Returns the page so many pages further, if the program ever uses it.
    fn neighbour(&self, page: u32, distance: isize) -> Option<u32> {
        let address = self.addresses[page as usize].checked_add_signed(distance as i64)?;
        let near = page as usize as isize + distance;
        let is_it = |at: isize| {
            usize::try_from(at).ok().and_then(|at| self.addresses.get(at)) == Some(&address)
        };
        if is_it(near) {
            return Some(near as u32);
        }
        self.addresses.binary_search(&address).ok().map(|at| at as u32)
    }

    fn location(&self, page: u32) -> SimulatedLocation {
        self.locations[page as usize]
    }

    fn make_resident(&mut self, page: u32) {
        self.locations[page as usize] = SimulatedLocation::Resident;
        self.made_resident += 1;
        let cluster = self.cluster_of[page as usize] as usize;
        if self.clusters.mark_queued(cluster) {
            self.queue.push(cluster);
        }
    }

    /// Evicts a batch, and drops staged pages beyond the number to keep. Returns false if it could do
    /// neither.
    fn make_room(&mut self) -> bool {
        let has_evicted = self.evict_batch();
        let keep = if has_evicted { self.thresholds.staged } else { 0 };
        let mut has_released = false;
        while self.free() < self.thresholds.high && self.staged > keep && self.release_oldest() {
            has_released = true;
        }
        has_evicted || has_released
    }

    fn evict_batch(&mut self) -> bool {
        let (mut pages, mut looks) = (0, self.queue.len());
        while pages < self.thresholds.batch && looks > 0 {
            let Some(cluster) = self.queue.take_next(&self.clusters) else { break };
            pages += self.stage(cluster as u32);
            looks -= 1;
        }
        pages > 0
    }

    /// Moves the resident pages of a cluster to a new block. Returns their number.
    fn stage(&mut self, number: u32) -> usize {
        let &SimulatedCluster { first, pages, .. } = &self.clusters[number as usize];
        let block = self.first_block + self.blocks.len() as u32;
        let mut count = 0;
        for page in first..first + pages {
            if self.location(page) == SimulatedLocation::Resident {
                let is_changed = std::mem::take(&mut self.is_changed[page as usize]);
                let is_zero = self.is_zero[page as usize];
                // A page of zeros is nowhere, but its frame goes with its block.
                self.locations[page as usize] = match is_zero {
                    true => SimulatedLocation::Untouched,
                    false => SimulatedLocation::Staged(block),
                };
                self.counts.put_count += u64::from(is_changed && !is_zero);
                count += 1;
            }
        }
        if count > 0 {
            self.blocks.push_back(Block {
                cluster: number,
                frames: count,
                uses: BlockUse::default(),
            });
            self.staged += count;
        }
        count
    }

    fn release_oldest(&mut self) -> bool {
        let Some(block) = self.blocks.pop_front() else { return false };
        let &SimulatedCluster { first, pages, .. } = &self.clusters[block.cluster as usize];
        for page in first..first + pages {
            if self.location(page) == SimulatedLocation::Staged(self.first_block) {
                self.locations[page as usize] = SimulatedLocation::Stored(self.dropped);
                (self.dropped, self.stored) = (self.dropped + 1, self.stored + 1);
            }
        }
        self.first_block += 1;
        self.staged -= block.frames;
        self.used -= block.frames;
        true
    }

    /// Fills an untouched page with zeros and, in a stream, its successors or predecessors. The page has
    /// room.
    fn zero(&mut self, page: u32, ahead: Readahead) {
        let (goes_down, more) = ahead.zeros_ahead();
        let step = if goes_down { -1 } else { 1 };
        self.make_resident(page);
        let mut next = page;
        for _ in 0..more {
            let near = self.neighbour(next, step);
            let Some(near) =
                near.filter(|near| self.location(*near) == SimulatedLocation::Untouched)
            else {
                break;
            };
            if self.take_room(1) == 0 {
                break;
            }
            self.make_resident(near);
            next = near;
        }
    }

    /// Serves a page that is still in a block. Returns true if it needed no room.
    fn refault(&mut self, page: u32, block: u32) -> bool {
        let (clock, staged) = (self.made_resident, self.thresholds.staged);
        let Some(of) = self.blocks.get_mut((block - self.first_block) as usize) else {
            return false;
        };
        let (uses, is_whole) = of.uses.refault(clock, staged);
        of.uses = uses;
        let cluster = of.cluster as usize;
        let (first, pages) = (self.clusters[cluster].first, self.clusters[cluster].pages);
        let same: Vec<u32> = (first..first + pages)
            .filter(|p| self.location(*p) == SimulatedLocation::Staged(block))
            .collect();
        let is_moved = is_whole && same.len() > 1;
        if is_moved {
            if let Some(of) = self.blocks.get_mut((block - self.first_block) as usize) {
                of.frames -= same.len();
            }
            self.staged -= same.len();
            same.into_iter().for_each(|page| self.make_resident(page));
        } else {
            self.make_resident(page);
        }
        self.clusters.mark_refaulted(cluster);
        is_moved
    }

    /// Brings a page from the store, with its readahead. The page has room.
    fn page_in(&mut self, page: u32, stamp: u64, ahead: Readahead) {
        self.counts.page_in_count += 1;
        self.fetch(page);
        let stored = StoredPage {
            used: self.used,
            stored: self.stored + 1,
            dropped_since: (self.dropped - stamp) as usize,
        };
        let address = self.addresses[page as usize] as usize;
        let ahead = self.readahead.page_in(address, ahead, stored);
        let (before, after) = ahead.extent();
        self.fetch_run(page, -1, before);
        self.fetch_run(page, 1, after);
        if let Readahead::Stride(stride, count) = ahead {
            self.fetch_run(page, stride, count);
        }
    }

    fn fetch(&mut self, page: u32) {
        self.counts.fetched_count += 1;
        self.stored -= 1;
        self.make_resident(page);
    }

    /// Fetches pages at a stride, as long as the store has them and there is room.
    fn fetch_run(&mut self, page: u32, stride: isize, count: usize) {
        let mut at = page;
        for _ in 0..count.min(RUN_PAGES_MAX - 1).min(self.free()) {
            let next = self.neighbour(at, stride);
            let is_stored =
                |next: &u32| matches!(self.location(*next), SimulatedLocation::Stored(_));
            let Some(next) = next.filter(is_stored) else { break };
            self.used += 1;
            self.fetch(next);
            at = next;
        }
    }
}

impl Policy for PagerPolicy<'_> {
    fn access(&mut self, page: u32, is_write: bool) {
        let location = self.location(page);
        if location != SimulatedLocation::Resident {
            let ahead = self.readahead.fault(self.addresses[page as usize] as usize);
            while self.free() == 0 && self.make_room() {}
            // Making room may have dropped the page from its block.
            let room = self.take_room(1);
            let mut needed_room = true;
            match self.location(page) {
                SimulatedLocation::Resident => needed_room = false,
                SimulatedLocation::Untouched => self.zero(page, ahead),
                SimulatedLocation::Staged(block) => needed_room = !self.refault(page, block),
                SimulatedLocation::Stored(stamp) => self.page_in(page, stamp, ahead),
            }
            match (needed_room, room) {
                (true, 0) => self.used += 1,
                (false, room) => self.used -= room,
                _ => {}
            }
        }
        self.is_changed[page as usize] |= is_write;
        self.is_zero[page as usize] = false;
    }

    fn unmap(&mut self, page: u32) {
        match self.location(page) {
            SimulatedLocation::Resident => self.used -= 1,
            SimulatedLocation::Stored(_) => self.stored -= 1,
            SimulatedLocation::Untouched | SimulatedLocation::Staged(_) => {}
        }
        self.locations[page as usize] = SimulatedLocation::Untouched;
        self.is_changed[page as usize] = false;
    }

    fn zeros(&mut self, page: u32) {
        self.is_zero[page as usize] = true;
    }

    fn counts(&self) -> PolicyCounts {
        self.counts
    }
}
