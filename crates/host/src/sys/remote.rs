//! Calls on the memory of other processes, and settings that a program inherits at exec.

use rustix::process::Pid;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Advice that changes the size or age of pages, never their content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RemoteAdvice {
    /// Collapse to huge pages (Linux 6.1).
    Collapse,
    /// Deactivate pages; a range that ends inside a huge page splits it.
    Cold,
}

impl RemoteAdvice {
    /// Returns the value for madvise(2).
    pub fn raw(self) -> i32 {
        match self {
            RemoteAdvice::Collapse => libc::MADV_COLLAPSE,
            RemoteAdvice::Cold => libc::MADV_COLD,
        }
    }
}

/// Calls process_madvise(2) for one range.
///
/// # Errors
/// Fails as the call does: `EPERM` without CAP_SYS_NICE.
pub fn advise(pidfd: BorrowedFd<'_>, start: u64, len: u64, advice: RemoteAdvice) -> io::Result<()> {
    let range = libc::iovec { iov_base: start as *mut libc::c_void, iov_len: len as usize };
    let advice = advice.raw();
    // SAFETY: pidfd and range are live, and no content changes, even if the process is this one.
    let done = unsafe {
        let range = &raw const range;
        libc::syscall(libc::SYS_process_madvise, pidfd.as_raw_fd(), range, 1usize, advice, 0u32)
    };
    if done == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Returns true if the kernel supports [`RemoteAdvice::Collapse`].
pub fn knows_collapse() -> bool {
    // SAFETY: the range is empty, so the kernel only checks the value.
    unsafe { libc::madvise(std::ptr::null_mut(), 0, libc::MADV_COLLAPSE) == 0 }
}

/// Copies memory of another process into `buffer`.
///
/// # Errors
/// Fails unless the whole buffer was read.
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
/// # Errors
/// Fails unless all of `data` was written; with `InvalidInput` for this process.
pub fn write(pid: Pid, address: u64, data: &[u8]) -> io::Result<()> {
    if pid == rustix::process::getpid() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let local = libc::iovec { iov_base: data.as_ptr().cast_mut().cast(), iov_len: data.len() };
    let remote = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: data.len() };
    // SAFETY: `local` is exactly the data, which is only read; the written memory is another process's.
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

/// The huge pages that prctl(PR_SET_THP_DISABLE) forbids to this process and its descendants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Forbid {
    /// All transparent huge pages.
    All,
    /// Those without madvise(2) (Linux 6.18).
    Unadvised,
}

/// Transparent huge pages forbidden to this process. Drop restores the state before.
#[derive(Debug)]
pub struct Forbidden {
    before: libc::c_ulong,
}

impl Forbidden {
    /// Forbids them. A kernel that cannot forbid the unadvised ones alone forbids all.
    pub fn set(forbid: Forbid) -> io::Result<Forbidden> {
        // SAFETY: the option takes plain numbers.
        let before = unsafe { libc::prctl(libc::PR_GET_THP_DISABLE, 0, 0, 0, 0) };
        super::mapping::check(before.min(0))?;
        match forbid {
            Forbid::Unadvised => {
                set_thp_disable(1 | EXCEPT_ADVISED).or_else(|_| set_thp_disable(1))
            }
            Forbid::All => set_thp_disable(1),
        }?;
        Ok(Forbidden { before: before as libc::c_ulong })
    }
}

impl Drop for Forbidden {
    fn drop(&mut self) {
        // The kernel takes the state that it reported.
        let _ = set_thp_disable(self.before);
    }
}

/// PR_THP_DISABLE_EXCEPT_ADVISED of <linux/prctl.h>.
const EXCEPT_ADVISED: libc::c_ulong = 2;

/// Sets the state that PR_GET_THP_DISABLE reports: bit 0 disables huge pages, other bits are flags.
fn set_thp_disable(state: libc::c_ulong) -> io::Result<()> {
    // SAFETY: the option takes plain numbers.
    super::mapping::check(unsafe {
        libc::prctl(libc::PR_SET_THP_DISABLE, state & 1, state & !1, 0, 0)
    })
}
