//! Page faults: map resident pages, read pages from files or swap, zero-fill new pages.

use super::memory::{ACTIVE, INACTIVE, UNLISTED, ZonedMemory};
use super::profile::Line;
use super::reclaim::swap_place;
use super::runs::{Extent, ObjectId, ReclaimState, RunView};
use super::spaces::{ObjectKind, PAGE, VmArea};
use super::{COW_FAULTS, Linux24, MAJOR_FAULTS, MINOR_FAULTS, PAGE_INS, READ_BYTES, SWAP_INS};
use super::{RESIDENT_BYTES, SpaceId};
use crate::hardware::PageTables;
use crate::historic::cx::{CpuRow, Cx, Wait, WallRow};
use crate::historic::store::disk::DiskPosition;
use pagetax_core::units::PageSize;
use std::ops::Range;

/// The location of a page's content.
enum Content {
    /// The page is in memory, in the layer of this depth.
    Resident(usize, RunView),
    /// The page is in swap, at this object's place.
    Swapped(ObjectId),
    /// The page is in this file.
    File(ObjectId),
    /// The page has no content yet, so it reads as zeros.
    Zero,
}

impl Linux24 {
    /// Serves a fault on the first of `pages` of a mapping, and on the others if that needs no
    /// wait. Returns the number of pages mapped, or 0 if the process must wait or reclaim first.
    pub(super) fn serve<M: PageTables>(
        &mut self,
        hw: &mut M,
        cx: &mut Cx<'_>,
        space: SpaceId,
        mapping: &VmArea,
        pages: Range<u32>,
        write: bool,
    ) -> u32 {
        let Range { start: page, end } = pages;
        match self.content(mapping, page, end) {
            Content::Resident(depth, view) if depth > 0 && write && mapping.private => {
                self.copy(hw, cx, space, mapping, view)
            }
            Content::Resident(depth, view) => {
                let writable = write && (depth == 0 || !mapping.private);
                self.map_resident(hw, cx, space, mapping, view, writable);
                view.extent.len
            }
            Content::Swapped(object) | Content::File(object) => {
                let wanted = Extent { object, first: page, len: end - page };
                self.read(hw, cx, space, wanted, mapping.pages);
                0
            }
            Content::Zero if write || !mapping.private => {
                self.zero_fill(hw, cx, space, mapping, page, end)
            }
            Content::Zero => {
                // All such pages map the one zero page.
                self.load(hw, cx, space, mapping, page..page + 1, false);
                1
            }
        }
    }

    fn content(&self, mapping: &VmArea, page: u32, end: u32) -> Content {
        for (depth, layer) in mapping.layers.iter().enumerate() {
            let view = self.memory.find(*layer, page, end);
            if let Some(view) = view.filter(|view| view.extent.first == page) {
                let end = page + view.extent.len;
                let len = self.first_of(&mapping.layers[..depth], page, end) - page;
                return Content::Resident(
                    depth,
                    RunView { extent: Extent { len, ..view.extent }, ..view },
                );
            }
            let object = self.spaces.object(*layer);
            if object.is_swapped(page) {
                return Content::Swapped(*layer);
            }
            if object.kind == ObjectKind::File {
                return Content::File(*layer);
            }
        }
        Content::Zero
    }

    /// Returns the first page in `page..end` that one of these layers has, resident or in swap.
    /// Returns `end` if there is none.
    fn first_of(&self, layers: &[ObjectId], page: u32, end: u32) -> u32 {
        layers.iter().fold(end, |end, layer| {
            let resident = self.memory.find(*layer, page, end);
            let end = resident.map_or(end, |view| view.extent.first);
            self.spaces.object(*layer).swapped_from(page, end).unwrap_or(end)
        })
    }

