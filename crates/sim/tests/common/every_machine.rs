//! Runs one job on every built-in machine and compares the verdicts.

use pagetax_core::cause::Account;
use pagetax_core::job::Job;
use pagetax_core::machine::{Machine, RunError};
use pagetax_core::plan::{Op, Plan};
use pagetax_core::quantity::Params;
use pagetax_core::report::{Recording, Run};
use pagetax_sim::historic::engine::Caps;
use pagetax_sim::historic::machine::SimMachine;
use pagetax_sim::models;

/// The steps within which every random job ends; an endless loop takes more.
const STEPS_MAX: u64 = 3_000_000;

/// The result of a job on all machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Every machine rejects the job.
    Invalid,
    /// So many machines ran the job to its end; the others named demands that they cannot meet.
    RanOn(usize),
}

/// Returns all built-in machines, with so little memory that small jobs fill some of them.
pub fn machines() -> Vec<SimMachine> {
    let small = |name: &'static str| {
        let mut model = models::find(name).expect("a built-in machine");
        let mut set = |table, key, value: f64| model.set(table, key, value).expect("a constant");
        match name {
            "alpha-nms" => set("paging", "resident_pages", 16.0),
            _ if name.starts_with("linux") => set("machine", "memory", 48.0 / 1024.0),
            _ if name.starts_with("ultrasparc") || name.starts_with("x86") => {
                set("machine", "memory", 32.0 / 1024.0);
            }
            _ => {}
        }
        let mut machine = SimMachine::new(model).expect("a possible machine");
        machine.caps = Caps { steps: STEPS_MAX, ..Caps::default() };
        machine
    };
    models::names().map(small).collect()
}

/// Runs `text` on each machine.
///
/// # Errors
/// Returns the problem as text: machines that disagree on validity, runs that fail or do not end,
/// counts that differ from the plan's, or budgets that do not add up.
pub fn check(machines: &mut [SimMachine], text: &str) -> Result<Verdict, String> {
    let (mut valid, mut refused, mut ran) = (Vec::new(), Vec::new(), 0);
    for machine in machines {
        let name = machine.spec().name;
        let resolved = Job::parse(text, "random.toml")
            .and_then(|job| job.resolve(&Params::new(), &machine.spec(), None));
        match resolved {
            Ok(plan) => {
                valid.push(name.clone());
                ran += usize::from(check_run(machine, &plan).map_err(|e| format!("{name}: {e}"))?);
            }
            Err(error) => {
                let has_place = error.place.starts_with("random.toml:");
                if !has_place || error.remedy.is_empty() {
                    return Err(format!("{name}: no place or no remedy: {error}"));
                }
                refused.push(format!("{name}: {error}"));
            }
        }
    }
    match (valid.is_empty(), refused.is_empty()) {
        (true, _) => Ok(Verdict::Invalid),
        (_, true) => Ok(Verdict::RanOn(ran)),
        _ => Err(format!("valid on {valid:?}, refused by {refused:?}")),
    }
}

/// Runs the plan. Returns true if the machine ran it, and false if it refused it in preflight.
fn check_run(machine: &mut SimMachine, plan: &Plan) -> Result<bool, String> {
    plan.check().map_err(|mistake| format!("a resolved plan with a mistake: {mistake}"))?;
    let unmet = machine.check(plan);
    if unmet.iter().any(|unmet| unmet.what.is_empty() || unmet.remedy.is_empty()) {
        return Err(format!("no remedy: {unmet:?}"));
    }
    let is_refused = unmet.iter().any(|unmet| unmet.fatal);
    let mut recording = Recording::new(plan, &machine.spec());
    match machine.run(plan, &mut recording) {
        Err(RunError::Unmet(_)) if is_refused => return Ok(false),
        Ok(()) if !is_refused => {}
        other => return Err(format!("refused: {is_refused}; its end: {other:?}")),
    }
    check_report(plan, &recording.finish())?;
    Ok(true)
}

fn check_report(plan: &Plan, run: &Run) -> Result<(), String> {
    let budget = run.budget.as_ref().ok_or("no budget")?;
    let sum = |account| budget.rows(account).iter().filter_map(|row| row.ns).sum::<u64>();
    let (totals, sums) =
        (Account::ALL.map(|account| budget.total_ns(account)), Account::ALL.map(sum));
    let unexplained = Account::ALL.map(|account| budget.unexplained_ns(account));
    if totals != sums || totals[1] != run.wall_ns || unexplained != [0, 0] {
        return Err(format!("budgets do not sum: {sums:?} of {totals:?}"));
    }
    let counted = run.counters["access_count"].value.ok_or("accesses are not counted")? as f64;
    let planned: f64 = plan.phases.iter().map(|phase| phase.access_count()).sum();
    let ends_by_clock = plan.phases.iter().any(|phase| phase.time.is_some());
    if counted > planned || (counted < planned && !ends_by_clock) {
        return Err(format!("{counted} accesses, {planned} planned"));
    }
    let locks = plan.phases.iter().flat_map(|phase| &phase.ops);
    let has_locks = locks.clone().any(|op| matches!(op, Op::Lock { .. }));
    match run.counters.get("locked_bytes_max").and_then(|reading| reading.value) {
        Some(locked) if locked > 0 && !has_locks => Err(format!("{locked} locked by nobody")),
        _ => Ok(()),
    }
}
