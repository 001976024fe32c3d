//! Each fault's service time, without root: paired perf software events.
//!
//! `PAGE_FAULTS` fires when a fault begins, `PAGE_FAULTS_MIN` or `_MAJ` when it has been handled;
//! the distance is the time that the fault took, less exception entry and exit. Blind to the faults
//! of mlock and populate, and to those inside system calls (kernel events are excluded, so that
//! perf_event_paranoid may be 2).
//!
//! The thread pays for each field of a sample, so samples carry their time and no more: their length
//! tells which event they are of, and records of context switches whose they are. That is a quarter
//! cheaper than samples with identifiers and threads; `cargo xtask bench fault-latency` shows what is
//! left beside the least that a pair of samples can cost.
//!
//! Invariant: a sample that was lost or has no partner is counted and told, never guessed.

mod pairing;

use crate::sys::perf::{
    DUMMY, Event, EventSpec, FIELD_CPU, FIELD_PERIOD, FIELD_TID, FIELD_TIME, MAJOR_FAULT,
    MINOR_FAULT, PAGE_FAULT, Ring, Sampling,
};
use hdrhistogram::Histogram;
use pagetax_core::counter::Provenance;
use pagetax_core::machine::Sink;
use pagetax_core::report::Warning;
use pairing::{Pairing, Stream};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

/// Rings are tried from 512 KiB a CPU, 13,000 faults, down to 64 KiB; what fits is up to
/// perf_event_mlock_kb. Larger ones push the job out of the CPU's cache.
const RING_PAGES: [usize; 4] = [128, 64, 32, 16];
const PERIOD: Duration = Duration::from_millis(5);
/// A sample is in its ring at most this long after its time stamp was taken.
const SETTLED_NS: u64 = 1_000_000;

/// Longer faults count as this: a minute.
const LONGEST_NS: u64 = 60_000_000_000;

/// Why there are no latencies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NoLatency {
    /// What the system said.
    pub what: String,
    /// What would help.
    pub remedy: String,
}

/// Histograms of service times, as found.
#[derive(Debug)]
pub struct FaultTimes {
    /// Faults served from memory, in nanoseconds.
    pub minor: Histogram<u64>,
    /// Faults that waited for storage, in nanoseconds.
    pub major: Histogram<u64>,
    /// Samples that did not fit into a ring.
    pub lost_count: u64,
    /// Ends without a begin.
    pub unpaired_count: u64,
}

/// Watches the faults of the threads and children that the calling thread makes from now on.
pub struct FaultLatency {
    ending: Arc<AtomicBool>,
    reader: JoinHandle<FaultTimes>,
}

impl FaultLatency {
    /// Opens the events on each CPU, and starts their reader.
    pub fn start() -> Result<FaultLatency, NoLatency> {
        let watched = rustix::thread::gettid().as_raw_nonzero().get();
        let ending = Arc::new(AtomicBool::new(false));
        let (ready, is_ready) = mpsc::channel();
        let ends = ending.clone();
        // The reader opens the events: a thread made after them would inherit them.
        let read = move || match Reader::open(watched) {
            Ok((reader, events)) => {
                // The receiver waits for this; it cannot be gone.
                let _ = ready.send(Ok(()));
                let times = reader.read(&ends);
                drop(events);
                times
            }
            Err(error) => {
                let _ = ready.send(Err(error));
                FaultTimes::new()
            }
        };
        let thread = std::thread::Builder::new().name("fault-latency".into());
        let reader = thread.spawn(read).map_err(|error| no_latency(&error))?;
        let opened = is_ready.recv().unwrap_or_else(|_| Err(io::ErrorKind::BrokenPipe.into()));
        opened.map_err(|error| no_latency(&error))?;
        Ok(FaultLatency { ending, reader })
    }

