//! Changes the pages that a running process has: collapses them to huge ones, or splits those.
//!
//! Where process_madvise(2) is allowed, the process never stops. Else it makes the calls itself, in
//! stops of a few milliseconds with gaps between them. The kernel takes one huge page at a time, so that
//! no lock of the target is held for long. A call about several that fails is repeated for each, so that each
//! failure has its place.

use super::inject::{Injector, Stops};
use super::parts::part_of;
use super::remap;
use super::settings::base_page;
use super::target::{Refusal, Target};
use crate::pages::pagemap::{self, Mapping, PageMap, Segment};
use crate::sys::mapping::{OwnedMapping as Memory, Request, Source};
use crate::sys::remote;
use pagetax_core::page_size::{How, MemoryPart, PageSizeRequest, PartSizes};
use pagetax_core::units::PageSize;
use serde::Serialize;
use std::collections::{BTreeMap, HashSet};
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// A stop begins no further call after this long. A call takes 0.5 ms, and up to 6 where the kernel has
/// to look for memory, or to wait for its own threads on other CPUs; it cannot be cut short.
const STOP_MAX: Duration = Duration::from_millis(1);
/// The most blocks that one call from outside collapses.
const TOGETHER_MAX: usize = 32;
/// The target runs at least this long between two stops.
const GAP: Duration = Duration::from_millis(2);

const NO_COLLAPSE: &str = "this kernel cannot make huge pages of memory that is there already (MADV_COLLAPSE, \
     Linux 6.1)\n  hint: start the command under ppgsz, or wait for khugepaged";

/// The kernel's reason to leave a page as it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// No free block of memory of that size.
    NoMemory,
    /// The memory cgroup is at its limit.
    Limit,
    /// Pages are pinned, locked or in use by others just now.
    Busy,
    /// This memory cannot have them.
    NotEligible,
    /// The file that the memory was copied from is gone or replaced.
    NoFile,
    /// It went away meanwhile.
    Gone,
    /// Another error.
    Other,
}

impl Cause {
    pub(super) fn of(error: &io::Error) -> Cause {
        match error.raw_os_error() {
            Some(libc::ENOMEM) => Cause::NoMemory,
            Some(libc::EBUSY) => Cause::Limit,
            Some(libc::EAGAIN) => Cause::Busy,
            Some(libc::EINVAL) => Cause::NotEligible,
            Some(libc::ESRCH | libc::EFAULT) => Cause::Gone,
            _ => Cause::Other,
        }
    }
}

/// The result of a change.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Outcome {
    /// Bytes whose pages were changed, by part.
    pub changed_bytes: BTreeMap<MemoryPart, u64>,
    /// Bytes that stayed, by part and cause.
    #[serde(skip)]
    pub failed_bytes: BTreeMap<(MemoryPart, Cause), u64>,
    /// The number and length of the target's stops.
    #[serde(skip)]
    pub stops: Stops,
    /// The time of each block, in nanoseconds: threads that touch it wait so long. It is the kernel's CPU
    /// time where calls come from outside, else the time in the stop.
    #[serde(skip)]
    pub blocks_ns: Vec<u64>,
}

impl Outcome {
    /// Adds the result of a later change.
    pub fn add(&mut self, later: Outcome) {
        for (part, bytes) in later.changed_bytes {
            *self.changed_bytes.entry(part).or_default() += bytes;
        }
        for ((part, cause), bytes) in later.failed_bytes {
            self.fail(part, cause, bytes);
        }
        self.stops.all.extend(later.stops.all);
        self.blocks_ns.extend(later.blocks_ns);
    }

    pub(super) fn fail(&mut self, part: MemoryPart, cause: Cause, bytes: u64) {
        *self.failed_bytes.entry((part, cause)).or_default() += bytes;
    }

    /// Returns the bytes whose pages were changed, of all parts.
    pub fn total_bytes(&self) -> u64 {
        self.changed_bytes.values().sum()
    }
}

