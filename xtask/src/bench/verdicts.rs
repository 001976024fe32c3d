//! The errors of `diagnose` while a compiler runs beside it: trials of a program that are all alike (A/A),
//! and programs that are made faster or slower on large pages only.
//!
//! It takes hours. Each run is noted in target/bench, and the bench goes on from there until pagetax is built
//! anew.

use super::programs::{Compiler, Workshop};
use super::{Outcome, pagetax};
use crate::shell;
use anyhow::{Context, Result};
use pagetax_core::diagnosis::{CHECK, Diagnosis};
use pagetax_core::shares::clopper_pearson;
use pagetax_core::stats::median;
use pagetax_host::sys::process::Child;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, UNIX_EPOCH};

/// The share of A/A runs that may have a false verdict.
const FALSE_LIMIT: f64 = 0.05;
/// The share of planted gains that are to be found.
const FOUND_LIMIT: f64 = 0.9;
/// The limit of `diagnose` for the rounds of an A/A run. Those of a gain have the default.
const TIME: &str = "20s";
/// For shorter runs, pagetax subtracts the start of its own programs.
const SUBTRACTED: Duration = Duration::from_millis(100);
const LENGTHS: [Duration; 3] =
    [Duration::from_millis(20), Duration::from_millis(200), Duration::from_secs(1)];

/// A kind of run.
struct Kind {
    name: &'static str,
    /// The time on large pages ÷ the time otherwise, in percent.
    percent: u64,
    /// The number of runs of all lengths together.
    runs: usize,
}

static KINDS: [Kind; 3] = [
    Kind { name: "5 % gain", percent: 95, runs: 20 },
    Kind { name: "2 % loss", percent: 102, runs: 20 },
    Kind { name: "A/A", percent: 100, runs: 200 },
];

/// The verdict of one diagnosis.
#[derive(Serialize, Deserialize)]
struct Seen {
    kind: String,
    length_ms: u64,
    winner: Option<String>,
    /// True if the command differs from itself.
    is_check_different: bool,
    is_refused: bool,
    rounds: usize,
    seconds: f64,
}

/// Runs the bench, or so many more diagnoses of it.
pub fn run(parts: &[String]) -> Result<Outcome> {
    let more = parts.first().map(|part| part.parse::<usize>()).transpose();
    let mut more = more.context("the part is a number of runs")?.unwrap_or(usize::MAX);
    let pagetax = pagetax()?;
    let notes = notes(&pagetax)?;
    let mut seen = read(&notes)?;
    let stage = Stage::new()?;
    while let Some((kind, done)) = next(&seen).filter(|_| more > 0) {
        let one = stage.diagnose(&pagetax, kind, LENGTHS[done % LENGTHS.len()])?;
        let note = json!(one).to_string();
        writeln!(OpenOptions::new().append(true).create(true).open(&notes)?, "{note}")?;
        eprintln!("{} {} of {}: {note}", kind.name, done + 1, kind.runs);
        seen.push(one);
        more -= 1;
    }
    drop(stage);
    Ok(outcome(&seen))
}

/// Returns the first kind of which runs are left, and its number of runs so far; none if all are done.
fn next(seen: &[Seen]) -> Option<(&'static Kind, usize)> {
    let done = |kind: &Kind| seen.iter().filter(|one| one.kind == kind.name).count();
    KINDS.iter().map(|kind| (kind, done(kind))).find(|(kind, done)| *done < kind.runs)
}

/// Returns the file of the runs of this build.
fn notes(pagetax: &str) -> Result<PathBuf> {
    let built = fs::metadata(pagetax)?.modified()?.duration_since(UNIX_EPOCH)?.as_secs();
    let directory = Path::new("target/bench");
    fs::create_dir_all(directory)?;
    Ok(directory.join(format!("verdicts-{built}.jsonl")))
}

fn read(notes: &Path) -> Result<Vec<Seen>> {
    let text = fs::read_to_string(notes).unwrap_or_default();
    let parsed = text.lines().map(serde_json::from_str).collect::<Result<_, _>>();
    parsed.with_context(|| format!("{} is damaged; remove it", notes.display()))
}

fn of<'a>(seen: &'a [Seen], kind: &'a str, length: Duration) -> impl Iterator<Item = &'a Seen> {
    let length_ms = length.as_millis() as u64;
    seen.iter().filter(move |one| one.kind == kind && one.length_ms == length_ms)
}

