//! The network-memory kernel (NMS, 2003): a client whose memory caches pages of memory servers.
//!
//! The faulting client serves its faults one at a time, synchronously: zero-fill or page-in,
//! preceded by page-out of the victim. The published rates imply that page-in and page-out are
//! serial (1/1000 s = page-in + page-out + user work). The client sleeps if a page does not arrive
//! while it spins. It also sleeps during the search for servers before the first page-out. Source:
//! the NMS report.
//! Invariant: a copy-on-write page is copied before any process writes to it.

pub mod memory;
pub mod model;
mod preflight;
pub mod spaces;

use crate::hardware::accesses::Accesses;
use crate::hardware::{PageTables, Pte, SpaceId, Stop};
use crate::historic::cx::{CpuRow, Cx, Wait, WallRow};
use crate::historic::kernel::replacement::FrameIndex;
use crate::historic::kernel::{Kernel, KernelReport, Step};
use crate::tally::{CounterId, Tally};
use memory::{Arrival, ClientMemory, Origin, PageNumber, Translations};
use model::PagerModel;
use pagetax_core::counter::{Provenance, Reading};
use pagetax_core::machine::Unmet;
use pagetax_core::plan::{Advice, Backing, Plan, Region, RegionId};
use pagetax_core::report::Table;
use pagetax_core::units::Bytes;
use spaces::{AreaPage, ClientArea, ClientSpaces, Loaded, Mapped};
use std::collections::BTreeMap;

const MINOR_FAULTS: CounterId = CounterId::of("minor_fault_count");
const MAJOR_FAULTS: CounterId = CounterId::of("major_fault_count");
const COW_FAULTS: CounterId = CounterId::of("cow_fault_count");
const PAGES_IN: CounterId = CounterId::of("page_in_count");
const PAGES_OUT: CounterId = CounterId::of("page_out_count");
const EVICTIONS: CounterId = CounterId::of("reclaim_steal_count");
const RESIDENT_BYTES: CounterId = CounterId::of("resident_bytes_max");
const LOCKED_BYTES: CounterId = CounterId::of("locked_bytes_max");

/// Service latencies of an interval: minimum and mean, as the report plots them.
#[derive(Debug, Clone, Copy, Default)]
struct IntervalLatency {
    count: u64,
    sum_ns: u64,
    min_ns: u64,
}

impl IntervalLatency {
    fn record(&mut self, ns: u64) {
        self.min_ns = if self.count == 0 { ns } else { self.min_ns.min(ns) };
        self.count += 1;
        self.sum_ns += ns;
    }
}

/// The page under an address in a space.
#[derive(Debug, Clone, Copy)]
struct At {
    space: SpaceId,
    place: AreaPage,
    /// Virtual address of the page's first byte.
    address: u64,
    /// True if forked children write to the same page.
    shared: bool,
}

/// The kernel of a client.
#[derive(Debug, Clone)]
pub struct Pager {
    model: PagerModel,
    memory: ClientMemory,
    spaces: ClientSpaces,
    loaded: Loaded,
    locked_pages: u64,
    /// Latencies of all faults since the last sample; `page_in_latency` covers page-ins only.
    latency: IntervalLatency,
    page_in_latency: IntervalLatency,
    /// The frame that the last fault filled. Its referenced bit is cleared before the next page
    /// comes in, because the faulting access is not a second use.
    fresh: Option<FrameIndex>,
    /// The number of resident pages that the job wants for each mapping; `u64::MAX` if the job sets
    /// no limit.
    wanted_pages: BTreeMap<(SpaceId, RegionId), u64>,
}

impl Pager {
    /// Returns a client with empty memory and empty servers.
    pub fn new(model: PagerModel) -> Self {
        Pager {
            memory: ClientMemory::new(model.memory.clone()),
            spaces: ClientSpaces::new(model.page.bytes()),
            loaded: Loaded::default(),
            locked_pages: 0,
            latency: IntervalLatency::default(),
            page_in_latency: IntervalLatency::default(),
            fresh: None,
            wanted_pages: BTreeMap::new(),
            model,
        }
    }

    /// Limits resident pages to the sum over all mappings, because they share memory.
    fn limit_memory(&mut self) {
        let wanted =
            self.wanted_pages.values().fold(0, |sum: u64, pages| sum.saturating_add(*pages));
        self.memory.limit(if self.wanted_pages.is_empty() { u64::MAX } else { wanted });
    }

    fn page_bytes(&self) -> u64 {
        self.model.page.bytes()
    }

