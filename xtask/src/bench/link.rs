//! Cold page-ins over a link with a rate and a delay, beside a bare ping-pong on the same path; and writes
//! over slower links, beside a bare stream of pages.
//!
//! The servers are in a network namespace of their own, on CPU 1; the program is on CPU 0. A relay before
//! each server holds every request back for 30 µs, and the ping-pong goes through such a relay too.

use super::remote::{SERVING, SERVINGS, TOUCH, build_touch, compiled, measure, us};
use super::serve::Server;
use super::{Outcome, median, number, pagetax};
use crate::at_end::AtEnd;
use crate::shell;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const SOURCE: &str = "xtask/src/bench/link.c";
/// The addresses of the two ends, of a network for documentation.
const RATE: &str = "10gbit";
const DELAY_NS: &str = "30000";
const ROUNDS: usize = 5;
const WRITE_ROUNDS: usize = 3;
/// The goal: the 99th percentile of a page-in, in those of a ping-pong.
const RATIO_MAX: f64 = 3.0;
/// The links for writes, with the least rate of pages in those of a bare stream. Half of each page of `touch`
/// compresses.
const WRITE_LINKS: [(&str, f64); 3] = [("100mbit", 1.0), ("1gbit", 1.0), ("10gbit", 0.0)];
const SINK_PORT: &str = "7175";
const MEMORY: &str = "512M";
const NEAR: &str = "198.51.100.1";
const FAR: &str = "198.51.100.2";
/// The ports of the relays: to the two servers, and to the echo.
const PORTS: [&str; 3] = ["7171", "7172", "7173"];
const ECHO_PORT: &str = "7174";

/// Two ends of a link: this network namespace, and another one.
struct Link {
    namespace: String,
    near: String,
    _remove: AtEnd,
}

impl Link {
    fn make() -> Result<Link> {
        let namespace = format!("pagetax-{}", std::process::id());
        let near = format!("ptx{}", std::process::id() % 1_000_000);
        let remove = AtEnd::run(&format!("ip netns delete {namespace}"))?;
        let script = format!(
            "set -e; ip netns add {namespace}; in='ip netns exec {namespace}'
             ip link add {near} type veth peer name far netns {namespace}
             ip addr add {NEAR}/30 dev {near}; ip link set {near} up
             $in ip link set lo up; $in ip addr add {FAR}/30 dev far; $in ip link set far up
             tc qdisc add dev {near} root tbf rate {RATE} burst 256kb latency 2ms
             $in tc qdisc add dev far root tbf rate {RATE} burst 256kb latency 2ms"
        );
        shell::succeed(Command::new("sh").args(["-c", &script]))
            .context("a link between network namespaces takes root, iproute2, veth and sch_tbf")?;
        Ok(Link { namespace, near, _remove: remove })
    }

    /// Changes the rate of the near end's sending.
    fn set_rate(&self, rate: &str) -> Result<()> {
        let script = format!(
            "tc qdisc change dev {} root tbf rate {rate} burst 256kb latency 2ms",
            self.near
        );
        shell::succeed(Command::new("sh").args(["-c", &script]))
    }

    /// Starts a program at the far end, and waits for its first line.
    fn start(&self, program: &Path, words: &[&str]) -> Result<Server> {
        let mut far = Command::new("ip");
        far.args(["netns", "exec", &self.namespace, "taskset", "-c", "1"]);
        let end = Server::of(far.arg(program).args(words).stdin(Stdio::null()))?;
        ensure!(end.address == "up", "{} {words:?} does not start", program.display());
        Ok(end)
    }

    /// Starts a memory server at the far end.
    fn serve(&self, folder: &Path, pagetax: &str) -> Result<Server> {
        let script = folder.join("pagetax-far");
        let line = format!("#!/bin/sh\nexec ip netns exec {} {pagetax} \"$@\"\n", self.namespace);
        std::fs::write(&script, line)?;
        shell::succeed(Command::new("chmod").arg("+x").arg(&script))?;
        let server = Server::start(&script.to_string_lossy(), MEMORY, "127.0.0.1:0")?;
        server.pin("1")?;
        Ok(server)
    }
}