    /// Maps resident pages. A page that was mapped before is in use again and becomes active.
    fn map_resident<M: PageTables>(
        &mut self,
        hw: &mut M,
        cx: &mut Cx<'_>,
        space: SpaceId,
        mapping: &VmArea,
        view: RunView,
        writable: bool,
    ) {
        let old = view.page;
        let again = old.touched && !old.mapped;
        let page = ReclaimState { mapped: true, touched: true, dirty: old.dirty | writable, ..old };
        if again && view.list != ACTIVE && view.list != UNLISTED {
            let ns = u64::from(view.extent.len) * self.config.costs.lru_page_ns;
            self.hold(cx, CpuRow::MinorFault, Line::Fault, 0, ns);
            self.memory.move_found(view, ACTIVE, ReclaimState { age: old.age.max(2), ..page });
        } else if view.list == ZonedMemory::clean_list(old.zone) {
            self.memory.move_found(view, INACTIVE, page);
        } else if page != old {
            self.memory.update(view.extent, |p| {
                (p.mapped, p.touched, p.dirty) = (true, true, page.dirty);
            });
        }
        let first = view.extent.first;
        self.load(hw, cx, space, mapping, first..first + view.extent.len, writable);
    }

    /// Copies a page of a lower layer into private memory (copy-on-write). Returns 1, or 0 if the
    /// process must reclaim first.
    fn copy<M: PageTables>(
        &mut self,
        hw: &mut M,
        cx: &mut Cx<'_>,
        space: SpaceId,
        mapping: &VmArea,
        lower: RunView,
    ) -> u32 {
        let first = lower.extent.first;
        let placed = self.new_memory(hw, cx, space, mapping.layers[0], first, 1);
        if placed > 0 {
            cx.count(COW_FAULTS, 1);
            self.load(hw, cx, space, mapping, first..first + 1, true);
        }
        placed
    }

    fn zero_fill<M: PageTables>(
        &mut self,
        hw: &mut M,
        cx: &mut Cx<'_>,
        space: SpaceId,
        mapping: &VmArea,
        page: u32,
        end: u32,
    ) -> u32 {
        let object = mapping.layers[0];
        let mut len = self.memory.find(object, page, end).map_or(end, |v| v.extent.first) - page;
        let swapped = (1..len).find(|i| self.spaces.object(object).is_swapped(page + i));
        len = swapped.unwrap_or(len);
        if mapping.layers.len() > 1 {
            len = 1;
        }
        let placed = self.new_memory(hw, cx, space, object, page, len);
        if placed > 0 {
            self.load(hw, cx, space, mapping, page..page + placed, true);
        }
        placed
    }

    /// Allocates pages of private memory and charges their zeroing or copying. Returns the number
    /// that got frames.
    fn new_memory<M: PageTables>(
        &mut self,
        hw: &mut M,
        cx: &mut Cx<'_>,
        space: SpaceId,
        object: ObjectId,
        first: u32,
        len: u32,
    ) -> u32 {
        let Some(mut grant) = self.frames(hw, cx, space, u64::from(len)) else { return 0 };
        let extent = Extent { object, first, len: grant.pages() as u32 };
        let page =
            ReclaimState { mapped: true, touched: true, dirty: true, ..ReclaimState::default() };
        let list = self.config.policy.new_memory_list();
        self.memory.place(&mut grant, extent, list, page);
        let ns = u64::from(extent.len) * self.config.costs.zero_page_ns;
        self.work(cx, CpuRow::ZeroCopy, Line::ZeroCopy, u64::from(extent.len), ns);
        extent.len
    }

    /// Loads pages into a process's page tables.
    fn load<M: PageTables>(
        &mut self,
        hw: &mut M,
        cx: &mut Cx<'_>,
        space: SpaceId,
        mapping: &VmArea,
        pages: Range<u32>,
        writable: bool,
    ) {
        let len = pages.len() as u32;
        let address = mapping.base + u64::from(pages.start) * PAGE;
        let range = address..address + u64::from(len) * PAGE;
        let new = hw.load_range(space, range, PageSize::K4, writable);
        let resident = &mut self.spaces.space_mut(space.0).resident;
        *resident += new;
        cx.at_least(RESIDENT_BYTES, *resident * PAGE);
        cx.count(MINOR_FAULTS, u64::from(len));
        let ns = u64::from(len) * self.config.costs.fault_page_ns;
        self.work(cx, CpuRow::MinorFault, Line::Fault, u64::from(len), ns);
    }

