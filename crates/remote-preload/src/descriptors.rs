//! The pager's files: programs count on low numbers being free, and close all that they do not know. The pager's
//! are moved out of the way, and survive.

use crate::threads::is_internal;
use crate::{fail, paged};
use libc::{c_int, c_uint};

/// The pager's sockets have this number or a higher one, below the usual limit of 1024.
pub const FIRST: c_int = pagetax_remote::pager::DESCRIPTORS_FROM;
const LAST: c_int = FIRST + 127;
/// Children keep this one.
const STDERR: c_int = LAST + 1;

/// Whether a number is of the pager's. Below STDERR, but none of the program's is likely to be there:
/// that would take 700 open files.
fn is_ours(file: c_int) -> bool {
    paged::paged().is_some() && (FIRST..=STDERR).contains(&file)
}

/// socket(2): the pager's go out of the way.
#[unsafe(no_mangle)]
pub extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    // SAFETY: plain numbers; the program's own call.
    let made = unsafe { libc::syscall(libc::SYS_socket, domain, kind, protocol) } as c_int;
    if made < 0 || !is_internal() {
        return made;
    }
    // SAFETY: duplicates and closes a number that was just made here.
    unsafe {
        let moved = libc::fcntl(made, libc::F_DUPFD_CLOEXEC, FIRST);
        if moved < 0 {
            return made;
        }
        libc::syscall(libc::SYS_close, made);
        moved
    }
}

/// close(2)
#[unsafe(no_mangle)]
pub extern "C" fn close(file: c_int) -> c_int {
    if is_ours(file) {
        return fail(libc::EBADF, -1);
    }
    // SAFETY: the program's own call.
    unsafe { libc::syscall(libc::SYS_close, file) as c_int }
}

/// close_range(2)
#[unsafe(no_mangle)]
pub extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    // SAFETY: the program's own call, less what is ours.
    let call = |first: c_uint, last: c_uint| unsafe {
        libc::syscall(libc::SYS_close_range, first, last, flags) as c_int
    };
    let (ours, ours_end) = (FIRST as c_uint, STDERR as c_uint);
    if paged::paged().is_none() || last < ours || first > ours_end || first > last {
        return call(first, last);
    }
    let below = if first < ours { call(first, ours - 1) } else { 0 };
    let above = if last > ours_end { call(ours_end + 1, last) } else { 0 };
    below.min(above)
}

/// closefrom(3)
#[unsafe(no_mangle)]
pub extern "C" fn closefrom(first: c_int) {
    close_range(first.max(0) as c_uint, c_uint::MAX, 0);
}

/// Another number of what stderr is now, which the program does not close.
pub fn stderr_of_ours() -> c_int {
    // SAFETY: duplicates a number; if it cannot be done, stderr itself has to do.
    let made = unsafe { libc::fcntl(libc::STDERR_FILENO, libc::F_DUPFD_CLOEXEC, STDERR) };
    if made < 0 { libc::STDERR_FILENO } else { made }
}

/// In the child of a fork: closes the parent's sockets, which would else stay open as long as the child.
pub fn close_the_parents() {
    // SAFETY: these numbers are ours alone; nothing refers to the parent's files any more.
    unsafe { libc::syscall(libc::SYS_close_range, FIRST, LAST, 0) };
}
