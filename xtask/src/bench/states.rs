//! `pagetax diagnose --when` on real programs and on one that large pages slow: the speed-ups in each state
//! of memory.

use super::programs::{Workshop, chosen};
use super::swap::Swap;
use super::{Outcome, pagetax};
use crate::shell;
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::process::{Command, Stdio};

const PROGRAMS: [&str; 5] = ["python3", "sort", "sqlite3", "gcc", "xz"];
const STATES: [&str; 4] = ["fragmented", "compactable", "pressed", "forked"];
/// The rounds of each state.
const ROUNDS: u32 = 5;
const C_SOURCE: &str = "xtask/src/bench/churn.c";
const CHURN: &str = "churn";
/// How often the program that large pages slow is diagnosed on fresh memory, and how often the loss and its
/// cause must be seen.
const CHURN_RUNS: usize = 10;
const CHURN_SEEN: usize = 9;
const CHURN_CAUSE: &str = "zero_copy";
const LOSS: f64 = 0.98;

/// Runs the benchmark on all programs, or on those that are named.
pub fn run(names: &[String]) -> Result<Outcome> {
    let workshop = Workshop::new(1)?;
    let _swap = Swap::file(&workshop.path("swap"), 2048)?;
    let churn = workshop.path(CHURN);
    shell::succeed(Command::new("cc").args(["-O1", C_SOURCE, "-o"]).arg(&churn))
        .context("install gcc")?;
    let wanted = |name: &str| names.is_empty() || names.iter().any(|one| one == name);
    let (mut rows, mut results) = (Vec::new(), Vec::new());
    let mut is_kept = true;
    for program in chosen(&PROGRAMS.map(String::from))? {
        let Some(script) = workshop.script(program)?.filter(|_| wanted(program.name)) else {
            continue;
        };
        let report = diagnose(&["sh", "-c", &script])?;
        is_kept &= is_safe_advice(&report);
        rows.extend(rows_of(program.name, &report));
        results.push(json!({ "program": program.name, "states": report["states"] }));
    }
    let mut promise = "no trial is recommended that loses 2 % or more in any state".to_string();
    if wanted(CHURN) {
        let path = churn.to_str().context("a path that is no text")?;
        let in_states = diagnose(&[path, "100"])?;
        let fresh: Vec<Value> = (0..CHURN_RUNS)
            .map(|_| diagnosed(&["--pages", "4K,2M"], &[path, "300"]))
            .collect::<Result<_>>()?;
        let seen = fresh.iter().filter(|report| shows_loss(report)).count();
        promise += &format!(
            "; the loss of {CHURN} by {CHURN_CAUSE} is shown in {CHURN_SEEN} of {CHURN_RUNS} runs ({seen})"
        );
        is_kept &= seen >= CHURN_SEEN && is_safe_advice(&in_states);
        rows.extend(rows_of(CHURN, &in_states));
        let verdicts: Vec<&Value> =
            fresh.iter().map(|report| &report["verdict"]["reason"]).collect();
        results.push(json!({
            "program": CHURN, "states": in_states["states"], "seen": seen, "verdicts": verdicts,
        }));
    }
    Ok(Outcome {
        headings: vec!["program", "memory", "base", "thp-2M", "takes longer", "recommended"],
        rows,
        json: json!(results),
        promise: (promise, is_kept),
    })
}

/// Diagnoses a command in all states.
fn diagnose(command: &[&str]) -> Result<Value> {
    let (rounds, when) = (ROUNDS.to_string(), STATES.join(","));
    diagnosed(&["--pages", "4K,2M", "--runs", &rounds, "--when", &when], command)
}

fn diagnosed(options: &[&str], command: &[&str]) -> Result<Value> {
    let said = Command::new(pagetax()?)
        .args(["diagnose", "--json", "--quiet"])
        .args(options)
        .arg("--")
        .args(command)
        .stdin(Stdio::null())
        .output()?;
    serde_json::from_slice(&said.stdout)
        .with_context(|| String::from_utf8_lossy(&said.stderr).into_owned())
}

/// Returns the states with trials, fresh memory first.
fn states_of(report: &Value) -> Vec<(&str, &Value)> {
    let others = report["states"].as_array().into_iter().flatten();
    let named = others.map(|state| (state["state"].as_str().unwrap_or_default(), state));
    std::iter::once(("fresh", report)).chain(named).collect()
}

fn trial<'a>(state: &'a Value, name: &str) -> Option<&'a Value> {
    state["trials"].as_array()?.iter().find(|trial| trial["name"] == name)
}

fn rows_of(program: &str, report: &Value) -> Vec<Vec<String>> {
    let speedup = |state: &Value, name: &str| {
        let of = trial(state, name).map(|trial| &trial["speedup"]);
        let bound = |key: &str| of.and_then(|speedup| speedup[key].as_f64());
        match (bound("value"), bound("low"), bound("high")) {
            (Some(value), Some(low), Some(high)) => format!("{value:.2} ({low:.2}–{high:.2})"),
            _ => state["why_not"].as_str().unwrap_or("–").to_string(),
        }
    };
    let winner = report["verdict"]["winner"].as_str().unwrap_or("nothing");
    let row = |(index, (name, state)): (usize, (&str, &Value))| {
        let first = |words: &str| if index == 0 { words.to_string() } else { String::new() };
        let cause = state["growth"][0]["id"].as_str().unwrap_or_default();
        let (base, large) = (speedup(state, "base"), speedup(state, "thp-2M"));
        vec![first(program), name.into(), base, large, cause.into(), first(winner)]
    };
    states_of(report).into_iter().enumerate().map(row).collect()
}

/// Returns true if the recommended trial loses in no state.
fn is_safe_advice(report: &Value) -> bool {
    let Some(winner) = report["verdict"]["winner"].as_str() else { return true };
    let value = |state: &Value| trial(state, winner).and_then(|t| t["speedup"]["value"].as_f64());
    states_of(report).into_iter().all(|(_, state)| value(state).is_none_or(|value| value > LOSS))
}

/// Returns true if base pages win, so that large pages lose, and the budget names the cause.
fn shows_loss(report: &Value) -> bool {
    let ns = |row: &&Value| row["ns"].as_u64().unwrap_or(0);
    let rows = report["budget"]["cpu"].as_array().into_iter().flatten();
    let largest =
        rows.filter(|row| row["id"] != "compute" && row["id"] != "other_kernel").max_by_key(ns);
    report["verdict"]["winner"] == "base" && largest.is_some_and(|row| row["id"] == CHURN_CAUSE)
}
