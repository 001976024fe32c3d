//! Large pages for what glibc's malloc takes: the brk heap, large chunks, the arenas of threads.
//!
//! malloc grows by steps too small for a large page, and touches new memory before anyone can
//! advise it. So it is made to take [`ROOM_BYTES`] at a time, from an aligned address; each step is
//! advised as soon as an allocation shows it; and the one large page that malloc has touched
//! before that is collapsed. The first large page of a heap is collapsed only when the second is used: a
//! small program costs nothing.
//!
//! A thread's arena lies in reservations of 64 MiB, aligned to their size, made accessible in small
//! steps; a large page cannot come where a step ends within it. So at its first allocation in one,
//! it is made accessible and advised as a whole; malloc's own steps then change nothing.
//!
//! Source of the layout: malloc(3) internals as documented in glibc's "MallocInternals"; checked
//! with glibc 2.36. Another malloc than glibc's is left alone.

use crate::system;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering::Relaxed};

/// What malloc takes beyond what it needs when its heap grows. Addresses only; untouched, it is no
/// memory.
const ROOM_BYTES: usize = 64 << 20;
/// glibc's own value of the same.
const ROOM_BYTES_DEFAULT: libc::c_int = 128 << 10;
/// The most that glibc takes: smaller chunks come from the heap, where large pages are.
const MMAP_THRESHOLD_BYTES: libc::c_int = 32 << 20;
/// glibc's HEAP_MAX_SIZE on 64-bit machines.
const ARENA_BYTES: usize = 64 << 20;
/// From this size on an allocation may be a mapping of its own.
const LARGE_BYTES: usize = 2 << 20;
/// Bits of the word before an allocation.
const MAPPED: usize = 2;
const NOT_MAIN_ARENA: usize = 4;
/// Known blocks outside the brk heap are remembered in so many places.
const KNOWN_MAX: usize = 1024;

static ACTIVE: AtomicBool = AtomicBool::new(false);
/// Whether the brk heap is ours to see to.
static OWN_BRK: AtomicBool = AtomicBool::new(false);
static ROOM: AtomicBool = AtomicBool::new(false);
static BUSY: AtomicBool = AtomicBool::new(false);
/// The size that is advised for.
static PAGE_BYTES: AtomicUsize = AtomicUsize::new(0);
/// Where glibc keeps the end of the brk heap.
static END: AtomicPtr<usize> = AtomicPtr::new(std::ptr::null_mut());
/// The end when it was last looked at.
static SEEN_END: AtomicUsize = AtomicUsize::new(0);
/// The brk heap from its first large page on; allocations in its first `KNOWN_BYTES` need no look.
static START: AtomicUsize = AtomicUsize::new(0);
static KNOWN_BYTES: AtomicUsize = AtomicUsize::new(0);
/// Blocks of large pages outside the brk heap that were looked at: their number plus 1.
static KNOWN: [AtomicUsize; KNOWN_MAX] = [const { AtomicUsize::new(0) }; KNOWN_MAX];

/// Advises what malloc takes from now on, and with `own_brk` also has it take the brk heap in
/// large steps. The first call decides; the only thread makes it.
pub fn advise_from_now_on(page_bytes: usize, own_brk: bool) {
    if ACTIVE.load(Relaxed) || !malloc_is_glibcs() {
        return;
    }
    // SAFETY: the name ends in null.
    let end = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__curbrk".as_ptr()) }.cast::<usize>();
    if end.is_null() {
        return;
    }
    let start = align_brk(page_bytes);
    if own_brk {
        // SAFETY: plain numbers.
        unsafe {
            libc::mallopt(libc::M_TOP_PAD, ROOM_BYTES as libc::c_int);
            libc::mallopt(libc::M_TRIM_THRESHOLD, 2 * ROOM_BYTES as libc::c_int);
            libc::mallopt(libc::M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES);
        }
    }
    END.store(end, Relaxed);
    START.store(start, Relaxed);
    SEEN_END.store(start, Relaxed);
    KNOWN_BYTES.store(page_bytes, Relaxed);
    PAGE_BYTES.store(page_bytes, Relaxed);
    OWN_BRK.store(own_brk, Relaxed);
    ROOM.store(own_brk, Relaxed);
    ACTIVE.store(true, Relaxed);
}

/// Programs with an allocator of their own have no such heap, and no such chunks.
fn malloc_is_glibcs() -> bool {
    // SAFETY: the names end in null; the results are compared, not called.
    unsafe {
        let own = libc::dlsym(libc::RTLD_DEFAULT, c"__libc_malloc".as_ptr());
        !own.is_null() && own == libc::dlsym(libc::RTLD_NEXT, c"malloc".as_ptr())
    }
}

/// Moves the end of the brk heap up to a multiple; malloc goes on from where it finds it. Returns
/// it, or the end as it is where it cannot be moved.
fn align_brk(page_bytes: usize) -> usize {
    // SAFETY: the gap becomes ours and stays unused; nobody's memory is taken.
    unsafe {
        let end = libc::sbrk(0) as usize;
        let aligned = end.next_multiple_of(page_bytes);
        let moved = libc::sbrk((aligned - end) as libc::intptr_t) as usize == end;
        if moved { aligned } else { end }
    }
}

/// Whether an allocation tells nothing new. Also when nobody wants to know.
#[inline(always)]
pub fn is_known(address: usize, bytes: usize) -> bool {
    if !ACTIVE.load(Relaxed) {
        return true;
    }
    let in_heap =
        || address.wrapping_sub(START.load(Relaxed)) < KNOWN_BYTES.load(Relaxed) && !has_moved();
    bytes < LARGE_BYTES && (in_heap() || (is_remembered(address) && !has_moved()))
}

