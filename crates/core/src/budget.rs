//! The budget: where the time and the memory went.
//!
//! Two ledgers that are never mixed. CPU: what the processors did, user + kernel time in all. Wall:
//! what the main line of the job waited for. Invariant, held by construction and by a property test:
//! the rows and "unexplained" add up to the total exactly; unexplained may be negative, and is shown.

use crate::counter::{Provenance, Reading};
use serde::{Deserialize, Serialize};

/// A row of a ledger of time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimeRow {
    /// One of the ids in [`CPU_ROWS`] or [`WALL_ROWS`].
    pub id: String,
    /// Best estimate; absent when missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ns: Option<u64>,
    /// Lower bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub low_ns: Option<u64>,
    /// Upper bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub high_ns: Option<u64>,
    /// Of `ns`.
    pub provenance: Provenance,
    /// By which method, or why it is missing.
    pub how: String,
}

/// A row of the memory line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryRow {
    /// `resident`, `huge`, `page_tables`, …
    pub id: String,
    /// Absent when missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Of `bytes`.
    pub provenance: Provenance,
    /// By which method, or why it is missing.
    pub how: String,
}

/// Rows of the CPU ledger and what they mean, in the order of printing.
pub const CPU_ROWS: &[(&str, &str)] = &[
    ("compute", "user time that is not translation"),
    ("translation", "page walks and TLB refills"),
    ("minor_fault", "faults served from memory, without zeroing and copying"),
    ("zero_copy", "zeroing new pages and copying shared ones"),
    ("reclaim", "scanning and freeing pages, on the job's own CPU time"),
    ("compaction", "moving pages to make huge ones"),
    ("swap", "compressing, writing and reading swapped or remote pages"),
    ("other_kernel", "the rest of the kernel's work for the job"),
];

/// Rows of the wall ledger and what they mean, in the order of printing.
pub const WALL_ROWS: &[(&str, &str)] = &[
    ("running", "on a CPU"),
    ("run_queue", "runnable, but another had the CPU"),
    ("page_in", "blocked on pages from files or servers"),
    ("swap_in", "blocked on pages from swap"),
    ("throttle", "blocked in reclaim"),
    ("sleep", "asleep by its own wish"),
];

/// The wall row of network memory, which only jobs that use it have; it is split off from `page_in`.
pub const REMOTE_PAGE_IN: (&str, &str) = ("remote_page_in", "blocked on pages from a page store");

/// A ledger under construction: rows for a known total.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ledger {
    rows: Vec<TimeRow>,
    /// What the rows should add up to.
    pub total_ns: u64,
}

impl Ledger {
    /// An empty ledger for this total.
    pub fn new(total_ns: u64) -> Self {
        Ledger { rows: Vec::new(), total_ns }
    }

    /// Adds a row. `id` should be in [`CPU_ROWS`] or [`WALL_ROWS`].
    pub fn row(&mut self, id: &str, reading: Reading, how: impl Into<String>) {
        let known = CPU_ROWS.iter().chain(WALL_ROWS).chain([&REMOTE_PAGE_IN]);
        debug_assert!(known.into_iter().any(|(known, _)| *known == id), "{id}");
        let provenance = reading.provenance();
        let ns = reading.value();
        let (low_ns, high_ns, how) = match reading {
            Reading::Derived { low, high, .. } => (Some(low), Some(high), how.into()),
            Reading::Missing(why) => (None, None, why),
            _ => (ns, ns, how.into()),
        };
        self.rows.push(TimeRow { id: id.into(), ns, low_ns, high_ns, provenance, how });
    }

    /// What is left of the total when all known rows are taken away; may be negative.
    pub fn unexplained_ns(&self) -> i64 {
        let explained: i128 = self.rows.iter().filter_map(|row| row.ns).map(i128::from).sum();
        (i128::from(self.total_ns) - explained) as i64
    }
}

/// Both ledgers and the memory line, as in a report.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Budget {
    /// Rows of CPU time.
    pub cpu: Vec<TimeRow>,
    /// User + kernel time of the job.
    pub cpu_total_ns: u64,
    /// Total less rows.
    pub cpu_unexplained_ns: i64,
    /// Rows of elapsed time.
    pub wall: Vec<TimeRow>,
    /// Elapsed time.
    pub wall_total_ns: u64,
    /// Total less rows.
    pub wall_unexplained_ns: i64,
    /// Where the memory went.
    pub memory: Vec<MemoryRow>,
}

impl Budget {
    /// Closes both ledgers.
    pub fn new(cpu: Ledger, wall: Ledger) -> Self {
        Budget {
            cpu_total_ns: cpu.total_ns,
            cpu_unexplained_ns: cpu.unexplained_ns(),
            cpu: cpu.rows,
            wall_total_ns: wall.total_ns,
            wall_unexplained_ns: wall.unexplained_ns(),
            wall: wall.rows,
            memory: Vec::new(),
        }
    }

