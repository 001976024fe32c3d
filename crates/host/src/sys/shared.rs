//! Atomic words that forked children and threads share, with futexes to wait on them.

use super::mapping::{OwnedMapping, Request, Source};
use rustix::thread::futex::{self, Flags, Timespec};
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::Duration;

/// Atomic words in shared anonymous memory, zero at first.
#[derive(Debug)]
pub struct SharedWords {
    mapping: OwnedMapping,
    count: usize,
}

impl SharedWords {
    /// Maps `count` words, all zero.
    pub fn new(count: usize) -> io::Result<SharedWords> {
        let page = rustix::param::page_size();
        let request =
            Request { source: Source::Shared, len: count * 8, align: page, hugetlb: None };
        Ok(SharedWords { mapping: OwnedMapping::new(request)?, count })
    }

    /// Returns the word of an index.
    ///
    /// # Panics
    /// If there is no such word.
    pub fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.count);
        // SAFETY: the word lies inside the mapping (index < count), is aligned to 8, is valid with any bits,
        // is accessed only atomically, and lives as long as `self`.
        unsafe { AtomicU64::from_ptr((self.mapping.address() as *mut u64).add(index)) }
    }

    /// Returns the low half of a word, to wait on. Use a word in this way or as a whole, not both.
    ///
    /// # Panics
    /// If there is no such word.
    pub fn futex(&self, index: usize) -> &AtomicU32 {
        assert!(index < self.count);
        // SAFETY: as in `word`; the low half of an aligned u64 is aligned to 4.
        unsafe { AtomicU32::from_ptr((self.mapping.address() as *mut u64).add(index).cast()) }
    }
}

/// Waits until `word` is no longer `seen`, is woken, or the time is up. May return early.
pub fn wait(word: &AtomicU32, seen: u32, at_most: Duration) {
    let timeout = Timespec {
        tv_sec: at_most.as_secs().min(i64::MAX as u64) as i64,
        tv_nsec: at_most.subsec_nanos().into(),
    };
    // After any error (the word has changed, timeout, signal), callers look at the word again.
    let _ = futex::wait(word, Flags::empty(), seen, Some(&timeout));
}

/// Wakes all threads that wait on `word`.
pub fn wake_all(word: &AtomicU32) {
    // Waking a valid word cannot fail.
    let _ = futex::wake(word, Flags::empty(), i32::MAX as u32);
}
