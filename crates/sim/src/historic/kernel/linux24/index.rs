//! Lookup of an object's runs by page.
//!
//! The index has a slot for each page, and bits that mark used slots, in two levels. The lookup of
//! the run that covers a page takes a few steps, regardless of the number and length of the runs.

/// The runs of an object by their first pages.
#[derive(Debug, Clone, Default)]
pub struct Index {
    /// Runs by first page; meaningless if no run begins there.
    runs: Vec<u32>,
    /// A bit for each page where a run begins.
    starts: Vec<u64>,
    /// A bit for each word of `starts` that is not 0.
    words: Vec<u64>,
}

impl Index {
    /// Adds a run that begins at page `first`, where none did.
    pub fn insert(&mut self, first: u32, run: u32) {
        let (page, word) = (first as usize, first as usize / 64);
        if self.starts.len() <= word {
            let words = (word + 1).next_power_of_two();
            self.runs.resize(words * 64, 0);
            self.starts.resize(words, 0);
            self.words.resize(words.div_ceil(64), 0);
        }
        self.runs[page] = run;
        self.starts[word] |= 1 << (page % 64);
        self.words[word / 64] |= 1 << (word % 64);
    }

    /// Removes the run that begins at page `first`.
    pub fn remove(&mut self, first: u32) {
        let word = first as usize / 64;
        self.starts[word] &= !(1 << (first % 64));
        if self.starts[word] == 0 {
            self.words[word / 64] &= !(1 << (word % 64));
        }
    }

    /// Returns the last run that begins at `page` or before, or None if there is none.
    pub fn at_or_before(&self, page: u32) -> Option<u32> {
        let word = page as usize / 64;
        let near = self.starts.get(word).map_or(0, |bits| bits & (u64::MAX >> (63 - page % 64)));
        let (word, bits) = if near != 0 {
            (word, near)
        } else {
            let word = self.word_before(word)?;
            (word, self.starts[word])
        };
        Some(self.runs[word * 64 + 63 - bits.leading_zeros() as usize])
    }

    /// Returns the first run that begins after `page`, or None if there is none.
    pub fn after(&self, page: u32) -> Option<u32> {
        let (word, bit) = (page as usize / 64, page % 64);
        let near = self.starts.get(word)? & (u64::MAX << bit & !(1 << bit));
        let (word, bits) = if near != 0 {
            (word, near)
        } else {
            let word = self.word_after(word)?;
            (word, self.starts[word])
        };
        Some(self.runs[word * 64 + bits.trailing_zeros() as usize])
    }

    /// Finds the last nonzero word before this one.
    fn word_before(&self, word: usize) -> Option<usize> {
        let word = word.min(self.starts.len());
        let near = self.words.get(word / 64).map_or(0, |bits| bits & !(u64::MAX << (word % 64)));
        let (index, bits) = if near != 0 {
            (word / 64, near)
        } else {
            let mut before = self.words[..word / 64].iter().enumerate().rev();
            before.find(|(_, bits)| **bits != 0).map(|(index, bits)| (index, *bits))?
        };
        Some(index * 64 + 63 - bits.leading_zeros() as usize)
    }

    /// Finds the first nonzero word after this one.
    fn word_after(&self, word: usize) -> Option<usize> {
        let (index, bit) = (word / 64, word % 64);
        let near = self.words.get(index)? & (u64::MAX << bit & !(1 << bit));
        let (index, bits) = if near != 0 {
            (index, near)
        } else {
            let mut after = self.words.iter().enumerate().skip(index + 1);
            after.find(|(_, bits)| **bits != 0).map(|(index, bits)| (index, *bits))?
        };
        Some(index * 64 + bits.trailing_zeros() as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        #[test]
        fn an_index_is_a_sorted_map(
            steps in proptest::collection::vec((any::<bool>(), 0u32..20_000), 1..80),
            asked in 0u32..30_000,
        ) {
            let (mut index, mut map) = (Index::default(), BTreeMap::new());
            for (number, (adds, page)) in steps.into_iter().enumerate() {
                if adds && !map.contains_key(&page) {
                    index.insert(page, number as u32);
                    map.insert(page, number as u32);
                } else if map.remove(&page).is_some() {
                    index.remove(page);
                }
                for asked in [asked, page, page + 1, page.saturating_sub(1)] {
                    let before = map.range(..=asked).next_back().map(|(_, run)| *run);
                    prop_assert_eq!(index.at_or_before(asked), before);
                    let after = map.range(asked + 1..).next().map(|(_, run)| *run);
                    prop_assert_eq!(index.after(asked), after);
                }
            }
        }
    }
}
