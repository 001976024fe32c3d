//! Network memory beside its floor (a bare userfaultfd handler and a bare TCP server) and its peers (a
//! swap file and zram under the same limit), all in one run. Parts: `region`, and each program.
//!
//! Servers, handler and program share one CPU for latencies, as waking another CPU costs more than the
//! whole service. Rates are those of a program that keeps to one CPU while all else may run anywhere: a
//! scheduler that is left alone moves the program to an idle CPU each time that it got a page. The table
//! says where each row ran.

use super::remote_programs;
use super::serve::Server;
use super::swap::{Limited, Swap};
use super::{Outcome, median, number, pagetax};
use crate::at_end::AtEnd;
use crate::shell;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

const FLOOR_C: &str = "xtask/src/bench/remote_floor.c";
const TOUCH: &str = "target/release/examples/touch";
/// Of each server.
const MEMORY: &str = "4G";
const ANYWHERE: &str = "127.0.0.1:0";
/// Of the floor and of cold page-ins, in turns.
const ROUNDS: usize = 5;
/// Of a program on one CPU, each with a fresh server.
const RATE_ROUNDS: usize = 3;
/// Of a run of `touch`.
const FIGURES: [&str; 5] = [
    "fill_pages_per_s",
    "sequential_pages_per_s",
    "rewrite_faults_per_s",
    "rewrite_p50_ns",
    "rewrite_p99_ns",
];
const MIB_BYTES: f64 = (1 << 20) as f64;
const REGION: &str = "region";
const MIB: &str = "1024";
const RESIDENT_MIB: u64 = 256;
/// Rows, and what they say of what is promised.
#[derive(Default)]
pub struct Findings {
    /// Columns: what, where, and three figures.
    pub rows: Vec<Vec<String>>,
    /// By row.
    pub json: Vec<Value>,
    /// Promises and whether they hold.
    pub promises: Vec<(String, bool)>,
}

impl Findings {
    /// Adds a row.
    pub fn row(&mut self, cells: &[&str], json: Value) {
        self.rows.push(cells.iter().map(|cell| cell.to_string()).collect());
        self.json.push(json);
    }

    /// Adds what is promised of a figure.
    pub fn promise(&mut self, what: &str, value: f64, limit: f64, at_most: bool) {
        let holds = if at_most { value <= limit } else { value >= limit };
        let sign = if at_most { "≤" } else { "≥" };
        let verdict = if holds { "" } else { " (not reached)" };
        self.promises.push((format!("{what} {value:.2} {sign} {limit}{verdict}"), holds));
    }
}

pub fn run(parts: &[String]) -> Result<Outcome> {
    let known: Vec<&str> = [REGION].into_iter().chain(remote_programs::names()).collect();
    if let Some(unknown) = parts.iter().find(|part| !known.contains(&part.as_str())) {
        bail!("no part is called `{unknown}`; there are {}", known.join(", "));
    }
    let asked = |name: &str| parts.is_empty() || parts.iter().any(|part| part == name);
    let pagetax = pagetax()?;
    let packages = ["--package", "pagetax-remote", "--package", "pagetax-remote-preload"];
    let targets = ["--lib", "--example", "touch"];
    shell::cargo(&[&["build", "--quiet", "--release"][..], &packages, &targets].concat())?;
    let mut findings = Findings::default();
    let folder = tempfile::tempdir_in("target")?;
    // A swap file in it can be removed when it is none any more.
    let place = folder.path().display();
    let remove =
        format!("for i in $(seq 100); do rm -rf {place} 2> /dev/null && exit; sleep 0.1; done");
    let _folder = AtEnd::run(&format!("{remove}; exit 1"))?;
    if asked(REGION) {
        latencies(&mut findings, &pagetax, folder.path())?;
        throughput(&mut findings, &pagetax, folder.path())?;
    }
    let programs: Vec<&str> =
        known.into_iter().filter(|name| *name != REGION && asked(name)).collect();
    if !programs.is_empty() {
        remote_programs::run(&mut findings, &pagetax, folder.path(), &programs)?;
    }
    let holds = findings.promises.iter().all(|(_, holds)| *holds);
    let promises: Vec<String> = findings.promises.into_iter().map(|(text, _)| text).collect();
    Ok(Outcome {
        headings: vec!["what", "where", "", "", ""],
        rows: findings.rows,
        json: json!(findings.json),
        promise: (promises.join("; "), holds),
    })
}

