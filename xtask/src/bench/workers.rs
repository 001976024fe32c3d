//! The page tables of workers that share memory: their bytes and the time of the faults that fill them, as
//! measured and as `pagetax hatstat` predicts them.

use super::Outcome;
use super::pages::Pool;
use crate::shell::{self, pagetax};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

const C_SOURCE: &str = "xtask/src/bench/workers.c";
const WORKERS: u64 = 64;
const MIB: u64 = 2048;
/// How the workers touch the memory, and on which pages.
const WAYS: [(&str, &str); 3] = [("read", "4K"), ("write", "4K"), ("read", "2M")];

/// Runs the benchmark.
pub fn run() -> Result<Outcome> {
    let folder = tempfile::tempdir()?;
    let program = folder.path().join("workers");
    shell::succeed(Command::new("cc").args(["-O1", C_SOURCE, "-o"]).arg(&program))
        .context("install gcc")?;
    shell::output(Command::new(pagetax()?).args(["calibrate", "--json"]))?;
    let (mut rows, mut results, mut fine) = (Vec::new(), Vec::new(), true);
    let mut foretold: Option<Value> = None;
    for (how, pages) in WAYS {
        let _pool = match pages {
            "2M" => Some(Pool::fill(2048, MIB / 2).context("no room for a pool of 2M pages")?),
            _ => None,
        };
        let seen = measure(&program, how, pages)?;
        let (table, time) = match pages {
            "2M" => (None, "huge_fault_ns"),
            _ => (Some("page_table_bytes"), "fault_ns"),
        };
        // The time on 2M pages is foretold from the workers on base pages.
        if pages == "4K" {
            foretold = seen.hatstat;
        }
        let foretold = foretold.as_ref();
        let bytes = table.and_then(|key| Some(bounds(foretold?, key)?.map(|x| x / 1048576.0)));
        let ns = foretold.and_then(|mapping| Some(bounds(mapping, time)?.map(|x| x / 1e9)));
        let held = |range: Option<[f64; 3]>, value: f64| match range {
            Some([_, low, high]) => low <= value && value <= high,
            None => false,
        };
        let (mib, seconds) = (seen.table_bytes / 1048576.0, seen.fault_ns / 1e9);
        fine &= (table.is_none() || held(bytes, mib)) && held(ns, seconds);
        let range = |range: Option<[f64; 3]>, unit: &str| match range {
            Some([value, low, high]) => format!("{value:.1} {unit} ({low:.1}–{high:.1})"),
            None => "–".into(),
        };
        rows.push(vec![
            format!("{how}, {pages}"),
            format!("{mib:.1} MiB"),
            range(bytes, "MiB"),
            format!("{seconds:.2} s"),
            range(ns, "s"),
        ]);
        results.push(json!({ "how": how, "pages": pages, "table_bytes": seen.table_bytes,
            "fault_ns": seen.fault_ns, "hatstat": foretold }));
    }
    Ok(Outcome {
        headings: vec!["touched", "page tables", "hatstat", "time of faults", "hatstat"],
        rows,
        json: json!(results),
        promise: ("the bounds of hatstat hold what was measured".into(), fine),
    })
}

/// Returns a reading's value and bounds.
fn bounds(mapping: &Value, key: &str) -> Option<[f64; 3]> {
    let of = |bound: &str| mapping[key][bound].as_f64();
    Some([of("value")?, of("low")?, of("high")?])
}

struct WorkersSeen {
    /// The page tables of all workers, less those of as many processes that touch nothing.
    table_bytes: f64,
    fault_ns: f64,
    /// The mapping, as hatstat lists it.
    hatstat: Option<Value>,
}

fn measure(program: &Path, how: &str, pages: &str) -> Result<WorkersSeen> {
    let with = |mib: u64| -> Result<WorkersSeen> {
        let mut command = Command::new(program);
        command.args([&WORKERS.to_string(), &mib.to_string(), how, pages]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut said = BufReader::new(child.stdout.take().context("no output")?).lines();
        let pids = said.next().transpose()?.context("workers said nothing")?;
        let fault_ns = said.next().transpose()?.context("workers gave no time")?.parse()?;
        let tables = pids.split_whitespace().map(table_bytes).sum::<Result<f64>>()?;
        let json = shell::output(Command::new(pagetax()?).args(["hatstat", "--json"]))?;
        let stat: Value = serde_json::from_str(&json)?;
        let ours = |one: &&Value| one["name"].as_str().is_some_and(|name| name.contains("workers"));
        // A list of nothing is left out.
        let hatstat = stat["shared"].as_array().and_then(|all| all.iter().find(ours)).cloned();
        drop(child.stdin.take());
        ensure!(child.wait()?.success(), "{C_SOURCE} fails");
        Ok(WorkersSeen { table_bytes: tables, fault_ns, hatstat })
    };
    // Two MiB are one table, or none.
    let (small, whole) = (with(2)?, with(MIB)?);
    Ok(WorkersSeen { table_bytes: whole.table_bytes - small.table_bytes, ..whole })
}

/// Returns the bytes of a process's page tables.
fn table_bytes(pid: &str) -> Result<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmPTE:")).context("no VmPTE")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<f64>()? * 1024.0)
}
