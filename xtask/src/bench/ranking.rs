//! The first process of `pagetax diagnose --all` beside the one that gains most, in mixes of ten processes.
//!
//! The gain of a process is its CPU time in the mix × the share that the same program saves on 2M pages.
//! A restart A/B measures this share once for each program: both run at a time on one CPU, so that changes
//! of its speed affect both.

use super::{Outcome, median, pagetax};
use crate::shell;
use anyhow::{Context, Result, bail, ensure};
use pagetax_core::document;
use pagetax_core::ranking::Ranking;
use pagetax_host::procfs::{Root, process_memory, schedstat};
use serde_json::json;
use std::io::{BufRead, BufReader, Lines};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

const C_SOURCE: &str = "xtask/src/bench/ranking_loads.c";
const PYTHON_SOURCE: &str = "xtask/src/bench/ranking_lookups.py";
const MIXES: u64 = 12;
const PROCESSES: usize = 10;
/// Mixes in which the first process must be the one that gains most, of ten.
const PROMISED_OF_TEN: f64 = 8.0;
/// A process that gains so much of the most is as good a first one: programs differ by more between runs.
const NEAR: f64 = 0.9;
const AB_ROUNDS: usize = 3;
const AB_TIME: Duration = Duration::from_millis(1_500);
const INTERVAL: &str = "3s";
/// The CPUs' share that processes of a mix ask for, in percent.
const PERCENTS: [u64; 5] = [5, 15, 30, 60, 100];

/// A program with its size: MiB, or millions of keys of a dict.
#[derive(Clone, Copy)]
struct Load {
    kind: &'static str,
    size: u64,
    pages: &'static str,
}

const fn load(kind: &'static str, size: u64, pages: &'static str) -> Load {
    Load { kind, size, pages }
}

const LOADS: &[Load] = &[
    load("gather", 16, "base"),
    load("gather", 64, "base"),
    load("gather", 256, "base"),
    load("gather", 768, "base"),
    load("gather", 256, "huge"),
    load("chase", 64, "base"),
    load("chase", 256, "base"),
    load("chase", 768, "base"),
    load("chase", 256, "huge"),
    load("sequential", 64, "base"),
    load("sequential", 256, "base"),
    load("sequential", 768, "base"),
    load("compute", 4, "base"),
    load("compute", 512, "base"),
    load("sleep", 1_536, "base"),
    load("sleep", 256, "base"),
    load("fault", 8, "base"),
    load("fault", 64, "base"),
    load("dict", 1, "base"),
    load("dict", 4, "base"),
];

impl Load {
    fn name(&self) -> String {
        let unit = if self.kind == "dict" { "M keys" } else { "M" };
        let pages = if self.pages == "huge" { " on 2M" } else { "" };
        format!("{} {}{unit}{pages}", self.kind, self.size)
    }

    fn command(&self, program: &Path, pages: &str, percent: u64) -> Command {
        let [size, percent] = [self.size, percent].map(|number| number.to_string());
        if self.kind != "dict" {
            let mut command = Command::new(program);
            command.args([self.kind, &size, pages, &percent]);
            return command;
        }
        let mut command = Command::new("python3");
        // Its own allocator maps memory by itself, and asks for no large pages.
        command.args([PYTHON_SOURCE, &size, &percent]).env("PYTHONMALLOC", "malloc");
        if pages == "huge" {
            command.env("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1");
        }
        command
    }
}

/// A process of a mix. Dropping it ends it.
struct LoadProcess {
    child: Child,
    said: Lines<BufReader<ChildStdout>>,
}

impl LoadProcess {
    fn start(command: &mut Command) -> Result<LoadProcess> {
        let mut child = command.stdout(Stdio::piped()).stdin(Stdio::null()).spawn()?;
        let said = BufReader::new(child.stdout.take().context("no output")?).lines();
        Ok(LoadProcess { child, said })
    }

    fn wait_until_up(&mut self) -> Result<()> {
        ensure!(self.said.next().transpose()?.as_deref() == Some("up"), "a load does not come up");
        Ok(())
    }

    fn cpu_ns(&self) -> Result<u64> {
        let times = schedstat(&Root::default(), self.child.id(), None);
        times.map(|(ran_ns, _)| ran_ns).map_err(anyhow::Error::msg)
    }

