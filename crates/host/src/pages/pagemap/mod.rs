//! The page-size map of a process: its addresses, each with the size of the page that maps it.
//!
//! There is one [`Run`] for each range of one page size in one mapping. PAGEMAP_SCAN shows, without
//! root, the ranges that one entry above the base level of the page table maps: transparent huge pages
//! and hugetlb pages. The hugetlb size is the mapping's. Transparent pages of the sizes between (mTHP,
//! large folios of files) are visible only to root, in /proc/kpageflags.
//!
//! Before Linux 6.7 there is no PAGEMAP_SCAN. /proc/PID/pagemap shows the pages in memory, and smaps a
//! mapping's bytes on huge pages. If these can be only some of its pages, /proc/kpageflags shows their place
//! to root; else it is unknown ([`Unplaced`]).
//!
//! Invariants: the runs of a mapping cover it without gap or overlap, and neighbours differ. A page that
//! is not in memory has no size. If sizes could not be distinguished, `folios_missing` has the reason. Then
//! `4K` means "4K or a size between". The counts of hugetlb pages come from their mapping and the page
//! table, never from smaps: it books a private 1G page as shared.

mod diff;
pub(crate) mod folio;
mod node;
mod read;
mod smaps;

pub use diff::{Change, PageMapDiff, Pages, ProcessChanges, diff};
pub use node::{NodeRuns, by_node};
pub use read::{PageMapError, read, read_huge, read_where};

use pagetax_core::document::Document;
use pagetax_core::units::{PageSize, VirtAddr};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The mappings of a process, with the pages that map them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PageMap {
    /// The process id, which may have been reused since.
    pub pid: u32,
    /// The command's name, as the kernel shows it.
    pub command: String,
    /// The size of the system's base page.
    pub base_page: PageSize,
    /// The reason why sizes between the base page and the huge page could not be distinguished from base
    /// pages; `None` if they were.
    pub folios_missing: Option<String>,
    /// True if the mappings changed during each attempt to read them, so that rows may disagree.
    pub unsettled: bool,
    /// The mappings, in the order of addresses.
    pub mappings: Vec<Mapping>,
}

/// The maps of some processes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PageMaps {
    /// The maps, in the order of the operands.
    pub maps: Vec<PageMap>,
}

impl Document for PageMaps {
    const KIND: &'static str = "page_maps";
}

/// A mapping: one line of /proc/PID/maps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Mapping {
    /// The first address of the mapping.
    pub start: VirtAddr,
    /// The first address after the mapping.
    pub end: VirtAddr,
    /// True if the process may read it.
    pub read: bool,
    /// True if the process may write to it.
    pub write: bool,
    /// True if it is executable.
    pub execute: bool,
    /// True if other processes see its writes (MAP_SHARED).
    pub shared: bool,
    /// True if it was mapped without reserving memory or swap (MAP_NORESERVE).
    pub no_reserve: bool,
    /// True if it is locked by mlock(2).
    pub locked: bool,
    /// True if it counts against the limit of committed memory.
    pub accounted: bool,
    /// The advice MADV_HUGEPAGE or MADV_NOHUGEPAGE; `None` without either.
    pub advice: Option<HugePageAdvice>,
    /// True if the kernel would give it transparent huge pages now; `None` before Linux 5.0.
    pub thp_eligible: Option<bool>,
    /// The page size of its hugetlb pool; `None` if it is not hugetlb memory.
    pub hugetlb: Option<PageSize>,
    /// The offset of its start in the file.
    pub offset_bytes: u64,
    /// The inode of the file; 0 for anonymous memory.
    pub inode: u64,
    /// The path of the file, a name in brackets, or nothing.
    pub name: String,
    /// The part of the program that it is.
    pub segment: Segment,
    /// The bytes on swap, by smaps.
    pub swapped_bytes: u64,
    /// True if KSM may merge its pages (MADV_MERGEABLE).
    #[serde(skip)]
    pub mergeable: bool,
    /// True if a userfaultfd handles its faults.
    #[serde(skip)]
    pub has_user_faults: bool,
    /// The counts that smaps gives for the mapping.
    #[serde(skip)]
    amounts: Amounts,
    /// The huge pages of its base-page runs whose place is unknown; `None` if the place of all pages is
    /// known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unplaced: Option<Unplaced>,
    /// The runs of pages of one size, by address.
    pub runs: Vec<Run>,
}

/// Huge pages of a mapping of which only the number is known (before Linux 6.7).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Unplaced {
    /// The size of each page of the run.
    pub page: PageSize,
    /// The bytes of all these pages.
    pub bytes: u64,
}

/// The counts of a mapping by smaps, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Amounts {
    resident: u64,
    anon: u64,
    /// The bytes on transparent huge pages.
    huge: u64,
    /// The bytes that KSM has merged; `None` before Linux 6.6.
    merged: Option<u64>,
}

/// The advice about transparent huge pages that a mapping has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum HugePageAdvice {
    /// The advice MADV_HUGEPAGE, to use huge pages.
    Huge,
    /// The advice MADV_NOHUGEPAGE.
    NoHuge,
}