    /// Makes a page resident. Returns None and fails the run if no frame can be freed.
    fn bring_in(
        &mut self,
        hw: &mut impl PageTables,
        cx: &mut Cx<'_>,
        page: PageNumber,
    ) -> Option<FrameIndex> {
        let page_bytes = self.page_bytes();
        let mut mapped = Mapped { loaded: &mut self.loaded, hw, page_bytes };
        if let Some(fresh) = self.fresh {
            mapped.take_referenced(fresh);
        }
        match self.memory.bring_in(page, &mut mapped, cx.rng()) {
            Ok(arrival) => self.account(cx, arrival),
            Err(error) => cx.fail(error.to_string(), error.remedy()),
        }
        cx.at_least(RESIDENT_BYTES, self.memory.resident_pages() * page_bytes);
        self.fresh = self.memory.frame(page);
        self.fresh
    }

    /// Charges, counts and waits for a page's arrival.
    fn account(&mut self, cx: &mut Cx<'_>, arrival: Arrival) {
        let latency_ns = arrival.service_ns + arrival.sleep_ns;
        let page_out_ns = arrival.page_out_ns.unwrap_or(0);
        let total_ns = latency_ns + page_out_ns + arrival.discovery_ns;
        self.latency.record(latency_ns);
        match arrival.origin {
            Origin::Zeros => {
                cx.count(MINOR_FAULTS, 1);
                cx.charge(CpuRow::ZeroCopy, arrival.service_ns);
                cx.latency("minor_fault", total_ns, 1);
                cx.latency("zero_fill", latency_ns, 1);
            }
            Origin::Server => {
                cx.count(MAJOR_FAULTS, 1);
                cx.count(PAGES_IN, 1);
                cx.charge(CpuRow::Swap, arrival.service_ns);
                cx.latency("major_fault", total_ns, 1);
                cx.latency("page_in", latency_ns, 1);
                self.page_in_latency.record(latency_ns);
            }
        }
        cx.count(EVICTIONS, u64::from(arrival.evicted));
        if arrival.page_out_ns.is_some() {
            cx.count(PAGES_OUT, 1);
            cx.charge(CpuRow::Swap, page_out_ns);
            cx.latency("page_out", page_out_ns, 1);
        }
        let row = if arrival.discovery_ns > 0 { WallRow::Throttle } else { WallRow::PageIn };
        if arrival.discovery_ns + arrival.sleep_ns > 0 {
            let ready_ns = cx.now() + arrival.discovery_ns + arrival.sleep_ns;
            cx.wait(Wait::Until(ready_ns), row);
        }
    }

    /// Loads the translation of a resident page. It is writable if no other place holds the page or
    /// if the area is shared.
    fn load(&mut self, hw: &mut impl PageTables, at: At, page: PageNumber, frame: FrameIndex) {
        let writable = at.shared || self.spaces.places(page) == 1;
        hw.load(at.space, Pte { address: at.address, size: self.model.page, writable });
        self.loaded.add(frame, (at.space, at.address));
    }

    /// Copies a page that other places hold as well, for a write to it (copy-on-write).
    fn copy(&mut self, hw: &mut impl PageTables, cx: &mut Cx<'_>, at: At, page: PageNumber) {
        let own = self.memory.add();
        let Some(frame) = self.bring_in(hw, cx, own) else { return };
        cx.count(COW_FAULTS, 1);
        cx.charge(CpuRow::ZeroCopy, self.model.copy_ns);
        self.memory.mark_dirty(own);
        self.unload(hw, at.space, at.address, page);
        self.put(at, own);
        self.load(hw, at, own, frame);
    }

    /// Removes a translation after saving its dirty bit in the page's state.
    fn unload(&mut self, hw: &mut impl PageTables, space: SpaceId, address: u64, page: PageNumber) {
        let Some(frame) = self.memory.frame(page) else { return };
        if hw.used(space, address).dirty {
            self.memory.mark_dirty(page);
        }
        hw.unload(space, address, self.page_bytes());
        self.loaded.remove(frame, (space, address));
    }

    /// Replaces the page of a place. If the place is locked, the new page is pinned and so must be
    /// resident.
    fn put(&mut self, at: At, page: PageNumber) {
        let (old, locked) = self.spaces.replace(at.space, at.place, page);
        if locked {
            self.memory.pin(page);
            self.memory.unpin(old);
        }
        if self.spaces.places(old) == 0 {
            self.memory.remove(old);
        }
    }

