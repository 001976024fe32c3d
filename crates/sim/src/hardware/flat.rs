//! Hardware whose translations take no time: a bitmap of loaded pages. Models of reclaim and paging use
//! it if their published figures do not cover translation.
//!
//! Addresses should lie near 0: the bitmap has a word for every 64 pages below the highest one.

use super::{Mmu, PageTables, Pte, SpaceId, Stop, Touched, Used, range_pages};
use crate::hardware::accesses::Accesses;
use pagetax_core::units::PageSize;
use std::ops::Range;

/// The bits of 64 pages.
#[derive(Debug, Clone, Copy, Default)]
struct Word {
    present: u64,
    writable: u64,
    referenced: u64,
    dirty: u64,
}

/// Translations of one page size that take no time.
#[derive(Debug, Clone)]
pub struct Flat {
    page: PageSize,
    spaces: Vec<Vec<Word>>,
}

impl Flat {
    /// Creates hardware with pages of this size only.
    pub fn new(page: PageSize) -> Self {
        Flat { page, spaces: Vec::new() }
    }

    fn word(&self, space: SpaceId, page: u64) -> Word {
        let words = self.spaces.get(space.0);
        words.and_then(|words| words.get((page / 64) as usize)).copied().unwrap_or_default()
    }

    fn word_mut(&mut self, space: SpaceId, page: u64) -> &mut Word {
        if self.spaces.len() <= space.0 {
            self.spaces.resize_with(space.0 + 1, Vec::new);
        }
        let (words, index) = (&mut self.spaces[space.0], (page / 64) as usize);
        if words.len() <= index {
            words.resize(index + 1, Word::default());
        }
        &mut words[index]
    }

    fn pages(&self, range: Range<u64>) -> Range<u64> {
        range.start >> self.page.shift()..range.end.div_ceil(self.page.bytes())
    }

    /// Calls `change` for each word of a range that exists, with a bit set for each page in the range.
    fn change(&mut self, space: SpaceId, range: Range<u64>, change: impl Fn(&mut Word, u64)) {
        let pages = self.pages(range);
        if let Some(words) = self.spaces.get_mut(space.0) {
            for (index, bits) in masks(pages) {
                let Some(word) = words.get_mut(index) else { break };
                change(word, bits);
            }
        }
    }

    /// Touches the next page `count` times if it is loaded. Returns true if it is.
    fn hit(&mut self, space: SpaceId, accesses: &mut Accesses, count: u64) -> bool {
        let page = accesses.next_address() >> self.page.shift();
        let (bit, writes) = (1 << (page % 64), accesses.writes);
        let word = self.word(space, page);
        if (if writes { word.present & word.writable } else { word.present }) & bit == 0 {
            return false;
        }
        let word = self.word_mut(space, page);
        word.referenced |= bit;
        word.dirty |= if writes { bit } else { 0 };
        accesses.advance(count);
        true
    }
}

/// Returns the words that hold a range of pages, with a bit set for each page in it.
fn masks(pages: Range<u64>) -> impl Iterator<Item = (usize, u64)> {
    let Range { start, end } = pages;
    (start / 64..end.div_ceil(64)).map(move |word| {
        let first = start.saturating_sub(word * 64);
        let last = 63 - (end - 1 - word * 64).min(63);
        (word as usize, (u64::MAX << first) & (u64::MAX >> last))
    })
}

impl Mmu for Flat {
    fn touch(
        &mut self,
        _cpu: usize,
        space: SpaceId,
        accesses: &mut Accesses,
        limit_ps: u64,
    ) -> Touched {
        let mut left = limit_ps.div_ceil(accesses.cost_ps.max(1)).max(1).min(accesses.left());
        let mut lap_hits = 0;
        let stop = loop {
            if left == 0 {
                break if accesses.left() == 0 { Stop::Done } else { Stop::Limit };
            }
            let mut count = 1;
            if let Some(sweep) = accesses.sweep() {
                // After a lap without a fault, the next laps have none either.
                if lap_hits >= sweep.lap {
                    accesses.advance(left);
                    left = 0;
                    continue;
                }
                // If the stride is smaller than a page, these are all touches of the page.
                if sweep.stride < self.page.bytes() {
                    let on_page = self.page.bytes() - accesses.next_address() % self.page.bytes();
                    count = on_page.div_ceil(sweep.stride).min(sweep.left_in_lap()).min(left);
                }
            }
            if !self.hit(space, accesses, count) {
                break Stop::Fault;
            }
            lap_hits += count;
            left -= count;
        };
        Touched { translation_ps: 0, stop }
    }

    fn switch(&mut self, _cpu: usize, _space: SpaceId) {}

    fn drop_space(&mut self, space: SpaceId) {
        if let Some(words) = self.spaces.get_mut(space.0) {
            *words = Vec::new();
        }
    }
}

impl PageTables for Flat {
    fn load(&mut self, space: SpaceId, pte: Pte) {
        for page in
            pte.address >> self.page.shift()..(pte.address + pte.size.bytes()) >> self.page.shift()
        {
            let bit = 1 << (page % 64);
            let word = self.word_mut(space, page);
            word.present |= bit;
            word.writable = if pte.writable { word.writable | bit } else { word.writable & !bit };
        }
    }

    fn unload(&mut self, space: SpaceId, address: u64, bytes: u64) {
        self.change(space, address..address + bytes, |word, bits| {
            word.present &= !bits;
            word.writable &= !bits;
            word.referenced &= !bits;
            word.dirty &= !bits;
        });
    }

