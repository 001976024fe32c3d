//! All TLB sizes in one pass: the misses of an address space with any number of entries of any page size,
//! from the stack distances of its pages.
//!
//! A fully associative LRU array of N entries misses an access if N or more other pages were touched since
//! the last use of its page. So one pass answers every N, with a curve for each page size. Set-associative
//! arrays need a simulation ([`crate::hardware::set`]). Source: Mattson et al., "Evaluation techniques for
//! storage hierarchies", IBM Systems Journal 9(2), 1970.
//!
//! A sampled curve follows only pages whose hash falls below a threshold. The threshold is halved whenever
//! the curve follows more pages than allowed. Distances and counts are scaled back. Source: Waldspurger et
//! al., "Efficient MRC construction with SHARDS", FAST 2015. Both kinds of curve count repeats of the last
//! page exactly, so only changes of page are estimated.
//!
//! Changes of page are processed in batches. Loops without branches first drop repeats of a larger page and
//! pages that are not followed.

mod histogram;
mod stack;

pub use stack::{LruStack, Touch};

use histogram::Distances;
use pagetax_core::access::mix64;
use pagetax_core::units::{PageSize, VirtAddr};

/// The number of pages that a curve follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Following {
    /// All of them: the curve is exact.
    All,
    /// At most this many, a sample by hash. With more pages, the curve is an estimate.
    AtMost(u64),
}

/// The miss curve of one page size.
pub struct MissCurve {
    page_size: PageSize,
    following: Following,
    /// The log2 of the sampling rate: the curve follows one page in 2^`rate_log2`.
    rate_log2: u32,
    stack: LruStack,
    last: Option<u64>,
    accesses: u64,
    changes: u64,
    seen: TouchCounts,
}

/// The scaled counts of touches by their result.
#[derive(Default)]
struct TouchCounts {
    /// The number of first touches of pages.
    first: u64,
    distances: Distances,
    /// The number of different pages in this interval.
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
    /// Creates a curve without accesses.
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

    /// Returns the number of accesses so far.
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

    /// Takes changes of a smaller page, whose numbers it shifts to this page size. Keeps those that change
    /// this page in `pages`, and returns their number.
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
            // The threshold may have been halved since the batch began.
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

    /// Returns the misses of a fully associative LRU array of `entries`, with first touches. It is an
    /// estimate if [`is_exact`](Self::is_exact) is false. More entries never miss more.
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

    /// Ends an interval and returns its working set: the number of different pages (scaled, if sampled).
    pub fn end_interval(&mut self) -> u64 {
        self.stack.mark();
        // The current page belongs to the next interval's working set as well.
        self.last = None;
        std::mem::take(&mut self.seen.interval_pages)
    }
}

/// The number of changes of page in a batch.
const BATCH: usize = 512;

/// Miss curves of several page sizes from one stream of accesses.
pub struct ReuseProfile {
    /// The curves, smallest pages first: if a page repeats, all larger ones do.
    curves: Vec<MissCurve>,
    /// The changes of the smallest page that the curves have not taken yet.
    pending: Box<[u64; BATCH]>,
    pending_count: usize,
    /// The last access's page, of the smallest size.
    last: Option<u64>,
    /// The number of accesses that the curves have not counted yet.
    accesses: u64,
}

impl ReuseProfile {
    /// Creates a curve for each of `page_sizes`, which ascend.
    pub fn new(page_sizes: &[PageSize], following: Following) -> Self {
        let mut page_sizes = page_sizes.to_vec();
        page_sizes.sort_unstable();
        page_sizes.dedup();
        let curves = page_sizes.into_iter().map(|size| MissCurve::new(size, following)).collect();
        let (pending, pending_count) = (Box::new([0; BATCH]), 0);
        ReuseProfile { curves, pending, pending_count, last: None, accesses: 0 }
    }

    /// Returns the curves, smallest pages first, of all accesses before the last [`settle`](Self::settle).
    pub fn curves(&self) -> &[MissCurve] {
        &self.curves
    }

    /// Takes `count` consecutive accesses within the smallest page of `address`.
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

    /// Takes `count` more accesses to the last page.
    pub fn stayed(&mut self, count: u64) {
        self.accesses += count;
    }

    /// Brings the curves up to date with all accesses.
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

    /// Ends an interval of all curves. Returns the working set of each in pages, smallest pages first.
    pub fn end_interval(&mut self) -> Vec<u64> {
        self.settle();
        self.last = None;
        self.curves.iter_mut().map(MissCurve::end_interval).collect()
    }
}

#[cfg(test)]
mod tests;
