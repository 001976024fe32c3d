//! All TLB sizes in one pass: how often an address space would miss with any number of entries of any
//! page size, from the stack distances of its pages.
//!
//! An LRU array of N entries, fully associative, misses exactly the accesses whose page has N or more
//! other pages touched since its last use (Mattson et al., "Evaluation techniques for storage
//! hierarchies", IBM Systems Journal 9(2), 1970). One pass therefore answers every N; each page size is
//! a curve of its own. Set-associative arrays need a simulation of their own ([`crate::hardware::set`]).
//!
//! A sampled curve follows only pages whose hash falls below a threshold, halved whenever more than a
//! stated number of pages are followed; distances and counts are scaled back (Waldspurger et al.,
//! "Efficient MRC construction with SHARDS", FAST 2015). Repeats of the page just used are counted
//! exactly in both, so the estimate covers only changes of page.
//!
//! Changes of page are taken many at a time: of a batch, repeats of a larger page and pages that are not
//! followed are dropped by loops without a branch, before anything is looked up.

mod histogram;
mod stack;

pub use stack::{LruStack, Touch};

use histogram::Distances;
use pagetax_core::access::mix64;
use pagetax_core::units::{PageSize, VirtAddr};

/// How many pages a curve follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Following {
    /// All of them: the curve is exact.
    All,
    /// At most this many, a sample by hash: the curve is an estimate once there are more.
    AtMost(u64),
}

/// The miss curve of one page size.
pub struct MissCurve {
    page_size: PageSize,
    following: Following,
    /// One page in 2^this is followed.
    rate_log2: u32,
    stack: LruStack,
    last: Option<u64>,
    accesses: u64,
    changes: u64,
    seen: TouchCounts,
}

/// Counts of touches by their result, scaled.
#[derive(Default)]
struct TouchCounts {
    /// First touches of pages.
    first: u64,
    distances: Distances,
    /// Different pages in this interval.
    interval_pages: u64,
}

impl TouchCounts {
    #[inline]
    fn note(&mut self, touch: Touch, rate_log2: u32) {
        let weight = 1 << rate_log2;
        let new_in_interval = match touch {
            Touch::First => {
                self.first += weight;
                true
            }
            Touch::Again { distance, before_mark } => {
                self.distances.add(distance << rate_log2, weight);
                before_mark
            }
        };
        if new_in_interval {
            self.interval_pages += weight;
        }
    }
}

impl MissCurve {
    /// Returns an empty curve.
    pub fn new(page_size: PageSize, following: Following) -> Self {
        MissCurve {
            page_size,
            following,
            rate_log2: 0,
            stack: LruStack::new(),
            last: None,
            accesses: 0,
            changes: 0,
            seen: TouchCounts::default(),
        }
    }

    /// Returns the size of the pages.
    pub fn page_size(&self) -> PageSize {
        self.page_size
    }

    /// Accesses seen.
    pub fn accesses(&self) -> u64 {
        self.accesses
    }

    /// Returns true if every page was followed, so that each figure is exact.
    pub fn is_exact(&self) -> bool {
        self.rate_log2 == 0
    }

    /// Returns the number of different pages touched (scaled, if sampled).
    pub fn pages(&self) -> u64 {
        self.stack.pages() << self.rate_log2
    }

    /// Takes changes of a smaller page, whose numbers are shifted into ours; leaves those that change ours,
    /// and says how many they are.
    fn take(&mut self, pages: &mut [u64], shift: u32) -> usize {
        let (mut last, mut kept) = (self.last.unwrap_or(u64::MAX), 0);
        for at in 0..pages.len() {
            let page = pages[at] >> shift;
            pages[kept] = page;
            kept += usize::from(page != last);
            last = page;
        }
        if kept > 0 {
            self.last = Some(last);
            self.changes += kept as u64;
            self.touch_followed(&pages[..kept]);
        }
        kept
    }

    fn touch_followed(&mut self, pages: &[u64]) {
        let Following::AtMost(limit) = self.following else {
            let seen = &mut self.seen;
            return self.stack.touch_all(pages, |touch| seen.note(touch, 0));
        };
        let (mut followed, mut count) = ([0; BATCH], 0);
        for &page in pages {
            followed[count] = page;
            count += usize::from(self.follows(page));
        }
        for &page in &followed[..count] {
            // Fewer may be followed than at the beginning of the batch.
            if self.follows(page) {
                let touch = self.stack.touch(page);
                self.seen.note(touch, self.rate_log2);
            }
            while self.stack.pages() > limit {
                self.halve();
            }
        }
    }

