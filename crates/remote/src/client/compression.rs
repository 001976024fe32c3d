//! Compression of written pages, where it saves time: the link is slower than the compressor.
//!
//! Compressing a byte takes `compressor` ns, and sends a `ratio` of it. So it pays where
//! `compressor < (1 - ratio) × link`, with the link's time for a byte. The kernel measures the link
//! (`TCP_INFO`), and the compressor's time and ratio are moving means of the runs that were compressed.

use lz4_flex::block::{compress_into, get_maximum_output_size};
use std::time::Instant;

/// The weight of the newest run in the moving means.
const WEIGHT: f64 = 1.0 / 8.0;

/// The time in ns to compress a byte, and the ratio, until a run was compressed. They are better than
/// those of most pages, so that a slow link is worth a trial.
const HOPE: Compressor = Compressor { ns_per_byte: 1.0, ratio: 0.5 };

/// The number of runs after which pages that did not compress are tried again: others may.
const RUNS_PER_TRIAL: u32 = 64;

/// The measured properties of the compressor on this program's pages.
#[derive(Debug, Clone, Copy)]
struct Compressor {
    ns_per_byte: f64,
    /// Compressed bytes divided by bytes.
    ratio: f64,
}

impl Compressor {
    /// Returns true if compressed pages are through such a link sooner.
    fn pays(&self, link_ns_per_byte: f64) -> bool {
        self.ns_per_byte < (1.0 - self.ratio) * link_ns_per_byte
    }
}

/// The compressor of one connection, and what it has shown so far.
#[derive(Debug)]
pub(super) struct Compression {
    seen: Compressor,
    runs_since_trial: u32,
}

impl Compression {
    pub fn new() -> Compression {
        Compression { seen: HOPE, runs_since_trial: 0 }
    }

    /// Returns true if the next run should be compressed, for a link that takes a byte in this time.
    pub fn pays(&mut self, link_ns_per_byte: f64) -> bool {
        let pays = self.seen.pays(link_ns_per_byte);
        if pays || !HOPE.pays(link_ns_per_byte) {
            return pays;
        }
        self.runs_since_trial = (self.runs_since_trial + 1) % RUNS_PER_TRIAL;
        self.runs_since_trial == 0
    }

    /// Compresses a run. Returns nothing if it does not become shorter by an eighth.
    pub fn compress(&mut self, pages: &[u8]) -> Option<Vec<u8>> {
        let begun = Instant::now();
        let mut out = vec![0; get_maximum_output_size(pages.len())];
        let len = compress_into(pages, &mut out).unwrap_or(pages.len());
        let took_ns = begun.elapsed().as_nanos() as f64;
        let now = Compressor {
            ns_per_byte: took_ns / pages.len() as f64,
            ratio: (len as f64 / pages.len() as f64).min(1.0),
        };
        self.seen.ns_per_byte += WEIGHT * (now.ns_per_byte - self.seen.ns_per_byte);
        self.seen.ratio += WEIGHT * (now.ratio - self.seen.ratio);
        out.truncate(len);
        (len <= pages.len() - pages.len() / 8).then_some(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::PAGE_BYTES;

    const NS_PER_BYTE_AT_1_GBIT: f64 = 8.0;
    const NS_PER_BYTE_AT_100_GBIT: f64 = 0.08;

    #[test]
    fn a_slow_link_gets_compressed_pages_and_a_fast_one_does_not() {
        let mut compression = Compression::new();
        assert!(compression.pays(NS_PER_BYTE_AT_1_GBIT));
        assert!((0..1000).all(|_| !compression.pays(NS_PER_BYTE_AT_100_GBIT)));
    }

    #[test]
    fn pages_that_do_not_compress_go_as_they_are_and_are_tried_again_now_and_then() {
        let mut rng = pagetax_core::access::Rng::new(7);
        let noise: Vec<u8> = (0..16 * PAGE_BYTES).map(|_| rng.below(256) as u8).collect();
        let mut compression = Compression::new();
        (0..64).for_each(|_| assert_eq!(compression.compress(&noise), None));
        let tried = (0..640).filter(|_| compression.pays(NS_PER_BYTE_AT_1_GBIT)).count();
        assert_eq!(tried, 10);
        // A single page, too.
        let zeros = vec![0; PAGE_BYTES];
        (0..64).for_each(|_| assert!(compression.compress(&zeros).is_some()));
        // Even a debug build and a busy machine compress zeros faster than 1 Mbit/s.
        assert!(compression.pays(8000.0));
    }
}
