//! Evictions by a copy, for pages that cannot be moved or for which a move is more expensive.
//!
//! Kernels before Linux 6.8 cannot move pages. There the evictor protects pages from writes and
//! copies them. When the copies are put, it drops the pages under the cluster's lock, if they are
//! still protected. A write meanwhile faults: the handler removes the protection
//! ([`PageLocation::CopyingOut`] becomes [`PageLocation::Resident`]), and the copy is discarded.
//!
//! This stops no device. What a device writes to a page after its copy is lost, whereas a pinned
//! page is never moved. The kernel has no cheap test for a pinned page.
//!
//! A move interrupts all CPUs that run the program once for each run of adjacent pages. A copy
//! interrupts them once for a cluster, and once more for many clusters
//! ([`EvictionMethod::Cheapest`]). Copied pages are never staged, so their room goes to resident
//! pages. The copy buffer is reused, whereas each page of a staging block would be allocated and
//! cleared.
//!
//! Invariants: a page is protected before the copy that is put. It is dropped only under its
//! cluster's lock and while it is still [`PageLocation::CopyingOut`], so no later write is lost.

use super::{EvictedCluster, EvictedTo, Evictor, resident};
use crate::pager::mask::{PageMask, bits, ends, mask_of, run_of, runs};
use crate::pager::options::EvictionMethod;
use crate::pager::stats::add;
use crate::pager::sys::memory::{PageSpan, drop_all};
use crate::pager::table::{CLUSTER_PAGES, HeldCluster, PageLocation};
use rustix::mm::Advice;
use std::sync::atomic::Ordering::Relaxed;

/// The most copied pages that are dropped in one call: their clusters are locked meanwhile.
const DROP_PAGES: u32 = 64;

/// The line that is logged at the first eviction by a copy.
const COPYING_NOTICE: &str = "pages are evicted by a copy under write protection, as they cannot be moved (Linux 6.8 can): do not \
     let devices write to paged memory (direct I/O, io_uring's registered buffers), as what one writes to a \
     page after its copy is lost";

impl Evictor {
    /// Write-protects the resident pages of a cluster and copies them. Pages that no thread writes
    /// to until the copies are put will be evicted. Pages that may not be read stay.
    ///
    /// A page may be missing, because the program dropped it past the pager. It becomes zeros.
    pub(super) fn copy_out(&mut self, cluster: usize) -> EvictedCluster {
        let shared = self.shared.clone();
        if shared.eviction_method == EvictionMethod::Copied
            && !shared.has_logged_copies.swap(true, Relaxed)
        {
            shared.log(COPYING_NOTICE);
        }
        let first = cluster * CLUSTER_PAGES;
        let held = shared.table.hold(cluster);
        let wanted = resident(&held);
        let protect =
            |bit, count| shared.uffd.protect(shared.arena.span(first + bit, count), true).is_ok();
        // Protect all runs in one call, and the gaps, which have no pages. If a mapping ends in
        // between, protect run by run.
        let (begin, end) = ends(wanted);
        let together = end > begin && protect(begin, end - begin);
        let location = EvictedTo::Copied { first: self.copy_buffer_used as u32 };
        let mut pages = 0;
        for (bit, count) in runs(wanted) {
            if together || protect(bit, count) {
                pages |= self.copy_run(first, bit, count);
            }
        }
        for bit in bits(wanted & !pages) {
            // If it cannot be made zeros, it is present and may not be read.
            let _ = shared.uffd.zero(shared.arena.span(first + bit, 1));
        }
        let moved = EvictedCluster::new(cluster, location, pages);
        for bit in bits(pages) {
            held.set(first + bit, location.of(held.get(first + bit)));
        }
        if wanted != pages {
            self.cancel_copies(&moved, &held, wanted & !pages);
            add(&shared.stats.stuck_count, (wanted & !pages).count_ones() as usize);
            // The next round of the queue tries them again.
            shared.enqueue(cluster);
        }
        moved
    }

