//! Least recently used.

use super::lists::PageLists;
use super::{Policy, PolicyCounts, SinglePages};

/// The one list.
const RESIDENT: usize = 0;

pub(super) struct Lru {
    limit: usize,
    lists: PageLists<1>,
    pages: SinglePages,
}

impl Lru {
    pub fn new(pages: usize, limit: usize) -> Lru {
        Lru { limit, lists: PageLists::new(pages), pages: SinglePages::new(pages) }
    }
}

impl Policy for Lru {
    fn access(&mut self, page: u32, is_write: bool) {
        let is_resident = self.lists.list_of(page).is_some();
        self.pages.note(page, is_write, is_resident);
        let is_full = self.lists.len(RESIDENT) >= self.limit;
        let victim = self.lists.oldest(RESIDENT).filter(|_| !is_resident && is_full);
        if let Some(victim) = victim {
            self.lists.remove(victim);
            self.pages.evict(victim);
        }
        self.lists.put(page, RESIDENT);
    }

    fn unmap(&mut self, page: u32) {
        self.lists.remove(page);
        self.pages.forget(page);
    }

    fn zeros(&mut self, page: u32) {
        self.pages.zeros(page);
    }

    fn counts(&self) -> PolicyCounts {
        self.pages.counts
    }
}
