//! The pages that come with a fault.

use super::{FaultAround, Readahead, StreamPrefetcher};

/// The memory around a stored page that faults, in pages.
#[derive(Debug, Clone, Copy)]
pub struct StoredPage {
    /// The resident and staged pages.
    pub used: usize,
    /// The pages that only the store has.
    pub stored: usize,
    /// The pages dropped since this one (its refault distance).
    pub dropped_since: usize,
}

/// The decisions on readahead. A stream or a stride comes first. A fault that neither predicts gets
/// neighbours, if [`FaultAround`] finds them worth it.
#[derive(Debug, Default)]
pub struct ReadaheadPolicy {
    streams: StreamPrefetcher,
    fault_around: FaultAround,
}

impl ReadaheadPolicy {
    /// Records a fault. Returns the pages that its stream or stride predicts.
    pub fn fault(&mut self, page: usize) -> Readahead {
        self.streams.fault(page)
    }

    /// Returns the pages to fetch with a stored page, given the prediction for its fault.
    pub fn page_in(&mut self, page: usize, predicted: Readahead, stored: StoredPage) -> Readahead {
        if predicted != Readahead::Nothing {
            return predicted;
        }
        let StoredPage { used, stored, dropped_since } = stored;
        match self.fault_around.page_in(used, stored, dropped_since) {
            1 => Readahead::Nothing,
            count => Readahead::Around(page % count, count - 1 - page % count),
        }
    }
}
