//! Sets of tags with replacement: the storage of TLBs, paging-structure caches and the caches that
//! hold page-table entries.
//!
//! Invariant: a set holds each tag at most once, and LRU replacement is exact. Tags stay in place; only
//! their order changes. Up to 16 ways, the order is packed into a word. Beyond, it is a ring of links, and
//! a hash finds the tags. Both forms give the same results.

use pagetax_core::access::Rng;

/// A replacement policy: the entry of a full set that is evicted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Replacement {
    /// The least recently used entry, exactly.
    #[default]
    Lru,
    /// A random entry, all with the same probability.
    Random,
}

/// An empty entry. No tag is 0.
const EMPTY: u64 = 0;

/// A set-associative array of tags.
#[derive(Debug, Clone)]
pub struct TagArray {
    set_mask: u64,
    ways: usize,
    store: Store,
}

#[derive(Debug, Clone)]
enum Store {
    Packed(Packed),
    Rings(Vec<Ring>),
    Random(RandomSets),
}

impl TagArray {
    /// Creates an array of `entries` in sets of `ways`, both at least 1. `entries / ways` must be a power of
    /// two.
    pub fn new(entries: usize, ways: usize, replacement: Replacement) -> Self {
        assert!(ways >= 1 && entries.is_multiple_of(ways), "{entries} entries in {ways} ways");
        let set_count = entries / ways;
        assert!(set_count.is_power_of_two(), "{set_count} sets");
        let store = match replacement {
            Replacement::Random => Store::Random(RandomSets::new(entries, ways)),
            Replacement::Lru if ways <= PACKED_WAYS => Store::Packed(Packed::new(set_count, ways)),
            Replacement::Lru => Store::Rings(vec![Ring::new(ways); set_count]),
        };
        TagArray { set_mask: set_count as u64 - 1, ways, store }
    }

    /// Returns the number of sets.
    pub fn set_count(&self) -> u64 {
        self.set_mask + 1
    }

    /// Returns the number of entries in each set.
    pub fn ways(&self) -> usize {
        self.ways
    }

    /// Looks `tag` up in its set, and inserts it if it is absent. Returns true if it was there.
    #[inline(always)]
    pub fn touch(&mut self, index: u64, tag: u64) -> bool {
        debug_assert_ne!(tag, EMPTY);
        let set = (index & self.set_mask) as usize;
        match &mut self.store {
            Store::Packed(packed) => packed.probe(set, tag) || packed.replace(set, tag),
            Store::Rings(rings) => rings[set].probe(tag) || rings[set].replace(tag),
            Store::Random(sets) => sets.probe(set, tag) || sets.replace(set, tag),
        }
    }

    /// Looks `tag` up and refreshes its recency. If it is absent, the set stays unchanged.
    #[inline(always)]
    pub fn probe(&mut self, index: u64, tag: u64) -> bool {
        let set = (index & self.set_mask) as usize;
        match &mut self.store {
            Store::Packed(packed) => packed.probe(set, tag),
            Store::Rings(rings) => rings[set].probe(tag),
            Store::Random(sets) => sets.probe(set, tag),
        }
    }

    /// Inserts a tag that is known to be absent.
    #[inline(always)]
    pub fn fill(&mut self, index: u64, tag: u64) {
        let set = (index & self.set_mask) as usize;
        match &mut self.store {
            Store::Packed(packed) => packed.replace(set, tag),
            Store::Rings(rings) => rings[set].replace(tag),
            Store::Random(sets) => sets.replace(set, tag),
        };
    }

    /// Drops every tag for which `doomed` returns true.
    pub fn flush(&mut self, doomed: impl Fn(u64) -> bool) {
        match &mut self.store {
            Store::Packed(packed) => packed.flush(doomed),
            Store::Rings(rings) => rings.iter_mut().for_each(|ring| ring.flush(&doomed)),
            Store::Random(sets) => {
                sets.tags.iter_mut().filter(|t| doomed(**t)).for_each(|t| *t = EMPTY);
            }
        }
    }
}

