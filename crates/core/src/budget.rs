//! The budget: where the time and the memory went.
//!
//! Two ledgers that are never mixed, one for each [`Account`]. CPU: user and kernel time of the job. Wall:
//! the elapsed time of the job's main line. Invariant, by construction and by a property test: the rows and
//! "unexplained" add up to the total exactly. Unexplained time may be negative, and is shown.

use crate::cause::{self, Account, Scope};
use crate::counter::{Provenance, Reading};
use serde::{Deserialize, Serialize};

/// A row of a ledger of time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TimeRow {
    /// The id of its [`cause::Cause`].
    pub id: String,
    /// The best estimate; `None` when missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ns: Option<u64>,
    /// The lower bound of the time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub low_ns: Option<u64>,
    /// The upper bound of the time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub high_ns: Option<u64>,
    /// The provenance of the best estimate, `ns`.
    pub provenance: Provenance,
    /// The method, or the reason why the row is missing.
    pub how: String,
}

impl TimeRow {
    fn new(id: &str, reading: Reading, how: impl Into<String>) -> TimeRow {
        let (provenance, ns) = (reading.provenance(), reading.value());
        let (low_ns, high_ns, how) = match reading {
            Reading::Derived { low, high, .. } => (Some(low), Some(high), how.into()),
            Reading::Missing(why) => (None, None, why),
            _ => (ns, ns, how.into()),
        };
        TimeRow { id: id.into(), ns, low_ns, high_ns, provenance, how }
    }

    /// Changes the estimate and both bounds, where they are known.
    fn change(&mut self, change: impl Fn(u64) -> u64) {
        for bound in [&mut self.ns, &mut self.low_ns, &mut self.high_ns] {
            *bound = bound.map(&change);
        }
    }
}

/// A row of the memory line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct MemoryRow {
    /// The kind of memory: `resident`, `huge`, `page_tables` and the like.
    pub id: String,
    /// The bytes; `None` when missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// The provenance of `bytes`.
    pub provenance: Provenance,
    /// The method, or the reason why the row is missing.
    pub how: String,
}

impl MemoryRow {
    /// Makes a row of a reading in bytes.
    pub fn new(id: &str, reading: Reading, how: impl Into<String>) -> MemoryRow {
        let (provenance, bytes) = (reading.provenance(), reading.value());
        let how = match reading {
            Reading::Missing(why) => why,
            _ => how.into(),
        };
        MemoryRow { id: id.into(), bytes, provenance, how }
    }
}

/// The share of CPU time that virtual memory takes: the CPU rows of the causes that are a tax, by the total.
///
/// Waiting is not part of it. If a row is missing, `value` is a lower bound and `high` is absent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct VmTax {
    /// The best estimate, 0 to 1; absent if no row of the tax is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<f64>,
    /// The sum of the rows' lower bounds. It holds even if all rows err in the same direction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub low: Option<f64>,
    /// The sum of the rows' upper bounds, at most 1; absent if a row is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub high: Option<f64>,
    /// The provenance of `value`: that of its rows if they agree.
    pub provenance: Provenance,
    /// The rows that are missing from the value, with their reasons, or the reason why there is no value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

impl VmTax {
    fn missing(why: String) -> VmTax {
        let (value, low, high) = (None, None, None);
        VmTax { value, low, high, provenance: Provenance::Missing, why: Some(why) }
    }

