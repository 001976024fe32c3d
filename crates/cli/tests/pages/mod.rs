//! What the tests of `pagetax ppgsz` share; each binary of tests uses a part of it.
#![allow(dead_code)]

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output, Stdio};

pub fn ppgsz(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagetax"));
    command.arg("ppgsz").args(args).env("NO_COLOR", "1").stdin(Stdio::null());
    for name in ["GLIBC_TUNABLES", "LD_PRELOAD", "MPSSHEAP", "MPSSSTACK", "MPSSCFGFILE"] {
        command.env_remove(name);
    }
    command
}

pub fn run(args: &[&str]) -> Output {
    ppgsz(args).output().unwrap()
}

pub fn code(args: &[&str]) -> Option<i32> {
    run(args).status.code()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

pub fn installed(program: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok();
    if !found {
        println!("SKIP: {program} is not installed");
    }
    found
}

/// Returns true if madvise(2) gives huge pages here.
pub fn advised() -> bool {
    let path = "/sys/kernel/mm/transparent_hugepage/enabled";
    let advised = std::fs::read_to_string(path).is_ok_and(|text| !text.contains("[never]"));
    if !advised {
        println!("SKIP: transparent huge pages are switched off ({path})");
    }
    advised
}

/// Runs a command under ppgsz and gives its document and what it printed.
pub fn verified(options: &[&str], argv: &[&str]) -> (Value, String) {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("pages.json");
    let json = format!("--json={}", file.display());
    let output = run(&[options, &[&json], argv].concat());
    assert!(output.status.success(), "{argv:?}: {}", stderr(&output));
    let text = std::fs::read_to_string(&file).unwrap();
    (serde_json::from_str(&text).unwrap(), String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Bytes as asked and resident bytes of some parts, of the largest process.
pub fn bytes(document: &Value, parts: &[&str]) -> (u64, u64) {
    let sums = |process: &Value| {
        let all = process["verdict"]["parts"].as_array().cloned().unwrap_or_default();
        let picked = all.iter().filter(|part| parts.iter().any(|name| part["part"] == *name));
        let number = |part: &Value, key: &str| part[key].as_u64().unwrap();
        picked.fold((0, 0), |(asked, resident), part| {
            (asked + number(part, "as_asked_bytes"), resident + number(part, "resident_bytes"))
        })
    };
    let processes = document["processes"].as_array().unwrap();
    processes.iter().map(sums).max_by_key(|(_, resident)| *resident).unwrap()
}

pub fn assert_share(document: &Value, parts: &[&str], least: f64, mib: u64) {
    let (asked, resident) = bytes(document, parts);
    println!("{parts:?}: {} of {} MiB as asked", asked >> 20, resident >> 20);
    assert!(resident >= mib << 20, "{resident} bytes seen: {document:#}");
    assert!(asked as f64 >= least * resident as f64, "{document:#}");
}

/// Compiles a C program of this folder.
pub fn compiled(directory: &Path, name: &str, flags: &[&str]) -> String {
    let program = directory.join(name);
    let source = format!("{}/tests/ppgsz/{name}.c", env!("CARGO_MANIFEST_DIR"));
    let status =
        Command::new("cc").args(["-O1", "-o"]).arg(&program).arg(source).args(flags).status();
    assert!(status.unwrap().success());
    program.to_str().unwrap().into()
}
