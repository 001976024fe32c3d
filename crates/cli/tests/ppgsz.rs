//! `pagetax ppgsz` on real programs: exit codes, environment, and whether it takes.

mod pages;

use pages::{
    advised, assert_share, bytes, code, compiled, installed, ppgsz, run, stderr, verified,
};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

#[test]
fn exit_codes_are_those_of_the_original() {
    assert_eq!(code(&["-o", "heap=2M", "sh", "-c", "exit 7"]), Some(7));
    assert_eq!(code(&["-o", "heap=0", "sh", "-c", "exit 7"]), Some(7));
    assert_eq!(code(&["-o", "bss=2M", "sh", "-c", "kill -9 $$"]), Some(137));
    assert_eq!(code(&["-o", "heap=2M", "no-such-program"]), Some(127));
    assert_eq!(code(&["-o", "heap=2M", "/etc/passwd"]), Some(126));
    for wrong in [
        &["true"][..],
        &["-o", "heap=3M", "true"],
        &["-o", "heap=2MB", "true"],
        &["-o", "hep=2M", "true"],
        &["-o", "heap=1G", "true"],
        &["-o", "heap=2M"],
        &["-o"],
        &["--undo", "true"],
        &["-p", "-o", "heap=2M", "nothing"],
        &["-p", "-o", "heap=hugetlb:2M", "1"],
        &["-p", "-o", "heap=8K", "1"],
        &["-o", "data=2M", "true"],
    ] {
        let output = run(wrong);
        assert_eq!(output.status.code(), Some(125), "{wrong:?}");
        assert!(!output.stderr.is_empty() && output.stdout.is_empty(), "{wrong:?}");
    }
    let help = run(&["--help"]);
    assert_eq!(help.status.code(), Some(0));
}

#[test]
fn the_environment_keeps_what_stands_there() {
    let own = ("GLIBC_TUNABLES", "glibc.malloc.arena_max=1");
    let output = ppgsz(&["-o", "heap=2M", "env"]).env(own.0, own.1).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        text.contains("GLIBC_TUNABLES=glibc.malloc.arena_max=1:glibc.malloc.hugetlb=1\n"),
        "{text}"
    );
    assert!(output.stderr.is_empty(), "{}", stderr(&output));
    let plain = run(&["-o", "heap=0", "env"]);
    assert!(!String::from_utf8_lossy(&plain.stdout).contains("GLIBC_TUNABLES"));
}

