//! The translation hardware of one CPU, for the address stream of a recorded program. It has no page
//! table: its caller knows the page size of each address.
//!
//! Invariant: TLBs, walkers and handlers are those of [`super::cached::CachedMmu`]. So the counts and
//! costs of a program's stream and of a job's accesses are comparable.

use super::cached::Refill;
use super::tlb::TlbHierarchy;
use pagetax_core::units::PageSize;

/// Returns the time of an access without the refill, in picoseconds, by the number of levels that missed.
/// `level_ps` is the added time of a hit in the second, third, … level.
pub(super) fn hit_times(data: &TlbHierarchy, level_ps: &[u64]) -> Vec<u64> {
    let mut times: Vec<u64> = std::iter::once(0).chain(level_ps.iter().copied()).collect();
    times.resize(data.levels() + 1, times.last().copied().unwrap_or(0));
    times
}

/// The TLBs for data and for instructions, and their refill.
#[derive(Debug, Clone)]
pub struct Translation {
    pub(super) data: TlbHierarchy,
    pub(super) instructions: TlbHierarchy,
    pub(super) refill: Refill,
    /// The time of an access by the number of missed levels, in picoseconds.
    pub(super) level_ps: Vec<u64>,
}

/// The result of one access.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Lookup {
    /// True if no level had the translation.
    pub walked: bool,
    /// True if the translation storage buffer missed, too (software refill only).
    pub tsb_missed: bool,
    /// The time without the refill, in picoseconds.
    pub level_ps: u64,
    /// The time of the walk, or of the handler if the TSB hits, in picoseconds.
    pub refill_ps: u64,
    /// The time of the same refill if it overlapped with no other; at least `refill_ps`.
    pub alone_ps: u64,
    /// The added time of a TSB miss, in picoseconds.
    pub tsb_ps: u64,
}

impl Translation {
    /// Returns the data side's TLBs.
    pub fn data(&self) -> &TlbHierarchy {
        &self.data
    }

    /// Returns the instruction side's TLBs.
    pub fn instructions(&self) -> &TlbHierarchy {
        &self.instructions
    }

    /// Returns the time of a miss that the handler's buffer serves, in picoseconds; none with a page walker.
    pub fn handler_ps(&self) -> Option<u64> {
        match &self.refill {
            Refill::Software(refill) => Some(refill.handler_ps()),
            Refill::Hardware { .. } => None,
        }
    }

    /// Makes programmable arrays hold pages of `size` beside the default. Kernels do so for processes with
    /// many such pages.
    pub fn program(&mut self, size: PageSize) {
        self.data.program(size, 1);
    }

    /// Records that the kernel has mapped the page of an address; a TSB gets its entry.
    pub fn mapped(&mut self, address: u64, shift: u32) {
        if let Refill::Software(refill) = &mut self.refill {
            refill.enter(0, address, shift);
        }
    }

    /// Removes the translations of a range, which was unmapped, from the TLBs and the TSB.
    pub fn unmapped(&mut self, range: std::ops::Range<u64>) {
        self.data.flush_range(0, range.clone());
        self.instructions.flush_range(0, range.clone());
        if let Refill::Software(refill) = &mut self.refill {
            refill.forget(0, range);
        }
    }

    /// Translates a load or store. `alone` is true if its walk does not overlap with others.
    #[inline]
    pub fn access(&mut self, address: u64, shift: u32, alone: bool) -> Lookup {
        let missed = self.data.access(0, address, shift);
        if missed == 0 {
            return Lookup::default();
        }
        let level_ps = self.level_ps[missed];
        if missed < self.data.levels() {
            return Lookup { level_ps, ..Lookup::default() };
        }
        Lookup { level_ps, ..self.walk(address, shift, alone) }
    }

    /// Translates an instruction fetch. Hits in any level are free, as under [`super::cached::CachedMmu`].
    #[inline]
    pub fn fetch(&mut self, address: u64, shift: u32) -> Lookup {
        if self.instructions.access(0, address, shift) < self.instructions.levels() {
            return Lookup::default();
        }
        self.walk(address, shift, true)
    }

    /// Handles an access that is known to hit, which only refreshes the order of its set.
    #[inline]
    pub fn refresh(&mut self, address: u64, shift: u32, is_code: bool) {
        let side = if is_code { &mut self.instructions } else { &mut self.data };
        side.access(0, address, shift);
    }

    fn walk(&mut self, address: u64, shift: u32, alone: bool) -> Lookup {
        let time = self.refill.time(0, 0, address, shift);
        let total_ps = time.ps(alone);
        let served_ps = match &self.refill {
            Refill::Software(refill) => refill.handler_ps(),
            Refill::Hardware { .. } => total_ps,
        };
        let tsb_ps = total_ps - served_ps;
        let alone_ps = time.alone_ps - tsb_ps;
        Lookup {
            walked: true,
            tsb_missed: tsb_ps > 0,
            level_ps: 0,
            refill_ps: served_ps,
            alone_ps,
            tsb_ps,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::configuration;
    use super::super::tlb::Nearest;
    use super::*;
    use crate::models;

    #[test]
    fn an_ultrasparc_traps_once_a_page_and_large_pages_need_programming() {
        let model = models::find("ultrasparc-3plus-900").unwrap();
        let mut cpu = configuration::translation(&model).unwrap();
        assert_eq!(cpu.handler_ps(), Some(210_000));
        cpu.mapped(0x2000, 13);
        let first = cpu.access(0x2000, 13, false);
        assert_eq!(
            first,
            Lookup { walked: true, refill_ps: 210_000, alone_ps: 210_000, ..Lookup::default() }
        );
        assert_eq!(cpu.access(0x3fff, 13, false), Lookup::default());
        let unmapped = cpu.access(0x4000, 13, false);
        assert!(unmapped.tsb_missed && unmapped.tsb_ps == 1_000_000, "the kernel does not know it");
        let sweep = |cpu: &mut Translation| {
            (0..64u64).filter(|page| cpu.access(page << 22, 22, false).walked).count()
        };
        sweep(&mut cpu);
        assert!(sweep(&mut cpu) > 32, "the small TLB does not hold them");
        cpu.program("4M".parse().unwrap());
        sweep(&mut cpu);
        assert_eq!(sweep(&mut cpu), 0, "a large TLB does");
    }

    #[test]
    fn walks_that_overlap_cost_less() {
        let model = models::find("x86-64-calibrated").unwrap();
        let mut cpu = configuration::translation(&model).unwrap();
        let alone = cpu.clone().access(0x1000, 12, true);
        let overlapped = cpu.access(0x1000, 12, false);
        assert!(alone.walked && overlapped.walked && !overlapped.tsb_missed);
        assert!(overlapped.refill_ps < alone.refill_ps);
        assert_eq!([alone, overlapped].map(|found| found.alone_ps), [alone.refill_ps; 2]);
    }

    #[test]
    fn the_nearest_arrays_of_a_size_and_their_sets() {
        let model = models::find("x86-64-calibrated").unwrap();
        let cpu = configuration::translation(&model).unwrap();
        let nearest = |array, set_count, ways| Nearest { array, set_count, ways, is_lru: true };
        assert_eq!(cpu.data().nearest_arrays(12), Some(vec![nearest(0, 16, 4)]));
        assert_eq!(cpu.data().nearest_arrays(21), Some(vec![nearest(1, 8, 4)]));
        assert_eq!(cpu.data().nearest_arrays(30), None);
    }
}
