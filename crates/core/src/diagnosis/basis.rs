//! The figure of a run that trials are compared by.

use super::{GAIN_MIN, Trial};
use crate::budget::Budget;
use crate::cause::Account;
use crate::load::LoadFigure;
use crate::sequential::Stopping;
use crate::stats::{median, quantiles};
use crate::units::Nanos;
use serde::{Deserialize, Serialize};

/// The share of elapsed time from which on a wait counts. A machine is busy if a command waits so long for a
/// CPU.
pub const BUSY_SHARE: f64 = 0.05;

/// The figure of a run that trials are compared by.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Basis {
    /// Elapsed time.
    #[default]
    Elapsed,
    /// CPU time, user and kernel, of all processes, at the mean speed of the machine where a probe saw it:
    /// see [`Occupation::basis`].
    Cpu,
    /// A figure of the load of a server.
    Load(LoadFigure),
}

/// The elapsed time of a run by what the command did as a whole, and its CPU time.
#[derive(Debug, Clone, Copy, Default)]
pub struct Occupation {
    /// The time in which at least one task ran, in nanoseconds.
    pub running_ns: u64,
    /// The time in which none ran, and at least one waited for a CPU that others had.
    pub queued_ns: u64,
    /// The time in which all waited for something else.
    pub waiting_ns: u64,
    /// The CPU time of all tasks, in nanoseconds.
    pub cpu_ns: u64,
}

impl Occupation {
    /// With more tasks at a time than this on average, elapsed time does not follow CPU time.
    const TASKS_MAX: f64 = 1.1;
    /// A command that waits for a larger share of its time is no work for a CPU.
    const WAITING_MAX: f64 = 0.2;

    /// Returns the basis for such a command: CPU time if the machine is busy, and the command is one task
    /// at a time that waits for hardly anything but a CPU.
    pub fn basis(self) -> Basis {
        let wall_ns = (self.running_ns + self.waiting_ns + self.queued_ns) as f64;
        let is_busy = self.queued_ns as f64 > BUSY_SHARE * wall_ns;
        match is_busy && self.can_have_probe() {
            true => Basis::Cpu,
            false => Basis::Elapsed,
        }
    }

    /// Returns true if runs of the command can share a CPU: it is one task at a time, and on an idle machine
    /// it is on a CPU for most of its time.
    pub fn can_share(self) -> bool {
        self.is_one_task() && self.waiting_share() < Self::WAITING_MAX
    }

    /// Returns true if a probe of the machine's speed can share a CPU with the command: it is one task at a
    /// time, and hardly ever waits for anything but a CPU.
    pub fn can_have_probe(self) -> bool {
        self.is_one_task() && self.waiting_share() < BUSY_SHARE
    }

    fn is_one_task(self) -> bool {
        (self.cpu_ns as f64) < Self::TASKS_MAX * self.running_ns as f64
    }

    /// Returns the share of waits for anything but a CPU, of the time without waits for a CPU.
    fn waiting_share(self) -> f64 {
        self.waiting_ns as f64 / (self.running_ns + self.waiting_ns).max(1) as f64
    }
}

impl Basis {
    /// Returns true for elapsed time.
    pub fn is_elapsed(&self) -> bool {
        *self == Basis::Elapsed
    }

    /// Returns true for a figure of a load.
    pub fn is_load(self) -> bool {
        matches!(self, Basis::Load(_))
    }

    /// Returns the column's heading.
    pub fn heading(self) -> &'static str {
        match self {
            Basis::Elapsed => "time",
            Basis::Cpu => "CPU time",
            Basis::Load(figure) => figure.heading(),
        }
    }

    /// Returns the median of a trial as text.
    pub fn median_text(self, trial: &Trial) -> String {
        let Basis::Load(figure) = self else { return Nanos(self.median_ns(trial)).to_string() };
        let values: Vec<f64> = trial.loads.iter().filter_map(|load| figure.value(load)).collect();
        match values[..] {
            [] => "–".into(),
            _ => figure.text(quantiles(&values, [0.5])[0]),
        }
    }

    /// Returns the time of each run of a trial, or the cost of its load.
    pub fn times_ns(self, trial: &Trial) -> Vec<u64> {
        match self {
            Basis::Elapsed => trial.runs_ns.clone(),
            Basis::Cpu if !trial.steady_ns.is_empty() => trial.steady_ns.clone(),
            Basis::Cpu => trial.cpu_ns().collect(),
            Basis::Load(figure) => trial.loads.iter().map(|load| figure.cost(load)).collect(),
        }
    }

    /// Returns the time of each run beyond the median start, if the start was measured.
    pub fn beyond_start_ns(self, trial: &Trial) -> Vec<u64> {
        let start_ns = median(&trial.start_ns).unwrap_or(0);
        self.times_ns(trial).iter().map(|run| run.saturating_sub(start_ns)).collect()
    }

    /// Returns the median time of a trial; 0 without runs.
    pub fn median_ns(self, trial: &Trial) -> u64 {
        median(&self.times_ns(trial)).unwrap_or(0)
    }
}

