//! What the supervisor and its workers share, over threads and forks alike: start, stop, barrier,
//! the first failure, and one row of figures for each client.
//!
//! Invariant: workers only ever wait on these words with a limit, so the death of one of them
//! cannot hang the others.

use super::pace::Halt;
use super::touch::Wrong;
use crate::sys::shared::{SharedWords, wait, wake_all};
use std::io;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::time::Duration;

const STOP: usize = 0;
const READY: usize = 1;
const GATE: usize = 2;
const ENDED: usize = 3;
/// Clients that take part in the high half, those that have arrived in the low half.
const BARRIER: usize = 4;
const GENERATION: usize = 5;
const FAILURE: usize = 6;
const FAILURE_WORDS: usize = 7; // operation, is_wrong, errno, offset, expected, found, address
const ROWS: usize = 16;
const ROW_WORDS: usize = 16;

const NO_FAILURE: u64 = 0;
const WRITING_FAILURE: u64 = 1;
const FAILURE_WRITTEN: u64 = 2;

/// The first failure of a phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failure {
    /// Index of the operation in its phase.
    pub operation: usize,
    /// Why.
    pub halt: Halt,
    /// Of the wrong word in its process; 0 for refusals.
    pub address: u64,
}

/// The shared words of one phase.
pub struct Control {
    words: SharedWords,
    clients: u32,
}

impl Control {
    /// For so many clients.
    pub fn new(clients: u32) -> io::Result<Control> {
        let words = SharedWords::new(ROWS + clients as usize * ROW_WORDS)?;
        words.word(BARRIER).store(u64::from(clients) << 32, Relaxed);
        Ok(Control { words, clients })
    }

    /// Everyone is to end soon.
    pub fn stop(&self) {
        self.words.futex(STOP).store(1, Release);
        for word in [STOP, GATE, GENERATION] {
            wake_all(self.words.futex(word));
        }
    }

    /// Whether everyone is to end soon.
    #[inline]
    pub fn is_stopping(&self) -> bool {
        self.words.futex(STOP).load(Relaxed) != 0
    }

    /// Sleeps for a while, or until everyone is to stop.
    pub fn wait_for_stop(&self, at_most: Duration) {
        wait(self.words.futex(STOP), 0, at_most);
    }

    /// A worker is ready; waits until all are.
    pub fn wait_at_gate(&self) {
        let ready = self.words.futex(READY).fetch_add(1, AcqRel) + 1;
        if ready == self.clients {
            self.words.futex(GATE).store(1, Release);
            wake_all(self.words.futex(GATE));
        }
        let gate = self.words.futex(GATE);
        while gate.load(Acquire) == 0 && !self.is_stopping() {
            wait(gate, 0, Duration::from_millis(50));
        }
    }

    /// A client has done all its work.
    pub fn end(&self, client: u32, time_ns: u64) {
        self.client(client).set(END_NS, time_ns.max(1));
        self.change_barrier(|parties, arrived| (parties - 1, arrived));
        self.words.futex(ENDED).fetch_add(1, AcqRel);
        wake_all(self.words.futex(ENDED));
    }

    /// How many clients have ended.
    pub fn ended(&self) -> u32 {
        self.words.futex(ENDED).load(Acquire)
    }

    /// Waits for another client's end.
    pub fn wait_for_end(&self, ended: u32, at_most: Duration) {
        wait(self.words.futex(ENDED), ended, at_most);
    }

    /// Comes to the barrier; the generation to wait in.
    pub fn arrive(&self) -> u32 {
        let generation = self.words.futex(GENERATION).load(Acquire);
        self.change_barrier(|parties, arrived| (parties, arrived + 1));
        generation
    }

    /// Waits a while for the barrier to open; whether it is still shut.
    pub fn waits_at_barrier(&self, generation: u32, at_most: Duration) -> bool {
        let word = self.words.futex(GENERATION);
        if word.load(Acquire) == generation {
            wait(word, generation, at_most);
        }
        word.load(Acquire) == generation
    }

    /// Opens the barrier when all that take part have arrived.
    fn change_barrier(&self, change: impl Fn(u64, u64) -> (u64, u64)) {
        let word = self.words.word(BARRIER);
        let mut before = word.load(Acquire);
        loop {
            let (parties, arrived) = change(before >> 32, before & u64::from(u32::MAX));
            let opens = arrived > 0 && arrived >= parties;
            let after = parties << 32 | if opens { 0 } else { arrived };
            match word.compare_exchange(before, after, AcqRel, Acquire) {
                Ok(_) if opens => {
                    self.words.futex(GENERATION).fetch_add(1, AcqRel);
                    return wake_all(self.words.futex(GENERATION));
                }
                Ok(_) => return,
                Err(now) => before = now,
            }
        }
    }

    /// Notes a failure, if it is the first, and stops everyone.
    pub fn fail(&self, failure: Failure) {
        let (is_wrong, errno, wrong) = match failure.halt {
            Halt::Over => return,
            Halt::Refused(errno) => (0, errno as u64, Wrong { offset: 0, expected: 0, found: 0 }),
            Halt::Wrong(wrong) => (1, 0, wrong),
        };
        let state = self.words.word(FAILURE);
        if state.compare_exchange(NO_FAILURE, WRITING_FAILURE, AcqRel, Acquire).is_ok() {
            let Wrong { offset, expected, found } = wrong;
            let operation = failure.operation as u64;
            let words = [operation, is_wrong, errno, offset, expected, found, failure.address];
            for (index, value) in words.into_iter().enumerate() {
                self.words.word(FAILURE_WORDS + index).store(value, Relaxed);
            }
            state.store(FAILURE_WRITTEN, Release);
        }
        self.stop();
    }

