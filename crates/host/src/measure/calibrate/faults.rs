//! The kernel's cost of a page, by kind of fault and by page size.

use super::{CalibrateError, Effort, enable, thread_ns};
use crate::measure::backed_memory;
use crate::pages::{Mode, PageSettings};
use crate::sys::mapping::{OwnedMapping, Request, Source};
use crate::sys::process::{fork, process_usage};
use crate::sys::shared::SharedWords;
use crate::sys::signal::asked_to_stop;
use pagetax_core::access::Rng;
use pagetax_core::calibration::{FaultCost, FaultKind, Spread};
use pagetax_core::units::PageSize;
use rustix::fs::{Advice, fadvise};
use std::fs::File;
use std::io;
use std::io::Write;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// The cost of a page in nanoseconds, by kind and page size.
pub(super) type Seen = (FaultKind, u64, f64);

/// The number of pages that each repetition reads from disk.
const MAJOR_COUNT: u64 = 48;
/// The smallest share of chunks that must have got pages of the size.
const TOOK_SHARE_MIN: f64 = 0.9;

/// Measures all kinds of fault. For a page size that is not available, the cost shows why.
pub(super) fn measure(
    effort: Effort,
    settings: &PageSettings,
    mut on_progress: impl FnMut(f64),
) -> Result<Vec<FaultCost>, CalibrateError> {
    let base = PageSize::K4.bytes().max(rustix::param::page_size() as u64);
    let available =
        |size: &PageSize| matches!(settings.of_size(*size), Some(Mode::Always | Mode::Madvise));
    let (sizes, off): (Vec<_>, Vec<_>) = settings.sizes().into_iter().partition(available);
    let mut file = CachedFile::new(effort.fault_bytes).map_err(system("make a temporary file"))?;
    let mut seen: Vec<Seen> = Vec::new();
    let mut fallen_back: Vec<(PageSize, String)> = Vec::new();
    backed_memory::bring(effort.fault_bytes as u64 * 4);
    for repetition in 0..effort.repetitions {
        if asked_to_stop() {
            return Err(CalibrateError::Interrupted);
        }
        base_pages(effort, base, &mut seen).map_err(system("map memory"))?;
        seen.push(copy_on_write(effort, base).map_err(system("fork"))?);
        for size in &sizes {
            match sized_pages(effort, *size, settings).map_err(system("map memory"))? {
                Ok(costs) => seen.extend(costs),
                Err(why) => fallen_back.push((*size, why)),
            }
        }
        seen.push(file.cached_read(base).map_err(system("map a file"))?);
        seen.extend(file.major_read(base).map_err(system("map a file"))?);
        on_progress(f64::from(repetition + 1) / f64::from(effort.repetitions));
    }
    let mut costs = summary(&seen);
    let mut missing = |kind, page_bytes: u64, why: String| {
        if !costs.iter().any(|c| c.kind == kind && c.page_bytes == page_bytes) {
            costs.push(FaultCost { kind, page_bytes, cost: None, why: Some(why) });
        }
    };
    for (size, why) in fallen_back {
        for kind in [FaultKind::AnonWrite, FaultKind::AnonFill] {
            missing(kind, size.bytes(), why.clone());
        }
    }
    for size in off {
        missing(FaultKind::AnonWrite, size.bytes(), format!("switched off; {}", enable(size)));
    }
    let in_memory = "the folder for temporary files is in memory; TMPDIR names another";
    missing(FaultKind::FileMajorRead, base, in_memory.into());
    costs.sort_by_key(|cost| (cost.kind, cost.page_bytes));
    Ok(costs)
}

/// Measures private memory once, on base pages and on huge ones.
pub(super) fn again(
    effort: Effort,
    base: u64,
    huge: PageSize,
    settings: &PageSettings,
    seen: &mut Vec<Seen>,
) -> Result<(), CalibrateError> {
    base_pages(effort, base, seen).map_err(system("map memory"))?;
    if let Ok(costs) = sized_pages(effort, huge, settings).map_err(system("map memory"))? {
        seen.extend(costs);
    }
    Ok(())
}

