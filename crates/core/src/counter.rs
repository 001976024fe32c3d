//! Readings, and the one table of counters: id, unit, meaning, source.
//!
//! Invariant: each number has its provenance. A reading that failed is [`Reading::Missing`] with a
//! reason, never 0.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A number and its provenance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reading {
    /// A value that the machine counted.
    Measured(u64),
    /// A value that a model computed.
    Modeled(u64),
    /// A value computed from other readings, with bounds.
    Derived {
        /// The best estimate, in the counter's unit.
        value: u64,
        /// The lower bound, in the counter's unit.
        low: u64,
        /// The upper bound, in the counter's unit.
        high: u64,
    },
    /// No value, and the reason.
    Missing(String),
}

impl Reading {
    /// Returns the value, or the best estimate of a derived one.
    pub fn value(&self) -> Option<u64> {
        match self {
            Reading::Measured(v) | Reading::Modeled(v) | Reading::Derived { value: v, .. } => {
                Some(*v)
            }
            Reading::Missing(_) => None,
        }
    }

    /// Returns the provenance of the value.
    pub fn provenance(&self) -> Provenance {
        match self {
            Reading::Measured(_) => Provenance::Measured,
            Reading::Modeled(_) => Provenance::Modeled,
            Reading::Derived { .. } => Provenance::Derived,
            Reading::Missing(_) => Provenance::Missing,
        }
    }
}

/// The origin of a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Provenance {
    /// Counted or timed on the real machine.
    Measured,
    /// Computed by a model with a virtual clock.
    Modeled,
    /// Computed from other readings.
    Derived,
    /// Not available.
    Missing,
}

impl std::fmt::Display for Provenance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Provenance::Measured => "measured",
            Provenance::Modeled => "modeled",
            Provenance::Derived => "derived",
            Provenance::Missing => "missing",
        })
    }
}

/// A reading with its unit, as reports write it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct UnitReading {
    /// Measured, modelled, derived or missing.
    pub provenance: Provenance,
    /// The unit of the counter's values.
    pub unit: Unit,
    /// The value, or the best estimate; absent when missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<u64>,
    /// The lower bound; only when derived.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub low: Option<u64>,
    /// The upper bound; only when derived.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub high: Option<u64>,
    /// The reason; only when missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

impl UnitReading {
    /// Combines a reading with its counter's unit.
    pub fn new(unit: Unit, reading: Reading) -> Self {
        let provenance = reading.provenance();
        let value = reading.value();
        let (low, high, why) = match reading {
            Reading::Derived { low, high, .. } => (Some(low), Some(high), None),
            Reading::Missing(why) => (None, None, Some(why)),
            _ => (None, None, None),
        };
        UnitReading { provenance, unit, value, low, high, why }
    }
}

/// The unit of a counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// Nanoseconds.
    Ns,
    /// Bytes.
    Bytes,
    /// A number of events.
    Count,
}

/// A row of the counter table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counter {
    /// The name in JSON, on the command line and in thresholds.
    pub id: &'static str,
    /// The unit, which the id ends in.
    pub unit: Unit,
    /// An explanation of one line.
    pub meaning: &'static str,
    /// The source on the host; simulated machines count the same event in their model.
    pub source: &'static str,
}

/// Counter values by id.
pub type Counters = BTreeMap<String, UnitReading>;

