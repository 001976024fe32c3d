//! The pager's threads and the program's. The pager's, and all threads that they create, get
//! unpaged memory. The program's are counted.

use crate::thread_count;
use pagetax_remote::threads::BlockedSignals;
use std::cell::Cell;
use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};

thread_local! {
    static INTERNAL: Cell<bool> = const { Cell::new(false) };
    static IS_PAGER_THREAD: Cell<bool> = const { Cell::new(false) };
}

/// A guard: while it lives, the calling thread works for the pager.
pub struct Internal {
    before: bool,
}

impl Internal {
    /// Marks the calling thread as working for the pager.
    pub fn enter() -> Internal {
        Internal { before: INTERNAL.replace(true) }
    }
}

impl Drop for Internal {
    fn drop(&mut self) {
        INTERNAL.set(self.before);
    }
}

/// Returns true if the calling thread works for the pager.
pub fn is_internal() -> bool {
    INTERNAL.get()
}

/// Returns true if the calling thread is one of the pager's own, which have their own descriptors.
pub fn is_pager_thread() -> bool {
    IS_PAGER_THREAD.get()
}

/// The number of running pager threads.
static PAGER_THREADS: AtomicUsize = AtomicUsize::new(0);

/// Returns the number of running pager threads.
pub fn pager_threads() -> usize {
    PAGER_THREADS.load(SeqCst)
}

/// Resets the count in the child of a fork, which has no pager thread.
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
/// The type of a thread's function in <threads.h>.
type StartC11 = unsafe extern "C" fn(*mut c_void) -> libc::c_int;
type CreateC11 = unsafe extern "C" fn(*mut libc::pthread_t, StartC11, *mut c_void) -> libc::c_int;

/// The function that a thread is to run, and its argument.
struct ThreadStart<S> {
    start: S,
    argument: *mut c_void,
}

impl<S> ThreadStart<S> {
    /// Creates a thread that takes this over. Returns the error number, or 0.
    fn pass_to_thread(self, create: impl FnOnce(*mut c_void) -> libc::c_int) -> libc::c_int {
        // Its allocations must be unpaged: the thread reads them when it looks up its variables,
        // even right after a fork.
        let _internal = Internal::enter();
        let handed = Box::into_raw(Box::new(self)).cast();
        let result = create(handed);
        if result != 0 {
            // SAFETY: no thread exists that could take it.
            drop(unsafe { ThreadStart::<S>::take(handed) });
        }
        result
    }

    /// Takes the start of a thread.
    ///
    /// # Safety
    /// Called once for each pointer of `pass_to_thread`.
    unsafe fn take(handed: *mut c_void) -> Box<ThreadStart<S>> {
        // SAFETY: as the caller promises.
        unsafe { Box::from_raw(handed.cast()) }
    }

    /// Takes the start of a thread of the program, and watches for its end.
    ///
    /// # Safety
    /// The contract of `take`.
    unsafe fn take_counted(handed: *mut c_void) -> ThreadStart<S> {
        let _internal = Internal::enter();
        thread_count::watch_this_thread();
        // SAFETY: as the caller promises.
        *unsafe { ThreadStart::take(handed) }
    }
}

/// Creates a thread of the program, and counts it.
fn counted(create: impl FnOnce() -> libc::c_int) -> libc::c_int {
    thread_count::count_started();
    let result = create();
    if result != 0 {
        thread_count::count_failed_start();
    }
    result
}

unsafe extern "C" fn run_pager_thread(handed: *mut c_void) -> *mut c_void {
    INTERNAL.set(true);
    IS_PAGER_THREAD.set(true);
    PAGER_THREADS.fetch_add(1, SeqCst);
    // SAFETY: `pthread_create` passes it to this one thread.
    let begin = unsafe { ThreadStart::<Start>::take(handed) };
    // SAFETY: as the creator promised pthread_create.
    let result = unsafe { (begin.start)(begin.argument) };
    PAGER_THREADS.fetch_sub(1, SeqCst);
    result
}

unsafe extern "C" fn run_program_thread(handed: *mut c_void) -> *mut c_void {
    // SAFETY: `pthread_create` passes it to this one thread.
    let begin = unsafe { ThreadStart::<Start>::take_counted(handed) };
    // SAFETY: as the creator promised pthread_create.
    unsafe { (begin.start)(begin.argument) }
}

unsafe extern "C" fn run_c11_thread(handed: *mut c_void) -> libc::c_int {
    // SAFETY: `thrd_create` passes it to this one thread.
    let begin = unsafe { ThreadStart::<StartC11>::take_counted(handed) };
    // SAFETY: as the creator promised thrd_create.
    unsafe { (begin.start)(begin.argument) }
}

/// Returns the address of the next definition of a function: the C library's own. Returns 0 if
/// there is none.
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

/// Replaces pthread_create(3). A thread that an internal thread creates is internal.
///
/// # Safety
/// The caller keeps the contract of pthread_create(3).
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
    // SAFETY: as our caller promises; both functions take the pointer.
    let create = |run, handed| unsafe { create(thread, attributes, run, handed) };
    if is_internal() {
        // Other libraries may create threads on behalf of the pager.
        let _blocked = BlockedSignals::block();
        return begin.pass_to_thread(|handed| create(run_pager_thread, handed));
    }
    counted(|| begin.pass_to_thread(|handed| create(run_program_thread, handed)))
}

/// Replaces thrd_create(3), as [`pthread_create`] does its own.
///
/// # Safety
/// The caller keeps the contract of thrd_create(3).
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
    // SAFETY: as our caller promises; the function takes the pointer.
    counted(|| begin.pass_to_thread(|handed| unsafe { create(thread, run_c11_thread, handed) }))
}

/// `thrd_error` of <threads.h>.
const THRD_ERROR: libc::c_int = 2;

type SetSpecific = unsafe extern "C" fn(libc::pthread_key_t, *const c_void) -> libc::c_int;

/// Replaces pthread_setspecific(3). In the child of a fork, the C library clears the value tables
/// of other threads before our handler runs there. So those tables are unpaged.
///
/// # Safety
/// The caller keeps the contract of pthread_setspecific(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_setspecific(
    key: libc::pthread_key_t,
    value: *const c_void,
) -> libc::c_int {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    // SAFETY: as the caller promises.
    unsafe { set_specific(c"pthread_setspecific", &NEXT, key, value).unwrap_or(libc::ENOMEM) }
}

/// Replaces tss_set(3), as [`pthread_setspecific`] does its own.
///
/// # Safety
/// The caller keeps the contract of tss_set(3).
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
