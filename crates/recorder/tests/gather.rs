//! Records a real program that reads 128 MB at random and models it on an UltraSPARC III+, with 8K pages and
//! with 4M pages. Program and machine are those of McDougall, 'Taming Your Emu' (Sun BluePrints, 2004).

mod common;

use common::{compile, has_programs, record};
use pagetax_recorder::config::{MachineConfig, PagePolicy};
use pagetax_recorder::counters::Side;
use pagetax_recorder::engine::EngineKind;
use pagetax_recorder::simulate::Simulation;
use pagetax_sim::models;

#[test]
fn half_the_time_goes_to_tlb_misses_and_large_pages_end_that() {
    if !has_programs(&["cc", "valgrind"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = compile("gather.c", &["-O1"], folder.path());
    let model = models::find("ultrasparc-3plus-900").unwrap();
    let policies = PagePolicy::alternatives(["8K,4M"]).unwrap();
    let config = |pages| MachineConfig::new(&model, pages).unwrap();
    let mut simulation = Simulation::new(policies.into_iter().map(config).collect());
    let ended = record(EngineKind::Valgrind, &program, &mut simulation);
    assert_eq!(ended.exit.shell_code(), 0, "{}", ended.log);
    let thread = &simulation.threads()[0];
    // Each read is a far access, in a loop whose length the model assumes.
    let loop_instructions = thread.instruction_count as f64 / thread.far_count as f64;
    let of_model = model.count("program", "loop").unwrap() as f64;
    assert!((loop_instructions / of_model - 1.0).abs() < 0.1, "{loop_instructions} instructions");
    let percent = |config: usize| {
        let counters = &thread.cpus[config].counters;
        let data = counters.total(Side::Data);
        (data.tlb_ps + data.tsb_ps) as f64 / counters.clock_ps as f64 * 100.0
    };
    let (small, large) = (percent(0), percent(1));
    assert!((small - 46.2).abs() < 2.0, "trapstat: 46.2 %, here {small}");
    assert!(large < 0.2, "trapstat: 0.2 %, most of it the kernel's; here {large}");
    let speedup = thread.cpus[0].counters.clock_ps as f64 / thread.cpus[1].counters.clock_ps as f64;
    assert!((1.7..1.95).contains(&speedup), "almost twice as fast; here {speedup}");
}
