//! `cargo xtask bench reclaim`: what became of kswapd's problem of 2001. It runs `mlock-cycle` and a plain
//! reader of a file under a memory cgroup, beside the simulated Linux 2.4.9. The part `guest` runs
//! `mlock-cycle` in a guest of 1 GB, where kswapd works as well.

mod guest;

use super::swap::Limited;
use super::{Outcome, number, report};
use crate::at_end::AtEnd;
use crate::shell;
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The memory of the cgroup in MiB. As in 2001, a file is a fifth of it, and two files are locked.
const MIB: u64 = 256;
const FILE: &str = "file_size=51M";
const READER: &str = "xtask/src/bench/reclaim/file_read.toml";
const LOADS: &[(&str, &[&str])] = &[
    ("mlock-cycle, base pages", &["mlock-cycle", "slots=2", FILE, "page_size=base"]),
    ("mlock-cycle, folios of 2M", &["mlock-cycle", "slots=2", FILE, "page_size=2M"]),
    ("mlock-cycle by MADV_WILLNEED", &["mlock-cycle", "slots=2", FILE, "how=willneed"]),
    ("mlock-cycle by MADV_POPULATE_READ", &["mlock-cycle", "slots=2", FILE, "how=populate-read"]),
    ("reader of a mapped file, base pages", &[READER, "page_size=base"]),
    ("reader of a mapped file, folios of 2M", &[READER, "page_size=2M"]),
];
/// The runs of each load. Rows show the one with the median of pages freed for each page scanned.
const RUNS: usize = 3;
const SIMULATED: &[(&str, &str)] = &[
    ("Linux 2.4.9, simulated, 2 GB", "sim:linux-2.4.9-2gb"),
    ("Linux 2.4.9 with the patch, simulated, 2 GB", "sim:linux-2.4.9-2gb-sleep-patch"),
];
/// The largest share of scans that the rest of the machine may cause meanwhile.
const OTHERS_MAX: f64 = 0.05;
const HEADINGS: [&str; 8] = [
    "load",
    "time to load",
    "each mlock or madvise: median, p99, longest",
    "pages scanned",
    "freed / scanned",
    "CPU time in direct reclaim",
    "kswapd, % of a CPU",
    "stalled on memory (PSI some): all, each second",
];

/// The figures of one load.
struct ReclaimSeen {
    name: String,
    report: Value,
    /// The time stalled on memory in each second of the load; none if the kernel has no such account.
    stalls_ms: Vec<f64>,
    /// The pages that kswapd scanned, as a share of all; known in the guest.
    background_share: Option<f64>,
    /// The least and the most pages freed for each page scanned, of several runs.
    efficiency_range: Option<(f64, f64)>,
}

impl ReclaimSeen {
    fn load(&self, counter: &str) -> Result<f64> {
        let phases = self.report["phases"].as_array().context("no phases")?;
        let load = phases.iter().find(|phase| phase["name"] == "load").context("no load")?;
        match counter {
            "length" => Ok(number(load, "/end_ns")? - number(load, "/start_ns")?),
            _ => number(load, &format!("/counters/{counter}/value")),
        }
    }

    /// Returns the pages freed for each page scanned; 1 if none was scanned.
    fn efficiency(&self) -> Result<f64> {
        let scanned = self.load("reclaim_scan_count")?;
        Ok(if scanned > 0.0 { self.load("reclaim_steal_count")? / scanned } else { 1.0 })
    }

    fn row(&self) -> Result<Vec<String>> {
        let ns = self.load("length")?;
        let scanned = self.load("reclaim_scan_count")?;
        let latency = ["lock", "advise"].iter().find_map(|kind| self.report["latency"].get(kind));
        let each = latency.map_or("–".into(), |latency| {
            let at = |key: &str| time(latency[key].as_f64().unwrap_or_default());
            format!("{}, {}, {}", at("p50_ns"), at("p99_ns"), at("max_ns"))
        });
        let rows = self.report["budget"]["cpu"].as_array().context("no budget")?;
        let reclaim = rows.iter().find(|row| row["id"] == "reclaim");
        let reclaim = reclaim.and_then(|row| row["ns"].as_f64()).map_or("–".into(), time);
        let background = self
            .background_share
            .map_or(String::new(), |share| format!(" ({:.0} % by kswapd)", share * 100.0));
        let efficiency = match (scanned > 0.0, self.efficiency_range) {
            (false, _) => "–".into(),
            (_, None) => format!("{:.3}", self.efficiency()?),
            (_, Some((low, high))) => format!("{:.2} ({low:.2} to {high:.2})", self.efficiency()?),
        };
        Ok(vec![
            self.name.clone(),
            time(ns),
            each,
            format!("{scanned:.0}{background}"),
            efficiency,
            reclaim,
            format!("{:.1}", self.load("kernel_daemon_ns")? / ns * 100.0),
            self.stalls(),
        ])
    }

