//! Miss curves of a recorded program: all TLB sizes and several page sizes at once.
//!
//! Each thread has its own TLBs, and so its own curves. Results are sums over threads. Invariant: an
//! access counts once. A curve that is not sampled is exact.

use crate::counters::Side;
use crate::filter::PAGE_SHIFT;
use crate::heatmap::Heatmap;
use crate::pages::{AccessKind, PageObserver, Thread};
use crate::places::Segment;
use pagetax_core::units::{PageSize, VirtAddr};
use pagetax_sim::hardware::reuse::{Following, ReuseProfile};
use std::ops::Range;

/// An observer that computes miss curves.
pub struct Curves {
    page_sizes: Vec<PageSize>,
    following: Following,
    side: Side,
    /// Reuse profiles by thread.
    profiles: Vec<ReuseProfile>,
    interval_accesses: u64,
    /// Accesses since the last interval ended.
    in_interval: u64,
    accesses: u64,
    /// Pages of each interval by page size, summed over threads.
    working_sets: Vec<Vec<u64>>,
    heatmap: Heatmap,
}

impl Curves {
    /// Creates empty curves. An interval of the working set has `interval_accesses` accesses.
    pub fn new(
        page_sizes: &[PageSize],
        following: Following,
        side: Side,
        interval_accesses: u64,
    ) -> Self {
        let mut page_sizes = page_sizes.to_vec();
        page_sizes.sort_unstable();
        page_sizes.dedup();
        Curves {
            page_sizes,
            following,
            side,
            profiles: Vec::new(),
            interval_accesses: interval_accesses.max(1),
            in_interval: 0,
            accesses: 0,
            working_sets: Vec::new(),
            heatmap: Heatmap::default(),
        }
    }

    /// Returns the page sizes in ascending order.
    pub fn page_sizes(&self) -> &[PageSize] {
        &self.page_sizes
    }

    /// Returns the loads and stores, or the instructions, of all threads.
    pub fn accesses(&self) -> u64 {
        self.accesses
    }

    /// Returns the number of threads.
    pub fn threads(&self) -> usize {
        self.profiles.len()
    }

    fn sum(&self, of: impl Fn(&ReuseProfile) -> u64) -> u64 {
        self.profiles.iter().map(of).sum()
    }

    /// Returns the misses of TLBs with `entries` entries. `size` is an index in [`Curves::page_sizes`].
    pub fn misses(&self, size: usize, entries: u64) -> u64 {
        self.sum(|profile| profile.curves()[size].misses(entries))
    }

    /// Returns the distinct pages of each thread, summed.
    pub fn pages(&self, size: usize) -> u64 {
        self.sum(|profile| profile.curves()[size].pages())
    }

    /// Returns true if this page size's curve is exact.
    pub fn is_exact(&self, size: usize) -> bool {
        self.profiles.iter().all(|profile| profile.curves()[size].is_exact())
    }

    /// Returns the fewest entries with which at most `missing` (0 to 1) of all accesses miss. None if
    /// first touches alone exceed this.
    pub fn entries_for(&self, size: usize, missing: f64) -> Option<u64> {
        let allowed = (self.accesses as f64 * missing) as u64;
        let (mut few, mut enough) = (0, self.pages(size).next_power_of_two().max(1) * 2);
        if self.misses(size, enough) > allowed {
            return None;
        }
        while few + 1 < enough {
            let middle = few + (enough - few) / 2;
            match self.misses(size, middle) > allowed {
                true => few = middle,
                false => enough = middle,
            }
        }
        Some(enough)
    }

    /// Returns the pages touched in each interval, by page size. The last interval may be shorter.
    pub fn working_sets(&self) -> &[Vec<u64>] {
        &self.working_sets
    }

    /// Returns the page changes of all threads by time and address.
    pub fn heatmap(&self) -> &Heatmap {
        &self.heatmap
    }

    /// Ends the last interval. Call it before reading results.
    pub fn finish(&mut self) {
        if self.in_interval > 0 {
            self.end_interval();
        }
        self.profiles.iter_mut().for_each(ReuseProfile::settle);
        self.heatmap.settle();
    }

    fn end_interval(&mut self) {
        self.in_interval = 0;
        let mut sum = vec![0; self.page_sizes.len()];
        for profile in &mut self.profiles {
            sum.iter_mut().zip(profile.end_interval()).for_each(|(sum, pages)| *sum += pages);
        }
        self.working_sets.push(sum);
    }

    fn profile(&mut self, thread: Thread) -> &mut ReuseProfile {
        let number = thread.number as usize;
        while self.profiles.len() <= number {
            self.profiles.push(ReuseProfile::new(&self.page_sizes, self.following));
        }
        &mut self.profiles[number]
    }
}

impl PageObserver for Curves {
    #[inline]
    fn change(&mut self, thread: Thread, kind: AccessKind, page: u64) {
        if (kind == AccessKind::Fetch) == (self.side == Side::Code) {
            self.profile(thread).access(VirtAddr(page << PAGE_SHIFT), 0);
            self.heatmap.change(page);
        }
    }

    fn ran(&mut self, thread: Thread, instructions: u64, accesses: u64) {
        let count = if self.side == Side::Code { instructions } else { accesses };
        self.profile(thread).stayed(count);
        self.heatmap.ran(count);
        self.accesses += count;
        self.in_interval += count;
        if self.in_interval >= self.interval_accesses {
            self.end_interval();
        }
    }

    fn found(&mut self, _: u32, _: u64, _: Segment) {}

    /// Does nothing: a page keeps its history when its address is mapped again. An LRU array of this size
    /// would have kept its translation, and curves compare sizes.
    fn gone(&mut self, _: Thread, _: Range<u64>) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_have_tlbs_of_their_own() {
        let mut curves =
            Curves::new(&[PageSize::M2, PageSize::K4], Following::All, Side::Data, 100);
        let threads = [0, 1].map(|number| Thread { number, process: 0 });
        for _ in 0..10 {
            for thread in threads {
                for page in 0..4 {
                    curves.change(thread, AccessKind::Load, page);
                    curves.change(thread, AccessKind::Fetch, 100 + page);
                }
                curves.ran(thread, 40, 10);
            }
        }
        curves.finish();
        assert_eq!((curves.accesses(), curves.threads()), (200, 2));
        assert_eq!(curves.page_sizes(), [PageSize::K4, PageSize::M2]);
        assert_eq!([1, 3, 4].map(|entries| curves.misses(0, entries)), [80, 80, 8]);
        assert_eq!(curves.misses(1, 1), 2);
        assert_eq!(curves.entries_for(0, 0.05), Some(4));
        assert_eq!(curves.entries_for(0, 0.01), None, "first touches are 4 %");
        assert_eq!(curves.working_sets(), [[8, 2], [8, 2]]);
        assert!(curves.is_exact(0) && curves.pages(0) == 8);
    }
}
