//! What is watched: the whole system, a cgroup or some processes; and the counters that each has.

use crate::measure::thread_events::TaskClock;
use crate::procfs::{Root, StatLine, cgroup_paths};
use procfs_core::{MemoryPressure, VmStat};
use std::collections::{BTreeMap, HashMap};

/// The tasks to watch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scope {
    /// All tasks of the machine.
    System,
    /// The tasks of a cgroup and of those below it, by its path below the mount, such as `/system.slice`.
    Cgroup(String),
    /// All tasks of these processes.
    Processes(Vec<u32>),
}

impl std::fmt::Display for Scope {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Scope::System => f.write_str("system"),
            Scope::Cgroup(path) => write!(f, "cgroup {path}"),
            Scope::Processes(pids) => {
                let pids: Vec<_> = pids.iter().map(u32::to_string).collect();
                write!(f, "processes {}", pids.join(","))
            }
        }
    }
}

/// A counter, or the reason why it cannot be read.
pub type Count = Result<u64, String>;

/// The counters of a scope at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScopeTotals {
    /// The CPU time of all its tasks, in nanoseconds.
    pub cpu_ns: Count,
    /// The part of it in the kernel.
    pub kernel_ns: Count,
    /// Events by the id of their reading.
    pub events: BTreeMap<&'static str, Count>,
}

/// Events as /proc/vmstat counts them: the first counter less the others.
const OF_VMSTAT: &[(&str, &[&str])] = &[
    ("minor_fault_count", &["pgfault", "pgmajfault"]),
    ("major_fault_count", &["pgmajfault"]),
    ("huge_fault_count", &["thp_fault_alloc"]),
    ("huge_fallback_count", &["thp_fault_fallback"]),
    ("collapse_count", &["thp_collapse_alloc"]),
    ("swap_in_count", &["pswpin"]),
    ("swap_out_count", &["pswpout"]),
    ("direct_scan_count", &["pgscan_direct"]),
    ("background_scan_count", &["pgscan_kswapd"]),
    ("direct_steal_count", &["pgsteal_direct"]),
    ("background_steal_count", &["pgsteal_kswapd"]),
    ("compaction_stall_count", &["compact_stall"]),
];

/// Returns the unit of CPU times in /proc/stat and /proc/PID/stat.
pub(in crate::measure) fn tick_ns() -> u64 {
    1_000_000_000 / rustix::param::clock_ticks_per_second().max(1)
}

impl Scope {
    /// Reads the counters. Each one that cannot be read keeps its own error.
    pub fn totals(&self, root: &Root, processes: &ProcessTotals) -> ScopeTotals {
        match self {
            Scope::System => of_system(root),
            Scope::Cgroup(path) => of_cgroup(root, path),
            Scope::Processes(_) => processes.sums(),
        }
    }

    /// Returns true if the process is in scope, by the text of its /proc/PID/cgroup.
    pub fn holds(&self, pid: u32, cgroups: &str) -> bool {
        match self {
            Scope::System => true,
            Scope::Processes(pids) => pids.contains(&pid),
            Scope::Cgroup(wanted) => {
                let below = |path: &str| {
                    path.strip_prefix(wanted.trim_end_matches('/'))
                        .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
                };
                cgroup_paths(cgroups).any(|(_, path)| below(path))
            }
        }
    }

    /// Checks that there is something to watch.
    ///
    /// # Errors
    /// The reason, and what to do.
    pub fn check(&self, root: &Root) -> Result<(), String> {
        match self {
            Scope::System => Ok(()),
            Scope::Cgroup(path) if folders(root, path).is_empty() => Err(format!(
                "no cgroup `{path}` is mounted here\n  hint: give its path below /sys/fs/cgroup, as \
                 /proc/PID/cgroup shows it"
            )),
            Scope::Cgroup(_) => Ok(()),
            Scope::Processes(pids) => {
                match pids.iter().find(|pid| !root.has(&format!("/proc/{pid}"))) {
                    Some(pid) => {
                        Err(format!("there is no process {pid}\n  hint: ps -e lists processes"))
                    }
                    None => Ok(()),
                }
            }
        }
    }

