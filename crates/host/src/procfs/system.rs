//! Counters of the whole system at one moment, and the difference of two moments.

use super::{Root, schedstat};
use pagetax_core::counter::Reading;
use procfs_core::{MemoryPressure, VmStat};

/// Counters of the whole machine. Other programs raise them too, not only the job.
#[derive(Debug, Clone)]
pub struct SystemSnapshot {
    vmstat: Result<VmStat, String>,
    /// The time in which some task stalled on memory.
    stall_ns: Result<u64, String>,
    /// The CPU time of kswapd and kcompactd.
    daemons_ns: Result<u64, String>,
    managed_pages: Result<u64, String>,
}

/// The counters that are sums over names of /proc/vmstat. pgscan_anon and pgscan_file count all reclaim: by
/// kswapd, directly and for cgroups. pgscan_direct misses the last.
const VMSTAT_SUMS: &[(&str, &[&str])] = &[
    ("compaction_stall_count", &["compact_stall"]),
    ("reclaim_scan_count", &["pgscan_anon", "pgscan_file"]),
    ("reclaim_steal_count", &["pgsteal_anon", "pgsteal_file"]),
    ("swap_in_count", &["pswpin"]),
    ("swap_out_count", &["pswpout"]),
];

/// The counters that /proc/vmstat has in KiB of block I/O. Reports have them in base pages.
const VMSTAT_KIB: &[(&str, &str)] = &[("page_in_count", "pgpgin"), ("page_out_count", "pgpgout")];

impl SystemSnapshot {
    /// Reads the counters. Each one that cannot be read keeps its own error.
    pub fn read(root: &Root) -> SystemSnapshot {
        SystemSnapshot {
            vmstat: root.parse("/proc/vmstat"),
            stall_ns: root
                .parse::<MemoryPressure>("/proc/pressure/memory")
                .map(|pressure| pressure.some.total * 1000),
            daemons_ns: daemons_ns(root),
            managed_pages: managed_pages(root),
        }
    }

    /// Returns the differences since `before` by counter id. No time exceeds `wall_ns`.
    pub fn since(&self, before: &SystemSnapshot, wall_ns: u64) -> Vec<(&'static str, Reading)> {
        let mut readings: Vec<_> = VMSTAT_SUMS
            .iter()
            .map(|(id, names)| (*id, self.vmstat_delta(before, names, |count| count)))
            .collect();
        let page_kib = rustix::param::page_size() as u64 / 1024;
        readings.extend(VMSTAT_KIB.iter().map(|(id, name)| {
            (*id, self.vmstat_delta(before, &[name], |kib| kib / page_kib.max(1)))
        }));
        let daemons = time_delta(&self.daemons_ns, &before.daemons_ns, wall_ns);
        readings.push(("kernel_daemon_ns", daemons));
        readings
    }

    /// Returns the time since `before` in which some task of the machine stalled on memory (PSI `some`).
    pub fn stalled_since(&self, before: &SystemSnapshot, wall_ns: u64) -> Reading {
        time_delta(&self.stall_ns, &before.stall_ns, wall_ns)
    }

    /// Returns the bytes by which the machine's memory grew since `before`. Some virtual machines get
    /// memory while they run, and its first touches are slow.
    pub fn memory_growth(&self, before: &SystemSnapshot) -> Reading {
        match (&self.managed_pages, &before.managed_pages) {
            (Ok(now), Ok(then)) => {
                Reading::Measured(now.saturating_sub(*then) * rustix::param::page_size() as u64)
            }
            (Err(why), _) | (_, Err(why)) => Reading::Missing(why.clone()),
        }
    }

    fn vmstat_delta(
        &self,
        before: &SystemSnapshot,
        names: &[&str],
        convert: impl Fn(u64) -> u64,
    ) -> Reading {
        let (now, then) = match (&self.vmstat, &before.vmstat) {
            (Ok(now), Ok(then)) => (now, then),
            (Err(why), _) | (_, Err(why)) => return Reading::Missing(why.clone()),
        };
        let mut sum = 0u64;
        for name in names {
            match (now.0.get(*name), then.0.get(*name)) {
                (Some(now), Some(then)) => sum += now.saturating_sub(*then).max(0) as u64,
                _ => return Reading::Missing(format!("/proc/vmstat has no {name}")),
            }
        }
        Reading::Measured(convert(sum))
    }
}

