//! `pagetax remote` with real servers and real programs: servers die while they run.

mod paged;
mod serve;

use paged::{program_of_the_library, remote, right_answer, start, start_script};
use serve::{PAGETAX, Serve};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

#[test]
fn a_program_outlives_one_of_two_servers() {
    let mut servers = [Serve::any("64M"), Serve::any("64M")];
    let both = format!("{},{}", servers[0].address, servers[1].address);
    let options = ["--servers", &both, "--copies", "2", "--stats"];
    let Some(program) = start(&options) else { return };
    servers[0].kill();
    let (answer, output) = program.finish();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{:?}: {errors}", output.status);
    assert_eq!(answer, right_answer());
    assert!(errors.contains("demand_page_in_count "), "nothing was paged: {errors}");
    assert!(errors.contains("run on one machine"), "both replicas are on one machine: {errors}");
}

/// Checks that pages go long before the time in which a killed client could come back.
#[test]
fn servers_have_their_memory_back_when_a_program_has_ended() {
    let server = Serve::any("64M");
    let Some(program) = start(&["--servers", &server.address]) else { return };
    let held = || {
        let listed = Command::new(PAGETAX)
            .args(["servers", "--json", "--servers", &server.address])
            .output()
            .unwrap();
        let listed: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
        listed.pointer("/servers/0/report/pages_held").unwrap().as_u64().unwrap()
    };
    assert!(held() > 0);
    let (_, output) = program.finish();
    assert!(output.status.success(), "{output:?}");
    let until = Instant::now() + Duration::from_secs(20);
    while held() > 0 {
        assert!(Instant::now() < until, "{} pages are still held", held());
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn a_lost_page_is_sigbus_and_a_line_that_names_it() {
    let mut server = Serve::any("64M");
    let address = server.address.clone();
    let Some(program) = start(&["--servers", &address]) else { return };
    server.kill();
    // Another in its place: the client need not wait to see whether the pages come back.
    let _other = Serve::start("64M", &address, &[]);
    let (answer, output) = program.finish();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{errors}");
    assert_eq!(answer, "");
    assert!(errors.contains("SIGBUS at 0x") && errors.contains("is lost"), "{errors}");
}

#[test]
fn servers_that_will_not_do_are_told_before_the_program_starts() {
    let server = Serve::any("16M");
    let tries: [(&[&str], &str); 6] = [
        (&["--servers", "192.0.2.1"], "--insecure"),
        (&["--discover"], "--insecure"),
        (&["--servers", "127.0.0.1:1"], "pagetax serve"),
        (&["--servers", &server.address, "--copies", "2"], "2 memory servers for 2 copies"),
        (&["--copies", "2"], "--servers"),
        (&["--servers", "no-such-host.invalid"], "no-such-host.invalid"),
    ];
    for (options, remedy) in tries {
        let output = Command::new(PAGETAX)
            .args(["remote", "--resident", "12M"])
            .args(options)
            .args(["--", "echo", "it ran"])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(remedy), "{options:?}: {said}");
        assert!(!output.status.success() && output.stdout.is_empty(), "{options:?}: {output:?}");
    }
}

/// Runs mmap3 on network memory, and returns its report. Prints a skip if this user may not page.
fn mmap3(settings: &str, options: &[&str]) -> Option<serde_json::Value> {
    let output = Command::new(PAGETAX)
        .args(["run", "mmap3", "--set", &format!("backing=remote,{settings}"), "--json"])
        .args(options)
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    if errors.contains("userfaultfd") {
        println!("SKIP: {}", errors.trim());
        return None;
    }
    assert!(output.status.success(), "{errors}");
    let run: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let phases: Vec<_> = run["phases"].as_array().unwrap().iter().map(|p| &p["name"]).collect();
    assert_eq!(phases, ["initialise", "verify", "random"]);
    // The graphs of the NMS report: paging rates, and latencies of each interval.
    let columns = run["series"]["columns"].as_object().unwrap();
    for id in
        ["page_in_count", "page_out_count", "page_in_latency_ns_min", "page_in_latency_ns_mean"]
    {
        let values: Vec<u64> =
            columns[id].as_array().unwrap().iter().filter_map(|v| v.as_u64()).collect();
        assert!(values.iter().any(|value| *value > 0), "{id}: {values:?}");
    }
    Some(run)
}

#[test]
fn mmap3_runs_on_memory_servers() {
    let servers = [Serve::any("64M"), Serve::any("64M")];
    let both = format!("{},{}", servers[0].address, servers[1].address);
    let options = ["--interval", "50ms", "--servers", &both, "--copies", "2"];
    let Some(run) = mmap3("size=24M,resident=6M,random=20_000", &options) else { return };
    let value = |id: &str| run["counters"][id]["value"].as_u64().unwrap();
    assert_eq!(value("access_count"), 2 * 24 * 256 + 20_000);
    assert_eq!(value("mismatch_count"), 0);
    assert!(value("page_in_count") > 18 * 256 + 10_000, "{run}");
    let title = run["tables"][0]["title"].as_str().unwrap();
    assert!(title.contains("2 copies") && title.contains(&servers[0].address), "{title}");
}

#[test]
fn mmap3_runs_on_the_machine_of_its_time_and_tells_the_same() {
    let settings = "size=240M,random=2_000";
    let Some(run) = mmap3(settings, &["--on", "sim:alpha-nms"]) else { return };
    assert_eq!(run["latency"]["page_in"]["provenance"], "modeled");
}

#[test]
fn a_child_of_a_fork_pages_to_the_servers_by_itself() {
    let servers = [Serve::any("64M"), Serve::any("64M")];
    let both = format!("{},{}", servers[0].address, servers[1].address);
    let script = "
import hashlib, os
b = bytearray(range(251)) * 16000
def grow(seed):
    c = bytearray(24_000_000)
    for i in range(0, len(c), 4096): c[i] = (i // 4096 + seed) % 251
    return hashlib.sha256(b).hexdigest(), hashlib.sha256(c).hexdigest(), hashlib.sha256(c).hexdigest()
pid = os.fork()
if pid == 0:
    b[1] = 0
    print(*grow(1), flush=True)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
print(*grow(2), flush=True)
";
    let plain = Command::new("/usr/bin/python3").args(["-c", script]).output().unwrap();
    let options = ["--servers", &both, "--copies", "2", "--stats"];
    let Some((paged, errors)) = remote(&options, &["/usr/bin/python3", "-c", script]) else {
        return;
    };
    assert!(paged.status.success(), "{errors}");
    assert_eq!(String::from_utf8_lossy(&paged.stdout), String::from_utf8_lossy(&plain.stdout));
    assert!(errors.contains(" page_in_count "), "nothing was paged: {errors}");
}

/// Checks that children start while one of two servers is away: at once after a fork, and as soon as it is
/// back after an exec.
#[test]
fn children_start_while_a_server_is_away() {
    let mut servers = [Serve::any("64M"), Serve::any("64M")];
    let addresses = servers.each_ref().map(|server| server.address.clone());
    let script = "
import os, subprocess, sys
print('filled', flush=True)
sys.stdin.readline()
pid = os.fork()
if pid == 0:
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
sys.stdin.readline()
print(subprocess.run(['/bin/echo', 'executed'], capture_output=True, text=True), flush=True)
";
    let options = ["--servers", &addresses.join(","), "--copies", "2"];
    let Some(mut program) = start_script("64M", &options, script) else { return };
    servers[1].kill();
    assert_eq!(program.go_on(), "7");
    let address = addresses[1].clone();
    let back = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(500));
        Serve::start("64M", &address, &[])
    });
    let (executed, output) = program.finish();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(executed.contains("returncode=0, stdout='executed"), "{executed}{errors}");
    assert!(output.status.success(), "{errors}");
    drop(back.join().unwrap());
}

