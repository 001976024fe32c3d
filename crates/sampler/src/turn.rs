//! Whose turn it is: threads take turns in the order in which they asked.

use crate::system;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

/// Numbers are drawn, and served one by one.
pub struct Turn {
    next: AtomicU32,
    served: AtomicU32,
}

impl Turn {
    pub const fn new() -> Turn {
        Turn { next: AtomicU32::new(0), served: AtomicU32::new(0) }
    }

    /// Without waiting; whether it is ours.
    pub fn try_take(&self) -> bool {
        let served = self.served.load(SeqCst);
        self.next.compare_exchange(served, served.wrapping_add(1), SeqCst, SeqCst).is_ok()
    }

    /// Waits for it.
    pub fn take(&self) {
        let ours = self.next.fetch_add(1, SeqCst);
        loop {
            let served = self.served.load(SeqCst);
            if served == ours {
                return;
            }
            self.futex(libc::FUTEX_WAIT, served);
        }
    }

    /// It is the next one's.
    pub fn give(&self) {
        let served = self.served.fetch_add(1, SeqCst).wrapping_add(1);
        if self.next.load(SeqCst) != served {
            self.futex(libc::FUTEX_WAKE, i32::MAX as u32);
        }
    }

    /// Whether somebody waits while it is ours.
    pub fn is_wanted(&self) -> bool {
        self.next.load(SeqCst).wrapping_sub(self.served.load(SeqCst)) > 1
    }

    fn futex(&self, operation: i32, value: u32) {
        let at = self.served.as_ptr() as usize;
        // SAFETY: waits on our own word, or wakes those who do.
        unsafe {
            system::call(
                libc::SYS_futex,
                [at, (operation | libc::FUTEX_PRIVATE_FLAG) as usize, value as usize, 0, 0, 0],
            )
        };
    }
}
