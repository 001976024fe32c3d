//! Chooses the filters: the accesses that an engine may drop without changing any count.
//!
//! For each set, an engine knows the pages used last: as many as the fewest ways of any TLB. An LRU set
//! certainly holds its last used pages. An access to one of them hits, no lower level sees it, and only
//! the order of the set changes. The order matters only when another page enters the set. The entry that
//! is then replaced must be the same with and without the filter.
//!
//! The invariant: in every TLB, the filter's pages are newer than all others, and the others lie in the
//! order of their last use. The replaced entry is therefore the oldest of the others. If there are no
//! others, it is the page that leaves the filter, which must be the oldest for the TLB too. Where it is
//! not, the engine first writes touches: it repeats the pages whose order has changed since their last
//! records, oldest first.
//!
//! This holds for three kinds of TLB:
//! - a TLB whose first level indexes its sets by the filter's index bits and more: its sets see fewer
//!   pages;
//! - a TLB of larger pages: the filter's pages lie on as many of its pages, or fewer;
//! - several arrays that share a size: each replaces by its own order.
//!
//! Where replacement is not LRU, only the last page of all of a set is certain: the filter has one way.
//!
//! Page sizes take their set index from different bits. Small and large pages therefore have a filter
//! each, and an access is dropped only if both hold its page. A touch names its filter. Where an array
//! holds several sizes that are in use, their sets share no index bits: the filter has a single set.
//!
//! All of this concerns the first level that can hold a size. Shared lower levels do not matter, since a
//! hit in the first level never reaches them. Limit: all addresses of a large page must be on large
//! pages. If a configuration has small pages beside a large one within its bounds, the TLB may take the
//! large one for newer than it is.

use crate::stream::{Filter, SETS_MAX, SideFilters, WAYS_MAX};
use pagetax_sim::hardware::tlb::{Nearest, TlbHierarchy};
use std::collections::BTreeSet;

/// log2 of the smallest page that engines distinguish: the base page of x86-64 and most others.
pub const PAGE_SHIFT: u32 = 12;
/// The end of small pages' index bits. [`crate::simulate`] uses all of them to count far accesses, so
/// that the filter drops no far access.
pub const INDEX_END: u32 = PAGE_SHIFT + SETS_MAX.ilog2();
/// log2 of the smallest large page: 1 MiB.
pub const LARGE_SHIFT: u32 = 20;

/// One TLB that the stream feeds, with the page sizes that it translates.
pub struct FilteredTlb<'a> {
    /// The TLB, programmed for its page sizes.
    pub tlb: &'a TlbHierarchy,
    /// log2 of these page sizes.
    pub shifts: BTreeSet<u32>,
}

/// Chooses the filters of one side, for all machines and page sizes together.
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
    // Far accesses need a filter of small pages, even if no TLB holds them.
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

    /// Returns how many of a set's last used pages it certainly holds.
    fn ways(&self, shift: u32) -> u32 {
        let certain = |array: &Nearest| if array.is_lru { array.ways } else { 1 };
        let ways = self.nearest(shift).iter().map(certain).min().unwrap_or(1);
        u32::try_from(ways).map_or(WAYS_MAX, |ways| ways.min(WAYS_MAX))
    }
}

/// Returns true if one array serves two page sizes, or if a page size has no array.
fn shares_an_array(fed: &FilteredTlb<'_>) -> bool {
    let mut seen = BTreeSet::new();
    fed.shifts.iter().any(|shift| match fed.tlb.nearest_arrays(*shift) {
        Some(arrays) => arrays.into_iter().any(|nearest| !seen.insert(nearest.array)),
        None => true,
    })
}

/// Returns a filter indexed by the bits that the sets of all sizes in a range share; none without such
/// sizes.
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

    /// A model of one filter of engines/filter.h, without its slots: the sets in their true order and in
    /// the order that the consumer knows.
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

        /// Moves a page to the front; false if it was not in the set.
        fn hold(&mut self, page: u64) -> bool {
            let at = self.set(page);
            let set = &mut self.is[at];
            let found = set.iter().position(|other| *other == page);
            found.map(|place| set.remove(place));
            set.insert(0, page);
            found.is_some()
        }

        /// Returns the pages to touch before a new page's record, oldest first. None if the consumer
        /// knows the leaving page as the oldest.
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

    /// Returns the misses of each level, with or without the filter in front of the TLB.
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
            // Small pages lie below 1 GiB, large ones above, so that a page has one size.
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
