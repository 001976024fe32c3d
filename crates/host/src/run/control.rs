//! The words that the supervisor and its workers share, across threads and forks: start, stop, barrier,
//! first failure, and one row of figures per client.
//!
//! Invariant: workers wait on these words only with a timeout, so the death of one cannot hang the
//! others.

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
/// The participating clients in the high half, the arrived ones in the low half.
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
    /// The reason why the worker halted.
    pub halt: Halt,
    /// The address of the wrong word in its process; 0 for refusals.
    pub address: u64,
}

/// The shared words of one phase.
pub struct Control {
    words: SharedWords,
    clients: u32,
}

impl Control {
    /// Creates the shared words for this many clients. Errors are those of the shared mapping.
    pub fn new(clients: u32) -> io::Result<Control> {
        let words = SharedWords::new(ROWS + clients as usize * ROW_WORDS)?;
        words.word(BARRIER).store(u64::from(clients) << 32, Relaxed);
        Ok(Control { words, clients })
    }

    /// Sets the stop flag and wakes all workers that wait.
    pub fn stop(&self) {
        self.words.futex(STOP).store(1, Release);
        for word in [STOP, GATE, GENERATION] {
            wake_all(self.words.futex(word));
        }
    }

    /// Returns true once [`Control::stop`] was called.
    #[inline]
    pub fn is_stopping(&self) -> bool {
        self.words.futex(STOP).load(Relaxed) != 0
    }

    /// Sleeps until `stop` is called, for `at_most` at the longest.
    pub fn wait_for_stop(&self, at_most: Duration) {
        wait(self.words.futex(STOP), 0, at_most);
    }

    /// Reports a worker as ready, and waits until all workers are.
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

    /// Records the end of a client, and removes it from the barrier so that the others do not wait for
    /// it.
    pub fn end(&self, client: u32, time_ns: u64) {
        self.client(client).set(END_NS, time_ns.max(1));
        self.change_barrier(|parties, arrived| (parties - 1, arrived));
        self.words.futex(ENDED).fetch_add(1, AcqRel);
        wake_all(self.words.futex(ENDED));
    }

    /// Returns the number of clients that have ended.
    pub fn ended(&self) -> u32 {
        self.words.futex(ENDED).load(Acquire)
    }

    /// Waits until the number of ended clients differs from `ended`, for `at_most` at the longest.
    pub fn wait_for_end(&self, ended: u32, at_most: Duration) {
        wait(self.words.futex(ENDED), ended, at_most);
    }

    /// Arrives at the barrier, and returns the generation to wait in.
    pub fn arrive(&self) -> u32 {
        let generation = self.words.futex(GENERATION).load(Acquire);
        self.change_barrier(|parties, arrived| (parties, arrived + 1));
        generation
    }

    /// Waits for the barrier to open, for `at_most` at the longest; returns true if it is still closed.
    pub fn waits_at_barrier(&self, generation: u32, at_most: Duration) -> bool {
        let word = self.words.futex(GENERATION);
        if word.load(Acquire) == generation {
            wait(word, generation, at_most);
        }
        word.load(Acquire) == generation
    }

    /// Changes the barrier's two counts, and opens it when all participants have arrived.
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

    /// Stores the failure if it is the phase's first, and stops all workers.
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

    /// Returns the first failure. Call it after all clients have ended.
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

    pub fn client(&self, client: u32) -> ClientRow<'_> {
        ClientRow { words: &self.words, first: ROWS + client as usize * ROW_WORDS }
    }

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

/// The figures of one client. Figures of [`Figure`] are stored plus one: 0 means "not read".
#[derive(Clone, Copy)]
pub struct ClientRow<'a> {
    words: &'a SharedWords,
    first: usize,
}

/// A figure that a client reads about itself before it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Figure {
    /// The time for which the client was runnable but not running, in nanoseconds.
    RunQueueNs,
    /// The most bytes locked at once.
    LockedBytesMax,
    /// The peak of resident bytes.
    ResidentBytesMax,
    /// The size of the page tables, in bytes.
    PageTableBytes,
    /// The bytes that huge pages map.
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

    pub fn set_access_count(&self, count: u64) {
        self.set(ACCESS_COUNT, count);
    }

    pub fn access_count(&self) -> u64 {
        self.get(ACCESS_COUNT)
    }

    pub fn set_faults(&self, minor: u64, major: u64) {
        self.set(MINOR_FAULTS, minor);
        self.set(MAJOR_FAULTS, major);
    }

    /// Returns the minor and the major faults so far.
    pub fn faults(&self) -> (u64, u64) {
        (self.get(MINOR_FAULTS), self.get(MAJOR_FAULTS))
    }

    /// Returns the time of the client's end, in nanoseconds since the start of the run; `None` while it
    /// works.
    pub fn end_ns(&self) -> Option<u64> {
        Some(self.get(END_NS)).filter(|ns| *ns > 0)
    }

    pub fn note(&self, figure: Figure, value: Option<u64>) {
        self.set(figure.index(), value.map_or(0, |value| value.saturating_add(1)));
    }

    /// Returns a figure; `None` if it was not read.
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
