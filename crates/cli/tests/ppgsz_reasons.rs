//! Failures, provoked for real: each reason that a verdict gives, each process that is left alone, and an
//! ordinary user's view.

mod pages;

use pages::{advised, assert_share, bytes, compiled, run, stderr, verified};
use rustix::fs::{FlockOperation, flock};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

const NOBODY: [&str; 4] = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
/// The memory of each case of reasons.c.
const BYTES: u64 = 32 << 20;

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        println!("SKIP: needs root");
    }
    root
}

/// Programs where every user can run them.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        let directory = tempfile::tempdir().unwrap();
        std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
        Place(directory)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn copy(&self, program: &str, mode: u32) -> PathBuf {
        let place = self.path().join(Path::new(program).file_name().unwrap());
        std::fs::copy(program, &place).unwrap();
        std::fs::set_permissions(&place, PermissionsExt::from_mode(mode)).unwrap();
        place
    }
}

/// A case of reasons.c, which ends with its input.
struct Case {
    child: Child,
    pid: String,
}

impl Case {
    fn start(mut command: Command) -> Case {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let pid = line.trim().strip_prefix("up ").unwrap_or_else(|| panic!("{command:?}: {line}"));
        Case { pid: pid.into(), child }
    }

    fn of(program: &str, why: &str) -> Case {
        let mut command = Command::new(program);
        command.arg(why);
        Case::start(command)
    }

    /// Returns the document of a change with these options.
    fn asked(&self, options: &[&str]) -> Value {
        let output = run(&[options, &["--json", "-p", &self.pid]].concat());
        assert!(output.status.success(), "{}", stderr(&output));
        serde_json::from_slice(&output.stdout).unwrap()
    }
}

impl Drop for Case {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let status = self.child.wait().unwrap();
        assert!(status.success() || std::thread::panicking(), "{status}");
    }
}

/// Bytes of `anon` for which a reason like this is given.
fn why(document: &Value, reason: &str) -> u64 {
    let whys = document["processes"][0]["verdict"]["parts"][0]["why"].as_array().unwrap();
    let alike = whys.iter().filter(|why| why["reason"].as_str().unwrap().contains(reason));
    alike.map(|why| why["bytes"].as_u64().unwrap()).sum()
}

#[test]
fn memory_that_cannot_have_huge_pages_says_why() {
    let place = Place::new();
    let program = compiled(place.path(), "reasons", &[]);
    for (case, reason) in [
        ("forbidden", "forbids itself huge pages (prctl"),
        ("refused", "refuses huge pages here (MADV_NOHUGEPAGE)"),
    ] {
        let document = Case::of(&program, case).asked(&["-o", "anon=2M"]);
        assert_eq!(why(&document, reason), BYTES, "{case}: {document:#}");
    }
    let document = Case::of(&program, "none").asked(&["-o", "anon=2M"]);
    assert_share(&document, &["anon"], 0.95, BYTES >> 20);
}

#[test]
fn locked_memory_is_not_split() {
    if !advised() || !is_root() {
        return;
    }
    let place = Place::new();
    let case = Case::of(&compiled(place.path(), "reasons", &[]), "locked");
    let document = case.asked(&["-o", "anon=4K"]);
    assert_eq!(why(&document, "locked in memory (mlock)"), BYTES, "{document:#}");
    let document = case.asked(&["-o", "anon=2M"]);
    assert_share(&document, &["anon"], 0.95, BYTES >> 20);
}

#[test]
fn what_a_child_has_copied_is_told_and_collapsed_again() {
    if !advised() {
        return;
    }
    let place = Place::new();
    let case = Case::of(&compiled(place.path(), "reasons", &[]), "forked");
    let plan = run(&["-o", "anon=2M", "--dry-run", "-p", &case.pid]);
    let said = stderr(&plan);
    assert!(said.contains("M not: copied after a fork: copy-on-write makes base pages"), "{said}");
    assert_share(&case.asked(&["-o", "anon=2M"]), &["anon"], 0.95, BYTES >> 20);
}

/// A memory cgroup of either version that goes with the value.
struct Group(PathBuf);

impl Group {
    fn make() -> Option<Group> {
        let root = Path::new("/sys/fs/cgroup");
        let v1 = root.join("memory");
        let parent = if v1.is_dir() { v1 } else { root.to_path_buf() };
        let path = parent.join(format!("pagetax-test-{}", std::process::id()));
        std::fs::create_dir(&path).ok()?;
        Some(Group(path)).filter(|group| group.limit().is_some())
    }

    fn limit(&self) -> Option<PathBuf> {
        let names = ["memory.limit_in_bytes", "memory.max"];
        names.iter().map(|name| self.0.join(name)).find(|file| file.exists())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        std::fs::remove_dir(&self.0).unwrap();
    }
}

