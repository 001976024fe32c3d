//! The time in which `diagnose` gives its verdict on programs that nobody here wrote, beside another build of
//! pagetax.

use super::programs::{Workshop, chosen};
use super::{Outcome, median, pagetax};
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::env;
use std::process::{Command, Stdio};
use std::time::Instant;

const PROGRAMS: [&str; 5] = ["python3", "sort", "sqlite3", "gcc", "xz"];
/// The runs of each build, in turn.
const ROUNDS: usize = 2;
/// The longest time for a clear case of a program of one second.
const LIMIT_S: f64 = 20.0;
/// The gain of a clear case.
const CLEAR_GAIN: f64 = 1.10;

/// One diagnosis.
struct Diagnosed {
    seconds: f64,
    /// The name of the best trial; none if nothing helps, or if it was left open.
    winner: Option<String>,
    /// The speed-up of that trial.
    speedup: f64,
    is_open: bool,
}

impl Diagnosed {
    fn verdict(&self) -> String {
        match &self.winner {
            Some(winner) => format!("{winner} {:.2}", self.speedup),
            None if self.is_open => "open".into(),
            None => "no gain".into(),
        }
    }
}

/// Runs the bench on these programs, or on all. The environment variable `PAGETAX_BEFORE` names the program
/// of another build.
pub fn run(names: &[String]) -> Result<Outcome> {
    let all = PROGRAMS.map(String::from);
    let names = if names.is_empty() { &all } else { names };
    let workshop = Workshop::new(1)?;
    let builds: Vec<String> =
        std::iter::once(pagetax()?).chain(env::var("PAGETAX_BEFORE")).collect();
    let (mut rows, mut results, mut fine) = (Vec::new(), Vec::new(), true);
    for program in chosen(names)? {
        let Some(script) = workshop.script(program)? else {
            rows.push(vec![program.name.into(), "not installed".into()]);
            continue;
        };
        let mut seen: Vec<Vec<Diagnosed>> = builds.iter().map(|_| Vec::new()).collect();
        for _ in 0..ROUNDS {
            for (build, seen) in builds.iter().zip(&mut seen) {
                let one = diagnose(build, &script)?;
                eprintln!("{}: {:.0} s, {}", program.name, one.seconds, one.verdict());
                seen.push(one);
            }
        }
        fine &= seen[0].iter().all(|one| one.speedup < CLEAR_GAIN || one.seconds <= LIMIT_S);
        let mut row = vec![program.name.to_string()];
        for seen in &seen {
            let seconds = median(seen.iter().map(|one| one.seconds));
            let verdicts: Vec<String> = seen.iter().map(Diagnosed::verdict).collect();
            row.extend([format!("{seconds:.0} s"), verdicts.join(", ")]);
            results
                .push(json!({ "program": program.name, "seconds": seconds, "verdicts": verdicts }));
        }
        rows.push(row);
    }
    let mut headings = vec!["program", "time", "verdicts"];
    if builds.len() > 1 {
        headings.extend(["time before", "verdicts before"]);
    }
    Ok(Outcome {
        headings,
        rows,
        json: json!(results),
        promise: (format!("a gain of {CLEAR_GAIN} or more is found within {LIMIT_S:.0} s"), fine),
    })
}

fn diagnose(pagetax: &str, script: &str) -> Result<Diagnosed> {
    let started = Instant::now();
    let mut command = Command::new(pagetax);
    // An older build ends with another status where it recommends nothing.
    let said = command
        .args(["diagnose", "--json", "--", "sh", "-c", script])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()?;
    let seconds = started.elapsed().as_secs_f64();
    let report: Value = serde_json::from_slice(&said.stdout).context("diagnose gave no report")?;
    let winner = report["verdict"]["winner"].as_str().map(String::from);
    let trials = report["trials"].as_array().context("no trials")?;
    let best = trials.iter().find(|trial| trial["name"].as_str() == winner.as_deref());
    let speedup = best.and_then(|trial| trial["speedup"]["value"].as_f64()).unwrap_or(1.0);
    let reason = report["verdict"]["reason"].as_str().unwrap_or_default();
    let is_open = reason.starts_with("undecided") || reason.starts_with("no verdict");
    Ok(Diagnosed { seconds, winner, speedup, is_open })
}
