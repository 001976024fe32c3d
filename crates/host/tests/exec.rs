//! Plans on the real kernel: each operation, pattern, backing and kind of client.

mod alone;

use alone::ran_alone;
use pagetax_core::budget::Budget;
use pagetax_core::cause::Account;
use pagetax_core::exit::Exit;
use pagetax_core::job::Job;
use pagetax_core::machine::{Machine, RunError};
use pagetax_core::plan::Plan;
use pagetax_core::quantity::Params;
use pagetax_core::report::{Recording, Run};
use pagetax_host::run::{HostMachine, NullMachine};
use pagetax_host::sys::process::fork;
use pagetax_remote::pager::JobMemory;
use rustix::process::{Signal, kill_process};
use std::sync::Arc;
use std::time::{Duration, Instant};

fn plan(text: &str) -> Plan {
    let spec = HostMachine::default().spec();
    Job::parse(text, "test.toml").unwrap().resolve(&Params::new(), &spec, None).unwrap()
}

fn run_on(machine: &dyn Machine, plan: &Plan) -> (Result<(), RunError>, Run) {
    let mut recording = Recording::new(plan, &machine.spec());
    let result = machine.run(plan, &mut recording);
    (result, recording.finish())
}

fn run(text: &str) -> Run {
    let (result, report) = run_on(&HostMachine::default(), &plan(text));
    result.unwrap();
    report
}

fn failure(text: &str) -> RunError {
    run_on(&HostMachine::default(), &plan(text)).0.unwrap_err()
}

fn count(counters: &pagetax_core::counter::Counters, id: &str) -> u64 {
    counters[id].value.unwrap_or_else(|| panic!("{id}: {:?}", counters[id]))
}

/// Returns a job of one region and one phase.
fn small(region: &str, phase: &str) -> String {
    format!("name = \"t\"\n[[region]]\nname = \"r\"\n{region}\n[[phase]]\nname = \"p\"\n{phase}\n")
}

#[test]
fn base_pages_fault_once_each() {
    if ran_alone() {
        return;
    }
    let report = run(&small(
        "size = \"2M\"\npage_size = \"base\"",
        "ops = [{ touch = \"r\", access = \"write\", pattern = \"strided\", stride = \"4K\" }]",
    ));
    let phase = &report.phases[0].counters;
    // The worker's own code and stack may fault in its first phase. They fault more often if the kernel
    // has just reclaimed unused pages, but not once for each page of the job.
    let faults = count(phase, "minor_fault_count");
    assert!((512..560).contains(&faults), "{faults}");
    assert_eq!(count(phase, "access_count"), 512);
    assert_eq!(count(phase, "huge_page_bytes_max"), 0);
}

#[test]
fn faults_are_exact_once_the_code_is_warm() {
    if ran_alone() {
        return;
    }
    let text = r#"
        name = "t"
        [[region]]
        name = "r"
        size = "2M"
        page_size = "base"
        mapped = false
        [[phase]]
        name = "cold"
        ops = [{ map = "r" }, { touch = "r", access = "write", stride = "4K", pattern = "strided" }, { unmap = "r" }]
        [[phase]]
        name = "ten"
        repeat = 10
        ops = [{ map = "r" }, { touch = "r", access = "write", stride = "4K", pattern = "strided" }, { unmap = "r" }]
    "#;
    let report = run(text);
    assert_eq!(count(&report.phases[1].counters, "minor_fault_count") / 512, 10);
    assert!(count(&report.phases[1].counters, "minor_fault_count") % 512 < 4);
}

