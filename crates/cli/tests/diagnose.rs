//! `pagetax diagnose` and `compare` on real programs, on misbehaving ones, and interrupted.

use pagetax_core::cause::Account;
use pagetax_core::diagnosis::{AS_IS, Basis, CHECK, Diagnosis, Trial};
use pagetax_core::exit::Exit;
use std::io::{BufRead, Write};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

fn pagetax(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagetax"));
    command.args(args).env("NO_COLOR", "1").stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn diagnose(options: &[&str], argv: &[&str]) -> Output {
    pagetax(&[&["diagnose", "--json"], options, &["--"], argv].concat()).output().unwrap()
}

fn document(output: &Output) -> Diagnosis {
    let error = String::from_utf8_lossy(&output.stderr);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {error}"))
}

fn trial<'a>(diagnosis: &'a Diagnosis, name: &str) -> &'a Trial {
    diagnosis.trials.iter().find(|t| t.name == name).unwrap()
}

fn warned(diagnosis: &Diagnosis, id: &str) -> bool {
    diagnosis.warnings.iter().any(|warning| warning.id == id)
}

const TWO: &[&str] = &["--runs", "2", "--warmup", "0", "--pages", "4K,2M"];
const DICT: &str = "d = {i: str(i) for i in range(150000)}; print(len(d))";

#[test]
fn programs_that_nobody_here_wrote_come_through_unharmed() {
    let sqlite = "CREATE TABLE t(a); WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n+1 FROM c \
                  LIMIT 50000) INSERT INTO t SELECT hex(n*7919) FROM c; SELECT count(*) FROM t;";
    let programs: &[&[&str]] = &[
        &["python3", "-c", DICT],
        &["sh", "-c", "seq 100000 | sort -S 50M -r | tail -n 1; (exit 0) & wait"],
        &["sqlite3", ":memory:", sqlite],
    ];
    for argv in programs {
        let installed = Command::new(argv[0]).arg("--version").output().is_ok();
        if !installed {
            println!("SKIP: {} is not installed", argv[0]);
            continue;
        }
        let output = diagnose(TWO, argv);
        let diagnosis = document(&output);
        assert_eq!((output.status.code(), diagnosis.exit), (Some(0), Exit::Code(0)), "{argv:?}");
        assert_eq!(diagnosis.command, *argv);
        assert_eq!(trial(&diagnosis, AS_IS).runs_ns.len(), 2);
        assert_eq!(trial(&diagnosis, "base").took.bytes, Some(0), "{argv:?}");
        assert!(!warned(&diagnosis, "output_differs"), "{argv:?}");
        // Absent where looks came too late to know it.
        let peak_bytes = trial(&diagnosis, AS_IS).peak_resident_bytes;
        let least_bytes = if argv[0] == "python3" { 20 << 20 } else { 1 << 20 };
        assert!(peak_bytes.is_none_or(|bytes| bytes > least_bytes), "{argv:?} {peak_bytes:?}");
        let budget = diagnosis.budget.unwrap();
        let rows: u64 = budget.rows(Account::Cpu).iter().filter_map(|row| row.ns).sum();
        assert_eq!(
            rows as i64 + budget.unexplained_ns(Account::Cpu),
            budget.total_ns(Account::Cpu) as i64
        );
    }
}

/// Takes and frees blocks of 16 MiB. Without settings, glibc maps each anew.
const FREES: &str = "for i in range(100): b = b'x' * (16 << 20)";

#[test]
fn settings_of_a_program_are_trials_with_their_price() {
    let options = ["--runs", "2", "--warmup", "0", "--pages", "2M"];
    let python = ["/usr/bin/python3", "-c", FREES];
    let diagnosis = document(&diagnose(&[&options[..], &["--settings"]].concat(), &python));
    let faults = |name: &str| trial(&diagnosis, name).fault_counts.clone();
    let (as_is, kept) = (faults(AS_IS), faults("glibc-keep"));
    assert!(kept.iter().max() < as_is.iter().min(), "{kept:?} of {as_is:?}");
    let keep = &trial(&diagnosis, "glibc-keep").mechanism;
    assert!(keep.contains("trim_threshold=") && keep.contains("not given back"), "{keep}");
    let own = &trial(&diagnosis, "python-malloc-2M").mechanism;
    assert!(own.contains("PYTHONMALLOC=malloc") && own.contains("takes longer"), "{own}");
    let without = document(&self::diagnose(&options, &python));
    let names: Vec<&str> = without.skipped.iter().map(|one| one.name.as_str()).collect();
    assert_eq!(names, ["python-malloc-2M"], "those of large pages are named");
    assert_eq!(without.skipped[0].remedy, "add --settings");
}

