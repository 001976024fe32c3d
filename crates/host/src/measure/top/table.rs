//! The table of all processes, which is read again in each interval.
//!
//! Invariants: each look reads one small file of each process. That is /proc/PID/schedstat of a process with
//! one thread: it tells for a fraction of the price whether the thread ran at all. If it did, or if there are
//! other threads, /proc/PID/stat has the figures; it takes no lock of the process's memory. Other files are
//! read only if the process has changed. Nothing here reads maps or smaps: they hold a lock that the
//! process's own faults may wait for.

use crate::measure::system::{memory_cgroup, tick_ns};
use crate::procfs::{Root, StatLine, process_memory};
use rustix::process::{Resource, getrlimit};
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// The processes whose page tables are read in one look; those read longest ago come first.
const TABLE_READS_MAX: usize = 500;
/// A process's cgroup is read again after so many looks, and its figures although it did not run: these
/// change seldom.
const SELDOM_LOOKS: u64 = 16;
/// A counter of /proc/vmstat that begins so counts pages taken from processes, which need not run for that.
const RECLAIMED: &str = "pgsteal";
/// The file that tells whether a thread ran.
const SCHEDULE: &str = "schedstat";
/// A line of /proc/PID/stat has at most 52 numbers and a name of 64 bytes.
const STAT_BYTES_MAX: usize = 2048;

/// The fields of /proc/PID/stat that the table has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct StatFields {
    is_kernel: bool,
    minor_fault_count: u64,
    major_fault_count: u64,
    cpu_ticks: u64,
    thread_count: u64,
    start_ticks: u64,
    resident_pages: u64,
}

impl StatFields {
    fn of(stat: &StatLine) -> Option<StatFields> {
        let [minor_fault_count, major_fault_count, user, kernel] =
            stat.numbers([10, 12, 14, 15])?;
        let [thread_count, start_ticks, resident_pages] = stat.numbers([20, 22, 24])?;
        Some(StatFields {
            is_kernel: stat.is_kernel(),
            minor_fault_count,
            major_fault_count,
            cpu_ticks: user + kernel,
            thread_count,
            start_ticks,
            resident_pages,
        })
    }
}

/// A process that is there, with its figures of the last interval.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownTask {
    /// Its name.
    pub name: String,
    /// True for a thread of the kernel.
    pub is_kernel: bool,
    /// The time of its start, in clock ticks since the machine booted.
    pub start_ticks: u64,
    /// Its memory cgroup.
    pub cgroup: Option<String>,
    /// Its CPU time of the interval, in nanoseconds.
    pub cpu_ns: u64,
    /// Its faults of the interval without I/O.
    pub minor_fault_count: u64,
    /// Its faults of the interval that read a page.
    pub major_fault_count: u64,
    /// Its resident bytes now.
    pub resident_bytes: u64,
    /// Its bytes of page tables; none for a thread of the kernel.
    pub page_table_bytes: Option<u64>,
    stat: StatFields,
    /// The line of schedstat when `stat` was read; empty if it was not read.
    schedule: Vec<u8>,
    /// The faults and pages when the page tables were read, and the number of that look.
    tables_read: Option<(u64, u64, u64)>,
    look: u64,
}

impl KnownTask {
    fn tables_are_due(&self) -> bool {
        let StatFields { minor_fault_count, resident_pages, .. } = self.stat;
        let is_same = |(faults, pages, _)| (faults, pages) == (minor_fault_count, resident_pages);
        !self.is_kernel && !self.tables_read.is_some_and(is_same)
    }
}

