//! Did it take? For each part that was asked for: how many bytes sit on which pages now, and of
//! those that are not as asked, why.
//!
//! Invariant: bytes as asked and bytes with a reason are all resident bytes of the part. Reasons are
//! looked for from what is certain (an address that no huge page fits, the kernel's own refusal) to
//! what is likely, and each byte has one.

use super::change::{Cause, Outcome};
use super::parts::part_of;
use super::{Mode, PageSettings};
use crate::pages::pagemap::{self, Mapping, PageMap, Segment};
use crate::procfs::{Fragmentation, Root, maps};
use pagetax_core::page_size::{MemoryPart, PageSizeRequest, PartSizes};
use pagetax_core::units::PageSize;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;

/// Bit of an entry in /proc/PID/pagemap: nobody else maps the page.
const EXCLUSIVE: u64 = 1 << 56;
/// Bit of an entry in /proc/PID/pagemap: the page is in memory.
const PRESENT: u64 = 1 << 63;

/// Bytes that are not on the requested pages, and the reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Why {
    /// The number of bytes that stayed.
    pub bytes: u64,
    /// The obstacle, in a few words.
    pub reason: String,
}

/// The result for one part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PartVerdict {
    /// The part of the program that was named.
    #[cfg_attr(feature = "schema", schemars(with = "String"))]
    pub part: MemoryPart,
    /// The size that was requested for it.
    #[cfg_attr(feature = "schema", schemars(with = "String"))]
    pub asked: PageSizeRequest,
    /// The bytes of the part that are in memory.
    pub resident_bytes: u64,
    /// Bytes in memory, by the size of their pages in bytes.
    pub resident_bytes_by_page: BTreeMap<u64, u64>,
    /// Bytes in memory on pages of the requested size; a larger page counts for a large one.
    pub as_asked_bytes: u64,
    /// The reasons for the rest.
    pub why: Vec<Why>,
}

/// The result for a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Verdict {
    /// The id of the process that was examined.
    pub pid: u32,
    /// The command line of the process.
    pub command: String,
    /// The results, one for each named part.
    pub parts: Vec<PartVerdict>,
}

/// The facts that a verdict rests on, beside the map.
struct VerdictEvidence<'a> {
    map: &'a PageMap,
    changed: &'a Outcome,
    huge: PageSize,
    system: &'a PageSettings,
    free_huge_blocks: Option<u64>,
    forbidden: bool,
    /// The starts of mappings of the process that it was forked from.
    parent_starts: BTreeSet<u64>,
}

/// Judges a map that was read after the change.
pub fn judge(
    map: &PageMap,
    advice: &PartSizes,
    changed: &Outcome,
    system: &PageSettings,
) -> Verdict {
    let huge = system.pmd_size().unwrap_or(PageSize::M2);
    let evidence = VerdictEvidence {
        map,
        changed,
        huge,
        system,
        free_huge_blocks: free_blocks(huge).ok(),
        forbidden: status_field(map.pid, "THP_enabled:").as_deref() == Some("0"),
        parent_starts: parent_starts(map.pid).unwrap_or_default(),
    };
    let parts = advice.iter().map(|(part, wish)| evidence.part(advice, part, wish)).collect();
    Verdict { pid: map.pid, command: map.command.clone(), parts }
}

/// Returns the number of free blocks of at least this size that ordinary memory can have.
pub fn free_blocks(size: PageSize) -> Result<u64, String> {
    let base = rustix::param::page_size() as u64;
    let state = Fragmentation::usable(&Root::default())?;
    Ok(state.free_bytes_in(size.bytes(), base) / size.bytes())
}

pub(super) fn status_field(pid: u32, name: &str) -> Option<String> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim().to_string())
}

/// Returns the starts of the parent's mappings, if it runs the same program: then this one was forked from
/// it.
fn parent_starts(pid: u32) -> Option<BTreeSet<u64>> {
    let parent = status_field(pid, "PPid:")?;
    let exe = |pid: &str| std::fs::read_link(format!("/proc/{pid}/exe")).ok();
    if exe(&parent)? != exe(&pid.to_string())? {
        return None;
    }
    let maps = maps(&Root::default(), parent.parse().ok()?).ok()?;
    Some(maps.into_iter().map(|line| line.range.start).collect())
}

