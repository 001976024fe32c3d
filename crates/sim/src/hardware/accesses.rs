//! The remaining addresses of a touch operation.
//!
//! Invariant: the host would touch the same addresses in the same order for this plan. Only the parts of
//! one access that fall on one page are folded into one touch. A sweep is arithmetic ([`CyclicSweep`]), so
//! translation hardware can handle runs of it and skip whole laps.

use pagetax_core::access::Offsets;
use pagetax_core::plan::{Pattern, Random, Touch};
use pagetax_core::replay::{Replayed, ThreadTotals};

/// The rest of a touch operation, in page touches: an access that spans pages is one for each.
#[derive(Debug, Clone)]
pub struct Accesses {
    base: u64,
    left: u64,
    allowed: u64,
    /// The user time of each page touch without translation, in picoseconds.
    pub cost_ps: u64,
    /// True if each access stores.
    pub writes: bool,
    /// True if each address is loaded by the previous access, so that no two overlap.
    pub dependent: bool,
    pieces: u64,
    /// The ratio of accesses of the plan to page touches.
    ratio: (u64, u64),
    order: Order,
    clean_at: Option<u64>,
    /// True if the next touch is an instruction fetch.
    is_fetch: bool,
}

#[derive(Debug, Clone)]
enum Order {
    Sweep(CyclicSweep),
    /// Separate accesses, each of `pieces` pages.
    Drawn {
        source: Source,
        at: u64,
        piece: u64,
        page_bytes: u64,
    },
}

#[derive(Debug, Clone)]
enum Source {
    Random(Random),
    Strided(CyclicSweep),
    Recorded(Box<Replayed>),
}

/// A cyclic sweep: `at, at + stride, …` below `lap × stride`, then from 0 again. Offsets in bytes
/// from the start of the region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CyclicSweep {
    /// The offset of the next page touch: `done × stride`.
    pub at: u64,
    /// The bytes from one touch to the next, at least 1.
    pub stride: u64,
    /// The page touches in a whole lap, at least 1.
    pub lap: u64,
    /// The page touches of this lap that are done, below `lap`.
    done: u64,
}

impl CyclicSweep {
    /// Returns the number of page touches until the lap ends, at least 1.
    #[inline(always)]
    pub fn left_in_lap(&self) -> u64 {
        self.lap - self.done
    }

    #[inline(always)]
    fn advance(&mut self, count: u64) {
        // Most calls stay within the lap, which needs no division.
        if count < self.left_in_lap() {
            self.done += count;
            self.at += count * self.stride;
        } else {
            self.done = (count - self.left_in_lap()) % self.lap;
            self.at = self.done * self.stride;
        }
    }
}

/// The region, the client and the repetition of a touch.
#[derive(Debug, Clone, Copy)]
pub struct TouchSite {
    /// The virtual address of the region.
    pub base: u64,
    /// The length of the region, in bytes.
    pub bytes: u64,
    /// The size of the pages by which accesses are folded.
    pub page_bytes: u64,
    /// The number of the client, from 0.
    pub client: u32,
    /// The number of the repetition, from 0.
    pub repeat: u64,
}

impl Accesses {
    /// Starts `touch` at `place`; `cost_ps` is the user time of one access.
    pub fn new(touch: &Touch, place: TouchSite, cost_ps: u64) -> Self {
        let pages = touch.grain_bytes.div_ceil(place.page_bytes).max(1);
        let (mut left, mut pieces, mut cost_ps) = (touch.count * pages, pages, cost_ps / pages);
        let order = match (touch.pattern, touch.random(place.bytes, place.client, place.repeat)) {
            (_, Some(random)) => drawn(Source::Random(random), place.page_bytes),
            (Pattern::Strided { stride_bytes }, _) => {
                let stride = stride_bytes.max(1);
                let room = place.bytes.saturating_sub(touch.grain_bytes.min(place.bytes));
                let lap = CyclicSweep { at: 0, stride, lap: room / stride + 1, done: 0 };
                if pages == 1 {
                    Order::Sweep(lap)
                } else if stride == pages * place.page_bytes {
                    Order::Sweep(CyclicSweep {
                        stride: place.page_bytes,
                        lap: lap.lap * pages,
                        ..lap
                    })
                } else {
                    drawn(Source::Strided(lap), place.page_bytes)
                }
            }
            (_, None) => unreachable!("every pattern but a sweep has a random stream"),
        };
        if left == 0 {
            (left, pieces, cost_ps) = (0, 1, 0);
        }
        let mut accesses = Accesses {
            base: place.base,
            left,
            allowed: u64::MAX,
            cost_ps,
            writes: touch.access.writes(),
            dependent: touch.pattern == Pattern::PointerChase,
            pieces,
            ratio: (1, pieces),
            order,
            clean_at: None,
            is_fetch: false,
        };
        accesses.draw();
        accesses
    }

