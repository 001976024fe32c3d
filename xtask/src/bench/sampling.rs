//! The cost and error of a sampled recording by the native engine: its slow-down on programs of five seconds
//! and more, and its misses in a million instructions compared with a whole recording by Valgrind's engine.

use super::{Outcome, pagetax};
use crate::shell;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

/// The largest slow-down of the program.
const SLOWER_LIMIT: f64 = 2.5;
/// The largest relative error of the misses, compared with the full recording.
const ERROR_LIMIT: f64 = 0.05;
/// Rounds: each is one bare run and one sampled recording.
const ROUNDS: usize = 2;

/// Name and script; `TOOL` stands before the measured command.
const PROGRAMS: &[(&str, &str)] = &[
    (
        "python3",
        "TOOL /usr/bin/python3 -c 'd = {i: str(i) for i in range(1500000)}; print(sum(len(d[k * 7919 % 1500000]) \
         for k in range(25000000))); e = [str(k) for k in range(2500000)]; e.sort(); print(e[-1])' > out",
    ),
    (
        "sqlite3",
        "TOOL sqlite3 :memory: 'CREATE TABLE t(a,b); WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT \
         n+1 FROM c LIMIT 4000000) INSERT INTO t SELECT n*7919%1000003, n FROM c; CREATE INDEX i ON t(a); \
         SELECT count(*), sum(x.b*y.b%7) FROM t x JOIN t y ON x.a = y.a; SELECT a%100 g, count(*), \
         avg(b) FROM t GROUP BY g ORDER BY 3 LIMIT 3;' > out",
    ),
    ("sort", "LC_ALL=C TOOL sort -S 4G --parallel=1 numbers > out"),
    (
        "perl",
        "PERL_HASH_SEED=0 TOOL perl -e 'for (1..10) { my %h; $h{\"k\".($_*7919%400009)} = $_ for 0..400000; my $s = \
         0; $s = ($s*31+$h{$_})%1000003 for sort keys %h; $s += $h{\"k\".($_*104729%400009)}||0 for 0..1500000; \
         print \"$s\\n\" }' > out",
    ),
    (
        "redis-server",
        "TOOL redis-server --port 0 --unixsocket socket --save '' > out & until redis-cli -s socket \
         ping 2> err | grep -q PONG; do sleep 0.01; done; redis-benchmark -s socket -t set,get -n \
         2000000 -r 1000000 -P 16 -q > out2; redis-cli -s socket shutdown nosave; wait",
    ),
];

pub fn run(parts: &[String]) -> Result<Outcome> {
    let known = || PROGRAMS.iter().map(|(name, _)| *name).collect::<Vec<_>>().join("; ");
    if let Some(wrong) = parts.iter().find(|part| PROGRAMS.iter().all(|(name, _)| name != part)) {
        bail!("no program is called `{wrong}`; there are: {}", known());
    }
    let pagetax = std::fs::canonicalize(pagetax()?)?;
    let folder = tempfile::tempdir()?;
    let mut rng = pagetax_core::access::Rng::new(1);
    let numbers: String = (0..32_000_000).map(|_| format!("{}\n", rng.below(1 << 30))).collect();
    std::fs::write(folder.path().join("numbers"), numbers)?;
    let tool = |options: &str| {
        format!("{} trapstat {options} -o tables --json=json --", pagetax.display())
    };
    let (full, sampled) =
        (tool("--backend record --engine valgrind"), tool("--sample --engine native"));
    let (mut rows, mut results, mut holds) = (Vec::new(), Vec::new(), true);
    let is_asked = |name: &str| parts.is_empty() || parts.iter().any(|part| part == name);
    for (name, script) in PROGRAMS.iter().filter(|(name, _)| is_asked(name)) {
        if !shell::has(name) {
            rows.push(vec![name.to_string(), "not installed".into()]);
            continue;
        }
        seconds(&script.replace("TOOL", &full), folder.path())?;
        let truth = misses(folder.path())?.0;
        for _ in 0..ROUNDS {
            let native = seconds(&script.replace("TOOL", ""), folder.path())?;
            let slower = seconds(&script.replace("TOOL", &sampled), folder.path())? / native;
            let (value, interval) = misses(folder.path())?;
            let error = value / truth - 1.0;
            holds &= slower <= SLOWER_LIMIT && error.abs() <= ERROR_LIMIT;
            let row = vec![
                name.to_string(),
                format!("{native:.1} s"),
                format!("{slower:.2}×"),
                format!("{truth:.1}"),
                format!("{value:.1} ± {interval:.1}"),
                format!("{:+.1} %", error * 100.0),
                if (value - truth).abs() <= interval { "yes" } else { "no" }.to_string(),
            ];
            eprintln!("{}", row.join("  "));
            rows.push(row);
            results
                .push(json!({"program": name, "native_s": native, "slower": slower, "full": truth,
                "sampled": value, "interval": interval}));
        }
    }
    Ok(Outcome {
        headings: vec![
            "program",
            "native",
            "sampled",
            "misses in a million",
            "sampled",
            "error",
            "in the interval",
        ],
        rows,
        json: json!(results),
        promise: (
            format!("at most {SLOWER_LIMIT} times slower, and {:.0} % off", ERROR_LIMIT * 100.0),
            holds,
        ),
    })
}

/// Returns the data misses in a million instructions of the last recording, and half of their interval.
fn misses(folder: &Path) -> Result<(f64, f64)> {
    let json: Value = serde_json::from_slice(&std::fs::read(folder.join("json"))?)?;
    let notes = json["notes"].as_array().context("the recording has no notes")?;
    let note = notes
        .iter()
        .filter_map(Value::as_str)
        .find_map(|note| note.split_once("data misses in a million instructions: "))
        .with_context(|| format!("no misses are noted: {notes:?}"))?;
    let mut words = note.1.split(' ');
    let value = words.next().unwrap_or_default().parse()?;
    let interval = words.nth(1).map_or(Ok(0.0), str::parse)?;
    Ok((value, interval))
}

fn seconds(script: &str, folder: &Path) -> Result<f64> {
    let mut sh = Command::new("sh");
    sh.args(["-c", script]).current_dir(folder).stderr(Stdio::null());
    let start = Instant::now();
    shell::succeed(&mut sh)?;
    Ok(start.elapsed().as_secs_f64())
}