    /// The first failure, once everyone has ended.
    pub fn failure(&self) -> Option<Failure> {
        if self.words.word(FAILURE).load(Acquire) != FAILURE_WRITTEN {
            return None;
        }
        let [operation, is_wrong, errno, offset, expected, found, address] =
            std::array::from_fn(|index| self.words.word(FAILURE_WORDS + index).load(Relaxed));
        let halt = if is_wrong == 1 {
            Halt::Wrong(Wrong { offset, expected, found })
        } else {
            Halt::Refused(errno as i32)
        };
        Some(Failure { operation: operation as usize, halt, address })
    }

    /// The row of a client.
    pub fn client(&self, client: u32) -> ClientRow<'_> {
        ClientRow { words: &self.words, first: ROWS + client as usize * ROW_WORDS }
    }

    /// All rows.
    pub fn rows(&self) -> impl Iterator<Item = ClientRow<'_>> {
        (0..self.clients).map(|client| self.client(client))
    }
}

const ACCESS_COUNT: usize = 0;
const MINOR_FAULTS: usize = 1;
const MAJOR_FAULTS: usize = 2;
const END_NS: usize = 3;
const RUN_QUEUE_NS: usize = 4;
const LOCKED_BYTES: usize = 5;
const RESIDENT_BYTES: usize = 6;
const PAGE_TABLE_BYTES: usize = 7;
const HUGE_BYTES: usize = 8;

/// One client's figures. Readings are stored plus one: 0 stands for "not read".
#[derive(Clone, Copy)]
pub struct ClientRow<'a> {
    words: &'a SharedWords,
    first: usize,
}

/// A figure that a client reads about itself at its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Figure {
    /// Runnable but not running.
    RunQueueNs,
    /// Most bytes locked at once.
    LockedBytesMax,
    /// Most resident bytes.
    ResidentBytesMax,
    /// Page tables.
    PageTableBytes,
    /// On huge pages.
    HugeBytes,
}

impl Figure {
    fn index(self) -> usize {
        match self {
            Figure::RunQueueNs => RUN_QUEUE_NS,
            Figure::LockedBytesMax => LOCKED_BYTES,
            Figure::ResidentBytesMax => RESIDENT_BYTES,
            Figure::PageTableBytes => PAGE_TABLE_BYTES,
            Figure::HugeBytes => HUGE_BYTES,
        }
    }
}

impl ClientRow<'_> {
    fn set(&self, index: usize, value: u64) {
        self.words.word(self.first + index).store(value, Relaxed);
    }

    fn get(&self, index: usize) -> u64 {
        self.words.word(self.first + index).load(Relaxed)
    }

    /// Accesses so far.
    pub fn set_access_count(&self, count: u64) {
        self.set(ACCESS_COUNT, count);
    }

    /// Accesses so far.
    pub fn access_count(&self) -> u64 {
        self.get(ACCESS_COUNT)
    }

    /// Faults so far.
    pub fn set_faults(&self, minor: u64, major: u64) {
        self.set(MINOR_FAULTS, minor);
        self.set(MAJOR_FAULTS, major);
    }

    /// Minor and major faults so far.
    pub fn faults(&self) -> (u64, u64) {
        (self.get(MINOR_FAULTS), self.get(MAJOR_FAULTS))
    }

    /// When it ended, since the start of the run; none while it works.
    pub fn end_ns(&self) -> Option<u64> {
        Some(self.get(END_NS)).filter(|ns| *ns > 0)
    }

    /// Notes a figure.
    pub fn note(&self, figure: Figure, value: Option<u64>) {
        self.set(figure.index(), value.map_or(0, |value| value.saturating_add(1)));
    }

    /// A figure, if it was read.
    pub fn figure(&self, figure: Figure) -> Option<u64> {
        self.get(figure.index()).checked_sub(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_barrier_opens_when_all_arrive_or_leave() {
        let control = Control::new(3).unwrap();
        let first = control.arrive();
        assert!(control.waits_at_barrier(first, Duration::ZERO));
        control.arrive();
        control.end(2, 1);
        assert!(!control.waits_at_barrier(first, Duration::ZERO));
        let second = control.arrive();
        assert!(control.waits_at_barrier(second, Duration::ZERO));
        control.arrive();
        assert!(!control.waits_at_barrier(second, Duration::ZERO));
    }

    #[test]
    fn the_first_failure_wins() {
        let control = Control::new(2).unwrap();
        assert_eq!(control.failure(), None);
        let wrong = Wrong { offset: 8, expected: 1, found: 2 };
        let first = Failure { operation: 3, halt: Halt::Wrong(wrong), address: 4096 };
        control.fail(first);
        control.fail(Failure { operation: 0, halt: Halt::Refused(12), address: 0 });
        assert_eq!(control.failure(), Some(first));
        assert!(control.is_stopping());
    }

    #[test]
    fn figures_that_were_not_read_are_none() {
        let control = Control::new(1).unwrap();
        let row = control.client(0);
        assert_eq!(row.figure(Figure::HugeBytes), None);
        row.note(Figure::HugeBytes, Some(0));
        assert_eq!(row.figure(Figure::HugeBytes), Some(0));
    }
}
