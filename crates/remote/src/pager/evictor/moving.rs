//! Evictions by a move: UFFDIO_MOVE takes pages from the region to staging blocks.

use super::*;

impl Evictor {
    /// Moves the resident pages of neighbouring clusters to their blocks. Whole clusters go in one
    /// call, because each call interrupts all CPUs that run the program. Returns the moved pages,
    /// and the clusters with pages that the program may not write to: those can only be copied.
    pub(super) fn move_out(&self, victims: &[(usize, u32)]) -> (Vec<EvictedCluster>, Vec<usize>) {
        let shared = &self.shared;
        // In ascending order, and no other thread locks more than one.
        let hold = |(cluster, _): &(usize, u32)| {
            let held = shared.table.hold(*cluster);
            let wanted: PageMask = resident(&held);
            (held, wanted)
        };
        let held: Vec<(HeldCluster<'_>, PageMask)> = victims.iter().map(hold).collect();
        let (cluster, block) = victims[0];
        let count = victims.len() * CLUSTER_PAGES;
        let whole = run_of(0, CLUSTER_PAGES);
        let together = match held.len() > 1 && held.iter().all(|(_, wanted)| *wanted == whole) {
            true => {
                let from = shared.arena.span(cluster * CLUSTER_PAGES, count);
                shared.uffd.move_pages(shared.staged_span(block, 0, count), from).0
            }
            false => 0,
        };
        let (mut all, mut unwritable) = (Vec::with_capacity(victims.len()), Vec::new());
        for (nth, ((held, wanted), (cluster, block))) in held.into_iter().zip(victims).enumerate() {
            let first = cluster * CLUSTER_PAGES;
            let done = together.saturating_sub(nth * CLUSTER_PAGES).min(CLUSTER_PAGES);
            let done = run_of(0, done);
            let (moved, refused) = self.move_bits(first, *block, wanted & !done);
            let pages = done | moved;
            for bit in bits(pages) {
                let state = held.get(first + bit);
                held.set(first + bit, EvictedTo::Moved { block: *block }.of(state));
            }
            shared.count_staged(*block, pages.count_ones() as usize);
            drop(held);
            let stuck = (wanted & !pages).count_ones() as usize;
            if bits(refused).any(|bit| !self.is_locked(first + bit)) {
                unwritable.push(*cluster);
            } else if stuck > 0 {
                // The next round of the queue tries them again.
                add(&shared.stats.stuck_count, stuck);
                shared.enqueue(*cluster);
            }
            all.push(EvictedCluster::new(*cluster, EvictedTo::Moved { block: *block }, pages));
        }
        (all, unwritable)
    }

    /// Returns true if a page is locked: madvise(MADV_COLD) fails for locked memory.
    pub(super) fn is_locked(&self, page: usize) -> bool {
        self.shared.arena.span(page, 1).advise(Advice::LinuxCold).is_err()
    }

    /// Moves pages, run by run. Returns the moved pages, and those whose mapping refuses moves: it
    /// is locked or not writable.
    pub(super) fn move_bits(
        &self,
        first: usize,
        block: u32,
        wanted: PageMask,
    ) -> (PageMask, PageMask) {
        let shared = &self.shared;
        let (mut moved, mut refused, mut tried_alone, mut left) = (0, 0, 0, wanted);
        // A run that crosses the end of a mapping is refused as a whole.
        let mut run_max = CLUSTER_PAGES;
        while let Some((bit, count)) = runs(left).next() {
            let count = count.min(run_max);
            let from = shared.arena.span(first + bit, count);
            let (done, stopped) =
                shared.uffd.move_pages(shared.staged_span(block, bit, count), from);
            moved |= run_of(bit, done);
            left &= !run_of(bit, done);
            let at = bit + done;
            match stopped {
                None => {}
                Some(Errno::BUSY) if tried_alone & 1 << at == 0 => {
                    // The page is shared with a child since a fork. A write makes a private copy,
                    // which can be moved. If the page is busy for another reason, the next try
                    // fails too.
                    tried_alone |= 1 << at;
                    let _ = shared.arena.span(first + at, 1).advise(Advice::LinuxPopulateWrite);
                }
                Some(_) if count > 1 && run_max > 1 => run_max = 1,
                Some(why) => {
                    left &= !(1 << at);
                    refused |= PageMask::from(why == Errno::INVAL) << at;
                }
            }
        }
        (moved, refused)
    }
}
