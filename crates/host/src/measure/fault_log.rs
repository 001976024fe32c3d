//! The page faults of a program with their pages, in order: the first touches of its memory.
//!
//! An event that samples each minor fault follows a program from its exec on; it needs no PMU. Records of its
//! mappings separate private memory from files. A fault takes longer by its record, so a run that is logged
//! is not timed.
//!
//! Source: perf_event_open(2), `PERF_RECORD_MMAP2`.
//! Invariant: one process is logged, and only what it does after its last exec.

use super::stacks::lost;
use crate::procfs::{Root, online_cpus};
use crate::sys::perf::{self, Event, EventSpec, PerfRecord, Ring, Sampling};
use pagetax_core::address_pattern::AddressPart;
use rangemap::RangeMap;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::thread::JoinHandle;

/// Pages of a ring: what root may lock, and what everyone may.
const RING_PAGES: [usize; 2] = [1024, 32];
/// The longest time between two reads of the rings.
const LOOK_INTERVAL_NS: i64 = 50_000_000;
const PAGE_SHIFT: u32 = 12;

/// A page fault of private memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoggedFault {
    /// The number of the base page.
    pub page: u64,
    /// The part of memory: heap, stack or mapping.
    pub part: AddressPart,
}

/// The faults of a program's run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LoggedFaults {
    /// The faults of private memory, in order.
    pub faults: Vec<LoggedFault>,
    /// The number of records that found no room.
    pub lost_count: u64,
    /// True if faults in the kernel, as of read(2) into new memory, are among them.
    pub has_kernel: bool,
}

/// A log of faults that is being written.
#[derive(Debug)]
pub struct FaultLog {
    stop: OwnedFd,
    reader: Option<JoinHandle<RingReader>>,
    has_kernel: bool,
}

/// An event of a process, as its ring has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Logged {
    time_ns: u64,
    pid: u32,
    what: LoggedEvent,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LoggedEvent {
    Exec,
    /// Pages from the first to before the second are this part of memory from now on; none is a file's, or
    /// shared memory.
    Mapped((u64, u64), Option<AddressPart>),
    /// A fault on a page.
    Fault(u64),
}

#[derive(Debug)]
struct RingReader {
    rings: Vec<(Event, Ring)>,
    steps: Vec<Logged>,
    lost_count: u64,
}

impl FaultLog {
    /// Starts to log the next program that a child of the calling thread executes.
    ///
    /// # Errors
    /// Says why the machine does not allow it, and what would.
    pub fn start() -> Result<FaultLog, String> {
        let stop =
            eventfd(0, EventfdFlags::CLOEXEC).map_err(|error| format!("eventfd: {error}"))?;
        let seen = stop.try_clone().map_err(|error| format!("eventfd: {error}"))?;
        let (has_kernel, rings) = open_all(false)
            .map(|rings| (true, rings))
            .or_else(|_| open_all(true).map(|rings| (false, rings)))?;
        let reader = RingReader { rings, steps: Vec::new(), lost_count: 0 };
        let reader = std::thread::Builder::new()
            .name("pagetax-faults".into())
            .spawn(move || reader.run(&seen))
            .map_err(|error| format!("no thread to log faults: {error}"))?;
        Ok(FaultLog { stop, reader: Some(reader), has_kernel })
    }

    /// Returns all faults, after the program has ended.
    pub fn finish(mut self) -> LoggedFaults {
        let Some(reader) = self.join() else { return LoggedFaults::default() };
        let faults = faults_of(reader.steps);
        LoggedFaults { faults, lost_count: reader.lost_count, has_kernel: self.has_kernel }
    }

    fn join(&mut self) -> Option<RingReader> {
        // Writing 8 bytes to an eventfd fails only on overflow, which one write does not cause.
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        self.reader.take()?.join().ok()
    }
}

impl Drop for FaultLog {
    fn drop(&mut self) {
        self.join();
    }
}

/// Opens the event and its ring on each CPU.
fn open_all(exclude_kernel: bool) -> Result<Vec<(Event, Ring)>, String> {
    let open = |cpu: u32| -> io::Result<(Event, Ring)> {
        let fields = perf::FIELD_TID | perf::FIELD_TIME | perf::FIELD_ADDRESS;
        let event = Event::open(&EventSpec {
            cpu: cpu as i32,
            sampling: Some(Sampling { period: 1, fields }),
            inherit: true,
            exclude_kernel,
            enable_on_exec: true,
            mapping_records: true,
            ..EventSpec::new(perf::MINOR_FAULT)
        })?;
        let ring =
            Ring::new(&event, RING_PAGES[0]).or_else(|_| Ring::new(&event, RING_PAGES[1]))?;
        Ok((event, ring))
    };
    let refused = |error| {
        format!(
            "page faults cannot be logged: {error}\n  hint: as root, with CAP_PERFMON, or after sysctl \
             kernel.perf_event_paranoid=2"
        )
    };
    online_cpus(&Root::default())?.into_iter().map(|cpu| open(cpu).map_err(refused)).collect()
}

