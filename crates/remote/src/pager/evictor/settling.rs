//! The end of a batch: stored pages get their new states, others return to the region.

use super::*;

impl Evictor {
    /// Gives the pages of a batch their new states: copied clusters together, others one by one.
    /// Returns the number of pages that are out of the region.
    pub(super) fn settle_all(&self, mut batch: &[EvictedCluster], was_put: bool) -> usize {
        let mut out = 0;
        while !batch.is_empty() {
            let (together, rest) = batch.split_at(dropped_together(batch));
            // No other thread locks more than one.
            let held = together.iter().map(|moved| self.shared.table.hold(moved.cluster));
            let held: Vec<HeldCluster<'_>> = held.collect();
            let gone = self.drop_copied(together, &held, was_put);
            for ((moved, held), gone) in together.iter().zip(held).zip(gone) {
                if moved.is_copied() {
                    self.cancel_copies(moved, &held, moved.pages & !gone);
                    if gone != moved.pages {
                        self.shared.enqueue(moved.cluster);
                    }
                }
                out += self.settle(moved, held, was_put);
                self.shared.give_room(gone.count_ones() as usize);
            }
            batch = rest;
        }
        out
    }

    /// Gives the pages of a cluster their new states. Moved pages that could not be put go back.
    /// Returns the number of pages that are out of the region.
    pub(super) fn settle(
        &self,
        moved: &EvictedCluster,
        held: HeldCluster<'_>,
        was_put: bool,
    ) -> usize {
        let shared = &self.shared;
        let mut out = 0;
        for bit in bits(moved.pages) {
            let (page, state) = (moved.page(bit), held.get(moved.page(bit)));
            let (changed, is_zero) = (moved.changed & 1 << bit != 0, moved.zeros & 1 << bit != 0);
            if changed && !was_put {
                self.restore_page(moved, &held, bit);
            } else if moved.is_evicting(&held, bit) {
                out += 1;
                let state = state.with_in_store(state.in_store() || changed);
                held.set(
                    page,
                    match moved.location {
                        _ if is_zero => state.at(PageLocation::Untouched),
                        EvictedTo::Moved { block } => state.in_block(PageLocation::Staged, block),
                        EvictedTo::Copied { .. } => shared.drop_stamped(state),
                    },
                );
                if is_zero && state.in_store() {
                    shared.drop_from_store(page, page + 1);
                }
            } else if changed {
                // Refaulted or dropped meanwhile. The store's copy matches the MAC all the same.
                held.set(page, state.with_in_store(true));
                if state.location() == PageLocation::Untouched {
                    shared.drop_from_store(page, page + 1);
                }
            }
        }
        drop(held);
        self.count(moved, out, was_put);
        out
    }

    pub(super) fn count(&self, moved: &EvictedCluster, out: usize, was_put: bool) {
        let stats = &self.shared.stats;
        let (changed, zeros) =
            (moved.changed.count_ones() as usize, moved.zeros.count_ones() as usize);
        if was_put {
            add(&stats.page_out_count, changed);
        } else {
            self.shared.enqueue(moved.cluster);
        }
        add(&stats.evicted_zero_count, zeros);
        let unchanged = moved.pages.count_ones() as usize - changed - zeros;
        add(&stats.evicted_clean_count, unchanged.min(out));
    }

    pub(super) fn restore_page(&self, moved: &EvictedCluster, held: &HeldCluster<'_>, bit: usize) {
        let shared = &self.shared;
        let EvictedTo::Moved { block } = moved.location else { return };
        if !moved.is_evicting(held, bit) {
            return;
        }
        let to = shared.arena.span(moved.page(bit), 1);
        let (done, _) = shared.uffd.move_pages(to, shared.staged_span(block, bit, 1));
        if done == 1 {
            shared.count_unstaged(block, 1);
        } else {
            // It cannot be moved, but a copy can be installed. The frame is freed with its block.
            if shared.take_room(1) == 0 {
                shared.allow_overflow(true);
                shared.wait_for_room();
            }
            let bytes = moved.bytes((shared, &self.copy_buffer), bit, 1);
            if shared.uffd.copy(to, bytes).is_err() {
                // Its bytes stay staged. A fault on it is a soft refault, and the restore is tried
                // again.
                return shared.give_room(1);
            }
        }
        held.set(moved.page(bit), held.get(moved.page(bit)).at(PageLocation::Resident));
        shared.uffd.wake(to);
    }

    /// Restores pages that the store refused and for which the kernel had no memory. They exist
    /// only in their blocks, which must not be released before.
    pub(super) fn restore_unstored(&mut self, batch: &[EvictedCluster]) {
        let shared = self.shared.clone();
        while !shared.is_stopping.load(Relaxed) {
            let mut left = 0;
            for moved in batch.iter().filter(|moved| !moved.is_copied()) {
                let held = shared.table.hold(moved.cluster);
                for bit in bits(moved.changed) {
                    self.restore_page(moved, &held, bit);
                    left += usize::from(moved.is_evicting(&held, bit));
                }
            }
            if left == 0 {
                return;
            }
            if self.stuck_log.is_due() {
                shared.log(&format!("{left} pages that cannot be stored wait to be put back"));
            }
            // Frees the memory of older blocks.
            self.release_oldest(usize::MAX);
            std::thread::sleep(BACK_OFF);
        }
    }
}
