//! Soft refaults: faults on pages whose eviction has not ended, or that are staged.

use super::*;

impl FaultHandler {
    /// Serves a page that is still in a staging block. If much of the block refaults, its pages are moved
    /// back. A single page is copied, because a move interrupts all CPUs that run the program. Pages that
    /// are being put are copied too: their bytes must stay.
    pub(super) fn serve_soft_refault(&self, held: HeldCluster<'_>, page: usize) -> bool {
        let shared = &self.shared;
        let (state, this) = (held.get(page), run_of(page % CLUSTER_PAGES, 1));
        let all = if shared.is_refaulted_whole(state.block()) {
            in_same_block(&held, state)
        } else {
            this
        };
        let may_move = state.location() == PageLocation::Staged && all != this;
        let is_moved = may_move && self.move_back(&held, state.block(), all) & this != 0;
        if !is_moved {
            let others = all.count_ones() as usize - 1;
            let room = shared.take_room(if may_move { 0 } else { others });
            let all = if room == others { all } else { this };
            let (copied, refused) = self.copy_back(&held, state.block(), all);
            shared.give_room(room - (copied & !this).count_ones() as usize);
            if copied & this == 0 {
                drop(held);
                if refused != Some(Errno::NOMEM) {
                    shared.log(&format!("page {page} cannot be installed: {refused:?}"));
                }
                // Its bytes are in memory, so the fault is retried however long that takes.
                let _ = refused.map(|error| shared.may_retry(error));
                shared.uffd.wake(shared.arena.span(page, 1));
                return false;
            }
        }
        held.mark_refaulted();
        drop(held);
        shared.note_memory_found();
        add(&shared.stats.soft_refault_count, 1);
        shared.enqueue(cluster_of(page));
        !is_moved
    }

    /// Moves staged pages of a block back. Returns the moved pages.
    pub(super) fn move_back(
        &self,
        held: &HeldCluster<'_>,
        block: u32,
        wanted: PageMask,
    ) -> PageMask {
        let (shared, first) = (&self.shared, held.pages().start);
        let mut moved = 0;
        for (bit, count) in runs(wanted) {
            let to = shared.arena.span(first + bit, count);
            let (done, _) = shared.uffd.move_pages(to, shared.staged_span(block, bit, count));
            moved |= run_of(bit, done);
        }
        self.mark_resident(held, moved);
        shared.count_unstaged(block, moved.count_ones() as usize);
        if moved != 0 {
            let (begin, end) = ends(moved);
            shared.uffd.wake(shared.arena.span(first + begin, end - begin));
        }
        moved
    }

    /// Copies pages of a block back, and leaves the block as it is. Returns the copied pages, and
    /// the error of the others.
    pub(super) fn copy_back(
        &self,
        held: &HeldCluster<'_>,
        block: u32,
        wanted: PageMask,
    ) -> (PageMask, Option<Errno>) {
        let (shared, first) = (&self.shared, held.pages().start);
        let (mut copied, mut refused) = (0, None);
        let mut copy = |bit: usize, count: usize| {
            let bytes = shared.staging.bytes(block as usize * CLUSTER_PAGES + bit, count);
            let done = shared.uffd.copy(shared.arena.span(first + bit, count), bytes);
            match done {
                Ok(()) => copied |= run_of(bit, count),
                Err(error) => refused = Some(error),
            }
            done.is_ok()
        };
        for (bit, count) in runs(wanted) {
            // A run that crosses the end of a mapping is refused as a whole; then copy page by
            // page.
            if !copy(bit, count) && count > 1 {
                for bit in bit..bit + count {
                    copy(bit, 1);
                }
            }
        }
        self.mark_resident(held, copied);
        (copied, refused)
    }

    pub(super) fn mark_resident(&self, held: &HeldCluster<'_>, pages: PageMask) {
        self.shared.count_made_resident(pages.count_ones() as usize);
        for page in bits(pages).map(|bit| held.pages().start + bit) {
            held.set(page, held.get(page).at(PageLocation::Resident));
        }
    }
}

/// Returns the pages of a cluster that have the same location and the same block.
pub(super) fn in_same_block(held: &HeldCluster<'_>, state: PageState) -> PageMask {
    let pages = (0..).zip(held.pages()).filter(|(_, page)| held.get(*page).is_same_location(state));
    mask_of(pages.map(|(bit, _)| bit))
}
