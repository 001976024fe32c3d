//! malloc and its family.
//!
//! A large block is a range of pages that can grow in place. Small blocks are mimalloc's, which
//! maps its memory through [`crate::maps`]. Before the pager runs, and for its own threads, memory
//! is private.

use crate::objects::is_loader;
use crate::paged::{Paged, paged, paged_at};
use crate::threads::Internal;
use crate::{fail, local, private};
use libc::{c_int, c_void, size_t};
use libmimalloc_sys as mi;
use std::ptr::{self, null_mut};

/// The size from which a block is a range of pages.
const LARGE: usize = 256 << 10;
const PAGE: usize = 4096;

/// The wanted contents of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AllocationKind {
    /// Any bytes.
    Bytes,
    /// Zeros.
    Zeros,
    /// A longer copy of another block. It will probably grow again.
    ToGrow,
}

fn allocate(bytes: usize, align: usize, kind: AllocationKind) -> *mut c_void {
    let at: *mut c_void = match paged() {
        None => private::allocate(bytes, align).cast(),
        Some(paged) if bytes >= LARGE => allocate_large(paged, bytes, align, kind).cast(),
        // SAFETY: any size will do; alignments are powers of two.
        Some(_) => unsafe {
            match (align <= 16, kind == AllocationKind::Zeros) {
                (true, false) => mi::mi_malloc(bytes),
                (true, true) => mi::mi_zalloc(bytes),
                (false, false) => mi::mi_malloc_aligned(bytes, align),
                (false, true) => mi::mi_zalloc_aligned(bytes, align),
            }
        },
    };
    if at.is_null() { fail(libc::ENOMEM, at) } else { at }
}

/// Allocates a range of pages, or the block that was freed last, if it has the length.
fn allocate_large(paged: &Paged, bytes: usize, align: usize, kind: AllocationKind) -> *mut u8 {
    let kept = match kind {
        AllocationKind::ToGrow => None,
        AllocationKind::Bytes | AllocationKind::Zeros => paged.reuse(bytes, align),
    };
    if let Some(at) = kept {
        if kind == AllocationKind::Zeros {
            // SAFETY: the block has this length, and nothing else has it.
            unsafe { at.write_bytes(0, bytes) };
        }
        return at;
    }
    let at = paged.allocate(bytes, align, kind == AllocationKind::ToGrow);
    if at.is_null() && paged.is_out_of_mappings() {
        return local::allocate(bytes, align).cast();
    }
    at
}

/// Allocates for a caller. The loader's records of loaded libraries are not paged: the pager's
/// threads read them when they start, and when they look up thread-local variables.
fn allocate_for(caller: usize, bytes: usize, kind: AllocationKind) -> *mut c_void {
    if is_loader(caller) {
        let _internal = Internal::enter();
        return allocate(bytes, 16, kind);
    }
    allocate(bytes, 16, kind)
}

extern "C" fn malloc_for(bytes: size_t, caller: usize) -> *mut c_void {
    allocate_for(caller, bytes, AllocationKind::Bytes)
}

extern "C" fn calloc_for(count: size_t, bytes: size_t, caller: usize) -> *mut c_void {
    match count.checked_mul(bytes) {
        Some(bytes) => allocate_for(caller, bytes, AllocationKind::Zeros),
        None => fail(libc::ENOMEM, null_mut()),
    }
}

/// Reallocates for a caller.
///
/// # Safety
/// The caller keeps the contract of realloc(3).
unsafe extern "C" fn realloc_for(at: *mut c_void, bytes: size_t, caller: usize) -> *mut c_void {
    let _internal = is_loader(caller).then(Internal::enter);
    // SAFETY: as the caller promises.
    unsafe { reallocate(at, bytes) }
}

/// The functions that need their callers, which only return addresses show.
#[cfg(target_arch = "x86_64")]
mod entries {
    use libc::{c_void, size_t};
    use std::arch::naked_asm;

    #[unsafe(naked)]
    #[unsafe(no_mangle)]
    pub extern "C" fn malloc(bytes: size_t) -> *mut c_void {
        naked_asm!("mov rsi, [rsp]", "jmp {}", sym super::malloc_for)
    }

    #[unsafe(naked)]
    #[unsafe(no_mangle)]
    pub extern "C" fn calloc(count: size_t, bytes: size_t) -> *mut c_void {
        naked_asm!("mov rdx, [rsp]", "jmp {}", sym super::calloc_for)
    }

