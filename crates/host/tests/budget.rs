//! A live budget: a child that does nothing but fault must spend its kernel time on faults.

use pagetax_core::cause::Account;
use pagetax_core::counter::Reading;
use pagetax_core::exit::Exit;
use pagetax_host::measure::budget::{Totals, Translation, Watch, budget};
use pagetax_host::measure::stacks::{Begin, TaskState, Wait};
use pagetax_host::sys::mapping::{OwnedMapping, Request, Source};
use pagetax_host::sys::process::fork;
use pagetax_host::sys::shared::{SharedWords, wait, wake_all};
use rustix::time::{ClockId, clock_gettime};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// CPU time of the child: some 160 stack samples, so that a cause of a tenth of it is never without any.
const FAULTING: Duration = Duration::from_secs(2);

/// Touches new anonymous memory, 16 MiB at a time, until it has taken [`FAULTING`].
fn fault() {
    let page = rustix::param::page_size();
    let cpu_time = || Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap();
    while cpu_time() < FAULTING {
        let request = Request { source: Source::Anon, len: 16 << 20, align: page, hugetlb: None };
        let mapping = OwnedMapping::new(request).expect("16 MiB of memory");
        for offset in (0..mapping.len()).step_by(page) {
            mapping.store(offset as u64, 1);
        }
    }
}

#[test]
fn a_child_that_faults_spends_its_kernel_time_on_faults() {
    let words = SharedWords::new(1).unwrap();
    let mut watch = Watch::new();
    let mut child = fork(|| {
        while words.futex(0).load(Ordering::Acquire) == 0 {
            wait(words.futex(0), 0, Duration::from_millis(100));
        }
        // In a grandchild, as in a real job: the profiler must follow it.
        match fork(|| {
            fault();
            0
        }) {
            Ok(mut grandchild) => i32::from(grandchild.wait().is_err()),
            Err(_) => 1,
        }
    })
    .unwrap();
    watch.attach(child.pid().as_raw_nonzero().get() as u32, Begin::Now);
    let start = Instant::now();
    words.futex(0).store(1, Ordering::Release);
    wake_all(words.futex(0));
    let (exit, usage) = child.wait().unwrap();
    let wall_ns = start.elapsed().as_nanos() as u64;
    let watched = watch.finish();
    assert_eq!(exit, Exit::Code(0));

    let totals = Totals {
        wall_ns,
        user_ns: usage.user_ns,
        kernel_ns: usage.kernel_ns,
        minor_fault_count: usage.minor_fault_count,
        major_fault_count: usage.major_fault_count,
        resident_bytes_max: Reading::Measured(usage.resident_bytes_max),
        huge_page_bytes_max: Reading::Missing("not looked at".into()),
        page_table_bytes_max: Reading::Missing("not looked at".into()),
        paging: None,
    };
    assert!(totals.minor_fault_count > 16 * 256, "{totals:?}");
    let translation = Translation::Unknown("not looked at".into());
    let budget = budget(&totals, &watched.profile, &translation, None);
    if let Err(why) = &watched.profile.stacks {
        println!("SKIP: kernel stacks cannot be sampled here: {why}");
        return;
    }
    let ns = |id: &str| budget.row(id).and_then(|row| row.ns).unwrap();
    let faults = ns("minor_fault") + ns("zero_copy");
    assert!(faults > totals.kernel_ns / 2, "{budget:#?}");
    assert!(ns("zero_copy") > 0, "{budget:#?}");
    let unexplained = budget.unexplained_ns(Account::Cpu).unsigned_abs();
    assert!(unexplained < budget.total_ns(Account::Cpu) / 10, "{budget:#?}");
    let unexplained = budget.unexplained_ns(Account::Wall).unsigned_abs();
    assert!(unexplained < budget.total_ns(Account::Wall) / 5, "{budget:#?}");
}

#[test]
fn a_command_is_followed_from_its_exec_on() {
    let mut watch = Watch::new();
    watch.attach(rustix::thread::gettid().as_raw_nonzero().get() as u32, Begin::AtExec);
    let start = Instant::now();
    let script = "i=0; while [ $i -lt 400000 ]; do i=$((i+1)); done; sleep 0.2";
    let status = std::process::Command::new("sh").args(["-c", script]).status().unwrap();
    let wall_ns = start.elapsed().as_nanos() as u64;
    let profile = watch.finish().profile;
    assert!(status.success());
    let line = profile.line.unwrap();
    assert!(line.total_ns() <= wall_ns && line.total_ns() > wall_ns / 10 * 8, "{line:?} {wall_ns}");
    assert!(line.ns(TaskState::Running) > 20_000_000, "{line:?}");
    assert!(line.ns(TaskState::Waiting(Wait::Sleep)) >= 190_000_000, "{line:?}");
    match profile.stacks {
        Ok(counts) => assert!(counts.user_count > 5, "{counts:?}"),
        Err(why) => println!("SKIP: kernel stacks cannot be sampled here: {why}"),
    }
}
