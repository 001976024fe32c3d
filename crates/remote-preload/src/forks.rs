//! Forks: a child gets the memory and pages it by itself. A store inside the process goes with it. Pages on
//! servers belong to the parent, which goes on changing them; so while there are any, fork is refused.
//! vfork, posix_spawn, system and popen share memory until exec, and always work.
//!
//! The pager stands still while the process forks: its locks are taken after everything that the program
//! wants done before a fork, as that may touch missing pages. So our handlers are registered before any
//! other's. One thread at a time takes them, in one order: its turn, the list of streams, the agent's tasks, and
//! the locks of [`Standstill`].
//!
//! A process that is forked past all of this (by the machine's instruction for it) does not have the memory: it gets
//! SIGSEGV, not zeros.

use crate::agent::say;
use crate::fork_resident;
use crate::paged::{self, Paged, Standstill};
use crate::private;
use crate::streams::Streams;
use crate::threads::{Internal, next};
use crate::{agent, fail, threads};
use libc::{c_char, c_int, pid_t, termios, winsize};
use pagetax_remote::threads::BlockedSignals;
use std::cell::UnsafeCell;
use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

type ForkHandler = Option<extern "C" fn()>;
type RegisterHandlers =
    unsafe extern "C" fn(ForkHandler, ForkHandler, ForkHandler, *mut c_void) -> c_int;

/// Whose turn it is to fork.
static TURN: Mutex<()> = Mutex::new(());

/// What the forking thread holds meanwhile. Dropped from the first to the last.
struct ForkHold {
    /// Whether the child has the memory.
    inherited: bool,
    _standstill: Standstill<'static>,
    _agent: MutexGuard<'static, agent::Tasks>,
    streams: Streams,
    _turn: MutexGuard<'static, ()>,
    /// A handler of the program's might touch a missing page.
    _blocked: BlockedSignals,
}

struct Forking(UnsafeCell<Option<ForkHold>>);
// SAFETY: used by the one thread whose turn it is.
unsafe impl Sync for Forking {}
static FORKING: Forking = Forking(UnsafeCell::new(None));

/// What pthread_atfork(3) calls.
///
/// # Safety
/// As of pthread_atfork(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __register_atfork(
    prepare: ForkHandler,
    parent: ForkHandler,
    child: ForkHandler,
    object: *mut c_void,
) -> c_int {
    register_ours();
    // SAFETY: as our caller promises.
    real_register().map_or(libc::ENOMEM, |real| unsafe { real(prepare, parent, child, object) })
}

/// Before any other's, whose handlers then run before ours at a fork and after ours behind it.
pub fn register_ours() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if let Some(real) = real_register() {
            // SAFETY: three functions of this library, which is never unloaded.
            unsafe { real(Some(prepare), Some(parent), Some(child), std::ptr::null_mut()) };
        }
    });
}

fn real_register() -> Option<RegisterHandlers> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let address = next(c"__register_atfork", &NEXT);
    // SAFETY: the C library's own function of that name has this type.
    (address != 0).then(|| unsafe { std::mem::transmute::<usize, RegisterHandlers>(address) })
}

/// Stops the pager with all memory here that the C library reaches in the child.
extern "C" fn prepare() {
    let Some(paged) = paged::paged() else { return };
    let blocked = BlockedSignals::block();
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    // Whoever holds the list may be waiting for a page, so this comes before the pager stops.
    let streams = Streams::hold();
    let agent = agent::hold();
    let (standstill, inherited) = loop {
        paged.stop_evicting();
        let fork_resident = fork_resident::bring(paged, &streams);
        let standstill = paged.stand_still();
        let inherited = paged.before_fork();
        paged.resume_evicting();
        // The program may have dropped one meanwhile.
        if fork_resident.iter().all(|page| paged.is_here(*page as *const u8)) {
            break (standstill, inherited);
        }
        paged.after_fork();
    };
    let held = ForkHold {
        inherited,
        _standstill: standstill,
        _agent: agent,
        streams,
        _turn: turn,
        _blocked: blocked,
    };
    private::lock();
    // SAFETY: see `Forking`.
    unsafe { *FORKING.0.get() = Some(held) };
}

/// Takes what `prepare` left.
fn take_held() -> Option<(&'static Paged, ForkHold)> {
    let paged = paged::paged()?;
    // SAFETY: see `Forking`.
    let held = unsafe { (*FORKING.0.get()).take() }?;
    private::unlock();
    Some((paged, held))
}

extern "C" fn parent() {
    if let Some((paged, held)) = take_held() {
        paged.after_fork();
        drop(held);
    }
}

