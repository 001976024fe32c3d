//! The evictor: it makes room by moving clusters of pages out of the region. It puts changed pages
//! into the store, and drops pages that the store has.
//!
//! ```text
//!            move             put             age
//!  resident ──────▶ evicting ──────▶ staged ──────▶ stored
//!      ▲               │ copy           │ move         │ fetch
//!      └───────────────┴────────────────┴──────────────┘ a fault
//! ```
//!
//! Staging is a second chance: a cluster with a soft refault goes round once more (segmented FIFO;
//! Turner, Levy 1981). Pages are moved, not copied, so that a concurrent write waits for its page
//! instead of being lost. Pages that cannot be moved because the program may not write to them, and
//! clusters whose pages are scattered, are copied ([`copying`]).

mod copying;
mod moving;
mod settling;
mod staging;

use super::frame_pool::SpareFrames;
use super::mask::{PageMask, bits, mask_of, run_of, runs};
use super::options::EvictionMethod;
use super::shared::{LogThrottle, SharedPager};
use super::stats::add;
use super::sys::idle_poll::IdlePoll;
use super::sys::memory::Pages;
use super::table::{CLUSTER_PAGES, HeldCluster, PageLocation, PageState, cluster_of};
use crate::affinity::{CpuChoice, ThreadAffinity};
use crate::page::{PageMac, PageRun, RUN_PAGES_MAX, is_zero};
use crate::store::{PageWriter, PutRun, StoreError};
use copying::dropped_together;
use rustix::io::Errno;
use rustix::mm::Advice;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// The pause after a round in which nothing could be evicted.
const BACK_OFF: Duration = Duration::from_millis(20);

/// The most blocks that are released in one call. More would delay the room that they free.
const RELEASE_MAX: u32 = 16;

/// The number of runs from which a cluster is copied, if the options allow copies. Four moves
/// interrupt as often as copies of this cluster and others together, and cost more than copying 32
/// pages.
const SCATTERED_RUNS: usize = 4;

/// The location of evicted bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EvictedTo {
    /// Moved to a staging block, each page at its offset in the cluster.
    Moved { block: u32 },
    /// Copied, one after the other, from this page of the copy buffer on.
    Copied { first: u32 },
}

/// The pages of a cluster that were moved, or copied, in one batch.
struct EvictedCluster {
    cluster: usize,
    location: EvictedTo,
    pages: PageMask,
    /// The pages to put: changed since their last put, and not zeros.
    changed: PageMask,
    /// The pages that have only zeros, which are not put.
    zeros: PageMask,
    macs: [PageMac; CLUSTER_PAGES],
}

impl EvictedTo {
    /// Returns the state of a page at this location.
    fn of(self, state: PageState) -> PageState {
        match self {
            EvictedTo::Moved { block } => state.in_block(PageLocation::Evicting, block),
            EvictedTo::Copied { first } => state.in_block(PageLocation::CopyingOut, first),
        }
    }
}

impl EvictedCluster {
    fn new(cluster: usize, location: EvictedTo, pages: PageMask) -> EvictedCluster {
        let macs = [PageMac::default(); CLUSTER_PAGES];
        EvictedCluster { cluster, location, pages, changed: 0, zeros: 0, macs }
    }

    fn page(&self, bit: usize) -> usize {
        self.cluster * CLUSTER_PAGES + bit
    }

    /// Returns the bytes of a run.
    fn bytes<'a>(&self, from: (&'a SharedPager, &'a Pages), bit: usize, count: usize) -> &'a [u8] {
        let (shared, copy_buffer) = from;
        match self.location {
            EvictedTo::Moved { block } => {
                shared.staging.bytes(block as usize * CLUSTER_PAGES + bit, count)
            }
            EvictedTo::Copied { first } => {
                let before = (self.pages & run_of(0, bit)).count_ones() as usize;
                copy_buffer.bytes(first as usize + before, count)
            }
        }
    }

    fn is_copied(&self) -> bool {
        matches!(self.location, EvictedTo::Copied { .. })
    }

    /// Returns true if a page is still being evicted: neither refaulted, cancelled nor dropped.
    fn is_evicting(&self, held: &HeldCluster<'_>, bit: usize) -> bool {
        let state = held.get(self.page(bit));
        state == self.location.of(state)
    }
}

/// The time of the evictor's next round.
enum NextRound {
    Now,
    /// When a thread needs room or drops pages, or after a nap.
    OnWork,
    /// After a pause, because nothing can be evicted.
    AfterBackOff,
}

