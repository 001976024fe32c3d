//! The kernel's entry points, which the engine calls.

use super::profile::Line;
use super::runs::{ObjectId, RunView};
use super::spaces::{ObjectKind, PAGE, SPACE_BYTES};
use super::*;
use crate::hardware::accesses::Accesses;
use crate::hardware::{PageTables, SpaceId};
use crate::historic::kernel::preflight::{
    fatal, ignored_advice, other_page_sizes, too_much_mapped, without_servers,
};
use crate::historic::kernel::{Kernel, KernelReport, Step};
use crate::tally::Tally;
use pagetax_core::counter::Reading;
use pagetax_core::machine::Unmet;
use pagetax_core::plan::{Advice, Plan, Region, RegionId};
use pagetax_core::units::{Bytes, PageSize};

const USER_NS: CounterId = CounterId::of("user_ns");

impl<M: PageTables> Kernel<M> for Linux24 {
    fn unmet_requirements(&self, plan: &Plan) -> Vec<Unmet> {
        let half = Bytes(self.memory.pages() * PAGE / 2);
        let locked = plan.locked_bytes_max();
        let mut unmet = other_page_sizes(plan, &[PageSize::K4]);
        if locked > half {
            let what = format!(
                "the job locks {locked} at once; this kernel lets a process lock half of memory, {half}"
            );
            unmet.push(fatal(what, "lock less, or take a machine with more memory"));
        }
        unmet.extend(too_much_mapped(plan, Bytes(SPACE_BYTES), "a process has addresses for"));
        unmet.extend(without_servers(plan));
        unmet.extend(ignored_advice(plan, &[]));
        unmet
    }

    fn call_ns(&self) -> u64 {
        self.config.costs.call_ns.max(1)
    }

