//! The stages of a thread in translated code: counting, a burst's warm-up, and its counted part.

use super::faults;
use super::threads::{self, Polls};
use super::*;
use crate::cache::CacheKind;
use crate::log_drain::ROUNDS;
use crate::recorder::StreamPhase;
use crate::status::{self, status};
use crate::system;
use crate::thread_state::{FRAMES, SLOTS};
use crate::translate::INSTRUCTIONS;
use std::sync::atomic::Ordering::*;

impl Engine {
    pub(super) fn random_below(&mut self, below: u64) -> u64 {
        self.sampling.rng_state ^= self.sampling.rng_state << 13;
        self.sampling.rng_state ^= self.sampling.rng_state >> 7;
        self.sampling.rng_state ^= self.sampling.rng_state << 17;
        self.sampling.rng_state % below.max(1)
    }

    /// Begins with a thread that its timer has stopped at `pc`.
    pub(super) fn begin(&mut self, pc: u64) {
        if faults::are_of_calls() || threads::has_shadow_stack() {
            self.leave(pc, BurstEnd::Handler);
        }
        self.check_maps();
        self.thread_state.fs = threads::fs_base();
        self.reset_if_new_thread();
        self.count_native();
        self.begin_stage();
        self.enter_translation(pc);
    }

    /// Enters counting translations, or a burst if one is due.
    pub(super) fn begin_stage(&mut self) {
        let is_between = match self.config.stress {
            Some(stress) => stress.between > 0 && self.sampling.stage == BurstStage::Out,
            None => !self.is_burst_due(),
        };
        if is_between {
            return self.enter_stage(BurstStage::Between, 0);
        }
        self.sampling.began_ns = system::now_ns(libc::CLOCK_MONOTONIC);
        self.recorder.begin(self.thread_state.thread);
        match self.config.stress {
            Some(stress) => {
                let length = self.random_below(stress.counted);
                self.enter_stage(BurstStage::Counted, length);
            }
            None => {
                let at_most = self.config.warm.max(self.sampling.total / self.config.warm_share);
                self.sampling.warm = match self.recorder.warm_up() {
                    0 => self.config.warm,
                    length => length.min(at_most),
                };
                // The counted part begins at the instruction that was drawn.
                let early = self.schedule().left.max(0) as u64;
                self.enter_stage(BurstStage::Warming, early + self.sampling.warm);
            }
        }
    }

    /// Enters a stage of at most `instructions` instructions.
    pub(super) fn enter_stage(&mut self, stage: BurstStage, instructions: u64) {
        let before = std::mem::replace(&mut self.sampling.stage, stage);
        (self.sampling.left, self.sampling.executed) = (instructions as i64, 0);
        self.kind =
            if stage == BurstStage::Between { CacheKind::Counting } else { CacheKind::Logging };
        let is_over = matches!(stage, BurstStage::Out | BurstStage::Between);
        if is_over && matches!(before, BurstStage::Counted | BurstStage::Warming) {
            self.recorder.phase(StreamPhase::Skipped, 0);
        }
        match stage {
            BurstStage::Out => {}
            BurstStage::Between => {
                self.thread_state.counter = 0;
                self.sampling.between_ns = system::now_ns(libc::CLOCK_THREAD_CPUTIME_ID);
                self.stop_counting(false);
                let next_ns = self.next_poll_ns();
                self.sampling.polls = Some(Polls::start(next_ns));
            }
            BurstStage::Warming => self.recorder.phase(StreamPhase::Warming, 0),
            BurstStage::Counted => {
                let gap = self.take_weight();
                self.recorder.phase(StreamPhase::Counted, gap);
            }
        }
        self.empty_log();
    }

    pub(super) fn empty_log(&mut self) {
        self.thread_state.position = (FRAMES * SLOTS * 8) as u64;
        // No block has more than INSTRUCTIONS instructions.
        let rounds = self.sampling.left / (FRAMES as i64 * i64::from(INSTRUCTIONS));
        self.thread_state.rounds = rounds.clamp(1, i64::from(ROUNDS)) as u32;
    }

    /// Sends the log to the recorder and empties it.
    pub(super) fn drain_log(&mut self) {
        if self.kind == CacheKind::Counting {
            return;
        }
        let from = (self.thread_state.position as usize / (8 * SLOTS)).max(1);
        let counts = self.log_drain.take(self.thread_state, from);
        let count = self.recorder.took(counts);
        self.sampling.left -= count as i64;
        self.sampling.executed += count;
        self.sampling.total += count;
        status().instructions.store(self.sampling.total, Relaxed);
        if self.sampling.stage == BurstStage::Warming {
            self.schedule().gone += count;
        }
        self.empty_log();
    }

    /// Enters the next stage if this one is complete. Returns the reason if the burst is over.
    pub(super) fn is_over(&mut self) -> Option<BurstEnd> {
        let is_done = self.sampling.left <= 0;
        match self.sampling.stage {
            BurstStage::Warming if is_done => {
                self.enter_stage(BurstStage::Counted, self.sampling.warm / self.config.counted_part)
            }
            BurstStage::Counted if is_done => return Some(BurstEnd::Done),
            _ => {}
        }
        self.must_leave().then_some(BurstEnd::Signal)
    }

    pub(super) fn must_leave(&mut self) -> bool {
        threads::waiting_signals() & !self.thread_state.context.mask != 0
            || status::is_closing()
            || IS_CANCELLED.load(Relaxed)
    }

    /// Handles a poll: a counting translation trapped at the start of block `number`.
    pub(super) fn poll(&mut self, number: usize) {
        let pc = self.cache().blocks[number].start;
        self.drain_counter();
        self.stop_counting(false);
        if self.must_leave() || WANTED.swap(false, Relaxed) {
            self.leave(pc, BurstEnd::Signal);
        }
        let is_over = match self.config.stress {
            Some(stress) => self.sampling.executed > stress.between,
            None => self.is_burst_due(),
        };
        if is_over {
            self.end_polls();
            self.begin_stage();
        } else {
            let next_ns = self.next_poll_ns();
            if let Some(polls) = &self.sampling.polls {
                polls.next(next_ns);
            }
        }
        self.enter_translation(pc);
    }

    pub(super) fn end_polls(&mut self) {
        if let Some(polls) = self.sampling.polls.take() {
            polls.end();
        }
    }

    /// Ends a complete burst and draws the next one.
    pub(super) fn done(&mut self, pc: u64) {
        self.drain_log();
        ended(BurstEnd::Done);
        self.draw_next_burst();
        if self.config.stress.is_some_and(|stress| stress.between == 0) {
            self.leave(pc, BurstEnd::Done);
        }
        self.enter_stage(BurstStage::Between, 0);
        self.enter_translation(pc);
    }
}