impl VerdictEvidence<'_> {
    fn part(&self, advice: &PartSizes, part: MemoryPart, asked: PageSizeRequest) -> PartVerdict {
        let of_part = |mapping: &Mapping| part_of(advice, mapping) == Some(part);
        let by_page = self.map.resident_by_size(of_part);
        let base = self.map.base_page;
        let wanted = asked.size(base);
        let as_asked = |size: PageSize| match wanted {
            Some(wanted) if wanted == base => size == base,
            wanted => wanted.is_none_or(|wanted| size >= wanted),
        };
        let resident_bytes = by_page.values().sum();
        let as_asked_bytes =
            by_page.iter().filter(|(size, _)| as_asked(**size)).map(|(_, bytes)| bytes).sum();
        let mut rest = UnexplainedBytes { bytes: resident_bytes - as_asked_bytes, why: Vec::new() };
        let mappings: Vec<&Mapping> = self.map.mappings.iter().filter(|m| of_part(m)).collect();
        match wanted {
            None => {}
            Some(_) if asked.hugetlb().is_some() => {
                rest.all("the pool had no page left, or the memory is not malloc's")
            }
            Some(size) if size == base => self.why_still_large(&mappings, &mut rest),
            Some(size) => self.why_small(part, size, &mappings, &mut rest),
        }
        PartVerdict {
            part,
            asked,
            resident_bytes,
            resident_bytes_by_page: by_page.iter().map(|(s, bytes)| (s.bytes(), *bytes)).collect(),
            as_asked_bytes,
            why: rest.why,
        }
    }

    fn why_still_large(&self, mappings: &[&Mapping], rest: &mut UnexplainedBytes) {
        let locked: u64 = mappings.iter().filter(|m| m.locked).map(|m| m.resident_bytes()).sum();
        rest.take(locked, "locked in memory (mlock): the kernel does not split locked pages");
        let pool: u64 =
            mappings.iter().filter(|m| m.hugetlb.is_some()).map(|m| m.resident_bytes()).sum();
        rest.take(pool, "pages of a hugetlb pool cannot be split");
        let of_files = mappings.iter().filter(|m| m.inode != 0);
        let of_files: u64 = of_files.map(|m| large_bytes(m, self.map.base_page)).sum();
        rest.take(of_files, CACHED);
        rest.all("came after the change: --follow, or -F for lasting advice");
    }

    fn why_small(
        &self,
        part: MemoryPart,
        size: PageSize,
        mappings: &[&Mapping],
        rest: &mut UnexplainedBytes,
    ) {
        let small = |mapping: &Mapping| small_bytes(mapping, size);
        if size < self.huge && self.map.folios_missing.is_some() {
            return rest.all("only root can tell pages of this size from base pages");
        }
        let unaligned: u64 = mappings.iter().map(|m| small(m).1).sum();
        let words = format!("unaligned: outside whole {size} blocks of their mappings");
        rest.take(unaligned, &words);
        if part == MemoryPart::Text {
            return self.why_small_text(size, mappings, rest);
        }
        let of_files: u64 =
            mappings.iter().filter(|m| m.segment == Segment::Data).map(|m| small(m).0).sum();
        rest.take(
            of_files,
            "private pages of a file cannot become huge pages; -F moves a copy there",
        );
        let mut refused = refused_bytes(mappings, size);
        for ((failed, cause), bytes) in &self.changed.failed_bytes {
            let mut bytes = if *failed == part { *bytes } else { 0 };
            if *cause == Cause::NotEligible && !self.forbidden {
                let by_itself = bytes.min(refused);
                rest.take(by_itself, REFUSED);
                (bytes, refused) = (bytes - by_itself, refused - by_itself);
            }
            rest.take(bytes, &self.words(*cause, size));
        }
        let shared: u64 = mappings.iter().map(|m| shared_bytes(self.map, m, size)).sum();
        rest.take(shared, "shared with a forked process until one of them writes (copy-on-write)");
        self.why_not_given(size, mappings, rest);
    }

    fn words(&self, cause: Cause, size: PageSize) -> String {
        match cause {
            Cause::NoMemory => match self.free_huge_blocks {
                Some(free) => format!(
                    "no memory for it: fragmented, with {free} free blocks of {size}; compact with \
                     `echo 1 | sudo tee /proc/sys/vm/compact_memory`"
                ),
                None => format!("no free block of {size}"),
            },
            Cause::Limit => "its memory cgroup is at its limit".into(),
            Cause::Busy => "busy: locked, pinned or being moved just now".into(),
            Cause::NotEligible if self.forbidden => {
                "the process forbids itself huge pages (prctl PR_SET_THP_DISABLE)".into()
            }
            Cause::NotEligible => "the kernel gives this memory no huge pages".into(),
            Cause::NoFile => NO_FILE.into(),
            Cause::Gone => "unmapped or ended meanwhile".into(),
            Cause::Other => "the kernel refused".into(),
        }
    }

    /// Explains memory that nobody tried to collapse, and that got no large pages from its faults.
    fn why_not_given(&self, size: PageSize, mappings: &[&Mapping], rest: &mut UnexplainedBytes) {
        let sum = |pick: &dyn Fn(&Mapping) -> bool| -> u64 {
            mappings.iter().filter(|m| pick(m)).map(|m| small_bytes(m, size).0).sum()
        };
        if self.forbidden {
            return rest.all("the process forbids itself huge pages (prctl PR_SET_THP_DISABLE)");
        }
        if self.system.of_size(size) == Some(Mode::Never) {
            return rest.all(&format!("{size} pages are switched off on this system (never)"));
        }
        rest.take(refused_bytes(mappings, size), REFUSED);
        let advised = |m: &Mapping| m.advice == Some(pagemap::HugePageAdvice::Huge);
        let inherited = |m: &Mapping| advised(m) && self.parent_starts.contains(&m.start.0);
        rest.take(sum(&inherited), "copied after a fork: copy-on-write makes base pages");
        if self.free_huge_blocks.is_some_and(|free| free == 0) {
            return rest.all(&self.words(Cause::NoMemory, size));
        }
        if size < self.huge {
            return rest.all("was there before, or larger sizes are switched on and come first");
        }
        if self.system.of_size(size) == Some(Mode::Madvise) {
            let unadvised = |m: &Mapping| !advised(m);
            rest.take(sum(&unadvised), "nobody asked for it: not malloc's memory; add --follow");
        }
        rest.all("came in smaller steps than a huge page, or later; add --follow");
    }

    fn why_small_text(&self, size: PageSize, mappings: &[&Mapping], rest: &mut UnexplainedBytes) {
        let apart = |m: &&&Mapping| {
            m.inode != 0 && !m.start.0.wrapping_sub(m.offset_bytes).is_multiple_of(size.bytes())
        };
        let bytes = |pick: &dyn Fn(&&&Mapping) -> bool| -> u64 {
            mappings.iter().filter(pick).map(|m| small_bytes(m, size).0).sum()
        };
        let words = format!("address and place in the file differ modulo {size}; -F moves a copy");
        rest.take(bytes(&apart), &words);
        rest.all(
            "the file is in memory by small pages, and stays so while a program maps it; -F moves \
             a copy",
        );
    }
}

