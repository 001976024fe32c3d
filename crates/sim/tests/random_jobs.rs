//! Random jobs on every built-in machine: the same verdict on validity, the plan's accesses,
//! budgets that add up, and an end. PAGETAX_RANDOM_JOBS sets the number of jobs.

#[path = "common/every_machine.rs"]
mod every_machine;
#[path = "common/random_job.rs"]
mod random_job;

use every_machine::{Verdict, check, machines};
use pagetax_core::access::Rng;
use pagetax_core::job::Job;
use pagetax_core::machine::Machine;
use pagetax_core::quantity::Params;
use pagetax_core::report::Recording;
use pagetax_sim::historic::machine::SimMachine;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};
use random_job::{Scope, random_job};
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};

const SCOPE: Scope = Scope { has_remote: true, has_optional_advice: true, has_pools: true };

/// Runs the jobs of a seed on all machines. Returns the number of invalid jobs and of those that
/// ran on most machines.
fn run_jobs(seed: u64, cases: u32) -> (u32, u32) {
    let all = RefCell::new(machines());
    let counts = RefCell::new((0, 0));
    let mut bytes = [0; 32];
    let mut rng = Rng::new(seed);
    bytes.chunks_mut(8).for_each(|chunk| chunk.copy_from_slice(&rng.next_u64().to_le_bytes()));
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, rng);
    let inputs = proptest::collection::vec(any::<u8>(), 0..160);
    let result = runner.run(&inputs, |input| {
        let text = random_job(&input, SCOPE);
        let checked = || check(&mut all.borrow_mut(), &text);
        let verdict = catch_unwind(AssertUnwindSafe(checked))
            .unwrap_or_else(|_| Err("a machine panicked".into()))
            .map_err(|why| TestCaseError::fail(format!("{why}\n{text}")))?;
        let mut counts = counts.borrow_mut();
        match verdict {
            Verdict::Invalid => counts.0 += 1,
            Verdict::RanOn(machines) => counts.1 += u32::from(machines > all.borrow().len() / 2),
        }
        Ok(())
    });
    match result {
        Ok(()) => counts.into_inner(),
        Err(TestError::Fail(why, _)) => panic!("seed {seed}: {why}"),
        Err(TestError::Abort(why)) => panic!("seed {seed}: {why}"),
    }
}

fn cases() -> u32 {
    let given = std::env::var("PAGETAX_RANDOM_JOBS").ok();
    given.map_or(150, |text| text.parse().expect("PAGETAX_RANDOM_JOBS is a number"))
}

#[test]
fn jobs_of_a_fixed_seed_agree_on_all_machines() {
    let (invalid, ran) = run_jobs(19, cases());
    // Without many of both kinds, the test proves little.
    assert!(invalid >= cases() / 5 && ran >= cases() / 5, "{invalid} invalid, {ran} ran");
}

#[test]
fn jobs_of_a_new_seed_agree_on_all_machines() {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let seed = now.map_or(1, |since| since.as_nanos() as u64);
    println!("seed {seed}");
    run_jobs(seed, cases());
}

/// Returns a job with one region of 64K and one phase.
fn job(region: &str, phase: &str) -> String {
    format!(
        "name = \"t\"\n[[region]]\nname = \"r\"\nsize = \"64K\"\n{region}\n[[phase]]\nname = \
         \"p\"\n{phase}\n"
    )
}

#[test]
fn memory_is_locked_untouched_but_not_unmapped() {
    let mut all = machines();
    let everywhere = Ok(Verdict::RanOn(all.len()));
    let untouched = "ops = [{ lock = \"r\" }, { unlock = \"r\" }, { lock = \"r\" }]";
    assert_eq!(check(&mut all, &job("", untouched)), everywhere);
    let pieces = "ops = [{ lock = \"r\", chunk = \"100B\" }]";
    assert_eq!(check(&mut all, &job("", pieces)), everywhere);
    let of_file = check(&mut all, &job("backing = \"file\"", pieces));
    assert!(matches!(of_file, Ok(Verdict::RanOn(machines)) if machines > 2), "{of_file:?}");
    let unmapped = check(&mut all, &job("mapped = false", untouched));
    assert_eq!(unmapped, Ok(Verdict::Invalid));
}

/// Checks that every operation takes time. Otherwise a phase that ends by the clock might never
/// end.
#[test]
fn operations_on_nothing_take_time() {
    let mut all = machines();
    let everywhere = Ok(Verdict::RanOn(all.len()));
    for ops in [
        "{ lock = \"r\" }, { lock = \"r\" }",
        "{ unlock = \"r\" }",
        "{ unmap = \"r\" }, { map = \"r\" }",
        "{ advise = \"r\", advice = \"normal\" }",
        "{ sleep = \"0s\" }",
        "{ barrier = true }",
    ] {
        let phase = format!("time = \"10ms\"\nops = [{ops}]");
        assert_eq!(check(&mut all, &job("", &phase)), everywhere, "{ops}");
    }
}

/// Checks that sleeps, of an operation or of a paced client, stop at the phase's end.
#[test]
fn the_clock_ends_sleeps() {
    for machine in &machines() {
        for phase in ["ops = [{ sleep = \"1h\" }]", "rate = 0.001\nops = [{ touch = \"r\" }]"] {
            let text = job("", &format!("time = \"30ms\"\n{phase}"));
            let job = Job::parse(&text, "t.toml").unwrap();
            let plan = job.resolve(&Params::new(), &machine.spec(), None).unwrap();
            let mut recording = Recording::new(&plan, &machine.spec());
            machine.run(&plan, &mut recording).unwrap();
            let run = recording.finish();
            let ns = run.phases[0].end_ns - run.phases[0].start_ns;
            assert!((20_000_000..1_000_000_000).contains(&ns), "{phase}: {ns} ns");
        }
    }
}

/// Checks that a machine refuses memory that it does not have, rather than run something else.
#[test]
fn other_memory_is_refused_beforehand() {
    let refuses = |name: &str, region: &str| {
        let machine = SimMachine::find(name).unwrap();
        let job = Job::parse(&job(region, "ops = [{ touch = \"r\" }]"), "t.toml").unwrap();
        let unmet = machine.check(&job.resolve(&Params::new(), &machine.spec(), None).unwrap());
        assert!(unmet.iter().all(|unmet| !unmet.remedy.is_empty()));
        unmet.iter().any(|unmet| unmet.fatal)
    };
    let remote = "backing = \"remote\"\nresident = \"128K\"";
    for name in ["sparcstation-1", "linux-2.4.9-2gb", "ultrasparc-2-450", "x86-64-calibrated"] {
        assert!(refuses(name, remote), "{name}");
        assert!(refuses(name, "page_size = \"hugetlb:1G\""), "{name}");
    }
    assert!(!refuses("alpha-nms", remote));
    for name in ["alpha-nms", "ultrasparc-2-450", "x86-64-calibrated"] {
        assert!(refuses(name, "backing = \"file\""), "{name}");
    }
}
