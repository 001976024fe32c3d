//! What collection costs a program: the same real program bare, watched as in each trial of
//! `diagnose`, and watched as for its budget, with sampled stacks, in rounds.

use super::programs::{Workshop, chosen};
use super::{Outcome, pagetax};
use crate::shell;
use anyhow::{Context, Result};
use pagetax_core::diagnosis::{AS_IS, Diagnosis};
use pagetax_core::stats::{Ratio, ratio_of_pairs};
use serde_json::json;
use std::process::Command;

/// On a shared machine one run differs from the next by 7 %: these see a cost of 5 % and more.
const ROUNDS: usize = 15;
/// Of the ratio.
const LIMIT: f64 = 1.02;
/// One that computes and faults, one that mostly computes.
const PROGRAMS: [&str; 2] = ["python3", "sort"];

/// Of these programs, or of the usual two.
pub fn run(names: &[String]) -> Result<Outcome> {
    let (pagetax, workshop) = (pagetax()?, Workshop::new()?);
    let usual = PROGRAMS.map(String::from);
    let (mut rows, mut results, mut shown) = (Vec::new(), Vec::new(), f64::MIN);
    for program in chosen(if names.is_empty() { &usual } else { names })? {
        let script = workshop.script(program)?.context("install the program first")?;
        eprintln!("{}: {ROUNDS} rounds", program.name);
        let [trial, budget] = costs(&pagetax, &script, &workshop)?;
        shown = shown.max(trial.low).max(budget.low);
        rows.push(vec![program.name.into(), trial.to_string(), budget.to_string()]);
        results.push(json!({"program": program.name, "trial": trial, "budget": budget}));
    }
    let percent = |ratio: f64| (ratio - 1.0) * 100.0;
    let (shown_percent, limit_percent) = (percent(shown), percent(LIMIT));
    let told = format!(
        "no interval lies above {limit_percent:+.0} %; they begin at {shown_percent:+.1} %"
    );
    Ok(Outcome {
        headings: vec!["program", "a trial ÷ bare", "with stacks for the budget ÷ bare"],
        rows,
        json: json!(results),
        promise: (told, shown <= LIMIT),
    })
}

/// Wall time of a trial ÷ bare, and of the run for the budget ÷ bare.
fn costs(pagetax: &str, script: &str, workshop: &Workshop) -> Result<[Ratio; 2]> {
    workshop.run(script, &[])?;
    let (mut bare, mut trial, mut budget) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let mut run_bare = || -> Result<()> {
            bare.push(workshop.run(script, &[])?.wall_ns);
            Ok(())
        };
        if round % 2 == 0 {
            run_bare()?;
        }
        let [as_is, watched] = watched(pagetax, script)?;
        trial.push(as_is);
        budget.push(watched);
        if round % 2 == 1 {
            run_bare()?;
        }
    }
    let over_bare = |times: &[u64]| ratio_of_pairs(times, &bare, 1).context("runs without a time");
    Ok([over_bare(&trial)?, over_bare(&budget)?])
}

/// One trial, and the run for the budget that comes before it.
fn watched(pagetax: &str, script: &str) -> Result<[u64; 2]> {
    let options = ["diagnose", "--json", "-", "--runs", "1", "--warmup", "0", "--sizes", "4K"];
    let mut command = Command::new(pagetax);
    command.args(options).args(["--", "sh", "-c", script]);
    let diagnosis: Diagnosis = serde_json::from_str(&shell::output(&mut command)?)?;
    let trial = diagnosis.trials.iter().find(|trial| trial.name == AS_IS);
    let trial = trial.and_then(|trial| trial.runs_ns.first()).context("no trial")?;
    Ok([*trial, diagnosis.budget.context("no budget")?.wall_total_ns])
}
