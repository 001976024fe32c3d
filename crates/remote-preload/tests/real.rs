//! Real programs with the preloaded library, on the real kernel: their output must match to the
//! byte.

#[macro_use]
#[path = "../../remote/tests/both_ways/mod.rs"]
mod both_ways;
#[path = "../../remote/tests/turns/mod.rs"]
mod turns;

use both_ways::{is_copied_out, runs_in};
use pagetax_remote::server::listen::{Server, ServerOptions};
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::Ordering;
use turns::turns;

both_ways! {
    sort_with_threads,
    python_objects_and_a_large_buffer,
    sqlite_in_memory,
    threads_and_subprocesses,
    shells_fork_pipelines_and_subshells,
    a_child_inherits_memory_and_pages_it_by_itself,
    a_child_of_a_fork_has_pages_that_are_away,
    forks_of_programs_with_streams_and_threads,
    forks_at_once_and_beside_a_flush,
    forks_in_any_locale,
    each_way_to_fork_gives_the_child_its_memory,
    processes_end_with_their_last_thread,
    signals_reach_those_who_wait_for_them,
    all_numbers_of_files_are_the_programs,
    locked_memory_that_was_freed_comes_back_as_zeros,
    reserved_addresses_files_over_pages_and_moves,
    memory_that_may_not_be_written_to_leaves,
    what_asks_to_stay_local_does_and_it_is_said_once
}

/// Tests with pages on two memory servers instead of inside the process.
macro_rules! on_servers {
    ($($name:ident),* $(,)?) => {
        mod on_servers {
            $(#[test] fn $name() { super::$name() })*
        }
    };
}

on_servers! {
    threads_and_subprocesses,
    a_child_inherits_memory_and_pages_it_by_itself,
    a_child_of_a_fork_has_pages_that_are_away,
    forks_of_programs_with_streams_and_threads,
    forks_at_once_and_beside_a_flush,
    forks_in_any_locale,
    each_way_to_fork_gives_the_child_its_memory,
}

/// Starts two servers, if the calling test is one on servers.
fn servers() -> Option<[Server; 2]> {
    let start = |_| Server::start((Ipv4Addr::LOCALHOST, 0).into(), ServerOptions::default());
    runs_in("on_servers").then(|| [0, 1].map(start).map(Result::unwrap))
}

/// Returns the path of the library under test, which Cargo builds beside this test.
fn library() -> PathBuf {
    let here = std::env::current_exe().unwrap();
    let library = here.parent().unwrap().join("libpagetax_remote_preload.so");
    assert!(library.exists(), "{} is not built", library.display());
    library
}

fn command(program: &str, arguments: &[&str], resident_mib: Option<u64>) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).env("LC_ALL", "C").env_remove("LD_PRELOAD");
    if let Some(mib) = resident_mib {
        command.env("LD_PRELOAD", library());
        command.env("PAGETAX_REMOTE_RESIDENT", (mib << 20).to_string());
        command.env("PAGETAX_REMOTE_STATS", "1");
        if is_copied_out() {
            command.env("PAGETAX_REMOTE_EVICTION", "copied");
        }
    }
    command
}

/// Runs a program plain and paged, and returns both outputs. Returns `None`, with a line, if it is
/// not installed or cannot be paged.
fn both(
    program: &str,
    arguments: &[&str],
    resident_mib: u64,
    input: &str,
) -> Option<(Output, Output)> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("input");
    std::fs::write(&path, input).unwrap();
    let servers = servers();
    let run = |mib| {
        let stdin = Stdio::from(std::fs::File::open(&path).unwrap());
        let mut command = command(program, arguments, mib);
        if let (Some(servers), true) = (&servers, mib.is_some()) {
            let addresses = servers.each_ref().map(|server| server.address().to_string());
            command.env("PAGETAX_REMOTE_SERVERS", addresses.join(","));
            command.env("PAGETAX_REMOTE_COPIES", "2");
        }
        command.stdin(stdin).output()
    };
    let Ok(plain) = run(None) else {
        println!("SKIP: {program} is not installed");
        return None;
    };
    let paged = run(Some(resident_mib)).unwrap();
    let errors = String::from_utf8_lossy(&paged.stderr);
    if paged.status.code() == Some(125) && errors.contains("userfaultfd") {
        println!("SKIP: {}", errors.trim());
        return None;
    }
    assert!(plain.status.success() && paged.status.success(), "{plain:?}\n{errors}");
    for server in servers.iter().flatten() {
        let put = server.pool().counters.pages_in_total.load(Ordering::Relaxed);
        assert!(put > 0, "no page went to a server: {errors}");
    }
    Some((plain, paged))
}

