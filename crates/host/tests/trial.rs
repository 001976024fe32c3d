//! Trials of real programs from other projects, and of some that misbehave.

use pagetax_core::exit::Exit;
use pagetax_core::units::PageSize;
use pagetax_host::launch::program::ProgramError;
use pagetax_host::measure::trial::{Finished, Outputs, TrialCommand, TrialError, run, took};
use pagetax_host::pages::mechanism::{Base, Conditions, Thp};
use pagetax_host::pages::{Mechanism, Mode, PageSettings, Recipe};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

fn launch(argv: &[&str]) -> TrialCommand {
    let argv = argv.iter().map(Into::into).collect();
    TrialCommand { argv, ..TrialCommand::default() }
}

fn shell(script: &str) -> Finished {
    run(&launch(&["sh", "-c", script]), &Recipe::default(), &Outputs::default(), None).unwrap()
}

fn recipe(mechanism: impl Mechanism + 'static) -> Recipe {
    let system = PageSettings::host();
    let conditions = Conditions { system: &system, tunables: None, has_code: true };
    Recipe::new(Arc::new(mechanism), &conditions).unwrap()
}

#[test]
fn exits_are_told() {
    assert_eq!(shell("exit 0").exit, Exit::Code(0));
    assert_eq!(shell("exit 3").exit, Exit::Code(3));
    assert_eq!(shell("kill -SEGV $$").exit, Exit::Signal(11));
}

#[test]
fn what_is_no_program_is_told_as_env_does() {
    let fail = |program: &str| {
        run(&launch(&[program]), &Recipe::default(), &Outputs::default(), None).unwrap_err()
    };
    assert!(
        matches!(fail("no-such-program"), TrialError::Program(ProgramError::NotFound(name)) if name == "no-such-program")
    );
    assert!(matches!(fail("/etc/passwd"), TrialError::Program(ProgramError::NotExecutable(..))));
    assert!(matches!(fail("/"), TrialError::Program(ProgramError::NotExecutable(..))));
}

#[test]
fn input_and_outputs_are_the_commands_own() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    std::fs::write(path("in"), "b\na\n").unwrap();
    let launch =
        TrialCommand { stdin: Some(path("in")), ..launch(&["sh", "-c", "sort; echo err >&2"]) };
    let outputs = Outputs { stdout: Some(path("out")), stderr: Some(path("err")) };
    for _ in 0..2 {
        run(&launch, &Recipe::default(), &outputs, None).unwrap();
        assert_eq!(std::fs::read_to_string(path("out")).unwrap(), "a\nb\n");
        assert_eq!(std::fs::read_to_string(path("err")).unwrap(), "err\n");
    }
}

/// A C program: fills 32 MiB and holds them until its standard input ends.
const HOLD_C: &str = r#"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int main(void) {
    char c, *memory = malloc(32 << 20);
    memset(memory, 1, 32 << 20);
    while (read(0, &c, 1) > 0) { }
    return memory[5] - 1;
}
"#;

#[test]
fn processes_of_a_pipeline_count_together() {
    let directory = tempfile::tempdir().unwrap();
    let hold = compile(directory.path(), HOLD_C);
    // 3 s is many times the time that the sampler needs for two looks, even on a busy machine.
    let finished = shell(&format!("sleep 3 | {hold} & sleep 3 | {hold}; wait"));
    assert_eq!(finished.exit, Exit::Code(0));
    let peak = finished.peak.unwrap();
    assert!(peak.process_count >= 2, "{peak:?}");
    assert!(peak.anon_bytes > 64 << 20, "{peak:?}");
    assert!(finished.usage.user_ns > 0 && finished.usage.minor_fault_count > 1_000);
}

#[test]
fn processes_that_come_and_go_are_told() {
    // The lists of processes are more than 10 ms apart, so some of these processes are on only one list.
    let finished = shell("i=0; while [ $i -lt 150 ]; do sleep 0.01; i=$((i + 1)); done");
    assert!((1..=150).contains(&finished.brief_count), "{finished:?}");
    assert_eq!(shell("exec sleep 0.5").brief_count, 0);
}

#[test]
fn what_is_left_running_is_ended() {
    let start = Instant::now();
    let finished = shell("sleep 1000 & setsid sleep 1000 & exit 0");
    assert_eq!((finished.exit, finished.left_running), (Exit::Code(0), 2));
    assert!(start.elapsed().as_secs() < 10);
}

#[test]
fn base_pages_hold_over_fork_and_exec() {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("out");
    let outputs = Outputs { stdout: Some(out.clone()), stderr: None };
    let status = launch(&["sh", "-c", "sh -c 'grep THP_enabled /proc/self/status'; true"]);
    run(&status, &recipe(Base), &outputs, None).unwrap();
    assert_eq!(std::fs::read_to_string(&out).unwrap(), "THP_enabled:\t0\n");
    run(&status, &Recipe::default(), &outputs, None).unwrap();
    assert_eq!(std::fs::read_to_string(&out).unwrap(), "THP_enabled:\t1\n");
}

/// A C program: four threads that fill their share of one large malloc.
const THREADS_C: &str = r#"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static char *memory;
static void *fill(void *at) { memset(memory + ((long)at << 24), 1, 1 << 24); return 0; }
int main(void) {
    pthread_t t[4];
    memory = malloc(4 << 24);
    for (long i = 0; i < 4; i++) pthread_create(&t[i], 0, fill, (void *)i);
    for (int i = 0; i < 4; i++) pthread_join(t[i], 0);
    usleep(100000);
    return memory[5] - 1;
}
"#;

fn compile(directory: &Path, source: &str) -> String {
    let (c, program) = (directory.join("t.c"), directory.join("t"));
    std::fs::write(&c, source).unwrap();
    let (c, program) = (c.to_str().unwrap(), program.to_str().unwrap());
    let compiler = launch(&["cc", "-O1", "-pthread", "-o", program, c]);
    let finished = run(&compiler, &Recipe::default(), &Outputs::default(), None).unwrap();
    assert_eq!(finished.exit, Exit::Code(0), "a C compiler is part of what Rust itself needs");
    program.to_string()
}

#[test]
fn malloc_of_a_threaded_program_is_on_huge_pages_where_the_system_lets_it() {
    let directory = tempfile::tempdir().unwrap();
    let program = launch(&[&compile(directory.path(), THREADS_C)]);
    let fraction = |recipe: &Recipe| {
        let finished = run(&program, recipe, &Outputs::default(), None).unwrap();
        assert_eq!(finished.exit, Exit::Code(0));
        took(&*recipe.mechanism, &[finished]).fraction.unwrap()
    };
    assert_eq!(fraction(&recipe(Base)), 0.0);
    match PageSettings::host().thp() {
        Some(Mode::Madvise) => {
            assert!(fraction(&recipe(Thp(PageSize::M2))) > 0.9);
            assert!(fraction(&Recipe::default()) < 0.1);
        }
        Some(Mode::Always) => assert!(fraction(&Recipe::default()) > 0.9),
        Some(Mode::Never) | None => assert_eq!(fraction(&Recipe::default()), 0.0),
    }
}
