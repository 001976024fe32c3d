//! SunOS 4.0.3 and 4.1 on a Sun-4: pages that are in memory, and yet fault.
//!
//! A page needs a valid entry in a pmeg. Pmegs are few; one is stolen when none is free, and all of its
//! entries go, so that each page faults again by itself. A process needs, beside its data, the page of
//! text that it runs and the page of its stack; when it steals one of those from itself, it wants it
//! back at once. Sources: report 000; what is inferred is marked "fitted" in the models.
//!
//! Invariant: an access and its fault are one: a fault that needs no waiting is served together with
//! its access, in time as well as in the order of accesses.

pub mod bits;
pub mod config;
pub mod hat;
mod preflight;
mod report;
mod run;
pub mod steal;
#[cfg(test)]
mod tests;
pub mod vm;

use super::{Epilogue, Kernel, Step};
use crate::accesses::Accesses;
use crate::cx::{CpuRow, Cx, Wait, WallRow};
use crate::mmu::sun4::{PmegId, Sun4};
use crate::mmu::{Mmu, SpaceId, Stop};
use crate::tally::{CounterId, Tally};
use config::{Config, Swapper};
use hat::Hat;
use pagetax_core::machine::Unmet;
use pagetax_core::plan::{Advice, Plan, Region, RegionId};
use pagetax_core::units::Bytes;
use run::{Run, Served};
use vm::{Provision, Vm};

const TRANSLATION_FAULTS: CounterId = CounterId::of("translation_fault_count");
const MINOR_FAULTS: CounterId = CounterId::of("minor_fault_count");
const MAJOR_FAULTS: CounterId = CounterId::of("major_fault_count");
const COW_FAULTS: CounterId = CounterId::of("cow_fault_count");
const PAGE_INS: CounterId = CounterId::of("page_in_count");
const SWAP_INS: CounterId = CounterId::of("swap_in_count");
const SWAP_OUTS: CounterId = CounterId::of("swap_out_count");
const RESIDENT_MAX: CounterId = CounterId::of("resident_bytes_max");

const COUNTERS: &[CounterId] = &[
    hat::CONTEXT_LOADS,
    COW_FAULTS,
    MAJOR_FAULTS,
    MINOR_FAULTS,
    PAGE_INS,
    hat::ALLOCATIONS,
    hat::RELOADS,
    hat::STEALS,
    RESIDENT_MAX,
    SWAP_INS,
    SWAP_OUTS,
    TRANSLATION_FAULTS,
];

const SECOND_NS: u64 = 1_000_000_000;
/// A process whose pmegs steal each other gives up after this many rounds and faults again later.
const ANCHOR_ROUNDS: usize = 4;
/// Runs of faults served in one call at most: the engine's cap on steps is to end endless jams.
const RUNS_A_CALL: usize = 256;

/// A process.
#[derive(Debug, Clone)]
struct Process {
    parent: Option<SpaceId>,
    children: u32,
    /// Faults of its start that are still to come; none once it has begun.
    start_faults: Option<u64>,
    alive: bool,
    swapped_out: bool,
}

/// The kernel.
#[derive(Debug, Clone)]
pub struct SunOs {
    config: Config,
    memory: Bytes,
    hat: Hat,
    vm: Vm,
    processes: Vec<Process>,
    running: Option<SpaceId>,
}

impl SunOs {
    /// Just started, on this hardware, with this much memory for users.
    pub fn new(config: Config, memory: Bytes, mmu: &mut Sun4) -> Self {
        mmu.note_use(config.hat.steal.asks_for_use);
        let hat = Hat::new(config.hat, config.costs, mmu);
        let (vm, processes, running) = (Vm::default(), Vec::new(), None);
        SunOs { config, memory, hat, vm, processes, running }
    }

    fn add_process(&mut self, space: SpaceId, parent: Option<SpaceId>) {
        let image = &self.config.image;
        let start_faults = if parent.is_some() { image.child_faults } else { image.exec_faults };
        let process = Process {
            parent,
            children: 0,
            start_faults: Some(start_faults),
            alive: true,
            swapped_out: false,
        };
        assert_eq!(space.0, self.processes.len(), "spaces are numbered in the order of creation");
        self.processes.push(process);
        self.hat.add_space(space);
        self.vm.add_space(space);
    }