/// The thread that evicts.
pub struct Evictor {
    shared: Arc<SharedPager>,
    writer: Box<dyn PageWriter>,
    /// The blocks that were used and released, oldest first. Adjacent blocks are used in order, and
    /// so released together.
    free_blocks: VecDeque<u32>,
    /// The first block that was never used. The fewer are used, the fewer page tables exist.
    fresh_block: u32,
    /// The staged blocks and their clusters, oldest first. The store has their pages.
    staged: VecDeque<(u32, usize)>,
    batch: Vec<EvictedCluster>,
    /// The copied pages of one batch.
    copy_buffer: Pages,
    copy_buffer_used: usize,
    put_failed_log: LogThrottle,
    overflow_log: LogThrottle,
    stuck_log: LogThrottle,
    /// True from the low threshold on, until the high one is reached.
    is_making_room: bool,
    placement: ThreadAffinity,
    /// The poll of idle CPUs. This thread updates it, because it runs even without faults.
    idle_poll: Option<IdlePoll>,
}

impl Evictor {
    /// Creates an evictor with its own writer.
    pub fn new(
        shared: Arc<SharedPager>,
        writer: Box<dyn PageWriter>,
        idle_poll: Option<IdlePoll>,
    ) -> io::Result<Evictor> {
        let placement = ThreadAffinity::of_this_thread();
        let (free_blocks, staged) = (VecDeque::new(), VecDeque::new());
        // A batch may end with a whole cluster.
        let copy_buffer = Pages::reserve(shared.thresholds.batch + CLUSTER_PAGES)?;
        copy_buffer.all().advise(Advice::LinuxDontFork)?;
        Ok(Evictor {
            shared,
            writer,
            free_blocks,
            fresh_block: 0,
            staged,
            batch: Vec::new(),
            copy_buffer,
            copy_buffer_used: 0,
            put_failed_log: LogThrottle::default(),
            overflow_log: LogThrottle::default(),
            stuck_log: LogThrottle::default(),
            is_making_room: false,
            placement,
            idle_poll,
        })
    }

    /// Evicts until the pager stops.
    pub fn run(mut self) {
        self.placement = ThreadAffinity::of_this_thread();
        while !self.shared.is_stopping.load(Relaxed) {
            // Read before the round, so that work that arrives during the round ends the wait.
            let seen = self.shared.work.now();
            match self.run_round() {
                NextRound::Now => {}
                NextRound::OnWork => self.shared.wait_for_work(seen),
                NextRound::AfterBackOff => std::thread::sleep(BACK_OFF),
            }
        }
    }

    /// Makes room if there is too little. Returns the time of the next round. No lock is held by
    /// then.
    fn run_round(&mut self) -> NextRound {
        let shared = self.shared.clone();
        self.keep_off_handler_cpu();
        if let Some(idle_poll) = &mut self.idle_poll {
            idle_poll.update(shared.stats.fault_count.load(Relaxed));
        }
        let _evicting = shared.evicting.lock();
        self.discard_dropped();
        if shared.is_unstaging.load(Relaxed) {
            while self.release_oldest(usize::MAX) {}
            return NextRound::OnWork;
        }
        let (free, thresholds) = (shared.free(), shared.thresholds);
        let was_evicting_all = shared.is_evicting_all.load(Relaxed);
        let wanted = if was_evicting_all { thresholds.limit } else { thresholds.high };
        let goes_on = self.is_making_room || wanted > thresholds.high;
        self.is_making_room = free < thresholds.low || free < wanted && goes_on;
        if !self.is_making_room {
            self.end_evicting_all(was_evicting_all);
            return NextRound::OnWork;
        }
        if self.make_room(wanted) {
            shared.allow_overflow(false);
            return NextRound::Now;
        }
        if shared.free() >= thresholds.low {
            // The remaining pages are locked or pinned, and no thread waits for room.
            self.is_making_room = false;
            shared.allow_overflow(false);
            self.end_evicting_all(was_evicting_all);
            return NextRound::OnWork;
        }
        if was_evicting_all {
            self.end_evicting_all(true);
            return NextRound::Now;
        }
        if !shared.allow_overflow(true) && self.overflow_log.is_due() {
            shared.log("no page can be evicted: going over the resident limit");
        }
        NextRound::AfterBackOff
    }

