//! Unmodified programs that need more memory than they are given: under `pagetax remote` with servers and
//! without, and in a cgroup with swap on disk and on zram. What they print must be what they print with
//! all the memory they like.

use super::engine::Engine;
use super::remote::{Findings, two_servers};
use super::swap::{KILLED, Swap, run_limited};
use crate::shell;
use anyhow::{Context, Result, bail};
use serde_json::json;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

const LIMIT_MIB: u64 = 100;

/// Name, required programs, and script; `TOOL` stands before the measured command, `@` is a directory.
const PROGRAMS: &[(&str, &str, &str)] = &[
    ("sort-66M", "sort", "LC_ALL=C TOOL sort -S 1G --parallel=1 @/66 | md5sum"),
    ("sort-198M", "sort", "LC_ALL=C TOOL sort -S 2G --parallel=1 @/198 | md5sum"),
    (
        "python3",
        "/usr/bin/python3",
        "TOOL /usr/bin/python3 -c 'import hashlib; b = bytearray(500_000_000); b[::4096] = bytes(i * 7919 \
         % 251 for i in range(len(b[::4096]))); print(hashlib.md5(b).hexdigest()); \
         print(hashlib.md5(b).hexdigest())'",
    ),
    (
        "sqlite3",
        "sqlite3",
        "TOOL sqlite3 :memory: 'CREATE TABLE t(a, b); WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT \
         n+1 FROM c LIMIT 800000) INSERT INTO t SELECT n*7919%1000003, printf(\"%0200d\", n) FROM c; \
         CREATE INDEX i ON t(a); SELECT count(*), sum(length(b)), max(a) FROM t; SELECT b FROM t WHERE \
         a = 77;'",
    ),
    (
        "redis-server",
        "redis-server",
        "TOOL redis-server --port 0 --unixsocket @/s --save '' --enable-debug-command local > @/log & \
         until redis-cli -s @/s ping 2> @/err | grep -q PONG; do sleep 0.02; done; redis-cli -s @/s debug \
         populate 600000 key 256; redis-benchmark -s @/s -t get,set -n 100000 -r 600000 -d 256 -q > @/out; \
         redis-cli -s @/s get key:77; redis-cli -s @/s eval 'local n = 0 for i = 0, 599999 do n = n + \
         redis.call(\"strlen\", \"key:\" .. i) end return n' 0; redis-cli -s @/s shutdown nosave; wait",
    ),
];

/// Returns the names of all programs.
pub fn names() -> impl Iterator<Item = &'static str> {
    PROGRAMS.iter().map(|(name, ..)| *name)
}

/// One run.
pub struct ServedRun {
    seconds: f64,
    output: Vec<u8>,
    succeeded: bool,
}

