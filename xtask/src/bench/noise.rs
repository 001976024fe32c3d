//! How much the CPU time of one command differs between equal runs: as it is, at the mean speed of the speed
//! probe, and between two runs side by side.

use super::diagnose::diagnosed;
use super::programs::{Workshop, chosen};
use super::{Outcome, pagetax};
use anyhow::{Context, Result};
use pagetax_core::diagnosis::CHECK;
use serde_json::json;
use std::fs::File;

/// The runs of each trial, and the pages of those beside the command as it is.
const OPTIONS: [&str; 4] = ["--sizes", "2M", "--runs", "10"];
/// The size of the file that sha256sum reads: about a second.
const HASHED_BYTES: u64 = 1 << 30;
/// The most of the variation that the probe may leave.
const LEFT_MAX: f64 = 0.5;

pub fn run() -> Result<Outcome> {
    let (pagetax, workshop) = (pagetax()?, Workshop::new(1)?);
    let hashed = workshop.path("hashed");
    File::create(&hashed)?.set_len(HASHED_BYTES)?;
    let sort = workshop.script(chosen(&["sort".into()])?[0])?.context("sort is not installed")?;
    let programs = [("sha256sum", format!("exec sha256sum {}", hashed.display())), ("sort", sort)];
    let (mut rows, mut results, mut fine) = (Vec::new(), Vec::new(), true);
    for (name, script) in programs {
        eprintln!("{name}: 10 runs of each trial, then side by side");
        let probed = diagnosed(&pagetax, &OPTIONS, &script)?;
        let as_is = probed.trials.first().context("no trial")?;
        let raw = deviation(&as_is.cpu_ns().collect::<Vec<_>>());
        let steady = match as_is.steady_ns.is_empty() {
            true => None,
            false => Some(deviation(&as_is.steady_ns)),
        };
        let beside =
            diagnosed(&pagetax, &[&OPTIONS[..], &["--side-by-side", "--check"]].concat(), &script)?;
        let check = beside.trials.iter().find(|trial| trial.name == CHECK).context("no A/A arm")?;
        let pair = deviation_of_pairs(beside.trials[0].cpu_ns(), check.cpu_ns());
        fine &= steady.is_some_and(|steady| steady <= LEFT_MAX * raw);
        let cell = |share: f64| format!("{:.1} %", 100.0 * share);
        let steady_cell = steady.map_or("no probe".into(), cell);
        rows.push(vec![name.to_string(), cell(raw), steady_cell, cell(pair)]);
        results.push(
            json!({"program": name, "cpu": raw, "at_mean_speed": steady, "side_by_side": pair}),
        );
    }
    Ok(Outcome {
        headings: vec!["program", "CPU time", "at the probe's mean speed", "side by side"],
        rows,
        json: json!(results),
        promise: ("a speed probe takes away half of the variation or more".into(), fine),
    })
}

/// Returns the standard deviation over the mean.
fn deviation(times: &[u64]) -> f64 {
    let count = times.len() as f64;
    let mean = times.iter().sum::<u64>() as f64 / count;
    let squares: f64 = times.iter().map(|time| (*time as f64 - mean).powi(2)).sum();
    (squares / (count - 1.0)).sqrt() / mean
}

/// Returns the deviation of one run, as the differences between runs of a pair show it.
fn deviation_of_pairs(one: impl Iterator<Item = u64>, other: impl Iterator<Item = u64>) -> f64 {
    let squares: Vec<f64> =
        one.zip(other).map(|(a, b)| (a as f64 / b as f64).ln().powi(2)).collect();
    (squares.iter().sum::<f64>() / squares.len() as f64 / 2.0).sqrt()
}
