//! Which pages of the paged region are given out. Pure: no memory is touched.
//!
//! Invariant: no page is given out twice. New ranges go into the middle of the largest free range, so
//! that what they are followed by stays free and they can grow where they are.

use std::collections::BTreeMap;

/// Ranges that are free, by first page; never adjacent to each other.
#[derive(Debug)]
pub struct Space {
    free: BTreeMap<usize, usize>,
    /// Ranges that malloc gave out, by first page: it must know their lengths again.
    allocations: BTreeMap<usize, usize>,
}

/// Ranges of this many pages and more begin at multiples of it: allocators like to have it so.
const ALIGNED_PAGES: usize = (32 << 20) / 4096;

impl Space {
    /// All free.
    pub fn new(pages: usize) -> Space {
        Space { free: BTreeMap::from([(0, pages)]), allocations: BTreeMap::new() }
    }

    /// A range of this many pages, which begins at a multiple of `align` pages.
    pub fn take(&mut self, pages: usize, align: usize) -> Option<usize> {
        let align = if pages >= ALIGNED_PAGES { align.max(ALIGNED_PAGES) } else { align.max(1) };
        let (first, len) = self.free.iter().max_by_key(|(_, len)| **len).map(|(f, l)| (*f, *l))?;
        let middle = (first + len / 2).next_multiple_of(align);
        if middle.checked_add(pages)? <= first + len / 4 * 3 {
            return self.take_at(middle, pages).then_some(middle);
        }
        let place = |(first, len): (&usize, &usize)| {
            let at = first.next_multiple_of(align);
            (at.checked_add(pages)? <= first + len).then_some(at)
        };
        let at = self.free.iter().find_map(place)?;
        self.take_at(at, pages).then_some(at)
    }

    /// Exactly this range, if all of it is free.
    fn take_at(&mut self, at: usize, pages: usize) -> bool {
        let Some((&first, &len)) = self.free.range(..=at).next_back() else { return false };
        if at + pages > first + len {
            return false;
        }
        self.free.remove(&first);
        if at > first {
            self.free.insert(first, at - first);
        }
        if at + pages < first + len {
            self.free.insert(at + pages, first + len - at - pages);
        }
        true
    }

    /// Makes a range longer where it is, if what follows is free.
    pub fn grow(&mut self, end: usize, pages: usize) -> bool {
        pages == 0 || self.take_at(end, pages)
    }

    /// Takes a range back. Parts that are free stay so.
    pub fn give(&mut self, first: usize, pages: usize) {
        let (mut first, mut end) = (first, first + pages);
        // All free ranges that touch or overlap become one with it.
        while let Some((&at, &len)) = self.free.range(..=end).next_back() {
            if at + len < first {
                break;
            }
            self.free.remove(&at);
            (first, end) = (first.min(at), end.max(at + len));
        }
        self.free.insert(first, end - first);
    }

    /// Notes a range as malloc's.
    pub fn note(&mut self, first: usize, pages: usize) {
        self.allocations.insert(first, pages);
    }

    /// Pages of malloc's range that begins here.
    pub fn noted(&self, first: usize) -> Option<usize> {
        self.allocations.get(&first).copied()
    }

    /// Forgets a range of malloc's; how long it was.
    pub fn forget(&mut self, first: usize) -> Option<usize> {
        self.allocations.remove(&first)
    }
}
