//! Pages that leave by a copy, where they cannot be moved or that is dearer.
//!
//! Kernels before Linux 6.8 cannot move pages. There they are protected from writes, copied, and dropped under
//! the cluster's lock when the copies are put, if they are still protected: a write meanwhile is
//! a fault, for which the handler takes the protection away ([`PageLocation::CopyingOut`] becomes [`PageLocation::Resident`]),
//! and the copy is thrown away. This stops no device: what one writes to a page after it was copied is lost,
//! while a page that is pinned for it is not moved. Nothing tells cheaply whether a page is pinned.
//!
//! A move interrupts all CPUs that run the program once for each run of adjacent pages; a copy does it once for
//! a cluster, and once more for many clusters ([`EvictionMethod::Cheapest`]). Copied pages are never staged: the memory
//! for copies is used again and again, where a staging block's would be allocated and cleared for each page,
//! and the room goes to resident pages.
//!
//! Invariants: a copy is put only of a page that was protected before it was taken; such a page is dropped only
//! while its cluster is held and it is still [`PageLocation::CopyingOut`], so nothing that was written since is lost.

use super::{EvictedCluster, EvictedTo, Evictor, resident};
use crate::pager::mask::{PageMask, bits, ends, mask_of, run_of, runs};
use crate::pager::options::EvictionMethod;
use crate::pager::stats::add;
use crate::pager::sys::memory::{PageSpan, drop_all};
use crate::pager::table::{CLUSTER_PAGES, HeldCluster, PageLocation};
use rustix::mm::Advice;
use std::sync::atomic::Ordering::Relaxed;

/// Most copied pages that are dropped at once, as their clusters are held meanwhile.
const DROP_PAGES: u32 = 64;

/// Said when the first page leaves so.
const COPYING_NOTICE: &str = "pages leave by a copy under write protection, as they cannot be moved (Linux 6.8 can): do not \
     let devices write to paged memory (direct I/O, io_uring's registered buffers), as what one writes to a \
     page after its copy is lost";

impl Evictor {
    /// Copies the resident pages of a cluster, protected from writes: those that nobody writes
    /// to until the copies are put will leave. Pages that may not be read stay.
    ///
    /// The program may have had the kernel drop a page of them, past us: that page is zeros from now on.
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
        // All at once, with what lies between: none of that is here. Where a mapping ends there, each run.
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
            // If it cannot be made zeros, it is here, and may not be read.
            let _ = shared.uffd.zero(shared.arena.span(first + bit, 1));
        }
        let moved = EvictedCluster::new(cluster, location, pages);
        for bit in bits(pages) {
            held.set(first + bit, location.of(held.get(first + bit)));
        }
        if wanted != pages {
            self.cancel_copies(&moved, &held, wanted & !pages);
            add(&shared.stats.stuck_count, (wanted & !pages).count_ones() as usize);
            // They are looked at again when their turn comes.
            shared.enqueue(cluster);
        }
        moved
    }

    /// Copies a run, without pages that are missing or may not be read; returns the copied pages.
    fn copy_run(&mut self, first: usize, bit: usize, count: usize) -> PageMask {
        let shared = self.shared.clone();
        // Only where all pages are moved there is none.
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

    /// Cancels the copies of pages: they stay.
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
                // Whoever writes to it asks for it, and it is tried again.
                shared.log(&format!("page {page} stays protected for now: {error}"));
            }
        }
    }

    /// Drops copied pages of clusters that are held; returns which of each. One call interrupts the CPUs that
    /// run the program once, if all can be dropped and the kernel can do so (Linux 6.16 can).
    pub(super) fn drop_copied(
        &self,
        all: &[EvictedCluster],
        held: &[HeldCluster<'_>],
        was_put: bool,
    ) -> Vec<PageMask> {
        let leaving = |(moved, held): (&EvictedCluster, &HeldCluster<'_>)| {
            let kept = if was_put { 0 } else { moved.changed };
            let leaving = bits(moved.pages & !kept).filter(|bit| moved.is_evicting(held, *bit));
            if moved.is_copied() { mask_of(leaving) } else { 0 }
        };
        let leaving: Vec<PageMask> = all.iter().zip(held).map(leaving).collect();
        let each = || all.iter().zip(&leaving);
        let spans = each().flat_map(|(moved, leaving)| {
            runs(*leaving).map(|(bit, count)| self.shared.arena.span(moved.page(bit), count))
        });
        let spans: Vec<PageSpan<'_>> = spans.collect();
        if spans.is_empty() || drop_all(&spans) {
            return leaving;
        }
        let drop_runs = |(moved, leaving): (&EvictedCluster, &PageMask)| {
            runs(*leaving).fold(0, |gone, (bit, count)| gone | self.drop_run(moved, bit, count))
        };
        each().map(drop_runs).collect()
    }

    /// Drops a run of pages, without locked ones; returns the dropped pages.
    fn drop_run(&self, moved: &EvictedCluster, bit: usize, count: usize) -> PageMask {
        let drop = |bit: usize, count: usize| {
            let span = self.shared.arena.span(moved.page(bit), count);
            span.advise(Advice::LinuxDontNeed).is_ok()
        };
        if drop(bit, count) {
            return run_of(bit, count);
        }
        // Some of them may be gone; those are dropped once more.
        let gone = mask_of((bit..bit + count).filter(|bit| drop(*bit, 1)));
        add(&self.shared.stats.stuck_count, count - gone.count_ones() as usize);
        gone
    }
}

/// Returns the number of clusters of a batch to drop together: copied ones, each once.
pub(super) fn dropped_together(batch: &[EvictedCluster]) -> usize {
    let mut pages = 0;
    let mut fits = |(nth, moved): &(usize, &EvictedCluster)| {
        pages += moved.pages.count_ones();
        let is_new = batch[..*nth].iter().all(|before| before.cluster != moved.cluster);
        moved.is_copied() && is_new && pages <= DROP_PAGES
    };
    batch.iter().enumerate().take_while(|each| fits(each)).count().max(1)
}
