//! Background and direct reclaim, their costs, and swap-out.

use super::memory::{ACTIVE, Grant, INACTIVE, UNLISTED, USER_ZONES};
use super::policy::{Action, Function, ReclaimStep};
use super::profile::Line;
use super::runs::{Extent, ObjectId, RunView};
use super::spaces::{ObjectKind, PAGE, VmArea};
use super::{KSWAPD, Linux24, PAGE_OUTS, SCANS, STEALS, SWAP_OUTS};
use crate::hardware::{PageTables, SpaceId};
use crate::historic::cx::{CpuRow, Cx, Wait, WallRow};
use crate::historic::store::disk::DiskPosition;
use pagetax_core::plan::RegionId;
use pagetax_core::units::PageSize;

/// The longest sleep of kswapd.
const DAEMON_NS: u64 = 1_000_000_000;
/// The most pages that may wait for the disk to write them.
const WRITE_QUEUE_PAGES: u64 = 256;
/// The number of consecutive reclaim attempts without an allocation after which the allocation
/// fails.
const FRUITLESS_MAX: u32 = 64;
/// Divisor of a process's resident pages: one swap-out scans 1/32 of them, but at least
/// [`SWAP_OUT_MIN`].
const SWAP_OUT_SHARE: u64 = 32;
const SWAP_OUT_MIN: u64 = 8;
/// The disk's file number for swap. Files have their objects' numbers.
pub(super) const SWAP_FILE: u32 = u32::MAX;

/// Returns a page's place in swap. Neighbouring pages are adjacent there.
pub(super) fn swap_place(object: ObjectId, page: u32) -> DiskPosition {
    DiskPosition { file: SWAP_FILE, offset: (u64::from(object.0) << 44) + u64::from(page) * PAGE }
}

impl Linux24 {
    /// Runs one step of kswapd's scan.
    pub(super) fn run_kswapd<M: PageTables>(&mut self, hw: &mut M, cx: &mut Cx<'_>) {
        let before = cx.spent_ns();
        self.end_reads(cx.now());
        let attempt = self.daemon.take().or_else(|| {
            cx.charge(CpuRow::OtherKernel, self.config.costs.call_ns);
            self.config.policy.daemon_attempt(&self.memory, cx.now())
        });
        let sleeps = match attempt {
            None => true,
            Some(mut attempt) => {
                let room = self.disk.room(cx.now(), PAGE, WRITE_QUEUE_PAGES);
                let action = self.config.policy.advance(&mut attempt, &mut self.memory, room);
                self.perform(hw, cx, None, action);
                if action.outcome == ReclaimStep::Goes {
                    self.daemon = Some(attempt);
                    false
                } else {
                    self.config.policy.daemon_sleeps(&attempt, action.outcome, &self.memory)
                }
            }
        };
        if sleeps {
            cx.wait(Wait::OnUntil(KSWAPD, cx.now() + DAEMON_NS), WallRow::Sleep);
        }
        self.daemon_ns += cx.spent_ns() - before;
    }

    /// Allocates frames for up to `want` pages of a process. Returns None if the process had to
    /// reclaim in its own time instead; it must then ask again.
    pub(super) fn frames<M: PageTables>(
        &mut self,
        hw: &mut M,
        cx: &mut Cx<'_>,
        space: SpaceId,
        want: u64,
    ) -> Option<Grant> {
        let grant = self.grab(cx, want, &USER_ZONES);
        if grant.is_some() {
            *self.direct_mut(space.0) = super::Direct::default();
        } else if self.reclaim_directly(hw, cx, space, &USER_ZONES) == ReclaimStep::Failed {
            self.fail_if_stuck(cx, space);
        }
        grant
    }

    /// Allocates up to `want` frames from these zones. Returns None if they have no frame to spare.
    pub(super) fn grab(&mut self, cx: &mut Cx<'_>, want: u64, zones: &[usize]) -> Option<Grant> {
        self.end_reads(cx.now());
        let allocation = self.config.policy.allocate(&mut self.memory, want, zones);
        let grant = allocation.grant;
        if allocation.wake_daemon {
            cx.wake(KSWAPD);
        }
        if grant.reclaimed > 0 {
            let ns = grant.reclaimed * self.config.costs.lru_page_ns;
            self.hold(cx, CpuRow::Reclaim, Line::ReclaimPage, grant.reclaimed, ns);
            cx.count(STEALS, grant.reclaimed);
        }
        (grant.pages() > 0).then_some(grant)
    }