    /// Replaces realloc(3), for paged and private blocks.
    ///
    /// # Safety
    /// The caller keeps the contract of realloc(3).
    #[unsafe(naked)]
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn realloc(at: *mut c_void, bytes: size_t) -> *mut c_void {
        naked_asm!("mov rdx, [rsp]", "jmp {}", sym super::realloc_for)
    }
}

/// The same functions, on architectures where the caller is unknown.
#[cfg(not(target_arch = "x86_64"))]
mod entries {
    use libc::{c_void, size_t};

    #[unsafe(no_mangle)]
    pub extern "C" fn malloc(bytes: size_t) -> *mut c_void {
        super::malloc_for(bytes, 0)
    }

    #[unsafe(no_mangle)]
    pub extern "C" fn calloc(count: size_t, bytes: size_t) -> *mut c_void {
        super::calloc_for(count, bytes, 0)
    }

    /// Replaces realloc(3), for paged and private blocks.
    ///
    /// # Safety
    /// The caller keeps the contract of realloc(3).
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn realloc(at: *mut c_void, bytes: size_t) -> *mut c_void {
        // SAFETY: as the caller promises.
        unsafe { super::realloc_for(at, bytes, 0) }
    }
}

/// Replaces free(3). Preserves errno.
///
/// # Safety
/// The caller keeps the contract of free(3).
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
        // SAFETY: ours by its address.
        None if private::owns(at.cast()) => unsafe { private::free(at.cast()) },
        None if local::free(at) => {}
        // SAFETY: in an area of mimalloc's.
        None if local::is_area(at) => unsafe { mi::mi_free(at) },
        // This library did not allocate it.
        None => {}
    }
    fail(errno, ());
}

/// Replaces malloc_usable_size(3).
///
/// # Safety
/// The caller keeps the contract of malloc_usable_size(3).
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
        None => match local::usable(at) {
            Some(bytes) => bytes,
            // SAFETY: in an area of mimalloc's.
            None if local::is_area(at) => unsafe { mi::mi_usable_size(at) },
            None => 0,
        },
    }
}

/// Reallocates for a caller.
///
/// # Safety
/// The caller keeps the contract of realloc(3).
unsafe fn reallocate(at: *mut c_void, bytes: size_t) -> *mut c_void {
    if at.is_null() {
        return allocate(bytes, 16, AllocationKind::Bytes);
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
    // SAFETY: both blocks have at least this length and do not overlap.
    unsafe {
        let before = malloc_usable_size(at);
        let kind = if bytes > before { AllocationKind::ToGrow } else { AllocationKind::Bytes };
        let new = allocate(bytes, 16, kind);
        if !new.is_null() {
            ptr::copy_nonoverlapping(at.cast::<u8>(), new.cast(), before.min(bytes));
            free(at);
        }
        new
    }
}

/// Replaces reallocarray(3).
///
/// # Safety
/// The caller keeps the contract of reallocarray(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn reallocarray(
    at: *mut c_void,
    count: size_t,
    bytes: size_t,
) -> *mut c_void {
    match count.checked_mul(bytes) {
        // SAFETY: as the caller promises.
        Some(bytes) => unsafe { reallocate(at, bytes) },
        None => fail(libc::ENOMEM, null_mut()),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn memalign(align: size_t, bytes: size_t) -> *mut c_void {
    match align.is_power_of_two() {
        true => allocate(bytes, align, AllocationKind::Bytes),
        false => fail(libc::EINVAL, null_mut()),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn aligned_alloc(align: size_t, bytes: size_t) -> *mut c_void {
    memalign(align, bytes)
}

#[unsafe(no_mangle)]
pub extern "C" fn valloc(bytes: size_t) -> *mut c_void {
    memalign(PAGE, bytes)
}

#[unsafe(no_mangle)]
pub extern "C" fn pvalloc(bytes: size_t) -> *mut c_void {
    match bytes.checked_next_multiple_of(PAGE) {
        Some(bytes) => memalign(PAGE, bytes),
        None => fail(libc::ENOMEM, null_mut()),
    }
}

/// Replaces posix_memalign(3).
///
/// # Safety
/// The caller keeps the contract of posix_memalign(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_memalign(
    out: *mut *mut c_void,
    align: size_t,
    bytes: size_t,
) -> c_int {
    if !align.is_power_of_two() || !align.is_multiple_of(size_of::<*mut c_void>()) {
        return libc::EINVAL;
    }
    let at = allocate(bytes, align, AllocationKind::Bytes);
    if at.is_null() {
        return libc::ENOMEM;
    }
    // SAFETY: a valid place, as the caller promises.
    unsafe { *out = at };
    0
}