    fn of(cpu: &Ledger) -> VmTax {
        let mut absent: Vec<(&str, &str)> = Vec::new();
        let mut known: Vec<&TimeRow> = Vec::new();
        for cause in Account::Cpu.causes().filter(|cause| cause.is_tax) {
            match cpu.rows.iter().find(|row| row.id == cause.id) {
                Some(row) if row.ns.is_some() => known.push(row),
                Some(row) => absent.push((cause.id, &row.how)),
                None if cause.scope == Scope::System => {}
                None => absent.push((cause.id, "not looked at")),
            }
        }
        if cpu.total_ns == 0 {
            return VmTax::missing("the job took no CPU time".into());
        }
        let why = (!absent.is_empty()).then(|| reasons(&absent));
        let Some(first) = known.first() else { return VmTax::missing(why.unwrap_or_default()) };
        let agree = known.iter().all(|row| row.provenance == first.provenance);
        let share = |bound: fn(&TimeRow) -> Option<u64>| {
            let ns: u128 = known.iter().filter_map(|row| bound(row)).map(u128::from).sum();
            let share = (ns as f64 / cpu.total_ns as f64).min(1.0);
            (share * SHARE_STEPS).round() / SHARE_STEPS
        };
        VmTax {
            value: Some(share(|row| row.ns)),
            low: Some(share(|row| row.low_ns.or(row.ns))),
            high: absent.is_empty().then(|| share(|row| row.high_ns.or(row.ns))),
            provenance: if agree { first.provenance } else { Provenance::Derived },
            why,
        }
    }

    /// Returns true if the tax may be larger than its value, because rows are missing.
    pub fn is_lower_bound(&self) -> bool {
        self.value.is_some() && self.high.is_none()
    }
}

/// Shares are rounded to hundredths of a percent.
const SHARE_STEPS: f64 = 10_000.0;

/// Lists missing rows, those of one reason together: "reclaim, swap (no samples); translation (no PMU)".
fn reasons(absent: &[(&str, &str)]) -> String {
    let mut groups: Vec<(&str, Vec<&str>)> = Vec::new();
    for (id, why) in absent {
        match groups.iter_mut().find(|(known, _)| known == why) {
            Some((_, ids)) => ids.push(id),
            None => groups.push((why, vec![id])),
        }
    }
    let group = |(why, ids): &(&str, Vec<&str>)| format!("{} ({why})", ids.join(", "));
    groups.iter().map(group).collect::<Vec<_>>().join("; ")
}

/// A ledger under construction: rows for a known total.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ledger {
    account: Account,
    rows: Vec<TimeRow>,
    total_ns: u64,
}

impl Ledger {
    /// Opens an empty ledger of an account for this total.
    pub fn new(account: Account, total_ns: u64) -> Self {
        Ledger { account, rows: Vec::new(), total_ns }
    }

    /// Adds a row. The id is that of one of the account's causes.
    pub fn row(&mut self, id: &str, reading: Reading, how: impl Into<String>) {
        debug_assert!(self.account.causes().any(|cause| cause.id == id), "{id}");
        self.rows.push(TimeRow::new(id, reading, how));
    }

    /// Replaces a row that was missing.
    pub fn replace(&mut self, id: &str, reading: Reading, how: impl Into<String>) {
        if let Some(row) = self.rows.iter_mut().find(|row| row.id == id) {
            *row = TimeRow::new(id, reading, how);
        }
    }

    /// Adds CPU time that a pager took on behalf of the job, in threads that do not belong to the job.
    pub fn add_remote_paging(&mut self, ns: u64, how: &str) {
        self.total_ns += ns;
        let Some(row) = self.rows.iter_mut().find(|row| row.id == "swap") else { return };
        if row.ns.is_none() {
            *row = TimeRow::new("swap", Reading::Measured(ns), how);
        } else {
            row.change(|before| before + ns);
            row.how = format!("{how}; {}", row.how);
        }
    }

    /// Moves the time of page-ins by a pager's own clock from the rows of page faults to a row of its own.
    /// Faults of several clients at a time overlap: then that time is an upper bound.
    pub fn split_remote_page_in(&mut self, ns: u64, overlaps: bool, how: &str) {
        let mut left = ns;
        for id in ["page_in", "sleep"] {
            let row = self.rows.iter_mut().find(|row| row.id == id && row.ns.is_some());
            let Some(row) = row else { continue };
            let taken = left.min(row.ns.unwrap_or(0));
            left -= taken;
            row.change(|ns| ns.saturating_sub(taken));
        }
        let taken = ns - left;
        let reading = match overlaps || left > 0 {
            true => Reading::Derived { value: taken, low: 0, high: taken },
            false => Reading::Measured(taken),
        };
        let after = self.rows.iter().position(|row| row.id == "page_in").map_or(0, |at| at + 1);
        self.rows.insert(after, TimeRow::new("remote_page_in", reading, how));
    }

