//! `pagetax diagnose --load`: servers, compared by what their load tells.

use pagetax_core::diagnosis::{Basis, Diagnosis};
use pagetax_core::document;
use pagetax_core::load::LoadFigure;
use std::net::TcpListener;
use std::process::{Command, Output, Stdio};

fn diagnose(options: &[&str], server: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagetax"));
    command.args(["diagnose", "--json", "--warmup", "0"]).args(options).arg("--").args(server);
    command.stdin(Stdio::null()).output().unwrap()
}

fn document(output: &Output) -> Diagnosis {
    let text = String::from_utf8_lossy(&output.stdout);
    document::from_json(&text)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)))
}

fn free_port() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string()
}

/// Returns true if a process sleeps for so many seconds.
fn is_running(seconds: &str) -> bool {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let line = format!("sleep\0{seconds}\0");
    let mut lines = processes.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
    lines.any(|cmdline| cmdline == line.as_bytes())
}

#[test]
fn redis_is_compared_by_the_figures_of_its_benchmark() {
    let port = free_port();
    let load = format!("redis-benchmark -p {port} -t set,get -n 12000 -r 10000 -d 100");
    let event = format!("redis-cli -p {port} bgsave");
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().to_str().unwrap();
    // Each run begins without the data of the last one.
    let server = format!(
        "rm -f {place}/dump.rdb; exec redis-server --port {port} --dir {place} --save '' --appendonly no"
    );
    let ready = format!("command:redis-cli -p {port} ping | grep PONG");
    let with_load = ["--runs", "2", "--pages", "4K,2M", "--load", &load, "--ready", &ready];
    let options = [&with_load[..], &["--metric", "p99", "--event", &event, "--settings"]].concat();
    let output = diagnose(&options, &["sh", "-c", &server]);
    let diagnosis = document(&output);
    assert_eq!(diagnosis.basis, Basis::Load(LoadFigure::P99));
    let names: Vec<&str> = diagnosis.trials.iter().map(|trial| trial.name.as_str()).collect();
    // Debian's Redis has its memory from jemalloc.
    assert_eq!(names, ["as-is", "base", "thp-2M", "jemalloc-thp", "jemalloc-keep"]);
    for trial in &diagnosis.trials {
        assert_eq!(trial.loads.len(), 2, "{trial:?}");
        assert!(trial.exit.success(), "{trial:?}");
        for load in &trial.loads {
            assert!(load.throughput_per_s > Some(100.0) && load.p50_ns > Some(1_000.0), "{load:?}");
            assert!(load.p999_ns >= load.p99_ns && load.p99_ns >= load.p50_ns, "{load:?}");
        }
    }
    assert!(diagnosis.trials[1].speedup.is_some());
    assert!(directory.path().join("dump.rdb").exists(), "the event came");
    assert!(TcpListener::bind(format!("127.0.0.1:{port}")).is_ok(), "the server has ended");
    assert_eq!(output.status.code(), Some(0));
}

#[test]
fn latencies_of_our_own_requests_show_a_stall_that_the_load_does_not() {
    let port = free_port();
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().to_str().unwrap();
    let server = format!("exec redis-server --port {port} --dir {place} --save '' --appendonly no");
    // The server answers nobody for half a second. No request of the benchmark is under way then.
    let load = format!(
        "redis-benchmark -p {port} -t set -n 40000 -r 1000 -d 10; \
         redis-cli -p {port} debug sleep 0.5; sleep 1.5"
    );
    let url = format!("redis://127.0.0.1:{port}");
    let ready = format!("command:redis-cli -p {port} ping | grep PONG");
    let options = ["--runs", "2", "--pages", "4K", "--load", &load, "--ready", &ready];
    let probe = ["--metric", "p99", "--probe", &url, "--probe-rate", "500"];
    let allowed = format!("{server} --enable-debug-command yes");
    let output = diagnose(&[&options[..], &probe].concat(), &["sh", "-c", &allowed]);
    let diagnosis = document(&output);
    for load in &diagnosis.trials[0].loads {
        assert!(load.p99_ns > Some(2e8), "{load:?}");
        assert!(load.p50_ns < Some(1e8) && load.throughput_per_s > Some(100.0), "{load:?}");
        assert!(load.request_count > Some(900), "{load:?}");
    }
    let said = diagnose(&options, &["sh", "-c", &allowed]);
    let plain = &document(&said).trials[0].loads[0];
    assert!(plain.p99_ns < Some(2e8) && plain.request_count.is_none(), "{plain:?}");
}

