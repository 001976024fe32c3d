//! The CPU time that a page size saves, part by part.

use super::UnknownCost;
use crate::predict::{Faults, Walks};
use pagetax_core::calibration::{Calibration, FaultKind, Spread};
use pagetax_core::units::PageSize;

/// A value with its bounds, in nanoseconds or as a ratio.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bounded {
    /// The best estimate of the count.
    pub value: f64,
    /// The lower bound of the count.
    pub low: f64,
    /// The upper bound of the count.
    pub high: f64,
}

impl Bounded {
    fn around((value, low, high): (f64, f64, f64)) -> Bounded {
        Bounded { value, low: low.min(value), high: high.max(value) }
    }

    pub(super) fn plus(self, other: Bounded) -> Bounded {
        let Bounded { value, low, high } = other;
        Bounded { value: self.value + value, low: self.low + low, high: self.high + high }
    }
}

/// The CPU time that a page size saves over base pages, in nanoseconds; negative where it costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Saved {
    /// The number of page walks.
    pub walks: Bounded,
    /// First touches: fewer, each of more zeroing.
    pub faults: Bounded,
    /// Filling new pages: the caches that a fault leaves behind differ with the page.
    pub filling: Bounded,
    /// Returning the memory to the kernel.
    pub unmapping: Bounded,
}

impl Saved {
    /// Returns the savings of `size` from translation and faults before and after. If a run had fewer
    /// faults (`measured_fault_count`) than its pages suggest, scales the savings of faults down.
    pub(super) fn new(
        size: PageSize,
        (walks, before): (Walks, Faults),
        (walks_after, after): (Walks, Faults),
        calibration: &Calibration,
        measured_fault_count: Option<u64>,
    ) -> Result<Saved, UnknownCost> {
        let base = Prices::new(calibration, calibration.base_page_bytes)?;
        let large = Prices::new(calibration, size.bytes())?;
        let modelled = before.base_count.max(1) as f64;
        let real = measured_fault_count.map_or(1.0, |count| (count as f64 / modelled).min(1.0));
        let fewer = |before: u64, after: u64| before.saturating_sub(after) as f64 * real;
        let pages = fewer(before.base_count, after.base_count);
        let filled = fewer(before.base_filled_count, after.base_filled_count);
        let part = |count: f64, base: Spread, more: u64, large: Spread| {
            let more = more as f64 * real;
            Bounded::around((
                count * base.median_ns - more * large.median_ns,
                count * base.low_ns - more * large.high_ns,
                count * base.high_ns - more * large.low_ns,
            ))
        };
        let [(value, low, high), (value_after, low_after, high_after)] =
            [walks.ns(), walks_after.ns()];
        let ends = [low - low_after, high - high_after];
        let walks = (value - value_after, ends[0].min(ends[1]), ends[0].max(ends[1]));
        Ok(Saved {
            walks: Bounded::around(walks),
            faults: part(pages, base.fault, after.large_count, large.fault),
            filling: part(filled, base.filling, after.large_filled_count, large.filling),
            unmapping: part(pages, base.unmapping, after.large_count, large.unmapping),
        })
    }

    /// Returns the parts by name.
    pub fn parts(&self) -> [(&'static str, Bounded); 4] {
        [
            ("page walks", self.walks),
            ("faults", self.faults),
            ("filling", self.filling),
            ("unmapping", self.unmapping),
        ]
    }

    /// Returns the sum of all parts.
    pub fn total(&self) -> Bounded {
        let sum = |sum: Bounded, (_, part): (&str, Bounded)| sum.plus(part);
        self.parts().into_iter().fold(Bounded::around((0.0, 0.0, 0.0)), sum)
    }
}

/// The costs of private pages of one size.
struct Prices {
    fault: Spread,
    /// The cost of filling a page, beside the fault.
    filling: Spread,
    unmapping: Spread,
}

impl Prices {
    fn new(calibration: &Calibration, page_bytes: u64) -> Result<Prices, UnknownCost> {
        let cost = |kind: FaultKind| {
            calibration.fault(kind, page_bytes).ok_or(UnknownCost { kind, page_bytes })
        };
        let (fault, filled) = (cost(FaultKind::AnonWrite)?, cost(FaultKind::AnonFill)?);
        let filling = Spread {
            median_ns: filled.median_ns - fault.median_ns,
            low_ns: filled.low_ns - fault.high_ns,
            high_ns: filled.high_ns - fault.low_ns,
            repetitions: filled.repetitions,
        };
        Ok(Prices { fault, filling, unmapping: cost(FaultKind::Unmap)? })
    }
}
