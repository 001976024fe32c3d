//! Runs of which `published/` takes few seeds: the others would say the same.

use pagetax_core::job::Job;
use pagetax_core::machine::Machine;
use pagetax_core::report::{Recording, Run};
use pagetax_sim::machine::SimMachine;
use pagetax_sim::models;

fn run(machine: &str, job: &str, set: &[(&str, &str)], seed: u64) -> Run {
    let mut machine = SimMachine::new(models::find(machine).expect("a model")).expect("a machine");
    let set = set.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
    let job = Job::builtin(job).expect("a built-in job");
    let plan = job.resolve(&set, &machine.spec(), Some(seed)).expect("a plan");
    let mut out = Recording::new(&plan, &machine.spec());
    machine.run(&plan, &mut out).expect("a whole run");
    out.finish()
}

/// The figures of each phase that checks are about: its length and some counters.
fn figures(report: &Run, counters: &[&str]) -> Vec<f64> {
    let of = |phase: &pagetax_core::report::ReportPhase| {
        let counts = counters.iter().map(|id| phase.counters[*id].value.expect("counted") as f64);
        counts.chain([(phase.end_ns - phase.start_ns) as f64]).collect::<Vec<_>>()
    };
    report.phases.iter().flat_map(of).collect()
}

/// Whether two seeds differ, and by less than `percent` in each figure.
fn compare(machine: &str, job: &str, set: &[(&str, &str)], counters: &[&str], percent: f64) {
    let [one, two] = [1, 2].map(|seed| figures(&run(machine, job, set, seed), counters));
    assert_ne!(one, two, "{machine}: a seed decides something");
    for (one, two) in one.into_iter().zip(two) {
        assert!((one - two).abs() <= one * percent / 100.0, "{machine}: {one} and {two}");
    }
}

#[test]
fn shares_of_minutes_on_linux_2_4_do_not_depend_on_the_seed() {
    let set = &[("files", "10")];
    compare("linux-2.4.9-2gb-sleep-patch", "mlock-cycle", set, &["kernel_daemon_ns"], 3.0);
}

#[test]
fn rates_on_network_memory_do_not_depend_on_the_seed() {
    compare("alpha-nms", "mmap3", &[], &["page_in_count", "page_out_count"], 1.0);
}