/// Returns 16 bits of a tag, which are searched first. They differ between nearby pages, spaces and page
/// sizes.
#[inline(always)]
fn print(tag: u64) -> u16 {
    (tag ^ (tag >> 16) ^ (tag >> 32) ^ (tag >> 20)) as u16
}

/// Tests whether a print is present. It has no branch for each print, so that the compiler uses vectors.
#[inline(always)]
fn any_print<const N: usize>(prints: &[u16; N], print: u16) -> bool {
    prints.iter().fold(0, |found, p| found | u16::from(*p == print)) != 0
}

/// Returns the first place of a print that is present. The place is unpredictable, so no branch depends on
/// it.
#[inline(always)]
fn first_place<const N: usize>(prints: &[u16; N], print: u16) -> usize {
    let mut equal = [0u8; N];
    equal.iter_mut().zip(prints).for_each(|(equal, p)| *equal = u8::from(*p == print));
    let words = equal.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes));
    let places = words.enumerate().rev().map(|(n, word)| (word, 8 * n));
    places.fold(
        0,
        |place, (word, before)| {
            if word == 0 { place } else { before + word.trailing_zeros() as usize / 8 }
        },
    )
}

/// Returns the place of a tag whose print is first found at `place`. Another tag may have the same print.
#[inline(always)]
fn found_at(tags: &[u64], place: usize, tag: u64) -> Option<usize> {
    if tags.get(place) == Some(&tag) {
        return Some(place);
    }
    tags.iter().position(|entry| *entry == tag)
}

/// The number of four-bit places in a word.
const PACKED_WAYS: usize = 16;
const WAY_BITS: usize = 4;
/// The most ways for which the tags are compared one by one.
const TRIED_WAYS: usize = 2;
/// The lowest and the highest bit of each place.
const LOW_BITS: u64 = 0x1111_1111_1111_1111;
const HIGH_BITS: u64 = LOW_BITS << 3;

/// Sets of up to 16 ways.
#[derive(Debug, Clone)]
struct Packed {
    ways: usize,
    last_place: usize,
    sets: Vec<PackedSet>,
}

/// A set in whole cache lines; sets of up to three ways use only the first.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct PackedSet {
    /// The ways in order, the newest in the lowest bits.
    order: u64,
    /// A print of each way's tag; 0 beyond the last way.
    prints: [u16; PACKED_WAYS],
    tags: [u64; PACKED_WAYS],
}

impl Packed {
    fn new(set_count: usize, ways: usize) -> Self {
        let order = (0..ways as u64).rev().fold(0, |order, way| (order << WAY_BITS) | way);
        let set = PackedSet { order, prints: [0; PACKED_WAYS], tags: [EMPTY; PACKED_WAYS] };
        Packed { ways, last_place: WAY_BITS * (ways - 1), sets: vec![set; set_count] }
    }

    #[inline(always)]
    fn probe(&mut self, index: usize, tag: u64) -> bool {
        let set = &mut self.sets[index];
        let print = print(tag);
        if !any_print(&set.prints, print) {
            return false;
        }
        let found = if self.ways <= TRIED_WAYS {
            set.tags[..TRIED_WAYS].iter().position(|entry| *entry == tag)
        } else {
            found_at(&set.tags, first_place(&set.prints, print), tag)
        };
        if let Some(way) = found {
            set.order = newest(set.order, way as u64);
        }
        found.is_some()
    }

    /// Evicts the oldest entry. Returns false.
    #[inline(always)]
    fn replace(&mut self, index: usize, tag: u64) -> bool {
        let set = &mut self.sets[index];
        let oldest = set.order >> self.last_place;
        set.order = ((set.order ^ (oldest << self.last_place)) << WAY_BITS) | oldest;
        set.prints[oldest as usize % PACKED_WAYS] = print(tag);
        set.tags[oldest as usize % PACKED_WAYS] = tag;
        false
    }

