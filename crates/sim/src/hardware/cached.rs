//! Translation hardware with TLBs: page tables, TLBs for each CPU, and their refill.
//!
//! Invariant: the TLBs of its CPU translate each access exactly once; a run of accesses inside one page
//! is one lookup and arithmetic. If a kernel removes a translation, it leaves the TLBs of all CPUs.

use super::page_table::PageTable;
use super::tlb::{ASID_BITS, TlbHierarchy};
use super::translation::hit_times;
use super::tsb::SoftwareRefill;
use super::walk::{PageWalker, WalkTime};
use super::{Mmu, PageTables, Pte, SpaceId, Stop, Touched, Used};
use crate::hardware::accesses::Accesses;
use pagetax_core::units::PageSize;

/// The mechanism that serves a miss of all TLB levels.
#[derive(Debug, Clone)]
pub enum Refill {
    /// A trap handler in software.
    Software(SoftwareRefill),
    /// A page walker for each CPU.
    Hardware {
        /// The page walker of each CPU.
        walkers: Vec<PageWalker>,
    },
}

#[derive(Debug, Clone)]
struct CachedSpace {
    table: PageTable,
    /// The page size that programmable TLB arrays hold for this process.
    large: Option<PageSize>,
}

/// Page tables behind TLBs.
#[derive(Debug, Clone)]
pub struct CachedMmu {
    base: PageSize,
    /// The data TLBs of each CPU.
    tlbs: Vec<TlbHierarchy>,
    /// The instruction TLBs, by CPU.
    instruction_tlbs: Vec<TlbHierarchy>,
    refill: Refill,
    /// The time of an access without refill by the number of missed levels, in picoseconds.
    level_ps: Vec<u64>,
    spaces: Vec<CachedSpace>,
    /// The running space, by CPU.
    running: Vec<Option<SpaceId>>,
    /// The misses of all levels since [`Mmu::take_tlb_misses`].
    misses: u64,
}

impl CachedMmu {
    /// Creates empty page tables and TLBs. `level_ps` is the added time of a hit in the second, third, …
    /// level.
    pub fn new(
        base: PageSize,
        data: TlbHierarchy,
        instructions: TlbHierarchy,
        cpus: usize,
        refill: Refill,
        level_ps: &[u64],
    ) -> Self {
        let times = hit_times(&data, level_ps);
        CachedMmu {
            base,
            tlbs: vec![data; cpus],
            instruction_tlbs: vec![instructions; cpus],
            refill,
            level_ps: times,
            spaces: Vec::new(),
            running: vec![None; cpus],
            misses: 0,
        }
    }

    /// Returns the base page size.
    pub fn base(&self) -> PageSize {
        self.base
    }

    /// Returns the number of data accesses to pages of `size` that no level could translate, on all CPUs.
    pub fn misses(&self, size: PageSize) -> u64 {
        self.tlbs.iter().map(|tlb| tlb.walks(size)).sum()
    }

    /// Returns the number of data accesses to pages of `size` by the number of missed levels, on all CPUs.
    pub fn counts(&self, size: PageSize) -> Vec<u64> {
        let mut sum = vec![0; self.level_ps.len()];
        for tlb in &self.tlbs {
            sum.iter_mut().zip(tlb.counts(size)).for_each(|(sum, count)| *sum += count);
        }
        sum
    }

    /// Returns the number of instruction fetches that no level could translate, on all CPUs.
    pub fn instruction_misses(&self) -> u64 {
        self.instruction_tlbs.iter().map(|tlb| tlb.walks(self.base)).sum()
    }

    /// Returns the mechanism that refills the TLBs.
    pub fn refill(&self) -> &Refill {
        &self.refill
    }

    /// Returns the size of the page that maps an address.
    pub fn size_at(&self, space: SpaceId, address: u64) -> Option<PageSize> {
        self.spaces.get(space.0)?.table.size_at(address)
    }

