//! A calibration of a real machine as constants of a model: memory and fault costs, and the cost and
//! overlap of walks by the place of their page-table line.
//!
//! Both patterns of a calibration use page-table lines at random. Over a working set of n lines, the reuse
//! distance of a line is uniform from 0 to n. So the measured cost of base pages is a mean over all distances
//! up to n. The difference between two working sets gives the cost of the distances between them. Walks
//! beyond the largest working set cost as much as its farthest. Walks in order reuse a line once a lap, at
//! the distance n: their cost is as measured. Constants that the calibration does not have stay unchanged.

use crate::model::{Constant, Model, ModelError};
use pagetax_core::calibration::{Calibration, FaultKind, WalkCost as MeasuredWalk, WalkPattern};

/// The places of page-table lines, nearest first.
const PLACES: [&str; 4] = ["l1", "l2", "l3", "memory"];

/// The range of addresses whose entries share a line: 8 entries of base pages.
const LINE_REACH_BYTES: u64 = 8 * 4096;

/// The working set for the cost of memory: far beyond the caches.
const FAR_BYTES: u64 = 256 << 20;

/// The model that takes its costs from a calibration.
pub const MODEL: &str = "x86-64-calibrated";

/// Replaces the constants that `calibration` has.
///
/// # Errors
/// Fails if the model has no page walker.
pub fn apply(model: &mut Model, calibration: &Calibration) -> Result<(), ModelError> {
    apply_tlbs(model, calibration)?;
    let places = places(model, calibration)?;
    let source = format!("measured: pagetax calibrate on {}", calibration.identity.cpu_model);
    let mut set = |table: &str, key: &str, value: f64, unit: &str| {
        let (value, unit, source) = (toml::Value::Float(value), unit.into(), source.clone());
        model.replace(table, key, Constant { value, unit, source })
    };
    for (key, value) in &places {
        set("walk", key, *value, if key.ends_with("lines") { "lines" } else { "ns" })?;
    }
    for (key, pattern) in
        [("dependent", WalkPattern::Dependent), ("random", WalkPattern::Independent)]
    {
        let far =
            |walk: &&MeasuredWalk| walk.pattern == pattern && walk.working_set_bytes >= FAR_BYTES;
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

/// Replaces the sizes of the TLBs by those that the CPU itself describes. Units of one level that hold the
/// same pages are one larger unit in the model.
fn apply_tlbs(model: &mut Model, calibration: &Calibration) -> Result<(), ModelError> {
    for (table, level, page_bytes) in
        [("dtlb_1a", 1, 4 << 10), ("dtlb_1b", 1, 2 << 20), ("dtlb_2a", 2, 4 << 10)]
    {
        let units = calibration.tlbs.iter().filter(|unit| {
            unit.level == level && unit.kind.serves_loads() && unit.page_bytes.contains(&page_bytes)
        });
        let (entries, ways) = units.fold((0, 0), |(entries, ways), unit| {
            (entries + unit.entries, ways + unit.ways.unwrap_or(unit.entries))
        });
        if entries == 0 || ways == 0 {
            continue;
        }
        for (key, value, unit) in
            [("entries", entries, "entries"), ("ways", ways_of(entries, ways), "ways")]
        {
            let source = format!("CPUID of {}", calibration.identity.cpu_model);
            let (value, unit) = (toml::Value::Integer(value.into()), unit.into());
            model.replace(table, key, Constant { value, unit, source })?;
        }
    }
    Ok(())
}

/// Returns the ways with which the number of sets is a power of two, as the model needs it: at least so many.
fn ways_of(entries: u32, ways: u32) -> u32 {
    let sets = 1 << (entries / ways).max(1).ilog2();
    match entries % sets {
        0 => entries / sets,
        _ => entries,
    }
}

/// Returns the constants of the places, from the working sets that the second-level TLB does not hold.
fn places(model: &Model, calibration: &Calibration) -> Result<Vec<(String, f64)>, ModelError> {
    let entries = model.positive("dtlb_2a", "entries")?;
    let hit_ns = model.ps("tlb", "level_2_hit")? as f64 / 1e3;
    let [alone, overlapped] = [WalkPattern::Dependent, WalkPattern::Independent]
        .map(|pattern| walk_prices(calibration, pattern, entries, hit_ns));
    let in_order = prices_in_order(calibration, entries, hit_ns);
    let known: Vec<_> = alone.iter().zip(&overlapped).collect();
    let Some(mut lines) = known.first().map(|(first, _)| first.lines) else {
        return Ok(Vec::new());
    };
    let mut constants = Vec::new();
    for (nr, place) in PLACES.iter().enumerate() {
        let (alone, overlapped) = known[nr.min(known.len() - 1)];
        if *place != "memory" {
            // A place without a working set of its own is as far as the previous place.
            lines = if nr < known.len() { alone.lines } else { 4 * lines };
            constants.push((format!("{place}_lines"), lines as f64));
        }
        constants.push((format!("{place}_walk"), alone.ns));
        // Overlap cannot make a walk slower; a measurement that shows so is noise.
        let overlapped_ns = overlapped.ns.min(alone.ns);
        constants.push((format!("{place}_overlapped"), overlapped_ns));
        if let Some(ns) = in_order.get(nr).or(in_order.last()) {
            constants.push((format!("{place}_in_order"), ns.min(overlapped_ns)));
        }
    }
    Ok(constants)
}

/// The cost of walks at the reuse distances between the previous working set and this one.
#[derive(Debug, Clone, Copy)]
struct WalkCost {
    lines: u64,
    ns: f64,
    /// The number of distances that it is the mean of.
    width: u64,
}

/// Returns the measurements over more memory than the TLB has entries for, the smallest working set first.
fn measured(calibration: &Calibration, pattern: WalkPattern, entries: u64) -> Vec<&MeasuredWalk> {
    let misses =
        |walk: &&MeasuredWalk| walk.pattern == pattern && walk.working_set_bytes / 4096 > entries;
    let mut walks: Vec<_> = calibration.walks.iter().filter(misses).collect();
    walks.sort_by_key(|walk| walk.working_set_bytes);
    walks
}

/// Returns the costs of walks in order in nanoseconds, nearest first. They may fall.
fn prices_in_order(calibration: &Calibration, entries: u64, hit_ns: f64) -> Vec<f64> {
    let walks = measured(calibration, WalkPattern::InOrder, entries);
    walks.iter().map(|walk| (walk.extra.median_ns - hit_ns).max(0.0)).collect()
}

/// Returns the costs of walks at random, nearest first and never falling.
fn walk_prices(
    calibration: &Calibration,
    pattern: WalkPattern,
    entries: u64,
    hit_ns: f64,
) -> Vec<WalkCost> {
    let (mut prices, mut before): (Vec<WalkCost>, (u64, f64)) = (Vec::new(), (0, 0.0));
    for walk in measured(calibration, pattern, entries) {
        let bytes = walk.working_set_bytes;
        // A cycle hits nothing of its previous lap; random accesses hit whatever the TLB still holds.
        let missing = match pattern {
            WalkPattern::Dependent | WalkPattern::InOrder => 1.0,
            WalkPattern::Independent => 1.0 - (entries * 4096) as f64 / bytes as f64,
        };
        let mean_ns = (walk.extra.median_ns / missing - hit_ns).max(0.0);
        let (lines, sum) = (bytes / LINE_REACH_BYTES, (bytes / LINE_REACH_BYTES) as f64 * mean_ns);
        let width = lines - before.0;
        prices.push(WalkCost { lines, ns: ((sum - before.1) / width as f64).max(0.0), width });
        before = (lines, sum);
    }
    rising(prices)
}

/// Makes costs rise: adjacent costs that fall get their mean (pool adjacent violators). Falling costs are
/// noise, or an effect of caches that each pattern has for itself.
fn rising(prices: Vec<WalkCost>) -> Vec<WalkCost> {
    let mut pools: Vec<(WalkCost, Vec<u64>)> = Vec::new();
    for price in prices {
        let mut pool = (price, vec![price.lines]);
        while let Some((last, _)) = pools.last()
            && last.ns > pool.0.ns
        {
            let (last, mut lines) = pools.pop().expect("there is a last one");
            let width = last.width + pool.0.width;
            let sum = last.ns * last.width as f64 + pool.0.ns * pool.0.width as f64;
            lines.append(&mut pool.1);
            pool = (WalkCost { ns: sum / width as f64, width, ..pool.0 }, lines);
        }
        pools.push(pool);
    }
    let each = |(price, lines): (WalkCost, Vec<u64>)| {
        lines.into_iter().map(move |lines| WalkCost { lines, ..price })
    };
    pools.into_iter().flat_map(each).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prices(ns: &[f64]) -> Vec<f64> {
        let price = |(n, ns): (usize, &f64)| WalkCost { lines: 1 << n, ns: *ns, width: 1 };
        rising(ns.iter().enumerate().map(price).collect()).iter().map(|price| price.ns).collect()
    }

    #[test]
    fn sets_are_a_power_of_two() {
        assert_eq!(ways_of(2_048, 16), 16);
        assert_eq!(ways_of(3_072, 8), 12, "384 sets become 256");
        assert_eq!(ways_of(72, 72), 72);
        assert_eq!(ways_of(97, 2), 97);
    }

    #[test]
    fn prices_that_fall_share_their_mean() {
        assert_eq!(prices(&[1.0, 2.0, 3.0]), [1.0, 2.0, 3.0]);
        assert_eq!(prices(&[1.0, 5.0, 3.0, 7.0]), [1.0, 4.0, 4.0, 7.0]);
        assert_eq!(prices(&[6.0, 5.0, 1.0]), [4.0, 4.0, 4.0]);
        assert_eq!(prices(&[]), [0.0; 0]);
    }
}