    fn flush(&mut self, doomed: impl Fn(u64) -> bool) {
        for PackedSet { order, tags, .. } in &mut self.sets {
            tags.iter_mut().filter(|tag| doomed(**tag)).for_each(|tag| *tag = EMPTY);
            // Tags that stay keep their order; empty ways go behind them.
            let kept: Vec<u64> =
                ways_of(*order, self.ways).filter(|way| tags[*way as usize] != EMPTY).collect();
            *order = kept.into_iter().rev().fold(*order, newest);
        }
    }
}

/// Returns the ways of an order, newest first.
fn ways_of(order: u64, ways: usize) -> impl Iterator<Item = u64> {
    (0..ways).map(move |place| (order >> (WAY_BITS * place)) & 15)
}

/// Returns the order with `way` moved to the front.
#[inline(always)]
fn newest(order: u64, way: u64) -> u64 {
    // The lowest place that holds `way`.
    let different = order ^ (way * LOW_BITS);
    let place = (different.wrapping_sub(LOW_BITS) & !different & HIGH_BITS).trailing_zeros() & !3;
    let before = (1u64 << place) - 1;
    let rest = if place == 60 { 0 } else { order >> (place + 4) << (place + 4) };
    rest | ((order & before) << WAY_BITS) | way
}

/// The sets of an array with random replacement, which need no order.
#[derive(Debug, Clone)]
struct RandomSets {
    ways: usize,
    tags: Vec<u64>,
    rng: Rng,
}

impl RandomSets {
    fn new(entries: usize, ways: usize) -> Self {
        RandomSets { ways, tags: vec![EMPTY; entries], rng: Rng::new(entries as u64) }
    }

    fn probe(&mut self, set: usize, tag: u64) -> bool {
        self.tags[set * self.ways..(set + 1) * self.ways].contains(&tag)
    }

    /// Fills a free entry, or evicts a random one. Returns false.
    fn replace(&mut self, set: usize, tag: u64) -> bool {
        let set = &mut self.tags[set * self.ways..(set + 1) * self.ways];
        let free = set.iter().position(|entry| *entry == EMPTY);
        set[free.unwrap_or_else(|| self.rng.below(self.ways as u64) as usize)] = tag;
        false
    }
}

/// One long set. Its slots form a ring from the newest to the oldest, which links to the newest again. To
/// replace the oldest, the ring turns by one. Empty slots are the oldest. Every other slot is also in the
/// chain of its tag's hash, by which a lookup finds it.
#[derive(Debug, Clone)]
struct Ring {
    slots: Vec<Slot>,
    /// The first slot of each chain, by hash.
    chains: Vec<u32>,
    newest: u32,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    tag: u64,
    newer: u32,
    older: u32,
    /// The next slot of the chain.
    next: u32,
}

/// The end of a chain.
const NO_SLOT: u32 = u32::MAX;
/// The chains for each slot. With four, most chains have one slot.
const CHAINS_PER_SLOT: usize = 4;

impl Ring {
    fn new(capacity: usize) -> Self {
        let count = capacity as u32;
        let slot = |nth: u32| Slot {
            tag: EMPTY,
            newer: (nth + count - 1) % count,
            older: (nth + 1) % count,
            next: NO_SLOT,
        };
        Ring {
            slots: (0..count).map(slot).collect(),
            chains: vec![NO_SLOT; (capacity * CHAINS_PER_SLOT).next_power_of_two()],
            newest: 0,
        }
    }

    fn slot(&mut self, slot: u32) -> &mut Slot {
        &mut self.slots[slot as usize]
    }

