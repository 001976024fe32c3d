//! malloc and its family.
//!
//! Large blocks are pages of their own, that grow where they are; small ones are mimalloc's, which
//! maps its memory through [`crate::maps`]. Before the pager is there, and for its own threads, memory
//! is private.

use crate::paged::{paged, paged_at};
use crate::{fail, private};
use libc::{c_int, c_void, size_t};
use libmimalloc_sys as mi;
use std::ptr::{self, null_mut};

/// Blocks from this size on are pages of their own.
const LARGE: usize = 256 << 10;
const PAGE: usize = 4096;

fn allocate(bytes: usize, align: usize, zeroed: bool) -> *mut c_void {
    let at: *mut c_void = match paged() {
        None => private::allocate(bytes, align).cast(),
        Some(paged) if bytes >= LARGE => paged.allocate(bytes, align).cast(),
        // SAFETY: any size will do; alignments are powers of two.
        Some(_) => unsafe {
            match (align <= 16, zeroed) {
                (true, false) => mi::mi_malloc(bytes),
                (true, true) => mi::mi_zalloc(bytes),
                (false, false) => mi::mi_malloc_aligned(bytes, align),
                (false, true) => mi::mi_zalloc_aligned(bytes, align),
            }
        },
    };
    if at.is_null() { fail(libc::ENOMEM, at) } else { at }
}

/// malloc(3)
#[unsafe(no_mangle)]
pub extern "C" fn malloc(bytes: size_t) -> *mut c_void {
    allocate(bytes, 16, false)
}

/// calloc(3)
#[unsafe(no_mangle)]
pub extern "C" fn calloc(count: size_t, bytes: size_t) -> *mut c_void {
    match count.checked_mul(bytes) {
        Some(bytes) => allocate(bytes, 16, true),
        None => fail(libc::ENOMEM, null_mut()),
    }
}

/// free(3); errno stays as it is.
///
/// # Safety
/// As of free(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free(at: *mut c_void) {
    if at.is_null() {
        return;
    }
    // SAFETY: the location is valid for the calling thread.
    let errno = unsafe { *libc::__errno_location() };
    match paged_at(at.cast()) {
        Some(paged) if paged.free(at.cast()) => {}
        // SAFETY: in the paged region but not a large block, so mimalloc's.
        Some(_) => unsafe { mi::mi_free(at) },
        // SAFETY: ours by its address. What is neither was never given out by this library.
        None if private::owns(at.cast()) => unsafe { private::free(at.cast()) },
        None => {}
    }
    fail(errno, ());
}

/// malloc_usable_size(3)
///
/// # Safety
/// As of malloc_usable_size(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc_usable_size(at: *mut c_void) -> size_t {
    if at.is_null() {
        return 0;
    }
    match paged_at(at.cast()) {
        Some(paged) => match paged.allocated(at.cast()) {
            Some(bytes) => bytes,
            // SAFETY: in the paged region but not a large block, so mimalloc's.
            None => unsafe { mi::mi_usable_size(at) },
        },
        // SAFETY: ours by its address.
        None if private::owns(at.cast()) => unsafe { private::usable(at.cast()) },
        None => 0,
    }
}

/// realloc(3)
///
/// # Safety
/// As of realloc(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realloc(at: *mut c_void, bytes: size_t) -> *mut c_void {
    if at.is_null() {
        return malloc(bytes);
    }
    if bytes == 0 {
        // SAFETY: as the caller promises.
        unsafe { free(at) };
        return null_mut();
    }
    let large = paged_at(at.cast()).map(|paged| (paged, paged.allocated(at.cast())));
    match large {
        Some((paged, Some(before)))
            if bytes >= LARGE / 2 && paged.resize(at.cast(), before, bytes) =>
        {
            return at;
        }
        // SAFETY: mimalloc's block stays mimalloc's.
        Some((_, None)) if bytes < LARGE && paged().is_some() => unsafe {
            let at = mi::mi_realloc(at, bytes);
            return if at.is_null() { fail(libc::ENOMEM, at) } else { at };
        },
        _ => {}
    }
    // SAFETY: both blocks are at least so long, and apart.
    unsafe {
        let new = malloc(bytes);
        if !new.is_null() {
            ptr::copy_nonoverlapping(
                at.cast::<u8>(),
                new.cast(),
                malloc_usable_size(at).min(bytes),
            );
            free(at);
        }
        new
    }
}

/// reallocarray(3)
///
/// # Safety
/// As of reallocarray(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn reallocarray(
    at: *mut c_void,
    count: size_t,
    bytes: size_t,
) -> *mut c_void {
    match count.checked_mul(bytes) {
        // SAFETY: as the caller promises.
        Some(bytes) => unsafe { realloc(at, bytes) },
        None => fail(libc::ENOMEM, null_mut()),
    }
}

/// memalign(3)
#[unsafe(no_mangle)]
pub extern "C" fn memalign(align: size_t, bytes: size_t) -> *mut c_void {
    match align.is_power_of_two() {
        true => allocate(bytes, align, false),
        false => fail(libc::EINVAL, null_mut()),
    }
}

/// aligned_alloc(3)
#[unsafe(no_mangle)]
pub extern "C" fn aligned_alloc(align: size_t, bytes: size_t) -> *mut c_void {
    memalign(align, bytes)
}

/// valloc(3)
#[unsafe(no_mangle)]
pub extern "C" fn valloc(bytes: size_t) -> *mut c_void {
    memalign(PAGE, bytes)
}

/// pvalloc(3)
#[unsafe(no_mangle)]
pub extern "C" fn pvalloc(bytes: size_t) -> *mut c_void {
    match bytes.checked_next_multiple_of(PAGE) {
        Some(bytes) => memalign(PAGE, bytes),
        None => fail(libc::ENOMEM, null_mut()),
    }
}

/// posix_memalign(3)
///
/// # Safety
/// As of posix_memalign(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_memalign(
    out: *mut *mut c_void,
    align: size_t,
    bytes: size_t,
) -> c_int {
    if !align.is_power_of_two() || !align.is_multiple_of(size_of::<*mut c_void>()) {
        return libc::EINVAL;
    }
    let at = allocate(bytes, align, false);
    if at.is_null() {
        return libc::ENOMEM;
    }
    // SAFETY: a valid place, as the caller promises.
    unsafe { *out = at };
    0
}
