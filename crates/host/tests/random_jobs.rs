//! Random jobs on the real machine and on the null machine. A job that resolves is refused before it
//! starts, or runs to its end. Then it has made the plan's accesses, its budgets add up, and memory
//! holds what was written. The same jobs run on every simulated machine
//! (crates/sim/tests/random_jobs.rs).

#[path = "../../sim/tests/common/random_job.rs"]
mod random_job;

use pagetax_core::access::Rng;
use pagetax_core::cause::Account;
use pagetax_core::job::Job;
use pagetax_core::machine::{Machine, RunError};
use pagetax_core::plan::Plan;
use pagetax_core::quantity::Params;
use pagetax_core::report::{Recording, Run};
use pagetax_host::run::{HostMachine, NullMachine};
use random_job::{Scope, random_job};

/// The features of the jobs, without those that depend on the kernel's build, pools and privileges.
const SCOPE: Scope = Scope { has_remote: false, has_optional_advice: false, has_pools: false };

/// Returns the seeds of the jobs, 60 or as many as PAGETAX_RANDOM_JOBS asks for.
fn seeds(first: u64) -> std::ops::Range<u64> {
    let given = std::env::var("PAGETAX_RANDOM_JOBS").ok();
    let count = given.map_or(60, |text| text.parse().expect("PAGETAX_RANDOM_JOBS is a number"));
    first..first + count
}

/// Runs the job of a seed; returns true if the job is valid.
fn check(seed: u64) -> bool {
    let mut rng = Rng::new(seed);
    let length = rng.below(160);
    let input: Vec<u8> = (0..length).map(|_| rng.next_u64() as u8).collect();
    let text = random_job(&input, SCOPE);
    let resolve = |machine: &dyn Machine| {
        Job::parse(&text, "random.toml")
            .and_then(|job| job.resolve(&Params::new(), &machine.spec(), None))
    };
    let plans = (resolve(&HostMachine::default()), resolve(&NullMachine));
    let (host, null) = match plans {
        (Ok(host), Ok(null)) => (host, null),
        (Err(host), Err(null)) if host == null => return false,
        other => panic!("seed {seed}: {other:?}\n{text}"),
    };
    assert_eq!(host, null, "seed {seed}: {text}");
    run(&NullMachine, &null, &format!("null, seed {seed}\n{text}"));
    run(&HostMachine::default(), &host, &format!("host, seed {seed}\n{text}"));
    true
}

fn run(machine: &dyn Machine, plan: &Plan, at: &str) {
    let is_refused = machine.check(plan).iter().any(|unmet| unmet.fatal);
    let mut recording = Recording::new(plan, &machine.spec());
    match machine.run(plan, &mut recording) {
        Err(RunError::Unmet(_)) if is_refused => return,
        Ok(()) if !is_refused => {}
        other => panic!("{at}: refused: {is_refused}; its end: {other:?}"),
    }
    check_report(plan, &recording.finish(), at);
}

fn check_report(plan: &Plan, run: &Run, at: &str) {
    let counted = run.counters["access_count"].value.expect("accesses are counted") as f64;
    let planned: f64 = plan.phases.iter().map(|phase| phase.access_count()).sum();
    let ends_by_clock = plan.phases.iter().any(|phase| phase.time.is_some());
    assert!(counted <= planned && (counted == planned || ends_by_clock), "{at}: {counted}");
    let Some(budget) = &run.budget else { return };
    for account in Account::ALL {
        let parts = budget.rows(account).iter().filter_map(|row| row.ns);
        let parts: i64 = parts.map(|ns| ns as i64).sum();
        let total_ns = budget.total_ns(account) as i64;
        assert_eq!(parts + budget.unexplained_ns(account), total_ns, "{at}: {account:?}");
    }
}

#[test]
fn jobs_of_fixed_seeds_run_or_are_refused() {
    let valid = seeds(1).filter(|seed| check(*seed)).count();
    assert!(valid * 5 >= seeds(1).count(), "only {valid} are valid");
}

#[test]
fn jobs_of_new_seeds_run_or_are_refused() {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let first = now.map_or(1, |since| since.as_nanos() as u64);
    println!("seeds from {first}");
    for seed in seeds(first) {
        check(seed);
    }
}
