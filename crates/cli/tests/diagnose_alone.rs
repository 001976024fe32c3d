//! A diagnosis beside times of our own. In a binary of its own, as those run one after the other: other
//! tests would be noise.

use pagetax_core::diagnosis::{AS_IS, Diagnosis};
use pagetax_core::stats::ratio_of_groups;
use std::process::{Command, Stdio};
use std::time::Instant;

const ARGV: [&str; 3] = ["python3", "-c", "d = {i: str(i) for i in range(150000)}; print(len(d))"];

fn plain_ns() -> u64 {
    let start = Instant::now();
    let run = Command::new(ARGV[0]).args(&ARGV[1..]).stdout(Stdio::null()).status().unwrap();
    assert!(run.success());
    start.elapsed().as_nanos() as u64
}

#[test]
fn speed_ups_agree_with_an_independent_measurement() {
    // A probe would share the CPU with it.
    let options = ["diagnose", "--alone", "--json", "--runs", "4", "--pages", "2M", "--"];
    let mut diagnose = Command::new(env!("CARGO_BIN_EXE_pagetax"));
    diagnose.args(options).args(ARGV).stdin(Stdio::null());
    let first: Vec<u64> = (0..3).map(|_| plain_ns()).collect();
    let output = diagnose.output().unwrap();
    let second: Vec<u64> = (0..3).map(|_| plain_ns()).collect();
    let error = String::from_utf8_lossy(&output.stderr);
    let diagnosis: Diagnosis =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {error}"));
    let plain_runs = [first, second].concat();
    let watched = diagnosis.trials.iter().find(|trial| trial.name == AS_IS).unwrap();
    // The command as it is, timed by us and by the diagnosis: no difference beyond the noise.
    let ratio = ratio_of_groups(&watched.runs_ns, &plain_runs, 1).unwrap();
    assert!(ratio.low < 1.1 && ratio.high > 0.9, "watched ÷ plain {ratio}");
}