/// The kernel itself reads and writes missing pages.
const SYSTEM_CALLS: &str = "
import hashlib, os, tempfile
def memory(turn):
    b = bytearray(24_000_000)
    for i in range(0, len(b), 4096): b[i:i + 8] = (i * 7919 + turn).to_bytes(8, 'little')
    return b
a, b = memory(1), memory(2)
with tempfile.TemporaryFile(buffering=0) as file:
    assert file.write(a) == len(a)
    os.lseek(file.fileno(), 0, os.SEEK_SET)
    assert file.readinto(b) == len(b)
assert a == b
r, w = os.pipe()
for at in range(0, len(a), 1 << 20):
    n = os.write(w, memoryview(a)[at:at + 65536])
    assert os.readv(r, [memoryview(b)[at + 500_000:at + 500_000 + n]]) in (n, len(b) - at - 500_000)
print(hashlib.sha256(a).hexdigest(), hashlib.sha256(b).hexdigest())
";

#[test]
fn system_calls_into_missing_pages_work() {
    let python = ["/usr/bin/python3", "-c", SYSTEM_CALLS];
    let plain = Command::new(python[0]).args(&python[1..]).output().unwrap();
    assert!(plain.status.success(), "{plain:?}");
    let Some((paged, errors)) = remote(&["--stats"], &python) else { return };
    assert!(paged.status.success() && paged.stdout == plain.stdout, "{errors}");
    assert!(errors.contains(" page_in_count "), "nothing was paged: {errors}");
}

