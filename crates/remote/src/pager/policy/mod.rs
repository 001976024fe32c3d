//! The replacement policy: the pager's decisions, without its threads, locks and system calls. The
//! simulator ([`super::replacement`]) makes the same calls, so it replays this policy and no copy of it.
//!
//! | Decision | Made by | Rule |
//! |---|---|---|
//! | when to evict, and how much | [`super::shared::Thresholds`] | little room is free, an eighth staged |
//! | the next cluster to evict | [`VictimQueue`] | FIFO; a cluster with a soft refault goes round once more |
//! | the pages that a soft refault restores | [`BlockUse`] | the page, or its block if half of it refaults |
//! | the pages that come with a fault | [`ReadaheadPolicy`] | a stream, else a stride, else neighbours |
//! | neighbours or none | [`FaultAround`] | the refault distance of recently evicted pages |

mod block_use;
mod fault_around;
mod readahead;
mod stream_prefetcher;
mod victims;

pub use block_use::BlockUse;
pub use fault_around::FaultAround;
pub use readahead::{ReadaheadPolicy, StoredPage};
pub use stream_prefetcher::{Readahead, StreamPrefetcher, last_run_boundary, next_run_boundary};
pub use victims::VictimQueue;