    /// Copies a run, except pages that are missing or may not be read. Returns the copied pages.
    fn copy_run(&mut self, first: usize, bit: usize, count: usize) -> PageMask {
        let shared = self.shared.clone();
        // It is absent only if all pages are moved.
        let Some(own_memory) = &shared.own_memory else { return 0 };
        let (mut copied, mut at, end) = (0, bit, bit + count);
        while at < end {
            let from = self.shared.arena.span(first + at, end - at);
            let done =
                own_memory.copy(self.copy_buffer.span(self.copy_buffer_used, end - at), from);
            self.copy_buffer_used += done;
            copied |= run_of(at, done);
            at += done + 1;
        }
        copied
    }

    /// Cancels the copies of pages, so that the pages stay.
    pub(super) fn cancel_copies(
        &self,
        moved: &EvictedCluster,
        held: &HeldCluster<'_>,
        pages: PageMask,
    ) {
        let shared = &self.shared;
        for bit in bits(pages) {
            let (page, state) = (moved.page(bit), held.get(moved.page(bit)));
            if moved.is_evicting(held, bit) {
                held.set(page, state.at(PageLocation::Resident));
            }
            if held.get(page).location() == PageLocation::Resident
                && let Err(error) = shared.uffd.protect(shared.arena.span(page, 1), false)
            {
                // A write to it faults, and the handler tries again.
                shared.log(&format!("page {page} stays protected for now: {error}"));
            }
        }
    }

    /// Drops the copied pages of locked clusters. Returns the dropped pages of each cluster. One
    /// call interrupts the CPUs that run the program once, if the kernel can do it (Linux 6.16 can)
    /// and all pages can be dropped.
    pub(super) fn drop_copied(
        &self,
        all: &[EvictedCluster],
        held: &[HeldCluster<'_>],
        was_put: bool,
    ) -> Vec<PageMask> {
        let evictable = |(moved, held): (&EvictedCluster, &HeldCluster<'_>)| {
            let kept = if was_put { 0 } else { moved.changed };
            let evictable = bits(moved.pages & !kept).filter(|bit| moved.is_evicting(held, *bit));
            if moved.is_copied() { mask_of(evictable) } else { 0 }
        };
        let evictable: Vec<PageMask> = all.iter().zip(held).map(evictable).collect();
        let each = || all.iter().zip(&evictable);
        let spans = each().flat_map(|(moved, evictable)| {
            runs(*evictable).map(|(bit, count)| self.shared.arena.span(moved.page(bit), count))
        });
        let spans: Vec<PageSpan<'_>> = spans.collect();
        if spans.is_empty() || drop_all(&spans) {
            return evictable;
        }
        let drop_runs = |(moved, evictable): (&EvictedCluster, &PageMask)| {
            runs(*evictable).fold(0, |gone, (bit, count)| gone | self.drop_run(moved, bit, count))
        };
        each().map(drop_runs).collect()
    }

    /// Drops a run of pages, except locked ones. Returns the dropped pages.
    fn drop_run(&self, moved: &EvictedCluster, bit: usize, count: usize) -> PageMask {
        let drop = |bit: usize, count: usize| {
            let span = self.shared.arena.span(moved.page(bit), count);
            span.advise(Advice::LinuxDontNeed).is_ok()
        };
        if drop(bit, count) {
            return run_of(bit, count);
        }
        // Some of them may be dropped already; dropping them again does no harm.
        let gone = mask_of((bit..bit + count).filter(|bit| drop(*bit, 1)));
        add(&self.shared.stats.stuck_count, count - gone.count_ones() as usize);
        gone
    }
}

/// Returns the number of leading clusters of a batch to drop together: copied ones, none twice.
pub(super) fn dropped_together(batch: &[EvictedCluster]) -> usize {
    let mut pages = 0;
    let mut fits = |(nth, moved): &(usize, &EvictedCluster)| {
        pages += moved.pages.count_ones();
        let is_new = batch[..*nth].iter().all(|before| before.cluster != moved.cluster);
        moved.is_copied() && is_new && pages <= DROP_PAGES
    };
    batch.iter().enumerate().take_while(|each| fits(each)).count().max(1)
}
