//! The only place that creates threads inside a program, which must not receive the program's
//! signals.
//!
//! Invariants: all signals are blocked in such a thread from its first instruction. Otherwise the
//! kernel may deliver it a signal of the process that the program blocks everywhere, for sigwait(3)
//! or signalfd(2). And such a thread starts and ends without the locks of Rust's standard library,
//! which std's own threads take. A fork copies a lock that another thread holds, and no thread of
//! the child ever opens it.
#![allow(unsafe_code)]

use std::io;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::mpsc;

/// The stack of a thread, as of std's own.
const STACK_BYTES: usize = 2 << 20;
/// The largest stack to try, if the thread-local variables of all libraries leave no room in a
/// smaller one.
const STACK_BYTES_MAX: usize = 1 << 30;

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

/// A running thread. It goes on when this is dropped.
#[derive(Debug)]
pub struct RunningThread(libc::pthread_t);

impl RunningThread {
    /// Waits until the thread has ended.
    pub fn join(self) {
        // SAFETY: a thread that was neither joined nor detached, because this value is gone after.
        unsafe { libc::pthread_join(self.0, ptr::null_mut()) };
        std::mem::forget(self);
    }
}

impl Drop for RunningThread {
    fn drop(&mut self) {
        // SAFETY: as for `join`.
        unsafe { libc::pthread_detach(self.0) };
    }
}

/// Starts a thread and waits until it runs. If it panics, the message is printed, and it ends.
///
/// The wait matters where memory is paged. At a thread's start the C library reads memory of the
/// program, such as the locale. Only a fault handler that already runs can fetch that memory.
///
/// # Errors
/// If the system has no more threads.
pub fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<RunningThread> {
    let (runs, is_running) = mpsc::channel();
    let name = name.to_string();
    let begin: Work = Box::new(move || {
        // A name is only for the user.
        let _ = std::ffi::CString::new(name).map(|name| rustix::thread::set_name(&name));
        // The creator waits until this, or until the channel is dropped.
        let _ = runs.send(());
        drop(runs);
        work();
    });
    let thread = with_signals_blocked(|| create(begin))?;
    let _ = is_running.recv();
    Ok(thread)
}

/// Runs the work of a thread without which the process cannot go on. If it panics, which is a flaw in this
/// program, the process ends after `log`.
pub fn run_or_abort(work: impl FnOnce(), log: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(work)).is_err() {
        log();
        std::process::abort();
    }
}

type Work = Box<dyn FnOnce() + Send>;

fn create(work: Work) -> io::Result<RunningThread> {
    let work = Box::into_raw(Box::new(work));
    let mut stack_bytes = STACK_BYTES;
    loop {
        // SAFETY: the attributes are initialised before they are used. The thread takes over the
        // work if it is created.
        let (error, thread) = unsafe {
            let (mut attributes, mut thread) = (MaybeUninit::uninit(), 0);
            libc::pthread_attr_init(attributes.as_mut_ptr());
            libc::pthread_attr_setstacksize(attributes.as_mut_ptr(), stack_bytes);
            let error = libc::pthread_create(&mut thread, attributes.as_ptr(), run, work.cast());
            libc::pthread_attr_destroy(attributes.as_mut_ptr());
            (error, thread)
        };
        match error {
            0 => return Ok(RunningThread(thread)),
            libc::EINVAL if stack_bytes < STACK_BYTES_MAX => stack_bytes *= 2,
            error => {
                // SAFETY: from `Box::into_raw`, and no thread has it.
                drop(unsafe { Box::from_raw(work) });
                return Err(io::Error::from_raw_os_error(error));
            }
        }
    }
}

extern "C" fn run(work: *mut libc::c_void) -> *mut libc::c_void {
    // SAFETY: `create` passes it to this thread alone.
    let work = unsafe { Box::from_raw(work.cast::<Work>()) };
    // A panic has printed its message, and may not go on into the C library.
    let _ = catch_unwind(AssertUnwindSafe(*work));
    ptr::null_mut()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_ends_the_process() {
        const PANICS: &str = "PAGETAX_TEST_PANICS";
        if std::env::var_os(PANICS).is_some() {
            run_or_abort(|| panic!("a planted flaw"), || eprintln!("it ends the program"));
        }
        let this = ["--exact", "threads::tests::a_panic_ends_the_process", "--nocapture"];
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let output = child.args(this).env(PANICS, "1").output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        let signal = std::os::unix::process::ExitStatusExt::signal(&output.status);
        assert_eq!(signal, Some(libc::SIGABRT));
        assert!(errors.contains("a planted flaw"), "{errors}");
        assert!(errors.contains("ends the program"), "{errors}");
    }

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
        thread.unwrap().join();
        assert_eq!((receiver.recv(), is_blocked(libc::SIGUSR1)), (Ok(true), false));
    }

    /// Returns true if std has prepared the calling thread for overflows of its stack, under its lock.
    fn is_prepared_by_std() -> bool {
        let mut stack = MaybeUninit::<libc::stack_t>::zeroed();
        // SAFETY: only reads the calling thread's signal stack, into a structure of ours.
        let stack = unsafe {
            libc::sigaltstack(ptr::null(), stack.as_mut_ptr());
            stack.assume_init()
        };
        stack.ss_flags & libc::SS_DISABLE == 0
    }

    #[test]
    fn a_thread_starts_without_the_locks_of_std() {
        assert!(std::thread::spawn(is_prepared_by_std).join().unwrap());
        let (sender, receiver) = mpsc::channel();
        let thread = spawn("bare", move || sender.send(is_prepared_by_std()).unwrap());
        thread.unwrap().join();
        assert_eq!(receiver.recv(), Ok(false));
    }

    #[test]
    fn a_panic_ends_the_thread_only() {
        // Without the message of a panic.
        spawn("panics", || std::panic::resume_unwind(Box::new(()))).unwrap().join();
    }
}
