//! Dropped pages: they read as zeros, and the store discards them later.

use super::*;

impl SharedPager {
    /// Drops pages: they read as zeros, and the store discards them later. Returns false if some pages,
    /// such as locked ones, keep their bytes.
    pub fn discard(&self, first: usize, count: usize) -> bool {
        let end = (first + count).min(self.table.pages());
        let (mut page, mut dropped_all) = (first, true);
        while page < end {
            let until = ((cluster_of(page) + 1) * CLUSTER_PAGES).min(end);
            dropped_all &= self.discard_in_cluster(page, until);
            page = until;
        }
        self.work.notify();
        dropped_all
    }

    pub(super) fn discard_in_cluster(&self, first: usize, end: usize) -> bool {
        if self.table.is_untouched(first..end) {
            return true;
        }
        let held = self.hold_without_fetches(first, end);
        let locations = || (first..end).map(|page| held.get(page).location());
        let resident = locations().filter(|location| location.is_mapped()).count();
        if resident > 0
            && self.arena.span(first, end - first).advise(Advice::LinuxDontNeed).is_err()
        {
            return false;
        }
        let mut in_store = false;
        for page in first..end {
            let state = held.get(page);
            in_store |= state.in_store();
            if state.location() == PageLocation::Lost
                && let Err(error) = self.uffd.unpoison(self.arena.span(page, 1))
            {
                self.log(&format!("page {page} stays lost, though it was dropped: {error}"));
                continue;
            }
            held.set(page, state.at(PageLocation::Untouched));
        }
        drop(held);
        self.give_room(resident);
        if in_store {
            self.drop_from_store(first, end);
        }
        true
    }

    /// Locks the cluster of some pages while none of them is being fetched. Polls, so that a fetch need not
    /// notify: discards of pages in flight are rare.
    pub(super) fn hold_without_fetches(&self, first: usize, end: usize) -> HeldCluster<'_> {
        loop {
            let held = self.table.hold(cluster_of(first));
            if (first..end).all(|page| held.get(page).location() != PageLocation::Fetching) {
                return held;
            }
            drop(held);
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    /// Records pages that the store may discard.
    pub fn drop_from_store(&self, first: usize, end: usize) {
        let run = PageRun { first: first as u64, count: (end - first) as u64 };
        let mut dropped = lock(&self.dropped);
        match dropped.last_mut() {
            Some(last) if last.end() == Some(run.first) => last.count += run.count,
            _ => dropped.push(run),
        }
    }

    /// Takes the recorded pages.
    pub fn take_dropped(&self) -> Vec<PageRun> {
        std::mem::take(&mut lock(&self.dropped))
    }
}