    /// Runs one step of a process's direct reclaim in these zones.
    pub(super) fn reclaim_directly<M: PageTables>(
        &mut self,
        hw: &mut M,
        cx: &mut Cx<'_>,
        space: SpaceId,
        zones: &[usize],
    ) -> ReclaimStep {
        let mut direct = *self.direct_mut(space.0);
        let mut attempt =
            direct.attempt.take().unwrap_or_else(|| self.config.policy.attempt(zones));
        let room = self.disk.room(cx.now(), PAGE, WRITE_QUEUE_PAGES);
        let action = self.config.policy.advance(&mut attempt, &mut self.memory, room);
        self.perform(hw, cx, Some(space), action);
        if action.outcome == ReclaimStep::Goes {
            direct.attempt = Some(attempt);
        } else {
            cx.charge(CpuRow::Reclaim, self.config.costs.call_ns);
            direct.fruitless += 1;
        }
        *self.direct_mut(space.0) = direct;
        action.outcome
    }

    /// Handles a failed attempt at direct reclaim. The process waits for the disk if the disk is
    /// busy. After too many failures in a row, the allocation fails.
    fn fail_if_stuck(&mut self, cx: &mut Cx<'_>, space: SpaceId) {
        if self.disk.free_at() > cx.now() {
            cx.wait(Wait::Until(self.disk.free_at()), WallRow::Throttle);
        }
        let fruitless = self.direct_mut(space.0).fruitless;
        if fruitless > FRUITLESS_MAX {
            self.give_up(cx, fruitless);
        }
    }

    fn give_up(&self, cx: &mut Cx<'_>, attempts: u32) {
        let locked: u64 = self
            .spaces
            .spaces
            .iter()
            .flat_map(|s| s.mappings.values())
            .map(|m| u64::from(m.locked))
            .sum();
        let remedy = if locked > 0 {
            "lock less, or run it on linux-2.4.9, which gets through"
        } else {
            "use less memory, or give the machine more swap"
        };
        cx.fail(
            format!(
                "order-0 allocation failed: {attempts} attempts in a row freed no page that it may \
                 use; {locked} pages are locked and stay on the lists that reclaim walks \
                 ({} active, {} inactive, {} pages of swap left), so it makes no progress",
                self.memory.listed(ACTIVE),
                self.memory.listed(INACTIVE),
                self.swap_left,
            ),
            remedy,
        );
    }

    /// Charges an action's cost, and performs the swap-out or slab shrinking that the policy
    /// requested.
    fn perform<M: PageTables>(
        &mut self,
        hw: &mut M,
        cx: &mut Cx<'_>,
        current: Option<SpaceId>,
        action: Action,
    ) {
        let Some(function) = action.function else { return };
        let mut visits = action.visits;
        match function {
            Function::SwapOut => visits = self.swap_out(hw, cx, current),
            Function::ShrinkSlabs => self.shrink_slabs(),
            _ => {}
        }
        let (line, ns, locks) = self.config.costs.of(function, visits);
        if locks {
            self.hold(cx, CpuRow::Reclaim, line, 1, ns);
            cx.count(SCANS, visits);
        } else {
            self.work(cx, CpuRow::Reclaim, line, 1, ns);
        }
        cx.count(STEALS, action.freed);
        if action.written > 0 {
            cx.count(PAGE_OUTS, action.written);
            let place = DiskPosition { file: SWAP_FILE, offset: 0 };
            let bytes = action.written * PAGE;
            self.disk.transfer(cx.now(), place, bytes, |ns, percent| cx.jitter(ns, percent));
        }
    }

    /// Frees buffer heads beyond the number that file pages need. They are allocated with the
    /// pages, but freed only here.
    fn shrink_slabs(&mut self) {
        let needed = self.slab_pages_needed();
        let excess = self.slab_pages.saturating_sub(needed);
        self.slab_pages -= excess;
        self.memory.zones[1].free += excess;
        self.config.policy.freed(excess);
    }

    pub(super) fn slab_pages_needed(&self) -> u64 {
        let pages = self.memory.pages()
            - self.memory.total(|zone| zone.free)
            - self.memory.listed(UNLISTED);
        pages / self.config.pages_a_slab
    }

    /// Unmaps pages that were not referenced since the last scan, first of the `current` process,
    /// then of the others. Returns the number of page-table entries scanned.
    fn swap_out<M: PageTables>(
        &mut self,
        hw: &mut M,
        cx: &mut Cx<'_>,
        current: Option<SpaceId>,
    ) -> u64 {
        let first = current.map_or(0, |space| space.0);
        let count = self.spaces.spaces.len();
        (0..count).map(|i| self.swap_out_of(hw, cx, (first + i) % count)).sum()
    }

