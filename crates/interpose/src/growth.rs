//! Huge pages for the memory of glibc's malloc: the brk heap, large chunks, the arenas of threads.
//!
//! malloc grows by steps smaller than a huge page, and touches new memory before anyone can advise it. So it
//! is configured to take [`ROOM_BYTES`] at a time, from an aligned address. Each step is advised as soon as
//! an allocation reveals it. The one huge page that malloc has touched before that is collapsed. The first
//! huge page of a heap is collapsed only when the second is used, so that a small program costs nothing.
//!
//! A thread's arena is a reservation of 64 MiB, aligned to its size. malloc makes it accessible in small
//! steps. The kernel maps no huge page across the end of a step. So the first allocation that is seen in an
//! arena makes the whole arena accessible and advises it. malloc's own steps then change nothing.
//!
//! Source of the layout: malloc(3) internals as documented in glibc's "MallocInternals"; checked with glibc
//! 2.36. If malloc is not glibc's, nothing is done.

use crate::selection::{self, Kind};
use crate::system;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering::Relaxed};

/// The address space that malloc takes beyond its need when its heap grows (M_TOP_PAD). Untouched, it uses no
/// memory.
const ROOM_BYTES: usize = 64 << 20;
/// The same where memory is named by its order: room for all chunks, so that the order does not depend on it.
/// A recorder may refuse to move the heap's end; then malloc continues in a mapping of this length.
const ROOM_BYTES_IN_ORDER: usize = 1 << 30;
/// glibc's default for M_TOP_PAD.
const ROOM_BYTES_DEFAULT: libc::c_int = 128 << 10;
/// The largest M_MMAP_THRESHOLD that glibc accepts. Smaller chunks come from the heap, which has huge pages.
const MMAP_THRESHOLD_BYTES: libc::c_int = 32 << 20;
/// glibc's HEAP_MAX_SIZE on 64-bit machines.
const ARENA_BYTES: usize = 64 << 20;
/// The size from which on an allocation may be a mapping of its own.
const LARGE_BYTES: usize = 2 << 20;
/// Flags in the word before an allocation (IS_MMAPPED, NON_MAIN_ARENA).
const MAPPED: usize = 2;
const NOT_MAIN_ARENA: usize = 4;
/// The number of entries that remember blocks outside the brk heap.
const KNOWN_MAX: usize = 1024;
/// The number of arenas that have numbers of their own.
const ARENAS_MAX: usize = 256;

static ACTIVE: AtomicBool = AtomicBool::new(false);
/// True if this library manages the brk heap.
static OWN_BRK: AtomicBool = AtomicBool::new(false);
static ROOM: AtomicBool = AtomicBool::new(false);
static BUSY: AtomicBool = AtomicBool::new(false);
/// The page size to advise for, in bytes.
static PAGE_BYTES: AtomicUsize = AtomicUsize::new(0);
/// The address of glibc's variable with the end of the brk heap (`__curbrk`).
static END: AtomicPtr<usize> = AtomicPtr::new(std::ptr::null_mut());
/// The end of the brk heap when it was last checked.
static SEEN_END: AtomicUsize = AtomicUsize::new(0);
/// The start of the brk heap's first huge page. Allocations in the `KNOWN_BYTES` from there need no check.
static START: AtomicUsize = AtomicUsize::new(0);
static KNOWN_BYTES: AtomicUsize = AtomicUsize::new(0);
/// Arenas in the order of their first use.
static ARENAS: [AtomicUsize; ARENAS_MAX] = [const { AtomicUsize::new(0) }; ARENAS_MAX];
/// The start of the main heap where malloc could not move the heap's end; 0 before that is seen.
static ELSEWHERE: AtomicUsize = AtomicUsize::new(0);
/// Blocks of 2 MiB outside the brk heap that were checked: their number plus 1, by number modulo
/// [`KNOWN_MAX`].
static KNOWN: [AtomicUsize; KNOWN_MAX] = [const { AtomicUsize::new(0) }; KNOWN_MAX];

