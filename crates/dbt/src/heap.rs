//! The heap of this library. A burst may interrupt the program anywhere, in its malloc too, so the engine
//! must not use the program's heap. This heap only grows and reuses nothing. So it has no state that an
//! interruption could leave inconsistent. Long-lived lists are created once, or cleared with their capacity
//! kept ([`crate::cache`]).

use crate::system;
use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The size of the reserved address range. The kernel allocates memory only where it is touched.
const RESERVE_BYTES: usize = 1 << 30;

struct Heap {
    next: AtomicUsize,
    end: AtomicUsize,
}

#[global_allocator]
static HEAP: Heap = Heap { next: AtomicUsize::new(0), end: AtomicUsize::new(0) };

/// Reserves the address range, before anything allocates. Returns false if the kernel refuses.
pub fn reserve() -> bool {
    let Some(start) = system::map(RESERVE_BYTES, libc::PROT_READ | libc::PROT_WRITE, 0) else {
        return false;
    };
    HEAP.end.store(start + RESERVE_BYTES, Relaxed);
    HEAP.next.store(start, Relaxed);
    true
}

/// Returns true if less than 1/64 of the range is left. An allocation without room aborts the program.
pub fn is_short() -> bool {
    HEAP.next.load(Relaxed) + (RESERVE_BYTES >> 6) > HEAP.end.load(Relaxed)
}

// SAFETY: each byte of the range is allocated at most once.
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
