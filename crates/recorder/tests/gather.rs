//! Records a real program that reads 128 MB at random and models it on an UltraSPARC III+, with 8K pages and
//! with 4M pages. Program and machine are those of McDougall, 'Taming Your Emu' (Sun BluePrints, 2004).

mod common;

use common::{compile, has_programs, record};
use pagetax_recorder::engine::EngineKind;
use pagetax_recorder::machine::View;
use pagetax_recorder::simulate::Simulation;
use pagetax_recorder::tally::Access;
use pagetax_sim::models;

#[test]
fn half_the_time_goes_to_tlb_misses_and_large_pages_end_that() {
    if !has_programs(&["cc", "valgrind"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = compile("gather.c", &["-O1"], folder.path());
    let model = models::find("ultrasparc-3plus-900").unwrap();
    let views = ["8K", "4M"].map(|pages| View::new(&model, pages.parse().unwrap()).unwrap());
    let mut simulation = Simulation::new(views.into());
    let ended = record(EngineKind::Valgrind, &program, &mut simulation);
    assert_eq!(ended.exit.shell_code(), 0, "{}", ended.log);
    let lane = &simulation.lanes()[0];
    // Each read is a load far from the last one, in a loop that the model takes to be so long.
    let loop_instructions = lane.instruction_count as f64 / lane.far_count as f64;
    let of_model = model.count("program", "loop").unwrap() as f64;
    assert!((loop_instructions / of_model - 1.0).abs() < 0.1, "{loop_instructions} instructions");
    let percent = |view: usize| {
        let tally = &lane.cpus[view].tally;
        let data = tally.total(Access::Data);
        (data.tlb_ps + data.tsb_ps) as f64 / tally.clock_ps as f64 * 100.0
    };
    let (small, large) = (percent(0), percent(1));
    assert!((small - 46.2).abs() < 2.0, "trapstat: 46.2 %, here {small}");
    assert!(large < 0.2, "trapstat: 0.2 %, most of it the kernel's; here {large}");
    let speedup = lane.cpus[0].tally.clock_ps as f64 / lane.cpus[1].tally.clock_ps as f64;
    assert!((1.7..1.95).contains(&speedup), "almost twice as fast; here {speedup}");
}
