//! The memory of connections: what is sent in runs needs large buffers, of which there is a bounded number.
//!
//! A connection keeps a large buffer while it is busy, and gives it back when it has nothing to do or another
//! connection waits for one.

use super::listen::REPLY_BYTES;
use crate::wire::FRAME_BYTES_MAX;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

/// A connection has so much for requests, and as much for replies, without asking.
pub(super) const SMALL_BYTES: usize = 8 << 10;

/// What a connection takes at most with a large buffer: a request, and replies that are sent when they come to
/// [`REPLY_BYTES`].
const LARGE_BYTES: u64 = (2 * FRAME_BYTES_MAX + REPLY_BYTES) as u64;

/// Enough for as many connections that are busy at the same moment.
const LARGE_MAX: u64 = 128;

/// The large buffers that a server can hand out.
#[derive(Debug)]
pub(super) struct Buffers {
    free: Mutex<u64>,
    changed: Condvar,
    waiting: AtomicU32,
}

/// The right to a large buffer.
#[derive(Debug)]
pub(super) struct Large<'a>(&'a Buffers);

impl Buffers {
    /// Returns the part of this memory that is kept for buffers, in bytes.
    pub fn bytes_of(memory: u64) -> u64 {
        let least = (4 << 20).min(memory / 4);
        (memory / 16).clamp(least, (LARGE_MAX * LARGE_BYTES).max(least))
    }

    /// As many as fit into their part of this memory, and at least one.
    pub fn new(memory: u64) -> Buffers {
        let free = (Self::bytes_of(memory) / LARGE_BYTES).clamp(1, LARGE_MAX);
        Buffers { free: Mutex::new(free), changed: Condvar::new(), waiting: AtomicU32::new(0) }
    }

    /// Waits for a large buffer.
    pub fn take(&self) -> Large<'_> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_add(1, Ordering::Relaxed);
        while *free == 0 {
            free = self.changed.wait(free).unwrap_or_else(PoisonError::into_inner);
        }
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        *free -= 1;
        Large(self)
    }

    /// Whether a connection waits for one.
    pub fn is_wanted(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }
}

impl Drop for Large<'_> {
    fn drop(&mut self) {
        *self.0.free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.0.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_stay_within_their_part_of_the_memory() {
        for shift in 18..44 {
            let memory = 1u64 << shift;
            let (part, count) =
                (Buffers::bytes_of(memory), *Buffers::new(memory).free.lock().unwrap());
            assert!(part <= memory / 4 && (1..=LARGE_MAX).contains(&count));
            assert!(count == 1 || count * LARGE_BYTES <= part, "{count} of {memory}");
        }
    }

    #[test]
    fn who_waits_gets_what_another_gives_back() {
        let buffers = Buffers::new(0);
        let first = buffers.take();
        std::thread::scope(|scope| {
            scope.spawn(|| drop(buffers.take()));
            while !buffers.is_wanted() {
                std::thread::yield_now();
            }
            drop(first);
        });
        assert!(!buffers.is_wanted() && *buffers.free.lock().unwrap() == 1);
    }
}
