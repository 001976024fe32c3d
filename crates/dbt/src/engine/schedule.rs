//! The distance of each thread to its next burst: the instructions in total, those executed, and the time
//! that the rest takes.
//!
//! Counting translations count instructions. Those that a thread executes natively are estimated from its
//! pace in counting translations.

use super::threads;
use super::{Engine, SamplingConfig};
use crate::status::status;
use crate::system;
use std::sync::atomic::Ordering::Relaxed;

/// The recent speed of the program in counting translations.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pace {
    instructions: f64,
    ns: f64,
}

/// The CPU time that the pace remembers; older measurements are halved.
const PACE_NS: f64 = 100e6;

impl Pace {
    fn learn(&mut self, instructions: u64, ns: u64) {
        self.instructions += instructions as f64;
        self.ns += ns as f64;
        if self.ns > PACE_NS {
            *self = Pace { instructions: self.instructions / 2.0, ns: self.ns / 2.0 };
        }
    }

    fn is_known(self) -> bool {
        self.ns > 0.0
    }

    /// Returns the instructions that the program executes in `ns`; 0 before the pace is known.
    fn instructions_in(self, ns: u64) -> u64 {
        if self.is_known() { (ns as f64 * self.instructions / self.ns) as u64 } else { 0 }
    }

    fn ns_of(self, instructions: i64) -> i64 {
        (instructions as f64 * (self.ns / self.instructions.max(1.0))) as i64
    }
}

/// A thread's progress towards its next burst.
#[derive(Debug, Clone, Copy)]
pub struct SamplingSchedule {
    /// The generation of the thread's number. A later thread may have the same number.
    generation: u32,
    /// True if one of the thread's bursts has counted.
    has_counted: bool,
    /// Instructions until the thread's next burst; negative if it is overdue.
    pub left: i64,
    /// Instructions since the thread last began to count.
    pub gone: u64,
    /// The thread's CPU time when it last went on natively, and when it last began to count.
    pub since_ns: u64,
    counted_ns: u64,
}

/// The distance before a thread's first burst.
impl Default for SamplingSchedule {
    fn default() -> SamplingSchedule {
        SamplingSchedule {
            generation: 0,
            has_counted: false,
            left: 20_000_000,
            gone: 0,
            since_ns: 0,
            counted_ns: 0,
        }
    }
}

/// More instructions than any processor executes in a nanosecond, though each element of a repeated
/// instruction counts as one.
const INSTRUCTIONS_PER_NS_MAX: u64 = 1000;
/// A flag in a gap: the thread has not counted before.
const FIRST: u64 = 1 << 63;

/// Returns the CPU time between two readings of a thread's clock. Panics if the clock went backwards: the
/// readings then come from different threads.
fn between(since_ns: u64, now_ns: u64) -> u64 {
    now_ns.checked_sub(since_ns).expect("the clock of a thread has gone backwards")
}

impl Engine {
    pub(super) fn schedule(&mut self) -> &mut SamplingSchedule {
        &mut self.sampling.schedules[self.thread_state.thread as usize]
    }

    /// Resets the distance if another thread had the number before.
    pub(super) fn reset_if_new_thread(&mut self) {
        let generation = threads::generation(self.thread_state.thread);
        if self.schedule().generation != generation {
            *self.schedule() = SamplingSchedule { generation, ..SamplingSchedule::default() };
        }
    }

    /// Counts instructions that the thread executed outside bursts.
    fn advance(&mut self, instructions: u64) {
        let schedule = self.schedule();
        schedule.left = schedule.left.saturating_sub_unsigned(instructions);
        schedule.gone = schedule.gone.saturating_add(instructions);
    }

    /// Counts an estimate of the instructions that the thread executed natively.
    pub(super) fn count_native(&mut self) {
        let now_ns = system::now_ns(libc::CLOCK_THREAD_CPUTIME_ID);
        let ns = between(self.schedule().since_ns, now_ns);
        self.advance(self.sampling.pace.instructions_in(ns));
    }

    /// Reads and clears the counter of counting translations.
    pub(super) fn drain_counter(&mut self) {
        let count = std::mem::take(&mut self.thread_state.counter);
        let now_ns = system::now_ns(libc::CLOCK_THREAD_CPUTIME_ID);
        let ns = between(std::mem::replace(&mut self.sampling.between_ns, now_ns), now_ns);
        self.sampling.pace.learn(count, ns);
        self.advance(count);
        self.sampling.executed += count;
        self.sampling.between += count;
        status().counted.store(self.sampling.between, Relaxed);
    }

    /// Returns the gap before a counted part, in instructions: the weight of the counted part. Panics if the
    /// thread's CPU time does not allow so many, as that is an error of ours.
    pub(super) fn take_weight(&mut self) -> u64 {
        let now_ns = system::now_ns(libc::CLOCK_THREAD_CPUTIME_ID);
        let schedule = self.schedule();
        let ns = between(std::mem::replace(&mut schedule.counted_ns, now_ns), now_ns);
        let gone = std::mem::take(&mut schedule.gone);
        let first = if std::mem::replace(&mut schedule.has_counted, true) { 0 } else { FIRST };
        assert!(
            gone <= ns.saturating_mul(INSTRUCTIONS_PER_NS_MAX),
            "{gone} instructions in {ns} ns of CPU time"
        );
        status().cpu_ns.fetch_add(ns, Relaxed);
        gone | first
    }

    /// Draws the distance to the next burst, after one has ended.
    pub(super) fn draw_next_burst(&mut self) {
        let took = between(self.sampling.began_ns, system::now_ns(libc::CLOCK_MONOTONIC));
        // One burst that was stopped for long must not delay the next one for long.
        let took = took.min(self.sampling.mean_ns.saturating_mul(16)).max(1);
        self.sampling.mean_ns = (self.sampling.mean_ns * 15 + took) / 16;
        if self.sampling.pace.is_known() {
            let SamplingConfig { share, .. } = self.config;
            let mean =
                self.sampling.pace.instructions_in(self.sampling.mean_ns * (100 - share) / share);
            let left = (mean / 2).saturating_add(self.random_below(mean));
            self.schedule().left = i64::try_from(left).unwrap_or(i64::MAX);
        }
    }

    /// Returns true if the next burst is so near that it begins now, with a longer warm-up.
    pub(super) fn is_burst_due(&mut self) -> bool {
        let left = self.schedule().left;
        left <= 0
            || self.sampling.pace.is_known()
                && self.sampling.pace.ns_of(left) <= self.config.close_ns as i64
    }

    /// Returns the time until the next poll: half of the estimate, as the program may become faster.
    pub(super) fn next_poll_ns(&mut self) -> u64 {
        let far_ns = self.sampling.pace.ns_of(self.schedule().left).max(0) as u64;
        match self.config {
            SamplingConfig { stress: Some(_), poll_ns, .. } => poll_ns,
            SamplingConfig { close_ns, poll_ns, .. } => (far_ns / 2).clamp(close_ns, poll_ns),
        }
    }
}
