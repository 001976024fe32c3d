//! The checks between a worker's accesses: clock, stop flag, rate, progress.
//!
//! Invariant: the loops pay one comparison every few thousand accesses. At most about 16 MiB are touched
//! between two checks.

use super::control::{ClientRow, Control};
use super::touch::Wrong;
use crate::sys::process::thread_usage;
use std::time::{Duration, Instant};

/// The reason why a worker ends before its last operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Halt {
    /// The phase's time is up, or all workers are to stop.
    Over,
    /// Memory does not hold the pattern that was written.
    Wrong(Wrong),
    /// The system refused an operation with this errno.
    Refused(i32),
}

impl From<Wrong> for Halt {
    fn from(wrong: Wrong) -> Halt {
        Halt::Wrong(wrong)
    }
}

impl From<std::io::Error> for Halt {
    fn from(error: std::io::Error) -> Halt {
        Halt::Refused(error.raw_os_error().unwrap_or(libc::EIO))
    }
}

const ACCESSES_BETWEEN_LOOKS: u64 = 4096;
const BYTES_BETWEEN_LOOKS: u64 = 16 << 20;
/// The interval at which a paced worker checks the clock and sleeps, in seconds.
const PACING_STEP_S: f64 = 1e-3;
/// The longest wait between two checks of the stop flag.
const NAP: Duration = Duration::from_millis(50);

/// The clock, rate and counts of one worker.
pub struct Pace<'a> {
    control: &'a Control,
    row: ClientRow<'a>,
    begun: Instant,
    end: Option<Instant>,
    rate: Option<f64>,
    /// True if fault counts are published too, for the series.
    publish_faults: bool,
    between_looks: u64,
    until_look: u64,
    access_count: u64,
}

impl<'a> Pace<'a> {
    /// Starts the worker's clock. `time` limits the phase; `rate` is in accesses a second.
    pub fn new(
        control: &'a Control,
        client: u32,
        time: Option<Duration>,
        rate: Option<f64>,
        publish_faults: bool,
    ) -> Pace<'a> {
        let begun = Instant::now();
        Pace {
            control,
            row: control.client(client),
            begun,
            end: time.map(|time| begun + time),
            rate,
            publish_faults,
            between_looks: 1,
            until_look: 1,
            access_count: 0,
        }
    }

    /// Sets the number of accesses between checks for grains of this size.
    pub fn begin_touch(&mut self, grain_bytes: u64) {
        let by_bytes = BYTES_BETWEEN_LOOKS / grain_bytes.max(1);
        let by_rate = self.rate.map_or(u64::MAX, |rate| (rate * PACING_STEP_S) as u64);
        self.between_looks = ACCESSES_BETWEEN_LOOKS.min(by_bytes).min(by_rate).max(1);
        self.until_look = self.until_look.min(self.between_looks);
    }

    /// Returns the number of accesses before the next call of [`Pace::done`].
    #[inline(always)]
    pub fn accesses_until_look(&self) -> u64 {
        self.until_look
    }

    /// Counts accesses; at a check, sleeps to keep the rate, and halts if the phase is over.
    #[inline(always)]
    pub fn done(&mut self, accesses: u64) -> Result<(), Halt> {
        self.access_count += accesses;
        self.until_look -= accesses;
        if self.until_look > 0 { Ok(()) } else { self.look() }
    }

    fn look(&mut self) -> Result<(), Halt> {
        self.until_look = self.between_looks;
        self.publish();
        if let Some(rate) = self.rate {
            let due = self.begun + Duration::from_secs_f64(self.access_count as f64 / rate);
            self.sleep_until(due)?;
        }
        self.between_operations()
    }

    /// Halts if the phase's time is up or all workers are to stop.
    pub fn between_operations(&self) -> Result<(), Halt> {
        let time_is_up = self.end.is_some_and(|end| Instant::now() >= end);
        if time_is_up || self.control.is_stopping() { Err(Halt::Over) } else { Ok(()) }
    }

    /// Sleeps; halts early if all workers are to stop or the phase's time ends.
    pub fn sleep(&self, time: Duration) -> Result<(), Halt> {
        self.sleep_until(Instant::now() + time)
    }

    fn sleep_until(&self, due: Instant) -> Result<(), Halt> {
        loop {
            self.between_operations()?;
            let end = self.end.map_or(due, |end| end.min(due));
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return if end == due { Ok(()) } else { Err(Halt::Over) };
            }
            self.control.wait_for_stop(left);
        }
    }

    /// Waits for all clients that have not ended. The phase's time does not end this wait.
    pub fn barrier(&self) -> Result<(), Halt> {
        let generation = self.control.arrive();
        while self.control.waits_at_barrier(generation, NAP) {
            if self.control.is_stopping() {
                return Err(Halt::Over);
            }
        }
        self.between_operations()
    }

    /// Publishes the counts so far, for the series and the progress.
    pub fn publish(&self) {
        self.row.set_access_count(self.access_count);
        if self.publish_faults {
            let usage = thread_usage();
            self.row.set_faults(usage.minor_fault_count, usage.major_fault_count);
        }
    }
}