    /// Answers a request to evict all pages that this round has seen. A later request is for the
    /// next round.
    fn end_evicting_all(&self, was_evicting_all: bool) {
        if was_evicting_all {
            self.shared.is_evicting_all.store(false, Relaxed);
        }
    }

    /// Moves this thread off the handler's CPU. The interrupt of a move costs the program less than
    /// waiting for a batch on its own CPU.
    fn keep_off_handler_cpu(&mut self) {
        self.placement.keep(self.shared.handlers_cpu().map_or(CpuChoice::Anywhere, CpuChoice::Off));
    }

    /// Evicts a batch, and releases staged pages beyond the number to keep. Returns false if it
    /// could do neither.
    fn make_room(&mut self, wanted: usize) -> bool {
        let evicted = self.evict_batches();
        let mut released = false;
        let keep = if evicted { self.shared.thresholds.staged } else { 0 };
        while self.shared.free() < wanted && self.shared.staged() > keep {
            let beyond = self.shared.staged() - keep;
            if !self.release_oldest(beyond.min(wanted - self.shared.free())) {
                break;
            }
            released = true;
        }
        evicted || released
    }

    /// Evicts a batch. For moved pages, locked ones are found before the batch is full. For copied
    /// pages they are found only at its end; then the next batch is tried, once for each cluster.
    fn evict_batches(&mut self) -> bool {
        let tries = match self.shared.eviction_method {
            EvictionMethod::Moved => 1,
            _ => 1 + self.shared.queued() / (self.shared.thresholds.batch / CLUSTER_PAGES).max(1),
        };
        for _ in 0..tries {
            let (evicted, was_put) = self.evict_batch();
            if evicted > 0 || !was_put {
                return evicted > 0;
            }
        }
        false
    }

    /// Returns the number of evicted pages, and true if the store took its pages.
    fn evict_batch(&mut self) -> (usize, bool) {
        let mut pages = 0;
        let mut looks = self.shared.queued();
        self.copy_buffer_used = 0;
        while pages < self.shared.thresholds.batch && looks > 0 {
            let Some(out) = self.evict_next(self.shared.thresholds.batch - pages) else { break };
            looks = looks.saturating_sub(out.len());
            for moved in out {
                pages += moved.pages.count_ones() as usize;
                match moved.location {
                    _ if moved.pages != 0 => self.batch.push(moved),
                    EvictedTo::Moved { block } => self.free_blocks.push_front(block),
                    EvictedTo::Copied { .. } => {}
                }
            }
        }
        // If pages are moved, the limit keeps no room for the few copies.
        let room = match self.shared.eviction_method {
            EvictionMethod::Moved => self.shared.take_room(self.copy_buffer_used),
            EvictionMethod::Cheapest | EvictionMethod::Copied => 0,
        };
        let mut batch = std::mem::take(&mut self.batch);
        batch.iter_mut().for_each(|moved| self.classify(moved));
        let result = self.put(&batch);
        if let Err(error) = &result
            && self.put_failed_log.is_due()
        {
            self.shared.log(&format!("evicted pages return to memory for now: {error}"));
        }
        let evicted = self.settle_all(&batch, result.is_ok());
        if result.is_err() {
            self.restore_unstored(&batch);
        }
        self.account_for_copy_buffer(room);
        self.staged.extend(batch.drain(..).filter_map(|moved| match moved.location {
            EvictedTo::Moved { block } => Some((block, moved.cluster)),
            EvictedTo::Copied { .. } => None,
        }));
        self.batch = batch;
        add(&self.shared.stats.evicted_count, evicted);
        (evicted, result.is_ok())
    }

    /// Accounts for the copy buffer: counts it, or drops its pages and gives back their room.
    fn account_for_copy_buffer(&self, room: usize) {
        let shared = &self.shared;
        if shared.eviction_method != EvictionMethod::Moved {
            shared.copy_pages.fetch_max(self.copy_buffer_used, Relaxed);
        } else if self.copy_buffer_used > 0 {
            if let Err(error) =
                self.copy_buffer.span(0, self.copy_buffer_used).advise(Advice::LinuxDontNeed)
            {
                shared.log(&format!("copies of pages cannot be dropped: {error}"));
            }
            shared.give_room(room);
        }
    }

