//! The interposed mmap: private anonymous memory that programs map themselves, such as that of allocators
//! other than glibc's (jemalloc, Python's). glibc's own malloc does not call this function.
//!
//! A mapping rarely begins and ends at huge page boundaries. Otherwise its ends could never be on huge pages.
//! So each mapping of [`PIECE_BYTES_MIN`] or more begins at a huge page boundary, or after another one in the
//! same huge page, if the caller leaves the address to us. The caller owns its piece like any mapping, and
//! may unmap it.

use crate::{selection, system};
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The size of a huge page of x86-64, and of arm64 with base pages of 4 KiB.
const LARGE_BYTES: usize = 2 << 20;
/// The size of the smallest mapping that becomes a piece.
const PIECE_BYTES_MIN: usize = 256 << 10;
/// The number of mappings before main that are remembered.
const EARLY_MAX: usize = 8;

static ACTIVE: AtomicBool = AtomicBool::new(false);
/// The address of the next piece: from there to the end of its huge page is free. 0: none.
static FREE: AtomicUsize = AtomicUsize::new(0);
/// Start and length of mappings that were made before the page size was known, as allocators start before any
/// constructor does.
static EARLY: [[AtomicUsize; 2]; EARLY_MAX] =
    [const { [AtomicUsize::new(0), AtomicUsize::new(0)] }; EARLY_MAX];
static EARLY_COUNT: AtomicUsize = AtomicUsize::new(0);
/// True if those early mappings are to be collapsed. They have base pages where they were touched. The
/// collapse waits until more is mapped, so that a small program does not pay for it.
static EARLY_IS_DUE: AtomicBool = AtomicBool::new(false);

/// Advises all mappings from now on, and the early ones.
pub fn advise_from_now_on(page_bytes: usize) {
    early().for_each(|(start, bytes)| selection::advise_mapping(bytes, start, bytes));
    let is_due = page_bytes == LARGE_BYTES && !selection::is_restricted();
    EARLY_IS_DUE.store(is_due, Ordering::Relaxed);
    ACTIVE.store(true, Ordering::Relaxed);
}

fn early() -> impl Iterator<Item = (usize, usize)> {
    let read = |[start, bytes]: &[AtomicUsize; 2]| {
        (start.load(Ordering::Relaxed), bytes.load(Ordering::Relaxed))
    };
    EARLY.iter().map(read).filter(|(_, bytes)| *bytes > 0)
}

fn remember(start: usize, bytes: usize) {
    if let Some([place, length]) = EARLY.get(EARLY_COUNT.fetch_add(1, Ordering::Relaxed)) {
        place.store(start, Ordering::Relaxed);
        length.store(bytes, Ordering::Relaxed);
    }
}

/// Interposes mmap(2).
///
/// # Safety
/// The same conditions as for mmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    place: *mut c_void,
    bytes: usize,
    protection: libc::c_int,
    flags: libc::c_int,
    fd: libc::c_int,
    offset: libc::off_t,
) -> *mut c_void {
    let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let memory = flags & !(libc::MAP_NORESERVE | libc::MAP_FIXED) == private
        && protection == libc::PROT_READ | libc::PROT_WRITE;
    let active = ACTIVE.load(Ordering::Relaxed);
    let anywhere = place.is_null() && flags & libc::MAP_FIXED == 0;
    if active
        && memory
        && anywhere
        && is_piece(bytes)
        && let Some(piece) = piece(bytes, flags)
    {
        return piece as *mut c_void;
    }
    // SAFETY: the caller's own arguments.
    let result = unsafe { raw(place, bytes, protection, flags, fd, offset) };
    if memory && bytes >= LARGE_BYTES && result != libc::MAP_FAILED {
        match active {
            true => selection::advise_mapping(bytes, result as usize, bytes),
            false => remember(result as usize, bytes),
        }
    }
    result
}

