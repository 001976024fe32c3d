//! The stdout of a program that pagetax runs is the program's own: tables go to stderr or into a file, and a
//! document on stdout moves the program's output to stderr.

use std::path::Path;
use std::process::{Command, Output, Stdio};

/// The words in front of a command, and a word of the tables.
const WRAPPERS: &[(&[&str], &str)] = &[
    (&["trapstat", "--backend", "record"], "dtlb-miss"),
    (&["misscurve"], "entries"),
    (&["whatif", "--runs", "2"], "speed-up"),
    (&["whatif", "--runs", "2", "--verify"], "speed-up"),
];

/// Runs `sort numbers` behind these words, with a calibration in the folder.
fn sort(words: &[&str], folder: &Path) -> (Output, String) {
    let mut pagetax = Command::new(env!("CARGO_BIN_EXE_pagetax"));
    pagetax.args(words).args(["--", "sort", "-n", "numbers"]);
    pagetax.current_dir(folder).env("XDG_CACHE_HOME", folder).stdin(Stdio::null());
    let output = pagetax.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (output, said)
}

/// Writes unsorted numbers, and returns them sorted. None, after a notice, if nothing can record here.
fn prepared(folder: &Path) -> Option<String> {
    if Command::new("valgrind").arg("--version").output().is_err() {
        println!("SKIP: not installed: valgrind");
        return None;
    }
    let numbers: String = (0..2_000u64).map(|i| format!("{}\n", i * 7_919 % 2_003)).collect();
    std::fs::write(folder.join("numbers"), numbers).unwrap();
    let sorted = Command::new("sort").args(["-n", "numbers"]).current_dir(folder).output().unwrap();
    Some(String::from_utf8(sorted.stdout).unwrap())
}

#[test]
fn tables_beside_a_program_go_to_stderr_or_into_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let Some(sorted) = prepared(folder.path()) else { return };
    for (words, in_tables) in WRAPPERS {
        let (output, said) = sort(words, folder.path());
        if said.contains("lacks the cost") {
            println!("SKIP: no prices for {words:?}: {said}");
            continue;
        }
        assert!(output.status.success(), "{words:?}: {said}");
        assert!(output.stdout == sorted.as_bytes(), "{words:?} spoils stdout");
        assert!(said.contains(in_tables), "{words:?}: {said}");
        let (output, said) = sort(&[words, &["-o", "tables"][..]].concat(), folder.path());
        assert!(output.stdout == sorted.as_bytes(), "{words:?} -o spoils stdout");
        let tables = std::fs::read_to_string(folder.path().join("tables")).unwrap();
        assert!(tables.contains(in_tables) && !said.contains(in_tables), "{words:?}: {said}");
    }
}

#[test]
fn a_document_on_stdout_is_alone_there() {
    let folder = tempfile::tempdir().unwrap();
    let Some(sorted) = prepared(folder.path()) else { return };
    let ppgsz: (&[&str], &str) = (&["ppgsz", "-o", "heap=2M"], "kind");
    for (words, _) in WRAPPERS[..3].iter().chain([&ppgsz]) {
        let (output, said) = sort(&[words, &["--json"][..]].concat(), folder.path());
        if said.contains("lacks the cost") {
            println!("SKIP: no prices for {words:?}: {said}");
            continue;
        }
        let document: serde_json::Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{words:?}: {error}: {said}"));
        assert!(document["kind"].is_string(), "{document}");
        assert!(said.contains(&sorted), "{words:?} loses what the program prints: {said}");
    }
}

#[test]
fn progress_needs_a_terminal_that_no_program_prints_on() {
    let folder = tempfile::tempdir().unwrap();
    if prepared(folder.path()).is_none() {
        return;
    }
    let pagetax = env!("CARGO_BIN_EXE_pagetax");
    let cases = [
        (format!("{pagetax} record -o a.ptt -- sleep 3 > out"), Some("million records after")),
        (format!("{pagetax} record -o b.ptt -- sleep 3"), None),
        (format!("{pagetax} -q record -o c.ptt -- sleep 3 > out"), None),
        (format!("{pagetax} record -o d.ptt -- sleep 3 > out 2> err"), None),
        (format!("{pagetax} reproduce sun-4 --seeds 1 > out"), Some("% ETA")),
        (format!("{pagetax} -q reproduce sun-4 --seeds 1 > out"), None),
    ];
    let on_a_terminal = |(line, shown)| {
        let mut script = Command::new("script");
        script.args(["-qec", line, "/dev/null"]).current_dir(folder.path());
        let child = script.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        (line, shown, child)
    };
    let running: Vec<_> = cases.iter().map(|(line, shown)| on_a_terminal((line, *shown))).collect();
    for (line, shown, child) in running {
        let Ok(child) = child else {
            println!("SKIP: not installed: script");
            return;
        };
        let output = child.wait_with_output().unwrap();
        let seen = String::from_utf8_lossy(&output.stdout);
        let errors = std::fs::read_to_string(folder.path().join("err")).unwrap_or_default();
        assert!(output.status.success(), "{line}: {seen}");
        let is_progress = |text: &str| text.contains(" records after ") || text.contains("ETA");
        assert_eq!(is_progress(&seen), shown.is_some(), "{line}: {seen}");
        assert!(shown.is_none_or(|word| seen.contains(word)), "{line}: {seen}");
        assert!(!is_progress(&errors), "{errors}");
    }
}

#[test]
fn a_stream_is_the_series_of_the_report() {
    let folder = tempfile::tempdir().unwrap();
    let run = |words: &[&str]| {
        let mut pagetax = Command::new(env!("CARGO_BIN_EXE_pagetax"));
        pagetax.args(["run", "mmap3", "--on", "sim:alpha-nms", "--stream"]).args(words);
        pagetax.current_dir(folder.path()).stdin(Stdio::null()).output().unwrap()
    };
    let output = run(&["--json=report.json"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("Counters"), "{said}");
    let json = std::fs::read_to_string(folder.path().join("report.json")).unwrap();
    let report: serde_json::Value = serde_json::from_str(&json).unwrap();
    let columns = report["series"]["columns"].as_object().unwrap();
    let lines = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<serde_json::Value> =
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), columns["time_ns"].as_array().unwrap().len());
    for (nth, line) in lines.iter().enumerate() {
        assert_eq!((&line["run"], &line["job"]), (&1.into(), &"mmap3".into()));
        columns.iter().for_each(|(id, values)| assert_eq!(line[id], values[nth], "{id} at {nth}"));
    }
    let refused = run(&["--json"]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(2) && said.contains("--json=report.json"), "{said}");
}