/// For two copies.
pub fn two_servers(pagetax: &str) -> Result<[Server; 2]> {
    let start = || Server::start(pagetax, MEMORY, ANYWHERE);
    Ok([start()?, start()?])
}

/// Runs a command that prints one line of JSON.
fn measure(command: &mut Command) -> Result<Value> {
    Ok(serde_json::from_str(shell::output(command.stdin(Stdio::null()))?.trim())?)
}

fn us(ns: f64) -> String {
    format!("{:.1} µs", ns / 1000.0)
}

fn thousand(rate: f64) -> String {
    format!("{:.0}k/s", rate / 1000.0)
}

/// Cold page-ins beside the floor, in turns, all on one CPU.
fn latencies(findings: &mut Findings, pagetax: &str, folder: &Path) -> Result<()> {
    let floor = folder.join("floor");
    let mut cc = Command::new("cc");
    shell::succeed(cc.args(["-O2", "-pthread", FLOOR_C, "-o"]).arg(&floor))?;
    let servers = two_servers(pagetax)?;
    servers.iter().try_for_each(|server| server.pin("0"))?;
    let both = format!("{},{}", servers[0].address, servers[1].address);
    let mut ratios = Vec::new();
    let (mut floors, mut colds) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let text = shell::output(Command::new("taskset").args(["-c", "0"]).arg(&floor))?;
        let bare: Vec<f64> = text.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        let mut touch = Command::new("taskset");
        let cold = measure(touch.args(["-c", "0", TOUCH, "cold", "64", &both, "2"]))?;
        let cold = [number(&cold, "/p50_ns")?, number(&cold, "/p99_ns")?];
        ratios.push(cold[0] / bare[0]);
        floors.push([bare[0], bare[1]]);
        colds.push(cold);
    }
    for (name, all) in [("floor", &floors), ("cold page-in, 2 copies", &colds)] {
        let [p50, p99] = [0, 1].map(|at| median(all.iter().map(|one| one[at])));
        let cells = [name, "one CPU", &format!("p50 {}", us(p50)), &format!("p99 {}", us(p99))];
        findings.row(&cells, json!({"what": name, "p50_p99_ns": all}));
    }
    findings.promise("cold page-in ÷ floor", median(ratios), 1.10, true);
    let mut touch = Command::new("taskset");
    let resident = RESIDENT_MIB.to_string();
    let paged = measure(touch.args(["-c", "0", TOUCH, "paged", MIB, &resident, &both, "2"]))?;
    row_of(findings, "pagetax, 2 copies", "one CPU", &paged)?;
    let floor = median(floors.iter().map(|one| one[0]));
    findings.promise("rewrite p50 ÷ floor", number(&paged, "/rewrite_p50_ns")? / floor, 1.15, true);
    Ok(())
}

/// Runs it to its end, and looks what its pages cost the server while they are there.
fn with_overheads(
    findings: &mut Findings,
    pagetax: &str,
    touch: &mut Command,
    server: &Server,
) -> Result<Value> {
    let before = server.resident_bytes()? as f64 / MIB_BYTES;
    let mut child = touch.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut line = String::new();
    BufReader::new(child.stdout.take().context("no output")?).read_line(&mut line)?;
    let seen = shell::output(Command::new(pagetax).args([
        "servers",
        "--json",
        "--servers",
        &server.address,
    ]))?;
    let seen: Value = serde_json::from_str(&seen)?;
    let held = number(&seen, "/servers/0/report/pages_held")? / 256.0;
    let taken = server.resident_bytes()? as f64 / MIB_BYTES - before;
    drop(child.stdin.take());
    child.wait()?;
    let result: Value = serde_json::from_str(line.trim())?;
    let own = number(&result, "/own_bytes")? / MIB_BYTES;
    let (client, server) = (own / MIB.parse::<f64>()? * 100.0, (taken / held - 1.0) * 100.0);
    let cells = [
        "memory beside pages",
        "",
        &format!("client {client:.2} %"),
        &format!("server {server:.2} %"),
    ];
    findings.row(
        &cells,
        json!({"what": "overheads", "client_percent": client, "server_percent": server}),
    );
    findings.promise("client's memory, % of the region", client, 0.5, true);
    findings.promise("server's memory, % over pages held", server, 3.0, true);
    Ok(result)
}

