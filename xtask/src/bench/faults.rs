//! What a fault costs under pagetax: against a bare C loop, and with latencies measured.
//!
//! Compares CPU time, so that neighbours on the machine do not count, in interleaved rounds, so
//! that a machine that grows slower is no argument.

use super::{Outcome, number, pagetax};
use crate::shell;
use anyhow::{Context, Result};
use serde_json::json;
use std::process::Command;

const JOB: &str = "xtask/src/bench/anon_fault.toml";
const C_SOURCE: &str = "xtask/src/bench/anon_fault.c";
const C_PROGRAM: &str = "target/anon_fault";
const RATE_LIMIT: f64 = 0.03;
const LATENCY_LIMIT_NS: f64 = 250.0;
/// Where two samples by themselves cost more than the limit: how much more than they.
const FLOOR_LIMIT: f64 = 0.25;

/// A job's anonymous faults against those of a C program that does nothing else.
pub fn against_c() -> Result<Outcome> {
    const ROUNDS: usize = 11;
    let faults = Faults::prepare(256 << 20, 4)?;
    let mut pairs = Vec::new();
    for _ in 0..ROUNDS {
        pairs.push([faults.in_c(&[])?, faults.in_job(&[])?]);
    }
    let excess = median(pairs.iter().map(|[c, ours]| ours / c - 1.0));
    let row = |(index, [c, ours]): (usize, &[f64; 2])| {
        let more = format!("{:+.1} %", (ours / c - 1.0) * 100.0);
        vec![format!("{}", index + 1), format!("{c:.0}"), format!("{ours:.0}"), more]
    };
    Ok(Outcome {
        headings: vec!["round", "C, ns a fault", "pagetax, ns a fault", "more"],
        rows: pairs.iter().enumerate().map(row).collect(),
        json: json!({"rounds": pairs, "median_excess": excess}),
        promise: (
            format!("median {:+.1} %, at most {} %", excess * 100.0, RATE_LIMIT * 100.0),
            excess.abs() <= RATE_LIMIT,
        ),
    })
}

/// The same job without and with latencies, beside what the kernel takes for two samples a fault.
pub fn latency_cost() -> Result<Outcome> {
    // Short ones and many: the machine's pace changes from one second to the next.
    const ROUNDS: usize = 301;
    let faults = Faults::prepare(16 << 20, 2)?;
    let mut rounds = Vec::new();
    for _ in 0..ROUNDS {
        rounds.push([
            faults.in_c(&[])?,
            faults.in_c(&["pair"])?,
            faults.in_job(&[])?,
            faults.in_job(&["--fault-latency"])?,
        ]);
    }
    let column = |of: fn(&[f64; 4]) -> f64| Quartiles::of(rounds.iter().map(of));
    let fault = column(|round| round[0]);
    let floor = column(|round| round[1] - round[0]);
    let cost = column(|round| round[3] - round[2]);
    let row = |what: &str, quartiles: &Quartiles| vec![what.into(), quartiles.to_string()];
    let excess = cost.median / floor.median - 1.0;
    Ok(Outcome {
        headings: vec!["CPU time for each fault, ns", "median (quartiles)"],
        rows: vec![
            row("a fault, in C", &fault),
            row("two samples without a reader, in C", &floor),
            row("a histogram of latencies", &cost),
        ],
        json: json!({"rounds": rounds, "median_cost_ns": cost.median,
            "median_floor_ns": floor.median}),
        promise: (
            format!(
                "median {:.0} ns a fault, {:+.0} % on top of two samples; at most \
                 {LATENCY_LIMIT_NS} ns, or {:+.0} %",
                cost.median,
                excess * 100.0,
                FLOOR_LIMIT * 100.0
            ),
            cost.median <= LATENCY_LIMIT_NS || excess <= FLOOR_LIMIT,
        ),
    })
}

/// The same faults in C and in a job, each as CPU nanoseconds a fault.
struct Faults {
    pagetax: String,
    bytes: u64,
    repeats: u64,
}

impl Faults {
    fn prepare(bytes: u64, repeats: u64) -> Result<Faults> {
        let compile = ["-O2", "-o", C_PROGRAM, C_SOURCE];
        shell::succeed(Command::new("cc").args(compile)).context("install a C compiler: gcc")?;
        Ok(Faults { pagetax: pagetax()?, bytes, repeats })
    }

    fn each(&self, ns: f64) -> f64 {
        ns / (self.bytes / 4096 * self.repeats) as f64
    }

    fn in_c(&self, more: &[&str]) -> Result<f64> {
        let args = [self.bytes.to_string(), self.repeats.to_string()];
        let text = shell::output(Command::new(C_PROGRAM).args(args).args(more))?;
        Ok(self.each(text.trim().parse()?))
    }

    /// CPU time of the one phase.
    fn in_job(&self, more: &[&str]) -> Result<f64> {
        let size = format!("size={}", self.bytes);
        let repeat = format!("repeat={}", self.repeats);
        let args = [JOB, "--set", &size, "--set", &repeat];
        let report = super::report(&self.pagetax, &[&args, more].concat())?;
        if !more.is_empty() {
            let seen = number(&report, "/latency/minor_fault/count");
            seen.context("no latencies: ask `pagetax doctor` why")?;
        }
        let ns = |id: &str| number(&report, &format!("/phases/0/counters/{id}/value"));
        Ok(self.each(ns("user_ns")? + ns("kernel_ns")?))
    }
}

struct Quartiles {
    low: f64,
    median: f64,
    high: f64,
}

impl Quartiles {
    fn of(values: impl Iterator<Item = f64>) -> Quartiles {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        let at = |quarters: usize| values[(values.len() - 1) * quarters / 4];
        Quartiles { low: at(1), median: at(2), high: at(3) }
    }
}

impl std::fmt::Display for Quartiles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.0} ({:.0}–{:.0})", self.median, self.low, self.high)
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    Quartiles::of(values).median
}
