//! The time of a job's tasks: on a CPU with their kernel stacks, and off it with the reason of their
//! wait.
//!
//! A timer that ticks while a task runs (cpu-clock; needs no PMU) samples its kernel stack. The stack of
//! each context switch shows the reason of the wait. Switch records give the times. All events follow
//! threads and children. Without the privilege to see kernel stacks, only the switch records remain.
//!
//! Invariant: the collecting thread opens the events itself, so they never follow it. It keeps counts,
//! not samples, so its memory does not grow with the run.

mod record;
mod symbols;
mod timeline;

pub(in crate::measure) use record::{RingSource, lost};
pub use symbols::{Detail, Symbols, Wait, Work};
pub use timeline::{MainLine, TaskState, Timeline};

use crate::procfs::{Root, StatLine, online_cpus};
use crate::sys::perf::{self, Event, EventKind, EventSpec, Ring, Sampling, monotonic_ns};
use record::TaskRecord;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::mpsc;
use std::thread::JoinHandle;

/// The interval between two samples of a task's stack: ±11 percentage points after a second of CPU time.
/// On a virtual machine the timer costs about 20 us. A deep stack costs as much again, as the kernel's
/// unwinder misses the caches. Together that is 0.2 to 0.5 % of the time.
const PERIOD_NS: u64 = 12_000_000;
/// The most context switches a second whose stacks are collected. Each stack costs the job 1.2 us and
/// its records 0.4 us: 1 % of the time.
const SWITCH_STACKS_PER_S_MAX: u64 = 6_000;
/// The longest time between two reads of the rings.
const LOOK_INTERVAL_NS: u64 = 200_000_000;

/// The start of collecting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begin {
    /// Collecting starts at once.
    Now,
    /// Collecting starts when the task, or a child of it, calls exec. Attached to a thread before it
    /// spawns a command, this follows the command from its first instruction.
    AtExec,
}

/// The number of samples by mode and work.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StackCounts {
    /// The number of samples in user mode.
    pub user_count: u64,
    /// The numbers of samples in the kernel, in the order of [`Work::ALL`].
    pub work_counts: [u64; Work::ALL.len()],
    /// The number of samples in the kernel without a frame that the table knows.
    pub unknown_count: u64,
}

impl StackCounts {
    /// Returns the number of samples in the kernel, of any kind.
    pub fn kernel_count(&self) -> u64 {
        self.work_counts.iter().sum::<u64>() + self.unknown_count
    }

    fn add(&mut self, user: bool, work: Option<Work>) {
        match (user, work.and_then(|work| Work::ALL.iter().position(|known| *known == work))) {
            (true, _) => self.user_count += 1,
            (false, Some(index)) => self.work_counts[index] += 1,
            (false, None) => self.unknown_count += 1,
        }
    }
}

/// The stacks and states that a [`Profiler`] collected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Profile {
    /// The samples by kernel work; an error shows why there are none.
    pub stacks: Result<StackCounts, String>,
    /// The job's state over time.
    pub line: Result<MainLine, String>,
    /// `Ok` if the main line distinguishes the waits; an error shows why all count as sleep.
    pub waits: Result<(), String>,
    /// The number of records that found no room in a ring.
    pub lost_count: u64,
}

impl Profile {
    /// Returns the profile of a job that could not be watched.
    pub fn missing(why: &str) -> Profile {
        let why = why.to_string();
        Profile { stacks: Err(why.clone()), line: Err(why.clone()), waits: Err(why), lost_count: 0 }
    }
}

/// A profile that is being collected.
#[derive(Debug)]
pub struct Profiler {
    stop: OwnedFd,
    collector: Option<JoinHandle<Profile>>,
}

