//! Forks: a child gets the memory and pages it by itself. A store inside the process is copied with
//! it. Of pages on memory servers, the servers keep a snapshot for the child
//! ([`pagetax_remote::store::PageStore::fork`]). If there can be no snapshot, fork is refused. vfork,
//! posix_spawn, system and popen share the memory until exec, and always work.
//!
//! The pager is quiescent while the process forks. Its locks are taken after all other fork
//! handlers have run, because those may touch missing pages. So our handlers are registered first.
//! One thread at a time takes the locks, in one order: [`FORK_LOCK`], the list of streams, the
//! agent's queue, and the locks of [`Quiesced`].
//!
//! A process that is forked by a system call of the program's own code does not have the memory: it
//! gets SIGSEGV, not zeros.

use crate::agent::log;
use crate::fork_resident;
use crate::paged::{self, Paged, Quiesced};
use crate::private;
use crate::streams::Streams;
use crate::threads::{Internal, next};
use crate::{agent, fail, threads};
use libc::{c_char, c_int, pid_t, termios, winsize};
use pagetax_remote::store::ChildStore;
use pagetax_remote::threads::BlockedSignals;
use std::cell::{Cell, UnsafeCell};
use std::ffi::{CStr, c_void};
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

type ForkHandler = Option<extern "C" fn()>;
type RegisterHandlers =
    unsafe extern "C" fn(ForkHandler, ForkHandler, ForkHandler, *mut c_void) -> c_int;

/// The lock of the thread that forks.
static FORK_LOCK: Mutex<()> = Mutex::new(());

/// The locks that the forking thread holds. The fields are dropped in this order.
struct ForkHold {
    /// True if the child has the memory.
    inherited: bool,
    /// The store of the child, if pages are in a store that it does not inherit.
    child_store: Option<ChildStore>,
    _quiesced: Quiesced<'static>,
    _agent: MutexGuard<'static, agent::Tasks>,
    streams: Streams,
    _turn: MutexGuard<'static, ()>,
    /// The program's signals: a handler might touch a missing page.
    _blocked: BlockedSignals,
}

struct Forking(UnsafeCell<Option<ForkHold>>);
// SAFETY: only the holder of `FORK_LOCK` uses it.
unsafe impl Sync for Forking {}
static FORKING: Forking = Forking(UnsafeCell::new(None));

/// Registers fork handlers for pthread_atfork(3), after ours.
///
/// # Safety
/// The caller keeps the contract of pthread_atfork(3).
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

/// Registers our handlers before any others. So at a fork the others run before ours, and after it
/// behind ours.
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

/// Quiesces the pager, with all memory resident that the C library touches in the child.
extern "C" fn prepare() {
    let Some(paged) = paged::paged() else { return };
    let blocked = BlockedSignals::block();
    let turn = FORK_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    // The thread that holds the list may be waiting for a page, so this comes before the pager
    // stops.
    let streams = Streams::lock();
    paged.stop_evicting();
    // A fork inside the C library has asked for none. If there can be none, its child ends.
    let child_store = take_child_store().or_else(|| child_store(paged).unwrap_or_default());
    let agent = agent::hold();
    let (quiesced, inherited) = loop {
        let fork_resident = fork_resident::make_resident(paged, &streams);
        let quiesced = paged.quiesce();
        let inherited = paged.before_fork(child_store.is_some());
        // The program may have dropped one of the pages meanwhile.
        if fork_resident.iter().all(|page| paged.is_resident(*page as *const u8)) {
            break (quiesced, inherited);
        }
        paged.after_fork();
    };
    let held = ForkHold {
        inherited,
        child_store,
        _quiesced: quiesced,
        _agent: agent,
        streams,
        _turn: turn,
        _blocked: blocked,
    };
    private::lock();
    // SAFETY: see `Forking`.
    unsafe { *FORKING.0.get() = Some(held) };
}

/// Takes the locks that `prepare` left.
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
        paged.resume_evicting();
        drop(held);
    }
}

extern "C" fn child() {
    let Some((paged, held)) = take_held() else { return };
    let ForkHold { inherited, child_store, _quiesced, _agent, streams, _turn, _blocked } = held;
    streams.open_in_child();
    drop((_quiesced, _agent, _turn));
    let _internal = Internal::enter();
    threads::restart_in_child();
    if !inherited {
        paged::refuse(
            "this child of a fork ends here: some of its memory was on servers, which only its parent can use",
        );
    }
    paged.restart_in_child(child_store);
}

