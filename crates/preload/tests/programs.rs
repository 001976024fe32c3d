//! Tests that at least 95% of the heap of real programs is on huge pages.

mod common;

use common::{preloaded, thp_can_be_advised};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A program that is killed when the test ends.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Running {
    /// Starts a program. Returns none, and prints the reason, if it is not installed.
    fn start(program: &str, args: &[&str]) -> Option<Running> {
        let mut command: Command = preloaded(program, &[("MPSSHEAP", "2M")]);
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped());
        match command.spawn() {
            Ok(child) => Some(Running(child)),
            Err(error) => {
                println!("SKIP: cannot start {program}: {error}");
                None
            }
        }
    }

    fn write(&mut self, text: &str) {
        let stdin = self.0.stdin.as_mut().unwrap();
        stdin.write_all(text.as_bytes()).and_then(|()| stdin.flush()).unwrap();
    }

    fn wait_for(&mut self, line: &str) {
        let stdout = BufReader::new(self.0.stdout.as_mut().unwrap());
        assert!(stdout.lines().any(|read| read.unwrap() == line), "it ended without `{line}`");
    }

    /// Returns the anonymous memory outside files, in KiB, and its part on huge pages.
    fn heap_kb(&self) -> (u64, u64) {
        let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", self.0.id())).unwrap();
        let (mut anon, mut huge, mut counts) = (0, 0, false);
        for line in smaps.lines() {
            let words: Vec<_> = line.split_whitespace().collect();
            match words[0] {
                "Anonymous:" if counts => anon += words[1].parse::<u64>().unwrap(),
                "AnonHugePages:" if counts => huge += words[1].parse::<u64>().unwrap(),
                word if !word.ends_with(':') => {
                    counts = words.get(5).is_none_or(|name| *name == "[heap]");
                }
                _ => {}
            }
        }
        (anon, huge)
    }

    fn assert_on_huge_pages(&self, least_kb: u64) {
        let (anon, huge) = self.heap_kb();
        assert!(anon >= least_kb, "only {anon} KiB: the test does not do what it says");
        assert!(huge * 100 >= anon * 95, "{huge} of {anon} KiB are on huge pages");
    }
}

#[test]
fn python() {
    if !thp_can_be_advised() {
        return;
    }
    // Small objects in Python's arenas, larger ones in malloc's heap, one large list.
    let script = "import sys
small = {i: str(i) for i in range(300000)}
middle = [b'x' * 3000 for i in range(10000)]
large = [0] * 8000000
print('ready', flush=True)
sys.stdin.read()";
    let Some(mut python) = Running::start("/usr/bin/python3", &["-c", script]) else { return };
    python.wait_for("ready");
    python.assert_on_huge_pages(100 << 10);
}

#[test]
fn sqlite() {
    if !thp_can_be_advised() {
        return;
    }
    let Some(mut sqlite) = Running::start("sqlite3", &[":memory:"]) else { return };
    sqlite.write(
        "CREATE TABLE t(a, b); WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c LIMIT \
         500000) INSERT INTO t SELECT n * 7919 % 1000003, hex(n) || hex(n * n) FROM c;\n.print ready\n",
    );
    sqlite.wait_for("ready");
    sqlite.assert_on_huge_pages(15 << 10);
}

#[test]
fn sort() {
    if !thp_can_be_advised() {
        return;
    }
    let Some(mut sort) = Running::start("sort", &["-S", "200M", "--parallel=1"]) else { return };
    let lines: String = (0..40_000u64).map(|i| format!("{}\n", i * 7919 % 1_000_003)).collect();
    // sort reads all that the pipe has. So its buffer then has everything except the pipe's own 64 KiB.
    (0..150).for_each(|_| sort.write(&lines));
    sort.assert_on_huge_pages(35 << 10);
}

#[test]
fn redis() {
    if !thp_can_be_advised() {
        return;
    }
    let port = "17391";
    let args = ["--port", port, "--save", "", "--bind", "127.0.0.1"];
    let Some(redis) = Running::start("redis-server", &args) else { return };
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut stream = loop {
        match TcpStream::connect(format!("127.0.0.1:{port}")) {
            Ok(stream) => break stream,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let mut ok = Vec::new();
    for batch in 0..200 {
        let sets: String = (0..1000)
            .map(|i| format!("SET key{} {}\r\n", batch * 1000 + i, "v".repeat(64)))
            .collect();
        stream.write_all(sets.as_bytes()).unwrap();
        ok.resize(1000 * "+OK\r\n".len(), 0);
        stream.read_exact(&mut ok).unwrap();
    }
    redis.assert_on_huge_pages(20 << 10);
}
