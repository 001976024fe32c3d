//! The service time of each fault, without root, from paired perf software events.
//!
//! `PAGE_FAULTS` fires when a fault begins, `PAGE_FAULTS_MIN` or `_MAJ` when the kernel has handled it.
//! The difference is the service time, without exception entry and exit. Faults of mlock and populate,
//! and faults inside system calls, are not seen: kernel events are excluded so that perf_event_paranoid
//! may be 2.
//!
//! The faulting thread pays for each field of a sample, so samples carry only their time. The length of
//! a sample identifies its event. Records of context switches identify its thread. This is a quarter
//! cheaper than samples with identifiers and threads. `cargo xtask bench fault-latency` compares it with
//! the least that a pair of samples can cost. It still costs too much for each fault of a program that
//! does little else. So after the first ten thousand faults, only those that begin in windows are
//! sampled (`windows`). All faults are counted, which costs almost nothing.
//!
//! Invariant: a sample that was lost or has no partner is counted and reported, never guessed. The total
//! number of faults is reported with the number in the histograms.

mod pairing;
mod windows;

use crate::procfs::{Root, online_cpus};
use crate::sys::perf::monotonic_ns;
use crate::sys::perf::{
    DUMMY, Event, EventKind, EventSpec, FIELD_CPU, FIELD_PERIOD, FIELD_TID, FIELD_TIME,
    MAJOR_FAULT, MINOR_FAULT, PAGE_FAULT, Ring, Sampling,
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
use windows::{Sampled, Windows};

/// The sizes of a ring in pages, tried in this order: from 512 KiB per CPU (13,000 faults) down to 64
/// KiB. perf_event_mlock_kb limits them. Larger rings evict the job's data from the CPU's cache.
const RING_PAGES: [usize; 4] = [128, 64, 32, 16];
/// The longest time from a sample's time stamp to its arrival in the ring.
const SETTLED_NS: u64 = 1_000_000;

/// The upper limit of the histograms, one minute: longer faults count as this.
const LONGEST_NS: u64 = 60_000_000_000;

/// The reason why latencies cannot be measured, with a hint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NoLatency {
    /// The error that the system returned.
    pub what: String,
    /// The hint: a way to make it work.
    pub remedy: String,
}

/// The histograms of service times, as measured.
#[derive(Debug)]
pub struct FaultTimes {
    /// The service times of minor faults, in nanoseconds.
    pub minor: Histogram<u64>,
    /// The service times of major faults, in nanoseconds.
    pub major: Histogram<u64>,
    /// The number of minor faults, sampled or not.
    pub minor_count: u64,
    /// The number of major faults, sampled or not.
    pub major_count: u64,
    /// The number of samples that found no room in a ring.
    pub lost_count: u64,
    /// The number of ends without a begin, and of begins whose end never came.
    pub unpaired_count: u64,
}

/// A watch on the faults of the threads and children that the calling thread makes from now on.
pub struct FaultLatency {
    ending: Arc<AtomicBool>,
    reader: JoinHandle<FaultTimes>,
}

