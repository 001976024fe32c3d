//! The interface of a kernel call: it charges time, counts, waits, wakes and fails.
//!
//! Invariant: all CPU time that a kernel takes goes through [`Cx::charge`], under a row of the
//! budget, so that nothing is left unexplained.

use crate::tally::{CounterId, Tally};
use hdrhistogram::Histogram;
use pagetax_core::access::Rng;
use pagetax_core::cause::Account;

/// A cause of CPU time, in the order of [`Account::causes_of_jobs`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CpuRow {
    /// The user time of the accesses themselves. The engine charges it.
    Compute,
    /// Translation that counts as user time.
    Translation,
    /// The service of faults from memory.
    MinorFault,
    /// The zeroing and copying of pages.
    ZeroCopy,
    /// The scanning and freeing of pages.
    Reclaim,
    /// The moving of pages.
    Compaction,
    /// The work for page-in and page-out.
    Swap,
    /// All other time in the kernel.
    OtherKernel,
}

impl CpuRow {
    /// All rows, in order.
    pub const ALL: [CpuRow; 8] = [
        CpuRow::Compute,
        CpuRow::Translation,
        CpuRow::MinorFault,
        CpuRow::ZeroCopy,
        CpuRow::Reclaim,
        CpuRow::Compaction,
        CpuRow::Swap,
        CpuRow::OtherKernel,
    ];

    /// Returns the row's id in the report.
    pub fn id(self) -> &'static str {
        id(Account::Cpu, self as usize)
    }

    /// Returns true if time in this row is user time.
    pub fn is_user(self) -> bool {
        matches!(self, CpuRow::Compute | CpuRow::Translation)
    }
}

/// A cause of elapsed time, in the order of [`Account::causes_of_jobs`]. It is also the order of
/// precedence: the run is in the first of the states that any of its tasks is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum WallRow {
    /// Time on a CPU. The engine charges it.
    Running,
    /// Time ready to run while others have the CPU. The engine charges it.
    RunQueue,
    /// Time waiting for pages from files or servers.
    PageIn,
    /// Time waiting for pages from swap.
    SwapIn,
    /// Time waiting for reclaim.
    Throttle,
    /// Time asleep.
    Sleep,
}

impl WallRow {
    /// All rows, in order.
    pub const ALL: [WallRow; 6] = [
        WallRow::Running,
        WallRow::RunQueue,
        WallRow::PageIn,
        WallRow::SwapIn,
        WallRow::Throttle,
        WallRow::Sleep,
    ];

    /// Returns the row's id in the report.
    pub fn id(self) -> &'static str {
        id(Account::Wall, self as usize)
    }
}

fn id(account: Account, index: usize) -> &'static str {
    account.causes_of_jobs().nth(index).expect("the rows are the causes of jobs").id
}

/// CPU time by row, in nanoseconds.
pub type CpuTimes = [u64; CpuRow::ALL.len()];

/// A wait channel. Kernels choose their numbers below [`Channel::ENGINE`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Channel(pub u32);

impl Channel {
    /// The first of the engine's own channels.
    pub const ENGINE: u32 = 1 << 31;
}

/// The event that a task waits for after a kernel call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// A point of virtual time.
    Until(u64),
    /// A [`Cx::wake`] of the channel.
    On(Channel),
    /// The earlier of both.
    OnUntil(Channel, u64),
}

/// An operation that cannot be done. It ends the run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The reason, in the system's words.
    pub why: String,
    /// The hint: a change of the plan that helps.
    pub remedy: String,
}

/// Latency histograms by kind.
#[derive(Debug, Clone, Default)]
pub struct Latencies(Vec<Series>);

/// The latencies of one kind. Equal values in a row, as most are in a model, are recorded together.
#[derive(Debug, Clone)]
struct Series {
    kind: &'static str,
    histogram: Histogram<u64>,
    /// A value and its count that are not yet in the histogram.
    pending: (u64, u64),
}

/// The significant digits of the histograms: 0.1 %.
const LATENCY_DIGITS: u8 = 3;