    /// Replays the accesses of a recorded thread in a region at `base`. All of them count as stores, since a
    /// recording does not show which accesses to a page store.
    pub fn replayed(changes: Replayed, totals: ThreadTotals, base: u64, user_ps: u64) -> Self {
        let touches = totals.page_change_count + totals.fetch_change_count;
        let mut accesses = Accesses {
            base,
            left: touches,
            allowed: u64::MAX,
            cost_ps: user_ps.checked_div(touches).unwrap_or(0),
            writes: true,
            dependent: false,
            pieces: 1,
            ratio: (totals.access_count, touches.max(1)),
            order: drawn(Source::Recorded(Box::new(changes)), 1),
            clean_at: None,
            is_fetch: false,
        };
        accesses.draw();
        accesses
    }

    /// Returns the number of page touches left that may be done now.
    pub fn left(&self) -> u64 {
        self.left.min(self.allowed)
    }

    /// Returns the number of page touches left, now or later.
    pub fn remaining(&self) -> u64 {
        self.left
    }

    /// Returns true if no page touch is left.
    pub fn is_done(&self) -> bool {
        self.left == 0
    }

    /// Allows `count` more page touches until the next call, for paced jobs.
    pub fn allow(&mut self, count: u64) {
        self.allowed = count;
    }

    /// Returns the number of page touches that make one access of the plan.
    pub fn pieces(&self) -> u64 {
        self.pieces
    }

    /// Converts page touches to accesses of the plan. `carry` is the remainder of the previous call; returns
    /// the accesses and the new remainder.
    pub fn accesses_in(&self, touches: u64, carry: u64) -> (u64, u64) {
        let (accesses, of_touches) = self.ratio;
        let sum = u128::from(touches) * u128::from(accesses) + u128::from(carry);
        let of_touches = u128::from(of_touches);
        ((sum / of_touches) as u64, (sum % of_touches) as u64)
    }

    /// Returns the virtual address of the region.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Returns the virtual address of the next touch. It means nothing if no touch is left.
    #[inline(always)]
    pub fn next_address(&self) -> u64 {
        self.base
            + match &self.order {
                Order::Sweep(sweep) => sweep.at,
                Order::Drawn { at, piece, page_bytes, .. } => at + piece * page_bytes,
            }
    }

    /// Returns true if the next touch is an instruction fetch of a recorded program.
    #[inline(always)]
    pub fn is_fetch(&self) -> bool {
        self.is_fetch
    }

    /// Returns true if instruction fetches are included. Otherwise the code of the loop lies on one page.
    pub fn tells_fetches(&self) -> bool {
        matches!(self.order, Order::Drawn { source: Source::Recorded(_), .. })
    }

    /// Returns the rest as a sweep; none for random patterns.
    #[inline(always)]
    pub fn sweep(&self) -> Option<CyclicSweep> {
        match &self.order {
            Order::Sweep(sweep) => Some(*sweep),
            Order::Drawn { .. } => None,
        }
    }

    /// Records that a whole lap had no fault at this version of the translations.
    pub fn set_clean(&mut self, version: u64) {
        self.clean_at = Some(version);
    }

    /// Returns true if a whole lap had no fault at this version of the translations. Then no other lap faults
    /// until the version changes.
    #[inline(always)]
    pub fn is_clean(&self, version: u64) -> bool {
        self.clean_at == Some(version)
    }

