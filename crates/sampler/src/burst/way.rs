//! A thread's way to its next burst: how many instructions that is, how many it has gone, and how long the rest takes.
//!
//! Counting copies count; what a thread does natively is reckoned by its pace in these.

use super::{Engine, Plan};
use crate::system;

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
    /// Instructions until its next burst; fewer than none: they are over.
    pub left: i64,
    /// Instructions since it last counted.
    pub gone: u64,
    /// Its CPU time when it went on natively.
    pub since_ns: u64,
}

/// Until a thread's first burst.
impl Default for Way {
    fn default() -> Way {
        Way { left: 20_000_000, gone: 0, since_ns: 0 }
    }
}

impl Engine {
    pub(super) fn way(&mut self) -> &mut Way {
        &mut self.ways[self.area.thread as usize]
    }

    /// The thread has gone so far, not in a burst.
    fn goes(&mut self, instructions: u64) {
        let way = self.way();
        way.left -= instructions as i64;
        way.gone += instructions;
    }

    /// The thread comes back.
    pub(super) fn went_natively(&mut self) {
        let ns = system::now_ns(libc::CLOCK_THREAD_CPUTIME_ID) - self.way().since_ns;
        self.goes(self.pace.instructions_in(ns));
    }

    /// Takes what counting copies have counted.
    pub(super) fn take_count(&mut self) {
        let count = std::mem::take(&mut self.area.counter);
        let now = system::now_ns(libc::CLOCK_THREAD_CPUTIME_ID);
        self.pace.learn(count, now - std::mem::replace(&mut self.between_ns, now));
        self.goes(count);
        self.had += count;
        self.between += count;
    }

    /// After a burst: the way to the next one.
    pub(super) fn draw_way(&mut self) {
        let took = system::now_ns(libc::CLOCK_MONOTONIC) - self.began_ns;
        self.mean_ns = (self.mean_ns * 15 + took) / 16;
        if self.pace.is_known() {
            let Plan { share, .. } = self.plan;
            let mean = self.pace.instructions_in(self.mean_ns * (100 - share) / share);
            self.way().left = (mean / 2 + self.draw(mean)) as i64;
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