    /// Frees the pages of an area that has been removed from its space.
    fn release(&mut self, hw: &mut impl PageTables, space: SpaceId, area: ClientArea) {
        self.unpin(&area);
        for (index, page) in area.pages.iter().enumerate() {
            self.unload(hw, space, area.base + index as u64 * self.page_bytes(), *page);
            self.spaces.detach(*page);
            if self.spaces.places(*page) == 0 {
                self.memory.remove(*page);
            }
        }
    }

    fn at(&self, space: SpaceId, address: u64) -> Option<At> {
        let place = self.spaces.find(space, address)?;
        let (_, shared) = self.spaces.page(space, place);
        let address = address / self.page_bytes() * self.page_bytes();
        Some(At { space, place, address, shared })
    }

    /// Serves the fault of the next access: page-in, copy-on-write, or only a new translation.
    fn serve(
        &mut self,
        hw: &mut impl PageTables,
        cx: &mut Cx<'_>,
        space: SpaceId,
        accesses: &Accesses,
    ) {
        let address = accesses.next_address();
        let Some(at) = self.at(space, address) else {
            return cx.fail(
                format!("nothing is mapped at {address:#x}"),
                "map the region before it is touched",
            );
        };
        let page = self.spaces.page(space, at.place).0;
        match self.memory.frame(page) {
            None => {
                if let Some(frame) = self.bring_in(hw, cx, page) {
                    self.load(hw, at, page, frame);
                }
            }
            Some(_) if accesses.writes && !at.shared && self.spaces.places(page) > 1 => {
                self.copy(hw, cx, at, page);
            }
            Some(frame) => {
                cx.count(MINOR_FAULTS, 1);
                cx.charge(CpuRow::MinorFault, self.model.soft_fault_ns);
                cx.latency("minor_fault", self.model.soft_fault_ns, 1);
                self.load(hw, at, page, frame);
            }
        }
    }

    fn unpin(&mut self, area: &ClientArea) {
        area.pages[..area.locked_pages].iter().for_each(|page| self.memory.unpin(*page));
        self.locked_pages -= area.locked_pages as u64;
    }
}

impl<M: PageTables> Kernel<M> for Pager {
    fn unmet_requirements(&self, plan: &Plan) -> Vec<Unmet> {
        preflight::unmet_requirements(&self.model, plan)
    }

    /// Returns the cost of a soft fault, because the source has no figure for a system call.
    fn call_ns(&self) -> u64 {
        self.model.soft_fault_ns.max(1)
    }