impl FaultLatency {
    /// Opens the events on each CPU, and starts the thread that reads them.
    pub fn start() -> Result<FaultLatency, NoLatency> {
        let watched = rustix::thread::gettid().as_raw_nonzero().get();
        let ending = Arc::new(AtomicBool::new(false));
        let (ready, is_ready) = mpsc::channel();
        let ends = ending.clone();
        // The reader opens the events: a thread made after them would inherit them.
        let read = move || match Reader::open(watched) {
            Ok(reader) => {
                // The receiver waits for this, so it still exists.
                let _ = ready.send(Ok(()));
                reader.read(&ends)
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

    /// Stops the reader, and returns all fault times.
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

/// The events on one CPU, all in one ring. All stay open during the watch; two are switched on and off.
struct OnCpu {
    begins: Event,
    minor_ends: Event,
    _always: [Event; 2],
    ring: Ring,
    stream: Stream,
}

impl OnCpu {
    fn open(watched: i32, cpu: i32) -> io::Result<OnCpu> {
        let open = |kind, fields, task_records| {
            let sampling = Some(Sampling { period: 1, fields });
            let spec = EventSpec { cpu, sampling, task_records, ..inherited(kind, watched) };
            Event::open(&spec)
        };
        let begins = open(PAGE_FAULT, FIELD_TIME, false)?;
        let ring = RING_PAGES.iter().find_map(|pages| Ring::new(&begins, *pages).ok());
        let ring = ring.ok_or(io::ErrorKind::PermissionDenied)?;
        // The additional fields only make these samples longer, which identifies them; see `pairing`.
        let minor_ends = open(MINOR_FAULT, FIELD_TIME | FIELD_PERIOD, false)?;
        let always = [
            open(MAJOR_FAULT, FIELD_TIME | FIELD_CPU | FIELD_PERIOD, false)?,
            open(DUMMY, FIELD_TID | FIELD_TIME, true)?,
        ];
        [&minor_ends].into_iter().chain(&always).try_for_each(|event| event.redirect(&begins))?;
        let stream = Stream::new(watched as u32);
        Ok(OnCpu { begins, minor_ends, _always: always, ring, stream })
    }

    /// Switches the ends before the begins, so that no begin lacks its end when a window opens.
    fn switch(&self, sampled: Sampled) -> io::Result<()> {
        self.minor_ends.switch(sampled.minor_ends)?;
        self.begins.switch(sampled.begins)
    }
}

/// Returns an event that follows the threads and children that a thread makes from now on.
fn inherited(kind: EventKind, watched: i32) -> EventSpec {
    EventSpec { pid: watched, inherit: true, ..EventSpec::new(kind) }
}

/// A count of all faults of one kind, less those of the watched thread, which does not belong to the
/// job.
struct Tally {
    all: Event,
    own: Event,
}

impl Tally {
    fn open(kind: EventKind, watched: i32) -> io::Result<Tally> {
        let all = inherited(kind, watched);
        let own = EventSpec { inherit: false, ..all };
        Ok(Tally { all: Event::open(&all)?, own: Event::open(&own)? })
    }

    fn count(&self) -> io::Result<u64> {
        Ok(self.all.count()?.saturating_sub(self.own.count()?))
    }
}

/// The thread that empties the rings while the job runs.
struct Reader {
    cpus: Vec<OnCpu>,
    minor: Tally,
    major: Tally,
    pairing: Pairing,
}

impl Reader {
    /// Opens events and rings on each CPU for the threads and children that a thread makes from now on.
    fn open(watched: i32) -> io::Result<Reader> {
        let cpus = online_cpus(&Root::default()).map_err(io::Error::other)?;
        let cpus = cpus.into_iter().map(|cpu| OnCpu::open(watched, cpu as i32));
        Ok(Reader {
            cpus: cpus.collect::<io::Result<_>>()?,
            minor: Tally::open(MINOR_FAULT, watched)?,
            major: Tally::open(MAJOR_FAULT, watched)?,
            // The supervisor's own faults do not belong to the job.
            pairing: Pairing::new(watched as u32),
        })
    }

    fn read(mut self, ending: &AtomicBool) -> FaultTimes {
        let (mut windows, mut sampled) = (Windows::new(), Sampled::ALL);
        loop {
            let is_last = ending.load(Ordering::Acquire);
            self.hear(if is_last { u64::MAX } else { monotonic_ns().saturating_sub(SETTLED_NS) });
            if is_last {
                return self.finish();
            }
            self.pairing.give_up(monotonic_ns().saturating_sub(LONGEST_NS));
            let under_way = self.pairing.has_open_fault(self.cpus.iter().map(|cpu| &cpu.stream));
            let (next, wait) = windows.next(self.pairing.times.seen_count(), under_way);
            if next != sampled {
                self.switch(next);
                sampled = next;
            }
            std::thread::park_timeout(wait);
        }
    }

    /// Reads the new records, and pairs those up to this time.
    fn hear(&mut self, horizon_ns: u64) {
        for OnCpu { ring, stream, .. } in &mut self.cpus {
            ring.drain(|record| self.pairing.hear(stream, &record));
        }
        self.pairing.pair_until(horizon_ns);
    }

    /// Switches the events. An event that cannot be switched stays as it is: it costs more, but loses no
    /// fault.
    fn switch(&mut self, sampled: Sampled) {
        self.pairing.expect_ends_alone();
        let _ = self.cpus.iter().try_for_each(|cpu| cpu.switch(sampled));
    }

    fn finish(self) -> FaultTimes {
        let count = |tally: &Tally, seen: u64| tally.count().unwrap_or(seen).max(seen);
        let mut times = self.pairing.times;
        times.minor_count = count(&self.minor, times.minor.len());
        times.major_count = count(&self.major, times.major.len());
        times
    }
}

impl FaultTimes {
    fn new() -> FaultTimes {
        let empty = || {
            Histogram::new_with_bounds(1, LONGEST_NS, 3)
                .unwrap_or_else(|_| unreachable!("bounds and digits are allowed ones"))
        };
        FaultTimes {
            minor: empty(),
            major: empty(),
            minor_count: 0,
            major_count: 0,
            lost_count: 0,
            unpaired_count: 0,
        }
    }

    /// Returns the number of faults in the histograms.
    fn seen_count(&self) -> u64 {
        self.minor.len() + self.major.len()
    }

    /// Reports the histograms, with a warning if samples are missing from them.
    pub fn report(&self, out: &mut dyn Sink) {
        out.latency("minor_fault", &self.minor, Some(self.minor_count), Provenance::Measured);
        out.latency("major_fault", &self.major, Some(self.major_count), Provenance::Measured);
        let missing = self.lost_count + self.unpaired_count;
        if missing > 0 {
            out.warning(Warning {
                id: "lost_fault_samples".into(),
                text: format!(
                    "{} samples of faults were lost and {} have no partner; {} faults are in the \
                     histograms",
                    self.lost_count,
                    self.unpaired_count,
                    self.seen_count()
                ),
                remedy: "sysctl kernel.perf_event_mlock_kb=16384, or fewer clients".into(),
            });
        }
        for (kind, seen, count) in [
            ("minor", self.minor.len(), self.minor_count),
            ("major", self.major.len(), self.major_count),
        ] {
            if seen == 0 && count > 0 {
                out.warning(Warning {
                    id: "no_fault_seen".into(),
                    text: format!("none of {count} {kind} faults began while faults were sampled"),
                    remedy: "repeat the run, or make it longer".into(),
                });
            }
        }
    }
}