/// All counters, sorted by id.
pub const COUNTERS: &[Counter] = &[
    c("access_count", Unit::Count, "memory accesses of the job", "the plan's own count"),
    c("block_read_bytes", Unit::Bytes, "bytes read from block devices", "/proc/PID/io"),
    c("compaction_stall_count", Unit::Count, "direct compactions, whole system", "/proc/vmstat"),
    c("context_load_count", Unit::Count, "hardware contexts loaded or stolen", "model"),
    c("context_switch_count", Unit::Count, "voluntary and involuntary switches", "getrusage"),
    c("cow_fault_count", Unit::Count, "minor faults that copied a page", "model; stacks"),
    c("disk_read_bytes_per_s", Unit::Bytes, "bytes read from disk a second", "model"),
    c(
        "huge_page_bytes_max",
        Unit::Bytes,
        "most bytes on huge pages at once",
        "smaps, PAGEMAP_SCAN",
    ),
    c("kernel_daemon_ns", Unit::Ns, "CPU time of kswapd and kcompactd, whole system", "schedstat"),
    c("kernel_ns", Unit::Ns, "CPU time in the kernel", "getrusage"),
    c("locked_bytes_max", Unit::Bytes, "most bytes locked at once", "/proc/PID/status"),
    c("major_fault_count", Unit::Count, "faults that waited for storage", "getrusage"),
    c("minor_fault_count", Unit::Count, "faults served from memory", "getrusage"),
    c("mismatch_count", Unit::Count, "words that did not hold what was written", "the job itself"),
    c(
        "page_in_count",
        Unit::Count,
        "base pages read from storage or servers",
        "/proc/vmstat; pager; model",
    ),
    c(
        "page_out_count",
        Unit::Count,
        "base pages written to storage or servers",
        "/proc/vmstat; pager; model",
    ),
    c("page_table_bytes_max", Unit::Bytes, "most bytes of page tables at once", "VmPTE"),
    c("pmeg_allocation_count", Unit::Count, "pmegs given to a segment (hatcnt word 4)", "model"),
    c("pmeg_reload_count", Unit::Count, "whole pmegs loaded from the software cache", "model"),
    c("pmeg_steal_count", Unit::Count, "pmegs taken from a segment (hatcnt word 5)", "model"),
    c(
        "reclaim_scan_count",
        Unit::Count,
        "base pages scanned by reclaim, whole system",
        "/proc/vmstat",
    ),
    c("reclaim_steal_count", Unit::Count, "base pages reclaimed, whole system", "/proc/vmstat"),
    c("resident_bytes_max", Unit::Bytes, "most resident bytes at once", "VmHWM, getrusage"),
    c("run_queue_ns", Unit::Ns, "time spent runnable but not running", "schedstat"),
    c(
        "swap_in_count",
        Unit::Count,
        "base pages swapped in; processes on SunOS",
        "/proc/vmstat; model",
    ),
    c(
        "swap_out_count",
        Unit::Count,
        "base pages swapped out; processes on SunOS",
        "/proc/vmstat; model",
    ),
    c("tlb_miss_count", Unit::Count, "accesses that no TLB level could translate", "model; PMU"),
    c("translation_fault_count", Unit::Count, "faults for a missing hardware translation", "model"),
    c("translation_ns", Unit::Ns, "time spent translating addresses", "model; trials; PMU"),
    c("user_ns", Unit::Ns, "CPU time in user mode", "getrusage"),
    c("wall_ns", Unit::Ns, "elapsed time", "CLOCK_MONOTONIC; virtual clock"),
];

const fn c(id: &'static str, unit: Unit, meaning: &'static str, source: &'static str) -> Counter {
    Counter { id, unit, meaning, source }
}

/// Returns the counter with this id.
pub fn counter(id: &str) -> Option<&'static Counter> {
    COUNTERS.iter().find(|c| c.id == id)
}

/// Adds a reading with its counter's unit.
///
/// # Panics
/// If `id` is not in [`COUNTERS`]: ids come from programmers, not from users.
pub fn put(counters: &mut Counters, id: &str, reading: Reading) {
    let unit = counter(id).unwrap_or_else(|| panic!("counter `{id}` is not in the table")).unit;
    counters.insert(id.to_string(), UnitReading::new(unit, reading));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sorted_and_units_come_last() {
        assert!(COUNTERS.windows(2).all(|w| w[0].id < w[1].id));
        for c in COUNTERS {
            match c.unit {
                Unit::Ns => assert!(c.id.ends_with("_ns"), "{}", c.id),
                Unit::Bytes => assert!(c.id.contains("_bytes"), "{}", c.id),
                Unit::Count => assert!(c.id.ends_with("_count"), "{}", c.id),
            }
        }
    }

    #[test]
    fn each_counter_is_documented() {
        let text = include_str!("../../../docs/report.md");
        for c in COUNTERS {
            assert!(
                text.contains(&format!("`{}`", c.id)),
                "docs/report.md says nothing of {}",
                c.id
            );
        }
    }

    #[test]
    fn missing_is_never_zero() {
        let r = UnitReading::new(Unit::Ns, Reading::Missing("no PMU".into()));
        let json = serde_json::to_string(&r).unwrap();
        assert_eq!(json, r#"{"provenance":"missing","unit":"ns","why":"no PMU"}"#);
    }
}