    /// Ends it, and returns the CPU time of a round.
    fn round_ns(mut self) -> Result<f64> {
        shell::succeed(Command::new("kill").args(["-USR1", &self.child.id().to_string()]))?;
        let line = self.said.next().transpose()?.context("a load ended early")?;
        let words: Vec<f64> = line.split(' ').map_while(|word| word.parse().ok()).collect();
        let [rounds, ns, ..] = words[..] else { bail!("`{line}` has no rounds") };
        Ok(ns / rounds.max(1.0))
    }
}

impl Drop for LoadProcess {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the share of CPU time that a program saves on 2M pages.
fn saved_share(load: &Load, program: &Path) -> Result<f64> {
    if load.kind == "sleep" || load.pages == "huge" {
        // It does nothing, or has its large pages already.
        return Ok(0.0);
    }
    let round = |_| {
        let start = |pages| {
            let command = load.command(program, pages, 100);
            let mut pinned = Command::new("taskset");
            pinned.args(["-c", "1"]).arg(command.get_program()).args(command.get_args());
            pinned.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
            LoadProcess::start(&mut pinned)
        };
        let (mut base, mut huge) = (start("base")?, start("huge")?);
        base.wait_until_up()?;
        huge.wait_until_up()?;
        std::thread::sleep(AB_TIME);
        let (base_ns, huge_ns) = (base.round_ns()?, huge.round_ns()?);
        Ok(1.0 - huge_ns / base_ns)
    };
    let shares = (0..AB_ROUNDS).map(round).collect::<Result<Vec<f64>>>()?;
    Ok(median(shares).max(0.0))
}

/// Returns the next number of a generator. A seed gives the same mix everywhere.
fn draw(state: &mut u64, below: usize) -> usize {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) as usize % below
}

/// Returns the loads of a mix, by their index, and their percent of a CPU.
fn mix(seed: u64) -> Vec<(usize, u64)> {
    let (mut state, mut left) = (seed, (0..LOADS.len()).collect::<Vec<_>>());
    // The first numbers of near seeds are alike.
    for _ in 0..4 {
        draw(&mut state, 1);
    }
    let one = |_| {
        let index = left.swap_remove(draw(&mut state, left.len()));
        (index, PERCENTS[draw(&mut state, PERCENTS.len())])
    };
    (0..PROCESSES).map(one).collect()
}

/// The outcome of a mix: the gain of each process in percent of a CPU, and the first ones of three rankings.
struct MixOutcome {
    names: Vec<String>,
    gains: Vec<f64>,
    estimates: Vec<Option<f64>>,
    by_tax: Option<usize>,
    by_cpu: usize,
    by_resident: usize,
}

impl MixOutcome {
    fn best(&self) -> usize {
        largest(&self.gains)
    }
}

fn largest(values: &[f64]) -> usize {
    let largest = (0..values.len()).max_by(|a, b| values[*a].total_cmp(&values[*b]));
    largest.unwrap_or(0)
}

fn run_mix(seed: u64, saved: &[f64], program: &Path, pagetax: &str) -> Result<MixOutcome> {
    let drawn = mix(seed);
    let start = |(index, percent): &(usize, u64)| {
        let load = &LOADS[*index];
        LoadProcess::start(&mut load.command(program, load.pages, *percent))
    };
    let mut processes = drawn.iter().map(start).collect::<Result<Vec<_>>>()?;
    processes.iter_mut().try_for_each(LoadProcess::wait_until_up)?;
    let cpu_ns = || processes.iter().map(LoadProcess::cpu_ns).collect::<Result<Vec<u64>>>();
    let (begin, before) = (Instant::now(), cpu_ns()?);
    let mut diagnose = Command::new(pagetax);
    diagnose.args(["--quiet", "diagnose", "--all", "--for", INTERVAL, "--json"]);
    let ranking: Ranking = document::from_json(&shell::output(&mut diagnose)?)?;
    let (elapsed_ns, after) = (begin.elapsed().as_nanos() as f64, cpu_ns()?);
    let cpu: Vec<f64> = after
        .iter()
        .zip(&before)
        .map(|(after, before)| (after - before) as f64 / elapsed_ns)
        .collect();
    let pid = |process: &LoadProcess| process.child.id();
    let resident = processes.iter().map(|process| {
        process_memory(&Root::default(), pid(process)).resident_bytes.value().unwrap_or(0) as f64
    });
    let resident: Vec<f64> = resident.collect();
    let is_ours = |row: &&pagetax_core::ranking::RankedProcess| {
        processes.iter().any(|process| pid(process) == row.pid)
    };
    let first = ranking.processes.iter().find(is_ours).map(|row| row.pid);
    let estimate = |process: &LoadProcess| {
        let row = ranking.processes.iter().find(|row| row.pid == pid(process))?;
        Some(row.tax_ns.value? as f64 / ranking.elapsed_ns as f64)
    };
    Ok(MixOutcome {
        estimates: processes.iter().map(estimate).collect(),
        names: drawn.iter().map(|(index, _)| LOADS[*index].name()).collect(),
        gains: drawn.iter().zip(&cpu).map(|((index, _), cpu)| cpu * saved[*index]).collect(),
        by_tax: processes.iter().position(|process| Some(pid(process)) == first),
        by_cpu: largest(&cpu),
        by_resident: largest(&resident),
    })
}