/// Runs as nobody, of a group that may use a copy of /dev/userfaultfd, which only it sees; or of none.
fn as_nobody(group: &str) -> Output {
    const SCRIPT: &str = "
        mount -t tmpfs pagetax-test /mnt && mknod /mnt/uffd c 10 \"$2\" && chgrp 54321 /mnt/uffd &&
        chmod 0660 /mnt/uffd && mount --bind /mnt/uffd /dev/userfaultfd || exit 99
        group=$1; shift 2
        exec setpriv --reuid=65534 --regid=65534 --groups=$group --no-new-privs \"$@\"";
    let misc = std::fs::read_to_string("/proc/misc").unwrap();
    let minor = misc.lines().find_map(|line| line.trim().strip_suffix(" userfaultfd"));
    Command::new("unshare")
        .args(["--mount", "--propagation=private", "sh", "-c", SCRIPT, "sh", group])
        .args([
            minor.unwrap_or("none").trim(),
            PAGETAX,
            "remote",
            "--resident",
            "12M",
            "--stats",
            "--",
        ])
        .args(["/usr/bin/python3", "-c", SYSTEM_CALLS])
        .current_dir("/")
        .output()
        .unwrap()
}

#[test]
fn an_ordinary_user_pages_who_may_use_the_device() {
    let allowed = as_nobody("54321");
    let errors = String::from_utf8_lossy(&allowed.stderr);
    let is_refused = allowed.status.code() == Some(99) || errors.starts_with("unshare:");
    if !rustix::process::geteuid().is_root() || is_refused {
        return println!("SKIP: no mount namespace with a device of its own: {errors}");
    }
    if errors.contains("Permission denied")
        && errors.contains("pagetax")
        && !errors.contains("userfaultfd")
    {
        return println!("SKIP: nobody may not run what is built here: {errors}");
    }
    assert!(allowed.status.success(), "{errors}");
    assert!(errors.contains(" page_in_count "), "nothing was paged: {errors}");
    let settings = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap();
    if settings.trim() == "0" {
        let refused = as_nobody("54322");
        let errors = String::from_utf8_lossy(&refused.stderr);
        assert_eq!(refused.status.code(), Some(125), "{errors}");
        assert!(errors.contains("chgrp") && refused.stdout.is_empty(), "{errors}");
    }
}

#[test]
fn what_a_program_starts_as_a_user_without_the_right_runs_unpaged() {
    let setting = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd");
    if !rustix::process::geteuid().is_root() || setting.is_ok_and(|setting| setting.trim() != "0") {
        return println!("SKIP: each user may page here, or none can be become");
    }
    // The program itself has the right: what becomes nobody is a child of it.
    let script = "import subprocess
print(subprocess.run(['id', '-u'], user=65534, capture_output=True, text=True))";
    let Some((paged, errors)) = remote(&[], &["/usr/bin/python3", "-c", script]) else { return };
    let output = String::from_utf8_lossy(&paged.stdout);
    assert!(output.contains("returncode=0, stdout='65534\\n'"), "{output}{errors}");
    if output.contains("cannot be preloaded") {
        return println!("SKIP: nobody may not read what is built here: {output}");
    }
    assert!(output.contains("is not paged: userfaultfd:") && output.contains("chgrp"), "{output}");
}

#[test]
fn programs_that_nothing_can_be_preloaded_into_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(path("a.c"), "int main(void) { return 0; }").unwrap();
    let cc = |more: &[&str], to: &str| {
        Command::new("cc").args(more).args([&path("a.c"), "-o", &path(to)]).status().unwrap()
    };
    assert!(cc(&["-static"], "static").success() && cc(&[], "setuid").success());
    let refused = |name: &str| {
        let output = Command::new(PAGETAX)
            .args(["remote", "--resident", "12M", "--", &path(name)])
            .output()
            .unwrap();
        assert!(output.stdout.is_empty(), "{output:?}");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, why) = refused("static");
    assert!(code == Some(126) && why.contains("linked statically"), "{why}");
    // A program of musl's: as far as anybody looks before it runs, its loader is what tells.
    assert!(cc(&["-Wl,--dynamic-linker=/lib/ld-musl-x86_64.so.1"], "musl").success());
    let (code, why) = refused("musl");
    assert!(code == Some(126) && why.contains("than glibc"), "{why}");
    // The header says for which machine a program is: here for an ARM.
    let mut foreign = std::fs::read(path("setuid")).unwrap();
    foreign[18..20].copy_from_slice(&183u16.to_le_bytes());
    std::fs::write(path("foreign"), foreign).unwrap();
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(path("foreign"), executable).unwrap();
    let (code, why) = refused("foreign");
    assert!(code == Some(126) && why.contains("is built for"), "{why}");
    if !rustix::process::geteuid().is_root() {
        return println!("SKIP: only root can make a file another user's");
    }
    let to_nobody = Command::new("chown").args(["65534", &path("setuid")]).status().unwrap();
    let chmod = Command::new("chmod").args(["4755", &path("setuid")]).status().unwrap();
    assert!(to_nobody.success() && chmod.success());
    let (code, why) = refused("setuid");
    assert!(code == Some(125) && why.contains("set-id"), "{why}");
}

