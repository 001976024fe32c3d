//! `pagetax diagnose -p` beside a restart: two fresh processes take turns on a CPU, one on base pages and
//! one on huge ones, and their CPU time for each unit of progress is compared.

use super::Outcome;
use crate::shell::{self, pagetax};
use anyhow::{Context, Result, ensure};
use pagetax_core::stats::quantiles;
use pagetax_host::sys::process::cpu_clock_ns;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const C_SOURCE: &str = "crates/cli/tests/live/gather.c";
/// The pairs of fresh processes; the median counts.
const PAIRS: usize = 3;
/// The turns of each process, their length, and the time before each in which caches fill.
const TURNS: usize = 10;
const TURN: Duration = Duration::from_millis(900);
const SETTLE: Duration = Duration::from_millis(100);
/// The time in which a program fills its memory.
const WARM_UP: Duration = Duration::from_secs(12);
/// The experiments on each program.
const EXPERIMENTS: usize = 2;
/// The widest half of an interval.
const HALF_WIDTH_MAX: f64 = 0.05;
/// The restart's speed-up from which on the tax is a tenth of the time, and the time to find it.
const HIGH_TAX: f64 = 1.0 / 0.9;
const DECIDED_NS_MAX: f64 = 60e9;
const STOP_NS_MAX: u64 = 20_000_000;
const THROUGHPUT_MIN: f64 = 0.98;

/// A program that runs until it is ended, as a line of a shell. `$FOLDER` holds gather, `$PORT` is free.
struct LiveServer {
    name: &'static str,
    line: &'static str,
    /// A client that keeps it busy, on another CPU.
    client: Option<&'static str>,
}

const SERVERS: &[LiveServer] = &[
    LiveServer { name: "gather", line: "exec $FOLDER/gather 256 $LARGE", client: None },
    LiveServer { name: "python3", line: "exec python3 -c \"$PYTHON\"", client: None },
    LiveServer {
        name: "sqlite3",
        line: "yes \"$QUERY\" | exec sqlite3 -init $FOLDER/table.sql",
        client: None,
    },
    LiveServer {
        name: "redis",
        line: "exec redis-server --port $PORT --save '' --appendonly no --loglevel warning",
        client: Some(
            "redis-benchmark -p $PORT -q -t set -r 1000000 -n 1000000 -d 100 -P 16 >/dev/null; exec redis-benchmark -p \
             $PORT -q -l -t get -r 1000000 -n 1000000 -P 16",
        ),
    },
    LiveServer {
        name: "java",
        line: "exec java -XX:+UseSerialGC -Xms400m -Xmx400m ${LARGE:+-XX:+UseTransparentHugePages} -cp $FOLDER Lookups",
        client: None,
    },
];

const PYTHON: &str = "\
import random
names = {i: str(i) for i in range(2_000_000)}
keys = [random.randrange(2_000_000) for _ in range(1 << 20)]
out = open('/dev/null', 'wb', buffering=0)
while True:
    for i in range(0, 1 << 20, 256):
        sum(len(names[k]) for k in keys[i:i + 256])
        out.write(b'x')
";
const JAVA: &str = "\
import java.util.HashMap;

public class Lookups {
    public static void main(String[] arguments) throws java.io.IOException {
        HashMap<Integer, Integer> map = new HashMap<>();
        for (int i = 0; i < 2_000_000; i++) map.put(i * 7919, i);
        java.io.FileOutputStream out = new java.io.FileOutputStream(\"/dev/null\");
        java.util.Random random = new java.util.Random(1);
        for (long sum = 0; ; out.write((int) sum))
            for (int i = 0; i < 2_000; i++) sum += map.get(random.nextInt(2_000_000) * 7919);
    }
}
";
const TABLE: &str = "\
CREATE TABLE t(k INTEGER PRIMARY KEY, v TEXT);
WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 999999)
INSERT INTO t SELECT i, hex(randomblob(40)) FROM n;
";
const QUERY: &str = "SELECT sum(length(t.v)) FROM (SELECT abs(random()) % 1000000 AS r FROM t LIMIT 50) a JOIN t ON t.k = a.r;";

