//! Signals as flags: requests to stop, and signals to pass on to a child.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

static ASKED_TO_STOP: AtomicBool = AtomicBool::new(false);
/// The signals by which users end a process.
const ENDING: [libc::c_int; 4] = [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM];

extern "C" fn note(_signal: libc::c_int) {
    ASKED_TO_STOP.store(true, Ordering::Relaxed);
}

/// Returns true if a stop signal has come since the last [`StopSignals::watch`].
pub fn asked_to_stop() -> bool {
    ASKED_TO_STOP.load(Ordering::Relaxed)
}

/// Handlers by which SIGHUP, SIGINT, SIGQUIT and SIGTERM only set a flag. Dropping it restores the old ones.
pub struct StopSignals {
    _handlers: Handlers,
}

impl StopSignals {
    /// Clears the flag and installs the handlers.
    pub fn watch() -> io::Result<StopSignals> {
        ASKED_TO_STOP.store(false, Ordering::Relaxed);
        Ok(StopSignals { _handlers: Handlers::set(note as *const (), 0)? })
    }
}

static ASKED_TO_RELOAD: AtomicBool = AtomicBool::new(false);

extern "C" fn note_hangup(_signal: libc::c_int) {
    ASKED_TO_RELOAD.store(true, Ordering::Relaxed);
}

/// Returns true if SIGHUP has come since the last call, while a [`ServiceSignals`] lives.
pub fn asked_to_reload() -> bool {
    ASKED_TO_RELOAD.swap(false, Ordering::Relaxed)
}

/// Handlers of a service: SIGINT, SIGQUIT and SIGTERM ask it to stop, SIGHUP to reload its files. Dropping
/// it restores the old ones.
pub struct ServiceSignals {
    // Handlers are restored in the reverse order.
    _hangup: Handlers,
    _stop: StopSignals,
}

impl ServiceSignals {
    /// Clears the flag and installs the handlers.
    pub fn watch() -> io::Result<ServiceSignals> {
        let stop = StopSignals::watch()?;
        let hangup = Handlers::set_for(&[libc::SIGHUP], note_hangup as *const (), 0)?;
        Ok(ServiceSignals { _hangup: hangup, _stop: stop })
    }
}

static SENT: AtomicI32 = AtomicI32::new(0);

extern "C" fn note_sent(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo to handlers with SA_SIGINFO.
    let by_a_process = unsafe { (*info).si_code } <= 0;
    if by_a_process {
        SENT.store(signal, Ordering::Relaxed);
    }
}

/// Handlers that keep stop signals for a child that we wait for. They ignore signals of the terminal, which
/// reach the child anyway: it is in the same process group.
pub struct PassedOn {
    _handlers: Handlers,
}

impl PassedOn {
    /// Forgets earlier signals and installs the handlers.
    pub fn watch() -> io::Result<PassedOn> {
        SENT.store(0, Ordering::Relaxed);
        Ok(PassedOn { _handlers: Handlers::set(note_sent as *const (), libc::SA_SIGINFO)? })
    }

    /// Returns the last signal that has come and was not taken yet.
    pub fn take(&self) -> Option<rustix::process::Signal> {
        rustix::process::Signal::from_named_raw(SENT.swap(0, Ordering::Relaxed))
    }
}

/// The handlers that ours replaced. Dropping it restores them.
struct Handlers {
    before: Vec<(libc::c_int, libc::sigaction)>,
}

impl Handlers {
    /// Sets `handler` for those of [`ENDING`] that are not ignored. `flags` are those of sigaction(2).
    fn set(handler: *const (), flags: libc::c_int) -> io::Result<Handlers> {
        Handlers::set_for(&ENDING, handler, flags)
    }

    /// Sets `handler` for those of these signals that are not ignored.
    fn set_for(
        signals: &[libc::c_int],
        handler: *const (),
        flags: libc::c_int,
    ) -> io::Result<Handlers> {
        let mut handlers = Handlers { before: Vec::new() };
        // SAFETY: sigaction is plain data for which zeros are valid.
        let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
        action.sa_sigaction = handler as libc::sighandler_t;
        action.sa_flags = libc::SA_RESTART | flags;
        for &signal in signals {
            let mut before = action;
            // SAFETY: the pointer is to a live sigaction, and this call only reads the handler.
            super::mapping::check(unsafe { libc::sigaction(signal, ptr::null(), &mut before) })?;
            if before.sa_sigaction == libc::SIG_IGN {
                continue;
            }
            // SAFETY: the pointer is to a live sigaction. The handlers of this module only read their
            // arguments and store to an atomic, which is async-signal-safe.
            super::mapping::check(unsafe { libc::sigaction(signal, &action, ptr::null_mut()) })?;
            handlers.before.push((signal, before));
        }
        Ok(handlers)
    }
}

impl Drop for Handlers {
    fn drop(&mut self) {
        for (signal, before) in &self.before {
            // SAFETY: restores what sigaction itself gave us; it cannot fail for these signals.
            unsafe { libc::sigaction(*signal, before, ptr::null_mut()) };
        }
    }
}
