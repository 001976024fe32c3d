//! The wall ledger: elapsed time by the state of the job as a whole (see `stacks::timeline`).

use super::{Totals, derived};
use crate::measure::stacks::{MainLine, Profile, TaskState, Wait};
use pagetax_core::budget::Ledger;
use pagetax_core::calibration::{Calibration, FaultKind};
use pagetax_core::counter::Reading;

const WAITS: [(&str, Wait); 4] = [
    ("page_in", Wait::PageIn),
    ("swap_in", Wait::SwapIn),
    ("throttle", Wait::Throttle),
    ("sleep", Wait::Sleep),
];

pub(super) fn rows(
    ledger: &mut Ledger,
    totals: &Totals,
    profile: &Profile,
    calibration: Option<&Calibration>,
) {
    let line = match &profile.line {
        Ok(line) => line,
        Err(why) => return without_line(ledger, totals, why),
    };
    let running_ns = line.ns(TaskState::Running);
    let cpu_ns = totals.user_ns + totals.kernel_ns;
    let at_once = cpu_ns as f64 / running_ns.max(1) as f64;
    let how = format!("some task of the job was on a CPU, {at_once:.1} of them on average");
    ledger.row("running", Reading::Measured(running_ns), how);
    let runnable = Reading::Measured(line.ns(TaskState::Runnable));
    ledger.row("run_queue", runnable, "none was, but some could have been");
    match &profile.waits {
        Ok(()) => {
            for (id, wait) in WAITS {
                let reading = Reading::Measured(line.ns(TaskState::Waiting(wait)));
                ledger.row(id, reading, "all waited; by the stack of each switch");
            }
        }
        Err(why) => without_stacks(ledger, totals, line, calibration, why),
    }
}

/// Adds the waits as one row, less a row for major faults × their calibrated cost.
fn without_stacks(
    ledger: &mut Ledger,
    totals: &Totals,
    line: &MainLine,
    calibration: Option<&Calibration>,
    why: &str,
) {
    let waiting_ns = line.waiting_ns();
    let cost = calibration.and_then(|c| c.fault(FaultKind::FileMajorRead, c.base_page_bytes));
    let majors = totals.major_fault_count as f64;
    let page_in = match cost {
        // Tasks wait at the same time, and read-ahead serves many pages with one wait. So the lower
        // bound is 0.
        Some(cost) => derived(majors * cost.median_ns, 0.0, majors * cost.high_ns, waiting_ns),
        None if totals.major_fault_count == 0 => Reading::Measured(0),
        None => {
            Reading::Missing(format!("{why}; `pagetax calibrate` would give a major fault's cost"))
        }
    };
    let (value, low, high) = match page_in {
        Reading::Derived { value, low, high } => (value, low, high),
        Reading::Missing(_) => (0, 0, waiting_ns),
        _ => (0, 0, 0),
    };
    ledger.row("page_in", page_in, format!("{majors} major faults × calibrated elapsed cost"));
    for id in ["swap_in", "throttle"] {
        ledger.row(id, Reading::Missing(format!("waits are not told apart: {why}")), "");
    }
    let sleep = Reading::Derived {
        value: waiting_ns - value,
        low: waiting_ns - high,
        high: waiting_ns - low,
    };
    ledger.row("sleep", sleep, "the rest of all waiting, of whatever kind");
}

/// Adds the CPU time as the running time. Without switch records, it is the only known part of elapsed
/// time.
fn without_line(ledger: &mut Ledger, totals: &Totals, why: &str) {
    let cpu_ns = totals.user_ns + totals.kernel_ns;
    let most = cpu_ns.min(totals.wall_ns);
    let cpus = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    let running = Reading::Derived { value: most, low: most.min(cpu_ns / cpus), high: most };
    ledger.row("running", running, "CPU time, as if one task ran at a time");
    for id in ["run_queue", "page_in", "swap_in", "throttle", "sleep"] {
        ledger.row(id, Reading::Missing(why.into()), "");
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{calibration, profile, totals};
    use super::super::{Translation, budget};
    use pagetax_core::budget::Budget;
    use pagetax_core::cause::Account;
    use pagetax_core::counter::Provenance;

    fn row<'a>(b: &'a Budget, id: &str) -> &'a pagetax_core::budget::TimeRow {
        b.row(id).unwrap()
    }

    #[test]
    fn without_stacks_major_faults_come_out_of_the_waiting() {
        let mut p = profile();
        p.waits = Err("not allowed".into());
        let unknown = Translation::Unknown("test".into());
        let b = budget(&totals(), &p, &unknown, Some(&calibration()));
        assert_eq!(row(&b, "page_in").ns, Some(200_000));
        assert_eq!(row(&b, "sleep").ns, Some(90_000_000 - 200_000));
        assert_eq!(row(&b, "throttle").provenance, Provenance::Missing);
        assert_eq!(b.unexplained_ns(Account::Wall), 0);

        let b = budget(&totals(), &p, &unknown, None);
        assert_eq!(row(&b, "page_in").provenance, Provenance::Missing);
        assert_eq!(row(&b, "sleep").low_ns, Some(0));
    }

    #[test]
    fn without_switch_records_the_rest_is_unexplained() {
        let mut p = profile();
        p.line = Err("not allowed".into());
        let b = budget(&totals(), &p, &Translation::Unknown("test".into()), None);
        assert_eq!(row(&b, "running").ns, Some(900_000_000));
        assert_eq!(b.unexplained_ns(Account::Wall), 100_000_000);
    }
}
