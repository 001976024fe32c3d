//! The process's action for SIGBUS: a thread that touches a missing page of a served region fetches
//! the page itself.
//!
//! Invariants: every other SIGBUS goes to the previous action, as if this one did not exist. A
//! region is served from its [`serve`] until the returned value is dropped, which waits for threads
//! inside the handler. Finding a region takes no lock and no memory.
//!
//! Source: userfaultfd(2), `UFFD_FEATURE_SIGBUS`; sigaction(2). `asm/trap_pf.h` of the kernel's
//! tree has the processor's error codes of page faults.

use super::memory::Pages;
use super::uffd::Fault;
use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering::*};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The most regions of a process that are served in place at once.
const REGIONS_MAX: usize = 64;

/// A server of faults for the thread that faulted.
pub trait ServeFault: Send + Sync {
    /// Returns true if the page is present, or if another touch will fault again. Runs in a signal handler,
    /// with all signals blocked.
    fn serve(&self, fault: Fault) -> bool;
}

/// The slot of one region. It is free while it has no server.
struct RegionSlot {
    start: AtomicU64,
    end: AtomicU64,
    server: AtomicPtr<Box<dyn ServeFault>>,
    /// The number of threads that may be using the server.
    users: AtomicU32,
}

impl RegionSlot {
    const fn free() -> RegionSlot {
        let (start, end) = (AtomicU64::new(0), AtomicU64::new(0));
        RegionSlot { start, end, server: AtomicPtr::new(ptr::null_mut()), users: AtomicU32::new(0) }
    }

    /// Serves a fault. Returns false if it is not in this region, or if its page is lost.
    fn serve(&self, fault: Fault) -> bool {
        let has = || (self.start.load(Relaxed)..self.end.load(Relaxed)).contains(&fault.address);
        if !has() {
            return false;
        }
        self.users.fetch_add(1, SeqCst);
        // SAFETY: a server is freed only after its slot has none and then no users. This thread
        // became a user before it read the server.
        let server = unsafe { self.server.load(SeqCst).as_ref() };
        // The slot may belong to another region by now.
        let served = server.is_some_and(|server| has() && server.serve(fault));
        self.users.fetch_sub(1, SeqCst);
        served
    }
}

static REGION_SLOTS: [RegionSlot; REGIONS_MAX] = [const { RegionSlot::free() }; REGIONS_MAX];
/// The lock of threads that take or free a slot.
static TAKING: Mutex<()> = Mutex::new(());
/// The program's previous action.
static PREVIOUS_ACTION: OnceLock<libc::sigaction> = OnceLock::new();

/// A region that is served in place, until this is dropped.
#[derive(Debug)]
pub struct ServedRegion {
    slot: usize,
    server: *mut Box<dyn ServeFault>,
}

// SAFETY: this value owns the server, which any thread may use; the slot is an index.
unsafe impl Send for ServedRegion {}

/// Makes threads that touch these pages serve themselves from now on.
pub fn serve(pages: &Pages, count: usize, server: Box<dyn ServeFault>) -> io::Result<ServedRegion> {
    if !cfg!(target_arch = "x86_64") {
        let why = "the kind of an access is only known on x86-64 processors";
        return Err(io::Error::new(io::ErrorKind::Unsupported, why));
    }
    let all = pages.span(0, count);
    let _taking = TAKING.lock().unwrap_or_else(PoisonError::into_inner);
    install_action()?;
    let free = REGION_SLOTS.iter().position(|slot| slot.server.load(SeqCst).is_null());
    let why = "64 regions of this process are served in place already";
    let at = free.ok_or_else(|| io::Error::new(io::ErrorKind::QuotaExceeded, why))?;
    let server = Box::into_raw(Box::new(server));
    REGION_SLOTS[at].start.store(all.address(), Relaxed);
    REGION_SLOTS[at].end.store(all.address() + all.bytes() as u64, Relaxed);
    REGION_SLOTS[at].server.store(server, SeqCst);
    Ok(ServedRegion { slot: at, server })
}

impl Drop for ServedRegion {
    fn drop(&mut self) {
        let _taking = TAKING.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = &REGION_SLOTS[self.slot];
        slot.end.store(0, Relaxed);
        // In the child of a fork the slots are empty already.
        if slot.server.compare_exchange(self.server, ptr::null_mut(), SeqCst, SeqCst).is_ok() {
            while slot.users.load(SeqCst) > 0 {
                std::thread::yield_now();
            }
        }
        // SAFETY: from `Box::into_raw`; no slot has it, and no thread uses it.
        drop(unsafe { Box::from_raw(self.server) });
    }
}