#[test]
fn a_plan_is_told_and_not_carried_out() {
    let output = run(&["-o", "heap=2M", "--dry-run", "sh", "-c", "echo no"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("glibc.malloc.hugetlb=1") && !text.contains("no\n"), "{text}");
    let anon = run(&["-o", "anon=2M", "true"]);
    assert!(anon.status.success() && stderr(&anon).contains("--follow"), "{}", stderr(&anon));
}

/// Returns what each part of parts.c printed: large pages near its start and near its end.
fn parts_on_large_pages(program: &str, only: &str) -> (String, String) {
    let output = run(&["-o", "heap=2M", "--only", only, "--verify", program]);
    assert!(output.status.success(), "{only}: {}", stderr(&output));
    (String::from_utf8_lossy(&output.stdout).trim().replace('\n', ", "), stderr(&output))
}

#[test]
fn patterns_choose_the_memory_that_gets_large_pages() {
    if !advised() {
        return;
    }
    let keep = tempfile::tempdir().unwrap();
    let program = compiled(keep.path(), "parts", &["-pthread"]);
    for (only, expected) in [
        ("heap@0-20M", "heap 1 0, chunk 0 0, mmap 0 0, arena 0 0"),
        ("heap@60M-100M", "heap 0 1, chunk 1 0, mmap 0 0, arena 0 0"),
        ("mapping:8M", "heap 0 0, chunk 0 0, mmap 1 1, arena 0 0"),
        ("mapping@4M-", "refused"),
        ("arena,mapping:8M@4M-8M", "heap 0 0, chunk 0 0, mmap 0 1, arena 1 1"),
    ] {
        if expected == "refused" {
            assert_eq!(code(&["-o", "heap=2M", "--only", only, &program]), Some(125));
            continue;
        }
        // A second run finds the same memory by the same pattern.
        for _ in 0..2 {
            let (found, said) = parts_on_large_pages(&program, only);
            assert_eq!(found, expected, "{only}: {said}");
            assert!(!said.contains("named no memory"), "{said}");
        }
    }
}

#[test]
fn patterns_that_match_nothing_or_cannot_be_applied_have_a_sentence() {
    let keep = tempfile::tempdir().unwrap();
    let program = compiled(keep.path(), "parts", &["-pthread"]);
    let (found, said) = parts_on_large_pages(&program, "mapping:64M,heap@2G-");
    assert!(!found.contains('1'), "{found}");
    assert!(said.contains("mapping:64M named no memory: the program had heap"), "{said}");
    assert!(said.contains("heap@2G- named no memory"), "{said}");
    let (_, said) = parts_on_large_pages(&program, "heap@200M-300M");
    assert!(said.contains("the command used none of it"), "{said}");
    let (_, said) = parts_on_large_pages("true", "heap");
    assert!(said.contains("named no memory") || said.contains("could not be looked at"), "{said}");
    let refused = |options: &[&str]| {
        let output = run(options);
        assert_eq!(output.status.code(), Some(125), "{options:?}");
        stderr(&output)
    };
    assert!(refused(&["-o", "heap=2M", "--only", "hep", "true"]).contains("names no part"));
    assert!(refused(&["-o", "stack=2M", "--only", "heap", "true"]).contains("-o heap=2M"));
    let of_file = refused(&["-o", "text=2M", "--only", "text:no-such", "true"]);
    assert!(of_file.contains("no such file") && of_file.contains("libc.so.6"), "{of_file}");
    let fixed = compiled(keep.path(), "parts", &["-pthread", "-static"]);
    let fixed = refused(&["-o", "heap=2M", "--only", "heap", &fixed]);
    assert!(fixed.contains("no library can see"), "{fixed}");
}

#[test]
fn signals_reach_the_command() {
    let script = "trap 'exit 9' TERM; echo up; while :; do sleep 0.02; done";
    let mut child =
        ppgsz(&["-o", "bss=2M", "sh", "-c", script]).stdout(Stdio::piped()).spawn().unwrap();
    wait_for_line(&mut child);
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(9));
}

fn wait_for_line(child: &mut Child) {
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "up\n");
}

const NUMBERS: &str = "import random\nrandom.seed(1)\n\
                       print('\\n'.join(str(random.random()) for _ in range(1200000)))";

/// Counts all resident bytes of heap and anonymous memory, also those that no huge page fits.
#[test]
fn heaps_of_real_programs_come_on_huge_pages() {
    if !advised() || !preload_is_built() {
        return;
    }
    let heap = |argv: &[&str], least, mib| {
        if installed(argv[0]) {
            let (document, _) = verified(&["-o", "heap=2M"], argv);
            assert_share(&document, &["heap", "anon"], least, mib);
        }
    };
    let dict = "import time\nd = {i: str(i) for i in range(1800000)}\ntime.sleep(3)";
    heap(&["python3", "-c", dict], 0.95, 150);
    let rows = "CREATE TABLE t(a); WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n+1 FROM c LIMIT \
                2500000) INSERT INTO t SELECT hex(n*7919)||hex(n) FROM c; SELECT count(*) FROM t x \
                WHERE a LIKE '%123%';";
    heap(&["sqlite3", ":memory:", rows], 0.95, 60);
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("numbers");
    if installed("python3") {
        let numbers = Command::new("python3").args(["-c", NUMBERS]).output().unwrap().stdout;
        std::fs::write(&file, numbers.repeat(3)).unwrap();
        heap(
            &["sort", "-S", "300M", "--parallel=1", "-o", "/dev/null", file.to_str().unwrap()],
            0.95,
            100,
        );
    }
}

/// A server on a port of its own, ended on drop.
struct Redis(Child, String);