    /// Reads a process's user and kernel time, and its minor and major faults. They hold its ended threads.
    pub(in crate::measure) fn times_and_faults(root: &Root, pid: u32) -> Result<[u64; 4], String> {
        let path = format!("/proc/{pid}/stat");
        let text = root.text(&path)?;
        let numbers = StatLine::parse(&text).and_then(|stat| stat.numbers([10, 12, 14, 15]));
        let [minor, major, user, kernel] =
            numbers.ok_or_else(|| format!("{path} has no times or faults"))?;
        Ok([user * tick_ns(), kernel * tick_ns(), minor, major])
    }
}

fn of_system(root: &Root) -> ScopeTotals {
    let vmstat = root.parse::<VmStat>("/proc/vmstat");
    let events = OF_VMSTAT.iter().map(|(id, names)| (*id, of_vmstat(&vmstat, names)));
    let mut events: BTreeMap<_, _> = events.collect();
    events.extend(pressure(root, "/proc/pressure/memory"));
    let times = cpu_times(root);
    ScopeTotals {
        cpu_ns: times.clone().map(|(busy_ns, _)| busy_ns),
        kernel_ns: times.map(|(_, kernel_ns)| kernel_ns),
        events,
    }
}

fn of_vmstat(vmstat: &Result<VmStat, String>, names: &[&str]) -> Count {
    let vmstat = vmstat.as_ref().map_err(Clone::clone)?;
    let count = |name: &str| {
        let count = vmstat.0.get(name).ok_or_else(|| format!("/proc/vmstat has no {name}"));
        count.map(|count| (*count).max(0) as u64)
    };
    let mut values = names.iter().map(|name| count(name));
    let first = values.next().unwrap_or(Ok(0))?;
    values.try_fold(first, |left, value| Ok(left.saturating_sub(value?)))
}

/// Returns the time that all CPUs were busy, and that in the kernel, interrupts included.
fn cpu_times(root: &Root) -> Result<(u64, u64), String> {
    let text = root.text("/proc/stat")?;
    let line = text.lines().next().and_then(|line| line.strip_prefix("cpu "));
    let ticks: Vec<u64> =
        line.into_iter().flat_map(str::split_whitespace).map_while(|w| w.parse().ok()).collect();
    // user nice system idle iowait irq softirq steal; user holds the time of guests.
    let [user, nice, system, _, _, irq, softirq, ..] = ticks[..] else {
        return Err("/proc/stat has no times of CPUs".into());
    };
    let kernel = system + irq + softirq;
    Ok(((user + nice + kernel) * tick_ns(), kernel * tick_ns()))
}

