//! Watches a command's memory while it runs: how much at its peak, and on which page sizes.
//!
//! The kernel walks the page tables for smaps_rollup, some 8 us a megabyte of base pages, and whoever maps
//! memory meanwhile waits. PAGEMAP_SCAN costs a tenth of it and tells all but what processes share. So both
//! are asked only when the cheap resident count has grown, and smaps less often where one process holds
//! nearly everything. The shares of time that watching may take add up to about 1 %.

use super::proof::Allocator;
use super::tree::{self, Held};
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

/// Looks at page sizes may take one part in this many of the time; of each kind.
const LOOK_SHARE: u32 = 250;
/// What all other processes together hold, at most, where one is said to hold nearly everything: one part in
/// this many.
const OTHERS_PART: u64 = 20;
/// Lists of processes, and looks at resident counts, may each take one part in this many.
const QUICK_SHARE: u32 = 500;
/// The pace is this part of the time so far: a peak that is held for less is not seen. Each look wakes
/// a thread, which costs more than the look where timers are a hypervisor's.
const PACE_SHARE: u32 = 50;
/// The pace at the start.
const PACE_MIN: Duration = Duration::from_millis(2);
/// The pace at worst.
const PACE_MAX: Duration = Duration::from_millis(250);
/// A look at less than this share of the peak has missed it.
const NEAR_PEAK: f64 = 0.8;
/// In a run with two looks further apart than this part of it, memory that grows steadily may have been seen
/// at less than [`NEAR_PEAK`].
const GAP_SHARE: u32 = 5;
/// A plateau is looked at again after this long: khugepaged may have been at work.
const PLATEAU: Duration = Duration::from_millis(500);

/// Where addresses of user space end, with page tables of four levels.
const USER_END: u64 = (1 << 47) - 4096;

/// Memory of all processes of a command when they had most of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Peak {
    /// Resident, each shared page counted once (PSS), with hugetlb.
    pub resident_bytes: u64,
    /// Anonymous memory of all processes, with hugetlb.
    pub anon_bytes: u64,
    /// Of that, on transparent huge pages of the PMD size.
    pub thp_bytes: u64,
    /// Of that, on hugetlb pages.
    pub hugetlb_bytes: u64,
    /// On transparent pages below the PMD size, on the whole system, above what there was before;
    /// only where the recipe asks for such a size.
    pub mthp_bytes: Option<u64>,
    /// On entries of the page table above the base level, by PAGEMAP_SCAN: all of the above and
    /// files; none before Linux 6.7.
    pub huge_mapped_bytes: Option<u64>,
    /// Page tables of all processes.
    pub page_table_bytes: u64,
    /// How many processes there were.
    pub process_count: usize,
    /// Resident when page sizes were last looked at, which may be short of the peak.
    pub looked_at_bytes: u64,
    /// Looks were so far apart that there may have been more than `resident_bytes`.
    pub is_lower_bound: bool,
}

impl Peak {
    /// The kernel's own maximum is of the largest process, so it is exact where one has it all. It begins at
    /// the size of the process that forked, so it says nothing below that.
    pub(super) fn add_kernels_own(&mut self, resident_bytes_max: u64, floor_bytes: u64) {
        if resident_bytes_max > floor_bytes {
            self.resident_bytes = self.resident_bytes.max(resident_bytes_max + self.hugetlb_bytes);
            let is_of_one = self.process_count == 1 && self.was_looked_at();
            self.is_lower_bound &= !is_of_one;
        }
    }

    /// Whether page sizes were looked at when there was nearly as much memory as at the peak.
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

    /// Resident at the peak, if it is known.
    pub fn known_resident_bytes(&self) -> Option<u64> {
        (!self.is_lower_bound).then_some(self.resident_bytes)
    }
}

/// What a sampler has seen.
#[derive(Debug, Default)]
pub struct Seen {
    pub peak: Option<Peak>,
    pub allocator: Option<Allocator>,
    pub watch_ns: u64,
    pub brief_count: usize,
}

/// A thread that watches until it is stopped.
pub struct Sampler {
    stop: Sender<()>,
    thread: JoinHandle<Seen>,
}

impl Sampler {
    /// Begins to watch the process and its descendants.
    pub fn start(root: Pid, mthp: Option<PageSize>) -> Sampler {
        let (stop, stopped) = channel();
        let thread = std::thread::spawn(move || Watcher::new(root, mthp).watch(&stopped));
        Sampler { stop, thread }
    }

    /// What was seen.
    pub fn stop(self) -> Seen {
        drop(self.stop);
        self.thread.join().unwrap_or_default()
    }
}

/// CPU time of this thread: what watching costs, whoever else wants the CPU.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// How to look at page sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Look {
    /// By smaps of all processes.
    Full,
    /// By PAGEMAP_SCAN, which does not tell what processes share: where one holds nearly everything.
    Quick,
}

/// When one kind of look was taken, and what it cost.
#[derive(Debug, Clone, Copy)]
struct Taken {
    at: Instant,
    cost: Duration,
}

impl Taken {
    /// Whether the next one is within its share of the time.
    fn is_past(taken: Option<Taken>, now: Instant) -> bool {
        taken.is_none_or(|taken| now - taken.at > taken.cost * LOOK_SHARE)
    }
}

