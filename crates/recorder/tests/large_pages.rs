//! A program requests large pages while it runs, and the Valgrind tool tests for them from then on. The
//! number of accesses to large pages depends on timing.

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
