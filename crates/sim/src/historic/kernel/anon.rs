//! Private anonymous memory, demand-paged, with pages of several sizes. Solaris 9 and current Linux
//! share it; a [`Flavor`] holds the differences.
//!
//! Invariant: every resident page holds one block of physical memory, shared only copy-on-write. No
//! block is both free and mapped. If no block of the wanted size is available, the page gets the
//! next smaller size.

use super::buddy::{Buddy, FrameNumber, Owner};
use super::preflight::{fatal, ignored_advice, other_page_sizes, too_much_mapped, without_servers};
use super::{Kernel, KernelReport, Step};
use crate::hardware::accesses::Accesses;
use crate::hardware::cached::CachedMmu;
use crate::hardware::{PageTables, Pte, SpaceId};
use crate::historic::cx::{CpuRow, Cx};
use crate::model::{Model, ModelError};
use crate::tally::{CounterId, Tally};
use pagetax_core::counter::Reading;
use pagetax_core::machine::Unmet;
use pagetax_core::plan::{Advice, Plan, Region, RegionId};
use pagetax_core::units::{Bytes, PageSize};
use std::collections::BTreeMap;

const MINOR_FAULTS: CounterId = CounterId::of("minor_fault_count");
const COW_FAULTS: CounterId = CounterId::of("cow_fault_count");
const RESIDENT_MAX: CounterId = CounterId::of("resident_bytes_max");
const HUGE_MAX: CounterId = CounterId::of("huge_page_bytes_max");
const LOCKED_MAX: CounterId = CounterId::of("locked_bytes_max");
const TLB_MISSES: CounterId = CounterId::of("tlb_miss_count");

/// The decisions that differ between kernels of this kind.
pub trait Flavor {
    /// Chooses a region's address in `space` and its page size.
    fn place(&mut self, space: SpaceId, id: RegionId, region: &Region) -> Placed;

    /// Returns a region's page size after advice, or None if the advice does not change it.
    fn advised(&self, advice: Advice) -> Option<PageSize>;

    /// Reacts to a page that was mapped in `space`, or to its fork. Unmapping does not call this: the next
    /// page that is mapped corrects the hardware's programming, and a steady state starts at a mapping.
    fn pages_changed(
        &mut self,
        hw: &mut CachedMmu,
        cx: &mut Cx<'_>,
        memory: &AnonMemory,
        space: SpaceId,
    );

    /// Notes that a process ends now. Its memory is still mapped.
    fn ending(&mut self, hw: &CachedMmu, cx: &Cx<'_>, memory: &AnonMemory, space: SpaceId);

    /// Learns the plan, once, before its run.
    fn prepare(&mut self, _plan: &Plan) {}

    /// Returns a demand of `region` that this kernel cannot meet, or None.
    fn limit(&self, region: &Region) -> Option<Unmet>;

    /// Returns the tables, memory rows and warnings at the end of the run.
    fn kernel_report(&self, hw: &CachedMmu, memory: &AnonMemory) -> KernelReport;
}

/// The address, length and page size of a region in a space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placed {
    /// Virtual address of the region's first byte.
    pub base: u64,
    /// Length in bytes, a multiple of the base page; large pages may reach beyond the region's own
    /// length.
    pub bytes: u64,
    /// The wanted page size; a page gets a smaller one if memory is short.
    pub page: PageSize,
}

/// A resident page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResidentPage {
    /// The size of the page that a fault maps.
    pub size: PageSize,
    frame: FrameNumber,
}

/// The areas and resident pages of one space.
#[derive(Debug, Clone, Default)]
pub struct AddressSpace {
    /// Mapped regions by virtual address.
    pub areas: BTreeMap<u64, AnonArea>,
    /// Resident pages by virtual address.
    pub pages: BTreeMap<u64, ResidentPage>,
    /// The number of resident pages of each size.
    pub page_counts: BTreeMap<PageSize, u64>,
}

impl AddressSpace {
    fn insert(&mut self, start: u64, page: ResidentPage) {
        self.pages.insert(start, page);
        *self.page_counts.entry(page.size).or_default() += 1;
    }

