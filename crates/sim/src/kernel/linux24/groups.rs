//! Groups of runs: what a scan may pass over at one step.
//!
//! A scan that only turns pages around need not look at each run. Runs that lie behind each other are
//! therefore grouped, and a group knows how many pages it has and of which kinds they are: when all
//! of these kinds go round, the hand moves behind the whole group.
//!
//! Invariant: the runs of a group are neighbours on one list, from its first to its last toward the
//! head; its counts are theirs (a property test adds them up). Groups never change what is where.

use super::runs::Page;

/// Runs of a group before it is halved; few in tests, so that they come to it.
pub const GROUP_RUNS: u32 = if cfg!(test) { 4 } else { 32 };

/// What a scan decides by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kind {
    /// Index of the zone.
    pub zone: u8,
    /// In page tables.
    pub mapped: bool,
    /// To be written before it is freed.
    pub dirty: bool,
    /// Of age 0 and not referenced: a scan does not change it.
    pub settled: bool,
}

const KINDS: usize = 24;

impl Kind {
    fn of(page: Page) -> Self {
        let settled = page.age == 0 && !page.referenced;
        Kind { zone: page.zone, mapped: page.mapped, dirty: page.dirty, settled }
    }

    fn numbered(number: usize) -> Self {
        let bit = |place: usize| number >> place & 1 == 1;
        Kind { zone: (number >> 3) as u8, mapped: bit(0), dirty: bit(1), settled: bit(2) }
    }

    fn number(self) -> usize {
        let (mapped, dirty) = (usize::from(self.mapped), usize::from(self.dirty));
        usize::from(self.zone) << 3 | usize::from(self.settled) << 2 | dirty << 1 | mapped
    }
}

/// A set of kinds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Kinds(u32);

impl Kinds {
    /// Those that `includes` says yes to.
    pub fn that(includes: impl Fn(Kind) -> bool) -> Self {
        let one = |number| u32::from(includes(Kind::numbered(number))) << number;
        Kinds((0..KINDS).map(one).sum())
    }

    /// Whether pages like this are in the set.
    pub fn contains(self, page: Page) -> bool {
        self.0 >> Kind::of(page).number() & 1 == 1
    }
}

/// Neighbouring runs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Group {
    /// Toward the tail.
    pub first: u32,
    /// Toward the head.
    pub last: u32,
    /// How many runs.
    pub runs: u32,
    /// How many pages they have.
    pub pages: u64,
    /// Runs by kind.
    by_kind: [u16; KINDS],
    kinds: u32,
}

impl Group {
    /// A group without runs yet, that will begin and end with this one.
    pub fn at(run: u32) -> Self {
        Group { first: run, last: run, ..Group::default() }
    }

    /// Whether all its pages are of these kinds.
    pub fn is_of(&self, kinds: Kinds) -> bool {
        self.kinds & !kinds.0 == 0
    }

    /// A run more.
    pub fn add(&mut self, page: Page, pages: u32) {
        self.runs += 1;
        self.pages += u64::from(pages);
        let kind = Kind::of(page).number();
        self.by_kind[kind] += 1;
        self.kinds |= 1 << kind;
    }

    /// A run less.
    pub fn remove(&mut self, page: Page, pages: u32) {
        self.runs -= 1;
        self.pages -= u64::from(pages);
        let kind = Kind::of(page).number();
        self.by_kind[kind] -= 1;
        self.kinds &= !(u32::from(self.by_kind[kind] == 0) << kind);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_have_numbers() {
        assert!((0..KINDS).all(|number| Kind::numbered(number).number() == number));
        let locked = Kinds::that(|kind| kind.mapped && kind.settled);
        let page = Page { mapped: true, ..Page::default() };
        assert!(locked.contains(page) && !locked.contains(Page { age: 1, ..page }));
    }

    #[test]
    fn a_group_forgets_kinds_that_it_has_no_more() {
        let (old, mapped) = (Page::default(), Page { mapped: true, ..Page::default() });
        let mut group = Group::at(0);
        group.add(old, 10);
        group.add(mapped, 20);
        let unmapped = Kinds::that(|kind| !kind.mapped);
        assert!(!group.is_of(unmapped));
        group.remove(mapped, 20);
        assert!(group.is_of(unmapped) && group.pages == 10);
    }
}