fn system(what: &'static str) -> impl FnOnce(io::Error) -> CalibrateError {
    move |error| CalibrateError::System(what, error)
}

pub(super) fn summary(seen: &[Seen]) -> Vec<FaultCost> {
    let mut keys: Vec<(FaultKind, u64)> =
        seen.iter().map(|(kind, size, _)| (*kind, *size)).collect();
    keys.sort();
    keys.dedup();
    let cost = |(kind, page_bytes): (FaultKind, u64)| {
        let same = seen.iter().filter(|(k, size, _)| (*k, *size) == (kind, page_bytes));
        let cost = Spread::of(same.map(|(.., ns)| *ns).collect());
        FaultCost { kind, page_bytes, cost, why: None }
    };
    keys.into_iter().map(cost).collect()
}

fn map(len: usize, align: u64, advice: i32) -> io::Result<OwnedMapping> {
    let align = align as usize;
    let mapping = OwnedMapping::new(Request { source: Source::Anon, len, align, hugetlb: None })?;
    match mapping.advise(advice) {
        // Kernels without huge pages refuse the advice, and use base pages anyway.
        Err(error) if error.raw_os_error() != Some(libc::EINVAL) => Err(error),
        _ => Ok(mapping),
    }
}

fn offsets(mapping: &OwnedMapping, page: u64) -> impl Iterator<Item = u64> + use<> {
    (0..mapping.len() as u64).step_by(page as usize)
}

/// Returns the CPU time that `work` takes for each page of a mapping.
fn per_page(mapping: &OwnedMapping, page: u64, work: impl Fn(&OwnedMapping, u64)) -> f64 {
    let before = thread_ns();
    for offset in offsets(mapping, page) {
        work(mapping, offset);
    }
    (thread_ns() - before) as f64 / (mapping.len() as u64 / page) as f64
}

fn read(mapping: &OwnedMapping, offset: u64) {
    mapping.load(offset);
}

/// Returns the CPU time that unmapping takes for each page.
fn unmap(mapping: OwnedMapping, page: u64) -> f64 {
    let pages = (mapping.len() as u64 / page) as f64;
    let before = thread_ns();
    drop(mapping);
    (thread_ns() - before) as f64 / pages
}

fn base_pages(effort: Effort, page: u64, seen: &mut Vec<Seen>) -> io::Result<()> {
    let zero = map(effort.fault_bytes, page, libc::MADV_NOHUGEPAGE)?;
    seen.push((FaultKind::ZeroRead, page, per_page(&zero, page, read)));
    drop(zero);
    let anon = map(effort.fault_bytes, page, libc::MADV_NOHUGEPAGE)?;
    seen.push((FaultKind::AnonWrite, page, per_page(&anon, page, |m, o| m.store(o, 1))));
    seen.push((FaultKind::Unmap, page, unmap(anon, page)));
    let filled = map(effort.fault_bytes, page, libc::MADV_NOHUGEPAGE)?;
    let (bytes, before) = (filled.len() as u64, thread_ns());
    filled.set(0, bytes, 1);
    let each_ns = (thread_ns() - before) as f64 / (bytes / page) as f64;
    seen.push((FaultKind::AnonFill, page, each_ns));
    Ok(())
}

/// Measures the copies: a child writes to pages that its parent has written.
fn copy_on_write(effort: Effort, page: u64) -> io::Result<Seen> {
    let anon = map(effort.fault_bytes, page, libc::MADV_NOHUGEPAGE)?;
    offsets(&anon, page).for_each(|offset| anon.store(offset, 1));
    let result = SharedWords::new(1)?;
    let mut child = fork(|| {
        let ns = per_page(&anon, page, |m, o| m.store(o, 2));
        result.word(0).store(ns.to_bits(), Ordering::Relaxed);
        0
    })?;
    child.wait()?;
    let ns = f64::from_bits(result.word(0).load(Ordering::Relaxed));
    Ok((FaultKind::CowWrite, page, ns))
}

