//! Translation lookaside buffers: any number of levels, each of parallel arrays.
//!
//! Invariant: counts are exact. A run of accesses inside one page is one lookup and arithmetic: the
//! page is the most recently used one after the first access, so the others change nothing.
//! The caller knows the page size of an address from its page table, so only the arrays that can hold it
//! are searched. Hardware searches all of them at once, with the same outcome.

use super::set::{Replacement, TagArray};
use pagetax_core::access::Rng;
use pagetax_core::units::PageSize;

/// The geometry of one array.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArraySpec {
    /// The number of entries, locked ones included.
    pub entries: u32,
    /// The number of entries in a set; absent: fully associative.
    pub ways: Option<u32>,
    /// The page sizes that it can hold.
    pub page_sizes: Vec<PageSize>,
    /// The number of entries that the kernel keeps locked (fully associative only).
    pub locked: u32,
    /// The replacement policy of its sets.
    pub replacement: Replacement,
    /// True if it holds one of its page sizes at a time, which software chooses for each process.
    pub programmable: bool,
    /// True if it takes only the page sizes that no other array of its level holds.
    pub fallback: bool,
}

/// The arrays of one level, which are searched together.
pub type LevelSpec = Vec<ArraySpec>;

/// The reasons why a geometry is impossible.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GeometryError {
    /// No level, or a level without entries.
    #[error("{0}: a TLB needs at least one level, and each level at least one array with entries")]
    Empty(String),
    /// Sets of different sizes, or a number of sets that is no power of two.
    #[error(
        "{at}: {entries} entries in {ways} ways make no whole power of two of sets; choose ways \
         that divide the entries"
    )]
    Ways {
        /// The array, as the model names it.
        at: String,
        /// The entries in the model.
        entries: u32,
        /// The number of ways in the model.
        ways: u32,
    },
    /// Only locked entries, or locked entries in a set-associative array.
    #[error(
        "{at}: {locked} locked of {entries} entries; only fully associative arrays lock, and some must be left"
    )]
    Locked {
        /// The array, as the model names it.
        at: String,
        /// The entries in the model.
        entries: u32,
        /// The locked entries in the model.
        locked: u32,
    },
    /// An array without page sizes.
    #[error("{0}: no page size; name those that it can hold")]
    NoPageSize(String),
    /// More than [`MAX_ARRAYS`] arrays in a level.
    #[error("{0}: more than {MAX_ARRAYS} arrays in a level")]
    TooManyArrays(String),
}

/// The most arrays in a level.
pub const MAX_ARRAYS: usize = 8;

/// The number of possible page shifts.
const SHIFTS: usize = 64;

impl ArraySpec {
    fn check(&self, at: &str) -> Result<(), GeometryError> {
        let at = at.to_string();
        let (entries, ways) = (self.entries, self.ways.unwrap_or(self.entries));
        if entries == 0 {
            return Err(GeometryError::Empty(at));
        }
        if ways == 0 || !entries.is_multiple_of(ways) || !(entries / ways).is_power_of_two() {
            return Err(GeometryError::Ways { at, entries, ways });
        }
        if self.locked >= entries || (self.locked > 0 && ways != entries) {
            return Err(GeometryError::Locked { at, entries, locked: self.locked });
        }
        if self.page_sizes.is_empty() {
            return Err(GeometryError::NoPageSize(at));
        }
        Ok(())
    }

    fn build(&self) -> TagArray {
        let entries = (self.entries - self.locked) as usize;
        let ways = self.ways.filter(|w| *w != self.entries).map_or(entries, |w| w as usize);
        TagArray::new(entries, ways, self.replacement)
    }
}

/// A page of one address space, as TLBs and caches tag it: page number, address space, page size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageTag(u64);

/// Bits of an address-space number: as many as an UltraSPARC context has.
pub const ASID_BITS: u32 = 13;

impl PageTag {
    /// Creates a tag. `asid` is below 2^13, the address below 2^57.
    #[inline(always)]
    pub fn new(asid: u16, address: u64, shift: u32) -> Self {
        let asid = u64::from(asid) & ((1 << ASID_BITS) - 1);
        PageTag(((address >> shift) << (ASID_BITS + 6)) | (asid << 6) | u64::from(shift))
    }

    #[inline(always)]
    fn index(self) -> u64 {
        self.0 >> (ASID_BITS + 6)
    }

    fn asid(bits: u64) -> u16 {
        ((bits >> 6) & ((1 << ASID_BITS) - 1)) as u16
    }

    fn address(bits: u64) -> u64 {
        (bits >> (ASID_BITS + 6)) << (bits & 63)
    }
}

