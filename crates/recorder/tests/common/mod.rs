//! Shared code of the engines' tests.
#![allow(dead_code, reason = "each test uses its part")]

use pagetax_host::launch::program::Program;
use pagetax_recorder::engine::{Engine, EngineKind};
use pagetax_recorder::session::{RecordOptions, SessionOutcome, Streams, run};
use pagetax_recorder::simulate::Simulation;
use pagetax_recorder::stream::SideFilters;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns true if all programs are installed; prints those that are not.
pub fn has_programs(names: &[&str]) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_here = |name: &str| std::env::split_paths(&path).any(|dir| dir.join(name).is_file());
    let missing: Vec<_> = names.iter().filter(|name| !is_here(name)).collect();
    if !missing.is_empty() {
        println!("SKIP: not installed: {missing:?}");
    }
    missing.is_empty()
}

/// Returns true if the native engine's library was built, as building the workspace does.
pub fn has_sampler() -> bool {
    let is_built = pagetax_host::launch::libraries::find("libpagetax_dbt.so").is_ok();
    if !is_built {
        println!("SKIP: not built: libpagetax_dbt.so");
    }
    is_built
}

/// Compiles one of tests/programs.
pub fn compile(source: &str, options: &[&str], folder: &Path) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(source);
    let program = folder.join("program");
    let cc = Command::new("cc").args(options).arg(source).arg("-o").arg(&program).output().unwrap();
    assert!(cc.status.success(), "{}", String::from_utf8_lossy(&cc.stderr));
    program
}

/// Runs a program under an engine and feeds the simulation.
pub fn record(kind: EngineKind, program: &Path, simulation: &mut Simulation) -> SessionOutcome {
    let filters = simulation.filters();
    record_with(kind, program, simulation, filters)
}

/// Runs a program under an engine that uses these filters.
pub fn record_with(
    kind: EngineKind,
    program: &Path,
    simulation: &mut Simulation,
    filters: (SideFilters, SideFilters),
) -> SessionOutcome {
    record_part(kind, program, simulation, filters, false)
}

/// Runs a program under an engine; records only bursts if `sample`.
pub fn record_part(
    kind: EngineKind,
    program: &Path,
    simulation: &mut Simulation,
    filters: (SideFilters, SideFilters),
    sample: bool,
) -> SessionOutcome {
    let argv = [program.as_os_str().to_owned()];
    let program = Program::find(program).unwrap();
    let engine = Engine::choose(&program, Some(kind)).unwrap();
    let (follow, streams) = (true, Streams::Inherited);
    let options = RecordOptions {
        engine: &engine,
        argv: &argv,
        follow,
        sample,
        zeros: false,
        filters,
        streams,
        environment: &[],
    };
    run(&options, simulation, |_, _| {}).unwrap()
}