#[test]
fn every_pattern_access_and_backing_runs() {
    let mut text = "name = \"t\"\n".to_string();
    for backing in ["anon", "shared", "memfd", "file"] {
        text += &format!("[[region]]\nname = \"{backing}\"\nsize = \"64K\"\n");
        text += &format!("backing = \"{backing}\"\n");
    }
    for (grain, backing) in ["8", "4K"]
        .iter()
        .flat_map(|grain| ["anon", "shared", "memfd", "file"].map(|backing| (grain, backing)))
    {
        let touch = |access: &str, pattern: &str| {
            format!(
                "{{ touch = \"{backing}\", access = \"{access}\", grain = \"{grain}\", {pattern} }}"
            )
        };
        let sweep = "pattern = \"sequential\"";
        let mut ops = vec![touch("write", sweep)];
        for pattern in [
            sweep,
            "pattern = \"uniform\", count = 500",
            "pattern = \"zipf\", theta = 0.9, count = 500",
        ] {
            ops.extend(["read", "verify", "rewrite", "write"].map(|access| touch(access, pattern)));
        }
        text += &format!("[[phase]]\nname = \"{backing} {grain}\"\nops = [{}]\n", ops.join(", "));
    }
    let report = run(&text);
    assert_eq!(report.phases.len(), 8);
    assert_eq!(count(&report.counters, "mismatch_count"), 0);
    for phase in &report.phases {
        let words = if phase.name.ends_with("4K") { 16 } else { 8192 };
        assert_eq!(count(&phase.counters, "access_count"), 5 * words + 8 * 500, "{}", phase.name);
    }
}

#[test]
fn files_hold_the_pattern_before_anything_is_written() {
    let report = run(&small(
        "size = \"1M\"\nbacking = \"file\"",
        "ops = [{ touch = \"r\", access = \"verify\", grain = \"4K\" }]",
    ));
    assert_eq!(count(&report.counters, "mismatch_count"), 0);
}

#[test]
fn chases_run_in_every_kind_of_client() {
    for clients in ["", "clients = 2\n", "clients = 2\nclient_kind = \"threads\"\n"] {
        let chase =
            "{ touch = \"r\", pattern = \"pointer-chase\", grain = \"64\", count = 10_000 }";
        let report = run(&small("size = \"256K\"", &format!("{clients}ops = [{chase}]")));
        let clients = if clients.is_empty() { 1 } else { 2 };
        assert_eq!(count(&report.counters, "access_count"), 10_000 * clients);
    }
}

#[test]
fn null_does_the_same_accesses_without_memory() {
    let text = small(
        "size = \"8M\"",
        "clients = 2\nclient_kind = \"threads\"\n\
         ops = [{ touch = \"r\", access = \"write\" }, { barrier = true }, \
         { touch = \"r\", pattern = \"zipf\", theta = 0.9, count = 1000 }]",
    );
    let plan = plan(&text);
    let (host, null) = (run_on(&HostMachine::default(), &plan), run_on(&NullMachine, &plan));
    host.0.unwrap();
    null.0.unwrap();
    let accesses = |run: &Run| count(&run.counters, "access_count");
    assert_eq!(accesses(&host.1), accesses(&null.1));
    assert!(count(&null.1.counters, "minor_fault_count") < 200);
    assert!(count(&host.1.counters, "minor_fault_count") >= 4);
}

const FLIPPED: &str = r#"
    name = "t"
    [[region]]
    name = "r"
    size = "1M"
    backing = "BACKING"
    [[phase]]
    name = "write"
    ops = [{ touch = "r", access = "write", grain = "4K" }]
    [[phase]]
    name = "verify"
    CLIENTS
    ops = [{ touch = "r", access = "verify", grain = "4K" }]
    [native]
    flip_byte_at = 70_003
"#;

#[test]
fn a_flipped_byte_is_reported_with_its_place() {
    for backing in ["anon", "shared", "memfd", "file"] {
        for clients in ["", "clients = 2", "clients = 2\nclient_kind = \"threads\""] {
            let text = FLIPPED.replace("BACKING", backing).replace("CLIENTS", clients);
            match failure(&text) {
                RunError::Mismatch { region, offset, address, expected, found } => {
                    assert_eq!((region.as_str(), offset), ("r", 70_000), "{backing} {clients}");
                    assert_eq!(expected ^ found, 1 << 24);
                    assert_eq!(address % 4096, offset % 4096);
                }
                other => panic!("{backing} {clients}: {other:?}"),
            }
        }
    }
}

