//! The distance of each thread to its next burst: the instructions in total, those executed, and the time
//! that the rest takes.
//!
//! Counting translations count instructions. Those that a thread executes natively are estimated from its
//! pace in counting translations.

use super::{Engine, Plan};
use crate::status::status;
use crate::system;
use crate::threads;
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
pub struct Way {
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
impl Default for Way {
    fn default() -> Way {
        Way {
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
    pub(super) fn way(&mut self) -> &mut Way {
        &mut self.ways[self.area.thread as usize]
    }

    /// Resets the distance if another thread had the number before.
    pub(super) fn know_thread(&mut self) {
        let generation = threads::generation(self.area.thread);
        if self.way().generation != generation {
            *self.way() = Way { generation, ..Way::default() };
        }
    }

    /// Counts instructions that the thread executed outside bursts.
    fn goes(&mut self, instructions: u64) {
        let way = self.way();
        way.left = way.left.saturating_sub_unsigned(instructions);
        way.gone = way.gone.saturating_add(instructions);
    }

    /// Counts an estimate of the instructions that the thread executed natively.
    pub(super) fn went_natively(&mut self) {
        let now_ns = system::now_ns(libc::CLOCK_THREAD_CPUTIME_ID);
        let ns = between(self.way().since_ns, now_ns);
        self.goes(self.pace.instructions_in(ns));
    }

    /// Reads and clears the counter of counting translations.
    pub(super) fn take_count(&mut self) {
        let count = std::mem::take(&mut self.area.counter);
        let now_ns = system::now_ns(libc::CLOCK_THREAD_CPUTIME_ID);
        let ns = between(std::mem::replace(&mut self.between_ns, now_ns), now_ns);
        self.pace.learn(count, ns);
        self.goes(count);
        self.had += count;
        self.between += count;
        status().counted.store(self.between, Relaxed);
    }

    /// Returns the gap before a counted part, in instructions: the weight of the counted part. Panics if the
    /// thread's CPU time does not allow so many, as that is an error of ours.
    pub(super) fn weigh(&mut self) -> u64 {
        let now_ns = system::now_ns(libc::CLOCK_THREAD_CPUTIME_ID);
        let way = self.way();
        let ns = between(std::mem::replace(&mut way.counted_ns, now_ns), now_ns);
        let gone = std::mem::take(&mut way.gone);
        let first = if std::mem::replace(&mut way.has_counted, true) { 0 } else { FIRST };
        assert!(
            gone <= ns.saturating_mul(INSTRUCTIONS_PER_NS_MAX),
            "{gone} instructions in {ns} ns of CPU time"
        );
        status().cpu_ns.fetch_add(ns, Relaxed);
        gone | first
    }

    /// Draws the distance to the next burst, after one has ended.
    pub(super) fn draw_way(&mut self) {
        let took = between(self.began_ns, system::now_ns(libc::CLOCK_MONOTONIC));
        // One burst that was stopped for long must not delay the next one for long.
        let took = took.min(self.mean_ns.saturating_mul(16)).max(1);
        self.mean_ns = (self.mean_ns * 15 + took) / 16;
        if self.pace.is_known() {
            let Plan { share, .. } = self.plan;
            let mean = self.pace.instructions_in(self.mean_ns * (100 - share) / share);
            let left = (mean / 2).saturating_add(self.draw(mean));
            self.way().left = i64::try_from(left).unwrap_or(i64::MAX);
        }
    }

    /// Returns true if the next burst is so near that it begins now, with a longer warm-up.
    pub(super) fn is_close(&mut self) -> bool {
        let left = self.way().left;
        left <= 0 || self.pace.is_known() && self.pace.ns_of(left) <= self.plan.close_ns as i64
    }

    /// Returns the time until the next poll: half of the estimate, as the program may become faster.
    pub(super) fn next_poll_ns(&mut self) -> u64 {
        let far_ns = self.pace.ns_of(self.way().left).max(0) as u64;
        match self.plan {
            Plan { stress: Some(_), poll_ns, .. } => poll_ns,
            Plan { close_ns, poll_ns, .. } => (far_ns / 2).clamp(close_ns, poll_ns),
        }
    }
}