    fn swap_out_of<M: PageTables>(&mut self, hw: &mut M, cx: &mut Cx<'_>, space: usize) -> u64 {
        let state = &self.spaces.spaces[space];
        let budget = (state.resident / SWAP_OUT_SHARE).max(SWAP_OUT_MIN).min(state.resident);
        let mut areas: Vec<_> =
            state.mappings.values().filter(|m| m.locked == 0).cloned().collect();
        areas.sort_by_key(|mapping| mapping.base);
        let cursor = state.cursor;
        // The scan runs from the cursor to the end, then from the start to the cursor. The area
        // with the cursor is visited twice.
        let page_in = |mapping: &VmArea| (cursor.saturating_sub(mapping.base) / PAGE) as u32;
        let after = areas.iter().map(|m| (m, page_in(m))).filter(|(m, page)| *page < m.pages);
        let before = areas.iter().filter(|m| m.base <= cursor).map(|m| (m, 0));
        let mut looked = 0;
        for (mapping, from) in after.chain(before) {
            looked += self.swap_out_area(hw, cx, mapping, from, space, budget - looked);
            if looked >= budget {
                break;
            }
        }
        looked
    }

    /// Scans up to `budget` pages of a mapping, and leaves the cursor after the last.
    fn swap_out_area<M: PageTables>(
        &mut self,
        hw: &mut M,
        cx: &mut Cx<'_>,
        mapping: &VmArea,
        from: u32,
        space: usize,
        budget: u64,
    ) -> u64 {
        let own = [mapping.layers[0], mapping.layers[mapping.layers.len() - 1]];
        let layers = if own[0] == own[1] { &own[..1] } else { &own[..] };
        let mut looked = 0;
        for layer in layers {
            let mut at = from;
            while let (Some(view), true) =
                (self.memory.find(*layer, at, mapping.pages), looked < budget)
            {
                let len = (u64::from(view.extent.len)).min(budget - looked) as u32;
                let view = RunView { extent: Extent { len, ..view.extent }, ..view };
                at = view.extent.first + len;
                if view.page.mapped {
                    looked += u64::from(len);
                    self.swap_out_pages(hw, cx, view);
                }
            }
            self.spaces.space_mut(space).cursor = mapping.base + u64::from(at) * PAGE;
        }
        looked
    }

    fn swap_out_pages<M: PageTables>(&mut self, hw: &mut M, cx: &mut Cx<'_>, view: RunView) {
        let places: Vec<_> = self.spaces.mapped_at(view.extent.object).collect();
        let (mut start, end) = (view.extent.first, view.extent.first + view.extent.len);
        while start < end {
            let young = used(hw, &places, start);
            let mut next = start + 1;
            while next < end && used(hw, &places, next) == young {
                next += 1;
            }
            let extent = Extent { first: start, len: next - start, ..view.extent };
            if young {
                self.memory.update(extent, |page| page.referenced = true);
            } else {
                self.unmap_pages(hw, cx, RunView { extent, ..view }, &places);
            }
            start = next;
        }
    }

    /// Unmaps pages from all page tables. Private memory gets a place in swap, and becomes inactive
    /// if it was on no list. If swap has too little room, the pages stay mapped.
    fn unmap_pages<M: PageTables>(
        &mut self,
        hw: &mut M,
        cx: &mut Cx<'_>,
        view: RunView,
        places: &[(usize, u64)],
    ) {
        let Extent { object, first, len } = view.extent;
        let memory = self.spaces.object(object).kind == ObjectKind::ZonedMemory;
        if memory {
            let state = self.spaces.object_mut(object);
            let new = (first..first + len).filter(|page| !state.is_swapped(*page)).count() as u64;
            if self.swap_left < new {
                return;
            }
            (first..first + len).for_each(|page| _ = state.set_swapped(page));
            self.swap_left -= new;
            cx.count(SWAP_OUTS, u64::from(len));
        }
        for (space, base) in places {
            let (address, bytes) = (base + u64::from(first) * PAGE, u64::from(len) * PAGE);
            let present = hw.present_in(SpaceId(*space), address..address + bytes, PageSize::K4);
            self.spaces.space_mut(*space).resident -= present;
            hw.unload(SpaceId(*space), address, bytes);
        }
        if memory && view.list == UNLISTED {
            let page = super::ReclaimState { mapped: false, ..view.page };
            self.memory.move_found(view, INACTIVE, page);
        } else {
            self.memory.update(view.extent, |page| page.mapped = false);
        }
    }

    /// Returns a region's mapping in a space, or None if it is not mapped there.
    pub(super) fn mapping(&self, space: SpaceId, id: RegionId) -> Option<&VmArea> {
        self.spaces.spaces.get(space.0)?.mappings.get(&id)
    }
}

/// Returns true if any process has used the page since the last scan, and clears its referenced
/// bits.
fn used<M: PageTables>(hw: &mut M, places: &[(usize, u64)], page: u32) -> bool {
    places.iter().fold(false, |young, (space, base)| {
        let address = base + u64::from(page) * PAGE;
        hw.test_and_clear_referenced(SpaceId(*space), address).referenced | young
    })
}
