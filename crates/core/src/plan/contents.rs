//! The words of a region that certainly hold the pattern of its writes.
//!
//! Invariant: never more than is certain. A [`Contents`] may leave out words that do hold the pattern.

use super::{Pattern, Touch};

/// The words that a sweep reaches: `grain` bytes at each of the first `count` multiples of `stride`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Footprint {
    stride: u64,
    grain: u64,
    count: u64,
}

impl Footprint {
    /// Returns the footprint of all words of a region.
    pub fn whole(bytes: u64) -> Footprint {
        Footprint { stride: 8, grain: 8, count: bytes / 8 }
    }

    /// Returns the words that a touch may reach; for a sweep, exactly those that it reaches.
    pub fn reached(touch: &Touch, region_bytes: u64) -> Footprint {
        let grain = touch.grain_bytes;
        match touch.pattern {
            Pattern::Strided { stride_bytes: stride } => {
                let lap = region_bytes.saturating_sub(grain) / stride + 1;
                Footprint { stride, grain, count: lap.min(touch.count) }
            }
            _ => Footprint { stride: grain, grain, count: (region_bytes / grain).max(1) },
        }
        .normal()
    }

    /// Turns a footprint without gaps into the equal sweep of words.
    fn normal(self) -> Footprint {
        if self.grain < self.stride && self.count > 1 {
            return self;
        }
        Footprint { stride: 8, grain: 8, count: ((self.count - 1) * self.stride + self.grain) / 8 }
    }

    /// Returns true if each word of `other` is one of these.
    fn covers(&self, other: &Footprint) -> bool {
        if self.stride == 8 {
            return (other.count - 1) * other.stride + other.grain <= self.count * 8;
        }
        other.stride.is_multiple_of(self.stride)
            && other.grain <= self.grain
            && (other.count - 1) * (other.stride / self.stride) < self.count
    }
}

/// The footprints that hold the pattern, none within another.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Contents(Vec<Footprint>);

/// The most sweeps of different strides that are remembered for a region.
const FOOTPRINTS_MAX: usize = 16;

impl Contents {
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Adds a footprint that was written.
    pub fn add(&mut self, new: Footprint) {
        if self.cover(new) {
            return;
        }
        self.0.retain(|old| !new.covers(old));
        if self.0.len() < FOOTPRINTS_MAX {
            self.0.push(new);
        }
    }

    /// Returns true if all of `wanted` is written.
    pub fn cover(&self, wanted: Footprint) -> bool {
        self.0.iter().any(|written| written.covers(&wanted))
    }

    /// Keeps the words that both are certain to hold.
    pub fn meet(&mut self, other: &Contents) {
        self.0.retain(|written| other.cover(*written));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Access, RegionId};
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn words(footprint: Footprint) -> BTreeSet<u64> {
        let Footprint { stride, grain, count } = footprint;
        (0..count).flat_map(|k| (0..grain / 8).map(move |word| k * stride + word * 8)).collect()
    }

    fn sweeps() -> impl Strategy<Value = Footprint> {
        (1u64..6, 1u64..6, 1u64..20).prop_map(|(stride, grain, count)| {
            let (region, access) = (RegionId(0), Access::Write);
            let pattern = Pattern::Strided { stride_bytes: stride * 8 };
            let touch = Touch { region, access, pattern, count, grain_bytes: grain * 8, seed: 1 };
            Footprint::reached(&touch, 400)
        })
    }

    proptest! {
        #[test]
        fn what_is_covered_is_there(a in sweeps(), b in sweeps()) {
            if a.covers(&b) {
                prop_assert!(words(b).is_subset(&words(a)), "{:?} {:?}", a, b);
            }
            prop_assert!(a.covers(&a));
        }

        #[test]
        fn only_what_was_written_is_certain(
            first in prop::collection::vec(sweeps(), 0..4),
            second in prop::collection::vec(sweeps(), 0..4),
            wanted in sweeps(),
        ) {
            let contents = |sweeps: &[Footprint]| {
                let mut contents = Contents::default();
                sweeps.iter().for_each(|sweep| contents.add(*sweep));
                contents
            };
            let all = |sweeps: &[Footprint]| -> BTreeSet<u64> {
                sweeps.iter().flat_map(|sweep| words(*sweep)).collect()
            };
            let (mut either, written) = (contents(&first), all(&first));
            prop_assert!(!either.cover(wanted) || words(wanted).is_subset(&written));
            either.meet(&contents(&second));
            let both = written.intersection(&all(&second)).copied().collect();
            prop_assert!(!either.cover(wanted) || words(wanted).is_subset(&both));
        }
    }

    #[test]
    fn a_whole_sweep_covers_every_pattern() {
        let whole = Footprint::whole(4096);
        let touch = |pattern, grain_bytes| Touch {
            region: RegionId(0),
            access: Access::Verify,
            pattern,
            count: 7,
            grain_bytes,
            seed: 1,
        };
        for pattern in [Pattern::Uniform, Pattern::PointerChase, Pattern::Zipf { theta: 0.9 }] {
            assert!(whole.covers(&Footprint::reached(&touch(pattern, 512), 4096)));
        }
        let pages = Footprint::reached(&touch(Pattern::Strided { stride_bytes: 512 }, 8), 4096);
        assert!(whole.covers(&pages) && !pages.covers(&whole));
        assert!(!pages.covers(&Footprint::reached(&touch(Pattern::Uniform, 512), 4096)));
    }
}
