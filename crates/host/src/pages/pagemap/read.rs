//! The reading of a live process's map, repeated if its mappings change meanwhile.

use super::folio::{Folios, read_words};
use super::smaps;
use super::{Mapping, PageMap, Run, Segment, Unplaced};
use crate::pages::settings::PageSettings;
use crate::procfs::{Root, maps, maps_line};
use crate::sys::pagemap::{
    self, PAGE_IS_FILE, PAGE_IS_HUGE, PAGE_IS_PFNZERO, PAGE_IS_PRESENT, PAGE_IS_SWAPPED, PageRange,
};
use pagetax_core::units::{PageSize, VirtAddr};
use std::cell::Cell;
use std::fs::File;
use std::io;

/// The most attempts: pmap of Solaris reads again five times before it shows an unsettled map.
const ATTEMPTS_MAX: u32 = 1 + 5;

/// The reason why there is no map.
#[derive(Debug, thiserror::Error)]
pub enum PageMapError {
    /// The process does not exist, or it ended meanwhile.
    #[error("no process {0}\n  hint: list processes with ps -e")]
    NoProcess(u32),
    /// A kernel thread, or a process that has ended and was not waited for.
    #[error("process {0} has no memory of its own: a kernel thread, or it has ended")]
    NoMemory(u32),
    /// The process belongs to another user.
    #[error("process {0} may not be looked at\n  hint: be its user, or root")]
    NotPermitted(u32),
    /// Any other error, with the file.
    #[error("{path}: {error}")]
    Io {
        /// The path of the file that failed.
        path: String,
        /// The error that the system returned.
        error: io::Error,
    },
    /// A file has unexpected content; the text shows it.
    #[error("process {0}: {1}")]
    Format(u32, String),
}

impl PageMapError {
    pub(super) fn of(pid: u32, path: &str, error: io::Error) -> PageMapError {
        match error.raw_os_error() {
            // For a process without memory, files about memory return "no such process", though it
            // exists.
            Some(libc::ESRCH) if std::path::Path::new(&format!("/proc/{pid}")).exists() => {
                PageMapError::NoMemory(pid)
            }
            Some(libc::ENOENT | libc::ESRCH) => PageMapError::NoProcess(pid),
            Some(libc::EACCES | libc::EPERM) => PageMapError::NotPermitted(pid),
            _ => PageMapError::Io { path: path.into(), error },
        }
    }
}

/// Reads the page-size map of a process.
pub fn read(pid: u32) -> Result<PageMap, PageMapError> {
    settled(PageMapReader::open(pid)?, |_, _| true)
}

/// Reads the map without distinguishing base pages from sizes below the huge page. That distinction
/// takes most of the time if many pages are small.
pub fn read_huge(pid: u32) -> Result<PageMap, PageMapError> {
    let folios = Err("not looked at, to be quick".into());
    settled(PageMapReader { folios, ..PageMapReader::open(pid)? }, |_, _| true)
}

/// Reads the map of the mappings that `pick` accepts by start and end, which saves reading the others.
pub fn read_where(
    pid: u32,
    pick: impl Fn(VirtAddr, VirtAddr) -> bool,
) -> Result<PageMap, PageMapError> {
    settled(PageMapReader::open(pid)?, pick)
}

fn settled(
    reader: PageMapReader,
    pick: impl Fn(VirtAddr, VirtAddr) -> bool,
) -> Result<PageMap, PageMapError> {
    let pid = reader.pid;
    let mut attempt = 1;
    loop {
        let (mappings, settled) = reader.attempt(&pick)?;
        if settled || attempt == ATTEMPTS_MAX {
            return Ok(PageMap {
                pid,
                command: reader.command()?,
                base_page: reader.base_page,
                folios_missing: reader.folios.err(),
                unsettled: !settled,
                mappings,
            });
        }
        attempt += 1;
    }
}

struct PageMapReader {
    pid: u32,
    root: Root,
    pagemap: File,
    folios: Result<Folios, String>,
    base_page: PageSize,
    huge_page: PageSize,
    /// True until the kernel refuses PAGEMAP_SCAN, which shows page sizes by address.
    scans: Cell<bool>,
}

/// The number of entries of /proc/PID/pagemap in one read.
const ENTRIES: u64 = 1 << 14;
/// The bits of such an entry: the page is in memory; it belongs to a file or is shared.
const PRESENT: u64 = 1 << 63;
const OF_FILE: u64 = 1 << 61;