/// The arrays of a level that hold one page size.
#[derive(Debug, Clone, Copy, Default)]
struct Route {
    count: u8,
    arrays: [u8; MAX_ARRAYS],
}

impl Route {
    fn add(&mut self, array: usize) {
        self.arrays[usize::from(self.count)] = array as u8;
        self.count += 1;
    }
}

#[derive(Debug, Clone)]
struct Level {
    specs: Vec<ArraySpec>,
    arrays: Vec<TagArray>,
    /// The current page size of each programmable array; None for the others.
    programmed: Vec<Option<PageSize>>,
    /// The routes, by page shift.
    routes: [Route; SHIFTS],
    /// The generator that chooses among arrays of one size on a fill.
    rng: Rng,
}

impl Level {
    fn new(specs: &LevelSpec) -> Self {
        let mut level = Level {
            specs: specs.clone(),
            arrays: specs.iter().map(ArraySpec::build).collect(),
            // A programmable array begins with its first, its default size.
            programmed: specs.iter().map(|s| s.programmable.then_some(s.page_sizes[0])).collect(),
            routes: [Route::default(); SHIFTS],
            rng: Rng::new(specs.len() as u64),
        };
        level.lay_routes();
        level
    }

    fn lay_routes(&mut self) {
        self.routes = [Route::default(); SHIFTS];
        for (array, (spec, programmed)) in self.specs.iter().zip(&self.programmed).enumerate() {
            let held = programmed.as_ref().map_or(&spec.page_sizes[..], std::slice::from_ref);
            let held = held.iter().filter(|_| !spec.fallback);
            held.for_each(|size| self.routes[size.shift() as usize].add(array));
        }
        for (array, spec) in self.specs.iter().enumerate().filter(|(_, spec)| spec.fallback) {
            let routes = spec.page_sizes.iter().map(|size| size.shift() as usize);
            let unheld = routes.filter(|shift| self.routes[*shift].count == 0);
            unheld.collect::<Vec<_>>().into_iter().for_each(|s| self.routes[s].add(array));
        }
    }

    #[inline(always)]
    fn touch(&mut self, tag: PageTag, shift: u32) -> bool {
        let route = &self.routes[shift as usize & (SHIFTS - 1)];
        match route.count {
            0 => false,
            1 => self.arrays[usize::from(route.arrays[0])].touch(tag.index(), tag.0),
            _ => self.touch_one_of(shift, tag),
        }
    }

    /// Looks a page up in several arrays of one size. A fill goes into one of them at random.
    #[inline]
    fn touch_one_of(&mut self, shift: u32, tag: PageTag) -> bool {
        let route = &self.routes[shift as usize & (SHIFTS - 1)];
        let arrays = &route.arrays[..usize::from(route.count)];
        for array in arrays {
            if self.arrays[usize::from(*array)].probe(tag.index(), tag.0) {
                return true;
            }
        }
        let chosen = arrays[self.rng.below(arrays.len() as u64) as usize];
        self.arrays[usize::from(chosen)].fill(tag.index(), tag.0);
        false
    }

    /// Implements [`TlbHierarchy::program`].
    fn program(&mut self, size: PageSize, keep: usize) {
        let mut nth = 0;
        for (array, spec) in self.specs.iter().enumerate() {
            let Some(programmed) = &mut self.programmed[array] else { continue };
            let takes = nth >= keep && spec.page_sizes.contains(&size);
            let wanted = if takes { size } else { spec.page_sizes[0] };
            if *programmed != wanted {
                *programmed = wanted;
                self.arrays[array].flush(|_| true);
            }
            nth += 1;
        }
        self.lay_routes();
    }
}

/// A first-level array for a page size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Nearest {
    /// The array's number in its level.
    pub array: u8,
    /// The number of sets in the array.
    pub set_count: u64,
    /// The number of entries in each set.
    pub ways: usize,
    /// True if the least recently used entry makes room.
    pub is_lru: bool,
}

/// All levels of one side (data, instructions).
#[derive(Debug, Clone)]
pub struct TlbHierarchy {
    levels: Vec<Level>,
    /// The accesses by `shift * (levels + 1) + missed levels`.
    counts: Vec<u64>,
}

impl TlbHierarchy {
    /// Checks and builds the levels. Errors name the TLB `name`.
    pub fn new(name: &str, levels: &[LevelSpec]) -> Result<Self, GeometryError> {
        check(name, levels)?;
        Ok(TlbHierarchy {
            levels: levels.iter().map(Level::new).collect(),
            counts: vec![0; SHIFTS * (levels.len() + 1)],
        })
    }