#[test]
fn children_have_their_own_copies_and_threads_do_not() {
    if ran_alone() {
        return;
    }
    let job = |kind: &str| {
        small(
            "size = \"1M\"\npage_size = \"base\"",
            &format!(
                "ops = [{{ touch = \"r\", access = \"write\", grain = \"4K\" }}]\n\
                 [[phase]]\nname = \"again\"\nclients = 4\nclient_kind = \"{kind}\"\n\
                 ops = [{{ touch = \"r\", access = \"write\", grain = \"4K\" }}, {{ barrier = true }}]"
            ),
        )
    };
    let (children, threads) = (run(&job("processes")), run(&job("threads")));
    let faults = |run: &Run| count(&run.phases[1].counters, "minor_fault_count");
    assert!(faults(&children) >= 3 * 256, "{}", faults(&children));
    assert!(faults(&threads) < 256, "{}", faults(&threads));
}

#[test]
fn locking_in_chunks_is_seen_and_undone() {
    let report = run(&small(
        "size = \"4M\"\nbacking = \"file\"\nmapped = false",
        "ops = [{ map = \"r\" }, { lock = \"r\", chunk = \"1M\" }, { unlock = \"r\" }, { unmap = \"r\" }]",
    ));
    assert_eq!(count(&report.counters, "locked_bytes_max"), 4 << 20);
    assert!(count(&report.counters, "block_read_bytes") > 0, "the file was never on storage");
}

#[test]
fn advice_is_given() {
    let report = run(&small(
        "size = \"1M\"\npage_size = \"base\"\nadvice = [\"populate-write\"]",
        "ops = [{ advise = \"r\", advice = \"dontneed\" }, \
         { touch = \"r\", access = \"write\", pattern = \"strided\", stride = \"4K\" }]",
    ));
    assert!(count(&report.phases[0].counters, "minor_fault_count") >= 256);
}

#[test]
fn time_and_rate_end_and_pace_a_phase() {
    let report = run(&small(
        "size = \"1M\"",
        "time = \"200ms\"\nrate = 1000\nrepeat = 1_000_000\nops = [{ touch = \"r\" }]",
    ));
    let phase = &report.phases[0];
    let (took, accesses) = (phase.end_ns - phase.start_ns, count(&phase.counters, "access_count"));
    assert!((190_000_000..400_000_000).contains(&took), "{took}");
    assert!((100..=260).contains(&accesses), "{accesses}");
}

#[test]
fn the_series_has_points() {
    let report = run(&format!(
        "{}\n[measure]\ninterval = \"20ms\"",
        small(
            "size = \"1M\"",
            "time = \"200ms\"\nrepeat = 1_000_000_000\nops = [{ touch = \"r\" }]"
        )
    ));
    let points = report.series.columns["access_count"].len();
    assert!((4..=11).contains(&points), "{points}");
    let accesses = &report.series.columns["access_count"];
    let seen: u64 = accesses.iter().flatten().sum();
    let all = count(&report.counters, "access_count");
    // A busy machine may leave the job out of a whole interval: that is 0, and not missing.
    let (known, worked) = (
        accesses.iter().all(Option::is_some),
        accesses.iter().filter(|n| n.is_some_and(|n| n > 0)),
    );
    assert!(known && worked.count() >= 2 && seen <= all, "{accesses:?}");
    assert!(seen > all / 2, "points are of their own intervals: {seen} of {all}");
}

