//! The whole machine: the published program on the published machines.

use super::*;
use crate::hardware::flat::Flat;
use crate::historic::engine::{Caps, Engine, Parts, Settings};
use crate::historic::kernel::Kernel;
use crate::historic::sched::scheduler;
use crate::model::Model;
use pagetax_core::cause::Account;
use pagetax_core::job::Job;
use pagetax_core::machine::{MachineKind, MachineSpec, RunError};
use pagetax_core::plan::Plan;
use pagetax_core::report::{Recording, Run};
use pagetax_core::units::Nanos;

/// Interval between the series' points.
const SAMPLE_NS: u64 = 2_000_000_000;
const BASE: &str = include_str!("../../../../../../machines/linux-2.4.9-2gb.toml");

fn model(name: &str) -> Model {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../machines/");
    let text = std::fs::read_to_string(format!("{dir}{name}.toml")).expect("a model's file");
    Model::parse(name, &text, |base| (base == "linux-2.4.9-2gb").then_some(BASE)).expect("a model")
}

fn spec(model: &Model, settings: &Settings) -> MachineSpec {
    MachineSpec {
        name: model.name.clone(),
        kind: MachineKind::Sim,
        validated_jobs: model.validated_jobs.clone(),
        memory: settings.memory,
        base_page: settings.page,
        page_sizes: vec![settings.page],
        cpus: settings.cpus,
        job_params: model.job_params.clone(),
    }
}

/// Resolves a built-in job with these parameters.
fn plan(model: &Model, job: &str, set: &[(&str, &str)], seed: u64) -> Plan {
    let settings = Settings::load(model).expect("settings");
    let set = set.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
    let job = Job::builtin(job).expect("a built-in job");
    let mut plan = job.resolve(&set, &spec(model, &settings), Some(seed)).expect("a plan");
    plan.measure.interval = Some(Nanos(SAMPLE_NS));
    plan
}

/// Runs the published program, cut short: one file, then sleep.
fn short_run(model: &Model, seed: u64) -> Run {
    let (report, end) =
        run(model, &plan(model, "mlock-cycle", &[("files", "1"), ("sleep", "6s")], seed));
    end.expect("a run to the end");
    report
}

/// Returns kswapd's share of a CPU in percent, for each whole interval of a phase.
fn kswapd_percent(report: &Run, phase: &str) -> Vec<u64> {
    let phase = report.phases.iter().find(|p| p.name == phase).expect("the phase");
    let column = |id: &str| report.series.columns[id].iter().map(|v| v.unwrap_or(0));
    let whole = |end: u64| end >= phase.start_ns + SAMPLE_NS && end <= phase.end_ns;
    let points = column("time_ns").zip(column("kswapd_cpu_ns")).filter(|(end, _)| whole(*end));
    points.map(|(_, ns)| ns * 100 / SAMPLE_NS).collect()
}

fn mean(percent: &[u64]) -> u64 {
    percent.iter().sum::<u64>() / percent.len() as u64
}

fn run(model: &Model, plan: &Plan) -> (Run, Result<(), RunError>) {
    let settings = Settings::load(model).expect("settings");
    let kernel = Linux24::new(Linux24Config::new(model).expect("a kernel"));
    let parts = Parts {
        settings: &settings,
        caps: Caps { steps: 20_000_000, ..Caps::default() },
        hardware: Flat::new(settings.page),
        kernel,
        scheduler: scheduler(model).expect("a scheduler"),
    };
    let mut recording = Recording::new(plan, &spec(model, &settings));
    let end = Engine::run(parts, plan, &mut recording);
    (recording.finish(), end)
}

#[test]
fn with_a_full_cache_kswapd_takes_a_cpu_within_seconds_and_keeps_it_while_the_program_sleeps() {
    let report = short_run(&model("linux-2.4.9-2gb-second-run"), 1);
    for phase in ["load", "sleep"] {
        let percent = kswapd_percent(&report, phase);
        let settled = if phase == "load" { &percent[5..] } else { &percent[..] };
        assert!(mean(settled) >= 95, "{phase}: {percent:?}");
    }
    let names: Vec<_> = report.tables[0].rows.iter().map(|row| row[4].as_str()).collect();
    let place = |name| names.iter().position(|n| *n == name);
    assert!(place("refill_inactive_scan") < place("page_launder"));
    assert!(place("page_launder") < place("stext_lock"));
}