/// Describes the wait of a whole program for CPUs; none up to [`BUSY_SHARE`] of the elapsed time.
pub fn queued(budget: &Budget) -> Option<String> {
    let (queued_ns, wall_ns) = (budget.row("run_queue")?.ns?, budget.total_ns(Account::Wall));
    let is_busy = queued_ns as f64 > BUSY_SHARE * wall_ns as f64;
    let (queued, wall) = (Nanos(queued_ns), Nanos(wall_ns));
    is_busy.then(|| format!("{queued} of {wall} for a CPU: something else runs on this machine"))
}

/// Says which other figures of the load the winner makes worse by 2 % or more.
pub(super) fn losses(winner: &Trial, as_is: &Trial, basis: Basis) -> String {
    let figures = [LoadFigure::Throughput, LoadFigure::P50, LoadFigure::P99, LoadFigure::P999];
    let loss = |figure: &LoadFigure| {
        let costs = |trial| Basis::Load(*figure).times_ns(trial);
        let ratio = Stopping::Fixed.ratio(&costs(winner), &costs(as_is), &[], figures.len())?;
        let words = if figure.is_more_better() { "requests take" } else { "latency is" };
        (ratio.low > 1.0 && ratio.value >= 1.0 + GAIN_MIN)
            .then(|| format!("; but by {}, {words} {ratio} times as long", figure.heading()))
    };
    let others = figures.iter().filter(|figure| basis.is_load() && basis != Basis::Load(**figure));
    others.filter_map(loss).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::trial;
    use super::super::{AS_IS, compare_trials};
    use super::*;
    use crate::budget::Ledger;
    use crate::counter::Reading;
    use crate::sequential::Stopping;

    #[test]
    fn cpu_time_counts_where_only_others_make_the_command_wait() {
        for (queued_ns, waiting_ns, cpu_ns, basis) in [
            (10, 0, 1_000, Basis::Elapsed),
            (100, 0, 1_000, Basis::Cpu),
            (900, 40, 1_050, Basis::Cpu),
            (900, 60, 1_000, Basis::Elapsed),
            (900, 0, 1_500, Basis::Elapsed),
        ] {
            let seen = Occupation { running_ns: 1_000, queued_ns, waiting_ns, cpu_ns };
            assert_eq!(seen.basis(), basis, "{seen:?}");
        }
        assert_eq!(Occupation::default().basis(), Basis::Elapsed);
        assert!(!Occupation::default().can_share() && !Occupation::default().can_have_probe());
        for (waiting_ns, cpu_ns, shared) in
            [(240, 1_000, true), (260, 1_000, false), (0, 1_500, false)]
        {
            let seen = Occupation { running_ns: 1_000, queued_ns: 0, waiting_ns, cpu_ns };
            assert_eq!(seen.can_share(), shared, "{seen:?}");
            assert!(!seen.can_have_probe(), "{seen:?}");
        }
    }

    #[test]
    fn a_wait_for_a_cpu_is_described_from_a_share_on() {
        let waited = |queued_ns| {
            let mut wall = Ledger::new(Account::Wall, 1_000_000);
            wall.row("run_queue", Reading::Measured(queued_ns), "schedstat");
            queued(&Budget::new(Ledger::new(Account::Cpu, 0), wall, Vec::new()))
        };
        assert_eq!(waited(50_000), None);
        let text = waited(60_000).unwrap();
        assert!(text.starts_with("60.0 µs of 1.00 ms for a CPU"), "{text}");
    }

    #[test]
    fn waits_for_a_cpu_do_not_hide_a_gain_of_cpu_time() {
        let disturbed = |name, ms: u64, waits: [u64; 3]| {
            let runs_ns = waits.iter().map(|wait| (ms + wait) * 1_000_000).collect();
            Trial { runs_ns, ..trial(name, ms, 100, 0.9) }
        };
        let mut trials =
            [disturbed(AS_IS, 1_300, [0, 900, 100]), disturbed("thp-2M", 1_000, [400, 0, 1_200])];
        compare_trials(&mut trials, Stopping::Fixed, Basis::Elapsed);
        assert!(trials[1].speedup.unwrap().holds_one());
        compare_trials(&mut trials, Stopping::Fixed, Basis::Cpu);
        assert!(trials[1].speedup.unwrap().low > 1.2);
    }
}
