//! Which faults are sampled: all of the first ones, then those that begin in windows of time.
//!
//! A pair of samples costs 250 to 1,000 ns, by machine; a sixth of the faults is enough once there
//! are thousands. Windows come at random distances, so that no rhythm of a job hides from them.
//!
//! Invariant: whether a fault is seen depends on when it began, never on how long it took. A window
//! closes to begins at once, and to ends when each fault that began in it has ended.

use pagetax_core::access::Rng;
use std::time::Duration;

/// Faults of a run that are all seen, or rather more: a window lasts [`OPEN`] at least.
pub const WHOLE_COUNT: u64 = 10_000;
/// How long a window is open, and how often the rings are emptied.
const OPEN: Duration = Duration::from_millis(5);
/// How long ends are waited for at a time: samples need a moment to reach their ring.
const CLOSING: Duration = Duration::from_millis(1);
/// Between windows: 27 ms on average, so that a sixth of the time is seen.
const CLOSED_MS: std::ops::Range<u64> = 14..41;

/// What is sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sampled {
    /// Begins of faults.
    pub begins: bool,
    /// Ends of minor faults. Those of major ones always are: they cost nothing beside the fault.
    pub minor_ends: bool,
}

impl Sampled {
    /// In a window.
    pub const ALL: Sampled = Sampled { begins: true, minor_ends: true };
    const CLOSING: Sampled = Sampled { begins: false, minor_ends: true };
    const CLOSED: Sampled = Sampled { begins: false, minor_ends: false };
}

/// Decides what is sampled next.
#[derive(Debug)]
pub struct Windows {
    now: Sampled,
    rng: Rng,
}

impl Windows {
    /// Begins with an open one, which ends when enough faults were seen.
    pub fn new() -> Windows {
        Windows { now: Sampled::ALL, rng: Rng::new(1) }
    }

    /// What to sample for how long, when so many faults were seen, and some are still under way.
    pub fn next(&mut self, seen_count: u64, under_way: bool) -> (Sampled, Duration) {
        self.now = match self.now {
            Sampled::ALL if seen_count < WHOLE_COUNT => Sampled::ALL,
            Sampled::ALL => Sampled::CLOSING,
            Sampled::CLOSING if under_way => Sampled::CLOSING,
            Sampled::CLOSING => Sampled::CLOSED,
            _ => Sampled::ALL,
        };
        let wait = match self.now {
            Sampled::ALL => OPEN,
            Sampled::CLOSING => CLOSING,
            _ => Duration::from_millis(
                CLOSED_MS.start + self.rng.below(CLOSED_MS.end - CLOSED_MS.start),
            ),
        };
        (self.now, wait)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_faults_are_all_seen() {
        let mut windows = Windows::new();
        for seen in [0, 1, WHOLE_COUNT - 1] {
            assert_eq!(windows.next(seen, true), (Sampled::ALL, OPEN));
        }
        assert_eq!(windows.next(WHOLE_COUNT, true).0, Sampled::CLOSING);
    }

    #[test]
    fn a_window_waits_for_the_ends_of_its_faults() {
        let mut windows = Windows::new();
        for _ in 0..100 {
            assert_eq!(windows.next(WHOLE_COUNT, true).0, Sampled::CLOSING);
        }
        assert_eq!(windows.next(WHOLE_COUNT, false).0, Sampled::CLOSED);
        assert_eq!(windows.next(WHOLE_COUNT, false).0, Sampled::ALL);
    }

    #[test]
    fn windows_are_a_sixth_of_the_time() {
        let mut windows = Windows::new();
        let (mut cost, mut total) = (0.0, 0.0);
        for _ in 0..30_000 {
            let (sampled, wait) = windows.next(WHOLE_COUNT, false);
            let samples = u8::from(sampled.begins) + u8::from(sampled.minor_ends);
            cost += f64::from(samples) / 2.0 * wait.as_secs_f64();
            total += wait.as_secs_f64();
        }
        assert!((0.14..0.18).contains(&(cost / total)), "{}", cost / total);
    }
}