#[test]
fn fault_latencies_are_paired() {
    let job = |clients: &str| {
        format!(
            "{}\n[measure]\nfault_latency = true",
            small(
                "size = \"4M\"\npage_size = \"base\"",
                &format!(
                    "{clients}\nops = [{{ touch = \"r\", access = \"write\", pattern = \"strided\", \
                     stride = \"4K\" }}]"
                )
            )
        )
    };
    for clients in ["", "clients = 2\nclient_kind = \"processes\""] {
        let report = run(&job(clients));
        if report.warnings.iter().any(|w| w.id == "no_fault_latency") {
            assert!(report.latency.is_empty());
            println!("SKIP: fault latencies: perf events are refused");
            return;
        }
        let minor = &report.latency["minor_fault"];
        assert!(minor.count >= 1024, "{minor:?}");
        assert_eq!(minor.of_count, Some(minor.count), "so few are all seen");
        assert!((100..100_000).contains(&minor.p50_ns), "{minor:?}");
        // Every begin finds its end, even if other processes compete for the CPUs.
        assert!(!report.warnings.iter().any(|w| w.text.contains("have no partner")), "{report:?}");
    }
}

#[test]
fn of_many_faults_the_report_says_how_many_were_seen() {
    const FAULTS: u64 = (32 << 20) / 4096 * 8;
    let region = "size = \"32M\"\npage_size = \"base\"\nmapped = false";
    let phase = "repeat = 8\nops = [{ map = \"r\" }, { touch = \"r\", access = \"write\", pattern \
                 = \"strided\", stride = \"4K\" }, { unmap = \"r\" }]";
    let report = run(&format!("{}\n[measure]\nfault_latency = true", small(region, phase)));
    if report.warnings.iter().any(|w| w.id == "no_fault_latency") {
        println!("SKIP: fault latencies: perf events are refused");
        return;
    }
    let minor = &report.latency["minor_fault"];
    let of_count = minor.of_count.expect("faults are counted");
    assert!((FAULTS..FAULTS + 1_000).contains(&of_count), "{minor:?}");
    // At least as many as the smallest rings hold, even if they are emptied rarely.
    assert!((1_000..=of_count).contains(&minor.count), "{minor:?}");
    assert_eq!(report.latency["fault"].of_count, Some(of_count + major_count(&report)));
}

/// Returns the number of major faults that were counted, sampled or not.
fn major_count(report: &Run) -> u64 {
    report.latency.get("major_fault").and_then(|major| major.of_count).unwrap_or(0)
}

#[test]
fn preflight_names_what_cannot_be_had() {
    let what = |text: &str| match failure(text) {
        RunError::Unmet(unmet) => {
            assert!(unmet.iter().all(|u| u.fatal && !u.remedy.is_empty()));
            unmet.into_iter().map(|u| u.what).collect::<Vec<_>>().join("\n")
        }
        other => panic!("{other:?}"),
    };
    let read = "ops = [{ touch = \"r\" }]";
    assert!(what(&small("size = \"$memory * 2\"", read)).contains("needs"));
    assert!(what(&small("size = \"40T\"\nbacking = \"file\"", read)).contains("room"));
    let lock = "ops = [{ lock = \"r\" }]";
    assert!(what(&small("size = \"$memory / 2\"", lock)).contains("locks"));
    assert!(
        what(&small("size = \"1M\"\nbacking = \"file\"\ndirectory = \"/nonexistent/x\"", read))
            .contains("/nonexistent/x")
    );
    assert!(what(&small("size = \"1G\"\npage_size = \"hugetlb:1G\"", read)).contains("1G"));
}

/// Makes a mistake that no job file can have: the machines check plans from all sources.
#[test]
fn invalid_plans_are_refused_by_host_and_null() {
    let mut plan = plan(&small("size = \"1M\"", "ops = [{ touch = \"r\" }]"));
    plan.regions[0].mapped_at_start = false;
    let refused = |machine: &dyn Machine| match run_on(machine, &plan).0 {
        Err(RunError::Unmet(unmet)) => unmet[0].what.contains("not mapped"),
        other => panic!("{other:?}"),
    };
    assert!(refused(&HostMachine::default()) && refused(&NullMachine));
}