    fn remove(&mut self, start: u64) -> Option<ResidentPage> {
        let page = self.pages.remove(&start)?;
        *self.page_counts.entry(page.size).or_default() -= 1;
        Some(page)
    }
}

/// A mapped region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AnonArea {
    /// The region's id in the plan.
    pub id: RegionId,
    /// Address, length and wanted page size.
    pub placed: Placed,
    /// Locked bytes, counted from the area's start.
    pub locked_bytes: u64,
}

impl AnonArea {
    fn end(&self) -> u64 {
        self.placed.base + self.placed.bytes
    }
}

/// Costs in picoseconds, from tables `[fault]` and `[process]`.
#[derive(Debug, Clone)]
struct AnonCosts {
    fault_ps: u64,
    zero_ps_per_kib: u64,
    copy_ps_per_kib: u64,
    relocate_ps: u64,
    fork_ps: u64,
    exec_ps: u64,
    exit_ps: u64,
    switch_ps: u64,
}

impl AnonCosts {
    fn load(model: &Model) -> Result<Self, ModelError> {
        let ps = |key| model.ps("fault", key);
        Ok(AnonCosts {
            fault_ps: ps("time")?,
            zero_ps_per_kib: ps("zero_kib")?,
            copy_ps_per_kib: ps("copy_kib")?,
            relocate_ps: ps("relocate")?,
            fork_ps: model.ps("process", "fork")?,
            exec_ps: model.ps("process", "exec")?,
            exit_ps: model.ps("process", "exit")?,
            switch_ps: model.ps("process", "switch")?,
        })
    }
}

/// Physical memory and the spaces that map it.
#[derive(Debug, Clone)]
pub struct AnonMemory {
    base: PageSize,
    /// Page sizes, smallest first.
    sizes: Vec<PageSize>,
    buddy: Buddy,
    /// Blocks that more than one space maps, with the number of their mappings.
    shared: BTreeMap<FrameNumber, u32>,
    spaces: Vec<AddressSpace>,
    /// The number of pages moved to make room for larger ones.
    pub relocated_pages: u64,
    /// The number of faults that got a smaller page than they asked for.
    pub fallback_count: u64,
}

/// The owner of blocks that belong to no space of the job.
pub const OTHERS: u64 = 0xffff << 48;

/// Packs a space (16 bits) and an address in it (48 bits) into one word.
fn owner(space: SpaceId, address: u64) -> u64 {
    ((space.0 as u64) << 48) | address
}

fn owner_parts(owner: u64) -> (SpaceId, u64) {
    (SpaceId((owner >> 48) as usize), owner & ((1 << 48) - 1))
}

impl AnonMemory {
    /// Returns `bytes` of free memory with pages of `sizes`, smallest first.
    pub fn new(bytes: Bytes, sizes: &[PageSize]) -> Self {
        let (base, largest) = (sizes[0], sizes[sizes.len() - 1]);
        let buddy = Buddy::new(bytes.0 >> base.shift(), largest.shift() - base.shift());
        AnonMemory {
            base,
            sizes: sizes.to_vec(),
            buddy,
            shared: BTreeMap::new(),
            spaces: Vec::new(),
            relocated_pages: 0,
            fallback_count: 0,
        }
    }

    /// Returns the frame allocator, so that callers can reserve memory for other owners.
    pub fn buddy(&mut self) -> &mut Buddy {
        &mut self.buddy
    }

    /// Returns one space's memory, empty if the space has none.
    pub fn space(&self, space: SpaceId) -> &AddressSpace {
        static EMPTY: AddressSpace = AddressSpace {
            areas: BTreeMap::new(),
            pages: BTreeMap::new(),
            page_counts: BTreeMap::new(),
        };
        self.spaces.get(space.0).unwrap_or(&EMPTY)
    }

    fn space_mut(&mut self, space: SpaceId) -> &mut AddressSpace {
        if self.spaces.len() <= space.0 {
            self.spaces.resize_with(space.0 + 1, AddressSpace::default);
        }
        &mut self.spaces[space.0]
    }

