//! `pagetax trapstat` end to end: real programs come through both engines unharmed, and bad ones get a
//! clear word.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn has(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// Says so if something is not installed.
fn has_all(programs: &[&str]) -> bool {
    let missing: Vec<_> = programs.iter().filter(|program| !has(program)).collect();
    if !missing.is_empty() {
        println!("SKIP: not installed: {missing:?}");
    }
    missing.is_empty()
}

fn trapstat(arguments: &[impl AsRef<OsStr>], folder: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagetax"));
    command.arg("trapstat").args(arguments).current_dir(folder).stdin(Stdio::null());
    command.output().unwrap()
}

/// The same output and status as without us, and tables that say something.
fn unharmed(engine: &str, command: &[&str], folder: &Path) {
    let native = Command::new(command[0])
        .args(&command[1..])
        .current_dir(folder)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let options = ["--backend", "record", "--engine", engine, "-o", "tables", "--"];
    let arguments: Vec<&str> = options.iter().chain(command).copied().collect();
    let ours = trapstat(&arguments, folder);
    let said = String::from_utf8_lossy(&ours.stderr);
    assert_eq!(ours.status.code(), native.status.code(), "{command:?}: {said}");
    assert_eq!(
        String::from_utf8_lossy(&ours.stdout),
        String::from_utf8_lossy(&native.stdout),
        "{command:?}: {said}"
    );
    let tables = std::fs::read_to_string(folder.join("tables")).unwrap();
    assert!(tables.contains("dtlb-miss") && tables.contains("misses by function"), "{tables}");
    assert!(said.starts_with("trapstat: backend record"), "{said}");
}

fn programs(folder: &Path) -> Vec<Vec<&'static str>> {
    let numbers: String = (0..20_000u64).map(|i| format!("{}\n", i * 7_919 % 20_011)).collect();
    std::fs::write(folder.join("numbers"), numbers).unwrap();
    std::fs::write(folder.join("a.c"), "int f(int a) { return a * 3 + 1; }\n").unwrap();
    vec![
        vec!["sort", "-n", "numbers"],
        vec!["python3", "-c", "print(sum(hash(str(i)) % 1 + i for i in range(20000))); exit(3)"],
        vec![
            "sqlite3",
            ":memory:",
            "CREATE TABLE t(a); INSERT INTO t VALUES(1),(2); SELECT sum(a) FROM t;",
        ],
        vec!["gcc", "-O2", "-S", "-o", "-", "a.c"],
    ]
}

#[test]
fn real_programs_come_through_valgrind() {
    if !has_all(&["valgrind", "cc", "sort", "python3", "sqlite3", "gcc"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for command in programs(folder.path()) {
        unharmed("valgrind", &command, folder.path());
    }
}

#[test]
fn real_programs_come_through_qemu() {
    if !has_all(&["qemu-x86_64", "cc", "sort", "python3", "sqlite3", "gcc"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for command in programs(folder.path()) {
        unharmed("qemu", &command, folder.path());
    }
}

#[test]
fn children_are_followed_on_request() {
    if !has_all(&["valgrind", "cc"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let threads = |options: &[&str]| {
        let mut arguments = vec!["--backend", "record", "-o", "tables", "--json", "json"];
        arguments.extend_from_slice(options);
        arguments.extend_from_slice(&["--", "sh", "-c", "cat /dev/null; (exit 4)"]);
        let output = trapstat(&arguments, folder.path());
        assert_eq!(output.status.code(), Some(4), "{}", String::from_utf8_lossy(&output.stderr));
        let text = std::fs::read_to_string(folder.path().join("json")).unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let rows = json["listings"][0]["rows"].as_array().unwrap().clone();
        rows.iter().map(|row| row["cpu"].as_u64().unwrap()).max().unwrap() + 1
    };
    assert_eq!(threads(&[]), 1);
    assert!(threads(&["-f"]) >= 3, "the shell, cat, and the shell in brackets");
}

#[test]
fn ends_by_signals_are_kept() {
    if !has_all(&["valgrind", "cc"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["--backend", "record", "-o", "tables", "--", "sh", "-c", "kill -TERM $$"];
    let output = trapstat(&arguments, folder.path());
    assert_eq!(output.status.code(), Some(128 + 15));
    assert!(String::from_utf8_lossy(&output.stderr).contains("ended by signal 15"));
}

#[test]
fn bad_input_gets_a_clear_word() {
    let folder = tempfile::tempdir().unwrap();
    for (arguments, code, word) in [
        (&["--backend", "record", "--", "no-such-program"][..], 127, "not found"),
        (&["--backend", "record", "--", "/etc/passwd"], 126, "execute permission"),
        (&["--backend", "record"], 2, "no command to record"),
        (&["--backend", "record", "-p", "1"], 3, "running process"),
        (&["--on", "sim:sparcstation-1", "--backend", "record", "--", "true"], 2, "no TLB"),
        (&["--on", "host", "--backend", "record", "--", "true"], 2, "no simulated machine"),
        (&["--pages", "head=2M", "--backend", "record", "--", "true"], 2, "no segment"),
        (&["0", "--", "true"], 2, "interval"),
    ] {
        let output = trapstat(arguments, folder.path());
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
        assert!(said.contains(word), "{arguments:?}: {said}");
    }
}
