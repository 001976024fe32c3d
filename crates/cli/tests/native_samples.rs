//! `pagetax trapstat --sample` and `whatif --sample` by the native engine: rates of programs whose threads
//! end, and programs that it refuses.
#![cfg(target_arch = "x86_64")]

use std::path::Path;
use std::process::{Command, Output, Stdio};

fn has(programs: &[&str]) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_there = |name: &&&str| std::env::split_paths(&path).any(|dir| dir.join(name).is_file());
    let folder = Path::new(env!("CARGO_BIN_EXE_pagetax")).parent().unwrap();
    let missing: Vec<_> = programs.iter().filter(|name| !is_there(name)).collect();
    if !missing.is_empty() {
        println!("SKIP: not installed: {missing:?}");
    } else if !folder.join("libpagetax_dbt.so").is_file() {
        println!("SKIP: not built: libpagetax_dbt.so");
        return false;
    }
    missing.is_empty()
}

fn compiled(name: &str, source: &str, folder: &Path) -> String {
    let (file, program) = (folder.join(format!("{name}.c")), folder.join(name));
    std::fs::write(&file, source).unwrap();
    let mut cc = Command::new("cc");
    cc.args(["-O1", "-pthread"]).arg(&file).arg("-o").arg(&program);
    assert!(cc.status().unwrap().success());
    program.to_str().unwrap().into()
}

fn trapstat(options: &[&str], command: &[&str], folder: &Path) -> Output {
    let mut pagetax = Command::new(env!("CARGO_BIN_EXE_pagetax"));
    pagetax.arg("trapstat").args(options).args(["-o", "tables", "--"]).args(command);
    pagetax.current_dir(folder).stdin(Stdio::null()).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Returns data misses in a million instructions, and half of their interval.
fn rate(said: &str) -> (f64, f64) {
    let line = said.lines().find(|line| line.contains(": data misses in a million"));
    let line = line.unwrap_or_else(|| panic!("{said}"));
    let mut words = line.split_once("instructions: ").unwrap().1.split(' ');
    let value = words.next().unwrap().parse().unwrap();
    (value, words.nth(1).map_or(0.0, |word| word.parse().unwrap()))
}

/// A program with a thread that computes, followed by threads that read all over their memory. Each of these
/// reuses its predecessor's number, and takes less CPU time than the first.
const PHASES: &str = "#include <pthread.h>
#include <stdlib.h>
#include <sys/prctl.h>
static volatile unsigned m[16 << 20];
static long rounds;
static void *computes(void *none) { volatile unsigned long s = 1; for (long i = 0; i < 12 * rounds; i++) s = s * 77 + i;
  return none; }
static void *reads(void *none) { unsigned long s = 88172645463325252ul, sum = 0;
  for (long i = 0; i < rounds; i++) { s ^= s << 13; s ^= s >> 7; s ^= s << 17; sum += m[(s + sum) % (16 << 20)]; }
  m[0] = sum & 0; return none; }
int main(int count, char **words) { (void)count; rounds = atol(words[1]);
  prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0); for (int i = 0; i < 5; i++) { pthread_t t;
  if (pthread_create(&t, NULL, i ? reads : computes, NULL) != 0) return 1; pthread_join(t, NULL); } return 0; }";

