//! The kernel's entry points, which the engine calls.

use super::config::Swapper;
use super::{COUNTERS, MINOR_FAULTS, SWAP_INS, SWAP_OUTS, SunOs, preflight, report};
use crate::hardware::SpaceId;
use crate::hardware::accesses::Accesses;
use crate::hardware::sun4::Sun4;
use crate::historic::cx::{CpuRow, Cx, Wait, WallRow};
use crate::historic::kernel::{Kernel, KernelReport, Step};
use crate::tally::{CounterId, Tally};
use pagetax_core::machine::Unmet;
use pagetax_core::plan::{Advice, Plan, Region, RegionId};
use pagetax_core::units::Bytes;

const SECOND_NS: u64 = 1_000_000_000;
/// The most runs of faults that one call serves. Without a limit, the engine's cap on steps could
/// not end an endless fault loop.
const RUNS_A_CALL: usize = 256;

impl Kernel<Sun4> for SunOs {
    fn unmet_requirements(&self, plan: &Plan) -> Vec<Unmet> {
        preflight::unmet_requirements(plan, self.memory, self.page)
    }

    fn call_ns(&self) -> u64 {
        self.config.costs.syscall_ns.max(1)
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
        let private = region.backing.is_anonymous();
        let align = if private { page_bytes } else { geometry.segment_bytes() };
        let start = self.config.image.text_data_pages * page_bytes;
        // The job gets the lower half of the space; the upper is for libraries, stacks and the
        // kernel.
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

    /// Swaps out processes without any translation, once a second (the eager swapper).
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

    fn kernel_report(&self, hw: &Sun4, tally: &Tally) -> KernelReport {
        report::kernel_report(&self.config, hw.geometry(), tally)
    }
}

impl SunOs {
    /// Invalidates the translations of all pages of a region.
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
