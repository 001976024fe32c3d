//! The only place that creates threads inside a program, which must not receive the program's
//! signals.
//!
//! Invariant: all signals are blocked in such a thread from its first instruction. Otherwise the
//! kernel may deliver it a signal of the process that the program blocks everywhere, for sigwait(3)
//! or signalfd(2).
#![allow(unsafe_code)]

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::mpsc;
use std::thread::{Builder, JoinHandle};

/// A guard that blocks all signals of the calling thread until it is dropped.
#[derive(Debug)]
pub struct BlockedSignals {
    before: libc::sigset_t,
}

impl BlockedSignals {
    /// Blocks all signals of the calling thread, except those that the C library reserves.
    pub fn block() -> BlockedSignals {
        let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::zeroed());
        // SAFETY: sigfillset(3) fills the set that pthread_sigmask(3) reads; both sets are ours.
        // Zeros are a set too, if the call fails.
        unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
            BlockedSignals { before: before.assume_init() }
        }
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: restores the set that pthread_sigmask(3) wrote.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, ptr::null_mut()) };
    }
}

/// Calls a function that creates threads, such as one of another library, while all signals are
/// blocked.
pub fn with_signals_blocked<T>(make: impl FnOnce() -> T) -> T {
    let _blocked = BlockedSignals::block();
    make()
}

/// Starts a thread and waits until it runs.
///
/// The wait matters where memory is paged. At a thread's start the C library reads memory of the
/// program, such as the locale. Only a fault handler that already runs can fetch that memory.
///
/// # Errors
/// If the system has no more threads.
pub fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    let (runs, is_running) = mpsc::channel();
    let begin = move || {
        // The creator waits until this, or until the channel is dropped.
        let _ = runs.send(());
        drop(runs);
        work();
    };
    let thread = with_signals_blocked(|| Builder::new().name(name.into()).spawn(begin))?;
    let _ = is_running.recv();
    Ok(thread)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_blocked(signal: i32) -> bool {
        let mut now = MaybeUninit::zeroed();
        // SAFETY: only reads the calling thread's mask, into a set of ours.
        unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, ptr::null(), now.as_mut_ptr());
            libc::sigismember(now.as_ptr(), signal) == 1
        }
    }

    #[test]
    fn signals_are_blocked_in_the_thread_and_only_there() {
        let (sender, receiver) = mpsc::channel();
        let thread = spawn("blocked", move || sender.send(is_blocked(libc::SIGUSR1)).unwrap());
        thread.unwrap().join().unwrap();
        assert_eq!((receiver.recv(), is_blocked(libc::SIGUSR1)), (Ok(true), false));
    }
}
