//! The error of predicted times with parts of a program's memory on 2M pages (mosaics).
//!
//! `pagetax whatif --by` records a program and predicts what each block of 2M saves. Then runs with no, with
//! all and with parts of the memory on 2M pages take turns. The prediction is the time on base pages less the
//! measured gain of all memory times the predicted share of the mosaic. A straight line takes the mosaic's
//! share of memory instead. Times are CPU times beside a probe of the machine's speed, as those of diagnose:
//! the turn of another program is no error of the prediction.

use super::{Outcome, median, pagetax};
use crate::shell;
use anyhow::{Context, Result, bail};
use pagetax_core::address_pattern::{AddressPattern, merged};
use pagetax_core::diagnosis::{Basis, Trial, compare_trials};
use pagetax_core::sequential::Stopping;
use pagetax_core::units::Nanos;
use pagetax_host::measure::trial::{self, TrialCommand};
use pagetax_host::pages::mechanism::{Conditions, Only};
use pagetax_host::pages::{PageSettings, Recipe, Unavailable};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

const SOURCE: &str = "xtask/src/bench/mosaics.c";
const HASH_MAP: &str = "\
#include <cstdio>
#include <unordered_map>
int main() {
  std::unordered_map<unsigned long, unsigned long> map;
  unsigned long x = 1, sum = 0;
  for (unsigned long i = 0; i < 1000000; i++) map[i * 0x9E3779B97F4A7C15ul] = i;
  for (int i = 0; i < 3000000; i++) {
    x = x * 6364136223846793005ul + 1442695040888963407ul;
    sum += map[(x >> 40) % 1000000 * 0x9E3779B97F4A7C15ul];
  }
  std::printf(\"%lu\\n\", sum);
}
";
const DICT: &str = "d = {i: str(i) for i in range(500000)}\nprint(sum(len(d[k * 7919 % 500000]) for k in range(1500000)))";
/// Name and command.
const PROGRAMS: [(&str, &[&str]); 4] = [
    ("hot range", &["./mosaics", "hot", "8"]),
    ("skewed table", &["./mosaics", "skewed", "8"]),
    ("hash map", &["./hash_map"]),
    ("python3 dict", &["/usr/bin/python3", "dict.py"]),
];

/// Memory is divided into so many pieces, of which a mosaic has some.
const PIECES: usize = 16;
/// A program belongs in the table if it gains this much.
const GAIN_MIN: f64 = 1.05;
/// The fewest and the most rounds, of which each runs all mosaics, and the time that they may take between
/// these.
const ROUNDS: (usize, usize) = (7, 25);
const ROUNDS_FOR: Duration = Duration::from_secs(90);
/// The promise: as for the anchor, which has counters and a pool (Mosmodel), less strict for noise.
const ERROR_MAX: f64 = 10.0;
const SEED: u64 = 2004;

/// A piece of memory: its patterns by block, with what each saves.
#[derive(Debug, Clone)]
struct Named {
    key: String,
    range: Range<u64>,
    bytes: f64,
    saved: f64,
}

/// Memory on 2M pages.
struct Mosaic {
    name: String,
    patterns: String,
    memory_share: f64,
    gain_share: f64,
}

pub fn run(parts: &[String]) -> Result<Outcome> {
    let pagetax = std::fs::canonicalize(pagetax()?)?;
    let folder = tempfile::tempdir()?;
    make_programs(folder.path())?;
    // Commands are relative to their folder.
    let (source, here) = (std::env::current_dir()?, folder.path());
    std::env::set_current_dir(here)?;
    let asked = |name: &str| parts.is_empty() || parts.iter().any(|part| part == name);
    let mut rows = Vec::new();
    let mut results = Vec::new();
    let mut worst = 0.0_f64;
    for (name, argv) in PROGRAMS.iter().filter(|(name, _)| asked(name)) {
        let result = program(&pagetax.to_string_lossy(), argv)
            .with_context(|| format!("mosaics of {name}"))?;
        worst = worst.max(result.error);
        rows.push(result.row(name));
        results.push(json!({"program": name, "mosaics": result.json}));
    }
    std::env::set_current_dir(source)?;
    Ok(Outcome {
        headings: vec![
            "program",
            "4K",
            "all on 2M",
            "speed-up",
            "mosaics",
            "largest error",
            "median error",
            "straight line: largest",
            "median",
        ],
        rows,
        json: json!(results),
        promise: (
            format!(
                "the largest error of a prediction is {worst:.1} %, at most {ERROR_MAX} % wanted"
            ),
            worst <= ERROR_MAX,
        ),
    })
}

fn make_programs(folder: &Path) -> Result<()> {
    let mut cc = Command::new("cc");
    shell::succeed(cc.args(["-O1", "-o"]).arg(folder.join("mosaics")).arg(SOURCE))?;
    std::fs::write(folder.join("hash_map.cpp"), HASH_MAP)?;
    std::fs::write(folder.join("dict.py"), DICT)?;
    let mut cxx = Command::new("g++");
    let source = folder.join("hash_map.cpp");
    shell::succeed(cxx.args(["-O2", "-o"]).arg(folder.join("hash_map")).arg(source))
}

/// The result for one program.
struct Errors {
    base_ns: f64,
    all_ns: f64,
    speedup: String,
    error: f64,
    errors: Vec<f64>,
    line_errors: Vec<f64>,
    json: Value,
}

impl Errors {
    fn row(&self, name: &str) -> Vec<String> {
        let percent = |value: f64| format!("{value:.1} %");
        let largest = |errors: &[f64]| errors.iter().copied().fold(0.0, f64::max);
        vec![
            name.into(),
            Nanos(self.base_ns as u64).to_string(),
            Nanos(self.all_ns as u64).to_string(),
            self.speedup.clone(),
            self.errors.len().to_string(),
            percent(largest(&self.errors)),
            percent(median(self.errors.iter().copied())),
            percent(largest(&self.line_errors)),
            percent(median(self.line_errors.iter().copied())),
        ]
    }
}

fn program(pagetax: &str, argv: &[&str]) -> Result<Errors> {
    let mosaics = mosaics(&blocks(pagetax, argv)?)?;
    let runs = measured(pagetax, argv, &mosaics)?;
    let [base_ns, all_ns] = [0, 1].map(|at| median(runs[at].iter().map(|ns| *ns as f64)));
    // Runs of one round share its speed.
    let over_base = |runs_ns: &Vec<u64>| {
        let ratios = runs_ns.iter().zip(&runs[0]).map(|(ns, base)| *ns as f64 / *base as f64);
        median(ratios)
    };
    let took: Vec<f64> = runs.iter().map(over_base).collect();
    let gain = Stopping::Fixed.ratio(&runs[0], &runs[1], &runs, 1).context("too few runs")?;
    let error = |share: f64, took_of_base: f64| {
        ((1.0 - (1.0 - took[1]) * share) / took_of_base - 1.0).abs() * 100.0
    };
    let inner = || mosaics.iter().zip(&took).skip(2);
    let errors: Vec<f64> = inner().map(|(mosaic, took)| error(mosaic.gain_share, *took)).collect();
    let line_errors: Vec<f64> =
        inner().map(|(mosaic, took)| error(mosaic.memory_share, *took)).collect();
    let json = mosaics.iter().zip(&runs).map(|(mosaic, runs)| {
        json!({
            "mosaic": mosaic.name, "patterns": mosaic.patterns, "memory_share": mosaic.memory_share,
            "gain_share": mosaic.gain_share, "runs_ns": runs,
        })
    });
    let mut speedup = gain.to_string();
    if gain.value < GAIN_MIN {
        speedup += " (gains too little)";
    }
    let largest = errors.iter().copied().fold(0.0, f64::max);
    Ok(Errors {
        base_ns,
        all_ns,
        speedup,
        error: largest,
        json: json.collect(),
        errors,
        line_errors,
    })
}

/// Records a program and returns its blocks that patterns name, in the order of allocation.
fn blocks(pagetax: &str, argv: &[&str]) -> Result<Vec<Named>> {
    let mut whatif = Command::new(pagetax);
    whatif.args(["whatif", "--by", "heap,stack,arena,mapping", "--runs", "1", "--json=by.json"]);
    shell::output(whatif.arg("--").args(argv))?;
    let document: Value = serde_json::from_str(&std::fs::read_to_string("by.json")?)?;
    let blocks = document["blocks"].as_array().context("the prediction has no blocks")?;
    let mut all = Vec::new();
    for block in blocks {
        let text = block["pattern"].as_str().unwrap_or_default();
        let pattern = AddressPattern::parse(text.as_bytes()).context("no pattern")?;
        if pattern.range.end == u64::MAX {
            continue;
        }
        all.push(Named {
            key: text.split('@').next().unwrap_or_default().into(),
            range: pattern.range,
            bytes: block["touched_bytes"].as_f64().context("no bytes")?,
            saved: block["saved_ns"].as_f64().context("no saving")?,
        });
    }
    all.sort_by_key(|block| (block.key.clone(), block.range.start));
    if all.len() < PIECES {
        bail!("only {} blocks of 2M have a pattern", all.len());
    }
    Ok(all)
}

/// Returns no memory, all memory, and then eight mosaics.
fn mosaics(blocks: &[Named]) -> Result<Vec<Mosaic>> {
    let piece_of = |at: usize| at * PIECES / blocks.len();
    let mut state = SEED;
    let mut random = |of_four: u64| -> [bool; PIECES] {
        [(); PIECES].map(|()| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % 4 < of_four
        })
    };
    let between = |from: usize, to: usize| -> [bool; PIECES] {
        std::array::from_fn(|piece| (from..to).contains(&piece))
    };
    let choices = [
        ("nothing".to_string(), between(0, 0)),
        ("all".into(), between(0, PIECES)),
        ("first quarter".into(), between(0, 4)),
        ("first half".into(), between(0, 8)),
        ("first three quarters".into(), between(0, 12)),
        ("last quarter".into(), between(12, 16)),
        ("last half".into(), between(8, 16)),
        ("a random quarter".into(), random(1)),
        ("a random half".into(), random(2)),
        ("three random quarters".into(), random(3)),
    ];
    let total = |of: fn(&Named) -> f64| blocks.iter().map(of).sum::<f64>();
    let (bytes, saved) = (total(|block| block.bytes), total(|block| block.saved));
    let mosaic = |(name, pieces): (String, [bool; PIECES])| {
        let chosen: Vec<&Named> = blocks
            .iter()
            .enumerate()
            .filter(|(at, _)| pieces[piece_of(*at)])
            .map(|(_, block)| block)
            .collect();
        let share = |of: fn(&Named) -> f64, all: f64| {
            chosen.iter().map(|block| of(block)).sum::<f64>() / all
        };
        Mosaic {
            name,
            patterns: patterns(&chosen),
            memory_share: share(|block| block.bytes, bytes),
            gain_share: share(|block| block.saved, saved),
        }
    };
    Ok(choices.into_iter().map(mosaic).collect())
}

