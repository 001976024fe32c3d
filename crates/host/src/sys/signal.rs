//! Signals as flags to look at: a wish to stop, or what to pass on to a child.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

static ASKED_TO_STOP: AtomicBool = AtomicBool::new(false);
/// All that end a process unless it does something about them, and come from a user.
const ENDING: [libc::c_int; 4] = [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM];

extern "C" fn note(_signal: libc::c_int) {
    ASKED_TO_STOP.store(true, Ordering::Relaxed);
}

/// Whether one of them came since the last [`StopSignals::watch`].
pub fn asked_to_stop() -> bool {
    ASKED_TO_STOP.load(Ordering::Relaxed)
}

/// While it lives, SIGHUP, SIGINT, SIGQUIT and SIGTERM only set a flag; then the old handlers are
/// back.
pub struct StopSignals {
    _handlers: Handlers,
}

impl StopSignals {
    /// Begins to watch.
    pub fn watch() -> io::Result<StopSignals> {
        ASKED_TO_STOP.store(false, Ordering::Relaxed);
        Ok(StopSignals { _handlers: Handlers::set(note as *const (), 0)? })
    }
}

static ASKED_TO_RELOAD: AtomicBool = AtomicBool::new(false);

extern "C" fn note_hangup(_signal: libc::c_int) {
    ASKED_TO_RELOAD.store(true, Ordering::Relaxed);
}

/// Whether SIGHUP came since the last call, under a [`ServiceSignals`].
pub fn asked_to_reload() -> bool {
    ASKED_TO_RELOAD.swap(false, Ordering::Relaxed)
}

/// Signals of a service, while it lives: SIGINT, SIGQUIT and SIGTERM ask it to stop, SIGHUP to read its files
/// again; then the old handlers are back.
pub struct ServiceSignals {
    // Dropped first, as it was set last.
    _hangup: Handlers,
    _stop: StopSignals,
}

impl ServiceSignals {
    /// Begins to watch.
    pub fn watch() -> io::Result<ServiceSignals> {
        let stop = StopSignals::watch()?;
        let hangup = Handlers::set_for(&[libc::SIGHUP], note_hangup as *const (), 0)?;
        Ok(ServiceSignals { _hangup: hangup, _stop: stop })
    }
}

static SENT: AtomicI32 = AtomicI32::new(0);

extern "C" fn note_sent(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel hands a handler of this kind a valid siginfo.
    let by_a_process = unsafe { (*info).si_code } <= 0;
    if by_a_process {
        SENT.store(signal, Ordering::Relaxed);
    }
}

/// While it lives, the same signals are noted for a child that we wait for. What the terminal sends
/// goes to the child anyway, as it is of the same group, and is not noted.
pub struct PassedOn {
    _handlers: Handlers,
}

impl PassedOn {
    /// Begins to note.
    pub fn watch() -> io::Result<PassedOn> {
        SENT.store(0, Ordering::Relaxed);
        Ok(PassedOn { _handlers: Handlers::set(note_sent as *const (), libc::SA_SIGINFO)? })
    }

    /// The last signal that came and was not taken yet.
    pub fn take(&self) -> Option<rustix::process::Signal> {
        rustix::process::Signal::from_named_raw(SENT.swap(0, Ordering::Relaxed))
    }
}

/// What was there before handlers of ours; put back on drop.
struct Handlers {
    before: Vec<(libc::c_int, libc::sigaction)>,
}

impl Handlers {
    /// Sets `handler`, of the kind that `flags` says, for all of [`ENDING`] that are not ignored.
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
            // SAFETY: the pointer is to a live sigaction; nothing is changed by this call.
            super::mapping::check(unsafe { libc::sigaction(signal, ptr::null(), &mut before) })?;
            if before.sa_sigaction == libc::SIG_IGN {
                continue;
            }
            // SAFETY: the pointer is to a live sigaction; both handlers of this module only read
            // what they are given and store to an atomic, which is async-signal-safe.
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
