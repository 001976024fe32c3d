//! The stream prefetcher: it follows streams of adjacent faults, or else the stride of the most
//! recent faults.
//!
//! Source: windows that double while a stream goes on, as in every kernel's file readahead. The
//! majority of recent strides is Leap's (Al Maruf, Chowdhury, ATC 2020).

use crate::page::RUN_PAGES_MAX;

/// The number of streams that are followed at once.
const STREAMS: usize = 16;
/// The number of recent faults whose majority stride decides.
const HISTORY: usize = 16;
/// The number of pages to fetch along a stride.
const STRIDE_PAGES: usize = 4;
const WINDOW_FIRST: usize = 4;
/// The distance from the end of a window within which a stream's next fault may be.
const SLACK: usize = 4;

/// Returns the run boundary after a page. A stream's runs end at multiples of the longest run, so that each
/// is one request to one server.
pub fn next_run_boundary(page: usize) -> usize {
    (page / RUN_PAGES_MAX + 1) * RUN_PAGES_MAX
}

/// Returns the run boundary before a page.
pub fn last_run_boundary(page: usize) -> usize {
    page.saturating_sub(1) / RUN_PAGES_MAX * RUN_PAGES_MAX
}

/// The pages to fetch together with a faulting one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readahead {
    /// No prediction.
    Nothing,
    /// This many pages right after it.
    Up(usize),
    /// This many pages right before it.
    Down(usize),
    /// This many pages right before it, and this many right after it. In a stream, one of the two is what it
    /// skipped.
    Around(usize, usize),
    /// A stride in pages, and this many pages at it.
    Stride(isize, usize),
}

impl Readahead {
    /// Returns the pages to fill with zeros after an untouched one that faults, and true if they lie before
    /// it. Of pages that a stream skipped, the program may never use any.
    pub fn zeros_ahead(self) -> (bool, usize) {
        let (before, after) = self.extent();
        (before > after, before.max(after))
    }

