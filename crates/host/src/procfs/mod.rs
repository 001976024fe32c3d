//! Readers of /proc and /sys.
//!
//! Invariants:
//! - Each reader starts at a [`Root`], so that a captured tree reads like a live machine.
//! - A figure that cannot be read is an error text, which becomes the reason of a `Missing` reading. It is
//!   never 0.
//! - A file of lines (maps, smaps) fails with the system's own error: its callers distinguish a process
//!   that has ended from one that they may not read. A line that no kernel writes is an error that shows
//!   the line.
//! - The difference of two times never exceeds the interval between them. A block-I/O delay has been seen
//!   to read the machine's uptime.

mod cpus;
mod maps;
mod memory;
mod stat_line;
mod system;

pub use cpus::{CpuList, NoCpuList, online_cpus};
pub use maps::{MapsLine, line as maps_line, maps};
pub use memory::{Fragmentation, cgroup_file, cgroup_paths, memory_cgroup, memory_limit};
pub use stat_line::StatLine;
pub use system::SystemSnapshot;

use pagetax_core::counter::Reading;
use procfs_core::FromRead;
use procfs_core::process::{Schedstat, SmapsRollup};
use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};

/// The folder that holds /proc and /sys: `/` on a live machine, any other for a captured one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Root(PathBuf);

impl Default for Root {
    fn default() -> Self {
        Root("/".into())
    }
}

impl Root {
    /// Returns the root of a captured tree.
    pub fn at(folder: impl Into<PathBuf>) -> Root {
        Root(folder.into())
    }

    /// Returns an absolute path, moved under this root.
    pub fn path(&self, path: &str) -> PathBuf {
        self.0.join(path.trim_start_matches('/'))
    }

    /// Reads a whole file, byte for byte.
    pub fn bytes(&self, path: &str) -> io::Result<Vec<u8>> {
        std::fs::read(self.path(path))
    }

    /// Reads a whole file without its last newline. The error has the path and the cause.
    pub fn text(&self, path: &str) -> Result<String, String> {
        let text = std::fs::read_to_string(self.path(path)).map_err(|e| format!("{path}: {e}"))?;
        Ok(text.trim_end().to_string())
    }

    /// Reads a file that holds one whole number.
    pub fn number(&self, path: &str) -> Result<u64, String> {
        let text = self.text(path)?;
        text.parse().map_err(|_| format!("{path}: `{text}` is no whole number"))
    }

    /// Parses a file by the procfs crate.
    pub fn parse<T: FromRead>(&self, path: &str) -> Result<T, String> {
        T::from_file(self.path(path)).map_err(|e| format!("{path}: {e}"))
    }

    /// Returns the names in a folder, sorted. There are none if it cannot be read.
    pub fn names(&self, path: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(path)).into_iter().flatten().flatten();
        let mut names: Vec<_> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// Returns the ids of all processes.
    pub fn pids(&self) -> impl Iterator<Item = u32> + use<> {
        self.names("/proc").into_iter().filter_map(|name| name.parse().ok())
    }

    /// Returns true if the path exists.
    pub fn has(&self, path: &str) -> bool {
        Path::exists(&self.path(path))
    }
}

/// The memory of a process, by kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessMemory {
    /// Resident bytes now (VmRSS).
    pub resident_bytes: Reading,
    /// The most resident bytes so far (VmHWM).
    pub resident_bytes_max: Reading,
    /// Resident anonymous bytes (RssAnon), without hugetlb pages.
    pub anon_bytes: Reading,
    /// Bytes on hugetlb pages (HugetlbPages). No other figure here includes them.
    pub hugetlb_bytes: Reading,
    /// Bytes of page tables (VmPTE).
    pub page_table_bytes: Reading,
    /// Bytes locked in memory (VmLck).
    pub locked_bytes: Reading,
}

/// Reads the memory of a process from /proc/PID/status, without a walk over its page tables. Parses only
/// the lines that it needs, because a watcher calls it often.
pub fn process_memory(root: &Root, pid: u32) -> ProcessMemory {
    let path = format!("/proc/{pid}/status");
    let status = root.text(&path);
    let field = |name: &str| match &status {
        Ok(status) => match kib_in(status, name) {
            Some(kib) => Reading::Measured(kib * 1024),
            None => Reading::Missing(format!("{path} has no {name}")),
        },
        Err(why) => Reading::Missing(why.clone()),
    };
    ProcessMemory {
        resident_bytes: field("VmRSS"),
        resident_bytes_max: field("VmHWM"),
        anon_bytes: field("RssAnon"),
        hugetlb_bytes: field("HugetlbPages"),
        page_table_bytes: field("VmPTE"),
        locked_bytes: field("VmLck"),
    }
}

