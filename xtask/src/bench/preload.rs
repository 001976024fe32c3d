//! The cost of the preload library for a program that does not need it, and for each allocation.
//!
//! Starts `true` with and without the library in interleaved rounds. Then runs a C loop that allocates and
//! frees, with and without the library.

use super::Outcome;
use crate::shell;
use anyhow::{Context, Result};
use pagetax_core::stats::quantiles;
use serde_json::json;
use std::process::Command;
use std::time::Instant;

const LIBRARY: &str = "target/release/libpagetax_preload.so";
const C_SOURCE: &str = "xtask/src/bench/allocate.c";
const C_PROGRAM: &str = "target/allocate";
const ROUNDS: usize = 300;
const LOOP_ROUNDS: usize = 11;
const LIMIT_US: f64 = 1000.0;

/// The requests to the library: none, heap, heap and stack.
const CASES: [(&str, &[(&str, &str)]); 3] = [
    ("no requests", &[]),
    ("MPSSHEAP=2M", &[("MPSSHEAP", "2M")]),
    ("MPSSHEAP=2M MPSSSTACK=2M", &[("MPSSHEAP", "2M"), ("MPSSSTACK", "2M")]),
];

pub fn run() -> Result<Outcome> {
    shell::cargo(&["build", "--quiet", "--release", "--package", "pagetax-preload"])?;
    let library = std::fs::canonicalize(LIBRARY)?.into_os_string();
    let library = library.to_str().context("a path that is no text")?;
    let compile = ["-O1", "-fno-builtin", "-o", C_PROGRAM, C_SOURCE];
    shell::succeed(Command::new("cc").args(compile)).context("install a C compiler: gcc")?;
    let command = |program: &str, wishes: Option<&[(&str, &str)]>| {
        let mut command = Command::new(program);
        for name in ["MPSSHEAP", "MPSSSTACK", "LD_PRELOAD", "GLIBC_TUNABLES"] {
            command.env_remove(name);
        }
        if let Some(wishes) = wishes {
            command.env("LD_PRELOAD", library).envs(wishes.iter().copied());
        }
        command
    };
    let mut plain = Vec::new();
    let mut times = vec![Vec::new(); CASES.len()];
    for _ in 0..ROUNDS {
        plain.push(start_us(&mut command("/bin/true", None))?);
        for (case, times) in CASES.iter().zip(&mut times) {
            times.push(start_us(&mut command("/bin/true", Some(case.1)))?);
        }
    }
    let (mut bare, mut wrapped) = (Vec::new(), Vec::new());
    for _ in 0..LOOP_ROUNDS {
        let ns =
            |command: &mut Command| -> Result<f64> { Ok(shell::output(command)?.trim().parse()?) };
        bare.push(ns(&mut command(C_PROGRAM, None))?);
        wrapped.push(ns(&mut command(C_PROGRAM, Some(CASES[1].1)))?);
    }
    let (bare, wrapped) = (spread(bare), spread(wrapped));
    let plain = spread(plain);
    let mut rows = vec![row("`true` alone", plain, "µs")];
    let spreads: Vec<_> = times.into_iter().map(spread).collect();
    for ((name, _), spread) in CASES.iter().zip(&spreads) {
        rows.push(row(&format!("  with the library, {name}"), *spread, "µs"));
    }
    rows.push(row("malloc and free of a small chunk", bare, "ns"));
    rows.push(row("  the same with MPSSHEAP=2M", wrapped, "ns"));
    let worst = spreads.iter().map(|spread| spread[0] - plain[0]).fold(0.0, f64::max);
    Ok(Outcome {
        headings: vec!["", "tenth", "median", "nine tenths"],
        rows,
        json: json!({"alone_us": plain, "with_us": spreads, "malloc_ns": [bare, wrapped]}),
        promise: (
            format!("{worst:.0} µs more for `true` where least disturbed, at most {LIMIT_US} µs"),
            worst <= LIMIT_US,
        ),
    })
}

fn start_us(command: &mut Command) -> Result<f64> {
    let start = Instant::now();
    shell::succeed(command)?;
    Ok(start.elapsed().as_nanos() as f64 / 1e3)
}

/// Returns the 10th percentile, which neighbours on the machine disturb least, the median and the 90th
/// percentile.
fn spread(values: Vec<f64>) -> [f64; 3] {
    quantiles(&values, [0.1, 0.5, 0.9])
}

fn row(name: &str, spread: [f64; 3], unit: &str) -> Vec<String> {
    let cells = spread.iter().map(|value| format!("{value:.1} {unit}"));
    [name.to_string()].into_iter().chain(cells).collect()
}
