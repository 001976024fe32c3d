//! The evictor: makes room by moving clusters of pages out of the region, putting what has changed
//! into the store, and dropping what the store has.
//!
//! ```text
//!            move            put             age
//!  resident ──────▶ leaving ──────▶ staged ──────▶ stored
//!      ▲               │ copy          │ move         │ fetch
//!      └───────────────┴───────────────┴──────────────┘ a fault
//! ```
//!
//! Staged pages are a second chance: a cluster of which a page is wanted again while it is staged goes
//! round once more (segmented FIFO; Turner, Levy 1981). Pages are moved, not copied, so that a program
//! that writes meanwhile waits for its page rather than loses its write.
//! Where the kernel cannot move them, as the program may not write to them, or a cluster's are scattered, they are
//! copied ([`copying`]).

mod copying;

use super::frame_pool::SpareFrames;
use super::mask::{PageMask, bits, mask_of, run_of, runs};
use super::options::EvictionMethod;
use super::shared::{LogThrottle, SharedPager};
use super::stats::add;
use super::sys::idle_poll::IdlePoll;
use super::sys::memory::Pages;
use super::table::{CLUSTER_PAGES, HeldCluster, PageLocation, PageState, cluster_of};
use crate::page::{PageRun, PageSum, RUN_PAGES_MAX, is_zero};
use crate::placement::{Keep, Placement};
use crate::store::{PageWriter, PutRun, StoreError};
use copying::dropped_together;
use rustix::io::Errno;
use rustix::mm::Advice;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// After the store took nothing, this long until the next try.
const BACK_OFF: Duration = Duration::from_millis(20);

/// Most blocks that are dropped at once, so that room is there soon.
const RELEASE_MAX: u32 = 16;

/// A cluster whose pages lie in so many runs is copied, where it may be: 4 moves interrupt as often as copies
/// of it and of others with it, and cost more than copying 32 pages.
const SCATTERED_RUNS: usize = 4;

/// Where pages that leave lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EvictedTo {
    /// Moved to a staging block, each page at its place in the cluster.
    Moved { block: u32 },
    /// Copied, one after the other, from this page of the memory for copies on.
    Copied { first: u32 },
}

/// The pages of a cluster that were moved, or copied, together.
struct EvictedCluster {
    cluster: usize,
    location: EvictedTo,
    pages: PageMask,
    /// Of them: to be put.
    changed: PageMask,
    /// Of them: all zeros.
    zeros: PageMask,
    sums: [PageSum; CLUSTER_PAGES],
}

impl EvictedTo {
    /// The state of a page that lies so.
    fn of(self, state: PageState) -> PageState {
        match self {
            EvictedTo::Moved { block } => state.in_block(PageLocation::Evicting, block),
            EvictedTo::Copied { first } => state.in_block(PageLocation::CopyingOut, first),
        }
    }
}

impl EvictedCluster {
    fn new(cluster: usize, location: EvictedTo, pages: PageMask) -> EvictedCluster {
        let sums = [PageSum::default(); CLUSTER_PAGES];
        EvictedCluster { cluster, location, pages, changed: 0, zeros: 0, sums }
    }

    fn page(&self, bit: usize) -> usize {
        self.cluster * CLUSTER_PAGES + bit
    }

    /// What was taken out of a run.
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

    /// Whether a page is still on its way from here, neither rescued, kept nor dropped.
    fn is_evicting(&self, held: &HeldCluster<'_>, bit: usize) -> bool {
        let state = held.get(self.page(bit));
        state == self.location.of(state)
    }
}

/// The thread that evicts.
pub struct Evictor {
    shared: Arc<SharedPager>,
    writer: Box<dyn PageWriter>,
    /// Blocks that were used and released, oldest first: blocks that follow each other are used one
    /// after the other, and so released together.
    free_blocks: VecDeque<u32>,
    /// Blocks from this one on were never used; the fewer, the less page tables.
    fresh_block: u32,
    /// Blocks whose pages the store has, oldest first, with their clusters.
    staged: VecDeque<(u32, usize)>,
    batch: Vec<EvictedCluster>,
    /// Where to: those of one batch.
    copy_buffer: Pages,
    copy_buffer_used: usize,
    put_failed_log: LogThrottle,
    overflow_log: LogThrottle,
    stuck_log: LogThrottle,
    placement: Placement,
    /// Here, as this thread looks around even when there are no faults.
    idle_poll: Option<IdlePoll>,
}

