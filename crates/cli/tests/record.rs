//! `pagetax record` end to end: programs come through unharmed, their traces run on simulated machines,
//! and what is cut, damaged or none gets a clear word.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

fn has_valgrind() -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let here = std::env::split_paths(&path).any(|folder| folder.join("valgrind").is_file());
    if !here {
        println!("SKIP: not installed: [\"valgrind\"]");
    }
    here
}

fn command(arguments: &[impl AsRef<OsStr>], folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagetax"));
    command.args(arguments).current_dir(folder).stdin(Stdio::null());
    command
}

fn pagetax(arguments: &[impl AsRef<OsStr>], folder: &Path) -> Output {
    command(arguments, folder).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

const SCRIPT: &str = "x = {i: str(i) for i in range(30000)}; print(len(x)); exit(3)";

/// Prints the distances of large blocks, and of others. The two kinds are far apart.
const BLOCKS: &str = "
import ctypes
sizes = [300 << 10, 1 << 20, 40 << 20, 300 << 10, 33 << 20, 2 << 20]
blocks = [ctypes.create_string_buffer(size) for size in sizes]
for large in (False, True):
    at = [ctypes.addressof(b) for b in blocks if (len(b) >= 32 << 20) == large]
    print([b - a for a, b in zip(at, at[1:])])";

#[test]
fn a_trace_for_remote_has_the_addresses_that_memory_has_there() {
    if !has_valgrind() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let remote = pagetax(&["remote", "--resident", "20M", "--", "python3", "-c", BLOCKS], at);
    assert!(remote.status.success(), "{}", text(&remote.stderr));
    let record = ["record", "--for-remote", "-o", "a.ptt", "--", "python3", "-c", BLOCKS];
    let record = pagetax(&record, at);
    assert_eq!(text(&record.stdout), text(&remote.stdout), "{}", text(&record.stderr));
    let said = text(&record.stderr);
    assert!(said.lines().all(|line| line.starts_with("record: ")), "{said}");
    let simulate = |trace: &str| {
        let out = pagetax(&["remote", "--resident", "10M", "--simulate", trace], at);
        assert!(out.status.success(), "{}", text(&out.stderr));
        text(&out.stderr).contains("--for-remote")
    };
    assert!(!simulate("a.ptt"), "it is placed as there");
    let plain = pagetax(&["record", "-o", "plain.ptt", "--", "python3", "-c", BLOCKS], at);
    assert_ne!(text(&plain.stdout), text(&remote.stdout));
    assert!(simulate("plain.ptt"));
    // Children of all kinds, which fork and execute others.
    let script = "seq 2000 | sort -r | (read first; echo $first); python3 -c 'import os; print(os.fork() > 0 and os.wait()[1])'";
    let record =
        pagetax(&["record", "-f", "--for-remote", "-o", "f.ptt", "--", "sh", "-c", script], at);
    assert!(record.status.success(), "{}", text(&record.stderr));
    let mut lines: Vec<String> = text(&record.stdout).lines().map(String::from).collect();
    lines.sort();
    assert_eq!(lines, ["0", "999", "False"]);
    // The library would not reach it.
    std::fs::write(at.join("static.c"), "int main(void) { return 0; }").unwrap();
    let mut compiled = Command::new("cc");
    compiled.args(["-static", "-o", "static", "static.c"]).current_dir(at);
    if compiled.status().is_ok_and(|status| status.success()) {
        let refused = pagetax(&["record", "--for-remote", "-o", "s.ptt", "--", "./static"], at);
        assert!(refused.status.code() == Some(126), "{}", text(&refused.stderr));
    }
}

#[test]
fn a_program_runs_again_on_other_machines() {
    if !has_valgrind() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let record = pagetax(&["record", "-f", "-o", "a.ptt", "--", "python3", "-c", SCRIPT], at);
    assert_eq!(record.status.code(), Some(3), "the program's own: {}", text(&record.stderr));
    assert_eq!(text(&record.stdout), "30000\n");
    assert!(text(&record.stderr).contains("record: a.ptt: "), "{}", text(&record.stderr));
    let quiet = pagetax(&["-q", "record", "-o", "quiet.ptt", "--", "true"], at);
    assert_eq!((quiet.status.code(), text(&quiet.stderr)), (Some(0), String::new()));
    let machines = "sim:ultrasparc-3plus-900,sim:x86-64-calibrated";
    let run = pagetax(&["run", "a.ptt", "--on", machines, "--json"], at);
    let document: serde_json::Value = serde_json::from_slice(&run.stdout).unwrap();
    for run in document["runs"].as_array().unwrap() {
        let count = |id: &str| run["counters"][id]["value"].as_u64().unwrap();
        assert!(count("access_count") > 1_000_000, "{run}");
        assert!(count("tlb_miss_count") > 0 && count("minor_fault_count") > 100, "{run}");
        assert_eq!(run["budget"]["cpu_unexplained_ns"].as_i64(), Some(0));
        assert_eq!(run["machine"]["kind"], "sim");
    }
    let larger = ["run", "a.ptt", "--on", "sim:x86-64-calibrated", "--set", "page_size=2M"];
    let larger = pagetax(&[&larger[..], &["--json"]].concat(), at);
    let larger: serde_json::Value = serde_json::from_slice(&larger.stdout).unwrap();
    let faults = |run: &serde_json::Value| run["counters"]["minor_fault_count"]["value"].as_u64();
    assert!(faults(&larger).unwrap() * 20 < faults(&document["runs"][1]).unwrap());
    let host = pagetax(&["run", "a.ptt"], at);
    assert_eq!(host.status.code(), Some(3));
    assert!(text(&host.stderr).contains("on simulated machines only"));
    let show = pagetax(&["jobs", "a.ptt"], at);
    assert!(text(&show.stdout).contains("replay = \"program\""), "{}", text(&show.stdout));
}

#[test]
fn cut_and_damaged_traces_are_read_as_far_as_they_are_whole() {
    if !has_valgrind() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    assert!(pagetax(&["record", "-o", "a.ptt", "--", "ls", "/"], at).status.success());
    let whole = std::fs::read(at.join("a.ptt")).unwrap();
    std::fs::write(at.join("cut.ptt"), &whole[..whole.len() - 30]).unwrap();
    let run = pagetax(&["run", "cut.ptt", "--on", "sim:x86-64-calibrated"], at);
    assert!(run.status.success(), "{}", text(&run.stderr));
    assert!(text(&run.stderr).contains("cut or damaged"), "{}", text(&run.stderr));
    let mut damaged = whole.clone();
    damaged[whole.len() / 2] ^= 0x40;
    std::fs::write(at.join("damaged.ptt"), &damaged).unwrap();
    let run = pagetax(&["run", "damaged.ptt", "--on", "sim:x86-64-calibrated"], at);
    assert!(text(&run.stderr).contains("damaged"), "{}", text(&run.stderr));
}

#[test]
fn an_interrupt_keeps_what_was_seen() {
    if !has_valgrind() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let arguments = ["record", "-f", "-o", "a.ptt", "--", "python3", "-c", "while True: pass"];
    // Whatever runs the tests may ignore SIGINT, and its children with it.
    let mut command = Command::new("env");
    command.arg("--default-signal=INT").arg(env!("CARGO_BIN_EXE_pagetax")).args(arguments);
    command.current_dir(at).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // It has begun once it has written a block.
    let begun = Instant::now();
    while at.join("a.ptt").metadata().map_or(0, |file| file.len()) < 1_000 {
        if begun.elapsed() > Duration::from_secs(120) {
            child.kill().unwrap();
            panic!("nothing was recorded");
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    // SAFETY: a child of ours that has not been waited for.
    assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGINT) }, 0);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("ended by signal 2"), "{}", text(&output.stderr));
    let run = pagetax(&["run", "a.ptt", "--on", "sim:x86-64-calibrated"], at);
    assert!(
        run.status.success() && !text(&run.stderr).contains("damaged"),
        "{}",
        text(&run.stderr)
    );
}