impl Latencies {
    /// Adds `count` equal values.
    pub fn record(&mut self, kind: &'static str, ns: u64, count: u64) {
        // Most values are the same as the previous one.
        if let Some(first) = self.0.first_mut()
            && std::ptr::eq(first.kind, kind)
            && first.pending.0 == ns
        {
            first.pending.1 += count;
            return;
        }
        let known = |series: &Series| std::ptr::eq(series.kind, kind) || series.kind == kind;
        let index = match self.0.iter().position(known) {
            Some(index) => index,
            None => {
                let histogram = Histogram::new(LATENCY_DIGITS).expect("3 digits are allowed");
                self.0.push(Series { kind, histogram, pending: (ns, 0) });
                self.0.len() - 1
            }
        };
        let series = &mut self.0[index];
        if series.pending.0 != ns {
            series.settle();
            series.pending = (ns, 0);
        }
        series.pending.1 += count;
    }

    /// Returns the histograms in the order of their first use.
    pub fn iter(&mut self) -> impl Iterator<Item = (&'static str, &Histogram<u64>)> {
        self.0.iter_mut().map(|series| {
            series.settle();
            (series.kind, &series.histogram)
        })
    }
}

impl Series {
    fn settle(&mut self) {
        let (ns, count) = std::mem::take(&mut self.pending);
        if count > 0 {
            self.histogram.record_n(ns, count).expect("the histogram grows");
        }
    }
}

/// The state that outlives a kernel call: counters, latencies and the random generator.
#[derive(Debug)]
pub struct RunState {
    /// The counters of the run so far.
    pub tally: Tally,
    /// The latencies of the run.
    pub latencies: Latencies,
    /// The random generator of the simulation; the plan's streams have their own.
    pub rng: Rng,
}

/// The context of one kernel call.
#[derive(Debug)]
pub struct Cx<'a> {
    now: u64,
    limit_ns: u64,
    cpu: usize,
    /// The user time of this call's touches, in picoseconds. None if the kernel must return after each
    /// fault.
    touched_ps: Option<u64>,
    run_state: &'a mut RunState,
    spent_ns: u64,
    /// The time charged so far in this call, by row; the sum is `spent_ns`.
    pub spent: CpuTimes,
    /// The wait that [`Cx::wait`] has set.
    pub wait: Option<(Wait, WallRow)>,
    /// The channels that [`Cx::wake`] has woken.
    pub woken: Vec<Channel>,
    /// The failure that [`Cx::fail`] has set. Boxed, because every call's end is moved and few fail.
    pub failure: Option<Box<Failure>>,
}

impl<'a> Cx<'a> {
    /// Creates the context of a call at `now` on `cpu`; the CPU is needed elsewhere after `limit_ns`.
    pub fn new(now: u64, limit_ns: u64, cpu: usize, run_state: &'a mut RunState) -> Self {
        let (spent, wait, failure) = (CpuTimes::default(), None, None);
        let (touched_ps, woken) = (None, Vec::new());
        Cx { now, limit_ns, cpu, touched_ps, run_state, spent_ns: 0, spent, wait, woken, failure }
    }

    /// Lets the kernel touch on and serve further faults, as long as [`Cx::may_go_on`]; `carry_ps` of
    /// user time below a nanosecond have not been charged yet.
    pub fn going_on(mut self, carry_ps: u64) -> Self {
        self.touched_ps = Some(carry_ps);
        self
    }

    /// Returns true if the task may serve another fault in this call.
    pub fn may_go_on(&self) -> bool {
        let stops = self.wait.is_some() || self.failure.is_some();
        self.touched_ps.is_some() && self.left_ns() > 0 && !stops
    }

    /// Notes that the kernel has advanced past touches that take `ps` of user time. The engine charges them
    /// after the call, but virtual time advances now.
    pub fn touched(&mut self, ps: u64) {
        if let Some(touched_ps) = &mut self.touched_ps {
            *touched_ps += ps;
        }
    }

    /// Returns the time until the CPU is needed elsewhere.
    pub fn left_ns(&self) -> u64 {
        self.limit_ns.saturating_sub(self.spent_ns() + self.touched_ps.unwrap_or(0) / 1000)
    }

    /// Returns the virtual time in nanoseconds, with what this call has spent so far.
    pub fn now(&self) -> u64 {
        self.now + self.spent_ns() + self.touched_ps.unwrap_or(0) / 1000
    }

    /// Returns the CPU of the call.
    pub fn cpu(&self) -> usize {
        self.cpu
    }

    /// Returns the time that this call has been charged so far.
    pub fn spent_ns(&self) -> u64 {
        self.spent_ns
    }

