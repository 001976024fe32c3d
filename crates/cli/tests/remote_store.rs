//! `pagetax remote --store` with a real Redis cluster: its servers die while programs run.

mod paged;
#[path = "../../remote/tests/redis_server/mod.rs"]
mod redis_server;

use paged::{program_of_the_library, remote, right_answer, start};
use redis_server::{RedisServer, url_of};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const PAGETAX: &str = env!("CARGO_BIN_EXE_pagetax");

/// Starts a cluster that soon notices a failed master, and goes on without its slots.
fn cluster() -> Option<Vec<RedisServer>> {
    let nodes = RedisServer::start_cluster(3)?;
    for node in &nodes {
        node.say("CONFIG SET cluster-node-timeout 1000");
        node.say("CONFIG SET cluster-require-full-coverage no");
        node.say("CONFIG SET maxmemory 96mb");
    }
    Some(nodes)
}

/// Checks that a program printed the right answer. Returns its errors.
fn errors_of_right((answer, output): (String, Output), what: &str) -> String {
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!((answer, output.status.code()), (right_answer(), Some(0)), "{what}: {errors}");
    errors
}

/// Checks that a program ended by SIGBUS, with a line and without an answer. Returns its errors.
fn errors_of_sigbus((answer, output): (String, Output), what: &str) -> String {
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    let ended = (answer.as_str(), output.status.signal());
    assert_eq!(ended, ("", Some(libc::SIGBUS)), "{what}: {errors}");
    assert!(errors.contains("SIGBUS at 0x"), "{what}: {errors}");
    errors
}

/// Ends a server at once, as a crash would.
fn kill(server: &mut RedisServer) {
    server.child.kill().unwrap();
    server.child.wait().unwrap();
}

#[test]
fn a_program_outlives_a_master_of_a_cluster() {
    let Some(mut nodes) = cluster() else { return };
    let url = url_of(&nodes);
    let Some(program) = start(&["--store", &url, "--copies", "2", "--stats"]) else { return };
    assert!(nodes.iter().all(|node| node.say("DBSIZE").trim() != ":0"), "pages lie elsewhere");
    kill(&mut nodes[1]);
    let (answer, output) = program.finish();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{:?}: {errors}", output.status);
    assert_eq!(answer, right_answer());
    assert!(errors.contains("demand_page_in_count "), "nothing was paged: {errors}");
    // The pages of a program that has ended do not outlive it for long.
    let until = Instant::now() + Duration::from_secs(60);
    while [&nodes[0], &nodes[2]].iter().any(|node| node.say("DBSIZE").trim() != ":0") {
        assert!(Instant::now() < until, "keys are left");
        std::thread::sleep(Duration::from_millis(200));
    }
}

#[test]
fn a_page_that_the_engine_lost_is_sigbus_and_a_line_that_names_it() {
    let Some(redis) = RedisServer::start(&["--requirepass", "swordfish"]) else { return };
    let url = redis.url().replace("redis://", "redis://:swordfish@");
    let Some(program) = start(&["--store", &url]) else { return };
    redis.say("FLUSHALL");
    let errors = errors_of_sigbus(program.finish(), "its pages are gone");
    assert!(errors.contains("is lost"), "{errors}");
    assert!(!errors.contains("swordfish"), "{errors}");
}

#[test]
fn a_store_that_stays_away_is_waited_for_as_long_as_asked() {
    let Some(mut redis) = RedisServer::start(&[]) else { return };
    let Some(program) = start(&["--store", &redis.url(), "--unreachable", "1s"]) else { return };
    kill(&mut redis);
    let since = Instant::now();
    let errors = errors_of_sigbus(program.finish(), "its store is gone");
    assert!(errors.contains("cannot reach"), "{errors}");
    // The default is half a minute.
    assert!(since.elapsed() < Duration::from_secs(20), "{:?}", since.elapsed());
}

/// A change that a proxy makes to the answers of a store.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Lie {
    /// Changes one bit of a page.
    Changed,
    /// Makes a page one byte shorter.
    Short,
    /// Gives a page of an earlier answer.
    Earlier,
    /// Hangs up in the middle of a page.
    Cut,
}