/// All processes.
#[derive(Debug)]
pub struct TaskTable {
    tasks: HashMap<u32, KnownTask>,
    /// Open files of processes, by id and name: to open one costs about as much as to read it.
    files: HashMap<u32, (&'static str, File)>,
    files_max: usize,
    /// False if the kernel does not tell whether a thread ran.
    has_schedules: bool,
    /// The pages that were reclaimed until the last look.
    reclaimed_count: u64,
    looks: u64,
    page_bytes: u64,
    tick_ns: u64,
}

impl TaskTable {
    /// Reads all processes for the first time. Their figures of the interval are 0.
    pub fn new(root: &Root) -> TaskTable {
        let page_bytes = rustix::param::page_size() as u64;
        let (tasks, files) = (HashMap::new(), HashMap::new());
        // The other half remains for what else is open.
        let files_max = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX) as usize / 2;
        let tick_ns = tick_ns();
        let mut table = TaskTable {
            tasks,
            files,
            files_max,
            has_schedules: root.has("/proc/self/schedstat"),
            reclaimed_count: 0,
            looks: 0,
            page_bytes,
            tick_ns,
        };
        table.look(root);
        for task in table.tasks.values_mut() {
            (task.cpu_ns, task.minor_fault_count, task.major_fault_count) = (0, 0, 0);
        }
        table
    }

    /// Returns the processes that the last look found, by id.
    pub fn tasks(&self) -> &HashMap<u32, KnownTask> {
        &self.tasks
    }

    /// Reads all processes again. A process that ends meanwhile is left out.
    pub fn look(&mut self, root: &Root) {
        self.looks += 1;
        let reclaimed_count = reclaimed_count(root);
        let is_reclaimed =
            std::mem::replace(&mut self.reclaimed_count, reclaimed_count) != reclaimed_count;
        let mut line = vec![0; STAT_BYTES_MAX];
        for pid in root.pids() {
            let schedule = self.schedule(root, pid, &mut line);
            if !is_reclaimed && self.has_slept(pid, &schedule) {
                continue;
            }
            let Some(length) = self.read_line(root, pid, "stat", &mut line) else { continue };
            let line = String::from_utf8_lossy(&line[..length]);
            let Some(stat) = StatLine::parse(&line) else { continue };
            if let Some(fields) = StatFields::of(&stat) {
                self.update(root, pid, stat.name, fields, schedule);
            }
        }
        let look = self.looks;
        self.tasks.retain(|_, task| task.look == look);
        self.files.retain(|pid, _| self.tasks.contains_key(pid));
        self.read_tables(root);
    }

    /// Returns the line of schedstat of a process with one thread; empty if it has more or is not known.
    fn schedule(&mut self, root: &Root, pid: u32, line: &mut [u8]) -> Vec<u8> {
        let is_single = self.tasks.get(&pid).is_some_and(|task| task.stat.thread_count == 1);
        if !self.has_schedules || !is_single {
            return Vec::new();
        }
        let length = self.read_line(root, pid, SCHEDULE, line).unwrap_or(0);
        line[..length].to_vec()
    }

    /// Returns true if a process did not run since its figures were read. Their figures of the interval are
    /// 0 then.
    fn has_slept(&mut self, pid: u32, schedule: &[u8]) -> bool {
        let is_due = (self.looks + u64::from(pid)).is_multiple_of(SELDOM_LOOKS);
        let Some(task) = self.tasks.get_mut(&pid) else { return false };
        if is_due || schedule.is_empty() || schedule != task.schedule {
            return false;
        }
        (task.cpu_ns, task.minor_fault_count, task.major_fault_count) = (0, 0, 0);
        task.look = self.looks;
        true
    }

    /// Reads a file of a process into a buffer, and returns its length. The kernel writes all of it into one
    /// read. One file of each process stays open, the one that is read in most looks.
    fn read_line(
        &mut self,
        root: &Root,
        pid: u32,
        name: &'static str,
        line: &mut [u8],
    ) -> Option<usize> {
        if let Some((_, file)) = self.files.get(&pid).filter(|(open, _)| *open == name) {
            if let Ok(length @ 1..) = file.read_at(line, 0) {
                return Some(length);
            }
            // That process has ended; another may have its number now.
            self.files.remove(&pid);
        }
        let file = File::open(root.path(&format!("/proc/{pid}/{name}"))).ok()?;
        let length = file.read_at(line, 0).ok()?;
        let is_open = self.files.contains_key(&pid);
        if (is_open && name == SCHEDULE) || (!is_open && self.files.len() < self.files_max) {
            self.files.insert(pid, (name, file));
        }
        Some(length)
    }