/// One huge page's worth of addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Chunk {
    start: u64,
    part: MemoryPart,
    /// Resident bytes on pages of another size.
    bytes: u64,
}

/// Does as [`apply`], and with `force` also moves code and data ([`remap`]).
pub fn apply_all(
    target: &Target,
    map: &PageMap,
    advice: &PartSizes,
    huge: PageSize,
    force: bool,
) -> Result<Outcome, Refusal> {
    let mut outcome = apply(target, map, advice, huge)?;
    if force {
        outcome.add(remap::apply(target, map, advice, huge)?);
    }
    Ok(outcome)
}

/// Checks that the kernel can collapse memory that is there.
pub fn check_collapse() -> Result<(), Refusal> {
    match remote::knows_collapse() {
        true => Ok(()),
        false => Err(Refusal::System(NO_COLLAPSE.into())),
    }
}

/// Gives a process's present memory the page sizes of `advice`, as far as that is possible from outside: huge
/// pages by collapsing, base pages by splitting. Sizes between come with later faults, so those mappings are
/// advised.
pub fn apply(
    target: &Target,
    map: &PageMap,
    advice: &PartSizes,
    huge: PageSize,
) -> Result<Outcome, Refusal> {
    let base = map.base_page;
    let mut changed = Outcome::default();
    let collapse = chunks(map, huge, |mapping| asked(advice, mapping, |size| size == huge));
    let split = huge_runs(map, huge, |mapping| asked(advice, mapping, |size| size == base));
    let reach = Reach::of(target)?;
    if !collapse.is_empty() {
        check_collapse()?;
    }
    reach.change(&collapse, huge.bytes(), remote::RemoteAdvice::Collapse, &mut changed);
    // A part of a huge page that is not needed soon splits it.
    reach.change(&split, base.bytes(), remote::RemoteAdvice::Cold, &mut changed);
    let between = |mapping: &Mapping| {
        let unasked = mapping.advice != Some(pagemap::HugePageAdvice::Huge);
        let part = asked(advice, mapping, |size| size > base && size < huge).filter(|_| unasked);
        part.map(|part| (part, libc::MADV_HUGEPAGE))
    };
    let stays_small = |mapping: &Mapping| {
        let may_grow = mapping.thp_eligible == Some(true);
        let part = asked(advice, mapping, |size| size == base).filter(|_| may_grow);
        part.map(|part| (part, libc::MADV_NOHUGEPAGE))
    };
    advise_mappings(target, map, &mut changed, |m| between(m).or_else(|| stays_small(m)))?;
    Ok(changed)
}

/// Splits the huge pages of all parts that `advice` names, and maps the file of moved code again. The kernel
/// splits pages of files only if no other process maps them.
pub fn undo(
    target: &Target,
    map: &PageMap,
    advice: &PartSizes,
    huge: PageSize,
) -> Result<Outcome, Refusal> {
    let base = map.base_page;
    let (mut changed, restored) = remap::restore(target, map, advice)?;
    let split = huge_runs(map, huge, |mapping| {
        part_of(advice, mapping).filter(|_| !restored.contains(&mapping.start.0))
    });
    Reach::of(target)?.change(&split, base.bytes(), remote::RemoteAdvice::Cold, &mut changed);
    Ok(changed)
}

/// The smallest share of a block that is there already. A collapse fills the rest with zeros, which stay.
const THERE_MIN: f64 = 0.9;

/// Blocks of a huge page's size that are nearly full of base pages.
#[derive(Debug, Clone)]
pub struct FullBlocks {
    chunks: Vec<Chunk>,
    huge: PageSize,
    base: PageSize,
}

