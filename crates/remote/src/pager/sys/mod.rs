//! The pager's only unsafe room: userfaultfd, its memory, where its threads run, and SIGBUS.
//!
//! Invariant: nothing given out here can touch memory other than the mappings that this module made
//! for the pager, whatever the caller does.
#![allow(unsafe_code)]

pub mod awake;
pub mod lock;
pub mod memory;
pub mod sigbus;
pub mod threads;
pub mod uffd;

use crate::pager::DESCRIPTORS_FROM;
use rustix::fd::OwnedFd;

/// The same file under a number that programs do not count on, if there is one.
fn out_of_the_way(fd: OwnedFd) -> OwnedFd {
    rustix::io::fcntl_dupfd_cloexec(&fd, DESCRIPTORS_FROM).unwrap_or(fd)
}
