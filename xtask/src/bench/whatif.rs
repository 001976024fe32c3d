//! The error of `pagetax whatif`: its predicted speed-up from 4K to 2M pages compared with that of trials, on
//! programs of known kinds and on real ones. Beside it stands the error of who predicts that nothing changes.
//! Writes the table of docs/whatif.md if all of them ran.

use super::{Outcome, number, pagetax};
use crate::shell;
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// In percent, either way.
const ERROR_MAX: f64 = 10.0;
/// The share of good predictions that the bench promises.
const WITHIN_MIN: f64 = 0.9;
/// A program gains if trials are this many times as fast on 2M pages.
const GAIN_MIN: f64 = 1.1;
/// The number of programs that are to gain.
const GAINERS_MIN: usize = 8;
/// The fewest and the most pairs of trials.
const PAIRS: (usize, usize) = (11, 41);
/// The time that the trials of a program may take between these.
const TRIALS_FOR: Duration = Duration::from_secs(24);
/// The share of the error of who predicts 1.00 that remains, of the programs that gain.
const ERROR_LEFT_MAX: f64 = 0.5;

const CORPUS_C: &str = "xtask/src/bench/whatif_corpus.c";
const CONTAINERS_CC: &str = "xtask/src/bench/whatif_containers.cc";
/// Name, required programs, and command, which runs in its own folder.
const PROGRAMS: &[(&str, &str, &str)] = &[
    ("sequential", "cc", "./corpus sequential 256 100"),
    ("strided", "cc", "./corpus strided 256 60"),
    ("uniform", "cc", "./corpus uniform 512 20"),
    ("zipf", "cc", "./corpus zipf 512 30"),
    ("linked list", "cc", "./corpus list 256 4"),
    ("hash join", "cc", "./corpus hash-join 256 8"),
    ("sort", "sort", "sort -S 1G --parallel=1 numbers -o sorted"),
    (
        "python3",
        "/usr/bin/python3",
        "/usr/bin/python3 -c 'd = {i: str(i) for i in range(400000)}; print(sum(len(d[k * 7919 % 400000]) \
         for k in range(800000)))'",
    ),
    (
        "sqlite3",
        "sqlite3",
        "sqlite3 :memory: 'CREATE TABLE t(a); WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n+1 \
         FROM c LIMIT 200000) INSERT INTO t SELECT n*7919%100003 FROM c; CREATE INDEX i ON t(a); \
         SELECT count(*) FROM t x JOIN t y ON x.a = y.a;'",
    ),
    ("redis", "redis-server", "sh redis.sh"),
    ("std::map", "g++", "./containers map 150000"),
    ("std::unordered_map", "g++", "./containers unordered_map 500000"),
    ("std::deque", "g++", "./containers deque 20000000"),
    ("std::priority_queue", "g++", "./containers priority_queue 2000000"),
    (
        "python3 list",
        "/usr/bin/python3",
        "/usr/bin/python3 -c 'a = list(range(1500000)); print(sum(a[k * 7919 % 1500000] for k in range(700000)))'",
    ),
    (
        "python3 bytes",
        "/usr/bin/python3",
        "/usr/bin/python3 -c 'b = bytearray(200 << 20); print(sum(b[k * 999983 % len(b)] for k in range(500000)))'",
    ),
    (
        "perl hash",
        "perl",
        "perl -e 'for (1..200000) { $h{$_ * 7919 % 1000003} = $_ } $s += $h{$_ * 31 % 1000003} // 0 for 1..300000; \
         print $s'",
    ),
    (
        "perl sort",
        "perl",
        "perl -e '@a = map { $_ * 7919 % 1000003 } 1..500000; @b = sort { $a <=> $b } @a; print $b[5]'",
    ),
    (
        "awk",
        "mawk",
        "mawk 'BEGIN { for (i = 0; i < 200000; i++) a[i * 7919 % 1000003] = i; for (i = 0; i < 400000; i++) \
         s += a[i * 31 % 200000]; print s }'",
    ),
    ("xz", "xz", "xz -4 -c numbers"),
    ("bzip2", "bzip2", "bzip2 -c numbers"),
    ("zstd", "zstd", "zstd -12 -c numbers"),
    ("gcc", "gcc", "gcc -O2 -S -o /dev/null corpus.c"),
];

const REDIS_SH: &str = "\
export GLIBC_TUNABLES
redis-server --port 0 --unixsocket \"$PWD/socket\" --save '' --daemonize no > log &
until redis-cli -s socket ping 2> err | grep -q PONG; do sleep 0.01; done
redis-benchmark -s socket -t set,get -n 20000 -r 100000 -d 100 -q > out
redis-cli -s socket shutdown nosave
wait
";

