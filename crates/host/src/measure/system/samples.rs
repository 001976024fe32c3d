//! Stacks of all tasks of the machine: a timer on each CPU, and the switches to waits for memory.
//!
//! Invariants: the collector keeps counts, not samples. It has no thread of its own, so its caller has to
//! [`look`](SystemCollector::look) at least five times a second.

use crate::measure::stacks::{Detail, RingSource, Symbols, Wait, Work, lost};
use crate::procfs::{Root, online_cpus};
use crate::sys::perf::{
    self, Event, EventKind, EventSpec, PerfRecord, Ring, Sampling, monotonic_ns,
};
use std::collections::HashMap;

/// The samples that all CPUs together take in a second when all are busy. Each costs some 20 us on a virtual
/// machine, so that they take 0.2 % of a CPU.
const SAMPLES_PER_S: u64 = 100;
/// The most context switches a second whose stacks are collected. They cost 1 to 2 us each.
const SWITCHES_PER_S_MAX: u64 = 2_000;
/// The pages of a ring: records of 200 ms have room in it.
const RING_PAGES: usize = 64;

/// The rows of the CPU ledger that samples tell apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Row {
    /// User mode.
    User,
    /// Kernel mode, by the stack's work.
    Work(Work),
    /// Kernel mode, by the stack's detail: [`Detail::Shootdown`] or [`Detail::PageTable`].
    Detail(Detail),
}

/// All rows, as [`TaskCounts::rows`] has them.
pub const ROWS: [Row; 9] = [
    Row::User,
    Row::Work(Work::Fault),
    Row::Work(Work::ZeroCopy),
    Row::Work(Work::Reclaim),
    Row::Work(Work::Compaction),
    Row::Work(Work::Swap),
    Row::Detail(Detail::PageTable),
    Row::Detail(Detail::Shootdown),
    Row::Work(Work::Other),
];

impl Row {
    /// Returns the id of the row's cause.
    pub fn id(self) -> &'static str {
        match self {
            Row::User => "compute",
            Row::Work(work) => work.row(),
            Row::Detail(Detail::PageTable) => "page_table",
            Row::Detail(_) => "shootdown",
        }
    }

    /// Returns the row of a stack in the kernel. A shootdown is one wherever it is needed. Page tables that a
    /// fault makes belong to the fault.
    fn of(work: Option<Work>, detail: Option<Detail>) -> Option<Row> {
        match (work, detail) {
            (_, Some(Detail::Shootdown)) => Some(Row::Detail(Detail::Shootdown)),
            (None | Some(Work::Other), Some(Detail::PageTable)) => {
                Some(Row::Detail(Detail::PageTable))
            }
            (work, _) => work.map(Row::Work),
        }
    }
}

/// The samples and the waits of one process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TaskCounts {
    /// The number of samples of each of [`ROWS`].
    pub rows: [u64; ROWS.len()],
    /// The number of samples in the kernel whose row is not known.
    pub unknown: u64,
    /// The number of samples in an allocation of memory.
    pub allocations: u64,
    /// The waits for memory of all its tasks, in nanoseconds, in the order of [`WAITS`].
    pub waits_ns: [u64; WAITS.len()],
}

/// The waits for memory.
pub const WAITS: [Wait; 3] = [Wait::PageIn, Wait::SwapIn, Wait::Throttle];

impl TaskCounts {
    /// Returns the number of all samples.
    pub fn samples(&self) -> u64 {
        self.rows.iter().sum::<u64>() + self.unknown
    }

    /// Adds those of another process, or of another interval.
    pub fn add(&mut self, other: &TaskCounts) {
        self.rows.iter_mut().zip(other.rows).for_each(|(sum, count)| *sum += count);
        self.waits_ns.iter_mut().zip(other.waits_ns).for_each(|(sum, ns)| *sum += ns);
        self.unknown += other.unknown;
        self.allocations += other.allocations;
    }
}

/// The samples of an interval.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SystemSamples {
    /// The counts of each process by its id.
    pub processes: HashMap<u32, TaskCounts>,
    /// Ok if waits were seen; else the reason.
    pub waits: Result<(), String>,
    /// The number of records that found no room.
    pub lost_count: u64,
}

impl SystemSamples {
    /// Returns the number of samples of all processes.
    pub fn count(&self) -> u64 {
        self.processes.values().map(TaskCounts::samples).sum()
    }

    /// Adds those of the next interval. Waits that were not seen once are not known.
    pub fn add(&mut self, next: &SystemSamples) {
        for (pid, counts) in &next.processes {
            self.processes.entry(*pid).or_default().add(counts);
        }
        self.waits = std::mem::replace(&mut self.waits, Ok(())).and(next.waits.clone());
        self.lost_count += next.lost_count;
    }
}

