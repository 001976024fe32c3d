//! Which slot each page of a region lies in.
//!
//! Pages that are neighbours stand side by side, in leaves of [`LEAF_PAGES`]: a run of pages is found
//! with few looks at distant memory, and takes less of it.

use super::slab::Slot;
use pagetax_core::access::mix64;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Pages of a leaf. Half a cache line: a region of pages that are far apart pays for whole leaves.
const LEAF_PAGES: u64 = 8;

/// Most bytes that a page takes here: a leaf of 41 bytes to itself, in a hash table that is at least
/// 7/16 full, and half of that more while it grows.
pub const BYTES_MAX: u64 = 141;

/// Page numbers are short and plain; one mix scatters them. A client that chooses them badly slows
/// down its own region.
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

type Leaf = [Option<Slot>; LEAF_PAGES as usize];

/// See the module.
#[derive(Debug, Default)]
pub struct Index {
    leaves: HashMap<u64, Leaf, BuildHasherDefault<PageHasher>>,
    pages: u64,
}

impl Index {
    /// Pages that are held.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Where a page lies, if it is held.
    pub fn get(&self, page: u64) -> Option<Slot> {
        self.leaves.get(&(page / LEAF_PAGES))?[(page % LEAF_PAGES) as usize]
    }

    /// Notes where a page lies that was not held.
    pub fn insert(&mut self, page: u64, slot: Slot) {
        let leaf = self.leaves.entry(page / LEAF_PAGES).or_default();
        let before = leaf[(page % LEAF_PAGES) as usize].replace(slot);
        self.pages += before.is_none() as u64;
    }

    /// Where all of them lay.
    pub fn into_slots(self) -> Vec<Slot> {
        self.leaves.into_values().flatten().flatten().collect()
    }

    /// Forgets pages and says where they lay.
    pub fn remove(&mut self, first: u64, end: u64, mut gone: impl FnMut(Slot)) {
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
        // So that it stays small against the pages that it finds.
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
    use crate::wire::Checksum;

    #[test]
    fn what_is_in_is_found_until_it_is_out() {
        assert_eq!(size_of::<Option<Slot>>(), 4);
        let slab = Slab::new(100);
        let mut index = Index::default();
        let pages = [0, 1, 7, 8, 9, 1000, u64::MAX - 1];
        for page in pages {
            let slot = slab.put(&[1; PAGE_BYTES], Checksum(page)).unwrap();
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