    /// Returns the bytes that all spaces have mapped on pages of at least `size`.
    fn mapped_bytes(&self, size: PageSize) -> u64 {
        let counts = self.spaces.iter().flat_map(|space| space.page_counts.range(size..));
        counts.map(|(size, count)| size.bytes() * count).sum()
    }

    fn area(&self, space: SpaceId, address: u64) -> Option<AnonArea> {
        let area = self.space(space).areas.range(..=address).next_back()?.1;
        (address < area.end()).then_some(*area)
    }

    fn page(&self, space: SpaceId, address: u64) -> Option<(u64, ResidentPage)> {
        let (start, page) = self.space(space).pages.range(..=address).next_back()?;
        (address < start + page.size.bytes()).then_some((*start, *page))
    }

    /// Returns the sizes that a page at `address` may have, largest first. If a page of the wanted
    /// size would reach outside the area, only base pages fit. The head of the heap in McDougall,
    /// 'Taming Your Emu' (Sun BluePrints, 2004) shows this. Intermediate sizes are fallbacks for
    /// when memory is short.
    fn possible_sizes(&self, space: SpaceId, area: &AnonArea, address: u64) -> Vec<PageSize> {
        let extent = |size: PageSize| {
            let start = address & !(size.bytes() - 1);
            start..start + size.bytes()
        };
        let wanted = extent(area.placed.page);
        let inside = wanted.start >= area.placed.base && wanted.end <= area.end();
        let free = |size: PageSize| self.space(space).pages.range(extent(size)).next().is_none();
        let fits = |size: &PageSize| {
            *size == self.base || (inside && *size <= area.placed.page && free(*size))
        };
        self.sizes.iter().rev().copied().filter(fits).collect()
    }

    fn drop_block(&mut self, frame: FrameNumber) {
        match self.shared.get_mut(&frame) {
            Some(count) if *count > 2 => *count -= 1,
            Some(_) => drop(self.shared.remove(&frame)),
            None => self.buddy.free(frame),
        }
    }
}

/// The demand-paging kernel; `F` makes the decisions that differ between kernels.
#[derive(Clone)]
pub struct AnonKernel<F> {
    memory: AnonMemory,
    costs: AnonCosts,
    flavor: F,
    memory_bytes: Bytes,
}

impl<F: Flavor> AnonKernel<F> {
    /// Reads `[fault]` and `[process]`. `memory` already holds the blocks of other owners.
    ///
    /// # Errors
    /// Returns an error if a constant is absent or out of range.
    pub fn new(model: &Model, memory: AnonMemory, flavor: F) -> Result<Self, ModelError> {
        let memory_bytes = Bytes(memory.buddy.frames() << memory.base.shift());
        Ok(AnonKernel { memory, costs: AnonCosts::load(model)?, flavor, memory_bytes })
    }

    /// Allocates a block for a page of the first of `sizes` that memory can provide. Fails the run
    /// if there is no block of any size.
    fn block(
        &mut self,
        hw: &mut CachedMmu,
        cx: &mut Cx<'_>,
        sizes: &[PageSize],
        space: SpaceId,
        address: u64,
    ) -> Option<(u64, ResidentPage)> {
        for (nth, size) in sizes.iter().enumerate() {
            let start = address & !(size.bytes() - 1);
            let order = size.shift() - self.memory.base.shift();
            let owner = Owner::Movable(owner(space, start));
            let mut frame = self.memory.buddy.allocate(order, owner);
            if frame.is_none() && order > 0 && self.relocate(hw, cx, order) {
                frame = self.memory.buddy.allocate(order, owner);
            }
            if let Some(frame) = frame {
                self.memory.fallback_count += u64::from(nth > 0);
                return Some((start, ResidentPage { size: *size, frame }));
            }
        }
        cx.fail(
            "out of memory: this model has no swap",
            format!("use less than {} of memory", self.memory_bytes),
        );
        None
    }

