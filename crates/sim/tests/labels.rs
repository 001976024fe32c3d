//! The labels of a report's figures: validated, transcribed, or known to be missing.

use pagetax_core::job::Job;
use pagetax_core::machine::Machine;
use pagetax_core::report::{Recording, Run};
use pagetax_sim::historic::machine::SimMachine;
use pagetax_sim::historic::reproduce::expression::Expression;
use pagetax_sim::historic::reproduce::published::{self, Published};
use pagetax_sim::models;
use std::collections::{BTreeMap, BTreeSet};

fn run(machine: &str, job: &str, params: &[(&str, &str)]) -> Run {
    let machine = SimMachine::find(machine).expect("a machine");
    let params = params.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
    let job = Job::builtin(job).expect("a built-in job");
    let plan = job.resolve(&params, &machine.spec(), None).expect("a plan");
    let mut recording = Recording::new(&plan, &machine.spec());
    machine.run(&plan, &mut recording).expect("a whole run");
    recording.finish()
}

fn warned(run: &Run, id: &str) -> bool {
    run.warnings.iter().any(|warning| warning.id == id)
}

/// Returns the expressions whose published numbers are in a report and are asserted.
fn asserted(file: &Published) -> impl Iterator<Item = (Option<String>, &str)> {
    let columns = file.sweep.iter().flat_map(|sweep| {
        let columns =
            sweep.column.iter().filter(|c| c.status.is_published() && !c.tolerance.is_empty());
        columns.map(|column| (Some(sweep.name.clone()), column.value.as_str()))
    });
    let checks = file.check.iter().filter(|check| {
        check.status.is_published() && (check.ratio.is_some() || check.range.is_some())
    });
    columns.chain(checks.filter_map(|check| Some((None, check.value.as_deref()?))))
}

#[test]
fn a_model_is_called_checked_with_the_jobs_that_published_figures_are_asserted_of() {
    let mut checked: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for name in published::names() {
        let file = published::find(name).expect("a file");
        let setups = file.setups().expect("its runs");
        for (sweep, text) in asserted(&file) {
            for (run, _) in Expression::parse(text).expect("an expression").terms() {
                let setup = match &sweep {
                    Some(name) => &file.sweep.iter().find(|s| s.name == *name).expect("it").setup,
                    None => &setups[run],
                };
                if setup.set.is_empty() {
                    checked.entry(setup.machine.clone()).or_default().insert(setup.job.clone());
                }
            }
        }
    }
    for name in models::names() {
        let own: BTreeSet<String> =
            models::find(name).expect("a model").validated_jobs.into_iter().collect();
        assert_eq!(own, checked.remove(name).unwrap_or_default(), "{name}");
    }
}

#[test]
fn another_job_than_the_one_that_was_checked_is_not_checked() {
    let small = &[("size", "2M"), ("loops", "10")];
    let own = run("sparcstation-1", "vmtest", small);
    assert!(own.machine.validated && !warned(&own, "not_validated"));
    let other = run("sparcstation-1", "mmap3", &[("size", "1M"), ("random", "10")]);
    assert!(!other.machine.validated);
    let warning = other.warnings.iter().find(|w| w.id == "not_validated").expect("a warning");
    assert!(warning.text.contains("not validated for mmap3"), "{}", warning.text);
    assert!(!run("sparcstation-1plus", "vmtest", small).machine.validated, "its base is");
}

#[test]
fn a_file_of_the_users_is_not_checked_whatever_it_says() {
    let path = std::env::temp_dir().join(format!("pagetax-labels-{}.toml", std::process::id()));
    std::fs::write(&path, models::text("sparcstation-1").expect("a text")).expect("a file");
    let model = models::find(path.to_str().expect("a path"));
    std::fs::remove_file(&path).expect("the file that was written");
    assert!(model.expect("a model").validated_jobs.is_empty());
}

#[test]
fn kernels_that_do_not_show_what_was_published_say_so() {
    let params = &[("files", "1"), ("file_size", "8M")];
    for machine in ["linux-2.4.13-2gb", "linux-2.4.13-3.5gb", "linux-2.4.13-ac4-3.5gb"] {
        assert!(warned(&run(machine, "mlock-cycle", params), "model_limits"), "{machine}");
    }
    assert!(!warned(&run("linux-2.4.9-2gb", "mlock-cycle", params), "model_limits"));
}

#[test]
fn listings_of_the_report_stand_beside_its_own_program_alone() {
    let sources = |run: &Run, title: &str| -> Vec<String> {
        let table = run.tables.iter().find(|table| table.title == title).expect("a table");
        assert_eq!(table.columns.last().map(String::as_str), Some("source"));
        table.rows.iter().map(|row| row.last().cloned().unwrap_or_default()).collect()
    };
    let own = run("ultrasparc-3plus-900", "tlb-gather", &[("size", "1M"), ("count", "1000")]);
    assert!(warned(&own, "assumed_background"));
    assert_eq!(
        sources(&own, "trapstat -t"),
        ["modeled, transcribed", "transcribed", "modeled, transcribed"]
    );
    let transcribed = sources(&own, "pmap -sx").iter().filter(|s| *s == "transcribed").count();
    assert_eq!(transcribed, 16, "the program's image and libraries");
    let other = run("ultrasparc-3plus-900", "mmap3", &[("size", "1M"), ("random", "10")]);
    assert!(!warned(&other, "assumed_background"));
    assert_eq!(sources(&other, "trapstat -t"), ["modeled", "not modeled", "modeled"]);
    assert!(sources(&other, "pmap -sx").iter().all(|source| source == "modeled"));
    let kernel = &other.tables.iter().find(|t| t.title == "trapstat -t").expect("it").rows[1];
    assert!(kernel[2..11].iter().all(|cell| cell == "-"), "missing is never 0: {kernel:?}");
}
