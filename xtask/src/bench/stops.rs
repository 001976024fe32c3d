//! How long a threaded process stands still while its pages are changed by a user who may not use
//! process_madvise(2): the process then makes the calls itself, in stops.

use super::{Outcome, pagetax};
use crate::shell;
use anyhow::{Context, Result, ensure};
use pagetax_core::stats::quantiles;
use serde_json::{Value, json};
use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

/// The cycles of attach, change and detach. Every second one undoes the previous one.
const CYCLES: usize = 300;
/// It notices when a wait of its is cut short, a sum wrong, or a lock two.
const C_SOURCE: &str = "crates/host/tests/pagesize/threads.c";
const MIB: &str = "32";
const LIMIT_MS: f64 = 20.0;
const PARTS: &str = "heap=2M,anon=2M,stack=2M";

pub fn run() -> Result<Outcome> {
    // Where an ordinary user can read it.
    let directory = tempfile::tempdir()?;
    std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755))?;
    let (own, program) = (directory.path().join("pagetax"), directory.path().join("threads"));
    std::fs::copy(pagetax()?, &own)?;
    let compile = ["-O1", "-pthread", C_SOURCE, "-o"];
    shell::succeed(Command::new("cc").args(compile).arg(&program)).context("install gcc")?;
    let mut target = unprivileged(&program)?
        .arg(MIB)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("install util-linux, for setpriv")?;
    let mut said = BufReader::new(target.stdout.take().context("no output")?).lines();
    ensure!(said.next().transpose()?.as_deref() == Some("up"), "{C_SOURCE} does not come up");
    let pid = target.id().to_string();
    let (mut longest, mut waits, mut stops) = (Vec::new(), Vec::new(), 0);
    for cycle in 0..CYCLES {
        let what: &[&str] = if cycle % 2 == 0 { &["-o", PARTS] } else { &["--undo"] };
        let mut change = unprivileged(&own)?;
        change.arg("ppgsz").args(what).args(["--json", "-p", &pid]);
        let document: Value = serde_json::from_str(&shell::output(&mut change)?)?;
        let process = &document["processes"][0];
        let number = |key: &str| process[key].as_u64().with_context(|| format!("{key}: {process}"));
        longest.push(number("stop_ns_max")? as f64 / 1e6);
        waits.push(number("stop_cpu_wait_ns")? as f64 / 1e6);
        stops += number("stop_count")?;
    }
    drop(target.stdin.take());
    let end = said.next().transpose()?;
    ensure!(target.wait()?.success() && end.as_deref() == Some("ok"), "it was harmed: {end:?}");
    let own: Vec<f64> = longest.iter().zip(&waits).map(|(wall, wait)| wall - wait).collect();
    let (wall, own) = (spread(longest), spread(own));
    Ok(Outcome {
        headings: vec!["the longest stop of each cycle", "median", "90 %", "99 %", "longest"],
        rows: vec![row("by the clock on the wall", wall), row("less waits for a CPU", own)],
        json: json!({"cycles": CYCLES, "stops": stops, "wall_ms": wall, "own_ms": own}),
        promise: (
            format!("{stops} stops in {CYCLES} cycles, none longer than {LIMIT_MS} ms"),
            wall[3] <= LIMIT_MS,
        ),
    })
}

/// Returns a command that runs as the current user, or as nobody if that is root.
fn unprivileged(program: impl AsRef<OsStr>) -> Result<Command> {
    if shell::output(Command::new("id").arg("-u"))?.trim() != "0" {
        return Ok(Command::new(program));
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(program);
    Ok(command)
}

fn spread(values: Vec<f64>) -> [f64; 4] {
    quantiles(&values, [0.5, 0.9, 0.99, 1.0])
}

fn row(name: &str, spread: [f64; 4]) -> Vec<String> {
    let cells = spread.iter().map(|ms| format!("{ms:.1} ms"));
    [name.to_string()].into_iter().chain(cells).collect()
}
