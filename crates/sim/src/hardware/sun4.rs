//! The Sun-4's memory management unit: all page tables in fast static memory, in groups (pmegs).
//!
//! Context and segment number select a pmeg through the segment map. The pmeg has one entry for each page
//! of the 256K segment. A three-level machine has a region map before the segment map: the entries for 64
//! segments are a group (smeg), whose number is limited as well. There is no walker: an access without an
//! entry in a pmeg faults. A translation that is present costs nothing.
//!
//! Invariant: a pmeg belongs to at most one segment of one space. If a kernel shares pmegs, it belongs to
//! the same segment of several spaces. Each pmeg is owned or free.
//! Source: Lawrence's report on the Sun-4 MMU (Sun-Managers, 1990), section 4.

use super::{Mmu, SpaceId, Stop, Touched};
use crate::hardware::accesses::Accesses;
use crate::model::{Model, ModelError};
use pagetax_core::units::PageSize;

/// The number of a pmeg, from 0.
pub type PmegId = usize;

/// The sizes of the hardware's tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// The number of page-table groups.
    pub pmegs: usize,
    /// The entries in each group: a power of two, at most 64.
    pub ptes: u32,
    /// The page size of the machine.
    pub page: PageSize,
    /// The number of hardware contexts.
    pub contexts: usize,
    /// The number of segments of an address space.
    pub segments: usize,
    /// The number of groups of segment-map entries, on a three-level machine.
    pub smegs: Option<usize>,
}

/// The segments under one entry of the region map.
pub const SEGMENTS_PER_REGION: usize = 64;
/// The limit of the largest machine (4/400).
pub const PMEGS_MAX: u64 = 1024;
/// The most segments of a space, so that its regions fit in a word.
const SEGMENTS_MAX: u64 = 4096;

impl Geometry {
    /// Reads the table `[mmu]`: pmegs, ptes, contexts, segments, and smegs on three-level machines.
    ///
    /// # Errors
    /// Fails if a constant is absent, or no Sun-4 could have the geometry.
    pub fn load(model: &Model, page: PageSize) -> Result<Self, ModelError> {
        let ptes = model.power_of_two("mmu", "ptes")?;
        if ptes > 64 {
            let problem = format!("is {ptes}, more than 64");
            return Err(model.error("mmu", "ptes", problem, "write 32 or 64"));
        }
        let smegs =
            model.has("mmu", "smegs").then(|| model.positive("mmu", "smegs")).transpose()?;
        let pmegs = model.positive("mmu", "pmegs")?;
        if pmegs > PMEGS_MAX {
            let problem = format!("is {pmegs}, more than {PMEGS_MAX}");
            return Err(model.error("mmu", "pmegs", problem, "no Sun-4 has more"));
        }
        let segments = model.power_of_two("mmu", "segments")?;
        if !(4 * SEGMENTS_PER_REGION as u64..=SEGMENTS_MAX).contains(&segments) {
            let problem = format!("is {segments}, not within 256 and {SEGMENTS_MAX}");
            return Err(model.error("mmu", "segments", problem, "a Sun-4 has 4096"));
        }
        Ok(Geometry {
            pmegs: pmegs as usize,
            ptes: ptes as u32,
            page,
            contexts: model.positive("mmu", "contexts")? as usize,
            segments: segments as usize,
            smegs: smegs.map(|smegs| smegs as usize),
        })
    }

    /// Returns the bytes that one pmeg maps.
    pub fn segment_bytes(&self) -> u64 {
        u64::from(self.ptes) * self.page.bytes()
    }

    /// Returns the segment and entry of an address.
    pub fn locate(&self, address: u64) -> (usize, u32) {
        let (page, entries) = (address >> self.page.shift(), self.ptes.trailing_zeros());
        ((page >> entries) as usize, (page & u64::from(self.ptes - 1)) as u32)
    }
}

/// A page-table group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pmeg {
    /// The owning space and its segment. None if the pmeg is free.
    pub owner: Option<(SpaceId, usize)>,
    /// The valid entries, one bit each.
    pub valid: u64,
    /// The writable ones of the valid entries, one bit each.
    pub writable: u64,
    /// True if the segment was touched since a kernel cleared this bit.
    pub referenced: bool,
    /// The time of its last touch or assignment, counted in touches of segments.
    pub used_at: u64,
    /// True if other spaces use it, too.
    pub shared: bool,
}

/// The hardware's state of a space.
#[derive(Debug, Clone, Default)]
struct Sun4Space {
    /// The pmeg of each segment.
    map: Vec<Option<u16>>,
    /// The regions whose smeg is loaded, one bit each.
    regions: u64,
    /// The number of times that this space alone has lost entries.
    losses: u64,
}

