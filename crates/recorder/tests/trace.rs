//! Traces of a real program equal lackey's list of its accesses, and give the same misses as the online
//! model.

mod common;

use common::{compile, has_programs, record};
use pagetax_core::units::PageSize;
use pagetax_host::launch::program::Program;
use pagetax_recorder::config::{MachineConfig, PagePolicy};
use pagetax_recorder::engine::{Engine, EngineKind};
use pagetax_recorder::pages::{AccessKind, RecordAdapter, filters};
use pagetax_recorder::session::{RecordOptions, Streams, run};
use pagetax_recorder::simulate::Simulation;
use pagetax_recorder::stream::MemoryUse;
use pagetax_recorder::trace::code::Step;
use pagetax_recorder::trace::import::{Format, import};
use pagetax_recorder::trace::{DROPPED, Head, Trace, TraceWriter};
use pagetax_sim::hardware::configuration;
use pagetax_sim::models;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Compiles a program whose stack lies in its own data, so that addresses do not depend on the engine.
fn program(folder: &Path) -> PathBuf {
    compile("oracle.c", &["-O1", "-static", "-nostdlib", "-fno-pie", "-no-pie"], folder)
}

fn writer(path: &Path) -> TraceWriter {
    let (command, dropped) = (vec!["oracle".into()], DROPPED.into());
    let (recorded_by, architecture) = ("test".into(), "x86_64".into());
    let head = Head { command, recorded_by, architecture, dropped, allocator: None };
    TraceWriter::create(path, &head).unwrap()
}

fn recorded(kind: EngineKind, program: &Path, path: &Path) -> Trace {
    let argv = [program.as_os_str().to_owned()];
    let program = Program::find(program).unwrap();
    let engine = Engine::choose(&program, Some(kind)).unwrap();
    let options = RecordOptions {
        engine: &engine,
        argv: &argv,
        follow: false,
        sample: false,
        zeros: true,
        filters: filters(),
        streams: Streams::Inherited,
        environment: &[],
    };
    let mut live = RecordAdapter::new(writer(path), &program);
    assert_eq!(run(&options, &mut live, |_, _| {}).unwrap().exit.shell_code(), 42);
    live.pages.finish().unwrap();
    Trace::open(path).unwrap()
}

fn steps(trace: &Trace) -> impl Iterator<Item = Step> + '_ {
    (0..trace.blocks()).flat_map(|n| trace.block(n).unwrap().steps().collect::<Vec<_>>())
}

/// Returns the pages of one side, in order.
fn pages(trace: &Trace, code: bool) -> Vec<u64> {
    let page = |step| match step {
        Step::Change(kind, page) if (kind == AccessKind::Fetch) == code => Some(page),
        _ => None,
    };
    steps(trace).filter_map(page).collect()
}

