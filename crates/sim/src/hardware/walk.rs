//! The hardware page walker of x86-64: paging-structure caches, page-table entries in the data
//! caches, and nested paging.
//!
//! Invariant: a walk reads exactly what hardware would read. It reads each level below the deepest
//! paging-structure cache hit once. Under nested paging it also reads, for each such table, the host's
//! levels below *its* deepest hit. A cold four-level walk is 4 reads, a cold nested one 24.
//!
//! The cost of a walk depends on the cache that holds the line of its leaf entry. A pointer chase on 4K
//! pages, minus the same chase on 2M pages, measures it. Walks that overlap have another cost: a gather
//! of independent addresses measures it. Walks of one page after another share lines, and are cheaper
//! still. Reads above the leaf may have a cost of their own.
//! The model assumes that table pages lie in guest memory in the order of the addresses that they map.
//! Source: Intel SDM volume 3, chapters 4.10 (paging-structure caches) and 28.3 (EPT).

use super::set::{Replacement, TagArray};
use pagetax_core::units::PageSize;

/// Bits of an address that one level of tables resolves: 512 entries.
const LEVEL_BITS: u32 = 9;
/// log2 of entries in a cache line: 64 bytes of 8.
const LINE_ENTRY_BITS: u32 = 3;
/// log2 of what a leaf entry of the lowest level maps.
const BASE_SHIFT: u32 = 12;

/// A cache of entries of one level: a hit skips the reads from the root down to that level.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StructureCacheSpec {
    /// The level of the entries: 2 for entries that point to tables of 4K pages, 3 for those above, …
    pub level: u32,
    /// The number of entries; fully associative.
    pub entries: u32,
}

/// The second dimension of a walk, in a virtual machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NestedSpec {
    /// The levels of the host's tables.
    pub levels: u32,
    /// The host's page size for the guest's memory.
    pub page_size: PageSize,
    /// The entries of the nested TLB, which translates guest-physical pages; fully associative.
    pub tlb_entries: u32,
    /// Caches of the host's upper levels.
    pub structure_caches: Vec<StructureCacheSpec>,
}

/// A place where page-table lines may lie.
#[derive(Debug, Clone, PartialEq)]
pub struct LineCacheSpec {
    /// The cache's name: `L1`, `L2`, …
    pub name: String,
    /// The lines of page tables that it holds beside the data: a power of two, 8-way, LRU.
    pub lines: u32,
    /// The time of a walk whose leaf line is here.
    pub walk: WalkNs,
}

/// The time of a whole walk, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WalkNs {
    /// The time of a walk that overlaps with no other.
    pub alone: f64,
    /// The time of a walk among others, for accesses with independent addresses.
    pub overlapped: f64,
    /// The time of a walk of such accesses that go from page to page in order: eight of these share a line.
    pub in_order: f64,
}

/// A walk's time in picoseconds, both ways.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WalkTime {
    /// The time of a walk that overlaps with no other.
    pub alone_ps: u64,
    /// The time of a walk that overlaps with others.
    pub overlapped_ps: u64,
}

impl WalkTime {
    /// Returns the times of a walk at random, and of one that continues a stream.
    fn of(walk: WalkNs) -> [WalkTime; 2] {
        let ps = |ns: f64| (ns * 1e3).round() as u64;
        [walk.overlapped, walk.in_order]
            .map(|ns| WalkTime { alone_ps: ps(walk.alone), overlapped_ps: ps(ns) })
    }

    fn plus(self, ps: u64) -> WalkTime {
        WalkTime { alone_ps: self.alone_ps + ps, overlapped_ps: self.overlapped_ps + ps }
    }

    /// Returns one of the two times.
    pub fn ps(self, alone: bool) -> u64 {
        if alone { self.alone_ps } else { self.overlapped_ps }
    }
}

/// The geometry and the costs of a page walker.
#[derive(Debug, Clone, PartialEq)]
pub struct WalkerSpec {
    /// The levels of the tables: 4, or 5 with 57-bit addresses.
    pub levels: u32,
    /// The paging-structure caches, which hold upper levels.
    pub structure_caches: Vec<StructureCacheSpec>,
    /// The second dimension, in a virtual machine.
    pub nested: Option<NestedSpec>,
    /// The caches that hold page-table lines, nearest first.
    pub line_caches: Vec<LineCacheSpec>,
    /// The time of a walk whose leaf line is in none of them.
    pub memory_walk: WalkNs,
    /// The time of a read above the leaf, by the same places; the last one is memory.
    pub upper_read_ns: Vec<f64>,
}