/// Runs the benchmark, or the named programs.
pub fn run(parts: &[String]) -> Result<Outcome> {
    let folder = tempfile::tempdir()?;
    shell::succeed(
        Command::new("cc").args(["-O1", C_SOURCE, "-o"]).arg(folder.path().join("gather")),
    )
    .context("install gcc")?;
    fs::write(folder.path().join("table.sql"), TABLE)?;
    let is_chosen = |name: &str| parts.is_empty() || parts.iter().any(|part| part == name);
    if is_chosen("java") {
        let source = folder.path().join("Lookups.java");
        fs::write(&source, JAVA)?;
        let mut javac = Command::new("javac");
        shell::succeed(javac.arg(&source)).context("install openjdk-17-jdk-headless")?;
    }
    let (mut rows, mut results) = (Vec::new(), Vec::new());
    for server in SERVERS.iter().filter(|server| is_chosen(server.name)) {
        let pairs: Result<Vec<f64>> = (0..PAIRS).map(|_| restart(server, folder.path())).collect();
        // The least, the median and the most.
        let restarts = quantiles(&pairs?, [0.0, 0.5, 1.0]);
        let restart = restarts[1];
        for _ in 0..EXPERIMENTS {
            let live = experiment(server, folder.path())?;
            rows.push(row(server.name, restarts, &live));
            results.push(json!({ "program": server.name, "restart": restart, "restarts": restarts, "live": live }));
        }
    }
    let count = |of: fn(&Value) -> bool| results.iter().filter(|result| of(result)).count();
    let all = results.len();
    let (held, narrow, same) = (count(holds), count(is_narrow), count(check_holds));
    let taxed = || results.iter().filter(|result| result["restart"].as_f64() >= Some(HIGH_TAX));
    let decided = taxed().filter(|result| is_decided(result)).count();
    let gentle = count(is_gentle);
    Ok(Outcome {
        headings: vec![
            "program",
            "restart",
            "live",
            "by the order of base pages",
            "nothing changed",
            "clear after",
            "time",
            "tried",
            "longest stop or block",
            "rate",
        ],
        rows,
        json: json!(results),
        promise: (
            format!(
                "the interval holds the restart's speed-up in 9 of 10 ({held} of {all}). Half of it is at most {:.0} \
                 points in 8 of 10 ({narrow}). Nothing changed holds 1 in 19 of 20 ({same}). A gain of a tenth is clear \
                 within 60 s ({decided} of {}). No stop is longer than 20 ms, and the rate stays above 98 % ({gentle})",
                HALF_WIDTH_MAX * 100.0,
                taxed().count()
            ),
            held * 10 >= all * 9
                && narrow * 10 >= all * 8
                && same * 20 >= all * 19
                && decided == taxed().count()
                && gentle == all,
        ),
    })
}

fn holds(result: &Value) -> bool {
    let of = |key: &str| result["live"]["speedup"][key].as_f64();
    let (Some(low), Some(high), Some(restart)) =
        (of("low"), of("high"), result["restart"].as_f64())
    else {
        return false;
    };
    low <= restart && restart <= high
}

fn is_narrow(result: &Value) -> bool {
    let of = |key: &str| result["live"]["speedup"][key].as_f64().unwrap_or(f64::NAN);
    of("high") - of("low") <= 2.0 * HALF_WIDTH_MAX
}

fn check_holds(result: &Value) -> bool {
    let of = |key: &str| result["live"]["check"][key].as_f64().unwrap_or(f64::NAN);
    of("low") <= 1.0 && 1.0 <= of("high")
}

fn is_decided(result: &Value) -> bool {
    result["live"]["decided_ns"].as_f64().is_some_and(|ns| ns <= DECIDED_NS_MAX)
}

fn is_gentle(result: &Value) -> bool {
    let live = &result["live"];
    live["stop_ns_max"].as_u64().is_some_and(|ns| ns <= STOP_NS_MAX)
        && live["throughput"].as_f64().is_some_and(|rate| rate >= THROUGHPUT_MIN)
}

fn row(name: &str, [least, restart, most]: [f64; 3], live: &Value) -> Vec<String> {
    let ratio = |key: &str| match &live[key] {
        Value::Null => "no verdict".to_string(),
        ratio => {
            let of = |key: &str| ratio[key].as_f64().unwrap_or(f64::NAN);
            format!("{:.2} ({:.2}–{:.2})", of("value"), of("low"), of("high"))
        }
    };
    let number = |key: &str| live[key].as_f64().unwrap_or(f64::NAN);
    let stop_ns = number("stop_ns_max").max(number("block_ns_max"));
    vec![
        name.into(),
        format!("{restart:.2} ({least:.2}–{most:.2})"),
        ratio("speedup"),
        ratio("order"),
        ratio("check"),
        live["decided_ns"].as_f64().map_or("–".into(), |ns| format!("{:.0} s", ns / 1e9)),
        format!("{:.0} s", number("elapsed_ns") / 1e9),
        format!(
            "{:.0} of {:.0} MiB",
            number("tried_bytes") / 1048576.0,
            number("base_bytes") / 1048576.0
        ),
        format!("{:.1} ms", stop_ns / 1e6),
        format!("{:.0} %", number("throughput") * 100.0),
    ]
}

