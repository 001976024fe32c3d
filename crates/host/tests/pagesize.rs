//! Page sizes of running processes, on the real kernel.

use pagetax_core::page_size::{MemoryPart, PartSizes};
use pagetax_core::units::PageSize;
use pagetax_host::pages::change::{self, Outcome};
use pagetax_host::pages::inject::{Injector, Stops};
use pagetax_host::pages::pagemap;
use pagetax_host::pages::target::{Refusal, Target};
use pagetax_host::pages::{PageSettings, Verdict, judge};
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

const HUGE: PageSize = PageSize::M2;

/// Returns the C program of tests/pagesize/, compiled once.
fn program() -> &'static PathBuf {
    static PROGRAM: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, program) = PROGRAM.get_or_init(|| {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("threads");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/pagesize/threads.c");
        let mut cc = Command::new("cc");
        cc.args(["-O1", "-pthread", "-o"]).arg(&program).arg(source);
        assert!(cc.status().unwrap().success());
        (directory, program)
    });
    program
}

/// The program with this much memory. The test fails if it does not exit with status 0 when asked to
/// end.
struct Running {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Running {
    fn start(mib: u32) -> Running {
        let mut command = Command::new(program());
        command.arg(mib.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut running = Running { child, input, output };
        assert_eq!(running.line(), "up\n");
        running
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line
    }

    fn target(&self) -> Target {
        Target::open(self.child.id(), false).unwrap()
    }

    fn end(mut self) {
        drop(self.input.take());
        assert_eq!(self.line(), "ok\n");
        assert!(self.child.wait().unwrap().success());
    }
}

fn advice(text: &str) -> PartSizes {
    PartSizes::parse([text]).unwrap()
}

fn verdict(target: &Target, advice: &PartSizes, outcome: &Outcome) -> Verdict {
    let map = pagemap::read(target.pid().as_raw_nonzero().get() as u32).unwrap();
    judge(&map, advice, outcome, &PageSettings::host())
}

fn apply(target: &Target, advice: &PartSizes) -> (Outcome, Verdict) {
    let map = pagemap::read(target.pid().as_raw_nonzero().get() as u32).unwrap();
    let outcome = change::apply(target, &map, advice, HUGE).unwrap();
    let verdict = verdict(target, advice, &outcome);
    (outcome, verdict)
}

fn undo(target: &Target, advice: &PartSizes) -> (Outcome, Verdict) {
    let map = pagemap::read(target.pid().as_raw_nonzero().get() as u32).unwrap();
    let outcome = change::undo(target, &map, advice, HUGE).unwrap();
    let verdict = verdict(target, advice, &outcome);
    (outcome, verdict)
}

/// Returns the bytes as asked and the resident bytes of a part; the reasons must cover the rest exactly.
fn part(verdict: &Verdict, part: MemoryPart) -> (u64, u64) {
    let found = verdict.parts.iter().find(|p| p.part == part).unwrap();
    let why: u64 = found.why.iter().map(|why| why.bytes).sum();
    assert_eq!(found.as_asked_bytes + why, found.resident_bytes, "{found:?}");
    (found.as_asked_bytes, found.resident_bytes)
}

/// Checks that nearly all of a part is as asked. Another process may use up memory; then the output
/// shows the reason.
fn nearly_all(verdict: &Verdict, of: MemoryPart) {
    let (asked, resident) = part(verdict, of);
    assert!(asked as f64 >= 0.95 * resident as f64, "{verdict:#?}");
}

fn collapse_and_split(target: &Target) {
    let heap = advice("heap=2M");
    let (outcome, now) = apply(target, &heap);
    nearly_all(&now, MemoryPart::Heap);
    assert!(outcome.total_bytes() > 60 << 20);
    let (outcome, now) = undo(target, &heap);
    assert_eq!(part(&now, MemoryPart::Heap).0, 0, "{now:?}");
    assert!(outcome.total_bytes() > 60 << 20);
    // The same once more, but splits by asking for base pages.
    apply(target, &heap);
    let base = advice("heap=4K");
    let (_, now) = apply(target, &base);
    let (asked, resident) = part(&now, MemoryPart::Heap);
    assert_eq!(asked, resident, "{now:?}");
}

#[test]
fn a_heap_is_collapsed_and_split_from_outside() {
    let running = Running::start(80);
    let target = running.target();
    if target.is_remote() {
        collapse_and_split(&target);
    } else {
        println!("SKIP: process_madvise(2) of other processes needs CAP_SYS_NICE");
    }
    running.end();
}

#[test]
fn a_heap_is_collapsed_and_split_by_calls_of_its_own() {
    let running = Running::start(80);
    collapse_and_split(&running.target().by_tracing());
    running.end();
}

#[test]
fn three_hundred_times_attached_and_nothing_noticed() {
    let running = Running::start(32);
    let all = advice("heap=2M,anon=2M,stack=2M");
    let mut stops = Vec::new();
    for cycle in 0..300 {
        let target = running.target().by_tracing();
        let change = if cycle % 2 == 0 { apply } else { undo };
        stops.extend(change(&target, &all).0.stops.all);
    }
    running.end();
    // `cargo xtask bench stops` measures how long each stop takes.
    assert!(stops.len() >= 300);
}

#[test]
fn every_byte_that_is_not_as_asked_has_a_reason() {
    let running = Running::start(20);
    let target = running.target();
    let all = advice("heap=2M,stack=2M,anon=2M,text=2M,data=2M,bss=2M");
    let (_, now) = apply(&target, &all);
    assert_eq!(now.parts.len(), 6);
    for verdict in &now.parts {
        part(&now, verdict.part);
    }
    let stack = now.parts.iter().find(|p| p.part == MemoryPart::Stack).unwrap();
    assert!(stack.why[0].reason.starts_with("unaligned"), "{stack:?}");
    running.end();
}

#[test]
fn memory_shared_after_a_fork_is_told_from_the_rest() {
    // The parent sleeps with the pages that it has filled; the child shares them.
    let script = "import os, time, sys\nd = bytearray(b'x' * (64 << 20))\npid = os.fork()\n\
                  if pid: print('up', flush=True)\ntime.sleep(60)";
    let mut parent = Command::new("python3")
        .args(["-c", script])
        .stdout(Stdio::piped())
        .spawn()
        .expect("python3 is a package that tests need");
    let mut line = String::new();
    BufReader::new(parent.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let target = Target::open(parent.id(), false).unwrap();
    let anon = advice("anon=2M");
    let untouched = verdict(&target, &anon, &Outcome::default());
    let reasons: Vec<_> = untouched.parts[0].why.iter().map(|why| &why.reason).collect();
    assert!(reasons.iter().any(|reason| reason.contains("forked")), "{untouched:?}");
    let (_, now) = apply(&target, &anon);
    nearly_all(&now, MemoryPart::Anon);
    for child in children(parent.id()) {
        rustix::process::kill_process(child, rustix::process::Signal::KILL).unwrap();
    }
    parent.kill().unwrap();
    parent.wait().unwrap();
}

fn children(pid: u32) -> Vec<rustix::process::Pid> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    text.split_whitespace()
        .filter_map(|pid| rustix::process::Pid::from_raw(pid.parse().ok()?))
        .collect()
}

#[test]
fn a_process_that_vanishes_is_no_surprise() {
    let mut running = Running::start(64);
    let target = running.target();
    let map = pagemap::read(running.child.id()).unwrap();
    running.child.kill().unwrap();
    running.child.wait().unwrap();
    assert!(!target.is_alive());
    let heap = advice("heap=2M");
    let outcome = change::apply(&target, &map, &heap, HUGE).unwrap();
    assert_eq!(outcome.total_bytes(), 0);
    assert!(outcome.failed_bytes.values().sum::<u64>() > 0);
    let refused = change::apply(&target.by_tracing(), &map, &heap, HUGE);
    assert_eq!(refused.unwrap_err(), Refusal::Gone);
}

#[test]
fn a_stopped_process_stays_stopped() {
    // Not the program above: a stop alone interrupts its epoll_wait.
    let mut child = Command::new("sleep").arg("60").spawn().unwrap();
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    let state = || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        stat.rsplit_once(") ").unwrap().1.chars().next().unwrap()
    };
    let deadline = Instant::now() + Duration::from_secs(5);
    while state() != 'T' && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut stops = Stops::default();
    let injector = Injector::open(pid).unwrap();
    let called = injector.session(&mut stops, |session| session.call(libc::SYS_getpid, [0; 6]));
    assert_eq!(called.unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(state(), 'T');
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn filtered_processes_are_refused_unless_forced() {
    let seccomp = "import ctypes, sys\nlibc = ctypes.CDLL(None)\n\
                   class F(ctypes.Structure):\n  _fields_ = [('c', ctypes.c_ushort), ('t', ctypes.c_ubyte), \
                   ('f', ctypes.c_ubyte), ('k', ctypes.c_uint)]\n\
                   class P(ctypes.Structure):\n  _fields_ = [('n', ctypes.c_ushort), ('p', ctypes.POINTER(F))]\n\
                   allow = F(6, 0, 0, 0x7fff0000)\nprogram = P(1, ctypes.pointer(allow))\n\
                   assert libc.prctl(38, 1, 0, 0, 0) == 0\n\
                   assert libc.prctl(22, 2, ctypes.byref(program)) == 0\n\
                   print('up', flush=True)\nsys.stdin.read()";
    let mut child = Command::new("python3")
        .args(["-c", seccomp])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("python3 is a package that tests need");
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "up\n");
    assert_eq!(Target::open(child.id(), false).unwrap_err(), Refusal::Seccomp);
    let (_, now) = apply(&Target::open(child.id(), true).unwrap(), &advice("anon=2M"));
    assert!(part(&now, MemoryPart::Anon).1 > 0);
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
}

#[test]
fn kernel_threads_are_refused() {
    let comm = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    match comm(2).trim() {
        "kthreadd" => {
            let refused = Target::open(2, true).unwrap_err();
            assert!(matches!(refused, Refusal::KernelThread | Refusal::OtherUser(0)));
        }
        _ => println!("SKIP: kernel threads are not visible (a PID namespace)"),
    }
}
