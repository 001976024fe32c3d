//! The Sun-4 models against the tables of Lawrence's report of 1990 (Sun-Managers), as far as one
//! seed suffices. `pagetax reproduce` checks all of them, with medians. Slow tests run in release
//! builds only: `cargo test --release -p pagetax-sim --test sun4_published`.

use pagetax_core::job::Job;
use pagetax_core::machine::{Machine, RunError};
use pagetax_core::quantity::Params;
use pagetax_core::report::{Recording, Run};
use pagetax_sim::historic::machine::SimMachine;
use pagetax_sim::model::Model;
use pagetax_sim::models;

fn vmtest(model: Model, params: &[(&str, &str)], seed: u64) -> (Run, Result<(), RunError>) {
    let machine = SimMachine::new(model).unwrap();
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

fn simulate(model: &Model, params: &[(&str, &str)]) -> Row {
    let (run, end) = vmtest(model.clone(), params, 1);
    end.unwrap();
    let of = |id: &str| run.counters[id].value.unwrap() as f64;
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

/// The published table: megabytes, elapsed seconds, translation faults.
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

/// Returns the geometric RMS of simulated over published elapsed times, for 16 to 24 MB. Each
/// simulated time is the least of 3 runs, as in the report, and the median of 3 such groups.
#[cfg(not(debug_assertions))]
fn policy_rms(policy: &str) -> f64 {
    let mut model = models::find("sparcstation-1").unwrap();
    model.set("hat", "steal", policy).unwrap();
    let elapsed = |mb: u64, seed: u64| {
        let (run, end) = vmtest(model.clone(), &[("size", &format!("{mb}M"))], seed);
        end.unwrap();
        run.wall_ns as f64 / 1e9
    };
    let square = |(mb, published, _): &(u64, f64, f64)| {
        let least =
            |group: u64| (1..=3).map(|n| elapsed(*mb, 3 * group + n)).fold(f64::INFINITY, f64::min);
        let groups: Vec<f64> = (0..3).map(least).collect();
        (pagetax_core::stats::quantiles(&groups, [0.5])[0] / published).ln().powi(2)
    };
    let rows: Vec<f64> = SPARCSTATION_1[7..12].iter().map(square).collect();
    (rows.iter().sum::<f64>() / rows.len() as f64).sqrt().exp()
}

/// Runs in release builds only (`cargo xtask gate`), because it takes minutes in debug builds.
#[cfg(not(debug_assertions))]
#[test]
fn the_fitted_policy_is_the_best_of_all() {
    let policies = pagetax_sim::historic::kernel::sunos::steal::POLICIES;
    let rms: Vec<(&str, f64)> = std::thread::scope(|scope| {
        let names = policies.iter().map(|(name, _)| *name);
        let threads: Vec<_> =
            names.map(|name| (name, scope.spawn(move || policy_rms(name)))).collect();
        threads.into_iter().map(|(name, thread)| (name, thread.join().unwrap())).collect()
    });
    println!("{rms:.2?}");
    let fitted = rms.iter().find(|(name, _)| *name == "no-context-first-rover").unwrap().1;
    let others = rms.iter().filter(|(name, _)| *name != "no-context-first-rover");
    for (name, other) in others {
        assert!(*other > fitted, "{name}: ×{other:.2} against ×{fitted:.2}");
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
            assert_eq!(warned, !machine.spec().is_validated_for("vmtest"), "{name}");
            let accesses = 512 + 3 * 50 * 512;
            assert_eq!(run.counters["access_count"].value, Some(accesses), "{name}");
        }
    }
}