/// The memory management unit.
#[derive(Debug, Clone)]
pub struct Sun4 {
    geometry: Geometry,
    pmegs: Vec<Pmeg>,
    spaces: Vec<Sun4Space>,
    clock: u64,
    /// The number of times that any space may have lost entries.
    losses: u64,
    notes_use: bool,
}

impl Sun4 {
    /// Creates an MMU with all pmegs free.
    pub fn new(geometry: Geometry) -> Self {
        let pmegs = vec![Pmeg::default(); geometry.pmegs];
        Sun4 { geometry, pmegs, spaces: Vec::new(), clock: 0, losses: 0, notes_use: true }
    }

    /// Sets whether to keep [`Pmeg::referenced`] and [`Pmeg::used_at`]. If not, laps without a fault are
    /// skipped completely.
    pub fn note_use(&mut self, notes_use: bool) {
        self.notes_use = notes_use;
    }

    /// Returns the sizes of the tables.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Returns all pmegs by number.
    pub fn pmegs(&self) -> &[Pmeg] {
        &self.pmegs
    }

    /// Returns a pmeg whose bits may be changed, also to fewer valid ones.
    pub fn pmeg_mut(&mut self, pmeg: PmegId) -> &mut Pmeg {
        self.losses += 1;
        &mut self.pmegs[pmeg]
    }

    /// Makes entries of a pmeg valid, some of them writable.
    #[inline(always)]
    pub fn load(&mut self, pmeg: PmegId, valid: u64, writable: u64) {
        let held = &mut self.pmegs[pmeg];
        (held.valid, held.writable) = (held.valid | valid, held.writable | writable);
    }

    /// Returns a number that changes whenever a space may have lost entries.
    pub fn version(&self, space: SpaceId) -> u64 {
        self.losses + self.spaces.get(space.0).map_or(0, |space| space.losses)
    }

    /// Returns the pmeg of a segment.
    #[inline(always)]
    pub fn pmeg_of(&self, space: SpaceId, segment: usize) -> Option<PmegId> {
        let map = &self.spaces.get(space.0)?.map;
        map.get(segment).copied().flatten().map(PmegId::from)
    }

    fn space_mut(&mut self, space: SpaceId) -> &mut Sun4Space {
        if self.spaces.len() <= space.0 {
            self.spaces.resize_with(space.0 + 1, Sun4Space::default);
        }
        let entry = &mut self.spaces[space.0];
        if entry.map.is_empty() {
            entry.map = vec![None; self.geometry.segments];
        }
        entry
    }

    /// Gives a free pmeg to a segment; its entries are invalid.
    pub fn assign_pmeg(&mut self, pmeg: PmegId, space: SpaceId, segment: usize) {
        assert!(self.pmegs[pmeg].owner.is_none(), "pmeg {pmeg} is owned");
        self.clock += 1;
        let (owner, used_at) = (Some((space, segment)), self.clock);
        self.pmegs[pmeg] = Pmeg { owner, used_at, ..Pmeg::default() };
        let known = self.spaces.get_mut(space.0).and_then(|space| space.map.get_mut(segment));
        match known {
            Some(place) => *place = Some(pmeg as u16),
            None => self.space_mut(space).map[segment] = Some(pmeg as u16),
        }
    }

    /// Lets the same segment of another space use the pmeg as well.
    pub fn share(&mut self, pmeg: PmegId, space: SpaceId) {
        let (_, segment) = self.pmegs[pmeg].owner.expect("a shared pmeg has an owner");
        self.pmegs[pmeg].shared = true;
        self.space_mut(space).map[segment] = Some(pmeg as u16);
    }

    /// Takes a pmeg from all spaces that use it, and returns its content.
    pub fn release_pmeg(&mut self, pmeg: PmegId) -> Pmeg {
        let held = std::mem::take(&mut self.pmegs[pmeg]);
        let Some((owner, segment)) = held.owner else { return held };
        if !held.shared {
            self.spaces[owner.0].map[segment] = None;
            self.spaces[owner.0].losses += 1;
            return held;
        }
        self.losses += 1;
        for space in &mut self.spaces {
            if let Some(entry) = space.map.get_mut(segment).filter(|e| **e == Some(pmeg as u16)) {
                *entry = None;
            }
        }
        held
    }

    /// Loads or unloads the segment-map entries of a region; only on three-level machines.
    pub fn set_region(&mut self, space: SpaceId, region: usize, loaded: bool) {
        self.losses += 1;
        let regions = &mut self.space_mut(space).regions;
        *regions = if loaded { *regions | 1 << region } else { *regions & !(1 << region) };
    }

