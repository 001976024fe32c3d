//! `pagetax diagnose -p` on processes that check their own memory.

use pagetax_core::live_tax::LiveTax;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};

/// The program of tests/live, which runs.
struct Gather {
    child: Child,
    _folder: tempfile::TempDir,
}

impl Gather {
    fn start(mib: u32) -> Gather {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("gather");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/live/gather.c");
        let mut cc = Command::new("cc");
        assert!(cc.args(["-O1", "-o"]).arg(&program).arg(source).status().unwrap().success());
        let mut command = Command::new(&program);
        let mut child = command.arg(mib.to_string()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "up\n");
        Gather { child, _folder: folder }
    }

    fn huge_kib(&self) -> u64 {
        let path = format!("/proc/{}/smaps_rollup", self.child.id());
        let rollup = std::fs::read_to_string(path).unwrap();
        let line = rollup.lines().find_map(|line| line.strip_prefix("AnonHugePages:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().trim().parse().unwrap()
    }

    /// Ends it; the test fails if a byte of its memory was wrong.
    fn end(mut self) {
        assert!(self.child.try_wait().unwrap().is_none(), "it has ended by itself");
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Gather {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn diagnose(pid: u32, words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagetax"));
    command.args(["diagnose", "-p", &pid.to_string()]).args(words).env("NO_COLOR", "1");
    command.stdin(Stdio::null()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_running_process_is_diagnosed_and_is_as_before() {
    let gather = Gather::start(64);
    let output = diagnose(gather.child.id(), &["--yes", "--for", "8s", "--json"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let live: LiveTax = serde_json::from_slice(&output.stdout).unwrap();
    assert!(live.tried_bytes > 0 && live.tried_bytes <= live.base_bytes, "{live:?}");
    assert!(live.growth_bytes == 0 && live.before.unit_count > 0, "{live:?}");
    assert!(live.cycles.len() >= 3 && live.speedup.is_some(), "{live:?}");
    assert!(live.cycles.iter().all(|cycle| cycle.huge.unit_count > 0 && cycle.huge.cpu_ns > 0));
    let (found, in_order) = (live.as_found.len(), live.in_order.len());
    assert!(found >= 4 && in_order == found.div_ceil(3) && live.order.is_some(), "{live:?}");
    assert!(live.budget.is_some() && live.changes.is_empty(), "{:?}", live.changes);
    assert_eq!(gather.huge_kib(), 0);
    gather.end();
}

#[test]
fn a_probe_counts_the_calls_of_a_function() {
    let has_probes = std::path::Path::new("/sys/bus/event_source/devices/uprobe/type").exists();
    if !has_probes || !rustix::process::geteuid().is_root() {
        eprintln!("skipped: probes need root and a kernel with uprobes");
        return;
    }
    let gather = Gather::start(16);
    let words = ["--progress", "probe:gather_step", "--yes", "--for", "6s", "--json"];
    let output = diagnose(gather.child.id(), &words);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let live: LiveTax = serde_json::from_slice(&output.stdout).unwrap();
    assert!(live.before.unit_count > 0 && live.speedup.is_some(), "{live:?}");
    let unknown = diagnose(gather.child.id(), &["--progress", "probe:no_such_function", "--yes"]);
    assert!(text(&unknown.stderr).contains("no function `no_such_function`"));
    gather.end();
}

#[test]
fn nothing_is_changed_without_consent() {
    let gather = Gather::start(16);
    let refused = diagnose(gather.child.id(), &[]);
    assert!(!refused.status.success() && text(&refused.stderr).contains("--yes"));
    let planned = diagnose(gather.child.id(), &["--dry-run"]);
    assert!(planned.status.success() && text(&planned.stdout).contains("Nothing was changed"));
    assert_eq!(gather.huge_kib(), 0);
    gather.end();
}

#[test]
fn a_process_without_progress_has_no_verdict() {
    let mut sleep = Command::new("python3");
    let script = "import time; kept = bytearray(8 << 20); print(flush=True); time.sleep(100)";
    let mut child = sleep.args(["-c", script]).stdout(Stdio::piped()).spawn().unwrap();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
    let output = diagnose(child.id(), &["--yes", "--for", "6s"]);
    child.kill().unwrap();
    child.wait().unwrap();
    let said = text(&output.stdout);
    assert!(output.status.success() && said.contains("no verdict"), "{said}");
    assert!(said.contains("--progress"), "{said}");
}

#[test]
fn a_process_that_ends_half_way_is_reported() {
    let gather = Gather::start(16);
    let pid = gather.child.id();
    let ending = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_secs(3));
        gather.end();
    });
    let output = diagnose(pid, &["--yes", "--for", "10s"]);
    ending.join().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("has ended"), "{}", text(&output.stdout));
}

#[test]
fn who_must_be_left_alone_is_refused() {
    for (pid, word) in [(u32::MAX, "no such process"), (2, "kernel thread")] {
        let output = diagnose(pid, &["--yes"]);
        assert!(!output.status.success(), "{pid}");
        assert!(text(&output.stderr).contains(word), "{}", text(&output.stderr));
    }
}