pub fn run(parts: &[String]) -> Result<Outcome> {
    let pagetax = std::fs::canonicalize(pagetax()?)?;
    let folder = tempfile::tempdir()?;
    make_inputs(folder.path())?;
    let (mut rows, mut results, mut errors) = (Vec::new(), Vec::new(), Vec::new());
    let _held = Held::scattered_memory(folder.path())?;
    let mut calibrate = Command::new(&pagetax);
    shell::succeed(calibrate.arg("calibrate").stdout(Stdio::null()))?;
    let asked = |name: &str| parts.is_empty() || parts.iter().any(|part| part == name);
    for (name, needs, command) in PROGRAMS.iter().filter(|(name, ..)| asked(name)) {
        if !shell::has(needs) && !Path::new(needs).exists() || !shell::has("valgrind") {
            rows.push(vec![name.to_string(), "not installed".into()]);
            continue;
        }
        let shell = |script: &str| -> Result<Duration> {
            let begun = Instant::now();
            let mut sh = Command::new("sh");
            sh.args(["-c", script]).current_dir(folder.path());
            shell::succeed(&mut sh).with_context(|| format!("whatif of {name}"))?;
            Ok(begun.elapsed())
        };
        // The command's own output would mix with ours.
        let once = shell(&format!("{command} > output"))?;
        let pairs = (TRIALS_FOR.as_secs_f64() / 2.0 / once.as_secs_f64()) as usize;
        let pairs = pairs.clamp(PAIRS.0, PAIRS.1);
        let whatif = format!("{} whatif -f --verify --runs {pairs}", pagetax.display());
        shell(&format!("{whatif} --json=whatif.json -- {command} > table"))?;
        let document = std::fs::read_to_string(folder.path().join("whatif.json"))?;
        let document: Value = serde_json::from_str(&document)?;
        let error = number(&document, "/sizes/0/error_percent")?;
        let measured = number(&document, "/sizes/0/measured_speedup/value")?;
        errors.push(Error { measured, percent: error });
        rows.push(row(name, &document, error)?);
        results.push(json!({"program": name, "result": document}));
    }
    let headings = vec![
        "program",
        "4K",
        "predicted",
        "low – high",
        "measured",
        "interval",
        "error",
        "walks",
        "faults",
        "filling",
        "unmapping",
        "took",
        "if off",
    ];
    let promise = promise(&errors, parts.is_empty());
    Ok(Outcome { headings, rows, json: json!(results), promise })
}

/// The error of one prediction.
struct Error {
    /// The speed-up of the trials.
    measured: f64,
    /// The predicted speed-up over the measured one, less 1, in percent.
    percent: f64,
}

impl Error {
    /// Returns the error, in percent, of who predicts that the program takes as long on 2M pages.
    fn of_no_change(&self) -> f64 {
        (1.0 / self.measured - 1.0) * 100.0
    }
}

/// Sums up the errors, and says whether they keep the limits. A part of the programs may all be slow to gain.
fn promise(errors: &[Error], is_whole: bool) -> (String, bool) {
    let within = errors.iter().filter(|error| error.percent.abs() <= ERROR_MAX).count();
    let largest =
        errors.iter().map(|error| error.percent).max_by(|a, b| a.abs().total_cmp(&b.abs()));
    let gainers: Vec<&Error> = errors.iter().filter(|error| error.measured >= GAIN_MIN).collect();
    let mean = |of: fn(&Error) -> f64| {
        gainers.iter().map(|error| of(error).abs()).sum::<f64>() / gainers.len().max(1) as f64
    };
    let (ours, of_no_change) = (mean(|error| error.percent), mean(Error::of_no_change));
    let text = format!(
        "{within} of {} within ±{ERROR_MAX} % ({:.0} % wanted). The largest error is {:+.1} %. {} gain 10 % or more \
         ({GAINERS_MIN} wanted): their mean error is {ours:.1} %. That of predicting 1.00 is {of_no_change:.1} % \
         (at most half of it is wanted)",
        errors.len(),
        WITHIN_MIN * 100.0,
        largest.unwrap_or(f64::NAN),
        gainers.len(),
    );
    let is_kept = within as f64 >= WITHIN_MIN * errors.len() as f64
        && (ours <= ERROR_LEFT_MAX * of_no_change || gainers.is_empty())
        && (gainers.len() >= GAINERS_MIN || !is_whole);
    (text, is_kept)
}

/// Memory that nobody gets as long as this lives.
pub(super) struct Held(Child);