    /// Flushes translations from the TLBs of all CPUs, after frames or rights have changed.
    pub fn flush(&mut self, space: SpaceId, address: u64, bytes: u64) {
        let range = address..address + bytes;
        let tlbs = self.tlbs.iter_mut().chain(&mut self.instruction_tlbs);
        tlbs.for_each(|tlb| tlb.flush_range(asid(space), range.clone()));
    }

    /// Programs the TLB arrays that can be programmed, all but the first, for pages of `large`
    /// (none: the default size) whenever this space runs.
    pub fn program(&mut self, space: SpaceId, large: Option<PageSize>) {
        self.space_mut(space).large = large;
        for cpu in 0..self.tlbs.len() {
            if self.running[cpu] == Some(space) {
                self.program_cpu(cpu, large);
            }
        }
    }

    fn program_cpu(&mut self, cpu: usize, large: Option<PageSize>) {
        match large {
            Some(size) => self.tlbs[cpu].program(size, 1),
            None => self.tlbs[cpu].program(self.base, 0),
        }
    }

    fn space_mut(&mut self, space: SpaceId) -> &mut CachedSpace {
        if self.spaces.len() <= space.0 {
            let base = self.base;
            let new = || CachedSpace { table: PageTable::new(base), large: None };
            self.spaces.resize_with(space.0 + 1, new);
        }
        &mut self.spaces[space.0]
    }
}

/// The address of programs' text: on SPARC and on x86-64, far below their data.
const TEXT: u64 = 0x1_0000;

/// Returns the ASID of a space. Spaces share ASIDs if there are more spaces, but the translations of an ended
/// space are gone by then.
fn asid(space: SpaceId) -> u16 {
    (space.0 & ((1 << ASID_BITS) - 1)) as u16
}

impl Refill {
    /// Returns the time of one TLB miss, alone and overlapped. A software handler never overlaps.
    #[inline]
    pub(super) fn time(&mut self, cpu: usize, asid: u16, address: u64, shift: u32) -> WalkTime {
        match self {
            Refill::Software(refill) => {
                let ps = refill.refill(asid, address, shift);
                WalkTime { alone_ps: ps, overlapped_ps: ps }
            }
            Refill::Hardware { walkers } => walkers[cpu].walk(asid, address, shift),
        }
    }
}

impl Mmu for CachedMmu {
    fn touch(
        &mut self,
        cpu: usize,
        space: SpaceId,
        accesses: &mut Accesses,
        limit_ps: u64,
    ) -> Touched {
        self.space_mut(space);
        let table = &mut self.spaces[space.0].table;
        let (tlb, asid) = (&mut self.tlbs[cpu], asid(space));
        let (writes, alone, cost_ps) = (accesses.writes, accesses.dependent, accesses.cost_ps);
        let (mut spent_ps, mut translation_ps) = (0, 0);
        let base_shift = self.base.shift();
        let mut fetch = |refill: &mut Refill, address, shift| {
            let itlb = &mut self.instruction_tlbs[cpu];
            // Pages of a size that no array holds are looked up as base pages.
            let shift = if itlb.holds(shift) { shift } else { base_shift };
            match itlb.access(asid, address, shift) == itlb.levels() {
                true => refill.time(cpu, asid, address, shift).alone_ps,
                false => 0,
            }
        };
        if !accesses.tells_fetches() {
            translation_ps += fetch(&mut self.refill, TEXT, base_shift);
        }
        let stop = loop {
            if accesses.left() == 0 {
                break Stop::Done;
            }
            if spent_ps + translation_ps >= limit_ps {
                break Stop::Limit;
            }
            let address = accesses.next_address();
            let Some(shift) = table.translate(address, writes) else { break Stop::Fault };
            let affordable = (limit_ps - spent_ps - translation_ps).div_ceil(cost_ps.max(1));
            let count = on_page(accesses, address, shift).min(affordable).max(1);
            if accesses.is_fetch() {
                translation_ps += fetch(&mut self.refill, address, shift);
                spent_ps += cost_ps;
                accesses.advance(1);
                continue;
            }
            tlb.repeat(asid, address, shift, count, |missed| {
                translation_ps += self.level_ps[missed];
                if missed == self.level_ps.len() - 1 {
                    self.misses += 1;
                    translation_ps += self.refill.time(cpu, asid, address, shift).ps(alone);
                }
            });
            spent_ps += count * cost_ps;
            accesses.advance(count);
        };
        Touched { translation_ps, stop }
    }