    #[inline]
    fn chain(&mut self, tag: u64) -> &mut u32 {
        let hash = (tag ^ (tag >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let mask = self.chains.len() - 1;
        &mut self.chains[hash as usize & mask]
    }

    #[inline]
    fn find(&mut self, tag: u64) -> Option<u32> {
        let mut slot = *self.chain(tag);
        while slot != NO_SLOT && self.slot(slot).tag != tag {
            slot = self.slot(slot).next;
        }
        (slot != NO_SLOT).then_some(slot)
    }

    fn leave_chain(&mut self, slot: u32) {
        let Slot { tag, next, .. } = *self.slot(slot);
        let mut before = *self.chain(tag);
        if before == slot {
            *self.chain(tag) = next;
            return;
        }
        while self.slot(before).next != slot {
            before = self.slot(before).next;
        }
        self.slot(before).next = next;
    }

    #[inline]
    fn probe(&mut self, tag: u64) -> bool {
        let found = self.find(tag);
        if let Some(slot) = found {
            self.make_newest(slot);
        }
        found.is_some()
    }

    /// Evicts the oldest entry. Returns false.
    #[inline]
    fn replace(&mut self, tag: u64) -> bool {
        let oldest = self.slot(self.newest).newer;
        if self.slot(oldest).tag != EMPTY {
            self.leave_chain(oldest);
        }
        let next = std::mem::replace(self.chain(tag), oldest);
        let slot = self.slot(oldest);
        (slot.tag, slot.next) = (tag, next);
        self.newest = oldest;
        false
    }

    #[inline]
    fn make_newest(&mut self, slot: u32) {
        let newest = std::mem::replace(&mut self.newest, slot);
        let oldest = self.slot(newest).newer;
        if slot == newest || slot == oldest {
            return;
        }
        let Slot { newer, older, .. } = *self.slot(slot);
        self.slot(newer).older = older;
        self.slot(older).newer = newer;
        (self.slot(slot).newer, self.slot(slot).older) = (oldest, newest);
        self.slot(oldest).older = slot;
        self.slot(newest).newer = slot;
    }

    fn flush(&mut self, doomed: impl Fn(u64) -> bool) {
        let kept: Vec<u64> = self.oldest_first().filter(|tag| !doomed(*tag)).collect();
        *self = Ring::new(self.slots.len());
        kept.into_iter().for_each(|tag| {
            self.replace(tag);
        });
    }

    fn oldest_first(&self) -> impl Iterator<Item = u64> + '_ {
        let mut slot = self.newest;
        (0..self.slots.len())
            .map(move |_| {
                slot = self.slots[slot as usize].newer;
                self.slots[slot as usize].tag
            })
            .filter(|tag| *tag != EMPTY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The slow one: a list of tags a set, newest last.
    struct Oracle {
        sets: Vec<Vec<u64>>,
        ways: usize,
    }

    impl Oracle {
        fn touch(&mut self, tag: u64, fill: bool) -> bool {
            let index = tag as usize % self.sets.len();
            let set = &mut self.sets[index];
            let found = set.iter().position(|t| *t == tag);
            if let Some(at) = found {
                set.remove(at);
            } else if fill && set.len() == self.ways {
                set.remove(0);
            }
            if fill || found.is_some() {
                set.push(tag);
            }
            found.is_some()
        }
    }

    proptest! {
        #[test]
        fn both_stores_equal_the_oracle(
            set_bits in 0u32..4,
            ways in 1usize..40,
            steps in proptest::collection::vec((1u64..200, 0u8..20), 1..600),
        ) {
            let sets = 1usize << set_bits;
            let mut array = TagArray::new(sets * ways, ways, Replacement::Lru);
            let mut oracle = Oracle { sets: vec![Vec::new(); sets], ways };
            for (tag, kind) in steps {
                match kind {
                    0 => {
                        array.flush(|t| t % 3 == tag % 3);
                        oracle.sets.iter_mut().for_each(|s| s.retain(|t| t % 3 != tag % 3));
                    }
                    1..5 => prop_assert_eq!(array.probe(tag, tag), oracle.touch(tag, false)),
                    _ => prop_assert_eq!(array.touch(tag, tag), oracle.touch(tag, true)),
                }
            }
        }

        #[test]
        fn random_replacement_holds_a_tag_once(tags in proptest::collection::vec(1u64..60, 1..500)) {
            let mut array = TagArray::new(16, 4, Replacement::Random);
            for tag in tags {
                let known = array.probe(tag, tag);
                prop_assert_eq!(array.touch(tag, tag), known);
                prop_assert!(array.probe(tag, tag));
                array.flush(|t| t == tag && tag % 7 == 0);
                prop_assert_eq!(array.probe(tag, tag), tag % 7 != 0);
            }
        }
    }
}
