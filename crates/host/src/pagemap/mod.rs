//! The page-size map of a process: which of its addresses are mapped by pages of which size.
//!
//! One [`Run`] for each stretch of one page size inside one mapping. Where the sizes come from:
//! PAGEMAP_SCAN tells, without root, what one entry above the base level of the page table maps (a
//! transparent huge page, a hugetlb page); the hugetlb size is the mapping's; transparent pages of
//! the sizes between (mTHP, large folios of files) only show in /proc/kpageflags, to root.
//!
//! Before Linux 6.7 there is no PAGEMAP_SCAN: which pages are in memory says /proc/PID/pagemap, and how many bytes of a
//! mapping lie on huge pages, smaps. Where these can be some of its pages only, they have no place ([`Unplaced`]).
//!
//! Invariants: the runs of a mapping cover it without gap or overlap, neighbours differ; a page
//! that is not in memory has no size; what could not be told apart is said so in `folios`, and
//! then `4K` means "4K or a size between". hugetlb pages are counted by their mapping and by the
//! page table, never by smaps, which books a private 1G page as shared.

mod diff;
mod folio;
mod node;
mod read;
mod smaps;

pub use diff::{Change, Pages, diff};
pub use node::{NodeRuns, by_node};
pub use read::{PageMapError, read, read_huge, read_where};

use pagetax_core::units::{PageSize, VirtAddr};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What a process has mapped, and by which pages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageMap {
    /// The process.
    pub pid: u32,
    /// Its command, as the kernel shows it.
    pub command: String,
    /// Of the system.
    pub base_page: PageSize,
    /// Why sizes between the base page and the huge page could not be told from base pages; none:
    /// they were.
    pub folios_missing: Option<String>,
    /// The mappings changed during each of the attempts to read them, so that rows may disagree.
    pub unsettled: bool,
    /// By address.
    pub mappings: Vec<Mapping>,
}

/// A mapping: one line of /proc/PID/maps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mapping {
    /// First address.
    pub start: VirtAddr,
    /// First address after it.
    pub end: VirtAddr,
    /// Readable.
    pub read: bool,
    /// Writable.
    pub write: bool,
    /// Executable.
    pub execute: bool,
    /// Writes are seen by others.
    pub shared: bool,
    /// Mapped without reserving memory or swap (MAP_NORESERVE).
    pub no_reserve: bool,
    /// mlock(2)ed.
    pub locked: bool,
    /// Counts against the limit of committed memory.
    pub accounted: bool,
    /// MADV_HUGEPAGE or MADV_NOHUGEPAGE.
    pub advice: Option<Advice>,
    /// Whether the kernel would give it transparent huge pages now; none before Linux 5.0.
    pub thp_eligible: Option<bool>,
    /// From the hugetlb pool of pages of this size.
    pub hugetlb: Option<PageSize>,
    /// Offset in the file.
    pub offset_bytes: u64,
    /// Of the file; 0 for anonymous memory.
    pub inode: u64,
    /// The path of the file, a name in brackets, or nothing.
    pub name: String,
    /// Which part of the program it is.
    pub segment: Segment,
    /// What it has on swap, by smaps.
    pub swapped_bytes: u64,
    /// What smaps counts of it.
    #[serde(skip)]
    amounts: Amounts,
    /// Of its runs of base pages, what lies on huge ones; none where each has its place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unplaced: Option<Unplaced>,
    /// By address.
    pub runs: Vec<Run>,
}

/// Huge pages of a mapping of which only the number is known (before Linux 6.7).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unplaced {
    /// Their size.
    pub page: PageSize,
    /// All of them.
    pub bytes: u64,
}

/// Of a mapping, in bytes, by smaps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Amounts {
    resident: u64,
    anon: u64,
    /// On transparent huge pages.
    huge: u64,
}

/// Advice about transparent huge pages that a mapping carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Advice {
    /// MADV_HUGEPAGE.
    Huge,
    /// MADV_NOHUGEPAGE.
    NoHuge,
}

/// The part of a program that a mapping is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Segment {
    /// Code: private and executable, of a file.
    Text,
    /// Private and only readable, of a file.
    ReadOnly,
    /// Private and writable, of a file.
    Data,
    /// Anonymous, right behind the data of a file.
    Bss,
    /// brk.
    Heap,
    /// The main thread's stack, also the parts that lost their name when it was split.
    Stack,
    /// Other private anonymous memory: malloc's large chunks, threads' arenas and stacks.
    Anon,
    /// Shared with other processes: files, shm, memfd.
    Shared,
    /// Of the kernel: vdso and the like.
    Kernel,
}

/// A stretch of addresses of one page size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// First address.
    pub start: VirtAddr,
    /// First address after it.
    pub end: VirtAddr,
    /// None: no page is mapped there.
    pub page: Option<PageSize>,
    /// In memory; pages of zeros, which are the kernel's, do not count.
    pub resident_bytes: u64,
    /// Of that, anonymous.
    pub anon_bytes: u64,
}

impl Run {
    /// Its length.
    pub fn bytes(&self) -> u64 {
        self.end.0 - self.start.0
    }

    /// The part of a count of this run that falls to `part_bytes` of it.
    fn share(&self, count_bytes: u64, part_bytes: u64) -> u64 {
        (u128::from(count_bytes) * u128::from(part_bytes) / u128::from(self.bytes().max(1))) as u64
    }

    /// Joins `next`, which begins where this ends, if it is of the same page size.
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
    /// Its length.
    pub fn bytes(&self) -> u64 {
        self.end.0 - self.start.0
    }

    /// In memory.
    pub fn resident_bytes(&self) -> u64 {
        self.runs.iter().map(|run| run.resident_bytes).sum()
    }

    /// Of that, anonymous.
    pub fn anon_bytes(&self) -> u64 {
        self.runs.iter().map(|run| run.anon_bytes).sum()
    }

    /// The runs, or, where some of its huge pages have no place, one for each page size, largest first: lengths are
    /// right, addresses are not.
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
    /// Resident bytes by page size, of the mappings that are picked.
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

    /// Keeps what lies in `start..end`; mappings and runs at the borders are cut. Counts of a run
    /// that is cut are its share; exact, as its pages are all alike but for pages of zeros.
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
            // What is left of it can be no more than all of its pages.
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
