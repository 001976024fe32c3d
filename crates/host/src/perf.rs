//! Each fault's service time, without root: paired perf software events.
//!
//! `PAGE_FAULTS` fires when a fault begins, `PAGE_FAULTS_MIN` or `_MAJ` when it has been handled;
//! with a sample for each, paired by thread, the distance is the time that the fault took, less
//! exception entry and exit. Blind to the faults of mlock and populate, and to those inside system
//! calls (kernel events are excluded, so that perf_event_paranoid may be 2).
//!
//! Invariant: a sample that was lost or has no partner is counted and told, never guessed.

use crate::sys::perf::{
    Event, EventKind, EventSpec, MAJOR_FAULT, MINOR_FAULT, PAGE_FAULT, RECORD_LOST, RECORD_SAMPLE,
    Record, Ring, Sampling,
};
use hdrhistogram::Histogram;
use pagetax_core::counter::Provenance;
use pagetax_core::machine::Sink;
use pagetax_core::report::Warning;
use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

/// `PERF_SAMPLE_IDENTIFIER | PERF_SAMPLE_TID | PERF_SAMPLE_TIME`
const FIELDS: u64 = 1 << 16 | 1 << 1 | 1 << 2;
/// Rings are tried from 8 MiB a CPU down to 64 KiB; what fits is up to perf_event_mlock_kb.
const RING_PAGES: [usize; 8] = [2048, 1024, 512, 256, 128, 64, 32, 16];
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

/// Begin or end of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Edge {
    Begin,
    MinorEnd,
    MajorEnd,
}

/// One sample.
#[derive(Debug, Clone, Copy)]
struct Mark {
    time_ns: u64,
    tid: u32,
    edge: Edge,
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
fn online_cpus() -> Vec<i32> {
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

/// The three events on one CPU, all into one ring.
fn open_on(pid: i32, cpu: i32, edges: &mut HashMap<u64, Edge>) -> io::Result<(Ring, [Event; 3])> {
    let open = |kind: EventKind| {
        let sampling = Some(Sampling { period: 1, fields: FIELDS });
        Event::open(&EventSpec { pid, cpu, sampling, inherit: true, ..EventSpec::new(kind) })
    };
    let events = [open(PAGE_FAULT)?, open(MINOR_FAULT)?, open(MAJOR_FAULT)?];
    let ring = RING_PAGES.iter().find_map(|pages| Ring::new(&events[0], *pages).ok());
    let ring = ring.ok_or(io::ErrorKind::PermissionDenied)?;
    for event in &events[1..] {
        event.redirect(&events[0])?;
    }
    for (event, edge) in events.iter().zip([Edge::Begin, Edge::MinorEnd, Edge::MajorEnd]) {
        edges.insert(event.id()?, edge);
    }
    Ok((ring, events))
}

/// Empties the rings while the job runs.
struct Reader {
    rings: Vec<Ring>,
    edges: HashMap<u64, Edge>,
    pairing: Pairing,
    ignored: u32,
}

impl Reader {
    /// Opens events and rings on each CPU for what a thread makes from now on.
    fn open(watched: i32) -> io::Result<(Reader, Vec<Event>)> {
        let (mut events, mut rings, mut edges) = (Vec::new(), Vec::new(), HashMap::new());
        for cpu in online_cpus() {
            let (ring, opened) = open_on(watched, cpu, &mut edges)?;
            rings.push(ring);
            events.extend(opened);
        }
        let pairing = Pairing::new();
        // The supervisor's own faults are no part of the job.
        Ok((Reader { rings, edges, pairing, ignored: watched as u32 }, events))
    }

    fn read(mut self, ending: &AtomicBool) -> FaultTimes {
        loop {
            let is_last = ending.load(Ordering::Acquire);
            let now = monotonic_ns();
            self.drain();
            self.pairing.pair_until(if is_last {
                u64::MAX
            } else {
                now.saturating_sub(SETTLED_NS)
            });
            if is_last {
                return self.pairing.times;
            }
            std::thread::park_timeout(PERIOD);
        }
    }

    fn drain(&mut self) {
        let Reader { rings, edges, pairing, ignored } = self;
        for ring in rings {
            ring.drain(|record| match mark_of(&record, edges) {
                Some(mark) if mark.tid != *ignored => pairing.marks.push(mark),
                Some(_) => {}
                None if record.kind == RECORD_LOST => {
                    pairing.times.lost_count += record.words.get(1).copied().unwrap_or(0);
                }
                None => {}
            });
        }
    }
}

/// A sample's words: identifier, thread (high half) and process, time.
fn mark_of(record: &Record<'_>, edges: &HashMap<u64, Edge>) -> Option<Mark> {
    let [id, ids, time_ns, ..] = *record.words else { return None };
    if record.kind != RECORD_SAMPLE {
        return None;
    }
    Some(Mark { time_ns, tid: (ids >> 32) as u32, edge: *edges.get(&id)? })
}

fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Pairs begins and ends by thread, in the order of time over all rings.
struct Pairing {
    marks: Vec<Mark>,
    begun: HashMap<u32, u64>,
    times: FaultTimes,
}

impl Pairing {
    fn new() -> Pairing {
        Pairing { marks: Vec::new(), begun: HashMap::new(), times: FaultTimes::new() }
    }

    /// Pairs what happened up to this time; later marks wait, as others may still come before them.
    fn pair_until(&mut self, horizon_ns: u64) {
        self.marks.sort_by_key(|mark| mark.time_ns);
        let settled = self.marks.partition_point(|mark| mark.time_ns <= horizon_ns);
        for mark in self.marks.drain(..settled) {
            let histogram = match mark.edge {
                Edge::Begin => {
                    self.begun.insert(mark.tid, mark.time_ns);
                    continue;
                }
                Edge::MinorEnd => &mut self.times.minor,
                Edge::MajorEnd => &mut self.times.major,
            };
            match self.begun.remove(&mark.tid) {
                Some(begun_ns) => histogram.saturating_record(mark.time_ns - begun_ns),
                None => self.times.unpaired_count += 1,
            }
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(time_ns: u64, tid: u32, edge: Edge) -> Mark {
        Mark { time_ns, tid, edge }
    }

    #[test]
    fn pairs_by_thread_over_rings() {
        let mut pairing = Pairing::new();
        // Thread 1 moves to another CPU during its fault, so that its end is read first.
        pairing.marks = vec![
            mark(900, 1, Edge::MajorEnd),
            mark(150, 2, Edge::Begin),
            mark(250, 2, Edge::MinorEnd),
            mark(100, 1, Edge::Begin),
        ];
        pairing.pair_until(800);
        assert_eq!((pairing.times.minor.len(), pairing.times.major.len()), (1, 0));
        pairing.pair_until(u64::MAX);
        assert_eq!((pairing.times.minor.max(), pairing.times.major.max()), (100, 800));
        assert_eq!(pairing.times.unpaired_count, 0);
    }

    #[test]
    fn an_end_without_a_begin_is_counted() {
        let mut pairing = Pairing::new();
        pairing.marks = vec![mark(5, 1, Edge::MinorEnd)];
        pairing.pair_until(u64::MAX);
        assert_eq!(pairing.times.unpaired_count, 1);
        assert!(pairing.times.minor.is_empty());
    }
}