impl PageMapReader {
    fn open(pid: u32) -> Result<PageMapReader, PageMapError> {
        let root = Root::default();
        let path = format!("/proc/{pid}/pagemap");
        let pagemap = File::open(root.path(&path)).map_err(|e| PageMapError::of(pid, &path, e))?;
        let base_page = PageSize::new(rustix::param::page_size() as u64)
            .map_err(|error| PageMapError::Format(pid, error.to_string()))?;
        let huge_page = PageSettings::host().pmd_size().unwrap_or(PageSize::M2);
        let folios = Folios::open(&root, base_page.bytes(), huge_page.bytes());
        let scans = Cell::new(true);
        Ok(PageMapReader { pid, root, pagemap, folios, base_page, huge_page, scans })
    }

    fn bytes(&self, file: &str) -> Result<Vec<u8>, PageMapError> {
        let path = format!("/proc/{}/{file}", self.pid);
        self.root.bytes(&path).map_err(|error| PageMapError::of(self.pid, &path, error))
    }

    fn command(&self) -> Result<String, PageMapError> {
        let line = self.bytes("cmdline")?;
        let words = line.split(|byte| *byte == 0).map(String::from_utf8_lossy);
        Ok(words.collect::<Vec<_>>().join(" ").trim_end().to_string())
    }

    /// Reads all mappings that `pick` accepts. The second value is true if they were still the same at
    /// the end.
    fn attempt(
        &self,
        pick: impl Fn(VirtAddr, VirtAddr) -> bool,
    ) -> Result<(Vec<Mapping>, bool), PageMapError> {
        let text = self.bytes("smaps")?;
        if text.is_empty() {
            return Err(PageMapError::NoMemory(self.pid));
        }
        let mut mappings =
            smaps::parse(&text).map_err(|why| PageMapError::Format(self.pid, why))?;
        mappings.retain(|mapping| pick(mapping.start, mapping.end));
        for mapping in &mut mappings {
            self.look(mapping).map_err(|error| {
                PageMapError::of(self.pid, &format!("/proc/{}/pagemap", self.pid), error)
            })?;
        }
        let path = format!("/proc/{}/maps", self.pid);
        let after =
            maps(&self.root, self.pid).map_err(|error| PageMapError::of(self.pid, &path, error))?;
        let settled = text.split(|byte| *byte == b'\n').filter_map(maps_line).eq(after);
        Ok((mappings, settled))
    }

    /// Finds the runs of a mapping.
    fn look(&self, mapping: &mut Mapping) -> io::Result<()> {
        // The kernel's own pages cannot be scanned, and one of them is beyond user space.
        if mapping.segment == Segment::Kernel {
            mapping.runs = self.runs(mapping, &[])?;
            return Ok(());
        }
        if self.scans.get() {
            let any = PAGE_IS_PRESENT | PAGE_IS_SWAPPED;
            let wanted = any | PAGE_IS_FILE | PAGE_IS_PFNZERO | PAGE_IS_HUGE;
            let (start, end) = (mapping.start.0, mapping.end.0);
            match pagemap::scan_any(&self.pagemap, start, end, any, wanted) {
                Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => self.scans.set(false),
                ranges => {
                    mapping.runs = self.runs(mapping, &ranges?)?;
                    return Ok(());
                }
            }
        }
        self.look_without_scan(mapping)
    }

    /// Finds the runs of a mapping from the files of older kernels.
    fn look_without_scan(&self, mapping: &mut Mapping) -> io::Result<()> {
        let ranges = match mapping.amounts.resident == 0 && mapping.hugetlb.is_none() {
            true => Vec::new(),
            false => self.present(mapping.start.0, mapping.end.0)?,
        };
        let huge = self.huge_page.bytes();
        let blocks: Vec<PageRange> =
            ranges.iter().filter_map(|range| whole(*range, huge)).collect();
        let fitting: u64 = blocks.iter().map(|block| block.end - block.start).sum();
        let amounts = mapping.amounts;
        let has_some = amounts.huge > 0 && amounts.huge < fitting;
        let placed = if has_some { self.huge_blocks(&blocks, amounts.huge)? } else { None };
        let (ranges, has_some) = match placed {
            Some(placed) => (marked(&ranges, &placed, huge), false),
            None if amounts.huge > 0 && !has_some => {
                (ranges.iter().flat_map(|range| with_huge(*range, huge)).collect(), false)
            }
            None => (ranges, has_some),
        };
        mapping.unplaced =
            has_some.then_some(Unplaced { page: self.huge_page, bytes: amounts.huge });
        mapping.runs = self.runs(mapping, &ranges)?;
        if mapping.hugetlb.is_none() {
            cap(&mut mapping.runs, amounts.resident, |run| &mut run.resident_bytes);
            cap(&mut mapping.runs, amounts.anon, |run| &mut run.anon_bytes);
        }
        Ok(())
    }

