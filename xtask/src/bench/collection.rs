//! What collection costs a program: the same real program bare, watched as in each trial of
//! `diagnose`, and watched as for its budget, with sampled stacks, in rounds.
//!
//! Runs of one program differ by more than the limit, so it takes many short rounds, of which each
//! gives a ratio. The promise needs the whole interval of their median: an interval that reaches over
//! the limit shows nothing, and is no pass.

use super::programs::{Run, Workshop, chosen};
use super::{Outcome, pagetax};
use crate::shell;
use anyhow::{Context, Result};
use pagetax_core::diagnosis::{AS_IS, Diagnosis};
use pagetax_core::stats::{Ratio, median_of_ratios};
use serde_json::json;
use std::process::Command;
use std::time::{Duration, Instant};

/// For all programs together. It is fixed, as stopping when one likes the result is no measurement.
const TIME: Duration = Duration::from_secs(160);
const ROUNDS_MIN: usize = 10;
/// Programs have a quarter of their usual work, some 0.3 s, so that rounds are many.
const PART: u32 = 4;
/// Of the ratio.
const LIMIT: f64 = 1.02;
/// One that computes and faults, one that mostly computes.
const PROGRAMS: [&str; 2] = ["python3", "sort"];

/// Of these programs, or of the usual two.
pub fn run(names: &[String]) -> Result<Outcome> {
    let (pagetax, workshop) = (pagetax()?, Workshop::new(PART)?);
    let usual = PROGRAMS.map(String::from);
    let programs = chosen(if names.is_empty() { &usual } else { names })?;
    let time = TIME / programs.len() as u32;
    let (mut rows, mut results, mut walls) = (Vec::new(), Vec::new(), Vec::new());
    for program in programs {
        let script = workshop.script(program)?.context("install the program first")?;
        eprintln!("{}: rounds for {} s", program.name, time.as_secs());
        let rounds = rounds(&pagetax, &script, &workshop, time)?;
        for (place, watched) in ["in a trial", "with stacks"].into_iter().enumerate() {
            let of = |ns: fn(&Run) -> u64| over_bare(&rounds, place + 1, ns);
            let (wall, cpu) = (of(|run| run.wall_ns)?, of(|run| run.cpu_ns)?);
            let cells = [program.name, watched].map(String::from).into_iter();
            let count = [rounds.len().to_string(), wall.to_string(), cpu.to_string()];
            rows.push(cells.chain(count).collect());
            results.push(json!({"program": program.name, "watched": watched,
                "rounds": rounds.len(), "wall": wall, "cpu": cpu}));
            walls.push(wall);
        }
    }
    Ok(Outcome {
        headings: vec!["program", "watched", "rounds", "wall time ÷ bare", "CPU time ÷ bare"],
        rows,
        json: json!(results),
        promise: promise(&walls),
    })
}

/// What the intervals of all ratios show.
fn promise(walls: &[Ratio]) -> (String, bool) {
    let limit = format!("{:.0} % of wall time", (LIMIT - 1.0) * 100.0);
    let any = |over: fn(&Ratio) -> f64| walls.iter().any(|wall| over(wall) > LIMIT);
    match () {
        () if any(|wall| wall.low) => (format!("more than {limit}, beyond the noise"), false),
        () if any(|wall| wall.high) => {
            (format!("not settled: an interval reaches over {limit}; use a quieter machine"), false)
        }
        () => (format!("at most {limit}, with the whole of each interval"), true),
    }
}

/// Bare, in a trial, with stacks.
type Round = [Run; 3];

fn rounds(pagetax: &str, script: &str, workshop: &Workshop, time: Duration) -> Result<Vec<Round>> {
    workshop.run(script, &[])?;
    let (start, mut rounds) = (Instant::now(), Vec::new());
    while start.elapsed() < time || rounds.len() < ROUNDS_MIN {
        // What comes first, and what follows what, changes from round to round.
        let round = if rounds.len() % 2 == 0 {
            let bare = workshop.run(script, &[])?;
            let [trial, budget] = watched(pagetax, script)?;
            [bare, trial, budget]
        } else {
            let [trial, budget] = watched(pagetax, script)?;
            [workshop.run(script, &[])?, trial, budget]
        };
        rounds.push(round);
    }
    Ok(rounds)
}

fn over_bare(rounds: &[Round], place: usize, ns: fn(&Run) -> u64) -> Result<Ratio> {
    let of = |place: usize| rounds.iter().map(|round| ns(&round[place])).collect::<Vec<_>>();
    median_of_ratios(&of(place), &of(0), 1).context("runs without a time")
}

/// One trial, and the run for the budget that comes before it. A run that does not count is first: memory
/// that has to come from the hypervisor is no cost of watching.
fn watched(pagetax: &str, script: &str) -> Result<[Run; 2]> {
    let options = ["diagnose", "--json", "-", "--runs", "1", "--warmup", "1", "--sizes", "4K"];
    let mut command = Command::new(pagetax);
    command.args(options).args(["--", "sh", "-c", script]);
    let diagnosis: Diagnosis = serde_json::from_str(&shell::output(&mut command)?)?;
    let trial = diagnosis.trials.iter().find(|trial| trial.name == AS_IS);
    let trial = trial.context("no trial")?;
    let first = |column: &[u64]| column.first().copied().context("no run");
    let cpu_ns = first(&trial.user_ns)? + first(&trial.kernel_ns)?;
    let budget = diagnosis.budget.context("no budget")?;
    Ok([
        Run { wall_ns: first(&trial.runs_ns)?, cpu_ns, output: Vec::new() },
        Run { wall_ns: budget.wall_total_ns, cpu_ns: budget.cpu_total_ns, output: Vec::new() },
    ])
}