struct Watcher {
    root: Pid,
    start: Instant,
    family: tree::Family,
    processes: Vec<Pid>,
    /// On how many lists each process was that has been on any.
    listed: HashMap<Pid, u32>,
    processes_listed: Option<Instant>,
    list_cost: Duration,
    full: Option<Taken>,
    quick: Option<Taken>,
    /// When the last look of any kind was taken, and what was held.
    last_look: Option<(Instant, u64)>,
    mthp: Option<(PageSize, u64)>,
    /// The largest process and what it held when its allocator was last looked for.
    allocator_of: Option<Held>,
    /// Whether there are hugetlb pages to be had: only then it is worth asking who holds some.
    has_hugetlb: bool,
    seen: Seen,
}

impl Watcher {
    fn new(root: Pid, mthp: Option<PageSize>) -> Watcher {
        let settings = PageSettings::host();
        let folios = |size| settings.folios(size).map(|before| (size, before));
        let has_hugetlb =
            settings.hugetlb_sizes().iter().any(|size| settings.hugetlb_pages(*size) > Some(0));
        Watcher {
            root,
            start: Instant::now(),
            family: tree::Family::default(),
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
            seen: Seen::default(),
        }
    }

    fn watch(mut self, stopped: &Receiver<()>) -> Seen {
        let mut pace = PACE_MIN;
        let (mut last, mut gap) = (self.start, Duration::ZERO);
        while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(pace) {
            let now = Instant::now();
            (last, gap) = (now, gap.max(now - last));
            self.list_processes(now);
            let before = cpu_time();
            let held = self.held();
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

    fn held(&self) -> Vec<Held> {
        let held = self.processes.iter().filter_map(|pid| Held::by(*pid));
        match self.has_hugetlb {
            true => held.map(Held::with_hugetlb).collect(),
            false => held.collect(),
        }
    }

    /// The list of processes costs a walk over /proc, so it has a pace of its own. At first it is made each
    /// time that the run has grown by half: what a short program starts may be over before the next is due.
    fn list_processes(&mut self, now: Instant) {
        let due = self.processes_listed.is_none_or(|last| {
            now - last > self.list_cost * QUICK_SHARE || now - last > (last - self.start) / 2
        });
        if due {
            let before = cpu_time();
            self.processes = self.family.descendants(self.root);
            self.processes.push(self.root);
            for pid in &self.processes {
                *self.listed.entry(*pid).or_default() += 1;
            }
            (self.processes_listed, self.list_cost) = (Some(now), cpu_time() - before);
        }
    }

    /// Processes that were gone by the next list: there may have been others that were on none.
    fn brief_count(&self) -> usize {
        let gone = |pid: &Pid| !self.processes.contains(pid);
        self.listed.iter().filter(|(pid, lists)| **lists == 1 && gone(pid)).count()
    }

    /// The look that is due; none before memory has grown.
    fn next_look(&self, now: Instant, held: &[Held]) -> Option<Look> {
        let all = Held::total(held);
        let Some((last, seen)) = self.last_look else { return (all > 0).then_some(Look::Full) };
        let grown = all > seen + seen / 20;
        if !grown && (now - last < PLATEAU || all < seen) {
            return None;
        }
        // A program may be over before the share allows the next look. There are few such steps.
        let is_free = all >= seen + seen / 4;
        match one_holds_nearly_all(held) {
            _ if Taken::is_past(self.full, now) => Some(Look::Full),
            true if is_free || Taken::is_past(self.quick, now) => Some(Look::Quick),
            false if is_free => Some(Look::Full),
            _ => None,
        }
    }

    fn look(&mut self, look: Look, now: Instant, held: &[Held]) {
        let before = cpu_time();
        // What a quick look does not tell, as on older kernels, a full one does.
        let quick = match look {
            Look::Full => None,
            Look::Quick => quick_look(&self.processes),
        };
        self.note(quick.unwrap_or_else(|| full_look(&self.processes)), held);
        self.last_look = Some((now, Held::total(held)));
        let taken = Some(Taken { at: now, cost: cpu_time() - before });
        match look {
            Look::Full => self.full = taken,
            Look::Quick => self.quick = taken,
        }
    }

    /// The allocator shows in a process's mappings, once it has begun; to read them costs as much as a look.
    fn note_allocator(&mut self, held: &[Held]) {
        let Some(largest) = Held::largest(held) else { return };
        let is_known = |of: &Held| of.pid == largest.pid && largest.bytes() < 4 * of.bytes();
        if !self.allocator_of.as_ref().is_some_and(is_known) {
            self.allocator_of = Some(largest);
            self.seen.allocator = Allocator::of(largest.pid).or(self.seen.allocator.take());
        }
    }

    fn note(&mut self, mut peak: Peak, held: &[Held]) {
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

/// Whether one process holds nearly everything. What it shares with the others is next to nothing then.
fn one_holds_nearly_all(held: &[Held]) -> bool {
    let largest = Held::largest(held).map_or(0, |largest| largest.bytes());
    Held::total(held).saturating_sub(largest) < largest / OTHERS_PART
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

/// None if the kernel has no PAGEMAP_SCAN.
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

/// By PAGEMAP_SCAN, which skips what is not mapped; whether they are of a file or the page of zeros is asked of
/// huge pages alone, as the answer takes a look at each page's own data. Empty if the process has ended,
/// none if the kernel does not know the call.
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

/// Adds one process's /proc/PID/smaps_rollup; nothing if it has ended.
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
        // Where others want the CPUs, its first look is late.
        let look = |turn: u32| {
            let sampler = Sampler::start(rustix::process::getpid(), None);
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
    fn nearly_everything_is_all_but_a_twentieth() {
        let [a, b] = [1, 2].map(|pid| Pid::from_raw(pid).unwrap());
        let held = |pid, anon_bytes| Held { pid, anon_bytes, shared_bytes: 20 };
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
            let sampler = Sampler::start(rustix::process::getpid(), None);
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