    /// Returns true if the segment has a pmeg, and this entry of it is valid.
    #[inline(always)]
    pub fn is_valid(&self, space: SpaceId, segment: usize, entry: u32) -> bool {
        self.pmeg_of(space, segment).is_some_and(|pmeg| self.pmegs[pmeg].valid >> entry & 1 != 0)
    }

    /// Returns true if the segment-map entries for this segment are in the hardware.
    #[inline(always)]
    pub fn has_region(&self, space: SpaceId, segment: usize) -> bool {
        let region = 1 << (segment / SEGMENTS_PER_REGION);
        self.geometry.smegs.is_none()
            || self.spaces.get(space.0).is_some_and(|space| space.regions & region != 0)
    }

    /// Returns true if an access to this address faults.
    #[inline(always)]
    pub fn faults(&self, space: SpaceId, address: u64, writes: bool) -> bool {
        let (segment, entry) = self.geometry.locate(address);
        self.usable(space, segment, writes).1 >> entry & 1 == 0
    }

    /// Returns the entries that let such an access through, of a segment's pmeg.
    #[inline(always)]
    fn usable(&self, space: SpaceId, segment: usize, writes: bool) -> (Option<PmegId>, u64) {
        match self.pmeg_of(space, segment) {
            Some(pmeg) if self.has_region(space, segment) => {
                let Pmeg { valid, writable, .. } = self.pmegs[pmeg];
                (Some(pmeg), if writes { valid & writable } else { valid })
            }
            _ => (None, 0),
        }
    }

    #[inline(always)]
    fn used(&mut self, pmeg: PmegId) {
        if !self.notes_use {
            return;
        }
        self.clock += 1;
        let entry = &mut self.pmegs[pmeg];
        (entry.referenced, entry.used_at) = (true, self.clock);
    }

    /// Touches the part of a sweep that lies in the next address's segment, up to `left` touches.
    /// Returns how many did not fault.
    fn touch_segment(&mut self, space: SpaceId, accesses: &mut Accesses, left: u64) -> u64 {
        let address = accesses.next_address();
        let (segment, entry) = self.geometry.locate(address);
        let (pmeg, usable) = self.usable(space, segment, accesses.writes);
        let Some(pmeg) = pmeg.filter(|_| usable >> entry & 1 != 0) else { return 0 };
        let count = match accesses.sweep() {
            None => 1,
            Some(sweep) if sweep.stride == self.geometry.page.bytes() => {
                let run = (usable >> entry).trailing_ones().min(self.geometry.ptes - entry);
                u64::from(run).min(sweep.left_in_lap()).min(left)
            }
            Some(sweep) => {
                let end = self.end_of_run(address, usable >> entry, entry, sweep.stride);
                (end - address).div_ceil(sweep.stride).min(sweep.left_in_lap()).min(left)
            }
        };
        self.used(pmeg);
        accesses.advance(count);
        count
    }

    /// Returns the address at which a sweep from `address` meets the first unusable entry or the end of the
    /// segment. The first bit of `usable` is the entry of `address`.
    fn end_of_run(&self, address: u64, usable: u64, entry: u32, stride: u64) -> u64 {
        let page_bytes = self.geometry.page.bytes();
        let page_start = address & !(page_bytes - 1);
        if stride <= page_bytes {
            let run = usable.trailing_ones().min(self.geometry.ptes - entry);
            return page_start + u64::from(run) * page_bytes;
        }
        let mut next = address;
        loop {
            next += stride;
            let ahead =
                (next >> self.geometry.page.shift()) - (address >> self.geometry.page.shift());
            if ahead >= u64::from(self.geometry.ptes - entry) || usable >> ahead & 1 == 0 {
                return next;
            }
        }
    }
}

impl Mmu for Sun4 {
    fn touch(
        &mut self,
        _cpu: usize,
        space: SpaceId,
        accesses: &mut Accesses,
        limit_ps: u64,
    ) -> Touched {
        let mut left = limit_ps.div_ceil(accesses.cost_ps.max(1)).max(1).min(accesses.left());
        let mut without_fault = 0;
        let version = self.version(space);
        if accesses.is_clean(version) && !self.notes_use {
            accesses.advance(left);
            left = 0;
        }
        let stop = loop {
            if left == 0 {
                break if accesses.left() == 0 { Stop::Done } else { Stop::Limit };
            }
            // After a lap without a fault, no entry is missing. If use is noted, the last lap is done in
            // full, since it sets the notes.
            if let Some(sweep) = accesses.sweep().filter(|sweep| without_fault >= sweep.lap) {
                accesses.set_clean(version);
                let laps = (left / sweep.lap).saturating_sub(1);
                let skipped = if self.notes_use { laps * sweep.lap } else { left };
                accesses.advance(skipped);
                left -= skipped;
                if left == 0 {
                    continue;
                }
            }
            let count = self.touch_segment(space, accesses, left);
            if count == 0 {
                break Stop::Fault;
            }
            without_fault += count;
            left -= count;
        };
        Touched { translation_ps: 0, stop }
    }