    fn unexplained_ns(&self) -> i64 {
        let explained: i128 = self.rows.iter().filter_map(|row| row.ns).map(i128::from).sum();
        (i128::from(self.total_ns) - explained) as i64
    }
}

/// Both ledgers and the memory line, as in a report.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Budget {
    /// Absent in reports that were written without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    vm_tax: Option<VmTax>,
    cpu: Vec<TimeRow>,
    cpu_total_ns: u64,
    cpu_unexplained_ns: i64,
    wall: Vec<TimeRow>,
    wall_total_ns: u64,
    wall_unexplained_ns: i64,
    memory: Vec<MemoryRow>,
}

impl Budget {
    /// Closes both ledgers. Nothing changes a budget afterwards.
    ///
    /// # Panics
    /// If the ledgers are not those of CPU time and of wall time, in this order.
    pub fn new(cpu: Ledger, wall: Ledger, memory: Vec<MemoryRow>) -> Self {
        assert_eq!([cpu.account, wall.account], Account::ALL);
        Budget {
            vm_tax: Some(VmTax::of(&cpu)),
            cpu_total_ns: cpu.total_ns,
            cpu_unexplained_ns: cpu.unexplained_ns(),
            cpu: cpu.rows,
            wall_total_ns: wall.total_ns,
            wall_unexplained_ns: wall.unexplained_ns(),
            wall: wall.rows,
            memory,
        }
    }

    /// Returns the share of CPU time that virtual memory takes; `None` in reports written without it.
    pub fn vm_tax(&self) -> Option<&VmTax> {
        self.vm_tax.as_ref()
    }

    /// Returns the share of elapsed time that the job waited for memory; `None` if no such row is known.
    pub fn waiting(&self) -> Option<f64> {
        let rows = self.wall.iter().filter(|row| cause::find(&row.id).is_some_and(|c| c.is_tax));
        let known: Vec<u64> = rows.filter_map(|row| row.ns).collect();
        let has_share = !known.is_empty() && self.wall_total_ns > 0;
        has_share.then(|| known.iter().sum::<u64>() as f64 / self.wall_total_ns as f64)
    }

    /// Returns the rows of an account.
    pub fn rows(&self, account: Account) -> &[TimeRow] {
        match account {
            Account::Cpu => &self.cpu,
            Account::Wall => &self.wall,
        }
    }

    /// Returns the total of an account: user and kernel time, or elapsed time.
    pub fn total_ns(&self, account: Account) -> u64 {
        match account {
            Account::Cpu => self.cpu_total_ns,
            Account::Wall => self.wall_total_ns,
        }
    }

    /// Returns the total less all rows; it may be negative.
    pub fn unexplained_ns(&self, account: Account) -> i64 {
        match account {
            Account::Cpu => self.cpu_unexplained_ns,
            Account::Wall => self.wall_unexplained_ns,
        }
    }

    /// Returns the row of a cause; no id is in both accounts.
    pub fn row(&self, id: &str) -> Option<&TimeRow> {
        let account = cause::find(id)?.account;
        self.rows(account).iter().find(|row| row.id == id)
    }

