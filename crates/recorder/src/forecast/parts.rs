//! The saved time by part of memory, and the smallest set of addresses that saves most of it.

use super::saving::{Bounded, Saved};
use super::{Forecast, UnknownCost};
use crate::predict::{BlockUse, Predictor};
use pagetax_core::address_pattern::{AddressPart, AddressPattern, merged};
use pagetax_core::calibration::Calibration;
use pagetax_core::units::PageSize;
use std::collections::BTreeMap;
use std::ops::Range;

/// A set of addresses stops growing when it saves this share of all that is saved.
const GAIN_SHARE: f64 = 0.95;
/// A set with more ranges closes its smallest gaps. The preload library keeps 64.
const RANGES_MAX: usize = 48;
const BLOCK_BYTES: u64 = 2 << 20;

/// A part of memory alone on large pages.
#[derive(Debug, Clone)]
pub struct PartForecast {
    /// The part of memory.
    pub part: AddressPart,
    /// Bytes on base pages that were touched; none of code, which is not counted.
    pub touched_bytes: Option<u64>,
    /// CPU time saved over base pages; none of code, as the calibration has no cost of its walks.
    pub saved: Option<Saved>,
}

/// 2 MiB of a part.
#[derive(Debug, Clone)]
pub struct BlockForecast {
    /// The part of memory.
    pub part: AddressPart,
    /// The pattern of this block; none of memory that no pattern names so closely.
    pub pattern: Option<AddressPattern<'static>>,
    /// Bytes on base pages that were touched.
    pub touched_bytes: u64,
    /// CPU time saved if all parts are on large pages.
    pub saved_ns: f64,
}

/// Addresses that save most of the time.
#[derive(Debug, Clone, PartialEq)]
pub struct AddressSet {
    /// The patterns, separated by commas.
    pub patterns: String,
    /// Bytes on base pages that were touched there.
    pub touched_bytes: u64,
    /// Their share of all touched memory, 0 to 1.
    pub memory_share: f64,
    /// The share of the saved time, 0 to 1.
    pub gain_share: f64,
}

/// Predicts each part alone, and each block, from a predictor by these parts.
pub(super) fn predict(
    size: PageSize,
    parts: &[AddressPart],
    pages: &mut Predictor,
    paced: &Calibration,
    measured_fault_count: Option<u64>,
) -> Result<(Vec<PartForecast>, Vec<BlockForecast>), UnknownCost> {
    let base = (pages.walks(0), pages.faults(0));
    let uses = pages.blocks();
    let mut alone = 2..;
    let mut forecasts = Vec::new();
    for part in parts {
        let of_part = uses.iter().filter(|block| block.part == *part);
        let touched_bytes: u64 = of_part.map(|block| block.touched_bytes).sum();
        let forecast = match part {
            AddressPart::Text => PartForecast { part: *part, touched_bytes: None, saved: None },
            _ => {
                let config = alone.next().unwrap_or(2);
                let after = (pages.walks(config), pages.faults(config));
                let saved = Saved::new(size, base, after, paced, measured_fault_count)?;
                let touched_bytes = Some(touched_bytes);
                PartForecast { part: *part, touched_bytes, saved: Some(saved) }
            }
        };
        forecasts.push(forecast);
    }
    let block = |block: &BlockUse| -> Result<BlockForecast, UnknownCost> {
        let saved = Saved::new(size, block.base, block.large, paced, None)?;
        Ok(BlockForecast {
            part: block.part,
            pattern: block.pattern.clone(),
            touched_bytes: block.touched_bytes,
            saved_ns: saved.total().value,
        })
    };
    let blocks = uses.iter().map(block).collect::<Result<_, _>>()?;
    Ok((forecasts, blocks))
}

impl Forecast {
    /// Returns the sum of what the parts save alone; none if there are no parts.
    pub fn saved_alone(&self) -> Option<Bounded> {
        let saved = self.parts.iter().filter_map(|part| part.saved.as_ref());
        saved.map(Saved::total).reduce(Bounded::plus)
    }
}