/// Of several runs, each figure's median, and all runs.
fn medians(runs: &[Value]) -> Result<Value> {
    let median_of = |key: &str| -> Result<f64> {
        let values = runs.iter().map(|run| number(run, &format!("/{key}")));
        Ok(median(values.collect::<Result<Vec<_>>>()?))
    };
    let mut all = json!({"runs": runs});
    for key in FIGURES {
        all[key] = json!(median_of(key)?);
    }
    Ok(all)
}

/// The same accesses in a region, and in plain memory of a cgroup with swap on disk and on zram.
fn throughput(findings: &mut Findings, pagetax: &str, folder: &Path) -> Result<()> {
    let resident = RESIDENT_MIB.to_string();
    let server = Server::start(pagetax, MEMORY, ANYWHERE)?;
    let mut touch = Command::new(TOUCH);
    let touch = touch.args(["paged", MIB, &resident, &server.address, "1"]);
    let one = with_overheads(findings, pagetax, touch, &server)?;
    row_of(findings, "pagetax, 1 copy", "any CPU", &one)?;
    drop(server);
    let one = (0..RATE_ROUNDS).map(|_| {
        let server = Server::start(pagetax, MEMORY, ANYWHERE)?;
        measure(Command::new(TOUCH).args(["paged", MIB, &resident, &server.address, "1", "0"]))
    });
    let one = medians(&one.collect::<Result<Vec<_>>>()?)?;
    row_of(findings, "pagetax, 1 copy", "program on CPU 0", &one)?;
    let disk = peer(findings, "swap file", Swap::file(&folder.join("swap"), 2048)?)?;
    let zram = peer(findings, "zram", Swap::zram(2048)?)?;
    let rate = |result: &Value| number(result, "/rewrite_faults_per_s");
    findings.promise("rewrite faults/s", rate(&one)?, 80_000.0, false);
    findings.promise("rewrite p99 µs", number(&one, "/rewrite_p99_ns")? / 1000.0, 40.0, true);
    findings.promise("rewrite ÷ swap file", rate(&one)? / rate(&disk)?, 2.5, false);
    findings.promise("rewrite ÷ zram", rate(&one)? / rate(&zram)?, 0.7, false);
    let sequential = number(&one, "/sequential_pages_per_s")?;
    findings.promise("sequential pages/s", sequential, 350_000.0, false);
    findings.promise("fill pages/s", number(&one, "/fill_pages_per_s")?, 250_000.0, false);
    let published =
        ["report 004 (2003)", "2 servers", "1.0–1.8k/s", "3.7k/s", "1.3k/s, 230–300 µs"];
    findings.row(&published, json!({"what": "report 004"}));
    Ok(())
}

fn peer(findings: &mut Findings, name: &str, swap: Swap) -> Result<Value> {
    let limited = Limited::new(RESIDENT_MIB)?;
    let result = measure(
        Command::new("sh").args(["-c", &format!("{} {TOUCH} plain {MIB}", limited.shell())]),
    )?;
    drop(limited);
    drop(swap);
    row_of(findings, name, "any CPU", &result)?;
    Ok(result)
}

fn row_of(findings: &mut Findings, name: &str, place: &str, result: &Value) -> Result<()> {
    let get = |key: &str| number(result, &format!("/{key}"));
    let cells = [
        format!("sequential {}", thousand(get("sequential_pages_per_s")?)),
        format!("fill {}", thousand(get("fill_pages_per_s")?)),
        format!(
            "rewrite {}, p50 {}, p99 {}",
            thousand(get("rewrite_faults_per_s")?),
            us(get("rewrite_p50_ns")?),
            us(get("rewrite_p99_ns")?)
        ),
    ];
    let cells = [name, place, &cells[0], &cells[1], &cells[2]];
    findings.row(&cells, json!({"what": name, "where": place, "result": result}));
    Ok(())
}
