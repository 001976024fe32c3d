//! The index of a region: page number to slot.
//!
//! Neighbouring pages share a leaf of [`LEAF_PAGES`] entries. So the lookup of a run takes few cache
//! misses, and the index takes less memory.

use super::slab::PageSlot;
use pagetax_core::access::mix64;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// The number of pages of a leaf, which is half a cache line. A region of scattered pages pays for
/// whole leaves.
const LEAF_PAGES: u64 = 8;

/// The most bytes that the index takes for a page. The worst case is a leaf of 41 bytes for one
/// page, in a hash table that is 7/16 full, and half as much again while the table grows.
pub const BYTES_MAX: u64 = 141;

/// A hasher of page numbers, with one round of mixing. A client that provokes collisions slows down
/// only its own region.
#[derive(Debug, Default)]
pub struct PageHasher(u64);

impl Hasher for PageHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = mix64(self.0 ^ *byte as u64));
    }

    fn write_u64(&mut self, page: u64) {
        self.0 = mix64(self.0 ^ page);
    }
}

type Leaf = [Option<PageSlot>; LEAF_PAGES as usize];

/// The slots of a region's pages.
#[derive(Debug, Default, Clone)]
pub struct PageIndex {
    leaves: HashMap<u64, Leaf, BuildHasherDefault<PageHasher>>,
    pages: u64,
}

impl PageIndex {
    /// Returns the number of pages that are held.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Returns the slot of a page, or `None` if the page is not held.
    pub fn get(&self, page: u64) -> Option<PageSlot> {
        self.leaves.get(&(page / LEAF_PAGES))?[(page % LEAF_PAGES) as usize]
    }

    /// Records the slot of a page. Returns the slot that it had before.
    pub fn insert(&mut self, page: u64, slot: PageSlot) -> Option<PageSlot> {
        let leaf = self.leaves.entry(page / LEAF_PAGES).or_default();
        let before = leaf[(page % LEAF_PAGES) as usize].replace(slot);
        self.pages += before.is_none() as u64;
        before
    }

    /// Returns an upper bound of the bytes that the index takes.
    pub fn bytes(&self) -> u64 {
        // A hash table is at most seven eighths full, and has a byte of its own for each place.
        let places = self.leaves.capacity() as u64 * 8 / 7 + 1;
        places * (size_of::<(u64, Leaf)>() as u64 + 1)
    }

    /// Returns the slot of each page.
    pub fn slots(&self) -> impl Iterator<Item = PageSlot> {
        self.leaves.values().flatten().flatten().copied()
    }

    /// Returns the slots of all pages.
    pub fn into_slots(self) -> Vec<PageSlot> {
        self.leaves.into_values().flatten().flatten().collect()
    }

    /// Removes the pages from `first` to `end`, and passes their slots to `gone`.
    pub fn remove(&mut self, first: u64, end: u64, mut gone: impl FnMut(PageSlot)) {
        let is_in = |page: &u64| (first..end).contains(page);
        let pages = &mut self.pages;
        let mut empty = |number: u64, leaf: &mut Leaf| {
            for (at, place) in (0..).zip(leaf.iter_mut()) {
                if let Some(slot) = place.take_if(|_| is_in(&(number * LEAF_PAGES + at))) {
                    *pages -= 1;
                    gone(slot);
                }
            }
            leaf.iter().all(Option::is_none)
        };
        if first >= end {
            return;
        }
        let numbers = first / LEAF_PAGES..(end - 1) / LEAF_PAGES + 1;
        if numbers.end - numbers.start > self.leaves.len() as u64 {
            self.leaves.retain(|number, leaf| !numbers.contains(number) || !empty(*number, leaf));
        } else {
            for number in numbers {
                if self.leaves.get_mut(&number).is_some_and(|leaf| empty(number, leaf)) {
                    self.leaves.remove(&number);
                }
            }
        }
        // The index must stay small in comparison with its pages.
        if self.leaves.len() < self.leaves.capacity() / 4 {
            let room = self.leaves.len() * 2;
            self.leaves.shrink_to(room);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::PAGE_BYTES;
    use crate::server::slab::Slab;
    use crate::wire::WireChecksum;

    #[test]
    fn what_is_in_is_found_until_it_is_out() {
        assert_eq!(size_of::<Option<PageSlot>>(), 4);
        let slab = Slab::new(100);
        let mut index = PageIndex::default();
        let pages = [0, 1, 7, 8, 9, 1000, u64::MAX - 1];
        for page in pages {
            let slot = slab.put(&[1; PAGE_BYTES], WireChecksum(page)).unwrap();
            index.insert(page, slot);
            assert_eq!(index.get(page), Some(slot));
        }
        assert_eq!((index.pages(), index.get(2)), (7, None));
        let mut gone = 0;
        index.remove(1, 9, |_| gone += 1);
        assert_eq!((gone, index.pages()), (3, 4));
        assert!(index.get(0).is_some() && index.get(8).is_none() && index.get(9).is_some());
        index.remove(5, 5, |_| gone += 1);
        assert_eq!(gone, 3);
        index.remove(0, u64::MAX, |_| gone += 1);
        assert_eq!((gone, index.pages(), index.leaves.capacity()), (7, 0, 0));
    }
}
