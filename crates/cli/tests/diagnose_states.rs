//! `pagetax diagnose --when`: trials in other states of memory.

use pagetax_core::diagnosis::{Diagnosis, MemoryState};
use pagetax_core::document;
use std::process::{Command, Output, Stdio};

fn diagnose(states: &str, script: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagetax"));
    command.args(["diagnose", "--json", "--warmup", "0", "--runs", "2", "--pages", "4K"]);
    command.args(["--when", states, "--", "/usr/bin/python3", "-c", script]);
    command.stdin(Stdio::null()).output().unwrap()
}

fn document(output: &Output) -> Diagnosis {
    let text = String::from_utf8_lossy(&output.stdout);
    document::from_json(&text)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)))
}

/// Writes to 40 MB for half a second, and fails if it sees a child.
const WRITER: &str = "\
import os, sys, time
memory = bytearray(40 << 20)
end = time.monotonic() + 0.5
while time.monotonic() < end:
    for at in range(0, len(memory), 4096):
        memory[at] = 1
try:
    os.waitpid(-1, os.WNOHANG)
    sys.exit(7)
except ChildProcessError:
    print('done')
";

#[test]
fn trials_run_in_each_state_that_can_be_made_and_the_others_say_what_would() {
    let output = diagnose("forked,found,pressed,forked", WRITER);
    let diagnosis = document(&output);
    assert!(output.status.success() && diagnosis.trials.len() == 2, "{:?}", diagnosis.warnings);
    let states: Vec<MemoryState> = diagnosis.states.iter().map(|state| state.state).collect();
    assert_eq!(states, [MemoryState::Forked, MemoryState::Found, MemoryState::Pressed]);
    for state in &diagnosis.states[..2] {
        assert_eq!(state.why_not, None, "{}", state.state);
        assert!(state.trials.iter().all(|trial| trial.runs_ns.len() == 2 && trial.exit.success()));
        assert!(!state.how.is_empty() && !state.free_blocks.is_empty());
    }
    let faults =
        |trials: &[pagetax_core::diagnosis::Trial]| trials[0].fault_counts.iter().sum::<u64>();
    let (fresh, forked) = (faults(&diagnosis.trials), faults(&diagnosis.states[0].trials));
    // Two runs copy 10,000 pages each.
    assert!(forked > fresh + 15_000, "{forked} faults after a fork, {fresh} without");
    let pressed = &diagnosis.states[2];
    match &pressed.why_not {
        Some(why) => assert!(why.contains("swap") || why.contains("root"), "{why}"),
        None => assert!(pressed.how.contains("limits each run to"), "{}", pressed.how),
    }
}

#[test]
fn a_state_that_does_not_exist_is_refused_with_those_that_do() {
    let output = diagnose("fragmentd", "pass");
    let words = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{words}");
    assert!(words.contains("fragmentd") && words.contains("fragmented, compactable"), "{words}");
}