    /// Stops, and reads what is left.
    pub fn finish(self) -> FaultTimes {
        self.ending.store(true, Ordering::Release);
        self.reader.thread().unpark();
        self.reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

fn no_latency(error: &io::Error) -> NoLatency {
    let remedy = match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => "sysctl kernel.perf_event_paranoid=2",
        Some(libc::EMFILE) => "ulimit -n 4096",
        _ => "run on a kernel with CONFIG_PERF_EVENTS",
    };
    NoLatency {
        what: format!("fault latencies cannot be measured: perf_event_open: {error}"),
        remedy: remedy.into(),
    }
}

/// CPUs by number; offline ones are left out by the system when events are opened on them.
pub(crate) fn online_cpus() -> Vec<i32> {
    let text = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    let mut cpus = Vec::new();
    for range in text.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        if let (Ok(first), Ok(last)) = (first.parse::<i32>(), last.parse::<i32>()) {
            cpus.extend(first..=last);
        }
    }
    if cpus.is_empty() { vec![0] } else { cpus }
}

/// The events on one CPU, all into one ring.
fn open_on(pid: i32, cpu: i32) -> io::Result<(Ring, Vec<Event>)> {
    let open = |kind, fields, task_records| {
        let sampling = Some(Sampling { period: 1, fields });
        let spec =
            EventSpec { pid, cpu, sampling, inherit: true, task_records, ..EventSpec::new(kind) };
        Event::open(&spec)
    };
    let begin = open(PAGE_FAULT, FIELD_TIME, false)?;
    let ring = RING_PAGES.iter().find_map(|pages| Ring::new(&begin, *pages).ok());
    let ring = ring.ok_or(io::ErrorKind::PermissionDenied)?;
    // The further fields only make these samples longer; see `pairing`.
    let others = [
        open(MINOR_FAULT, FIELD_TIME | FIELD_PERIOD, false)?,
        open(MAJOR_FAULT, FIELD_TIME | FIELD_CPU | FIELD_PERIOD, false)?,
        open(DUMMY, FIELD_TID | FIELD_TIME, true)?,
    ];
    others.iter().try_for_each(|event| event.redirect(&begin))?;
    Ok((ring, [begin].into_iter().chain(others).collect()))
}

/// Empties the rings while the job runs.
struct Reader {
    rings: Vec<(Ring, Stream)>,
    pairing: Pairing,
}

impl Reader {
    /// Opens events and rings on each CPU for what a thread makes from now on.
    fn open(watched: i32) -> io::Result<(Reader, Vec<Event>)> {
        let (mut events, mut rings) = (Vec::new(), Vec::new());
        for cpu in online_cpus() {
            let (ring, opened) = open_on(watched, cpu)?;
            rings.push((ring, Stream::new(watched as u32)));
            events.extend(opened);
        }
        // The supervisor's own faults are no part of the job.
        Ok((Reader { rings, pairing: Pairing::new(watched as u32) }, events))
    }

    fn read(mut self, ending: &AtomicBool) -> FaultTimes {
        loop {
            let is_last = ending.load(Ordering::Acquire);
            let now = monotonic_ns();
            let Reader { rings, pairing } = &mut self;
            for (ring, stream) in rings {
                ring.drain(|record| pairing.hear(stream, &record));
            }
            pairing.pair_until(if is_last { u64::MAX } else { now.saturating_sub(SETTLED_NS) });
            if is_last {
                return self.pairing.times;
            }
            std::thread::park_timeout(PERIOD);
        }
    }
}

fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

impl FaultTimes {
    fn new() -> FaultTimes {
        let empty = || {
            Histogram::new_with_bounds(1, LONGEST_NS, 3)
                .unwrap_or_else(|_| unreachable!("bounds and digits are allowed ones"))
        };
        FaultTimes { minor: empty(), major: empty(), lost_count: 0, unpaired_count: 0 }
    }

    /// Pours the histograms out, with a warning if samples are missing in them.
    pub fn report(&self, out: &mut dyn Sink) {
        out.latency("minor_fault", &self.minor, Provenance::Measured);
        out.latency("major_fault", &self.major, Provenance::Measured);
        let missing = self.lost_count + self.unpaired_count;
        if missing > 0 {
            let seen = self.minor.len() + self.major.len();
            out.warning(Warning {
                id: "lost_fault_samples".into(),
                text: format!(
                    "{} samples of faults were lost and {} have no partner; {seen} faults are in \
                     the histograms",
                    self.lost_count, self.unpaired_count
                ),
                remedy: "sysctl kernel.perf_event_mlock_kb=16384, or fewer clients".into(),
            });
        }
    }
}