#[test]
fn threads_that_follow_each_other_are_weighed_by_their_own_time() {
    if !has(&["valgrind", "cc"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = compiled("phases", PHASES, folder.path());
    // The same mixture of work, for as long as each takes.
    let whole = ["--backend", "record", "--engine", "valgrind"];
    let whole = said(&trapstat(&whole, &[&program, "1000000"], folder.path()));
    let (truth, _) = rate(&whole);
    let output =
        trapstat(&["--sample", "--engine", "native"], &[&program, "20000000"], folder.path());
    let sampled = said(&output);
    assert_eq!(output.status.code(), Some(0), "{sampled}");
    let (value, error) = rate(&sampled);
    assert!((value - truth).abs() <= error + truth * 0.05, "{truth}, sampled: {sampled}\n{whole}");
    assert!(error < truth, "{truth}, sampled: {sampled}");
}

/// A program that fills 64 MB in order, and makes as many reads all over them as its argument says.
const FILLED: &str = "#include <stdlib.h>
#include <string.h>
int main(int count, char **words) { (void)count; size_t bytes = 64 << 20; unsigned *m = malloc(bytes);
  memset(m, 1, bytes); unsigned long s = 88172645463325252ul, sum = 0;
  for (long i = 0; i < atol(words[1]); i++) { s ^= s << 13; s ^= s >> 7; s ^= s << 17; sum += m[(s + sum) % (16 << 20)]; }
  return sum == 1; }";

/// Predicts by `whatif`; returns its document's part about 4K pages and about 2M pages.
fn whatif(options: &[&str], command: &[&str], folder: &Path) -> [serde_json::Value; 2] {
    let mut pagetax = Command::new(env!("CARGO_BIN_EXE_pagetax"));
    pagetax.args(["whatif", "--runs", "1", "--json"]).args(options).arg("--").args(command);
    let output = pagetax.current_dir(folder).stdin(Stdio::null()).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    [&document["base"]["why"], &document["sizes"][0]["why"]].map(Clone::clone)
}

#[test]
fn a_prediction_from_bursts_agrees_with_that_from_all_accesses() {
    if !has(&["valgrind", "cc"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = compiled("filled", FILLED, folder.path());
    const READS: f64 = 30e6;
    let rounds = (READS as u64).to_string();
    let [base, large] = whatif(&["--sample"], &[&program, &rounds], folder.path());
    let [_, all_large] = whatif(&[], &[&program, "1000000"], folder.path());
    let number = |value: &serde_json::Value, key: &str| value[key].as_f64().unwrap();
    // Nearly each read of 64 MB walks on 4K pages, and none on 2M.
    let walks = number(&base, "other_walk_count") + number(&base, "chased_walk_count");
    assert!((READS * 0.6..READS * 1.05).contains(&walks), "{base}");
    assert!(number(&large, "other_walk_count") < READS * 0.01, "{large}");
    let (faults, truth) =
        (number(&large, "large_fault_count"), number(&all_large, "large_fault_count"));
    assert!((faults - truth).abs() <= 1.0, "{large}, {all_large}");
    assert!((16384.0..18000.0).contains(&number(&base, "base_fault_count")), "{base}");
}

#[test]
fn a_filter_of_system_calls_is_the_reason_of_what_is_missing() {
    if !has(&["cc"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    // A strict filter: all but read, write, exit and rt_sigreturn kills.
    let source = "#include <sys/prctl.h>\n#include <sys/syscall.h>\n#include <unistd.h>\nint main(void) { volatile \
                  unsigned long s = 1; for (long i = 0; i < 300000000; i++) s = s * 77 + i; prctl(PR_SET_SECCOMP, 1); \
                  for (long i = 0; i < 300000000; i++) s = s * 77 + i; write(1, \"alive\\n\", 6); \
                  syscall(SYS_exit, 9); }";
    let program = compiled("strict", source, folder.path());
    let output = trapstat(&["--sample", "--engine", "native"], &[&program], folder.path());
    let said = said(&output);
    assert_eq!((output.status.code(), &*output.stdout), (Some(9), &b"alive\n"[..]), "{said}");
    assert!(said.contains("seccomp") && said.contains("ms of CPU time"), "{said}");
}

#[test]
fn programs_made_by_go_are_refused_before_they_start() {
    if !has(&["cc"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let source = "#include <stdio.h>\n__attribute__((section(\".go.buildinfo\"))) const char go[] = \"go\"; \
                  int main(void) { return puts(\"started\") + go[0]; }";
    let program = compiled("go", source, folder.path());
    let output = trapstat(&["--sample", "--engine", "native"], &[&program], folder.path());
    assert_eq!(output.status.code(), Some(3), "{}", said(&output));
    assert!(said(&output).contains("is made by Go") && output.stdout.is_empty());
}

#[test]
fn no_bursts_have_a_reason() {
    if !has(&["cc"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let output = trapstat(&["--sample", "--engine", "native"], &["true"], folder.path());
    assert_eq!(output.status.code(), Some(0));
    // A busy machine can make the start of `true` take more CPU time than a burst needs, but no thread of it.
    let reasons = ["the program used too little CPU time", "no thread used enough CPU time"];
    let has = |reason: &&str| said(&output).contains(&format!("no bursts: {reason}"));
    assert!(reasons.iter().any(has), "{}", said(&output));
}