/// The reasons why a walker is impossible.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum WalkerError {
    /// Levels out of range.
    #[error("page tables have 1 to 5 levels, not {0}")]
    Levels(u32),
    /// A structure cache of a level that does not exist, or one without entries.
    #[error(
        "a paging-structure cache of level {level} with {entries} entries; levels are 2 to {levels} and entries at least 1"
    )]
    StructureCache {
        /// The cache level in the model.
        level: u32,
        /// The entries in the model.
        entries: u32,
        /// The number of levels of the tables.
        levels: u32,
    },
    /// A cache or nested TLB without entries, or caches that do not grow.
    #[error("{0}")]
    Sizes(String),
    /// A number of prices that differs from the number of places.
    #[error(
        "upper_read_ns needs {expected} prices (one for each line cache and memory), not {found}"
    )]
    Prices {
        /// The number of line caches, plus 1.
        expected: usize,
        /// The number of prices in the model.
        found: usize,
    },
}

/// One dimension: tables of some levels with their structure caches.
#[derive(Debug, Clone)]
struct Dimension {
    levels: u32,
    /// The caches by level; None for a level without a cache.
    caches: Vec<Option<TagArray>>,
}

impl Dimension {
    fn new(levels: u32, specs: &[StructureCacheSpec]) -> Result<Self, WalkerError> {
        if !(1..=5).contains(&levels) {
            return Err(WalkerError::Levels(levels));
        }
        let mut caches = vec![None; levels as usize + 1];
        for StructureCacheSpec { level, entries } in specs.iter().cloned() {
            if !(2..=levels).contains(&level) || entries == 0 {
                return Err(WalkerError::StructureCache { level, entries, levels });
            }
            caches[level as usize] = Some(fully_associative(entries));
        }
        Ok(Dimension { levels, caches })
    }

    /// Returns the first level to read on the way down to `leaf`: the one below the deepest cached entry.
    /// Fills the caches with what the walk will have read.
    fn first_read(&mut self, tag: u64, address: u64, leaf: u32) -> u32 {
        let mut first = self.levels;
        for level in (leaf + 1..=self.levels).rev() {
            let Some(cache) = &mut self.caches[level as usize] else { continue };
            if cache.touch(0, entry_tag(tag, address, level)) {
                first = level - 1;
            }
        }
        first
    }
}

fn line_cache(lines: u32) -> TagArray {
    TagArray::new(lines as usize, lines.min(8) as usize, Replacement::Lru)
}

fn fully_associative(entries: u32) -> TagArray {
    TagArray::new(entries as usize, entries as usize, Replacement::Lru)
}

/// Returns log2 of the bytes that one entry of a level maps.
fn entry_shift(level: u32) -> u32 {
    BASE_SHIFT + LEVEL_BITS * (level - 1)
}

/// Returns the level whose entries map pages of this size directly.
fn leaf_level(size_shift: u32) -> u32 {
    (size_shift.saturating_sub(BASE_SHIFT)) / LEVEL_BITS + 1
}

/// Returns the tag of an entry, which includes the address space (below 2^14, never 0) and the level.
fn entry_tag(space: u64, address: u64, level: u32) -> u64 {
    ((address >> entry_shift(level)) << 17) | (space << 3) | u64::from(level)
}

/// Returns the tag of the line of an entry, with its address space and level.
fn line_tag(entry: u64, space: u64, level: u32) -> u64 {
    ((entry >> LINE_ENTRY_BITS) * TAG_STEP) | (space << 3) | u64::from(level)
}

/// The host's own tables, among the tags of address spaces.
const HOST: u64 = 1;

/// Reads of page-table entries, by the place where their line lay; the last place is memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WalkCounts {
    /// The number of walks so far.
    pub walks: u64,
    /// Reads of leaf entries, by place.
    pub leaf_reads: Vec<u64>,
    /// Reads of all other entries by place, with the host's under nested paging.
    pub upper_reads: Vec<u64>,
}