    #[inline(always)]
    fn follows(&self, page: u64) -> bool {
        mix64(page) & ((1 << self.rate_log2) - 1) == 0
    }

    fn halve(&mut self) {
        self.rate_log2 += 1;
        let dropped: Vec<u64> = self.stack.iter().filter(|&page| !self.follows(page)).collect();
        for page in dropped {
            self.stack.forget(page);
        }
    }

    /// Misses of a fully associative LRU array of `entries`, first touches included. Exact, or an
    /// estimate if [`is_exact`](Self::is_exact) is false; monotone: more entries never miss more.
    pub fn misses(&self, entries: u64) -> u64 {
        (self.seen.first + self.seen.distances.at_least(entries.max(1))).min(self.changes)
    }

    /// Returns the fewest entries that miss at most `missing` of all accesses (0 to 1); `None` where first
    /// touches alone are more.
    pub fn entries_for(&self, missing: f64) -> Option<u64> {
        let allowed = (self.accesses as f64 * missing) as u64;
        let allowed = allowed.checked_sub(self.seen.first)?;
        Some(self.seen.distances.entries_for(allowed).max(1))
    }

    /// Ends an interval: different pages touched in it (scaled, if sampled), its working set.
    pub fn end_interval(&mut self) -> u64 {
        self.stack.mark();
        // The page in use goes on being used: the next interval starts with it.
        self.last = None;
        std::mem::take(&mut self.seen.interval_pages)
    }
}

/// Changes of page that are taken at a time.
const BATCH: usize = 512;

/// Miss curves of several page sizes from one stream of accesses.
pub struct ReuseProfile {
    /// Smallest pages first: where a page repeats, all larger ones do.
    curves: Vec<MissCurve>,
    /// Changes of the smallest page that the curves have not taken.
    pending: Box<[u64; BATCH]>,
    pending_count: usize,
    /// The smallest page of the last access.
    last: Option<u64>,
    /// Accesses that the curves have not counted.
    accesses: u64,
}

impl ReuseProfile {
    /// Curves of `page_sizes`, in ascending order.
    pub fn new(page_sizes: &[PageSize], following: Following) -> Self {
        let mut page_sizes = page_sizes.to_vec();
        page_sizes.sort_unstable();
        page_sizes.dedup();
        let curves = page_sizes.into_iter().map(|size| MissCurve::new(size, following)).collect();
        let (pending, pending_count) = (Box::new([0; BATCH]), 0);
        ReuseProfile { curves, pending, pending_count, last: None, accesses: 0 }
    }

    /// Returns the curves, smallest pages first, of all that was [settled](Self::settle).
    pub fn curves(&self) -> &[MissCurve] {
        &self.curves
    }

    /// `count` accesses in a row, all within the smallest page of `address`.
    #[inline]
    pub fn access(&mut self, address: VirtAddr, count: u64) {
        self.accesses += count;
        let Some(smallest) = self.curves.first() else { return };
        let page = address.page(smallest.page_size);
        if self.last == Some(page) {
            return;
        }
        self.last = Some(page);
        self.pending[self.pending_count] = page;
        self.pending_count += 1;
        if self.pending_count == BATCH {
            self.settle();
        }
    }

    /// `count` accesses to the page of the one before.
    pub fn stayed(&mut self, count: u64) {
        self.accesses += count;
    }

    /// Brings the curves up to date.
    pub fn settle(&mut self) {
        let accesses = std::mem::take(&mut self.accesses);
        let mut pages = &mut self.pending[..std::mem::take(&mut self.pending_count)];
        let mut size = self.curves.first().map(|curve| curve.page_size);
        for curve in &mut self.curves {
            curve.accesses += accesses;
            let smaller = size.replace(curve.page_size).unwrap_or(curve.page_size);
            let kept = curve.take(pages, curve.page_size.shift() - smaller.shift());
            pages = &mut std::mem::take(&mut pages)[..kept];
        }
    }

    /// Ends an interval of all curves: the working set of each, in pages, smallest pages first.
    pub fn end_interval(&mut self) -> Vec<u64> {
        self.settle();
        self.last = None;
        self.curves.iter_mut().map(MissCurve::end_interval).collect()
    }
}

#[cfg(test)]
mod tests;