    /// Returns the rows of the memory line.
    pub fn memory(&self) -> &[MemoryRow] {
        &self.memory
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

    /// Returns a ledger with a row for each reading, as far as the account has causes.
    fn ledger(account: Account, total_ns: u64, readings: &[Reading]) -> Ledger {
        let mut ledger = Ledger::new(account, total_ns);
        for (reading, cause) in readings.iter().zip(account.causes()) {
            ledger.row(cause.id, reading.clone(), "test");
        }
        ledger
    }

    #[test]
    fn the_tax_is_the_rows_of_memory_by_cpu_time() {
        let mut cpu = Ledger::new(Account::Cpu, 1_000);
        cpu.row("compute", Reading::Measured(600), "getrusage");
        cpu.row("translation", Reading::Derived { value: 100, low: 50, high: 200 }, "trials");
        for id in ["minor_fault", "zero_copy", "reclaim", "compaction", "swap"] {
            cpu.row(id, Reading::Measured(if id == "minor_fault" { 150 } else { 0 }), "stacks");
        }
        cpu.row("other_kernel", Reading::Measured(150), "stacks");
        let mut wall = Ledger::new(Account::Wall, 2_000);
        wall.row("page_in", Reading::Measured(500), "switches");
        wall.row("sleep", Reading::Measured(500), "switches");
        let budget = Budget::new(cpu, wall, Vec::new());
        let tax = budget.vm_tax().unwrap();
        assert_eq!((tax.value, tax.low, tax.high), (Some(0.25), Some(0.2), Some(0.35)));
        assert_eq!((tax.provenance, tax.why.clone()), (Provenance::Derived, None));
        assert_eq!(budget.waiting(), Some(0.25));
    }

    #[test]
    fn a_tax_without_all_rows_is_a_lower_bound_that_names_them() {
        let mut cpu = Ledger::new(Account::Cpu, 1_000);
        cpu.row("translation", Reading::Missing("no PMU".into()), "");
        cpu.row("minor_fault", Reading::Measured(150), "stacks");
        cpu.row("zero_copy", Reading::Measured(0), "stacks");
        cpu.row("swap", Reading::Missing("no PMU".into()), "");
        let tax = VmTax::of(&cpu);
        assert!(tax.is_lower_bound() && tax.value == Some(0.15), "{tax:?}");
        let why = "translation, swap (no PMU); reclaim, compaction (not looked at)";
        assert_eq!(tax.why.as_deref(), Some(why));
        assert_eq!(tax.provenance, Provenance::Measured);
        let none = VmTax::of(&Ledger::new(Account::Cpu, 1_000));
        assert_eq!((none.value, none.provenance), (None, Provenance::Missing));
        let idle = VmTax::of(&Ledger::new(Account::Cpu, 0));
        assert_eq!(idle.why.as_deref(), Some("the job took no CPU time"));
    }

    proptest! {
        #[test]
        fn parts_and_unexplained_are_the_total(
            totals in (0u64..1 << 55, 0u64..1 << 55),
            cpu in proptest::collection::vec(any_reading(), 0..9),
            wall in proptest::collection::vec(any_reading(), 0..7),
            (pager_ns, page_in_ns) in (0u64..1 << 50, 0u64..1 << 50),
            overlaps in any::<bool>(),
        ) {
            let mut cpu = ledger(Account::Cpu, totals.0, &cpu);
            let mut wall = ledger(Account::Wall, totals.1, &wall);
            cpu.add_remote_paging(pager_ns, "test");
            wall.split_remote_page_in(page_in_ns, overlaps, "test");
            let budget = Budget::new(cpu, wall, Vec::new());
            for (account, total) in [(Account::Cpu, totals.0 + pager_ns), (Account::Wall, totals.1)] {
                let parts = budget.rows(account).iter().filter_map(|row| row.ns);
                let parts: i64 = parts.map(|ns| ns as i64).sum();
                prop_assert_eq!(budget.total_ns(account), total);
                prop_assert_eq!(parts + budget.unexplained_ns(account), total as i64);
            }
            let json = serde_json::to_string(&budget).unwrap();
            prop_assert_eq!(serde_json::from_str::<Budget>(&json).unwrap(), budget);
        }

        #[test]
        fn what_is_split_off_a_row_is_not_counted_twice(
            (total, page_in, sleep, ns) in (0u64..1 << 50, 0u64..1 << 40, 0u64..1 << 40, 0u64..1 << 42),
            overlaps in any::<bool>(),
        ) {
            let mut wall = Ledger::new(Account::Wall, total);
            wall.row("page_in", Reading::Measured(page_in), "stacks");
            wall.row("sleep", Reading::Measured(sleep), "stacks");
            wall.split_remote_page_in(ns, overlaps, "test");
            let mut cpu = Ledger::new(Account::Cpu, 0);
            cpu.add_remote_paging(ns, "test");
            let budget = Budget::new(cpu, wall, Vec::new());
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
