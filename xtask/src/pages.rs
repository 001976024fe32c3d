//! `cargo xtask page-sizes`: the tables of docs/large-pages-measured.md. Each mechanism on each kind of
//! program on this kernel: bytes on huge pages by part, or the reason.

use crate::{book, shell};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

const PARTS: [&str; 6] = ["heap", "anon", "stack", "text", "data", "bss"];
const ADVICE: &str = "heap=2M,stack=2M,text=2M,bss=2M";
const ALL: &str = "heap=2M,anon=2M,stack=2M,text=2M,data=2M,bss=2M";

/// A kind of program: its name, and how it comes about in a directory.
struct ProgramKind {
    name: &'static str,
    needs: &'static str,
    build: &'static str,
    run: &'static [&'static str],
}

const KINDS: &[ProgramKind] = &[
    ProgramKind {
        name: "glibc, dynamic",
        needs: "cc",
        build: "cc -O1 -pthread -o dynamic fill.c",
        run: &["./dynamic"],
    },
    ProgramKind {
        name: "glibc, static",
        needs: "cc",
        build: "cc -O1 -pthread -static -o static fill.c",
        run: &["./static"],
    },
    ProgramKind {
        name: "musl, static",
        needs: "musl-gcc",
        build: "musl-gcc -O1 -pthread -static -o musl fill.c",
        run: &["./musl"],
    },
    ProgramKind { name: "Go", needs: "go", build: "go build -o go fill.go", run: &["./go"] },
    ProgramKind {
        name: "Rust",
        needs: "rustc",
        build: "rustc -O -o rust fill.rs",
        run: &["./rust"],
    },
    ProgramKind {
        name: "JVM",
        needs: "javac",
        build: "javac Fill.java",
        run: &["java", "-XX:+UseSerialGC", "-Xms256m", "-Xmx512m", "Fill"],
    },
    ProgramKind { name: "python3", needs: "python3", build: "true", run: &["python3", "fill.py"] },
    ProgramKind { name: "node", needs: "node", build: "true", run: &["node", "fill.js"] },
];

/// A mechanism: its heading, options of ppgsz, and whether it is applied to a running process.
struct Mechanism {
    name: &'static str,
    options: &'static [&'static str],
    running: bool,
}

const MECHANISMS: &[Mechanism] = &[
    Mechanism {
        name: "as it is",
        options: &["-o", "heap=0,anon=0,stack=0,text=0,data=0,bss=0"],
        running: false,
    },
    Mechanism { name: "a command", options: &["-o", ADVICE], running: false },
    Mechanism { name: "a command, --follow", options: &["--follow", "-o", ADVICE], running: false },
    Mechanism { name: "a running process", options: &["-o", ALL], running: true },
    Mechanism { name: "a running process, -F", options: &["-F", "-o", ALL], running: true },
    Mechanism { name: "--undo", options: &["--undo"], running: true },
];

/// Numbered reasons below the tables.
#[derive(Default)]
struct Notes(Vec<String>);

impl Notes {
    fn number(&mut self, text: &str) -> usize {
        let found = self.0.iter().position(|known| known == text);
        found.unwrap_or_else(|| {
            self.0.push(text.into());
            self.0.len() - 1
        }) + 1
    }
}

/// Measures all, and writes the tables into the document.
pub fn run() -> Result<()> {
    let pagetax = std::fs::canonicalize(shell::pagetax()?)?;
    let sources = std::fs::canonicalize("xtask/src/pages")?;
    let directory = tempfile::tempdir()?;
    for entry in std::fs::read_dir(sources)?.flatten() {
        std::fs::copy(entry.path(), directory.path().join(entry.file_name()))?;
    }
    let mut kinds = Vec::new();
    for kind in KINDS {
        if shell::has(kind.needs) {
            let mut sh = Command::new("sh");
            shell::succeed(sh.args(["-c", kind.build]).current_dir(directory.path()))?;
            kinds.push(kind);
        } else {
            println!("SKIP: {} ({} is not installed)", kind.name, kind.needs);
        }
    }
    let mut notes = Notes::default();
    let mut text = String::new();
    for mechanism in MECHANISMS {
        let mut cells = BTreeMap::new();
        for kind in &kinds {
            let document = measured(&pagetax, mechanism, kind, directory.path())
                .with_context(|| format!("{}: {}", mechanism.name, kind.name))?;
            for part in PARTS {
                cells.insert((part, kind.name), cell(&document, part, &mut notes));
            }
            println!("{}: {}", mechanism.name, kind.name);
        }
        text += &table(mechanism, &kinds, &cells);
    }
    for (index, note) in notes.0.iter().enumerate() {
        text += &format!("{}. {note}\n", index + 1);
    }
    write(&text)
}