impl FullBlocks {
    /// Finds the blocks of anonymous memory, those of the largest mappings first, up to so many bytes.
    pub fn of(map: &PageMap, huge: PageSize, bytes_max: u64) -> FullBlocks {
        let request = PageSizeRequest::preferred(huge);
        let parts = PartSizes::of(&[MemoryPart::Heap, MemoryPart::Anon], request);
        let mut chunks = chunks(map, huge, |mapping| asked(&parts, mapping, |size| size == huge));
        chunks.retain(|chunk| chunk.bytes as f64 >= THERE_MIN * huge.bytes() as f64);
        let length = |chunk: &Chunk| {
            let holds = |m: &&Mapping| m.start.0 <= chunk.start && chunk.start < m.end.0;
            map.mappings.iter().find(holds).map_or(0, Mapping::bytes)
        };
        chunks.sort_by_cached_key(|chunk| (std::cmp::Reverse(length(chunk)), chunk.start));
        chunks.truncate((bytes_max / huge.bytes()) as usize);
        FullBlocks { chunks, huge, base: map.base_page }
    }

    /// Returns the bytes of all blocks.
    pub fn bytes(&self) -> u64 {
        self.chunks.len() as u64 * self.huge.bytes()
    }

    /// Returns the bytes by which the process grows if all blocks are collapsed.
    pub fn growth_bytes(&self) -> u64 {
        self.bytes() - self.chunks.iter().map(|chunk| chunk.bytes).sum::<u64>()
    }

    /// Leaves out the blocks after the first `bytes`.
    pub fn truncate(&mut self, bytes: u64) {
        self.chunks.truncate((bytes / self.huge.bytes()) as usize);
    }

    /// Returns the first blocks: this share of them, but at least one.
    pub fn share(&self, share: f64) -> FullBlocks {
        let count = (self.chunks.len() as f64 * share).max(1.0) as usize;
        FullBlocks { chunks: self.chunks[..count.min(self.chunks.len())].to_vec(), ..*self }
    }

    /// Returns the bytes of these blocks that a page map shows on huge pages.
    pub fn bytes_on_huge_pages(&self, map: &PageMap) -> u64 {
        let huge = huge_runs(map, self.huge, |_| Some(MemoryPart::Anon));
        let starts: HashSet<u64> = huge.iter().map(|chunk| chunk.start).collect();
        let count = self.chunks.iter().filter(|chunk| starts.contains(&chunk.start)).count();
        count as u64 * self.huge.bytes()
    }

    /// Collapses each block to a huge page.
    pub fn collapse(&self, target: &Target) -> Result<Outcome, Refusal> {
        self.call(target, self.huge.bytes(), remote::RemoteAdvice::Collapse)
    }

    /// Splits the huge page of each block.
    pub fn split(&self, target: &Target) -> Result<Outcome, Refusal> {
        // A part of a huge page that is not needed soon splits it.
        self.call(target, self.base.bytes(), remote::RemoteAdvice::Cold)
    }

    /// Returns true if a block overlaps a range of addresses.
    pub fn touch(&self, range: &Range<u64>) -> bool {
        let overlaps = |chunk: &Chunk| {
            chunk.start < range.end && range.start < chunk.start + self.huge.bytes()
        };
        self.chunks.iter().any(overlaps)
    }

    /// Makes as many calls and stops, which change nothing.
    pub fn pretend(&self, target: &Target) -> Result<Outcome, Refusal> {
        self.call(target, 0, remote::RemoteAdvice::Cold)
    }

    fn call(
        &self,
        target: &Target,
        len: u64,
        advice: remote::RemoteAdvice,
    ) -> Result<Outcome, Refusal> {
        let mut outcome = Outcome::default();
        Reach::of(target)?.change(&self.chunks, len, advice, &mut outcome);
        Ok(outcome)
    }
}

/// Returns the part of a mapping of anonymous memory, if its requested size is `wanted`.
fn asked(
    advice: &PartSizes,
    mapping: &Mapping,
    wanted: impl Fn(PageSize) -> bool,
) -> Option<MemoryPart> {
    if matches!(mapping.segment, Segment::Text | Segment::Data) || mapping.hugetlb.is_some() {
        return None;
    }
    let part = part_of(advice, mapping)?;
    let request = advice.get(part)?;
    let size = request.size(base_page()).filter(|_| request.how() == How::Preferred)?;
    wanted(size).then_some(part)
}

