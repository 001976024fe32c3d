//! The tax of processes that already run, by an experiment: their memory is collapsed to huge pages and
//! split again, in turn, while their progress is counted.
//!
//! Each cycle has three windows: on base pages after calls that changed nothing, on huge pages, and on
//! base pages again. The cost of a window is its CPU time for each unit of progress. The check compares
//! the two windows beside the calls that changed nothing. The first cycles may have only a part of the
//! memory; the speed-up is that of the cycles with the most of it.
//!
//! A split leaves base pages in the order of their addresses, on memory that was one block. These can be
//! faster than the pages that a process was found with. So all blocks are collapsed and split once before
//! the cycles. The windows before and after that show what the order gains. That change cannot be
//! repeated, so a drift of the machine does not cancel in it. All windows together show how much costs
//! drift ([`crate::local_level`]), and so how exact the speed-up over pages as found is.

use crate::diagnosis::{GAIN_MIN, Verdict};
use crate::document::Document;
use crate::local_level::{Effects, Value};
use crate::report::Warning;
use crate::sequential::Stopping;
use crate::stats::{Ratio, quantiles};
use crate::system_stat::SystemInterval;
use crate::units::Bytes;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// The widest half of an interval with which the experiment may end early.
const HALF_WIDTH_MAX: f64 = 0.05;
/// The comparisons of an experiment: the speed-up and the check.
const COMPARISONS: usize = 2;
/// The probability that the interval of the order excludes the truth. Nothing is decided by it.
const ORDER_ERROR: f64 = 0.05;
/// The smallest share of the memory on base pages that must be tried to rule a gain out.
const TRIED_MIN: f64 = 0.9;
/// The cycles that the speed-up needs.
const CYCLES_MIN: usize = 2;
// The states: base pages as found, base pages in the order of addresses, huge pages.
const FOUND: usize = 0;
const ORDER: usize = 1;
const HUGE: usize = 2;
/// The powers of the probes' times, near and far, that costs go with where windows do not tell.
const POWERS: [f64; 2] = [0.5, 0.25];
/// The weight of these, in squared logarithms: what a window's probe varies by on a quiet machine.
const POWER_WEIGHT: f64 = 0.015 * 0.015;
/// The largest power.
const POWER_MAX: f64 = 3.0;
/// The largest logarithm of a probe's time relative to the usual one: single windows have some times
/// that, and the cost of the program hardly follows.
const SLOWER_MAX: f64 = 0.25;
/// The fewest units of a window: with fewer, a whole number is too coarse.
pub const UNITS_MIN: u64 = 50;

/// The tax of running processes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LiveTax {
    /// The processes.
    pub processes: Vec<LiveProcess>,
    /// The source of progress.
    pub progress: String,
    /// The time that the whole experiment took, in nanoseconds.
    pub elapsed_ns: u64,
    /// Anonymous memory on base pages, in blocks of 2M of which nine tenths are there.
    pub base_bytes: u64,
    /// The part of it that was collapsed and split, in the cycles that give the speed-up.
    pub tried_bytes: u64,
    /// The most by which the processes grow: what lacks of a block becomes zeros, and stays.
    pub growth_bytes: u64,
    /// The bytes that the first collapse could not put on huge pages.
    pub failed_bytes: u64,
    /// The processes before any change. No unit if no progress was seen.
    pub before: Window,
    /// The parts of that time.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub as_found: Vec<Window>,
    /// Windows after all blocks were collapsed and split, as many: base pages lie in the order of
    /// addresses.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub in_order: Vec<Window>,
    /// The speed-up of base pages by that order. It is a part of the speed-up by huge pages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub order: Option<Ratio>,
    /// All cycles.
    pub cycles: Vec<Cycle>,
    /// The speed-up by huge pages over base pages as they were found, by CPU time for each unit.
    pub speedup: Option<Ratio>,
    /// The speed-up by calls that change nothing: 1 if the experiment can be trusted.
    pub check: Option<Ratio>,
    /// The time after which the speed-up's interval first left no doubt whether there is a gain, in
    /// nanoseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decided_ns: Option<u64>,
    /// Units for each second of the experiment, divided by those before it.
    pub throughput: Option<f64>,
    /// The stops of threads that made calls; 0 if calls came from outside.
    pub stop_count: u64,
    /// The longest of these stops, in nanoseconds.
    pub stop_ns_max: u64,
    /// The longest call about one block of 2M, in nanoseconds: a thread that touches it waits so long.
    pub block_ns_max: u64,
    /// The kinds of pages of the tried memory that are not as they were before.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub changes: Vec<String>,
    /// The costs by cause before any change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget: Option<SystemInterval>,
    /// The result.
    pub verdict: Verdict,
    /// The limits of the result.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<Warning>,
}