/// A program that runs, its client, and the process that does the work.
struct RunningServer {
    children: Vec<Child>,
    pid: u32,
}

impl RunningServer {
    fn start(
        server: &LiveServer,
        folder: &Path,
        wrapper: &str,
        cpu: &str,
    ) -> Result<RunningServer> {
        let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
        let shell = |line: &str, cpu: &str| {
            let mut command = Command::new("taskset");
            command.args(["-c", cpu, "sh", "-c", line]).stdout(Stdio::null()).stdin(Stdio::null());
            command
                .env("FOLDER", folder)
                .env("PORT", &port)
                .env("PYTHON", PYTHON)
                .env("QUERY", QUERY);
            command.env("LARGE", if wrapper.is_empty() { "" } else { "large" });
            command.spawn().context("install util-linux")
        };
        let line = server.line.replace("exec ", &format!("exec {wrapper} "));
        let mut children = vec![shell(&line, cpu)?];
        std::thread::sleep(Duration::from_millis(500));
        if let Some(client) = server.client {
            children.push(shell(client, "1")?);
        }
        std::thread::sleep(WARM_UP);
        let pid = largest(children[0].id())?;
        Ok(RunningServer { children, pid })
    }

    /// Returns the CPU time and the calls that read or wrote.
    fn seen(&self) -> Result<(u64, u64)> {
        let io = fs::read_to_string(format!("/proc/{}/io", self.pid))?;
        let of = |name: &str| {
            io.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok())
        };
        let calls = of("syscr:").context("no calls")? + of("syscw:").context("no calls")?;
        Ok((cpu_clock_ns(self.pid)?, calls))
    }

    fn send(&self, signal: &str) -> Result<()> {
        shell::succeed(Command::new("kill").args([signal, &self.pid.to_string()]))
    }

    /// Lets it run for a turn, and returns the CPU time for each call.
    fn turn(&self) -> Result<f64> {
        self.send("-CONT")?;
        std::thread::sleep(SETTLE);
        let before = self.seen()?;
        std::thread::sleep(TURN);
        let after = self.seen()?;
        self.send("-STOP")?;
        ensure!(after.1 > before.1, "process {} makes no progress", self.pid);
        Ok((after.0 - before.0) as f64 / (after.1 - before.1) as f64)
    }
}

impl Drop for RunningServer {
    fn drop(&mut self) {
        // A pipe's other end stops with the program that reads it.
        let _ = Command::new("kill").arg(self.pid.to_string()).status();
        let _ = self.send("-CONT");
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Returns the process with the most memory of one and its descendants.
fn largest(root: u32) -> Result<u32> {
    let mut all = vec![root];
    let mut at = 0;
    while let Some(pid) = all.get(at).copied() {
        let path = PathBuf::from(format!("/proc/{pid}/task/{pid}/children"));
        let children = fs::read_to_string(path).unwrap_or_default();
        all.extend(children.split_whitespace().filter_map(|word| word.parse::<u32>().ok()));
        at += 1;
    }
    let resident = |pid: &u32| {
        let statm = fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
        statm.split(' ').nth(1).and_then(|word| word.parse::<u64>().ok()).unwrap_or(0)
    };
    all.into_iter().max_by_key(resident).context("no process")
}

/// Returns how many times as fast the program is on huge pages when it starts on them.
fn restart(server: &LiveServer, folder: &Path) -> Result<f64> {
    let wrapper = format!("{} ppgsz -o heap=2M", pagetax()?);
    let base = RunningServer::start(server, folder, "", "0")?;
    let huge = RunningServer::start(server, folder, &wrapper, "0")?;
    base.send("-STOP")?;
    huge.send("-STOP")?;
    let turns: Result<Vec<(f64, f64)>> =
        (0..TURNS).map(|_| Ok((base.turn()?, huge.turn()?))).collect();
    let ratios: Vec<f64> = turns?.into_iter().map(|(base, huge)| base / huge).collect();
    Ok(quantiles(&ratios, [0.5])[0])
}

fn experiment(server: &LiveServer, folder: &Path) -> Result<Value> {
    let running = RunningServer::start(server, folder, "", "0")?;
    let pid = running.pid.to_string();
    let mut command = Command::new(pagetax()?);
    command.args(["diagnose", "-q", "-p", &pid, "--progress", "calls", "--yes", "--json"]);
    Ok(serde_json::from_str(&shell::output(&mut command)?)?)
}
