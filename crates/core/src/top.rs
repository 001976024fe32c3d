//! What virtual memory costs each process and each cgroup of a system in one interval.
//!
//! Invariant: a figure that is not known is absent, and [`SystemTop::missing`] has the reason. It is never 0.

use crate::document::Document;
use crate::system_stat::SystemInterval;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The costs of one interval, by process and by cgroup.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SystemTop {
    /// The number of CPUs that are online.
    pub cpu_count: u32,
    /// The costs of the whole system in the interval.
    pub system: SystemInterval,
    /// The reasons for absent figures, by the key of the figure.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub missing: BTreeMap<String, String>,
    /// All processes at the end of the interval, and those that ended in it and were sampled.
    pub processes: Vec<TopProcess>,
    /// The memory cgroups of these processes. A cgroup does not include those below it.
    pub cgroups: Vec<TopCgroup>,
}

impl Document for SystemTop {
    const KIND: &'static str = "system_top";
}

/// A process and its costs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TopProcess {
    /// The process.
    pub pid: u32,
    /// The time of its start in clock ticks since the machine booted; 0 if it has ended. An id is used again,
    /// the id and this time are not.
    pub start_ticks: u64,
    /// Its name.
    pub name: String,
    /// True for a thread of the kernel.
    pub is_kernel: bool,
    /// True if it ended in the interval. Its samples are known, its other figures are not.
    pub has_ended: bool,
    /// Its memory cgroup; absent if it is in none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    /// Its costs.
    pub figures: TopFigures,
}

/// A cgroup and the costs of its processes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TopCgroup {
    /// Its path below the mount.
    pub path: String,
    /// The number of its processes.
    pub process_count: u64,
    /// The sums over its processes. Resident bytes that several of them share are counted once for each.
    pub figures: TopFigures,
}

/// The costs of a process or a cgroup in one interval.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TopFigures {
    /// CPU time, in nanoseconds: by the kernel's account, in steps of 10 ms. That of an ended process is its
    /// share of the samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_ns: Option<u64>,
    /// CPU time that virtual memory took: its share of the samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm_cpu_ns: Option<u64>,
    /// The lower bound of `vm_cpu_ns`, at a confidence of 95 %.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm_cpu_low_ns: Option<u64>,
    /// The upper bound of `vm_cpu_ns`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm_cpu_high_ns: Option<u64>,
    /// The number of stack samples that `vm_cpu_ns` rests on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sample_count: Option<u64>,
    /// The parts of `vm_cpu_ns` by the id of their cause, without those that are 0.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub causes: BTreeMap<String, u64>,
    /// Bytes on base pages that it touches in 2 ms, when they were sampled last: within a minute or so, the
    /// busiest processes in turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub touched_bytes: Option<u64>,
    /// An estimate of the CPU time that page walks took: the calibrated share for pages that are touched at
    /// this rate, of its CPU time outside the kernel's memory management.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub walk_ns: Option<u64>,
    /// Waits for memory of all its tasks, in nanoseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_ns: Option<u64>,
    /// Page faults without I/O.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minor_fault_count: Option<u64>,
    /// Page faults that read a page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub major_fault_count: Option<u64>,
    /// Resident bytes at the end of the interval.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resident_bytes: Option<u64>,
    /// Bytes of page tables at the end of the interval.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page_table_bytes: Option<u64>,
}

impl TopFigures {
    /// Returns the CPU time that virtual memory took, with that of page walks as far as they are known.
    pub fn vm_and_walk_ns(&self) -> Option<u64> {
        self.vm_cpu_ns.map(|ns| ns + self.walk_ns.unwrap_or(0))
    }

    /// Returns the cause with most time; none if no part is known.
    pub fn main_cause(&self) -> Option<(&str, u64)> {
        let most = self.causes.iter().max_by_key(|(_, ns)| **ns)?;
        Some((most.0.as_str(), *most.1))
    }

    /// Adds the counts and bytes of another process. A figure that only one of them has stays. The times by
    /// samples are not added, because the bounds of a sum are closer than the sums of bounds.
    pub fn add_counts(&mut self, other: &TopFigures) {
        let add = |sum: &mut Option<u64>, more: Option<u64>| {
            *sum = match (*sum, more) {
                (Some(sum), Some(more)) => Some(sum + more),
                (sum, more) => sum.or(more),
            }
        };
        add(&mut self.cpu_ns, other.cpu_ns);
        add(&mut self.touched_bytes, other.touched_bytes);
        add(&mut self.walk_ns, other.walk_ns);
        add(&mut self.minor_fault_count, other.minor_fault_count);
        add(&mut self.major_fault_count, other.major_fault_count);
        add(&mut self.resident_bytes, other.resident_bytes);
        add(&mut self.page_table_bytes, other.page_table_bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_keep_the_missing_apart_from_zero() {
        let mut sum = TopFigures::default();
        let bytes = |bytes| TopFigures { resident_bytes: bytes, ..TopFigures::default() };
        sum.add_counts(&bytes(None));
        assert_eq!(sum.resident_bytes, None);
        sum.add_counts(&bytes(Some(3)));
        sum.add_counts(&bytes(None));
        sum.add_counts(&bytes(Some(4)));
        assert_eq!((sum.resident_bytes, sum.cpu_ns), (Some(7), None));
    }

    #[test]
    fn the_main_cause_has_most_time() {
        let mut figures = TopFigures::default();
        assert_eq!(figures.main_cause(), None);
        figures.causes.extend([("reclaim".into(), 3), ("swap".into(), 9)]);
        assert_eq!(figures.main_cause(), Some(("swap", 9)));
    }
}