/// Measures pages larger than the base page. Each is in its own mapping, which is touched before the
/// next one is made. So no larger size fits, even if it is enabled.
fn sized_pages(
    effort: Effort,
    size: PageSize,
    settings: &PageSettings,
) -> io::Result<Result<Vec<Seen>, String>> {
    let bytes = size.bytes();
    let count = (effort.fault_bytes as u64 / bytes).clamp(4, 64);
    let before = fault_allocations(settings, size);
    let (mut mappings, mut write_ns, mut fill_ns) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..count {
        let mapping = map(bytes as usize, bytes, libc::MADV_HUGEPAGE)?;
        let start = Instant::now();
        mapping.store(0, 1);
        write_ns.push(start.elapsed().as_nanos() as f64);
        mapping.set(0, bytes, 1);
        fill_ns.push(start.elapsed().as_nanos() as f64);
        mappings.push(mapping);
    }
    let took = match (before, fault_allocations(settings, size)) {
        (Some(before), Some(after)) => after.saturating_sub(before) as f64 / count as f64,
        // Kernels before 6.8 do not count by size.
        _ => 1.0,
    };
    if took < TOOK_SHARE_MIN {
        let percent = took * 100.0;
        return Ok(Err(format!(
            "only {percent:.0} % of new {size} pages were to be had: memory is fragmented; \
             echo 1 > /proc/sys/vm/compact_memory (as root) may help"
        )));
    }
    // The median mapping: elapsed time can be read without a system call, unlike CPU time.
    let mut costs = Vec::new();
    for (kind, each_ns) in [(FaultKind::AnonWrite, write_ns), (FaultKind::AnonFill, fill_ns)] {
        costs.extend(Spread::of(each_ns).map(|spread| (kind, bytes, spread.median_ns)));
    }
    let freed: Vec<f64> = mappings.into_iter().map(|mapping| unmap(mapping, bytes)).collect();
    costs.extend(Spread::of(freed).map(|spread| (FaultKind::Unmap, bytes, spread.median_ns)));
    Ok(Ok(costs))
}

fn fault_allocations(settings: &PageSettings, size: PageSize) -> Option<u64> {
    let folder = settings.size_path(size).parent()?.join("stats/anon_fault_alloc");
    std::fs::read_to_string(folder).ok()?.trim().parse().ok()
}

/// A file without a name, which ends with the process.
struct CachedFile {
    file: File,
    bytes: usize,
    random: Rng,
}

impl CachedFile {
    fn new(bytes: usize) -> io::Result<CachedFile> {
        let mut file = tempfile::tempfile()?;
        let block = vec![0x5a; 1 << 20];
        for _ in 0..bytes.div_ceil(block.len()) {
            file.write_all(&block)?;
        }
        file.sync_all()?;
        Ok(CachedFile { file, bytes, random: Rng::new(1) })
    }

    fn map(&self, page: u64) -> io::Result<OwnedMapping> {
        let source = Source::File { file: &self.file, private: false, writable: true };
        OwnedMapping::new(Request { source, len: self.bytes, align: page as usize, hugetlb: None })
    }

    /// Measures faults in order on cached pages, with fault-around.
    fn cached_read(&mut self, page: u64) -> io::Result<Seen> {
        let warm = self.map(page)?;
        offsets(&warm, page).for_each(|offset| read(&warm, offset));
        drop(warm);
        let mapping = self.map(page)?;
        Ok((FaultKind::FileCachedRead, page, per_page(&mapping, page, read)))
    }

    /// Measures random reads from the disk: the median elapsed time of the major faults.
    fn major_read(&mut self, page: u64) -> io::Result<Option<Seen>> {
        fadvise(&self.file, 0, None, Advice::DontNeed)?;
        let mapping = self.map(page)?;
        mapping.advise(libc::MADV_RANDOM)?;
        let pages = mapping.len() as u64 / page;
        let mut waits_ns = Vec::new();
        for _ in 0..MAJOR_COUNT {
            let offset = self.random.below(pages) * page;
            let (before, start) = (process_usage().major_fault_count, Instant::now());
            mapping.load(offset);
            let ns = start.elapsed().as_nanos() as f64;
            if process_usage().major_fault_count > before {
                waits_ns.push(ns);
            }
        }
        let spread = Spread::of(waits_ns);
        Ok(spread.map(|spread| (FaultKind::FileMajorRead, page, spread.median_ns)))
    }
}