/// Returns the blocks that save most for their memory, as patterns: until they save most of the time, or have
/// `memory_max` of all memory. None if nothing is saved, or if no pattern names it.
pub fn address_set(blocks: &[BlockForecast], memory_max: f64) -> Option<AddressSet> {
    let all_bytes: u64 = blocks.iter().map(|block| block.touched_bytes).sum();
    let all_ns: f64 = blocks.iter().map(|block| block.saved_ns).sum();
    let mut named: Vec<&BlockForecast> =
        blocks.iter().filter(|block| block.pattern.is_some() && block.saved_ns > 0.0).collect();
    let density = |block: &BlockForecast| block.saved_ns / block.touched_bytes.max(1) as f64;
    named.sort_by(|one, other| density(other).total_cmp(&density(one)));
    let most = (all_bytes as f64 * memory_max) as u64;
    let (mut bytes, mut ns) = (0, 0.0);
    let mut chosen: BTreeMap<(AddressPart, Option<u64>), Vec<Range<u64>>> = BTreeMap::new();
    for block in named {
        let Some(pattern) = &block.pattern else { continue };
        if ns >= all_ns * GAIN_SHARE || bytes + block.touched_bytes > most {
            break;
        }
        bytes += block.touched_bytes;
        ns += block.saved_ns;
        chosen.entry((pattern.part, pattern.class_bytes)).or_default().push(pattern.range.clone());
    }
    let patterns =
        (0..).map(|step| with_gaps(&chosen, step)).find(|all| all.len() <= RANGES_MAX)?;
    if patterns.is_empty() || all_ns <= 0.0 {
        return None;
    }
    // Closed gaps are part of the set.
    let is_in =
        |block: &&BlockForecast| block.pattern.as_ref().is_some_and(|own| named_by(own, &patterns));
    let bytes: u64 = blocks.iter().filter(is_in).map(|block| block.touched_bytes).sum();
    let ns: f64 = blocks.iter().filter(is_in).map(|block| block.saved_ns).sum();
    Some(AddressSet {
        patterns: patterns.iter().map(ToString::to_string).collect::<Vec<_>>().join(","),
        touched_bytes: bytes,
        memory_share: bytes as f64 / all_bytes.max(1) as f64,
        gain_share: ns / all_ns,
    })
}

/// Returns the ranges as patterns, with gaps closed that are shorter than the step allows.
fn with_gaps(
    chosen: &BTreeMap<(AddressPart, Option<u64>), Vec<Range<u64>>>,
    step: u32,
) -> Vec<AddressPattern<'static>> {
    let gap = if step == 0 { 0 } else { BLOCK_BYTES << step.min(40) };
    let of_part = |((part, class_bytes), ranges): (&(AddressPart, Option<u64>), &Vec<_>)| {
        let mut ranges: Vec<Range<u64>> = ranges.clone();
        ranges.sort_by_key(|range| range.start);
        let (part, class_bytes) = (*part, *class_bytes);
        let pattern = move |range| AddressPattern { part, class_bytes, file: None, range };
        merged(&ranges, gap).into_iter().map(pattern).collect::<Vec<_>>()
    };
    chosen.iter().flat_map(of_part).collect()
}

fn named_by(block: &AddressPattern<'_>, patterns: &[AddressPattern<'_>]) -> bool {
    let middle = block.range.start + BLOCK_BYTES / 2;
    patterns.iter().any(|pattern| {
        (pattern.part, pattern.class_bytes) == (block.part, block.class_bytes)
            && pattern.range.contains(&middle)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns blocks of the heap that save so much each.
    fn heap(saved: impl IntoIterator<Item = f64>) -> Vec<BlockForecast> {
        let block = |(number, saved_ns): (u64, f64)| {
            let range = number * BLOCK_BYTES..(number + 1) * BLOCK_BYTES;
            let part = AddressPart::Heap;
            let pattern = Some(AddressPattern { part, class_bytes: None, file: None, range });
            BlockForecast { part, pattern, touched_bytes: BLOCK_BYTES, saved_ns }
        };
        (0..).zip(saved).map(block).collect()
    }

    #[test]
    fn a_hot_range_is_found() {
        let blocks = heap((0..100).map(|n| if (40..50).contains(&n) { 99.0 } else { 0.5 }));
        let set = address_set(&blocks, 0.2).unwrap();
        assert_eq!(set.patterns, "heap@80M-100M");
        assert!((set.memory_share - 0.1).abs() < 1e-9 && set.gain_share > 0.95, "{set:?}");
    }

    #[test]
    fn memory_that_gains_alike_keeps_little_in_a_fifth_of_it() {
        let set = address_set(&heap([1.0; 100]), 0.2).unwrap();
        assert!((set.gain_share - 0.2).abs() < 1e-9, "{set:?}");
        assert_eq!(address_set(&heap([0.0; 100]), 0.2), None);
        assert_eq!(address_set(&heap([-1.0; 100]), 0.2), None);
    }

    #[test]
    fn scattered_blocks_close_their_gaps_and_count_them() {
        let blocks = heap((0..1_000).map(|n| if n % 10 == 0 { 9.0 } else { 0.0 }));
        let set = address_set(&blocks, 0.2).unwrap();
        assert!(set.patterns.split(',').count() <= RANGES_MAX);
        assert!(set.memory_share > 0.9, "{set:?}");
    }
}