#[test]
fn a_probe_that_gets_no_answer_ends_the_trial() {
    let port = free_port();
    let url = format!("http://127.0.0.1:{port}/none");
    let ready = ["--ready", &port, "--load", "sleep 60", "--metric", "p99"];
    let web = ["python3", "-m", "http.server", "--protocol", "HTTP/1.1", &port];
    for (probe, part) in [
        (["--probe", &url], "--probe: http://127.0.0.1"),
        (["--probe", "ftp://127.0.0.1"], "http://HOST:PORT/PATH"),
    ] {
        let output = diagnose(&[&ready[..], &probe].concat(), &web);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(part), "{said}");
        assert_eq!(output.status.code(), Some(2), "{said}");
    }
}

#[test]
fn the_verdict_is_on_the_figure_that_was_asked_for() {
    let directory = tempfile::tempdir().unwrap();
    let told = directory.path().join("told").display().to_string();
    // It serves more on large pages, which the tunable shows, and answers later.
    let server = format!(
        "case $GLIBC_TUNABLES in *hugetlb=1*) echo 130 >{told};; *) echo 100 >{told};; esac; echo up; exec sleep 100"
    );
    let load = format!("echo \"$(cat {told}) requests per second, p50=$(cat {told}) msec\"");
    let options = ["--runs", "5", "--pages", "2M", "--load", &load, "--ready", "output:^up"];
    let diagnosis = document(&diagnose(&options, &["sh", "-c", &server]));
    assert_eq!(diagnosis.basis, Basis::Load(LoadFigure::Throughput));
    let verdict = &diagnosis.verdict;
    assert_eq!(verdict.winner.as_deref(), Some("thp-2M"), "{verdict:?}");
    assert!(verdict.reason.contains("times as fast as it is now by requests/s"), "{verdict:?}");
    assert!(verdict.reason.contains("but by p50, latency is 1.3"), "{verdict:?}");
    let latency = [&options[..], &["--metric", "less:p50=([0-9]+)"]].concat();
    let diagnosis = document(&diagnose(&latency, &["sh", "-c", &server]));
    assert_eq!(diagnosis.verdict.winner, None, "{:?}", diagnosis.verdict);
}

#[test]
fn what_fails_is_said_with_the_runs_so_far() {
    let busy = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = busy.local_addr().unwrap().port().to_string();
    let sleeps: &[&str] = &["sleep", "100"];
    for (load, ready, metric, server, part) in [
        ("true", taken.as_str(), "p99", sleeps, "in use before the server starts"),
        ("true", "command:true", "p99", sleeps, "the load printed nothing"),
        ("echo hello", "command:true", "p99", sleeps, "no p99; its last line: hello"),
        ("echo lost; exit 3", "command:true", "p99", sleeps, "3): lost"),
        ("sleep 4711", "command:sleep 0.1", "p99", &["sleep", "0.5"], "ended while it was loaded"),
        ("true", "output:never", "p99", &["sleep", "0.1"], "ended before it was ready"),
        ("true", "soon", "p99", sleeps, "--ready soon"),
        ("true", "command:true", "p98", sleeps, "--metric p98"),
    ] {
        let options = ["--load", load, "--ready", ready, "--metric", metric];
        let output = diagnose(&options, server);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(part), "{part}: {said}");
        assert_eq!(output.status.code(), Some(2), "{said}");
    }
    assert!(!is_running("4711"), "a load that was cut off has ended");
    // The second run fails: what was seen before stays.
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("once").display().to_string();
    let load =
        format!("echo x >>{file}; test $(wc -l <{file}) -lt 4 && echo '10 requests per second'");
    let options = ["--runs", "5", "--pages", "4K", "--load", &load, "--ready", "command:true"];
    let output = diagnose(&options, sleeps);
    assert_eq!(output.status.code(), Some(2));
    let diagnosis = document(&output);
    assert!(
        diagnosis.warnings.iter().any(|warning| warning.id == "service_failed"),
        "{diagnosis:?}"
    );
    assert!(!diagnosis.trials[0].loads.is_empty());
}

#[test]
fn a_server_that_fails_in_one_trial_is_compared_in_the_others() {
    let server = "case $GLIBC_TUNABLES in *hugetlb=1*) exit 3;; esac; exec sleep 100";
    let load = "echo '10 requests per second'";
    let options =
        ["--runs", "2", "--pages", "4K,2M", "--load", load, "--ready", "command:sleep 0.3"];
    let output = diagnose(&options, &["sh", "-c", server]);
    let diagnosis = document(&output);
    let names: Vec<&str> = diagnosis.trials.iter().map(|trial| trial.name.as_str()).collect();
    assert_eq!((names, output.status.code()), (vec!["as-is", "base"], Some(0)));
    let failed = diagnosis.skipped.iter().find(|one| one.name == "thp-2M").unwrap();
    assert!(failed.why.contains("the server ended"), "{failed:?}");
}