    /// Advances by `count` page touches, at most [`Accesses::left`].
    #[inline(always)]
    pub fn advance(&mut self, count: u64) {
        debug_assert!(count <= self.left());
        self.left -= count;
        self.allowed -= count;
        if let Order::Sweep(sweep) = &mut self.order {
            sweep.advance(count);
            return;
        }
        for _ in 0..count {
            if let Order::Drawn { piece, .. } = &mut self.order {
                *piece += 1;
                if *piece == self.pieces {
                    self.draw();
                }
            }
        }
    }

    fn draw(&mut self) {
        if let Order::Drawn { source, at, piece, .. } = &mut self.order {
            *piece = 0;
            *at = match source {
                Source::Random(random) => random.next_offset(),
                Source::Strided(sweep) => {
                    let now = sweep.at;
                    sweep.advance(1);
                    now
                }
                Source::Recorded(changes) => match changes.next() {
                    Some(change) => {
                        self.is_fetch = change.is_fetch;
                        change.offset
                    }
                    None => {
                        self.left = 0;
                        return;
                    }
                },
            };
        }
    }
}

fn drawn(source: Source, page_bytes: u64) -> Order {
    Order::Drawn { source, at: 0, piece: 0, page_bytes }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetax_core::plan::{Access, RegionId};

    fn touch(pattern: Pattern, count: u64, grain_bytes: u64) -> Touch {
        let (region, access) = (RegionId(0), Access::Read);
        Touch { region, access, pattern, count, grain_bytes, seed: 1 }
    }

    fn place(bytes: u64) -> TouchSite {
        TouchSite { base: 1 << 20, bytes, page_bytes: 4096, client: 0, repeat: 0 }
    }

    fn addresses(mut accesses: Accesses) -> Vec<u64> {
        let mut seen = Vec::new();
        while accesses.left() > 0 {
            seen.push(accesses.next_address() - accesses.base());
            accesses.advance(1);
        }
        seen
    }

    #[test]
    fn sweeps_wrap_as_the_plans_runs_do() {
        for (bytes, stride, grain) in [(40960, 4096, 8), (40000, 3000, 8), (8192, 16, 16)] {
            let touch = touch(Pattern::Strided { stride_bytes: stride }, 37, grain);
            let expected: Vec<_> = touch
                .runs(bytes)
                .flat_map(|run| (0..run.count).map(move |i| run.first + i * run.stride))
                .collect();
            assert_eq!(addresses(Accesses::new(&touch, place(bytes), 0)), expected);
        }
    }

    #[test]
    fn large_grains_touch_each_of_their_pages() {
        let dense = touch(Pattern::Strided { stride_bytes: 8192 }, 3, 8192);
        let pages = addresses(Accesses::new(&dense, place(16384), 0));
        assert_eq!(pages, [0, 4096, 8192, 12288, 0, 4096]);
        let sparse = touch(Pattern::Strided { stride_bytes: 16384 }, 2, 8192);
        let pages = addresses(Accesses::new(&sparse, place(32768), 0));
        assert_eq!(pages, [0, 4096, 16384, 20480]);
    }

    #[test]
    fn random_patterns_are_the_plans_own() {
        let touch = touch(Pattern::Uniform, 20, 4096);
        let mut stream = touch.random(1 << 20, 0, 0).unwrap();
        let expected: Vec<_> = (0..20).map(|_| stream.next_offset()).collect();
        assert_eq!(addresses(Accesses::new(&touch, place(1 << 20), 0)), expected);
    }

    #[test]
    fn advancing_at_once_is_advancing_one_by_one() {
        let touch = touch(Pattern::Strided { stride_bytes: 4096 }, 100, 8);
        let (mut fast, mut slow) =
            (Accesses::new(&touch, place(28672), 0), Accesses::new(&touch, place(28672), 0));
        fast.advance(31);
        (0..31).for_each(|_| slow.advance(1));
        assert_eq!(fast.next_address(), slow.next_address());
        assert_eq!(fast.sweep().unwrap().left_in_lap(), 4);
    }
}
