//! A thread's way to its next burst: how many instructions that is, how many it has gone, and how long the rest takes.
//!
//! Counting copies count; what a thread does natively is reckoned by its pace in these.

use super::{Engine, Plan};
use crate::status::status;
use crate::system;
use crate::threads;
use std::sync::atomic::Ordering::Relaxed;

/// How fast the program is in counting copies, of late.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pace {
    instructions: f64,
    ns: f64,
}

/// What is remembered of the pace.
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

    /// None before the pace is known.
    fn instructions_in(self, ns: u64) -> u64 {
        if self.is_known() { (ns as f64 * self.instructions / self.ns) as u64 } else { 0 }
    }

    fn ns_of(self, instructions: i64) -> i64 {
        (instructions as f64 * (self.ns / self.instructions.max(1.0))) as i64
    }
}

/// Of a thread.
#[derive(Debug, Clone, Copy)]
pub struct Way {
    /// The thread that this is of: a number is another thread's once that has ended.
    generation: u32,
    /// Whether it has counted.
    has_counted: bool,
    /// Instructions until its next burst; fewer than none: they are over.
    pub left: i64,
    /// Instructions since it last counted.
    pub gone: u64,
    /// Its CPU time when it went on natively, and when it last began to count.
    pub since_ns: u64,
    counted_ns: u64,
}

/// Until a thread's first burst.
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

/// No processor executes as many in a nanosecond, though each element of a repeated instruction counts as one.
const INSTRUCTIONS_PER_NS_MAX: u64 = 1000;
/// Of a gap: that its thread has not counted before.
const FIRST: u64 = 1 << 63;

/// CPU time from one moment of a thread to another. A thread's clock never goes backwards, so that two moments which say
/// so are not one thread's.
fn between(since_ns: u64, now_ns: u64) -> u64 {
    now_ns.checked_sub(since_ns).expect("the clock of a thread has gone backwards")
}

impl Engine {
    pub(super) fn way(&mut self) -> &mut Way {
        &mut self.ways[self.area.thread as usize]
    }

    /// Forgets what is known of another thread that had the number before.
    pub(super) fn know_thread(&mut self) {
        let generation = threads::generation(self.area.thread);
        if self.way().generation != generation {
            *self.way() = Way { generation, ..Way::default() };
        }
    }

    /// The thread has gone so far, not in a burst.
    fn goes(&mut self, instructions: u64) {
        let way = self.way();
        way.left = way.left.saturating_sub_unsigned(instructions);
        way.gone = way.gone.saturating_add(instructions);
    }

    /// The thread comes back.
    pub(super) fn went_natively(&mut self) {
        let now_ns = system::now_ns(libc::CLOCK_THREAD_CPUTIME_ID);
        let ns = between(self.way().since_ns, now_ns);
        self.goes(self.pace.instructions_in(ns));
    }

    /// Takes what counting copies have counted.
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

    /// A burst begins to count: the gap before it, which is its weight. One that the thread's CPU time does not allow is
    /// an error of ours.
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

    /// After a burst: the way to the next one.
    pub(super) fn draw_way(&mut self) {
        let took = between(self.began_ns, system::now_ns(libc::CLOCK_MONOTONIC));
        // Whoever was stopped for long in a burst is to have another one soon.
        let took = took.min(self.mean_ns.saturating_mul(16)).max(1);
        self.mean_ns = (self.mean_ns * 15 + took) / 16;
        if self.pace.is_known() {
            let Plan { share, .. } = self.plan;
            let mean = self.pace.instructions_in(self.mean_ns * (100 - share) / share);
            let left = (mean / 2).saturating_add(self.draw(mean));
            self.way().left = i64::try_from(left).unwrap_or(i64::MAX);
        }
    }

    /// Whether the next burst is so near that it begins now, and warms up for longer.
    pub(super) fn is_close(&mut self) -> bool {
        let left = self.way().left;
        left <= 0 || self.pace.is_known() && self.pace.ns_of(left) <= self.plan.close_ns as i64
    }

    /// Until the next look at what was counted: half of the way, as the program may become faster.
    pub(super) fn next_poll_ns(&mut self) -> u64 {
        let far_ns = self.pace.ns_of(self.way().left).max(0) as u64;
        match self.plan {
            Plan { stress: Some(_), poll_ns, .. } => poll_ns,
            Plan { close_ns, poll_ns, .. } => (far_ns / 2).clamp(close_ns, poll_ns),
        }
    }
}
