//! The library preloaded into real programs, on the real kernel: what they print is right to the byte.

#[macro_use]
#[path = "../../remote/tests/both_ways/mod.rs"]
mod both_ways;

use both_ways::is_copied_out;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

both_ways! {
    sort_with_threads,
    python_objects_and_a_large_buffer,
    sqlite_in_memory,
    threads_and_subprocesses,
    shells_fork_pipelines_and_subshells,
    a_child_inherits_memory_and_pages_it_by_itself,
    a_child_of_a_fork_has_pages_that_are_away,
    forks_of_programs_with_streams_and_threads,
    what_asks_to_stay_local_does_and_it_is_said_once
}

/// Built beside this test, as the library under test.
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
            command.env("PAGETAX_REMOTE_LEAVING", "copied");
        }
    }
    command
}

/// What a program prints, plain and paged; none, said so, if it cannot be paged or is not here.
fn both(
    program: &str,
    arguments: &[&str],
    resident_mib: u64,
    input: &str,
) -> Option<(Output, Output)> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("input");
    std::fs::write(&path, input).unwrap();
    let run = |mib| {
        let stdin = Stdio::from(std::fs::File::open(&path).unwrap());
        command(program, arguments, mib).stdin(stdin).output()
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
    Some((plain, paged))
}

/// One of the counts that a paged program says at its end, after its children.
fn count(output: &Output, name: &str) -> u64 {
    let errors = String::from_utf8_lossy(&output.stderr);
    let (_, rest) = errors.rsplit_once(&format!("{name}: ")).unwrap_or_else(|| panic!("{errors}"));
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
    // It closes stderr before it ends, and has it said all the same what was paged.
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
    let output = bad.env("PAGETAX_REMOTE_LEAVING", "soon").output().unwrap();
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
    // So much that frames go round.
    assert_same("/usr/bin/python3", &["-c", script, "72000000"], 32, "");
}

/// A C program of tests/, built into a folder.
fn build(name: &str, folder: &std::path::Path) -> String {
    let program = folder.join(name).display().to_string();
    let source = format!("{}/tests/{name}.c", env!("CARGO_MANIFEST_DIR"));
    let mut cc = Command::new("cc");
    let built = cc.args(["-O1", "-Wall", "-pthread", &source, "-o", &program]).status().unwrap();
    assert!(built.success());
    program
}

fn forks_of_programs_with_streams_and_threads() {
    let folder = tempfile::tempdir().unwrap();
    assert_same(&build("forks", folder.path()), &[], 12, "");
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
    let wanted = "mlock: 0 0\nMAP_FIXED: 1\nlocked and missing: 0\nzeros: 1 0 0\nfile: 1 1\n\
                  mlockall: -1\n";
    assert!(paged.status.success() && said == wanted, "{said}{errors}");
    for line in ["locked pages stay local", "a file cannot be mapped over", "mlockall is refused"] {
        assert_eq!(errors.matches(line).count(), 1, "{line}: {errors}");
    }
    assert!(count(&paged, ", page_in_count") > 3000, "{errors}");
}
