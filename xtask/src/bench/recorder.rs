//! The slow-down of a program that is recorded whole by `pagetax trapstat` with Valgrind's engine. Valgrind
//! without a tool (nulgrind, its translation alone) and cachegrind are compared with it, each as a ratio to
//! the bare program. All of them take turns in each round.
//!
//! DynamoRIO is missing: Debian has no package of it. Sampled recordings have their own benchmark
//! (`sampling`). Each program has rounds for its part of the remaining time, and at least one. Its row is
//! printed when it is complete.

use super::{Outcome, median, pagetax};
use crate::shell;
use anyhow::{Context, Result, bail};
use pagetax_core::stats::quantiles;
use serde_json::json;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// For all programs together, where a round of each takes no longer.
const BUDGET: Duration = Duration::from_secs(330);
const ROUNDS_MAX: usize = 5;
/// At most this part of cachegrind's slow-down is promised.
const LIMIT: f64 = 0.5;

/// Name, required programs, and script; `TOOL` stands before the measured command.
const PROGRAMS: &[(&str, &str, &str)] = &[
    ("sort", "sort", "LC_ALL=C TOOL sort -S 1G --parallel=1 numbers > out"),
    ("sort, 4 threads", "sort", "LC_ALL=C TOOL sort -S 1G --parallel=4 numbers > out"),
    (
        "python3",
        "python3",
        "TOOL /usr/bin/python3 -c 'd = {i: str(i) for i in range(120000)}; print(sum(len(d[k * 7919 % 120000]) \
         for k in range(2000000)))' > out",
    ),
    (
        "sqlite3",
        "sqlite3",
        "TOOL sqlite3 :memory: 'CREATE TABLE t(a); WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT \
         n+1 FROM c LIMIT 200000) INSERT INTO t SELECT n*7919%100003 FROM c; CREATE INDEX i ON t(a); \
         SELECT count(*) FROM t x JOIN t y ON x.a = y.a;' > out",
    ),
    ("cc1", "gcc", "TOOL $(gcc -print-prog-name=cc1) -quiet -O2 functions.c -o /dev/null"),
    (
        "redis-server",
        "redis-server",
        "TOOL redis-server --port 0 --unixsocket socket --save '' > out & until redis-cli -s socket \
         ping 2> err | grep -q PONG; do sleep 0.01; done; redis-benchmark -s socket -t set,get -n \
         50000 -r 100000 -q > out2; redis-cli -s socket shutdown nosave; wait",
    ),
    ("gather, 4 threads", "cc", "TOOL ./threads > out"),
];

/// Four threads that each read at random from memory of their own, then from each other's.
const THREADS_C: &str = "xtask/src/bench/recorder_threads.c";

pub fn run(parts: &[String]) -> Result<Outcome> {
    let pagetax = std::fs::canonicalize(pagetax()?)?;
    let folder = tempfile::tempdir()?;
    make_inputs(folder.path())?;
    let whole = "trapstat --backend record --engine valgrind -o tables --";
    let tools = [
        ("native", String::new()),
        ("nulgrind", "valgrind --tool=none -q".into()),
        ("cachegrind", "valgrind --tool=cachegrind --cachegrind-out-file=/dev/null -q".into()),
        ("valgrind", format!("{} {whole}", pagetax.display())),
    ];
    let (mut rows, mut results, mut holds) = (Vec::new(), Vec::new(), true);
    let programs = asked(parts)?;
    let budget = BUDGET * programs.len() as u32 / PROGRAMS.len() as u32;
    let start = Instant::now();
    for (nth, (name, needs, script)) in programs.iter().enumerate() {
        let scripts = tools.each_ref().map(|(_, tool)| script.replace("TOOL", tool));
        let left = budget.saturating_sub(start.elapsed());
        let mut row = vec![name.to_string()];
        if shell::has(needs) && shell::has("valgrind") {
            let times = rounds(&scripts, folder.path(), left / (programs.len() - nth) as u32)?;
            let slower = times.each_ref().map(|tool| ratios(tool, &times[0]));
            let of_cachegrind = median(slower[3].clone()) / median(slower[2].clone());
            holds &= of_cachegrind <= LIMIT;
            row.push(format!("{:.2} s × {}", median(times[0].clone()), times[0].len()));
            row.extend(slower[1..].iter().map(|slower| spread(slower)));
            row.push(format!("{of_cachegrind:.2}"));
            results
                .push(json!({"program": name, "seconds": times, "of_cachegrind": of_cachegrind}));
        } else {
            row.push("not installed".into());
        }
        eprintln!("{}", row.join("  "));
        rows.push(row);
    }
    Ok(Outcome {
        headings: vec![
            "program",
            "native",
            "nulgrind",
            "cachegrind",
            "valgrind engine",
            "valgrind engine ÷ cachegrind",
        ],
        rows,
        json: json!(results),
        promise: (format!("at most {LIMIT} of cachegrind's slow-down on each"), holds),
    })
}