    fn load_range(
        &mut self,
        space: SpaceId,
        range: Range<u64>,
        size: PageSize,
        writable: bool,
    ) -> u64 {
        let pages = range_pages(&range, size);
        if pages == 0 {
            return 0;
        }
        let present = self.present_in(space, range.clone(), size);
        self.word_mut(space, (range.end - 1) >> self.page.shift());
        self.change(space, range, |word, bits| {
            word.present |= bits;
            word.writable = if writable { word.writable | bits } else { word.writable & !bits };
        });
        pages - present
    }

    fn present_in(&self, space: SpaceId, range: Range<u64>, _size: PageSize) -> u64 {
        let words = self.spaces.get(space.0).map_or(&[][..], Vec::as_slice);
        let present = |(index, bits): (usize, u64)| {
            words.get(index).map_or(0, |word: &Word| u64::from((word.present & bits).count_ones()))
        };
        masks(self.pages(range)).map(present).sum()
    }

    fn protect(&mut self, space: SpaceId, address: u64, bytes: u64) {
        self.change(space, address..address + bytes, |word, bits| word.writable &= !bits);
    }

    fn used(&self, space: SpaceId, address: u64) -> Used {
        let page = address >> self.page.shift();
        let (word, bit) = (self.word(space, page), 1 << (page % 64));
        Used {
            present: word.present & bit != 0,
            referenced: word.referenced & bit != 0,
            dirty: word.dirty & bit != 0,
        }
    }

    fn test_and_clear_referenced(&mut self, space: SpaceId, address: u64) -> Used {
        let used = self.used(space, address);
        if used.referenced {
            let page = address >> self.page.shift();
            self.word_mut(space, page).referenced &= !(1 << (page % 64));
        }
        used
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::accesses::TouchSite;
    use pagetax_core::plan::{Access, Pattern, RegionId, Touch};
    use proptest::prelude::*;

    const SPACE: SpaceId = SpaceId(0);

    fn sweep(access: Access, stride_bytes: u64, count: u64, cost_ps: u64) -> Accesses {
        let pattern = Pattern::Strided { stride_bytes };
        let touch = Touch { region: RegionId(0), access, pattern, count, grain_bytes: 8, seed: 0 };
        let place = TouchSite { base: 0, bytes: 10 * 4096, page_bytes: 4096, client: 0, repeat: 0 };
        Accesses::new(&touch, place, cost_ps)
    }

    fn loaded(pages: std::ops::Range<u64>, writable: bool) -> Flat {
        let mut flat = Flat::new(PageSize::K4);
        pages.for_each(|p| {
            flat.load(SPACE, Pte { address: p * 4096, size: PageSize::K4, writable })
        });
        flat
    }

    #[test]
    fn touches_until_the_first_page_that_is_not_loaded() {
        let mut flat = loaded(0..7, true);
        let mut accesses = sweep(Access::Read, 512, 500, 1);
        assert_eq!(flat.touch(0, SPACE, &mut accesses, 1 << 40).stop, Stop::Fault);
        assert_eq!(500 - accesses.left(), 7 * 8);
        assert!(flat.used(SPACE, 6 * 4096).referenced && !flat.used(SPACE, 6 * 4096).dirty);
    }

    #[test]
    fn laps_stop_at_the_limit_and_at_the_end() {
        let mut flat = loaded(0..10, true);
        let mut accesses = sweep(Access::Write, 4096, 1_000_000_000, 10);
        assert_eq!(flat.touch(0, SPACE, &mut accesses, 9_999_995).stop, Stop::Limit);
        assert_eq!(accesses.left(), 1_000_000_000 - 1_000_000);
        assert_eq!(flat.touch(0, SPACE, &mut accesses, u64::MAX).stop, Stop::Done);
        assert!(flat.used(SPACE, 9 * 4096).dirty);
    }

    #[test]
    fn stores_need_a_writable_page() {
        let mut flat = loaded(0..10, true);
        flat.protect(SPACE, 3 * 4096, 4096);
        let mut accesses = sweep(Access::Rewrite, 4096, 10, 10);
        assert_eq!(flat.touch(0, SPACE, &mut accesses, 1 << 40).stop, Stop::Fault);
        assert_eq!(accesses.next_address(), 3 * 4096);
        flat.unload(SPACE, 0, 4096);
        assert_eq!(flat.touch(0, SPACE, &mut sweep(Access::Read, 4096, 9, 1), 9).stop, Stop::Fault);
        assert!(!flat.test_and_clear_referenced(SPACE, 0).present);
    }

    proptest! {
        #[test]
        fn a_range_is_its_pages(
            steps in proptest::collection::vec((0u8..4, 0u64..300, 0u64..200), 1..12),
        ) {
            let (mut flat, mut pages) = (Flat::new(PageSize::K4), vec![None; 500]);
            for (step, first, len) in steps {
                let bytes = first * 4096..(first + len) * 4096;
                let within = &mut pages[first as usize..(first + len) as usize];
                let present = within.iter().flatten().count() as u64;
                prop_assert_eq!(flat.present_in(SPACE, bytes.clone(), PageSize::K4), present);
                match step {
                    0 | 1 => {
                        let new = flat.load_range(SPACE, bytes, PageSize::K4, step == 1);
                        prop_assert_eq!(new, len - present);
                        within.fill(Some(step == 1));
                    }
                    2 => {
                        flat.unload(SPACE, bytes.start, len * 4096);
                        within.fill(None);
                    }
                    _ => {
                        flat.protect(SPACE, bytes.start, len * 4096);
                        within.iter_mut().flatten().for_each(|writable| *writable = false);
                    }
                }
                for (page, expected) in pages.iter().enumerate() {
                    let word = flat.word(SPACE, page as u64);
                    let bit = |bits: u64| bits >> (page % 64) & 1 == 1;
                    prop_assert_eq!(bit(word.present), expected.is_some());
                    prop_assert_eq!(bit(word.writable), *expected == Some(true));
                }
            }
        }
    }
}
