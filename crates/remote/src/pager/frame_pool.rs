//! Frames that go round: a long run of pages is received into memory whose frames left the region before, and
//! moved into place. So nothing is copied to fresh frames, which the kernel has to find and charge one by one, and
//! which come from another CPU's cache or, where a hypervisor has taken free memory back, from it.
//!
//! A spare is empty, with no frames, or full. The limit of a region has room for all of its spares; they are filled
//! only as long as runs come.

use super::shared::lock;
use super::sys::memory::Pages;
use super::sys::uffd::Uffd;
use crate::page::RUN_PAGES_MAX;
use rustix::io::Errno;
use rustix::mm::Advice;
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Twice as many pages as are evicted at once.
const SPARES_MAX: usize = 8;
/// One page in this many of the limit is kept for spares.
const LIMIT_PER_SPARE: usize = 64;

/// The frames in a spare that is returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpareFrames {
    /// Each of its pages.
    All,
    /// No frames.
    None,
    /// Perhaps some, which are dropped.
    Some,
}

/// See the module. Only who serves faults, evicts or forks takes its locks: a fork waits for the first two, so that
/// its child finds them open.
#[derive(Debug)]
pub struct FramePool {
    empty: Mutex<Vec<Pages>>,
    full: Mutex<Vec<Pages>>,
    /// Pages of full ones. Beside the lock, as anybody may ask for them while another thread forks.
    pages: AtomicUsize,
    /// Runs that asked for one, and did not have one filled since.
    wanted: AtomicUsize,
}

impl FramePool {
    /// Pages of the spares that a limit has room for.
    pub fn of_limit(limit: usize) -> usize {
        (limit / LIMIT_PER_SPARE / RUN_PAGES_MAX).min(SPARES_MAX) * RUN_PAGES_MAX
    }

    /// As many as so many pages make, all empty.
    pub fn new(pages: usize) -> io::Result<FramePool> {
        let count = pages / RUN_PAGES_MAX;
        let fresh = || {
            let spare = Pages::reserve(RUN_PAGES_MAX)?;
            spare.all().advise(Advice::LinuxDontFork)?;
            Ok(spare)
        };
        let empty: io::Result<Vec<Pages>> = (0..count).map(|_| fresh()).collect();
        // With its room, as a handler allocates nothing.
        let full = Mutex::new(Vec::with_capacity(count));
        let (pages, wanted) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Ok(FramePool { empty: Mutex::new(empty?), full, pages, wanted })
    }

    /// Pages can be moved into them from now on.
    pub fn register(&self, uffd: &Uffd) -> Result<(), Errno> {
        lock(&self.empty).iter().try_for_each(|spare| uffd.register_target(spare))
    }

    /// Advises the kernel about all spares; for a fork, while none is in use.
    pub fn advise(&self, advice: Advice) -> Result<(), Errno> {
        for spares in [&self.empty, &self.full] {
            lock(spares).iter().try_for_each(|spare| spare.all().advise(advice))?;
        }
        Ok(())
    }

    /// Drops all frames.
    pub fn drop_all(&self) {
        while let Some(spare) = self.change_full(Vec::pop) {
            self.put(spare, SpareFrames::Some);
        }
    }

    /// Frames in full ones.
    pub fn pages(&self) -> usize {
        self.pages.load(Relaxed)
    }

    fn change_full<T>(&self, change: impl FnOnce(&mut Vec<Pages>) -> T) -> T {
        let mut full = lock(&self.full);
        let changed = change(&mut full);
        self.pages.store(full.len() * RUN_PAGES_MAX, Relaxed);
        changed
    }

    /// Takes a full spare for a run, and asks for another to be filled.
    pub fn take_full(&self) -> Option<Pages> {
        if self.wanted.load(Relaxed) < SPARES_MAX {
            self.wanted.fetch_add(1, Relaxed);
        }
        self.change_full(Vec::pop)
    }

    /// Takes an empty spare that is to be filled.
    pub fn take_empty(&self) -> Option<Pages> {
        let wanted = self.wanted.fetch_update(Relaxed, Relaxed, |wanted| wanted.checked_sub(1));
        wanted.ok().and_then(|_| lock(&self.empty).pop())
    }

    /// Returns a spare. If its frames cannot be dropped, it is not used again.
    pub fn put(&self, spare: Pages, frames: SpareFrames) {
        match frames {
            SpareFrames::All => self.change_full(|full| full.push(spare)),
            SpareFrames::Some if spare.all().advise(Advice::LinuxDontNeed).is_err() => {}
            SpareFrames::Some | SpareFrames::None => lock(&self.empty).push(spare),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_counted_past_the_lock() {
        let spares = FramePool::new(2 * RUN_PAGES_MAX).unwrap();
        assert!(spares.take_full().is_none() && spares.pages() == 0);
        let spare = spares.take_empty().expect("one is wanted");
        spares.put(spare, SpareFrames::All);
        let _full = lock(&spares.full);
        assert_eq!(spares.pages(), RUN_PAGES_MAX);
    }

    #[test]
    fn full_ones_count_until_they_are_taken() {
        let spares = FramePool::new(2 * RUN_PAGES_MAX).unwrap();
        for taken in [false, true] {
            assert!(spares.take_full().is_none());
            let spare = spares.take_empty().expect("one is wanted");
            spares.put(spare, SpareFrames::All);
            match taken {
                true => spares.put(spares.take_full().expect("a full one"), SpareFrames::None),
                false => spares.drop_all(),
            }
            assert_eq!(spares.pages(), 0);
        }
    }
}