/// Returns a count that a paged program logs at its end, the last one if its children log too.
fn count(output: &Output, name: &str) -> u64 {
    let errors = String::from_utf8_lossy(&output.stderr);
    let (_, rest) = errors.rsplit_once(&format!(" {name} ")).unwrap_or_else(|| panic!("{errors}"));
    rest.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap()
}

fn assert_same(program: &str, arguments: &[&str], resident_mib: u64, input: &str) {
    let Some((plain, paged)) = both(program, arguments, resident_mib, input) else { return };
    assert!(plain.stdout == paged.stdout, "{program} prints something else when it is paged");
    assert!(count(&paged, "page_in_count") > 0, "nothing was paged");
}

fn sort_with_threads() {
    let mut state = 1u64;
    let mut line = |_| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        format!("{:032x}\n", (state as u128) << 50)
    };
    let input: String = (0..200_000).map(&mut line).collect();
    // It closes stderr before it ends; the counts are logged all the same.
    assert_same("sort", &["--parallel=2", "-S", "40M"], 6, &input);
}

fn python_objects_and_a_large_buffer() {
    let script = "
import hashlib
b = bytearray(24_000_000)
for i in range(0, len(b), 4096): b[i] = i // 4096 % 251 + 1
print(hashlib.md5(b).hexdigest(), hashlib.md5(b).hexdigest())
d = {str(i): [i] for i in range(100_000)}
print(sum(v[0] for v in d.values()), d['777'])
b += b'x' * 5_000_000
print(hashlib.md5(b).hexdigest())
";
    assert_same("/usr/bin/python3", &["-c", script], 12, "");
}

fn sqlite_in_memory() {
    let sql = "
create table t(a integer primary key, b text);
with recursive c(x) as (select 1 union all select x+1 from c where x<100000)
insert into t select x, printf('%0200d', x*7919%1000003) from c;
create index i on t(b);
select count(*), sum(length(b)), min(b), max(b) from t;
select sum(a) from t where b like '%77';
";
    assert_same("sqlite3", &[":memory:"], 8, sql);
}

fn threads_and_subprocesses() {
    let script = "
import subprocess, threading, os
b = [bytearray(8_000_000) for _ in range(4)]
def work(part, n):
    for round in range(3):
        for i in range(0, len(part), 4096):
            assert part[i] == (n * round) % 256, (n, round, i)
            part[i] = n * (round + 1) % 256
t = [threading.Thread(target=work, args=(part, n + 1)) for n, part in enumerate(b)]
[x.start() for x in t]; [x.join() for x in t]
print([part[4096] for part in b])
print(subprocess.run(['/bin/echo', 'from a child'], stdout=subprocess.PIPE, close_fds=True))
print(os.read(os.open('/proc/self/exe', os.O_RDONLY), 4))
";
    assert_same("/usr/bin/python3", &["-c", script], 8, "");
}

#[test]
fn bad_settings_are_refused_and_none_is_no_paging() {
    let mut bad = command("true", &[], Some(1));
    let output = bad.env("PAGETAX_REMOTE_RESIDENT", "lots").output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert!(String::from_utf8_lossy(&output.stderr).contains("RESIDENT=lots"), "{output:?}");
    let mut bad = command("true", &[], Some(1));
    let output = bad.env("PAGETAX_REMOTE_EVICTION", "soon").output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert!(String::from_utf8_lossy(&output.stderr).contains("moved, cheapest"), "{output:?}");
    let output = command("echo", &["x"], None).env("LD_PRELOAD", library()).output().unwrap();
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"x\n"[..]));
}