/// Reads the stalls on memory from a file of pressure stall information.
fn pressure(root: &Root, path: &str) -> [(&'static str, Count); 2] {
    let pressure = root.parse::<MemoryPressure>(path);
    let total_ns = |of: fn(&MemoryPressure) -> u64| {
        pressure.as_ref().map(|pressure| of(pressure) * 1000).map_err(Clone::clone)
    };
    [
        ("memory_some_ns", total_ns(|pressure| pressure.some.total)),
        ("memory_full_ns", total_ns(|pressure| pressure.full.total)),
    ]
}

/// Returns the folders of a cgroup: that of version 2, or those of the controllers of version 1.
fn folders(root: &Root, path: &str) -> Vec<String> {
    let path = path.trim_end_matches('/');
    let mounts = ["", "/unified", "/memory", "/cpuacct", "/cpu,cpuacct"];
    let folders = mounts.map(|mount| format!("/sys/fs/cgroup{mount}{path}"));
    folders.into_iter().filter(|folder| root.has(&format!("{folder}/cgroup.procs"))).collect()
}

/// Reads `key value` lines of the first folder's file that exists.
fn keyed(root: &Root, folders: &[String], file: &str) -> Result<HashMap<String, u64>, String> {
    let text = folders.iter().find_map(|folder| root.text(&format!("{folder}/{file}")).ok());
    let text = text.ok_or_else(|| format!("the cgroup has no {file}"))?;
    let pair = |line: &str| {
        let (key, value) = line.split_once(' ')?;
        Some((key.to_string(), value.parse().ok()?))
    };
    Ok(text.lines().filter_map(pair).collect())
}

fn of_cgroup(root: &Root, path: &str) -> ScopeTotals {
    let folders = folders(root, path);
    let number = |file: &str| {
        let found = folders.iter().find_map(|folder| root.number(&format!("{folder}/{file}")).ok());
        found.ok_or_else(|| format!("the cgroup has no {file}"))
    };
    let cpu = keyed(root, &folders, "cpu.stat");
    let micros = |key: &str| {
        let value = cpu.as_ref().ok().and_then(|stat| stat.get(key));
        value.map(|us| us * 1000).ok_or_else(|| format!("the cgroup's cpu.stat has no {key}"))
    };
    let memory = keyed(root, &folders, "memory.stat");
    let of = |names: &[&str]| -> Count {
        let memory = memory.as_ref().map_err(Clone::clone)?;
        let found = names.iter().find_map(|name| memory.get(*name));
        found.copied().ok_or_else(|| format!("the cgroup's memory.stat has no {}", names[0]))
    };
    let major = of(&["total_pgmajfault", "pgmajfault"]);
    let all = of(&["total_pgfault", "pgfault"]);
    let mut events: BTreeMap<&'static str, Count> = BTreeMap::from([
        ("minor_fault_count", all.and_then(|all| Ok(all.saturating_sub(major.clone()?)))),
        ("major_fault_count", major),
        ("huge_fault_count", of(&["thp_fault_alloc"])),
        ("collapse_count", of(&["thp_collapse_alloc"])),
        ("direct_scan_count", of(&["pgscan_direct"])),
        ("direct_steal_count", of(&["pgsteal_direct"])),
        ("background_scan_count", of(&["pgscan_kswapd"])),
        ("background_steal_count", of(&["pgsteal_kswapd"])),
        ("swap_in_count", of(&["pswpin"])),
        ("swap_out_count", of(&["pswpout"])),
    ]);
    let mut files = folders.iter().map(|folder| format!("{folder}/memory.pressure"));
    let file = files.find(|file| root.has(file));
    events.extend(pressure(root, &file.unwrap_or_else(|| "memory.pressure of the cgroup".into())));
    ScopeTotals {
        cpu_ns: micros("usage_usec").or_else(|_| number("cpuacct.usage")),
        kernel_ns: micros("system_usec").or_else(|_| number("cpuacct.usage_sys")),
        events,
    }
}

/// The user and kernel time of processes, and their minor and major faults, by the last look. A process that
/// has ended keeps its last figures.
#[derive(Debug, Default)]
pub struct ProcessTotals {
    known: BTreeMap<u32, [u64; 4]>,
    clocks: BTreeMap<u32, TaskClock>,
    why: Option<String>,
}

impl ProcessTotals {
    /// Opens a clock for each process in scope that allows it.
    pub fn open(scope: &Scope) -> ProcessTotals {
        let Scope::Processes(pids) = scope else { return ProcessTotals::default() };
        let clocks = pids.iter().filter_map(|pid| Some((*pid, TaskClock::open(*pid)?)));
        ProcessTotals { clocks: clocks.collect(), ..ProcessTotals::default() }
    }

    /// Reads those that are still there.
    pub fn look(&mut self, root: &Root, scope: &Scope) {
        let Scope::Processes(pids) = scope else { return };
        for pid in pids {
            match Scope::times_and_faults(root, *pid) {
                Ok(values) => drop(self.known.insert(*pid, values)),
                Err(why) => self.why = Some(why),
            }
        }
    }