fn patterns(blocks: &[&Named]) -> String {
    let mut ranges: BTreeMap<&str, Vec<Range<u64>>> = BTreeMap::new();
    blocks.iter().for_each(|block| ranges.entry(&block.key).or_default().push(block.range.clone()));
    let of_key = |(key, ranges): (&&str, &Vec<Range<u64>>)| {
        let text = |range: Range<u64>| format!("{key}@{}-{}", range.start, range.end);
        merged(ranges, 0).into_iter().map(text).collect::<Vec<_>>()
    };
    let all: Vec<String> = ranges.iter().flat_map(of_key).collect();
    if all.is_empty() { "heap@0-0".into() } else { all.join(",") }
}

/// Returns the number of rounds that count, if one takes so long.
fn rounds_of(round: Duration) -> usize {
    let fitting = ROUNDS_FOR.as_secs_f64() / round.as_secs_f64().max(1e-3);
    (fitting as usize).clamp(ROUNDS.0, ROUNDS.1)
}

/// Runs the program with each mosaic, in turns, and returns CPU times by mosaic at the machine's mean speed.
fn measured(pagetax: &str, argv: &[&str], mosaics: &[Mosaic]) -> Result<Vec<Vec<u64>>> {
    let system = PageSettings::host();
    let conditions = Conditions { system: &system, tunables: None, has_code: false };
    let argv = argv.iter().map(Into::into).collect();
    let mut launch = TrialCommand { argv, has_probe: true, ..TrialCommand::default() };
    let recipe = |mosaic: &Mosaic| {
        let recipe = Recipe::new(Arc::new(Only(mosaic.patterns.clone())), &conditions);
        let unavailable = |unavailable: Unavailable| anyhow::anyhow!(unavailable.why);
        Ok(recipe.map_err(unavailable)?.through(pagetax))
    };
    let recipes: Vec<Recipe> = mosaics.iter().map(recipe).collect::<Result<_>>()?;
    let mut runs = vec![Vec::new(); mosaics.len()];
    let (mut round, mut round_time) = (0, Duration::ZERO);
    while round <= rounds_of(round_time) {
        let begun = Instant::now();
        for turn in 0..mosaics.len() {
            let at = (turn + round) % mosaics.len();
            let finished = trial::run(&launch, &recipes[at], &Default::default(), None)?;
            if !finished.exit.success() {
                bail!("{}: {}", mosaics[at].name, finished.exit);
            }
            launch.learn(&finished);
            // The first round warms caches.
            if round > 0 {
                runs[at].push(finished);
            }
        }
        (round, round_time) = (round + 1, begun.elapsed());
    }
    let trials = recipes.iter().zip(&runs).map(|(recipe, runs)| trial::trial_of(recipe, runs));
    let mut trials: Vec<Trial> = trials.collect();
    compare_trials(&mut trials, Stopping::Fixed, Basis::Cpu);
    Ok(trials.iter().map(|trial| Basis::Cpu.times_ns(trial)).collect())
}
