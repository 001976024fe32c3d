//! Room for resident and staged pages, and its accounting.
//!
//! Invariant: resident and staged pages together stay within the limit, unless nothing more can be evicted
//! ([`SharedPager::allow_overflow`]). Then the program goes on rather than stops.

use super::*;

impl SharedPager {
    /// Returns the number of resident and staged pages.
    pub fn used(&self) -> usize {
        self.used.load(Relaxed)
    }

    /// Returns the number of staged pages.
    pub fn staged(&self) -> usize {
        self.staged.load(Relaxed)
    }

    /// Returns the free room, in pages.
    pub fn free(&self) -> usize {
        self.thresholds.limit.saturating_sub(self.used())
    }

    /// Takes room for at most `wanted` pages. Returns the number of pages.
    pub fn take_room(&self, wanted: usize) -> usize {
        let take = |used: usize| {
            let free = self.thresholds.limit.saturating_sub(used).min(wanted);
            (free > 0).then_some(used + free)
        };
        let taken = match self.used.fetch_update(Relaxed, Relaxed, take) {
            Ok(used) => self.thresholds.limit.saturating_sub(used).min(wanted),
            Err(_) => 0,
        };
        if self.free() < self.thresholds.low {
            self.work.notify();
        }
        taken
    }

    /// Waits for room for one page and takes it.
    pub fn wait_for_room(&self) {
        let begun = Instant::now();
        loop {
            let seen = self.room.now();
            if self.take_room(1) == 1 {
                break;
            }
            if self.may_overflow.load(Relaxed) || self.is_stopping.load(Relaxed) {
                self.used.fetch_add(1, Relaxed);
                break;
            }
            self.room.wait(seen, WAIT_MAX);
        }
        add(&self.stats.room_wait_ns_total, begun.elapsed().as_nanos() as usize);
    }

    /// Gives back the room of this many pages.
    pub fn give_room(&self, pages: usize) {
        if pages > 0 {
            self.used.fetch_sub(pages, Relaxed);
            self.room.notify();
        }
    }

    /// Counts pages that were moved to a staging block.
    pub fn count_staged(&self, block: u32, pages: usize) {
        self.frames[block as usize].fetch_add(pages as u32, Relaxed);
        self.staged.fetch_add(pages, Relaxed);
    }

    /// Counts pages that were moved back from a staging block.
    pub fn count_unstaged(&self, block: u32, pages: usize) {
        self.frames[block as usize].fetch_sub(pages as u32, Relaxed);
        self.staged.fetch_sub(pages, Relaxed);
    }

    /// Frees the room of a block whose pages were dropped.
    pub fn count_released(&self, block: u32) {
        let pages = self.frames[block as usize].swap(0, Relaxed) as usize;
        self.staged.fetch_sub(pages, Relaxed);
        self.give_room(pages);
    }

    /// Sets whether faults may exceed the limit because nothing can be evicted. Returns the previous value.
    pub fn allow_overflow(&self, allowed: bool) -> bool {
        let before = self.may_overflow.swap(allowed, Relaxed);
        if allowed {
            self.room.notify();
        }
        before
    }
}

/// The thresholds of room, in pages.
#[derive(Debug, Clone, Copy)]
pub struct Thresholds {
    /// The most resident and staged pages together.
    pub limit: usize,
    /// The number of staged pages that are kept for a second chance.
    pub staged: usize,
    /// The room below which the evictor works…
    pub low: usize,
    /// …and the room up to which it works.
    pub high: usize,
    /// The number of pages of one batch.
    pub batch: usize,
    /// The number of spare frames, which are outside the limit.
    pub frame_pool: usize,
}

impl Thresholds {
    /// Derives the thresholds from the limit. Copied pages of a batch are in memory twice, so room is kept
    /// for them. Moved pages need room for the frame pool instead.
    pub fn of(limit: usize, eviction_method: EvictionMethod) -> Thresholds {
        // Free room is memory that the program lacks, so it is a twentieth at most.
        let batch = (limit / 64).clamp(1, 256);
        let kept = match eviction_method {
            EvictionMethod::Moved => 0,
            EvictionMethod::Cheapest | EvictionMethod::Copied => {
                (batch + CLUSTER_PAGES).min(limit / 2)
            }
        };
        let frame_pool = match eviction_method {
            EvictionMethod::Moved | EvictionMethod::Cheapest => FramePool::of_limit(limit),
            EvictionMethod::Copied => 0,
        };
        let limit = limit - kept - frame_pool;
        Thresholds { limit, staged: limit / 8, low: batch, high: 3 * batch, batch, frame_pool }
    }
}
