//! Which accesses an engine may drop without changing any count.
//!
//! Of each set, an engine knows the last pages used: as many as every TLB that is fed has ways. A set of
//! least recently used entries holds its last pages used for certain, and whatever else was used since
//! went to other sets or is among them, too. So an access to one of them hits, the levels below never
//! see it, and all that it changes is the order. That matters first when another page comes into the
//! set, and then it is enough that the page that leaves the filter, the one used longest ago, is also the
//! one of these whose use the TLB knows to be longest ago. So in every TLB, pages of the filter are newer
//! than all others, which lie in the order of their last use, as they left in it; and the entry that makes
//! room is the oldest of the others, or, if there are none, the one that leaves the filter. Where the
//! order is not like that, the engine tells it before the record of the new page: it touches those pages
//! whose order has changed since their last records, oldest first.
//! This holds for a TLB whose first level has the address bits of the filter's
//! index among those of its set index, as its sets see fewer pages; for one of larger pages, as the last
//! pages lie on as many or fewer of its own; and for several arrays side by side that share a size, as
//! each makes room by its own order. Where any entry may make room, the last page of all of a set is what
//! is left: its filter has one way.
//!
//! Pages of different sizes take their set index from different bits, so small and large ones have a
//! filter each, and an access drops only when both hold its page; touches say which filter's they are.
//! Where an array holds several of the sizes in use, their sets have no bits in common, and one set is
//! what is left.
//!
//! All of this speaks of the first level that can hold a size; what is shared beneath does not matter,
//! as a hit in the first keeps the access from it. It asks that all of a large page's addresses are on
//! large pages: where a config has small pages next to a large one inside its bounds, the large one may
//! pass for newer than it is.

use crate::stream::{Filter, SETS_MAX, SideFilters, WAYS_MAX};
use pagetax_sim::hardware::tlb::{Nearest, TlbHierarchy};
use std::collections::BTreeSet;

/// What the engines tell pages apart by at least: the base page of x86-64 and most others.
pub const PAGE_SHIFT: u32 = 12;
/// Index bits of small pages end here, and [`crate::simulate`] counts far accesses by all of them, so
/// that no far access is dropped.
pub const INDEX_END: u32 = PAGE_SHIFT + SETS_MAX.ilog2();
/// Pages from here on are large ones: 1M.
pub const LARGE_SHIFT: u32 = 20;

/// One TLB that the stream feeds, and the page sizes that will be looked up in it.
pub struct FilteredTlb<'a> {
    /// As it is programmed.
    pub tlb: &'a TlbHierarchy,
    /// log2 of each page size.
    pub shifts: BTreeSet<u32>,
}

/// The filters for one side of all machines and page sizes together.
pub fn choose(fed: &[FilteredTlb<'_>]) -> SideFilters {
    if fed.iter().any(shares_an_array) {
        let ways = fed.iter().flat_map(|fed| fed.shifts.iter().map(|shift| fed.ways(*shift))).min();
        let one_set = Filter {
            page_shift: PAGE_SHIFT,
            index_shift: PAGE_SHIFT,
            index_mask: 0,
            ways: ways.unwrap_or(1),
        };
        return SideFilters { small: one_set, ..SideFilters::default() };
    }
    // Far accesses are told apart by small pages, even where no TLB holds them.
    let far = Filter {
        page_shift: PAGE_SHIFT,
        index_shift: PAGE_SHIFT,
        index_mask: SETS_MAX - 1,
        ways: WAYS_MAX,
    };
    let small = filter(fed, 0..LARGE_SHIFT, INDEX_END);
    SideFilters {
        small: small.map_or(far, |small| Filter { page_shift: PAGE_SHIFT, ..small }),
        large: filter(fed, LARGE_SHIFT..u32::MAX, u32::MAX).unwrap_or_default(),
        large_on_demand: 0,
    }
}

impl FilteredTlb<'_> {
    fn nearest(&self, shift: u32) -> Vec<Nearest> {
        self.tlb.nearest_arrays(shift).unwrap_or_default()
    }

    /// The last pages of a set that are there for certain.
    fn ways(&self, shift: u32) -> u32 {
        let certain = |array: &Nearest| if array.is_lru { array.ways } else { 1 };
        let ways = self.nearest(shift).iter().map(certain).min().unwrap_or(1);
        u32::try_from(ways).map_or(WAYS_MAX, |ways| ways.min(WAYS_MAX))
    }
}