    /// Returns the number of levels; as many misses mean a walk.
    pub fn levels(&self) -> usize {
        self.levels.len()
    }

    /// Returns the number of entries of the largest level.
    pub fn entries_max(&self) -> u64 {
        let of = |level: &Level| level.specs.iter().map(|spec| u64::from(spec.entries)).sum();
        self.levels.iter().map(of).max().unwrap_or(0)
    }

    /// Looks up one access. Returns the number of levels that missed: 0 for a first-level hit,
    /// [`Self::levels`] for a walk.
    #[inline]
    pub fn access(&mut self, asid: u16, address: u64, shift: u32) -> usize {
        let missed = self.lookup(asid, address, shift);
        self.counts[shift as usize * (self.levels.len() + 1) + missed] += 1;
        missed
    }

    #[inline(always)]
    fn lookup(&mut self, asid: u16, address: u64, shift: u32) -> usize {
        let tag = PageTag::new(asid, address, shift);
        let hit = self.levels.iter_mut().position(|level| level.touch(tag, shift));
        hit.unwrap_or(self.levels.len())
    }

    /// Looks up `count` ≥ 1 accesses to one page in a row. Calls `on_lookup` with the number of levels that
    /// missed: once, or for each access if no level can hold such pages.
    #[inline]
    pub fn repeat(
        &mut self,
        asid: u16,
        address: u64,
        shift: u32,
        count: u64,
        mut on_lookup: impl FnMut(usize),
    ) {
        on_lookup(self.access(asid, address, shift));
        if count > 1 {
            let again = self.missed_again(shift);
            self.counts[shift as usize * (self.levels.len() + 1) + again] += count - 1;
            if again > 0 {
                (1..count).for_each(|_| on_lookup(again));
            }
        }
    }

    /// Looks up `count` accesses from `first` on, `stride` bytes apart, all on pages of one size. Calls
    /// `on_lookup` as [`Self::repeat`] does, for each page.
    pub fn sweep(
        &mut self,
        asid: u16,
        first: u64,
        stride: u64,
        count: u64,
        shift: u32,
        mut on_lookup: impl FnMut(usize),
    ) {
        let (mut address, mut left) = (first, count);
        while left > 0 {
            let to_page_end = (1u64 << shift) - 1 - (address & ((1 << shift) - 1));
            let here = match stride {
                0 => left,
                _ => (to_page_end / stride + 1).min(left),
            };
            self.repeat(asid, address, shift, here, &mut on_lookup);
            left -= here;
            address += here * stride;
        }
    }

    /// Returns the number of levels that miss on a page that was touched just before.
    fn missed_again(&self, shift: u32) -> usize {
        let holds = |level: &Level| level.routes[shift as usize].count > 0;
        self.levels.iter().position(holds).unwrap_or(self.levels.len())
    }

    /// Returns true if any level can hold pages of this size.
    #[inline]
    pub fn holds(&self, shift: u32) -> bool {
        self.levels.iter().any(|level| level.routes[shift as usize & (SHIFTS - 1)].count > 0)
    }

    /// Returns the arrays that a lookup of this page size searches first: those of the nearest level that
    /// can hold the size, as it is programmed now. None if no level can.
    pub fn nearest_arrays(&self, shift: u32) -> Option<Vec<Nearest>> {
        let route = |level: &Level| level.routes[shift as usize & (SHIFTS - 1)];
        let level = self.levels.iter().find(|level| route(level).count > 0)?;
        let route = route(level);
        let nearest = |array: &u8| {
            let tags = &level.arrays[usize::from(*array)];
            let is_lru = level.specs[usize::from(*array)].replacement == Replacement::Lru;
            Nearest { array: *array, set_count: tags.set_count(), ways: tags.ways(), is_lru }
        };
        Some(route.arrays[..usize::from(route.count)].iter().map(nearest).collect())
    }

    /// Makes the programmable arrays hold `size`, those of them that can; the first `keep` of each
    /// level stay with their default size. Arrays that change lose their entries.
    pub fn program(&mut self, size: PageSize, keep: usize) {
        self.levels.iter_mut().for_each(|level| level.program(size, keep));
    }

    /// Returns the number of accesses to pages of `size`, by the number of levels that missed.
    pub fn counts(&self, size: PageSize) -> Vec<u64> {
        let row = size.shift() as usize * (self.levels.len() + 1);
        self.counts[row..=row + self.levels.len()].to_vec()
    }

