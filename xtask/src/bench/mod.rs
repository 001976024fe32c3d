//! `cargo xtask bench NAME`: the figures of docs/benchmarks.md, one command each.
//!
//! A benchmark prints a table for people and one line of JSON for scripts, and `--write` puts the table into
//! docs/. It fails if its figure is worse than its limit. To add one: a file here, and a row in [`BENCHES`].

mod bills;
mod collection;
mod culprits;
mod diagnose;
mod engine;
mod faults;
mod link;
mod live;
mod mosaics;
mod noise;
mod null;
mod page;
mod pages;
mod parts;
mod preload;
mod programs;
mod ranking;
mod reclaim;
mod recorder;
mod redis;
mod remote;
mod remote_prediction;
mod remote_programs;
mod reproduce;
mod sampling;
pub mod serve;
mod server;
mod stalls;
mod stat;
mod states;
mod stops;
mod swap;
mod unexplained;
mod verdict_time;
mod verdicts;
mod whatif;
mod whatif_sample;
mod workers;

use crate::book;
use crate::shell::{self, pagetax};
use anyhow::{Context, Result, bail};
use pagetax_core::stats::quantiles;
use serde_json::{Value, json};
use std::process::Command;

/// A named benchmark.
struct Bench {
    name: &'static str,
    what: &'static str,
    /// Runs the benchmark, or the named parts of it.
    run: fn(&[String]) -> Result<Outcome>,
}

const BENCHES: &[Bench] = &[
    Bench {
        name: "ci",
        what: "growth found and false alarms of `pagetax ci` beside a compiler; part: runs of unchanged programs",
        run: bills::run,
    },
    Bench {
        name: "diagnose",
        what: "speed-ups by diagnose beside those of its line by hand, on real programs; parts: busy (all CPUs) programs",
        run: diagnose::run,
    },
    Bench {
        name: "collection",
        what: "wall time of real programs under collection against that of bare ones (limit: 2 %)",
        run: collection::run,
    },
    Bench {
        name: "culprits",
        what: "the process and cgroup that stat names for kswapd in a guest of 1 GB (limit: 9 of 10)",
        run: |_| culprits::run(),
    },
    Bench {
        name: "link",
        what: "page-ins over a link with a rate and a delay beside a ping-pong (limit: 3 times its p99)",
        run: |_| link::run(),
    },
    Bench {
        name: "anon-fault",
        what: "anonymous faults of a job against those of a bare C loop (limit: 3 %)",
        run: |_| faults::against_c(),
    },
    Bench {
        name: "fault-latency",
        what: "what histograms of fault latencies cost for each fault of a run (limit: 250 ns)",
        run: |_| faults::latency_cost(),
    },
    Bench {
        name: "noise",
        what: "how much equal runs differ, with and without the speed probe (limit: half is left)",
        run: |_| noise::run(),
    },
    Bench {
        name: "null",
        what: "what the harness itself costs for each operation (limit: 2 ns)",
        run: |_| null::run(),
    },
    Bench {
        name: "reclaim",
        what: "mlock-cycle under a memory cgroup, beside Linux 2.4.9 (as root); part: guest, one of 1 GB",
        run: reclaim::run,
    },
    Bench {
        name: "recorder",
        what: "slow-down of programs under trapstat, beside nulgrind and cachegrind (limit: half)",
        run: recorder::run,
    },
    Bench {
        name: "redis",
        what: "p99 and throughput of Redis around a fork, on base and on large pages (limit: 5 of 5 alike)",
        run: |_| redis::run(),
    },
    Bench {
        name: "page",
        what: "how long the page of a large document takes to open in a browser (limit: 1 s)",
        run: |_| page::run(),
    },
    Bench {
        name: "page-sizes",
        what: "time on base pages ÷ time on large ones, by each way to get them (as root: pools too)",
        run: |_| pages::run(),
    },
    Bench {
        name: "parts",
        what: "the part of memory that deserves large pages, as diagnose --parts finds it (limit: 12 runs)",
        run: |_| parts::run(),
    },
    Bench {
        name: "preload",
        what: "what the preload library costs `true`, and each allocation (limit: 1 ms)",
        run: |_| preload::run(),
    },
    Bench {
        name: "ranking",
        what: "the first process of `diagnose --all` beside the one that gains most, in mixes; parts: seeds",
        run: ranking::run,
    },
    Bench {
        name: "server",
        what: "a memory server: bytes over the pages held (limit: 3 %), pages a second, CPU time for each",
        run: |_| server::run(),
    },
    Bench {
        name: "live",
        what: "speed-ups of diagnose -p beside those of a restart (limit: 9 of 10 within the interval); parts: gather …",
        run: live::run,
    },
    Bench {
        name: "mosaics",
        what: "times with parts of memory on 2M pages, as predicted and as measured; parts: programs",
        run: mosaics::run,
    },
    Bench {
        name: "stalls",
        what: "lost and wrong pages and longest waits while memory servers fail (50 ms after a kill); parts: killed=5 …",
        run: stalls::run,
    },
    Bench {
        name: "stat",
        what: "times by cause of stat beside direct measures (as root; limit: 15 %); parts: faults reclaim …",
        run: stat::run,
    },
    Bench {
        name: "stops",
        what: "how long a threaded process stands still when ppgsz traces it (limit: 20 ms)",
        run: |_| stops::run(),
    },
    Bench {
        name: "remote",
        what: "network memory beside its floor, a swap file and zram, also under real programs (as root)",
        run: remote::run,
    },
    Bench {
        name: "reproduce",
        what: "what all published figures take on one core (limit: 2 s of user time)",
        run: |_| reproduce::run(),
    },
    Bench {
        name: "sampling",
        what: "slow-down and error of native sampling on long programs (limits: 2.5 times, 5 %); part: program",
        run: sampling::run,
    },
    Bench {
        name: "states",
        what: "speed-ups by diagnose --when in each state of memory (as root); parts: programs",
        run: states::run,
    },
    Bench {
        name: "verdict-time",
        what: "time to the verdict of diagnose (limit: 20 s where the gain is clear); PAGETAX_BEFORE: another build",
        run: verdict_time::run,
    },
    Bench {
        name: "verdicts",
        what: "false and missed verdicts of diagnose beside a compiler; goes on where it stopped; part: number of runs",
        run: verdicts::run,
    },
    Bench {
        name: "whatif",
        what: "speed-ups that whatif predicts beside those of trials (limit: 8 of 10 within 10 %)",
        run: whatif::run,
    },
    Bench {
        name: "whatif-sample",
        what: "time and error of whatif --sample on programs of 10 s (limit: 60 s)",
        run: whatif_sample::run,
    },
    Bench {
        name: "workers",
        what: "page tables of 64 workers over 2 GiB of shared memory, as measured and as hatstat predicts them",
        run: |_| workers::run(),
    },
    Bench {
        name: "unexplained",
        what: "share of CPU and wall time that the budget cannot place (limit: 10 %)",
        run: |_| unexplained::run(),
    },
];

