//! Golden reports: one small run on each family of machines, byte for byte as in `golden/`, in
//! debug and release builds and on any host. If BLESS is set in the environment, the new reports
//! replace the old.

use pagetax_core::document::Document;
use pagetax_core::job::Job;
use pagetax_core::machine::Machine;
use pagetax_core::report::Recording;
use pagetax_sim::historic::machine::SimMachine;
use pagetax_sim::models;
use std::path::PathBuf;

/// A small run of a job on a machine. It may change one constant, mostly memory, so that little is
/// enough to fill it.
struct GoldenRun {
    machine: &'static str,
    constant: Option<(&'static str, &'static str, f64)>,
    job: &'static str,
    params: &'static [(&'static str, &'static str)],
}

impl GoldenRun {
    fn report(&self) -> String {
        let mut model = models::find(self.machine).expect("a known machine");
        if let Some((table, name, value)) = self.constant {
            model.set(table, name, value).expect("a constant");
        }
        let machine = SimMachine::new(model).expect("a possible machine");
        let job = Job::builtin(self.job).expect("a built-in job");
        let params = self.params.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
        let plan = job.resolve(&params, &machine.spec(), Some(1)).expect("parameters that fit");
        let mut recording = Recording::new(&plan, &machine.spec());
        machine.run(&plan, &mut recording).expect("a whole run");
        recording.finish().to_json().expect("a report is JSON")
    }

    fn check(&self) {
        let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
        let path = directory.join(format!("{}-{}.json", self.machine, self.job));
        let report = self.report();
        if std::env::var_os("BLESS").is_some() {
            std::fs::write(&path, report).expect("the directory is writable");
            return;
        }
        let golden = std::fs::read_to_string(&path).unwrap_or_default();
        let different = report.lines().zip(golden.lines()).find(|(now, then)| now != then);
        let path = path.display();
        assert!(report == golden, "{path}: not {different:?}; if it is right: cargo xtask bless");
    }
}

#[test]
fn sun_4_where_pmegs_are_stolen() {
    let params = &[("size", "32M"), ("loops", "2000")];
    GoldenRun { machine: "sparcstation-1", constant: None, job: "vmtest", params }.check();
}

#[test]
fn sun_4_with_suns_pmeg_patch() {
    let params = &[("size", "32M"), ("loops", "2000")];
    GoldenRun { machine: "sparcstation-1-pmeg-patch", constant: None, job: "vmtest", params }
        .check();
}

#[test]
fn ultrasparc_beyond_the_reach_of_its_tlb() {
    let params = &[("size", "16M"), ("count", "50_000")];
    GoldenRun { machine: "ultrasparc-3plus-900", constant: None, job: "tlb-gather", params }
        .check();
}

#[test]
fn x86_64_with_page_walks() {
    let params = &[("size", "64M"), ("count", "50_000")];
    GoldenRun { machine: "x86-64-calibrated", constant: None, job: "tlb-gather", params }.check();
}

#[test]
fn linux_2_4_full_of_pages_that_were_locked() {
    let (constant, params) = (Some(("machine", "memory", 0.125)), &[("file_size", "8M")]);
    GoldenRun { machine: "linux-2.4.9-2gb", constant, job: "mlock-cycle", params }.check();
}

#[test]
fn alpha_with_a_region_beyond_its_memory() {
    // 4000 pages of 8K are 31 MB.
    let constant = Some(("paging", "resident_pages", 4000.0));
    let params = &[("size", "40M"), ("random", "1000")];
    GoldenRun { machine: "alpha-nms", constant, job: "mmap3", params }.check();
}
