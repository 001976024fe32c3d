//! Atomic words that forked children and threads share, with futexes to wait on them.

use super::mapping::{Mapping, Request, Source};
use rustix::thread::futex::{self, Flags, Timespec};
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::Duration;

/// A row of atomic words in shared anonymous memory, zero at first.
#[derive(Debug)]
pub struct SharedWords {
    mapping: Mapping,
    count: usize,
}

impl SharedWords {
    /// `count` words.
    pub fn new(count: usize) -> io::Result<SharedWords> {
        let page = rustix::param::page_size();
        let request =
            Request { source: Source::Shared, len: count * 8, align: page, hugetlb: None };
        Ok(SharedWords { mapping: Mapping::new(request)?, count })
    }

    /// The word of an index.
    ///
    /// # Panics
    /// If there is no such word.
    pub fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.count);
        // SAFETY: inside the mapping (index < count), aligned to 8, valid as an atomic whatever its
        // bits, only ever accessed atomically, and alive as long as `self`.
        unsafe { AtomicU64::from_ptr((self.mapping.address() as *mut u64).add(index)) }
    }

    /// The low half of a word, to wait on. Use a word in this way or as a whole, not both.
    ///
    /// # Panics
    /// If there is no such word.
    pub fn futex(&self, index: usize) -> &AtomicU32 {
        assert!(index < self.count);
        // SAFETY: as in `word`; the low half of an aligned u64 is aligned to 4.
        unsafe { AtomicU32::from_ptr((self.mapping.address() as *mut u64).add(index).cast()) }
    }
}

/// Waits until `word` is no longer `seen`, someone wakes it, or the time is up; may wake for nothing.
pub fn wait(word: &AtomicU32, seen: u32, at_most: Duration) {
    let timeout = Timespec {
        tv_sec: at_most.as_secs().min(i64::MAX as u64) as i64,
        tv_nsec: at_most.subsec_nanos().into(),
    };
    // Every error (changed already, timed out, interrupted) means: look again, as the caller does.
    let _ = futex::wait(word, Flags::empty(), seen, Some(&timeout));
}

/// Wakes everyone who waits on `word`.
pub fn wake_all(word: &AtomicU32) {
    // Waking a valid word cannot fail.
    let _ = futex::wake(word, Flags::empty(), i32::MAX as u32);
}
