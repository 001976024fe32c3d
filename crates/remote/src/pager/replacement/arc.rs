//! Adaptive replacement cache: pages seen once against pages seen again, in a proportion that follows the
//! pages that come back. Source: Megiddo, Modha, FAST 2003, figure 4.

use super::lists::PageLists;
use super::{Policy, PolicyCounts, SinglePages};

/// Resident pages that were seen once since they came…
const ONCE: usize = 0;
/// …and more often.
const OFTEN: usize = 1;
/// Pages that left the list of those seen once…
const LEFT_ONCE: usize = 2;
/// …and the other one.
const LEFT_OFTEN: usize = 3;

pub(super) struct Arc {
    limit: usize,
    /// The pages that [`ONCE`] should have.
    target: usize,
    lists: PageLists<4>,
    pages: SinglePages,
}

impl Arc {
    pub fn new(pages: usize, limit: usize) -> Arc {
        Arc { limit, target: 0, lists: PageLists::new(pages), pages: SinglePages::new(pages) }
    }

    /// Makes room for a page: `is_from_often` if it left the list of pages seen more often.
    fn replace(&mut self, is_from_often: bool) {
        let once = self.lists.len(ONCE);
        let is_over = once > self.target || is_from_often && once == self.target;
        let (from, to) = match once > 0 && is_over {
            true => (ONCE, LEFT_ONCE),
            false => (OFTEN, LEFT_OFTEN),
        };
        if let Some(victim) = self.lists.oldest(from).or_else(|| self.lists.oldest(ONCE)) {
            self.pages.evict(victim);
            self.lists.put(victim, to);
        }
    }

    fn resident(&self) -> usize {
        self.lists.len(ONCE) + self.lists.len(OFTEN)
    }

    fn bring(&mut self, page: u32) {
        let of = |list| self.lists.len(list);
        let (left_once, left_often) = (of(LEFT_ONCE), of(LEFT_OFTEN));
        let list = match self.lists.list_of(page) {
            Some(LEFT_ONCE) => {
                let more = (left_often / left_once.max(1)).max(1);
                self.target = (self.target + more).min(self.limit);
                OFTEN
            }
            Some(LEFT_OFTEN) => {
                self.target = self.target.saturating_sub((left_once / left_often.max(1)).max(1));
                OFTEN
            }
            _ => ONCE,
        };
        let is_from_often = self.lists.list_of(page) == Some(LEFT_OFTEN);
        if self.resident() >= self.limit {
            self.replace(is_from_often);
        }
        if list == ONCE {
            self.forget_history();
        }
        self.lists.put(page, list);
    }

    /// Forgets pages that left, so that a new page keeps the lists within twice the limit.
    fn forget_history(&mut self) {
        let of = |list| self.lists.len(list);
        let once = of(ONCE) + of(LEFT_ONCE);
        let oldest = match once >= self.limit {
            true => self.lists.oldest(LEFT_ONCE),
            false if once + of(OFTEN) + of(LEFT_OFTEN) >= 2 * self.limit => {
                self.lists.oldest(LEFT_OFTEN)
            }
            false => None,
        };
        if let Some(oldest) = oldest {
            self.lists.remove(oldest);
        }
    }
}

impl Policy for Arc {
    fn access(&mut self, page: u32, is_write: bool) {
        let is_resident = matches!(self.lists.list_of(page), Some(ONCE | OFTEN));
        self.pages.note(page, is_write, is_resident);
        match is_resident {
            true => self.lists.put(page, OFTEN),
            false => self.bring(page),
        }
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
