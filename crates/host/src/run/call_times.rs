//! The times of the system calls whose work is that of faults: mlock(2) and madvise(2).

use hdrhistogram::Histogram;
use pagetax_core::counter::Provenance;
use pagetax_core::machine::Sink;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// A call that is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimedCall {
    /// Each call of mlock(2).
    Lock,
    /// Each call of madvise(2) by an operation.
    Advise,
}

/// Histograms of calls, in nanoseconds. Clones share them, as threads do. A forked child has its own, which
/// end with it.
#[derive(Debug, Clone, Default)]
pub struct CallTimes {
    times: Arc<Mutex<[Option<Histogram<u64>>; 2]>>,
}

impl CallTimes {
    /// Makes a call and records the time of it.
    pub fn time<T>(&self, call: TimedCall, make: impl FnOnce() -> T) -> T {
        let begun = Instant::now();
        let result = make();
        let ns = begun.elapsed().as_nanos() as u64;
        let mut times = self.times.lock().unwrap_or_else(PoisonError::into_inner);
        let empty = || Histogram::new(3).expect("three digits are a precision of hdrhistogram");
        // A histogram without upper bound grows as needed.
        let _ = times[call as usize].get_or_insert_with(empty).record(ns.max(1));
        result
    }

    /// Reports the histogram of each call that was made.
    pub fn report(&self, out: &mut dyn Sink) {
        let times = self.times.lock().unwrap_or_else(PoisonError::into_inner);
        for (kind, histogram) in ["lock", "advise"].into_iter().zip(times.iter()) {
            if let Some(histogram) = histogram {
                out.latency(kind, histogram, None, Provenance::Measured);
            }
        }
    }
}