/// Returns the programs of these names, or all.
fn asked(parts: &[String]) -> Result<Vec<(&str, &str, &str)>> {
    let known = || PROGRAMS.iter().map(|(name, ..)| *name).collect::<Vec<_>>().join("; ");
    if let Some(wrong) = parts.iter().find(|part| PROGRAMS.iter().all(|(name, ..)| name != part)) {
        bail!("no program is called `{wrong}`; there are: {}", known());
    }
    let is_asked = |name: &str| parts.is_empty() || parts.iter().any(|part| part == name);
    Ok(PROGRAMS.iter().filter(|(name, ..)| is_asked(name)).copied().collect())
}

/// Seconds of each script in each round: as many rounds as the time is enough for.
fn rounds<const N: usize>(
    scripts: &[String; N],
    folder: &Path,
    time: Duration,
) -> Result<[Vec<f64>; N]> {
    let mut times = [const { Vec::new() }; N];
    let start = Instant::now();
    for round in 1..=ROUNDS_MAX as u32 {
        for (script, times) in scripts.iter().zip(&mut times) {
            times.push(seconds(script, folder)?);
        }
        if start.elapsed() * (round + 1) / round > time {
            break;
        }
    }
    Ok(times)
}

fn ratios(tool: &[f64], native: &[f64]) -> Vec<f64> {
    tool.iter().zip(native).map(|(tool, native)| tool / native).collect()
}

/// Writes random numbers to sort, functions to compile, and the program with threads.
fn make_inputs(folder: &Path) -> Result<()> {
    let mut rng = pagetax_core::access::Rng::new(1);
    let numbers: String = (0..1_000_000).map(|_| format!("{}\n", rng.below(1 << 30))).collect();
    std::fs::write(folder.join("numbers"), numbers)?;
    let function = |i: u32| {
        format!(
            "int f{i}(int a) {{ int s = {i}; for (int j = 0; j < a; j++) s += s % (j + {i} + 1); return s; }}\n"
        )
    };
    std::fs::write(folder.join("functions.c"), (0..80).map(function).collect::<String>())?;
    let program = folder.join("threads");
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-pthread", THREADS_C, "-o"]).arg(program);
    shell::succeed(&mut cc).context("install a C compiler: gcc")
}

fn seconds(script: &str, folder: &Path) -> Result<f64> {
    let mut sh = Command::new("sh");
    sh.args(["-c", script]).current_dir(folder).stderr(Stdio::null());
    let start = Instant::now();
    shell::succeed(&mut sh)?;
    Ok(start.elapsed().as_secs_f64())
}

/// Formats a ratio with its range, as in `12.3× (11.9–13.0)`.
fn spread(values: &[f64]) -> String {
    let [low, median, high] = quantiles(values, [0.0, 0.5, 1.0]);
    format!("{median:.1}× ({low:.1}–{high:.1})")
}
