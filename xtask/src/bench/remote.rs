//! Network memory, its floor (a bare userfaultfd handler and a bare TCP server) and its peers (a
//! swap file and zram under the same limit), all in one run. Parts: `region`, `any-cpu`, `prediction`, and
//! each program.
//!
//! For latencies, servers, handler and program share one CPU, because waking another CPU costs more than the
//! whole service. Rates have two places: a program pinned to one CPU while the rest may run anywhere, and
//! nothing pinned. In the second, the scheduler moves the program to an idle CPU after each page. Region and
//! peers run in both places. The table shows the place of each row.

use super::serve::Server;
use super::swap::{KILLED, Swap, run_limited};
use super::{Outcome, median, number, pagetax};
use super::{remote_prediction, remote_programs};
use crate::at_end::AtEnd;
use crate::shell;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const FLOOR_C: &str = "xtask/src/bench/remote_floor.c";
const FLOOR_STREAM_C: &str = "xtask/src/bench/remote_floor_stream.c";
const FLOOR_THREADS_C: &str = "xtask/src/bench/remote_floor_threads.c";
/// The pager's checksum of a page, for the floors.
const PAGE_SUM: &str = "target/release/examples/libpage_sum.a";
pub const TOUCH: &str = "target/release/examples/touch";
/// The memory limit of each server.
const MEMORY: &str = "4G";
/// The variable by which `touch` chooses the thread that serves faults.
pub const SERVING: &str = "PAGETAX_REMOTE_SERVING";
const ANYWHERE: &str = "127.0.0.1:0";
/// Alternating rounds of the floor and of cold page-ins.
const ROUNDS: usize = 5;
/// Rounds of a program on one CPU, alternating with zram, each with a fresh server. Longer benches have one
/// round.
const RATE_ROUNDS: usize = 3;
/// The figures of a run of `touch`: rates, and times of the rewrites that faulted.
const FIGURES: [&str; 5] = [
    "fill_pages_per_s",
    "sequential_pages_per_s",
    "rewrite/faults_per_s",
    "rewrite/p50_ns",
    "rewrite/p99_ns",
];
const MIB_BYTES: f64 = (1 << 20) as f64;
const REGION: &str = "region";
/// The same accesses by a program that is not tied to a CPU.
const NOT_TIED: &str = "any-cpu";
/// Predictions of `pagetax remote --simulate`, and real counts.
const PREDICTION: &str = "prediction";
const MIB: &str = "1024";
const RESIDENT_MIB: u64 = 256;
/// The memory of the floor of rewrites, and what is resident of it, less the room that `touch` adds.
const FLOOR_MIB: &str = "256";
const FLOOR_RESIDENT_MIB: &str = "60";
/// Threads of the program that waits for several pages at a time.
const THREADS: usize = 8;
const SWAP_MIB: u64 = 2048;

/// The thread that serves faults (the pager's, or the program's own in place), and its suffix in names.
pub const SERVINGS: [(&str, &str); 2] = [("thread", ""), ("in-place", ", in place")];

/// A name and the CPU that the program is tied to, if it is; everything else may run anywhere.
type Place = (&'static str, Option<&'static str>);
const ANY_CPU: Place = ("any CPU", None);
/// The way whose idle CPUs halt, in names.
const NEVER_AWAKE: &str = ", --awake=never";
/// As taskset has it.
const ALL_CPUS: &str = "0-1023";
const PINNED: Place = ("program on CPU 0", Some("0"));

/// Rows, and the promises that they keep or break.
#[derive(Default)]
pub struct Findings {
    /// Columns: what, where, and three figures.
    pub rows: Vec<Vec<String>>,
    /// The results as JSON, by row.
    pub json: Vec<Value>,
    /// Promises and whether they hold.
    pub promises: Vec<(String, bool)>,
}

impl Findings {
    /// Adds a row to table and JSON.
    pub fn row(&mut self, cells: &[&str], json: Value) {
        self.rows.push(cells.iter().map(|cell| cell.to_string()).collect());
        self.json.push(json);
    }