fn compiled(folder: &Path) -> Result<PathBuf> {
    let program = folder.join("ranking_loads");
    shell::succeed(Command::new("cc").args(["-O2", C_SOURCE, "-o"]).arg(&program))
        .context("install gcc")?;
    Ok(program)
}

/// Runs the mixes of the named seeds, or all.
pub fn run(parts: &[String]) -> Result<Outcome> {
    let seeds = parts.iter().map(|part| part.parse::<u64>().context("a part is a seed, such as 3"));
    let seeds = seeds.collect::<Result<Vec<u64>>>()?;
    let seeds = if seeds.is_empty() { (1..=MIXES).collect() } else { seeds };
    let folder = tempfile::tempdir()?;
    let (program, pagetax) = (compiled(folder.path())?, pagetax()?);
    let saved = |load: &Load| {
        let share = saved_share(load, &program)?;
        eprintln!("{}: 2M pages save {:.0} % of CPU time", load.name(), share * 100.0);
        Ok(share)
    };
    let saved = LOADS.iter().map(saved).collect::<Result<Vec<f64>>>()?;
    let (mut rows, mut results) = (Vec::new(), Vec::new());
    let (mut hits, mut near) = ([0usize; 3], [0usize; 3]);
    for seed in &seeds {
        let mix = run_mix(*seed, &saved, &program, &pagetax)?;
        let best = mix.best();
        let firsts = [mix.by_tax, Some(mix.by_cpu), Some(mix.by_resident)];
        for (at, first) in firsts.iter().enumerate() {
            let gain = first.map_or(0.0, |first| mix.gains[first]);
            hits[at] += usize::from(*first == Some(best));
            near[at] += usize::from(gain >= NEAR * mix.gains[best]);
        }
        let cell = |at: usize| format!("{} ({:.1} %)", mix.names[at], mix.gains[at] * 100.0);
        let firsts = firsts.map(|first| first.map_or("none".into(), cell));
        rows.push([vec![seed.to_string(), cell(best)], firsts.to_vec()].concat());
        results.push(json!({"seed": seed, "loads": mix.names, "gains": mix.gains, "best": best,
            "estimates": mix.estimates, "by_tax": mix.by_tax, "by_cpu": mix.by_cpu, "by_resident": mix.by_resident}));
    }
    let count = seeds.len();
    let summary = |name: &str, hits: [usize; 3]| {
        let cells = hits.map(|hits| format!("{hits} of {count}"));
        [vec![name.to_string(), String::new()], cells.to_vec()].concat()
    };
    rows.push(summary("gains most", hits));
    rows.push(summary("or 90 % of that", near));
    Ok(Outcome {
        headings: vec!["mix", "gains most (of a CPU)", "first of --all", "by CPU", "by RSS"],
        rows,
        json: json!({"saved": LOADS.iter().map(Load::name).zip(&saved).collect::<Vec<_>>(),
            "mixes": results}),
        promise: (
            "the first of --all gains most in at least 8 of 10 mixes".into(),
            hits[0] as f64 * 10.0 >= PROMISED_OF_TEN * count as f64,
        ),
    })
}