/// Runs the benchmark.
pub fn run() -> Result<Outcome> {
    let pagetax = std::fs::canonicalize(pagetax()?)?.display().to_string();
    build_touch()?;
    let folder = tempfile::tempdir()?;
    let program: PathBuf = compiled(SOURCE, &folder.path().join("link"))?;
    let link = Link::make()?;
    let servers = [(); 2].map(|()| link.serve(folder.path(), &pagetax));
    let servers = servers.into_iter().collect::<Result<Vec<_>>>()?;
    let _echo = link.start(&program, &["echo", ECHO_PORT])?;
    let targets = servers.iter().map(|server| server.address.rsplit(':').next().unwrap_or(""));
    let relays = PORTS.iter().zip(targets.chain([ECHO_PORT]));
    let _relays = relays
        .map(|(port, target)| link.start(&program, &["relay", FAR, port, target, DELAY_NS]))
        .collect::<Result<Vec<_>>>()?;
    let both = format!("{FAR}:{},{FAR}:{}", PORTS[0], PORTS[1]);
    let (mut pings, mut colds) = (Vec::new(), [const { Vec::new() }; SERVINGS.len()]);
    for _ in 0..ROUNDS {
        let mut ping = Command::new("taskset");
        let text =
            shell::output(ping.args(["-c", "0"]).arg(&program).args(["ping", FAR, PORTS[2]]))?;
        let bare: Vec<f64> = text.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        pings.push([bare[0], bare[1]]);
        for (colds, (serving, _)) in colds.iter_mut().zip(SERVINGS) {
            let mut touch = Command::new("taskset");
            touch.args(["-c", "0", TOUCH, "cold", "64", &both, "2"]);
            touch.env(SERVING, serving).env("PAGETAX_REMOTE_INSECURE", "1");
            let cold = measure(&mut touch)?;
            colds.push([number(&cold, "/p50_ns")?, number(&cold, "/p99_ns")?]);
        }
    }
    let mut rows = Vec::new();
    let mut row = |name: &str, all: &[[f64; 2]]| -> f64 {
        let [p50, p99] = [0, 1].map(|at| median(all.iter().map(|one| one[at])));
        let ratio = median(all.iter().zip(&pings).map(|(one, ping)| one[1] / ping[1]));
        rows.push(vec![name.into(), us(p50), us(p99), format!("{ratio:.2}")]);
        ratio
    };
    row("ping-pong: 32 bytes, and a page back", &pings);
    let names = SERVINGS.map(|(_, how)| format!("cold page-in, 2 copies{how}"));
    let ratios: Vec<f64> = names.iter().zip(&colds).map(|(name, colds)| row(name, colds)).collect();
    let _sink = link.start(&program, &["sink", FAR, SINK_PORT])?;
    let writes = measure_writes(&link, &program, &pagetax)?;
    rows.extend(writes.rows);
    Ok(Outcome {
        headings: vec!["", "p50 or pages/s", "p99", "÷ ping-pong or bare"],
        rows,
        json: json!({"ping_p50_p99_ns": pings, "cold_p50_p99_ns": colds, "write_pages_per_s": writes.json}),
        promise: (
            format!(
                "the 99th percentile of a page-in is at most {RATIO_MAX} times that of a ping-pong, and slow links \
                 take pages that compress faster than they are"
            ),
            ratios.iter().all(|ratio| *ratio <= RATIO_MAX) && writes.hold,
        ),
    })
}

/// Writes over links of several rates.
struct Writes {
    rows: Vec<Vec<String>>,
    json: Vec<Value>,
    hold: bool,
}

/// Fills memory over links of several rates, in turn with a bare stream of pages.
fn measure_writes(link: &Link, program: &Path, pagetax: &str) -> Result<Writes> {
    let mut serve = Command::new("ip");
    serve.args(["netns", "exec", &link.namespace, pagetax, "serve", "--memory", MEMORY]);
    let server = Server::of(serve.args(["--listen", &format!("{FAR}:0"), "--insecure"]))?;
    let mut writes = Writes { rows: Vec::new(), json: Vec::new(), hold: true };
    for (rate, least) in WRITE_LINKS {
        link.set_rate(rate)?;
        let (mut bares, mut fills) = (Vec::new(), Vec::new());
        for _ in 0..WRITE_ROUNDS {
            let mut flood = Command::new(program);
            bares
                .push(shell::output(flood.args(["flood", FAR, SINK_PORT]))?.trim().parse::<f64>()?);
            let mut touch = Command::new(TOUCH);
            touch
                .args(["fill", "64", "4", &server.address, "1"])
                .env("PAGETAX_REMOTE_INSECURE", "1");
            fills.push(number(&measure(&mut touch)?, "/written_pages_per_s")?);
        }
        let [bare, fill] = [&bares, &fills].map(|all| median(all.iter().copied()));
        let ratio = median(fills.iter().zip(&bares).map(|(fill, bare)| fill / bare));
        writes.hold &= ratio >= least;
        let row = |name: &str, rate_per_s: f64, ratio: String| {
            vec![format!("{name}, {rate}"), format!("{rate_per_s:.0}"), String::new(), ratio]
        };
        writes.rows.push(row("bare stream of pages", bare, String::new()));
        writes.rows.push(row("evictions, 1 copy", fill, format!("{ratio:.2}")));
        writes.json.push(json!({"link": rate, "bare": bares, "evicted": fills}));
    }
    Ok(writes)
}