/// Installs the process's action, once.
fn install_action() -> io::Result<()> {
    if PREVIOUS_ACTION.get().is_some() {
        return Ok(());
    }
    let checked = |result| if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) };
    // SAFETY: zeros are a sigaction, which the calls read and fill. The handler lives as long as
    // the process. The kernel gets it only after the previous action is known.
    unsafe {
        let mut before: libc::sigaction = std::mem::zeroed();
        checked(libc::sigaction(libc::SIGBUS, ptr::null(), &mut before))?;
        PREVIOUS_ACTION.get_or_init(|| before);
        // A child serves none of its parent's regions.
        libc::pthread_atfork(None, None, Some(free_slots_in_child));
        let mut ours: libc::sigaction = std::mem::zeroed();
        ours.sa_sigaction = on_sigbus as *const () as usize;
        // The handler does not use the alternate stack, which may be too small.
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
        // A handler of the program that ran meanwhile and touched a page would wait for itself.
        libc::sigfillset(&mut ours.sa_mask);
        checked(libc::sigaction(libc::SIGBUS, &ours, ptr::null_mut()))
    }
}

extern "C" fn free_slots_in_child() {
    for slot in &REGION_SLOTS {
        slot.end.store(0, Relaxed);
        slot.server.store(ptr::null_mut(), SeqCst);
        slot.users.store(0, SeqCst);
    }
}

/// Handles SIGBUS. A panic here aborts the process.
extern "C" fn on_sigbus(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes both structures of this signal, as SA_SIGINFO asks; errno is the
    // thread's.
    unsafe {
        let errno = *libc::__errno_location();
        // Other codes are of a poisoned page, or of a signal that a process sent. Kernels without
        // CONFIG_MEMORY_FAILURE report a poisoned page as BUS_ADRERR, too.
        let may_be_ours = (*info).si_code == libc::BUS_ADRERR;
        let fault = fault_of((*info).si_addr() as u64, &*context.cast());
        if !may_be_ours || !REGION_SLOTS.iter().any(|slot| slot.serve(fault)) {
            call_previous_action(signal, info, context);
        }
        *libc::__errno_location() = errno;
    }
}

/// Returns the fault that a signal context describes.
#[cfg(target_arch = "x86_64")]
fn fault_of(address: u64, context: &libc::ucontext_t) -> Fault {
    /// `X86_PF_PROT`, and `X86_PF_WRITE` below.
    const PRESENT: i64 = 1 << 0;
    const WRITE: i64 = 1 << 1;
    let error = context.uc_mcontext.gregs[libc::REG_ERR as usize];
    let is_write = error & WRITE != 0;
    Fault { address, is_write, is_protected: is_write && error & PRESENT != 0, thread: 0 }
}

/// Returns a fault with its address only. On other architectures no region is served, so only
/// unrelated signals get here.
#[cfg(not(target_arch = "x86_64"))]
fn fault_of(address: u64, _: &libc::ucontext_t) -> Fault {
    Fault { address, ..Fault::default() }
}

/// Calls the previous action, as if ours did not exist.
///
/// # Safety
/// The arguments are those that the kernel passed to the calling handler.
unsafe fn call_previous_action(
    signal: i32,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    let Some(before) = PREVIOUS_ACTION.get() else { return };
    // SAFETY: as the caller promises; the flags say which kind of function the program's handler
    // is.
    unsafe {
        let was_sent = (*info).si_code <= 0;
        match before.sa_sigaction {
            libc::SIG_IGN if was_sent => {}
            libc::SIG_DFL | libc::SIG_IGN => {
                restore_default_action(signal);
                // An access is repeated by itself; a signal that was sent has to be sent again.
                if was_sent {
                    libc::raise(signal);
                }
            }
            handler => {
                if before.sa_flags & libc::SA_RESETHAND != 0 {
                    restore_default_action(signal);
                }
                allow_signals(signal, before, &*context.cast());
                if before.sa_flags & libc::SA_SIGINFO != 0 {
                    type SignalHandler =
                        extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void);
                    std::mem::transmute::<usize, SignalHandler>(handler)(signal, info, context);
                } else {
                    std::mem::transmute::<usize, extern "C" fn(i32)>(handler)(signal);
                }
            }
        }
    }
}

/// Restores the default action of a signal.
///
/// # Safety
/// No other code relies on another action.
unsafe fn restore_default_action(signal: i32) {
    // SAFETY: zeros are the default action.
    unsafe {
        let default: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, &default, ptr::null_mut());
    }
}

/// Blocks the signals that the program's handler and its thread had blocked, and no others.
///
/// # Safety
/// The caller is a signal handler, and passes its context.
unsafe fn allow_signals(signal: i32, action: &libc::sigaction, context: &libc::ucontext_t) {
    // SAFETY: the sets are filled before they are used. The mask is the calling thread's, and
    // sigreturn restores it.
    unsafe {
        let mut blocked = MaybeUninit::<libc::sigset_t>::uninit();
        libc::sigemptyset(blocked.as_mut_ptr());
        let mut blocked = blocked.assume_init();
        for other in 1..=libc::SIGRTMAX() {
            let is_in = |set| libc::sigismember(set, other) == 1;
            if is_in(&action.sa_mask) || is_in(&context.uc_sigmask) {
                libc::sigaddset(&mut blocked, other);
            }
        }
        if action.sa_flags & libc::SA_NODEFER == 0 {
            libc::sigaddset(&mut blocked, signal);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &blocked, ptr::null_mut());
    }
}
