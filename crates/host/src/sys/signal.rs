//! SIGINT and SIGTERM as a flag to look at.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

static ASKED_TO_STOP: AtomicBool = AtomicBool::new(false);
const STOPPING: [libc::c_int; 2] = [libc::SIGINT, libc::SIGTERM];

extern "C" fn note(_signal: libc::c_int) {
    ASKED_TO_STOP.store(true, Ordering::Relaxed);
}

/// Whether SIGINT or SIGTERM came since the last [`StopSignals::watch`].
pub fn asked_to_stop() -> bool {
    ASKED_TO_STOP.load(Ordering::Relaxed)
}

/// While it lives, SIGINT and SIGTERM only set a flag; then the old handlers are back.
pub struct StopSignals {
    before: [libc::sigaction; 2],
}

impl StopSignals {
    /// Begins to watch.
    pub fn watch() -> io::Result<StopSignals> {
        ASKED_TO_STOP.store(false, Ordering::Relaxed);
        // SAFETY: sigaction is plain data for which zeros are valid.
        let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
        action.sa_sigaction = note as *const () as libc::sighandler_t;
        action.sa_flags = libc::SA_RESTART;
        let mut before = [action; 2];
        for (signal, before) in STOPPING.into_iter().zip(&mut before) {
            // SAFETY: both pointers are to live sigactions; the handler only stores to an atomic,
            // which is async-signal-safe.
            super::mapping::check(unsafe { libc::sigaction(signal, &action, before) })?;
        }
        Ok(StopSignals { before })
    }
}

impl Drop for StopSignals {
    fn drop(&mut self) {
        for (signal, before) in STOPPING.into_iter().zip(&self.before) {
            // SAFETY: restores what sigaction itself gave us; it cannot fail for these signals.
            unsafe { libc::sigaction(signal, before, ptr::null_mut()) };
        }
    }
}
