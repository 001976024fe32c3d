//! What virtual memory costs a whole system, a cgroup or processes that run already.
//!
//! [`SystemWatch`] collects; [`cost`] is a pure function that turns what it saw into a document. Exact are
//! the CPU time of the scope, that of the daemons, the events, and the time of waits. Stacks divide the
//! rest.
//!
//! Invariant: what was seen in intervals that follow each other adds up to what was seen in all of them.

mod cost;
mod samples;
mod scope;

pub use cost::{SampledTime, TaskTimes, cost};
pub use samples::{ROWS, Row, SystemSamples, TaskCounts, WAITS};
pub(in crate::measure) use scope::tick_ns;
pub use scope::{Count, ProcessTotals, Scope, ScopeTotals};

use crate::procfs::{Fragmentation, Root, StatLine, cgroup_paths, schedstat};
use crate::sys::perf::monotonic_ns;
use pagetax_core::system_stat::huge_blocks;
use samples::SystemCollector;
use std::collections::{BTreeMap, HashMap};
use std::time::{SystemTime, UNIX_EPOCH};

/// The longest time between two calls of [`SystemWatch::look`], in nanoseconds.
pub const LOOK_INTERVAL_NS: u64 = 200_000_000;

/// The kernel's daemons of memory: their names begin so, and their time is that row.
pub const DAEMONS: [(&str, &str); 3] = [
    ("kswapd", "background_reclaim"),
    ("kcompactd", "background_compaction"),
    ("khugepaged", "khugepaged"),
];

/// A daemon: its index in [`DAEMONS`], and its process.
pub(in crate::measure) type Daemon = (usize, u32);

/// A process as it was when it was first sampled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Its name.
    pub name: String,
    /// True for a thread of the kernel.
    pub is_kernel: bool,
    /// The text of its /proc/PID/cgroup.
    pub cgroups: String,
}

impl Process {
    /// Reads a process; none if it has ended.
    pub(in crate::measure) fn read(root: &Root, pid: u32) -> Option<Process> {
        let stat = root.text(&format!("/proc/{pid}/stat")).ok()?;
        let stat = StatLine::parse(&stat)?;
        let cgroups = root.text(&format!("/proc/{pid}/cgroup")).unwrap_or_default();
        Some(Process { name: stat.name.into(), is_kernel: stat.is_kernel(), cgroups })
    }

    /// Returns its memory cgroup, or that of version 2.
    pub fn memory_cgroup(&self) -> Option<String> {
        memory_cgroup(&self.cgroups).map(str::to_string)
    }
}

/// Returns the memory cgroup, or that of version 2, of the text of a /proc/PID/cgroup.
pub(in crate::measure) fn memory_cgroup(cgroups: &str) -> Option<&str> {
    let path = |wanted: &dyn Fn(&str) -> bool| {
        let found = cgroup_paths(cgroups).find(|(controllers, _)| wanted(controllers));
        found.map(|(_, path)| path)
    };
    path(&|controllers| controllers.split(',').any(|name| name == "memory"))
        .or_else(|| path(&str::is_empty))
}

/// The counters and samples of an interval, or of several that follow each other.
#[derive(Debug, Clone, PartialEq)]
pub struct Observation {
    /// The end, in milliseconds of Unix time.
    pub end_unix_ms: u64,
    /// The length in nanoseconds.
    pub elapsed_ns: u64,
    /// Differences of the scope's counters.
    pub totals: ScopeTotals,
    /// The CPU time of each of [`DAEMONS`].
    pub daemons_ns: [Count; DAEMONS.len()],
    /// The stacks of processes in scope.
    pub samples: Result<SystemSamples, String>,
    /// The samples in allocations of memory, of all processes of the machine.
    pub allocations: HashMap<u32, u64>,
    /// The processes that were sampled in an allocation.
    pub processes: HashMap<u32, Process>,
    /// The free blocks of 2^index base pages at the end.
    pub free_blocks: Result<Vec<u64>, String>,
    /// Blocks that hold a huge page, at the start; none if free blocks cannot be read.
    pub free_huge_before: Option<u64>,
    /// The CPU time that watching took.
    pub own_cpu_ns: u64,
}

