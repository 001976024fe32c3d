//! The pager's only unsafe room: userfaultfd, its memory, where its threads run, and SIGBUS.
//!
//! Invariant: nothing given out here can touch memory other than the mappings that this module made
//! for the pager, whatever the caller does.
#![allow(unsafe_code)]

pub mod idle_poll;
pub mod lock;
pub mod memory;
pub mod sigbus;
pub mod threads;
pub mod uffd;

use rustix::fd::{AsRawFd, OwnedFd};
use std::io;

/// The lowest number of the pager's own descriptors, since programs count on low ones. The limit of descriptors
/// may not allow it; then they stay low.
const DESCRIPTORS_FROM: i32 = 700;

/// Moves a descriptor to a number that programs do not use, if one is free.
fn out_of_the_way(fd: OwnedFd) -> OwnedFd {
    rustix::io::fcntl_dupfd_cloexec(&fd, DESCRIPTORS_FROM).unwrap_or(fd)
}

/// For the child of a fork: has the number of a file that was the parent's mean the child's own.
fn put_in_place(fresh: OwnedFd, stale: &OwnedFd) -> io::Result<()> {
    if fresh.as_raw_fd() == stale.as_raw_fd() {
        // The parent's was closed already, and the number is `stale`'s.
        std::mem::forget(fresh);
        return Ok(());
    }
    // SAFETY: replaces what the number means at once; the number stays owned by `stale`.
    match unsafe { libc::dup3(fresh.as_raw_fd(), stale.as_raw_fd(), libc::O_CLOEXEC) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}