impl Redis {
    fn start(port: u16) -> Option<Redis> {
        if !installed("redis-server") || !installed("redis-benchmark") {
            return None;
        }
        let port = port.to_string();
        let args =
            ["--port", &port, "--save", "", "--io-threads", "2", "--enable-debug-command", "yes"];
        let child = Command::new("redis-server").args(args).stdout(Stdio::null()).spawn().unwrap();
        let redis = Redis(child, port);
        let deadline = Instant::now() + Duration::from_secs(10);
        while redis.ask(&["ping"]) != "PONG\n" {
            assert!(Instant::now() < deadline, "redis-server does not come up");
            std::thread::sleep(Duration::from_millis(50));
        }
        redis.ask(&["debug", "populate", "800000", "key", "100"]);
        Some(redis)
    }

    fn ask(&self, words: &[&str]) -> String {
        let output = Command::new("redis-cli").args(["-p", &self.1]).args(words).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        // A test that fails has no other use for it.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn text_of(mut file: std::fs::File) -> String {
    file.seek(SeekFrom::Start(0)).unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn a_threaded_server_is_collapsed_under_load() {
    let Some(redis) = Redis::start(7397) else { return };
    // Files, because it says much about its progress, and a pipe would fill up.
    let (said, errors) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    let mut load = Command::new("redis-benchmark")
        .args(["-p", &redis.1, "-t", "set,get", "-n", "20000", "-c", "20", "-r", "500000", "-q"])
        .stdout(said.try_clone().unwrap())
        .stderr(errors.try_clone().unwrap())
        .spawn()
        .unwrap();
    let mut rounds = 0;
    while load.try_wait().unwrap().is_none() {
        let done = run(&["-o", "heap=2M,anon=2M", "-p", &redis.pid()]);
        assert!(done.status.success(), "{}", stderr(&done));
        let undone = run(&["--undo", "-p", &redis.pid()]);
        assert!(undone.status.success(), "{}", stderr(&undone));
        rounds += 1;
        std::thread::sleep(Duration::from_millis(300));
    }
    let (said, errors) = (text_of(said), text_of(errors));
    assert!(load.wait().unwrap().success() && errors.is_empty(), "{said}{errors}");
    assert!(rounds > 0 && said.matches("requests per second").count() == 2, "{said}");
    assert!(!said.to_lowercase().contains("error"), "{said}");
    assert_eq!(redis.ask(&["ping"]), "PONG\n");

    let pid = redis.pid();
    let collapsed = run(&["-o", "heap=2M,anon=2M", "--json", "-p", &pid]);
    let document: Value = serde_json::from_slice(&collapsed.stdout).unwrap();
    println!("{rounds} rounds under load");
    assert_share(&document, &["heap", "anon"], 0.95, 50);
    let undone = run(&["--undo", "--json", "-p", &pid]);
    let document: Value = serde_json::from_slice(&undone.stdout).unwrap();
    assert_share(&document, &["heap", "anon"], 1.0, 50);
}

#[test]
fn an_error_of_one_process_does_not_stop_the_list() {
    let start = || {
        let script = "d = b'x' * (40 << 20)\nprint('up', flush=True)\nimport sys; sys.stdin.read()";
        let mut command = Command::new("python3");
        command.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
    };
    if !installed("python3") {
        return;
    }
    let mut child = start();
    wait_for_line(&mut child);
    let proc_path = format!("/proc/{}", child.id());
    let args = ["-o", "anon=2M", "--json", "-p", "nobody", "4194304", &proc_path];
    let output = run(&args);
    assert_eq!(output.status.code(), Some(125));
    let said = stderr(&output);
    assert!(
        said.contains("nobody: it is no process id") && said.contains("4194304: no such"),
        "{said}"
    );
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_share(&document, &["anon"], 0.7, 40);
    child.kill().unwrap();
    child.wait().unwrap();
}

fn preload_is_built() -> bool {
    let library = Path::new(env!("CARGO_BIN_EXE_pagetax")).with_file_name("libpagetax_preload.so");
    if !library.exists() {
        println!("SKIP: {} is not built (cargo build -p pagetax-preload)", library.display());
    }
    library.exists()
}

#[test]
fn a_deep_stack_comes_on_huge_pages() {
    if !advised() || !preload_is_built() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let deep = compiled(directory.path(), "deep", &[]);
    let file = directory.path().join("pages.json");
    let (own, json) = (env!("CARGO_BIN_EXE_pagetax"), file.display());
    // 8 MiB are the usual limit.
    for (limit_kib, deep_mib) in [(65536, 48), (8192, 7)] {
        let wrapped = format!("{own} ppgsz -o stack=2M --json={json} {deep} {deep_mib}");
        let script = format!("ulimit -s {limit_kib}; exec {wrapped}");
        assert!(Command::new("sh").args(["-c", &script]).status().unwrap().success());
        let document = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
        let (asked, resident) = bytes(&document, &["stack"]);
        let unaligned = missing(&document, "stack", "unaligned");
        println!("{limit_kib} KiB: {asked} of {resident} bytes, {unaligned} of them unaligned");
        assert!(resident >= (deep_mib - 1) << 20, "{document:#}");
        // A stack begins and ends where no huge page does: up to 2 MiB at each end. And its first
        // block may have been used before the program could ask.
        let least = if deep_mib > 40 { 0.9 * resident as f64 } else { 0.0 };
        assert!(asked as f64 >= least && asked + unaligned + (2 << 20) >= resident, "{document:#}");
        assert!(asked >= 2 << 20, "{document:#}");
    }
}

/// Bytes of a part of the largest process that have a reason like this.
fn missing(document: &Value, part: &str, reason: &str) -> u64 {
    let processes = document["processes"].as_array().unwrap().iter();
    let parts = processes.flat_map(|process| process["verdict"]["parts"].as_array().unwrap());
    let of_part = parts.filter(|known| known["part"] == part);
    let whys = of_part.flat_map(|part| part["why"].as_array().unwrap());
    let alike = whys.filter(|why| why["reason"].as_str().unwrap().contains(reason));
    alike.map(|why| why["bytes"].as_u64().unwrap()).sum()
}

#[test]
fn static_programs_are_collapsed_as_they_grow() {
    let directory = tempfile::tempdir().unwrap();
    // brk by itself, no malloc at all: nothing in the environment could reach it.
    let program = compiled(directory.path(), "own", &["-static"]);
    let (document, said) = verified(&["-o", "heap=2M", "--follow"], &[&program]);
    assert_eq!(said, "ok\n");
    assert_share(&document, &["heap", "anon"], 0.9, 60);
}

#[test]
fn code_of_a_large_library_comes_on_huge_pages() {
    let find = "ls -S /usr/lib/x86_64-linux-gnu/lib*.so.* | head -n 1";
    let found = Command::new("sh").args(["-c", find]).output().unwrap().stdout;
    let library = String::from_utf8_lossy(&found).trim().to_string();
    let large = std::fs::metadata(&library).is_ok_and(|file| file.len() > 32 << 20);
    if !large {
        println!("SKIP: no library of more than 32 MiB is installed");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    // A copy, which nobody else maps.
    let copy = directory.path().join("large.so");
    std::fs::copy(&library, &copy).unwrap();
    let program = compiled(directory.path(), "code", &[]);
    let plain = Command::new(&program).arg(&copy).output().unwrap();
    assert!(plain.status.success(), "{}", stderr(&plain));
    let text = pagetax_host::pages::text::prepare(&copy).unwrap().unwrap();
    if text.large_bytes == 0 {
        println!("SKIP: the file system of {} keeps no large folios", copy.display());
        return;
    }
    assert!(text.large_bytes as f64 >= 0.9 * text.aligned_bytes as f64, "{text:?}");
    let (document, _) = verified(&["-o", "text=2M"], &[&program, copy.to_str().unwrap()]);
    let (asked, _) = bytes(&document, &["text"]);
    println!("{} MiB of {} MiB aligned code", asked >> 20, text.aligned_bytes >> 20);
    assert!(asked as f64 >= 0.9 * text.aligned_bytes as f64, "{document:#}");
}

/// Returns the KB of a process's code on huge pages: anonymous ones, and the file's own.
fn huge_code_kb(pid: &str) -> [u64; 2] {
    let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let (mut is_code, mut huge_kb) = (false, [0; 2]);
    for line in smaps.lines() {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        if !line.starts_with(|first: char| first.is_ascii_uppercase()) {
            is_code = words[1].contains('x');
        } else if is_code {
            let kinds = ["AnonHugePages:", "FilePmdMapped:"];
            let kind = kinds.iter().position(|kind| *kind == words[0]);
            kind.iter().for_each(|kind| huge_kb[*kind] += words[1].parse::<u64>().unwrap());
        }
    }
    huge_kb
}

/// Returns the KB of code that a process maps from a file, and from no file.
fn code_kb(pid: &str, file: &str) -> (u64, u64) {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let (mut of_file, mut of_copy) = (0, 0);
    for line in maps.lines().filter(|line| line.contains(" r-xp ") && !line.contains("[v")) {
        let (start, rest) = line.split_once('-').unwrap();
        let address = |text: &str| u64::from_str_radix(text, 16).unwrap();
        let kb = (address(rest.split_once(' ').unwrap().0) - address(start)) >> 10;
        match () {
            () if line.ends_with(file) => of_file += kb,
            () if line.contains(" 00:00 0") => of_copy += kb,
            () => {}
        }
    }
    (of_file, of_copy)
}

#[test]
fn code_whose_file_is_gone_stays_a_copy_and_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let program = compiled(directory.path(), "moved", &["-Wl,-z,max-page-size=0x200000"]);
    let mut child =
        Command::new(&program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let pid = child.id().to_string();
    let mut said = std::io::BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut said, &mut line).unwrap();
    let done = run(&["-F", "-o", "text=2M", "-p", &pid]);
    assert!(done.status.success(), "{}", stderr(&done));
    std::fs::remove_file(&program).unwrap();
    let undone = run(&["--undo", "-p", &pid]);
    let why = stderr(&undone);
    assert_eq!(undone.status.code(), Some(1), "{why}");
    assert!(why.contains("of code stay a private copy: the file"), "{why}");
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
}

#[test]
fn moved_code_is_undone() {
    let directory = tempfile::tempdir().unwrap();
    let program = compiled(directory.path(), "moved", &["-Wl,-z,max-page-size=0x200000"]);
    for undo in [&["--undo", "-p"][..], &["--undo", "-o", "text=4K", "-p"]] {
        let mut child =
            Command::new(&program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let pid = child.id().to_string();
        let mut said = std::io::BufReader::new(child.stdout.take().unwrap());
        let is_right = |said: &mut dyn std::io::BufRead| {
            let mut line = String::new();
            said.read_line(&mut line).unwrap();
            line == "right\n"
        };
        assert!(is_right(&mut said));
        let done = run(&["-F", "-o", "text=2M", "-p", &pid]);
        assert!(done.status.success(), "{}", stderr(&done));
        if huge_code_kb(&pid)[0] == 0 {
            println!("SKIP: no free block for huge pages of code");
            child.kill().unwrap();
            child.wait().unwrap();
            return;
        }
        writeln!(child.stdin.as_ref().unwrap()).unwrap();
        assert!(is_right(&mut said), "moved");
        let undone = run(&[undo, &[&pid]].concat());
        let text = String::from_utf8_lossy(&undone.stdout).into_owned();
        let [anonymous_kb, of_file_kb] = huge_code_kb(&pid);
        assert_eq!(anonymous_kb, 0, "{text}");
        let (of_file, of_copy) = code_kb(&pid, &program);
        assert!(of_file > 5 << 10 && of_copy == 0, "{of_file} KB of the file, {of_copy} KB copied");
        // Code is the file's own, too, where it is asked for by name.
        let is_whole = undo == ["--undo", "-p"] || of_file_kb == 0;
        assert_eq!(undone.status.code(), Some(if is_whole { 0 } else { 1 }), "{text}");
        assert!(is_whole || text.contains("page cache"), "{text}");
        writeln!(child.stdin.as_ref().unwrap()).unwrap();
        assert!(is_right(&mut said), "undone");
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
    }
}
