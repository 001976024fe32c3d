//! The hat layer: the pmegs of segments, and the hardware contexts of processes.
//!
//! Invariant: each of the users' pmegs is on the free list or owned by one segment. `contextless`
//! holds exactly the pmegs of spaces without a context. A process keeps its pmegs when it loses its
//! context.

use super::bits::PmegSet;
use super::config::{HatConfig, SunOsCosts};
use super::steal::Pool;
use crate::hardware::SpaceId;
use crate::hardware::sun4::{PmegId, SEGMENTS_PER_REGION, Sun4};
use crate::historic::cx::{CpuRow, Cx};
use crate::tally::CounterId;
use std::collections::BTreeMap;

/// Pmegs given to segments: hatcnt word 4.
pub const ALLOCATIONS: CounterId = CounterId::of("pmeg_allocation_count");
/// Pmegs stolen from segments: hatcnt word 5.
pub const STEALS: CounterId = CounterId::of("pmeg_steal_count");
/// Pmegs reloaded whole from the software cache.
pub const RELOADS: CounterId = CounterId::of("pmeg_reload_count");
/// Contexts given to a process that had none.
pub const CONTEXT_LOADS: CounterId = CounterId::of("context_load_count");

/// The hat layer's state of a space.
#[derive(Debug, Clone, Default)]
struct HatSpace {
    has_context: bool,
    owned: PmegSet,
    /// The valid and the writable entries of stolen pmegs, by segment.
    cache: BTreeMap<usize, (u64, u64)>,
}

/// The hat layer: it gives pmegs to segments and contexts to processes.
#[derive(Debug, Clone)]
pub struct Hat {
    config: HatConfig,
    costs: SunOsCosts,
    pool: Pool,
    free: Vec<PmegId>,
    spaces: Vec<HatSpace>,
    /// The spaces that have a context.
    contexts: Vec<SpaceId>,
    /// Loaded segment-map groups of a three-level machine, oldest first.
    smegs: Vec<(SpaceId, usize)>,
    switches: u64,
    gifts: u64,
    faults: u64,
}

impl Hat {
    /// Returns the state with all of the users' pmegs free.
    pub fn new(config: HatConfig, costs: SunOsCosts, mmu: &Sun4) -> Self {
        let pmegs = mmu.geometry().pmegs;
        let pool = Pool {
            users: config.kernel_pmegs..pmegs,
            hand: pmegs - 1,
            contextless: PmegSet::default(),
            given_at: vec![0; pmegs],
            faulted_at: vec![0; pmegs],
            ran_at: Vec::new(),
        };
        Hat {
            free: pool.users.clone().rev().collect(),
            pool,
            config,
            costs,
            spaces: Vec::new(),
            contexts: Vec::new(),
            smegs: Vec::new(),
            switches: 0,
            gifts: 0,
            faults: 0,
        }
    }

    /// Makes room for a space's state.
    pub fn add_space(&mut self, space: SpaceId) {
        self.spaces.resize_with(self.spaces.len().max(space.0 + 1), HatSpace::default);
        self.pool.ran_at.resize(self.spaces.len(), 0);
    }

    /// Returns true if the space has a translation, in a pmeg or in the software cache. A space
    /// without one looks as if no page of it were in memory.
    pub fn has_translations(&self, space: SpaceId) -> bool {
        let HatSpace { owned, cache, .. } = &self.spaces[space.0];
        !(owned.is_empty() && cache.is_empty())
    }

    /// Returns the number of free pmegs.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Gives a space that gets a CPU a context. If all are taken, the least recently run space
    /// loses its own.
    pub fn run(&mut self, cx: &mut Cx<'_>, space: SpaceId) {
        self.switches += 1;
        self.pool.ran_at[space.0] = self.switches;
        if std::mem::replace(&mut self.spaces[space.0].has_context, true) {
            return;
        }
        self.contexts.push(space);
        self.pool.contextless.subtract(&self.spaces[space.0].owned);
        cx.count(CONTEXT_LOADS, 1);
        if self.contexts.len() > self.config.user_contexts {
            // Take the context of the least recently run space.
            let ran_at = |place: &usize| self.pool.ran_at[self.contexts[*place].0];
            let oldest = (0..self.contexts.len()).min_by_key(ran_at).unwrap_or(0);
            let loser = self.contexts.swap_remove(oldest);
            self.spaces[loser.0].has_context = false;
            self.pool.contextless.add(&self.spaces[loser.0].owned);
            cx.charge(CpuRow::OtherKernel, self.costs.context_steal_ns);
            cx.charge(CpuRow::Translation, self.costs.context_steal_user_ns);
        }
    }

    /// Returns the pmeg of a segment, and allocates or steals one if the segment has none. With a
    /// software cache, a new pmeg is loaded with the entries of the segment's last one.
    pub fn pmeg(
        &mut self,
        mmu: &mut Sun4,
        cx: &mut Cx<'_>,
        space: SpaceId,
        segment: usize,
    ) -> PmegId {
        self.load_region(mmu, cx, space, segment);
        self.faults += 1;
        let pmeg = mmu.pmeg_of(space, segment).unwrap_or_else(|| {
            let pmeg = self.free.pop().unwrap_or_else(|| self.steal(mmu, cx, space));
            self.assign_pmeg(mmu, cx, pmeg, space, segment);
            pmeg
        });
        self.pool.faulted_at[pmeg] = self.faults;
        pmeg
    }