fn measured(
    pagetax: &Path,
    mechanism: &Mechanism,
    kind: &ProgramKind,
    directory: &Path,
) -> Result<Value> {
    let json = directory.join("pages.json");
    let mut command = Command::new(pagetax);
    command.arg("ppgsz").args(mechanism.options).arg(format!("--json={}", json.display()));
    command.current_dir(directory).stderr(Stdio::null()).stdout(Stdio::null());
    if mechanism.running {
        let mut program = Command::new(kind.run[0]);
        program.args(&kind.run[1..]).current_dir(directory).stdout(Stdio::piped());
        let mut child = program.spawn()?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().context("stdout was not piped")?)
            .read_line(&mut line)?;
        if mechanism.options.contains(&"--undo") {
            let pid = child.id().to_string();
            let before = ["ppgsz", "-o", "heap=2M,anon=2M,stack=2M,bss=2M", "-p", &pid];
            Command::new(pagetax).args(before).stdout(Stdio::null()).status()?;
        }
        let status = command.args(["-p", &child.id().to_string()]).status();
        child.kill()?;
        child.wait()?;
        if !status?.success() {
            bail!("{command:?} failed");
        }
    } else {
        shell::succeed(command.args(kind.run))?;
    }
    Ok(serde_json::from_str(&std::fs::read_to_string(json)?)?)
}

/// Formats the largest process: bytes on pages of 2M and more, of all bytes, and the numbers of the reasons.
fn cell(document: &Value, name: &str, notes: &mut Notes) -> String {
    let part = |process: &Value| {
        let parts = process["verdict"]["parts"].as_array()?.clone();
        parts.into_iter().find(|part| part["part"] == name)
    };
    let resident = |part: &Value| part["resident_bytes"].as_u64().unwrap_or(0);
    let processes = document["processes"].as_array().cloned().unwrap_or_default();
    let Some(part) = processes.iter().filter_map(part).max_by_key(resident) else {
        return "not asked".into();
    };
    let all = resident(&part);
    if all < 2 << 20 {
        return format!("{} K in all", all >> 10);
    }
    let sizes = part["resident_bytes_by_page"].as_object().cloned().unwrap_or_default();
    let large: u64 = sizes
        .iter()
        .filter(|(size, _)| size.parse::<u64>().is_ok_and(|size| size >= 2 << 20))
        .filter_map(|(_, bytes)| bytes.as_u64())
        .sum();
    let mut text = format!("{} of {} M", large >> 20, all >> 20);
    for why in part["why"].as_array().into_iter().flatten() {
        // What is less than a huge page needs no words.
        if why["bytes"].as_u64().is_some_and(|bytes| bytes >= 2 << 20)
            && let Some(reason) = why["reason"].as_str()
        {
            text += &format!(" [{}]", notes.number(reason));
        }
    }
    text
}

fn table(
    mechanism: &Mechanism,
    kinds: &[&ProgramKind],
    cells: &BTreeMap<(&str, &str), String>,
) -> String {
    let options = mechanism.options.join(" ");
    let process = if mechanism.running { "-p PID" } else { "CMD" };
    let mut out = format!("### {}\n\n`pagetax ppgsz {options} {process}`\n\n|", mechanism.name);
    kinds.iter().for_each(|kind| out += &format!(" | {}", kind.name));
    out += " |\n|---";
    kinds.iter().for_each(|_| out += "|---");
    out += "|\n";
    for part in PARTS {
        out += &format!("| {part}");
        kinds.iter().for_each(|kind| out += &format!(" | {}", cells[&(part, kind.name)]));
        out += " |\n";
    }
    out + "\n"
}

fn write(tables: &str) -> Result<()> {
    let mode = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled")?;
    let head = format!("{}, transparent_hugepage: {}.", book::machine()?, mode.trim());
    book::write("cargo xtask page-sizes", &format!("{head}\n\n{tables}"))
}