thread_local! {
    /// The store of the child that this thread is about to fork. It has no destructor: the C library would
    /// allocate paged memory to register one.
    static CHILD_STORE: Cell<ManuallyDrop<Option<ChildStore>>> =
        const { Cell::new(ManuallyDrop::new(None)) };
}

fn take_child_store() -> Option<ChildStore> {
    ManuallyDrop::into_inner(CHILD_STORE.replace(ManuallyDrop::new(None)))
}

/// Returns the store of the next child, unless it inherits one. A child whose memory is all resident can
/// do without, and opens a store of its own. Eviction is stopped, so that this stays true until the
/// fork. The caller holds [`FORK_LOCK`]: a child of another thread would find the locks held that
/// this takes.
fn child_store(paged: &'static Paged) -> Result<Option<ChildStore>, String> {
    if paged.is_store_inherited() {
        return Ok(None);
    }
    paged.fork_store().map(Some).or_else(|why| if paged.can_fork() { Ok(None) } else { Err(why) })
}

/// Forks through a function of the C library, unless the child could not have the memory.
fn fork_if_allowed(fork: impl FnOnce() -> pid_t) -> pid_t {
    static WAS_LOGGED: AtomicBool = AtomicBool::new(false);
    let Some(paged) = paged::paged().filter(|paged| !paged.is_store_inherited()) else {
        return fork();
    };
    paged.stop_evicting();
    let child_store = {
        // A handler of the program might fork, too.
        let _blocked = BlockedSignals::block();
        let _turn = FORK_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        child_store(paged)
    };
    match child_store {
        Ok(store) => CHILD_STORE.set(ManuallyDrop::new(store)),
        Err(why) => {
            paged.resume_evicting();
            if !WAS_LOGGED.swap(true, Relaxed) {
                log(&format!(
                    "fork is refused: {why}; vfork and posix_spawn work, and so does fork with more --resident"
                ));
            }
            return fail(libc::ENOMEM, -1);
        }
    }
    let before = rustix::process::getpid();
    let result = fork();
    // A fork that failed may have left it.
    drop(take_child_store());
    // The child has restarted the pager, and with it eviction.
    if rustix::process::getpid() == before {
        paged.resume_evicting();
    }
    result
}

/// Forks through a function that runs no fork handlers of the C library.
pub fn fork_without_handlers(fork: impl FnOnce() -> pid_t) -> pid_t {
    fork_if_allowed(|| {
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

/// Restarts the pager in the child of clone(2), before its own work.
#[cfg(target_arch = "x86_64")]
pub fn restart_cloned_child() {
    child();
}

/// Calls clone(2) as a fork: quiesces the pager before, and lets the parent's go on after.
#[cfg(target_arch = "x86_64")]
pub fn clone_as_fork(clone: impl FnOnce() -> pid_t) -> pid_t {
    fork_if_allowed(|| {
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
    // SAFETY: the C library's own functions of these names take nothing and return a process ID.
    (address != 0).then(|| unsafe { std::mem::transmute::<usize, Fork>(address) })
}

/// Replaces fork(2). Fails with ENOMEM if the child cannot have the pages that are in the store.
#[unsafe(no_mangle)]
pub extern "C" fn fork() -> pid_t {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    match real_fork(c"fork", &NEXT) {
        Some(real) => fork_if_allowed(|| real()),
        None => fail(libc::ENOSYS, -1),
    }
}

/// Replaces fork(2) under its second name.
#[unsafe(no_mangle)]
pub extern "C" fn __fork() -> pid_t {
    fork()
}

/// Replaces _Fork(3), which runs none of the program's fork handlers.
#[unsafe(no_mangle)]
pub extern "C" fn _Fork() -> pid_t {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    match real_fork(c"_Fork", &NEXT) {
        Some(real) => fork_without_handlers(|| real()),
        None => fail(libc::ENOSYS, -1),
    }
}

/// Replaces daemon(3), which forks inside the C library.
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
    fork_if_allowed(|| real(keep_directory, keep_files))
}

/// Replaces forkpty(3), which forks inside the C library.
///
/// # Safety
/// The caller keeps the contract of forkpty(3).
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
    fork_if_allowed(|| unsafe { real(master, name, settings, size) })
}