impl Profiler {
    /// Starts to collect data about a thread, by its id, and all threads and children that it makes from
    /// now on. Errors show why the machine does not allow it.
    pub fn start(tid: u32, begin: Begin) -> Result<Profiler, String> {
        let stop = eventfd(0, EventfdFlags::CLOEXEC).map_err(|e| format!("eventfd: {e}"))?;
        let stop_seen = stop.try_clone().map_err(|e| format!("eventfd: {e}"))?;
        let (ready, is_ready) = mpsc::channel();
        let collector = std::thread::Builder::new()
            .name("pagetax-stacks".into())
            .spawn(move || match Collector::open(tid, begin) {
                Ok(collector) => {
                    // The receiver waits for this, so it still exists.
                    let _ = ready.send(Ok(()));
                    collector.run(&stop_seen)
                }
                Err(why) => {
                    let profile = Profile::missing(&why);
                    let _ = ready.send(Err(why));
                    profile
                }
            })
            .map_err(|e| format!("no thread to collect stacks: {e}"))?;
        is_ready.recv().map_err(|_| "the collecting thread ended early".to_string())??;
        Ok(Profiler { stop, collector: Some(collector) })
    }

    /// Stops after all records that have arrived are read.
    pub fn finish(mut self) -> Profile {
        self.join().unwrap_or_else(|| Profile::missing("the collecting thread failed"))
    }

    fn join(&mut self) -> Option<Profile> {
        // The write carries the end time, as the collector may wake late. Writing 8 bytes to an eventfd
        // fails only on overflow, which one time does not cause.
        let _ = rustix::io::write(&self.stop, &monotonic_ns().to_ne_bytes());
        self.collector.take()?.join().ok()
    }
}

impl Drop for Profiler {
    fn drop(&mut self) {
        self.join();
    }
}

/// An event on one CPU and its ring.
struct CpuRing {
    source: RingSource,
    event: Event,
    records: Ring,
    hung_up: bool,
}

struct Collector {
    rings: Vec<CpuRing>,
    symbols: Result<&'static Symbols, String>,
    counts: StackCounts,
    timeline: Timeline,
    /// The wait that a task is about to begin, by its last switch stack.
    reasons: HashMap<u32, Wait>,
    waits: Result<(), String>,
    /// The decoded records that wait, as another ring may still hold earlier ones.
    held: Vec<TaskRecord>,
    switch_stacks: u64,
    looked_ns: u64,
    lost_count: u64,
}

impl Collector {
    fn open(tid: u32, begin: Begin) -> Result<Collector, String> {
        let root = Root::default();
        let cpus = online_cpus(&root)?;
        let (rings, symbols) = match Symbols::of_this_kernel() {
            Ok(symbols) => {
                match open_rings(tid, begin, &cpus, &[RingSource::Clock, RingSource::Switch]) {
                    Ok(rings) => (rings, Ok(symbols)),
                    Err(why) => (open_rings(tid, begin, &cpus, &[RingSource::Records])?, Err(why)),
                }
            }
            Err(why) => (open_rings(tid, begin, &cpus, &[RingSource::Records])?, Err(why)),
        };
        let now = monotonic_ns();
        let mut timeline = Timeline::default();
        if begin == Begin::Now {
            timeline.enter(now, tid, state_of(&root, tid)?);
        }
        Ok(Collector {
            waits: symbols.as_ref().map(|_| ()).map_err(Clone::clone),
            rings,
            symbols,
            counts: StackCounts::default(),
            timeline,
            reasons: HashMap::new(),
            held: Vec::new(),
            switch_stacks: 0,
            looked_ns: now,
            lost_count: 0,
        })
    }

