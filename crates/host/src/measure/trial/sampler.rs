//! Watches a command's memory while it runs: the amount at its peak, and the page sizes.
//!
//! For smaps_rollup the kernel walks the page tables, which takes some 8 us a megabyte of base pages.
//! Meanwhile, a thread that maps memory waits. PAGEMAP_SCAN costs a tenth of that, but does not show which
//! pages processes share. So the watcher takes either look only when the cheap resident count has grown. It
//! reads smaps less often if one process holds nearly everything. Watching takes about 1 % of the time.

use super::proof::Allocator;
use super::tree::{self, MemoryUse};
use crate::pages::PageSettings;
use crate::pages::mechanism::LargePages;
use crate::procfs::{ProcessMemory, Root, process_memory, smaps_rollup};
use crate::sys::pagemap::{self, PAGE_IS_FILE, PAGE_IS_HUGE, PAGE_IS_PFNZERO, PageRange};
use pagetax_core::counter::Reading;
use pagetax_core::units::PageSize;
use rustix::process::Pid;
use rustix::time::{ClockId, clock_gettime};
use std::collections::HashMap;
use std::fs::File;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Each kind of look may take one part in this many of the time.
const LOOK_SHARE: u32 = 250;
/// A process holds nearly everything if the others together hold less than one part in this many of its
/// memory.
const OTHERS_PART: u64 = 20;
/// Lists of processes and reads of resident counts may each take one part in this many of the time.
const QUICK_SHARE: u32 = 500;
/// The pace is this part of the time so far, and a shorter peak is missed. Each look wakes a thread, which
/// costs more than the look itself if a hypervisor provides the timers.
const PACE_SHARE: u32 = 50;
/// The pace at the start of a run.
const PACE_MIN: Duration = Duration::from_millis(2);
/// The slowest pace.
const PACE_MAX: Duration = Duration::from_millis(250);
/// A look at less than this share of the peak has missed the peak.
const NEAR_PEAK: f64 = 0.8;
/// If two looks are further apart than this part of the run, the last one may have been below [`NEAR_PEAK`]
/// of memory that grows steadily.
const GAP_SHARE: u32 = 5;
/// The time between two looks at a plateau: khugepaged may have collapsed pages meanwhile.
const PLATEAU: Duration = Duration::from_millis(500);

/// The end of user space with page tables of four levels.
const USER_END: u64 = (1 << 47) - 4096;

/// The memory of all processes of a command at their peak.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Peak {
    /// Resident bytes with hugetlb pages. Each shared page counts once (PSS).
    pub resident_bytes: u64,
    /// Anonymous bytes of all processes, with hugetlb pages.
    pub anon_bytes: u64,
    /// The part of them on transparent huge pages of the PMD size.
    pub thp_bytes: u64,
    /// The part of them on hugetlb pages.
    pub hugetlb_bytes: u64,
    /// The growth of transparent huge pages below the PMD size on the whole system, in bytes. It is only
    /// measured if the recipe asks for such a size.
    pub mthp_bytes: Option<u64>,
    /// Bytes that page-table entries above the base level map, by PAGEMAP_SCAN: all of the above, and
    /// files. `None` before Linux 6.7.
    pub huge_mapped_bytes: Option<u64>,
    /// Bytes of page tables of all processes.
    pub page_table_bytes: u64,
    /// The number of processes at that time.
    pub process_count: usize,
    /// Resident bytes at the last look at page sizes, which may be fewer than at the peak.
    pub looked_at_bytes: u64,
    /// True if looks were so far apart that the peak may have been above `resident_bytes`.
    pub is_lower_bound: bool,
}

impl Peak {
    /// Adds the kernel's own maximum, which is of the largest process: it is exact if there is one process
    /// alone. The kernel starts it at the size of the process that forked, so a lower value shows nothing.
    pub(super) fn add_kernels_own(&mut self, resident_bytes_max: u64, floor_bytes: u64) {
        if resident_bytes_max > floor_bytes {
            self.resident_bytes = self.resident_bytes.max(resident_bytes_max + self.hugetlb_bytes);
            let is_of_one = self.process_count == 1 && self.was_looked_at();
            self.is_lower_bound &= !is_of_one;
        }
    }

    /// Returns true if the last look at page sizes was near the peak.
    pub(super) fn was_looked_at(&self) -> bool {
        self.looked_at_bytes as f64 >= NEAR_PEAK * self.resident_bytes as f64
    }