    /// Adds the promise for a figure.
    pub fn promise(&mut self, what: &str, value: f64, limit: f64, at_most: bool) {
        let holds = if at_most { value <= limit } else { value >= limit };
        let sign = if at_most { "≤" } else { "≥" };
        let verdict = if holds { "" } else { " (not reached)" };
        self.promises.push((format!("{what} {value:.2} {sign} {limit}{verdict}"), holds));
    }

    /// Adds the promise for a missing figure.
    pub fn not_shown(&mut self, what: &str) {
        self.promises.push((format!("{what} missing (not reached)"), false));
    }
}

pub fn run(parts: &[String]) -> Result<Outcome> {
    let others = [REGION, NOT_TIED, PREDICTION];
    let known: Vec<&str> = others.into_iter().chain(remote_programs::names()).collect();
    if let Some(unknown) = parts.iter().find(|part| !known.contains(&part.as_str())) {
        bail!("no part is called `{unknown}`; there are {}", known.join(", "));
    }
    let asked = |name: &str| parts.is_empty() || parts.iter().any(|part| part == name);
    let pagetax = pagetax()?;
    build_touch()?;
    let mut findings = Findings::default();
    let folder = tempfile::tempdir_in("target")?;
    // A swap file in it can be removed when it is none any more.
    let place = folder.path().display();
    let remove =
        format!("for i in $(seq 100); do rm -rf {place} 2> /dev/null && exit; sleep 0.1; done");
    let _folder = AtEnd::run(&format!("{remove}; exit 1"))?;
    if asked(REGION) {
        let floor = latencies(&mut findings, &pagetax, folder.path())?;
        let rewriting = compiled(FLOOR_THREADS_C, &folder.path().join("floor-threads"))?;
        rewrites_on_one_cpu(&mut findings, &pagetax, &rewriting)?;
        throughput(&mut findings, &pagetax, folder.path(), floor, &rewriting)?;
    }
    if asked(NOT_TIED) {
        rates(&mut findings, &pagetax, folder.path(), ANY_CPU, 1, &mut || Ok(()))?;
        untied_beside_tied(&mut findings, &pagetax)?;
    }
    let programs: Vec<&str> = remote_programs::names().filter(|name| asked(name)).collect();
    if !programs.is_empty() {
        remote_programs::run(&mut findings, &pagetax, folder.path(), &programs)?;
    }
    if asked(PREDICTION) {
        remote_prediction::run(&mut findings, &pagetax, folder.path())?;
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

/// Builds `touch`, the preloaded library and the checksum for the floors.
pub fn build_touch() -> Result<()> {
    let packages = ["--package", "pagetax-remote", "--package", "pagetax-remote-preload"];
    let targets = ["--lib", "--example", "touch"];
    shell::cargo(&[&["build", "--quiet", "--release"][..], &packages, &targets].concat())?;
    let sum = ["-p", "pagetax-remote", "--example", "page_sum"];
    shell::cargo(&[&["build", "--quiet", "--release"][..], &sum].concat())
}

/// Starts two servers, for two copies.
pub fn two_servers(pagetax: &str) -> Result<[Server; 2]> {
    let start = || Server::start(pagetax, MEMORY, ANYWHERE);
    Ok([start()?, start()?])
}

/// Runs a command that prints one line of JSON.
pub fn measure(command: &mut Command) -> Result<Value> {
    Ok(serde_json::from_str(shell::output(command.stdin(Stdio::null()))?.trim())?)
}

pub fn us(ns: f64) -> String {
    format!("{:.1} µs", ns / 1000.0)
}

fn thousand(rate: f64) -> String {
    format!("{:.0}k/s", rate / 1000.0)
}

pub fn compiled(source: &str, program: &Path) -> Result<PathBuf> {
    let mut cc = Command::new("cc");
    shell::succeed(cc.args(["-O2", "-pthread", source, PAGE_SUM, "-lm", "-o"]).arg(program))?;
    Ok(program.to_path_buf())
}

/// Measures cold page-ins, served in each way, alternating with the floor, all on one CPU. Returns the
/// floor's median and 99th percentile.
fn latencies(findings: &mut Findings, pagetax: &str, folder: &Path) -> Result<[f64; 2]> {
    let floor = compiled(FLOOR_C, &folder.join("floor"))?;
    let servers = two_servers(pagetax)?;
    servers.iter().try_for_each(|server| server.pin("0"))?;
    let both = format!("{},{}", servers[0].address, servers[1].address);
    let (mut floors, mut colds) = (Vec::new(), [const { Vec::new() }; SERVINGS.len()]);
    for _ in 0..ROUNDS {
        let text = shell::output(Command::new("taskset").args(["-c", "0"]).arg(&floor))?;
        let bare: Vec<f64> = text.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        floors.push([bare[0], bare[1]]);
        for (colds, (serving, _)) in colds.iter_mut().zip(SERVINGS) {
            let mut touch = Command::new("taskset");
            touch.args(["-c", "0", TOUCH, "cold", "64", &both, "2"]).env(SERVING, serving);
            let cold = measure(&mut touch)?;
            colds.push([number(&cold, "/p50_ns")?, number(&cold, "/p99_ns")?]);
        }
    }
    let medians = |all: &[[f64; 2]]| [0, 1].map(|at| median(all.iter().map(|one| one[at])));
    let cold_rows = SERVINGS.map(|(_, how)| format!("cold page-in, 2 copies{how}"));
    let cold_rows = cold_rows.iter().map(String::as_str).zip(&colds);
    for (name, all) in [("floor", &floors)].into_iter().chain(cold_rows) {
        let [p50, p99] = medians(all);
        // One thread waits for one page at a time.
        let rate = format!("at most {}", thousand(1e9 / p50));
        let cells = [&format!("p50 {}", us(p50)), &format!("p99 {}", us(p99)), &rate];
        let cells = [name, "one CPU", cells[0], cells[1], cells[2]];
        findings.row(&cells, json!({"what": name, "p50_p99_ns": all}));
    }
    for (colds, (_, how)) in colds.iter().zip(SERVINGS) {
        let ratios = colds.iter().zip(&floors).map(|(cold, floor)| cold[0] / floor[0]);
        findings.promise(&format!("cold page-in ÷ floor{how}"), median(ratios), 1.10, true);
    }
    let (floor, resident) = (medians(&floors), RESIDENT_MIB.to_string());
    for (serving, how) in SERVINGS {
        let mut touch = Command::new("taskset");
        touch.args(["-c", "0", TOUCH, "paged", MIB, &resident, &both, "2"]).env(SERVING, serving);
        let paged = measure(&mut touch)?;
        row_of(findings, &format!("pagetax, 2 copies{how}"), "one CPU", &paged)?;
        let rewrite = number(&paged, "/rewrite/p50_ns")?;
        findings.promise(&format!("rewrite p50 ÷ floor{how}"), rewrite / floor[0], 1.15, true);
    }
    Ok(floor)
}

/// Measures rewrites by one thread, served in each way, alternating with a bare pager that also evicts. All
/// of it is on one CPU, the servers too.
fn rewrites_on_one_cpu(findings: &mut Findings, pagetax: &str, floor: &Path) -> Result<()> {
    let server = Server::start(pagetax, MEMORY, ANYWHERE)?;
    server.pin("0")?;
    let (mut floors, mut ours) = (Vec::new(), [const { Vec::new() }; SERVINGS.len()]);
    for _ in 0..ROUNDS {
        let text = shell::output(Command::new("taskset").args(["-c", "0"]).arg(floor).arg("1"))?;
        floors.push(text.trim().parse::<f64>()?);
        for (ours, (serving, _)) in ours.iter_mut().zip(SERVINGS) {
            let mut touch = Command::new("taskset");
            touch.args(["-c", "0", TOUCH, "threads", "1", FLOOR_MIB, FLOOR_RESIDENT_MIB]);
            let run = measure(touch.args([&server.address, "1"]).env(SERVING, serving))?;
            ours.push(number(&run, "/rewrite/faults_per_s")?);
        }
    }
    let names = SERVINGS.map(|(_, how)| format!("rewrite, 1 copy{how}"));
    let names = ["floor of rewrites"].into_iter().chain(names.iter().map(String::as_str));
    for (name, rates) in names.zip([&floors].into_iter().chain(&ours)) {
        let cell = format!("rewrite {}", thousand(median(rates.iter().copied())));
        let json = json!({"what": name, "where": "one CPU", "faults_per_s": rates});
        findings.row(&[name, "one CPU", "", "", &cell], json);
    }
    for (ours, (_, how)) in ours.iter().zip(SERVINGS) {
        let ratios = ours.iter().zip(&floors).map(|(ours, floor)| floor / ours);
        let what = format!("rewrite ÷ floor of rewrites{how}");
        findings.promise(&what, median(ratios), 1.15, true);
    }
    Ok(())
}

/// Measures the memory overhead of pages in a server and in its client.
fn overheads(findings: &mut Findings, pagetax: &str) -> Result<()> {
    let server = Server::start(pagetax, MEMORY, ANYWHERE)?;
    let before = server.resident_bytes()? as f64 / MIB_BYTES;
    let mut touch = paged(&server, PINNED, SERVINGS[0].0);
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
    Ok(())
}

/// Returns the median of each figure over several runs, and all runs.
fn medians(runs: &[Value]) -> Result<Value> {
    let median_of = |key: &str| -> Result<f64> {
        let values = runs.iter().map(|run| number(run, &format!("/{key}")));
        Ok(median(values.collect::<Result<Vec<_>>>()?))
    };
    let mut all = json!({"runs": runs});
    for key in FIGURES {
        let median = json!(median_of(key)?);
        match key.split_once('/') {
            Some((of, figure)) => all[of][figure] = median,
            None => all[key] = median,
        }
    }
    Ok(all)
}

/// Accesses to a region with one copy of each page.
fn paged(server: &Server, (_, cpu): Place, serving: &str) -> Command {
    let mut touch = Command::new(TOUCH);
    touch.args(["paged", MIB, &RESIDENT_MIB.to_string(), &server.address, "1"]).args(cpu);
    touch.env(SERVING, serving);
    touch
}

/// Runs the same in plain memory of a cgroup with swap. Returns `None` if the machine has no such cgroup.
fn plain(peer: &str, swap: Swap, (_, cpu): Place) -> Result<Option<Value>> {
    run_limited(peer, RESIDENT_MIB, swap, |limited| {
        let script = format!("{} {TOUCH} plain {MIB} {}", limited.shell(), cpu.unwrap_or_default());
        measure(Command::new("sh").args(["-c", &script]))
    })
}

/// Measures a region, served in each way, zram and a swap file, with the program in the same place,
/// alternating with `beside`. Returns the region's figures.
fn rates(
    findings: &mut Findings,
    pagetax: &str,
    folder: &Path,
    place: Place,
    rounds: usize,
    beside: &mut dyn FnMut() -> Result<()>,
) -> Result<[Value; SERVINGS.len()]> {
    let (mut ours, mut zram) = ([const { Vec::new() }; SERVINGS.len()], Some(Vec::new()));
    for _ in 0..rounds {
        beside()?;
        for (ours, (serving, _)) in ours.iter_mut().zip(SERVINGS) {
            let server = Server::start(pagetax, MEMORY, ANYWHERE)?;
            ours.push(measure(&mut paged(&server, place, serving))?);
        }
        if let Some(runs) = &mut zram {
            match plain("zram", Swap::zram(SWAP_MIB)?, place)? {
                Some(run) => runs.push(run),
                None => zram = None,
            }
        }
    }
    let [thread, in_place] = ours;
    let ours = [medians(&thread)?, medians(&in_place)?];
    let zram = zram.map(|runs| medians(&runs)).transpose()?;
    let disk = plain("swap file", Swap::file(&folder.join("swap"), SWAP_MIB)?, place)?;
    let rate = |result: &Value| number(result, "/rewrite/faults_per_s");
    for (ours, (_, how)) in ours.iter().zip(SERVINGS) {
        row_of(findings, &format!("pagetax, 1 copy{how}"), place.0, ours)?;
        for (peer, result, limit) in [("swap file", &disk, 2.5), ("zram", &zram, 0.7)] {
            let what = format!("rewrite ÷ {peer}, {}{how}", place.0);
            match result {
                Some(result) => findings.promise(&what, rate(ours)? / rate(result)?, limit, false),
                None => findings.not_shown(&what),
            }
        }
    }
    for (peer, result) in [("zram", &zram), ("swap file", &disk)] {
        match result {
            Some(result) => row_of(findings, peer, place.0, result)?,
            None => {
                let json = json!({"what": peer, "where": place.0, "missing": KILLED});
                findings.row(&[peer, place.0, &format!("missing ({KILLED})")], json);
            }
        }
    }
    Ok(ours)
}

/// Rewrites by several threads at once, whose faults are served together, and their floor, in turns. Returns
/// how many a second each.
fn rewrite_by_threads(
    findings: &mut Findings,
    pagetax: &str,
    floor: &Path,
    (place, cpu): Place,
) -> Result<[f64; 2]> {
    let (threads, resident) = (THREADS.to_string(), RESIDENT_MIB.to_string());
    let (mut runs, mut floors) = (Vec::new(), Vec::new());
    for _ in 0..RATE_ROUNDS {
        let tied = ["-c", cpu.unwrap_or(ALL_CPUS)];
        let rate = shell::output(Command::new("taskset").args(tied).arg(floor).arg(&threads))?;
        floors.push(rate.trim().parse::<f64>()?);
        let server = Server::start(pagetax, MEMORY, ANYWHERE)?;
        let mut touch = Command::new(TOUCH);
        touch.args(["threads", &threads, MIB, &resident, &server.address, "1"]).args(cpu);
        runs.push(measure(&mut touch)?);
    }
    let median_of = |key: &str| -> Result<f64> {
        let values = runs.iter().map(|run| number(run, key));
        Ok(median(values.collect::<Result<Vec<_>>>()?))
    };
    let (rate, least) = (median_of("/rewrite/faults_per_s")?, median(floors.iter().copied()));
    let name = format!("floor, {THREADS} threads");
    let cell = format!("rewrite {}", thousand(least));
    // All of it is tied, the server too.
    let floors_place = if cpu.is_some() { "one CPU" } else { place };
    findings.row(
        &[&name, floors_place, "", "", &cell],
        json!({"what": name, "where": floors_place, "threads": THREADS, "faults_per_s": floors}),
    );
    let name = format!("rewrite, {THREADS} threads, 1 copy");
    let times = [us(median_of("/rewrite/p50_ns")?), us(median_of("/rewrite/p99_ns")?)];
    let cell = format!("rewrite {}, p50 {}, p99 {}", thousand(rate), times[0], times[1]);
    findings.row(
        &[&name, place, "", "", &cell],
        json!({"what": name, "where": place, "threads": THREADS, "runs": runs}),
    );
    Ok([rate, least])
}

fn throughput(
    findings: &mut Findings,
    pagetax: &str,
    folder: &Path,
    floor: [f64; 2],
    rewriting: &Path,
) -> Result<()> {
    overheads(findings, pagetax)?;
    let floor_stream = compiled(FLOOR_STREAM_C, &folder.join("floor-stream"))?;
    let mut streams: Vec<f64> = Vec::new();
    let mut stream = || {
        let rate = shell::output(&mut Command::new(&floor_stream))?;
        streams.push(rate.trim().parse()?);
        Ok(())
    };
    let ours = rates(findings, pagetax, folder, PINNED, RATE_ROUNDS, &mut stream)?;
    let stream = median(streams.iter().copied());
    let cell = format!("sequential {}", thousand(stream));
    findings.row(
        &["floor, runs of 64", PINNED.0, &cell, "", ""],
        json!({"what": "floor, runs of 64", "where": PINNED.0, "pages_per_s": streams}),
    );
    let [least, tail] = floor;
    for place in [PINNED, ANY_CPU] {
        let [rate, least] = rewrite_by_threads(findings, pagetax, rewriting, place)?;
        let (threads, least) = (format!("{THREADS} threads, {}", place.0), thousand(least));
        let what = format!("rewrite faults/s of {threads} (the floor: {least})");
        findings.promise(&what, rate, 80_000.0, false);
    }
    for (ours, (_, how)) in ours.iter().zip(SERVINGS) {
        let get = |key: &str| number(ours, &format!("/{key}"));
        let what = format!("rewrite faults/s{how} (the floor allows {})", thousand(1e9 / least));
        findings.promise(&what, get("rewrite/faults_per_s")?, 80_000.0, false);
        let what = format!("rewrite p99 µs{how} (the floor's own: {})", us(tail));
        findings.promise(&what, get("rewrite/p99_ns")? / 1000.0, 40.0, true);
        let what = format!("sequential pages/s{how} (the floor: {})", thousand(stream));
        findings.promise(&what, get("sequential_pages_per_s")?, 350_000.0, false);
        findings.promise(&format!("fill pages/s{how}"), get("fill_pages_per_s")?, 250_000.0, false);
    }
    let published =
        ["NMS report (2003)", "2 servers", "1.0–1.8k/s", "3.7k/s", "1.3k/s, 230–300 µs"];
    findings.row(&published, json!({"what": "NMS report (2003)"}));
    Ok(())
}

/// Measures a region by a program that is tied to a CPU and by one that is not, in turns: served by the
/// pager's thread, while idle CPUs are kept awake and while they are not, and in place.
fn untied_beside_tied(findings: &mut Findings, pagetax: &str) -> Result<()> {
    let [thread, in_place] = SERVINGS;
    let ways = [
        (thread, PINNED, ""),
        (thread, ANY_CPU, ""),
        (thread, ANY_CPU, NEVER_AWAKE),
        (in_place, PINNED, ""),
        (in_place, ANY_CPU, ""),
    ];
    let mut runs = ways.map(|_| Vec::new());
    for _ in 0..RATE_ROUNDS {
        for (runs, ((serving, _), place, awake)) in runs.iter_mut().zip(ways) {
            let server = Server::start(pagetax, MEMORY, ANYWHERE)?;
            let mut touch = paged(&server, place, serving);
            if awake == NEVER_AWAKE {
                touch.env("PAGETAX_REMOTE_AWAKE", "never");
            }
            runs.push(measure(&mut touch)?);
        }
    }
    let mut rates = Vec::new();
    for (runs, ((_, how), place, awake)) in runs.iter().zip(ways) {
        let result = medians(runs)?;
        row_of(findings, &format!("pagetax, 1 copy{how}{awake}"), place.0, &result)?;
        rates.push(number(&result, "/rewrite/faults_per_s")?);
    }
    for (what, tied) in [("thread", 0), ("in place", 3)] {
        let what = format!("rewrite, any CPU ÷ tied, {what}");
        findings.promise(&what, rates[tied + 1] / rates[tied], 0.9, false);
    }
    Ok(())
}

fn row_of(findings: &mut Findings, name: &str, place: &str, result: &Value) -> Result<()> {
    let get = |key: &str| number(result, &format!("/{key}"));
    let cells = [
        format!("sequential {}", thousand(get("sequential_pages_per_s")?)),
        format!("fill {}", thousand(get("fill_pages_per_s")?)),
        format!(
            "rewrite {}, p50 {}, p99 {}",
            thousand(get("rewrite/faults_per_s")?),
            us(get("rewrite/p50_ns")?),
            us(get("rewrite/p99_ns")?)
        ),
    ];
    let cells = [name, place, &cells[0], &cells[1], &cells[2]];
    findings.row(&cells, json!({"what": name, "where": place, "result": result}));
    Ok(())
}