/// A wait that has not ended.
#[derive(Debug)]
struct Open {
    pid: u32,
    wait: usize,
    since_ns: u64,
}

/// The open events of all CPUs. Dropping it closes them.
#[derive(Debug)]
pub struct SystemCollector {
    symbols: &'static Symbols,
    cpus: Vec<u32>,
    rings: Vec<(RingSource, Event, Ring)>,
    processes: HashMap<u32, TaskCounts>,
    open: HashMap<u32, Open>,
    switches: u64,
    looked_ns: u64,
    waits: Result<(), String>,
    lost_count: u64,
}

impl SystemCollector {
    /// Starts to collect. Errors show why the machine does not allow it.
    pub fn start() -> Result<SystemCollector, String> {
        let symbols = Symbols::of_this_kernel()?;
        let cpus = online_cpus(&Root::default())?;
        let rings = open_all(&[RingSource::Clock, RingSource::Switch, RingSource::Records], &cpus)?;
        Ok(SystemCollector {
            symbols,
            cpus,
            rings,
            processes: HashMap::new(),
            open: HashMap::new(),
            switches: 0,
            looked_ns: monotonic_ns(),
            waits: Ok(()),
            lost_count: 0,
        })
    }

    /// Reads the new records of all rings.
    pub fn look(&mut self) {
        let mut ends = Vec::new();
        let SystemCollector { rings, symbols, processes, open, switches, lost_count, .. } = self;
        for (source, _, ring) in rings.iter_mut() {
            ring.drain(|record| match record.kind {
                perf::RECORD_LOST => *lost_count += lost(&record).unwrap_or(0),
                perf::RECORD_SAMPLE if *source == RingSource::Clock => {
                    count(processes, symbols, &record)
                }
                perf::RECORD_SAMPLE => {
                    *switches += 1;
                    if let Some((tid, begun)) = begun(symbols, &record) {
                        open.insert(tid, begun);
                    }
                }
                perf::RECORD_SWITCH_CPU_WIDE if record.misc & perf::MISC_SWITCH_OUT == 0 => {
                    if let [.., task, time_ns] = *record.words {
                        ends.push(((task >> 32) as u32, time_ns));
                    }
                }
                _ => {}
            });
        }
        // A task's wait begins on one CPU and may end on another, whose ring may have been read before.
        for (tid, end_ns) in ends {
            if self.open.get(&tid).is_some_and(|open| open.since_ns < end_ns) {
                let open = self.open.remove(&tid);
                open.into_iter().for_each(|open| self.close(&open, end_ns));
            }
        }
        self.guard_cost();
    }

    fn close(&mut self, open: &Open, end_ns: u64) {
        let counts = self.processes.entry(open.pid).or_default();
        counts.waits_ns[open.wait] += end_ns.saturating_sub(open.since_ns);
    }

    /// Leaves the switches out until the next interval if they come too fast to be cheap.
    fn guard_cost(&mut self) {
        let now_ns = monotonic_ns();
        let elapsed_ns = now_ns.saturating_sub(self.looked_ns).max(1);
        if self.switches * 1_000_000_000 / elapsed_ns > SWITCHES_PER_S_MAX
            && elapsed_ns > 50_000_000
        {
            self.rings.retain(|(source, ..)| *source == RingSource::Clock);
            self.open.clear();
            self.waits = Err(format!(
                "more than {SWITCHES_PER_S_MAX} context switches a second: their stacks would cost too much"
            ));
        }
        (self.switches, self.looked_ns) = (0, now_ns);
    }

    /// Returns the processes that were seen since the last [`SystemCollector::take`].
    pub fn pids(&self) -> impl Iterator<Item = u32> + '_ {
        self.processes.keys().copied()
    }

    /// Returns what was seen since the last call.
    pub fn take(&mut self) -> SystemSamples {
        self.look();
        let now_ns = monotonic_ns();
        let mut open = std::mem::take(&mut self.open);
        for open in open.values_mut() {
            self.close(open, now_ns);
            open.since_ns = now_ns.max(open.since_ns);
        }
        self.open = open;
        let samples = SystemSamples {
            processes: std::mem::take(&mut self.processes),
            waits: std::mem::replace(&mut self.waits, Ok(())),
            lost_count: std::mem::take(&mut self.lost_count),
        };
        if samples.waits.is_err() {
            match open_all(&[RingSource::Switch, RingSource::Records], &self.cpus) {
                Ok(rings) => self.rings.extend(rings),
                Err(why) => self.waits = Err(why),
            }
        }
        samples
    }
}