impl Lie {
    /// Changes a piece of an answer. Returns false if it has no page to lie about.
    fn tell(self, piece: &mut Vec<u8>, earlier: &mut Vec<u8>) -> bool {
        let head = b"$4096\r\n";
        let at = piece.windows(head.len()).position(|at| at == head).map(|at| at + head.len());
        let Some(at) = at.filter(|at| at + 4096 <= piece.len()) else { return false };
        match self {
            Lie::Changed => piece[at + 77] ^= 4,
            Lie::Short => {
                piece.remove(at + 77);
                piece[at - 3] = b'5';
            }
            Lie::Earlier if earlier.is_empty() => {
                *earlier = piece[at..at + 4096].to_vec();
                return false;
            }
            Lie::Earlier => piece[at..at + 4096].copy_from_slice(earlier),
            Lie::Cut => piece.truncate(at + 2000),
        }
        true
    }
}

/// Starts a proxy before a store. Its URL, and the lies that are left to tell.
fn lying(store: &RedisServer, lie: Lie) -> (String, Arc<AtomicUsize>) {
    let (listener, port) = (TcpListener::bind("127.0.0.1:0").unwrap(), store.port);
    let url = format!("redis://{}", listener.local_addr().unwrap());
    let left: Arc<AtomicUsize> = Arc::default();
    let lies = left.clone();
    let earlier: Arc<Mutex<Vec<u8>>> = Arc::default();
    let pump = move |mut from: TcpStream, mut to: TcpStream, lies: Option<Arc<AtomicUsize>>| {
        let mut piece = vec![0; 1 << 16];
        while let Ok(len @ 1..) = from.read(&mut piece) {
            let mut piece = piece[..len].to_vec();
            let wants = lies.as_ref().filter(|lies| lies.load(Ordering::SeqCst) > 0);
            let lied = wants.filter(|_| lie.tell(&mut piece, &mut earlier.lock().unwrap()));
            lied.iter().for_each(|lies| {
                lies.fetch_sub(1, Ordering::SeqCst);
            });
            if to.write_all(&piece).is_err() || (lied.is_some() && lie == Lie::Cut) {
                break;
            }
        }
        let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
    };
    std::thread::spawn(move || {
        while let Ok((client, _)) = listener.accept() {
            let store = TcpStream::connect(("127.0.0.1", port)).unwrap();
            let (back, lies) =
                ((store.try_clone().unwrap(), client.try_clone().unwrap()), lies.clone());
            let (pump, answers) = (pump.clone(), pump.clone());
            std::thread::spawn(move || pump(client, store, None));
            std::thread::spawn(move || answers(back.0, back.1, Some(lies)));
        }
    });
    (url, left)
}

#[test]
fn a_store_that_lies_once_is_asked_again_and_one_that_goes_on_is_never_believed() {
    let Some(redis) = RedisServer::start(&[]) else { return };
    for lie in [Lie::Changed, Lie::Short, Lie::Earlier, Lie::Cut] {
        for lies in [1, usize::MAX] {
            // Those of a program that was killed stay for a while.
            redis.say("FLUSHALL");
            let (url, left) = lying(&redis, lie);
            let Some(program) = start(&["--store", &url, "--unreachable", "2s"]) else { return };
            left.store(lies, Ordering::SeqCst);
            let finished = program.finish();
            assert!(left.load(Ordering::SeqCst) < lies, "{lie:?} was never told");
            let what = format!("{lie:?}");
            match lies {
                1 => errors_of_right(finished, &what),
                _ => errors_of_sigbus(finished, &what),
            };
        }
    }
}