    fn run(mut self, stop: &OwnedFd) -> Profile {
        let timeout = Timespec { tv_sec: 0, tv_nsec: LOOK_INTERVAL_NS as i64 };
        loop {
            let open: Vec<usize> =
                (0..self.rings.len()).filter(|index| !self.rings[*index].hung_up).collect();
            let mut fds = vec![PollFd::new(stop, PollFlags::IN)];
            fds.extend(open.iter().map(|i| PollFd::new(&self.rings[*i].event, PollFlags::IN)));
            // An interrupted or failed poll only means that the rings are read now.
            let _ = poll(&mut fds, Some(&timeout));
            let stopping = fds[0].revents().contains(PollFlags::IN);
            let hung_up: Vec<bool> =
                fds[1..].iter().map(|fd| fd.revents().contains(PollFlags::HUP)).collect();
            for (index, hung_up) in open.into_iter().zip(hung_up) {
                self.rings[index].hung_up = hung_up;
            }
            let now = monotonic_ns();
            self.look();
            if stopping {
                let end_ns = end_of(stop).unwrap_or(now);
                self.settle(end_ns);
                return self.close(end_ns);
            }
            self.settle(now);
            self.guard_cost(now);
        }
    }

    /// Decodes the new records of all rings.
    fn look(&mut self) {
        let Collector { rings, symbols, held, lost_count, .. } = self;
        for ring in rings {
            ring.records.drain(|record| {
                if let Some(lost) = record::lost(&record) {
                    *lost_count += lost;
                } else if let Some(seen) =
                    record::decode(ring.source, &record, symbols.as_ref().ok().copied())
                {
                    held.push(seen);
                }
            });
        }
        held.sort_by_key(|seen| (seen.time_ns, seen.what.rank()));
    }

    /// Applies the records up to `until_ns`: all rings have been read beyond that time.
    fn settle(&mut self, until_ns: u64) {
        let count = self.held.partition_point(|seen| seen.time_ns <= until_ns);
        let settled: Vec<TaskRecord> = self.held.drain(..count).collect();
        for seen in settled {
            self.apply(seen);
        }
    }

    fn apply(&mut self, seen: TaskRecord) {
        use record::TaskEvent;
        let TaskRecord { time_ns, tid, what } = seen;
        match what {
            TaskEvent::Fork { child } => self.timeline.enter(time_ns, child, TaskState::Runnable),
            TaskEvent::Exit => self.timeline.exit(time_ns, tid),
            TaskEvent::SwitchStack(wait) => {
                self.switch_stacks += 1;
                self.reasons.insert(tid, wait);
            }
            TaskEvent::SwitchedOut { preempted: true } => {
                self.timeline.enter(time_ns, tid, TaskState::Runnable);
            }
            TaskEvent::SwitchedOut { preempted: false } => {
                let wait = self.reasons.remove(&tid).unwrap_or(Wait::Sleep);
                self.timeline.enter(time_ns, tid, TaskState::Waiting(wait));
            }
            TaskEvent::SwitchedIn => self.timeline.enter(time_ns, tid, TaskState::Running),
            TaskEvent::Clock { user, work } => {
                self.counts.add(user, work);
                if !self.timeline.knows(tid) {
                    self.timeline.enter(time_ns, tid, TaskState::Running);
                }
            }
            TaskEvent::Exec => {
                if !self.timeline.knows(tid) {
                    self.timeline.enter(time_ns, tid, TaskState::Running);
                }
            }
        }
    }

    /// Closes the switch events if their stacks come too fast to be cheap.
    fn guard_cost(&mut self, now_ns: u64) {
        let elapsed_ns = now_ns.saturating_sub(self.looked_ns);
        if elapsed_ns < LOOK_INTERVAL_NS {
            return;
        }
        if self.switch_stacks * 1_000_000_000 / elapsed_ns > SWITCH_STACKS_PER_S_MAX {
            self.rings.retain(|ring| ring.source != RingSource::Switch);
            self.waits = Err(format!(
                "more than {SWITCH_STACKS_PER_S_MAX} context switches a second: \
                 their stacks would cost too much"
            ));
        }
        (self.switch_stacks, self.looked_ns) = (0, now_ns);
    }

    fn close(self, end_ns: u64) -> Profile {
        let line = self.timeline.finish(end_ns);
        Profile {
            stacks: self.symbols.map(|_| self.counts),
            line: line.ok_or_else(|| "no task of the job was ever seen on a CPU".into()),
            waits: self.waits,
            lost_count: self.lost_count,
        }
    }
}