    /// Frees a large block by moving small pages. Returns true if it did.
    fn relocate(&mut self, hw: &mut CachedMmu, cx: &mut Cx<'_>, order: u32) -> bool {
        // With fewer free frames than the block needs, no move can make room.
        if self.memory.buddy.free_frames() >> order == 0 {
            return false;
        }
        let Some(moves) = self.memory.buddy.relocate(order) else { return false };
        for m in &moves {
            let (space, address) = owner_parts(m.owner);
            self.memory.relocated_pages += 1;
            let bytes = self.memory.base.bytes() << m.order;
            cx.charge(CpuRow::Compaction, self.costs.relocate_ps / 1000 + self.copy_ns(bytes));
            // A block without a space here belongs to another process: its move only costs time.
            let owner = self.memory.spaces.get_mut(space.0);
            if let Some(page) = owner.and_then(|space| space.pages.get_mut(&address)) {
                page.frame = m.to;
                hw.flush(space, address, bytes);
            }
        }
        true
    }

    fn copy_ns(&self, bytes: u64) -> u64 {
        self.costs.copy_ps_per_kib * (bytes >> 10) / 1000
    }

    fn map_page(
        &mut self,
        hw: &mut CachedMmu,
        cx: &mut Cx<'_>,
        space: SpaceId,
        start: u64,
        page: ResidentPage,
    ) {
        self.memory.space_mut(space).insert(start, page);
        hw.load(space, Pte { address: start, size: page.size, writable: true });
        let (base, next) = (self.memory.base, self.memory.sizes.get(1));
        cx.at_least(RESIDENT_MAX, self.memory.mapped_bytes(base));
        cx.at_least(HUGE_MAX, next.map_or(0, |size| self.memory.mapped_bytes(*size)));
        self.flavor.pages_changed(hw, cx, &self.memory, space);
    }

    /// Serves a fault on a page that is not resident: allocates, zeroes and maps it.
    fn fill(&mut self, hw: &mut CachedMmu, cx: &mut Cx<'_>, space: SpaceId, address: u64) {
        let Some(area) = self.memory.area(space, address) else {
            cx.fail(format!("no memory at {address:#x}"), "map the region before touching it");
            return;
        };
        let sizes = self.memory.possible_sizes(space, &area, address);
        let Some((start, page)) = self.block(hw, cx, &sizes, space, address) else { return };
        cx.count(MINOR_FAULTS, 1);
        cx.charge(CpuRow::MinorFault, self.costs.fault_ps / 1000);
        let zero_ns = self.costs.zero_ps_per_kib * (page.size.bytes() >> 10) / 1000;
        cx.charge(CpuRow::ZeroCopy, zero_ns);
        cx.latency("minor_fault", self.costs.fault_ps / 1000 + zero_ns, 1);
        self.map_page(hw, cx, space, start, page);
    }

    /// Serves a store to a resident read-only page: copies the page if other spaces still share it.
    fn unshare(
        &mut self,
        hw: &mut CachedMmu,
        cx: &mut Cx<'_>,
        space: SpaceId,
        start: u64,
        page: ResidentPage,
    ) {
        cx.count(MINOR_FAULTS, 1);
        cx.charge(CpuRow::MinorFault, self.costs.fault_ps / 1000);
        if !self.memory.shared.contains_key(&page.frame) {
            // No other space shares the page any more, so this space owns it again.
            self.memory.buddy.set_owner(page.frame, Owner::Movable(owner(space, start)));
            hw.load(space, Pte { address: start, size: page.size, writable: true });
            return;
        }
        cx.count(COW_FAULTS, 1);
        let Some((_, own)) = self.block(hw, cx, &[page.size], space, start) else { return };
        cx.charge(CpuRow::ZeroCopy, self.copy_ns(page.size.bytes()));
        self.memory.space_mut(space).remove(start);
        self.memory.drop_block(page.frame);
        hw.unload(space, start, page.size.bytes());
        self.map_page(hw, cx, space, start, own);
    }