#[test]
fn with_the_patch_kswapd_rests_and_rests_more_while_the_program_sleeps() {
    let mut patched = model("linux-2.4.9-2gb-second-run");
    patched.set("reclaim", "retries_on_failure", false).expect("a constant");
    let report = short_run(&patched, 1);
    let (load, sleep) =
        (mean(&kswapd_percent(&report, "load")), mean(&kswapd_percent(&report, "sleep")));
    assert!((25..60).contains(&load), "{load}");
    assert!((10..28).contains(&sleep), "{sleep}");
}

#[test]
fn nothing_is_reclaimed_while_memory_is_free() {
    let report = short_run(&model("linux-2.4.9-2gb"), 1);
    assert_eq!(mean(&kswapd_percent(&report, "load")), 0);
    let load = &report.phases[0];
    let seconds = (load.end_ns - load.start_ns) as f64 / 1e9;
    assert!((17.5..18.5).contains(&seconds), "18 s to load a file, and {seconds}");
    assert_eq!(report.counters["page_in_count"].value, Some(104_415));
    assert_eq!(report.counters["reclaim_steal_count"].value, Some(0));
}

#[test]
fn equal_seeds_give_equal_reports_and_nothing_is_unexplained() {
    let machine = model("linux-2.4.9-2gb-second-run");
    let reports = [1, 1, 2].map(|seed| short_run(&machine, seed));
    assert_eq!(reports[0], reports[1]);
    assert_ne!(reports[0].phases[0].end_ns, reports[2].phases[0].end_ns);
    let budget = reports[0].budget.as_ref().expect("a budget");
    assert_eq!(Account::ALL.map(|account| budget.unexplained_ns(account)), [0, 0]);
}

#[test]
fn more_than_half_of_memory_cannot_be_locked() {
    let machine = model("linux-2.4.9-2gb");
    let kernel = Linux24::new(Linux24Config::new(&machine).expect("a kernel"));
    let unmet = |slots| {
        let plan = plan(&machine, "mlock-cycle", &[("slots", slots)], 1);
        Kernel::<Flat>::unmet_requirements(&kernel, &plan)
    };
    assert!(unmet("2").is_empty());
    assert!(unmet("3")[0].what.contains("half of memory"));
}

/// Writes one page after the other of a heap of `mib` MiB, `laps` times, on a machine with 48 MiB
/// of memory and `swap_mib` MiB of swap.
fn sweep(policy: &str, mib: u64, laps: u64, swap_mib: u64) -> (Run, Result<(), RunError>) {
    let mut machine = model(policy);
    machine.set("machine", "memory", 48.0 / 1024.0).expect("a constant");
    machine.set("disk", "swap", swap_mib as f64 / 1024.0).expect("a constant");
    let job = format!(
        r#"
        name = "sweep"
        [[region]]
        name = "heap"
        size = "{mib}M"
        [[phase]]
        name = "laps"
        ops = [{{ touch = "heap", access = "write", pattern = "strided", stride = "4K", count = {} }}]
        "#,
        laps * mib * 256
    );
    let settings = Settings::load(&machine).expect("settings");
    let job = Job::parse(&job, "test").expect("a job");
    let plan =
        job.resolve(&Default::default(), &spec(&machine, &settings), Some(1)).expect("a plan");
    run(&machine, &plan)
}

const POLICIES: [&str; 2] = ["linux-2.4.9-2gb", "linux-2.4.13-2gb"];

#[test]
fn private_memory_beyond_physical_goes_to_swap_and_comes_back() {
    for policy in POLICIES {
        let (report, end) = sweep(policy, 21, 2, 1024);
        end.expect("a run to the end");
        let count = |id: &str| report.counters[id].value.expect("a value");
        assert!(count("swap_out_count") > 200 && count("page_out_count") > 200, "{policy}");
        assert!(count("swap_in_count") > 100, "{policy}");
        assert!(count("resident_bytes_max") <= 48 << 20, "{policy}");
    }
}

#[test]
fn swap_need_not_hold_what_is_in_memory() {
    for policy in POLICIES {
        let (report, end) = sweep(policy, 24, 2, 12);
        assert!(end.is_ok(), "{policy}: larger than swap, not than swap and memory: {end:?}");
        assert!(report.counters["swap_in_count"].value > Some(1000), "{policy}");
    }
}

#[test]
fn memory_beyond_physical_and_swap_ends_the_run_with_a_remedy() {
    for policy in POLICIES {
        let (_, end) = sweep(policy, 40, 1, 8);
        let Err(RunError::Op { why, remedy, .. }) = end else { panic!("{policy}: {end:?}") };
        assert!(why.contains("order-0 allocation failed"), "{policy}: {why}");
        assert!(remedy.contains("more swap"), "{policy}: {remedy}");
    }
}