    /// Returns the starts of the huge pages among some blocks, if /proc/kpageflags shows as many bytes of
    /// them as smaps does. More may be whole folios that base entries map.
    fn huge_blocks(&self, blocks: &[PageRange], bytes: u64) -> io::Result<Option<Vec<u64>>> {
        let (Ok(folios), huge) = (&self.folios, self.huge_page.bytes()) else { return Ok(None) };
        let mut starts = Vec::new();
        for start in blocks.iter().flat_map(|b| (b.start..b.end).step_by(huge as usize)) {
            if folios.is_huge(&self.pagemap, start)? {
                starts.push(start);
            }
        }
        Ok((starts.len() as u64 * huge == bytes).then_some(starts))
    }

    /// Returns the ranges of pages that are in memory, including zero pages.
    fn present(&self, start: u64, end: u64) -> io::Result<Vec<PageRange>> {
        let base = self.base_page.bytes();
        let mut found: Vec<PageRange> = Vec::new();
        let mut at = start;
        while at < end {
            let count = ENTRIES.min((end - at) / base);
            for entry in read_words(&self.pagemap, at / base, count as usize)? {
                if entry & PRESENT != 0 {
                    let of_file = if entry & OF_FILE != 0 { PAGE_IS_FILE } else { 0 };
                    let categories = PAGE_IS_PRESENT | of_file;
                    match found.last_mut().filter(|l| (l.end, l.categories) == (at, categories)) {
                        Some(last) => last.end += base,
                        None => found.push(PageRange { start: at, end: at + base, categories }),
                    }
                }
                at += base;
            }
        }
        Ok(found)
    }

    fn runs(&self, mapping: &Mapping, ranges: &[PageRange]) -> io::Result<Vec<Run>> {
        let mut runs = Runs { at: mapping.start.0, runs: Vec::new() };
        for range in ranges.iter().filter(|range| range.categories & PAGE_IS_PRESENT != 0) {
            self.add(mapping, range, &mut runs)?;
        }
        runs.skip_to(mapping.end.0);
        Ok(runs.runs)
    }

    fn add(&self, mapping: &Mapping, range: &PageRange, runs: &mut Runs) -> io::Result<()> {
        let has = |category| range.categories & category != 0;
        let resident = !has(PAGE_IS_PFNZERO);
        let anon = resident && !has(PAGE_IS_FILE);
        let mut add = |start, end, bytes| {
            // Sizes come from the system's list of sizes or are powers of two of the base page.
            if let Ok(size) = PageSize::new(bytes) {
                runs.push(start, end, size, resident, anon);
            }
        };
        let large = mapping.hugetlb.or(has(PAGE_IS_HUGE).then_some(self.huge_page));
        match (large, &self.folios) {
            (Some(size), _) => add(range.start, range.end, size.bytes()),
            (None, Err(_)) => add(range.start, range.end, self.base_page.bytes()),
            (None, Ok(folios)) => {
                folios.split(&self.pagemap, (range.start, range.end), &mut add)?;
            }
        }
        Ok(())
    }
}

/// Returns the whole blocks of a size in a range, as one range.
fn whole(range: PageRange, size: u64) -> Option<PageRange> {
    let (start, end) = (range.start.next_multiple_of(size), range.end / size * size);
    (start < end).then_some(PageRange { start, end, ..range })
}

/// Splits a range so that its whole blocks of a size are huge pages.
fn with_huge(range: PageRange, size: u64) -> Vec<PageRange> {
    let Some(blocks) = whole(range, size) else { return vec![range] };
    let before = PageRange { end: blocks.start, ..range };
    let after = PageRange { start: blocks.end, ..range };
    let huge = PageRange { categories: range.categories | PAGE_IS_HUGE, ..blocks };
    [before, huge, after].into_iter().filter(|part| part.start < part.end).collect()
}

