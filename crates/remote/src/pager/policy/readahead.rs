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
            count => {
                let (before, after) = (page % count, count - 1 - page % count);
                self.streams.add_neighbours(before, after);
                Readahead::Around(before, after)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sweeps over stored pages of which none was evicted recently. Returns the number of page-ins.
    fn sweep(pages: impl Iterator<Item = usize>) -> usize {
        let (mut policy, mut present) = (ReadaheadPolicy::default(), vec![false; 100_000]);
        let mut page_in_count = 0;
        for page in pages {
            if present[page] {
                continue;
            }
            let stored = StoredPage { used: 10_000, stored: 20_000, dropped_since: 20_000 };
            let predicted = policy.fault(page);
            let (before, after) = policy.page_in(page, predicted, stored).extent();
            present[page - before..=page + after].fill(true);
            page_in_count += 1;
        }
        page_in_count
    }

    // Blocks of neighbours lie side by side, but their faults do not.
    #[test]
    fn a_sweep_by_neighbours_becomes_a_stream() {
        // Scattered page-ins, so that neighbours are worth it.
        let scattered = || (0..100).map(|nth| 60_000 + nth * 397);
        let alone = sweep(scattered());
        let up = sweep(scattered().chain(1_000..11_000)) - alone;
        let down = sweep(scattered().chain((1_000..11_000).rev())) - alone;
        assert!((10_000 / 64..200).contains(&up), "{up}");
        assert!((10_000 / 64..200).contains(&down), "{down}");
    }
}
