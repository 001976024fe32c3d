//! What to fetch ahead of need: streams of adjacent faults, else the stride of most recent faults.
//!
//! Source: read-ahead windows that double while a stream goes on, as in every kernel's file
//! read-ahead; the majority of recent strides is Leap's (Al Maruf, Chowdhury, ATC 2020).

use crate::page::RUN_PAGES_MAX;

/// Streams that are followed at once.
const STREAMS: usize = 16;
/// Faults of which the majority decides.
const HISTORY: usize = 16;
/// Pages fetched ahead along a stride.
const STRIDE_PAGES: usize = 4;
const WINDOW_FIRST: usize = 4;
/// A stream's next fault may be this far beyond where its window ended.
const SLACK: usize = 4;

/// The seam after a page. A stream's runs end at seams, multiples of the longest run, so that each of
/// them is one request to one server.
pub fn next_seam(page: usize) -> usize {
    (page / RUN_PAGES_MAX + 1) * RUN_PAGES_MAX
}

/// The seam before a page.
pub fn last_seam(page: usize) -> usize {
    page.saturating_sub(1) / RUN_PAGES_MAX * RUN_PAGES_MAX
}

/// Pages that will be wanted soon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ahead {
    /// None that we know of.
    Nothing,
    /// This many right after the faulting one.
    Up(usize),
    /// This many right before it.
    Down(usize),
    /// This many right before it, and this many right after it.
    Around(usize, usize),
    /// This many, each so many pages further.
    Stride(isize, usize),
}

#[derive(Debug, Clone, Copy, Default)]
struct Stream {
    /// Where the next fault is expected.
    next: usize,
    down: bool,
    window: usize,
    used_at: u64,
}

/// Follows the faults of one handler.
#[derive(Debug, Default)]
pub struct Trend {
    streams: [Stream; STREAMS],
    strides: [isize; HISTORY],
    faults: u64,
    last: usize,
}

impl Trend {
    /// A fault on a page; what to fetch with it.
    pub fn fault(&mut self, page: usize) -> Ahead {
        self.faults += 1;
        let stride = page.wrapping_sub(self.last) as isize;
        self.strides[self.faults as usize % HISTORY] = stride;
        let before = std::mem::replace(&mut self.last, page);
        if let Some(ahead) = self.follow(page) {
            return ahead;
        }
        self.begin(page, before);
        match self.majority() {
            Some(stride) if stride.unsigned_abs() > 1 => Ahead::Stride(stride, STRIDE_PAGES),
            _ => Ahead::Nothing,
        }
    }

    fn follow(&mut self, page: usize) -> Option<Ahead> {
        let faults = self.faults;
        let goes_on = |stream: &&mut Stream| {
            stream.window > 0
                && if stream.down {
                    page <= stream.next && stream.next - page <= SLACK
                } else {
                    page >= stream.next && page - stream.next <= SLACK
                }
        };
        let stream = self.streams.iter_mut().find(goes_on)?;
        stream.window = (stream.window * 2).min(RUN_PAGES_MAX - 1);
        stream.used_at = faults;
        if stream.down {
            let pages = stream.window.min(page - last_seam(page + 1));
            stream.next = page.saturating_sub(pages + 1);
            Some(Ahead::Down(pages))
        } else {
            let pages = stream.window.min(next_seam(page) - page - 1);
            stream.next = page + pages + 1;
            Some(Ahead::Up(pages))
        }
    }

    /// A stream begins with two adjacent faults: so each fault is the candidate of the next.
    fn begin(&mut self, page: usize, before: usize) {
        let faults = self.faults;
        let oldest = self.streams.iter_mut().min_by_key(|stream| stream.used_at);
        let Some(stream) = oldest else { return };
        let down = before == page + 1;
        let next = if down { page.saturating_sub(1) } else { page + 1 };
        *stream = Stream { next, down, window: WINDOW_FIRST / 2, used_at: faults };
    }

    /// The stride of more than half of the recent faults (Boyer, Moore).
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

    /// Faults of a sweep, each fetching what the trend says.
    fn sweep(trend: &mut Trend, mut page: usize, faults: usize) -> Vec<usize> {
        let next = |_| {
            let ahead = match trend.fault(page) {
                Ahead::Up(pages) => pages,
                _ => 0,
            };
            page += ahead + 1;
            ahead
        };
        (0..faults).map(next).collect()
    }

    #[test]
    fn a_stream_widens() {
        assert_eq!(sweep(&mut Trend::default(), 128, 7), [0, 4, 8, 16, 31, 63, 63]);
    }

    #[test]
    fn runs_end_at_seams() {
        assert_eq!((next_seam(127), next_seam(128)), (128, 192));
        assert_eq!((last_seam(128), last_seam(129), last_seam(0)), (64, 128, 0));
        let mut trend = Trend::default();
        trend.fault(124);
        assert_eq!((trend.fault(125), trend.fault(128)), (Ahead::Up(2), Ahead::Up(8)));
        trend.fault(1026);
        trend.fault(1025);
        assert_eq!((trend.fault(1024), trend.fault(1023)), (Ahead::Down(0), Ahead::Down(8)));
    }

    #[test]
    fn a_stream_may_go_down() {
        let mut trend = Trend::default();
        assert_eq!(trend.fault(1000), Ahead::Nothing);
        assert_eq!(trend.fault(999), Ahead::Nothing);
        assert_eq!(trend.fault(998), Ahead::Down(4));
        assert_eq!(trend.fault(993), Ahead::Down(8));
    }

    #[test]
    fn streams_are_told_apart() {
        let mut trend = Trend::default();
        let mut at = [0, 1 << 20, 2 << 20];
        for round in 0..6 {
            for page in &mut at {
                match trend.fault(*page) {
                    Ahead::Up(pages) => *page += pages + 1,
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
        let mut trend = Trend::default();
        let ahead: Vec<_> = (0..40).map(|i| trend.fault(i * 37)).collect();
        assert_eq!(ahead[30], Ahead::Stride(37, 4));
        let (mut trend, mut rng) = (Trend::default(), Rng::new(1));
        let fetched =
            (0..1000).filter(|_| trend.fault(rng.below(1 << 20) as usize) != Ahead::Nothing);
        assert!(fetched.count() < 5);
    }
}