    /// Segment and entry of the page of text that a process runs, and of the page of its stack.
    fn anchors(mmu: &Sun4) -> [(usize, u32); 2] {
        let geometry = mmu.geometry();
        [(0, 0), (geometry.segments - 1, geometry.ptes - 1)]
    }

    /// Loads the entry of a page that the process needs beside its regions, with a fault if need be.
    fn load_own(&mut self, hw: &mut Sun4, cx: &mut Cx<'_>, space: SpaceId, at: (usize, u32)) {
        let (segment, entry) = at;
        if hw.is_valid(space, segment, entry) && hw.has_region(space, segment) {
            return;
        }
        let pmeg = self.pmeg(hw, cx, space, segment);
        if hw.pmegs()[pmeg].valid >> entry & 1 == 0 {
            hw.load(pmeg, 1 << entry, 0);
            self.charge_faults(cx, 1);
        }
    }

    /// The segment's pmeg, from the family if that shares.
    fn pmeg(&mut self, hw: &mut Sun4, cx: &mut Cx<'_>, space: SpaceId, segment: usize) -> PmegId {
        if hw.pmeg_of(space, segment).is_none()
            && let Some(parent) = self.processes[space.0].parent
            && self.may_share(hw, space, segment)
        {
            let pmeg = self.hat.pmeg(hw, cx, parent, segment);
            self.hat.share(hw, parent, space, segment);
            return pmeg;
        }
        self.hat.pmeg(hw, cx, space, segment)
    }

    /// Whether parent and child see the same pages in this segment: neither the stack, nor the
    /// segment of the data that each writes for itself.
    fn may_share(&self, hw: &Sun4, space: SpaceId, segment: usize) -> bool {
        let ptes = i64::from(hw.geometry().ptes);
        let (stack, data) = (hw.geometry().segments - 1, 0);
        let first = |base: u64| segment as i64 * ptes - (base >> hw.geometry().page.shift()) as i64;
        self.config.hat.share
            && segment != stack
            && segment != data
            && self.vm.regions(space).all(|(id, base)| self.vm.is_common(space, id, first(base)))
    }

    fn charge_faults(&mut self, cx: &mut Cx<'_>, count: u64) {
        let costs = &self.config.costs;
        cx.count(TRANSLATION_FAULTS, count);
        cx.count(MINOR_FAULTS, count);
        cx.charge(CpuRow::MinorFault, count * costs.fault_ns);
        cx.charge(CpuRow::Translation, count * costs.fault_user_ns);
        cx.latency("minor_fault", costs.fault_ns + costs.fault_user_ns, count);
    }

    /// What a process needs whenever it has the CPU: its text and its stack. Whether nothing had to be
    /// loaded.
    #[inline]
    fn load_anchors(&mut self, hw: &mut Sun4, cx: &mut Cx<'_>, space: SpaceId) -> bool {
        let anchors = Self::anchors(hw);
        let is_loaded =
            |(segment, entry)| hw.is_valid(space, segment, entry) && hw.has_region(space, segment);
        let all = anchors.into_iter().all(is_loaded);
        if !all {
            self.fight_for(hw, cx, space, anchors);
        }
        all
    }

    /// Each may take its pmeg from the other.
    fn fight_for(
        &mut self,
        hw: &mut Sun4,
        cx: &mut Cx<'_>,
        space: SpaceId,
        anchors: [(usize, u32); 2],
    ) {
        for _ in 0..ANCHOR_ROUNDS {
            for at in anchors {
                self.load_own(hw, cx, space, at);
            }
            let stolen = |(segment, entry)| !hw.is_valid(space, segment, entry);
            if !anchors.into_iter().any(stolen) {
                return;
            }
        }
    }

    /// The library that a process sleeps in while it waits for children.
    fn load_libc(&mut self, hw: &mut Sun4, cx: &mut Cx<'_>, space: SpaceId) {
        let stack = hw.geometry().segments - 1;
        for segment in stack - self.config.image.libc_segments..stack {
            self.load_own(hw, cx, space, (segment, 0));
        }
    }

