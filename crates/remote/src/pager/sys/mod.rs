//! The pager's only unsafe module: userfaultfd, the pager's memory, the CPUs of threads, and
//! SIGBUS.
//!
//! Invariant: whatever the caller does, no result of this module can touch memory other than the
//! mappings that it made for the pager.
#![allow(unsafe_code)]

pub mod idle_poll;
pub mod lock;
pub mod memory;
pub mod sigbus;
pub mod threads;
pub mod uffd;

use rustix::fd::{AsRawFd, OwnedFd};
use std::io;

/// The lowest number of the pager's own descriptors, since programs count on low ones. The limit of
/// descriptors may not allow it; then they stay low.
const DESCRIPTORS_FROM: i32 = 700;

/// Moves a descriptor to a number that programs do not use, if one is free.
fn move_to_high_number(fd: OwnedFd) -> OwnedFd {
    rustix::io::fcntl_dupfd_cloexec(&fd, DESCRIPTORS_FROM).unwrap_or(fd)
}

/// Replaces the parent's file under a descriptor by the child's own, in the child of a fork.
fn replace_file(fresh: OwnedFd, stale: &OwnedFd) -> io::Result<()> {
    if fresh.as_raw_fd() == stale.as_raw_fd() {
        // The parent's file was closed already, and the fresh one has its number, which `stale`
        // owns.
        std::mem::forget(fresh);
        return Ok(());
    }
    // SAFETY: replaces the file under the number atomically; `stale` still owns the number.
    match unsafe { libc::dup3(fresh.as_raw_fd(), stale.as_raw_fd(), libc::O_CLOEXEC) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}