#[test]
fn runs_share_a_cpu_only_if_the_command_needs_nothing_but_a_cpu() {
    let counts = "print(sum(i * i for i in range(5_000_000)))";
    let output = diagnose(&["--side-by-side", "--runs", "3"], &["python3", "-c", counts]);
    let diagnosis = document(&output);
    assert_eq!((diagnosis.exit, diagnosis.basis), (Exit::Code(0), Basis::Cpu));
    assert!(diagnosis.side_by_side && trial(&diagnosis, "thp-2M").runs_ns.len() == 3);
    assert!(!warned(&diagnosis, "output_differs"));
    assert!(diagnosis.trials.iter().all(|trial| !trial.name.contains("text")));
    // A run takes longer than its CPU time by those beside it.
    let alone = trial(&diagnosis, AS_IS);
    assert!(alone.runs_ns[0] > alone.user_ns[0] * 3 / 2, "{alone:?}");

    let output = diagnose(&["--side-by-side", "--runs", "2"], &["sleep", "0.3"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("one after another: the command waits"), "{said}");
    let diagnosis = document(&output);
    assert!(!diagnosis.side_by_side && diagnosis.basis == Basis::Elapsed);
}

#[test]
fn a_probe_runs_beside_one_task_in_a_virtual_machine() {
    let counts = "print(sum(i * i for i in range(6_000_000)))";
    let of = |options: &[&str], argv: &[&str]| {
        document(&diagnose(&[&["--runs", "2", "--pages", "4K,2M"], options].concat(), argv))
    };
    let probes = |diagnosis: &Diagnosis| trial(diagnosis, AS_IS).probe_ns.clone();
    let alone = of(&["--alone"], &["python3", "-c", counts]);
    assert!(probes(&alone).is_empty() && trial(&alone, AS_IS).steady_ns.is_empty());
    let waiting = of(&[], &["sleep", "0.3"]);
    assert!(probes(&waiting).is_empty() && waiting.basis == Basis::Elapsed);
    if alone.environment["hypervisor"] == "none" {
        println!("SKIP: this is no virtual machine");
        return;
    }
    // On a busy machine the command may wait for its files for too large a part of its time.
    let tries = (0..5).map(|_| of(&[], &["python3", "-c", counts]));
    let one_task = tries.into_iter().find(|one| !probes(one).is_empty()).expect("no probe");
    assert!(probes(&one_task).iter().all(|ns| ns.is_some_and(|ns| ns > 100)), "{one_task:?}");
    assert_eq!(one_task.basis, Basis::Cpu);
    let as_is = trial(&one_task, AS_IS);
    assert_eq!(as_is.steady_ns.len(), 2);
    // The probe's share of the CPU.
    assert!(as_is.runs_ns[0] > as_is.user_ns[0] * 9 / 8, "{as_is:?}");
}

#[test]
fn a_command_that_fails_is_run_once_and_its_status_is_ours() {
    let output = diagnose(TWO, &["sh", "-c", "echo no such luck >&2; exit 3"]);
    let diagnosis = document(&output);
    assert_eq!((output.status.code(), diagnosis.exit), (Some(3), Exit::Code(3)));
    assert_eq!((diagnosis.trials.len(), diagnosis.trials[0].runs_ns.len()), (1, 1));
    assert!(diagnosis.verdict.winner.is_none());
    let warning = diagnosis.warnings.iter().find(|w| w.id == "command_failed").unwrap();
    assert!(warning.text.contains("no such luck"), "{}", warning.text);

    let killed = diagnose(TWO, &["sh", "-c", "kill -ABRT $$"]);
    assert_eq!((killed.status.code(), document(&killed).exit), (Some(134), Exit::Signal(6)));

    let stubborn = diagnose(&[TWO, &["--ignore-failure"]].concat(), &["sh", "-c", "exit 3"]);
    assert!(
        document(&stubborn).trials.iter().all(|t| t.runs_ns.len() == 2 && t.exit == Exit::Code(3))
    );
}

#[test]
fn what_cannot_be_run_says_so_as_env_does() {
    for (argv, code, words) in
        [("no-such-program", 127, "was not found"), ("/etc/passwd", 126, "cannot be run")]
    {
        let output = diagnose(TWO, &[argv]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{error}");
        assert!(error.contains(argv) && error.contains(words), "{error}");
        assert!(output.stdout.is_empty());
    }
    let sizes = diagnose(&["--pages", "3M"], &["true"]);
    assert_eq!(sizes.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&sizes.stderr).contains("powers of two"));
    let input = diagnose(&["--input", "/nonexistent"], &["cat"]);
    assert_eq!(input.status.code(), Some(2));
}

#[test]
fn each_run_reads_all_of_standard_input() {
    let directory = tempfile::tempdir().unwrap();
    let kept = directory.path().join("kept");
    let options = ["--keep-output", kept.to_str().unwrap()];
    let args = [&["diagnose"], TWO, &options, &["--", "tr", "a-z", "A-Z"]].concat();
    let mut child = pagetax(&args).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"hello\n").unwrap();
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && !text.contains("HELLO"), "{text}");
    for run in ["as-is.0.out", "as-is.1.out", "as-is.2.out", "base.2.out"] {
        assert_eq!(std::fs::read_to_string(kept.join(run)).unwrap(), "HELLO\n", "{run}");
    }
}