    fn unmap_range(&mut self, hw: &mut CachedMmu, space: SpaceId, range: std::ops::Range<u64>) {
        let pages = &self.memory.space(space).pages;
        let gone: Vec<_> = pages.range(range.clone()).map(|(address, _)| *address).collect();
        for address in gone {
            if let Some(page) = self.memory.space_mut(space).remove(address) {
                self.memory.drop_block(page.frame);
            }
        }
        hw.unload(space, range.start, range.end - range.start);
    }

    fn area_of(&mut self, space: SpaceId, id: RegionId) -> Option<&mut AnonArea> {
        self.memory.space_mut(space).areas.values_mut().find(|area| area.id == id)
    }

    /// Faults in all pages of a range that are not resident.
    fn populate(
        &mut self,
        hw: &mut CachedMmu,
        cx: &mut Cx<'_>,
        space: SpaceId,
        range: std::ops::Range<u64>,
    ) {
        let mut address = range.start;
        while address < range.end && cx.failure.is_none() {
            if self.memory.page(space, address).is_none() {
                self.fill(hw, cx, space, address);
            }
            let step = self.memory.page(space, address).map(|(start, p)| start + p.size.bytes());
            address = step.unwrap_or(range.end);
        }
    }
}

/// The advice that this kernel acts on.
const KNOWN_ADVICE: [Advice; 6] = [
    Advice::Dontneed,
    Advice::Free,
    Advice::Hugepage,
    Advice::Nohugepage,
    Advice::PopulateRead,
    Advice::PopulateWrite,
];

impl<F: Flavor> Kernel<CachedMmu> for AnonKernel<F> {
    fn prepare(&mut self, plan: &Plan) {
        self.flavor.prepare(plan);
    }

    fn unmet_requirements(&self, plan: &Plan) -> Vec<Unmet> {
        let other =
            |region: &&Region| !region.backing.is_anonymous() && !region.backing.is_remote();
        let refuse = |region: &Region| {
            let name = &region.name;
            fatal(
                format!("region `{name}`: this model has private anonymous memory only"),
                "use backing = \"anon\", or another machine",
            )
        };
        let mut unmet: Vec<_> = plan.regions.iter().filter(other).map(refuse).collect();
        unmet.extend(without_servers(plan));
        unmet.extend(plan.regions.iter().filter_map(|region| self.flavor.limit(region)));
        unmet.extend(too_much_mapped(plan, self.memory_bytes, "the machine has, without swap,"));
        unmet.extend(other_page_sizes(plan, &self.memory.sizes));
        unmet.extend(ignored_advice(plan, &KNOWN_ADVICE));
        unmet
    }

    /// Returns the fixed cost of a fault, because the source has no figure for a system call.
    fn call_ns(&self) -> u64 {
        (self.costs.fault_ps / 1000).max(1)
    }

    fn page_sizes(&self, _base: PageSize) -> Vec<PageSize> {
        self.memory.sizes.clone()
    }