/// Splits ranges so that the blocks at `starts` are huge pages.
fn marked(ranges: &[PageRange], starts: &[u64], size: u64) -> Vec<PageRange> {
    let mut parts = Vec::new();
    for range in ranges {
        let mut rest = *range;
        for start in starts.iter().filter(|start| (range.start..range.end).contains(*start)) {
            let block = PageRange {
                start: *start,
                end: start + size,
                categories: range.categories | PAGE_IS_HUGE,
            };
            parts.extend([PageRange { end: *start, ..rest }, block]);
            rest.start = block.end;
        }
        parts.push(rest);
    }
    parts.retain(|part| part.start < part.end);
    parts
}

/// Limits the sum of a count over the runs to that of smaps, which does not count zero pages.
fn cap(runs: &mut [Run], all: u64, count: impl Fn(&mut Run) -> &mut u64) {
    let mut left = all;
    for run in runs {
        let count = count(run);
        *count = (*count).min(left);
        left -= *count;
    }
}

/// The runs of a mapping while they are built.
struct Runs {
    at: u64,
    runs: Vec<Run>,
}

impl Runs {
    fn push(&mut self, start: u64, end: u64, page: PageSize, resident: bool, anon: bool) {
        self.skip_to(start);
        let bytes = end - start;
        let counted = |counts: bool| if counts { bytes } else { 0 };
        self.join(Run {
            start: VirtAddr(start),
            end: VirtAddr(end),
            page: Some(page),
            resident_bytes: counted(resident),
            anon_bytes: counted(anon),
        });
    }

    /// Adds a run without pages up to `end`.
    fn skip_to(&mut self, end: u64) {
        if self.at < end {
            let (start, end) = (VirtAddr(self.at), VirtAddr(end));
            self.join(Run { start, end, page: None, resident_bytes: 0, anon_bytes: 0 });
        }
    }

