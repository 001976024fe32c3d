//! `pagetax remote --store` with a real Redis cluster: its servers die while programs run.

mod paged;
#[path = "../../remote/tests/redis_server/mod.rs"]
mod redis_server;

use paged::{right_answer, start};
use redis_server::{RedisServer, url_of};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
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
    let (answer, output) = program.finish();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{errors}");
    assert_eq!(answer, "");
    assert!(errors.contains("SIGBUS at 0x") && errors.contains("is lost"), "{errors}");
    assert!(!errors.contains("swordfish"), "{errors}");
}

#[test]
fn a_store_that_stays_away_is_waited_for_as_long_as_asked() {
    let Some(mut redis) = RedisServer::start(&[]) else { return };
    let Some(program) = start(&["--store", &redis.url(), "--unreachable", "1s"]) else { return };
    kill(&mut redis);
    let since = Instant::now();
    let (answer, output) = program.finish();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.signal(), answer.as_str()), (Some(libc::SIGBUS), ""), "{errors}");
    assert!(errors.contains("SIGBUS at 0x") && errors.contains("cannot reach"), "{errors}");
    // The default is half a minute.
    assert!(since.elapsed() < Duration::from_secs(20), "{:?}", since.elapsed());
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
    assert!(title.contains("2 copies on Redis cluster at 127.0.0.1"), "{title}");
}
