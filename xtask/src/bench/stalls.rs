//! The time that a program waits for its memory when servers fail, and the proof that all of it comes back.
//! One of three servers fails while a program rewrites memory of which a quarter is resident, with two
//! copies.
//!
//! Servers are processes on loopback. Tests in `crates/cli/tests/memory_servers` cover lost packets. Each run
//! is a process of its own, which a lost page ends by SIGBUS.

mod failure;
mod program;
mod proxy;
mod store;

use super::{Outcome, pagetax};
use anyhow::{Context, Result, bail, ensure};
use failure::{FAILURES, ServerFailure};
use pagetax_core::units::Bytes;
use serde_json::{Value, json};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// For the longest stall after a kill, at the 99th percentile of runs.
const STALL_LIMIT: Duration = Duration::from_millis(50);
/// Between two lines that say how far it is.
const PROGRESS_EVERY: Duration = Duration::from_secs(10);
/// The first part of a single run's arguments: the path of pagetax, the kind and the seed follow.
const SINGLE: &str = "single";
/// The part that keeps pages in a cluster of Valkey or Redis, and the target of a single run there.
const STORE: &str = "store";
/// The signal that ends a process that touches a lost page.
const SIGBUS: i32 = 7;

/// The runs of one kind.
struct FailureKind {
    name: &'static str,
    trouble: ServerFailure,
    runs: u64,
    results: Vec<Value>,
    lost: u64,
    failed: u64,
}

/// Runs the bench. Its parts are the number of runs of each kind, as in `killed=5 gray=5`. Without parts, all
/// kinds run. With `store` pages lie on a Valkey or Redis cluster, and its servers fail.
pub fn run(parts: &[String]) -> Result<Outcome> {
    if let [first, target, kind, seed] = parts
        && first == SINGLE
    {
        let (kind, seed) = (kind_of(kind)?, seed.parse()?);
        let result = match target.as_str() {
            STORE => store::run(kind, seed)?,
            pagetax => failure::run(pagetax, kind, seed)?,
        };
        println!("{result}");
        std::process::exit(0);
    }
    let (on_store, parts): (Vec<_>, Vec<_>) = parts.iter().cloned().partition(|part| part == STORE);
    let mut kinds = chosen(&parts)?;
    let target = if on_store.is_empty() {
        pagetax()?
    } else {
        kinds.retain(|kind| store::FAILURES.contains(&kind.trouble));
        STORE.to_string()
    };
    let all: u64 = kinds.iter().map(|kind| kind.runs).sum();
    let (mut done, mut said) = (0, Instant::now());
    for kind in &mut kinds {
        for seed in 0..kind.runs {
            kind.run(&target, seed)?;
            done += 1;
            if said.elapsed() >= PROGRESS_EVERY || done == all {
                said = Instant::now();
                eprintln!("{done} of {all} runs, now {}", kind.name);
            }
        }
    }
    outcome(&kinds, target == STORE)
}

fn kind_of(name: &str) -> Result<ServerFailure> {
    let known = FAILURES.iter().find(|(_, known, _)| *known == name);
    let names = || FAILURES.map(|(_, name, _)| name).join(", ");
    Ok(known.with_context(|| format!("no trouble is called `{name}`; there are {}", names()))?.0)
}

fn chosen(parts: &[String]) -> Result<Vec<FailureKind>> {
    let mut kinds = Vec::new();
    for part in parts {
        let (name, runs) = part.split_once('=').context("as in killed=5")?;
        kind_of(name)?;
        kinds.push((name, runs.parse().context("how many runs?")?));
    }
    let runs_of = |name, all| match parts {
        [] => all,
        _ => kinds.iter().filter(|(kind, _)| *kind == name).map(|(_, runs)| runs).sum(),
    };
    let kinds = FAILURES.map(|(trouble, name, all)| FailureKind {
        name,
        trouble,
        runs: runs_of(name, all),
        results: Vec::new(),
        lost: 0,
        failed: 0,
    });
    let kinds: Vec<FailureKind> = kinds.into_iter().filter(|kind| kind.runs > 0).collect();
    ensure!(!kinds.is_empty(), "at least one run");
    Ok(kinds)
}

impl FailureKind {
    /// Runs once, as a process of its own.
    fn run(&mut self, target: &str, seed: u64) -> Result<()> {
        let mut run = Command::new(std::env::current_exe()?);
        run.args(["bench", "stalls", SINGLE, target, self.name, &seed.to_string()]);
        let output = run.stderr(Stdio::inherit()).output()?;
        if output.status.success() {
            self.results.push(serde_json::from_slice(&output.stdout)?);
            return Ok(());
        }
        let is_lost = output.status.signal() == Some(SIGBUS);
        self.lost += is_lost as u64;
        self.failed += !is_lost as u64;
        eprintln!("{} with seed {seed}: {}", self.name, output.status);
        Ok(())
    }

