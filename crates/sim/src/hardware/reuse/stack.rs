//! The LRU stack of pages: the number of other pages that were touched since a page's last use.
//!
//! Each touch looks up the id of its page. A short list holds the last few ids, most recent first, and most
//! touches find theirs there. An id that leaves the list takes the next *slot* of a line of slots. A bit of
//! each slot is set while the slot is the current one of its page. So a page's stack distance is the length
//! of the list plus the set bits after its slot. Three levels of counts give these from a few cache lines:
//! words of 64 slots, blocks of 32 words, groups of 32 blocks. If no slot is left, the live ones are
//! compacted in order, into a longer line if they fill much of it. A touch takes amortised O(1) plus the
//! count.
//!
//! Invariants: the bits of a word sum to its count, words to their block's, blocks to their group's,
//! groups to the number of pages in the line; each page is in the list, or has one set bit, at its slot.

use pagetax_core::access::mix64;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::BitAnd;

/// The pages in the list. A longer list has more hits, but each miss searches all of it.
const RECENT: usize = 8;

const WORD_SLOTS: usize = 64;
/// The counts of a level that are summed together.
const AT_ONCE: usize = 32;
const BLOCK_WORDS: usize = AT_ONCE;
const BLOCK_SLOTS: usize = BLOCK_WORDS * WORD_SLOTS;
const GROUP_BLOCKS: usize = AT_ONCE;
const GROUP_SLOTS: usize = BLOCK_SLOTS * GROUP_BLOCKS;

/// The touches that are looked up together.
const AHEAD: usize = 16;

/// The length of the line in multiples of the stack's. Compaction costs a random write for each page, so it
/// must be rare.
const SLOTS_PER_PAGE: usize = 4;

/// The pages of a leaf of the index: as many as a page of a page table has entries.
const LEAF_PAGES: u64 = 512;
const NO_SLOT: u32 = u32::MAX;

/// A hash for the numbers of leaves, which are small and close together.
#[derive(Default)]
struct MixHasher(u64);

impl Hasher for MixHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = mix64(self.0 ^ value);
    }
}

/// The leaves that are found without hashing: those of 2 GiB of base pages.
const NEAR_LEAVES: usize = 1024;

/// The ids of pages: leaf × [`LEAF_PAGES`] + place in the leaf. Leaves keep the ids of adjacent pages
/// together, since these are used together.
struct Ids {
    /// The leaf of each page number / `LEAF_PAGES`.
    leaf_of: HashMap<u64, u32, BuildHasherDefault<MixHasher>>,
    /// The page number / `LEAF_PAGES` of each leaf.
    number_of: Vec<u64>,
    /// A direct-mapped cache of recent lookups: number and leaf.
    near: Box<[(u64, u32); NEAR_LEAVES]>,
}

impl Ids {
    fn new() -> Self {
        let near = Box::new([(u64::MAX, 0); NEAR_LEAVES]);
        Ids { leaf_of: HashMap::default(), number_of: Vec::new(), near }
    }

    #[inline]
    fn of(&mut self, page: u64) -> u32 {
        let number = page / LEAF_PAGES;
        let (known, mut leaf) = self.near[number as usize % NEAR_LEAVES];
        if known != number {
            leaf = self.look_up(number);
        }
        leaf * LEAF_PAGES as u32 + (page % LEAF_PAGES) as u32
    }

    #[cold]
    fn look_up(&mut self, number: u64) -> u32 {
        let next = self.number_of.len() as u32;
        let leaf = *self.leaf_of.entry(number).or_insert(next);
        if leaf == next {
            self.number_of.push(number);
        }
        self.near[number as usize % NEAR_LEAVES] = (number, leaf);
        leaf
    }

    fn page(&self, id: u32) -> u64 {
        let id = u64::from(id);
        self.number_of[(id / LEAF_PAGES) as usize] * LEAF_PAGES + id % LEAF_PAGES
    }

    /// Returns one more than the largest possible id.
    fn end(&self) -> usize {
        self.number_of.len() * LEAF_PAGES as usize
    }
}

/// The result of a touch of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touch {
    /// The page was never touched before.
    First,
    /// `distance` other pages were touched since the page last was (0: it was the last one).
    Again {
        /// The number of pages touched since. An LRU array of more entries still holds the page.
        distance: u64,
        /// True if the page was last touched before the last [`LruStack::mark`].
        before_mark: bool,
    },
}