/// Returns the blocks of huge pages that hold smaller pages.
fn chunks(
    map: &PageMap,
    huge: PageSize,
    part_of: impl Fn(&Mapping) -> Option<MemoryPart>,
) -> Vec<Chunk> {
    let size = huge.bytes();
    let mut all = Vec::new();
    for mapping in &map.mappings {
        let Some(part) = part_of(mapping) else { continue };
        let mut small: BTreeMap<u64, u64> = BTreeMap::new();
        for run in &mapping.runs {
            if run.resident_bytes == 0 || run.page.is_none_or(|page| page >= huge) {
                continue;
            }
            let mut at = run.start.0;
            while at < run.end.0 {
                let start = at / size * size;
                let end = run.end.0.min(start + size);
                *small.entry(start).or_default() += end - at;
                at = end;
            }
        }
        small.retain(|start, _| *start >= mapping.start.0 && start + size <= mapping.end.0);
        all.extend(small.into_iter().map(|(start, bytes)| Chunk { start, part, bytes }));
    }
    all
}

/// Returns each huge page, or where only their number is known, each block that could be one. Splitting does
/// no harm to the others.
fn huge_runs(
    map: &PageMap,
    huge: PageSize,
    part_of: impl Fn(&Mapping) -> Option<MemoryPart>,
) -> Vec<Chunk> {
    let size = huge.bytes();
    let mut all = Vec::new();
    for mapping in &map.mappings {
        let Some(part) = part_of(mapping) else { continue };
        let may_be_huge = |run: &&pagemap::Run| match mapping.unplaced {
            Some(_) => run.page.is_some(),
            None => run.page == Some(huge),
        };
        for run in mapping.runs.iter().filter(may_be_huge) {
            let (first, end) = (run.start.0.next_multiple_of(size), run.end.0);
            let starts = (first..end).step_by(size as usize);
            let starts = starts.filter(|start| mapping.unplaced.is_none() || start + size <= end);
            all.extend(starts.map(|start| Chunk { start, part, bytes: size }));
        }
    }
    all
}

/// The way to make calls in the target.
enum Reach<'a> {
    Remote(&'a Target),
    Injected(Injector),
}

impl Reach<'_> {
    fn of(target: &Target) -> Result<Reach<'_>, Refusal> {
        match target.is_remote() {
            true => Ok(Reach::Remote(target)),
            false => Injector::open(target.pid()).map(Reach::Injected),
        }
    }

    /// Gives `advice` about `len` bytes at the start of each chunk, and records the results.
    fn change(
        &self,
        chunks: &[Chunk],
        len: u64,
        advice: remote::RemoteAdvice,
        changed: &mut Outcome,
    ) {
        let mut rest = chunks;
        while !rest.is_empty() {
            let (begun, begun_cpu_ns) = (Instant::now(), thread_cpu_ns());
            let done = match self {
                Reach::Remote(target) => together(target, rest, len, advice),
                Reach::Injected(injector) => {
                    if advice == remote::RemoteAdvice::Collapse {
                        warm_up(len as usize);
                    }
                    in_one_stop(injector, rest, len, advice, &mut changed.stops)
                }
            };
            let ns = match self {
                Reach::Remote(_) => thread_cpu_ns() - begun_cpu_ns,
                Reach::Injected(_) => begun.elapsed().as_nanos() as u64,
            };
            changed.blocks_ns.extend(done.iter().map(|_| ns / done.len() as u64));
            if let Reach::Injected(_) = self {
                std::thread::sleep(GAP);
            }
            for (chunk, result) in rest.iter().zip(&done) {
                match result {
                    Ok(()) => *changed.changed_bytes.entry(chunk.part).or_default() += chunk.bytes,
                    Err(error) => changed.fail(chunk.part, Cause::of(error), chunk.bytes),
                }
            }
            rest = &rest[done.len().max(1)..];
        }
    }
}