/// The most streams that a walker tells apart.
const STREAMS_MAX: usize = 4;
/// The difference between the tags of two adjacent lines of one level.
const TAG_STEP: u64 = 1 << 17;

/// The last lines of leaf entries with the places where they lay, most recent first: accesses that go from
/// page to page in order come back to the same line, or to its neighbour.
#[derive(Debug, Clone, Default)]
struct Streams(Vec<(u64, usize)>);

impl Streams {
    /// Returns the place from which a stream got the line with this tag; none if the walk continues no
    /// stream.
    fn place(&mut self, tag: u64, place: usize) -> Option<usize> {
        let lines = &mut self.0;
        let at_distance = |bits: u64| lines.iter().position(|(line, _)| line.abs_diff(tag) == bits);
        let (found, place) = match at_distance(0) {
            Some(at) => (Some(at), lines[at].1),
            None => (at_distance(TAG_STEP), place),
        };
        match found {
            Some(at) => drop(lines.remove(at)),
            None => lines.truncate(STREAMS_MAX - 1),
        }
        lines.insert(0, (tag, place));
        found.map(|_| place)
    }
}

/// A page walker with its caches.
#[derive(Debug, Clone)]
pub struct PageWalker {
    guest: Dimension,
    nested: Option<Nested>,
    lines: Vec<TagArray>,
    streams: Streams,
    /// The times by place: at random, and in a stream.
    walks: Vec<[WalkTime; 2]>,
    upper_ps: Vec<u64>,
    counts: WalkCounts,
}

#[derive(Debug, Clone)]
struct Nested {
    host: Dimension,
    tlb: TagArray,
    page_shift: u32,
}

impl PageWalker {
    /// Checks the geometry and builds a cold walker.
    pub fn new(spec: &WalkerSpec) -> Result<Self, WalkerError> {
        let places = spec.line_caches.len() + 1;
        if spec.upper_read_ns.len() != places {
            return Err(WalkerError::Prices { expected: places, found: spec.upper_read_ns.len() });
        }
        if spec.line_caches.first().is_some_and(|c| c.lines == 0)
            || spec.line_caches.windows(2).any(|w| w[1].lines <= w[0].lines)
        {
            return Err(WalkerError::Sizes(
                "line caches grow from level to level, from 1 line".into(),
            ));
        }
        let nested = spec.nested.as_ref().map(Nested::new).transpose()?;
        let ps = |ns: f64| (ns * 1e3).round() as u64;
        let walks = spec.line_caches.iter().map(|c| c.walk).chain([spec.memory_walk]);
        Ok(PageWalker {
            guest: Dimension::new(spec.levels, &spec.structure_caches)?,
            nested,
            lines: spec.line_caches.iter().map(|c| line_cache(c.lines)).collect(),
            streams: Streams::default(),
            walks: walks.map(WalkTime::of).collect(),
            upper_ps: spec.upper_read_ns.iter().copied().map(ps).collect(),
            counts: WalkCounts {
                walks: 0,
                leaf_reads: vec![0; places],
                upper_reads: vec![0; places],
            },
        })
    }

    /// Walks for one page. Returns the time.
    pub fn walk(&mut self, asid: u16, address: u64, size_shift: u32) -> WalkTime {
        let space = u64::from(asid) + HOST + 1;
        let leaf = leaf_level(size_shift).min(self.guest.levels);
        let first = self.guest.first_read(space, address, leaf);
        let (mut walk, mut upper_ps) = (WalkTime::default(), 0);
        for level in (leaf..=first).rev() {
            // The table that holds the entry is itself at a guest-physical address.
            let table = guest_table_address(space, address, level);
            upper_ps += self.translate_guest(table);
            let tag = line_tag(address >> entry_shift(level), space, level);
            let place = self.read_line(tag);
            if level == leaf {
                self.counts.leaf_reads[place] += 1;
                walk = match self.streams.place(tag, place) {
                    Some(origin) => WalkTime {
                        alone_ps: self.walks[place][0].alone_ps,
                        ..self.walks[origin][1]
                    },
                    None => self.walks[place][0],
                };
            } else {
                upper_ps += self.upper_read(place);
            }
        }
        upper_ps += self.translate_guest((space << SPACE_SHIFT) | address);
        self.counts.walks += 1;
        walk.plus(upper_ps)
    }