/// The result of a benchmark.
pub struct Outcome {
    /// The headings of the columns of `rows`.
    pub headings: Vec<&'static str>,
    /// The cells as text, by row.
    pub rows: Vec<Vec<String>>,
    /// The results as JSON, for scripts.
    pub json: Value,
    /// The promise, and true if it holds.
    pub promise: (String, bool),
}

/// Runs a benchmark, or lists all. `is_written` puts its table into its block of docs/.
pub fn run(name: Option<&str>, parts: &[String], is_written: bool) -> Result<()> {
    let Some(name) = name else {
        BENCHES.iter().for_each(|bench| println!("{:<14} {}", bench.name, bench.what));
        return Ok(());
    };
    let known = || BENCHES.iter().map(|bench| bench.name).collect::<Vec<_>>().join(", ");
    let bench = BENCHES
        .iter()
        .find(|bench| bench.name == name)
        .with_context(|| format!("no benchmark is called `{name}`; there are {}", known()))?;
    let command = format!("cargo xtask bench {}", [&[name.to_string()], parts].concat().join(" "));
    if is_written && !book::has(&command)? {
        bail!("no page of docs/ has a block for `{command}`; run it without --write");
    }
    let outcome = (bench.run)(parts)?;
    print_table(&outcome.headings, &outcome.rows);
    let (promise, holds) = &outcome.promise;
    let verdict = format!("{}: {promise}", if *holds { "holds" } else { "FAILS" });
    println!("{verdict}");
    if is_written {
        let table = book::table(&outcome.headings, &outcome.rows);
        book::write(&command, &format!("{}.\n\n{table}\n{verdict}", book::machine()?))?;
    }
    println!("{}", json!({"bench": name, "holds": holds, "result": outcome.json}));
    if !holds {
        bail!("benchmark {name} fails its limit: {promise}");
    }
    Ok(())
}

fn print_table(headings: &[&str], rows: &[Vec<String>]) {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain([headings[column].chars().count()]).max().unwrap_or(0)
    };
    let print = |cells: &[String]| {
        let line = cells.iter().enumerate().map(|(i, cell)| format!("{cell:<w$}", w = width(i)));
        println!("{}", line.collect::<Vec<_>>().join("  ").trim_end());
    };
    print(&headings.iter().map(|heading| heading.to_string()).collect::<Vec<_>>());
    rows.iter().for_each(|row| print(row));
}

/// Returns the JSON report of `pagetax run` with these arguments.
pub fn report(pagetax: &str, args: &[&str]) -> Result<Value> {
    let text = shell::output(Command::new(pagetax).arg("run").args(args).args(["--json"]))?;
    Ok(serde_json::from_str(&text)?)
}

/// Returns a number of a report, by JSON pointer.
pub fn number(report: &Value, pointer: &str) -> Result<f64> {
    let found = report.pointer(pointer).and_then(Value::as_f64);
    found.with_context(|| format!("the report has no number at {pointer}"))
}

/// Returns the median by core's rule.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let values: Vec<f64> = values.into_iter().collect();
    quantiles(&values, [0.5])[0]
}
