//! The cost of collection for a program. Each round runs the same real program bare, watched as in a trial
//! of `diagnose`, and watched as for its budget with sampled stacks.
//!
//! Runs of one program differ by more than the limit, so there are many short rounds, and each gives a
//! ratio. The library of `diagnose` runs them, so nothing else lies between the runs of a round. The
//! promise needs the whole interval of their median: an interval that crosses the limit is no pass.

use super::Outcome;
use super::programs::{ProgramRun, Workshop, chosen};
use anyhow::{Context, Result, anyhow, bail};
use pagetax_core::stats::{Ratio, median_of_ratios};
use pagetax_host::measure::budget::Watch;
use pagetax_host::measure::trial::{self, Outputs, TrialCommand};
use pagetax_host::pages::Recipe;
use serde_json::json;
use std::time::{Duration, Instant};

/// The time for each program. It is fixed: to stop when the result pleases would bias it.
const TIME: Duration = Duration::from_secs(900);
const ROUNDS_MIN: usize = 10;
/// The divisor of the programs' usual work. A run takes some 0.2 s, so there are many rounds.
const PART: u32 = 4;
/// The largest ratio of a program's time under collection to its bare time.
const LIMIT: f64 = 1.02;
/// A program that computes and faults, and one that mostly computes.
const PROGRAMS: [&str; 2] = ["python3", "sort"];

/// Benches the named programs, or the usual two.
pub fn run(names: &[String]) -> Result<Outcome> {
    let workshop = Workshop::new(PART)?;
    let usual = PROGRAMS.map(String::from);
    let programs = chosen(if names.is_empty() { &usual } else { names })?;
    let (mut rows, mut results, mut walls) = (Vec::new(), Vec::new(), Vec::new());
    for program in programs {
        let script = workshop.script(program)?.context("install the program first")?;
        eprintln!("{}: rounds for {} s", program.name, TIME.as_secs());
        let rounds = rounds(&script, &workshop)?;
        for (place, watched) in ["in a trial", "with stacks"].into_iter().enumerate() {
            let of = |ns: fn(&ProgramRun) -> u64| over_bare(&rounds, place + 1, ns);
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

/// Judges the intervals of all ratios against the limit.
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

/// Runs a round: bare, in a trial, with stacks.
type RunTriple = [ProgramRun; 3];

fn rounds(script: &str, workshop: &Workshop) -> Result<Vec<RunTriple>> {
    let argv = ["sh", "-c", script].map(Into::into).to_vec();
    let mut launch = TrialCommand { argv, ..TrialCommand::default() };
    // The first runs do not count: memory that comes from the hypervisor is no cost of watching.
    workshop.run(script, &[])?;
    watched(&mut launch, workshop, true)?;
    let (start, mut rounds) = (Instant::now(), Vec::new());
    while start.elapsed() < TIME || rounds.len() < ROUNDS_MIN {
        let mut round: [Option<ProgramRun>; 3] = [const { None }; 3];
        // The order changes from round to round.
        let first = rounds.len() % 3;
        let turns = (0..3).map(|turn| if rounds.len() % 2 == 0 { turn } else { 2 - turn });
        for turn in turns.map(|turn| (first + turn) % 3) {
            round[turn] = Some(match turn {
                0 => workshop.run(script, &[])?,
                _ => watched(&mut launch, workshop, turn == 2)?,
            });
        }
        let [Some(bare), Some(trial), Some(budget)] = round else {
            bail!("a round has three runs")
        };
        rounds.push([bare, trial, budget]);
    }
    Ok(rounds)
}

fn over_bare(rounds: &[RunTriple], place: usize, ns: fn(&ProgramRun) -> u64) -> Result<Ratio> {
    let of = |place: usize| rounds.iter().map(|round| ns(&round[place])).collect::<Vec<_>>();
    median_of_ratios(&of(place), &of(0), 1).context("runs without a time")
}

/// Runs a trial, or the run for the budget.
fn watched(launch: &mut TrialCommand, workshop: &Workshop, stacks: bool) -> Result<ProgramRun> {
    let outputs = Outputs { stdout: Some(workshop.path("out")), stderr: None };
    let mut watch = stacks.then(Watch::new);
    let finished = trial::run(launch, &Recipe::default(), &outputs, watch.as_mut())?;
    if let Some(watch) = watch {
        let seen = watch.finish().profile;
        seen.stacks.map_err(|why| anyhow!("no stacks were watched: {why}"))?;
    }
    if !finished.exit.success() {
        bail!("{:?} fails", launch.argv);
    }
    launch.learn(&finished);
    let cpu_ns = finished.usage.user_ns + finished.usage.kernel_ns;
    Ok(ProgramRun { wall_ns: finished.wall_ns, cpu_ns, output: Vec::new() })
}