impl Document for LiveTax {
    const KIND: &'static str = "live_tax";
}

/// A process of an experiment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LiveProcess {
    /// Its id.
    pub pid: u32,
    /// Its name.
    pub command: String,
}

/// A stretch of time in which nothing was changed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Window {
    /// The progress.
    pub unit_count: u64,
    /// The CPU time of all threads, in nanoseconds.
    pub cpu_ns: u64,
    /// The length in nanoseconds.
    pub wall_ns: u64,
    /// The begin, in nanoseconds since the experiment began.
    #[serde(default)]
    pub begin_ns: u64,
    /// The time of the speed probe's piece of work in the median of its bursts, in nanoseconds. None
    /// without a probe.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probe_ns: Option<u64>,
    /// The same time of a probe of more memory than caches hold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub far_probe_ns: Option<u64>,
}

impl Window {
    /// Returns the logarithm of the CPU time of a unit; none without progress.
    fn cost_log(&self) -> Option<f64> {
        let has_cost = self.unit_count > 0 && self.cpu_ns > 0;
        has_cost.then(|| (self.cpu_ns as f64 / self.unit_count as f64).ln())
    }

    /// Returns the logarithms of the probes' times; none of a probe that there was not.
    fn probe_logs(&self) -> [Option<f64>; 2] {
        let log = |ns: u64| (ns as f64).ln();
        [self.probe_ns, self.far_probe_ns].map(|ns| ns.filter(|ns| *ns > 0).map(log))
    }

    /// Returns windows that follow each other as one, with the mean of the probe's times.
    pub fn whole(windows: &[Window]) -> Window {
        let sum = |of: fn(&Window) -> u64| windows.iter().map(of).sum::<u64>();
        let mean = |of: fn(&Window) -> Option<u64>| {
            let probed = || windows.iter().filter_map(|one| Some((of(one)?, one.wall_ns)));
            let all_ns = probed().map(|(_, wall_ns)| wall_ns).sum::<u64>();
            let sum = probed().map(|(ns, wall_ns)| ns as f64 * wall_ns as f64).sum::<f64>();
            (all_ns > 0).then(|| (sum / all_ns as f64) as u64)
        };
        Window {
            unit_count: sum(|one| one.unit_count),
            cpu_ns: sum(|one| one.cpu_ns),
            wall_ns: sum(|one| one.wall_ns),
            begin_ns: windows.first().map_or(0, |first| first.begin_ns),
            probe_ns: mean(|one| one.probe_ns),
            far_probe_ns: mean(|one| one.far_probe_ns),
        }
    }

    /// Returns the units for each second.
    pub fn rate(&self) -> f64 {
        self.unit_count as f64 * 1e9 / self.wall_ns.max(1) as f64
    }
}

/// Three windows that follow each other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Cycle {
    /// The bytes that were collapsed and split.
    pub tried_bytes: u64,
    /// The window on base pages, after calls that changed nothing.
    pub unchanged: Window,
    /// The window on huge pages.
    pub huge: Window,
    /// The window on base pages again.
    pub split: Window,
}

/// The speed of the machine, by two probes: costs go with a power of the time of each.
#[derive(Debug, Clone, Copy, Default)]
struct Speed {
    powers: [f64; 2],
    /// The medians of the logarithms of the probes' times.
    usual_logs: [f64; 2],
}

