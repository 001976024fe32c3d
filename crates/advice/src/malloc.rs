//! The malloc family, interposed: each call goes on to the next allocator, and what it returns
//! is looked at. That is how growth is noticed ([`crate::growth`]): glibc's malloc takes memory by
//! calls that cannot be interposed.
//!
//! Invariant: a call does what the next allocator would do. Only where that fails for want of the
//! room that we made malloc ask for, the room is given up and the call made once more.

use crate::growth;
use crate::next::Next;
use std::ffi::c_void;

static MALLOC: Next = Next::of(c"malloc");
static CALLOC: Next = Next::of(c"calloc");
static REALLOC: Next = Next::of(c"realloc");
static MEMALIGN: Next = Next::of(c"memalign");
static ALIGNED_ALLOC: Next = Next::of(c"aligned_alloc");
static POSIX_MEMALIGN: Next = Next::of(c"posix_memalign");

type OneSize = unsafe extern "C" fn(usize) -> *mut c_void;
type TwoSizes = unsafe extern "C" fn(usize, usize) -> *mut c_void;
type Resize = unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void;
type Store = unsafe extern "C" fn(*mut *mut c_void, usize, usize) -> libc::c_int;

/// The next allocator's function; ENOMEM's result where there is none, which no C library has.
macro_rules! next {
    ($next:ident as $kind:ty, $none:expr) => {{
        let address = $next.address();
        if address.is_null() {
            return $none;
        }
        // SAFETY: the symbol of that name has this type by POSIX or ISO C.
        unsafe { std::mem::transmute::<*mut c_void, $kind>(address) }
    }};
}

/// Looks at a result, and calls again if it is null only for our sake.
#[inline(always)]
fn seen(result: *mut c_void, bytes: usize, again: impl FnOnce() -> *mut c_void) -> *mut c_void {
    if growth::is_known(result as usize, bytes) {
        return result;
    }
    let result = if result.is_null() && growth::give_up_room(bytes) { again() } else { result };
    growth::notice(result as usize);
    result
}

/// # Safety
/// As malloc(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc(bytes: usize) -> *mut c_void {
    let next = next!(MALLOC as OneSize, std::ptr::null_mut());
    // SAFETY: the caller's own argument.
    let call = || unsafe { next(bytes) };
    seen(call(), bytes, call)
}

/// # Safety
/// As calloc(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn calloc(count: usize, bytes: usize) -> *mut c_void {
    let next = next!(CALLOC as TwoSizes, std::ptr::null_mut());
    // SAFETY: the caller's own arguments.
    let call = || unsafe { next(count, bytes) };
    seen(call(), count.saturating_mul(bytes), call)
}

/// # Safety
/// As realloc(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realloc(old: *mut c_void, bytes: usize) -> *mut c_void {
    let next = next!(REALLOC as Resize, std::ptr::null_mut());
    // SAFETY: the caller's own arguments; where it fails, the old memory is untouched.
    let call = || unsafe { next(old, bytes) };
    if bytes == 0 {
        // Null is success here: the memory is freed.
        return call();
    }
    seen(call(), bytes, call)
}

/// # Safety
/// As memalign(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memalign(align: usize, bytes: usize) -> *mut c_void {
    let next = next!(MEMALIGN as TwoSizes, std::ptr::null_mut());
    // SAFETY: the caller's own arguments.
    let call = || unsafe { next(align, bytes) };
    seen(call(), bytes, call)
}

/// # Safety
/// As aligned_alloc(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aligned_alloc(align: usize, bytes: usize) -> *mut c_void {
    let next = next!(ALIGNED_ALLOC as TwoSizes, std::ptr::null_mut());
    // SAFETY: the caller's own arguments.
    let call = || unsafe { next(align, bytes) };
    seen(call(), bytes, call)
}

/// # Safety
/// As posix_memalign(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_memalign(
    place: *mut *mut c_void,
    align: usize,
    bytes: usize,
) -> libc::c_int {
    let next = next!(POSIX_MEMALIGN as Store, libc::ENOMEM);
    // SAFETY: the caller's own arguments.
    let mut result = unsafe { next(place, align, bytes) };
    if result == libc::ENOMEM && growth::give_up_room(bytes) {
        // SAFETY: as above; a failed call has changed nothing.
        result = unsafe { next(place, align, bytes) };
    }
    if result == 0 {
        // SAFETY: on success the place was written.
        let memory = unsafe { *place } as usize;
        if !growth::is_known(memory, bytes) {
            growth::notice(memory);
        }
    }
    result
}
