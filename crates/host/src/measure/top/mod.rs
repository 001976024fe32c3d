//! What virtual memory costs each process of this machine, interval by interval.
//!
//! [`TopWatch`] joins the stacks of a [`SystemWatch`] with the [`TaskTable`] of all processes. The join is a
//! pure function. A process's time is its share of all stacks, as in the CPU ledger of the system, so that
//! all processes add up to the ledger. Walks of the page tables are user time, which stacks do not tell from
//! other work. They are estimated from the pages that a [`TouchWatch`] sees touched.

mod table;

pub use table::{KnownTask, TaskTable};

use crate::measure::ranking::TouchWatch;
use crate::measure::system::{
    Daemon, Observation, Process, SampledTime, Scope, SystemWatch, TaskCounts, cost, daemons,
};
use crate::procfs::{Root, online_cpus, schedstat};
use pagetax_core::calibration::Calibration;
use pagetax_core::system_stat::SystemInterval;
use pagetax_core::top::{SystemTop, TopCgroup, TopFigures, TopProcess};
use std::collections::{BTreeMap, HashMap};

/// A watch over all processes of the machine.
pub struct TopWatch {
    root: Root,
    system: SystemWatch,
    table: TaskTable,
    daemons: Vec<Daemon>,
    /// The CPU times of the daemons at the last look, by process.
    daemon_times: HashMap<u32, u64>,
    cpu_count: u32,
    touches: TouchWatch,
}

impl TopWatch {
    /// Starts to watch. `is_hurried` asks for touched pages as soon as possible, at the price of more CPU
    /// time.
    ///
    /// # Errors
    /// If the system cannot be watched. Figures that the machine does not show are missing instead.
    pub fn start(is_hurried: bool) -> Result<TopWatch, String> {
        TopWatch::at(Root::default(), SystemWatch::start(Scope::System)?, is_hurried)
    }

    /// Starts to watch a live or a captured tree.
    pub(in crate::measure) fn at(
        root: Root,
        system: SystemWatch,
        is_hurried: bool,
    ) -> Result<TopWatch, String> {
        let daemons = daemons(&root);
        let daemon_times = daemon_times(&root, &daemons);
        let cpu_count = online_cpus(&root)?.len() as u32;
        Ok(TopWatch {
            table: TaskTable::new(&root),
            touches: TouchWatch::start(&root, is_hurried),
            root,
            system,
            daemons,
            daemon_times,
            cpu_count,
        })
    }

    /// Lets the first interval of a captured tree begin when its processes started.
    #[cfg(test)]
    pub(in crate::measure) fn count_from_start(&mut self) {
        self.table = TaskTable::new(&Root::at("/nonexistent"));
        self.system.count_from_boot();
    }

    /// Returns true if there are stacks, so that times by cause are known.
    pub fn has_stacks(&self) -> bool {
        self.system.without_stacks().is_none()
    }

    /// Returns true if the kernel tells which pages are touched.
    pub fn has_touches(&self) -> bool {
        self.touches.missing().is_none()
    }

    /// Reads the samples that have come. Call it at least once in
    /// [`LOOK_INTERVAL_NS`](crate::measure::system::LOOK_INTERVAL_NS).
    pub fn look(&mut self) {
        self.system.look();
    }

    /// Returns the costs since the last call.
    pub fn interval(&mut self, calibration: Result<&Calibration, &str>) -> SystemTop {
        let seen = self.system.interval();
        self.table.look(&self.root);
        let now = daemon_times(&self.root, &self.daemons);
        let before = std::mem::replace(&mut self.daemon_times, now);
        let since = |(pid, ns): (&u32, &u64)| Some((*pid, ns.saturating_sub(*before.get(pid)?)));
        let parts = Parts {
            system: cost(&seen, calibration),
            seen: &seen,
            tasks: self.table.tasks(),
            daemons_ns: self.daemon_times.iter().filter_map(since).collect(),
        };
        let sampled = |pid| self.system.process(pid);
        let elapsed_ns = parts.seen.elapsed_ns.max(1) as f64;
        let busy = parts.tasks.iter().map(|(pid, task)| {
            ((*pid, task.start_ticks), task.cpu_ns as f64 / elapsed_ns, task.resident_bytes)
        });
        self.touches.choose(busy);
        let touches = Touches { watch: &self.touches, calibration };
        SystemTop { cpu_count: self.cpu_count, ..parts.join(&sampled, &touches) }
    }
}

