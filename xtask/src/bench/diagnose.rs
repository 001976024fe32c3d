//! Whether `diagnose` tells the truth: its speed-ups of real programs beside those of a plain A/B
//! that runs the same commands by itself, without watching them.

use super::{Outcome, pagetax};
use crate::shell;
use anyhow::{Context, Result, bail};
use pagetax_core::diagnosis::Diagnosis;
use pagetax_core::stats::{Ratio, ratio_of_pairs};
use serde_json::json;
use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

const ROUNDS: usize = 6;
const TUNABLE: (&str, &str) = ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1");

/// Programs that nobody here wrote, with something to do; `FILE` is a text of random numbers.
const PROGRAMS: &[(&str, &str)] = &[
    (
        "python3",
        "python3 -c 'd = {i: str(i) for i in range(2000000)}; print(sum(len(d[k * 7919 % 2000000]) \
         for k in range(2000000)))'",
    ),
    ("sort", "LC_ALL=C sort -S 1G --parallel=1 FILE | tail -n 1"),
    (
        "sqlite3",
        "sqlite3 :memory: 'CREATE TABLE t(a); WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT \
         n+1 FROM c LIMIT 700000) INSERT INTO t SELECT n*7919%1000003 FROM c; CREATE INDEX i ON \
         t(a); SELECT count(*) FROM t x JOIN t y ON x.a = y.a;'",
    ),
    ("gcc", "gcc -O2 -x c -c -o /dev/null FILE.c"),
    ("xz", "head -c 16000000 FILE | xz -9 -T1 | wc -c"),
    (
        "redis-server",
        "redis-server --port 7391 --save '' --daemonize no >/dev/null & sleep 0.3; redis-benchmark \
         -p 7391 -t set,get -n 150000 -r 1000000 -d 64 -q >/dev/null; redis-cli -p 7391 shutdown \
         nosave; wait",
    ),
];

pub fn run() -> Result<Outcome> {
    let pagetax = pagetax()?;
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("numbers");
    make_inputs(&file)?;
    let (mut rows, mut results, mut agree) = (Vec::new(), Vec::new(), true);
    for (program, script) in PROGRAMS {
        if !shell::has(program) {
            rows.push(vec![program.to_string(), "not installed".into()]);
            continue;
        }
        let script = script.replace("FILE", file.to_str().context("a path that is no text")?);
        let told = diagnosed(&pagetax, &script)?;
        let plain = measured(&script, directory.path())?;
        let overlap = told.low <= plain.high && plain.low <= told.high;
        agree &= overlap;
        let word = if overlap { "agree" } else { "DIFFER" };
        rows.push(vec![program.to_string(), told.to_string(), plain.to_string(), word.into()]);
        results.push(json!({"program": program, "diagnose": told, "plain": plain}));
    }
    Ok(Outcome {
        headings: vec!["program", "diagnose: 2M speed-up", "plain A/B", ""],
        rows,
        json: json!(results),
        promise: ("the intervals of diagnose and of a plain A/B overlap".into(), agree),
    })
}

/// 24 MB of random numbers, and a C file of many functions.
fn make_inputs(file: &Path) -> Result<()> {
    let mut rng = pagetax_core::access::Rng::new(1);
    let numbers: String = (0..2_500_000).map(|_| format!("{}\n", rng.below(1 << 30))).collect();
    std::fs::write(file, numbers)?;
    let function = |i: u32| {
        format!(
            "int f{i}(int a) {{ int s = {i}; for (int j = 0; j < a; j++) s += s % (j + {i} + 1); return s; }}\n"
        )
    };
    Ok(std::fs::write(file.with_extension("c"), (0..1_500).map(function).collect::<String>())?)
}

fn diagnosed(pagetax: &str, script: &str) -> Result<Ratio> {
    let runs = ROUNDS.to_string();
    let options = ["diagnose", "--json", "-", "--sizes", "2M", "--runs", &runs, "--", "sh", "-c"];
    let text = shell::output(Command::new(pagetax).args(options).arg(script))?;
    let diagnosis: Diagnosis = serde_json::from_str(&text)?;
    let trial = diagnosis.trials.iter().find(|t| t.name == "thp-2M");
    trial
        .and_then(|t| t.speedup)
        .context("no trial on 2M pages; set /sys/kernel/mm/transparent_hugepage/enabled to madvise")
}

/// As it is ÷ with the tunable, alternating which goes first.
fn measured(script: &str, directory: &Path) -> Result<Ratio> {
    let time = |tuned: bool| -> Result<u64> {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::null()).stderr(Stdio::null());
        command.stdout(File::create(directory.join("out"))?);
        if tuned {
            command.env(TUNABLE.0, TUNABLE.1);
        }
        let start = Instant::now();
        if !command.status()?.success() {
            bail!("`{script}` fails");
        }
        Ok(start.elapsed().as_nanos() as u64)
    };
    time(false)?;
    let (mut plain, mut tuned) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        for turn in 0..2 {
            let with = (round + turn) % 2 == 1;
            if with { &mut tuned } else { &mut plain }.push(time(with)?);
        }
    }
    ratio_of_pairs(&plain, &tuned, 1).context("runs without a time")
}
