//! A whole recording by the native engine against one by Valgrind's. Each begins at another instruction of a
//! program's start, so what is held against each other is what a longer run of it has more than a shorter one.
#![cfg(target_arch = "x86_64")]

mod common;

use common::{compile, has_programs, has_sampler, record};
use pagetax_recorder::engine::EngineKind;
use pagetax_recorder::machine::View;
use pagetax_recorder::simulate::Simulation;
use pagetax_recorder::tally::Access;
use pagetax_sim::models;
use std::path::Path;

/// By thread, the busiest last: instructions, accesses, and misses of data by page size.
fn counts(engine: EngineKind, program: &Path) -> Vec<[i64; 4]> {
    let model = models::find("x86-64-calibrated").unwrap();
    let views =
        ["all=4K", "all=2M"].map(|pages| View::new(&model, pages.parse().unwrap()).unwrap());
    let mut simulation = Simulation::new(views.into());
    let ended = record(engine, program, &mut simulation);
    assert_eq!(ended.exit.shell_code(), 42, "{}", ended.log);
    let lanes = simulation.lanes().iter();
    let counts = lanes.map(|lane| {
        let [small, large] =
            [0, 1].map(|view: usize| lane.cpus[view].tally.total(Access::Data).tlb_count);
        [lane.instruction_count, lane.access_count, small, large].map(|count| count as i64)
    });
    let mut counts: Vec<_> = counts.collect();
    counts.sort();
    counts
}

/// What the two threads have in the longer run and not in the shorter one.
fn more(engine: EngineKind) -> Vec<[i64; 4]> {
    let folder = tempfile::tempdir().unwrap();
    let [shorter, longer] = ["-DREADS=102400", "-DREADS=512000"].map(|reads| {
        // Symbols are found before there are threads, not by the one that comes first.
        let options = ["-O1", "-pthread", "-Wl,-z,now", reads];
        let program = compile("whole.c", &options, folder.path());
        counts(engine, &program)
    });
    assert_eq!((shorter.len(), longer.len()), (3, 3), "{engine}: main and two threads");
    let of_threads = longer.iter().zip(&shorter).skip(1);
    of_threads.map(|(l, s)| std::array::from_fn(|nth| l[nth] - s[nth])).collect()
}

#[test]
fn a_whole_native_recording_counts_as_valgrind_does() {
    if !has_programs(&["cc", "valgrind"]) || !has_sampler() {
        return;
    }
    let (native, valgrind) = (more(EngineKind::Native), more(EngineKind::Valgrind));
    for (native, valgrind) in native.iter().zip(&valgrind) {
        assert_eq!(native[..2], valgrind[..2], "instructions and accesses");
        // What the TLBs held at the beginning was not the same.
        for (native, valgrind) in native[2..].iter().zip(&valgrind[2..]) {
            assert!((native - valgrind).abs() <= 50 + valgrind / 1000, "{native} and {valgrind}");
        }
    }
    assert!(native[0][2] > 100_000, "too easy a program: {native:?}");
}