/// Interposes mmap64, which is mmap(2) with a 64-bit offset.
///
/// # Safety
/// The same conditions as for mmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    place: *mut c_void,
    bytes: usize,
    protection: libc::c_int,
    flags: libc::c_int,
    fd: libc::c_int,
    offset: libc::off64_t,
) -> *mut c_void {
    // SAFETY: the caller's own arguments.
    unsafe { mmap(place, bytes, protection, flags, fd, offset) }
}

/// Makes the system call, and sets errno as the C library's function does.
///
/// # Safety
/// The same conditions as for mmap(2).
unsafe fn raw(
    place: *mut c_void,
    bytes: usize,
    protection: libc::c_int,
    flags: libc::c_int,
    fd: libc::c_int,
    offset: libc::off_t,
) -> *mut c_void {
    // SAFETY: the caller's own arguments.
    unsafe { libc::syscall(libc::SYS_mmap, place, bytes, protection, flags, fd, offset) as *mut _ }
}

fn collapse(start: usize, bytes: usize) {
    // SAFETY: private memory of the program; collapsing keeps its contents. If nothing is mapped there any
    // more, the call fails.
    unsafe { libc::madvise(start as *mut c_void, bytes, system::MADV_COLLAPSE) };
}

fn is_piece(bytes: usize) -> bool {
    let base = system::base_page() as usize;
    bytes >= PIECE_BYTES_MIN && bytes.is_multiple_of(base)
}

/// Returns a piece of the huge page in use, or of new ones. None if there is no room.
fn piece(bytes: usize, flags: libc::c_int) -> Option<usize> {
    let take = |free: usize| (bytes <= left(free)).then(|| rest(free + bytes));
    if let Ok(piece) = FREE.fetch_update(Ordering::AcqRel, Ordering::Acquire, take) {
        return Some(piece);
    }
    let start = large_pages(bytes, flags)?;
    let free = rest(start + bytes);
    // Keep the larger rest; the other one stays unused.
    let keep = |other: usize| (left(free) > left(other)).then_some(free);
    let _ = FREE.fetch_update(Ordering::AcqRel, Ordering::Acquire, keep);
    Some(start)
}

/// Returns the free bytes from an address to the end of its huge page.
fn left(free: usize) -> usize {
    free.next_multiple_of(LARGE_BYTES) - free
}

/// Returns the start of the free part; 0 if there is none.
fn rest(free: usize) -> usize {
    if left(free) > 0 { free } else { 0 }
}

/// Maps whole huge pages for a piece of so many bytes, and advises them.
fn large_pages(asked: usize, flags: libc::c_int) -> Option<usize> {
    let bytes = asked.checked_next_multiple_of(LARGE_BYTES)?;
    let errno = system::errno();
    let start = aligned(bytes, flags);
    if let Some(start) = start {
        selection::advise_mapping(asked, start, bytes);
    }
    if EARLY_IS_DUE.swap(false, Ordering::Relaxed) {
        early().for_each(|(start, bytes)| collapse(start, bytes));
    }
    system::set_errno(errno);
    start
}

fn aligned(bytes: usize, flags: libc::c_int) -> Option<usize> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let map = |bytes: usize| {
        // SAFETY: a new private mapping.
        let memory = unsafe { raw(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
        (memory != libc::MAP_FAILED).then_some(memory as usize)
    };
    let unmap = |start: usize, bytes: usize| {
        if bytes > 0 {
            // SAFETY: part of a mapping that was made here and whose address nobody else knows.
            unsafe { libc::munmap(start as *mut c_void, bytes) };
        }
    };
    // Linux 6.7 and later align mappings of such lengths.
    let first = map(bytes)?;
    if first.is_multiple_of(LARGE_BYTES) {
        return Some(first);
    }
    unmap(first, bytes);
    let wide = map(bytes.checked_add(LARGE_BYTES)?)?;
    let start = wide.next_multiple_of(LARGE_BYTES);
    unmap(wide, start - wide);
    unmap(start + bytes, wide + LARGE_BYTES - start);
    Some(start)
}