#[test]
fn other_peoples_traces_run_too() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let lackey: String =
        (0..5000).map(|n| format!("I  00401000,4\n L {:x},8\n", 0x10_0000 + n * 4096)).collect();
    std::fs::write(at.join("lackey"), lackey).unwrap();
    let import = pagetax(&["record", "--import", "lackey", "lackey", "-o", "a.ptt"], at);
    assert!(import.status.success(), "{}", text(&import.stderr));
    let run = pagetax(&["run", "a.ptt", "--on", "sim:x86-64-calibrated", "--json"], at);
    let run: serde_json::Value = serde_json::from_slice(&run.stdout).unwrap();
    assert_eq!(run["counters"]["access_count"]["value"], 5000);
    assert_eq!(run["counters"]["tlb_miss_count"]["value"], 5000);
}

#[test]
fn bad_input_gets_a_clear_word() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    std::fs::write(at.join("text"), "hello\n").unwrap();
    std::fs::write(at.join("half"), "I  04001000,3\n L 1ffe").unwrap();
    for (arguments, code, word) in [
        (&["-o", "x.ptt", "--", "no-such-program"][..], 127, "not found"),
        (&["-o", "x.ptt", "--", "/etc/passwd"], 126, "execute permission"),
        (&["-o", "/nonexistent/x.ptt", "--", "true"], 2, "/nonexistent/x.ptt"),
        (&["-o", "x.ptt"], 2, "no command"),
        (&["--", "true"], 2, "nowhere to write to"),
        (&["-o", "x.ptt", "text.ptt"], 2, "recorded already"),
        (&["--import", "lackey", "text", "-o", "x.ptt"], 2, "has no accesses"),
        (&["--import", "lackey", "half", "-o", "x.ptt"], 2, "half:2"),
        (&["--import", "drmemtrace-text", "missing", "-o", "x.ptt"], 2, "cannot read missing"),
    ] {
        let output = pagetax(&[&["record"], arguments].concat(), at);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
        assert!(said.contains(word), "{arguments:?}: {said}");
    }
    assert!(!at.join("x.ptt").exists(), "a failed import leaves no file");
}
