//! The time of `pagetax whatif --sample` on programs of some 10 seconds: two runs and a sampled recording.
//! The error of a sample's walks is that of `bench sampling`, and the error of predictions that of
//! `bench whatif`.

use super::whatif::{Held, make_inputs};
use super::{Outcome, number, pagetax};
use crate::shell;
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::process::{Command, Stdio};
use std::time::Instant;

/// The most seconds for a program of 10.
const SECONDS_MAX: f64 = 60.0;
const PROGRAM_SECONDS: f64 = 10.0;

/// Name and command, which runs in its own folder.
const PROGRAMS: [(&str, &str); 6] = [
    ("uniform", "./corpus uniform 512 200"),
    ("zipf", "./corpus zipf 512 150"),
    ("linked list", "./corpus list 256 35"),
    ("std::map", "./containers map 1300000"),
    (
        "python3",
        "/usr/bin/python3 -c 'd = {i: str(i) for i in range(3000000)}; print(sum(len(d[k * 7919 % 3000000]) \
         for k in range(10000000)))'",
    ),
    (
        "sqlite3",
        "sqlite3 :memory: 'CREATE TABLE t(a); WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n+1 FROM c \
         LIMIT 3000000) INSERT INTO t SELECT n*7919%1000003 FROM c; CREATE INDEX i ON t(a); \
         SELECT count(*) FROM t x JOIN t y ON x.a = y.a;'",
    ),
];

pub fn run(parts: &[String]) -> Result<Outcome> {
    let pagetax = std::fs::canonicalize(pagetax()?)?;
    let folder = tempfile::tempdir()?;
    make_inputs(folder.path())?;
    let _held = Held::scattered_memory(folder.path())?;
    let mut calibrate = Command::new(&pagetax);
    shell::succeed(calibrate.arg("calibrate").stdout(Stdio::null()))?;
    let (mut rows, mut results, mut is_kept) = (Vec::new(), Vec::new(), true);
    let asked = |name: &str| parts.is_empty() || parts.iter().any(|part| part == name);
    for (name, command) in PROGRAMS.iter().filter(|(name, _)| asked(name)) {
        let whatif = format!("{} whatif --sample --runs 1 --json=whatif.json", pagetax.display());
        let mut sh = Command::new("sh");
        sh.args(["-c", &format!("{whatif} -- {command} > table")]).current_dir(folder.path());
        let begun = Instant::now();
        shell::succeed(&mut sh).with_context(|| format!("whatif of {name}"))?;
        let seconds = begun.elapsed().as_secs_f64();
        let document = std::fs::read_to_string(folder.path().join("whatif.json"))?;
        let document: Value = serde_json::from_str(&document)?;
        let run_seconds = number(&document, "/base/time_ns")? / 1e9;
        is_kept &= seconds <= SECONDS_MAX * (run_seconds / PROGRAM_SECONDS).max(1.0);
        let walk_count = |key: &str| number(&document, &format!("/base/why/{key}_walk_count"));
        // None if it would save more than all CPU time, as prices of a busier moment do.
        let speedup = number(&document, "/sizes/0/speedup/value").ok();
        rows.push(vec![
            name.to_string(),
            format!("{run_seconds:.1} s"),
            format!("{seconds:.0} s"),
            format!("{:.0} million", (walk_count("chased")? + walk_count("other")?) / 1e6),
            speedup.map_or("none".into(), |speedup| format!("{speedup:.2}")),
        ]);
        results.push(json!({"program": name, "seconds": seconds, "result": document}));
    }
    let text = format!(
        "two runs of a program of {PROGRAM_SECONDS:.0} s and its sampled recording take at most {SECONDS_MAX:.0} s; \
         a longer program may take longer in proportion"
    );
    Ok(Outcome {
        headings: vec!["program", "a run", "whatif --sample --runs 1", "walks", "predicted"],
        rows,
        json: json!(results),
        promise: (text, is_kept),
    })
}