#[test]
fn a_recording_is_what_lackey_lists() {
    if !has_programs(&["cc", "valgrind"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = program(folder.path());
    let list = folder.path().join("list");
    let status = Command::new("valgrind")
        .args(["--tool=lackey", "--trace-mem=yes", "--basic-counts=no", "-q"])
        .arg(format!("--log-file={}", list.display()))
        .arg(&program)
        .status()
        .unwrap();
    assert_eq!(status.code(), Some(42));
    let imported = folder.path().join("imported.ptt");
    let mut importer = writer(&imported);
    let mut shares = Vec::new();
    let count = import(Format::Lackey, &list, &mut importer, |done| shares.push(done)).unwrap();
    assert!(count > 200_000);
    assert!(shares.len() > 2 && shares.is_sorted() && shares[0] > 0.0, "{shares:?}");
    assert!(shares.last().is_some_and(|last| (0.5..=1.0).contains(last)), "{shares:?}");
    importer.finish().unwrap();
    let (imported, own) = (
        Trace::open(&imported).unwrap(),
        recorded(EngineKind::Valgrind, &program, &folder.path().join("own.ptt")),
    );
    for code in [false, true] {
        assert!(pages(&own, code).len() > 1_000);
        assert!(pages(&own, code) == pages(&imported, code), "code: {code}");
    }
    let count = |trace: &Trace| (trace.totals().access_count, trace.totals().instruction_count);
    assert_eq!(count(&own), count(&imported));
}

#[test]
fn a_trace_has_what_system_calls_use() {
    if !has_programs(&["cc", "valgrind"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = compile("system_calls.c", &["-O1"], folder.path());
    let trace = recorded(EngineKind::Valgrind, &program, &folder.path().join("a.ptt"));
    let uses: Vec<_> = steps(&trace)
        .filter_map(|step| match step {
            Step::MemoryUse(how, pages) if pages.end - pages.start >= 16 => Some((how, pages)),
            _ => None,
        })
        .collect();
    let start = uses.first().map_or(0, |(_, pages)| pages.start);
    let wanted = [
        (MemoryUse::Written, start..start + 64),
        (MemoryUse::Read, start..start + 32),
        (MemoryUse::Dropped, start..start + 16),
    ];
    let of_memory = uses.iter().filter(|(_, pages)| pages.start == start);
    assert!(of_memory.eq(&wanted), "{uses:?}");
    let touched = steps(&trace)
        .any(|step| matches!(step, Step::Change(_, page) if (start..start + 64).contains(&page)));
    assert!(start > 0 && !touched, "the program itself goes to none of these pages");
}

#[test]
fn a_trace_has_unused_pages_of_zeros() {
    if !has_programs(&["cc", "valgrind"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = compile("zeros.c", &["-O1"], folder.path());
    let trace = recorded(EngineKind::Valgrind, &program, &folder.path().join("a.ptt"));
    let stored = |step: &Step| matches!(step, Step::Change(AccessKind::Store, _));
    let stores = steps(&trace).filter(stored).filter_map(|step| match step {
        Step::Change(_, page) => Some(page),
        _ => None,
    });
    // The first page of the mapping is the first of 2,048 in a row that are written.
    let seen: std::collections::BTreeSet<u64> = stores.collect();
    let start = *seen.iter().find(|page| (0..2048).all(|n| seen.contains(&(*page + n)))).unwrap();
    let mut zeros: Vec<u64> = steps(&trace)
        .filter_map(|step| match step {
            Step::MemoryUse(MemoryUse::Zeros, pages) => Some(pages.start),
            _ => None,
        })
        .filter(|page| (start..start + 2048).contains(page))
        .collect();
    let wanted: Vec<u64> = (0..1024).step_by(2).map(|page| start + page).collect();
    // Other pages of the program may push some out earlier.
    zeros.sort();
    assert_eq!(zeros, wanted, "each once");
}

#[test]
fn a_trace_misses_what_the_program_misses() {
    for (kind, runner) in [(EngineKind::Valgrind, "valgrind"), (EngineKind::Qemu, "qemu-x86_64")] {
        if !has_programs(&["cc", runner]) {
            continue;
        }
        let folder = tempfile::tempdir().unwrap();
        let program = program(folder.path());
        let model = models::find("x86-64-calibrated").unwrap();
        let all = PagePolicy::alternatives(["heap=4K,stack=4K,anon=4K,text=4K,data=4K"]).unwrap();
        let config = MachineConfig::new(&model, all[0].clone()).unwrap();
        let mut online = Simulation::new(vec![config]);
        record(kind, &program, &mut online);
        let online = &online.threads()[0].cpus[0].translation;
        let trace = recorded(kind, &program, &folder.path().join("a.ptt"));
        let mut cpu = configuration::translation(&model).unwrap();
        for step in steps(&trace) {
            match step {
                Step::Change(AccessKind::Fetch, page) => drop(cpu.fetch(page << 12, 12)),
                Step::Change(_, page) => drop(cpu.access(page << 12, 12, false)),
                Step::Gone(pages) => cpu.unmapped(pages.start << 12..pages.end << 12),
                Step::MemoryUse(..) => {}
            }
        }
        let size = PageSize::K4;
        assert!(cpu.data().walks(size) > 1_000);
        assert_eq!(cpu.data().walks(size), online.data().walks(size), "data, {kind}");
        assert_eq!(cpu.data().counts(size)[1..], online.data().counts(size)[1..], "{kind}");
        assert_eq!(cpu.instructions().walks(size), online.instructions().walks(size), "{kind}");
    }
}