    fn sum(&self, what: &str) -> u64 {
        self.results.iter().filter_map(|run| run[what].as_u64()).sum()
    }

    /// Returns the longest wait for a CPU in each run, of a thread that needs no page.
    fn oversleeps(&self) -> Vec<Duration> {
        let times = self.results.iter().filter_map(|run| run["longest_oversleep_ns"].as_u64());
        times.map(Duration::from_nanos).collect()
    }

    /// Returns the longest stalls of the runs, before or after the failure.
    fn stalls(&self, after: usize) -> Vec<Duration> {
        let stalls = self.results.iter().filter_map(|run| run["longest_stall_ns"][after].as_u64());
        stalls.map(Duration::from_nanos).collect()
    }
}

fn outcome(kinds: &[FailureKind], is_store: bool) -> Result<Outcome> {
    let calm: Vec<Duration> = kinds.iter().flat_map(|kind| kind.stalls(0)).collect();
    if calm.is_empty() {
        bail!("no run came to its end");
    }
    let comparison = |name: &str, values| {
        let named = [name, "", "", "", ""].map(String::from);
        named.into_iter().chain(cells(values)).collect()
    };
    let sleepers = kinds.iter().flat_map(FailureKind::oversleeps).collect();
    let comparisons = [
        comparison("none, for comparison", calm),
        comparison("a thread that sleeps, for a CPU", sleepers),
    ];
    let rows = kinds.iter().map(|kind| {
        let counts = [kind.sum("page_ins"), kind.lost, kind.sum("wrong_pages"), kind.failed];
        let named = [kind.name.into()].into_iter().chain(counts.map(|count| count.to_string()));
        named.chain(cells(kind.stalls(1))).collect()
    });
    let is_kill = |kind: &&FailureKind| {
        matches!(kind.trouble, ServerFailure::Killed | ServerFailure::Restarted)
    };
    let p99_of = |kind: &FailureKind| percentile(&mut kind.stalls(1), 99);
    let p99 = kinds.iter().filter(is_kill).filter_map(p99_of).max();
    // The limit is one of our own servers.
    let limit = (!is_store).then_some(STALL_LIMIT);
    let total = |what: fn(&FailureKind) -> u64| kinds.iter().map(what).sum::<u64>();
    let runs = total(|kind| kind.runs);
    let (page_ins, wrong) =
        (total(|kind| kind.sum("page_ins")), total(|kind| kind.sum("wrong_pages")));
    let (lost, failed) = (total(|kind| kind.lost), total(|kind| kind.failed));
    let after_kill = p99.map(|p99| {
        let at_most = limit.map_or(String::new(), |limit| format!(", at most {}", millis(limit)));
        format!("; after a kill p99 {} ms{at_most}", millis(p99))
    });
    Ok(Outcome {
        headings: vec![
            "trouble; longest stall of a run, ms",
            "page-ins",
            "runs with lost pages",
            "wrong pages",
            "failed runs",
            "p50",
            "p90",
            "p99",
            "max",
        ],
        rows: comparisons.into_iter().chain(rows).collect(),
        json: json!({
            "runs": runs, "page_ins": page_ins, "wrong_pages": wrong, "runs_with_lost_pages": lost,
            "failed_runs": failed, "region_bytes": program::REGION_BYTES,
            "resident_bytes": program::RESIDENT_BYTES,
            "of_runs": kinds.iter().flat_map(|kind| &kind.results).collect::<Vec<_>>(),
        }),
        promise: (
            format!(
                "{runs} runs of {} with {} resident, {page_ins} page-ins, {wrong} wrong pages, {lost} runs with lost \
                 pages, {failed} that failed{}",
                Bytes(program::REGION_BYTES),
                Bytes(program::RESIDENT_BYTES),
                after_kill.unwrap_or_default(),
            ),
            wrong + lost + failed == 0 && p99.zip(limit).is_none_or(|(p99, limit)| p99 <= limit),
        ),
    })
}

/// Formats four percentiles.
fn cells(mut values: Vec<Duration>) -> [String; 4] {
    [50, 90, 99, 100].map(|percent| percentile(&mut values, percent).map_or("-".into(), millis))
}

/// Returns the nearest-rank percentile.
fn percentile(values: &mut [Duration], percent: usize) -> Option<Duration> {
    values.sort_unstable();
    values.get((values.len() * percent).div_ceil(100).checked_sub(1)?).copied()
}

fn millis(time: Duration) -> String {
    format!("{:.1}", time.as_secs_f64() * 1e3)
}
