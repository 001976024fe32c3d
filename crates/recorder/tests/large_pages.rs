//! A program that asks for large pages while it runs: the Valgrind tool tests for them from then on. When
//! a page is looked at is a matter of timing, and so is how many accesses are to large ones.

mod common;

use common::{compile, has_programs, record};
use pagetax_core::units::PageSize;
use pagetax_recorder::config::{MachineConfig, PagePolicy};
use pagetax_recorder::engine::EngineKind;
use pagetax_recorder::simulate::Simulation;
use pagetax_sim::models;

#[test]
fn a_program_that_asks_for_large_pages_goes_on() {
    if !has_programs(&["cc", "valgrind"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program =
        compile("large.c", &["-O1", "-static", "-nostdlib", "-fno-pie", "-no-pie"], folder.path());
    let model = models::find("x86-64-calibrated").unwrap();
    let mut simulation =
        Simulation::new(vec![MachineConfig::new(&model, PagePolicy::Real).unwrap()]);
    let ended = record(EngineKind::Valgrind, &program, &mut simulation);
    assert_eq!(ended.exit.shell_code(), 42, "{}", ended.log);
    let counts = simulation.threads()[0].cpus[0].translation.data().counts(PageSize::K4);
    assert!(counts[1] > 0, "{counts:?}");
}