/// The pages in the order of their last use.
pub struct LruStack {
    /// The list of recent ids, most recent first; `recent_count` of them.
    recent: [u32; RECENT],
    recent_count: usize,
    ids: Ids,
    /// The slot of each id that left the list.
    slot_of: Vec<u32>,
    /// The id of each slot, live or not.
    held: Vec<u32>,
    bits: Vec<u64>,
    /// The set bits by word; below, by block and by group.
    words: Vec<u8>,
    blocks: Vec<u16>,
    groups: Vec<u32>,
    live: usize,
    next: usize,
    mark: usize,
}

impl Default for LruStack {
    fn default() -> Self {
        Self::new()
    }
}

impl LruStack {
    /// Creates a stack without pages.
    pub fn new() -> Self {
        let mut stack = LruStack {
            recent: [0; RECENT],
            recent_count: 0,
            ids: Ids::new(),
            slot_of: Vec::new(),
            held: Vec::new(),
            bits: Vec::new(),
            words: Vec::new(),
            blocks: Vec::new(),
            groups: Vec::new(),
            live: 0,
            next: 0,
            mark: 0,
        };
        stack.resize(BLOCK_SLOTS);
        stack
    }

    /// Returns the number of different pages on the stack.
    pub fn pages(&self) -> u64 {
        (self.live + self.recent_count) as u64
    }

    /// Removes a page, as if it had never been touched.
    pub fn forget(&mut self, page: u64) {
        let id = self.id(page);
        if let Some(at) = self.recent_place(id) {
            self.recent.copy_within(at + 1..self.recent_count, at);
            self.recent_count -= 1;
            return;
        }
        let slot = std::mem::replace(&mut self.slot_of[id as usize], NO_SLOT);
        if slot != NO_SLOT {
            self.clear(slot as usize);
        }
    }

    #[inline]
    fn id(&mut self, page: u64) -> u32 {
        let id = self.ids.of(page);
        if id as usize >= self.slot_of.len() {
            self.slot_of.resize(self.ids.end(), NO_SLOT);
        }
        id
    }