    fn update(&mut self, root: &Root, pid: u32, name: &str, stat: StatFields, schedule: Vec<u8>) {
        let known =
            self.tasks.remove(&pid).filter(|task| task.stat.start_ticks == stat.start_ticks);
        let mut task = known.unwrap_or_else(|| KnownTask::new(stat));
        let before = std::mem::replace(&mut task.stat, stat);
        let since = |of: fn(&StatFields) -> u64| of(&stat).saturating_sub(of(&before));
        task.cpu_ns = since(|stat| stat.cpu_ticks) * self.tick_ns;
        task.minor_fault_count = since(|stat| stat.minor_fault_count);
        task.major_fault_count = since(|stat| stat.major_fault_count);
        task.resident_bytes = stat.resident_pages * self.page_bytes;
        if task.name != name {
            task.name = name.into();
        }
        if task.look == 0 || (self.looks + u64::from(pid)).is_multiple_of(SELDOM_LOOKS) {
            let cgroups = root.text(&format!("/proc/{pid}/cgroup")).unwrap_or_default();
            task.cgroup = memory_cgroup(&cgroups).map(str::to_string);
        }
        (task.look, task.schedule) = (self.looks, schedule);
        self.tasks.insert(pid, task);
    }

    /// Reads the page tables of processes that have faulted, or whose pages became more or fewer.
    fn read_tables(&mut self, root: &Root) {
        let mut due: Vec<(u32, &mut KnownTask)> = self
            .tasks
            .iter_mut()
            .filter(|(_, task)| task.tables_are_due())
            .map(|(pid, task)| (*pid, task))
            .collect();
        due.sort_by_key(|(pid, task)| (task.tables_read.map_or(0, |(.., look)| look), *pid));
        for (pid, task) in due.into_iter().take(TABLE_READS_MAX) {
            task.page_table_bytes = process_memory(root, pid).page_table_bytes.value();
            let StatFields { minor_fault_count, resident_pages, .. } = task.stat;
            task.tables_read = Some((minor_fault_count, resident_pages, self.looks));
        }
    }
}

/// Returns the pages that were reclaimed since the machine booted.
fn reclaimed_count(root: &Root) -> u64 {
    let text = root.text("/proc/vmstat").unwrap_or_default();
    let counters = text.lines().filter(|line| line.starts_with(RECLAIMED));
    counters.filter_map(|line| line.split_once(' ')?.1.parse::<u64>().ok()).sum()
}

impl KnownTask {
    /// Makes a process that began in this interval, so that all its counts belong to it.
    fn new(stat: StatFields) -> KnownTask {
        let none = StatFields { minor_fault_count: 0, major_fault_count: 0, cpu_ticks: 0, ..stat };
        KnownTask {
            name: String::new(),
            is_kernel: stat.is_kernel,
            start_ticks: stat.start_ticks,
            cgroup: None,
            cpu_ns: 0,
            minor_fault_count: 0,
            major_fault_count: 0,
            resident_bytes: 0,
            page_table_bytes: None,
            stat: none,
            schedule: Vec::new(),
            tables_read: None,
            look: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn write(folder: &Path, pid: u32, name: &str, [start, faults, ticks, pages]: [u64; 4]) {
        let process = folder.join(format!("proc/{pid}"));
        std::fs::create_dir_all(&process).unwrap();
        let line = format!(
            "{pid} ({name}) S 1 1 1 0 -1 4194560 {faults} 0 2 0 {ticks} 1 0 0 20 0 1 0 {start} 9 \
             {pages} 18446744073709551615\n"
        );
        std::fs::write(process.join("stat"), line).unwrap();
        std::fs::write(process.join("cgroup"), "4:memory:/box\n0::/\n").unwrap();
        std::fs::write(process.join("status"), format!("VmPTE:\t{pages} kB\n")).unwrap();
    }

    #[test]
    fn figures_are_those_of_the_interval_and_a_new_process_has_all_of_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        write(folder.path(), 7, "a) (b", [5, 100, 50, 3]);
        let mut table = TaskTable::new(&root);
        let task = &table.tasks()[&7];
        assert_eq!((task.name.as_str(), task.cgroup.as_deref()), ("a) (b", Some("/box")));
        assert_eq!((task.cpu_ns, task.minor_fault_count), (0, 0));
        assert_eq!(task.page_table_bytes, Some(3 * 1024));
        write(folder.path(), 7, "a) (b", [5, 110, 52, 4]);
        write(folder.path(), 8, "child", [9, 20, 3, 1]);
        table.look(&root);
        let task = &table.tasks()[&7];
        assert_eq!((task.cpu_ns, task.minor_fault_count), (2 * tick_ns(), 10));
        assert_eq!(task.page_table_bytes, Some(4 * 1024));
        assert_eq!(table.tasks()[&8].minor_fault_count, 20);
    }

    #[test]
    fn an_id_that_is_used_again_is_another_process_and_an_ended_one_goes() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        write(folder.path(), 7, "one", [5, 100, 50, 3]);
        write(folder.path(), 8, "two", [5, 100, 50, 3]);
        let mut table = TaskTable::new(&root);
        write(folder.path(), 7, "other", [6, 30, 1, 3]);
        std::fs::remove_dir_all(folder.path().join("proc/8")).unwrap();
        table.look(&root);
        assert_eq!(table.tasks().len(), 1);
        let other = &table.tasks()[&7];
        assert_eq!((other.name.as_str(), other.minor_fault_count), ("other", 30));
    }

