//! Architectures on which pagetax cannot stop a thread: the calls of [`super::x86_64`] are refused.

use super::Stop;
use rustix::process::Pid;
use std::io;
use std::time::Duration;

/// A value for a stopped thread. It cannot exist.
pub enum NoThread {}

/// Refuses to stop a thread.
///
/// # Errors
/// Always `Unsupported`.
pub fn with_stopped<T: Send>(
    _tid: Pid,
    _work: impl FnOnce(&mut NoThread) -> T + Send,
) -> io::Result<(T, Stop)> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Refuses to fork a process.
///
/// # Errors
/// Always `Unsupported`.
pub fn with_fork(_tid: Pid, _instruction: u64, _work: impl FnOnce()) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

impl NoThread {
    /// Returns the time since the stop began.
    pub fn elapsed(&self) -> Duration {
        match *self {}
    }

    /// Returns the stack pointer.
    pub fn stack_pointer(&self) -> u64 {
        match *self {}
    }

    /// Makes the thread execute a system call.
    ///
    /// # Errors
    /// None, as there is no such thread.
    pub fn call(&mut self, _instruction: u64, _number: i64, _args: [u64; 6]) -> io::Result<u64> {
        match *self {}
    }
}