    /// Returns the stalls of the load: the sum, and a bar for each second.
    fn stalls(&self) -> String {
        if self.stalls_ms.is_empty() {
            return "–".into();
        }
        let bar =
            |ms: &f64| ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'][(ms / 125.0).min(7.0) as usize];
        let bars: String = self.stalls_ms.iter().map(bar).collect();
        format!("{} {bars}", time(self.stalls_ms.iter().sum::<f64>() * 1e6))
    }

    fn json(&self) -> Result<Value> {
        Ok(json!({
            "load": self.name, "length_ns": self.load("length")?, "latency": self.report["latency"],
            "scanned": self.load("reclaim_scan_count")?, "freed": self.load("reclaim_steal_count")?,
            "daemon_ns": self.load("kernel_daemon_ns")?, "stalls_ms": self.stalls_ms,
        }))
    }
}

/// Returns a time in the unit that fits it.
fn time(ns: f64) -> String {
    match ns {
        ns if ns < 1e3 => format!("{ns:.0} ns"),
        ns if ns < 1e6 => format!("{:.0} µs", ns / 1e3),
        ns if ns < 1e9 => format!("{:.1} ms", ns / 1e6),
        ns => format!("{:.1} s", ns / 1e9),
    }
}

/// Runs the loads under a cgroup and on the simulated machines; or, with the part `guest`, in a guest.
pub fn run(parts: &[String]) -> Result<Outcome> {
    let program = program()?;
    match parts {
        [] => {}
        [part] if part == "guest" => return guest::run(&program),
        _ => bail!("the only part of this benchmark is `guest`"),
    }
    let before = scans_of_the_machine()?;
    let mut seen = Vec::new();
    for (name, words) in LOADS {
        seen.push(median_of_runs(name, &program, words)?);
    }
    let others = scans_of_the_machine()? - before;
    let scans: f64 = seen.iter().map(|seen| seen.load("reclaim_scan_count")).sum::<Result<_>>()?;
    for (name, machine) in SIMULATED {
        let report = report(&program, &["mlock-cycle", "--on", machine])?;
        seen.push(ReclaimSeen {
            name: name.to_string(),
            report,
            stalls_ms: Vec::new(),
            background_share: None,
            efficiency_range: None,
        });
    }
    let promise = format!("the rest of the machine scans at most {:.0} %", OTHERS_MAX * 100.0);
    outcome(&seen, (promise, others <= scans * OTHERS_MAX))
}

fn outcome(seen: &[ReclaimSeen], promise: (String, bool)) -> Result<Outcome> {
    Ok(Outcome {
        headings: HEADINGS.to_vec(),
        rows: seen.iter().map(ReclaimSeen::row).collect::<Result<_>>()?,
        json: json!(seen.iter().map(ReclaimSeen::json).collect::<Result<Vec<_>>>()?),
        promise,
    })
}

/// Returns the program under test: `PAGETAX`, or a release build.
fn program() -> Result<String> {
    std::env::var("PAGETAX").or_else(|_| shell::pagetax())
}

/// Returns the pages that were scanned for the whole machine, not for a cgroup.
fn scans_of_the_machine() -> Result<f64> {
    let text = fs::read_to_string("/proc/vmstat")?;
    let scans = text.lines().filter_map(|line| {
        let (name, count) = line.split_once(' ')?;
        ["pgscan_kswapd", "pgscan_direct"].contains(&name).then(|| count.parse::<f64>().ok())?
    });
    Ok(scans.sum())
}