/// Runs a job in its own child, and sends it SIGINT once it touches its file. No file and no grandchild
/// may remain, and the report must show the work done.
#[test]
fn an_interrupt_cleans_up_and_keeps_what_was_seen() {
    if ran_alone() {
        return;
    }
    for kind in ["processes", "threads"] {
        let directory = tempfile::tempdir().unwrap();
        let text = format!(
            "{}\n[[phase]]\nname = \"long\"\nclients = 2\nclient_kind = \"{kind}\"\ntime = \"1min\"\n\
             repeat = 1_000_000_000\nops = [{{ touch = \"r\" }}]",
            small(
                &format!("size = \"1M\"\nbacking = \"file\"\ndirectory = {:?}", directory.path()),
                "ops = [{ touch = \"r\" }]"
            )
        );
        let plan = plan(&text);
        let mut child = fork(|| {
            let (result, report) = run_on(&HostMachine::default(), &plan);
            let interrupted = matches!(result, Err(RunError::Interrupted));
            let seen = report.phases.len() == 2 && count(&report.counters, "access_count") > 0;
            let alone = std::fs::read_to_string("/proc/thread-self/children").unwrap().is_empty();
            i32::from(!(interrupted && seen && alone))
        })
        .unwrap();
        let maps = format!("/proc/{}/maps", child.pid());
        let file = directory.path().to_str().unwrap();
        let deadline = Instant::now() + Duration::from_secs(30);
        while !std::fs::read_to_string(&maps).unwrap().contains(file) {
            assert!(Instant::now() < deadline, "{kind}: the file is not mapped");
            std::thread::sleep(Duration::from_millis(10));
        }
        std::thread::sleep(Duration::from_millis(700));
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "a file has a name");
        kill_process(child.pid(), Signal::INT).unwrap();
        assert_eq!(child.wait().unwrap().0, Exit::Code(0), "{kind}");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}

#[test]
fn the_budget_adds_up() {
    let report = run(&small(
        "size = \"32M\"\npage_size = \"base\"",
        "repeat = 3\nops = [{ touch = \"r\", access = \"write\" }, \
         { advise = \"r\", advice = \"dontneed\" }]",
    ));
    let budget = report.budget.unwrap();
    assert_adds_up(&budget, Account::Cpu);
    let used = count(&report.counters, "user_ns") + count(&report.counters, "kernel_ns");
    assert_eq!(budget.total_ns(Account::Cpu), used);
    assert_eq!(budget.total_ns(Account::Wall), report.wall_ns);
    let unexplained_ns = budget.unexplained_ns(Account::Wall).unsigned_abs();
    assert!(unexplained_ns < report.wall_ns / 4, "{budget:?}");
    assert!(report.environment.contains_key("kernel"), "{:?}", report.environment);
}

fn assert_adds_up(budget: &Budget, account: Account) {
    let parts = budget.rows(account).iter().filter_map(|row| row.ns);
    let parts: i64 = parts.map(|ns| ns as i64).sum();
    assert_eq!(parts + budget.unexplained_ns(account), budget.total_ns(account) as i64);
}

/// Returns the machine with network memory that is compressed in this process.
fn machine_with_network() -> HostMachine {
    HostMachine::default().with_network(Arc::new(|room| Arc::new(JobMemory::embedded(room, None))))
}

/// Checks that a machine without network memory refuses it before the run, in words of the job.
#[test]
fn network_memory_that_nobody_handed_in_is_refused() {
    let region = "size = \"16M\"\nbacking = \"remote\"\nresident = \"4M\"";
    let failure = failure(&small(region, "ops = [{ touch = \"r\" }]"));
    let RunError::Unmet(unmet) = failure else { panic!("{failure}") };
    assert!(unmet[0].fatal && unmet[0].what.contains("region `r` is network memory"), "{unmet:?}");
}

/// Runs a job on network memory, compressed in this process. Returns `None` and prints SKIP if this user
/// may not page.
fn run_remote(more: &str, phase: &str) -> Option<(Result<(), RunError>, Run)> {
    let region = "size = \"16M\"\nbacking = \"remote\"\nresident = \"4M\"";
    let plan = plan(&format!("{}\n{more}", small(region, phase)));
    let (result, report) = run_on(&machine_with_network(), &plan);
    match result {
        Err(RunError::Op { why, .. }) if why.contains("userfaultfd") => {
            println!("SKIP: {why}");
            None
        }
        result => Some((result, report)),
    }
}