    /// Returns anonymous memory at the peak, by the kind of its pages.
    pub(super) fn large_pages(&self) -> LargePages {
        LargePages {
            anon_bytes: self.anon_bytes,
            thp_bytes: self.thp_bytes,
            hugetlb_bytes: self.hugetlb_bytes,
            folio_bytes: self.mthp_bytes,
        }
    }

    /// Returns the resident bytes at the peak if they are more than a lower bound.
    pub fn known_resident_bytes(&self) -> Option<u64> {
        (!self.is_lower_bound).then_some(self.resident_bytes)
    }
}

/// The observations of one run's memory.
#[derive(Debug, Default)]
pub struct Observations {
    pub peak: Option<Peak>,
    pub allocator: Option<Allocator>,
    pub watch_ns: u64,
    pub brief_count: usize,
}

/// A thread that watches until it is stopped.
pub struct MemorySampler {
    stop: Sender<()>,
    thread: JoinHandle<Observations>,
}

impl MemorySampler {
    /// Begins to watch the process and its descendants.
    pub fn start(root: Pid, mthp: Option<PageSize>) -> MemorySampler {
        let (stop, stopped) = channel();
        let thread = std::thread::spawn(move || SamplerThread::new(root, mthp).watch(&stopped));
        MemorySampler { stop, thread }
    }

    /// Stops watching and returns the observations.
    pub fn stop(self) -> Observations {
        drop(self.stop);
        self.thread.join().unwrap_or_default()
    }
}

/// Returns the CPU time of this thread: the cost of watching, however busy the machine is.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The two ways to look at page sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Look {
    /// Reads smaps_rollup of all processes.
    Full,
    /// Calls PAGEMAP_SCAN, which counts shared pages once for each process: for one that holds nearly
    /// everything.
    Quick,
}

/// The time and the cost of the last look of one kind.
#[derive(Debug, Clone, Copy)]
struct Taken {
    at: Instant,
    cost: Duration,
}

impl Taken {
    /// Returns true if the next look stays within its share of the time.
    fn is_past(taken: Option<Taken>, now: Instant) -> bool {
        taken.is_none_or(|taken| now - taken.at > taken.cost * LOOK_SHARE)
    }
}

/// The facts about a process that was on a list.
#[derive(Debug, Clone, Copy, Default)]
struct Listed {
    /// The number of lists that it was on.
    lists: u32,
    /// The most memory that it was seen to hold.
    bytes: u64,
}

struct SamplerThread {
    root: Pid,
    start: Instant,
    tree: tree::ProcessTree,
    processes: Vec<Pid>,
    listed: HashMap<Pid, Listed>,
    processes_listed: Option<Instant>,
    list_cost: Duration,
    full: Option<Taken>,
    quick: Option<Taken>,
    /// The time of the last look of any kind, and the bytes that were resident then.
    last_look: Option<(Instant, u64)>,
    mthp: Option<(PageSize, u64)>,
    /// The largest process and its memory when its allocator was last looked for.
    allocator_of: Option<MemoryUse>,
    /// True if the system has hugetlb pages. Else no process is asked for its own.
    has_hugetlb: bool,
    seen: Observations,
}

impl SamplerThread {
    fn new(root: Pid, mthp: Option<PageSize>) -> SamplerThread {
        let settings = PageSettings::host();
        let folios = |size| settings.folios(size).map(|before| (size, before));
        let has_hugetlb =
            settings.hugetlb_sizes().iter().any(|size| settings.hugetlb_pages(*size) > Some(0));
        SamplerThread {
            root,
            start: Instant::now(),
            tree: tree::ProcessTree::default(),
            processes: vec![root],
            listed: HashMap::new(),
            processes_listed: None,
            list_cost: Duration::ZERO,
            full: None,
            quick: None,
            last_look: None,
            mthp: mthp.and_then(folios),
            allocator_of: None,
            has_hugetlb,
            seen: Observations::default(),
        }
    }

    fn watch(mut self, stopped: &Receiver<()>) -> Observations {
        let mut pace = PACE_MIN;
        let (mut last, mut gap) = (self.start, Duration::ZERO);
        while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(pace) {
            let now = Instant::now();
            (last, gap) = (now, gap.max(now - last));
            self.list_processes(now);
            let before = cpu_time();
            let held = self.held();
            for of in &held {
                let listed = self.listed.entry(of.pid).or_default();
                listed.bytes = listed.bytes.max(of.bytes());
            }
            let affordable = (cpu_time() - before) * QUICK_SHARE;
            pace = affordable.max(self.start.elapsed() / PACE_SHARE).clamp(PACE_MIN, PACE_MAX);
            if let Some(look) = self.next_look(now, &held) {
                self.look(look, now, &held);
            }
        }
        let end = Instant::now();
        if let Some(peak) = &mut self.seen.peak {
            peak.is_lower_bound = gap.max(end - last) > (end - self.start) / GAP_SHARE;
        }
        self.seen.brief_count = self.brief_count();
        self.seen.watch_ns = cpu_time().as_nanos() as u64;
        self.seen
    }