extern "C" fn child() {
    let Some((paged, held)) = take_held() else { return };
    let ForkHold { inherited, _standstill, _agent, streams, _turn, _blocked } = held;
    streams.open_in_child();
    drop((_standstill, _agent, _turn));
    let _internal = Internal::enter();
    threads::restart_in_child();
    if !inherited {
        paged::refuse(
            "this child of a fork ends here: some of its memory was on servers, which only its parent can use",
        );
    }
    paged.restart_in_child();
}

/// Forks by a function of the C library's, unless the child could not have the memory. What is checked stays so:
/// no page leaves meanwhile.
fn checked(fork: impl FnOnce() -> pid_t) -> pid_t {
    static SAID: AtomicBool = AtomicBool::new(false);
    let Some(paged) = paged::paged().filter(|paged| !paged.is_store_inherited()) else {
        return fork();
    };
    paged.stop_evicting();
    if !paged.can_fork() {
        paged.resume_evicting();
        if !SAID.swap(true, Relaxed) {
            say(
                "fork is refused: pages are on servers, and a child cannot share them; vfork and posix_spawn \
                 work, and so does fork with more --resident or without --servers",
            );
        }
        return fail(libc::ENOMEM, -1);
    }
    let before = rustix::process::getpid();
    let result = fork();
    // In the child the pager began anew.
    if rustix::process::getpid() == before {
        paged.resume_evicting();
    }
    result
}

/// Forks where the C library runs no handlers.
pub fn without_handlers(fork: impl FnOnce() -> pid_t) -> pid_t {
    checked(|| {
        prepare();
        let result = fork();
        // SAFETY: the location is valid for the calling thread.
        let errno = unsafe { *libc::__errno_location() };
        match result {
            0 => child(),
            _ => parent(),
        }
        fail(errno, result)
    })
}

/// What the child of clone(2) does before its own work.
#[cfg(target_arch = "x86_64")]
pub fn begin_cloned() {
    child();
}

/// What the parent of clone(2) does before and after.
#[cfg(target_arch = "x86_64")]
pub fn around_clone(clone: impl FnOnce() -> pid_t) -> pid_t {
    checked(|| {
        prepare();
        let result = clone();
        // SAFETY: the location is valid for the calling thread.
        let errno = unsafe { *libc::__errno_location() };
        parent();
        fail(errno, result)
    })
}

type Fork = extern "C" fn() -> pid_t;

fn real_fork(name: &'static CStr, found: &AtomicUsize) -> Option<Fork> {
    let address = next(name, found);
    // SAFETY: the C library's own functions of these names take nothing and return a process's number.
    (address != 0).then(|| unsafe { std::mem::transmute::<usize, Fork>(address) })
}

/// fork(2): refused while pages are on servers.
#[unsafe(no_mangle)]
pub extern "C" fn fork() -> pid_t {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    match real_fork(c"fork", &NEXT) {
        Some(real) => checked(|| real()),
        None => fail(libc::ENOSYS, -1),
    }
}

/// fork(2), by its other name.
#[unsafe(no_mangle)]
pub extern "C" fn __fork() -> pid_t {
    fork()
}

/// _Fork(3): as fork, but without the program's handlers.
#[unsafe(no_mangle)]
pub extern "C" fn _Fork() -> pid_t {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    match real_fork(c"_Fork", &NEXT) {
        Some(real) => without_handlers(|| real()),
        None => fail(libc::ENOSYS, -1),
    }
}

/// daemon(3), which forks inside the C library.
#[unsafe(no_mangle)]
pub extern "C" fn daemon(keep_directory: c_int, keep_files: c_int) -> c_int {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let address = next(c"daemon", &NEXT);
    if address == 0 {
        return fail(libc::ENOSYS, -1);
    }
    // SAFETY: the C library's own function of that name has this type.
    let real =
        unsafe { std::mem::transmute::<usize, extern "C" fn(c_int, c_int) -> c_int>(address) };
    checked(|| real(keep_directory, keep_files))
}

/// forkpty(3), which forks inside the C library.
///
/// # Safety
/// As of forkpty(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forkpty(
    master: *mut c_int,
    name: *mut c_char,
    settings: *const termios,
    size: *const winsize,
) -> pid_t {
    type ForkPty =
        unsafe extern "C" fn(*mut c_int, *mut c_char, *const termios, *const winsize) -> pid_t;
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let address = next(c"forkpty", &NEXT);
    if address == 0 {
        return fail(libc::ENOSYS, -1);
    }
    // SAFETY: the C library's own function of that name has this type.
    let real = unsafe { std::mem::transmute::<usize, ForkPty>(address) };
    // SAFETY: as the caller promises.
    checked(|| unsafe { real(master, name, settings, size) })
}