fn time_delta(now: &Result<u64, String>, then: &Result<u64, String>, wall_ns: u64) -> Reading {
    match (now, then) {
        (Ok(now), Ok(then)) => Reading::Measured(now.saturating_sub(*then).min(wall_ns)),
        (Err(why), _) | (_, Err(why)) => Reading::Missing(why.clone()),
    }
}

/// Reads the CPU time of the kernel's memory daemons from schedstat, which counts nanoseconds.
fn daemons_ns(root: &Root) -> Result<u64, String> {
    let mut total = None;
    for pid in root.pids() {
        let Ok(comm) = root.text(&format!("/proc/{pid}/comm")) else { continue };
        if comm.starts_with("kswapd") || comm.starts_with("kcompactd") {
            total = Some(total.unwrap_or(0) + schedstat(root, pid, None)?.0);
        }
    }
    total.ok_or_else(|| "no kswapd is visible in /proc (a PID namespace hides it)".into())
}

/// Returns the pages that the kernel manages, over all zones of /proc/zoneinfo.
fn managed_pages(root: &Root) -> Result<u64, String> {
    let text = root.text("/proc/zoneinfo")?;
    let pages = |line: &str| line.trim().strip_prefix("managed")?.trim().parse::<u64>().ok();
    let mut zones = text.lines().filter_map(pages).peekable();
    zones.peek().ok_or("/proc/zoneinfo has no managed pages")?;
    Ok(zones.sum())
}

#[cfg(test)]
mod tests {
    use super::super::tests::captured;
    use super::*;

    fn find(readings: &[(&'static str, Reading)], id: &str) -> Reading {
        readings.iter().find(|(known, _)| *known == id).unwrap().1.clone()
    }

    #[test]
    fn differences_are_by_counter_and_clamped() {
        let then = SystemSnapshot::read(&captured());
        let mut now = then.clone();
        let vmstat = &mut now.vmstat.as_mut().unwrap().0;
        *vmstat.get_mut("pgscan_anon").unwrap() += 30;
        *vmstat.get_mut("pgscan_file").unwrap() += 12;
        *vmstat.get_mut("pgpgin").unwrap() += 400;
        vmstat.remove("pswpin");
        now.daemons_ns = Ok(then.daemons_ns.clone().unwrap() + (1 << 60));
        let readings = now.since(&then, 1_000);
        assert_eq!(find(&readings, "reclaim_scan_count"), Reading::Measured(42));
        assert_eq!(find(&readings, "page_in_count"), Reading::Measured(100));
        assert_eq!(find(&readings, "kernel_daemon_ns"), Reading::Measured(1_000));
        assert_eq!(
            find(&readings, "swap_in_count"),
            Reading::Missing("/proc/vmstat has no pswpin".into())
        );
        assert_eq!(now.stalled_since(&then, 1_000), Reading::Measured(0));
        assert_eq!(now.memory_growth(&then), Reading::Measured(0));
    }

    #[test]
    fn an_empty_machine_is_missing_everywhere() {
        let nothing = SystemSnapshot::read(&Root::at("/nonexistent"));
        for (id, reading) in nothing.since(&nothing, 1) {
            assert!(matches!(reading, Reading::Missing(_)), "{id}: {reading:?}");
        }
        assert!(matches!(nothing.memory_growth(&nothing), Reading::Missing(_)));
    }

    #[test]
    fn every_counter_is_in_the_table() {
        let snapshot = SystemSnapshot::read(&captured());
        for (id, _) in snapshot.since(&snapshot, 1) {
            assert!(pagetax_core::counter::counter(id).is_some(), "{id}");
        }
    }
}