    fn counters(&self) -> &'static [CounterId] {
        &[TLB_MISSES, MINOR_FAULTS, COW_FAULTS, RESIDENT_MAX, HUGE_MAX, LOCKED_MAX]
    }

    fn begin(&mut self, _hw: &mut CachedMmu, cx: &mut Cx<'_>, space: SpaceId) -> Step {
        if space == SpaceId(0) {
            cx.charge(CpuRow::OtherKernel, self.costs.exec_ps / 1000);
        }
        Step::Finished
    }

    fn map(
        &mut self,
        _hw: &mut CachedMmu,
        _cx: &mut Cx<'_>,
        space: SpaceId,
        id: RegionId,
        region: &Region,
    ) -> u64 {
        let placed = self.flavor.place(space, id, region);
        let area = AnonArea { id, placed, locked_bytes: 0 };
        self.memory.space_mut(space).areas.insert(placed.base, area);
        placed.base
    }

    fn unmap(&mut self, hw: &mut CachedMmu, _cx: &mut Cx<'_>, space: SpaceId, id: RegionId) {
        if let Some(area) = self.area_of(space, id).copied() {
            self.unmap_range(hw, space, area.placed.base..area.end());
            self.memory.space_mut(space).areas.remove(&area.placed.base);
        }
    }

    fn lock(
        &mut self,
        hw: &mut CachedMmu,
        cx: &mut Cx<'_>,
        space: SpaceId,
        id: RegionId,
        offset: u64,
        bytes: u64,
    ) -> u64 {
        let Some(area) = self.area_of(space, id) else { return bytes };
        area.locked_bytes = area.locked_bytes.max(offset + bytes);
        let base = area.placed.base;
        self.populate(hw, cx, space, base + offset..base + offset + bytes);
        let areas = self.memory.spaces.iter().flat_map(|space| space.areas.values());
        cx.at_least(LOCKED_MAX, areas.map(|area| area.locked_bytes).sum());
        bytes
    }

    fn unlock(&mut self, _hw: &mut CachedMmu, _cx: &mut Cx<'_>, space: SpaceId, id: RegionId) {
        if let Some(area) = self.area_of(space, id) {
            area.locked_bytes = 0;
        }
    }

    fn advise(
        &mut self,
        hw: &mut CachedMmu,
        cx: &mut Cx<'_>,
        space: SpaceId,
        id: RegionId,
        advice: Advice,
    ) {
        let wanted = self.flavor.advised(advice);
        let Some(area) = self.area_of(space, id) else { return };
        area.placed.page = wanted.unwrap_or(area.placed.page);
        let range = area.placed.base..area.end();
        match advice {
            Advice::Dontneed | Advice::Free => self.unmap_range(hw, space, range),
            Advice::PopulateRead | Advice::PopulateWrite => self.populate(hw, cx, space, range),
            _ => {}
        }
    }

    fn fault(
        &mut self,
        hw: &mut CachedMmu,
        cx: &mut Cx<'_>,
        space: SpaceId,
        accesses: &mut Accesses,
    ) {
        let address = accesses.next_address();
        match self.memory.page(space, address) {
            Some((start, page)) => self.unshare(hw, cx, space, start, page),
            None => self.fill(hw, cx, space, address),
        }
    }

    fn fork(&mut self, hw: &mut CachedMmu, cx: &mut Cx<'_>, parent: SpaceId, child: SpaceId) {
        cx.charge(CpuRow::OtherKernel, self.costs.fork_ps / 1000);
        let mut copy = self.memory.space(parent).clone();
        copy.areas.values_mut().for_each(|area| area.locked_bytes = 0);
        for (start, page) in &copy.pages {
            *self.memory.shared.entry(page.frame).or_insert(1) += 1;
            self.memory.buddy.set_owner(page.frame, Owner::Pinned);
            hw.load(child, Pte { address: *start, size: page.size, writable: false });
        }
        for area in copy.areas.values() {
            hw.protect(parent, area.placed.base, area.placed.bytes);
        }
        *self.memory.space_mut(child) = copy;
        self.flavor.pages_changed(hw, cx, &self.memory, child);
    }

    fn exit(&mut self, hw: &mut CachedMmu, cx: &mut Cx<'_>, space: SpaceId) -> Step {
        self.flavor.ending(hw, cx, &self.memory, space);
        cx.charge(CpuRow::OtherKernel, self.costs.exit_ps / 1000);
        for area in std::mem::take(&mut self.memory.space_mut(space).areas).into_values() {
            self.unmap_range(hw, space, area.placed.base..area.end());
        }
        Step::Finished
    }

    fn switch(&mut self, _hw: &mut CachedMmu, cx: &mut Cx<'_>, _space: Option<SpaceId>) {
        cx.charge(CpuRow::OtherKernel, self.costs.switch_ps / 1000);
    }

    fn kernel_report(&self, hw: &CachedMmu, tally: &Tally) -> KernelReport {
        let mut kernel_report = self.flavor.kernel_report(hw, &self.memory);
        for (id, counter, how) in [
            ("resident", RESIDENT_MAX, "pages mapped, at most at once"),
            ("huge", HUGE_MAX, "of them, on pages larger than the base page"),
        ] {
            kernel_report.memory.push((id, Reading::Modeled(tally.get(counter)), how.into()));
        }
        kernel_report
    }
}