    /// Makes a page present; false if the process has to wait for it.
    fn provide(
        &mut self,
        cx: &mut Cx<'_>,
        space: SpaceId,
        id: RegionId,
        page: u64,
        writes: bool,
        page_bytes: u64,
    ) -> bool {
        let cluster = self.config.disk_cluster_pages;
        let provision = self.vm.provide(space, id, page, writes, cluster);
        match provision {
            Provision::Present => return true,
            Provision::Zeroed => cx.charge(CpuRow::ZeroCopy, self.config.costs.zero_ns),
            Provision::Copied => {
                cx.count(COW_FAULTS, 1);
                cx.charge(CpuRow::ZeroCopy, self.config.costs.copy_ns);
            }
            Provision::Read(pages) => {
                cx.charge(CpuRow::Swap, self.config.costs.fault_ns);
                cx.count(MAJOR_FAULTS, 1);
                cx.count(PAGE_INS, pages);
                let wait_ns = self.config.disk_access_ns + pages * self.config.disk_page_ns;
                cx.wait(Wait::Until(cx.now() + wait_ns), WallRow::PageIn);
                cx.latency("major_fault", self.config.costs.fault_ns + wait_ns, 1);
            }
        }
        let resident_bytes = self.vm.frames() * page_bytes;
        cx.at_least(RESIDENT_MAX, resident_bytes);
        if resident_bytes > self.memory.0 {
            let why = format!("the job needs more than the {} of memory for users", self.memory);
            cx.fail(why, "make the job smaller; this model does not page out");
        }
        !matches!(provision, Provision::Read(_))
    }

    /// Serves the fault of the next access and of those after it that fault in the same pmeg on pages
    /// that are in memory, each with its access. False if the process has to wait for the page, or if it
    /// must be `present_already` and is not.
    fn serve_run(
        &mut self,
        hw: &mut Sun4,
        cx: &mut Cx<'_>,
        at: (SpaceId, RegionId),
        accesses: &mut Accesses,
        present_already: bool,
    ) -> bool {
        let ((space, id), geometry) = (at, *hw.geometry());
        let (segment, entry) = geometry.locate(accesses.next_address());
        let base_page = (accesses.base() >> geometry.page.shift()) as i64;
        let first = segment as i64 * i64::from(geometry.ptes) - base_page;
        let mut present = self.vm.present(space, id, first);
        if present.to(accesses.writes) >> entry & 1 == 0 {
            let (page, page_bytes) = ((first + i64::from(entry)) as u64, geometry.page.bytes());
            if present_already || !self.provide(cx, space, id, page, accesses.writes, page_bytes) {
                return false;
            }
            present = self.vm.present(space, id, first);
        }
        let fresh = hw.pmeg_of(space, segment).is_none();
        let pmeg = self.pmeg(hw, cx, space, segment);
        let held = &hw.pmegs()[pmeg];
        let usable = if accesses.writes { held.valid & held.writable } else { held.valid };
        if usable >> entry & 1 != 0 {
            // A software cache brought it back.
            accesses.advance(1);
            cx.touched(accesses.cost_ps);
            self.load_anchors(hw, cx, space);
            return true;
        }
        let faulting = present.to(accesses.writes) & !usable;
        let mut run = Run::of(accesses, &geometry, faulting, entry);
        if fresh {
            // A pmeg that had to be found may have been one that the process needs: that comes first.
            self.serve(hw, cx, pmeg, accesses, run.take(1), present.write);
            let undisturbed = self.load_anchors(hw, cx, space);
            if !undisturbed || run.faults == 0 || !cx.may_go_on() {
                return true;
            }
        }
        let costs = &self.config.costs;
        let touch_ns = run.touches_each * accesses.cost_ps / 1000;
        let affordable = cx.affordable(costs.fault_ns + costs.fault_user_ns + touch_ns);
        let served = run.take(run.faults.min(affordable));
        self.serve(hw, cx, pmeg, accesses, served, present.write);
        self.load_anchors(hw, cx, space);
        true
    }

    fn serve(
        &mut self,
        hw: &mut Sun4,
        cx: &mut Cx<'_>,
        pmeg: PmegId,
        accesses: &mut Accesses,
        served: Served,
        writable: u64,
    ) {
        hw.load(pmeg, served.entries, served.entries & writable);
        self.charge_faults(cx, served.faults);
        accesses.advance(served.touches);
        cx.touched(served.touches * accesses.cost_ps);
    }

    /// Touches on, if there is time; whether it came to another fault.
    fn touch_on(
        &self,
        hw: &mut Sun4,
        cx: &mut Cx<'_>,
        space: SpaceId,
        accesses: &mut Accesses,
    ) -> bool {
        if !cx.may_go_on() || accesses.left() == 0 {
            return false;
        }
        if hw.faults(space, accesses.next_address(), accesses.writes) {
            return true;
        }
        let before = accesses.remaining();
        let touched = hw.touch(cx.cpu(), space, accesses, cx.left_ns().saturating_mul(1000));
        cx.touched((before - accesses.remaining()) * accesses.cost_ps);
        touched.stop == Stop::Fault
    }
}

