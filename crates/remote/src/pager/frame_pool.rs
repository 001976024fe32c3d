//! A pool of spare frames. A long run is received into frames of evicted pages, which are then
//! moved into place. So nothing is copied to fresh frames. The kernel would have to find and charge
//! those one by one. They would come from another CPU's cache, or from the hypervisor if it has
//! taken free memory back.
//!
//! A spare is a mapping of [`RUN_PAGES_MAX`] pages, empty or with all its frames. The limit of a
//! region has room for all of its spares. They are filled only while runs are fetched.

use super::shared::lock;
use super::sys::memory::Pages;
use super::sys::uffd::Uffd;
use crate::page::RUN_PAGES_MAX;
use rustix::io::Errno;
use rustix::mm::Advice;
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The most spares: twice as many pages as one batch evicts.
const SPARES_MAX: usize = 8;
/// The share of the limit that is kept for spares: one page in this many.
const LIMIT_PER_SPARE: usize = 64;

/// The frames in a spare that is returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpareFrames {
    /// A frame for each page.
    All,
    /// No frames.
    None,
    /// Perhaps some frames, which are dropped.
    Some,
}

/// The spares of a region. Only threads that serve faults, evict or fork take its locks. A fork
/// waits for the first two, so that its child finds the locks open.
#[derive(Debug)]
pub struct FramePool {
    empty: Mutex<Vec<Pages>>,
    full: Mutex<Vec<Pages>>,
    /// The pages of full spares. This is outside the lock, because any thread may read it while
    /// another forks.
    pages: AtomicUsize,
    /// The number of runs that took or missed a full spare and for which none was filled since.
    wanted: AtomicUsize,
}

impl FramePool {
    /// Returns the number of pages of the spares for which a limit has room.
    pub fn of_limit(limit: usize) -> usize {
        (limit / LIMIT_PER_SPARE / RUN_PAGES_MAX).min(SPARES_MAX) * RUN_PAGES_MAX
    }

    /// Creates the spares that this many pages make, all empty.
    pub fn new(pages: usize) -> io::Result<FramePool> {
        let count = pages / RUN_PAGES_MAX;
        let fresh = || {
            let spare = Pages::reserve(RUN_PAGES_MAX)?;
            spare.all().advise(Advice::LinuxDontFork)?;
            Ok(spare)
        };
        let empty: io::Result<Vec<Pages>> = (0..count).map(|_| fresh()).collect();
        // With full capacity, because a handler must not allocate.
        let full = Mutex::new(Vec::with_capacity(count));
        let (pages, wanted) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Ok(FramePool { empty: Mutex::new(empty?), full, pages, wanted })
    }

    /// Registers the spares as targets of moves.
    pub fn register(&self, uffd: &Uffd) -> Result<(), Errno> {
        lock(&self.empty).iter().try_for_each(|spare| uffd.register_target(spare))
    }

    /// Gives the kernel advice on all spares. A fork does so while no spare is in use.
    pub fn advise(&self, advice: Advice) -> Result<(), Errno> {
        for spares in [&self.empty, &self.full] {
            lock(spares).iter().try_for_each(|spare| spare.all().advise(advice))?;
        }
        Ok(())
    }

    /// Drops the frames of all full spares.
    pub fn drop_all(&self) {
        while let Some(spare) = self.change_full(Vec::pop) {
            self.put(spare, SpareFrames::Some);
        }
    }

    /// Returns the number of frames in full spares.
    pub fn pages(&self) -> usize {
        self.pages.load(Relaxed)
    }

    fn change_full<T>(&self, change: impl FnOnce(&mut Vec<Pages>) -> T) -> T {
        let mut full = lock(&self.full);
        let changed = change(&mut full);
        self.pages.store(full.len() * RUN_PAGES_MAX, Relaxed);
        changed
    }

    /// Takes a full spare for a run, and requests another.
    pub fn take_full(&self) -> Option<Pages> {
        if self.wanted.load(Relaxed) < SPARES_MAX {
            self.wanted.fetch_add(1, Relaxed);
        }
        self.change_full(Vec::pop)
    }

    /// Takes an empty spare to fill, if one is requested.
    pub fn take_empty(&self) -> Option<Pages> {
        let wanted = self.wanted.fetch_update(Relaxed, Relaxed, |wanted| wanted.checked_sub(1));
        wanted.ok().and_then(|_| lock(&self.empty).pop())
    }

    /// Puts a spare back. If its frames cannot be dropped, it is not used again.
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
