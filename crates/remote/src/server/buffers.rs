//! The buffers of connections. Runs of pages need large buffers, whose number is bounded.
//!
//! A connection keeps its large buffer while it is busy. It releases the buffer when it is idle or
//! another connection waits for one.

use super::listen::REPLY_BYTES;
use crate::wire::FRAME_BYTES_MAX;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

/// The bytes that a connection has for requests, and again for replies, without a large buffer.
pub(super) const SMALL_BYTES: usize = 8 << 10;

/// The most bytes that a connection takes with a large buffer: a request, and replies. Replies are
/// sent when they reach [`REPLY_BYTES`].
const LARGE_BYTES: u64 = (2 * FRAME_BYTES_MAX + REPLY_BYTES) as u64;

/// The most large buffers, one for each connection that is busy.
const LARGE_MAX: u64 = 128;

/// The large buffers of a server.
#[derive(Debug)]
pub(super) struct BufferPool {
    free: Mutex<u64>,
    changed: Condvar,
    waiting: AtomicU32,
}

/// A permit for one large buffer, released on drop.
#[derive(Debug)]
pub(super) struct LargeBuffer<'a>(&'a BufferPool);

impl BufferPool {
    /// Returns the bytes of `memory` that are reserved for buffers.
    pub fn bytes_of(memory: u64) -> u64 {
        let least = (4 << 20).min(memory / 4);
        (memory / 16).clamp(least, (LARGE_MAX * LARGE_BYTES).max(least))
    }

    /// Returns as many buffers as fit into their part of `memory`, and at least one.
    pub fn new(memory: u64) -> BufferPool {
        let free = (Self::bytes_of(memory) / LARGE_BYTES).clamp(1, LARGE_MAX);
        BufferPool { free: Mutex::new(free), changed: Condvar::new(), waiting: AtomicU32::new(0) }
    }

    /// Waits for a large buffer.
    pub fn take(&self) -> LargeBuffer<'_> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_add(1, Ordering::Relaxed);
        while *free == 0 {
            free = self.changed.wait(free).unwrap_or_else(PoisonError::into_inner);
        }
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        *free -= 1;
        LargeBuffer(self)
    }

    /// Returns true if a connection waits for a large buffer.
    pub fn is_wanted(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }
}

impl Drop for LargeBuffer<'_> {
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
                (BufferPool::bytes_of(memory), *BufferPool::new(memory).free.lock().unwrap());
            assert!(part <= memory / 4 && (1..=LARGE_MAX).contains(&count));
            assert!(count == 1 || count * LARGE_BYTES <= part, "{count} of {memory}");
        }
    }

    #[test]
    fn who_waits_gets_what_another_gives_back() {
        let buffers = BufferPool::new(0);
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
