//! Calls about the memory of another process that leave its contents as they are, and its settings
//! for a program to come.

use rustix::process::Pid;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Advice that changes how pages are kept, never what they hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advice {
    /// Make huge pages of what is there (Linux 6.1).
    Collapse,
    /// Not needed soon; a part of a huge page splits it.
    Cold,
}

impl Advice {
    /// The number that madvise(2) takes.
    pub fn raw(self) -> i32 {
        match self {
            Advice::Collapse => libc::MADV_COLLAPSE,
            Advice::Cold => libc::MADV_COLD,
        }
    }
}

/// process_madvise(2) of one range. Errors are the system's; `EPERM` without CAP_SYS_NICE.
pub fn advise(pidfd: BorrowedFd<'_>, start: u64, len: u64, advice: Advice) -> io::Result<()> {
    let range = libc::iovec { iov_base: start as *mut libc::c_void, iov_len: len as usize };
    let advice = advice.raw();
    // SAFETY: pidfd and range are live. Whichever process it is, also this one: contents stay.
    let done = unsafe {
        let range = &raw const range;
        libc::syscall(libc::SYS_process_madvise, pidfd.as_raw_fd(), range, 1usize, advice, 0u32)
    };
    if done == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Whether the kernel knows [`Advice::Collapse`].
pub fn knows_collapse() -> bool {
    // SAFETY: advice about no memory at all; only the number is looked at.
    unsafe { libc::madvise(std::ptr::null_mut(), 0, libc::MADV_COLLAPSE) == 0 }
}

/// Copies memory of another process into `buffer`; an error unless all of it was read.
pub fn read(pid: Pid, address: u64, buffer: &mut [u8]) -> io::Result<()> {
    let local = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    let remote = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: buffer.len() };
    // SAFETY: `local` is exactly the buffer, which is writable; the kernel checks `remote`.
    let read =
        unsafe { libc::process_vm_readv(pid.as_raw_nonzero().get(), &local, 1, &remote, 1, 0) };
    whole(read, buffer.len())
}

/// Copies `data` into the writable memory of a process other than this one.
///
/// Errors: `InvalidInput` for this process; the system's; or that not all of it was written.
pub fn write(pid: Pid, address: u64, data: &[u8]) -> io::Result<()> {
    if pid == rustix::process::getpid() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let local = libc::iovec { iov_base: data.as_ptr().cast_mut().cast(), iov_len: data.len() };
    let remote = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: data.len() };
    // SAFETY: `local` is exactly the data and only read; the memory that changes is not ours.
    let written =
        unsafe { libc::process_vm_writev(pid.as_raw_nonzero().get(), &local, 1, &remote, 1, 0) };
    whole(written, data.len())
}

fn whole(done: isize, wanted: usize) -> io::Result<()> {
    match done {
        -1 => Err(io::Error::last_os_error()),
        done if done as usize == wanted => Ok(()),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// What prctl(PR_SET_THP_DISABLE) forbids to this process and to what it becomes or starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Forbid {
    /// All transparent huge pages.
    All,
    /// Those that nobody advised (Linux 6.18).
    Unadvised,
}

/// Forbids transparent huge pages to this process. `EINVAL` where the kernel is too old.
pub fn forbid_huge_pages(forbid: Forbid) -> io::Result<()> {
    /// PR_THP_DISABLE_EXCEPT_ADVISED of <linux/prctl.h>.
    const EXCEPT_ADVISED: libc::c_ulong = 2;
    let flags = match forbid {
        Forbid::All => 0,
        Forbid::Unadvised => EXCEPT_ADVISED,
    };
    // SAFETY: the option takes plain numbers.
    super::mapping::check(unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, flags, 0, 0) })
}
