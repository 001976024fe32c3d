//! The processes of a command: itself and its descendants. They come from /proc/PID/task/TID/children, or
//! from the parents in /proc/PID/stat if the kernel does not have that file.

use crate::procfs::{Root, StatLine, process_memory};
use rustix::process::Pid;
use std::collections::HashMap;
use std::path::Path;
use std::sync::LazyLock;

/// The parents of all processes that were ever listed. Each process is read once. So a list costs little,
/// and an orphan remains a descendant of the process that started it.
#[derive(Debug, Default)]
pub struct ProcessTree {
    parent_of: HashMap<i32, i32>,
}

impl ProcessTree {
    /// Lists the descendants that a process has now. Empty if /proc cannot be read.
    pub fn descendants(&mut self, root: Pid) -> Vec<Pid> {
        static HAS_CHILDREN: LazyLock<bool> =
            LazyLock::new(|| Path::new("/proc/thread-self/children").exists());
        let root = root.as_raw_nonzero().get();
        self.parent_of = if *HAS_CHILDREN { self.by_children(root) } else { self.by_parents() };
        let pids = self.parent_of.keys().copied();
        pids.filter(|pid| self.descends(*pid, root)).filter_map(Pid::from_raw).collect()
    }

    /// Walks down from the root, which reads only its own descendants (Linux with CONFIG_PROC_CHILDREN).
    fn by_children(&self, root: i32) -> HashMap<i32, i32> {
        let is_there = |pid: &i32| Path::new(&format!("/proc/{pid}")).exists();
        let known = self.parent_of.iter().filter(|(pid, _)| is_there(pid));
        let mut parent_of: HashMap<i32, i32> = known.map(|(pid, parent)| (*pid, *parent)).collect();
        let mut to_ask: Vec<i32> = parent_of.keys().copied().chain([root]).collect();
        while let Some(pid) = to_ask.pop() {
            for child in children(pid) {
                if !parent_of.contains_key(&child) && parent(child).is_some() {
                    parent_of.insert(child, pid);
                    to_ask.push(child);
                }
            }
        }
        parent_of
    }

    /// Reads the parents of all processes of the machine.
    fn by_parents(&self) -> HashMap<i32, i32> {
        let known_or_new = |pid| {
            let known = self.parent_of.get(&pid).copied();
            Some((pid, known.or_else(|| parent(pid))?))
        };
        numbers_in("/proc").into_iter().filter_map(known_or_new).collect()
    }

    /// Walks up to `root`. Takes at most one step for each process, because stale parents could form a
    /// circle.
    fn descends(&self, pid: i32, root: i32) -> bool {
        let mut up = std::iter::successors(Some(pid), |pid| self.parent_of.get(pid).copied());
        up.by_ref().skip(1).take(self.parent_of.len()).any(|ancestor| ancestor == root)
    }
}

/// Returns the entries of a directory that are numbers. There are none if the directory is gone.
fn numbers_in(directory: &str) -> Vec<i32> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Reads the children of all threads of a process.
fn children(pid: i32) -> Vec<i32> {
    let of_thread = |tid| std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/children")).ok();
    let texts = numbers_in(&format!("/proc/{pid}/task")).into_iter().filter_map(of_thread);
    texts
        .flat_map(|text| text.split(' ').filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>())
        .collect()
}

/// Reads the parent of a process; `None` if the process has ended.
fn parent(pid: i32) -> Option<i32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let stat = StatLine::parse(&stat).filter(|stat| !stat.has_ended())?;
    stat.parent()?.try_into().ok()
}

/// The memory of a process at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryUse {
    pub pid: Pid,
    /// Anonymous bytes, with hugetlb pages after [`MemoryUse::with_hugetlb`].
    pub anon_bytes: u64,
    /// Bytes of files and of shared memory. Other processes may hold the same pages.
    pub shared_bytes: u64,
}

impl MemoryUse {
    /// Reads /proc/PID/statm, which needs no walk over page tables. `None` if the process has ended.
    pub fn by(pid: Pid) -> Option<MemoryUse> {
        let statm =
            std::fs::read_to_string(format!("/proc/{}/statm", pid.as_raw_nonzero())).ok()?;
        let mut fields = statm.split(' ').skip(1).map(|pages| pages.parse::<u64>().ok());
        let page = rustix::param::page_size() as u64;
        let (resident, shared) = (fields.next()?? * page, fields.next()?? * page);
        Some(MemoryUse { pid, anon_bytes: resident.saturating_sub(shared), shared_bytes: shared })
    }

    /// Adds the hugetlb pages, which statm does not count.
    pub fn with_hugetlb(self) -> MemoryUse {
        let pid = self.pid.as_raw_nonzero().get() as u32;
        let hugetlb_bytes =
            process_memory(&Root::default(), pid).hugetlb_bytes.value().unwrap_or(0);
        MemoryUse { anon_bytes: self.anon_bytes + hugetlb_bytes, ..self }
    }

    pub fn bytes(&self) -> u64 {
        self.anon_bytes + self.shared_bytes
    }

    /// Sums all processes, as if the largest shared part included the others.
    pub fn total(held: &[MemoryUse]) -> u64 {
        let shared = held.iter().map(|one| one.shared_bytes).max().unwrap_or(0);
        held.iter().map(|one| one.anon_bytes).sum::<u64>() + shared
    }

    pub fn largest(held: &[MemoryUse]) -> Option<MemoryUse> {
        held.iter().copied().max_by_key(MemoryUse::bytes)
    }
}

/// Returns the resident bytes, with shared ones; `None` if the process has ended.
pub fn resident_bytes(pid: Pid) -> Option<u64> {
    Some(MemoryUse::by(pid)?.bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grandchildren_are_found_and_orphans_stay() {
        let mut shell = std::process::Command::new("sh")
            .args(["-c", "sleep 60 & wait"])
            .spawn()
            .expect("sh is everywhere");
        let root = Pid::from_child(&shell);
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(5);
        let mut family = ProcessTree::default();
        let found = loop {
            let found = family.descendants(root);
            if !found.is_empty() || std::time::Instant::now() > deadline {
                break found;
            }
        };
        assert_eq!(found.len(), 1);
        let by_parents = ProcessTree { parent_of: ProcessTree::default().by_parents() };
        let [sleeper, root_pid] = [found[0], root].map(|pid| pid.as_raw_nonzero().get());
        assert!(by_parents.descends(sleeper, root_pid));
        shell.kill().unwrap();
        shell.wait().unwrap();
        assert_eq!(
            (family.descendants(root), ProcessTree::default().descendants(root)),
            (found, vec![])
        );
        let sleeper = Pid::from_raw(sleeper).unwrap();
        rustix::process::kill_process(sleeper, rustix::process::Signal::KILL).unwrap();
    }

    #[test]
    fn this_process_is_resident() {
        let held = MemoryUse::by(rustix::process::getpid()).unwrap();
        assert!(held.bytes() > 100_000 && held.anon_bytes > 10_000, "{held:?}");
        assert_eq!(MemoryUse::total(&[held]), held.bytes());
        assert_eq!(MemoryUse::total(&[held, held]), held.bytes() + held.anon_bytes);
    }
}
