//! A simulated CPU's TLB misses by side and page size, and its clock.

use std::ops::{AddAssign, Sub};

/// The two sides of a TLB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Side {
    /// Instruction fetches.
    Code = 0,
    /// Loads and stores.
    Data = 1,
}

/// The misses of one side and one page size.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Misses {
    /// Accesses that missed all TLB levels.
    pub tlb_count: u64,
    /// The time of their page walks, or of TSB hits, in picoseconds.
    pub tlb_ps: u64,
    /// TLB misses that missed the translation storage buffer (TSB) as well.
    pub tsb_count: u64,
    /// The additional time of TSB misses, in picoseconds.
    pub tsb_ps: u64,
}

impl AddAssign for Misses {
    fn add_assign(&mut self, other: Misses) {
        self.tlb_count += other.tlb_count;
        self.tlb_ps += other.tlb_ps;
        self.tsb_count += other.tsb_count;
        self.tsb_ps += other.tsb_ps;
    }
}

impl Sub for Misses {
    type Output = Misses;
    fn sub(self, before: Misses) -> Misses {
        Misses {
            tlb_count: self.tlb_count - before.tlb_count,
            tlb_ps: self.tlb_ps - before.tlb_ps,
            tsb_count: self.tsb_count - before.tsb_count,
            tsb_ps: self.tsb_ps - before.tsb_ps,
        }
    }
}

const SHIFTS: usize = 64;

/// A CPU's misses, and its time so far.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuCounters {
    misses: [[Misses; SHIFTS]; 2],
    /// The modelled time, translation included, in picoseconds.
    pub clock_ps: u64,
}

impl Default for CpuCounters {
    fn default() -> Self {
        CpuCounters { misses: [[Misses::default(); SHIFTS]; 2], clock_ps: 0 }
    }
}

impl CpuCounters {
    /// Returns the misses of one side and page size (log2).
    pub fn misses(&self, side: Side, shift: u32) -> Misses {
        self.misses[side as usize][shift as usize % SHIFTS]
    }

    /// Returns the counters of one side and page size, to add to.
    pub fn misses_mut(&mut self, side: Side, shift: u32) -> &mut Misses {
        &mut self.misses[side as usize][shift as usize % SHIFTS]
    }

    /// Returns the misses of one side over all page sizes.
    pub fn total(&self, side: Side) -> Misses {
        let mut total = Misses::default();
        self.misses[side as usize].iter().for_each(|misses| total += *misses);
        total
    }

    /// Returns the increase since `before`.
    pub fn since(&self, before: &CpuCounters) -> CpuCounters {
        let mut since = self.clone();
        for (side, old) in since.misses.iter_mut().zip(&before.misses) {
            side.iter_mut().zip(old).for_each(|(new, old)| *new = *new - *old);
        }
        since.clock_ps -= before.clock_ps;
        since
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_by_side_and_size() {
        let mut before = CpuCounters::default();
        before.misses_mut(Side::Data, 12).tlb_count = 3;
        before.clock_ps = 10;
        let mut after = before.clone();
        after.misses_mut(Side::Data, 12).tlb_count += 4;
        after.misses_mut(Side::Code, 21).tsb_ps += 5;
        after.clock_ps += 7;
        let since = after.since(&before);
        assert_eq!((since.total(Side::Data).tlb_count, since.clock_ps), (4, 7));
        assert_eq!(since.misses(Side::Code, 21).tsb_ps, 5);
    }
}