    /// Returns the number of accesses to pages of `size` that needed a walk.
    pub fn walks(&self, size: PageSize) -> u64 {
        self.counts[size.shift() as usize * (self.levels.len() + 1) + self.levels.len()]
    }

    /// Drops the translations of one address space.
    pub fn flush_asid(&mut self, asid: u16) {
        self.flush(|bits| PageTag::asid(bits) == asid);
    }

    /// Drops the translations of the pages of an address space that begin in the range.
    pub fn flush_range(&mut self, asid: u16, range: std::ops::Range<u64>) {
        self.flush(|bits| PageTag::asid(bits) == asid && range.contains(&PageTag::address(bits)));
    }

    fn flush(&mut self, doomed: impl Fn(u64) -> bool) {
        let arrays = self.levels.iter_mut().flat_map(|level| &mut level.arrays);
        arrays.for_each(|array| array.flush(&doomed));
    }
}

/// Checks that such a TLB is possible. Errors name it `name`.
pub fn check(name: &str, levels: &[LevelSpec]) -> Result<(), GeometryError> {
    if levels.is_empty() {
        return Err(GeometryError::Empty(name.into()));
    }
    for (n, level) in levels.iter().enumerate() {
        let at = format!("{name} level {}", n + 1);
        if level.is_empty() {
            return Err(GeometryError::Empty(at));
        }
        if level.len() > MAX_ARRAYS {
            return Err(GeometryError::TooManyArrays(at));
        }
        for (array, spec) in level.iter().enumerate() {
            spec.check(&format!("{at}, array {}", array + 1))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn size(text: &str) -> PageSize {
        text.parse().unwrap()
    }

    fn array(entries: u32, ways: Option<u32>, page_sizes: &[&str]) -> ArraySpec {
        let page_sizes = page_sizes.iter().map(|text| size(text)).collect();
        let replacement = Replacement::Lru;
        ArraySpec {
            entries,
            ways,
            page_sizes,
            locked: 0,
            replacement,
            programmable: false,
            fallback: false,
        }
    }

    /// The sets of an array; in each, asid, page and shift, oldest first.
    type Sets = Vec<Vec<(u16, u64, u32)>>;

    /// Access by access, with a list for each set and no arithmetic.
    struct Oracle {
        specs: Vec<LevelSpec>,
        /// The sets of each array, by level.
        sets: Vec<Vec<Sets>>,
    }

    impl Oracle {
        fn new(specs: &[LevelSpec]) -> Self {
            let set_count =
                |s: &ArraySpec| ((s.entries / s.ways.unwrap_or(s.entries)) as usize).max(1);
            let level = |l: &LevelSpec| l.iter().map(|s| vec![Vec::new(); set_count(s)]).collect();
            Oracle { specs: specs.to_vec(), sets: specs.iter().map(level).collect() }
        }

        fn access(&mut self, asid: u16, address: u64, shift: u32) -> usize {
            for (n, level) in self.specs.iter().enumerate() {
                let holds = |s: &&ArraySpec| s.page_sizes.iter().any(|p| p.shift() == shift);
                let Some(at) = level.iter().position(|s| holds(&s)) else { continue };
                let sets = &mut self.sets[n][at];
                let page = address >> shift;
                let index = page as usize % sets.len();
                let (set, tag) = (&mut sets[index], (asid, page, shift));
                let found = set.iter().position(|t| *t == tag);
                let entries = level[at].entries;
                let ways = level[at].ways.map_or(entries - level[at].locked, |w| w) as usize;
                match found {
                    Some(at) => drop(set.remove(at)),
                    None if set.len() == ways => drop(set.remove(0)),
                    None => {}
                }
                set.push(tag);
                if found.is_some() {
                    return n;
                }
            }
            self.specs.len()
        }
    }

    fn some_levels() -> impl Strategy<Value = Vec<LevelSpec>> {
        let small = (1u32..40, 0u32..3).prop_map(|(entries, locked)| {
            vec![ArraySpec {
                locked: locked.min(entries - 1),
                ..array(entries, None, &["8K", "64K"])
            }]
        });
        let split = (0u32..4, 1u32..5, 1u32..20).prop_map(|(sets, ways, large)| {
            vec![array(ways << sets, Some(ways), &["8K"]), array(large, None, &["64K"])]
        });
        let one_size = (0u32..3, 1u32..5)
            .prop_map(|(sets, ways)| vec![array(ways << sets, Some(ways), &["64K"])]);
        proptest::collection::vec(prop_oneof![small, split, one_size], 1..4)
    }

    proptest! {
        #[test]
        fn counts_equal_those_of_the_oracle(
            levels in some_levels(),
            runs in proptest::collection::vec(
                (0u16..3, 0u64..1 << 20, prop_oneof![0u64..100, 4000u64..20_000], 1u64..60, any::<bool>()),
                1..60,
            ),
        ) {
            let mut tlb = TlbHierarchy::new("test", &levels).unwrap();
            let mut oracle = Oracle::new(&levels);
            let mut expected = std::collections::BTreeMap::new();
            for (asid, first, stride, count, large) in runs {
                let page = size(if large { "64K" } else { "8K" });
                let row = expected.entry(page).or_insert(vec![0; levels.len() + 1]);
                for i in 0..count {
                    row[oracle.access(asid, first + i * stride, page.shift())] += 1;
                }
                if count == 1 {
                    tlb.access(asid, first, page.shift());
                } else {
                    tlb.sweep(asid, first, stride, count, page.shift(), |_| {});
                }
            }
            for (page, row) in expected {
                prop_assert_eq!(tlb.counts(page), row);
            }
        }

        #[test]
        fn misses_never_rise_with_more_entries(
            entries in 1u32..60,
            more in 1u32..60,
            pages in proptest::collection::vec(0u64..90, 1..800),
        ) {
            let walks = |entries| {
                let mut tlb = TlbHierarchy::new("test", &[vec![array(entries, None, &["8K"])]]).unwrap();
                for page in &pages {
                    tlb.access(0, page << 13, 13);
                }
                tlb.walks(size("8K"))
            };
            prop_assert!(walks(entries + more) <= walks(entries));
        }
    }

    #[test]
    fn a_sweep_reports_each_page_once() {
        let mut tlb = TlbHierarchy::new("test", &[vec![array(4, None, &["8K"])]]).unwrap();
        let mut pages = Vec::new();
        tlb.sweep(0, 100, 3000, 8, 13, |missed| pages.push(missed));
        assert_eq!(pages, [1, 1, 1]);
        assert_eq!(tlb.counts(size("8K")), [5, 3]);
    }

    #[test]
    fn two_arrays_of_one_size_hold_twice_as_much() {
        let pair = || ArraySpec { programmable: true, ..array(8, None, &["8K", "4M"]) };
        let mut tlb = TlbHierarchy::new("test", &[vec![pair(), pair()]]).unwrap();
        let sixteen_pages = [0..8u64, 0..8].into_iter().flatten();
        let hits = sixteen_pages.filter(|page| tlb.access(0, page << 13, 13) == 0).count();
        assert_eq!(hits, 8, "16 entries, eight of them used");
        assert_eq!(tlb.access(0, 0, 22), 1);
        assert_eq!(tlb.access(0, 0, 22), 1, "no array holds 4M pages yet");
        tlb.program(size("4M"), 1);
        tlb.access(0, 0, 22);
        assert_eq!(tlb.access(0, 0, 22), 0);
        tlb.program(size("8K"), 0);
        assert_eq!(tlb.access(0, 0, 22), 1, "no longer held");
    }

    #[test]
    fn flushes_take_what_they_name_and_nothing_else() {
        let mut tlb = TlbHierarchy::new("test", &[vec![array(32, None, &["8K"])]]).unwrap();
        let missed = |tlb: &mut TlbHierarchy| {
            [(1, 0), (1, 3), (2, 3)].map(|(a, p)| tlb.access(a, p << 13, 13))
        };
        missed(&mut tlb);
        tlb.flush_range(1, 3 << 13..4 << 13);
        assert_eq!(missed(&mut tlb), [0, 1, 0]);
        tlb.flush_asid(1);
        assert_eq!(missed(&mut tlb), [1, 1, 0]);
    }

    #[test]
    fn impossible_geometry_is_refused() {
        let refused =
            |spec: ArraySpec| TlbHierarchy::new("dtlb", &[vec![spec]]).unwrap_err().to_string();
        assert!(
            refused(array(512, Some(3), &["8K"]))
                .contains("dtlb level 1, array 1: 512 entries in 3 ways")
        );
        assert!(refused(array(12, Some(4), &["8K"])).contains("power of two"));
        assert!(refused(array(0, None, &["8K"])).contains("entries"));
        assert!(refused(array(16, None, &[])).contains("page size"));
        assert!(refused(ArraySpec { locked: 16, ..array(16, None, &["8K"]) }).contains("locked"));
        assert!(refused(ArraySpec { locked: 1, ..array(16, Some(2), &["8K"]) }).contains("locked"));
        assert!(TlbHierarchy::new("dtlb", &[]).is_err());
    }
}