    /// Returns the pages on the stack, least recently used first.
    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        let recent = self.recent[..self.recent_count].iter().rev().copied();
        self.in_line().chain(recent).map(|id| self.ids.page(id))
    }

    /// Returns the ids that have slots, least recently used first.
    fn in_line(&self) -> impl Iterator<Item = u32> + '_ {
        let slots = |(word, &bits): (usize, &u64)| {
            let mut left = bits;
            std::iter::from_fn(move || {
                let bit = left.trailing_zeros() as usize;
                left &= left.checked_sub(1)?;
                Some(word * WORD_SLOTS + bit)
            })
        };
        self.bits.iter().enumerate().flat_map(slots).map(|slot| self.held[slot])
    }

    /// Sets the mark: later touches report whether the page's last touch came before it.
    pub fn mark(&mut self) {
        while self.recent_count > 0 {
            self.recent_count -= 1;
            self.append(self.recent[self.recent_count]);
        }
        self.mark = self.next;
    }

    /// Touches a page and returns its distance.
    #[inline]
    pub fn touch(&mut self, page: u64) -> Touch {
        let id = self.id(page);
        self.touch_id(id)
    }

    /// Touches pages in turn and calls `then` with each result. It looks up several pages at a time and reads
    /// in advance what their touches need, so that their cache misses overlap.
    #[inline]
    pub fn touch_all(&mut self, pages: &[u64], mut then: impl FnMut(Touch)) {
        for some in pages.chunks(AHEAD) {
            let mut ids = [0; AHEAD];
            for (id, page) in ids.iter_mut().zip(some) {
                *id = self.id(*page);
            }
            let ids = &ids[..some.len()];
            let mut read = 0;
            for id in ids {
                let slot = self.slot_of[*id as usize] as usize;
                // A page without a slot reads nothing. A slot that moves meanwhile costs only a miss.
                read ^= self.bits.get(slot / WORD_SLOTS).copied().unwrap_or(0);
                read ^= u64::from(self.words.get(slot / WORD_SLOTS).copied().unwrap_or(0));
            }
            std::hint::black_box(read);
            ids.iter().for_each(|id| then(self.touch_id(*id)));
        }
    }

    #[inline]
    fn touch_id(&mut self, id: u32) -> Touch {
        if let Some(at) = self.recent_place(id) {
            self.recent.copy_within(..at, 1);
            self.recent[0] = id;
            // All pages in the list were touched after the mark.
            return Touch::Again { distance: at as u64, before_mark: false };
        }
        self.touch_in_line(id)
    }

    #[inline]
    fn recent_place(&self, id: u32) -> Option<usize> {
        self.recent[..self.recent_count].iter().position(|&known| known == id)
    }

    fn touch_in_line(&mut self, id: u32) -> Touch {
        let old = std::mem::replace(&mut self.slot_of[id as usize], NO_SLOT);
        let touch = if old == NO_SLOT {
            Touch::First
        } else {
            let old = old as usize;
            let distance = (self.live_after(old) + self.recent_count) as u64;
            self.clear(old);
            Touch::Again { distance, before_mark: old < self.mark }
        };
        if self.recent_count == RECENT {
            self.append(self.recent[RECENT - 1]);
        } else {
            self.recent_count += 1;
        }
        self.recent.copy_within(..RECENT - 1, 1);
        self.recent[0] = id;
        touch
    }

    /// Gives an id the next slot.
    fn append(&mut self, id: u32) {
        if self.next == self.held.len() {
            self.compact();
        }
        let slot = self.next;
        self.next += 1;
        self.slot_of[id as usize] = slot as u32;
        self.held[slot] = id;
        self.bits[slot / WORD_SLOTS] |= 1 << (slot % WORD_SLOTS);
        self.words[slot / WORD_SLOTS] += 1;
        self.blocks[slot / BLOCK_SLOTS] += 1;
        self.groups[slot / GROUP_SLOTS] += 1;
        self.live += 1;
    }

    fn clear(&mut self, slot: usize) {
        self.bits[slot / WORD_SLOTS] &= !(1 << (slot % WORD_SLOTS));
        self.words[slot / WORD_SLOTS] -= 1;
        self.blocks[slot / BLOCK_SLOTS] -= 1;
        self.groups[slot / GROUP_SLOTS] -= 1;
        self.live -= 1;
    }

    /// Returns the number of live slots after `slot`.
    ///
    /// It sums a fixed number of counts on each level and masks out those before `slot`. A branch on the
    /// place of `slot` would be unpredictable, and sums of fixed length use vector instructions. Sums of 16
    /// bits do not overflow: a group has 2^16 slots, and the block of `slot` is not included.
    fn live_after(&self, slot: usize) -> usize {
        let (word, block, group) = (slot / WORD_SLOTS, slot / BLOCK_SLOTS, slot / GROUP_SLOTS);
        let in_word = (self.bits[word] & (!1 << (slot % WORD_SLOTS))).count_ones();
        let in_block = behind(&self.words, &MASKS_8, word).map(u32::from).sum::<u32>();
        let in_group = behind(&self.blocks, &MASKS_16, block).sum::<u16>();
        let near = behind(&self.groups, &MASKS_32, group).sum::<u32>();
        let far = self.groups[(group / AT_ONCE + 1) * AT_ONCE..].iter().sum::<u32>();
        (in_word + in_block + u32::from(in_group) + near + far) as usize
    }

    fn resize(&mut self, slots: usize) {
        self.held.resize(slots, 0);
        self.bits.resize(slots / WORD_SLOTS, 0);
        let groups = slots.div_ceil(GROUP_SLOTS).next_multiple_of(AT_ONCE);
        self.words.resize(groups * GROUP_SLOTS / WORD_SLOTS, 0);
        self.blocks.resize(groups * GROUP_BLOCKS, 0);
        self.groups.resize(groups, 0);
    }

    /// Compacts the live slots, in a longer line if they fill too much of it.
    fn compact(&mut self) {
        let live: Vec<u32> = self.in_line().collect();
        self.mark = self.live - self.live_after_mark();
        self.bits.fill(0);
        self.words.fill(0);
        self.blocks.fill(0);
        self.groups.fill(0);
        self.live = 0;
        let slots = (live.len() * SLOTS_PER_PAGE).next_power_of_two();
        if slots > self.held.len() {
            self.resize(slots);
        }
        self.next = 0;
        live.into_iter().for_each(|id| self.append(id));
    }

    fn live_after_mark(&self) -> usize {
        self.mark.checked_sub(1).map_or(self.live, |slot| self.live_after(slot))
    }
}