    /// Reads the first pages of `wanted` from their file or from swap, and read-ahead pages up to a
    /// cluster's end (at most `last`). The process waits for them. The wanted pages count as mapped
    /// from now on, so that reclaim spares them until the process continues.
    fn read<M: PageTables>(
        &mut self,
        hw: &mut M,
        cx: &mut Cx<'_>,
        space: SpaceId,
        wanted: Extent,
        last: u32,
    ) {
        let Extent { object, first, len } = wanted;
        let from_swap = self.spaces.object(object).kind == ObjectKind::ZonedMemory;
        let end = self.read_ahead(object, first, last);
        let pages = u64::from(end - first);
        let Some(low) = self.bounce_pages(hw, cx, space, pages) else { return };
        let Some(mut grant) = self.frames(hw, cx, space, pages) else {
            return self.give_back(low);
        };
        let (pages, high_pages) = (grant.pages(), grant.by_zone[2]);
        let lru_ns = pages * self.config.costs.lru_page_ns;
        self.hold(cx, CpuRow::OtherKernel, Line::Fault, 0, lru_ns);
        let mapped = len.min(pages as u32);
        let dirty = from_swap && self.free_places(object, first, mapped);
        let page = ReclaimState { mapped: true, touched: true, dirty, ..ReclaimState::default() };
        self.memory.place(&mut grant, Extent { len: mapped, ..wanted }, INACTIVE, page);
        let ahead = Extent { object, first: first + mapped, len: pages as u32 - mapped };
        self.memory.place(&mut grant, ahead, INACTIVE, ReclaimState::default());
        self.grow_slabs(cx);
        let interrupt_ns = pages * self.config.costs.interrupt_page_ns;
        self.work(cx, CpuRow::OtherKernel, Line::DiskInterrupt, 1, interrupt_ns);
        let (place, row) = if from_swap {
            (swap_place(object, first), WallRow::SwapIn)
        } else {
            (DiskPosition { file: object.0, offset: u64::from(first) * PAGE }, WallRow::PageIn)
        };
        let now = cx.now();
        let done =
            self.disk.transfer(now, place, pages * PAGE, |ns, percent| cx.jitter(ns, percent));
        self.hold_bounces(low, high_pages, done);
        cx.wait(Wait::Until(done), row);
        cx.latency("major_fault", done - now, 1);
        cx.count(MAJOR_FAULTS, 1);
        cx.count(PAGE_INS, pages);
        cx.count(READ_BYTES, pages * PAGE);
        cx.count(SWAP_INS, if from_swap { pages } else { 0 });
    }

    /// Frees the swap places of pages that were read from swap if swap is more than half full.
    /// Returns true if it did. Otherwise the pages keep their places, so that clean pages need not
    /// be written again.
    fn free_places(&mut self, object: ObjectId, first: u32, count: u32) -> bool {
        let full = self.swap_left * 2 < self.config.swap_pages;
        if full {
            self.swap_left += self.spaces.object_mut(object).clear_swapped(first, count);
        }
        full
    }

    /// Returns the end of a read that begins at `first`. It is the end of the cluster, or the first
    /// page that is resident or not in swap.
    fn read_ahead(&self, object: ObjectId, first: u32, last: u32) -> u32 {
        let state = self.spaces.object(object);
        let from_swap = state.kind == ObjectKind::ZonedMemory;
        let cluster = if from_swap { self.config.swap_cluster } else { self.config.file_cluster };
        let end = last.min((first | (cluster - 1)) + 1);
        let end = self.memory.find(object, first, end).map_or(end, |view| view.extent.first);
        let absent = |page: &u32| from_swap && !state.is_swapped(*page);
        (first..end).find(absent).unwrap_or(end)
    }
}
