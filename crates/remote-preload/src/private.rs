//! The heap that is never paged. It serves this library's own Rust code, and the C library's
//! allocations on behalf of the pager.

use dlmalloc::{Allocator, Dlmalloc};
use pagetax_core::units::Bytes;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use rustix::process::{Resource, getrlimit};
use std::alloc::{GlobalAlloc, Layout};
use std::cell::UnsafeCell;
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::*};

/// The address space to reserve, as far as limits allow. Memory is used only where the heap is.
const RESERVE_BYTES_MAX: usize = 128 << 30;
/// The smallest reserve with which the library can run.
const RESERVE_BYTES_MIN: usize = 16 << 20;

static START: AtomicUsize = AtomicUsize::new(0);
static RESERVED_BYTES: AtomicUsize = AtomicUsize::new(0);

/// An allocator that cuts the reserve from its start.
struct Reserve {
    used: AtomicUsize,
}

impl Reserve {
    fn start() -> usize {
        let start = START.load(Acquire);
        if start != 0 {
            return start;
        }
        // The paged region and the program need the rest of the limit.
        let limit = getrlimit(Resource::As).current.unwrap_or(u64::MAX);
        let mut bytes = RESERVE_BYTES_MAX.min((limit / 4) as usize).max(RESERVE_BYTES_MIN);
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        while bytes >= RESERVE_BYTES_MIN {
            bytes = bytes / GRAIN * GRAIN;
            // SAFETY: a fresh mapping at an address of the kernel's choice. A direct system call
            // does not come back to this library.
            let made = unsafe { mmap_anonymous(ptr::null_mut(), bytes, protection, flags) };
            if let Ok(made) = made {
                RESERVED_BYTES.store(bytes, Relaxed);
                START.store(made as usize, Release);
                return made as usize;
            }
            bytes /= 2;
        }
        0
    }
}

/// The step in which the heap grows into the reserve.
const GRAIN: usize = 64 << 10;

/// Returns the bytes of pages that a store may keep in this heap: at most half of the reserve, as
/// the heap also has waste and tables that double, and at most the machine's memory.
pub fn room() -> Bytes {
    Reserve::start();
    let reserve = (RESERVED_BYTES.load(Relaxed) / 2) as u64;
    let system = rustix::system::sysinfo();
    // The unit is one byte on 64-bit machines.
    let memory = (system.totalram as u64).saturating_mul(u64::from(system.mem_unit.max(1)));
    Bytes(reserve.min(memory).min(cgroup_limit().unwrap_or(u64::MAX)))
}

/// Returns the memory limit of the process's control group, if it has one.
fn cgroup_limit() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    // The limits of all parent groups apply as well.
    let limit_of = |group: &Path| {
        let file = Path::new("/sys/fs/cgroup").join(group).join("memory.max");
        std::fs::read_to_string(file).ok()?.trim().parse().ok()
    };
    Path::new(path.trim_start_matches('/')).ancestors().filter_map(limit_of).min()
}

// SAFETY: `alloc` returns each part of a live mapping once; nothing is ever unmapped.
unsafe impl Allocator for Reserve {
    fn alloc(&self, size: usize) -> (*mut u8, usize, u32) {
        let start = Reserve::start();
        let size = size.next_multiple_of(GRAIN);
        let used = self.used.load(Relaxed);
        if start == 0 || size > RESERVED_BYTES.load(Relaxed) - used {
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
        // The lock is held for a few hundred instructions that cannot fault on paged memory, and
        // during a fork. A waiting thread yields to a preempted holder.
        lock();
        // SAFETY: the lock is held, so this is the only reference.
        let result = work(unsafe { &mut *self.heap.get() });
        unlock();
        result
    }
}

/// Locks the heap for a fork, so that the child finds it consistent.
pub fn lock() {
    while PRIVATE.lock.compare_exchange_weak(0, 1, Acquire, Relaxed).is_err() {
        rustix::thread::sched_yield();
    }
}

/// Undoes [`lock`], in the parent or the child.
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

/// Returns true if an address is of this heap.
pub fn owns(at: *const u8) -> bool {
    let start = START.load(Acquire);
    start != 0 && (at as usize).wrapping_sub(start) < RESERVED_BYTES.load(Relaxed)
}

/// The header of a block for C, which frees without a size.
#[repr(C)]
struct BlockHeader {
    block: *mut u8,
    block_bytes: usize,
    bytes: usize,
    align: usize,
}

const HEADER_BYTES: usize = size_of::<BlockHeader>();

/// Allocates zeroed memory for C, aligned to `align` (a power of two). Returns null if there is
/// none.
pub fn allocate(bytes: usize, align: usize) -> *mut u8 {
    let align = align.max(16);
    let Some(block_bytes) = bytes.max(1).checked_add(HEADER_BYTES + align) else {
        return ptr::null_mut();
    };
    let Ok(layout) = Layout::from_size_align(block_bytes, align) else { return ptr::null_mut() };
    // SAFETY: the layout is not of size 0.
    let block = unsafe { PRIVATE.alloc_zeroed(layout) };
    if block.is_null() {
        return block;
    }
    let place = HEADER_BYTES.next_multiple_of(align);
    // SAFETY: place + bytes ≤ HEADER_BYTES + align + bytes, the size of the block. The header lies
    // right before, and is aligned: `align` and HEADER_BYTES are multiples of 8.
    unsafe {
        let at = block.add(place);
        at.sub(HEADER_BYTES).cast::<BlockHeader>().write(BlockHeader {
            block,
            block_bytes,
            bytes,
            align,
        });
        at
    }
}

/// Frees a block of [`allocate`].
///
/// # Safety
/// The caller keeps the contract of free(3), and [`owns`] returns true.
pub unsafe fn free(at: *mut u8) {
    // SAFETY: `allocate` wrote a header before each block, with this layout.
    unsafe {
        let head = at.sub(HEADER_BYTES).cast::<BlockHeader>().read();
        PRIVATE
            .dealloc(head.block, Layout::from_size_align_unchecked(head.block_bytes, head.align));
    }
}

/// Returns the usable size of a block of [`allocate`].
///
/// # Safety
/// The contract of [`free`].
pub unsafe fn usable(at: *const u8) -> usize {
    // SAFETY: as in `free`.
    unsafe { (*at.sub(HEADER_BYTES).cast::<BlockHeader>()).bytes }
}
