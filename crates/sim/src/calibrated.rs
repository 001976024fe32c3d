//! A calibration of a real machine as constants of a model: walk costs by where the line of a
//! page-table entry lies, their overlap, memory and fault costs.
//!
//! A pointer chase of one line a page misses every TLB level and finds the lines of its entries as far
//! away as the working set has lines: 32K of addresses each. So what base pages add to a chase is the
//! walk of the place that just holds them. What is not in the calibration stays as it was.

use crate::model::{Constant, Model, ModelError};
use pagetax_core::calibration::{Calibration, FaultKind, WalkPattern};

/// The working sets whose walks stand for a place: twice the reach of a second-level TLB, and what
/// the second level, the near third level, and nothing holds.
const PLACES: [(&str, u64); 4] =
    [("l1_walk", 16 << 20), ("l2_walk", 256 << 20), ("l3_walk", 1 << 30), ("memory_walk", 4 << 30)];

/// Where overlap and memory are taken: far beyond the caches.
const FAR_BYTES: u64 = 256 << 20;

/// The model that takes its costs from a calibration.
pub const MODEL: &str = "x86-64-calibrated";

/// Replaces what `calibration` has measured.
///
/// # Errors
/// A model without a page walker.
pub fn apply(model: &mut Model, calibration: &Calibration) -> Result<(), ModelError> {
    let source = format!("measured: pagetax calibrate on {}", calibration.identity.cpu_model);
    let mut set = |table: &str, key: &str, value: f64, unit: &str| {
        let (value, unit, source) = (toml::Value::Float(value), unit.into(), source.clone());
        model.replace(table, key, Constant { value, unit, source })
    };
    let measured_to = calibration.walks.iter().map(|walk| walk.working_set_bytes).max();
    for (key, working_set) in PLACES {
        let known = measured_to.is_some_and(|largest| working_set <= largest);
        let extra = calibration.walk_extra(WalkPattern::Dependent, working_set).filter(|_| known);
        if let Some(extra) = extra {
            set("walk", key, extra.median_ns, "ns")?;
        }
    }
    let extra = |pattern| calibration.walk_extra(pattern, FAR_BYTES).map(|extra| extra.median_ns);
    if let (Some(alone), Some(overlapped)) =
        (extra(WalkPattern::Dependent), extra(WalkPattern::Independent))
        && overlapped > 0.0
    {
        set("walk", "overlap", (alone / overlapped).max(1.0), "1")?;
    }
    for (key, pattern) in
        [("dependent", WalkPattern::Dependent), ("random", WalkPattern::Independent)]
    {
        let far = |walk: &&pagetax_core::calibration::WalkCost| {
            walk.pattern == pattern && walk.working_set_bytes >= FAR_BYTES
        };
        let nearest = calibration.walks.iter().filter(far).min_by_key(|w| w.working_set_bytes);
        if let Some(walk) = nearest {
            set("access", key, walk.huge.median_ns, "ns")?;
        }
    }
    let fault = |bytes| calibration.fault(FaultKind::AnonWrite, bytes).map(|cost| cost.median_ns);
    if let (Some(base), Some(huge)) =
        (fault(calibration.base_page_bytes), fault(calibration.huge_page_bytes))
    {
        let zero_kib = huge / (calibration.huge_page_bytes >> 10) as f64;
        let zeroing = zero_kib * (calibration.base_page_bytes >> 10) as f64;
        set("fault", "zero_kib", zero_kib, "ns")?;
        set("fault", "time", (base - zeroing).max(0.0), "ns")?;
    }
    Ok(())
}
