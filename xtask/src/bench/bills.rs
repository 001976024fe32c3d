//! The errors of `pagetax ci` while a compiler runs beside it: alarms about programs that did not change, and
//! growth that was planted into other people's programs.

use super::programs::{Compiler, Workshop};
use super::{Outcome, pagetax};
use anyhow::{Context, Result, bail};
use pagetax_core::bill::{Bill, BillFinding, Outcome as Meaning};
use pagetax_core::shares::clopper_pearson;
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Runs of unchanged programs, all together.
const UNCHANGED: usize = 200;

/// A growth that is planted.
struct Plant {
    name: &'static str,
    /// The words of the command. NUMBERS is a file, and WHAT stands for what differs.
    run: &'static [&'static str],
    /// True if children are recorded.
    follow: bool,
    /// The words that stand for WHAT in the program without the growth.
    before: &'static str,
    /// Those of the program with it.
    after: &'static str,
    /// The reading that must fail.
    reading: &'static str,
}

const PYTHON: &[&str] = &["/usr/bin/python3", "-S", "-c", "WHAT"];

const PLANTS: [Plant; 10] = [
    Plant {
        name: "sqlite3: 6 % more rows",
        run: &["sqlite3", ":memory:", "WHAT"],
        follow: false,
        before: "create table t(a, b); with recursive c(n) as (select 1 union all select n + 1 from c limit 8000) insert into t select n, hex(n * 7919) from c; select count(*) from t",
        after: "create table t(a, b); with recursive c(n) as (select 1 union all select n + 1 from c limit 8480) insert into t select n, hex(n * 7919) from c; select count(*) from t",
        reading: "instruction_count",
    },
    Plant {
        name: "xz: a dictionary 12 % larger",
        run: &["xz", "--threads=1", "WHAT", "--stdout", "NUMBERS"],
        follow: false,
        before: "--lzma2=preset=0,dict=256KiB",
        after: "--lzma2=preset=0,dict=288KiB",
        reading: "touched_4k_count",
    },
    Plant {
        name: "perl: a hash with 6 % more keys",
        run: &["perl", "-e", "WHAT"],
        follow: false,
        before: "$h{$_} = $_ for 1..30000; print scalar keys %h",
        after: "$h{$_} = $_ for 1..31800; print scalar keys %h",
        reading: "minor_fault_count",
    },
    Plant {
        name: "sed: a second expression for a third of the lines",
        run: &["sed", "WHAT", "NUMBERS"],
        follow: false,
        before: "s/7/8/",
        after: "s/7/8/;1,12000s/^x//",
        reading: "instruction_count",
    },
    Plant {
        name: "glibc: freed memory is given back and faulted in again",
        run: &[
            "env",
            "WHAT",
            "/usr/bin/python3",
            "-S",
            "-c",
            "for i in range(4): b = bytearray(80_000); del b",
        ],
        follow: true,
        // Without a pad, each free that is large enough gives memory back.
        before: "GLIBC_TUNABLES=glibc.malloc.top_pad=0:glibc.malloc.trim_threshold=4194304",
        after: "GLIBC_TUNABLES=glibc.malloc.top_pad=0:glibc.malloc.trim_threshold=0000000",
        reading: "minor_fault_count",
    },
    Plant {
        name: "python3: a child that copies what it inherited",
        run: PYTHON,
        follow: false,
        before: "import os; d = bytearray(8 << 20)\nif not os.fork(): os._exit(0)\nos.wait()",
        after: "import os; d = bytearray(8 << 20)\nif not os.fork():\n for i in range(0, 600_000, 4096): d[i] = 1\n os._exit(0)\nos.wait()",
        reading: "minor_fault_count",
    },
    Plant {
        name: "python3: one page in a hundred of a map lies apart",
        run: PYTHON,
        follow: false,
        before: "import mmap; m = mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE)\nfor i in range(2048): m[i * 4096] = 1",
        after: "import mmap; m = mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE)\nfor i in range(2048): m[i * 4096 if i % 100 else (8 << 20) + (i // 100 << 21)] = 1",
        reading: "touched_2m_count",
    },
    Plant {
        name: "python3: one access in 200 elsewhere",
        run: PYTHON,
        follow: false,
        before: "m = bytearray(16 << 20)\nfor i in range(50_000): m[i * 64 % len(m) if i % 200 else i * 64 % len(m)] = 1",
        after: "m = bytearray(16 << 20)\nfor i in range(50_000): m[i * 64 % len(m) if i % 200 else i * 7919 % len(m)] = 1",
        reading: "tlb_miss_4k_count",
    },
    Plant {
        name: "awk: an array with 6 % more elements",
        run: &["awk", "WHAT"],
        follow: false,
        before: "BEGIN { for (i = 0; i < 30000; i++) a[i] = i; print length(a) }",
        after: "BEGIN { for (i = 0; i < 31800; i++) a[i] = i; print length(a) }",
        reading: "instruction_count",
    },
    Plant {
        name: "sort: a key instead of the whole line",
        run: &["sort", "WHAT", "NUMBERS"],
        follow: false,
        before: "-n",
        after: "-nk1,1",
        reading: "instruction_count",
    },
];