    fn assign_pmeg(
        &mut self,
        mmu: &mut Sun4,
        cx: &mut Cx<'_>,
        pmeg: PmegId,
        space: SpaceId,
        segment: usize,
    ) {
        cx.count(ALLOCATIONS, 1);
        mmu.assign_pmeg(pmeg, space, segment);
        self.gifts += 1;
        self.pool.given_at[pmeg] = self.gifts;
        let entry = &mut self.spaces[space.0];
        entry.owned.insert(pmeg);
        if !entry.has_context {
            self.pool.contextless.insert(pmeg);
        }
        if let Some((valid, writable)) = entry.cache.remove(&segment) {
            mmu.load(pmeg, valid, writable);
            cx.count(RELOADS, 1);
            cx.charge(CpuRow::MinorFault, self.costs.reload_ns);
            cx.charge(CpuRow::Translation, self.costs.reload_user_ns);
        }
    }

    fn steal(&mut self, mmu: &mut Sun4, cx: &mut Cx<'_>, thief: SpaceId) -> PmegId {
        cx.count(STEALS, 1);
        let pmeg = (self.config.steal.pick)(&self.pool, mmu, thief, cx.rng());
        self.pool.hand = pmeg;
        let (valid, writable) = (mmu.pmegs()[pmeg].valid, mmu.pmegs()[pmeg].writable);
        if let Some((owner, segment)) = self.release_pmeg(mmu, pmeg)
            && self.config.software_cache
        {
            self.spaces[owner.0].cache.insert(segment, (valid, writable));
        }
        pmeg
    }

    fn release_pmeg(&mut self, mmu: &mut Sun4, pmeg: PmegId) -> Option<(SpaceId, usize)> {
        let (owner, segment) = mmu.release_pmeg(pmeg).owner?;
        self.spaces[owner.0].owned.remove(pmeg);
        self.pool.contextless.remove(pmeg);
        Some((owner, segment))
    }

    /// Loads the segment-map entries of a region on a three-level machine. The oldest group makes
    /// room.
    fn load_region(&mut self, mmu: &mut Sun4, cx: &mut Cx<'_>, space: SpaceId, segment: usize) {
        let Some(smegs) = mmu.geometry().smegs else { return };
        if mmu.has_region(space, segment) {
            return;
        }
        if self.smegs.len() == smegs {
            let (loser, region) = self.smegs.remove(0);
            mmu.set_region(loser, region, false);
        }
        let region = segment / SEGMENTS_PER_REGION;
        self.smegs.push((space, region));
        mmu.set_region(space, region, true);
        cx.charge(CpuRow::MinorFault, self.costs.region_load_ns);
    }

    /// Makes stores to present pages fault (copy-on-write after a fork).
    pub fn write_protect(&mut self, mmu: &mut Sun4, space: SpaceId) {
        let entry = &mut self.spaces[space.0];
        entry.owned.iter().for_each(|pmeg| mmu.pmeg_mut(pmeg).writable = 0);
        entry.cache.values_mut().for_each(|(_, writable)| *writable = 0);
    }

    /// Invalidates the entries of `mask` in a segment, and frees the pmeg if that empties it.
    pub fn invalidate(&mut self, mmu: &mut Sun4, space: SpaceId, segment: usize, mask: u64) {
        if let Some(pmeg) = mmu.pmeg_of(space, segment) {
            let held = mmu.pmeg_mut(pmeg);
            (held.valid, held.writable) = (held.valid & !mask, held.writable & !mask);
            let empty = held.valid == 0 && held.owner == Some((space, segment));
            if empty && self.release_pmeg(mmu, pmeg).is_some() {
                self.free.push(pmeg);
            }
        }
        if let Some((valid, writable)) = self.spaces[space.0].cache.get_mut(&segment) {
            (*valid, *writable) = (*valid & !mask, *writable & !mask);
        }
    }

    /// Lets `space` use the pmeg that another space of its family has for this segment. Returns
    /// false without sharing, or if that space has none.
    pub fn share(&mut self, mmu: &mut Sun4, from: SpaceId, space: SpaceId, segment: usize) -> bool {
        let pmeg = if self.config.share { mmu.pmeg_of(from, segment) } else { None };
        pmeg.inspect(|pmeg| mmu.share(*pmeg, space)).is_some()
    }

    /// Removes an ended space and frees its pmegs, context and segment-map groups.
    pub fn remove_space(&mut self, mmu: &mut Sun4, space: SpaceId) {
        let owned = std::mem::take(&mut self.spaces[space.0]).owned;
        for pmeg in owned.iter() {
            mmu.release_pmeg(pmeg);
            self.free.push(pmeg);
        }
        self.pool.contextless.subtract(&owned);
        self.contexts.retain(|other| *other != space);
        self.smegs.retain(|(owner, _)| *owner != space);
    }

    /// Asserts the invariants of pmegs and contexts.
    #[cfg(test)]
    pub fn check(&self, mmu: &Sun4) {
        let mut contextless = PmegSet::default();
        let mut owned = 0;
        for (index, space) in self.spaces.iter().enumerate() {
            for pmeg in space.owned.iter() {
                let (owner, segment) = mmu.pmegs()[pmeg].owner.expect("an owned pmeg has an owner");
                assert_eq!(owner, SpaceId(index));
                assert_eq!(mmu.pmeg_of(owner, segment), Some(pmeg));
                owned += 1;
                if !space.has_context {
                    contextless.insert(pmeg);
                }
            }
        }
        assert_eq!(owned + self.free.len(), self.pool.users.len());
        assert!(self.free.iter().all(|pmeg| mmu.pmegs()[*pmeg].owner.is_none()));
        assert_eq!(contextless, self.pool.contextless);
        assert!(self.contexts.len() <= self.config.user_contexts);
    }
}
