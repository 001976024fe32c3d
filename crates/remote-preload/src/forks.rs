//! Forks: a child gets the memory and pages it by itself. A store inside the process goes with it. Pages on
//! servers belong to the parent, which goes on changing them; so while there are any, fork is refused.
//! vfork, posix_spawn, system and popen share memory until exec, and always work.
//!
//! The pager stands still while the process forks: its locks are taken after everything that the program
//! wants done before a fork, as that may touch missing pages. So our handlers are registered before any
//! other's. A process that is forked past them (by the bare system call) does not have the memory:
//! it gets SIGSEGV, not zeros.

use crate::paged::{self, Paged, Standstill};
use crate::streams::Streams;
use crate::threads::{Internal, next};
use crate::{descriptors, fail, private, say};
use libc::c_int;
use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

type Handler = Option<extern "C" fn()>;
type Register = unsafe extern "C" fn(Handler, Handler, Handler, *mut c_void) -> c_int;

/// What the forking thread holds meanwhile.
struct Forking(UnsafeCell<Option<(Standstill<'static>, bool)>>);
// SAFETY: used by the one thread that forks; the C library lets only one fork at a time.
unsafe impl Sync for Forking {}
static FORKING: Forking = Forking(UnsafeCell::new(None));

/// What pthread_atfork(3) calls.
///
/// # Safety
/// As of pthread_atfork(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __register_atfork(
    prepare: Handler,
    parent: Handler,
    child: Handler,
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

fn real_register() -> Option<Register> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let address = next(c"__register_atfork", &NEXT);
    // SAFETY: the C library's own function of that name has this type.
    (address != 0).then(|| unsafe { std::mem::transmute::<usize, Register>(address) })
}

extern "C" fn prepare() {
    let Some(paged) = paged::paged() else { return };
    let streams = Streams::hold();
    let (held, inherited) = loop {
        let touched = streams.touch();
        let held = paged.stand_still();
        let inherited = paged.before_fork();
        if touched.iter().all(|at| paged.is_here(*at)) {
            break (held, inherited);
        }
        paged.after_fork();
    };
    drop(streams);
    private::lock();
    // SAFETY: see `Forking`.
    unsafe { *FORKING.0.get() = Some((held, inherited)) };
}

/// Opens what `prepare` closed; whether it closed anything, and the child has the memory.
fn go_on() -> Option<(&'static Paged, bool)> {
    let paged = paged::paged()?;
    // SAFETY: see `Forking`.
    let (held, inherited) = unsafe { (*FORKING.0.get()).take() }?;
    private::unlock();
    drop(held);
    Some((paged, inherited))
}

extern "C" fn parent() {
    if let Some((paged, _)) = go_on() {
        paged.after_fork();
    }
}

extern "C" fn child() {
    let Some((paged, inherited)) = go_on() else { return };
    let _internal = Internal::enter();
    if !inherited {
        return say("this child has no paged memory: some of it was away when it was forked");
    }
    descriptors::close_the_parents();
    paged.restart_in_child();
}

/// fork(2): refused while pages are on servers.
#[unsafe(no_mangle)]
pub extern "C" fn fork() -> libc::pid_t {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    static SAID: AtomicBool = AtomicBool::new(false);
    let address = next(c"fork", &NEXT);
    let refused = paged::paged().is_some_and(|paged| !paged.can_fork());
    if refused && !SAID.swap(true, Relaxed) {
        say(
            "fork is refused: pages are on servers, and a child cannot share them; vfork and posix_spawn \
             work, and so does fork with more --resident or without --servers",
        );
    }
    if refused || address == 0 {
        return fail(libc::ENOMEM, -1);
    }
    // SAFETY: the C library's own function of that name has this type.
    unsafe { std::mem::transmute::<usize, extern "C" fn() -> libc::pid_t>(address)() }
}
