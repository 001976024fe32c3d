//! `pagetax stat` beside measures that share no source with it: loads that time themselves, and the
//! kernel's begin and end events of reclaim and compaction, and its account of delays for swap.

mod taskstats;

use super::Outcome;
use super::swap::{Limited, Swap};
use crate::at_end::AtEnd;
use crate::shell::{self, pagetax};
use crate::stat_document::seconds_of;
use anyhow::{Context, Result, ensure};
use pagetax_host::sys::process::cpu_clock_ns;
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use taskstats::{DelayAccount, TaskDelays};

const C_SOURCE: &str = "xtask/src/bench/stat_loads.c";
/// The time of each load. A tenth of it is 3 s, some 150 samples: 16 % at a confidence of 95 %.
const SECONDS: &str = "30";
/// The largest difference between stat and the direct measure.
const LIMIT: f64 = 0.15;
/// The processes of the load that only shows what `stat` and `top` take at their default intervals, as a
/// share of a CPU, and its limit. `$0` is pagetax. `top` needs a terminal.
const IDLE_COUNT: usize = 500;
const OWN: &[(&str, &str)] = &[
    ("stat", r#"exec "$0" stat -q 1"#),
    ("top", r#"TERM=xterm exec script -qec "stty rows 50 columns 120; exec $0 top" /dev/null"#),
];
const OWN_LIMIT: f64 = 0.005;
/// The memory of loads that reclaim.
const MIB: u64 = 64;
/// The rows of stat for reads from swap and for direct reclaim, which taskstats accounts.
const DELAYED: &[&str] = &["reclaim", "swap", "shootdown"];

/// A load, the rows of stat that hold its cost, and the kernel's events of it, if it cannot time itself.
struct StatLoad {
    name: &'static str,
    rows: &'static [&'static str],
    event: Option<&'static str>,
    limited: bool,
    swaps: bool,
}

const LOADS: &[StatLoad] = &[
    StatLoad {
        name: "faults",
        rows: &["minor_fault", "zero_copy"],
        event: None,
        limited: false,
        swaps: false,
    },
    StatLoad {
        name: "reclaim",
        rows: &["reclaim", "shootdown"],
        event: Some("vmscan/mm_vmscan_memcg_reclaim"),
        limited: true,
        swaps: false,
    },
    StatLoad {
        name: "compaction",
        // Making the pieces needs most of its shootdowns.
        rows: &["compaction"],
        event: Some("compaction/mm_compaction"),
        limited: false,
        swaps: false,
    },
    StatLoad {
        name: "swap",
        rows: &["minor_fault", "zero_copy", "reclaim", "swap", "shootdown"],
        event: None,
        limited: true,
        swaps: true,
    },
];

/// Runs the benchmark, or the named loads.
pub fn run(parts: &[String]) -> Result<Outcome> {
    let folder = tempfile::tempdir_in(".")?;
    let program = folder.path().join("stat_loads");
    shell::succeed(Command::new("cc").args(["-O1", C_SOURCE, "-o"]).arg(&program))
        .context("install gcc")?;
    let file = folder.path().join("file");
    // A hole is read without a disk, so that reclaim is much of the work.
    fs::File::create(&file)?.set_len((4 * MIB) << 20)?;
    let (mut rows, mut results, mut worst) = (Vec::new(), Vec::new(), 0f64);
    let chosen = |load: &&StatLoad| parts.is_empty() || parts.iter().any(|part| part == load.name);
    for load in LOADS.iter().filter(chosen) {
        let seen = measure(load, &program, &file)?;
        let own = format!("{:.2} %", seen.own_share * 100.0);
        let mut compare = |name: &str, direct_s: f64, how: String, stat_s: f64| {
            let off = stat_s / direct_s - 1.0;
            worst = worst.max(off.abs());
            let off = format!("{:+.0} %", off * 100.0);
            let [direct, stat] = [direct_s, stat_s].map(|s| format!("{s:.2} s"));
            rows.push(vec![name.into(), direct, how, stat, off, own.clone()]);
            results.push(json!({"load": name, "direct_s": direct_s, "stat_s": stat_s, "own_share": seen.own_share}));
        };
        let how = load
            .event
            .map_or("by itself".into(), |event| format!("events {event}_begin, _end, on a CPU"));
        compare(load.name, seen.direct_s, how, seen.stat_s);
        if let Some(delays) = seen.delays {
            let name = format!("{}, reclaim and reads alone", load.name);
            compare(&name, delays.seconds(), delays.to_string(), seen.delayed_s);
        }
    }
    let mut own_share = 0f64;
    if parts.is_empty() || parts.iter().any(|part| part == "idle") {
        for (name, script) in OWN {
            let share = among_idle(script)?;
            own_share = own_share.max(share);
            let load = format!("{IDLE_COUNT} processes that sleep, {name}");
            let none = || "–".to_string();
            let text = format!("{:.2} %", share * 100.0);
            rows.push(vec![load.clone(), none(), none(), none(), none(), text]);
            results.push(json!({"load": load, "own_share": share}));
        }
    }
    Ok(Outcome {
        headings: vec!["load", "direct", "measured", "pagetax stat", "off by", "its own CPU time"],
        rows,
        json: json!(results),
        promise: (
            format!(
                "each within {:.0} % of the direct measure; at most {:.1} % of a CPU with {IDLE_COUNT} processes",
                LIMIT * 100.0,
                OWN_LIMIT * 100.0
            ),
            worst <= LIMIT && own_share <= OWN_LIMIT,
        ),
    })
}

/// Processes that are ended with it.
struct Ended(Vec<Child>);

impl Drop for Ended {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Returns the CPU time of a command of pagetax ÷ the time, after its start, while many processes sleep.
fn among_idle(script: &str) -> Result<f64> {
    let mut all = Ended(Vec::new());
    for _ in 0..IDLE_COUNT {
        all.0.push(Command::new("sleep").arg("600").spawn()?);
    }
    let mut command = Command::new("sh");
    command.args(["-c", script, &pagetax()?]).stdin(Stdio::piped()).stdout(Stdio::null());
    let watcher = command.spawn()?;
    let shell = watcher.id();
    all.0.push(watcher);
    std::thread::sleep(Duration::from_secs(1));
    let pid = child_of(shell);
    let seen = || -> Result<(u64, Instant)> { Ok((cpu_clock_ns(pid)?, Instant::now())) };
    std::thread::sleep(Duration::from_secs(5));
    let (before_ns, begun) = seen()?;
    std::thread::sleep(Duration::from_secs(30));
    let (after_ns, ended) = seen()?;
    Ok((after_ns - before_ns) as f64 / (ended - begun).as_nanos() as f64)
}

struct Measured {
    direct_s: f64,
    stat_s: f64,
    /// The delays of a load that swaps, and the rows of stat for the same.
    delays: Option<TaskDelays>,
    delayed_s: f64,
    own_share: f64,
}

fn measure(load: &StatLoad, program: &Path, file: &Path) -> Result<Measured> {
    let account = load.swaps.then(DelayAccount::switch_on).transpose()?;
    let _swap = load.swaps.then(|| Swap::zram(4 * MIB)).transpose()?;
    let limited = load.limited.then(|| Limited::new(MIB)).transpose()?;
    let mut command = match &limited {
        Some(limited) => {
            let shell = limited.shell();
            let mut command = Command::new("sh");
            command.arg("-c").arg(format!("{shell} \"$@\"")).arg("sh").arg(program);
            command
        }
        None => Command::new(program),
    };
    command.args([load.name, SECONDS]);
    if load.name == "reclaim" {
        command.arg(file);
    }
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut input = child.stdin.take().context("no input")?;
    let mut said = BufReader::new(child.stdout.take().context("no output")?).lines();
    ensure!(said.next().transpose()?.as_deref() == Some("up"), "{C_SOURCE} does not come up");
    let pid = child_of(child.id());
    let delays = || account.as_ref().map(|account| account.delays(pid)).transpose();
    let trace = load.event.map(|event| Trace::start(event, pid)).transpose()?;
    let document = tempfile::NamedTempFile::new()?;
    let json = format!("--json={}", document.path().display());
    let mut stat = Command::new(pagetax()?)
        .args(["stat", "-q", "-p", &pid.to_string(), &json, "1"])
        .stdout(Stdio::null())
        .spawn()?;
    std::thread::sleep(Duration::from_millis(500));
    let delays_before = delays()?;
    input.write_all(b"\n")?;
    let own_s: f64 = said.next().transpose()?.context("the load said nothing")?.parse()?;
    let delays = delays()?.zip(delays_before).map(|(after, before)| after.since(before));
    let events_s = trace.map(|trace| trace.seconds(pid)).transpose()?;
    std::thread::sleep(Duration::from_millis(1_200));
    shell::succeed(Command::new("kill").args(["-INT", &stat.id().to_string()]))?;
    stat.wait()?;
    drop(input);
    child.wait()?;
    let document: Value = serde_json::from_str(&fs::read_to_string(document.path())?)?;
    let intervals = document["intervals"].as_array().context("no intervals")?;
    let total = |pointer: &str| -> f64 {
        intervals.iter().filter_map(|one| one.pointer(pointer)?.as_f64()).sum()
    };
    Ok(Measured {
        direct_s: events_s.unwrap_or(own_s),
        stat_s: seconds_of(&document, load.rows)?,
        delayed_s: seconds_of(&document, DELAYED)?,
        delays,
        own_share: total("/readings/own_cpu_ns/value") / total("/elapsed_ns"),
    })
}

/// Returns the process that does the work: a shell that enters a cgroup becomes it, or has it as a child.
fn child_of(pid: u32) -> u32 {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    let first = children.ok().and_then(|text| text.split_whitespace().next()?.parse().ok());
    first.unwrap_or(pid)
}

/// Events of the kernel in a trace of our own.
struct Trace {
    instance: PathBuf,
    begin: String,
    _end: AtEnd,
}

impl Trace {
    /// Starts to record an event of all tasks, and the moments at which this one gets and leaves a CPU.
    fn start(event: &str, pid: u32) -> Result<Trace> {
        let folder =
            std::env::temp_dir().join(format!("pagetax-bench-trace-{}", std::process::id()));
        fs::create_dir_all(&folder)?;
        let place = folder.display();
        let instance = folder.join("instances/pagetax-bench");
        let end =
            AtEnd::run(&format!("rmdir {0}; umount {place}; rmdir {place}", instance.display()))?;
        shell::succeed(Command::new("mount").args(["-t", "tracefs", "tracefs"]).arg(&folder))?;
        fs::create_dir(&instance)?;
        fs::write(instance.join("buffer_size_kb"), "65536")?;
        for side in ["begin", "end"] {
            fs::write(instance.join(format!("events/{event}_{side}/enable")), "1")?;
        }
        let switch = instance.join("events/sched/sched_switch");
        fs::write(switch.join("filter"), format!("prev_pid=={pid} || next_pid=={pid}"))?;
        fs::write(switch.join("enable"), "1")?;
        let begin = format!("{}_begin:", event.rsplit('/').next().unwrap_or(event));
        Ok(Trace { instance, begin, _end: end })
    }

    /// Returns the CPU time of a task between its begin and its end events.
    fn seconds(&self, pid: u32) -> Result<f64> {
        let text = fs::read_to_string(self.instance.join("trace"))?;
        let (mut begun, mut left, mut off, mut sum) = (None, None, 0.0, 0.0);
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let Some((task, rest)) = line.split_once(" [") else { continue };
            let task = task.trim().rsplit('-').next().and_then(|word| word.parse::<u32>().ok());
            let time = rest
                .split(": ")
                .next()
                .and_then(|head| head.rsplit(' ').next()?.parse::<f64>().ok());
            let Some(time) = time else { continue };
            let is_switch_to_it = rest.contains("sched_switch:") && task != Some(pid);
            match task {
                _ if is_switch_to_it => off += left.take().map_or(0.0, |left: f64| time - left),
                Some(task) if task != pid => {}
                _ if rest.contains("sched_switch:") => left = Some(time),
                _ if rest.contains(&self.begin) => (begun, off) = (Some(time), 0.0),
                _ => sum += begun.take().map_or(0.0, |begun: f64| time - begun - off),
            }
        }
        Ok(sum)
    }
}