/// Whether one array is asked for pages of two sizes, or none for pages of some size.
fn shares_an_array(fed: &FilteredTlb<'_>) -> bool {
    let mut seen = BTreeSet::new();
    fed.shifts.iter().any(|shift| match fed.tlb.nearest_arrays(*shift) {
        Some(arrays) => arrays.into_iter().any(|nearest| !seen.insert(nearest.array)),
        None => true,
    })
}

/// Indexed by the bits that all sets of the sizes in a range have in common; none without such sizes.
fn filter(fed: &[FilteredTlb<'_>], sizes: std::ops::Range<u32>, end: u32) -> Option<Filter> {
    let (mut page_shift, mut low, mut high, mut ways) = (None, 0, end, WAYS_MAX);
    for fed in fed {
        for shift in fed.shifts.range(sizes.clone()) {
            let set_bits = fed.nearest(*shift).iter().map(|array| array.set_count.ilog2()).min();
            page_shift = Some(page_shift.map_or(*shift, |smallest: u32| smallest.min(*shift)));
            low = low.max(*shift);
            high = high.min(shift + set_bits.unwrap_or(0));
            ways = ways.min(fed.ways(*shift));
        }
    }
    let bits = high.saturating_sub(low).min(SETS_MAX.ilog2());
    Some(Filter { page_shift: page_shift?, index_shift: low, index_mask: (1 << bits) - 1, ways })
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetax_core::units::PageSize;
    use pagetax_sim::hardware::set::Replacement;
    use pagetax_sim::hardware::tlb::{ArraySpec, LevelSpec};
    use proptest::prelude::*;

    fn array(entries: u32, ways: u32, sizes: &[u32]) -> ArraySpec {
        ArraySpec {
            entries,
            ways: Some(ways),
            page_sizes: sizes.iter().map(|s| PageSize::new(1 << s).unwrap()).collect(),
            locked: 0,
            replacement: Replacement::Lru,
            programmable: false,
            fallback: false,
        }
    }

    fn tlb(levels: &[LevelSpec]) -> TlbHierarchy {
        TlbHierarchy::new("test", levels).unwrap()
    }

    fn fed<'a>(tlb: &'a TlbHierarchy, shifts: &[u32]) -> FilteredTlb<'a> {
        FilteredTlb { tlb, shifts: shifts.iter().copied().collect() }
    }

    #[test]
    fn index_bits_are_those_that_all_sets_have_in_common() {
        let x86 = tlb(&[vec![array(96, 6, &[12]), array(32, 4, &[21])]]);
        let sparc = tlb(&[vec![array(512, 2, &[13])]]);
        let side = choose(&[fed(&x86, &[12]), fed(&x86, &[12, 21]), fed(&sparc, &[13])]);
        let small = Filter { page_shift: 12, index_shift: 13, index_mask: 7, ways: 2 };
        let large = Filter { page_shift: 21, index_shift: 21, index_mask: 7, ways: 4 };
        assert_eq!(side, SideFilters { small, large, large_on_demand: 0 });
        let shared = tlb(&[vec![array(64, 4, &[12, 21])]]);
        let side = choose(&[fed(&x86, &[12]), fed(&shared, &[12, 21])]);
        assert_eq!((side.small.index_mask, side.small.ways, side.large.ways), (0, 4, 0));
        assert_eq!(choose(&[fed(&x86, &[30])]).small.index_mask, 0, "no array holds 1G");
        assert_eq!(choose(&[fed(&x86, &[21])]).small.ways, WAYS_MAX, "far accesses only");
    }

    /// One filter of engines/filter.h, without its table of slots: sets in their true order, and in the
    /// order that the consumer knows.
    struct Sets {
        filter: Filter,
        is: Vec<Vec<u64>>,
        known: Vec<Vec<u64>>,
    }

    impl Sets {
        fn new(filter: Filter) -> Self {
            let empty = vec![Vec::new(); filter.index_mask as usize + 1];
            Sets { filter, is: empty.clone(), known: empty }
        }

        fn set(&self, page: u64) -> usize {
            let address = page << self.filter.page_shift;
            ((address >> self.filter.index_shift) & u64::from(self.filter.index_mask)) as usize
        }

        /// Newest first; false if it was not there.
        fn hold(&mut self, page: u64) -> bool {
            let at = self.set(page);
            let set = &mut self.is[at];
            let found = set.iter().position(|other| *other == page);
            found.map(|place| set.remove(place));
            set.insert(0, page);
            found.is_some()
        }

        /// Pages to touch before a record of a page that was not there, oldest first: none if the page
        /// that leaves is the one that the consumer knows as the oldest.
        fn touches(&mut self, page: u64) -> Vec<u64> {
            let at = self.set(page);
            let (known, is) = (&mut self.known[at], &self.is[at][1..]);
            if is.len() < self.filter.ways as usize || is.last() == known.last() {
                return Vec::new();
            }
            let mut rest = known.iter().rev();
            let in_order = is.iter().rev().take_while(|page| rest.any(|other| other == *page));
            let touched = is.len() - in_order.count();
            *known = is.to_vec();
            is[..touched].iter().rev().copied().collect()
        }

        fn recorded(&mut self, page: u64) {
            let at = self.set(page);
            self.is[at].truncate(self.filter.ways as usize);
            let left = |other: &u64| *other != page && self.is[at].contains(other);
            self.known[at].retain(left);
            self.known[at].insert(0, page);
        }
    }

    /// Accesses that miss, and how many levels, with and without the filter before the TLB.
    fn misses(levels: &[LevelSpec], accesses: &[u64], filtered: bool) -> Vec<u64> {
        let mut tlb = tlb(levels);
        let side = choose(&[fed(&tlb, &[12, 21])]);
        let mut sets: Vec<Sets> = [side.small, side.large]
            .into_iter()
            .filter(|filter| filter.ways > 0)
            .map(Sets::new)
            .collect();
        let is_large = |address: u64| address >= 1 << 30;
        let shift = |address: u64| if is_large(address) { 21 } else { 12 };
        let mut all = Vec::new();
        for address in accesses {
            let held: Vec<bool> =
                sets.iter_mut().map(|sets| sets.hold(address >> sets.filter.page_shift)).collect();
            if filtered && held.iter().all(|held| *held) {
                continue;
            }
            let two = sets.len() == 2;
            for (nth, (sets, held)) in sets.iter_mut().zip(held).enumerate() {
                let page = address >> sets.filter.page_shift;
                let touches = if held { Vec::new() } else { sets.touches(page) };
                for touched in touches.iter().filter(|_| filtered) {
                    let touched = touched << sets.filter.page_shift;
                    if !two || is_large(touched) == (nth == 1) {
                        assert_eq!(tlb.access(0, touched, shift(touched)), 0, "a touch is a hit");
                    }
                }
                sets.recorded(page);
            }
            let missed = tlb.access(0, *address, shift(*address));
            if missed > 0 {
                all.push(address * 4 + missed as u64);
            }
        }
        all
    }

    proptest! {
        #[test]
        fn what_is_dropped_changes_no_count(
            small_sets in 0u32..5, small_ways in 1u32..5,
            large_sets in 0u32..4, large_ways in 1u32..5,
            shared in any::<bool>(),
            // Small pages low, large ones from 1G on: a page has one size.
            accesses in proptest::collection::vec(
                (0u64..64, 0u64..12, 0u8..4).prop_map(|(small, large, which)| match which {
                    0 => (1 << 30) + (large << 21) + (small << 12),
                    _ => small << 12,
                }), 1..600),
        ) {
            let (small, large) = (small_ways << small_sets, large_ways << large_sets);
            let first = match shared {
                true => vec![array(small, small_ways, &[12, 21])],
                false => vec![array(small, small_ways, &[12]), array(large, large_ways, &[21])],
            };
            let levels = [first, vec![array(32, 4, &[12, 21])]];
            prop_assert_eq!(misses(&levels, &accesses, true), misses(&levels, &accesses, false));
        }
    }
}