    fn take_tlb_misses(&mut self) -> u64 {
        std::mem::take(&mut self.misses)
    }

    fn switch(&mut self, cpu: usize, space: SpaceId) {
        let large = self.space_mut(space).large;
        self.running[cpu] = Some(space);
        self.program_cpu(cpu, large);
    }

    fn drop_space(&mut self, space: SpaceId) {
        self.space_mut(space).table = PageTable::new(self.base);
        let tlbs = self.tlbs.iter_mut().chain(&mut self.instruction_tlbs);
        tlbs.for_each(|tlb| tlb.flush_asid(asid(space)));
        if let Refill::Software(refill) = &mut self.refill {
            refill.forget(asid(space), 0..u64::MAX);
        }
    }
}

/// Returns the number of the next accesses that are known to be on the page of the first one.
#[inline(always)]
fn on_page(accesses: &Accesses, address: u64, shift: u32) -> u64 {
    let Some(sweep) = accesses.sweep() else { return 1 };
    let to_page_end = (1u64 << shift) - 1 - (address & ((1 << shift) - 1));
    (to_page_end / sweep.stride + 1).min(sweep.left_in_lap()).min(accesses.left())
}

impl PageTables for CachedMmu {
    fn load(&mut self, space: SpaceId, pte: Pte) {
        self.space_mut(space).table.load(pte.address, pte.size, pte.writable);
        if let Refill::Software(refill) = &mut self.refill {
            refill.enter(asid(space), pte.address, pte.size.shift());
        }
    }

    fn unload(&mut self, space: SpaceId, address: u64, bytes: u64) {
        let range = address..address + bytes;
        self.space_mut(space).table.unload(range.clone());
        self.flush(space, address, bytes);
        if let Refill::Software(refill) = &mut self.refill {
            refill.forget(asid(space), range);
        }
    }

    fn protect(&mut self, space: SpaceId, address: u64, bytes: u64) {
        let range = address..address + bytes;
        self.space_mut(space).table.protect(range);
        self.flush(space, address, bytes);
    }

    fn used(&self, space: SpaceId, address: u64) -> Used {
        self.spaces.get(space.0).map_or(Used::default(), |space| space.table.used(address))
    }

    fn test_and_clear_referenced(&mut self, space: SpaceId, address: u64) -> Used {
        let used = self.used(space, address);
        if used.referenced {
            self.space_mut(space).table.clear_referenced(address);
        }
        used
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::configuration;
    use crate::models;

    #[test]
    fn unloaded_pages_leave_the_tlbs_of_both_sides() {
        const SPACE: SpaceId = SpaceId(1);
        let model = models::find("ultrasparc-3plus-900").unwrap();
        let base = PageSize::new(8192).unwrap();
        let mut mmu = configuration::load(&model, base, 1).unwrap();
        let (address, shift) = (5 * base.bytes(), base.shift());
        mmu.load(SPACE, Pte { address, size: base, writable: true });
        // The number of levels that missed, by the data and by the instruction side.
        let access = |mmu: &mut CachedMmu| {
            let sides = [&mut mmu.tlbs[0], &mut mmu.instruction_tlbs[0]];
            sides.map(|tlb| tlb.access(asid(SPACE), address, shift) == tlb.levels())
        };
        assert_eq!((access(&mut mmu), access(&mut mmu)), ([true; 2], [false; 2]));
        mmu.protect(SPACE, address, base.bytes());
        assert_eq!((access(&mut mmu), access(&mut mmu)), ([true; 2], [false; 2]));
        mmu.unload(SPACE, address, base.bytes());
        assert_eq!(access(&mut mmu), [true; 2]);
    }
}