fn daemon_times(root: &Root, daemons: &[Daemon]) -> HashMap<u32, u64> {
    let time = |(_, pid): &Daemon| Some((*pid, schedstat(root, *pid, None).ok()?.0));
    daemons.iter().filter_map(time).collect()
}

/// The parts of one interval that are joined by process.
struct Parts<'a> {
    system: SystemInterval,
    seen: &'a Observation,
    tasks: &'a HashMap<u32, KnownTask>,
    daemons_ns: HashMap<u32, u64>,
}

/// The pages that processes touch, and what walks for them cost.
struct Touches<'a> {
    watch: &'a TouchWatch,
    calibration: Result<&'a Calibration, &'a str>,
}

impl Touches<'_> {
    /// Adds what was sampled of a process.
    fn add(&self, process: &mut TopProcess) {
        let Some(window) = self.watch.seen((process.pid, process.start_ticks)) else { return };
        let figures = &mut process.figures;
        figures.touched_bytes = Some(window.touched_bytes);
        let share = self.calibration.ok().and_then(|known| window.walk_share(known));
        let Some((share, ..)) = share else { return };
        let other_ns = figures.cpu_ns.map(|ns| ns.saturating_sub(figures.vm_cpu_ns.unwrap_or(0)));
        figures.walk_ns = other_ns.map(|ns| (ns as f64 * share).max(0.0) as u64);
    }

    /// Returns the reason for absent figures: of touched pages, and of walks.
    fn missing(&self) -> [String; 2] {
        const NOT_SEEN: &str =
            "the busiest processes of at least 0.5 % of a CPU and 4 MiB are sampled in turn";
        let touched = self.watch.missing().unwrap_or_else(|| NOT_SEEN.into());
        let walks = self.calibration.err().map_or_else(|| touched.clone(), String::from);
        [touched, walks]
    }
}

/// A group of processes while it is added up.
#[derive(Default)]
struct CgroupSum {
    process_count: u64,
    counts: TaskCounts,
    /// The exact time of the kernel's daemons in it.
    daemons_ns: u64,
    figures: TopFigures,
}

