//! Groups of runs, which a scan can pass in one step.
//!
//! A scan that only rotates pages need not visit each run. Adjacent runs are therefore grouped, and
//! a group knows the number and the kinds of its pages. If all of these kinds rotate, the hand
//! moves past the whole group.
//!
//! Invariant: the runs of a group are neighbours on one list, from its first to its last toward the
//! head. Its counts are the sums over its runs; a property test checks them. Groups never change
//! the order of pages.

use super::runs::ReclaimState;
use std::ops::{BitAnd, BitOr, Not};

/// The most runs of a group before it is halved; below 256, because counts by kind are `u8`. It is
/// small in tests, so that they halve groups.
pub const GROUP_RUNS: u32 = if cfg!(test) { 4 } else { 32 };

const ZONES: usize = 3;
/// The number of page kinds. A scan decides by a page's zone, and by mapped, dirty and settled.
const KINDS: usize = ZONES << 3;
const MAPPED: usize = 0b001;
const DIRTY: usize = 0b010;
const SETTLED: usize = 0b100;

/// Returns the number of a page's kind.
fn kind(page: ReclaimState) -> usize {
    let settled = page.age == 0 && !page.referenced;
    let bit = |holds: bool, bit: usize| if holds { bit } else { 0 };
    usize::from(page.zone) << 3
        | bit(settled, SETTLED)
        | bit(page.dirty, DIRTY)
        | bit(page.mapped, MAPPED)
}

/// A set of page kinds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Kinds(u32);

impl Kinds {
    /// The empty set.
    pub const NONE: Kinds = Kinds(0);
    /// Pages in page tables.
    pub const MAPPED: Kinds = Kinds::with(MAPPED);
    /// Pages that must be written before they can be freed.
    pub const DIRTY: Kinds = Kinds::with(DIRTY);
    /// Pages of age 0 that are not referenced: a scan does not change their age.
    pub const SETTLED: Kinds = Kinds::with(SETTLED);

    const fn with(bit: usize) -> Self {
        let (mut kinds, mut number) = (0, 0);
        while number < KINDS {
            if number & bit != 0 {
                kinds |= 1 << number;
            }
            number += 1;
        }
        Kinds(kinds)
    }

    /// Returns all kinds of pages in the zones that are true.
    pub fn in_zones(zones: [bool; ZONES]) -> Self {
        let kinds = |zone: usize| if zones[zone] { 0xff << (zone << 3) } else { 0 };
        Kinds((0..ZONES).map(kinds).sum())
    }

    /// Returns true if pages like this one are in the set.
    pub fn contains(self, page: ReclaimState) -> bool {
        self.0 >> kind(page) & 1 == 1
    }
}

impl BitOr for Kinds {
    type Output = Kinds;
    fn bitor(self, other: Kinds) -> Kinds {
        Kinds(self.0 | other.0)
    }
}

impl BitAnd for Kinds {
    type Output = Kinds;
    fn bitand(self, other: Kinds) -> Kinds {
        Kinds(self.0 & other.0)
    }
}

impl Not for Kinds {
    type Output = Kinds;
    fn not(self) -> Kinds {
        Kinds(!self.0)
    }
}

/// Neighbouring runs on one list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Group {
    /// The run nearest to the tail.
    pub first: u32,
    /// The run nearest to the head.
    pub last: u32,
    /// The number of runs in the group.
    pub runs: u32,
    /// The number of pages in all runs.
    pub pages: u64,
    /// The number of runs of each kind.
    by_kind: [u8; KINDS],
    kinds: u32,
}

impl Group {
    /// Returns a group without runs; `run` is to be its first and its last.
    pub fn at(run: u32) -> Self {
        Group { first: run, last: run, ..Group::default() }
    }

    /// Returns true if all its pages are of these kinds.
    pub fn is_of(&self, kinds: Kinds) -> bool {
        self.kinds & !kinds.0 == 0
    }

    /// Adds a run of `pages` pages like `page` to the counts.
    pub fn add(&mut self, page: ReclaimState, pages: u32) {
        self.runs += 1;
        self.pages += u64::from(pages);
        let kind = kind(page);
        self.by_kind[kind] += 1;
        self.kinds |= 1 << kind;
    }

    /// Removes a run of `pages` pages like `page` from the counts.
    pub fn remove(&mut self, page: ReclaimState, pages: u32) {
        self.runs -= 1;
        self.pages -= u64::from(pages);
        let kind = kind(page);
        self.by_kind[kind] -= 1;
        self.kinds &= !(u32::from(self.by_kind[kind] == 0) << kind);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_have_the_pages_that_their_names_say() {
        let page = ReclaimState { zone: 2, mapped: true, ..ReclaimState::default() };
        let (aged, used) =
            (ReclaimState { age: 1, ..page }, ReclaimState { referenced: true, ..page });
        let locked = Kinds::MAPPED & Kinds::SETTLED;
        assert!(locked.contains(page) && !locked.contains(aged) && !locked.contains(used));
        assert!(!Kinds::DIRTY.contains(page) && (!Kinds::DIRTY).contains(page));
        let high = Kinds::in_zones([false, false, true]);
        assert!(high.contains(aged) && !high.contains(ReclaimState { zone: 1, ..aged }));
        assert!((high | Kinds::DIRTY).contains(ReclaimState { zone: 0, dirty: true, ..page }));
        assert!(!Kinds::NONE.contains(page));
    }

    #[test]
    fn a_group_forgets_kinds_that_it_has_no_more() {
        let (old, mapped) =
            (ReclaimState::default(), ReclaimState { mapped: true, ..ReclaimState::default() });
        let mut group = Group::at(0);
        group.add(old, 10);
        group.add(mapped, 20);
        let unmapped = !Kinds::MAPPED;
        assert!(!group.is_of(unmapped));
        group.remove(mapped, 20);
        assert!(group.is_of(unmapped) && group.pages == 10);
    }
}