    /// Adds CPU time that a pager took on behalf of the job, in threads that are none of its own.
    pub fn add_remote_paging(&mut self, ns: u64, how: &str) {
        self.cpu_total_ns += ns;
        let Some(row) = self.cpu.iter_mut().find(|row| row.id == "swap") else {
            self.cpu_unexplained_ns += ns as i64;
            return;
        };
        if row.ns.is_none() {
            let mut ledger = Ledger::default();
            ledger.row("swap", Reading::Measured(ns), how);
            return ledger.rows.into_iter().for_each(|own| *row = own);
        }
        for bound in [&mut row.ns, &mut row.low_ns, &mut row.high_ns] {
            *bound = bound.map(|before| before + ns);
        }
        row.how = format!("{how}; {}", row.how);
    }

    /// Splits what a pager's own clock says of page-ins off the wall row of page faults. Faults of
    /// several clients at a time overlap: then it is a bound.
    pub fn split_remote_page_in(&mut self, ns: u64, overlaps: bool, how: &str) {
        let mut left = ns;
        for id in ["page_in", "sleep"] {
            let row = self.wall.iter_mut().find(|row| row.id == id && row.ns.is_some());
            let Some(row) = row else { continue };
            let taken = left.min(row.ns.unwrap_or(0));
            left -= taken;
            for bound in [&mut row.ns, &mut row.low_ns, &mut row.high_ns] {
                *bound = bound.map(|ns| ns.saturating_sub(taken));
            }
        }
        let taken = ns - left;
        let reading = match overlaps || left > 0 {
            true => Reading::Derived { value: taken, low: 0, high: taken },
            false => Reading::Measured(taken),
        };
        let mut ledger = Ledger::default();
        ledger.row(REMOTE_PAGE_IN.0, reading, how);
        let after = self.wall.iter().position(|row| row.id == "page_in").map_or(0, |at| at + 1);
        self.wall.splice(after..after, ledger.rows);
    }

    /// Adds to the memory line.
    pub fn memory(&mut self, id: &str, reading: Reading, how: impl Into<String>) {
        let (provenance, bytes) = (reading.provenance(), reading.value());
        let how = match reading {
            Reading::Missing(why) => why,
            _ => how.into(),
        };
        self.memory.push(MemoryRow { id: id.into(), bytes, provenance, how });
    }

    /// A CPU row by id.
    pub fn cpu_row(&self, id: &str) -> Option<&TimeRow> {
        self.cpu.iter().find(|row| row.id == id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_reading() -> impl Strategy<Value = Reading> {
        let time = 0u64..1 << 50;
        prop_oneof![
            time.clone().prop_map(Reading::Measured),
            time.clone().prop_map(Reading::Modeled),
            (time.clone(), time).prop_map(|(value, high)| Reading::Derived { value, low: 0, high }),
            Just(Reading::Missing("no PMU".into())),
        ]
    }

    proptest! {
        #[test]
        fn parts_and_unexplained_are_the_total(
            total in 0u64..1 << 55,
            readings in proptest::collection::vec(any_reading(), 0..8),
        ) {
            let mut ledger = Ledger::new(total);
            for (reading, (id, _)) in readings.iter().zip(CPU_ROWS) {
                ledger.row(id, reading.clone(), "test");
            }
            let budget = Budget::new(ledger, Ledger::new(0));
            let parts: i64 = budget.cpu.iter().filter_map(|row| row.ns).map(|ns| ns as i64).sum();
            prop_assert_eq!(parts + budget.cpu_unexplained_ns, total as i64);
        }

        #[test]
        fn what_is_split_off_a_row_is_not_counted_twice(
            (total, page_in, sleep, ns) in (0u64..1 << 50, 0u64..1 << 40, 0u64..1 << 40, 0u64..1 << 42),
            overlaps in any::<bool>(),
        ) {
            let mut ledger = Ledger::new(total);
            ledger.row("page_in", Reading::Measured(page_in), "stacks");
            ledger.row("sleep", Reading::Measured(sleep), "stacks");
            let mut budget = Budget::new(Ledger::new(0), ledger);
            budget.split_remote_page_in(ns, overlaps, "test");
            budget.add_remote_paging(ns, "test");
            prop_assert_eq!((budget.cpu_total_ns, budget.cpu_unexplained_ns), (ns, ns as i64));
            let parts: u64 = budget.wall.iter().filter_map(|row| row.ns).sum();
            prop_assert_eq!(parts as i64 + budget.wall_unexplained_ns, total as i64);
            let row = &budget.wall[1];
            prop_assert_eq!((row.id.as_str(), row.ns), ("remote_page_in", Some(ns.min(page_in + sleep))));
            let is_exact = !overlaps && ns <= page_in + sleep;
            prop_assert_eq!(row.provenance == Provenance::Measured, is_exact);
        }
    }
}