#[test]
fn a_store_that_fills_up_keeps_pages_in_memory_and_one_that_evicts_is_sigbus() {
    let Some(redis) = RedisServer::start(&[]) else { return };
    let Some(program) = start(&["--store", &redis.url()]) else { return };
    redis.say("CONFIG SET maxmemory 4mb");
    let errors = errors_of_right(program.finish(), "full");
    assert!(errors.contains("the page store is full"), "{errors}");
    redis.say("CONFIG SET maxmemory 48mb");
    let Some(program) = start(&["--store", &redis.url()]) else { return };
    redis.say("CONFIG SET maxmemory-policy allkeys-lru");
    redis.say("CONFIG SET maxmemory 4mb");
    let errors = errors_of_sigbus(program.finish(), "evicts");
    assert!(errors.contains("is lost"), "{errors}");
}

/// Sends a command to a store with the other password.
fn say(port: u16, command: &str) {
    let output = Command::new("redis-cli")
        .args(["-p", &port.to_string(), "-a", "another-secret"])
        .args(command.split(' '))
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn a_password_that_changes_is_waited_for_and_never_shown() {
    let Some(redis) = RedisServer::start(&["--requirepass", "swordfish"]) else { return };
    let url = redis.url().replace("redis://", "redis://:swordfish@");
    for comes_back in [true, false] {
        let wait = if comes_back { "30s" } else { "1s" };
        let Some(program) = start(&["--store", &url, "--unreachable", wait]) else { return };
        redis.say("CONFIG SET requirepass another-secret");
        say(redis.port, "CLIENT KILL TYPE normal");
        let back = || {
            std::thread::sleep(Duration::from_secs(2));
            say(redis.port, "CONFIG SET requirepass swordfish");
        };
        let finished = std::thread::scope(|scope| {
            comes_back.then(|| scope.spawn(back));
            program.finish()
        });
        let errors = match comes_back {
            true => errors_of_right(finished, "the password came back"),
            false => errors_of_sigbus(finished, "the password stayed away"),
        };
        assert!(!errors.contains("swordfish") && !errors.contains("another-secret"), "{errors}");
    }
}

/// Returns a command that says if it ran.
fn echo(options: &[&str]) -> Command {
    let mut remote = Command::new(PAGETAX);
    remote.args(["remote", "--resident", "12M"]).args(options).args(["--", "echo", "it ran"]);
    remote
}

#[test]
fn stores_that_will_not_do_are_told_before_the_program_starts() {
    let Some(redis) = RedisServer::start(&["--requirepass", "swordfish"]) else { return };
    let at = format!("127.0.0.1:{}", redis.port);
    let tries: [(&[&str], &str); 7] = [
        (&["--store", "valkey://192.0.2.1"], "--insecure"),
        (&["--store", "valkey://127.0.0.1:1"], "127.0.0.1:1"),
        (&["--store", "http://127.0.0.1"], "valkey://HOST:PORT"),
        (&["--store", &format!("valkey://{at}")], "Authentication required"),
        (&["--store", &format!("valkey://:wrong-secret@{at}")], "authentication failed"),
        (&["--store", &format!("valkey://:swordfish@{at}"), "--copies", "2"], "2 copies need"),
        (&["--store", &format!("rediss://:swordfish@{at}")], &at),
    ];
    for (options, remedy) in tries {
        let output = echo(options).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(remedy), "{options:?}: {said}");
        assert!(!said.contains("wrong-secret") && !said.contains("swordfish"), "{said}");
        assert!(!output.status.success() && output.stdout.is_empty(), "{options:?}: {output:?}");
    }
    let by_variable = echo(&["--store", &format!("valkey://{at}")])
        .env("REDISCLI_AUTH", "swordfish")
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&by_variable.stderr);
    assert!(by_variable.status.success() || errors.contains("userfaultfd"), "{errors}");
}

#[test]
fn a_job_runs_on_a_store() {
    let Some(nodes) = cluster() else { return };
    let output = Command::new(PAGETAX)
        .args(["run", "mmap3", "--set", "backing=remote,size=16M,resident=6M,random=5_000"])
        .args(["--json", "--store", &url_of(&nodes), "--copies", "2"])
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    if errors.contains("userfaultfd") {
        println!("SKIP: {}", errors.trim());
        return;
    }
    assert!(output.status.success(), "{errors}");
    let run: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(run["counters"]["mismatch_count"]["value"], 0);
    let title = run["tables"][0]["title"].as_str().unwrap();
    let (engine, _) = redis_server::engine().unwrap();
    assert!(title.contains(&format!("2 copies on {engine} cluster at 127.0.0.1")), "{title}");
}