    fn counters(&self) -> &'static [CounterId] {
        const KEPT: [CounterId; 8] = [
            MINOR_FAULTS,
            MAJOR_FAULTS,
            COW_FAULTS,
            PAGES_IN,
            PAGES_OUT,
            EVICTIONS,
            RESIDENT_BYTES,
            LOCKED_BYTES,
        ];
        &KEPT
    }

    fn begin(&mut self, _hw: &mut M, _cx: &mut Cx<'_>, _space: SpaceId) -> Step {
        Step::Finished
    }

    fn map(
        &mut self,
        _hw: &mut M,
        _cx: &mut Cx<'_>,
        space: SpaceId,
        id: RegionId,
        region: &Region,
    ) -> u64 {
        let wanted = match region.backing {
            Backing::Remote { resident_bytes, .. } => resident_bytes / self.page_bytes(),
            _ => u64::MAX,
        };
        self.wanted_pages.insert((space, id), wanted);
        self.limit_memory();
        let count = region.bytes.div_ceil(self.page_bytes());
        let pages = (0..count).map(|_| self.memory.add()).collect();
        self.spaces.map(space, id, region, pages)
    }

    fn unmap(&mut self, hw: &mut M, _cx: &mut Cx<'_>, space: SpaceId, id: RegionId) {
        self.wanted_pages.remove(&(space, id));
        self.limit_memory();
        if let Some(area) = self.spaces.remove(space, id) {
            self.release(hw, space, area);
        }
    }

    /// Locks one page per call, so that the task can wait for each page-in.
    fn lock(
        &mut self,
        hw: &mut M,
        cx: &mut Cx<'_>,
        space: SpaceId,
        id: RegionId,
        offset: u64,
        bytes: u64,
    ) -> u64 {
        let page_bytes = self.page_bytes();
        let index = offset / page_bytes;
        let locked = bytes.min((index + 1) * page_bytes - offset);
        let Some(area) = self.spaces.area_mut(space, id) else { return bytes };
        let Some(page) = area.pages.get(index as usize).copied() else { return bytes };
        if area.locked_pages != index as usize {
            return locked;
        }
        if self.memory.frame(page).is_none() && self.bring_in(hw, cx, page).is_none() {
            return bytes;
        }
        self.memory.pin(page);
        self.locked_pages += 1;
        cx.at_least(LOCKED_BYTES, self.locked_pages * page_bytes);
        if let Some(area) = self.spaces.area_mut(space, id) {
            area.locked_pages += 1;
        }
        locked
    }

    fn unlock(&mut self, _hw: &mut M, _cx: &mut Cx<'_>, space: SpaceId, id: RegionId) {
        if let Some(area) = self.spaces.area_mut(space, id) {
            let locked = area.clone();
            area.locked_pages = 0;
            self.unpin(&locked);
        }
    }

    /// Acts on MADV_DONTNEED only, and only for areas that are neither shared nor locked.
    fn advise(
        &mut self,
        hw: &mut M,
        _cx: &mut Cx<'_>,
        space: SpaceId,
        id: RegionId,
        advice: Advice,
    ) {
        let Some(area) = self.spaces.area_mut(space, id) else { return };
        if advice != Advice::Dontneed || area.shared || area.locked_pages > 0 {
            return;
        }
        let (base, pages) = (area.base, area.pages.clone());
        for (index, page) in pages.into_iter().enumerate() {
            let address = base + index as u64 * self.page_bytes();
            self.unload(hw, space, address, page);
            if let Some(at) = self.at(space, address) {
                let zeros = self.memory.add();
                self.put(at, zeros);
            }
        }
    }

    /// Serves the fault of the next access, then further faults while [`Cx::may_go_on`] is true.
    fn fault(&mut self, hw: &mut M, cx: &mut Cx<'_>, space: SpaceId, accesses: &mut Accesses) {
        self.serve(hw, cx, space, accesses);
        while cx.may_go_on() {
            let before = accesses.remaining();
            let touched = hw.touch(cx.cpu(), space, accesses, cx.left_ns().saturating_mul(1000));
            cx.touched((before - accesses.remaining()) * accesses.cost_ps);
            cx.charge(CpuRow::Translation, touched.translation_ps / 1000);
            if touched.stop != Stop::Fault {
                break;
            }
            self.serve(hw, cx, space, accesses);
        }
    }

    fn fork(&mut self, hw: &mut M, cx: &mut Cx<'_>, parent: SpaceId, child: SpaceId) {
        cx.charge(CpuRow::OtherKernel, self.model.fork_ns);
        for (address, bytes) in self.spaces.fork(parent, child) {
            hw.protect(parent, address, bytes);
        }
    }

    fn exit(&mut self, hw: &mut M, cx: &mut Cx<'_>, space: SpaceId) -> Step {
        for id in self.spaces.regions(space) {
            self.unmap(hw, cx, space, id);
        }
        Step::Finished
    }

    fn switch(&mut self, _hw: &mut M, cx: &mut Cx<'_>, space: Option<SpaceId>) {
        if space.is_some() {
            cx.charge(CpuRow::OtherKernel, self.model.switch_ns);
        }
    }

    fn sample(&mut self, _hw: &M, out: &mut Vec<(&'static str, u64)>) {
        let latency = std::mem::take(&mut self.latency);
        if let Some(mean_ns) = latency.sum_ns.checked_div(latency.count) {
            out.push(("fault_latency_ns_min", latency.min_ns));
            out.push(("fault_latency_ns_mean", mean_ns));
        }
        let latency = std::mem::take(&mut self.page_in_latency);
        if let Some(mean_ns) = latency.sum_ns.checked_div(latency.count) {
            out.push(("page_in_latency_ns_min", latency.min_ns));
            out.push(("page_in_latency_ns_mean", mean_ns));
        }
    }

    fn kernel_report(&self, _hw: &M, _tally: &Tally) -> KernelReport {
        let resident = self.memory.resident_pages() * self.page_bytes();
        let size = |pages: u64| Bytes(pages * self.page_bytes()).to_string();
        let row = |(number, (used, room)): (usize, (u64, u64))| {
            vec![(number + 1).to_string(), size(room), size(used), size(room - used)]
        };
        let servers = Table {
            title: "memory servers at the end".into(),
            columns: ["server", "memory", "used", "free"].map(String::from).to_vec(),
            rows: self.memory.server_pages().into_iter().enumerate().map(row).collect(),
            provenance: Provenance::Modeled,
        };
        let how = "frames in use at the end".to_string();
        KernelReport {
            tables: vec![servers],
            memory: vec![("resident", Reading::Modeled(resident), how)],
            warnings: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests;