fn open_rings(
    tid: u32,
    begin: Begin,
    cpus: &[u32],
    sources: &[RingSource],
) -> Result<Vec<CpuRing>, String> {
    // The rings of all CPUs share the memory that one user may lock.
    let pages = if cpus.len() <= 16 { 64 } else { 16 };
    let mut rings = Vec::new();
    for cpu in cpus {
        for source in sources {
            let refused = |what: &str, error: std::io::Error| {
                format!(
                    "{what} ({source:?} on CPU {cpu}): {error} (root, CAP_PERFMON or \
                     sysctl kernel.perf_event_paranoid=1 would help)"
                )
            };
            let event = Event::open(&spec(tid, begin, *cpu, *source))
                .map_err(|error| refused("perf_event_open", error))?;
            let records =
                Ring::new(&event, if *source == RingSource::Records { pages / 4 } else { pages })
                    .map_err(|error| refused("a ring for perf events", error))?;
            rings.push(CpuRing { source: *source, event, records, hung_up: false });
        }
    }
    Ok(rings)
}

fn spec(tid: u32, begin: Begin, cpu: u32, source: RingSource) -> EventSpec {
    let stacks = perf::FIELD_IP | perf::FIELD_TID | perf::FIELD_TIME | perf::FIELD_CALLCHAIN;
    let (kind, period, fields): (EventKind, u64, u64) = match source {
        RingSource::Clock => (perf::CPU_CLOCK, PERIOD_NS, stacks),
        RingSource::Switch => (perf::CONTEXT_SWITCH, 1, stacks),
        RingSource::Records => (perf::DUMMY, 1, perf::FIELD_TID | perf::FIELD_TIME),
    };
    EventSpec {
        pid: tid as i32,
        cpu: cpu as i32,
        sampling: Some(Sampling { period, fields }),
        inherit: true,
        exclude_kernel: source == RingSource::Records,
        exclude_callchain_user: true,
        enable_on_exec: begin == Begin::AtExec,
        task_records: source != RingSource::Switch,
        ..EventSpec::new(kind)
    }
}

/// Returns a task's state now, from /proc.
fn state_of(root: &Root, tid: u32) -> Result<TaskState, String> {
    let stat = root.text(&format!("/proc/{tid}/stat"))?;
    let is_running = StatLine::parse(&stat).is_some_and(|stat| stat.is_running());
    Ok(if is_running { TaskState::Running } else { TaskState::Waiting(Wait::Sleep) })
}

/// Returns the end time that was written to the eventfd.
fn end_of(stop: &OwnedFd) -> Option<u64> {
    let mut time_ns = [0; 8];
    let read = rustix::io::read(stop, &mut time_ns).ok()?;
    (read == time_ns.len()).then_some(u64::from_ne_bytes(time_ns))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_sleeps_and_computes() {
        let (go, wait_for_go) = mpsc::channel::<()>();
        let (tell, told) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            tell.send(rustix::thread::gettid().as_raw_nonzero().get() as u32).unwrap();
            wait_for_go.recv().unwrap();
            let begin = std::time::Instant::now();
            std::thread::sleep(std::time::Duration::from_millis(60));
            let used = || rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime).tv_nsec;
            let before = used();
            while (used() - before).abs() < 60_000_000 {}
            begin.elapsed().as_nanos() as u64
        });
        let profiler = Profiler::start(told.recv().unwrap(), Begin::Now).unwrap();
        go.send(()).unwrap();
        let wall_ns = thread.join().unwrap();
        let profile = profiler.finish();
        let line = profile.line.unwrap();
        let ms = |state| line.ns(state) / 1_000_000;
        assert!((50..90).contains(&ms(TaskState::Running)), "{line:?}");
        assert!(ms(TaskState::Waiting(Wait::Sleep)) >= 55, "{line:?}");
        assert!(line.total_ns().abs_diff(wall_ns) < wall_ns / 3, "{line:?} {wall_ns}");
    }
}