    /// Returns the number of pieces of work of `each_ns` that may begin before the CPU is needed elsewhere,
    /// at least one. For kernels that serve several faults in one call.
    pub fn affordable(&self, each_ns: u64) -> u64 {
        self.left_ns().div_ceil(each_ns.max(1)).max(1)
    }

    /// Charges CPU time to a row of the budget.
    pub fn charge(&mut self, row: CpuRow, ns: u64) {
        self.spent[row as usize] += ns;
        self.spent_ns += ns;
    }

    /// Adds `n` events to a counter.
    pub fn count(&mut self, counter: CounterId, n: u64) {
        self.run_state.tally.add(counter, n);
    }

    /// Raises a high-water mark to `n`.
    pub fn at_least(&mut self, counter: CounterId, n: u64) {
        self.run_state.tally.at_least(counter, n);
    }

    /// Records `count` events that took `ns` each, waiting included.
    pub fn latency(&mut self, kind: &'static str, ns: u64, count: u64) {
        self.run_state.latencies.record(kind, ns, count);
    }

    /// Makes the calling task give up the CPU when the call returns. The time until it can run again counts
    /// under `row`. The last call of `wait` wins.
    pub fn wait(&mut self, wait: Wait, row: WallRow) {
        self.wait = Some((wait, row));
    }

    /// Wakes all tasks that wait on `channel`.
    pub fn wake(&mut self, channel: Channel) {
        self.woken.push(channel);
    }

    /// Fails the operation and ends the run. The first failure wins.
    pub fn fail(&mut self, why: impl Into<String>, remedy: impl Into<String>) {
        let failure = || Box::new(Failure { why: why.into(), remedy: remedy.into() });
        self.failure.get_or_insert_with(failure);
    }

    /// Returns the random generator.
    pub fn rng(&mut self) -> &mut Rng {
        &mut self.run_state.rng
    }

    /// Returns `ns`, changed at random by at most `percent`.
    pub fn jitter(&mut self, ns: u64, percent: u64) -> u64 {
        let half_width = ns * percent / 100;
        ns - half_width + self.run_state.rng.below(2 * half_width + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_state() -> RunState {
        RunState { tally: Tally::new(), latencies: Latencies::default(), rng: Rng::new(1) }
    }

    #[test]
    fn rows_are_cores_causes() {
        let named = |id: &str, name: String| id.replace('_', "") == name.to_lowercase();
        assert!(CpuRow::ALL.iter().all(|row| named(row.id(), format!("{row:?}"))));
        assert!(WallRow::ALL.iter().all(|row| named(row.id(), format!("{row:?}"))));
        let [cpu, wall] = Account::ALL.map(|account| account.causes_of_jobs().count());
        assert_eq!((cpu, wall), (CpuRow::ALL.len(), WallRow::ALL.len()));
    }

    #[test]
    fn work_is_begun_until_the_limit() {
        let mut run_state = run_state();
        let mut cx = Cx::new(5, 100, 0, &mut run_state);
        assert_eq!(cx.affordable(30), 4);
        cx.charge(CpuRow::MinorFault, 95);
        assert_eq!((cx.now(), cx.affordable(30)), (100, 1));
        cx.charge(CpuRow::MinorFault, 95);
        assert_eq!(cx.affordable(30), 1);
        assert!(!cx.may_go_on());
    }

    #[test]
    fn touches_take_time_before_they_are_charged() {
        let mut run_state = run_state();
        let mut cx = Cx::new(0, 10, 0, &mut run_state).going_on(600);
        cx.touched(8_399);
        assert_eq!((cx.now(), cx.left_ns(), cx.spent_ns()), (8, 2, 0));
        cx.charge(CpuRow::MinorFault, 1);
        assert!(cx.may_go_on());
        cx.touched(1_001);
        assert!(!cx.may_go_on());
    }

    #[test]
    fn jitter_stays_within_its_width() {
        let mut run_state = run_state();
        let mut cx = Cx::new(0, 0, 0, &mut run_state);
        let seen: Vec<_> = (0..1000).map(|_| cx.jitter(1000, 20)).collect();
        assert!(seen.iter().all(|ns| (800..=1200).contains(ns)));
        assert!(seen.iter().any(|ns| *ns < 850) && seen.iter().any(|ns| *ns > 1150));
    }
}
