//! A trace as the recording that a plan replays.
//!
//! The memory of all processes becomes one region. It consists of the used pieces of 4 MiB in the order
//! of their addresses, process after process. A page keeps its offset within its piece, so page sizes up
//! to 4 MiB and the sets of TLBs remain.

use super::code::Step;
use super::index::Index;
use super::{Trace, TraceError};
use crate::pages::AccessKind;
use pagetax_core::replay::{Change, Recorded, ThreadTotals};

/// log2 of the pages in a piece.
const PIECE_SHIFT: u32 = 10;
const PIECE_BYTES: u64 = 4096 << PIECE_SHIFT;

/// A trace and its layout in one region.
#[derive(Debug)]
pub struct Replayable {
    trace: Trace,
    /// Pieces by process and number, sorted.
    pieces: Vec<(u32, u64)>,
    threads: Vec<ThreadTotals>,
    /// Block numbers of each thread, in order.
    blocks: Vec<Vec<usize>>,
}

impl Replayable {
    /// Checks the whole trace, so that damage is found before the run.
    ///
    /// # Errors
    /// The disk fails.
    pub fn new(mut trace: Trace) -> Result<Replayable, TraceError> {
        trace.check()?;
        let pieces = pieces(&trace.index);
        let (mut threads, mut blocks) = (Vec::new(), Vec::new());
        for (number, info) in trace.index.blocks.iter().enumerate() {
            let thread = info.thread as usize;
            if blocks.len() <= thread {
                blocks.resize(thread + 1, Vec::new());
                threads.resize(thread + 1, ThreadTotals::default());
            }
            blocks[thread].push(number);
            threads[thread] = super::read::sum([threads[thread], info.totals].into_iter());
        }
        Ok(Replayable { trace, pieces, threads, blocks })
    }

    /// Returns the trace that is replayed.
    pub fn trace(&self) -> &Trace {
        &self.trace
    }
}

fn pieces(index: &Index) -> Vec<(u32, u64)> {
    let of = |run: &super::PageRun| {
        let process = run.process;
        let last = run.first.saturating_add(run.pages.saturating_sub(1));
        (run.first >> PIECE_SHIFT..=last >> PIECE_SHIFT).map(move |piece| (process, piece))
    };
    let mut pieces: Vec<_> = index.found.iter().flat_map(of).collect();
    pieces.sort_unstable();
    pieces.dedup();
    pieces
}

impl Recorded for Replayable {
    fn bytes(&self) -> u64 {
        self.pieces.len() as u64 * PIECE_BYTES
    }

    fn threads(&self) -> &[ThreadTotals] {
        &self.threads
    }

    fn block(&self, thread: usize, number: usize) -> Option<Vec<Change>> {
        let block = *self.blocks.get(thread)?.get(number)?;
        // The check found this block whole. If the disk fails now, the thread ends.
        let block = self.trace.block(block).ok()?;
        let mut last = ((0, u64::MAX), 0);
        let change = |step: Step| {
            let Step::Change(kind, page) = step else { return None };
            let piece = (block.info.process, page >> PIECE_SHIFT);
            if last.0 != piece {
                last = (piece, self.pieces.binary_search(&piece).ok()? as u64 * PIECE_BYTES);
            }
            let offset = last.1 + (page % (1 << PIECE_SHIFT)) * 4096;
            Some(Change { offset, is_fetch: kind == AccessKind::Fetch })
        };
        Some(block.steps().filter_map(change).collect())
    }
}