/// Returns the number of a line such as `VmRSS:      1234 kB`.
fn kib_in(status: &str, name: &str) -> Option<u64> {
    let value = |line: &str| {
        line.strip_prefix(name)?.strip_prefix(':')?.strip_suffix(" kB")?.trim().parse().ok()
    };
    status.lines().find_map(value)
}

/// Reads the bytes of a process on 2M and 1G pages: anonymous and file THP, and hugetlb, but not mTHP. The
/// kernel walks the page tables for smaps_rollup, so do not call this in a tight loop.
pub fn process_huge_bytes(root: &Root, pid: u32) -> Reading {
    const HUGE: [&str; 5] =
        ["AnonHugePages", "ShmemPmdMapped", "FilePmdMapped", "Shared_Hugetlb", "Private_Hugetlb"];
    match smaps_rollup(root, pid) {
        Ok(whole) => Reading::Measured(HUGE.iter().filter_map(|key| whole.get(*key)).sum()),
        Err(why) => Reading::Missing(why),
    }
}

/// Reads the sums over all mappings of a process from /proc/PID/smaps_rollup, in bytes by name.
pub fn smaps_rollup(root: &Root, pid: u32) -> Result<HashMap<String, u64>, String> {
    let path = format!("/proc/{pid}/smaps_rollup");
    let rollup = root.parse::<SmapsRollup>(&path)?.memory_map_rollup.0;
    let whole = rollup.into_iter().next();
    whole
        .map(|whole| whole.extension.map)
        .ok_or_else(|| format!("{path} is empty: a kernel thread or a zombie"))
}

/// Reads the run time and the run-queue wait of a thread in nanoseconds: of `tid`, or else of the main
/// thread.
pub fn schedstat(root: &Root, pid: u32, tid: Option<u32>) -> Result<(u64, u64), String> {
    let path = match tid {
        Some(tid) => format!("/proc/{pid}/task/{tid}/schedstat"),
        None => format!("/proc/{pid}/schedstat"),
    };
    let stat: Schedstat = root.parse(&path)?;
    Ok((stat.sum_exec_runtime, stat.run_delay))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns the captured tree of a 2-core virtual machine with Linux 6.18 and a memory cgroup v1.
    pub(crate) fn captured() -> Root {
        Root::at(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/linux-6.18"))
    }

    #[test]
    fn a_captured_process_reads_like_a_live_one() {
        let memory = process_memory(&captured(), 4711);
        assert_eq!(memory.resident_bytes, Reading::Measured(144_640 * 1024));
        assert_eq!(memory.page_table_bytes, Reading::Measured(324 * 1024));
        assert_eq!(memory.locked_bytes, Reading::Measured(0));
        assert_eq!(process_huge_bytes(&captured(), 4711), Reading::Measured(131_072 * 1024));
        let (ran_ns, waited_ns) = schedstat(&captured(), 4711, None).unwrap();
        assert_eq!((ran_ns, waited_ns), (275_705_447, 522_950_327));
    }

    #[test]
    fn what_cannot_be_read_says_why() {
        let gone = process_memory(&captured(), 1);
        let Reading::Missing(why) = gone.resident_bytes else { panic!("{gone:?}") };
        assert!(why.contains("/proc/1/status"), "{why}");
        assert!(matches!(process_huge_bytes(&captured(), 1), Reading::Missing(_)));
        assert!(captured().number("/proc/sys/kernel/none").is_err());
    }

    #[test]
    fn this_process_is_resident() {
        let memory = process_memory(&Root::default(), std::process::id());
        assert!(memory.resident_bytes.value().unwrap() > 100_000);
        assert!(memory.page_table_bytes.value().unwrap() >= 4096);
        assert!(memory.anon_bytes.value().unwrap() > 10_000);
        assert_eq!(memory.hugetlb_bytes, Reading::Measured(0));
    }
}
