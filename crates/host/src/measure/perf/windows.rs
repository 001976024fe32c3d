//! The choice of sampled faults: all of the first ones, then those that begin in time windows.
//!
//! A pair of samples costs 250 to 1,000 ns, depending on the machine. Once there are thousands of
//! faults, a sixth of them is enough. The distance between windows is random, so that a periodic job
//! cannot avoid them.
//!
//! Invariant: the choice depends on when a fault began, never on how long it took. A window closes for
//! begins at once. It closes for ends when each fault that began in it has ended.

use pagetax_core::access::Rng;
use std::time::Duration;

/// The number of faults that are all sampled. Some more are sampled too: a window lasts at least
/// [`OPEN`].
pub const WHOLE_COUNT: u64 = 10_000;
/// The time for which a window is open, and the interval at which its rings are emptied.
const OPEN: Duration = Duration::from_millis(5);
/// The interval at which a closing window checks for ends: samples take some time to reach their ring.
const CLOSING: Duration = Duration::from_millis(1);
/// The time between windows: 27 ms on average, so that windows cover a sixth of the time.
const CLOSED_MS: std::ops::Range<u64> = 14..41;

/// The choice of events that are sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sampled {
    /// True if begins of faults are sampled.
    pub begins: bool,
    /// True if ends of minor faults are sampled. Ends of major faults always are: they cost little
    /// compared with the fault.
    pub minor_ends: bool,
}

impl Sampled {
    /// The events of an open window.
    pub const ALL: Sampled = Sampled { begins: true, minor_ends: true };
    const CLOSING: Sampled = Sampled { begins: false, minor_ends: true };
    const CLOSED: Sampled = Sampled { begins: false, minor_ends: false };
}

/// The schedule of windows.
#[derive(Debug)]
pub struct Windows {
    now: Sampled,
    rng: Rng,
}

impl Windows {
    /// Starts with an open window, which ends when enough faults were seen.
    pub fn new() -> Windows {
        Windows { now: Sampled::ALL, rng: Rng::new(1) }
    }

    /// Returns the events to sample next, and for how long. `seen_count` is the number of faults in the
    /// histograms; `under_way` is true if a fault has begun and not ended.
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
