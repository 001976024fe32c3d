//! Calls that only test whether the kernel allows an operation.

use super::mapping::OwnedMapping;
use rustix::process::Pid;
use std::io;
use std::os::fd::AsRawFd;

/// Collapses a mapping of this process to huge pages with process_madvise(2), as for another process.
pub fn collapse_remotely(mapping: &OwnedMapping) -> io::Result<()> {
    let own: Pid = rustix::process::getpid();
    let pidfd = rustix::process::pidfd_open(own, rustix::process::PidfdFlags::empty())?;
    let range =
        libc::iovec { iov_base: mapping.address() as *mut libc::c_void, iov_len: mapping.len() };
    // SAFETY: pidfd and range are live; the range is exactly this mapping, and collapsing changes
    // the size of its pages, never their content.
    let done = unsafe {
        libc::syscall(
            libc::SYS_process_madvise,
            pidfd.as_raw_fd(),
            &raw const range,
            1usize,
            libc::MADV_COLLAPSE,
            0u32,
        )
    };
    super::mapping::check(done.try_into().unwrap_or(0))
}