    fn sums(&self) -> ScopeTotals {
        let known = |of: &dyn Fn(u32, &[u64; 4]) -> Count| match &self.why {
            Some(why) if self.known.is_empty() => Err(why.clone()),
            _ => self.known.iter().map(|(pid, figures)| of(*pid, figures)).sum(),
        };
        let cpu_ns = |pid: u32, [user_ns, kernel_ns, ..]: &[u64; 4]| {
            let clock = self.clocks.get(&pid).map(TaskClock::ns);
            clock.unwrap_or(Ok(user_ns + kernel_ns)).map_err(|error| error.to_string())
        };
        ScopeTotals {
            cpu_ns: known(&cpu_ns),
            kernel_ns: known(&|_, [_, kernel_ns, ..]| Ok(*kernel_ns)),
            events: [
                ("minor_fault_count", known(&|_, [.., minor, _]| Ok(*minor))),
                ("major_fault_count", known(&|_, [.., major]| Ok(*major))),
            ]
            .into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::procfs::tests::captured;

    #[test]
    fn a_captured_system_has_all_counters() {
        let totals = Scope::System.totals(&captured(), &ProcessTotals::default());
        for (id, count) in &totals.events {
            assert!(count.is_ok(), "{id}: {count:?}");
        }
        assert!(totals.cpu_ns.unwrap() > totals.kernel_ns.unwrap());
    }

    #[test]
    fn what_a_machine_lacks_is_missing_with_its_reason_and_never_zero() {
        let nothing = Root::at("/nonexistent");
        for scope in [Scope::System, Scope::Cgroup("/a".into()), Scope::Processes(vec![1])] {
            let mut processes = ProcessTotals::default();
            processes.look(&nothing, &scope);
            let totals = scope.totals(&nothing, &processes);
            assert!(totals.cpu_ns.is_err() && totals.kernel_ns.is_err());
            assert!(totals.events.values().all(Result::is_err), "{totals:?}");
            assert_eq!(scope == Scope::System, scope.check(&nothing).is_ok());
        }
    }

    #[test]
    fn cgroups_of_both_versions_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("sys/fs/cgroup/two/cgroup.procs", "");
        write("sys/fs/cgroup/two/cpu.stat", "usage_usec 7\nuser_usec 4\nsystem_usec 3\n");
        write("sys/fs/cgroup/two/memory.stat", "anon 1\npgfault 12\npgmajfault 2\n");
        let stall = "avg10=0.00 avg60=0.00 avg300=0.00 total=5";
        write("sys/fs/cgroup/two/memory.pressure", &format!("some {stall}\nfull {stall}\n"));
        write("sys/fs/cgroup/memory/one/cgroup.procs", "");
        write(
            "sys/fs/cgroup/memory/one/memory.stat",
            "pgfault 1\ntotal_pgfault 9\ntotal_pgmajfault 4\n",
        );
        write("sys/fs/cgroup/cpuacct/one/cgroup.procs", "");
        write("sys/fs/cgroup/cpuacct/one/cpuacct.usage", "11\n");
        let root = Root::at(folder.path());
        let two = Scope::Cgroup("/two".into()).totals(&root, &ProcessTotals::default());
        assert_eq!((two.cpu_ns, two.kernel_ns), (Ok(7_000), Ok(3_000)));
        assert_eq!(two.events["minor_fault_count"], Ok(10));
        assert_eq!(two.events["memory_some_ns"], Ok(5_000));
        assert!(two.events["swap_in_count"].is_err());
        let one = Scope::Cgroup("/one".into()).totals(&root, &ProcessTotals::default());
        assert_eq!(one.cpu_ns, Ok(11));
        assert!(one.kernel_ns.is_err());
        assert_eq!(one.events["minor_fault_count"], Ok(5));
        assert!(one.events["memory_full_ns"].is_err());
    }

    #[test]
    fn a_process_that_has_ended_keeps_its_figures() {
        let scope = Scope::Processes(vec![4711, 4712]);
        let mut processes = ProcessTotals::default();
        let folder = tempfile::tempdir().unwrap();
        let stat = "4711 (a b) S 1 1 1 0 -1 0 5 0 7 0 300 200 0 0 20 0 1 0 9 0 0";
        std::fs::create_dir_all(folder.path().join("proc/4711")).unwrap();
        std::fs::write(folder.path().join("proc/4711/stat"), stat).unwrap();
        processes.look(&Root::at(folder.path()), &scope);
        processes.look(&Root::at("/nonexistent"), &scope);
        let totals = scope.totals(&Root::at("/nonexistent"), &processes);
        assert_eq!(totals.cpu_ns, Ok(500 * tick_ns()));
        assert_eq!(
            (&totals.events["minor_fault_count"], &totals.events["major_fault_count"]),
            (&Ok(5), &Ok(7))
        );
    }

    #[test]
    fn a_process_is_in_its_cgroup_and_in_those_above() {
        let cgroups = "4:memory:/a/b\n0::/";
        let holds = |path: &str| Scope::Cgroup(path.into()).holds(1, cgroups);
        assert!(holds("/a/b") && holds("/a") && holds("/a/") && holds("/"));
        assert!(!holds("/a/bc") && !holds("/b"));
        assert!(Scope::System.holds(1, "") && !Scope::Processes(vec![2]).holds(1, ""));
    }
}