    fn held(&self) -> Vec<MemoryUse> {
        let held = self.processes.iter().filter_map(|pid| MemoryUse::by(*pid));
        match self.has_hugetlb {
            true => held.map(MemoryUse::with_hugetlb).collect(),
            false => held.collect(),
        }
    }

    /// Lists the processes if a list is due. It costs a walk over /proc, so it has its own pace. At first
    /// it is due each time that the run has grown by half, because the children of a short program may end
    /// soon.
    fn list_processes(&mut self, now: Instant) {
        let due = self.processes_listed.is_none_or(|last| {
            now - last > self.list_cost * QUICK_SHARE || now - last > (last - self.start) / 2
        });
        if due {
            let before = cpu_time();
            self.processes = self.tree.descendants(self.root);
            self.processes.push(self.root);
            for pid in &self.processes {
                self.listed.entry(*pid).or_default().lists += 1;
            }
            (self.processes_listed, self.list_cost) = (Some(now), cpu_time() - before);
        }
    }

    /// Returns the number of processes that had ended by the next list and held so much that it may matter
    /// to the peak. Others may have been on no list at all.
    fn brief_count(&self) -> usize {
        let peak = self.seen.peak.map_or(0, |peak| peak.resident_bytes);
        let is_brief = |(pid, of): &(&Pid, &Listed)| {
            of.lists == 1 && !self.processes.contains(pid) && of.bytes * OTHERS_PART >= peak
        };
        self.listed.iter().filter(is_brief).count()
    }

    /// Returns the look that is due. There is none before memory has grown.
    fn next_look(&self, now: Instant, held: &[MemoryUse]) -> Option<Look> {
        let all = MemoryUse::total(held);
        let Some((last, seen)) = self.last_look else { return (all > 0).then_some(Look::Full) };
        let grown = all > seen + seen / 20;
        if !grown && (now - last < PLATEAU || all < seen) {
            return None;
        }
        // The program may end before the share allows the next look. Steps of a quarter are few.
        let is_free = all >= seen + seen / 4;
        match one_holds_nearly_all(held) {
            _ if Taken::is_past(self.full, now) => Some(Look::Full),
            true if is_free || Taken::is_past(self.quick, now) => Some(Look::Quick),
            false if is_free => Some(Look::Full),
            _ => None,
        }
    }

    fn look(&mut self, look: Look, now: Instant, held: &[MemoryUse]) {
        let before = cpu_time();
        // Older kernels have no quick look.
        let quick = match look {
            Look::Full => None,
            Look::Quick => quick_look(&self.processes),
        };
        self.note(quick.unwrap_or_else(|| full_look(&self.processes)), held);
        self.last_look = Some((now, MemoryUse::total(held)));
        let taken = Some(Taken { at: now, cost: cpu_time() - before });
        match look {
            Look::Full => self.full = taken,
            Look::Quick => self.quick = taken,
        }
    }

    /// Finds the allocator in the mappings of the largest process, unless it is known. They cost as much as
    /// a look.
    fn note_allocator(&mut self, held: &[MemoryUse]) {
        let Some(largest) = MemoryUse::largest(held) else { return };
        let is_known = |of: &MemoryUse| of.pid == largest.pid && largest.bytes() < 4 * of.bytes();
        if !self.allocator_of.as_ref().is_some_and(is_known) {
            self.allocator_of = Some(largest);
            self.seen.allocator = Allocator::of(largest.pid).or(self.seen.allocator.take());
        }
    }

    fn note(&mut self, mut peak: Peak, held: &[MemoryUse]) {
        peak.looked_at_bytes = peak.resident_bytes;
        peak.mthp_bytes = self.mthp.map(|(size, before)| {
            let folios = PageSettings::host().folios(size).unwrap_or(before);
            folios.saturating_sub(before) * size.bytes()
        });
        if self.seen.peak.is_none_or(|seen| peak.resident_bytes >= seen.resident_bytes) {
            self.seen.peak = Some(peak);
            self.note_allocator(held);
        }
    }
}

/// Returns true if one process holds nearly everything. It then shares next to nothing with the others.
fn one_holds_nearly_all(held: &[MemoryUse]) -> bool {
    let largest = MemoryUse::largest(held).map_or(0, |largest| largest.bytes());
    MemoryUse::total(held).saturating_sub(largest) < largest / OTHERS_PART
}

