//! Counters of a pager since its start, and the latency of page-ins.

use pagetax_core::network_memory::PagerCounts;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

macro_rules! counters {
    ($($name:ident,)*) => {
        /// Running counts; a snapshot is [`PagerCounts`], which describes each of them.
        #[derive(Debug, Default)]
        pub struct PagerStats {
            $(pub $name: AtomicU64,)*
            pub(super) page_in: LatencyHistogram,
        }

        impl PagerStats {
            /// Returns a snapshot of all counts.
            pub fn counts(&self) -> PagerCounts {
                PagerCounts { $($name: self.$name.load(Relaxed),)* }
            }
        }
    };
}

counters! {
    fault_count,
    zero_fault_count,
    soft_refault_count,
    demand_page_in_count,
    page_in_count,
    moved_in_count,
    evicted_count,
    page_out_count,
    evicted_zero_count,
    evicted_clean_count,
    cancelled_count,
    stuck_count,
    room_wait_ns_total,
    page_in_ns_total,
}

/// Adds to a counter, without ordering.
pub fn add(counter: &AtomicU64, count: usize) {
    counter.fetch_add(count as u64, Relaxed);
}

const SUB_BITS: u32 = 4;
const BUCKETS: usize = 40 << SUB_BITS;

/// A histogram of times: 16 steps for each power of two, so within 6 %.
#[derive(Debug)]
pub struct LatencyHistogram {
    buckets: [AtomicU64; BUCKETS],
}

impl Default for LatencyHistogram {
    fn default() -> Self {
        LatencyHistogram { buckets: [const { AtomicU64::new(0) }; BUCKETS] }
    }
}

impl LatencyHistogram {
    pub(super) fn record(&self, ns: u64) {
        self.buckets[bucket_of(ns)].fetch_add(1, Relaxed);
    }

    /// Returns each step's time in nanoseconds (its middle) and count.
    pub fn steps(&self) -> Vec<(u64, u64)> {
        let counts = self.buckets.iter().map(|bucket| bucket.load(Relaxed));
        counts.enumerate().filter(|(_, n)| *n > 0).map(|(i, n)| (middle_of(i), n)).collect()
    }
}

fn bucket_of(ns: u64) -> usize {
    let exponent = (ns | 1 << SUB_BITS).ilog2() - SUB_BITS;
    let step = (ns >> exponent) as usize & ((1 << SUB_BITS) - 1);
    let base = if ns < 1 << SUB_BITS { 0 } else { (exponent as usize + 1) << SUB_BITS };
    (base + step).min(BUCKETS - 1)
}

fn middle_of(bucket: usize) -> u64 {
    let (power, step) = (bucket >> SUB_BITS, (bucket & ((1 << SUB_BITS) - 1)) as u64);
    match power.checked_sub(1) {
        None => step,
        Some(shift) => (((1 << SUB_BITS) + step) << shift) + ((1 << shift) >> 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_within_six_percent() {
        for ns in [0, 1, 15, 16, 17, 31, 32, 1000, 11_300, 1_000_000, 5_000_000_000] {
            let middle = middle_of(bucket_of(ns));
            assert!(middle.abs_diff(ns) as f64 <= ns as f64 * 0.0625, "{ns} as {middle}");
        }
        assert!((1..100_000u64).all(|ns| bucket_of(ns) >= bucket_of(ns - 1)));
        let latency = LatencyHistogram::default();
        latency.record(1000);
        latency.record(1001);
        assert_eq!(latency.steps().iter().map(|(_, n)| n).sum::<u64>(), 2);
    }
}