impl Speed {
    /// Estimates the powers from the windows of each kind by themselves, so that no effect of pages
    /// enters them.
    fn of(live: &LiveTax) -> Speed {
        let kinds: [Vec<Window>; 3] = [
            live.as_found.clone(),
            live.base_windows(),
            live.cycles_with(live.tried_bytes).map(|cycle| cycle.huge).collect(),
        ];
        let usual_log = |probe: usize| {
            let logs = kinds.iter().flatten().filter_map(|window| window.probe_logs()[probe]);
            let logs: Vec<f64> = logs.collect();
            if logs.is_empty() { 0.0 } else { quantiles(&logs, [0.5])[0] }
        };
        let mut speed = Speed { powers: POWERS, usual_logs: [0, 1].map(usual_log) };
        // The squares and products of distances from the mean of each kind.
        let [mut near, mut both, mut far] = [POWER_WEIGHT, 0.0, POWER_WEIGHT];
        let mut with_cost = POWERS.map(|power| power * POWER_WEIGHT);
        for windows in kinds {
            let row = |window: &Window| {
                let [near, far] = speed.slower(window);
                Some([near, far, window.cost_log()?])
            };
            let rows: Vec<[f64; 3]> = windows.iter().filter_map(row).collect();
            let mean = |column: usize| {
                rows.iter().map(|row| row[column]).sum::<f64>() / rows.len().max(1) as f64
            };
            let means = [0, 1, 2].map(mean);
            for row in &rows {
                let [x, y, cost] = [0, 1, 2].map(|column| row[column] - means[column]);
                (near, both, far) = (near + x * x, both + x * y, far + y * y);
                with_cost = [with_cost[0] + x * cost, with_cost[1] + y * cost];
            }
        }
        let determinant = near * far - both * both;
        let [x, y] = with_cost;
        let powers = [far * x - both * y, near * y - both * x];
        speed.powers = powers.map(|power| (power / determinant).clamp(0.0, POWER_MAX));
        speed
    }

    /// Returns by how much each probe was slower than usual in a window, as a logarithm. A window without
    /// a probe was as usual. So was one whose probe met something that no program meets, but for a limit.
    fn slower(&self, window: &Window) -> [f64; 2] {
        let logs = window.probe_logs();
        [0, 1].map(|probe| {
            let slower = logs[probe].map_or(0.0, |log| log - self.usual_logs[probe]);
            slower.clamp(-SLOWER_MAX, SLOWER_MAX)
        })
    }

    /// Returns the logarithm of the cost of a window at the usual speed.
    fn cost_log(&self, window: &Window) -> Option<f64> {
        let [near, far] = self.slower(window);
        Some(window.cost_log()? - self.powers[0] * near - self.powers[1] * far)
    }

    /// Returns that cost in millionths of a nanosecond.
    fn cost(&self, window: &Window) -> Option<u64> {
        let cost = (self.cost_log(window)?.exp() * 1e6) as u64;
        Some(cost).filter(|cost| *cost > 0)
    }
}

impl Cycle {
    /// Returns the gain in units for each second on huge pages, as a share; none without progress.
    pub fn gain(&self) -> Option<f64> {
        let base = (self.unchanged.rate() * self.split.rate()).sqrt();
        (base > 0.0).then(|| self.huge.rate() / base - 1.0)
    }
}

impl LiveTax {
    /// Compares the windows, by a rule of stopping.
    pub fn compare(&mut self, stopping: Stopping) {
        let tried: BTreeSet<u64> = self.cycles.iter().map(|cycle| cycle.tried_bytes).collect();
        let enough = |bytes: &u64| self.cycles_with(*bytes).count() >= CYCLES_MIN;
        let most = tried.into_iter().rev().find(enough);
        self.tried_bytes = most.unwrap_or(self.tried_bytes);
        let speed = Speed::of(self);
        let effects = most.and_then(|bytes| Effects::of(&self.values(&speed, bytes)));
        let faster = |state: usize, error: f64| {
            let (value, low, high) = effects?.of_state(state, error);
            Some(Ratio { value: (-value).exp(), low: (-high).exp(), high: (-low).exp() })
        };
        let error = stopping.error(self.cycles_with(self.tried_bytes).count(), COMPARISONS);
        (self.order, self.speedup) = (faster(ORDER, ORDER_ERROR), faster(HUGE, error));
        let earlier = self.in_order.last().into_iter().chain(self.cycles.iter().map(|c| &c.split));
        let pairs = earlier.zip(self.cycles.iter().map(|cycle| &cycle.unchanged));
        let pairs = pairs.filter_map(|(one, other)| Some((speed.cost(one)?, speed.cost(other)?)));
        let (one, other): (Vec<u64>, Vec<u64>) = pairs.unzip();
        self.check = stopping.ratio(&one, &other, &[], COMPARISONS);
    }