impl Evictor {
    /// With its own way to the store.
    pub fn new(
        shared: Arc<SharedPager>,
        writer: Box<dyn PageWriter>,
        idle_poll: Option<IdlePoll>,
    ) -> io::Result<Evictor> {
        let placement = Placement::of_this_thread();
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
            placement,
            idle_poll,
        })
    }

    /// Works until it is told to stop.
    pub fn run(mut self) {
        self.placement = Placement::of_this_thread();
        let mut busy = false;
        while !self.shared.is_stopping.load(Relaxed) {
            let seen = self.shared.work.now();
            let shared = self.shared.clone();
            self.keep_off_handler_cpu();
            if let Some(idle_poll) = &mut self.idle_poll {
                idle_poll.look(shared.stats.fault_count.load(Relaxed));
            }
            let evicting = shared.evicting.lock();
            self.discard_dropped();
            if self.shared.is_unstaging.load(Relaxed) {
                while self.release_oldest(usize::MAX) {}
                drop(evicting);
                self.shared.nap(seen);
                continue;
            }
            let (free, thresholds) = (self.shared.free(), self.shared.thresholds);
            let was_evicting_all = self.shared.is_evicting_all.load(Relaxed);
            let wanted = if was_evicting_all { thresholds.limit } else { thresholds.high };
            busy = free < thresholds.low || free < wanted && (busy || wanted > thresholds.high);
            if !busy {
                self.end_evicting_all(was_evicting_all);
                drop(evicting);
                self.shared.nap(seen);
            } else if self.make_room(wanted) {
                self.shared.allow_overflow(false);
            } else if self.shared.free() >= thresholds.low {
                // What is left is locked or pinned, and nobody waits for its room.
                busy = false;
                self.shared.allow_overflow(false);
                self.end_evicting_all(was_evicting_all);
                drop(evicting);
                self.shared.nap(seen);
            } else if was_evicting_all {
                self.end_evicting_all(was_evicting_all);
            } else {
                if !self.shared.allow_overflow(true) && self.overflow_log.is_due() {
                    self.shared.log("no page can be evicted: going over the resident limit");
                }
                drop(evicting);
                std::thread::sleep(BACK_OFF);
            }
        }
    }

    /// Answers a request to evict all pages that this round has seen. A request that came since is for the next round.
    fn end_evicting_all(&self, was_evicting_all: bool) {
        if was_evicting_all {
            self.shared.is_evicting_all.store(false, Relaxed);
        }
    }

    /// Beside the program, not in its way. Each move interrupts the program's CPU, which costs it less than
    /// to wait for a whole batch on its own.
    fn keep_off_handler_cpu(&mut self) {
        self.placement.keep(self.shared.handlers_cpu().map_or(Keep::Anywhere, Keep::Off));
    }

    /// Evicts a batch, and releases staged pages beyond what is kept of them. False if there is
    /// neither.
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

    /// Evicts a batch. Pages that are locked are found before a batch is full where they are moved, but only
    /// at its end where they are copied: then the next batch is tried, once for each cluster.
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

    /// Returns how many pages went, and whether the store took what it was given.
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
        // Where all pages are moved, the limit keeps no room for copies of the few that cannot be.
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
            self.shared.log(&format!("pages stay for now: {error}"));
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

    /// Counts the memory that copies take, or gives it back with the room that was taken for it.
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

    /// Takes out the cluster whose turn it is; where it is moved, with neighbours, about so many pages.
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

    /// Moves the resident pages of neighbouring clusters to their blocks: whole ones in one call, as
    /// each call interrupts all CPUs that run the program. Returns what was moved, and the clusters with pages that
    /// the program may not write to: those can only be copied.
    fn move_out(&self, victims: &[(usize, u32)]) -> (Vec<EvictedCluster>, Vec<usize>) {
        let shared = &self.shared;
        // In order, and nobody else holds more than one.
        let hold = |(cluster, _): &(usize, u32)| {
            let held = shared.table.hold(*cluster);
            let wanted: PageMask = resident(&held);
            (held, wanted)
        };
        let held: Vec<(HeldCluster<'_>, PageMask)> = victims.iter().map(hold).collect();
        let (cluster, block) = victims[0];
        let count = victims.len() * CLUSTER_PAGES;
        let whole = run_of(0, CLUSTER_PAGES);
        let together = match held.len() > 1 && held.iter().all(|(_, wanted)| *wanted == whole) {
            true => {
                let from = shared.arena.span(cluster * CLUSTER_PAGES, count);
                shared.uffd.move_pages(shared.staged_span(block, 0, count), from).0
            }
            false => 0,
        };
        let (mut all, mut unwritable) = (Vec::with_capacity(victims.len()), Vec::new());
        for (nth, ((held, wanted), (cluster, block))) in held.into_iter().zip(victims).enumerate() {
            let first = cluster * CLUSTER_PAGES;
            let done = together.saturating_sub(nth * CLUSTER_PAGES).min(CLUSTER_PAGES);
            let done = run_of(0, done);
            let (moved, refused) = self.move_bits(first, *block, wanted & !done);
            let pages = done | moved;
            for bit in bits(pages) {
                let state = held.get(first + bit);
                held.set(first + bit, EvictedTo::Moved { block: *block }.of(state));
            }
            shared.count_staged(*block, pages.count_ones() as usize);
            drop(held);
            let stuck = (wanted & !pages).count_ones() as usize;
            if bits(refused).any(|bit| !self.is_locked(first + bit)) {
                unwritable.push(*cluster);
            } else if stuck > 0 {
                // They are looked at again when their turn comes.
                add(&shared.stats.stuck_count, stuck);
                shared.enqueue(*cluster);
            }
            all.push(EvictedCluster::new(*cluster, EvictedTo::Moved { block: *block }, pages));
        }
        (all, unwritable)
    }

    /// Whether a page is locked: the kernel takes no advice about the use of locked memory.
    fn is_locked(&self, page: usize) -> bool {
        self.shared.arena.span(page, 1).advise(Advice::LinuxCold).is_err()
    }

    /// Moves pages, run by run; returns which of them went, and which are of a mapping whose pages are not moved:
    /// it is locked, or not writable.
    fn move_bits(&self, first: usize, block: u32, wanted: PageMask) -> (PageMask, PageMask) {
        let shared = &self.shared;
        let (mut moved, mut refused, mut tried_alone, mut left) = (0, 0, 0, wanted);
        // Where a mapping ends inside the cluster, runs are refused as a whole.
        let mut run_max = CLUSTER_PAGES;
        while let Some((bit, count)) = runs(left).next() {
            let count = count.min(run_max);
            let from = shared.arena.span(first + bit, count);
            let (done, stopped) =
                shared.uffd.move_pages(shared.staged_span(block, bit, count), from);
            moved |= run_of(bit, done);
            left &= !run_of(bit, done);
            let at = bit + done;
            match stopped {
                None => {}
                Some(Errno::BUSY) if tried_alone & 1 << at == 0 => {
                    // Shared with a child since a fork: a copy of our own can be moved. If that is not
                    // what keeps it, the next try fails too.
                    tried_alone |= 1 << at;
                    let _ = shared.arena.span(first + at, 1).advise(Advice::LinuxPopulateWrite);
                }
                Some(_) if count > 1 && run_max > 1 => run_max = 1,
                Some(why) => {
                    left &= !(1 << at);
                    refused |= PageMask::from(why == Errno::INVAL) << at;
                }
            }
        }
        (moved, refused)
    }

    /// Tells zeros, unchanged and changed pages apart.
    fn classify(&self, moved: &mut EvictedCluster) {
        let shared = &self.shared;
        for bit in bits(moved.pages) {
            let bytes = moved.bytes((shared, &self.copy_buffer), bit, 1);
            match is_zero(bytes) {
                true => moved.zeros |= 1 << bit,
                false => moved.sums[bit] = PageSum::of(bytes),
            }
        }
        let held = shared.table.hold(moved.cluster);
        for bit in bits(moved.pages & !moved.zeros) {
            let (page, state) = (moved.page(bit), held.get(moved.page(bit)));
            let unchanged = state.in_store() && shared.table.sum(page) == moved.sums[bit];
            if moved.is_evicting(&held, bit) && !unchanged {
                moved.changed |= 1 << bit;
                held.set(page, state.with_in_store(false));
                held.set_sum(page, moved.sums[bit]);
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
                    sums: &moved.sums[bit..bit + count],
                });
                left &= !run_of(bit, count);
            }
        }
        match runs.is_empty() {
            true => Ok(()),
            false => self.writer.put(self.shared.region(), &runs),
        }
    }

    /// Gives the pages of a batch their new states: copied ones of some clusters together, others by the
    /// cluster. Returns how many are out of the region.
    fn settle_all(&self, mut batch: &[EvictedCluster], was_put: bool) -> usize {
        let mut out = 0;
        while !batch.is_empty() {
            let (together, rest) = batch.split_at(dropped_together(batch));
            // Nobody else holds more than one.
            let held = together.iter().map(|moved| self.shared.table.hold(moved.cluster));
            let held: Vec<HeldCluster<'_>> = held.collect();
            let gone = self.drop_copied(together, &held, was_put);
            for ((moved, held), gone) in together.iter().zip(held).zip(gone) {
                if moved.is_copied() {
                    self.cancel_copies(moved, &held, moved.pages & !gone);
                    if gone != moved.pages {
                        self.shared.enqueue(moved.cluster);
                    }
                }
                out += self.settle(moved, held, was_put);
                self.shared.give_room(gone.count_ones() as usize);
            }
            batch = rest;
        }
        out
    }

    /// Gives the pages of a cluster their new states; moved ones that could not be put go back. Returns how
    /// many are out of the region.
    fn settle(&self, moved: &EvictedCluster, held: HeldCluster<'_>, was_put: bool) -> usize {
        let shared = &self.shared;
        let mut out = 0;
        for bit in bits(moved.pages) {
            let (page, state) = (moved.page(bit), held.get(moved.page(bit)));
            let (changed, is_zero) = (moved.changed & 1 << bit != 0, moved.zeros & 1 << bit != 0);
            if changed && !was_put {
                self.restore_page(moved, &held, bit);
            } else if moved.is_evicting(&held, bit) {
                out += 1;
                let state = state.with_in_store(state.in_store() || changed);
                held.set(
                    page,
                    match moved.location {
                        _ if is_zero => state.at(PageLocation::Untouched),
                        EvictedTo::Moved { block } => state.in_block(PageLocation::Staged, block),
                        EvictedTo::Copied { .. } => shared.drop_stamped(state),
                    },
                );
                if is_zero && state.in_store() {
                    shared.drop_from_store(page, page + 1);
                }
            } else if changed {
                // Rescued or dropped meanwhile; what was put has the page's sum all the same.
                held.set(page, state.with_in_store(true));
                if state.location() == PageLocation::Untouched {
                    shared.drop_from_store(page, page + 1);
                }
            }
        }
        drop(held);
        self.count(moved, out, was_put);
        out
    }

    fn count(&self, moved: &EvictedCluster, out: usize, was_put: bool) {
        let stats = &self.shared.stats;
        let (changed, zeros) =
            (moved.changed.count_ones() as usize, moved.zeros.count_ones() as usize);
        if was_put {
            add(&stats.page_out_count, changed);
        } else {
            self.shared.enqueue(moved.cluster);
        }
        add(&stats.evicted_zero_count, zeros);
        let unchanged = moved.pages.count_ones() as usize - changed - zeros;
        add(&stats.evicted_clean_count, unchanged.min(out));
    }

    fn restore_page(&self, moved: &EvictedCluster, held: &HeldCluster<'_>, bit: usize) {
        let shared = &self.shared;
        let EvictedTo::Moved { block } = moved.location else { return };
        if !moved.is_evicting(held, bit) {
            return;
        }
        let to = shared.arena.span(moved.page(bit), 1);
        let (done, _) = shared.uffd.move_pages(to, shared.staged_span(block, bit, 1));
        if done == 1 {
            shared.count_unstaged(block, 1);
        } else {
            // It cannot be moved; a copy can be installed. The frame goes when its block does.
            if shared.take_room(1) == 0 {
                shared.allow_overflow(true);
                shared.wait_for_room();
            }
            let bytes = moved.bytes((shared, &self.copy_buffer), bit, 1);
            if shared.uffd.copy(to, bytes).is_err() {
                // Its bytes stay staged: who waits for it is served from there, and it is tried again.
                return shared.give_room(1);
            }
        }
        held.set(moved.page(bit), held.get(moved.page(bit)).at(PageLocation::Resident));
        shared.uffd.wake(to);
    }

    /// Pages that the store did not take, and that could not go back, as the kernel found no memory: no other copy is
    /// there, so that their blocks may not be released before they are back.
    fn restore_unstored(&mut self, batch: &[EvictedCluster]) {
        let shared = self.shared.clone();
        while !shared.is_stopping.load(Relaxed) {
            let mut left = 0;
            for moved in batch.iter().filter(|moved| !moved.is_copied()) {
                let held = shared.table.hold(moved.cluster);
                for bit in bits(moved.changed) {
                    self.restore_page(moved, &held, bit);
                    left += usize::from(moved.is_evicting(&held, bit));
                }
            }
            if left == 0 {
                return;
            }
            if self.stuck_log.is_due() {
                shared.log(&format!("{left} pages that cannot be stored wait to be put back"));
            }
            // Memory of ours that can be had.
            self.release_oldest(usize::MAX);
            std::thread::sleep(BACK_OFF);
        }
    }

    fn next_block(&self) -> Option<u32> {
        let is_left = (self.fresh_block as usize) < self.shared.frames.len();
        self.free_blocks.front().copied().or(is_left.then_some(self.fresh_block))
    }

    fn take_block(&mut self) -> Option<u32> {
        let next = self.next_block();
        if self.free_blocks.pop_front().is_none() {
            self.fresh_block += next.is_some() as u32;
        }
        next
    }

    /// Drops the frames of the oldest staged blocks, until so many pages are gone. Blocks that follow
    /// each other go in one call: each call interrupts all CPUs that run the program.
    fn release_oldest(&mut self, wanted: usize) -> bool {
        let shared = self.shared.clone();
        let (mut first, mut count, mut pages) = (0, 0, 0);
        while let Some((block, cluster)) = self.staged.front().copied() {
            if count > 0 && (block != first + count || pages >= wanted || count >= RELEASE_MAX) {
                break;
            }
            self.staged.pop_front();
            (first, count) = (block - count, count + 1);
            pages += shared.frames[block as usize].load(Relaxed) as usize;
            let held = shared.table.hold(cluster);
            for page in held.pages() {
                let state = held.get(page);
                if state.location() == PageLocation::Staged && state.block() == block {
                    held.set(page, shared.drop_stamped(state));
                }
            }
        }
        if count == 0 {
            return false;
        }
        self.refill_frame_pool(first, count);
        // Also where all pages have gone back: reading a hole leaves a page of zeros, and pages are
        // only moved to where none are.
        let span = shared.staged_span(first, 0, count as usize * CLUSTER_PAGES);
        if let Err(error) = span.advise(Advice::LinuxDontNeed) {
            shared.log(&format!("staged pages cannot be dropped: {error}"));
        }
        for block in first..first + count {
            shared.count_released(block);
            self.free_blocks.push_back(block);
        }
        true
    }

    /// Moves the frames of whole blocks to spares, where runs of pages want them.
    fn refill_frame_pool(&self, first: u32, count: u32) {
        const BLOCKS: u32 = (RUN_PAGES_MAX / CLUSTER_PAGES) as u32;
        let shared = &self.shared;
        let is_whole = |block| shared.frames[block as usize].load(Relaxed) == CLUSTER_PAGES as u32;
        for block in (first..first + count).step_by(BLOCKS as usize) {
            if block + BLOCKS > first + count || !(block..block + BLOCKS).all(is_whole) {
                continue;
            }
            let Some(spare) = shared.frame_pool.take_empty() else { break };
            let from = shared.staged_span(block, 0, RUN_PAGES_MAX);
            let (moved, _) = shared.uffd.move_pages(spare.all(), from);
            let frames = if moved == RUN_PAGES_MAX { SpareFrames::All } else { SpareFrames::Some };
            shared.frame_pool.put(spare, frames);
        }
    }

    /// Has the store forget pages that the program dropped, and has not written again.
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

/// Resident pages of a cluster.
fn resident(held: &HeldCluster<'_>) -> PageMask {
    let bits = (0..).zip(held.pages());
    let resident = bits.filter(|(_, page)| held.get(*page).location() == PageLocation::Resident);
    mask_of(resident.map(|(bit, _)| bit))
}