fn full_look(processes: &[Pid]) -> Peak {
    let mut peak = Peak { process_count: processes.len(), ..Peak::default() };
    for pid in processes {
        add_rollup(&mut peak, *pid);
        peak.page_table_bytes += memory_of(*pid).page_table_bytes.value().unwrap_or(0);
    }
    let mapped = |pid: &Pid| Some(huge_ranges(*pid)?.iter().map(length).sum::<u64>());
    peak.huge_mapped_bytes = processes.iter().map(mapped).sum();
    peak
}

/// Takes a look by PAGEMAP_SCAN; `None` if the kernel does not have it.
fn quick_look(processes: &[Pid]) -> Option<Peak> {
    let mut peak = Peak { process_count: processes.len(), ..Peak::default() };
    let mut huge_mapped_bytes = 0;
    for pid in processes {
        let (memory, huge) = (memory_of(*pid), huge_ranges(*pid)?);
        let bytes = |reading: &Reading| reading.value().unwrap_or(0);
        let is_anon = |range: &&PageRange| range.categories & (PAGE_IS_FILE | PAGE_IS_PFNZERO) == 0;
        let hugetlb_bytes = bytes(&memory.hugetlb_bytes);
        let huge_anon_bytes: u64 = huge.iter().filter(is_anon).map(length).sum();
        peak.resident_bytes += bytes(&memory.resident_bytes) + hugetlb_bytes;
        peak.anon_bytes += bytes(&memory.anon_bytes) + hugetlb_bytes;
        peak.thp_bytes += huge_anon_bytes.saturating_sub(hugetlb_bytes);
        peak.hugetlb_bytes += hugetlb_bytes;
        peak.page_table_bytes += bytes(&memory.page_table_bytes);
        huge_mapped_bytes += huge.iter().map(length).sum::<u64>();
    }
    peak.huge_mapped_bytes = Some(huge_mapped_bytes);
    Some(peak)
}

fn length(range: &PageRange) -> u64 {
    range.end - range.start
}

/// Returns the ranges on huge pages by PAGEMAP_SCAN. A second scan of these alone finds which are of a file
/// or the zero page, because for that the kernel reads the data of each page. Empty if the process has
/// ended, and `None` if the kernel does not have the call.
fn huge_ranges(pid: Pid) -> Option<Vec<PageRange>> {
    let Ok(map) = File::open(format!("/proc/{}/pagemap", pid.as_raw_nonzero())) else {
        return Some(Vec::new());
    };
    let huge = match pagemap::scan(&map, 0, USER_END, PAGE_IS_HUGE) {
        Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => return None,
        found => found.unwrap_or_default(),
    };
    let wanted = PAGE_IS_FILE | PAGE_IS_PFNZERO;
    let kinds = |range: &PageRange| {
        pagemap::scan_any(&map, range.start, range.end, PAGE_IS_HUGE, wanted).unwrap_or_default()
    };
    Some(huge.iter().flat_map(kinds).collect())
}

fn memory_of(pid: Pid) -> ProcessMemory {
    process_memory(&Root::default(), pid.as_raw_nonzero().get() as u32)
}

