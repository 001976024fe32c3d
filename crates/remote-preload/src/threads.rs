//! Which threads are the pager's: they, and all that they start, get unpaged memory.

use pagetax_remote::threads::BlockedSignals;
use std::cell::Cell;
use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

thread_local! {
    static INTERNAL: Cell<bool> = const { Cell::new(false) };
    static IS_PAGERS: Cell<bool> = const { Cell::new(false) };
}

/// While it lives, the calling thread works for the pager.
pub struct Internal {
    before: bool,
}

impl Internal {
    /// From here on.
    pub fn enter() -> Internal {
        Internal { before: INTERNAL.replace(true) }
    }
}

impl Drop for Internal {
    fn drop(&mut self) {
        INTERNAL.set(self.before);
    }
}

/// Whether the calling thread works for the pager.
pub fn is_internal() -> bool {
    INTERNAL.get()
}

/// Whether the calling thread is one of the pager's own, with the descriptors of those.
pub fn is_pagers() -> bool {
    IS_PAGERS.get()
}

type Start = unsafe extern "C" fn(*mut c_void) -> *mut c_void;
type Create = unsafe extern "C" fn(
    *mut libc::pthread_t,
    *const libc::pthread_attr_t,
    Start,
    *mut c_void,
) -> libc::c_int;

/// What an internal thread is to run.
struct Begin {
    start: Start,
    argument: *mut c_void,
}

unsafe extern "C" fn begin(of: *mut c_void) -> *mut c_void {
    INTERNAL.set(true);
    IS_PAGERS.set(true);
    // SAFETY: `pthread_create` below boxed it for this one call.
    let begin = unsafe { Box::from_raw(of.cast::<Begin>()) };
    // SAFETY: as the creator promised pthread_create.
    unsafe { (begin.start)(begin.argument) }
}

/// The next definition of a function of the C library.
pub fn next(name: &'static CStr, found: &AtomicUsize) -> usize {
    let known = found.load(Relaxed);
    if known != 0 {
        return known;
    }
    // SAFETY: the name ends in null.
    let address = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) } as usize;
    found.store(address, Relaxed);
    address
}

/// pthread_create(3): threads of internal threads are internal.
///
/// # Safety
/// As of pthread_create(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    start: Start,
    argument: *mut c_void,
) -> libc::c_int {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let address = next(c"pthread_create", &NEXT);
    if address == 0 {
        return libc::EAGAIN;
    }
    // SAFETY: the C library's own function of that name has this type.
    let create = unsafe { std::mem::transmute::<usize, Create>(address) };
    if !is_internal() {
        // What it allocates is where the thread looks for its variables, also right after a fork.
        let _internal = Internal::enter();
        // SAFETY: as our caller promises.
        return unsafe { create(thread, attributes, start, argument) };
    }
    let of = Box::into_raw(Box::new(Begin { start, argument }));
    // Also for threads that other libraries make for the pager.
    let _blocked = BlockedSignals::block();
    // SAFETY: `begin` takes what is handed over; if there is no thread, it comes back to us.
    unsafe {
        let result = create(thread, attributes, begin, of.cast());
        if result != 0 {
            drop(Box::from_raw(of));
        }
        result
    }
}

type SetSpecific = unsafe extern "C" fn(libc::pthread_key_t, *const c_void) -> libc::c_int;

/// pthread_setspecific(3): in the child of a fork the C library clears other threads' tables of values, before our
/// handler runs there. So those tables are not paged.
///
/// # Safety
/// As of pthread_setspecific(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_setspecific(
    key: libc::pthread_key_t,
    value: *const c_void,
) -> libc::c_int {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    // SAFETY: as the caller promises.
    unsafe { set_specific(c"pthread_setspecific", &NEXT, key, value).unwrap_or(libc::ENOMEM) }
}

/// tss_set(3), as pthread_setspecific(3).
///
/// # Safety
/// As of tss_set(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tss_set(key: libc::c_uint, value: *mut c_void) -> libc::c_int {
    /// Of <threads.h>.
    const THRD_ERROR: libc::c_int = 2;
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    // SAFETY: as the caller promises.
    unsafe { set_specific(c"tss_set", &NEXT, key, value).unwrap_or(THRD_ERROR) }
}

unsafe fn set_specific(
    name: &'static CStr,
    found: &AtomicUsize,
    key: libc::pthread_key_t,
    value: *const c_void,
) -> Option<libc::c_int> {
    let address = next(name, found);
    // SAFETY: the C library's own functions of these names have this type.
    let real =
        (address != 0).then(|| unsafe { std::mem::transmute::<usize, SetSpecific>(address) })?;
    let _internal = Internal::enter();
    // SAFETY: as the caller promises.
    Some(unsafe { real(key, value) })
}