/// Runs the bench, or so many runs of unchanged programs.
pub fn run(parts: &[String]) -> Result<Outcome> {
    let unchanged = parts.first().map(|part| part.parse::<usize>()).transpose();
    let unchanged = unchanged.context("the part is a number of runs")?.unwrap_or(UNCHANGED);
    let stage = Bills { pagetax: fs::canonicalize(pagetax()?)?, workshop: Workshop::new(40)? };
    let compiler = Compiler::start()?;
    let (mut rows, mut found, mut alarms) = (Vec::new(), 0, Vec::new());
    for (nth, plant) in PLANTS.iter().enumerate() {
        let folder = stage.write(nth, plant, plant.before)?;
        stage.ci(&folder, &["--update"])?;
        let runs = (unchanged + nth) / PLANTS.len();
        for _ in 0..runs {
            let findings = stage.ci(&folder, &[])?;
            alarms.extend(
                findings.into_iter().map(|finding| format!("{}: {}", plant.name, finding.text)),
            );
        }
        stage.write(nth, plant, plant.after)?;
        let findings = stage.ci(&folder, &[])?;
        let hit = findings.iter().find(|finding| finding.reading == plant.reading);
        found += usize::from(hit.is_some());
        let cause = |finding: &BillFinding| finding.cause.clone().unwrap_or_default();
        rows.push(vec![
            plant.name.into(),
            runs.to_string(),
            hit.map_or("MISSED".into(), |finding| finding.text.clone()),
            hit.map(cause).unwrap_or_default(),
        ]);
        eprintln!("{}", rows[nth].join(" | "));
    }
    drop(compiler);
    alarms.iter().for_each(|alarm| println!("false alarm: {alarm}"));
    let (_, most) = clopper_pearson(alarms.len() as u64, unchanged as u64);
    let promise = format!(
        "{found} of {} planted growths found; {} false alarms in {unchanged} runs (at most {:.1} %)",
        PLANTS.len(),
        alarms.len(),
        most * 100.0
    );
    let holds = found == PLANTS.len() && alarms.is_empty();
    Ok(Outcome {
        headings: vec!["planted", "runs unchanged", "found", "cause"],
        json: json!({"found": found, "alarms": alarms, "unchanged": unchanged}),
        rows,
        promise: (promise, holds),
    })
}

struct Bills {
    pagetax: PathBuf,
    workshop: Workshop,
}

impl Bills {
    /// Writes the file of a plant, and returns its folder.
    fn write(&self, nth: usize, plant: &Plant, what: &str) -> Result<PathBuf> {
        let folder = self.workshop.path(&nth.to_string());
        fs::create_dir_all(&folder)?;
        let numbers = self.workshop.path("numbers").display().to_string();
        let word = |word: &&str| word.replace("NUMBERS", &numbers).replace("WHAT", what);
        let words: Vec<String> = plant.run.iter().map(word).collect();
        let words = serde_json::to_string(&words)?;
        let text =
            format!("[[command]]\nname = \"it\"\nrun = {words}\nfollow = {}\n", plant.follow);
        fs::write(folder.join("pagetax.toml"), text)?;
        Ok(folder)
    }

    /// Runs `pagetax ci`, and returns what failed.
    fn ci(&self, folder: &Path, args: &[&str]) -> Result<Vec<BillFinding>> {
        let mut ci = Command::new(&self.pagetax);
        ci.args(["--quiet", "ci", "--json"]).args(args).current_dir(folder).stdin(Stdio::null());
        let output = ci.stderr(Stdio::inherit()).output()?;
        if !matches!(output.status.code(), Some(0 | 1)) {
            bail!("pagetax ci in {}: {}", folder.display(), output.status);
        }
        let bill: Bill = serde_json::from_slice(&output.stdout)?;
        let findings = bill.commands.into_iter().flat_map(|command| command.findings);
        Ok(findings.filter(|finding| finding.outcome == Meaning::Failed).collect())
    }
}
