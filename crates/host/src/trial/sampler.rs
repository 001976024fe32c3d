//! Watches a command's memory while it runs: how much at its peak, and on which page sizes.
//!
//! The kernel walks the page tables for smaps_rollup, so it is only asked when the cheap resident
//! count has grown, and the shares of time that watching may take add up to less than 1 %.

use super::proof::Allocator;
use super::tree;
use crate::pagesize::PageSettings;
use crate::procfs::{Root, process_memory};
use crate::sys::pagemap::{self, PAGE_IS_HUGE};
use pagetax_core::units::PageSize;
use rustix::process::Pid;
use rustix::time::{ClockId, clock_gettime};
use std::collections::HashMap;
use std::fs::File;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Looks at page sizes may take one part in this many of the time.
const LOOK_SHARE: u32 = 250;
/// The first looks, one after each growth, are not held back: a program may be over before the next is due.
const LOOKS_FREE: u32 = 10;
/// Lists of processes, and looks at resident counts, may each take one part in this many.
const QUICK_SHARE: u32 = 500;
/// The pace is this part of the time so far: a peak that is held for less is not seen. Each look wakes
/// a thread, which costs more than the look where timers are a hypervisor's.
const PACE_SHARE: u32 = 50;
/// The pace at the start.
const PACE_MIN: Duration = Duration::from_millis(2);
/// The pace at worst.
const PACE_MAX: Duration = Duration::from_millis(250);
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
}

