//! Events and traces that the kernel and the CPU count.

use crate::measure::stacks::Symbols;
use crate::procfs::Root;
use crate::sys::perf::{self, Event, EventKind, EventSpec, Ring, Sampling};
use pagetax_core::finding::{Feature, Finding};
use std::io;

/// The hardware event `PERF_COUNT_HW_CPU_CYCLES`.
const CPU_CYCLES: u32 = 0;

pub(super) fn findings(root: &Root) -> Vec<Finding> {
    vec![
        software_events(root),
        kernel_stacks(),
        hardware_events(),
        trace_events(root),
        delay_accounting(root),
        pressure(root),
    ]
}

fn open_with_ring(spec: &EventSpec) -> io::Result<()> {
    Ring::new(&Event::open(spec)?, 1).map(drop)
}

fn software_events(root: &Root) -> Finding {
    let feature = Feature("perf_software_events", "latency of each fault, without root");
    let sampling = Some(Sampling { period: 1, fields: perf::FIELD_TID | perf::FIELD_TIME });
    let spec = |kind| EventSpec { sampling, inherit: false, ..EventSpec::new(kind) };
    let opened = [perf::PAGE_FAULT, perf::MINOR_FAULT, perf::MAJOR_FAULT]
        .into_iter()
        .try_for_each(|kind| open_with_ring(&spec(kind)));
    let paranoid = root.text("/proc/sys/kernel/perf_event_paranoid").unwrap_or("unknown".into());
    match opened {
        Ok(()) => feature.works(format!("three events opened; perf_event_paranoid is {paranoid}")),
        Err(error) => feature.not_here(
            format!("perf_event_open: {error}; perf_event_paranoid is {paranoid}"),
            "sudo sysctl kernel.perf_event_paranoid=2",
        ),
    }
}

fn kernel_stacks() -> Finding {
    const ENABLE: &str = "sudo sysctl kernel.perf_event_paranoid=1 kernel.kptr_restrict=0";
    let feature = Feature("kernel_stacks", "kernel time by cause, sampled by cpu-clock");
    let fields = perf::FIELD_IP | perf::FIELD_CALLCHAIN;
    let spec = EventSpec {
        sampling: Some(Sampling { period: 1_000_000, fields }),
        exclude_kernel: false,
        exclude_callchain_user: true,
        ..EventSpec::new(perf::CPU_CLOCK)
    };
    match (open_with_ring(&spec), Symbols::of_this_kernel()) {
        (Ok(()), Ok(_)) => feature.works("stacks are sampled, and the kernel shows its symbols"),
        (Ok(()), Err(why)) => feature.limited(format!("stacks without names: {why}"), ENABLE),
        (Err(error), _) => {
            feature.not_here(format!("cpu-clock with kernel stacks: {error}"), ENABLE)
        }
    }
}

fn hardware_events() -> Finding {
    let feature = Feature("hardware_events", "page-walk cycles and TLB misses, counted by the CPU");
    let counted = Event::open(&EventSpec::new(EventKind::Hardware(CPU_CYCLES)))
        .and_then(|event| event.count());
    match counted {
        Ok(_) => feature.works("the CPU counts cycles"),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => feature.never_here(
            "this machine has no performance-monitoring unit (a virtual machine that is given \
             none); translation is told by trials and by the calibration instead",
        ),
        Err(error) => feature
            .not_here(format!("CPU cycles: {error}"), "sudo sysctl kernel.perf_event_paranoid=2"),
    }
}

fn trace_events(root: &Root) -> Finding {
    const ENABLE: &str = "sudo mount -t tracefs tracefs /sys/kernel/tracing";
    let feature = Feature("trace_events", "reclaim and compaction, event by event");
    for folder in ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"] {
        if root.number(&format!("{folder}/events/exceptions/page_fault_user/id")).is_ok() {
            return feature.works(format!("{folder} has page_fault_user"));
        }
    }
    if !rustix::process::geteuid().is_root() {
        return feature.not_here("tracefs is for root alone", "sudo pagetax doctor");
    }
    match root.names("/sys/kernel/tracing").is_empty() {
        true => feature.not_here("tracefs is not mounted", ENABLE),
        false => feature.never_here("the kernel was built without page-fault trace events"),
    }
}

fn delay_accounting(root: &Root) -> Finding {
    let feature = Feature("delay_accounting", "how long tasks were blocked (taskstats)");
    match root.number("/proc/sys/kernel/task_delayacct") {
        Ok(1) if rustix::process::geteuid().is_root() => {
            feature.works("kernel.task_delayacct is 1")
        }
        Ok(1) => feature.limited(
            "kernel.task_delayacct is 1, but only root may ask for other tasks",
            "sudo pagetax doctor",
        ),
        Ok(value) => feature.not_here(
            format!("kernel.task_delayacct is {value}; blocked time is told by switch stacks"),
            "sudo sysctl kernel.task_delayacct=1",
        ),
        Err(why) => feature.never_here(format!("the kernel keeps no such accounts: {why}")),
    }
}

fn pressure(root: &Root) -> Finding {
    let feature = Feature("pressure", "time in which the machine stalled on memory (PSI)");
    match root.parse::<procfs_core::MemoryPressure>("/proc/pressure/memory") {
        Ok(pressure) => feature.works(format!("stalled {} µs since boot", pressure.some.total)),
        Err(why) => feature.not_here(why, "add psi=1 to the kernel's command line and reboot"),
    }
}