/// Returns the bytes on smaller pages that another process maps too.
pub(super) fn shared_bytes(map: &PageMap, mapping: &Mapping, size: PageSize) -> u64 {
    let base = map.base_page.bytes();
    let Ok(pagemap) = File::open(format!("/proc/{}/pagemap", map.pid)) else { return 0 };
    let runs = mapping.runs.iter().filter(|r| r.anon_bytes > 0 && r.page.is_some_and(|p| p < size));
    let shared = |run: &pagemap::Run| {
        let mut entries = vec![0; (run.bytes() / base * 8) as usize];
        let read = pagemap.read_at(&mut entries, run.start.0 / base * 8).unwrap_or(0);
        let words = entries[..read].chunks_exact(8);
        let is_shared = |word: &&[u8]| {
            let entry = u64::from_ne_bytes((*word).try_into().unwrap_or_default());
            entry & PRESENT != 0 && entry & EXCLUSIVE == 0
        };
        words.filter(is_shared).count() as u64 * base
    };
    runs.map(shared).sum()
}

const REFUSED: &str = "the program itself refuses huge pages here (MADV_NOHUGEPAGE)";

/// The reason why moved code keeps its copy.
pub const NO_FILE: &str =
    "the file that it was copied from is gone or replaced, so it cannot be mapped again";

const CACHED: &str = "huge pages of the page cache, which other processes map too or which are in use just now: the \
                      kernel does not split them for one process";

/// Returns resident bytes on pages above the base page.
fn large_bytes(mapping: &Mapping, base: PageSize) -> u64 {
    let large = mapping.runs.iter().filter(|run| run.page.is_some_and(|page| page > base));
    large.filter(|run| run.resident_bytes > 0).map(|run| run.bytes()).sum()
}

/// Returns bytes on small pages where the program forbids others (MADV_NOHUGEPAGE).
fn refused_bytes(mappings: &[&Mapping], size: PageSize) -> u64 {
    let refused = mappings.iter().filter(|m| m.advice == Some(pagemap::HugePageAdvice::NoHuge));
    refused.map(|mapping| small_bytes(mapping, size).0).sum()
}

/// Returns resident bytes on pages below `size`: inside whole blocks of it, and outside.
pub(super) fn small_bytes(mapping: &Mapping, size: PageSize) -> (u64, u64) {
    let size_bytes = size.bytes();
    let first = mapping.start.0.next_multiple_of(size_bytes);
    let last = (mapping.end.0 / size_bytes * size_bytes).max(first);
    let (mut inside, mut outside) = (0, 0);
    for run in mapping.runs.iter().filter(|run| run.page.is_some_and(|page| page < size)) {
        if run.resident_bytes == 0 {
            continue;
        }
        let overlap = run.end.0.min(last).saturating_sub(run.start.0.max(first));
        inside += overlap;
        outside += run.bytes() - overlap;
    }
    let huge = mapping.unplaced.filter(|unplaced| unplaced.page >= size);
    (inside.saturating_sub(huge.map_or(0, |unplaced| unplaced.bytes)), outside)
}

/// Bytes that still need a reason.
struct UnexplainedBytes {
    bytes: u64,
    why: Vec<Why>,
}

impl UnexplainedBytes {
    fn take(&mut self, bytes: u64, reason: &str) {
        let bytes = bytes.min(self.bytes);
        if bytes > 0 {
            self.bytes -= bytes;
            self.why.push(Why { bytes, reason: reason.into() });
        }
    }

    fn all(&mut self, reason: &str) {
        self.take(self.bytes, reason);
    }
}