impl RingReader {
    fn run(mut self, stop: &OwnedFd) -> RingReader {
        let timeout = Timespec { tv_sec: 0, tv_nsec: LOOK_INTERVAL_NS };
        loop {
            let mut polled = vec![PollFd::new(stop, PollFlags::IN)];
            let events = self.rings.iter().map(|(event, _)| PollFd::new(event, PollFlags::IN));
            polled.extend(events);
            // An interrupted or failed poll only means that the rings are read now.
            let _ = poll(&mut polled, Some(&timeout));
            let is_over = polled[0].revents().contains(PollFlags::IN);
            let RingReader { rings, steps, lost_count } = &mut self;
            for (_, ring) in rings {
                ring.drain(|record| match lost(&record) {
                    Some(count) => *lost_count += count,
                    None => steps.extend(decode(&record)),
                });
            }
            if is_over {
                return self;
            }
        }
    }
}

/// Decodes a record; none if it does not matter here.
fn decode(record: &PerfRecord<'_>) -> Option<Logged> {
    let low = |word: u64| word as u32;
    if record.kind == perf::RECORD_SAMPLE {
        let [task, time_ns, address] = *record.words else { return None };
        let what = LoggedEvent::Fault(address >> PAGE_SHIFT);
        return Some(Logged { time_ns, pid: low(task), what });
    }
    let [.., task, time_ns] = *record.words else { return None };
    let what = match record.kind {
        perf::RECORD_COMM if record.misc & perf::MISC_COMM_EXEC != 0 => LoggedEvent::Exec,
        perf::RECORD_MMAP2 => mapped(record.words)?,
        _ => return None,
    };
    Some(Logged { time_ns, pid: low(task), what })
}

/// Decodes a new mapping. The words are task, start, length, five of the file, and its name.
fn mapped(words: &[u64]) -> Option<LoggedEvent> {
    const MAP_SHARED: u32 = 1;
    let [_, start, bytes, _, _, _, _, rights, name @ ..] = words else { return None };
    let flags = (rights >> 32) as u32;
    let name: Vec<u8> = name.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let part = match name.split(|byte| *byte == 0).next()? {
        b"//anon" => Some(AddressPart::Mapping),
        b"[heap]" => Some(AddressPart::Heap),
        b"[stack]" => Some(AddressPart::Stack),
        _ => None,
    };
    let pages = (start >> PAGE_SHIFT, (start + bytes) >> PAGE_SHIFT);
    Some(LoggedEvent::Mapped(pages, part.filter(|_| flags & MAP_SHARED == 0)))
}

/// Returns the faults of the process that executed first, after its last exec. Memory without a record came
/// from mremap(2), and is private.
fn faults_of(mut steps: Vec<Logged>) -> Vec<LoggedFault> {
    // Each CPU has its own ring.
    steps.sort_by_key(|step| step.time_ns);
    let Some(first) = steps.iter().find(|step| step.what == LoggedEvent::Exec) else {
        return Vec::new();
    };
    let pid = first.pid;
    let mut parts: RangeMap<u64, Option<AddressPart>> = RangeMap::new();
    let mut faults = Vec::new();
    for step in steps.iter().filter(|step| step.pid == pid) {
        match step.what {
            LoggedEvent::Exec => {
                parts.clear();
                faults.clear();
            }
            LoggedEvent::Mapped((start, end), part) if start < end => {
                parts.insert(Range { start, end }, part);
            }
            LoggedEvent::Mapped(..) => {}
            LoggedEvent::Fault(page) => {
                let part = parts.get(&page).copied().unwrap_or(Some(AddressPart::Mapping));
                faults.extend(part.map(|part| LoggedFault { page, part }));
            }
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_program_fills_its_memory_in_order() {
        const PAGES: usize = 5000;
        let program = format!(
            "import mmap; m = mmap.mmap(-1, {PAGES} * 4096, flags=34)\n\
             for i in range({PAGES}): m[i * 4096] = 1"
        );
        let log = FaultLog::start().unwrap();
        assert!(Command::new("python3").args(["-c", &program]).status().unwrap().success());
        let logged = log.finish();
        assert_eq!(logged.lost_count, 0);
        let pages: Vec<u64> = logged.faults.iter().map(|fault| fault.page).collect();
        let in_order = pages.windows(2).filter(|two| two[1] == two[0] + 1).count();
        assert!(in_order >= PAGES - 100, "{in_order} of {} faults", pages.len());
        assert!(pages.len() < PAGES + 3000, "{} faults", pages.len());
    }

    #[test]
    fn the_last_exec_of_the_first_process_counts_and_files_do_not() {
        let step = |time_ns, pid, what| Logged { time_ns, pid, what };
        let steps = vec![
            step(9, 7, LoggedEvent::Fault(22)),
            step(1, 7, LoggedEvent::Exec),
            step(2, 7, LoggedEvent::Fault(10)),
            step(3, 7, LoggedEvent::Exec),
            step(4, 8, LoggedEvent::Exec),
            step(4, 8, LoggedEvent::Fault(5)),
            step(5, 7, LoggedEvent::Mapped((10, 20), Some(AddressPart::Heap))),
            step(6, 7, LoggedEvent::Mapped((12, 13), None)),
            step(7, 7, LoggedEvent::Fault(11)),
            step(8, 7, LoggedEvent::Fault(12)),
        ];
        let fault = |page, part| LoggedFault { page, part };
        let heap = fault(11, AddressPart::Heap);
        assert_eq!(faults_of(steps), [heap, fault(22, AddressPart::Mapping)]);
    }
}