#[inline(always)]
fn has_moved() -> bool {
    OWN_BRK.load(Relaxed) && end() != SEEN_END.load(Relaxed)
}

/// The end of the brk heap now.
#[inline(always)]
fn end() -> usize {
    // SAFETY: set before ACTIVE to the address of a word that lives as long as the C library. Another
    // thread may write it meanwhile; a machine word is read whole, and an old value only delays.
    unsafe { END.load(Relaxed).read_volatile() }
}

fn block(address: usize) -> usize {
    address / LARGE_BYTES + 1
}

#[inline(always)]
fn is_remembered(address: usize) -> bool {
    let block = block(address);
    KNOWN.get(block % KNOWN_MAX).is_some_and(|known| known.load(Relaxed) == block)
}

fn remember(address: usize) {
    let block = block(address);
    if let Some(place) = KNOWN.get(block % KNOWN_MAX) {
        place.store(block, Relaxed);
    }
}

/// Has malloc take no more than it needs; true if that may help an allocation that failed.
#[cold]
pub fn give_up_room(bytes: usize) -> bool {
    let had = bytes < 16 * ROOM_BYTES && ROOM.swap(false, Relaxed);
    if had {
        // SAFETY: a plain number.
        unsafe { libc::mallopt(libc::M_TOP_PAD, ROOM_BYTES_DEFAULT) };
    }
    had
}

/// Looks at an allocation, and advises what it shows. Who comes while another thread looks goes on:
/// what is new stays to be noticed.
#[cold]
pub fn notice(address: usize) {
    if address == 0 || BUSY.swap(true, Relaxed) {
        return;
    }
    let errno = system::errno();
    // SAFETY: malloc is glibc's (checked when this became active), so the word before an allocation
    // holds its chunk's size and flags.
    let word = unsafe { (address as *const usize).sub(1).read() };
    let (start, bytes) = (START.load(Relaxed), word & !7);
    if OWN_BRK.load(Relaxed) && has_moved() {
        heap_has_moved(start, address + bytes);
    }
    if address.wrapping_sub(start) < end().wrapping_sub(start) {
        in_heap(address, start);
    } else if word & MAPPED != 0 {
        // SAFETY: a chunk that is mapped by itself begins `before` bytes before its first word.
        let before = unsafe { (address as *const usize).sub(2).read() };
        advise(address - 16 - before, before + bytes);
    } else {
        if word & NOT_MAIN_ARENA != 0 {
            in_arena(address);
        }
        remember(address);
    }
    system::set_errno(errno);
    BUSY.store(false, Relaxed);
}

/// Advises what came; `touched` is where malloc has put the head of what is left of it.
///
/// The kernel makes no large page of parts of two mappings, and malloc touches a step before it can be
/// advised, which keeps it from becoming one mapping with an advised one. So only whole large pages are
/// advised: the rest at the end stays as the kernel maps a heap, grows into one mapping with the next
/// step, and is advised and collapsed with that.
///
/// The heap's end is malloc's alone: another thread may move it at any time, under malloc's lock.
fn heap_has_moved(start: usize, touched: usize) {
    let (end, seen) = (end(), SEEN_END.load(Relaxed).max(start));
    let whole = |address: usize| address & !(PAGE_BYTES.load(Relaxed) - 1);
    let (from, to) = (whole(seen).max(start), whole(end));
    if end > seen && to > from {
        advise(from, to - from);
        if from < seen && block(from) != block(start) {
            collapse(from);
        }
        if block(touched) != block(start) {
            collapse(touched);
        }
    }
    SEEN_END.store(end, Relaxed);
}

fn in_heap(address: usize, start: usize) {
    let known = KNOWN_BYTES.load(Relaxed);
    if address - start < known && known <= PAGE_BYTES.load(Relaxed) {
        return;
    }
    if known <= PAGE_BYTES.load(Relaxed) {
        collapse(start);
    }
    KNOWN_BYTES.store(end() - start, Relaxed);
}

fn in_arena(address: usize) {
    let arena = address & !(ARENA_BYTES - 1);
    // SAFETY: the aligned 64 MiB around a chunk of such an arena were reserved by malloc for nothing
    // else; it would make them accessible itself before using them.
    unsafe {
        libc::mprotect(arena as *mut c_void, ARENA_BYTES, libc::PROT_READ | libc::PROT_WRITE)
    };
    advise(arena, ARENA_BYTES);
    if address - arena >= LARGE_BYTES {
        collapse(arena);
    }
}

/// Advises the whole base pages of a range.
fn advise(start: usize, bytes: usize) {
    let base = system::base_page() as usize;
    let first = start & !(base - 1);
    // SAFETY: the range is malloc's memory; the advice changes no contents.
    unsafe { libc::madvise(first as *mut c_void, start + bytes - first, libc::MADV_HUGEPAGE) };
}

/// Makes the base pages of a block a large page, as far as that is what was asked for. Contents stay
/// as they are, also while others write them.
fn collapse(address: usize) {
    if PAGE_BYTES.load(Relaxed) == LARGE_BYTES {
        let block = address & !(LARGE_BYTES - 1);
        // SAFETY: whatever is mapped there keeps its contents; where nothing is, the call fails.
        unsafe { libc::madvise(block as *mut c_void, LARGE_BYTES, system::MADV_COLLAPSE) };
    }
}