/// Advises the memory that malloc takes from now on. With `own_brk`, it also makes malloc grow the brk heap
/// in large steps. Only the first call has an effect. The caller must be the process's only thread.
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
        // SAFETY: these options take plain numbers.
        unsafe {
            let room = if selection::is_in_order() { ROOM_BYTES_IN_ORDER } else { ROOM_BYTES };
            libc::mallopt(libc::M_TOP_PAD, room as libc::c_int);
            libc::mallopt(libc::M_TRIM_THRESHOLD, (room as libc::c_int).saturating_mul(2));
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

/// Returns true if malloc is glibc's. Other allocators have no such heap and no such chunks.
fn malloc_is_glibcs() -> bool {
    // SAFETY: the names end in null; the results are compared, not called.
    unsafe {
        let own = libc::dlsym(libc::RTLD_DEFAULT, c"__libc_malloc".as_ptr());
        !own.is_null() && own == libc::dlsym(libc::RTLD_NEXT, c"malloc".as_ptr())
    }
}

/// Moves the end of the brk heap up to a multiple of the page size; malloc continues from there. Returns the
/// new end, or the old one if it cannot be moved.
fn align_brk(page_bytes: usize) -> usize {
    // SAFETY: the gap belongs to us and stays unused; no memory in use is taken.
    unsafe {
        let end = libc::sbrk(0) as usize;
        let aligned = end.next_multiple_of(page_bytes);
        let moved = libc::sbrk((aligned - end) as libc::intptr_t) as usize == end;
        if moved { aligned } else { end }
    }
}

/// Returns true if an allocation needs no check. Always true before [`advise_from_now_on`].
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

/// Returns the present end of the brk heap.
#[inline(always)]
fn end() -> usize {
    // SAFETY: set before ACTIVE to the address of a word that lives as long as the C library. Another thread
    // may write it meanwhile. A machine word is read as a whole, and an old value only delays the advice.
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

/// Makes malloc take only what it needs. Returns true if that may help an allocation that failed.
#[cold]
pub fn give_up_room(bytes: usize) -> bool {
    let had = bytes < 16 * ROOM_BYTES && ROOM.swap(false, Relaxed);
    if had {
        // SAFETY: the option takes a plain number.
        unsafe { libc::mallopt(libc::M_TOP_PAD, ROOM_BYTES_DEFAULT) };
    }
    had
}

/// Advises the memory that an allocation reveals. While one thread is here, others return at once: a later
/// allocation reveals the same memory.
#[cold]
pub fn notice(address: usize) {
    if address == 0 || BUSY.swap(true, Relaxed) {
        return;
    }
    let errno = system::errno();
    // SAFETY: malloc is glibc's (checked when this became active), so the word before an allocation holds its
    // chunk's size and flags.
    let word = unsafe { (address as *const usize).sub(1).read() };
    let (start, bytes) = (START.load(Relaxed), word & !7);
    if OWN_BRK.load(Relaxed) && has_moved() {
        heap_has_moved(start, address + bytes);
    }
    if address.wrapping_sub(start) < end().wrapping_sub(start) {
        in_heap(address, start);
    } else if word & MAPPED != 0 {
        // SAFETY: a chunk that is a mapping of its own begins `before` bytes before its first word.
        let before = unsafe { (address as *const usize).sub(2).read() };
        selection::advise_mapping(before + bytes, address - 16 - before, before + bytes);
    } else {
        if word & NOT_MAIN_ARENA != 0 {
            in_arena(address);
        } else if OWN_BRK.load(Relaxed) && selection::is_logged() {
            in_heap_elsewhere(address);
        }
        remember(address);
    }
    system::set_errno(errno);
    BUSY.store(false, Relaxed);
}

/// Advises the new part of the brk heap. `touched` is the address of the top chunk's header, which malloc has
/// written.
///
/// The kernel makes no huge page out of two mappings. malloc touches a step before it can be advised, so the
/// step does not merge with an advised mapping. So only whole huge pages are advised. The rest at the end
/// stays an ordinary heap mapping. It merges with the next step, and is advised and collapsed with it.
///
/// Only malloc may move the heap's end: another thread may do so at any time, under malloc's lock.
fn heap_has_moved(start: usize, touched: usize) {
    let (end, seen) = (end(), SEEN_END.load(Relaxed).max(start));
    let whole = |address: usize| address & !(PAGE_BYTES.load(Relaxed) - 1);
    let (from, to) = (whole(seen).max(start), whole(end));
    if end > seen && to > from {
        selection::advise(Kind::Heap, from - start, from, to - from);
        let is_chosen = |at: usize| {
            block(at) != block(start) && selection::is_chosen(Kind::Heap, at.wrapping_sub(start))
        };
        if from < seen && is_chosen(from) {
            collapse(from);
        }
        if is_chosen(touched) {
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
    if known <= PAGE_BYTES.load(Relaxed) && selection::is_chosen(Kind::Heap, 0) {
        collapse(start);
    }
    KNOWN_BYTES.store(end() - start, Relaxed);
}

/// Logs the main heap that malloc continues outside the brk heap.
fn in_heap_elsewhere(address: usize) {
    let first = (address - 16) & !(system::base_page() as usize - 1);
    if ELSEWHERE.compare_exchange(0, first, Relaxed, Relaxed).is_ok() {
        selection::advise(Kind::Heap, 0, first, ROOM_BYTES_IN_ORDER);
    }
}

/// Returns the number of an arena, and true if it is new. All arenas beyond [`ARENAS_MAX`] share a number.
fn number_of(arena: usize) -> (usize, bool) {
    for (number, known) in ARENAS.iter().enumerate() {
        match known.compare_exchange(0, arena, Relaxed, Relaxed) {
            Ok(_) => return (number, true),
            Err(same) if same == arena => return (number, false),
            Err(_) => {}
        }
    }
    (ARENAS_MAX, true)
}

fn in_arena(address: usize) {
    let arena = address & !(ARENA_BYTES - 1);
    // SAFETY: malloc has reserved the aligned 64 MiB around a chunk of such an arena for nothing else. It
    // would make them accessible itself before use.
    unsafe {
        libc::mprotect(arena as *mut c_void, ARENA_BYTES, libc::PROT_READ | libc::PROT_WRITE)
    };
    let (number, is_new) = number_of(arena);
    if is_new {
        selection::advise(Kind::Arena, number * ARENA_BYTES, arena, ARENA_BYTES);
    }
    if address - arena >= LARGE_BYTES && selection::is_chosen(Kind::Arena, number * ARENA_BYTES) {
        collapse(arena);
    }
}

/// Collapses a block of 2 MiB into a huge page, if that is the size asked for. Its contents stay the same,
/// even while other threads write them.
fn collapse(address: usize) {
    if PAGE_BYTES.load(Relaxed) == LARGE_BYTES {
        let block = address & !(LARGE_BYTES - 1);
        // SAFETY: collapsing keeps contents. If nothing is mapped there, the call fails.
        unsafe { libc::madvise(block as *mut c_void, LARGE_BYTES, system::MADV_COLLAPSE) };
    }
}