    /// Returns the numbers of adjacent pages right before and right after the one that faults.
    pub fn extent(self) -> (usize, usize) {
        match self {
            Readahead::Up(after) => (0, after),
            Readahead::Down(before) => (before, 0),
            Readahead::Around(before, after) => (before, after),
            Readahead::Nothing | Readahead::Stride(..) => (0, 0),
        }
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct FaultStream {
    /// The page of its last fault.
    last: usize,
    /// The page of the next expected fault.
    next: usize,
    is_downward: bool,
    window: usize,
    used_at: u64,
}

/// The streams and strides of one handler's faults.
#[derive(Debug, Default)]
pub struct StreamPrefetcher {
    streams: [FaultStream; STREAMS],
    strides: [isize; HISTORY],
    faults: u64,
    /// The page of the last fault.
    last: usize,
    /// The first of the pages that came with the last fault, if no stream predicted them.
    last_first: usize,
}

impl StreamPrefetcher {
    /// Records a fault, and returns the pages to fetch with it.
    pub fn fault(&mut self, page: usize) -> Readahead {
        self.faults += 1;
        let stride = page.wrapping_sub(self.last) as isize;
        self.strides[self.faults as usize % HISTORY] = stride;
        let before = std::mem::replace(&mut self.last_first, page);
        self.last = page;
        if let Some(ahead) = self.follow(page) {
            return ahead;
        }
        self.begin(page, before);
        match self.majority() {
            Some(stride) if stride.unsigned_abs() > 1 => Readahead::Stride(stride, STRIDE_PAGES),
            _ => Readahead::Nothing,
        }
    }

    /// Returns the next window of the stream that the page goes on, and the pages that it skipped: programs
    /// whose blocks lie across pages come back to them. A fault inside the last window goes on too: a page
    /// that the store does not have, such as one of zeros, has cut that window short.
    fn follow(&mut self, page: usize) -> Option<Readahead> {
        let faults = self.faults;
        let goes_on = |stream: &&mut FaultStream| {
            stream.window > 0
                && if stream.is_downward {
                    page < stream.last && stream.next.saturating_sub(page) <= SLACK
                } else {
                    page > stream.last && page.saturating_sub(stream.next) <= SLACK
                }
        };
        let stream = self.streams.iter_mut().find(goes_on)?;
        let was_cut = if stream.is_downward { page > stream.next } else { page < stream.next };
        if !was_cut {
            stream.window = (stream.window * 2).min(RUN_PAGES_MAX - 1);
        }
        (stream.last, stream.used_at) = (page, faults);
        if stream.is_downward {
            let pages = stream.window.min(page - last_run_boundary(page + 1));
            let skipped = stream.next.saturating_sub(page).min(RUN_PAGES_MAX - 1 - pages);
            stream.next = page.saturating_sub(pages + 1);
            Some(if skipped > 0 {
                Readahead::Around(pages, skipped)
            } else {
                Readahead::Down(pages)
            })
        } else {
            let pages = stream.window.min(next_run_boundary(page) - page - 1);
            let skipped = page.saturating_sub(stream.next).min(RUN_PAGES_MAX - 1 - pages);
            stream.next = page + pages + 1;
            Some(if skipped > 0 { Readahead::Around(skipped, pages) } else { Readahead::Up(pages) })
        }
    }

    /// Records the neighbours that come with the last fault, which no stream predicted. The program's next
    /// fault lies beyond them.
    pub fn add_neighbours(&mut self, before: usize, after: usize) {
        let (page, faults) = (self.last, self.faults);
        self.last_first = page - before;
        let Some(stream) = self.streams.iter_mut().find(|stream| stream.used_at == faults) else {
            return;
        };
        stream.next = match stream.is_downward {
            true => (page - before).saturating_sub(1),
            false => page + after + 1,
        };
        // The next window doubles it.
        stream.window = stream.window.max((before + after).div_ceil(2));
    }

    /// Begins a stream at each fault: two adjacent ones, of pages or of pages with their neighbours, make it
    /// a stream.
    fn begin(&mut self, page: usize, before: usize) {
        let faults = self.faults;
        let oldest = self.streams.iter_mut().min_by_key(|stream| stream.used_at);
        let Some(stream) = oldest else { return };
        let is_downward = before == page + 1;
        let next = if is_downward { page.saturating_sub(1) } else { page + 1 };
        let window = WINDOW_FIRST / 2;
        *stream = FaultStream { last: page, next, is_downward, window, used_at: faults };
    }

    /// Returns the stride of more than half of the recent faults (Boyer, Moore).
    fn majority(&self) -> Option<isize> {
        let (mut candidate, mut lead) = (0, 0);
        for stride in self.strides {
            if lead == 0 {
                candidate = stride;
            }
            lead += if stride == candidate { 1 } else { -1 };
        }
        let count = self.strides.iter().filter(|stride| **stride == candidate).count();
        (count > HISTORY / 2).then_some(candidate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetax_core::access::Rng;

    /// Simulates the faults of a sweep, which fetches what the prefetcher predicts.
    fn sweep(prefetcher: &mut StreamPrefetcher, mut page: usize, faults: usize) -> Vec<usize> {
        let next = |_| {
            let ahead = match prefetcher.fault(page) {
                Readahead::Up(pages) => pages,
                _ => 0,
            };
            page += ahead + 1;
            ahead
        };
        (0..faults).map(next).collect()
    }

    #[test]
    fn a_stream_widens() {
        assert_eq!(sweep(&mut StreamPrefetcher::default(), 128, 7), [0, 4, 8, 16, 31, 63, 63]);
    }

    // The handler fetches all of them at once, into a buffer of a run.
    #[test]
    fn a_fault_never_brings_more_than_a_run() {
        let mut rng = Rng::new(64);
        let mut longest = 0;
        for _ in 0..2_000 {
            let (mut prefetcher, mut page) = (StreamPrefetcher::default(), 10_000 + rng.below(64));
            let is_downward = rng.below(2) == 0;
            for _ in 0..12 {
                let ahead = prefetcher.fault(page as usize);
                let (before, after) = match ahead {
                    Readahead::Nothing | Readahead::Stride(..) => {
                        let neighbours = (rng.below(4) as usize, rng.below(4) as usize);
                        prefetcher.add_neighbours(neighbours.0, neighbours.1);
                        neighbours
                    }
                    _ => ahead.extent(),
                };
                longest = longest.max(before + 1 + after);
                page = match is_downward {
                    true => page - before as u64 - 1 - rng.below(SLACK as u64 + 1),
                    false => page + after as u64 + 1 + rng.below(SLACK as u64 + 1),
                };
            }
        }
        assert_eq!(longest, RUN_PAGES_MAX);
    }

    #[test]
    fn runs_end_at_seams() {
        assert_eq!((next_run_boundary(127), next_run_boundary(128)), (128, 192));
        assert_eq!(
            (last_run_boundary(128), last_run_boundary(129), last_run_boundary(0)),
            (64, 128, 0)
        );
        let mut prefetcher = StreamPrefetcher::default();
        prefetcher.fault(124);
        assert_eq!(
            (prefetcher.fault(125), prefetcher.fault(128)),
            (Readahead::Up(2), Readahead::Up(8))
        );
        prefetcher.fault(1026);
        prefetcher.fault(1025);
        assert_eq!(
            (prefetcher.fault(1024), prefetcher.fault(1023)),
            (Readahead::Down(0), Readahead::Down(8))
        );
    }

    #[test]
    fn a_stream_may_go_down() {
        let mut prefetcher = StreamPrefetcher::default();
        assert_eq!(prefetcher.fault(1000), Readahead::Nothing);
        assert_eq!(prefetcher.fault(999), Readahead::Nothing);
        assert_eq!(prefetcher.fault(998), Readahead::Down(4));
        assert_eq!(prefetcher.fault(993), Readahead::Down(8));
    }

    #[test]
    fn what_a_stream_skipped_comes_with_its_next_window() {
        let mut prefetcher = StreamPrefetcher::default();
        prefetcher.fault(1000);
        assert_eq!(prefetcher.fault(1001), Readahead::Up(4));
        let ahead = prefetcher.fault(1007);
        assert_eq!((ahead, ahead.zeros_ahead()), (Readahead::Around(1, 8), (false, 8)));
        assert_eq!(prefetcher.fault(1016), Readahead::Up(7));
        let before: Vec<_> = (498..=500).rev().map(|page| prefetcher.fault(page)).collect();
        assert_eq!(before[2], Readahead::Down(4));
        let ahead = prefetcher.fault(492);
        assert_eq!((ahead, ahead.zeros_ahead()), (Readahead::Around(8, 1), (true, 8)));
    }

    #[test]
    fn a_window_that_is_cut_short_does_not_end_its_stream() {
        let mut prefetcher = StreamPrefetcher::default();
        prefetcher.fault(1024);
        let ahead = [1025, 1028, 1029, 1034].map(|page| prefetcher.fault(page));
        assert_eq!(ahead, [4, 4, 4, 8].map(Readahead::Up));
        assert_eq!(prefetcher.fault(1034), Readahead::Nothing, "the same page again");
        let mut prefetcher = StreamPrefetcher::default();
        for page in [1000, 999] {
            assert_eq!(prefetcher.fault(page), Readahead::Nothing);
        }
        let ahead = [998, 995, 990].map(|page| prefetcher.fault(page));
        assert_eq!(ahead, [4, 4, 8].map(Readahead::Down));
    }

    #[test]
    fn streams_are_told_apart() {
        let mut prefetcher = StreamPrefetcher::default();
        let mut at = [0, 1 << 20, 2 << 20];
        for round in 0..6 {
            for page in &mut at {
                match prefetcher.fault(*page) {
                    Readahead::Up(pages) => *page += pages + 1,
                    other => {
                        assert!(round == 0, "{other:?}");
                        *page += 1;
                    }
                }
            }
        }
    }

    #[test]
    fn strides_are_followed_and_chance_is_not() {
        let mut prefetcher = StreamPrefetcher::default();
        let ahead: Vec<_> = (0..40).map(|i| prefetcher.fault(i * 37)).collect();
        assert_eq!(ahead[30], Readahead::Stride(37, 4));
        let (mut prefetcher, mut rng) = (StreamPrefetcher::default(), Rng::new(1));
        let fetched = (0..1000)
            .filter(|_| prefetcher.fault(rng.below(1 << 20) as usize) != Readahead::Nothing);
        assert!(fetched.count() < 5);
    }
}