impl Observation {
    /// Adds what the next interval showed.
    pub fn add(&mut self, next: &Observation) {
        let sum = |sum: &mut Count, next: &Count| match (&mut *sum, next) {
            (Ok(sum), Ok(next)) => *sum += next,
            (Ok(_), Err(_)) => *sum = next.clone(),
            (Err(_), _) => {}
        };
        (self.end_unix_ms, self.free_blocks) = (next.end_unix_ms, next.free_blocks.clone());
        self.elapsed_ns += next.elapsed_ns;
        self.own_cpu_ns += next.own_cpu_ns;
        sum(&mut self.totals.cpu_ns, &next.totals.cpu_ns);
        sum(&mut self.totals.kernel_ns, &next.totals.kernel_ns);
        for (id, count) in &mut self.totals.events {
            sum(count, next.totals.events.get(id).unwrap_or(&Err("not counted".into())));
        }
        for (ns, next) in self.daemons_ns.iter_mut().zip(&next.daemons_ns) {
            sum(ns, next);
        }
        match (&mut self.samples, &next.samples) {
            (Ok(samples), Ok(next)) => samples.add(next),
            (Ok(_), Err(why)) => self.samples = Err(why.clone()),
            (Err(_), _) => {}
        }
        for (pid, count) in &next.allocations {
            *self.allocations.entry(*pid).or_default() += count;
        }
        self.processes.extend(next.processes.iter().map(|(pid, p)| (*pid, p.clone())));
    }
}

/// The counters at one moment.
struct Moment {
    time_ns: u64,
    own_cpu_ns: u64,
    totals: ScopeTotals,
    daemons_ns: [Count; DAEMONS.len()],
    free_blocks: Result<Vec<u64>, String>,
}

/// A watch over a scope.
pub struct SystemWatch {
    root: Root,
    scope: Scope,
    collector: Result<SystemCollector, String>,
    /// The kernel's daemons that were there at the start, by the index in [`DAEMONS`].
    daemons: Vec<Daemon>,
    /// Known processes; none for those that had ended before they were looked at.
    processes: HashMap<u32, Option<Process>>,
    /// The figures of the processes in scope.
    totals: ProcessTotals,
    before: Moment,
}

impl SystemWatch {
    /// Starts to watch.
    ///
    /// # Errors
    /// If there is no such scope. What the machine does not let us see is missing from the result instead.
    pub fn start(scope: Scope) -> Result<SystemWatch, String> {
        let totals = ProcessTotals::open(&scope);
        SystemWatch::at(Root::default(), scope, totals, SystemCollector::start())
    }

    /// Starts to watch a live or a captured tree.
    pub(in crate::measure) fn at(
        root: Root,
        scope: Scope,
        mut totals: ProcessTotals,
        collector: Result<SystemCollector, String>,
    ) -> Result<SystemWatch, String> {
        scope.check(&root)?;
        let daemons = daemons(&root);
        totals.look(&root, &scope);
        let before = Moment::read(&root, &scope, &totals, &daemons);
        Ok(SystemWatch {
            root,
            scope,
            collector,
            daemons,
            processes: HashMap::new(),
            totals,
            before,
        })
    }

    /// Lets the first interval of a captured tree begin when its machine booted.
    #[cfg(test)]
    pub(in crate::measure) fn count_from_boot(&mut self) {
        let Moment { totals, daemons_ns, time_ns, .. } = &mut self.before;
        let of_scope = [&mut totals.cpu_ns, &mut totals.kernel_ns].into_iter();
        let counts = of_scope.chain(daemons_ns).chain(totals.events.values_mut());
        counts.flatten().for_each(|count| *count = 0);
        *time_ns = 0;
    }

    /// Returns the reason why there are no stacks; none if there are.
    pub fn without_stacks(&self) -> Option<&str> {
        self.collector.as_ref().err().map(String::as_str)
    }

    /// Reads what has come. Call it at least once in [`LOOK_INTERVAL_NS`].
    pub fn look(&mut self) {
        self.totals.look(&self.root, &self.scope);
        let Ok(collector) = &mut self.collector else { return };
        collector.look();
        // Short-lived processes are gone at the end of an interval.
        for pid in collector.pids() {
            let read = || Process::read(&self.root, pid);
            self.processes.entry(pid).or_insert_with(read);
        }
    }

    /// Returns a process that was sampled in the last interval; none if it ended before it was looked at.
    pub fn process(&self, pid: u32) -> Option<&Process> {
        self.processes.get(&pid)?.as_ref()
    }

    /// Returns true if a process of the scope is left, or may come.
    pub fn goes_on(&self) -> bool {
        match &self.scope {
            Scope::Processes(pids) => {
                pids.iter().any(|p| self.root.has(&format!("/proc/{p}/stat")))
            }
            _ => self.scope.check(&self.root).is_ok(),
        }
    }