impl Peak {
    /// The kernel's own maximum is exact where one process has it all. It begins at the size of
    /// the process that forked, so it says nothing below that.
    pub(super) fn add_kernels_own(&mut self, resident_bytes_max: u64, floor_bytes: u64) {
        if resident_bytes_max > floor_bytes {
            self.resident_bytes = self.resident_bytes.max(resident_bytes_max + self.hugetlb_bytes);
        }
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

struct Watcher {
    root: Pid,
    family: tree::Family,
    processes: Vec<Pid>,
    /// On how many lists each process was that has been on any.
    listed: HashMap<Pid, u32>,
    processes_listed: Option<Instant>,
    list_cost: Duration,
    last_look: Option<(Instant, Duration, u64)>,
    looks: u32,
    mthp: Option<(PageSize, u64)>,
    seen: Seen,
}

impl Watcher {
    fn new(root: Pid, mthp: Option<PageSize>) -> Watcher {
        let folios = |size| PageSettings::host().folios(size).map(|before| (size, before));
        Watcher {
            root,
            family: tree::Family::default(),
            processes: vec![root],
            listed: HashMap::new(),
            processes_listed: None,
            list_cost: Duration::ZERO,
            last_look: None,
            looks: 0,
            mthp: mthp.and_then(folios),
            seen: Seen::default(),
        }
    }

    fn watch(mut self, stopped: &Receiver<()>) -> Seen {
        let (start, mut pace) = (Instant::now(), PACE_MIN);
        while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(pace) {
            let now = Instant::now();
            self.list_processes(now);
            let before = cpu_time();
            let resident: u64 =
                self.processes.iter().filter_map(|pid| tree::resident_bytes(*pid)).sum();
            let affordable = (cpu_time() - before) * QUICK_SHARE;
            pace = affordable.max(start.elapsed() / PACE_SHARE).clamp(PACE_MIN, PACE_MAX);
            if self.worth_a_look(now, resident) {
                self.look(now, resident);
            }
        }
        self.seen.brief_count = self.brief_count();
        self.seen.watch_ns = cpu_time().as_nanos() as u64;
        self.seen
    }

    /// The list of processes costs a walk over /proc, so it has a pace of its own.
    fn list_processes(&mut self, now: Instant) {
        let due =
            self.processes_listed.is_none_or(|last| now - last > self.list_cost * QUICK_SHARE);
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

    fn worth_a_look(&self, now: Instant, resident: u64) -> bool {
        let Some((last, cost, seen)) = self.last_look else { return resident > 0 };
        let since = now - last;
        let grown = resident > seen + seen / 20;
        let is_due = self.looks < LOOKS_FREE || since > cost * LOOK_SHARE;
        is_due && (grown || (since > PLATEAU && resident >= seen))
    }

    fn look(&mut self, now: Instant, resident: u64) {
        let before = cpu_time();
        let mut peak = Peak { process_count: self.processes.len(), ..Peak::default() };
        for pid in &self.processes {
            add_rollup(&mut peak, *pid);
            peak.page_table_bytes += page_table_bytes(*pid);
        }
        peak.mthp_bytes = self.mthp.map(|(size, before)| {
            let folios = PageSettings::host().folios(size).unwrap_or(before);
            folios.saturating_sub(before) * size.bytes()
        });
        peak.huge_mapped_bytes = self.processes.iter().map(|pid| huge_mapped_bytes(*pid)).sum();
        peak.looked_at_bytes = peak.resident_bytes;
        if self.seen.peak.is_none_or(|seen| peak.resident_bytes >= seen.resident_bytes) {
            self.seen.peak = Some(peak);
            let largest = self.processes.iter().max_by_key(|pid| tree::resident_bytes(**pid));
            let allocator = largest.and_then(|pid| Allocator::of(*pid));
            self.seen.allocator = allocator.or(self.seen.allocator.take());
        }
        self.looks += 1;
        self.last_look = Some((now, cpu_time() - before, resident));
    }
}

/// By PAGEMAP_SCAN, which skips what is not mapped; 0 if the process has ended, none if the kernel
/// does not know the call.
fn huge_mapped_bytes(pid: Pid) -> Option<u64> {
    let Ok(map) = File::open(format!("/proc/{}/pagemap", pid.as_raw_nonzero())) else {
        return Some(0);
    };
    match pagemap::scan(&map, 0, USER_END, PAGE_IS_HUGE) {
        Ok(ranges) => Some(ranges.iter().map(|range| range.end - range.start).sum()),
        Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => None,
        Err(_) => Some(0),
    }
}

fn page_table_bytes(pid: Pid) -> u64 {
    let pid = pid.as_raw_nonzero().get() as u32;
    process_memory(&Root::default(), pid).page_table_bytes.value().unwrap_or(0)
}

/// Adds one process's /proc/PID/smaps_rollup; nothing if it has ended.
fn add_rollup(peak: &mut Peak, pid: Pid) {
    let path = format!("/proc/{}/smaps_rollup", pid.as_raw_nonzero());
    let text = std::fs::read_to_string(path).unwrap_or_default();
    for line in text.lines() {
        let Some((key, rest)) = line.split_once(':') else { continue };
        let Some(bytes) = rest.trim().strip_suffix(" kB").and_then(|kb| kb.parse::<u64>().ok())
        else {
            continue;
        };
        let bytes = bytes * 1024;
        match key {
            "Pss" => peak.resident_bytes += bytes,
            "Anonymous" => peak.anon_bytes += bytes,
            "AnonHugePages" => peak.thp_bytes += bytes,
            "Private_Hugetlb" | "Shared_Hugetlb" => {
                peak.hugetlb_bytes += bytes;
                peak.resident_bytes += bytes;
                peak.anon_bytes += bytes;
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_seen_with_its_memory() {
        let memory = vec![1u8; 32 << 20];
        let sampler = Sampler::start(rustix::process::getpid(), None);
        std::thread::sleep(Duration::from_millis(100));
        std::hint::black_box(&memory);
        let seen = sampler.stop();
        let peak = seen.peak.unwrap();
        assert!(peak.anon_bytes >= 32 << 20 && peak.resident_bytes >= 32 << 20, "{peak:?}");
        assert!(peak.process_count >= 1);
    }

    #[test]
    fn the_kernels_maximum_counts_only_above_its_floor() {
        let mut peak = Peak { resident_bytes: 5, ..Peak::default() };
        peak.add_kernels_own(10, 10);
        assert_eq!(peak.resident_bytes, 5);
        peak.add_kernels_own(11, 10);
        assert_eq!(peak.resident_bytes, 11);
    }
}