    /// Takes the next victim out of the region. A moved victim takes its neighbours along, up to
    /// about this many pages.
    fn evict_next(&mut self, pages: usize) -> Option<Vec<EvictedCluster>> {
        let cluster = self.shared.next_victim()?;
        if self.prefers_copy(cluster) {
            return Some(vec![self.copy_out(cluster)]);
        }
        let Some(block) = self.take_block() else {
            self.shared.enqueue(cluster);
            return None;
        };
        let mut victims = vec![(cluster, block)];
        while victims.len() < pages / CLUSTER_PAGES {
            let (next, block) = (cluster + victims.len(), block + victims.len() as u32);
            let fits = self.next_block() == Some(block) && self.shared.is_next_victim(next);
            if !fits || self.prefers_copy(next) || !self.shared.take_victim(next) {
                break;
            }
            self.take_block();
            victims.push((next, block));
        }
        victims.iter().for_each(|(_, block)| self.shared.note_block_filled(*block));
        let (mut out, unwritable) = self.move_out(&victims);
        out.extend(unwritable.into_iter().map(|cluster| self.copy_out(cluster)));
        Some(out)
    }

    fn prefers_copy(&self, cluster: usize) -> bool {
        match self.shared.eviction_method {
            EvictionMethod::Moved => false,
            EvictionMethod::Cheapest => {
                runs(resident(&self.shared.table.hold(cluster))).count() >= SCATTERED_RUNS
            }
            EvictionMethod::Copied => true,
        }
    }

    /// Sorts the pages into zeros, unchanged and changed ones.
    fn classify(&self, moved: &mut EvictedCluster) {
        let shared = &self.shared;
        for bit in bits(moved.pages) {
            let bytes = moved.bytes((shared, &self.copy_buffer), bit, 1);
            match is_zero(bytes) {
                true => moved.zeros |= 1 << bit,
                false => moved.macs[bit] = PageMac::of(bytes),
            }
        }
        let held = shared.table.hold(moved.cluster);
        for bit in bits(moved.pages & !moved.zeros) {
            let (page, state) = (moved.page(bit), held.get(moved.page(bit)));
            let unchanged = state.in_store() && shared.table.mac(page) == moved.macs[bit];
            if moved.is_evicting(&held, bit) && !unchanged {
                moved.changed |= 1 << bit;
                held.set(page, state.with_in_store(false));
                held.set_mac(page, moved.macs[bit]);
            }
        }
    }

    fn put(&mut self, batch: &[EvictedCluster]) -> Result<(), StoreError> {
        let from = (&*self.shared, &self.copy_buffer);
        let mut runs = Vec::new();
        for moved in batch {
            let mut left = moved.changed;
            while left != 0 {
                let bit = left.trailing_zeros() as usize;
                let count = (left >> bit).trailing_ones() as usize;
                runs.push(PutRun {
                    first: moved.page(bit) as u64,
                    pages: moved.bytes(from, bit, count),
                    macs: &moved.macs[bit..bit + count],
                });
                left &= !run_of(bit, count);
            }
        }
        match runs.is_empty() {
            true => Ok(()),
            false => self.writer.put(self.shared.region(), &runs),
        }
    }

    /// Discards pages in the store that the program has dropped and not written again.
    fn discard_dropped(&mut self) {
        for dropped in self.shared.take_dropped() {
            let (mut page, end) =
                (dropped.first as usize, (dropped.first + dropped.count) as usize);
            let mut runs: Vec<PageRun> = Vec::new();
            while page < end {
                let held = self.shared.table.hold(cluster_of(page));
                let until = held.pages().end.min(end);
                for page in page..until {
                    let state = held.get(page);
                    if state.location() == PageLocation::Untouched && state.in_store() {
                        held.set(page, state.with_in_store(false));
                        append_page(&mut runs, page as u64);
                    }
                }
                page = until;
            }
            if let Err(error) = self.writer.discard(self.shared.region(), &runs) {
                self.shared.log(&format!("dropped pages stay in the store for now: {error}"));
            }
        }
    }
}

/// Adds a page to runs in order.
fn append_page(runs: &mut Vec<PageRun>, page: u64) {
    match runs.last_mut() {
        Some(last) if last.end() == Some(page) => last.count += 1,
        _ => runs.push(PageRun { first: page, count: 1 }),
    }
}

/// Returns the resident pages of a cluster.
fn resident(held: &HeldCluster<'_>) -> PageMask {
    let bits = (0..).zip(held.pages());
    let resident = bits.filter(|(_, page)| held.get(*page).location() == PageLocation::Resident);
    mask_of(resident.map(|(bit, _)| bit))
}
