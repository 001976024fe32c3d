//! A lock and a signal of one word each, on futexes. A word of zeros is an open lock.
//!
//! The standard library's locks are no alternative: these stand in a table of millions that is
//! zeros until it is used.

use super::memory::Zeroed;
use rustix::thread::futex::{self, Flags, Timespec};
use std::sync::atomic::{AtomicU32, Ordering::*};
use std::time::Duration;

const UNLOCKED: u32 = 0;
const LOCKED: u32 = 1;
const CONTENDED: u32 = 2;

/// A mutual exclusion lock.
#[derive(Debug, Default)]
pub struct Lock(AtomicU32);

// SAFETY: zeros are an open lock.
unsafe impl Zeroed for Lock {}

impl Lock {
    /// Takes the lock, and waits for it.
    pub fn lock(&self) -> Guard<'_> {
        if self.0.compare_exchange(UNLOCKED, LOCKED, Acquire, Relaxed).is_err() {
            self.wait();
        }
        Guard(self)
    }

    #[cold]
    fn wait(&self) {
        for _ in 0..100 {
            if self.0.compare_exchange(UNLOCKED, LOCKED, Acquire, Relaxed).is_ok() {
                return;
            }
            std::hint::spin_loop();
        }
        while self.0.swap(CONTENDED, Acquire) != UNLOCKED {
            // After an early return, the caller checks again.
            let _ = futex::wait(&self.0, Flags::PRIVATE, CONTENDED, None);
        }
    }

    fn unlock(&self) {
        if self.0.swap(UNLOCKED, Release) == CONTENDED {
            // The word is ours, so the call cannot fail.
            let _ = futex::wake(&self.0, Flags::PRIVATE, 1);
        }
    }
}

impl Lock {
    /// Returns true if no thread holds the lock now; the last holder's writes are visible then.
    pub fn is_unlocked(&self) -> bool {
        self.0.load(Acquire) == UNLOCKED
    }

    /// Takes the lock, and keeps it after this call: a fork copies the lock as it is.
    pub fn raw_lock(&self) {
        std::mem::forget(self.lock());
    }

    /// Opens a lock of [`Self::raw_lock`], in the same process or its child.
    pub fn raw_unlock(&self) {
        self.unlock();
    }
}

/// A guard that opens the lock when it is dropped.
#[derive(Debug)]
pub struct Guard<'a>(&'a Lock);

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.0.unlock();
    }
}

/// A lock and marks, side by side because the same code needs both.
#[derive(Debug, Default)]
pub struct MarkedLock {
    /// The lock of the cluster's page states.
    pub lock: Lock,
    /// The marks, which any thread may set without the lock.
    pub marks: AtomicU32,
}

// SAFETY: zeros are an open lock, and no marks.
unsafe impl Zeroed for MarkedLock {}

/// A signal that something has changed, for threads that wait to check again.
#[derive(Debug, Default)]
pub struct Signal {
    changes: AtomicU32,
    sleepers: AtomicU32,
}

impl Signal {
    /// Returns the number of changes. Read it before the check that decides to wait.
    pub fn now(&self) -> u32 {
        self.changes.load(SeqCst)
    }

    /// Waits until something has changed since `seen`, or `time` has passed.
    pub fn wait(&self, seen: u32, time: Duration) {
        self.sleepers.fetch_add(1, SeqCst);
        let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
        // After an early return, the caller checks again.
        let _ = futex::wait(&self.changes, Flags::PRIVATE, seen, Some(&time));
        self.sleepers.fetch_sub(1, SeqCst);
    }

    /// Signals a change. Makes no system call while no thread waits.
    pub fn notify(&self) {
        self.changes.fetch_add(1, SeqCst);
        if self.sleepers.load(SeqCst) > 0 {
            // The word is ours, so the call cannot fail.
            let _ = futex::wake(&self.changes, Flags::PRIVATE, i32::MAX as u32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::UnsafeCell;

    struct Counter(Lock, UnsafeCell<u64>);
    // SAFETY: the cell is only touched under the lock.
    unsafe impl Sync for Counter {}

    #[test]
    fn the_lock_excludes() {
        let counter = Counter(Lock::default(), UnsafeCell::new(0));
        let counter = &counter;
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        let _guard = counter.0.lock();
                        // SAFETY: under the lock.
                        unsafe { *counter.1.get() += 1 };
                    }
                });
            }
        });
        // SAFETY: all threads have ended.
        assert_eq!(unsafe { *counter.1.get() }, 80_000);
    }

    #[test]
    fn a_signal_before_the_wait_is_not_lost() {
        let signal = Signal::default();
        let seen = signal.now();
        signal.notify();
        let begun = std::time::Instant::now();
        signal.wait(seen, Duration::from_secs(5));
        assert!(begun.elapsed() < Duration::from_secs(4));
    }
}
