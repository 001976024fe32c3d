//! Which threads are the pager's: they, and all that they start, get unpaged memory. The others are counted.

use crate::thread_count;
use pagetax_remote::threads::BlockedSignals;
use std::cell::Cell;
use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};

thread_local! {
    static INTERNAL: Cell<bool> = const { Cell::new(false) };
    static IS_PAGER_THREAD: Cell<bool> = const { Cell::new(false) };
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
pub fn is_pager_thread() -> bool {
    IS_PAGER_THREAD.get()
}

/// Threads of the pager's that run.
static PAGER_THREADS: AtomicUsize = AtomicUsize::new(0);

/// How many threads of the pager's run.
pub fn pager_threads() -> usize {
    PAGER_THREADS.load(SeqCst)
}

/// In the child of a fork there is none.
pub fn restart_in_child() {
    PAGER_THREADS.store(0, SeqCst);
    thread_count::restart_in_child();
}

type Start = unsafe extern "C" fn(*mut c_void) -> *mut c_void;
type Create = unsafe extern "C" fn(
    *mut libc::pthread_t,
    *const libc::pthread_attr_t,
    Start,
    *mut c_void,
) -> libc::c_int;
/// The same of <threads.h>.
type StartC11 = unsafe extern "C" fn(*mut c_void) -> libc::c_int;
type CreateC11 = unsafe extern "C" fn(*mut libc::pthread_t, StartC11, *mut c_void) -> libc::c_int;

/// What a thread is to run.
struct ThreadStart<S> {
    start: S,
    argument: *mut c_void,
}

impl<S> ThreadStart<S> {
    /// Has a thread made that takes this over; what came of it, 0 if there is one.
    fn hand_over(self, create: impl FnOnce(*mut c_void) -> libc::c_int) -> libc::c_int {
        // What is allocated for a thread is where it looks for its variables, also right after a fork.
        let _internal = Internal::enter();
        let handed = Box::into_raw(Box::new(self)).cast();
        let result = create(handed);
        if result != 0 {
            // SAFETY: there is no thread that took it.
            drop(unsafe { ThreadStart::<S>::take(handed) });
        }
        result
    }

    /// # Safety
    /// Once, of what `hand_over` gave out.
    unsafe fn take(handed: *mut c_void) -> Box<ThreadStart<S>> {
        // SAFETY: as the caller promises.
        unsafe { Box::from_raw(handed.cast()) }
    }

    /// As `take`, on a thread of the program's that begins.
    ///
    /// # Safety
    /// As `take`.
    unsafe fn take_counted(handed: *mut c_void) -> ThreadStart<S> {
        let _internal = Internal::enter();
        thread_count::notice_end();
        // SAFETY: as the caller promises.
        *unsafe { ThreadStart::take(handed) }
    }
}

/// Has a thread of the program's made, counted.
fn counted(create: impl FnOnce() -> libc::c_int) -> libc::c_int {
    thread_count::count_new();
    let result = create();
    if result != 0 {
        thread_count::discount_new();
    }
    result
}

unsafe extern "C" fn begin_pagers(handed: *mut c_void) -> *mut c_void {
    INTERNAL.set(true);
    IS_PAGER_THREAD.set(true);
    PAGER_THREADS.fetch_add(1, SeqCst);
    // SAFETY: `pthread_create` hands it over to this one thread.
    let begin = unsafe { ThreadStart::<Start>::take(handed) };
    // SAFETY: as the creator promised pthread_create.
    let result = unsafe { (begin.start)(begin.argument) };
    PAGER_THREADS.fetch_sub(1, SeqCst);
    result
}

unsafe extern "C" fn begin_programs(handed: *mut c_void) -> *mut c_void {
    // SAFETY: `pthread_create` hands it over to this one thread.
    let begin = unsafe { ThreadStart::<Start>::take_counted(handed) };
    // SAFETY: as the creator promised pthread_create.
    unsafe { (begin.start)(begin.argument) }
}

unsafe extern "C" fn begin_c11(handed: *mut c_void) -> libc::c_int {
    // SAFETY: `thrd_create` hands it over to this one thread.
    let begin = unsafe { ThreadStart::<StartC11>::take_counted(handed) };
    // SAFETY: as the creator promised thrd_create.
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
    let begin = ThreadStart { start, argument };
    // SAFETY: as our caller promises; both functions take what is handed over.
    let create = |run, handed| unsafe { create(thread, attributes, run, handed) };
    if is_internal() {
        // Also for threads that other libraries make for the pager.
        let _blocked = BlockedSignals::block();
        return begin.hand_over(|handed| create(begin_pagers, handed));
    }
    counted(|| begin.hand_over(|handed| create(begin_programs, handed)))
}

/// thrd_create(3), as pthread_create(3).
///
/// # Safety
/// As of thrd_create(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn thrd_create(
    thread: *mut libc::pthread_t,
    start: StartC11,
    argument: *mut c_void,
) -> libc::c_int {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let address = next(c"thrd_create", &NEXT);
    if address == 0 {
        return THRD_ERROR;
    }
    // SAFETY: the C library's own function of that name has this type.
    let create = unsafe { std::mem::transmute::<usize, CreateC11>(address) };
    let begin = ThreadStart { start, argument };
    // SAFETY: as our caller promises; the function takes what is handed over.
    counted(|| begin.hand_over(|handed| unsafe { create(thread, begin_c11, handed) }))
}

/// Of <threads.h>.
const THRD_ERROR: libc::c_int = 2;

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
