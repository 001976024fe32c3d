//! Tests that real programs behave under many bursts, long and short, as they do natively.
#![cfg(target_arch = "x86_64")]

mod common;

use common::{compiled, has, run};
use std::fmt::Write;
use std::process::Command;

/// The most instructions of a burst, nanoseconds between two, and instructions that are only counted before
/// each.
const BURSTS: [&str; 4] = ["300:100000", "20000:100000", "20000000:200000", "20000:100000:20000"];
/// A schedule that only counts nearly all of the program.
const COUNTED: &str = "1:100000:1000000000000000";

fn same(program: &str, words: &[&str]) {
    if !has(program) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut numbers = String::new();
    (0..100_000u64).for_each(|i| writeln!(numbers, "{}", i * 7919 % 100_003).unwrap());
    std::fs::write(folder.path().join("numbers"), numbers).unwrap();
    let (natively, _) = run(program, words, None, folder.path());
    let mut bursts = 0;
    for length in BURSTS {
        let (sampled, said) = run(program, words, Some(length), folder.path());
        assert_eq!(sampled.status, natively.status, "{length}: {said}");
        assert!(sampled.stdout == natively.stdout, "{length}: other output; {said}");
        assert!(sampled.stderr == natively.stderr, "{length}: other messages; {said}");
        bursts += said.split(' ').next().unwrap().parse::<u64>().unwrap();
    }
    assert!(bursts > 0, "no burst came to its end");
    let (counted, said) = run(program, words, Some(COUNTED), folder.path());
    assert_eq!(counted.status, natively.status, "counted: {said}");
    assert!(counted.stdout == natively.stdout, "counted: other output; {said}");
    assert!(counted.stderr == natively.stderr, "counted: other messages; {said}");
    assert!(last_number(&said) > 1_000_000, "{said}");
}

fn in_bursts(said: &str) -> u64 {
    let rest = said.split("instructions in bursts: ").nth(1).unwrap();
    rest.split(',').next().unwrap().parse().unwrap()
}

fn last_number(said: &str) -> u64 {
    said.rsplit(' ').next().unwrap().trim().parse().unwrap()
}

#[test]
fn sort() {
    same("sort", &["--parallel=1", "numbers"]);
}

#[test]
fn sort_with_threads() {
    same("sort", &["--parallel=4", "-S", "100M", "numbers"]);
}

#[test]
fn python() {
    let script = "
import hashlib, json, subprocess, threading, zlib
d = {i: str(i) for i in range(30000)}
text = json.dumps(d).encode()
print(hashlib.sha256(text).hexdigest(), len(zlib.compress(text)))
seen = []
def work(n):
    try:
        raise ValueError(n)
    except ValueError as error:
        seen.append(str(error) + str(sum(i * i / 3 for i in range(20000))))
threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(sorted(seen), subprocess.check_output(['echo', 'child']))
";
    same("/usr/bin/python3", &["-c", script]);
}

#[test]
fn sqlite() {
    let script = "CREATE TABLE t(a); WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n+1 FROM c LIMIT \
                  20000) INSERT INTO t SELECT n*7919%100003 FROM c; CREATE INDEX i ON t(a); SELECT \
                  count(*), sum(a*1.25) FROM t x JOIN t y ON x.a = y.a;";
    same("sqlite3", &[":memory:", script]);
}

#[test]
fn shell_with_signals() {
    let script = "for i in $(seq 3000); do x=$((x+i)); done; echo $x; (exit 5); echo $?; trap 'echo usr1' \
                  USR1; kill -USR1 $$; seq 100000 | head -n 3; echo ${PIPESTATUS[*]}";
    same("bash", &["-c", script]);
}

#[test]
fn xz() {
    same("xz", &["-3", "-T1", "-c", "numbers"]);
}

/// Tests a compiler and a runtime that handle SIGSEGV, with a script whose output is deterministic.
#[test]
fn programs_with_handlers_of_faults() {
    let script = "let d = {}; for (let i = 0; i < 30000; i++) d['k' + i * 7919 % 30011] = i; console.log(\
                  Object.keys(d).sort().slice(0, 9).join(), JSON.stringify(d).length)";
    same("node", &["-e", script]);
    let Ok(cc1) = Command::new("gcc").arg("-print-prog-name=cc1").output() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.c");
    std::fs::write(&file, C).unwrap();
    let words = ["-quiet", "-O2", file.to_str().unwrap(), "-o", "-"];
    same(String::from_utf8(cc1.stdout).unwrap().trim(), &words);
}

const C: &str = "int f(int a) { int s = 3; for (int j = 0; j < a; j++) s += s % (j + a + 1); return s; }\n\
                 double g(double *x, int n) { double s = 0; while (n--) s += x[n] * x[n]; return s; }\n";

/// Tests handlers that run in loops and in system calls, do not return, or repair faults; threads and
/// children.
#[test]
fn signals() {
    if !has("cc") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = compiled("signals.c", folder.path());
    let (natively, _) = run(&program, &[], None, folder.path());
    for bursts in BURSTS.iter().chain([&COUNTED]).cycle().take(10) {
        let (sampled, said) = run(&program, &[], Some(bursts), folder.path());
        let [ours, theirs] = [&sampled, &natively].map(|of| String::from_utf8_lossy(&of.stdout));
        assert_eq!((sampled.status, ours), (natively.status, theirs), "{bursts}: {said}");
    }
}

/// Tests threads that have the number of an earlier thread, and less CPU time.
#[test]
fn threads_one_after_the_other() {
    if !has("cc") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = compiled("reuse.c", folder.path());
    for bursts in ["20000:100000", "20000:100000:20000", "300:100000", COUNTED] {
        let (sampled, said) = run(&program, &[], Some(bursts), folder.path());
        assert_eq!(sampled.status.code(), Some(0), "{bursts}: {said}");
        assert_eq!(sampled.stdout, b"0\n1\n2\n3\n4\n5\n", "{bursts}: {said}");
        assert!(!said.contains("failed"), "{bursts}: {said}");
        assert!(in_bursts(&said) + last_number(&said) > 100_000, "{bursts}: {said}");
    }
}

#[test]
fn perl() {
    let script = "my %h; $h{'k'.($_*7919%40009)} = $_ for 0..40000; my $s = 0; $s = ($s*31+$h{$_})%1000003 for sort \
                  keys %h; print \"$s\\n\", join(',', map { sprintf '%x', $_ ^ 77 } 1..50), \"\\n\"; my $t = join ' ', \
                  1..20000; my $n = () = $t =~ /1(\\d)7/g; print \"$n\\n\"";
    same("perl", &["-e", script]);
}