fn shells_fork_pipelines_and_subshells() {
    let script = "
x=1; list=$(seq 1 30000)
echo \"$list\" | sort -rn | head -n 3
(x=2; echo \"$x in a subshell\"; echo \"$list\" | md5sum)
echo $x $(echo substituted | tr a-z A-Z)
for i in 1 2 3; do echo \"$list\" | tail -n $i | head -n 1 & wait; done
";
    for shell in ["bash", "dash"] {
        let Some((plain, paged)) = both(shell, &["-c", script], 16, "") else { return };
        let errors = String::from_utf8_lossy(&paged.stderr);
        assert!(plain.stdout == paged.stdout, "{shell}: {errors}");
    }
}

fn a_child_inherits_memory_and_pages_it_by_itself() {
    let script = "
import hashlib, os
b = bytearray(range(251)) * 16000
def grow(seed):
    c = bytearray(24_000_000)
    for i in range(0, len(c), 4096): c[i] = (i // 4096 + seed) % 251
    print(hashlib.md5(b).hexdigest(), hashlib.md5(c).hexdigest(), hashlib.md5(c).hexdigest(), flush=True)
for seed in 1, 2:
    pid = os.fork()
    if pid == 0:
        b[seed] = 0
        grow(seed)
        os._exit(seed)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
grow(3)
";
    assert_same("/usr/bin/python3", &["-c", script], 12, "");
}

fn a_child_of_a_fork_has_pages_that_are_away() {
    let script = "
import hashlib, os, sys
b = bytearray(int(sys.argv[1]))
def fill(seed):
    for i in range(0, len(b), 4096): b[i] = (i // 4096 + seed) % 251
def sum(): return hashlib.md5(b).hexdigest()
fill(1)
for turn in range(3):
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(r, 1)
        before = sum()
        fill(100 + turn)
        grandchild = os.fork()
        if grandchild == 0:
            print('grandchild', sum(), flush=True)
            fill(7)
            os._exit(3)
        ended = os.waitpid(grandchild, 0)[1]
        print('child', before, sum(), ended, flush=True)
        os._exit(5)
    fill(turn + 50)
    os.write(w, b'the parent has changed all of its own')
    print(os.waitpid(pid, 0)[1], sum(), flush=True)
";
    assert_same("/usr/bin/python3", &["-c", script, "24000000"], 12, "");
    // Enough pages that spare frames are reused.
    assert_same("/usr/bin/python3", &["-c", script, "72000000"], 32, "");
}

/// Builds a C program of tests/ into a folder, and returns its path.
fn build(name: &str, folder: &std::path::Path) -> String {
    let program = folder.join(name).display().to_string();
    let source = format!("{}/tests/{name}.c", env!("CARGO_MANIFEST_DIR"));
    let mut cc = Command::new("cc");
    let built =
        cc.args(["-O1", "-Wall", "-pthread", &source, "-o", &program, "-lutil"]).status().unwrap();
    assert!(built.success());
    program
}

fn forks_of_programs_with_streams_and_threads() {
    let folder = tempfile::tempdir().unwrap();
    assert_same(&build("forks", folder.path()), &[], 12, "");
}

fn forks_at_once_and_beside_a_flush() {
    let folder = tempfile::tempdir().unwrap();
    assert_same(&build("forks_at_once", folder.path()), &[], 12, "");
}

/// Checks forks with locales: their tables are paged memory, and may be evicted.
fn forks_in_any_locale() {
    let script = "
import ctypes, locale, os
locale.setlocale(locale.LC_ALL, '')
b = bytearray(40_000_000)
def fill(seed):
    for i in range(0, len(b), 4096): b[i] = (i // 4096 + seed) % 251
def sum(): return [b[i] for i in range(0, len(b), 4096)]
for turn in range(3):
    fill(turn)
    before = sum()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if sum() == before else 1)
    print(os.waitpid(pid, 0)[1], sum() == before, flush=True)
";
    // A locale that is neither built in nor C, if its sources are installed.
    let folder = tempfile::tempdir().unwrap();
    let made = Command::new("localedef")
        .args(["-i", "de_DE", "-f", "UTF-8"])
        .arg(folder.path().join("de_DE.UTF-8"))
        .output();
    let german = made.is_ok_and(|made| made.status.success()).then_some("de_DE.UTF-8");
    let path = format!("LOCPATH={}", folder.path().display());
    for locale in ["C", "C.UTF-8"].into_iter().chain(german) {
        let language = format!("LC_ALL={locale}");
        let mut arguments = vec![language.as_str(), "/usr/bin/python3", "-c", script];
        if german == Some(locale) {
            arguments.insert(0, &path);
        }
        let Some((plain, paged)) = both("env", &arguments, 16, "") else { return };
        assert!(plain.stdout == paged.stdout, "{locale}: {paged:?}");
    }
}

fn each_way_to_fork_gives_the_child_its_memory() {
    let folder = tempfile::tempdir().unwrap();
    let mib = turns(24).max(8);
    assert_same(&build("ways_to_fork", folder.path()), &[&mib.to_string()], mib / 2, "");
}

fn processes_end_with_their_last_thread() {
    let folder = tempfile::tempdir().unwrap();
    assert_same(&build("last_threads", folder.path()), &[], 12, "");
}

fn signals_reach_those_who_wait_for_them() {
    let folder = tempfile::tempdir().unwrap();
    assert_same(&build("signals", folder.path()), &[], 12, "");
}

fn all_numbers_of_files_are_the_programs() {
    let folder = tempfile::tempdir().unwrap();
    let program = build("files", folder.path());
    let Some((plain, paged)) = both(&program, &[], 12, "") else { return };
    assert!(plain.stdout == paged.stdout, "{plain:?} {paged:?}");
}

fn locked_memory_that_was_freed_comes_back_as_zeros() {
    let folder = tempfile::tempdir().unwrap();
    let program = build("memory_calls", folder.path());
    let Some((plain, paged)) = both(&program, &["locked"], 12, "") else { return };
    assert!(plain.stdout == paged.stdout, "{paged:?}");
}

#[test]
fn freed_blocks_serve_the_next_request_with_their_pages() {
    let folder = tempfile::tempdir().unwrap();
    let program = build("memory_calls", folder.path());
    let Some((_, paged)) = both(&program, &["freed"], 64, "") else { return };
    assert_eq!(String::from_utf8_lossy(&paged.stdout), "freed blocks: 0 wrong\n", "{paged:?}");
    // Two for each block without them.
    let zero_fault_count = count(&paged, "zero_fault_count");
    assert!(zero_fault_count < 1_000, "{zero_fault_count} faults for 4,000 blocks");
}

fn reserved_addresses_files_over_pages_and_moves() {
    let folder = tempfile::tempdir().unwrap();
    let program = build("memory_calls", folder.path());
    for what in ["reservations", "files", "moves"] {
        let Some((plain, paged)) = both(&program, &[what], 12, "") else { return };
        assert!(plain.stdout == paged.stdout, "{what}: {plain:?} {paged:?}");
    }
}

/// Pages 96 MiB at a limit of 16 MiB, plus what the library itself and the compressed pages take.
fn memory_that_may_not_be_written_to_leaves() {
    let folder = tempfile::tempdir().unwrap();
    let program = build("read_only", folder.path());
    let Some((_, paged)) = both(&program, &["60"], 16, "") else { return };
    let wanted = "read-only: 0 0 wrong within the limit\nnone: 0 0 wrong within the limit\n\
                  writable: 0 0 wrong 196608 changed of 196608\n";
    assert_eq!(String::from_utf8_lossy(&paged.stdout), wanted, "{paged:?}");
}

#[test]
fn advice_is_followed_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let program = build("memory_calls", folder.path());
    let paged = command(&program, &["advice"], Some(12)).output().unwrap();
    let errors = String::from_utf8_lossy(&paged.stderr);
    if errors.contains("userfaultfd") {
        return println!("SKIP: {}", errors.trim());
    }
    let wanted = "\
        DONTFORK 22 WIPEONFORK 22 GUARD_INSTALL 22 GUARD_REMOVE 22 REMOVE 22 nonsense 22\n\
        DONTNEED_LOCKED 22 byte 1\n\
        DONTDUMP 0 1 DODUMP 0\n\
        DOFORK 0 KEEPONFORK 0 WILLNEED 0 byte 1\n\
        DONTNEED of locked pages 22 byte 1, unlocked 0 byte 0\n";
    assert_eq!(String::from_utf8_lossy(&paged.stdout), wanted, "{errors}");
}

#[test]
fn many_mappings_do_not_run_out() {
    let folder = tempfile::tempdir().unwrap();
    let program = build("memory_calls", folder.path());
    let Some((plain, paged)) = both(&program, &["many"], 256, "") else { return };
    assert!(plain.stdout == paged.stdout, "{paged:?}");
}

#[test]
fn no_line_goes_into_a_file_of_the_programs() {
    let folder = tempfile::tempdir().unwrap();
    let program = build("stderr_file", folder.path());
    let file = folder.path().join("data").display().to_string();
    let mut paged = command(&program, &[&file], Some(4));
    let paged = paged.env("PAGETAX_REMOTE_STATS", "0").output().unwrap();
    let errors = String::from_utf8_lossy(&paged.stderr);
    if errors.contains("userfaultfd") {
        return println!("SKIP: {}", errors.trim());
    }
    let said = String::from_utf8_lossy(&paged.stdout);
    assert_eq!(said, "0 -1\n0 bytes in the file\n", "{errors}");
    assert_eq!(std::fs::read(&file).unwrap(), b"", "a line is in the program's file");
}

/// Checks that a full pipe without a reader blocks no thread.
#[test]
fn a_full_stderr_stops_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let program = build("stderr_file", folder.path());
    let script = format!(
        "import os, subprocess, sys
r, w = os.pipe()
os.set_blocking(w, False)
try:
    while True: os.write(w, b'x' * 4096)
except BlockingIOError: pass
os.set_blocking(w, True)
sys.exit(subprocess.run([{program:?}], stderr=w, timeout=300).returncode)
"
    );
    let Ok(plain) = command("/usr/bin/python3", &["-c", &script], None).output() else {
        return println!("SKIP: python3 is not installed");
    };
    let mut paged = command("/usr/bin/python3", &["-c", &script], Some(4));
    let paged = paged.env("PAGETAX_REMOTE_STATS", "0").output().unwrap();
    let errors = String::from_utf8_lossy(&paged.stderr);
    if errors.contains("userfaultfd") {
        return println!("SKIP: {}", errors.trim());
    }
    assert!(plain.status.success() && paged.status.success(), "{plain:?} {paged:?}");
}

/// Fills the store with incompressible pages, more than the heap can hold. The rest stays resident,
/// over the limit.
#[test]
fn a_store_inside_the_process_is_full_before_its_heap_is() {
    let script = "
import hashlib, random
b, r = bytearray(150_000_000), random.Random(1)
for at in range(0, len(b), 1_000_000): b[at:at + 1_000_000] = r.randbytes(1_000_000)
print(hashlib.md5(b).hexdigest(), hashlib.md5(b).hexdigest())
";
    let python = ["/usr/bin/python3", "-c", script];
    let plain = command(python[0], &python[1..], None).output().unwrap();
    // The heap gets a quarter of the limit on addresses, the store half of that.
    let mut paged = command("prlimit", &["--as=900000000"], Some(4));
    paged.args(python).env("PAGETAX_REMOTE_ADDRESS_SPACE", (256u64 << 20).to_string());
    let paged = paged.output().unwrap();
    let errors = String::from_utf8_lossy(&paged.stderr);
    if errors.contains("userfaultfd") {
        return println!("SKIP: {}", errors.trim());
    }
    assert!(paged.status.success(), "{:?} {errors}", paged.status);
    assert!(plain.stdout == paged.stdout && errors.contains("page store is full"), "{errors}");
}

fn what_asks_to_stay_local_does_and_it_is_said_once() {
    let folder = tempfile::tempdir().unwrap();
    let program = build("stays_local", folder.path());
    let paged = command(&program, &[], Some(12)).output().unwrap();
    let (said, errors) =
        (String::from_utf8_lossy(&paged.stdout), String::from_utf8_lossy(&paged.stderr));
    if errors.contains("userfaultfd") {
        println!("SKIP: {}", errors.trim());
        return;
    }
    let wanted = "mlock: 0 0\nMAP_FIXED: 1\nlocked and missing: 0\nzeros: 1 0 0\n\
                  mlockall: -1\n";
    assert!(paged.status.success() && said == wanted, "{said}{errors}");
    for line in ["locked pages stay local", "mlockall is refused"] {
        assert_eq!(errors.matches(line).count(), 1, "{line}: {errors}");
    }
    assert!(count(&paged, "page_in_count") > 3000, "{errors}");
}
