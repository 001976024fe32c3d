//! What virtual memory costs a whole system, a cgroup or a process, interval by interval.

use crate::budget::Budget;
use crate::cause::Account;
use crate::counter::{Counters, Reading, Unit, UnitReading};
use crate::document::Document;
use serde::{Deserialize, Serialize};

/// The costs of intervals that follow each other.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SystemStat {
    /// The tasks that were watched: `system`, `cgroup PATH` or `processes PID,…`.
    pub scope: String,
    /// The number of CPUs that are online.
    pub cpu_count: u32,
    /// The intervals, in their order.
    pub intervals: Vec<SystemInterval>,
    /// All of them together, with bounds of the whole time; absent if the watching did not end by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total: Option<SystemInterval>,
}

impl Document for SystemStat {
    const KIND: &'static str = "system_stat";
}

/// The costs of one interval.
///
/// The CPU ledger divides the CPU time of all tasks in scope. The wall ledger adds up the waits of all tasks
/// for memory, so it may exceed the elapsed time.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SystemInterval {
    /// The end of the interval, in milliseconds of Unix time.
    pub end_unix_ms: u64,
    /// The length of the interval, in nanoseconds.
    pub elapsed_ns: u64,
    /// The time by cause.
    pub budget: Budget,
    /// Events and times of the interval that no ledger has; see [`READINGS`].
    pub readings: Counters,
    /// The processes that caused the time of the kernel's daemons.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub culprits: Vec<Culprit>,
    /// Free blocks of 2^index base pages at the end; empty if they cannot be read.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub free_blocks: Vec<u64>,
    /// The seconds until no free block holds a huge page, at the rate of the interval. Faults of huge pages
    /// begin to compact then. Absent if the blocks do not become fewer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compaction_in_s: Option<f64>,
}

impl SystemInterval {
    /// Adds a reading of [`READINGS`].
    ///
    /// # Panics
    /// If no such reading is in the table.
    pub fn put(&mut self, id: &str, reading: Reading) {
        let (_, unit, _) = READINGS.iter().find(|(known, ..)| *known == id).expect("a known id");
        self.readings.insert(id.into(), UnitReading::new(*unit, reading));
    }

    /// Returns the CPU time of all tasks in scope; none if it cannot be read. A recording without that
    /// reading has it as the total of its ledger.
    pub fn cpu_ns(&self) -> Option<u64> {
        match self.readings.get("cpu_ns") {
            Some(reading) => reading.value,
            None => Some(self.budget.total_ns(Account::Cpu)),
        }
    }

    /// Returns a reading's value; none if it is missing.
    pub fn value(&self, id: &str) -> Option<u64> {
        self.readings.get(id)?.value
    }
}

/// A huge page has 2^HUGE_ORDER base pages, on x86-64 with its base pages of 4 KiB.
const HUGE_ORDER: usize = 9;

/// Returns how many huge pages the free blocks of 2^index base pages hold.
pub fn huge_blocks(free_blocks: &[u64]) -> u64 {
    let large = free_blocks.iter().enumerate().skip(HUGE_ORDER);
    large.map(|(order, count)| count << (order - HUGE_ORDER)).sum()
}

/// A process that caused a part of a daemon's time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Culprit {
    /// The process.
    pub pid: u32,
    /// Its name.
    pub name: String,
    /// Its memory cgroup; absent if it is in none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    /// Its share of the allocations that were sampled, 0 to 1.
    pub share: f64,
    /// The lower bound of `share`, at a confidence of 95 %.
    pub low: f64,
    /// The upper bound of `share`.
    pub high: f64,
}

/// The readings of an interval: id, unit and meaning.
pub const READINGS: &[(&str, Unit, &str)] = &[
    (
        "vm_cpu_ns",
        Unit::Ns,
        "CPU time that virtual memory takes: the rows that are a tax, bounds of their sum",
    ),
    ("minor_fault_count", Unit::Count, "page faults without I/O"),
    ("major_fault_count", Unit::Count, "page faults that read a page"),
    ("huge_fault_count", Unit::Count, "faults that got a huge page"),
    ("huge_fallback_count", Unit::Count, "faults that were to get a huge page, and got base pages"),
    (
        "huge_fallback_ns",
        Unit::Ns,
        "what these cost more, with the faults that follow, by calibration",
    ),
    ("collapse_count", Unit::Count, "huge pages that khugepaged made"),
    ("swap_in_count", Unit::Count, "pages read from swap"),
    ("swap_out_count", Unit::Count, "pages written to swap"),
    ("direct_scan_count", Unit::Count, "pages that tasks scanned to free some"),
    ("background_scan_count", Unit::Count, "pages that kswapd scanned"),
    ("direct_steal_count", Unit::Count, "pages that tasks freed"),
    ("background_steal_count", Unit::Count, "pages that kswapd freed"),
    ("compaction_stall_count", Unit::Count, "allocations that compacted memory"),
    ("memory_some_ns", Unit::Ns, "PSI: time in which some task stalled on memory"),
    ("memory_full_ns", Unit::Ns, "PSI: time in which all tasks stalled on memory"),
    ("sample_count", Unit::Count, "stack samples that the CPU ledger rests on"),
    ("cpu_ns", Unit::Ns, "CPU time of all tasks in scope"),
    ("own_cpu_ns", Unit::Ns, "CPU time that watching took"),
];