    /// Returns what was seen since the last call.
    pub fn interval(&mut self) -> Observation {
        self.look();
        let now = Moment::read(&self.root, &self.scope, &self.totals, &self.daemons);
        let before = std::mem::replace(&mut self.before, now);
        let now = &self.before;
        let elapsed_ns = now.time_ns.saturating_sub(before.time_ns);
        let threads = |index| self.daemons.iter().filter(|(of, _)| *of == index).count() as u64;
        let since = |now: &Count, then: &Count| match (now, then) {
            (Ok(now), Ok(then)) => Ok(now.saturating_sub(*then)),
            (Err(why), _) | (_, Err(why)) => Err(why.clone()),
        };
        let event =
            |(id, now): (&&'static str, &Count)| (*id, since(now, &before.totals.events[id]));
        let totals = ScopeTotals {
            cpu_ns: since(&now.totals.cpu_ns, &before.totals.cpu_ns),
            kernel_ns: since(&now.totals.kernel_ns, &before.totals.kernel_ns),
            events: now.totals.events.iter().map(event).collect::<BTreeMap<_, _>>(),
        };
        let daemon = |index: usize| {
            let ns = since(&now.daemons_ns[index], &before.daemons_ns[index]);
            ns.map(|ns| ns.min(elapsed_ns * threads(index)))
        };
        let (daemons_ns, free_blocks) = ([0, 1, 2].map(daemon), now.free_blocks.clone());
        let own_cpu_ns = now.own_cpu_ns.saturating_sub(before.own_cpu_ns);
        let samples = self.collector.as_mut().map(SystemCollector::take).map_err(|why| why.clone());
        let allocations = self.allocations(samples.as_ref().ok());
        // Ids are used again, so only processes of this interval stay known.
        self.processes
            .retain(|pid, _| samples.as_ref().is_ok_and(|s| s.processes.contains_key(pid)));
        let of_allocator = |pid: &u32| Some((*pid, self.processes.get(pid)?.clone()?));
        Observation {
            end_unix_ms: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |t| t.as_millis() as u64),
            elapsed_ns,
            totals,
            daemons_ns,
            samples: samples.map(|samples| self.in_scope(samples)),
            processes: allocations.keys().filter_map(of_allocator).collect(),
            allocations,
            free_blocks,
            free_huge_before: before.free_blocks.ok().map(|blocks| huge_blocks(&blocks)),
            own_cpu_ns,
        }
    }

    fn allocations(&self, samples: Option<&SystemSamples>) -> HashMap<u32, u64> {
        let is_kernel = |pid: &u32| matches!(self.processes.get(pid), Some(Some(p)) if p.is_kernel);
        let of_all = samples.into_iter().flat_map(|samples| &samples.processes);
        of_all
            .filter(|(pid, counts)| counts.allocations > 0 && !is_kernel(pid))
            .map(|(pid, counts)| (*pid, counts.allocations))
            .collect()
    }

    /// Leaves out the daemons, whose time is known exactly, waits of the kernel's threads, and what is not in
    /// scope.
    fn in_scope(&self, mut samples: SystemSamples) -> SystemSamples {
        let is_daemon = |pid: &u32| self.daemons.iter().any(|(_, daemon)| daemon == pid);
        samples.processes.retain(|pid, counts| {
            let process = self.processes.get(pid).and_then(Option::as_ref);
            if process.is_some_and(|process| process.is_kernel) {
                counts.waits_ns = Default::default();
            }
            !is_daemon(pid) && self.scope.holds(*pid, process.map_or("", |p| p.cgroups.as_str()))
        });
        samples
    }
}

impl Moment {
    fn read(root: &Root, scope: &Scope, processes: &ProcessTotals, daemons: &[Daemon]) -> Moment {
        let free = Fragmentation::usable(root).map(|fragmentation| fragmentation.free_blocks);
        let own = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        Moment {
            time_ns: monotonic_ns(),
            own_cpu_ns: own.tv_sec as u64 * 1_000_000_000 + own.tv_nsec as u64,
            totals: scope.totals(root, processes),
            daemons_ns: [0, 1, 2].map(|index| match scope {
                Scope::System => daemon_ns(root, daemons, index),
                _ => Err("the kernel's daemons work for the whole system".into()),
            }),
            free_blocks: free,
        }
    }
}

/// Returns the CPU time of the daemons of one name, one for each memory node.
pub(in crate::measure) fn daemon_ns(root: &Root, daemons: &[Daemon], index: usize) -> Count {
    let of_name = daemons.iter().filter(|(of, _)| *of == index);
    let mut times = of_name.map(|(_, pid)| Ok(schedstat(root, *pid, None)?.0)).peekable();
    if times.peek().is_none() {
        return Err(format!("no {} is visible in /proc", DAEMONS[index].0));
    }
    times.sum()
}

/// Finds the kernel's daemons. Theirs are children of kthreadd, which is process 2.
pub(in crate::measure) fn daemons(root: &Root) -> Vec<Daemon> {
    let daemon = |pid: u32| {
        let name = root.text(&format!("/proc/{pid}/comm")).ok()?;
        let index = DAEMONS.iter().position(|(daemon, _)| name.starts_with(daemon))?;
        Process::read(root, pid)?.is_kernel.then_some((index, pid))
    };
    root.pids().filter_map(daemon).collect()
}
