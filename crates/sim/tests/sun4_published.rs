//! The Sun-4 models against the tables of report 000 (1990). Medians over seeds. What takes long runs in
//! release builds only: `cargo test --release -p pagetax-sim --test sun4_published`.

use pagetax_core::job::Job;
use pagetax_core::machine::{Machine, RunError};
use pagetax_core::quantity::Params;
use pagetax_core::report::{Recording, Run};
use pagetax_sim::machine::SimMachine;
use pagetax_sim::model::Model;
use pagetax_sim::models;

const SEEDS: u64 = if cfg!(debug_assertions) { 1 } else { 9 };

fn vmtest(model: Model, params: &[(&str, &str)], seed: u64) -> (Run, Result<(), RunError>) {
    let mut machine = SimMachine::new(model).unwrap();
    let overrides: Params = params.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
    let job = Job::builtin("vmtest").unwrap();
    let plan = job.resolve(&overrides, &machine.spec(), Some(seed)).unwrap();
    let mut recording = Recording::new(&plan, &machine.spec());
    let end = machine.run(&plan, &mut recording);
    (recording.finish(), end)
}

/// A published or simulated row.
#[derive(Debug, Clone, Copy)]
struct Row {
    elapsed_s: f64,
    user_s: f64,
    system_s: f64,
    faults: f64,
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The medians of `SEEDS` runs.
fn simulate(model: &Model, params: &[(&str, &str)]) -> Row {
    let runs: Vec<Run> = (1..=SEEDS)
        .map(|seed| {
            let (run, end) = vmtest(model.clone(), params, seed);
            end.unwrap();
            run
        })
        .collect();
    let of = |id: &str| median(runs.iter().map(|r| r.counters[id].value.unwrap() as f64).collect());
    Row {
        elapsed_s: of("wall_ns") / 1e9,
        user_s: of("user_ns") / 1e9,
        system_s: of("kernel_ns") / 1e9,
        faults: of("translation_fault_count"),
    }
}

fn table(machine: &str, megabytes: &[u64]) -> Vec<(u64, Row)> {
    let model = models::find(machine).unwrap();
    let row = |mb: &u64| (*mb, simulate(&model, &[("size", &format!("{mb}M"))]));
    megabytes.iter().map(row).collect()
}

fn within(value: f64, published: f64, low: f64, high: f64, what: &str) {
    let ratio = value / published;
    assert!(
        (low..=high).contains(&ratio),
        "{what}: {value:.1}, published {published}: ×{ratio:.2}"
    );
}

/// Megabytes, elapsed seconds, translation faults.
const SPARCSTATION_1: [(u64, f64, f64); 16] = [
    (2, 3.5, 1224.0),
    (4, 6.4, 1840.0),
    (6, 9.2, 2442.0),
    (8, 12.2, 2729.0),
    (10, 15.0, 3381.0),
    (12, 18.0, 4121.0),
    (14, 21.8, 5275.0),
    (16, 25.9, 8746.0),
    (18, 55.3, 98251.0),
    (20, 87.7, 200296.0),
    (22, 151.3, 406885.0),
    (24, 388.3, 1202899.0),
    (26, 371.9, 1118388.0),
    (28, 764.8, 2412144.0),
    (30, 1607.1, 5316313.0),
    (32, 2601.0, 8665839.0),
];

#[test]
fn rows_without_stealing_follow_the_table() {
    for (mb, elapsed_s, faults) in &SPARCSTATION_1[..7] {
        let row = table("sparcstation-1", &[*mb])[0].1;
        within(row.elapsed_s, *elapsed_s, 0.94, 1.06, &format!("{mb} MB"));
        within(row.faults, *faults, 0.85, 1.15, &format!("{mb} MB"));
    }
}

#[cfg(not(debug_assertions))]
#[test]
fn sparcstation_1_follows_the_whole_table() {
    let megabytes: Vec<u64> = SPARCSTATION_1.iter().map(|row| row.0).collect();
    let simulated = table("sparcstation-1", &megabytes);
    let mut squares = Vec::new();
    for ((mb, row), (_, elapsed_s, faults)) in simulated.iter().zip(SPARCSTATION_1) {
        println!("{mb} MB: {row:.1?}, published {elapsed_s} s, {faults} faults");
        let what = format!("{mb} MB");
        match mb {
            2..=14 => {
                within(row.elapsed_s, elapsed_s, 0.94, 1.06, &what);
                within(row.faults, faults, 0.85, 1.15, &what);
            }
            16 => {
                within(row.elapsed_s, elapsed_s, 0.94, 1.06, &what);
                within(row.faults, faults, 0.6, 1.6, &what);
            }
            _ => {
                within(row.elapsed_s, elapsed_s, 0.55, 1.8, &what);
                within(row.faults, faults, 0.55, 1.8, &what);
                squares.push((row.elapsed_s / elapsed_s).ln().powi(2));
                squares.push((row.faults / faults).ln().powi(2));
            }
        }
    }
    let rms = (squares.iter().sum::<f64>() / squares.len() as f64).sqrt().exp();
    assert!(rms <= 1.45, "rows 18-32: geometric RMS ×{rms:.2}");
    let relative_speed = |index: usize| 3.5 * (index + 1) as f64 / simulated[index].1.elapsed_s;
    assert!(relative_speed(7) >= 1.0 && relative_speed(8) <= 0.7, "the knee is at 16 MB");
    let (before, after) = (simulated[7].1, simulated[15].1);
    let slope_us = (after.system_s - before.system_s) / (after.faults - before.faults) * 1e6;
    assert!((255.0..=290.0).contains(&slope_us), "{slope_us} µs of system time a fault");
}

#[cfg(not(debug_assertions))]
#[test]
fn larger_processes_waste_fewer_pmegs() {
    let model = models::find("sparcstation-1").unwrap();
    let elapsed = |size| simulate(&model, &[("size", size), ("process_size", "4M")]).elapsed_s;
    let (one, two) = (elapsed("4M"), elapsed("8M"));
    let linear = |processes: f64| one + (two - one) * (processes - 1.0);
    within(elapsed("12M"), linear(3.0), 0.94, 1.06, "12 MB");
    within(elapsed("16M"), linear(4.0), 0.94, 1.06, "16 MB");
    assert!(elapsed("20M") >= 1.4 * linear(5.0));
}

#[cfg(not(debug_assertions))]
#[test]
fn the_fitted_policy_is_the_best() {
    let rms = |policy: &str| {
        let mut model = models::find("sparcstation-1").unwrap();
        model.set("hat", "steal", policy).unwrap();
        let square = |(mb, published, _): &(u64, f64, f64)| {
            let row = simulate(&model, &[("size", &format!("{mb}M"))]);
            (row.elapsed_s / published).ln().powi(2)
        };
        let rows: Vec<f64> = SPARCSTATION_1[7..12].iter().map(square).collect();
        (rows.iter().sum::<f64>() / rows.len() as f64).sqrt().exp()
    };
    let fitted = rms("no-context-first-rover");
    for policy in ["fifo", "exact-lru", "random"] {
        assert!(rms(policy) > fitted, "{policy}: ×{:.2} against ×{fitted:.2}", rms(policy));
    }
}

#[test]
fn the_pmeg_patch_takes_the_knee_away() {
    let published = [
        (2, 3.6),
        (4, 6.8),
        (8, 12.6),
        (12, 18.7),
        (14, 22.5),
        (16, 27.0),
        (18, 30.1),
        (24, 40.0),
        (32, 52.1),
        (64, 105.4),
        (96, 159.8),
    ];
    let megabytes = published.map(|(mb, _)| mb);
    for ((mb, row), (_, elapsed_s)) in
        table("sparcstation-1-pmeg-patch", &megabytes).iter().zip(published)
    {
        println!("{mb} MB: {row:.1?}, published {elapsed_s} s");
        within(row.elapsed_s, elapsed_s, 0.95, 1.05, &format!("{mb} MB"));
    }
}

#[test]
fn sparcstation_1plus_follows_suns_own_table() {
    let published = [
        (2, 2.3, 0.6),
        (4, 4.7, 0.8),
        (8, 9.4, 1.1),
        (10, 11.9, 1.2),
        (12, 14.3, 1.4),
        (14, 16.8, 1.5),
        (16, 19.5, 1.7),
        (18, 22.5, 1.9),
        (20, 25.3, 2.0),
        (22, 27.6, 2.2),
        (24, 30.4, 2.5),
        (26, 33.3, 2.5),
        (28, 35.7, 2.7),
        (30, 38.1, 2.9),
        (32, 40.8, 3.1),
    ];
    let megabytes = published.map(|(mb, ..)| mb);
    let simulated = table("sparcstation-1plus-pmeg-patch", &megabytes);
    for ((mb, row), (_, user_s, system_s)) in simulated.iter().zip(published) {
        println!("{mb} MB: {row:.1?}, published {user_s} + {system_s} s");
        let what = format!("{mb} MB");
        within(row.user_s, user_s, 0.95, 1.05, &what);
        assert!((row.system_s - system_s).abs() <= 0.5, "{what}: system {:.1} s", row.system_s);
        within(row.user_s + row.system_s, user_s + system_s, 0.95, 1.05, &what);
    }
}

#[cfg(not(debug_assertions))]
#[test]
fn throughput_bends_near_40_switches_a_second() {
    let model = models::find("sparcstation-1").unwrap();
    let elapsed =
        |rate: &str| simulate(&model, &[("size", "20M"), ("switch_rate", rate)]).elapsed_s;
    let (slow, bend, fast) = (elapsed("10"), elapsed("25"), elapsed("200"));
    println!("20 MB: {slow:.0} s at 20 switches a second, {bend:.0} s at 35, {fast:.0} s at 210");
    assert!(bend < 1.3 * slow && fast > 2.0 * bend);
}

#[test]
fn shared_pmegs_leave_no_knee() {
    let (row, _) =
        vmtest(models::find("sparcstation-1-shared-pmegs").unwrap(), &[("size", "32M")], 1);
    assert!(row.wall_ns < 60_000_000_000, "{} ns", row.wall_ns);
    assert_eq!(row.counters["pmeg_steal_count"].value, Some(0));
}

#[test]
fn every_model_loads_and_runs() {
    for name in models::names() {
        let machine = SimMachine::find(name).unwrap_or_else(|error| panic!("{name}: {error}"));
        let sun4 = machine.model().kernel == "sunos";
        if sun4 {
            let (run, end) = vmtest(machine.model().clone(), &[("size", "6M"), ("loops", "50")], 1);
            end.unwrap();
            let warned = run.warnings.iter().any(|warning| warning.id == "not_validated");
            assert_eq!(warned, !machine.spec().validated, "{name}");
            let accesses = 512 + 3 * 50 * 512;
            assert_eq!(run.counters["access_count"].value, Some(accesses), "{name}");
        }
    }
}