    /// Returns the reads so far.
    pub fn counts(&self) -> &WalkCounts {
        &self.counts
    }

    fn upper_read(&mut self, place: usize) -> u64 {
        self.counts.upper_reads[place] += 1;
        self.upper_ps[place]
    }

    /// Returns the place of a line, and brings it into the nearest cache.
    fn read_line(&mut self, tag: u64) -> usize {
        let place = self.lines.iter_mut().position(|cache| cache.touch(tag / TAG_STEP, tag));
        place.unwrap_or(self.lines.len())
    }

    /// Walks the host's tables for one guest-physical address. Returns the time in picoseconds, 0 without
    /// nested paging.
    fn translate_guest(&mut self, guest_physical: u64) -> u64 {
        let Some(nested) = &mut self.nested else { return 0 };
        let page = (guest_physical >> nested.page_shift) + 1;
        if nested.tlb.touch(0, page) {
            return 0;
        }
        let leaf = leaf_level(nested.page_shift).min(nested.host.levels);
        let first = nested.host.first_read(HOST, guest_physical, leaf);
        let mut total_ps = 0;
        for level in (leaf..=first).rev() {
            let place = self.read_line(line_tag(guest_physical >> entry_shift(level), HOST, level));
            total_ps += self.upper_read(place);
        }
        total_ps
    }
}

impl Nested {
    fn new(spec: &NestedSpec) -> Result<Self, WalkerError> {
        if spec.tlb_entries == 0 {
            return Err(WalkerError::Sizes("the nested TLB needs at least one entry".into()));
        }
        Ok(Nested {
            host: Dimension::new(spec.levels, &spec.structure_caches)?,
            tlb: fully_associative(spec.tlb_entries),
            page_shift: spec.page_size.shift(),
        })
    }
}

/// Guest-physical memory, as far as the model goes: each address space has 2^48 bytes of it, tables
/// in the upper half.
const SPACE_SHIFT: u32 = 48;
const TABLES: u64 = 1 << 47;

