//! The costs of an interval, from what was seen in it.

use super::{Count, DAEMONS, Observation, ROWS, SystemSamples, TaskCounts, WAITS};
use crate::measure::budget::{FEW_SAMPLES, FaultCosts, derived, share_bounds};
use crate::measure::stacks::Wait;
use pagetax_core::budget::{Budget, Ledger, TimeRow};
use pagetax_core::calibration::{Calibration, FaultKind};
use pagetax_core::cause::{Account, is_tax};
use pagetax_core::counter::Reading;
use pagetax_core::system_stat::{Culprit, SystemInterval, huge_blocks};

/// A culprit has at least this share of the allocations.
const CULPRIT_SHARE: f64 = 0.1;

/// Returns the costs of an interval.
pub fn cost(seen: &Observation, calibration: Result<&Calibration, &str>) -> SystemInterval {
    let mut interval = SystemInterval {
        end_unix_ms: seen.end_unix_ms,
        elapsed_ns: seen.elapsed_ns,
        budget: Budget::new(cpu(seen, calibration.ok()), waits(seen), Vec::new()),
        culprits: culprits(seen),
        free_blocks: seen.free_blocks.clone().unwrap_or_default(),
        compaction_in_s: compaction_in_s(seen),
        ..SystemInterval::default()
    };
    for (id, count) in &seen.totals.events {
        interval.put(id, reading(count));
    }
    interval.put("huge_fallback_ns", fallback(seen, calibration));
    interval.put("vm_cpu_ns", tax(seen, &interval.budget));
    interval.put("cpu_ns", reading(&seen.totals.cpu_ns));
    interval.put("own_cpu_ns", Reading::Measured(seen.own_cpu_ns));
    let samples = seen.samples.as_ref().map(SystemSamples::count);
    interval.put("sample_count", reading(&samples.map_err(Clone::clone)));
    interval
}

fn reading(count: &Count) -> Reading {
    count.clone().map_or_else(Reading::Missing, Reading::Measured)
}

fn cpu(seen: &Observation, calibration: Option<&Calibration>) -> Ledger {
    let daemons_ns: u64 = seen.daemons_ns.iter().flatten().sum();
    let total_ns = seen.totals.cpu_ns.clone().unwrap_or(0).max(daemons_ns);
    let mut ledger = Ledger::new(Account::Cpu, total_ns);
    let tasks_ns = total_ns - daemons_ns;
    match (&seen.totals.cpu_ns, &seen.samples) {
        (Err(why), _) => missing_rows(&mut ledger, why),
        (Ok(_), Ok(samples)) => from_stacks(&mut ledger, tasks_ns, samples),
        (Ok(_), Err(why)) => from_faults(&mut ledger, seen, calibration, why),
    }
    for ((name, row), ns) in DAEMONS.iter().zip(&seen.daemons_ns) {
        ledger.row(row, reading(ns), format!("{name}, by schedstat"));
    }
    ledger
}

fn missing_rows(ledger: &mut Ledger, why: &str) {
    for row in ROWS {
        ledger.row(row.id(), Reading::Missing(why.into()), "");
    }
    ledger.row("translation", Reading::Missing(why.into()), "");
}

/// Divides the tasks' time as their stacks are divided.
fn from_stacks(ledger: &mut Ledger, tasks_ns: u64, samples: &SystemSamples) {
    let count = |row: usize| samples.processes.values().map(|counts| counts.rows[row]).sum::<u64>();
    let all = samples.count();
    let lost = match samples.lost_count {
        0 => String::new(),
        lost => format!("; {lost} records were lost"),
    };
    let few = if all < FEW_SAMPLES { "too few samples: " } else { "" };
    for (index, row) in ROWS.iter().enumerate() {
        let count = count(index);
        let reading = match all {
            0 => Reading::Derived { value: 0, low: 0, high: tasks_ns },
            _ => {
                let (low, high) = share_bounds(count, all);
                let part = |share: f64| tasks_ns as f64 * share;
                derived(part(count as f64 / all as f64), part(low), part(high), tasks_ns)
            }
        };
        ledger.row(row.id(), reading, format!("{few}{count} of {all} stacks{lost}"));
    }
    let why =
        "stacks do not show translation; `pagetax trapstat 1` does where the CPU counts page walks";
    ledger.row("translation", Reading::Missing(why.into()), "");
}

/// Returns the number of samples in rows that are a tax.
fn taxed(counts: &TaskCounts) -> u64 {
    let rows = ROWS.iter().zip(counts.rows).filter(|(row, _)| is_tax(row.id()));
    rows.map(|(_, count)| count).sum()
}

