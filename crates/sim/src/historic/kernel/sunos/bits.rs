//! Sets of small numbers: pmegs, and the pages of a mapping.

use crate::hardware::sun4::PMEGS_MAX;

/// A set of pmegs, one bit each.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PmegSet([u64; PMEGS_MAX as usize / 64]);

impl PmegSet {
    /// Adds a pmeg, whose number must be below `PMEGS_MAX`.
    pub fn insert(&mut self, pmeg: usize) {
        self.0[pmeg / 64] |= 1 << (pmeg % 64);
    }

    /// Removes a pmeg, if it is in the set.
    pub fn remove(&mut self, pmeg: usize) {
        self.0[pmeg / 64] &= !(1 << (pmeg % 64));
    }

    /// Adds all members of `other`.
    pub fn add(&mut self, other: &PmegSet) {
        self.0.iter_mut().zip(other.0).for_each(|(word, more)| *word |= more);
    }

    /// Removes all members of `other`.
    pub fn subtract(&mut self, other: &PmegSet) {
        self.0.iter_mut().zip(other.0).for_each(|(word, less)| *word &= !less);
    }

    /// Returns the number of pmegs in the set.
    pub fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Returns true if the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }

    /// Returns the members in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().enumerate().flat_map(|(index, word)| {
            let mut rest = *word;
            std::iter::from_fn(move || {
                let bit = (rest != 0).then(|| rest.trailing_zeros() as usize)?;
                rest &= rest - 1;
                Some(index * 64 + bit)
            })
        })
    }

    /// Returns the first member after `hand`, with wraparound, or None if the set is empty.
    pub fn next_after(&self, hand: usize) -> Option<usize> {
        let start = (hand + 1) / 64 % self.0.len();
        let head = self.0[start] & (u64::MAX << ((hand + 1) % 64));
        if head != 0 {
            return Some(start * 64 + head.trailing_zeros() as usize);
        }
        let words = self.0.len();
        let index = (1..=words).map(|step| (start + step) % words).find(|i| self.0[*i] != 0)?;
        Some(index * 64 + self.0[index].trailing_zeros() as usize)
    }
}

/// A set of the pages of a mapping, one bit each.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PageSet(Vec<u64>);

impl PageSet {
    /// Returns an empty set for this many pages.
    pub fn new(pages: u64) -> Self {
        PageSet(vec![0; pages.div_ceil(64) as usize])
    }

    /// Returns true if the page is in the set.
    pub fn contains(&self, page: u64) -> bool {
        self.0.get((page / 64) as usize).is_some_and(|word| word >> (page % 64) & 1 != 0)
    }

    /// Adds a page. Returns true if it is new.
    pub fn insert(&mut self, page: u64) -> bool {
        let (word, bit) = (&mut self.0[(page / 64) as usize], 1 << (page % 64));
        let new = *word & bit == 0;
        *word |= bit;
        new
    }

    /// Removes a page. Returns true if it was in the set.
    pub fn remove(&mut self, page: u64) -> bool {
        let was = self.contains(page);
        if was {
            self.0[(page / 64) as usize] &= !(1 << (page % 64));
        }
        was
    }

    /// Adds all pages of `other`, a set of the same mapping.
    pub fn add(&mut self, other: &PageSet) {
        self.0.iter_mut().zip(&other.0).for_each(|(word, more)| *word |= more);
    }

    /// Returns the number of pages that are not in `other`.
    pub fn count_without(&self, other: &PageSet) -> u64 {
        self.0.iter().zip(&other.0).map(|(word, less)| u64::from((word & !less).count_ones())).sum()
    }

    /// Returns the number of pages in the set.
    pub fn count(&self) -> u64 {
        self.0.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// Removes all pages from the set.
    pub fn clear(&mut self) {
        self.0.fill(0);
    }

    /// Returns the 64 pages from `first` on, one bit each. Pages outside the mapping are not in the
    /// set.
    #[inline(always)]
    pub fn window(&self, first: i64) -> u64 {
        let (index, shift) = (first >> 6, (first & 63) as u32);
        // A negative index becomes a huge one and so is outside as well.
        let word = |index: i64| self.0.get(index as usize).copied().unwrap_or(0);
        let low = word(index) >> shift;
        if shift == 0 { low } else { low | word(index + 1) << (64 - shift) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn pmeg_sets_are_sets(members in proptest::collection::btree_set(0usize..1024, 0..60), hand in 0usize..1024) {
            let mut set = PmegSet::default();
            members.iter().for_each(|member| set.insert(*member));
            prop_assert_eq!(set.iter().collect::<BTreeSet<_>>(), members.clone());
            prop_assert_eq!(set.len(), members.len());
            let next = members.range(hand + 1..).next().or(members.first()).copied();
            prop_assert_eq!(set.next_after(hand), next);
        }

        #[test]
        fn windows_show_the_pages(members in proptest::collection::btree_set(0u64..300, 0..80), first in -70i64..320) {
            let mut set = PageSet::new(300);
            members.iter().for_each(|member| { set.insert(*member); });
            for bit in 0..64 {
                let page = first + bit;
                let expected = page >= 0 && members.contains(&(page as u64));
                prop_assert_eq!(set.window(first) >> bit & 1 == 1, expected);
            }
        }
    }
}