/// The CPU times of a run.
#[derive(Clone, Copy)]
struct Costs {
    whole_ns: f64,
    bytes_per_ns: f64,
    /// The time that large pages add to the same work, with the start of `ppgsz` as far as it counts.
    large_pages_ns: f64,
}

impl Costs {
    /// Returns the bytes more to read, or less, by which a run on large pages takes this share of the time.
    fn more_bytes(self, percent: u64) -> i64 {
        let more_ns = self.whole_ns * (percent as f64 / 100.0 - 1.0) - self.large_pages_ns;
        (more_ns * self.bytes_per_ns) as i64
    }
}

/// The files to read, and the compiler beside them.
struct Stage {
    workshop: Workshop,
    /// The bytes that sha256sum reads in a second.
    bytes_per_s: f64,
    /// The costs of runs, by their length.
    costs: RefCell<HashMap<Duration, Costs>>,
    _compiler: Compiler,
}

impl Stage {
    fn new() -> Result<Stage> {
        let workshop = Workshop::new(1)?;
        let probe = workshop.path("probe");
        File::create(&probe)?.set_len(64 << 20)?;
        let mut fastest = f64::INFINITY;
        for _ in 0..3 {
            let started = Instant::now();
            shell::output(Command::new("sha256sum").arg(&probe))?;
            fastest = fastest.min(started.elapsed().as_secs_f64());
        }
        let bytes_per_s = (64 << 20) as f64 / fastest;
        let costs = RefCell::default();
        Ok(Stage { workshop, bytes_per_s, costs, _compiler: Compiler::start()? })
    }

    /// Returns the costs of a run of this file, from runs that share a CPU.
    fn costs(&self, pagetax: &str, length: Duration, file: &Path, bytes: u64) -> Result<Costs> {
        if let Some(known) = self.costs.borrow().get(&length) {
            return Ok(*known);
        }
        let half = self.file("half", bytes / 2)?;
        // A shell starts it, as in the runs that are diagnosed.
        let reading = |file: &Path| -> Vec<String> {
            vec!["sh".into(), "-c".into(), format!("exec sha256sum {}", file.display())]
        };
        let on_large_pages = |command: Vec<String>| {
            let wrapper = [pagetax, "ppgsz", "-o", "heap=2M"].map(String::from);
            [wrapper.to_vec(), command].concat()
        };
        let commands = [
            reading(file),
            reading(&half),
            on_large_pages(reading(file)),
            vec!["true".into()],
            on_large_pages(vec!["true".into()]),
        ];
        let mut times: [Vec<u64>; 5] = Default::default();
        for _ in 0..11 {
            let ran = side_by_side(&commands)?;
            times.iter_mut().zip(ran).for_each(|(times, cpu_ns)| times.push(cpu_ns));
        }
        let [whole, half, large, start, large_start] =
            times.map(|times| median(&times).unwrap_or(0) as f64);
        let start = if length < SUBTRACTED { large_start - start } else { 0.0 };
        let costs = Costs {
            whole_ns: whole,
            bytes_per_ns: (bytes / 2) as f64 / (whole - half).max(1.0),
            large_pages_ns: large - whole - start,
        };
        self.costs.borrow_mut().insert(length, costs);
        Ok(costs)
    }

    /// Diagnoses sha256sum of a file, or of a file of another length if it starts on large pages.
    fn diagnose(&self, pagetax: &str, kind: &Kind, length: Duration) -> Result<Seen> {
        let bytes = (self.bytes_per_s * length.as_secs_f64()) as u64;
        let file = self.file("whole", bytes)?;
        let mut command = Command::new(pagetax);
        command.args(["diagnose", "--json", "--check", "--sizes", "4K,2M"]);
        match kind.percent {
            100 => command.args(["--time", TIME, "--", "sha256sum"]).arg(&file),
            percent => {
                let costs = self.costs(pagetax, length, &file, bytes)?;
                let part =
                    self.file("part", bytes.saturating_add_signed(costs.more_bytes(percent)))?;
                // The trial on large pages is the one with the tunable of the C library.
                let script = format!(
                    "case $GLIBC_TUNABLES in *hugetlb=1*) exec sha256sum {};; *) exec sha256sum {};; esac",
                    part.display(),
                    file.display()
                );
                command.args(["--", "sh", "-c", &script])
            }
        };
        let started = Instant::now();
        let diagnosis: Diagnosis =
            serde_json::from_str(&shell::output(command.stderr(Stdio::null()))?)?;
        let check = diagnosis.trials.iter().find(|trial| trial.name == CHECK);
        let check = check.context("no second trial of the command")?;
        Ok(Seen {
            kind: kind.name.into(),
            length_ms: length.as_millis() as u64,
            is_check_different: check.speedup.is_some_and(|ratio| !ratio.holds_one()),
            is_refused: diagnosis.verdict.reason.starts_with("no verdict"),
            rounds: check.runs_ns.len(),
            winner: diagnosis.verdict.winner,
            seconds: started.elapsed().as_secs_f64(),
        })
    }