/// Builds zeros followed by ones. From `AT_ONCE - 1 - n` on, they mask the counts behind place n.
macro_rules! masks {
    ($count:ty) => {{
        let (mut masks, mut at) = ([0; 2 * AT_ONCE], AT_ONCE);
        while at < 2 * AT_ONCE {
            masks[at] = <$count>::MAX;
            at += 1;
        }
        masks
    }};
}
static MASKS_8: [u8; 2 * AT_ONCE] = masks!(u8);
static MASKS_16: [u16; 2 * AT_ONCE] = masks!(u16);
static MASKS_32: [u32; 2 * AT_ONCE] = masks!(u32);

/// Returns the counts that are summed together around `at`; those not behind it are 0.
#[inline(always)]
fn behind<'a, T: Copy + BitAnd<Output = T>>(
    counts: &'a [T],
    masks: &'a [T; 2 * AT_ONCE],
    at: usize,
) -> impl Iterator<Item = T> + 'a {
    let chunk = |from: &'a [T]| from.first_chunk::<AT_ONCE>().expect("counts come in whole chunks");
    let near = chunk(&counts[at / AT_ONCE * AT_ONCE..]);
    let masks = chunk(&masks[AT_ONCE - 1 - at % AT_ONCE..]);
    near.iter().zip(masks).map(|(count, mask)| *count & *mask)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetax_core::access::Rng;

    /// The definition: a list of pages, most recently used first.
    #[derive(Default)]
    struct Naive(Vec<u64>);

    impl Naive {
        fn touch(&mut self, page: u64) -> Option<u64> {
            let distance = self.0.iter().position(|&other| other == page);
            if let Some(at) = distance {
                self.0.remove(at);
            }
            self.0.insert(0, page);
            distance.map(|at| at as u64)
        }
    }

    fn distance(touch: Touch) -> Option<u64> {
        match touch {
            Touch::First => None,
            Touch::Again { distance, .. } => Some(distance),
        }
    }

    #[test]
    fn distances_are_those_of_the_definition() {
        for (seed, pages) in [(1, 3), (2, 40), (3, 900)] {
            let (mut fast, mut slow, mut rng) = (LruStack::new(), Naive::default(), Rng::new(seed));
            for step in 0..20_000 {
                // Half of the touches stay near, so that small and large distances both occur.
                let page =
                    if rng.below(2) == 0 { rng.below(pages) } else { rng.below(3) + step / 97 };
                assert_eq!(distance(fast.touch(page)), slow.touch(page), "seed {seed} step {step}");
            }
            assert_eq!(fast.pages(), slow.0.len() as u64);
        }
    }

    #[test]
    fn slots_that_run_out_are_compacted_and_grown() {
        let mut stack = LruStack::new();
        let pages = 3 * GROUP_SLOTS as u64;
        for page in 0..pages {
            assert_eq!(stack.touch(page), Touch::First);
        }
        for page in 0..pages {
            assert_eq!(distance(stack.touch(page)), Some(pages - 1), "page {page}");
        }
        for _ in 0..4 * pages {
            stack.touch(7);
        }
        assert_eq!(distance(stack.touch(pages - 1)), Some(1));
    }

    #[test]
    fn a_mark_outlives_compaction() {
        let mut stack = LruStack::new();
        stack.touch(1);
        stack.touch(2);
        stack.mark();
        stack.touch(1);
        for _ in 0..GROUP_SLOTS {
            stack.touch(3);
        }
        assert_eq!(stack.touch(1), Touch::Again { distance: 1, before_mark: false });
        assert_eq!(stack.touch(2), Touch::Again { distance: 2, before_mark: true });
    }

    #[test]
    fn a_forgotten_page_is_new_again() {
        let mut stack = LruStack::new();
        for page in [1, 2, 3] {
            stack.touch(page);
        }
        stack.forget(2);
        stack.forget(9);
        assert_eq!(stack.iter().collect::<Vec<_>>(), [1, 3]);
        assert_eq!(distance(stack.touch(1)), Some(1));
        assert_eq!(stack.touch(2), Touch::First);
        for page in 100..100 + 2 * RECENT as u64 {
            stack.touch(page);
        }
        stack.forget(1);
        assert_eq!(stack.touch(1), Touch::First, "also one that has a slot");
        assert_eq!(stack.pages(), 3 + 2 * RECENT as u64);
        assert_eq!(stack.iter().count() as u64, stack.pages());
    }
}