/// The options of a Redis as before 6.2: it cannot copy a hash for a child.
const WITHOUT_COPY: &[&str] = &["--rename-command", "COPY", ""];

/// Checks that each way to make a child is refused, as fork is: the child would lack its memory.
#[test]
fn no_way_to_fork_leaves_pages_behind() {
    let folder = tempfile::tempdir().unwrap();
    let program = program_of_the_library("ways_to_fork", folder.path());
    let Some(redis) = RedisServer::start(WITHOUT_COPY) else { return };
    let Some((output, errors)) = remote(&["--store", &redis.url()], &[&program, "24"]) else {
        return;
    };
    let said = String::from_utf8_lossy(&output.stdout);
    let mut lines: Vec<&str> = said.lines().collect();
    // Its caller forks first.
    assert_eq!(lines.pop(), Some("daemon: Cannot allocate memory"), "{said}{errors}");
    assert_eq!(lines.len(), 9, "{said}{errors}");
    // Nobody can refuse this one; the child ends with a line.
    let own = lines.remove(6);
    assert_eq!(own, "the C library's fork: 125 signal 0", "{said}{errors}");
    assert_eq!(errors.matches("this child of a fork ends here").count(), 1, "{errors}");
    let refused = |line: &&str| line.ends_with(": Cannot allocate memory");
    assert!(lines.iter().all(refused), "{said}{errors}");
}

#[test]
fn a_fork_that_could_not_be_right_is_refused() {
    let Some(redis) = RedisServer::start(WITHOUT_COPY) else { return };
    let script = "
import hashlib, os, subprocess
b = bytearray(24_000_000)
for i in range(0, len(b), 4096): b[i] = i // 4096 % 251
before = hashlib.md5(b).hexdigest()
for turn in range(2):
    try:
        os.fork()
        print('forked')
    except OSError as error:
        print(error.errno)
print(subprocess.run(['/bin/echo', 'a child'], capture_output=True).stdout)
print(hashlib.md5(b).hexdigest() == before)
";
    let options = ["--store", &redis.url()];
    let Some((paged, errors)) = remote(&options, &["/usr/bin/python3", "-c", script]) else {
        return;
    };
    let said = String::from_utf8_lossy(&paged.stdout);
    assert_eq!(said, "12\n12\nb'a child\\n'\nTrue\n", "{errors}");
    assert_eq!(errors.matches("fork is refused").count(), 1, "{errors}");
}

#[test]
fn a_child_of_a_fork_has_its_pages_in_the_engine_by_itself() {
    let Some(redis) = RedisServer::start(&["--maxmemory", "256mb"]) else { return };
    let script = "
import hashlib, os
b = bytearray(24_000_000)
def fill(seed):
    for i in range(0, len(b), 4096): b[i] = (i // 4096 + seed) % 251
    return hashlib.sha256(b).hexdigest(), hashlib.sha256(b).hexdigest()
fill(0)
for turn in range(2):
    pid = os.fork()
    if pid == 0:
        print(hashlib.sha256(b).hexdigest(), *fill(turn + 1), flush=True)
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
print(hashlib.sha256(b).hexdigest(), *fill(3), flush=True)
";
    let plain = Command::new("/usr/bin/python3").args(["-c", script]).output().unwrap();
    let options = ["--store", &redis.url(), "--stats"];
    let Some((paged, errors)) = remote(&options, &["/usr/bin/python3", "-c", script]) else {
        return;
    };
    assert!(paged.status.success(), "{errors}");
    assert_eq!(String::from_utf8_lossy(&paged.stdout), String::from_utf8_lossy(&plain.stdout));
    assert!(errors.contains(" page_in_count "), "nothing was paged: {errors}");
}
