//! What a fault costs under pagetax: against a bare C loop, and with latencies measured.
//!
//! Compares CPU time, so that neighbours on the machine do not count, in interleaved rounds, so
//! that a machine that grows slower is no argument.

use super::{Outcome, number, pagetax};
use crate::shell;
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::process::Command;

const JOB: &str = "xtask/src/bench/anon_fault.toml";
const C_SOURCE: &str = "xtask/src/bench/anon_fault.c";
const C_PROGRAM: &str = "target/anon_fault";
const BYTES: u64 = 256 << 20;
const REPEATS: u64 = 4;
const FAULTS: f64 = (BYTES / 4096 * REPEATS) as f64;
const ROUNDS: usize = 11;
const RATE_LIMIT: f64 = 0.03;
const LATENCY_LIMIT_NS: f64 = 250.0;

/// A job's anonymous faults against those of a C program that does nothing else.
pub fn against_c() -> Result<Outcome> {
    let pagetax = pagetax()?;
    let compile = ["-O2", "-o", C_PROGRAM, C_SOURCE];
    shell::succeed(Command::new("cc").args(compile)).context("install a C compiler: gcc")?;
    let mut pairs = Vec::new();
    for _ in 0..ROUNDS {
        let args = [BYTES.to_string(), REPEATS.to_string()];
        let c = shell::output(Command::new(C_PROGRAM).args(args))?.trim().parse::<f64>()?;
        pairs.push((c / FAULTS, cpu_ns(&run(&pagetax, &[])?)? / FAULTS));
    }
    let excess = median(pairs.iter().map(|(c, ours)| ours / c - 1.0));
    Ok(Outcome {
        headings: vec!["round", "C, ns a fault", "pagetax, ns a fault", "more"],
        rows: rows(&pairs, |(c, ours)| format!("{:+.1} %", (ours / c - 1.0) * 100.0)),
        json: json!({"rounds": pairs, "median_excess": excess}),
        promise: (
            format!("median {:+.1} %, at most {} %", excess * 100.0, RATE_LIMIT * 100.0),
            excess.abs() <= RATE_LIMIT,
        ),
    })
}

/// The same job without and with latencies.
pub fn latency_cost() -> Result<Outcome> {
    let pagetax = pagetax()?;
    let mut pairs = Vec::new();
    for _ in 0..ROUNDS {
        let without = cpu_ns(&run(&pagetax, &[])?)? / FAULTS;
        let report = run(&pagetax, &["--fault-latency"])?;
        number(&report, "/latency/minor_fault/count").context("no latencies: pagetax doctor")?;
        pairs.push((without, cpu_ns(&report)? / FAULTS));
    }
    let cost_ns = median(pairs.iter().map(|(without, with)| with - without));
    Ok(Outcome {
        headings: vec!["round", "without, ns a fault", "with", "cost"],
        rows: rows(&pairs, |(without, with)| format!("{:.0} ns", with - without)),
        json: json!({"rounds": pairs, "median_cost_ns": cost_ns}),
        promise: (
            format!("median {cost_ns:.0} ns a fault, at most {LATENCY_LIMIT_NS} ns"),
            cost_ns <= LATENCY_LIMIT_NS,
        ),
    })
}

fn run(pagetax: &str, more: &[&str]) -> Result<Value> {
    let size = format!("size={BYTES}");
    let repeat = format!("repeat={REPEATS}");
    let args = [JOB, "--set", &size, "--set", &repeat];
    super::report(pagetax, &[&args, more].concat())
}

/// CPU time of the one phase.
fn cpu_ns(report: &Value) -> Result<f64> {
    let ns = |id: &str| number(report, &format!("/phases/0/counters/{id}/value"));
    Ok(ns("user_ns")? + ns("kernel_ns")?)
}

fn rows(pairs: &[(f64, f64)], last: impl Fn(&(f64, f64)) -> String) -> Vec<Vec<String>> {
    let row = |(index, pair): (usize, &(f64, f64))| {
        vec![
            format!("{}", index + 1),
            format!("{:.0}", pair.0),
            format!("{:.0}", pair.1),
            last(pair),
        ]
    };
    pairs.iter().enumerate().map(row).collect()
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