/// Returns the guest-physical address of the table page that holds the entry of `address` in `level`. The
/// tables of one level are adjacent, apart from the other levels and from the data.
fn guest_table_address(space: u64, address: u64, level: u32) -> u64 {
    let table = address >> entry_shift(level + 1);
    (space << SPACE_SHIFT) | TABLES | (u64::from(level) << 44) | (table << BASE_SHIFT)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the costs of a walk, in a stream a tenth of that among others.
    fn both(alone: f64, overlapped: f64) -> WalkNs {
        WalkNs { alone, overlapped, in_order: overlapped / 10.0 }
    }

    fn spec(nested: bool) -> WalkerSpec {
        let caches = |entries| (2..=4).map(|level| StructureCacheSpec { level, entries }).collect();
        WalkerSpec {
            levels: 4,
            structure_caches: caches(4),
            nested: nested.then(|| NestedSpec {
                levels: 4,
                page_size: PageSize::K4,
                tlb_entries: 1,
                structure_caches: Vec::new(),
            }),
            line_caches: vec![
                LineCacheSpec { name: "L1".into(), lines: 2, walk: both(10.0, 1.0) },
                LineCacheSpec { name: "L2".into(), lines: 64, walk: both(30.0, 2.0) },
            ],
            memory_walk: both(100.0, 5.0),
            upper_read_ns: vec![1.0, 2.0, 3.0],
        }
    }

    fn reads(walker: &PageWalker) -> u64 {
        walker.counts().leaf_reads.iter().chain(&walker.counts().upper_reads).sum()
    }

    #[test]
    fn a_cold_walk_reads_each_level_and_a_cold_nested_one_24_entries() {
        for (nested, expected) in [(false, 4), (true, 24)] {
            let mut walker = PageWalker::new(&spec(nested)).unwrap();
            walker.walk(0, 0x7654_3210_0000, 12);
            assert_eq!(reads(&walker), expected);
        }
    }

    #[test]
    fn a_large_page_ends_the_walk_one_level_higher() {
        let mut walker = PageWalker::new(&spec(false)).unwrap();
        walker.walk(0, 5 << 30, 21);
        assert_eq!(reads(&walker), 3);
        walker.walk(0, (5 << 30) + (2 << 20), 21);
        assert_eq!(reads(&walker), 4, "the entry above is cached: only the leaf is read");
    }

    #[test]
    fn structure_caches_forget_the_least_recent() {
        let mut walker = PageWalker::new(&spec(false)).unwrap();
        let far = |n: u64| n << 21;
        (0..5).for_each(|n| {
            walker.walk(0, far(n), 12);
        });
        let before = reads(&walker);
        walker.walk(0, far(4), 12);
        assert_eq!(reads(&walker), before + 1, "level 2 still cached");
        walker.walk(0, far(0), 12);
        assert_eq!(reads(&walker), before + 3, "evicted from level 2, still cached in level 3");
    }

    #[test]
    fn a_walk_costs_by_where_its_leaf_line_lies() {
        let mut walker = PageWalker::new(&spec(false)).unwrap();
        walker.walk(0, 0, 12);
        let near = walker.walk(0, 4096, 12);
        assert_eq!(
            (near.ps(true), near.ps(false)),
            (10_000, 500),
            "near, and in order from memory"
        );
        walker.walk(0, 8 * 4096, 12);
        walker.walk(0, 16 * 4096, 12);
        assert_eq!(walker.walk(0, 0, 12).alone_ps, 30_000, "pushed out of the near cache");
        (0..100).for_each(|n| {
            walker.walk(0, n * 8 * 4096, 12);
        });
        assert_eq!(walker.walk(0, 0, 12).alone_ps, 100_000, "out of both");
    }

    #[test]
    fn walks_in_order_cost_by_where_their_lines_came_from() {
        let leaf_alone = WalkerSpec { upper_read_ns: vec![0.0; 3], ..spec(false) };
        let mut walker = PageWalker::new(&leaf_alone).unwrap();
        let mut lap = |pages: &mut dyn Iterator<Item = u64>| {
            pages.map(|page| walker.walk(0, page * 4096, 12).ps(false)).collect::<Vec<_>>()
        };
        let cold = lap(&mut (0..24));
        assert_eq!((cold[0], cold[1..].iter().sum::<u64>()), (5_000, 23 * 500), "from memory");
        let back = lap(&mut (0..24).rev());
        let lines: Vec<u64> = back.chunks(8).map(|line| line.iter().sum()).collect();
        assert_eq!(lines, [8 * 500, 8 * 100, 8 * 200], "they lay near, nearer and less near");
        // Four streams at a time, and then walks that are in none.
        let streams = lap(&mut (0..32).map(|n| n % 4 * 10_000 + 1_000 + n / 4));
        assert!(streams[4..].iter().all(|ps| *ps == 500), "{streams:?}");
        let random = lap(&mut (0..32).map(|n| n * 7_919 % 3_001 * 80));
        assert!(random.iter().all(|ps| [1_000, 2_000, 5_000].contains(ps)), "{random:?}");
    }

    #[test]
    fn spaces_do_not_share_entries() {
        let mut walker = PageWalker::new(&spec(false)).unwrap();
        walker.walk(0, 0, 12);
        walker.walk(1, 0, 12);
        assert_eq!(reads(&walker), 8);
    }

    #[test]
    fn impossible_walkers_are_refused() {
        let with = |change: fn(&mut WalkerSpec)| {
            let mut spec = spec(true);
            change(&mut spec);
            PageWalker::new(&spec).unwrap_err()
        };
        assert_eq!(with(|s| s.levels = 0), WalkerError::Levels(0));
        assert!(matches!(
            with(|s| s.structure_caches[0].level = 5),
            WalkerError::StructureCache { .. }
        ));
        assert!(matches!(with(|s| s.line_caches[1].lines = 2), WalkerError::Sizes(_)));
        assert!(matches!(with(|s| s.upper_read_ns.truncate(1)), WalkerError::Prices { .. }));
        assert!(matches!(
            with(|s| s.nested.as_mut().unwrap().tlb_entries = 0),
            WalkerError::Sizes(_)
        ));
    }
}
