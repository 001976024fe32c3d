//! The only place that makes threads inside a program: its signals are not for them.
//!
//! Invariant: all signals are blocked in such a thread from before it exists. Otherwise the kernel may deliver
//! a signal of the process to it that the program blocks everywhere, for sigwait(3) or signalfd(2).
#![allow(unsafe_code)]

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::mpsc;
use std::thread::{Builder, JoinHandle};

/// All signals of the calling thread, blocked until this is dropped.
#[derive(Debug)]
pub struct BlockedSignals {
    before: libc::sigset_t,
}

impl BlockedSignals {
    /// Blocks all signals of the calling thread, but those that the C library keeps for itself.
    pub fn block() -> BlockedSignals {
        let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::zeroed());
        // SAFETY: sigfillset(3) fills the set that pthread_sigmask(3) reads; both sets are ours. Zeros are a set
        // too, if the call should fail.
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

/// Calls a function that makes threads by itself, such as one of another library.
pub fn with_signals_blocked<T>(make: impl FnOnce() -> T) -> T {
    let _blocked = BlockedSignals::block();
    make()
}

/// Starts a thread and waits until it runs.
///
/// The wait matters where memory is paged: at a thread's start the C library reads memory of the program's, such as
/// the locale, which only a handler that runs already can bring back.
///
/// # Errors
/// When the system has no more threads.
pub fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    let (runs, is_running) = mpsc::channel();
    let begin = move || {
        // Whoever waits does so until this, or until the channel is dropped.
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
