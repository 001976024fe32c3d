//! The reach of the TLBs on base pages: the most pages that a chase visits without a walk.
//!
//! The chase visits one line of each page, in a random cycle. Pages lie some pages apart, so that no entry
//! holds two of them (AMD merges entries of neighbours). The same lines on huge pages take the caches' part
//! out. A cycle over more pages than there are entries misses nearly always.

use super::walks::{chase, cycle};
use super::{CalibrateError, Effort};
use crate::measure::backed_memory;
use crate::sys::mapping::{OwnedMapping, Request, Source};
use crate::sys::signal::asked_to_stop;
use pagetax_core::calibration::TlbReach;
use pagetax_core::stats::quantiles;
use pagetax_core::units::PageSize;

/// The numbers of pages that are tried.
const COUNTS: [u64; 15] =
    [64, 96, 128, 192, 256, 384, 512, 768, 1_024, 1_536, 2_048, 3_072, 4_096, 6_144, 8_192];
/// The distance of two pages that are visited, in pages.
const STRIDE: u64 = 5;
/// The accesses for each number of pages, in each repetition.
const ACCESSES: u64 = 1 << 15;
/// The least time of a walk that shows.
const WALK_NS_MIN: f64 = 1.5;

/// Measures the reach; none if no walk shows, or if there is too little memory.
pub(super) fn measure(
    effort: Effort,
    huge: PageSize,
    memory_bytes_max: u64,
) -> Result<Option<TlbReach>, CalibrateError> {
    let bytes = COUNTS[COUNTS.len() - 1] * STRIDE * PageSize::K4.bytes();
    if 2 * bytes > memory_bytes_max {
        return Ok(None);
    }
    backed_memory::bring(2 * bytes);
    let map = |page: PageSize, advice| -> Result<OwnedMapping, CalibrateError> {
        let failed = |error| CalibrateError::System("map memory for the TLB", error);
        let (len, align) = (bytes as usize, page.bytes() as usize);
        let request = Request { source: Source::Anon, len, align, hugetlb: None };
        let mapping = OwnedMapping::new(request).map_err(failed)?;
        mapping.advise(advice).map_err(failed)?;
        Ok(mapping)
    };
    let on_base = map(PageSize::K4, libc::MADV_NOHUGEPAGE)?;
    let on_huge = map(huge, libc::MADV_HUGEPAGE)?;
    let mut extra_ns = Vec::new();
    for count in COUNTS {
        let order = cycle(count);
        [&on_base, &on_huge].into_iter().for_each(|mapping| link(mapping, &order));
        let mut samples = Vec::new();
        for _ in 0..effort.repetitions {
            if asked_to_stop() {
                return Err(CalibrateError::Interrupted);
            }
            let [base_ns, huge_ns] =
                [&on_base, &on_huge].map(|mapping| chase(mapping, &mut slot(0), ACCESSES, count));
            samples.push(base_ns - huge_ns);
        }
        extra_ns.push(quantiles(&samples, [0.5])[0]);
    }
    Ok(reach(&extra_ns))
}

/// Returns the offset of the line that is visited in a page. The first line in a page is hashed, as regular
/// offsets collide in the data caches.
fn slot(page: u64) -> u64 {
    let lines = PageSize::K4.bytes() / 64;
    let line = (page.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) % lines;
    page * STRIDE * PageSize::K4.bytes() + line * 64
}

/// Writes the cycle into a mapping.
fn link(mapping: &OwnedMapping, order: &[u32]) {
    for (page, next) in order.iter().enumerate() {
        mapping.store(slot(page as u64), slot(u64::from(*next)));
    }
}

/// Returns the last number of pages before accesses take half of a walk or more, and the next one.
fn reach(extra_ns: &[f64]) -> Option<TlbReach> {
    let walk_ns = *extra_ns.last()?;
    let is_walk = |ns: &&f64| **ns >= walk_ns / 2.0;
    let before = extra_ns.iter().take_while(|ns| !is_walk(ns)).count().checked_sub(1)?;
    let of = |at: usize| COUNTS.get(at).copied();
    (walk_ns >= WALK_NS_MIN)
        .then(|| Some(TlbReach { low_pages: of(before)?, high_pages: of(before + 1)? }))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reach_ends_where_walks_begin() {
        let mut extra_ns = vec![0.1; 10];
        extra_ns.extend([2.0, 12.0, 14.0, 15.0, 15.0]);
        let found = reach(&extra_ns).unwrap();
        assert_eq!((found.low_pages, found.high_pages), (2_048, 3_072));
        assert_eq!(reach(&[0.2; 15]), None, "no walk shows");
        assert_eq!(reach(&[20.0; 15]), None, "all of them walk");
    }

    #[test]
    fn slots_of_pages_lie_in_pages_of_their_own() {
        let pages: std::collections::BTreeSet<u64> =
            (0..8_192).map(|page| slot(page) / PageSize::K4.bytes()).collect();
        assert_eq!(pages.len(), 8_192);
        assert!(pages.iter().zip(pages.iter().skip(1)).all(|(one, next)| next - one == STRIDE));
    }
}
