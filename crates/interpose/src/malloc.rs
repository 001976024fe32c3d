//! The interposed malloc family. Each function calls the next allocator and checks the result. That is how
//! growth is noticed ([`crate::growth`]): glibc's malloc takes memory by calls that cannot be interposed.
//!
//! Invariant: a call does what the next allocator would do. If a call fails because malloc asked for
//! additional room on our behalf, the room is given up and the call is repeated.

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

/// Returns the next allocator's function, or returns `$none` from the caller if there is none. Every C
/// library has one.
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

/// Checks a result, and repeats the call if it may have failed only because of our room.
#[inline(always)]
fn seen(result: *mut c_void, bytes: usize, again: impl FnOnce() -> *mut c_void) -> *mut c_void {
    if growth::is_known(result as usize, bytes) {
        return result;
    }
    let result = if result.is_null() && growth::give_up_room(bytes) { again() } else { result };
    growth::notice(result as usize);
    result
}

/// Interposes malloc(3).
///
/// # Safety
/// The same conditions as for malloc(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc(bytes: usize) -> *mut c_void {
    let next = next!(MALLOC as OneSize, std::ptr::null_mut());
    // SAFETY: the caller's own argument.
    let call = || unsafe { next(bytes) };
    seen(call(), bytes, call)
}

/// Interposes calloc(3).
///
/// # Safety
/// The same conditions as for calloc(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn calloc(count: usize, bytes: usize) -> *mut c_void {
    let next = next!(CALLOC as TwoSizes, std::ptr::null_mut());
    // SAFETY: the caller's own arguments.
    let call = || unsafe { next(count, bytes) };
    seen(call(), count.saturating_mul(bytes), call)
}

/// Interposes realloc(3).
///
/// # Safety
/// The same conditions as for realloc(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realloc(old: *mut c_void, bytes: usize) -> *mut c_void {
    let next = next!(REALLOC as Resize, std::ptr::null_mut());
    // SAFETY: the caller's own arguments. If the call fails, the old memory is untouched.
    let call = || unsafe { next(old, bytes) };
    if bytes == 0 {
        // Null means success here: the memory is freed.
        return call();
    }
    seen(call(), bytes, call)
}

/// Interposes memalign(3).
///
/// # Safety
/// The same conditions as for memalign(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memalign(align: usize, bytes: usize) -> *mut c_void {
    let next = next!(MEMALIGN as TwoSizes, std::ptr::null_mut());
    // SAFETY: the caller's own arguments.
    let call = || unsafe { next(align, bytes) };
    seen(call(), bytes, call)
}

/// Interposes aligned_alloc(3).
///
/// # Safety
/// The same conditions as for aligned_alloc(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aligned_alloc(align: usize, bytes: usize) -> *mut c_void {
    let next = next!(ALIGNED_ALLOC as TwoSizes, std::ptr::null_mut());
    // SAFETY: the caller's own arguments.
    let call = || unsafe { next(align, bytes) };
    seen(call(), bytes, call)
}

/// Interposes posix_memalign(3).
///
/// # Safety
/// The same conditions as for posix_memalign(3).
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
        // SAFETY: on success the next allocator has written the place.
        let memory = unsafe { *place } as usize;
        if !growth::is_known(memory, bytes) {
            growth::notice(memory);
        }
    }
    result
}