/// Runs these programs in all ways.
pub fn run(findings: &mut Findings, pagetax: &str, folder: &Path, names: &[&str]) -> Result<()> {
    let folder = folder.canonicalize()?;
    let pagetax = std::fs::canonicalize(pagetax)?.display().to_string();
    let servers = two_servers(&pagetax)?;
    let remote = format!("{pagetax} remote --resident {LIMIT_MIB}M");
    let both = format!("{},{}", servers[0].address, servers[1].address);
    let mut ours = vec![
        ("pagetax, 2 servers, 2 copies".into(), format!("{remote} --servers {both} --copies 2 --")),
        (
            "the same, --awake=never".into(),
            format!("{remote} --servers {both} --copies 2 --awake=never --"),
        ),
        ("pagetax, compressed inside".into(), format!("{remote} --")),
    ];
    let engine = Engine::start(&folder)?;
    if let Some(Engine { name, url, .. }) = &engine {
        let way = |copies: u8| {
            let tool = format!("{remote} --store {url} --copies {copies} --");
            (format!("{name}, 3 servers, copies: {copies}"), tool)
        };
        ours.extend([way(1), way(2)]);
    }
    for name in names {
        let Some(script) = script(name, &folder)? else {
            findings.row(&[name, "not installed"], json!({"program": name}));
            continue;
        };
        let plain = must_succeed(&script.replace("TOOL", ""))?;
        row(findings, name, "all the memory it likes", &plain, &plain);
        let mut took = Vec::new();
        for (way, tool) in &ours {
            let run = once(&script.replace("TOOL", tool))?;
            took.push(run.seconds);
            row(findings, name, way, &run, &plain);
            let right = run.succeeded && run.output == plain.output;
            findings.promise(
                &format!("{name}, {way}: right"),
                f64::from(u8::from(right)),
                1.0,
                false,
            );
        }
        let mut beside = |way: &str, swap: Swap| {
            let run = run_limited(&format!("{name}, {way}"), LIMIT_MIB, swap, |limited| {
                once(&script.replace("TOOL", &limited.shell()))
            })?;
            match &run {
                Some(run) => row(findings, name, way, run, &plain),
                None => {
                    let json = json!({"program": name, "way": way, "missing": KILLED});
                    findings.row(&[name, way, "", KILLED], json);
                }
            }
            anyhow::Ok(run)
        };
        let disk = beside("swap file", Swap::file(&folder.join("swap"), 2048)?)?;
        beside("zram", Swap::zram(2048)?)?;
        if *name == "sort-66M" {
            let what = "sort-66M, time on servers ÷ on a swap file";
            match disk {
                Some(disk) => findings.promise(what, took[0] / disk.seconds, 1.0, true),
                None => findings.not_shown(what),
            }
        }
    }
    Ok(())
}

/// Prepares a program, and returns its script. None if it is not installed.
pub fn script(name: &str, folder: &Path) -> Result<Option<String>> {
    let known = PROGRAMS.iter().find(|(known, ..)| *known == name);
    let (_, needs, script) = known.context("no program has this name")?;
    if !shell::has(needs) && !Path::new(needs).exists() {
        return Ok(None);
    }
    prepare(name, folder)?;
    Ok(Some(script.replace('@', &folder.display().to_string())))
}

/// Runs a script that must succeed.
pub fn must_succeed(script: &str) -> Result<ServedRun> {
    let run = once(script)?;
    if !run.succeeded {
        bail!("this failed: {script}");
    }
    Ok(run)
}

fn row(findings: &mut Findings, name: &str, way: &str, run: &ServedRun, plain: &ServedRun) {
    let verdict = match (run.succeeded, run.output == plain.output) {
        (true, true) => "right",
        (true, false) => "WRONG",
        (false, _) => "failed",
    };
    let seconds = format!("{:.1} s", run.seconds);
    let json = json!({"program": name, "way": way, "seconds": run.seconds, "verdict": verdict});
    findings.row(&[name, way, &seconds, verdict], json);
}

fn once(script: &str) -> Result<ServedRun> {
    let started = Instant::now();
    let mut sh = Command::new("bash");
    sh.args(["-o", "pipefail", "-c", script]).stdin(Stdio::null()).stderr(Stdio::null());
    let output = sh.output()?;
    let seconds = started.elapsed().as_secs_f64();
    let succeeded = output.status.success();
    Ok(ServedRun { seconds, output: output.stdout, succeeded })
}

/// Writes the input of a program, such as lines to sort.
fn prepare(name: &str, folder: &Path) -> Result<()> {
    let Some(mib) = name.strip_prefix("sort-").map(|size| size.trim_end_matches('M')) else {
        return Ok(());
    };
    let mut rng = pagetax_core::access::Rng::new(1);
    let count = mib.parse::<usize>()? * 1_000_000 / 33;
    let mut text = String::with_capacity(count * 33);
    for _ in 0..count {
        text += &format!("{:016x}{:016x}\n", rng.next_u64(), rng.next_u64());
    }
    Ok(std::fs::write(folder.join(mib), text)?)
}
