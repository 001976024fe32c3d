//! What virtual memory has cost a machine since it booted: counts × the cost of each, as Lawrence's report of
//! 1990 does in its section 3.

use crate::counter::{Reading, Unit, UnitReading};
use crate::document::Document;
use serde::{Deserialize, Serialize};

/// The costs of a machine since its start.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct HatStat {
    /// The machine: `host`, or a simulated machine and the job that ran on it.
    pub machine: String,
    /// The time since its start, in nanoseconds.
    pub uptime_ns: u64,
    /// The number of its CPUs.
    pub cpu_count: u32,
    /// The costs, by cause.
    pub costs: Vec<HatCost>,
    /// The processes with the most faults, and those with the largest page tables.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub processes: Vec<HatProcess>,
    /// The shared mappings with the largest page tables.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shared: Vec<SharedMapping>,
}

impl Document for HatStat {
    const KIND: &'static str = "hatstat";
}

/// A cost: a count, the time of each, and their product.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct HatCost {
    /// The events, in a few words.
    pub what: String,
    /// The account: `cpu` for CPU time, or `wall` for waits.
    pub account: String,
    /// The number of events.
    pub count: UnitReading,
    /// The time of one event.
    pub each_ns: UnitReading,
    /// The time of all.
    pub total_ns: UnitReading,
    /// The method.
    pub how: String,
}

impl HatCost {
    /// Multiplies a count by the time of each.
    pub fn product(what: &str, account: &str, count: Reading, each_ns: Reading, how: &str) -> Self {
        let total = match (&count, &each_ns) {
            (Reading::Missing(why), _) | (_, Reading::Missing(why)) => {
                Reading::Missing(why.clone())
            }
            (_, Reading::Derived { value, low, high }) => {
                let times = |ns: &u64| count.value().unwrap_or(0).saturating_mul(*ns);
                Reading::Derived { value: times(value), low: times(low), high: times(high) }
            }
            (Reading::Modeled(count), each) => {
                Reading::Modeled(count.saturating_mul(each.value().unwrap_or(0)))
            }
            (_, each) => {
                let value = count.value().unwrap_or(0).saturating_mul(each.value().unwrap_or(0));
                Reading::Derived { value, low: value, high: value }
            }
        };
        HatCost::new(what, account, count, each_ns, total, how)
    }

    /// Makes a cost whose total has a source of its own.
    pub fn new(
        what: &str,
        account: &str,
        count: Reading,
        each_ns: Reading,
        total_ns: Reading,
        how: &str,
    ) -> Self {
        HatCost {
            what: what.into(),
            account: account.into(),
            count: UnitReading::new(Unit::Count, count),
            each_ns: UnitReading::new(Unit::Ns, each_ns),
            total_ns: UnitReading::new(Unit::Ns, total_ns),
            how: how.into(),
        }
    }
}

impl HatStat {
    /// Returns the CPU time of all costs, with its bounds; none if no cost is known.
    pub fn cpu_ns(&self) -> Option<(u64, u64, u64)> {
        let mut known = self.costs.iter().filter(|cost| cost.account == "cpu").filter_map(|cost| {
            let total = &cost.total_ns;
            let value = total.value?;
            Some((value, total.low.unwrap_or(value), total.high.unwrap_or(value)))
        });
        let first = known.next()?;
        Some(known.fold(first, |sum, one| (sum.0 + one.0, sum.1 + one.1, sum.2 + one.2)))
    }
}

/// A process, with its faults and page tables.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct HatProcess {
    /// The process.
    pub pid: u32,
    /// Its name.
    pub name: String,
    /// Its page faults without I/O.
    pub minor_fault_count: u64,
    /// Its page faults that read a page.
    pub major_fault_count: u64,
    /// Its page tables, in bytes.
    pub page_table_bytes: u64,
}

/// Memory that several processes map, each with page tables of its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SharedMapping {
    /// Its name: the file, or the kernel's name of shared memory.
    pub name: String,
    /// Its size, in bytes.
    pub bytes: u64,
    /// The number of processes that map it.
    pub process_count: u64,
    /// The page tables that map it, of all processes, in bytes.
    pub page_table_bytes: UnitReading,
    /// The part of them that huge pages would save: all tables of base pages.
    pub saved_bytes: UnitReading,
    /// The CPU time that the faults of all processes have taken, or take when they have touched all of it.
    pub fault_ns: UnitReading,
    /// The same on huge pages.
    pub huge_fault_ns: UnitReading,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counter::Provenance;

    #[test]
    fn costs_are_products_with_their_bounds_and_add_up() {
        let each = Reading::Derived { value: 3, low: 2, high: 5 };
        let faults = HatCost::product("faults", "cpu", Reading::Measured(10), each, "");
        assert_eq!(faults.total_ns.value.zip(faults.total_ns.low), Some((30, 20)));
        let missing = HatCost::product(
            "swap",
            "cpu",
            Reading::Measured(10),
            Reading::Missing("no calibration".into()),
            "",
        );
        assert_eq!(missing.total_ns.provenance, Provenance::Missing);
        let waits =
            HatCost::product("waits", "wall", Reading::Measured(1), Reading::Measured(9), "");
        let modelled =
            HatCost::product("faults", "cpu", Reading::Modeled(2), Reading::Modeled(7), "");
        assert_eq!(modelled.total_ns.provenance, Provenance::Modeled);
        let all = HatStat {
            machine: "host".into(),
            uptime_ns: 100,
            cpu_count: 1,
            costs: vec![faults, missing, waits, modelled],
            processes: Vec::new(),
            shared: Vec::new(),
        };
        assert_eq!(all.cpu_ns(), Some((44, 34, 64)));
    }
}