    fn counters(&self) -> &'static [CounterId] {
        &[
            MINOR_FAULTS,
            MAJOR_FAULTS,
            COW_FAULTS,
            PAGE_INS,
            PAGE_OUTS,
            SWAP_INS,
            SWAP_OUTS,
            SCANS,
            STEALS,
            READ_BYTES,
            LOCKED_BYTES,
            RESIDENT_BYTES,
        ]
    }

    fn begin(&mut self, _hw: &mut M, _cx: &mut Cx<'_>, space: SpaceId) -> Step {
        self.spaces.space_mut(space.0);
        Step::Finished
    }

    fn map(
        &mut self,
        _hw: &mut M,
        cx: &mut Cx<'_>,
        space: SpaceId,
        id: RegionId,
        region: &Region,
    ) -> u64 {
        cx.charge(CpuRow::OtherKernel, self.config.costs.call_ns);
        self.spaces.map(space.0, id, &region.backing, region.bytes).unwrap_or_else(|| {
            cx.fail(
                format!("no room for {} bytes in the 3 GiB of a process's addresses", region.bytes),
                "map less at a time",
            );
            0
        })
    }

    fn unmap(&mut self, hw: &mut M, cx: &mut Cx<'_>, space: SpaceId, id: RegionId) {
        let Some(mapping) = self.spaces.space_mut(space.0).mappings.remove(&id) else { return };
        let bytes = u64::from(mapping.pages) * PAGE;
        let present = hw.present_in(space, mapping.base..mapping.base + bytes, PageSize::K4);
        hw.unload(space, mapping.base, bytes);
        self.spaces.space_mut(space.0).resident -= present;
        let ns = self.config.costs.call_ns + present * self.config.costs.unmap_page_ns;
        self.work(cx, CpuRow::OtherKernel, Line::Unmap, 1, ns);
        for layer in mapping.layers {
            self.spaces.object_mut(layer).mappings -= 1;
            if self.spaces.object(layer).mappings == 0 {
                self.abandon(layer);
            }
        }
    }

    fn lock(
        &mut self,
        hw: &mut M,
        cx: &mut Cx<'_>,
        space: SpaceId,
        id: RegionId,
        offset: u64,
        bytes: u64,
    ) -> u64 {
        let Some(mapping) = self.mapping(space, id).cloned() else { return bytes };
        let (first, end) = (offset / PAGE, (offset + bytes).div_ceil(PAGE));
        let end = (end as u32).min(mapping.pages);
        let mut page = first as u32;
        while page < end {
            match self.serve(hw, cx, space, &mapping, page..end, false) {
                0 => break,
                served => page += served,
            }
        }
        let locked = &mut self.spaces.space_mut(space.0).mappings;
        locked.entry(id).and_modify(|mapping| mapping.locked = mapping.locked.max(page));
        let locked = locked.values().map(|mapping| u64::from(mapping.locked)).sum::<u64>();
        cx.at_least(LOCKED_BYTES, locked * PAGE);
        if page >= end { bytes } else { (u64::from(page) * PAGE).saturating_sub(offset) }
    }

    fn unlock(&mut self, _hw: &mut M, cx: &mut Cx<'_>, space: SpaceId, id: RegionId) {
        cx.charge(CpuRow::OtherKernel, self.config.costs.call_ns);
        if let Some(mapping) = self.spaces.space_mut(space.0).mappings.get_mut(&id) {
            mapping.locked = 0;
        }
    }

    fn advise(
        &mut self,
        _hw: &mut M,
        cx: &mut Cx<'_>,
        _space: SpaceId,
        _id: RegionId,
        _advice: Advice,
    ) {
        cx.charge(CpuRow::OtherKernel, self.config.costs.call_ns);
    }

    fn fault(&mut self, hw: &mut M, cx: &mut Cx<'_>, space: SpaceId, accesses: &mut Accesses) {
        let found = self.spaces.space_mut(space.0).at(accesses.next_address());
        let Some((id, page)) = found else {
            cx.fail("segmentation fault: the page is in no mapping", "map the region first");
            return;
        };
        let Some(mapping) = self.mapping(space, id).cloned() else { return };
        self.serve(hw, cx, space, &mapping, page..page + 1, accesses.writes);
    }

    fn fork(&mut self, hw: &mut M, cx: &mut Cx<'_>, parent: SpaceId, child: SpaceId) {
        self.spaces.fork(parent.0, child.0);
        let resident = self.spaces.space_mut(parent.0).resident;
        let ns = self.config.costs.call_ns + resident * self.config.costs.unmap_page_ns;
        cx.charge(CpuRow::OtherKernel, ns);
        for mapping in self.spaces.space_mut(parent.0).mappings.values().filter(|m| m.private) {
            hw.protect(parent, mapping.base, u64::from(mapping.pages) * PAGE);
        }
    }

    fn exit(&mut self, hw: &mut M, cx: &mut Cx<'_>, space: SpaceId) -> Step {
        let regions: Vec<_> = self.spaces.space_mut(space.0).mappings.keys().copied().collect();
        regions.into_iter().for_each(|id| self.unmap(hw, cx, space, id));
        Step::Finished
    }

    fn switch(&mut self, _hw: &mut M, _cx: &mut Cx<'_>, _space: Option<SpaceId>) {}

    fn threads(&self) -> &'static [&'static str] {
        &["kswapd"]
    }

    fn run_thread(&mut self, hw: &mut M, cx: &mut Cx<'_>, _thread: usize) {
        self.run_kswapd(hw, cx);
    }

    fn sample(&mut self, _hw: &M, out: &mut Vec<(&'static str, u64)>) {
        out.push(("kswapd_cpu_ns", self.daemon_ns - self.daemon_ns_sampled));
        self.daemon_ns_sampled = self.daemon_ns;
        out.push(("free_bytes", self.memory.total(|zone| zone.free) * PAGE));
        out.push(("active_bytes", self.memory.listed(ACTIVE) * PAGE));
        out.push(("inactive_bytes", self.memory.listed(INACTIVE) * PAGE));
    }

    fn kernel_report(&self, _hw: &M, tally: &Tally) -> KernelReport {
        let how = "pages on the lists at the end of the run";
        let row = |id, pages: u64| (id, Reading::Modeled(pages * PAGE), how.to_string());
        KernelReport {
            tables: vec![self.profile.table(self.worked_at, self.config.cpus, tally.get(USER_NS))],
            memory: vec![
                row("free", self.memory.total(|zone| zone.free)),
                row("active", self.memory.listed(ACTIVE)),
                row("inactive", self.memory.total(|zone| zone.inactive() - zone.free)),
                row("slab", self.slab_pages),
            ],
            ..KernelReport::default()
        }
    }
}

impl Linux24 {
    /// Releases an object that nobody maps any more. Private memory is freed; a file's pages stay
    /// in the page cache.
    fn abandon(&mut self, object: ObjectId) {
        let mut at = 0;
        while let Some(view) = self.memory.find(object, at, u32::MAX) {
            let RunView { extent, .. } = view;
            at = extent.first + extent.len;
            if self.spaces.object(object).kind == ObjectKind::File {
                self.memory.update(extent, |page| page.mapped = false);
            } else {
                self.memory.release(view);
                self.config.policy.freed(u64::from(extent.len));
            }
        }
        self.swap_left += self.spaces.object_mut(object).forget_swap();
    }
}
