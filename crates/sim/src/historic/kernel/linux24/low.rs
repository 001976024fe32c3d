//! The users of memory below 896 MiB: buffer heads of file pages, and bounce pages.
//!
//! The kernel's own objects must be in memory that it can address. The disk's driver reads a page
//! of high memory through a page below it, which is held until the read is done. So every read
//! allocates pages from the two lower zones. Their shortage makes reclaim search all pages for
//! those of these zones. Invariant: a bounce page is freed when its read is done.

use super::memory::{Grant, LOW_ZONES};
use super::{Linux24, SpaceId};
use crate::hardware::PageTables;
use crate::historic::cx::Cx;
use std::collections::VecDeque;

/// Bounce pages in use, each with the time when they are freed.
#[derive(Debug, Clone, Default)]
pub struct Bounces(VecDeque<(u64, Grant)>);

impl Linux24 {
    /// Allocates bounce pages for a read of up to `pages`, as many as are available. The rest uses
    /// a pool that always exists. Returns None if the process had to reclaim instead; it must then
    /// ask again.
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

    /// Holds bounce pages for the `high_pages` of a read that are in high memory until `done`, and
    /// frees the others.
    pub(super) fn hold_bounces(&mut self, mut low: Grant, high_pages: u64, done: u64) {
        let excess = low.pages().saturating_sub(high_pages);
        self.give_back(low.split_off(excess));
        if low.pages() > 0 {
            self.bounces.0.push_back((done, low));
        }
    }

    /// Frees the bounce pages of reads that are done.
    pub(super) fn end_reads(&mut self, now: u64) {
        while self.bounces.0.front().is_some_and(|(done, _)| *done <= now) {
            let low = self.bounces.0.pop_front().map_or(Grant::default(), |(_, low)| low);
            self.give_back(low);
        }
    }

    /// Frees frames that hold nothing, and lowers the policy's memory pressure.
    pub(super) fn give_back(&mut self, grant: Grant) {
        self.memory.give_back(grant);
        self.config.policy.freed(grant.pages());
    }

    /// Allocates buffer heads for the pages that were read.
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