/// Adds one process's smaps_rollup. A process that has ended adds nothing.
fn add_rollup(peak: &mut Peak, pid: Pid) {
    let pid = pid.as_raw_nonzero().get() as u32;
    let Ok(whole) = smaps_rollup(&Root::default(), pid) else { return };
    let bytes = |key: &str| whole.get(key).copied().unwrap_or(0);
    let pool_bytes = bytes("Private_Hugetlb") + bytes("Shared_Hugetlb");
    peak.resident_bytes += bytes("Pss") + pool_bytes;
    peak.anon_bytes += bytes("Anonymous") + pool_bytes;
    peak.thp_bytes += bytes("AnonHugePages");
    peak.hugetlb_bytes += pool_bytes;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alone::ran_alone;
    use crate::sys::mapping::{OwnedMapping, Request, Source};

    #[test]
    fn a_process_is_seen_with_its_memory() {
        let memory = vec![1u8; 32 << 20];
        // On a busy machine the first look is late.
        let look = |turn: u32| {
            let sampler = MemorySampler::start(rustix::process::getpid(), None);
            std::thread::sleep(Duration::from_millis(100) * 2u32.pow(turn));
            std::hint::black_box(&memory);
            sampler.stop().peak
        };
        let peak = (0..10).find_map(look).unwrap();
        assert!(peak.anon_bytes >= 32 << 20 && peak.resident_bytes >= 32 << 20, "{peak:?}");
        assert!(peak.process_count >= 1);
    }

    #[test]
    fn both_looks_see_the_same() {
        if ran_alone() {
            return;
        }
        let request =
            Request { source: Source::Anon, len: 64 << 20, align: 2 << 20, hugetlb: None };
        let mapping = OwnedMapping::new(request).unwrap();
        let own = [rustix::process::getpid()];
        for (advice, range) in [(libc::MADV_NOHUGEPAGE, 0..16), (libc::MADV_HUGEPAGE, 16..64)] {
            mapping.advise(advice).unwrap();
            range.for_each(|mb| {
                (0..256).for_each(|page| mapping.store((mb << 20) + (page << 12), 1))
            });
        }
        let Some(quick) = quick_look(&own) else {
            return assert!(huge_ranges(own[0]).is_none(), "a kernel with PAGEMAP_SCAN");
        };
        let full = full_look(&own);
        let alike = |a: u64, b: u64| a.abs_diff(b) < 4 << 20;
        assert!(alike(quick.anon_bytes, full.anon_bytes), "{quick:?} {full:?}");
        assert!(alike(quick.thp_bytes, full.thp_bytes), "{quick:?} {full:?}");
        assert!(alike(quick.resident_bytes, full.resident_bytes + (2 << 20)), "{quick:?} {full:?}");
        assert!(quick.anon_bytes >= 64 << 20 && quick.page_table_bytes > 0, "{quick:?}");
        assert_eq!(quick.process_count, 1);
    }

    #[test]
    fn brief_processes_count_where_their_memory_may_matter() {
        let [root, large, small] = [1, 2, 3].map(|pid| Pid::from_raw(pid).unwrap());
        let mut thread = SamplerThread::new(root, None);
        let mut counts = |brief: &[(Pid, u32, u64)]| {
            thread.listed = brief
                .iter()
                .map(|(pid, lists, bytes)| (*pid, Listed { lists: *lists, bytes: *bytes }))
                .collect();
            thread.seen.peak = Some(Peak { resident_bytes: 100, ..Peak::default() });
            thread.brief_count()
        };
        assert_eq!(counts(&[(root, 1, 90), (small, 1, 4)]), 0, "a wrapper that ran something else");
        assert_eq!(counts(&[(root, 1, 90), (large, 1, 30), (small, 1, 4)]), 1);
        assert_eq!(counts(&[(root, 1, 90), (large, 2, 30), (small, 1, 4)]), 0, "watched for long");
    }

    #[test]
    fn nearly_everything_is_all_but_a_twentieth() {
        let [a, b] = [1, 2].map(|pid| Pid::from_raw(pid).unwrap());
        let held = |pid, anon_bytes| MemoryUse { pid, anon_bytes, shared_bytes: 20 };
        assert!(one_holds_nearly_all(&[held(a, 80), held(b, 4)]));
        assert!(!one_holds_nearly_all(&[held(a, 80), held(b, 6)]));
        assert!(!one_holds_nearly_all(&[]));
    }

    #[test]
    fn the_kernels_maximum_counts_only_above_its_floor() {
        let (resident_bytes, is_lower_bound, process_count) = (5, true, 1);
        let looked = Peak {
            resident_bytes,
            is_lower_bound,
            process_count,
            looked_at_bytes: 5,
            ..Peak::default()
        };
        let added = |peak: Peak, max, floor| {
            let mut peak = peak;
            peak.add_kernels_own(max, floor);
            (peak.resident_bytes, peak.known_resident_bytes())
        };
        assert_eq!(added(looked, 10, 10), (5, None));
        assert_eq!(added(looked, 6, 4), (6, Some(6)));
        assert_eq!(added(looked, 7, 4), (7, None), "it was not this process that had them");
        assert_eq!(added(Peak { process_count: 2, ..looked }, 6, 4), (6, None));
    }

    #[test]
    fn a_run_that_was_hardly_looked_at_has_no_known_peak() {
        let memory = vec![1u8; 32 << 20];
        let known = |duration| {
            let sampler = MemorySampler::start(rustix::process::getpid(), None);
            std::thread::sleep(duration);
            std::hint::black_box(&memory);
            sampler.stop().peak.and_then(|peak| peak.known_resident_bytes())
        };
        // The first look is no earlier than after 2 ms.
        assert!((0..10).any(|_| known(Duration::from_millis(4)).is_none()));
        let later = (0..10).find_map(|turn| known(Duration::from_millis(400) * 2u32.pow(turn)));
        assert!(later.is_some_and(|bytes| bytes >= 32 << 20), "{later:?}");
    }
}