/// Gives advice on the first chunk, or on several that follow each other without a gap. Each call to collapse
/// waits for all CPUs, which takes milliseconds on a busy machine.
fn together(
    target: &Target,
    chunks: &[Chunk],
    len: u64,
    advice: remote::RemoteAdvice,
) -> Vec<io::Result<()>> {
    let follows = |pair: &&[Chunk]| pair[0].start + len == pair[1].start;
    let count = 1 + chunks.windows(2).take(TOGETHER_MAX - 1).take_while(follows).count();
    if count > 1 && remotely(target, chunks[0].start, len * count as u64, advice).is_ok() {
        return (0..count).map(|_| Ok(())).collect();
    }
    // One block of several may fail.
    chunks[..count].iter().map(|chunk| remotely(target, chunk.start, len, advice)).collect()
}

fn thread_cpu_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn remotely(target: &Target, start: u64, len: u64, advice: remote::RemoteAdvice) -> io::Result<()> {
    let once = || remote::advise(target.pidfd().as_fd(), start, len, advice);
    // Pages that are busy are so for a moment, mostly.
    once().or_else(|error| match error.raw_os_error() {
        Some(libc::EAGAIN) => once(),
        _ => Err(error),
    })
}

/// Touches blocks of memory and frees them, so that the kernel has blocks that a hypervisor already backs.
/// Other blocks take ten times as long to fill, while the target stands still.
fn warm_up(bytes: usize) {
    const BLOCKS: usize = 2;
    let request = || Request { source: Source::Anon, len: bytes, align: bytes, hugetlb: None };
    let block = || {
        let block = Memory::new(request()).ok()?;
        block.advise(libc::MADV_HUGEPAGE).ok()?;
        block.store(0, 1);
        Some(block)
    };
    let _in_use_together = [(); BLOCKS].map(|()| block());
}

/// Gives advice on as many of the first chunks as fit a stop, at least one; on all if there is no session.
fn in_one_stop(
    injector: &Injector,
    chunks: &[Chunk],
    len: u64,
    advice: remote::RemoteAdvice,
    stops: &mut Stops,
) -> Vec<io::Result<()>> {
    let done = injector.session(stops, |session| {
        let mut done = Vec::new();
        for chunk in chunks {
            done.push(session.advise(chunk.start, len, advice.raw()));
            if session.elapsed() > STOP_MAX {
                break;
            }
        }
        done
    });
    done.unwrap_or_else(|error| {
        let code = error.raw_os_error().unwrap_or(libc::EAGAIN);
        chunks.iter().map(|_| Err(io::Error::from_raw_os_error(code))).collect()
    })
}

/// Has the target advise its mappings for later faults: only a process itself can do that.
fn advise_mappings(
    target: &Target,
    map: &PageMap,
    changed: &mut Outcome,
    advice: impl Fn(&Mapping) -> Option<(MemoryPart, i32)>,
) -> Result<(), Refusal> {
    let wanted: Vec<(u64, u64, MemoryPart, i32)> = map
        .mappings
        .iter()
        .filter_map(|m| advice(m).map(|(part, advice)| (m.start.0, m.bytes(), part, advice)))
        .collect();
    if wanted.is_empty() {
        return Ok(());
    }
    let injector = Injector::open(target.pid())?;
    let results = injector.session(&mut changed.stops, |session| {
        let advise = |(start, len, _, advice): &(u64, u64, MemoryPart, i32)| {
            session.advise(*start, *len, *advice)
        };
        wanted.iter().map(advise).collect::<Vec<_>>()
    });
    let results = results.map_err(|error| Refusal::System(error.to_string()))?;
    for ((_, bytes, part, _), result) in wanted.iter().zip(results) {
        if let Err(error) = result {
            changed.fail(*part, Cause::of(&error), *bytes);
        }
    }
    Ok(())
}