#[test]
fn a_cgroup_at_its_limit_is_the_reason() {
    if !is_root() {
        return;
    }
    let Some(group) = Group::make() else {
        println!("SKIP: no memory cgroup can be made");
        return;
    };
    let place = Place::new();
    let program = compiled(place.path(), "reasons", &[]);
    let limit = group.limit().unwrap();
    // It fills its memory inside, so that this is what it is charged for; little is left then.
    std::fs::write(&limit, (BYTES + (1 << 20)).to_string()).unwrap();
    let script = format!("echo $$ > {}/cgroup.procs; exec {program} none", group.0.display());
    let mut command = Command::new("sh");
    command.args(["-c", &script]);
    let case = Case::start(command);
    let document = case.asked(&["-o", "anon=2M"]);
    assert!(why(&document, "cgroup is at its limit") >= BYTES / 2, "{document:#}");
    drop(case);
}

/// More pages in the pool of 2M pages for as long as this lives. The lock keeps two tests at a time from
/// putting back each other's numbers.
struct Pool {
    file: std::fs::File,
    before: u64,
    pages: u64,
}

impl Pool {
    const FILE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

    fn with(more: u64) -> Option<Pool> {
        let read = || std::fs::read_to_string(Pool::FILE).ok()?.trim().parse::<u64>().ok();
        let file = std::fs::File::open(Pool::FILE).ok()?;
        flock(&file, FlockOperation::LockExclusive).ok()?;
        let before = read()?;
        let pool = Pool { file, before, pages: before + more };
        std::fs::write(Pool::FILE, pool.pages.to_string()).ok()?;
        (read()? == pool.pages).then_some(pool)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        std::fs::write(Pool::FILE, self.before.to_string()).unwrap();
        flock(&self.file, FlockOperation::Unlock).unwrap();
    }
}

#[test]
fn a_heap_takes_what_the_pool_has_and_no_more() {
    if !is_root() {
        return;
    }
    let Some(pool) = Pool::with(16) else {
        println!("SKIP: the pool of 2M pages cannot be filled");
        return;
    };
    let place = Place::new();
    let program = compiled(place.path(), "pool", &[]);
    // Within the pool all of it; beyond it base pages, and never a signal.
    let pool_mib = pool.pages << 1;
    for (mib, least) in [(12, 12), (pool_mib + 68, 24)] {
        let argv = [program.as_str(), &mib.to_string()];
        let (document, _) = verified(&["-F", "-o", "heap=hugetlb:2M"], &argv);
        let (asked, resident) = bytes(&document, &["heap", "anon"]);
        println!("{mib} MiB: {} of {} MiB from the pool", asked >> 20, resident >> 20);
        assert!(asked >= least << 20 && asked <= pool_mib << 20, "{document:#}");
        assert!(resident >= mib << 20, "{document:#}");
    }
}

/// Runs a program as nobody.
fn unprivileged(program: &Path, args: &[&str]) -> Output {
    Command::new(NOBODY[0]).args(&NOBODY[1..]).arg(program).args(args).output().unwrap()
}

#[test]
fn an_ordinary_user_changes_what_is_theirs_and_nothing_else() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let own = place.copy(env!("CARGO_BIN_EXE_pagetax"), 0o755);
    let program = compiled(place.path(), "reasons", &[]);
    let theirs = |why: &str| {
        let mut command = Command::new(NOBODY[0]);
        command.args(&NOBODY[1..]).args([&program, why]);
        Case::start(command)
    };
    let ppgsz = |args: &[&str]| unprivileged(&own, &[&["ppgsz"], args].concat());
    let case = theirs("none");
    let change = |options: &[&str]| {
        let output = ppgsz(&[options, &["--json", "-p", &case.pid]].concat());
        assert!(output.status.success(), "{}", stderr(&output));
        serde_json::from_slice::<Value>(&output.stdout).unwrap()
    };
    // Without CAP_SYS_NICE the process makes the calls itself.
    let document = change(&["-o", "anon=2M"]);
    assert_share(&document, &["anon"], 0.95, BYTES >> 20);
    let document = change(&["--undo", "-o", "anon=2M"]);
    assert_share(&document, &["anon"], 1.0, BYTES >> 20);
    assert!(document["processes"][0]["stop_count"].as_u64() > Some(0), "{document:#}");

    let of_root = Case::of(&program, "none");
    let set_id = place.copy("/bin/sleep", 0o4755);
    let mut sleeper = Command::new(NOBODY[0]);
    let mut sleeper = sleeper.args(&NOBODY[1..]).arg(&set_id).arg("60").spawn().unwrap();
    let exec_done =
        || std::fs::read_link(format!("/proc/{}/exe", sleeper.id())).is_ok_and(|exe| exe == set_id);
    while !exec_done() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let sleeper_pid = sleeper.id().to_string();
    for (pid, word) in [
        (of_root.pid.as_str(), "belongs to user 0"),
        (sleeper_pid.as_str(), "set-id or with capabilities"),
    ] {
        let output = ppgsz(&["-o", "anon=2M", "-p", pid]);
        assert_eq!(output.status.code(), Some(125));
        assert!(stderr(&output).contains(word), "{}", stderr(&output));
    }
    sleeper.kill().unwrap();
    sleeper.wait().unwrap();
    let output = ppgsz(&["-o", "heap=2M", set_id.to_str().unwrap(), "0"]);
    assert_eq!(output.status.code(), Some(125));
    assert!(stderr(&output).contains("runs set-id"), "{}", stderr(&output));
}