    fn file(&self, name: &str, bytes: u64) -> Result<PathBuf> {
        let path = self.workshop.path(name);
        File::create(&path)?.set_len(bytes)?;
        // The first read fills the page cache, which no run should pay for.
        shell::output(Command::new("sha256sum").arg(&path))?;
        Ok(path)
    }
}

/// Runs commands at a time on one CPU, and returns the CPU time of each.
fn side_by_side(commands: &[Vec<String>]) -> Result<Vec<u64>> {
    let start = |words: &Vec<String>| {
        let mut command = Command::new("taskset");
        command.args(["-c", "0"]).args(words).stdout(Stdio::null());
        command.spawn().map(Child::from)
    };
    let children = commands.iter().map(start).collect::<Result<Vec<_>, _>>()?;
    let wait = |mut child: Child| {
        let (_, usage) = child.wait()?;
        Ok(usage.user_ns + usage.kernel_ns)
    };
    children.into_iter().map(wait).collect()
}

fn outcome(seen: &[Seen]) -> Outcome {
    let (mut rows, mut fine) = (Vec::new(), true);
    for kind in &KINDS {
        for length in LENGTHS {
            let all: Vec<&Seen> = of(seen, kind.name, length).collect();
            rows.push(row(kind, &format!("{} ms", length.as_millis()), &all));
        }
        let all: Vec<&Seen> = seen.iter().filter(|one| one.kind == kind.name).collect();
        rows.push(row(kind, "all", &all));
        let hits = hits(kind, &all) as f64;
        fine &= all.len() >= kind.runs
            && match kind.percent {
                100 => hits <= FALSE_LIMIT * all.len() as f64,
                percent if percent < 100 => hits >= FOUND_LIMIT * all.len() as f64,
                _ => hits == 0.0,
            };
    }
    Outcome {
        headings: vec!["runs", "length", "number", "verdicts", "share (95 %)", "refused", "time"],
        rows,
        json: json!(seen),
        promise: (
            "at most 5 % of the verdicts on equal programs are false, 9 of 10 gains of 5 % are found, and \
             a loss of 2 % is never recommended"
                .into(),
            fine,
        ),
    }
}

/// Returns the number of false verdicts of equal trials; of others, that of recommendations of large pages.
fn hits(kind: &Kind, all: &[&Seen]) -> u64 {
    let is_hit = |one: &&&Seen| match kind.percent {
        100 => one.winner.is_some() || one.is_check_different,
        _ => one.winner.as_deref() == Some("thp-2M"),
    };
    all.iter().filter(is_hit).count() as u64
}

fn row(kind: &Kind, length: &str, all: &[&Seen]) -> Vec<String> {
    let (number, hits) = (all.len() as u64, hits(kind, all));
    let what = if kind.percent == 100 { "false" } else { "large pages recommended" };
    let (share, time) = match number {
        0 => ("–".into(), "–".into()),
        _ => {
            let (low, high) = clopper_pearson(hits, number);
            let share = hits as f64 / number as f64;
            let seconds = all.iter().map(|one| one.seconds).sum::<f64>() / number as f64;
            (
                format!("{:.1} % ({:.1}–{:.1})", share * 100.0, low * 100.0, high * 100.0),
                format!("{seconds:.0} s each"),
            )
        }
    };
    vec![
        kind.name.into(),
        length.into(),
        number.to_string(),
        format!("{hits} {what}"),
        share,
        all.iter().filter(|one| one.is_refused).count().to_string(),
        time,
    ]
}