/// The times of a process or a group of processes.
#[derive(Debug, Clone, PartialEq)]
pub struct TaskTimes {
    /// All CPU time.
    pub cpu_ns: u64,
    /// The CPU time that virtual memory takes: the best estimate, and its lower and upper bound.
    pub vm_cpu_ns: [u64; 3],
    /// The parts of it by cause, without those that are 0.
    pub causes: Vec<(&'static str, u64)>,
}

/// The stacks of an interval, by which the time of all tasks is divided as in the CPU ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampledTime {
    tasks_ns: u64,
    all: u64,
}

impl SampledTime {
    /// Returns the time of all tasks but the daemons, and the number of stacks.
    ///
    /// # Errors
    /// The reason why the time or the stacks are not known.
    pub fn of(seen: &Observation) -> Result<SampledTime, String> {
        let daemons_ns: u64 = seen.daemons_ns.iter().flatten().sum();
        let all = seen.samples.as_ref().map_err(Clone::clone)?.count();
        Ok(SampledTime { tasks_ns: seen.totals.cpu_ns.clone()?.saturating_sub(daemons_ns), all })
    }

    /// Returns the part of a process, or of processes whose counts were added.
    pub fn times(self, counts: &TaskCounts) -> TaskTimes {
        let part = |share: f64| (self.tasks_ns as f64 * share.clamp(0.0, 1.0)).round() as u64;
        let ns = |count: u64| part(count as f64 / self.all.max(1) as f64);
        let count = taxed(counts);
        let (low, high) = match self.all {
            0 => (0.0, 1.0),
            all => share_bounds(count, all),
        };
        let causes =
            ROWS.iter().zip(counts.rows).filter(|(row, count)| *count > 0 && is_tax(row.id()));
        TaskTimes {
            cpu_ns: ns(counts.samples()),
            vm_cpu_ns: [ns(count), part(low), part(high)],
            causes: causes.map(|(row, count)| (row.id(), ns(count))).collect(),
        }
    }
}

/// Returns the sum of the rows that are a tax. Its bounds are closer than the sums of theirs, as what one row
/// has too much, another one lacks.
fn tax(seen: &Observation, budget: &Budget) -> Reading {
    let rows = budget.rows(Account::Cpu).iter().filter(|row| is_tax(&row.id));
    let sum = |of: fn(&TimeRow) -> Option<u64>| rows.clone().filter_map(of).sum::<u64>();
    if rows.clone().all(|row| row.ns.is_none()) {
        return Reading::Missing("no row of the tax is known".into());
    }
    let (value, daemons_ns) = (sum(|row| row.ns), seen.daemons_ns.iter().flatten().sum::<u64>());
    let Ok(samples) = &seen.samples else {
        // Rows that are missing may have taken the rest of the time.
        let is_whole = rows.clone().all(|row| row.ns.is_some());
        let most = if is_whole { sum(|row| row.high_ns.or(row.ns)) } else { u64::MAX };
        let (low, high) =
            (sum(|row| row.low_ns.or(row.ns)), most.min(budget.total_ns(Account::Cpu)));
        return Reading::Derived { value, low: low.min(value), high: high.max(value) };
    };
    let all = samples.count();
    let (low, high) = match all {
        0 => (0.0, 1.0),
        _ => share_bounds(samples.processes.values().map(taxed).sum(), all),
    };
    let tasks_ns = budget.total_ns(Account::Cpu).saturating_sub(daemons_ns) as f64;
    let bound = |share: f64| tasks_ns * share + daemons_ns as f64;
    derived(value as f64, bound(low), bound(high), budget.total_ns(Account::Cpu))
}

/// Prices faults by calibration where there are no stacks.
fn from_faults(
    ledger: &mut Ledger,
    seen: &Observation,
    calibration: Option<&Calibration>,
    why: &str,
) {
    missing_rows(ledger, &format!("no stacks: {why}"));
    let event = |id: &str| seen.totals.events.get(id)?.as_ref().ok().copied();
    // Without the kernel's share, all CPU time is the limit: an unknown one is not 0.
    let kernel_ns = seen.totals.kernel_ns.as_ref().or(seen.totals.cpu_ns.as_ref());
    let kernel_ns = kernel_ns.map_or(0, |ns| *ns);
    let costs = calibration
        .zip(event("minor_fault_count"))
        .and_then(|(c, count)| FaultCosts::of(c, count, event("huge_fault_count").unwrap_or(0)));
    let Some(costs) = costs else { return };
    for (id, reading) in ["minor_fault", "zero_copy"].into_iter().zip(costs.capped(kernel_ns)) {
        ledger.replace(id, reading, "minor faults × calibrated cost, at most the kernel's time");
    }
}

