//! The heap that is never paged: for this library's own Rust code, and for what the C library
//! allocates while it works for the pager.

use dlmalloc::{Allocator, Dlmalloc};
use pagetax_core::units::Bytes;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use rustix::process::{Resource, getrlimit};
use std::alloc::{GlobalAlloc, Layout};
use std::cell::UnsafeCell;
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::*};

/// Address space that is set aside, as far as limits allow. Memory is taken only where it is used.
const RESERVE_BYTES_MAX: usize = 128 << 30;
/// With less than this, nothing works.
const RESERVE_BYTES_MIN: usize = 16 << 20;

static START: AtomicUsize = AtomicUsize::new(0);
static RESERVED_BYTES: AtomicUsize = AtomicUsize::new(0);

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
        // The rest of a limit is for the paged region, and for the program.
        let limit = getrlimit(Resource::As).current.unwrap_or(u64::MAX);
        let mut bytes = RESERVE_BYTES_MAX.min((limit / 4) as usize).max(RESERVE_BYTES_MIN);
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        while bytes >= RESERVE_BYTES_MIN {
            bytes = bytes / GRAIN * GRAIN;
            // SAFETY: a fresh mapping at a place of the kernel's choice; a direct system call, so that it
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

/// What the heap takes from the reserve at once.
const GRAIN: usize = 64 << 10;

/// Returns how many bytes of pages a store may keep in this heap. Half of the reserve is for what the heap wastes, and
/// for tables that double; and a store takes no more than the memory that there is.
pub fn room() -> Bytes {
    Reserve::start();
    let reserve = (RESERVED_BYTES.load(Relaxed) / 2) as u64;
    let system = rustix::system::sysinfo();
    // In units of one byte on 64-bit machines.
    let memory = (system.totalram as u64).saturating_mul(u64::from(system.mem_unit.max(1)));
    Bytes(reserve.min(memory).min(cgroup_limit().unwrap_or(u64::MAX)))
}

/// The memory that the process's control group may use, where there is such a limit.
fn cgroup_limit() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    // Of each of its parents, too.
    let limit_of = |group: &Path| {
        let file = Path::new("/sys/fs/cgroup").join(group).join("memory.max");
        std::fs::read_to_string(file).ok()?.trim().parse().ok()
    };
    Path::new(path.trim_start_matches('/')).ancestors().filter_map(limit_of).min()
}

// SAFETY: `alloc` gives out each part of a live mapping once; nothing is ever unmapped.
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
    start != 0 && (at as usize).wrapping_sub(start) < RESERVED_BYTES.load(Relaxed)
}

/// What stands before memory that was given out to C, which frees without a size.
#[repr(C)]
struct BlockHeader {
    block: *mut u8,
    block_bytes: usize,
    bytes: usize,
    align: usize,
}

const HEADER_BYTES: usize = size_of::<BlockHeader>();

/// malloc and calloc for C: zeroed memory, aligned to `align` (a power of two), or null.
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
    // SAFETY: place + bytes ≤ HEADER_BYTES + align + bytes, the block's size; the head lies right before, and
    // is aligned as `align` and HEADER_BYTES are multiples of 8.
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

/// Frees what `allocate` gave out.
///
/// # Safety
/// As of free(3); [`owns`] must hold.
pub unsafe fn free(at: *mut u8) {
    // SAFETY: `allocate` wrote a head before what it gave out, for a block of this layout.
    unsafe {
        let head = at.sub(HEADER_BYTES).cast::<BlockHeader>().read();
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
    unsafe { (*at.sub(HEADER_BYTES).cast::<BlockHeader>()).bytes }
}