impl Parts<'_> {
    fn join<'p>(
        self,
        sampled: &dyn Fn(u32) -> Option<&'p Process>,
        touches: &Touches<'_>,
    ) -> SystemTop {
        let time = SampledTime::of(self.seen);
        let of_samples = self.seen.samples.as_ref().ok();
        let none = TaskCounts::default();
        let counts = |pid: u32| of_samples.and_then(|s| s.processes.get(&pid)).unwrap_or(&none);
        let ended = of_samples.into_iter().flat_map(|samples| samples.processes.keys());
        let ended = ended.filter(|pid| !self.tasks.contains_key(pid));
        let mut processes: Vec<TopProcess> =
            self.tasks.iter().map(|(pid, task)| present(*pid, task)).collect();
        processes.extend(ended.map(|pid| gone(*pid, sampled(*pid))));
        processes.sort_unstable_by_key(|process| process.pid);
        let mut groups: BTreeMap<&str, CgroupSum> = BTreeMap::new();
        for process in &mut processes {
            let counts = counts(process.pid);
            let daemon_ns = self.daemons_ns.get(&process.pid).copied();
            self.price(&mut process.figures, &time, counts, daemon_ns);
            touches.add(process);
            let Some(path) = &process.cgroup else { continue };
            let group = groups.entry(path).or_default();
            group.process_count += 1;
            group.counts.add(counts);
            group.daemons_ns += daemon_ns.unwrap_or(0);
            group.figures.add_counts(&process.figures);
        }
        let mut cgroups = Vec::new();
        for (path, CgroupSum { process_count, counts, daemons_ns, mut figures }) in groups {
            let cpu_ns = figures.cpu_ns;
            self.price(
                &mut figures,
                &time,
                &counts,
                (time.is_ok() && daemons_ns > 0).then_some(daemons_ns),
            );
            cgroups.push(TopCgroup {
                path: path.into(),
                process_count,
                figures: TopFigures { cpu_ns, ..figures },
            });
        }
        let mut missing = self.missing(&time);
        let [touched, walks] = touches.missing();
        missing.extend([("touched_bytes".into(), touched), ("walk_ns".into(), walks)]);
        SystemTop { cpu_count: 1, system: self.system, missing, processes, cgroups }
    }

    /// Adds the times that samples show, and the exact time of a daemon.
    fn price(
        &self,
        figures: &mut TopFigures,
        time: &Result<SampledTime, String>,
        counts: &TaskCounts,
        daemon_ns: Option<u64>,
    ) {
        if let Ok(samples) = &self.seen.samples {
            figures.wait_ns = samples.waits.is_ok().then(|| counts.waits_ns.iter().sum());
        }
        if let Ok(time) = time {
            let times = time.times(counts);
            let [value, low, high] = times.vm_cpu_ns;
            figures.cpu_ns = figures.cpu_ns.or(Some(times.cpu_ns));
            figures.vm_cpu_ns = Some(value);
            (figures.vm_cpu_low_ns, figures.vm_cpu_high_ns) = (Some(low), Some(high));
            figures.sample_count = Some(counts.samples());
            figures.causes = times.causes.into_iter().map(|(id, ns)| (id.into(), ns)).collect();
        }
        if let Some(ns) = daemon_ns {
            let only = counts.samples() == 0;
            let add = |sum: Option<u64>| if only { Some(ns) } else { sum.map(|sum| sum + ns) };
            figures.vm_cpu_ns = add(figures.vm_cpu_ns);
            figures.vm_cpu_low_ns = add(figures.vm_cpu_low_ns);
            figures.vm_cpu_high_ns = add(figures.vm_cpu_high_ns);
        }
    }

    /// Returns the reasons for absent figures.
    fn missing(&self, time: &Result<SampledTime, String>) -> BTreeMap<String, String> {
        let mut missing = BTreeMap::new();
        let mut put = |key: &str, why: &str| drop(missing.insert(key.to_string(), why.to_string()));
        if let Err(why) = time {
            put("vm_cpu_ns", why);
            put("sample_count", why);
        }
        let waits = self.seen.samples.as_ref().map_err(Clone::clone);
        if let Err(why) = waits.and_then(|samples| samples.waits.clone()) {
            put("wait_ns", &why);
        }
        put("minor_fault_count", "the faults of an ended process are gone");
        put("major_fault_count", "the faults of an ended process are gone");
        let memory =
            "a thread of the kernel has none of its own; those of an ended process are gone";
        put("resident_bytes", memory);
        put("page_table_bytes", memory);
        missing
    }
}

fn present(pid: u32, task: &KnownTask) -> TopProcess {
    TopProcess {
        pid,
        start_ticks: task.start_ticks,
        name: task.name.clone(),
        is_kernel: task.is_kernel,
        has_ended: false,
        cgroup: task.cgroup.clone(),
        figures: TopFigures {
            cpu_ns: Some(task.cpu_ns),
            minor_fault_count: Some(task.minor_fault_count),
            major_fault_count: Some(task.major_fault_count),
            resident_bytes: (!task.is_kernel).then_some(task.resident_bytes),
            page_table_bytes: task.page_table_bytes,
            ..TopFigures::default()
        },
    }
}