#[test]
fn signals_that_a_program_waits_for_reach_it_with_servers_too() {
    let folder = tempfile::tempdir().unwrap();
    let program = program_of_the_library("signals", folder.path());
    let server = Serve::any("64M");
    for options in [&["--servers", &server.address][..], &[]] {
        let Some((output, errors)) = remote(options, &[&program]) else { return };
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{options:?}: {:?} {errors}", output.status);
        assert!(said.starts_with("200 signals\n"), "{options:?}: {said}{errors}");
    }
}

#[test]
fn runtimes_that_reserve_addresses_start() {
    let programs: [&[&str]; 2] =
        [&["node", "-e", "console.log([...Array(1e6).keys()].length)"], &["java", "-version"]];
    for program in programs {
        if Command::new(program[0]).args(&program[1..]).output().is_err() {
            println!("SKIP: {} is not installed", program[0]);
            continue;
        }
        let Some((output, errors)) = remote(&[], program) else { return };
        assert!(output.status.success(), "{program:?}: {:?} {errors}", output.status);
        assert!(program[0] == "java" || output.stdout == b"1000000\n", "{output:?}");
    }
}

/// A redis-server on a socket in a folder.
struct Redis {
    child: Child,
    socket: String,
}

impl Redis {
    fn start(wrapper: &[&str], folder: &std::path::Path) -> Option<Redis> {
        let socket = folder.join("socket").display().to_string();
        let words = [wrapper, &["redis-server", "--port", "0", "--unixsocket", &socket]].concat();
        let child = Command::new(words[0])
            .args(&words[1..])
            .args(["--dir", folder.to_str()?, "--save", "", "--enable-debug-command", "local"])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn();
        let Ok(child) = child else {
            println!("SKIP: redis-server is not installed");
            return None;
        };
        let mut redis = Redis { child, socket };
        while redis.ask("ping") != "PONG" {
            if redis.child.try_wait().unwrap().is_some() {
                let mut errors = String::new();
                let stderr = redis.child.stderr.as_mut().unwrap();
                std::io::Read::read_to_string(stderr, &mut errors).unwrap();
                assert!(errors.contains("userfaultfd") || errors.contains("not found"), "{errors}");
                println!("SKIP: {}", errors.trim());
                return None;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        Some(redis)
    }

    fn ask(&self, question: &str) -> String {
        let mut cli = Command::new("redis-cli");
        let output = cli.args(["-s", &self.socket]).args(question.split(' ')).output().unwrap();
        String::from_utf8_lossy(&output.stdout).trim().into()
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn redis_saves_in_the_background_what_is_mostly_away() {
    saves_in_the_background(&[]);
}

#[test]
fn redis_saves_in_the_background_what_is_on_servers() {
    let servers = [Serve::any("64M"), Serve::any("64M")];
    let both = format!("{},{}", servers[0].address, servers[1].address);
    saves_in_the_background(&["--servers", &both, "--copies", "2"]);
}

fn saves_in_the_background(options: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let wrapper = [&[PAGETAX, "remote", "--resident", "12M"], options, &["--"]].concat();
    let Some(redis) = Redis::start(&wrapper, folder.path()) else { return };
    redis.ask("debug populate 60000 key 512");
    let digest = redis.ask("debug digest");
    let answer = redis.ask("bgsave");
    assert!(answer.contains("started"), "{answer}");
    // What is written after the fork is not in the file.
    redis.ask("debug populate 20000 later 512");
    let persistence = || redis.ask("info persistence");
    while persistence().contains("rdb_bgsave_in_progress:1") {
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    assert!(persistence().contains("rdb_last_bgsave_status:ok"), "{}", persistence());
    assert_eq!(redis.ask("dbsize"), "80000");
    drop(redis);
    let plain = Redis::start(&[], folder.path()).unwrap();
    assert_eq!((plain.ask("dbsize"), plain.ask("debug digest")), ("60000".into(), digest));
}

#[test]
fn a_library_that_the_loader_would_leave_out_is_refused() {
    let folder = tempfile::Builder::new().prefix("two words").tempdir().unwrap();
    let library = folder.path().join("libpagetax_remote_preload.so");
    let refused = |why: &str| {
        let output = Command::new(PAGETAX)
            .args(["remote", "--resident", "12M", "--", "/bin/true"])
            .env("PAGETAX_LIBRARY_DIR", folder.path())
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(125), "{errors}");
        assert!(errors.contains(why) && errors.contains("hint:"), "{errors}");
    };
    refused("has no libpagetax_remote_preload.so");
    std::fs::write(&library, "").unwrap();
    refused("a space or a colon");
}
