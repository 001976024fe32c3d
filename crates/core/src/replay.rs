//! Replay: a recorded program as an operation of a plan.
//!
//! A recording lists, for each thread, the pages that it used, in order. Accesses to the page of the
//! previous access are counted, not listed. Invariant: a replay makes exactly the recorded changes of
//! page, in the recorded order within each thread.

use crate::plan::RegionId;
use std::fmt;
use std::sync::Arc;

/// A thread's counts over the whole recording.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ThreadTotals {
    /// Loads and stores to another page than the previous one: the number of offsets.
    pub page_change_count: u64,
    /// Page changes to a page that was not used recently.
    pub far_count: u64,
    /// The loads and stores of all threads.
    pub access_count: u64,
    /// The instructions of all threads.
    pub instruction_count: u64,
    /// Fetches from another page than the previous fetch; 0 until a replay has counted them.
    pub fetch_change_count: u64,
}

/// A thread's move to another page, by a load, a store or a fetch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// The page's offset in the region.
    pub offset: u64,
    /// True for an instruction fetch.
    pub is_fetch: bool,
}

/// A recorded program whose pages form one region.
pub trait Recorded: fmt::Debug + Send + Sync {
    /// Returns the length of the region.
    fn bytes(&self) -> u64;

    /// Returns the counts of each thread, in the order of appearance.
    fn threads(&self) -> &[ThreadTotals];

    /// Returns a block of a thread's changes of page; none after the last block.
    fn block(&self, thread: usize, number: usize) -> Option<Vec<Change>>;
}

/// A shared recorded program. Two values are equal if they share the same program.
#[derive(Debug, Clone)]
pub struct RecordedProgram(pub Arc<dyn Recorded>);

impl PartialEq for RecordedProgram {
    fn eq(&self, other: &RecordedProgram) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// The replay operation: each client repeats the thread with its number.
#[derive(Debug, Clone, PartialEq)]
pub struct Replay {
    /// The region of the program's pages.
    pub region: RegionId,
    /// The program that the trace was recorded from.
    pub recording: RecordedProgram,
}

impl Replay {
    /// Returns the counts of a client.
    pub fn totals(&self, client: u32) -> ThreadTotals {
        self.recording.0.threads().get(client as usize).copied().unwrap_or_default()
    }

    /// Returns a client's stream of page changes.
    pub fn changes(&self, client: u32) -> Replayed {
        let recording = self.recording.clone();
        Replayed { recording, thread: client as usize, block: Vec::new(), next_block: 0, at: 0 }
    }
}

/// A stream of changes of page.
#[derive(Debug, Clone)]
pub struct Replayed {
    recording: RecordedProgram,
    thread: usize,
    block: Vec<Change>,
    next_block: usize,
    at: usize,
}

impl Iterator for Replayed {
    type Item = Change;

    #[inline]
    fn next(&mut self) -> Option<Change> {
        while self.at == self.block.len() {
            self.block = self.recording.0.block(self.thread, self.next_block)?;
            self.next_block += 1;
            self.at = 0;
        }
        self.at += 1;
        Some(self.block[self.at - 1])
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A recording in memory, for tests: offsets by thread, in blocks of three.
    #[derive(Debug)]
    pub struct Listed {
        offsets: Vec<Vec<u64>>,
        totals: Vec<ThreadTotals>,
    }

    impl Listed {
        pub fn recording(offsets: Vec<Vec<u64>>) -> RecordedProgram {
            let totals = offsets.iter().map(|offsets| {
                let count = offsets.len() as u64;
                ThreadTotals {
                    page_change_count: count,
                    access_count: 4 * count,
                    instruction_count: 10 * count,
                    far_count: 0,
                    fetch_change_count: 0,
                }
            });
            RecordedProgram(Arc::new(Listed { totals: totals.collect(), offsets }))
        }
    }

    impl Recorded for Listed {
        fn bytes(&self) -> u64 {
            1 << 22
        }
        fn threads(&self) -> &[ThreadTotals] {
            &self.totals
        }
        fn block(&self, thread: usize, number: usize) -> Option<Vec<Change>> {
            let block = self.offsets.get(thread)?.chunks(3).nth(number)?;
            Some(block.iter().map(|offset| Change { offset: *offset, is_fetch: false }).collect())
        }
    }

    #[test]
    fn streams_go_over_the_ends_of_blocks() {
        let offsets: Vec<u64> = (0..10).map(|n| n * 4096).collect();
        let recording = Listed::recording(vec![offsets.clone(), vec![]]);
        let replay = Replay { region: RegionId(0), recording };
        let told: Vec<u64> = replay.changes(0).map(|change| change.offset).collect();
        assert_eq!(told, offsets);
        assert_eq!(replay.changes(1).count() + replay.changes(2).count(), 0);
        assert_eq!(replay.totals(0).access_count, 40);
        assert_eq!(replay.totals(7), ThreadTotals::default());
    }
}
