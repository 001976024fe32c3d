//! What needs memory below 896 MiB: buffer heads of file pages, and bounce pages.
//!
//! The kernel's own objects must be where it can address them, and the disk's driver reads a page of
//! high memory through a page below that, which is held until the read is done. So every read asks
//! the two lower zones for pages, and their shortage makes reclaim look for pages of these zones
//! among those of all. Invariant: a bounce page is given back when its read is done.

use super::memory::{Grant, LOW_ZONES};
use super::{Linux24, SpaceId};
use crate::cx::Cx;
use crate::mmu::PageTables;
use std::collections::VecDeque;

/// Pages that are bounced through, with the time when they are given back.
#[derive(Debug, Clone, Default)]
pub struct Bounces(VecDeque<(u64, Grant)>);

impl Linux24 {
    /// Bounce pages for a read of up to `pages`, as many as there are: the rest goes through a pool
    /// that is always there. None when the process had to reclaim instead and must ask again.
    pub(super) fn bounce_pages<M: PageTables>(
        &mut self,
        hw: &mut M,
        cx: &mut Cx<'_>,
        space: SpaceId,
        pages: u64,
    ) -> Option<Grant> {
        if !self.config.bounces || self.memory.zones[2].size == 0 {
            return Some(Grant::default());
        }
        let low = self.grab(cx, pages, &LOW_ZONES);
        if low.is_none() && self.direct_mut(space.0).fruitless == 0 {
            self.reclaim_directly(hw, cx, space, &LOW_ZONES);
            return None;
        }
        Some(low.unwrap_or_default())
    }

    /// Holds bounce pages for those of `read` that are in high memory until `done`.
    pub(super) fn hold_bounces(&mut self, mut low: Grant, high_pages: u64, done: u64) {
        let excess = low.pages().saturating_sub(high_pages);
        self.give_back(low.split_off(excess));
        if low.pages() > 0 {
            self.bounces.0.push_back((done, low));
        }
    }

    /// Gives back the bounce pages of reads that are done.
    pub(super) fn end_reads(&mut self, now: u64) {
        while self.bounces.0.front().is_some_and(|(done, _)| *done <= now) {
            let low = self.bounces.0.pop_front().map_or(Grant::default(), |(_, low)| low);
            self.give_back(low);
        }
    }

    /// Frees frames that hold nothing.
    pub(super) fn give_back(&mut self, grant: Grant) {
        self.memory.give_back(grant);
        self.config.policy.freed(grant.pages());
    }

    /// Buffer heads for the pages that were read.
    pub(super) fn grow_slabs(&mut self, cx: &mut Cx<'_>) {
        let missing = self.slab_pages_needed().saturating_sub(self.slab_pages);
        if missing > 0 {
            let allocation = self.config.policy.allocate(&mut self.memory, missing, &LOW_ZONES);
            self.slab_pages += allocation.grant.pages();
            if allocation.wake_daemon {
                cx.wake(super::KSWAPD);
            }
        }
    }
}
