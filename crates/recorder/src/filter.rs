//! Which accesses an engine may drop without changing any count.
//!
//! An access drops when its page stands in a direct-mapped table of pages used before. That is exact
//! for a TLB whose first level has the address bits of the table's index among those of its set index:
//! accesses since the page was put there went to other slots, hence to other sets, so the page is
//! still the one that its set used last. It hits, changes no order, and the levels below never see it.
//! With one slot it is the last page of all, which is exact for every TLB.
//!
//! Pages of different sizes take their set index from different bits, so small and large ones have a
//! table each, and an access drops only when both drop it. Where an array holds several of the sizes in
//! use, their sets have no bits in common, and one slot is what is left.
//!
//! All of this speaks of the first level that can hold a size; what is shared beneath does not matter,
//! as a hit in the first keeps the access from it.

use crate::stream::{Filter, SLOTS_MAX, Side};
use pagetax_sim::mmu::tlb::TlbHierarchy;
use std::collections::BTreeSet;

/// What the engines tell pages apart by at least: the base page of x86-64 and most others.
pub const PAGE_SHIFT: u32 = 12;
/// Index bits end here, so that [`crate::simulate`] can count far accesses exactly.
pub const INDEX_END: u32 = 18;
/// Pages from here on are large ones: 1M.
const LARGE_SHIFT: u32 = 20;

/// One TLB that the stream feeds, and the page sizes that will be looked up in it.
pub struct Fed<'a> {
    /// As it is programmed.
    pub tlb: &'a TlbHierarchy,
    /// log2 of each page size.
    pub shifts: BTreeSet<u32>,
}

/// The filters for one side of all machines and page sizes together.
pub fn choose(fed: &[Fed<'_>]) -> Side {
    let last_page =
        Filter { page_shift: PAGE_SHIFT, index_shift: PAGE_SHIFT, index_mask: 0, used: 1 };
    if fed.iter().any(shares_an_array) {
        return Side { small: last_page, large: Filter::default() };
    }
    let large = filter(fed, LARGE_SHIFT..u32::MAX, u32::MAX);
    match filter(fed, 0..LARGE_SHIFT, INDEX_END) {
        Some(small) => Side {
            small: Filter { page_shift: PAGE_SHIFT, ..small },
            large: large.unwrap_or_default(),
        },
        // Far accesses are told apart by small pages, even where no TLB holds them.
        None => Side { small: last_page, large: Filter::default() },
    }
}

/// Whether one array is asked for pages of two sizes, or none for pages of some size.
fn shares_an_array(fed: &Fed<'_>) -> bool {
    let mut seen = BTreeSet::new();
    fed.shifts.iter().any(|shift| match fed.tlb.nearest_arrays(*shift) {
        Some(arrays) => arrays.into_iter().any(|(array, _)| !seen.insert(array)),
        None => true,
    })
}

/// Indexed by the bits that all sets of the sizes in a range have in common; none without such sizes.
fn filter(fed: &[Fed<'_>], sizes: std::ops::Range<u32>, end: u32) -> Option<Filter> {
    let (mut page_shift, mut low, mut high) = (None, 0, end);
    for Fed { tlb, shifts } in fed {
        for shift in shifts.range(sizes.clone()) {
            let arrays = tlb.nearest_arrays(*shift).unwrap_or_default();
            let set_bits = arrays.iter().map(|(_, sets)| sets.ilog2()).min().unwrap_or(0);
            page_shift = Some(page_shift.map_or(*shift, |smallest: u32| smallest.min(*shift)));
            low = low.max(*shift);
            high = high.min(shift + set_bits);
        }
    }
    let bits = high.saturating_sub(low).min(SLOTS_MAX.ilog2());
    Some(Filter { page_shift: page_shift?, index_shift: low, index_mask: (1 << bits) - 1, used: 1 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetax_core::units::PageSize;
    use pagetax_sim::mmu::set::Replacement;
    use pagetax_sim::mmu::tlb::{ArraySpec, LevelSpec};
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

    fn fed<'a>(tlb: &'a TlbHierarchy, shifts: &[u32]) -> Fed<'a> {
        Fed { tlb, shifts: shifts.iter().copied().collect() }
    }

    #[test]
    fn index_bits_are_those_that_all_sets_have_in_common() {
        let x86 = tlb(&[vec![array(96, 6, &[12]), array(32, 4, &[21])]]);
        let sparc = tlb(&[vec![array(512, 2, &[13])]]);
        let side = choose(&[fed(&x86, &[12]), fed(&x86, &[12, 21]), fed(&sparc, &[13])]);
        let small = Filter { page_shift: 12, index_shift: 13, index_mask: 7, used: 1 };
        let large = Filter { page_shift: 21, index_shift: 21, index_mask: 7, used: 1 };
        assert_eq!(side, Side { small, large });
        let shared = tlb(&[vec![array(64, 4, &[12, 21])]]);
        let side = choose(&[fed(&x86, &[12]), fed(&shared, &[12, 21])]);
        assert_eq!((side.small.index_mask, side.large.used), (0, 0));
        assert_eq!(choose(&[fed(&x86, &[30])]).small.index_mask, 0, "no array holds 1G");
    }

    /// The engine's filter, as in engines/stream.h.
    struct Slots(Vec<u64>);

    impl Slots {
        fn passes(&mut self, filter: &Filter, address: u64) -> bool {
            let slot = &mut self.0
                [((address >> filter.index_shift) & u64::from(filter.index_mask)) as usize];
            let page = address >> filter.page_shift;
            filter.used != 0 && std::mem::replace(slot, page) != page
        }
    }

    /// Counts of both sizes with and without the filter before the TLB.
    fn counts(levels: &[LevelSpec], accesses: &[(u64, bool)], filtered: bool) -> Vec<u64> {
        let mut tlb = tlb(levels);
        let side = choose(&[fed(&tlb, &[12, 21])]);
        let (mut small, mut large) = (Slots(vec![u64::MAX; 64]), Slots(vec![u64::MAX; 64]));
        let mut dropped = [0, 0];
        for (address, is_large) in accesses {
            let shift = if *is_large { 21 } else { 12 };
            // As in pt_note: when an access passes, it stands in both tables.
            let passes = small.passes(&side.small, *address) | large.passes(&side.large, *address);
            if passes || !filtered {
                tlb.access(0, *address, shift);
            } else {
                dropped[usize::from(*is_large)] += 1;
            }
        }
        let mut all = tlb.counts(PageSize::new(1 << 12).unwrap());
        all[0] += dropped[0];
        let mut large = tlb.counts(PageSize::M2);
        large[0] += dropped[1];
        all.extend(large);
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
                    0 => ((1 << 30) + (large << 21) + (small << 12), true),
                    _ => (small << 12, false),
                }), 1..600),
        ) {
            let (small, large) = (small_ways << small_sets, large_ways << large_sets);
            let first = match shared {
                true => vec![array(small, small_ways, &[12, 21])],
                false => vec![array(small, small_ways, &[12]), array(large, large_ways, &[21])],
            };
            let levels = [first, vec![array(32, 4, &[12, 21])]];
            prop_assert_eq!(counts(&levels, &accesses, true), counts(&levels, &accesses, false));
        }
    }
}