/// The part of a program that a mapping is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Segment {
    /// Code: a private and executable mapping of a file.
    Text,
    /// Constants: a private and only readable mapping of a file.
    ReadOnly,
    /// Data: a private and writable mapping of a file.
    Data,
    /// Anonymous memory directly after the data of a file.
    Bss,
    /// The heap that brk(2) grows.
    Heap,
    /// The main thread's stack, including parts that lost their name when it was split.
    Stack,
    /// Other private anonymous memory: malloc's large chunks, threads' arenas and stacks.
    Anon,
    /// Memory shared with other processes: files, shm, memfd.
    Shared,
    /// The kernel's own mappings: vdso and vvar.
    Kernel,
}

/// A range of addresses with one page size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Run {
    /// The first address of the range.
    pub start: VirtAddr,
    /// The first address after the range.
    pub end: VirtAddr,
    /// The page size; `None` if no page is mapped there.
    pub page: Option<PageSize>,
    /// The bytes in memory. The kernel's shared zero pages do not count.
    pub resident_bytes: u64,
    /// The part of `resident_bytes` that is anonymous.
    pub anon_bytes: u64,
}

impl Run {
    /// Returns the length of the range.
    pub fn bytes(&self) -> u64 {
        self.end.0 - self.start.0
    }

    /// Returns the part of a count of this run that belongs to `part_bytes` of it.
    fn share(&self, count_bytes: u64, part_bytes: u64) -> u64 {
        (u128::from(count_bytes) * u128::from(part_bytes) / u128::from(self.bytes().max(1))) as u64
    }

    /// Joins `next`, which begins where this ends, if its page size is the same.
    fn join(&mut self, next: &Run) -> bool {
        let joins = self.end == next.start && self.page == next.page;
        if joins {
            self.end = next.end;
            self.resident_bytes += next.resident_bytes;
            self.anon_bytes += next.anon_bytes;
        }
        joins
    }
}

impl Mapping {
    /// Returns the length of the mapping.
    pub fn bytes(&self) -> u64 {
        self.end.0 - self.start.0
    }

    /// Returns the bytes that KSM has merged; `None` before Linux 6.6.
    pub fn merged_bytes(&self) -> Option<u64> {
        self.amounts.merged
    }

    /// Returns the bytes in memory.
    pub fn resident_bytes(&self) -> u64 {
        self.runs.iter().map(|run| run.resident_bytes).sum()
    }

    /// Returns the part of `resident_bytes` that is anonymous.
    pub fn anon_bytes(&self) -> u64 {
        self.runs.iter().map(|run| run.anon_bytes).sum()
    }

    /// Returns the runs. If the place of some huge pages is unknown, returns one run for each page size,
    /// largest first: lengths are right, addresses are not.
    pub fn runs_by_size(&self) -> Vec<Run> {
        let Some(unplaced) = self.unplaced else { return self.runs.clone() };
        let mut sums: BTreeMap<Option<PageSize>, [u64; 3]> = BTreeMap::new();
        for run in &self.runs {
            let sum = sums.entry(run.page).or_default();
            let counts = [run.bytes(), run.resident_bytes, run.anon_bytes];
            sum.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        }
        if let Some((_, small)) = sums.iter_mut().find(|(page, _)| page.is_some()) {
            let huge = small.map(|count| unplaced.bytes.min(count));
            small.iter_mut().zip(huge).for_each(|(count, huge)| *count -= huge);
            sums.insert(Some(unplaced.page), huge);
        }
        let mut at = self.start.0;
        let run = |(page, [bytes, resident_bytes, anon_bytes]): (_, [u64; 3])| {
            let start = VirtAddr(at);
            at += bytes;
            Run { start, end: VirtAddr(at), page, resident_bytes, anon_bytes }
        };
        sums.into_iter().rev().filter(|(_, [bytes, ..])| *bytes > 0).map(run).collect()
    }
}

impl PageMap {
    /// Returns the resident bytes by page size, over the mappings that `pick` accepts.
    pub fn resident_by_size(&self, pick: impl Fn(&Mapping) -> bool) -> BTreeMap<PageSize, u64> {
        let mut sums = BTreeMap::new();
        let picked = self.mappings.iter().filter(|mapping| pick(mapping));
        for run in picked.flat_map(Mapping::runs_by_size) {
            if let Some(size) = run.page.filter(|_| run.resident_bytes > 0) {
                *sums.entry(size).or_default() += run.resident_bytes;
            }
        }
        sums
    }

    /// Keeps the range `start..end`, and cuts mappings and runs at its borders. A cut run keeps its
    /// share of the counts. That is exact, as its pages are all alike, except for zero pages.
    pub fn cut(&mut self, start: VirtAddr, end: VirtAddr) {
        for mapping in &mut self.mappings {
            for run in &mut mapping.runs {
                let whole = *run;
                run.start = run.start.max(start);
                run.end = run.end.min(end).max(run.start);
                run.resident_bytes = whole.share(whole.resident_bytes, run.bytes());
                run.anon_bytes = whole.share(whole.anon_bytes, run.bytes());
            }
            mapping.runs.retain(|run| run.bytes() > 0);
            // The rest of the mapping has at most all of its pages on huge pages.
            let resident = mapping.runs.iter().map(|run| run.resident_bytes).sum();
            if let Some(unplaced) = &mut mapping.unplaced {
                unplaced.bytes = unplaced.bytes.min(resident);
            }
            mapping.start = mapping.start.max(start);
            mapping.end = mapping.end.min(end).max(mapping.start);
        }
        self.mappings.retain(|mapping| mapping.bytes() > 0);
    }
}