/// Adds up the waits of all tasks.
fn waits(seen: &Observation) -> Ledger {
    let samples = seen.samples.as_ref().map_err(Clone::clone);
    let known = samples.and_then(|samples| samples.waits.clone().map(|()| samples));
    let ns = |wait: usize| match &known {
        Ok(samples) => {
            let waits = samples.processes.values().map(|counts| counts.waits_ns[wait]);
            Reading::Measured(waits.sum())
        }
        Err(why) => Reading::Missing(why.clone()),
    };
    let total_ns = (0..WAITS.len()).filter_map(|wait| ns(wait).value()).sum();
    let mut ledger = Ledger::new(Account::Wall, total_ns);
    for (index, wait) in WAITS.iter().enumerate() {
        let id = match wait {
            Wait::PageIn => "page_in",
            Wait::SwapIn => "swap_in",
            Wait::Throttle => "throttle",
            Wait::Sleep => continue,
        };
        ledger.row(id, ns(index), "from the switch away until the task runs again, of all tasks");
    }
    ledger
}

/// Returns who allocates the memory that the daemons make room for, those with most allocations first.
fn culprits(seen: &Observation) -> Vec<Culprit> {
    let all: u64 = seen.allocations.values().sum();
    let worked = seen.daemons_ns[..2].iter().flatten().any(|ns| *ns > 0);
    if all == 0 || !worked {
        return Vec::new();
    }
    let mut culprits: Vec<Culprit> = seen
        .allocations
        .iter()
        .map(|(pid, count)| {
            let (low, high) = share_bounds(*count, all);
            let process = seen.processes.get(pid);
            Culprit {
                pid: *pid,
                name: process.map_or_else(|| "ended".into(), |process| process.name.clone()),
                cgroup: process.and_then(|process| process.memory_cgroup()),
                share: *count as f64 / all as f64,
                low,
                high,
            }
        })
        .filter(|culprit| culprit.share >= CULPRIT_SHARE)
        .collect();
    culprits.sort_by(|one, other| other.share.total_cmp(&one.share).then(one.pid.cmp(&other.pid)));
    culprits
}

/// Returns the price of huge pages that faults did not get: as many base pages, less the huge page.
fn fallback(seen: &Observation, calibration: Result<&Calibration, &str>) -> Reading {
    let missing = |why: &str| Reading::Missing(why.into());
    let count = match seen.totals.events.get("huge_fallback_count") {
        Some(Ok(0)) => return Reading::Measured(0),
        Some(Ok(count)) => *count,
        Some(Err(why)) => return missing(why),
        None => return missing("the kernel counts failed huge pages for the whole system only"),
    };
    let calibration = match calibration {
        Ok(calibration) => calibration,
        Err(why) => return missing(why),
    };
    let (base, huge) = (calibration.base_page_bytes, calibration.huge_page_bytes);
    let costs = [base, huge].map(|bytes| calibration.fault(FaultKind::AnonWrite, bytes));
    let [Some(base_cost), Some(huge_cost)] = costs else {
        return missing("the calibration has no cost of huge pages");
    };
    let pages = (huge / base.max(1)) as f64;
    let price = |base: f64, huge: f64| count as f64 * (pages * base - huge);
    derived(
        price(base_cost.median_ns, huge_cost.median_ns),
        price(base_cost.low_ns, huge_cost.high_ns),
        price(base_cost.high_ns, huge_cost.low_ns),
        u64::MAX,
    )
}

fn compaction_in_s(seen: &Observation) -> Option<f64> {
    let (before, now) = (seen.free_huge_before?, huge_blocks(seen.free_blocks.as_ref().ok()?));
    let taken = before.checked_sub(now).filter(|taken| *taken > 0)?;
    Some(now as f64 / taken as f64 * seen.elapsed_ns as f64 / 1e9)
}

#[cfg(test)]
mod tests {
    use super::super::{Process, ScopeTotals};
    use super::*;
    use crate::measure::budget::tests::calibration;
    use pagetax_core::counter::Provenance;
    use std::collections::HashMap;

    fn seen() -> Observation {
        let counts = |user, fault, allocations| TaskCounts {
            rows: [user, fault, 10, 0, 0, 0, 0, 0, 0],
            allocations,
            waits_ns: [5, 0, 7],
            unknown: 0,
        };
        let process = |name: &str| Process {
            name: name.into(),
            is_kernel: false,
            cgroups: "3:memory:/big\n0::/".into(),
        };
        let events = [("minor_fault_count", Ok(100)), ("huge_fallback_count", Ok(2))];
        Observation {
            end_unix_ms: 1,
            elapsed_ns: 1_000_000_000,
            totals: ScopeTotals { cpu_ns: Ok(1_100), kernel_ns: Ok(500), events: events.into() },
            daemons_ns: [Ok(100), Ok(0), Err("not here".into())],
            samples: Ok(SystemSamples {
                processes: [(7, counts(30, 40, 45)), (8, counts(10, 0, 5))].into(),
                waits: Ok(()),
                lost_count: 0,
            }),
            allocations: [(7, 45), (8, 5)].into(),
            processes: HashMap::from([(7, process("hog")), (8, process("bystander"))]),
            free_blocks: Ok(vec![1, 0, 0, 0, 0, 0, 0, 0, 0, 3, 2]),
            free_huge_before: Some(8),
            own_cpu_ns: 3,
        }
    }

