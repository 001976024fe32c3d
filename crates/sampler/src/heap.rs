//! This library's own heap. What works for a burst has stopped the program anywhere, in its malloc too, so
//! none of ours may come from there. It only grows: nothing that is freed is used again, so that it has no
//! state that could be found half changed. What lives long is made once, or thrown away all at a time
//! with its size kept ([`crate::cache`]).

use crate::system;
use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Addresses that are set aside. Memory is taken only where it is used.
const RESERVE_BYTES: usize = 1 << 30;

struct Heap {
    next: AtomicUsize,
    end: AtomicUsize,
}

#[global_allocator]
static HEAP: Heap = Heap { next: AtomicUsize::new(0), end: AtomicUsize::new(0) };

/// Sets the addresses aside; false if there are none. Before anything allocates.
pub fn reserve() -> bool {
    let Some(start) = system::map(RESERVE_BYTES, libc::PROT_READ | libc::PROT_WRITE, 0) else {
        return false;
    };
    HEAP.end.store(start + RESERVE_BYTES, Relaxed);
    HEAP.next.store(start, Relaxed);
    true
}

/// Whether little is left. Who runs out of it is aborted.
pub fn is_short() -> bool {
    HEAP.next.load(Relaxed) + (RESERVE_BYTES >> 6) > HEAP.end.load(Relaxed)
}

// SAFETY: each byte of the reserve is given out once.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let size = layout.size() + layout.align();
        let start = self.next.fetch_add(size, Relaxed);
        if start == 0 || start + size > self.end.load(Relaxed) {
            return std::ptr::null_mut();
        }
        start.next_multiple_of(layout.align()) as *mut u8
    }

    unsafe fn dealloc(&self, _: *mut u8, _: Layout) {}
}
