//! Replay: a recorded program as an operation of a plan.
//!
//! A recording has, for each thread, the pages that it went to, in order; accesses that stay on the
//! page of the one before are counted, not listed. Invariant: changes are those of the recording, in
//! its order within each thread; nothing is drawn and nothing left out.

use crate::plan::RegionId;
use std::fmt;
use std::sync::Arc;

/// What a thread did in all.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ThreadTotals {
    /// Loads and stores that went to another page than the one before: how many offsets there are.
    pub page_change_count: u64,
    /// Of these, to a page that was not used lately.
    pub far_count: u64,
    /// All loads and stores.
    pub access_count: u64,
    /// All instructions.
    pub instruction_count: u64,
    /// Fetches from another page than the one before; 0 until they are counted, for a replay.
    pub fetch_change_count: u64,
}

/// A thread goes to another page than the one it was on, by a load or store, or by a fetch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// Of the page in the region.
    pub offset: u64,
    /// Of instructions.
    pub is_fetch: bool,
}

/// A recorded program: the pages that its threads went to, in a region of its own.
pub trait Recorded: fmt::Debug + Send + Sync {
    /// How many bytes of address space the region has.
    fn bytes(&self) -> u64;

    /// Of each thread, in the order of appearance.
    fn threads(&self) -> &[ThreadTotals];

    /// A thread's changes of page, block by block; none after the last.
    fn block(&self, thread: usize, number: usize) -> Option<Vec<Change>>;
}

/// A recorded program. Two are equal when they are the same one.
#[derive(Debug, Clone)]
pub struct Recording(pub Arc<dyn Recorded>);

impl PartialEq for Recording {
    fn eq(&self, other: &Recording) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// The operation: each client does what the thread of its number did.
#[derive(Debug, Clone, PartialEq)]
pub struct Replay {
    /// Where.
    pub region: RegionId,
    /// What.
    pub recording: Recording,
}

impl Replay {
    /// What a client does in all.
    pub fn totals(&self, client: u32) -> ThreadTotals {
        self.recording.0.threads().get(client as usize).copied().unwrap_or_default()
    }

    /// The stream of a client.
    pub fn changes(&self, client: u32) -> Replayed {
        let recording = self.recording.clone();
        Replayed { recording, thread: client as usize, block: Vec::new(), next_block: 0, at: 0 }
    }
}

/// A stream of changes of page.
#[derive(Debug, Clone)]
pub struct Replayed {
    recording: Recording,
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

    /// A recording in memory: offsets by thread, in blocks of three.
    #[derive(Debug)]
    pub struct Listed {
        offsets: Vec<Vec<u64>>,
        totals: Vec<ThreadTotals>,
    }

    impl Listed {
        pub fn recording(offsets: Vec<Vec<u64>>) -> Recording {
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
            Recording(Arc::new(Listed { totals: totals.collect(), offsets }))
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