    #[test]
    fn the_rows_add_up_to_the_time_of_all_tasks() {
        let interval = cost(&seen(), Ok(&calibration()));
        let budget = &interval.budget;
        assert_eq!(budget.total_ns(Account::Cpu), 1_100);
        let ns = |id: &str| budget.row(id).unwrap().ns;
        assert_eq!(
            (ns("compute"), ns("minor_fault"), ns("zero_copy")),
            (Some(400), Some(400), Some(200))
        );
        assert_eq!((ns("background_reclaim"), ns("khugepaged")), (Some(100), None));
        assert_eq!(budget.unexplained_ns(Account::Cpu), 0);
        assert_eq!((ns("page_in"), ns("swap_in"), ns("throttle")), (Some(10), Some(0), Some(14)));
        assert_eq!(budget.total_ns(Account::Wall), 24);
        assert_eq!(interval.compaction_in_s, Some(7.0));
    }

    #[test]
    fn the_times_of_processes_add_up_to_the_ledger() {
        let seen = seen();
        let sampled = SampledTime::of(&seen).unwrap();
        let of = |pid: u32| sampled.times(&seen.samples.as_ref().unwrap().processes[&pid]);
        let (hog, bystander) = (of(7), of(8));
        assert_eq!((hog.cpu_ns, bystander.cpu_ns), (800, 200));
        assert_eq!((hog.vm_cpu_ns[0], bystander.vm_cpu_ns[0]), (500, 100));
        assert_eq!(hog.causes, [("minor_fault", 400), ("zero_copy", 100)]);
        assert!(hog.vm_cpu_ns[1] < 450 && hog.vm_cpu_ns[2] > 550, "{hog:?}");
        let blind = Observation { samples: Err("not root".into()), ..seen };
        assert_eq!(SampledTime::of(&blind), Err("not root".into()));
    }

    #[test]
    fn who_allocates_is_named_with_the_cgroup() {
        let interval = cost(&seen(), Err("none"));
        assert_eq!(interval.culprits.len(), 2);
        let first = &interval.culprits[0];
        assert_eq!((first.name.as_str(), first.cgroup.as_deref()), ("hog", Some("/big")));
        assert!(first.share == 0.9 && first.low > 0.7 && first.high < 1.0, "{first:?}");
        let idle = Observation { daemons_ns: [Ok(0), Ok(0), Ok(5)], ..seen() };
        assert!(cost(&idle, Err("none")).culprits.is_empty());
    }

    #[test]
    fn intervals_add_up() {
        let mut twice = seen();
        twice.add(&seen());
        let (one, two) = (cost(&seen(), Err("none")), cost(&twice, Err("none")));
        for row in one.budget.rows(Account::Cpu) {
            let doubled = two.budget.row(&row.id).unwrap().ns;
            assert_eq!(doubled, row.ns.map(|ns| ns * 2), "{}", row.id);
        }
        assert_eq!(two.value("minor_fault_count"), Some(200));
        let mut lost = seen();
        lost.add(&Observation {
            samples: Err("closed".into()),
            daemons_ns: [0; 3].map(|_| Err("x".into())),
            ..seen()
        });
        let lost = cost(&lost, Err("none"));
        assert_eq!(lost.budget.row("background_reclaim").unwrap().ns, None);
        assert_eq!(lost.budget.row("compute").unwrap().provenance, Provenance::Missing);
    }

    #[test]
    fn without_stacks_faults_are_counted_and_fallbacks_priced() {
        let blind = Observation { samples: Err("not root".into()), ..seen() };
        let calibration = calibration();
        let interval = cost(&blind, Ok(&calibration));
        let row = |id: &str| interval.budget.row(id).unwrap();
        assert!(row("minor_fault").ns > Some(0) && row("minor_fault").ns < Some(500));
        assert_eq!(row("reclaim").provenance, Provenance::Missing);
        assert!(row("reclaim").how.contains("not root"));
        // 2 × (512 × 1.5 us - 243 us)
        assert_eq!(interval.value("huge_fallback_ns"), Some(1_050_000));
        assert_eq!(cost(&blind, Err("none")).value("huge_fallback_ns"), None);
    }
}
