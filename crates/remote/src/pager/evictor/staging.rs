//! Staging blocks: their allocation, and the release of the oldest.

use super::*;

impl Evictor {
    pub(super) fn next_block(&self) -> Option<u32> {
        let is_left = (self.fresh_block as usize) < self.shared.frames.len();
        self.free_blocks.front().copied().or(is_left.then_some(self.fresh_block))
    }

    pub(super) fn take_block(&mut self) -> Option<u32> {
        let next = self.next_block();
        if self.free_blocks.pop_front().is_none() {
            self.fresh_block += next.is_some() as u32;
        }
        next
    }

    /// Drops the frames of the oldest staged blocks, until `wanted` pages are freed. Adjacent
    /// blocks go in one call, because each call interrupts all CPUs that run the program. Returns
    /// false if no block is staged.
    pub(super) fn release_oldest(&mut self, wanted: usize) -> bool {
        let shared = self.shared.clone();
        let (mut first, mut count, mut pages) = (0, 0, 0);
        while let Some((block, cluster)) = self.staged.front().copied() {
            if count > 0 && (block != first + count || pages >= wanted || count >= RELEASE_MAX) {
                break;
            }
            self.staged.pop_front();
            (first, count) = (block - count, count + 1);
            pages += shared.frames[block as usize].load(Relaxed) as usize;
            let held = shared.table.hold(cluster);
            for page in held.pages() {
                let state = held.get(page);
                if state.location() == PageLocation::Staged && state.block() == block {
                    held.set(page, shared.drop_stamped(state));
                }
            }
        }
        if count == 0 {
            return false;
        }
        self.refill_frame_pool(first, count);
        // Even if all pages have gone back: a read of a hole leaves a page of zeros, and a move
        // needs missing pages as its target.
        let span = shared.staged_span(first, 0, count as usize * CLUSTER_PAGES);
        if let Err(error) = span.advise(Advice::LinuxDontNeed) {
            shared.log(&format!("staged pages cannot be dropped: {error}"));
        }
        for block in first..first + count {
            shared.count_released(block);
            self.free_blocks.push_back(block);
        }
        true
    }

    /// Moves the frames of whole blocks into the frame pool, as long as runs of pages ask for them.
    pub(super) fn refill_frame_pool(&self, first: u32, count: u32) {
        const BLOCKS: u32 = (RUN_PAGES_MAX / CLUSTER_PAGES) as u32;
        let shared = &self.shared;
        let is_whole = |block| shared.frames[block as usize].load(Relaxed) == CLUSTER_PAGES as u32;
        for block in (first..first + count).step_by(BLOCKS as usize) {
            if block + BLOCKS > first + count || !(block..block + BLOCKS).all(is_whole) {
                continue;
            }
            let Some(spare) = shared.frame_pool.take_empty() else { break };
            let from = shared.staged_span(block, 0, RUN_PAGES_MAX);
            let (moved, _) = shared.uffd.move_pages(spare.all(), from);
            let frames = if moved == RUN_PAGES_MAX { SpareFrames::All } else { SpareFrames::Some };
            shared.frame_pool.put(spare, frames);
        }
    }
}
