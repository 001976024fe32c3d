//! The heap that is never paged: for this library's own Rust code, and for what the C library
//! allocates while it works for the pager.

use dlmalloc::{Allocator, Dlmalloc};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use std::alloc::{GlobalAlloc, Layout};
use std::cell::UnsafeCell;
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::*};

/// Address space that is set aside. Memory is taken only where it is used.
const RESERVE_BYTES: usize = 16 << 30;

static START: AtomicUsize = AtomicUsize::new(0);

/// Hands out the reserve from its start on.
struct Reserve {
    used: AtomicUsize,
}

impl Reserve {
    fn start() -> usize {
        let start = START.load(Acquire);
        if start != 0 {
            return start;
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a fresh mapping at a place of the kernel's choice; a direct system call, so that it
        // does not come back to this library.
        let made = unsafe { mmap_anonymous(ptr::null_mut(), RESERVE_BYTES, protection, flags) };
        let Ok(made) = made else { return 0 };
        START.store(made as usize, Release);
        made as usize
    }
}

// SAFETY: `alloc` gives out each part of a live mapping once; nothing is ever unmapped.
unsafe impl Allocator for Reserve {
    fn alloc(&self, size: usize) -> (*mut u8, usize, u32) {
        let start = Reserve::start();
        let size = size.next_multiple_of(64 << 10);
        let used = self.used.load(Relaxed);
        if start == 0 || size > RESERVE_BYTES - used {
            return (ptr::null_mut(), 0, 0);
        }
        self.used.store(used + size, Relaxed);
        ((start + used) as *mut u8, size, 0)
    }

    fn remap(&self, _: *mut u8, _: usize, _: usize, _: bool) -> *mut u8 {
        ptr::null_mut()
    }

    fn free_part(&self, _: *mut u8, _: usize, _: usize) -> bool {
        false
    }

    fn free(&self, _: *mut u8, _: usize) -> bool {
        false
    }

    fn can_release_part(&self, _: u32) -> bool {
        false
    }

    fn allocates_zeros(&self) -> bool {
        true
    }

    fn page_size(&self) -> usize {
        4096
    }
}

/// The heap, one caller at a time.
struct Private {
    lock: AtomicU32,
    heap: UnsafeCell<Dlmalloc<Reserve>>,
}

// SAFETY: the heap is only touched by `with`, under the lock.
unsafe impl Sync for Private {}

#[global_allocator]
static PRIVATE: Private = Private {
    lock: AtomicU32::new(0),
    heap: UnsafeCell::new(Dlmalloc::new_with_allocator(Reserve { used: AtomicUsize::new(0) })),
};

impl Private {
    fn with<T>(&self, work: impl FnOnce(&mut Dlmalloc<Reserve>) -> T) -> T {
        // Held for a few hundred instructions that cannot fault on paged memory, and for a fork; a holder
        // that is preempted is given the CPU.
        lock();
        // SAFETY: the lock is held, so this is the only reference.
        let result = work(unsafe { &mut *self.heap.get() });
        unlock();
        result
    }
}

/// Takes the heap, for a fork: the child must not get it half changed.
pub fn lock() {
    while PRIVATE.lock.compare_exchange_weak(0, 1, Acquire, Relaxed).is_err() {
        rustix::thread::sched_yield();
    }
}

/// Gives back what [`lock`] took, in the parent or the child.
pub fn unlock() {
    PRIVATE.lock.store(0, Release);
}

// SAFETY: passes layouts on to an allocator that keeps the same contract.
unsafe impl GlobalAlloc for Private {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller promises.
        self.with(|heap| unsafe { heap.malloc(layout.size(), layout.align()) })
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        self.with(|heap| unsafe { heap.free(at, layout.size(), layout.align()) });
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller promises.
        self.with(|heap| unsafe { heap.calloc(layout.size(), layout.align()) })
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as the caller promises.
        self.with(|heap| unsafe { heap.realloc(at, layout.size(), layout.align(), size) })
    }
}

/// Whether C memory comes from here.
pub fn owns(at: *const u8) -> bool {
    let start = START.load(Acquire);
    start != 0 && (start..start + RESERVE_BYTES).contains(&(at as usize))
}

/// What stands before memory that was given out to C, which frees without a size.
#[repr(C)]
struct Head {
    block: *mut u8,
    block_bytes: usize,
    bytes: usize,
    align: usize,
}

const HEAD: usize = size_of::<Head>();

/// malloc and calloc for C: zeroed memory, aligned to `align` (a power of two), or null.
pub fn allocate(bytes: usize, align: usize) -> *mut u8 {
    let align = align.max(16);
    let Some(block_bytes) = bytes.max(1).checked_add(HEAD + align) else { return ptr::null_mut() };
    let Ok(layout) = Layout::from_size_align(block_bytes, align) else { return ptr::null_mut() };
    // SAFETY: the layout is not of size 0.
    let block = unsafe { PRIVATE.alloc_zeroed(layout) };
    if block.is_null() {
        return block;
    }
    let place = HEAD.next_multiple_of(align);
    // SAFETY: place + bytes ≤ HEAD + align + bytes, the block's size; the head lies right before, and
    // is aligned as `align` and HEAD are multiples of 8.
    unsafe {
        let at = block.add(place);
        at.sub(HEAD).cast::<Head>().write(Head { block, block_bytes, bytes, align });
        at
    }
}

/// Frees what `allocate` gave out.
///
/// # Safety
/// As of free(3); [`owns`] must hold.
pub unsafe fn free(at: *mut u8) {
    // SAFETY: `allocate` wrote a head before what it gave out, for a block of this layout.
    unsafe {
        let head = at.sub(HEAD).cast::<Head>().read();
        PRIVATE
            .dealloc(head.block, Layout::from_size_align_unchecked(head.block_bytes, head.align));
    }
}

/// Bytes that may be used of what `allocate` gave out.
///
/// # Safety
/// As [`free`].
pub unsafe fn usable(at: *const u8) -> usize {
    // SAFETY: as in `free`.
    unsafe { (*at.sub(HEAD).cast::<Head>()).bytes }
}