impl Held {
    /// Allocates all free memory in blocks below 2M. The cost of base pages in a virtual machine depends on
    /// their scatter, which changes by the minute. Without these blocks the calibration and all trials get
    /// adjacent pages.
    pub(super) fn scattered_memory(folder: &Path) -> Result<Held> {
        let text = std::fs::read_to_string("/proc/buddyinfo").context("cannot read buddyinfo")?;
        let pages = |line: &str| -> u64 {
            let counts = line.split_whitespace().skip(4).take(9).enumerate();
            counts.map(|(order, count)| count.parse::<u64>().unwrap_or(0) << order).sum()
        };
        let scattered = text.lines().map(pages).sum::<u64>() >> 8;
        let available = pagetax_host::measure::backed_memory::available_bytes(&Default::default());
        let most = available.map_err(anyhow::Error::msg)? >> 21;
        let mut hold = Command::new(folder.join("corpus"));
        hold.args(["hold", &(scattered + scattered / 8).min(most).to_string(), "0"]);
        let mut held = Held(hold.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?);
        let output = held.0.stdout.take().context("the holder has no output")?;
        let mut word = String::new();
        BufReader::new(output).read_line(&mut word)?;
        anyhow::ensure!(word == "held\n", "scattered memory could not be held");
        Ok(held)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        // It ends with its input; whether it could be waited for changes nothing.
        let _ = self.0.wait();
    }
}

fn row(name: &str, document: &Value, error: f64) -> Result<Vec<String>> {
    let at = |pointer: &str| number(document, pointer);
    let size = |key: &str| number(document, &format!("/sizes/0/{key}"));
    let range = |key: &str, digits: usize| {
        let end = |end: &str| match size(&format!("{key}/{end}")) {
            Ok(value) => format!("{value:.digits$}"),
            Err(_) => "no bound".into(),
        };
        format!("{} – {}", end("low"), end("high"))
    };
    let saved = |part: &str| -> Result<String> {
        Ok(format!("{:.0} ms", size(&format!("saved_parts_ns/{part}/value"))? / 1e6))
    };
    let took = size("took/fraction");
    Ok(vec![
        name.into(),
        format!("{:.0} ms", at("/base/time_ns")? / 1e6),
        format!("{:.3}", size("speedup/value")?),
        range("speedup", 2),
        format!("{:.3}", size("measured_speedup/value")?),
        range("measured_speedup", 3),
        format!("{error:+.1} %"),
        saved("page_walks")?,
        saved("faults")?,
        saved("filling")?,
        saved("unmapping")?,
        took.map_or("–".into(), |fraction| format!("{:.0} %", fraction * 100.0)),
        if error.abs() <= ERROR_MAX { String::new() } else { explanation(document)? },
    ])
}

/// Explains a wrong prediction by its own figures.
fn explanation(document: &Value) -> Result<String> {
    let size = |key: &str| number(document, &format!("/sizes/0/{key}"));
    let (predicted, measured) = (size("speedup/value")?, size("measured_speedup/value")?);
    let holds = |of: &str, value: f64| -> bool {
        let low = size(&format!("{of}/low")).unwrap_or(0.0);
        (low..=size(&format!("{of}/high")).unwrap_or(f64::INFINITY)).contains(&value)
    };
    if let Ok(fraction) = size("took/fraction")
        && fraction < 0.9
        && predicted > measured
    {
        let why = document.pointer("/sizes/0/took/why").and_then(Value::as_str).unwrap_or("");
        return Ok(format!("{:.0} % of its memory was on 2M pages: {why}", fraction * 100.0));
    }
    Ok(match (holds("measured_speedup", predicted), holds("speedup", measured)) {
        (true, _) => "within the interval of the trials".into(),
        (_, true) if predicted < measured => {
            "within low – high: its walks overlap less than those of a gather".into()
        }
        (_, true) => "within low – high: its walks hide behind other work".into(),
        _ => "neither walks nor faults account for it".into(),
    })
}

pub(super) fn make_inputs(folder: &Path) -> Result<()> {
    let mut rng = pagetax_core::access::Rng::new(1);
    let numbers: String = (0..500_000).map(|_| format!("{}\n", rng.below(1 << 30))).collect();
    std::fs::write(folder.join("numbers"), numbers)?;
    std::fs::write(folder.join("redis.sh"), REDIS_SH)?;
    std::fs::copy(CORPUS_C, folder.join("corpus.c"))?;
    for (compiler, source, program) in
        [("cc", CORPUS_C, "corpus"), ("g++", CONTAINERS_CC, "containers")]
    {
        let mut compile = Command::new(compiler);
        compile.args(["-O2", source, "-o"]).arg(folder.join(program));
        shell::succeed(&mut compile).context("install a compiler: gcc and g++")?;
    }
    Ok(())
}