    /// Returns the costs of all windows in the order of time, but for those on other huge pages.
    fn values(&self, speed: &Speed, tried_bytes: u64) -> Vec<Value> {
        let found = self.as_found.iter().map(|window| (FOUND, window));
        let order = self.in_order.iter().map(|window| (ORDER, window));
        let of_cycles = self.cycles.iter().flat_map(|cycle| {
            [(ORDER, &cycle.unchanged), (HUGE, &cycle.huge), (ORDER, &cycle.split)]
                .into_iter()
                .filter(|(state, _)| *state != HUGE || cycle.tried_bytes == tried_bytes)
        });
        let value = |(state, window): (usize, &Window)| {
            let length = window.wall_ns as f64;
            let at = window.begin_ns as f64 + length / 2.0;
            Some(Value { at, length, value: speed.cost_log(window)?, state })
        };
        found.chain(order).chain(of_cycles).filter_map(value).collect()
    }

    /// Returns all windows on base pages in order.
    fn base_windows(&self) -> Vec<Window> {
        let of_cycles = self.cycles.iter().flat_map(|cycle| [cycle.unchanged, cycle.split]);
        self.in_order.iter().copied().chain(of_cycles).collect()
    }

    /// Returns the cycles in which so many bytes were tried.
    pub fn cycles_with(&self, tried_bytes: u64) -> impl Iterator<Item = &Cycle> {
        self.cycles.iter().filter(move |cycle| cycle.tried_bytes == tried_bytes)
    }

    /// Returns true if there is a gain, or none, without doubt.
    pub fn is_clear(&self) -> bool {
        let clear = |ratio: &Ratio| ratio.low >= 1.0 + GAIN_MIN || ratio.high < 1.0 + GAIN_MIN;
        self.speedup.as_ref().is_some_and(clear)
    }

    /// Returns true if more cycles would not change the answer.
    pub fn is_settled(&self) -> bool {
        let narrow = |ratio: &Ratio| ratio.high - ratio.low <= 2.0 * HALF_WIDTH_MAX;
        self.is_clear() && self.speedup.as_ref().is_some_and(narrow)
    }

    /// Writes the verdict: the gain, or the reason why there is none.
    pub fn judge(&mut self) {
        let (winner, reason) = match self.gain() {
            Ok(words) => (Some("thp-2M".to_string()), words),
            Err(words) => (None, words),
        };
        let pids: Vec<_> = self.processes.iter().map(|process| process.pid.to_string()).collect();
        let apply = format!("pagetax ppgsz -o heap=2M,anon=2M -p {}", pids.join(","));
        self.verdict = Verdict {
            apply: winner.is_some().then_some(apply),
            winner,
            reason,
            ..Verdict::default()
        };
    }

    fn gain(&self) -> Result<String, String> {
        let no_verdict = |why: &str| Err(format!("no verdict: {why}"));
        if self.tried_bytes == 0 {
            return Err(
                "nothing to try: no 2M block of anonymous memory is full of base pages".into()
            );
        }
        if self.before.unit_count == 0 {
            let how = "name one: --progress probe:FUNCTION or --progress command:LINE";
            return no_verdict(&format!("{} show no progress; {how}", self.progress));
        }
        let Some(speedup) = self.speedup else {
            return no_verdict("too few windows had progress; give it more time (--for 5min)");
        };
        if self.failed_bytes * 10 > self.tried_bytes {
            return no_verdict("the kernel had no huge pages for more than a tenth of the memory");
        }
        if let Some(check) = self.check.filter(|check| !check.holds_one()) {
            let why = format!(
                "windows with nothing changed differ by {check}; try again when the load is steady"
            );
            return no_verdict(&why);
        }
        let percent = GAIN_MIN * 100.0;
        if speedup.low > 1.0 && speedup.value >= 1.0 + GAIN_MIN {
            return Ok(format!("huge pages make it {speedup} times as fast by CPU time"));
        }
        if (self.tried_bytes as f64) < TRIED_MIN * self.base_bytes as f64 {
            let (tried, base) = (Bytes(self.tried_bytes), Bytes(self.base_bytes));
            let why =
                format!("there was time for {tried} of {base} only; give it more (--for 5min)");
            return no_verdict(&why);
        }
        if speedup.high < 1.0 + GAIN_MIN {
            return Err(format!(
                "nothing to gain: huge pages make it {speedup} times as fast, less than {percent:.0} %"
            ));
        }
        Err(format!(
            "undecided: huge pages make it {speedup} times as fast, so a gain of {percent:.0} % is neither shown nor \
             ruled out; give it more time (--for 5min)"
        ))
    }

