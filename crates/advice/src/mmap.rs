//! mmap, interposed: private anonymous memory that programs map for themselves, as allocators do
//! that are not glibc's (jemalloc, Python's). glibc's own malloc does not come through here.
//!
//! A mapping seldom begins and ends where large pages do, and where it does not, its ends never
//! could have one. So mappings from [`PIECE_BYTES_MIN`] on, for which the caller leaves the place to
//! us, begin at a large page or behind another in the same large page. The caller owns its piece like
//! any mapping and unmaps it by itself.

use crate::system;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The huge page of x86-64, and of arm64 with base pages of 4K.
const LARGE_BYTES: usize = 2 << 20;
/// Smaller mappings are left as they are.
const PIECE_BYTES_MIN: usize = 256 << 10;
/// Mappings before main that are remembered.
const EARLY_MAX: usize = 8;

static ACTIVE: AtomicBool = AtomicBool::new(false);
/// The next piece; from here to the end of its large page is free. 0: none.
static FREE: AtomicUsize = AtomicUsize::new(0);
/// Start and length of mappings that were made before the wishes were known: allocators start
/// before any constructor does.
static EARLY: [[AtomicUsize; 2]; EARLY_MAX] =
    [const { [AtomicUsize::new(0), AtomicUsize::new(0)] }; EARLY_MAX];
static EARLY_COUNT: AtomicUsize = AtomicUsize::new(0);
/// They got base pages as far as they were used; made good when more is mapped, so that a small
/// program does not pay.
static EARLY_IS_DUE: AtomicBool = AtomicBool::new(false);

/// From now on mappings are advised, and those that are there already.
pub fn advise_from_now_on(page_bytes: usize) {
    early().for_each(|(start, bytes)| advise(start, bytes, libc::MADV_HUGEPAGE));
    EARLY_IS_DUE.store(page_bytes == LARGE_BYTES, Ordering::Relaxed);
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

/// # Safety
/// As mmap(2).
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
            true => advise(result as usize, bytes, libc::MADV_HUGEPAGE),
            false => remember(result as usize, bytes),
        }
    }
    result
}

/// # Safety
/// As mmap(2).
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

/// The system call itself, which sets errno as the C library's function does.
///
/// # Safety
/// As mmap(2).
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

fn advise(start: usize, bytes: usize, advice: libc::c_int) {
    let errno = system::errno();
    // SAFETY: private memory of the program; the advice changes no contents, and where nothing is
    // mapped any more it fails.
    unsafe { libc::madvise(start as *mut c_void, bytes, advice) };
    system::set_errno(errno);
}

fn is_piece(bytes: usize) -> bool {
    let base = system::base_page() as usize;
    bytes >= PIECE_BYTES_MIN && bytes.is_multiple_of(base)
}

/// A piece of the large page in use, else of new ones. None if there is no room.
fn piece(bytes: usize, flags: libc::c_int) -> Option<usize> {
    let take = |free: usize| (bytes <= left(free)).then(|| rest(free + bytes));
    if let Ok(piece) = FREE.fetch_update(Ordering::AcqRel, Ordering::Acquire, take) {
        return Some(piece);
    }
    let start = large_pages(bytes.checked_next_multiple_of(LARGE_BYTES)?, flags)?;
    let free = rest(start + bytes);
    // The larger rest is kept; the other stays unused.
    let keep = |other: usize| (left(free) > left(other)).then_some(free);
    let _ = FREE.fetch_update(Ordering::AcqRel, Ordering::Acquire, keep);
    Some(start)
}

/// What is free from here to the end of the large page.
fn left(free: usize) -> usize {
    free.next_multiple_of(LARGE_BYTES) - free
}

/// Where the free part begins; 0 if there is none.
fn rest(free: usize) -> usize {
    if left(free) > 0 { free } else { 0 }
}

/// A new, advised mapping of whole large pages.
fn large_pages(bytes: usize, flags: libc::c_int) -> Option<usize> {
    let errno = system::errno();
    let start = aligned(bytes, flags);
    if let Some(start) = start {
        advise(start, bytes, libc::MADV_HUGEPAGE);
    }
    if EARLY_IS_DUE.swap(false, Ordering::Relaxed) {
        early().for_each(|(start, bytes)| advise(start, bytes, system::MADV_COLLAPSE));
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
            // SAFETY: a part of a mapping that was made here and that nobody has seen.
            unsafe { libc::munmap(start as *mut c_void, bytes) };
        }
    };
    // Since Linux 6.7 such lengths are aligned by the kernel.
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