#[test]
fn a_pipe_that_nobody_writes_to_is_waited_for_with_a_word() {
    let args = [&["diagnose"], TWO, &["--", "cat"]].concat();
    let mut child = pagetax(&args).stdin(Stdio::piped()).spawn().unwrap();
    let mut told = String::new();
    std::io::BufReader::new(child.stderr.take().unwrap()).read_line(&mut told).unwrap();
    assert!(told.contains("--input null"), "{told}");
    drop(child.stdin.take());
    wait_at_most(&mut child, Duration::from_secs(60));
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_check_repeats_the_command_as_it_is_and_never_wins() {
    let output = diagnose(&["--check", "--runs", "3", "--pages", "2M"], &["python3", "-c", DICT]);
    let diagnosis = document(&output);
    let check = trial(&diagnosis, CHECK);
    assert_eq!((check.runs_ns.len(), &*check.mechanism), (3, &*trial(&diagnosis, AS_IS).mechanism));
    assert!(check.speedup.is_some(), "it is compared as the others are");
    assert_ne!(diagnosis.verdict.winner.as_deref(), Some(CHECK));
}

#[test]
fn the_start_of_a_short_command_is_measured_beside_each_run() {
    let options = ["--runs", "5", "--pages", "stack=2M"];
    let short = document(&diagnose(&options, &["true"]));
    assert!(short.trials.iter().all(|trial| trial.start_ns.len() == 5), "{:?}", short.trials);
    assert_eq!((&short.verdict.winner, &short.verdict.apply), (&None, &None));
    let reason = &short.verdict.reason;
    assert!(reason.starts_with("no verdict: of ") && reason.contains("does nothing"), "{reason}");
    let long = document(&diagnose(&options, &["sleep", "0.6"]));
    assert!(long.trials.iter().all(|trial| trial.start_ns.is_empty()), "{:?}", long.trials);
}

#[test]
fn outputs_that_differ_are_noticed() {
    // Base pages can be seen from inside: a program that prints them differs between trials.
    let output = diagnose(TWO, &["grep", "THP_enabled", "/proc/self/status"]);
    assert!(warned(&document(&output), "output_differs"));
    let random = diagnose(TWO, &["sh", "-c", "echo $$"]);
    assert!(!warned(&document(&random), "output_differs"));
}

fn wait_at_most(child: &mut Child, limit: Duration) {
    let deadline = Instant::now() + limit;
    while child.try_wait().unwrap().is_none() {
        assert!(Instant::now() < deadline, "did not end in {limit:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn interrupt(child: &Child) {
    let pid = rustix::process::Pid::from_child(child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
}

#[test]
fn an_interruption_keeps_finished_trials_and_leaves_nothing_behind() {
    let directory = tempfile::tempdir().unwrap();
    let marks = directory.path().join("marks");
    let script =
        format!("echo x >> {0}; [ $(wc -l < {0}) -le 6 ] || exec sleep 999", marks.display());
    let args = ["diagnose", "--json", "--runs", "9", "--pages", "4K", "--", "sh", "-c", &script];
    let mut child = pagetax(&args).env("TMPDIR", directory.path()).spawn().unwrap();
    let runs = || std::fs::read_to_string(&marks).unwrap_or_default().lines().count();
    let deadline = Instant::now() + Duration::from_secs(60);
    while runs() < 7 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(20));
    }
    interrupt(&child);
    wait_at_most(&mut child, Duration::from_secs(60));
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", String::from_utf8_lossy(&output.stderr));
    let diagnosis = document(&output);
    assert!(warned(&diagnosis, "interrupted"));
    // One warm-up, one run for the budget, two rounds of two; the seventh was cut off.
    assert_eq!(trial(&diagnosis, AS_IS).runs_ns.len(), 2);
    assert_eq!(trial(&diagnosis, "base").runs_ns.len(), 2);
    let left: Vec<_> = std::fs::read_dir(directory.path()).unwrap().flatten().collect();
    assert_eq!(left.len(), 1, "only the marks: {left:?}");
}

#[test]
fn changed_settings_are_put_back_also_after_an_interruption() {
    let path = Path::new("/sys/kernel/mm/transparent_hugepage/hugepages-64kB/enabled");
    if !path.exists() || !rustix::process::geteuid().is_root() {
        println!("SKIP: settings of the system: needs root and Linux 6.8 or later");
        return;
    }
    let before = std::fs::read_to_string(path).unwrap();
    let sizes = ["--pages", "64K", "--runs", "2", "--allow-sysfs"];
    let shell = ["sh", "-c", "cat /sys/kernel/mm/transparent_hugepage/hugepages-64kB/enabled"];
    let diagnosis = document(&diagnose(&sizes, &shell));
    assert_eq!(trial(&diagnosis, "mthp-64K").runs_ns.len(), 2);
    let changed = before.contains("[never]");
    assert_eq!(warned(&diagnosis, "output_differs"), changed, "the trial saw another setting");
    assert_eq!(std::fs::read_to_string(path).unwrap(), before);

    let script = "grep -q '\\[never\\]' /sys/kernel/mm/transparent_hugepage/hugepages-64kB/enabled \
                  || exec sleep 999";
    let args = [&["diagnose"], &sizes[..], &["--", "sh", "-c", script]].concat();
    let mut child = pagetax(&args).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while changed && std::fs::read_to_string(path).unwrap() == before && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    interrupt(&child);
    wait_at_most(&mut child, Duration::from_secs(60));
    assert_eq!(std::fs::read_to_string(path).unwrap(), before);
}

#[test]
fn diagnoses_are_compared_and_others_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_string();
    for (name, program) in [("a", "true"), ("b", "true"), ("c", "false")] {
        let args =
            ["--runs", "3", "--pages", "4K", "--ignore-failure", &format!("--json={}", path(name))];
        let output = pagetax(&[&["diagnose"], &args[..], &["--", program]].concat()).output();
        assert!(output.unwrap().status.code().is_some());
    }
    let compare = |args: &[&str]| pagetax(&[&["compare"], args].concat()).output().unwrap();
    let same = compare(&[&path("a"), &path("b")]);
    let text = String::from_utf8_lossy(&same.stdout);
    assert!(same.status.success() && text.contains("as-is wall_ns"), "{text}");
    let refused = compare(&[&path("a"), &path("c")]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("command: `true` and `false`"));
    let forced = compare(&["--force", &path("a"), &path("c")]);
    assert!(forced.status.success());
    assert!(String::from_utf8_lossy(&forced.stdout).contains("\nforced: these differ in\n"));
    let limits = ["--fail-if", "as-is wall_ns>0.000001", "--json"];
    let three = compare(&[&limits[..], &[&path("a"), &path("b"), &path("a")]].concat());
    assert_eq!(three.status.code(), Some(1), "{}", String::from_utf8_lossy(&three.stderr));
    let document: serde_json::Value = serde_json::from_slice(&three.stdout).unwrap();
    assert_eq!(document["comparisons"].as_array().unwrap().len(), 2);
}

#[test]
fn a_search_for_parts_takes_twelve_runs_and_has_an_answer() {
    let has = |program: &str| Command::new(program).arg("--version").output().is_ok();
    if !has("valgrind") || !has("/usr/bin/python3") {
        return println!("SKIP: valgrind or python3 is not installed");
    }
    let output = diagnose(&["--parts"], &["/usr/bin/python3", "-c", DICT]);
    let diagnosis = document(&output);
    let parts = diagnosis.parts.expect("a search");
    assert!((9..=12).contains(&parts.run_count), "{parts:?}");
    assert_eq!(parts.is_found, parts.why_not.is_none(), "{parts:?}");
    assert!(parts.memory_share.is_some_and(|share| share > 0.0), "{parts:?}");
    assert!(diagnosis.verdict.reason.contains("parts: "), "{}", diagnosis.verdict.reason);
    if parts.is_found {
        assert!(diagnosis.verdict.apply.is_some_and(|line| line.contains("--only")));
    }
}