    /// Returns the share of CPU time that base pages cost, with its bounds, by the speed-up.
    pub fn tax(&self) -> Option<(f64, f64, f64)> {
        let share = |ratio: f64| (1.0 - 1.0 / ratio).max(0.0);
        self.speedup.map(|speedup| (share(speedup.value), share(speedup.low), share(speedup.high)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::Rng;

    /// The cost of base pages as found, where others say nothing.
    const FOUND: f64 = 1.1;

    /// Makes an experiment of so many cycles. Each window is slower than the last, by `drift`.
    fn experiment(cycles: usize, found: f64, huge: f64, unchanged: f64, drift: f64) -> LiveTax {
        let mut at = 0;
        let mut window = |factor: f64| {
            at += 1;
            let speed = 1.0 + drift * at as f64 + 0.002 * (at * 7 % 5) as f64;
            let ns = (1e6 * factor * speed) as u64;
            let begin_ns = at * 1_100_000;
            Window { unit_count: 1_000, cpu_ns: ns, wall_ns: ns, begin_ns, ..Window::default() }
        };
        let as_found: Vec<Window> = (0..8).map(|_| window(found)).collect();
        let in_order: Vec<Window> = (0..8).map(|_| window(1.0)).collect();
        let mut cycle = |tried_bytes, huge| Cycle {
            tried_bytes,
            unchanged: window(unchanged),
            huge: window(huge),
            split: window(1.0),
        };
        // The first cycle has a part of the memory, and shows less of the gain.
        let part = (cycles > 0).then(|| cycle(1 << 20, huge.midpoint(1.0)));
        let whole = (0..cycles).map(|_| cycle(2 << 20, huge));
        let cycles: Vec<Cycle> = part.into_iter().chain(whole).collect();
        let before = Window::whole(&as_found);
        let mut live = LiveTax { before, as_found, in_order, cycles, ..LiveTax::default() };
        live.tried_bytes = 2 << 20;
        live.compare(Stopping::Sequential);
        live.judge();
        live
    }

    #[test]
    fn a_gain_is_found_on_a_machine_that_drifts() {
        let live = experiment(8, FOUND, 0.8, 1.0, 0.001);
        let (order, speedup) = (live.order.unwrap(), live.speedup.unwrap());
        assert!(order.low < FOUND && FOUND < order.high && order.high < 1.15, "{order}");
        let truth = FOUND / 0.8;
        assert!(speedup.low < truth && truth < speedup.high && live.is_settled(), "{speedup}");
        assert!((live.cycles[0].gain().unwrap() - 0.11).abs() < 0.01);
        assert!(live.check.unwrap().holds_one());
        assert_eq!(live.verdict.winner.as_deref(), Some("thp-2M"));
        assert!((live.tax().unwrap().0 - (1.0 - 1.0 / truth)).abs() < 0.01);
    }

    #[test]
    fn the_error_of_the_order_is_that_of_drift() {
        let still = experiment(8, 1.0, 0.9, 1.0, 0.0).order.unwrap();
        let drifts = experiment(8, 1.0, 0.9, 1.0, 0.005).order.unwrap();
        assert!(still.holds_one() && drifts.holds_one(), "{still}, {drifts}");
        assert!(drifts.high - drifts.low > 2.0 * (still.high - still.low), "{still}, {drifts}");
    }

    /// Returns all windows of an experiment.
    fn windows(live: &mut LiveTax) -> impl Iterator<Item = &mut Window> {
        let of_cycles = live.cycles.iter_mut();
        let of_cycles = of_cycles.flat_map(|c| [&mut c.unchanged, &mut c.huge, &mut c.split]);
        live.as_found.iter_mut().chain(&mut live.in_order).chain(of_cycles)
    }

    #[test]
    fn what_slows_the_probe_is_taken_out() {
        let mut live = experiment(8, FOUND, 0.8, 1.0, 0.0);
        let mut rng = Rng::new(1990);
        let mut slow = |window: &mut Window| {
            let slower = rng.unit() * 0.4;
            window.cpu_ns = (window.cpu_ns as f64 * (1.3 * slower).exp()) as u64;
            window.probe_ns = Some((14_000.0 * slower.exp()) as u64);
        };
        windows(&mut live).for_each(&mut slow);
        live.compare(Stopping::Sequential);
        let (speedup, truth) = (live.speedup.unwrap(), FOUND / 0.8);
        assert!(speedup.low > truth * 0.95 && speedup.high < truth * 1.05, "{speedup}");
        windows(&mut live).for_each(|window| window.probe_ns = None);
        live.compare(Stopping::Sequential);
        let without = live.speedup.unwrap();
        let width = |ratio: Ratio| (ratio.high / ratio.low).ln();
        assert!(width(without) > 4.0 * width(speedup), "{without}, with a probe {speedup}");
    }

    #[test]
    fn a_cost_may_follow_the_far_probe_and_a_probe_may_meet_what_no_cost_follows() {
        let mut live = experiment(8, FOUND, 0.8, 1.0, 0.0);
        let mut rng = Rng::new(2003);
        for window in windows(&mut live) {
            let slower = rng.unit() * 0.2;
            window.cpu_ns = (window.cpu_ns as f64 * slower.exp()) as u64;
            window.probe_ns = Some(14_000 + (rng.unit() * 100.0) as u64);
            window.far_probe_ns = Some((20_000.0 * slower.exp()) as u64);
        }
        live.compare(Stopping::Sequential);
        let (speedup, truth) = (live.speedup.unwrap(), FOUND / 0.8);
        assert!(speedup.low > truth * 0.95 && speedup.high < truth * 1.05, "{speedup}");
        live.as_found[3].far_probe_ns = Some(400_000);
        live.in_order[3].probe_ns = Some(400_000);
        live.compare(Stopping::Sequential);
        let speedup = live.speedup.unwrap();
        assert!(speedup.low > truth * 0.9 && speedup.high < truth * 1.1, "{speedup}");
    }

    #[test]
    fn no_verdict_without_progress_memory_or_a_true_check() {
        let nothing = experiment(12, 1.0, 1.0, 1.0, 0.0);
        assert!(
            nothing.verdict.reason.starts_with("nothing to gain"),
            "{}",
            nothing.verdict.reason
        );
        let differs = experiment(12, FOUND, 0.8, 0.9, 0.0);
        assert!(differs.verdict.reason.contains("nothing changed"), "{}", differs.verdict.reason);
        let mut still = experiment(0, 1.0, 1.0, 1.0, 0.0);
        still.before.unit_count = 0;
        still.judge();
        assert!(still.verdict.reason.contains("--progress"), "{}", still.verdict.reason);
        still.tried_bytes = 0;
        still.judge();
        assert!(still.verdict.reason.starts_with("nothing to try"));
        assert_eq!((still.verdict.winner, still.verdict.apply), (None, None));
    }

    #[test]
    fn without_enough_cycles_of_the_most_memory_those_before_count() {
        let mut live = experiment(8, FOUND, 0.8, 1.0, 0.0);
        live.cycles.truncate(2);
        live.cycles.extend_from_within(..1);
        let last = live.cycles.last_mut().unwrap();
        for window in [&mut last.unchanged, &mut last.huge, &mut last.split] {
            window.begin_ns += 20_000_000;
        }
        live.compare(Stopping::TimeUp);
        assert_eq!(live.tried_bytes, 1 << 20, "two cycles of 1 MiB, one of 2 MiB");
        assert!((live.speedup.unwrap().value - 1.1 * 1.11).abs() < 0.02, "{:?}", live.speedup);
    }

    #[test]
    fn a_window_without_progress_has_no_cost() {
        let cost = |unit_count| {
            let window = Window { unit_count, cpu_ns: 5, wall_ns: 5, ..Window::default() };
            Speed::default().cost(&window)
        };
        assert_eq!((cost(0), cost(2)), (None, Some(2_500_000)));
    }
}