/// Counts a sample of the timer.
fn count(processes: &mut HashMap<u32, TaskCounts>, symbols: &Symbols, record: &PerfRecord<'_>) {
    let Some((pid, _, _, stack)) = sample(record) else { return };
    let counts = processes.entry(pid).or_default();
    let row = match record.misc & perf::MISC_CPUMODE_MASK {
        perf::MISC_USER => Some(Row::User),
        _ => {
            let (detail, allocates) = symbols.detail(stack);
            counts.allocations += u64::from(allocates);
            Row::of(symbols.work(stack), detail)
        }
    };
    match row.and_then(|row| ROWS.iter().position(|known| *known == row)) {
        Some(index) => counts.rows[index] += 1,
        None => counts.unknown += 1,
    }
}

/// Returns the wait for memory that a task begins.
fn begun(symbols: &Symbols, record: &PerfRecord<'_>) -> Option<(u32, Open)> {
    let (pid, tid, since_ns, stack) = sample(record)?;
    let reason = symbols.wait(stack);
    let wait = WAITS.iter().position(|wait| *wait == reason)?;
    Some((tid, Open { pid, wait, since_ns }))
}

/// Returns a sample's process, thread, time and stack.
fn sample<'a>(record: &PerfRecord<'a>) -> Option<(u32, u32, u64, &'a [u64])> {
    let [_, task, time_ns, frames, ref rest @ ..] = *record.words else { return None };
    Some((task as u32, (task >> 32) as u32, time_ns, rest.get(..frames as usize)?))
}

fn open_all(
    sources: &[RingSource],
    cpus: &[u32],
) -> Result<Vec<(RingSource, Event, Ring)>, String> {
    let each = cpus.iter().flat_map(|cpu| sources.iter().map(|source| (*source, *cpu)));
    each.map(|(source, cpu)| open(source, cpu, cpus.len())).collect()
}

fn open(source: RingSource, cpu: u32, cpus: usize) -> Result<(RingSource, Event, Ring), String> {
    let refused = |error: std::io::Error| {
        format!(
            "perf_event_open ({source:?} on CPU {cpu}): {error} (root, CAP_PERFMON or sysctl \
             kernel.perf_event_paranoid=0 would help)"
        )
    };
    let stacks = perf::FIELD_IP | perf::FIELD_TID | perf::FIELD_TIME | perf::FIELD_CALLCHAIN;
    let period_ns = cpus as u64 * 1_000_000_000 / SAMPLES_PER_S;
    let (kind, period, fields): (EventKind, u64, u64) = match source {
        RingSource::Clock => (perf::CPU_CLOCK, period_ns, stacks),
        RingSource::Switch => (perf::CONTEXT_SWITCH, 1, stacks),
        RingSource::Records => (perf::DUMMY, 1, perf::FIELD_TID | perf::FIELD_TIME),
    };
    let spec = EventSpec {
        pid: -1,
        cpu: cpu as i32,
        sampling: Some(Sampling { period, fields }),
        exclude_kernel: false,
        exclude_idle: source == RingSource::Clock,
        exclude_callchain_user: true,
        task_records: source == RingSource::Records,
        ..EventSpec::new(kind)
    };
    let event = Event::open(&spec).map_err(refused)?;
    let ring = Ring::new(&event, RING_PAGES).map_err(refused)?;
    Ok((source, event, ring))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shootdown_and_a_page_table_have_rows_where_no_fault_needs_them() {
        let row = |work, detail| Row::of(work, detail).map(Row::id);
        assert_eq!(row(Some(Work::Fault), Some(Detail::Shootdown)), Some("shootdown"));
        assert_eq!(row(Some(Work::Fault), Some(Detail::PageTable)), Some("minor_fault"));
        assert_eq!(row(Some(Work::Other), Some(Detail::PageTable)), Some("page_table"));
        assert_eq!(row(Some(Work::Other), Some(Detail::Allocation)), Some("other_kernel"));
        assert_eq!(row(None, Some(Detail::PageTable)), Some("page_table"));
        assert_eq!(row(None, None), None);
    }

    #[test]
    fn busy_threads_of_this_process_are_sampled() {
        let Ok(mut collector) = SystemCollector::start() else {
            println!("SKIP: system-wide samples need root or perf_event_paranoid=0");
            return;
        };
        let begun = std::time::Instant::now();
        while begun.elapsed().as_millis() < 400 {
            // So many bytes are new pages each time.
            drop(std::hint::black_box(vec![1u8; 64 << 20]));
            collector.look();
        }
        let seen = collector.take();
        let own = &seen.processes[&std::process::id()];
        assert!(own.samples() >= 5, "{own:?}");
        assert!(own.allocations > 0, "{own:?}");
    }
}
