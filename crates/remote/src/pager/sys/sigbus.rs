//! The process's action for SIGBUS, by which a thread that touches a missing page of some region serves itself.
//!
//! Invariants: what is no such touch goes to the action that the program had before, as if this one were not there.
//! A region is served from its [`serve`] until what that returns is dropped, which waits for threads that are in
//! it. Looking a region up takes no lock and no memory.
//!
//! Source: userfaultfd(2), `UFFD_FEATURE_SIGBUS`; sigaction(2); what the processor says of a page fault is in
//! `asm/trap_pf.h` of the kernel's tree.

use super::memory::Pages;
use super::uffd::Fault;
use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering::*};
use std::sync::{Mutex, OnceLock, PoisonError};

/// Most regions of a process that are served so at once.
const REGIONS_MAX: usize = 64;

/// Gets pages for the thread that touched them.
pub trait ServeFault: Send + Sync {
    /// Returns true if the page is present, or if another touch will fault again. Runs in a signal handler,
    /// with all signals blocked.
    fn serve(&self, fault: Fault) -> bool;
}

/// One region. Free while it has no server.
struct RegionSlot {
    start: AtomicU64,
    end: AtomicU64,
    server: AtomicPtr<Box<dyn ServeFault>>,
    /// Threads that may be using the server.
    users: AtomicU32,
}

impl RegionSlot {
    const fn free() -> RegionSlot {
        let (start, end) = (AtomicU64::new(0), AtomicU64::new(0));
        RegionSlot { start, end, server: AtomicPtr::new(ptr::null_mut()), users: AtomicU32::new(0) }
    }

    /// Serves a fault; false if it is none of this region's, or its page is lost.
    fn serve(&self, fault: Fault) -> bool {
        let has = || (self.start.load(Relaxed)..self.end.load(Relaxed)).contains(&fault.address);
        if !has() {
            return false;
        }
        self.users.fetch_add(1, SeqCst);
        // SAFETY: a server goes only when its slot has none any more and, after that, no users; we became one
        // before we looked.
        let server = unsafe { self.server.load(SeqCst).as_ref() };
        // The slot may have become another's meanwhile.
        let served = server.is_some_and(|server| has() && server.serve(fault));
        self.users.fetch_sub(1, SeqCst);
        served
    }
}

static REGION_SLOTS: [RegionSlot; REGIONS_MAX] = [const { RegionSlot::free() }; REGIONS_MAX];
/// Held by who takes or frees a slot.
static TAKING: Mutex<()> = Mutex::new(());
/// The action that the program had.
static PREVIOUS_ACTION: OnceLock<libc::sigaction> = OnceLock::new();

/// A region that is served.
#[derive(Debug)]
pub struct ServedRegion {
    slot: usize,
    server: *mut Box<dyn ServeFault>,
}

// SAFETY: the server, which may be used from any thread, belongs to this; the slot is an index.
unsafe impl Send for ServedRegion {}

/// Has threads that touch these pages serve themselves from now on.
pub fn serve(pages: &Pages, count: usize, server: Box<dyn ServeFault>) -> io::Result<ServedRegion> {
    if !cfg!(target_arch = "x86_64") {
        let why = "what a thread wanted of a page is only known on x86-64 processors";
        return Err(io::Error::new(io::ErrorKind::Unsupported, why));
    }
    let all = pages.span(0, count);
    let _taking = TAKING.lock().unwrap_or_else(PoisonError::into_inner);
    act()?;
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
        // Not so in the child of a fork, which has none of its parent's.
        if slot.server.compare_exchange(self.server, ptr::null_mut(), SeqCst, SeqCst).is_ok() {
            while slot.users.load(SeqCst) > 0 {
                std::thread::yield_now();
            }
        }
        // SAFETY: from `Box::into_raw`; nobody finds it any more, and nobody has it.
        drop(unsafe { Box::from_raw(self.server) });
    }
}