    fn switch(&mut self, _cpu: usize, _space: SpaceId) {}

    fn drop_space(&mut self, space: SpaceId) {
        let owns = |pmeg: &Pmeg| pmeg.owner.is_some_and(|(owner, _)| owner == space);
        debug_assert!(!self.pmegs.iter().any(owns), "the kernel has freed the space's pmegs");
        self.losses += 1;
        if let Some(entry) = self.spaces.get_mut(space.0) {
            *entry = Sun4Space::default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::accesses::TouchSite;
    use pagetax_core::plan::{Access, Pattern, RegionId, Touch};

    const SPACE: SpaceId = SpaceId(0);

    fn sparcstation(smegs: Option<usize>) -> Sun4 {
        let page = PageSize::K4;
        Sun4::new(Geometry { pmegs: 8, ptes: 64, page, contexts: 8, segments: 4096, smegs })
    }

    fn sweep(stride_bytes: u64, count: u64) -> Accesses {
        let (region, access, pattern) =
            (RegionId(0), Access::Read, Pattern::Strided { stride_bytes });
        let touch = Touch { region, access, pattern, count, grain_bytes: 8, seed: 0 };
        let place =
            TouchSite { base: 4 * 4096, bytes: 2 << 20, page_bytes: 4096, client: 0, repeat: 0 };
        Accesses::new(&touch, place, 1000)
    }

    fn load(mmu: &mut Sun4, pmeg: PmegId, segment: usize, valid: u64) {
        mmu.assign_pmeg(pmeg, SPACE, segment);
        mmu.pmeg_mut(pmeg).valid = valid;
    }

    #[test]
    fn a_sweep_stops_at_the_first_invalid_entry() {
        for stride in [1024, 4096, 8192] {
            let mut mmu = sparcstation(None);
            load(&mut mmu, 3, 0, u64::MAX);
            load(&mut mmu, 5, 1, (1 << 20) - 1);
            let mut accesses = sweep(stride, 1 << 20);
            assert_eq!(mmu.touch(0, SPACE, &mut accesses, u64::MAX).stop, Stop::Fault);
            assert_eq!(accesses.next_address(), (64 + 20) * 4096, "{stride}");
            assert!(mmu.pmegs()[5].used_at > mmu.pmegs()[3].used_at);
        }
    }

    #[test]
    fn complete_laps_are_skipped_to_the_limit() {
        let mut mmu = sparcstation(None);
        (0..8).for_each(|segment| load(&mut mmu, segment, segment, u64::MAX));
        let mut accesses = sweep(4096, 1 << 40);
        assert_eq!(mmu.touch(0, SPACE, &mut accesses, 1 << 30).stop, Stop::Fault);
        assert_eq!((1 << 40) - accesses.left(), 508);
        let held = mmu.release_pmeg(0);
        assert_eq!(held.owner, Some((SPACE, 0)));
        load(&mut mmu, 0, 8, u64::MAX);
        assert_eq!(mmu.touch(0, SPACE, &mut accesses, 4000).stop, Stop::Limit);
        assert_eq!(mmu.touch(0, SPACE, &mut accesses, 1 << 30).stop, Stop::Fault);
        assert_eq!(accesses.next_address(), 4 * 4096);
        assert_eq!(mmu.pmeg_of(SPACE, 0), None);
    }

    #[test]
    fn stores_need_writable_entries_and_regions_their_smeg() {
        let mut mmu = sparcstation(Some(4));
        load(&mut mmu, 0, 0, u64::MAX);
        let mut accesses = sweep(4096, 10);
        assert_eq!(mmu.touch(0, SPACE, &mut accesses, u64::MAX).stop, Stop::Fault);
        mmu.set_region(SPACE, 0, true);
        accesses.writes = true;
        assert_eq!(mmu.touch(0, SPACE, &mut accesses, u64::MAX).stop, Stop::Fault);
        mmu.pmeg_mut(0).writable = u64::MAX;
        assert_eq!(mmu.touch(0, SPACE, &mut accesses, u64::MAX).stop, Stop::Done);
    }
}