/// Runs a load several times, and returns the run of median efficiency with the range of all.
fn median_of_runs(name: &str, program: &str, words: &[&str]) -> Result<ReclaimSeen> {
    let mut runs = Vec::new();
    for _ in 0..RUNS {
        let seen = limited(name, program, words)?;
        runs.push((seen.efficiency()?, seen));
    }
    runs.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    let range = (runs[0].0, runs[RUNS - 1].0);
    let (_, median) = runs.swap_remove(RUNS / 2);
    Ok(ReclaimSeen { efficiency_range: Some(range), ..median })
}

/// Runs a load in a memory cgroup of version 1, and in one of version 2, which has the account of stalls.
fn limited(name: &str, program: &str, words: &[&str]) -> Result<ReclaimSeen> {
    let limited = Limited::new(MIB)?;
    let pressure = PressureGroup::new()?;
    let folder = tempfile::tempdir_in(".")?;
    let document = folder.path().join("run.json");
    let (job, settings) = words.split_first().context("a load names its job")?;
    let mut command = Command::new("sh");
    let enter =
        format!("echo $$ > {} && {} \"$@\"", pressure.file("cgroup.procs"), limited.shell());
    command.args(["-c", &enter, "sh", program, "run", job]);
    command.args(["--json", "--set", &format!("directory={}", folder.path().display())]);
    command.args(settings.iter().flat_map(|setting| ["--set", setting]));
    command.stdin(Stdio::null()).stdout(fs::File::create(&document)?);
    let mut child = command.spawn()?;
    let (mut stalls_ns, mut next) = (vec![pressure.stalled_ns()?], Instant::now());
    let status = loop {
        next += Duration::from_secs(1);
        while Instant::now() < next && child.try_wait()?.is_none() {
            std::thread::sleep(Duration::from_millis(10));
        }
        stalls_ns.push(pressure.stalled_ns()?);
        if let Some(status) = child.try_wait()? {
            break status;
        }
    };
    ensure!(status.success(), "{name} ended with {status}");
    let report: Value = serde_json::from_str(&fs::read_to_string(&document)?)?;
    let stalls_ms = stalls_ns.windows(2).map(|pair| (pair[1] - pair[0]) / 1e6).collect();
    let mut seen = ReclaimSeen {
        name: name.into(),
        report,
        stalls_ms,
        background_share: None,
        efficiency_range: None,
    };
    seen.stalls_ms = last_seconds(&seen.stalls_ms, number(&seen.report, "/wall_ns")?);
    Ok(seen)
}

/// Returns the values of the last seconds, as many as a run took. Before it, the files are written.
fn last_seconds(values: &[f64], wall_ns: f64) -> Vec<f64> {
    let seconds = (wall_ns / 1e9).ceil() as usize;
    values[values.len().saturating_sub(seconds)..].to_vec()
}

/// A cgroup of version 2, whose account of stalls is that of its processes.
struct PressureGroup {
    directory: PathBuf,
    _end: AtEnd,
}

impl PressureGroup {
    fn new() -> Result<PressureGroup> {
        let mounts = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"].map(Path::new);
        let root = mounts.into_iter().find(|mount| mount.join("cgroup.controllers").exists());
        let root = root.context("no cgroup of version 2 is mounted")?;
        let directory = root.join(format!("pagetax-bench-{}", std::process::id()));
        let place = directory.display();
        let end = AtEnd::run(&format!(
            "for i in $(seq 100); do rmdir {place} && exit; sleep 0.1; done 2> /dev/null; exit 1"
        ))?;
        fs::create_dir(&directory)?;
        Ok(PressureGroup { directory, _end: end })
    }

    fn file(&self, name: &str) -> String {
        self.directory.join(name).display().to_string()
    }

    /// Returns the time in which at least one task stalled on memory.
    fn stalled_ns(&self) -> Result<f64> {
        let text = fs::read_to_string(self.file("memory.pressure"))?;
        let some = text.lines().find(|line| line.starts_with("some"));
        let total = some.and_then(|line| line.rsplit_once("total=")?.1.trim().parse::<f64>().ok());
        Ok(total.context("memory.pressure has no total")? * 1e3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seconds_before_the_run_are_cut() {
        assert_eq!(last_seconds(&[9.0, 1.0, 2.0], 1.2e9), [1.0, 2.0]);
        assert_eq!(last_seconds(&[1.0], 5e9), [1.0]);
        assert_eq!([time(900.0), time(2.5e6), time(3e9)], ["900 ns", "2.5 ms", "3.0 s"]);
    }
}