/// Makes this the process's action, once.
fn act() -> io::Result<()> {
    if PREVIOUS_ACTION.get().is_some() {
        return Ok(());
    }
    let checked = |result| if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) };
    // SAFETY: zeros are a sigaction, which the calls read and fill. The handler stays as long as the process. It
    // is handed to the kernel only when the action before it is known.
    unsafe {
        let mut before: libc::sigaction = std::mem::zeroed();
        checked(libc::sigaction(libc::SIGBUS, ptr::null(), &mut before))?;
        PREVIOUS_ACTION.get_or_init(|| before);
        // A child has to ask anew, for the regions that it gets.
        libc::pthread_atfork(None, None, Some(forget_all));
        let mut ours: libc::sigaction = std::mem::zeroed();
        ours.sa_sigaction = on_sigbus as *const () as usize;
        // Not on the thread's alternate stack, which may be too small.
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
        // A handler of the program's that ran meanwhile, and touched a page, would wait for itself.
        libc::sigfillset(&mut ours.sa_mask);
        checked(libc::sigaction(libc::SIGBUS, &ours, ptr::null_mut()))
    }
}

extern "C" fn forget_all() {
    for slot in &REGION_SLOTS {
        slot.end.store(0, Relaxed);
        slot.server.store(ptr::null_mut(), SeqCst);
        slot.users.store(0, SeqCst);
    }
}

/// Whatever unwinds here ends the process.
extern "C" fn on_sigbus(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel hands over both structures of this signal, as SA_SIGINFO asks; errno is the thread's.
    unsafe {
        let errno = *libc::__errno_location();
        // Other codes: a page that was poisoned (BUS_ADRERR, too, of kernels without CONFIG_MEMORY_FAILURE), or a
        // signal that somebody sent.
        let may_be_ours = (*info).si_code == libc::BUS_ADRERR;
        let fault = fault_of((*info).si_addr() as u64, &*context.cast());
        if !may_be_ours || !REGION_SLOTS.iter().any(|slot| slot.serve(fault)) {
            pass_on(signal, info, context);
        }
        *libc::__errno_location() = errno;
    }
}

/// Returns the fault that a signal context describes.
#[cfg(target_arch = "x86_64")]
fn fault_of(address: u64, context: &libc::ucontext_t) -> Fault {
    /// `X86_PF_PROT` and `X86_PF_WRITE`.
    const PRESENT: i64 = 1 << 0;
    const WRITE: i64 = 1 << 1;
    let error = context.uc_mcontext.gregs[libc::REG_ERR as usize];
    let is_write = error & WRITE != 0;
    Fault { address, is_write, is_protected: is_write && error & PRESENT != 0, thread: 0 }
}

/// Elsewhere nothing is served, so that nobody gets here but for others' signals.
#[cfg(not(target_arch = "x86_64"))]
fn fault_of(address: u64, _: &libc::ucontext_t) -> Fault {
    Fault { address, ..Fault::default() }
}

/// Does what would be done without us.
///
/// # Safety
/// With what the kernel handed to the handler that calls it.
unsafe fn pass_on(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let Some(before) = PREVIOUS_ACTION.get() else { return };
    // SAFETY: as the caller promises; a handler of the program's is a function of the kind that its flags say.
    unsafe {
        let was_sent = (*info).si_code <= 0;
        match before.sa_sigaction {
            libc::SIG_IGN if was_sent => {}
            libc::SIG_DFL | libc::SIG_IGN => {
                act_by_default(signal);
                // What was touched is touched again; what was sent has to be sent again.
                if was_sent {
                    libc::raise(signal);
                }
            }
            handler => {
                if before.sa_flags & libc::SA_RESETHAND != 0 {
                    act_by_default(signal);
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

/// # Safety
/// Nobody counts on another action.
unsafe fn act_by_default(signal: i32) {
    // SAFETY: zeros are the default action.
    unsafe {
        let default: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, &default, ptr::null_mut());
    }
}

/// Blocks what the program's handler wants blocked, and what its thread had blocked, and no more.
///
/// # Safety
/// In a signal handler, with its context.
unsafe fn allow_signals(signal: i32, action: &libc::sigaction, context: &libc::ucontext_t) {
    // SAFETY: sets of signals that are filled before they are used; the mask is the calling thread's, and
    // becomes what it was when the handler returns.
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
