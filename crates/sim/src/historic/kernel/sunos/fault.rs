//! Faults: page-ins, and runs of present pages that only lack their pmeg entry.

use super::run::{FaultRun, Served};
use super::vm::Provision;
use super::{
    COW_FAULTS, MAJOR_FAULTS, MINOR_FAULTS, PAGE_INS, RESIDENT_MAX, SunOs, TRANSLATION_FAULTS,
};
use crate::hardware::accesses::Accesses;
use crate::hardware::sun4::{PmegId, Sun4};
use crate::hardware::{Mmu, SpaceId, Stop};
use crate::historic::cx::{CpuRow, Cx, Wait, WallRow};
use pagetax_core::plan::RegionId;

impl SunOs {
    pub(super) fn charge_faults(&mut self, cx: &mut Cx<'_>, count: u64) {
        let costs = &self.config.costs;
        cx.count(TRANSLATION_FAULTS, count);
        cx.count(MINOR_FAULTS, count);
        cx.charge(CpuRow::MinorFault, count * costs.fault_ns);
        cx.charge(CpuRow::Translation, count * costs.fault_user_ns);
        cx.latency("minor_fault", costs.fault_ns + costs.fault_user_ns, count);
    }

    /// Makes a page present. Returns false if the process has to wait for it.
    pub(super) fn provide(
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

    /// Serves the fault of the next access, and those after it that fault in the same pmeg on
    /// present pages, each with its access. Returns false if the process has to wait for the page.
    /// It also returns false if the page must be `present_already` and is not.
    pub(super) fn serve_run(
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
        let is_anchored = self.processes[space.0].anchored_at == Some(hw.version(space));
        let may_lose_pmegs = !is_anchored || hw.pmeg_of(space, segment).is_none();
        let pmeg = self.pmeg(hw, cx, space, segment);
        let held = &hw.pmegs()[pmeg];
        let usable = if accesses.writes { held.valid & held.writable } else { held.valid };
        if usable >> entry & 1 != 0 {
            // The software cache reloaded the entry.
            accesses.advance(1);
            cx.touched(accesses.cost_ps);
            self.load_anchors(hw, cx, space);
            return true;
        }
        let faulting = present.to(accesses.writes) & !usable;
        let mut run = FaultRun::of(accesses, &geometry, faulting, entry);
        if may_lose_pmegs {
            // The process's text or stack may be gone: to this new pmeg, or to the library code of a
            // sleep. It is reloaded after the first fault, and may take this very pmeg.
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

    pub(super) fn serve(
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

    /// Performs further accesses while there is time. Returns true if they came to another fault.
    pub(super) fn touch_on(
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