#[test]
fn network_memory_holds_what_was_written_and_says_what_it_cost() {
    let touch = |access: &str, pattern: &str| {
        format!("{{ touch = \"r\", access = \"{access}\", grain = \"4K\", {pattern} }}")
    };
    let [sweep, random] = ["pattern = \"sequential\"", "pattern = \"uniform\", count = 20_000"];
    let ops = [touch("write", sweep), touch("verify", sweep), touch("rewrite", random)].join(", ");
    let more = "[measure]\ninterval = \"20ms\"";
    let Some((result, report)) = run_remote(more, &format!("ops = [{ops}]")) else { return };
    result.unwrap();
    let pages_in = count(&report.counters, "page_in_count");
    assert!(pages_in > 3 * 1024 + 5000, "{pages_in}");
    assert_eq!(count(&report.phases[0].counters, "page_in_count"), pages_in);
    assert!(count(&report.counters, "page_out_count") > 3 * 1024);
    assert_eq!(count(&report.counters, "mismatch_count"), 0);
    let latency = &report.latency["page_in"];
    assert!(latency.count > 5000 && latency.min_ns > 500, "{latency:?}");
    assert!(latency.min_ns <= latency.p50_ns && latency.p50_ns <= latency.p99_ns, "{latency:?}");
    let sum = |id: &str| report.series.columns[id].iter().flatten().sum::<u64>();
    assert!(sum("page_in_count") <= pages_in && sum("page_in_count") > pages_in / 2);
    assert!(sum("zero_fill_count") > 0 && sum("demand_page_in_count") > 0);
    assert!(report.series.columns.contains_key("page_in_latency_ns_p99"));
    let budget = report.budget.unwrap();
    Account::ALL.iter().for_each(|account| assert_adds_up(&budget, *account));
    let pager = budget.row("swap").unwrap();
    assert!(pager.how.contains("pager") && pager.ns > Some(5000 * 500), "{pager:?}");
    let row = budget.row("remote_page_in").unwrap();
    let mean_ns = row.ns.unwrap() / latency.count;
    assert!(mean_ns >= latency.min_ns && mean_ns <= latency.max_ns, "{row:?}, {latency:?}");
    assert!(report.tables[0].title.starts_with("network memory: embedded"), "{:?}", report.tables);
}

/// Checks that the clients' time includes the pager's, as they fetch the pages that they touch.
#[test]
fn clients_serve_themselves_in_place() {
    let region = "size = \"16M\"\nbacking = \"remote\"\nresident = \"4M\"\nserving = \"in-place\"";
    let touch =
        |access: &str| format!("{{ touch = \"r\", access = \"{access}\", grain = \"4K\" }}");
    let phase = format!(
        "clients = 2\nclient_kind = \"threads\"\nops = [{}, {}]",
        touch("write"),
        touch("verify")
    );
    let (result, report) = run_on(&machine_with_network(), &plan(&small(region, &phase)));
    match result {
        Err(RunError::Op { why, .. }) if why.contains("userfaultfd") => {
            return println!("SKIP: {why}");
        }
        result => result.unwrap(),
    }
    assert!(count(&report.counters, "page_in_count") > 3 * 1024);
    assert_eq!(count(&report.counters, "mismatch_count"), 0);
}

#[test]
fn a_wrong_word_of_network_memory_is_named() {
    let more = "[[phase]]\nname = \"verify\"\nops = [{ touch = \"r\", access = \"verify\" }]\n\
                [native]\nflip_byte_at = 4097";
    let write = "ops = [{ touch = \"r\", access = \"write\" }]";
    let Some((result, _)) = run_remote(more, write) else { return };
    let Err(RunError::Mismatch { offset, address, expected, found, .. }) = result else {
        panic!("{result:?}")
    };
    assert_eq!((offset, expected ^ found, address % 4096), (4096, 1 << 8, 0));
}
