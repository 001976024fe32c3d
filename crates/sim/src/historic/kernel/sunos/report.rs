//! The tables that the administrators of 1990 saw: hatcnt, and the estimate in section 3 of
//! Lawrence's report of 1990 (Sun-Managers).

use super::config::SunOsConfig;
use super::{RESIDENT_MAX, TRANSLATION_FAULTS, hat};
use crate::hardware::sun4::Geometry;
use crate::historic::kernel::KernelReport;
use crate::tally::{CounterId, Tally};
use pagetax_core::counter::{Provenance, Reading};
use pagetax_core::report::Table;

const KERNEL_NS: CounterId = CounterId::of("kernel_ns");

/// Returns the tables and memory rows at the end of a run.
pub(super) fn kernel_report(
    config: &SunOsConfig,
    geometry: &Geometry,
    tally: &Tally,
) -> KernelReport {
    let resident = Reading::Modeled(tally.get(RESIDENT_MAX));
    let tables_bytes = (geometry.pmegs as u64) * u64::from(geometry.ptes) * PTE_BYTES;
    KernelReport {
        tables: vec![hatcnt(tally), time_lost(config, geometry, tally)],
        memory: vec![
            ("resident", resident, "most page frames in use at once".into()),
            (
                "page_tables",
                Reading::Modeled(tables_bytes),
                "all pmegs, in static memory of their own".into(),
            ),
        ],
        warnings: Vec::new(),
    }
}

const PTE_BYTES: u64 = 4;

fn hatcnt(tally: &Tally) -> Table {
    let cell = |text: &str| text.to_string();
    let unknown = || cell("-");
    let words = (1..=8).map(|word| match word {
        4 => vec![cell("4"), cell("pmeg allocations"), tally.get(hat::ALLOCATIONS).to_string()],
        5 => vec![cell("5"), cell("  that stole a pmeg"), tally.get(hat::STEALS).to_string()],
        word => vec![word.to_string(), cell("not documented"), unknown()],
    });
    Table {
        title: "hatcnt/8D".into(),
        columns: ["word", "meaning", "value"].map(String::from).to_vec(),
        rows: words.collect(),
        provenance: Provenance::Modeled,
    }
}

/// Estimates the time lost, as the report does with half of a pmeg's entries: "Estimating, say 32
/// faults per stolen pmeg allocation".
fn time_lost(config: &SunOsConfig, geometry: &Geometry, tally: &Tally) -> Table {
    let faults_each = u64::from(geometry.ptes / 2);
    let steals = tally.get(hat::STEALS);
    let faults = tally.get(TRANSLATION_FAULTS);
    let fault_us = config.costs.fault_ns as f64 / 1e3;
    let estimate_s = (steals * faults_each) as f64 * fault_us / 1e6;
    let modeled_s = (faults * config.costs.fault_ns) as f64 / 1e9;
    let kernel_s = tally.get(KERNEL_NS) as f64 / 1e9;
    let row = |what: &str, value: String| vec![what.to_string(), value];
    Table {
        title: "time lost to stolen pmegs".into(),
        columns: ["what", "value"].map(String::from).to_vec(),
        rows: vec![
            row("pmegs stolen", steals.to_string()),
            row("faults for each, estimated", faults_each.to_string()),
            row("time of a fault, µs", format!("{fault_us:.0}")),
            row("estimate, s", format!("{estimate_s:.1}")),
            row("translation faults, modelled", faults.to_string()),
            row("  their system time, s", format!("{modeled_s:.1}")),
            row("all system time, s", format!("{kernel_s:.1}")),
        ],
        provenance: Provenance::Modeled,
    }
}