    fn join(&mut self, run: Run) {
        self.at = run.end.0;
        let joined = self.runs.last_mut().is_some_and(|last| last.join(&run));
        if !joined {
            self.runs.push(run);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::mapping::{OwnedMapping as Memory, Request, Source};

    fn map_of(memory: &Memory) -> PageMap {
        let mut map = read(std::process::id()).unwrap();
        let start = memory.address();
        map.cut(VirtAddr(start), VirtAddr(start + memory.len() as u64));
        map
    }

    fn pages(map: &PageMap) -> Vec<(u64, Option<u64>)> {
        let runs = map.mappings.iter().flat_map(|mapping| &mapping.runs);
        runs.map(|run| (run.bytes() >> 12, run.page.map(|size| size.bytes() >> 12))).collect()
    }

    /// Reads the map as on a kernel before Linux 6.7.
    fn map_without_scan(memory: &Memory) -> PageMap {
        let reader = PageMapReader::open(std::process::id()).unwrap();
        old_map(memory, PageMapReader { scans: Cell::new(false), ..reader })
    }

    /// Reads it as an ordinary user there.
    fn map_by_smaps(memory: &Memory) -> PageMap {
        let reader = PageMapReader::open(std::process::id()).unwrap();
        let folios = Err("as for a user".into());
        old_map(memory, PageMapReader { scans: Cell::new(false), folios, ..reader })
    }

    fn old_map(memory: &Memory, reader: PageMapReader) -> PageMap {
        let (start, end) = (memory.address(), memory.address() + memory.len() as u64);
        let mut map = settled(reader, |from, to| from.0 < end && to.0 > start).unwrap();
        map.cut(VirtAddr(start), VirtAddr(end));
        map
    }

    /// Returns true if this kernel has PAGEMAP_SCAN; prints SKIP if not.
    fn has_scan() -> bool {
        let reader = PageMapReader::open(std::process::id()).unwrap();
        reader.attempt(|_, _| true).unwrap();
        let supported = reader.scans.get();
        if !supported {
            println!("SKIP: this kernel has no PAGEMAP_SCAN");
        }
        supported
    }

    #[test]
    fn without_a_scan_sizes_are_those_of_smaps() {
        let huge = 2 << 20;
        let request = Request { source: Source::Anon, len: 4 * huge, align: huge, hugetlb: None };
        let memory = Memory::new(request).unwrap();
        memory.advise(libc::MADV_NOHUGEPAGE).unwrap();
        (0..512).for_each(|page| memory.store(page << 12, 1));
        memory.store(2 * huge as u64 + 4096, 1);
        let small = map_without_scan(&memory);
        assert_eq!(pages(&small), [(512, Some(1)), (513, None), (1, Some(1)), (1022, None)]);
        memory.advise(libc::MADV_HUGEPAGE).unwrap();
        // The kernel refuses to collapse the empty block.
        let refused = memory.advise(libc::MADV_COLLAPSE);
        let huge_bytes = map_without_scan(&memory).resident_by_size(|_| true);
        let Some(huge_bytes) = huge_bytes.get(&PageSize::M2).copied() else {
            println!("SKIP: no huge page could be had: {refused:?}");
            return;
        };
        // All pages that can be huge are.
        let map = map_without_scan(&memory);
        assert!(map.mappings.iter().all(|mapping| mapping.unplaced.is_none()), "{map:?}");
        if has_scan() {
            assert_eq!(map.resident_by_size(|_| true), map_of(&memory).resident_by_size(|_| true));
        }
        // One more block of small pages: the kernel does not show which blocks are the huge ones.
        memory.advise(libc::MADV_NOHUGEPAGE).unwrap();
        (0..512).for_each(|page| memory.store(3 * huge as u64 + (page << 12), 1));
        let map = map_without_scan(&memory);
        if map.folios_missing.is_none() {
            // Only root may read the flags of pages, which show it.
            assert!(map.mappings.iter().all(|mapping| mapping.unplaced.is_none()), "{map:?}");
            assert_eq!(map.resident_by_size(|_| true)[&PageSize::M2], huge_bytes);
            if has_scan() {
                assert_eq!(pages(&map), pages(&map_of(&memory)));
            }
        }
        let map = map_by_smaps(&memory);
        let unplaced: u64 = map.mappings.iter().filter_map(|m| Some(m.unplaced?.bytes)).sum();
        assert_eq!(unplaced, huge_bytes, "{map:?}");
        assert_eq!(map.resident_by_size(|_| true)[&PageSize::M2], huge_bytes);
        let mapping = map.mappings.iter().find(|m| m.unplaced.is_some()).unwrap();
        let runs = mapping.runs_by_size();
        assert_eq!(runs.iter().map(Run::bytes).sum::<u64>(), mapping.bytes());
        assert_eq!((runs[0].page, runs[0].bytes()), (Some(PageSize::M2), huge_bytes));
    }

    #[test]
    fn runs_follow_what_was_touched() {
        if !has_scan() {
            return;
        }
        let request =
            Request { source: Source::Anon, len: 16 << 12, align: 1 << 12, hugetlb: None };
        let memory = Memory::new(request).unwrap();
        memory.advise(libc::MADV_NOHUGEPAGE).unwrap();
        assert_eq!(pages(&map_of(&memory)), [(16, None)]);
        memory.store(3 << 12, 1);
        memory.store(4 << 12, 1);
        memory.load(9 << 12);
        let map = map_of(&memory);
        assert_eq!(pages(&map), [(3, None), (2, Some(1)), (4, None), (1, Some(1)), (6, None)]);
        let (base, mapping) = (map.base_page, &map.mappings[0]);
        assert_eq!(map.resident_by_size(|_| true)[&base], 2 << 12, "a page of zeros is not ours");
        assert_eq!((mapping.anon_bytes(), mapping.resident_bytes()), (2 << 12, 2 << 12));
    }

    #[test]
    fn collapsed_memory_is_huge() {
        if !has_scan() {
            return;
        }
        let huge = 2 << 20;
        let request = Request { source: Source::Anon, len: 2 * huge, align: huge, hugetlb: None };
        let memory = Memory::new(request).unwrap();
        memory.advise(libc::MADV_NOHUGEPAGE).unwrap();
        (0..512).for_each(|page| memory.store(page << 12, 1));
        memory.store(huge as u64, 1);
        memory.advise(libc::MADV_HUGEPAGE).unwrap();
        if let Err(error) = memory.advise(libc::MADV_COLLAPSE) {
            println!("SKIP: no huge page could be had: {error}");
            return;
        }
        assert_eq!(pages(&map_of(&memory)), [(1024, Some(512))]);
    }

    #[test]
    fn processes_without_memory_say_so() {
        assert!(matches!(read(u32::MAX), Err(PageMapError::NoProcess(_))));
        // The process was not waited for, so its number still exists. Kernel threads get the same error,
        // but containers do not show them.
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        let waited =
            rustix::process::WaitIdOptions::EXITED | rustix::process::WaitIdOptions::NOWAIT;
        let child = rustix::process::Pid::from_child(&ended);
        rustix::process::waitid(rustix::process::WaitId::Pid(child), waited).unwrap();
        let answer = read(ended.id());
        assert!(matches!(answer, Err(PageMapError::NoMemory(_))), "{answer:?}");
        ended.wait().unwrap();
    }
}
