//! The thresholds of room: when the evictor works, and how much it evicts.

use super::super::frame_pool::FramePool;
use super::super::options::EvictionMethod;
use super::super::table::CLUSTER_PAGES;

/// The thresholds of room, in pages.
#[derive(Debug, Clone, Copy)]
pub struct Thresholds {
    /// The most resident and staged pages together.
    pub limit: usize,
    /// The number of staged pages that are kept for a second chance.
    pub staged: usize,
    /// The room below which the evictor works…
    pub low: usize,
    /// …and the room up to which it works.
    pub high: usize,
    /// The number of pages of one batch.
    pub batch: usize,
    /// The number of spare frames, which are outside the limit.
    pub frame_pool: usize,
}

impl Thresholds {
    /// Derives the thresholds from the limit. Copied pages of a batch are in memory twice, so room is kept
    /// for them. Moved pages need room for the frame pool instead.
    pub fn of(limit: usize, eviction_method: EvictionMethod) -> Thresholds {
        // Free room is memory that the program lacks, so it is a twentieth at most.
        let batch = (limit / 64).clamp(1, 256);
        let kept = match eviction_method {
            EvictionMethod::Moved => 0,
            EvictionMethod::Cheapest | EvictionMethod::Copied => {
                (batch + CLUSTER_PAGES).min(limit / 2)
            }
        };
        let frame_pool = match eviction_method {
            EvictionMethod::Moved | EvictionMethod::Cheapest => FramePool::of_limit(limit),
            EvictionMethod::Copied => 0,
        };
        let limit = limit - kept - frame_pool;
        Thresholds { limit, staged: limit / 8, low: batch, high: 3 * batch, batch, frame_pool }
    }
}