/// Returns a process that was sampled and is no longer in the table.
fn gone(pid: u32, process: Option<&Process>) -> TopProcess {
    let unknown = match pid {
        // The kernel gives this id for a process outside this namespace.
        0 => "(outside)",
        _ => "(ended)",
    };
    TopProcess {
        pid,
        start_ticks: 0,
        name: process.map_or_else(|| unknown.into(), |process| process.name.clone()),
        is_kernel: process.is_some_and(|process| process.is_kernel),
        has_ended: true,
        cgroup: process.and_then(Process::memory_cgroup),
        figures: TopFigures::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::system::{ScopeTotals, SystemSamples};

    fn counts(user: u64, fault: u64) -> TaskCounts {
        TaskCounts { rows: [user, fault, 0, 0, 0, 0, 0, 0, 0], ..TaskCounts::default() }
    }

    fn seen(samples: Result<SystemSamples, String>) -> Observation {
        Observation {
            end_unix_ms: 1,
            elapsed_ns: 1_000_000_000,
            totals: ScopeTotals { cpu_ns: Ok(1_010), kernel_ns: Ok(500), events: BTreeMap::new() },
            daemons_ns: [Ok(10), Ok(0), Ok(0)],
            samples,
            allocations: HashMap::new(),
            processes: HashMap::new(),
            free_blocks: Err("none".into()),
            free_huge_before: None,
            own_cpu_ns: 0,
        }
    }

    fn join(seen: &Observation) -> SystemTop {
        let folder = tempfile::tempdir().unwrap();
        for (pid, name, flags) in [(7, "hog", 0), (40, "kswapd0", 0x0020_0000)] {
            let process = folder.path().join(format!("proc/{pid}"));
            std::fs::create_dir_all(&process).unwrap();
            let line =
                format!("{pid} ({name}) S 1 1 1 0 -1 {flags} 5 0 2 0 3 1 0 0 20 0 1 0 9 9 6 7\n");
            std::fs::write(process.join("stat"), line).unwrap();
            std::fs::write(process.join("cgroup"), "0::/box\n").unwrap();
        }
        let table = TaskTable::new(&Root::at(folder.path()));
        let ended = Process { name: "cc1".into(), is_kernel: false, cgroups: "0::/box\n".into() };
        let parts = Parts {
            system: cost(seen, Err("none")),
            seen,
            tasks: table.tasks(),
            daemons_ns: HashMap::from([(40, 10)]),
        };
        let watch = TouchWatch::start(&Root::at(folder.path()), false);
        let touches = Touches { watch: &watch, calibration: Err("none") };
        parts.join(&|pid| (pid == 8).then_some(&ended), &touches)
    }

    #[test]
    fn processes_that_ended_keep_their_samples_and_their_cgroup() {
        let processes = [(7, counts(10, 10)), (8, counts(50, 30))].into();
        let samples = SystemSamples { processes, waits: Ok(()), lost_count: 0 };
        let top = join(&seen(Ok(samples)));
        let names: Vec<_> = top.processes.iter().map(|p| (p.name.as_str(), p.has_ended)).collect();
        assert_eq!(names, [("hog", false), ("cc1", true), ("kswapd0", false)]);
        let ended = &top.processes[1].figures;
        assert_eq!((ended.vm_cpu_ns, ended.cpu_ns), (Some(300), Some(800)));
        assert_eq!((ended.minor_fault_count, ended.resident_bytes), (None, None));
        let daemon = &top.processes[2].figures;
        assert_eq!((daemon.vm_cpu_low_ns, daemon.vm_cpu_high_ns), (Some(10), Some(10)));
        assert_eq!(daemon.resident_bytes, None);
        let [group] = &top.cgroups[..] else { panic!("{:?}", top.cgroups) };
        assert_eq!((group.path.as_str(), group.process_count), ("/box", 3));
        assert_eq!(group.figures.vm_cpu_ns, Some(410));
        assert_eq!(group.figures.sample_count, Some(100));
    }

    #[test]
    fn without_stacks_times_are_missing_with_their_reason_and_faults_are_there() {
        let top = join(&seen(Err("not root".into())));
        assert_eq!(top.missing["vm_cpu_ns"], "not root");
        assert_eq!(top.missing["wait_ns"], "not root");
        let hog = &top.processes[0].figures;
        assert_eq!((hog.vm_cpu_ns, hog.wait_ns, hog.minor_fault_count), (None, None, Some(0)));
        assert_eq!(top.cgroups[0].figures.vm_cpu_ns, None);
    }
}