    #[test]
    fn page_tables_of_an_unchanged_process_are_not_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        write(folder.path(), 7, "idle", [5, 100, 50, 3]);
        let mut table = TaskTable::new(&root);
        std::fs::remove_file(folder.path().join("proc/7/status")).unwrap();
        table.look(&root);
        assert_eq!(table.tasks()[&7].page_table_bytes, Some(3 * 1024));
    }

    #[test]
    fn a_process_that_did_not_run_is_read_again_only_after_reclaim() {
        let folder = tempfile::tempdir().unwrap();
        let (root, path) = (Root::at(folder.path()), folder.path());
        let schedule = |pid: &str, line: &str| {
            std::fs::create_dir_all(path.join("proc").join(pid)).unwrap();
            std::fs::write(path.join("proc").join(pid).join("schedstat"), line).unwrap();
        };
        let reclaimed = |count: u64| {
            std::fs::write(path.join("proc/vmstat"), format!("pgsteal_kswapd {count}\n")).unwrap();
        };
        write(path, 7, "one", [5, 100, 50, 3]);
        schedule("self", "1 1 1\n");
        schedule("7", "100 0 1\n");
        reclaimed(9);
        let mut table = TaskTable::new(&root);
        let seen = |table: &mut TaskTable| {
            table.look(&root);
            let task = &table.tasks()[&7];
            (task.minor_fault_count, task.resident_bytes / table.page_bytes)
        };
        write(path, 7, "one", [5, 110, 50, 4]);
        assert_eq!(seen(&mut table), (10, 4), "the first line of schedstat is compared with none");
        write(path, 7, "one", [5, 120, 50, 5]);
        assert_eq!(seen(&mut table), (0, 4), "it did not run");
        schedule("7", "200 0 2\n");
        assert_eq!(seen(&mut table), (10, 5));
        write(path, 7, "one", [5, 120, 50, 2]);
        reclaimed(12);
        assert_eq!(seen(&mut table), (0, 2), "its pages were reclaimed while it slept");
    }

    #[test]
    fn a_line_without_its_fields_is_no_process() {
        let stat = StatLine::parse("7 (a) S 1 1").unwrap();
        assert_eq!(StatFields::of(&stat), None);
        assert_eq!(StatLine::parse(""), None);
    }

    #[test]
    fn the_live_table_has_this_process() {
        let table = TaskTable::new(&Root::default());
        let own = &table.tasks()[&std::process::id()];
        assert!(own.resident_bytes > 0 && own.page_table_bytes > Some(0), "{own:?}");
        assert!(!own.is_kernel);
    }
}