impl Kernel<Sun4> for SunOs {
    fn check(&self, plan: &Plan) -> Vec<Unmet> {
        preflight::check(plan, self.memory)
    }

    fn counters(&self) -> &'static [CounterId] {
        COUNTERS
    }

    fn begin(&mut self, hw: &mut Sun4, cx: &mut Cx<'_>, space: SpaceId) -> Step {
        let costs = self.config.costs;
        let process = &mut self.processes[space.0];
        let main = process.parent.is_none();
        let Some(left) = process.start_faults.take() else { return Step::Finished };
        if main && left == self.config.image.exec_faults {
            cx.charge(CpuRow::OtherKernel, costs.exec_ns);
        }
        self.load_libc(hw, cx, space);
        self.load_anchors(hw, cx, space);
        let count = left.min(cx.affordable(costs.fault_ns + costs.fault_user_ns));
        self.charge_faults(cx, count);
        self.processes[space.0].start_faults = (left > count).then_some(left - count);
        if left > count { Step::Again } else { Step::Finished }
    }

    fn map(
        &mut self,
        hw: &mut Sun4,
        cx: &mut Cx<'_>,
        space: SpaceId,
        id: RegionId,
        region: &Region,
    ) -> u64 {
        cx.charge(CpuRow::OtherKernel, self.config.costs.syscall_ns);
        let geometry = hw.geometry();
        let page_bytes = geometry.page.bytes();
        let pages = region.bytes.div_ceil(page_bytes);
        let private = matches!(region.backing, pagetax_core::plan::Backing::Anon);
        let align = if private { page_bytes } else { geometry.segment_bytes() };
        let start = self.config.image.text_data_pages * page_bytes;
        // The lower half of the space; the upper is for libraries, stacks and the kernel.
        let end = geometry.segments as u64 / 2 * geometry.segment_bytes();
        let place = self.vm.place(space, pages * page_bytes, align, start, end, page_bytes);
        let Some(base) = place else {
            let why = format!("`{}` does not fit the address space", region.name);
            cx.fail(why, format!("map less than {} at one time", Bytes(end)));
            return start;
        };
        self.vm.map(space, id, region, base, pages);
        base
    }

    fn unmap(&mut self, hw: &mut Sun4, cx: &mut Cx<'_>, space: SpaceId, id: RegionId) {
        cx.charge(CpuRow::OtherKernel, self.config.costs.syscall_ns);
        self.invalidate(hw, space, id);
        self.vm.unmap(space, id);
    }

    fn lock(
        &mut self,
        hw: &mut Sun4,
        cx: &mut Cx<'_>,
        space: SpaceId,
        id: RegionId,
        offset: u64,
        bytes: u64,
    ) -> u64 {
        let page_bytes = hw.geometry().page.bytes();
        let (first, end) = (offset / page_bytes, (offset + bytes).div_ceil(page_bytes));
        cx.charge(CpuRow::OtherKernel, self.config.costs.syscall_ns);
        for page in first..end {
            if !self.provide(cx, space, id, page, false, page_bytes) {
                return (page * page_bytes).saturating_sub(offset);
            }
            cx.charge(CpuRow::MinorFault, self.config.costs.fault_ns);
            cx.count(MINOR_FAULTS, 1);
        }
        bytes
    }

    fn unlock(&mut self, _hw: &mut Sun4, cx: &mut Cx<'_>, _space: SpaceId, _id: RegionId) {
        cx.charge(CpuRow::OtherKernel, self.config.costs.syscall_ns);
    }

    fn advise(
        &mut self,
        hw: &mut Sun4,
        cx: &mut Cx<'_>,
        space: SpaceId,
        id: RegionId,
        advice: Advice,
    ) {
        cx.charge(CpuRow::OtherKernel, self.config.costs.syscall_ns);
        if advice == Advice::Dontneed {
            self.invalidate(hw, space, id);
            self.vm.drop_private(space, id);
        }
    }

    fn fault(&mut self, hw: &mut Sun4, cx: &mut Cx<'_>, space: SpaceId, accesses: &mut Accesses) {
        let Some(id) = self.vm.region_at(space, accesses.base()) else {
            cx.fail("the region is not mapped", "map it before it is touched");
            return;
        };
        for nth in 0..RUNS_A_CALL {
            if !self.serve_run(hw, cx, (space, id), accesses, nth > 0)
                || !self.touch_on(hw, cx, space, accesses)
            {
                return;
            }
        }
    }

    fn fork(&mut self, hw: &mut Sun4, cx: &mut Cx<'_>, parent: SpaceId, child: SpaceId) {
        let costs = &self.config.costs;
        let fork_ns = cx.jitter(costs.fork_ns, costs.fork_jitter_percent);
        cx.charge(CpuRow::OtherKernel, fork_ns);
        self.add_process(child, Some(parent));
        self.processes[parent.0].children += 1;
        self.vm.fork(parent, child);
        self.hat.write_protect(hw, parent);
    }

    fn exit(&mut self, hw: &mut Sun4, cx: &mut Cx<'_>, space: SpaceId) -> Step {
        self.load_libc(hw, cx, space);
        cx.charge(CpuRow::OtherKernel, self.config.costs.syscall_ns);
        let process = &mut self.processes[space.0];
        process.alive = false;
        let parent = process.parent;
        if let Some(parent) = parent {
            self.processes[parent.0].children -= 1;
        }
        self.vm.remove_space(space, parent);
        self.hat.remove_space(hw, space);
        Step::Finished
    }

    fn switch(&mut self, hw: &mut Sun4, cx: &mut Cx<'_>, space: Option<SpaceId>) {
        cx.charge(CpuRow::OtherKernel, self.config.costs.switch_ns);
        self.running = space.or(self.running);
        let Some(space) = space else { return };
        if space.0 == self.processes.len() {
            self.add_process(space, None);
        }
        self.hat.run(cx, space);
        let process = &mut self.processes[space.0];
        if std::mem::take(&mut process.swapped_out) {
            cx.count(SWAP_INS, 1);
            cx.charge(CpuRow::Swap, self.config.swap_in_ns);
        }
        let (begun, waits) = (process.start_faults.is_none(), process.children > 0);
        if begun {
            self.load_anchors(hw, cx, space);
        }
        if waits {
            self.load_libc(hw, cx, space);
        }
    }

    fn threads(&self) -> &'static [&'static str] {
        if self.config.swapper == Swapper::Eager { &["sched"] } else { &[] }
    }

    /// The eager swapper looks once a second for processes without any translation.
    fn run_thread(&mut self, _hw: &mut Sun4, cx: &mut Cx<'_>, _thread: usize) {
        for (index, process) in self.processes.iter_mut().enumerate() {
            let space = SpaceId(index);
            let begun = process.alive && process.start_faults.is_none();
            let idle = self.running != Some(space) && !process.swapped_out;
            if begun && idle && !self.hat.has_translations(space) {
                process.swapped_out = true;
                cx.count(SWAP_OUTS, 1);
                cx.charge(CpuRow::Swap, self.config.swap_out_ns);
            }
        }
        cx.wait(Wait::Until((cx.now() / SECOND_NS + 1) * SECOND_NS), WallRow::Sleep);
    }

    fn sample(&mut self, _hw: &Sun4, out: &mut Vec<(&'static str, u64)>) {
        out.push(("free_pmeg_count", self.hat.free() as u64));
    }

    fn epilogue(&self, hw: &Sun4, tally: &Tally) -> Epilogue {
        report::epilogue(&self.config, hw.geometry(), tally)
    }
}

impl SunOs {
    /// The pages of a region have no translation any more.
    fn invalidate(&mut self, hw: &mut Sun4, space: SpaceId, id: RegionId) {
        let Some(mapping) = self.vm.mapping(space, id) else { return };
        let geometry = *hw.geometry();
        let (first, _) = geometry.locate(mapping.base);
        let start = mapping.base >> geometry.page.shift();
        let end = start + mapping.pages;
        let ptes = u64::from(geometry.ptes);
        for segment in first..(end.div_ceil(ptes)) as usize {
            let low = start.saturating_sub(segment as u64 * ptes);
            let high = (end - segment as u64 * ptes).min(ptes);
            let mask = (low..high).fold(0, |mask, entry| mask | 1 << entry);
            self.hat.invalidate(hw, space, segment, mask);
        }
    }
}
