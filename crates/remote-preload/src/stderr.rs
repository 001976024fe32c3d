//! Log lines. They go to the stderr of the program's start, or nowhere.
//!
//! Invariants: if a program closes stderr and opens a file under that number, no line ends up in
//! the file. No thread waits for room in a pipe: a line that does not fit at once is dropped and
//! counted.
//!
//! The pager's threads have descriptors of their own ([`crate::agent`]). They do not keep stderr
//! open, or a reader of the pipe would see no end of file after the program has closed it. They
//! borrow the descriptor for each line.

use crate::threads::is_pager_thread;
use libc::c_int;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::io::{Errno, IoSlice, ReadWriteFlags};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering::Relaxed};

/// A file: device and inode number.
type FileId = (u64, u64);

/// The file that stderr was at the start; `None` if it was closed.
static AT_START: OnceLock<Option<FileId>> = OnceLock::new();
/// True if the pager's threads keep stderr open.
static IS_KEPT: AtomicBool = AtomicBool::new(false);
/// A pidfd of this process, in the pager's table; -1 if there is none.
static PROCESS: AtomicI32 = AtomicI32::new(-1);
static DROPPED: AtomicU64 = AtomicU64::new(0);

fn stderr() -> BorrowedFd<'static> {
    // SAFETY: any code may use this number; if it is closed, calls fail.
    unsafe { BorrowedFd::borrow_raw(libc::STDERR_FILENO) }
}

fn id_of(file: impl AsFd) -> Option<FileId> {
    rustix::fs::fstat(file).ok().map(|stat| (stat.st_dev, stat.st_ino))
}

/// Records the file that stderr is, before any code of the program runs.
pub fn note() {
    let _ = AT_START.set(id_of(stderr()));
}

/// Returns true if a descriptor is the stderr of the program's start.
fn is_stderr(file: impl AsFd) -> bool {
    let at_start = AT_START.get().copied().flatten();
    at_start.is_some() && id_of(file) == at_start
}

/// Gives the calling thread a descriptor table of its own, and closes the program's files there.
/// With `keep`, stderr stays open, for lines after the program has closed it.
///
/// # Errors
/// The kernel gives threads no descriptor tables of their own.
pub fn unshare_descriptors(keep: bool) -> Result<(), Errno> {
    let (first, last) = (libc::STDERR_FILENO + 1, libc::c_uint::MAX);
    // SAFETY: closes no file of the program, whose table this thread leaves by the same call. No
    // file of ours is open yet.
    let parted = unsafe {
        libc::syscall(libc::SYS_close_range, first, last, libc::CLOSE_RANGE_UNSHARE as c_int)
    };
    if parted != 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL));
    }
    let nothing = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?;
    for number in [libc::STDIN_FILENO, libc::STDOUT_FILENO] {
        put_under(&nothing, number);
    }
    let process = rustix::process::pidfd_open(
        rustix::process::getpid(),
        rustix::process::PidfdFlags::empty(),
    );
    PROCESS.store(-1, Relaxed);
    if let Ok(process) = process {
        PROCESS.store(std::os::fd::IntoRawFd::into_raw_fd(process), Relaxed);
    }
    // If a sandbox forbids pidfd_getfd(2), stderr stays open.
    let keep = (keep || borrowed().is_err()) && is_stderr(stderr());
    IS_KEPT.store(keep, Relaxed);
    if !keep {
        put_under(&nothing, libc::STDERR_FILENO);
    }
    Ok(())
}

/// Occupies a standard number, so that no file of the pager gets it.
fn put_under(file: &OwnedFd, number: c_int) {
    // SAFETY: the thread's own table, in which no other code uses the number.
    unsafe { libc::dup3(file.as_raw_fd(), number, libc::O_CLOEXEC) };
}

/// Returns a duplicate of the program's current stderr.
fn borrowed() -> Result<OwnedFd, Errno> {
    let (process, number) = (PROCESS.load(Relaxed), libc::STDERR_FILENO);
    // SAFETY: plain numbers; the result is checked.
    match unsafe { libc::syscall(libc::SYS_pidfd_getfd, process, number, 0) } as c_int {
        -1 => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL)),
        // SAFETY: a new descriptor, which has no other owner.
        file => Ok(unsafe { OwnedFd::from_raw_fd(file) }),
    }
}

/// Writes a line. Only for the pager's threads, or while no other thread of the program runs.
pub fn write_line(line: &str) {
    let dropped = DROPPED.swap(0, Relaxed);
    let more = match dropped {
        0 => String::new(),
        count => format!("pagetax remote: {count} lines before this one found no room\n"),
    };
    let text = format!("{more}pagetax remote: {line}\n");
    let is_written = match is_pager_thread() && !IS_KEPT.load(Relaxed) {
        // If the program has closed it, there is no reader.
        true => borrowed().map_or(true, |file| write_to(&file, &text)),
        false => write_to(&stderr(), &text),
    };
    if !is_written {
        DROPPED.fetch_add(dropped + 1, Relaxed);
    }
}

/// Writes at once or not at all. Returns false if there was no room.
fn write_to(file: &impl AsFd, text: &str) -> bool {
    if !is_stderr(file) {
        return true;
    }
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let ready = poll(&mut [PollFd::new(file, PollFlags::OUT)], Some(&now));
    if !ready.is_ok_and(|ready| ready > 0) {
        return false;
    }
    let parts = [IoSlice::new(text.as_bytes())];
    let at_its_end = u64::MAX;
    match rustix::io::pwritev2(file, &parts, at_its_end, ReadWriteFlags::NOWAIT) {
        Ok(_) => true,
        // This kind of file has no NOWAIT. It does not block a writer after poll(2) has reported
        // room.
        Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL | Errno::SPIPE) => {
            rustix::io::write(file, text.as_bytes()).is_ok()
        }
        // Wait for a busy disk.
        Err(Errno::AGAIN) if is_regular(file) => rustix::io::write(file, text.as_bytes()).is_ok(),
        Err(_) => false,
    }
}

fn is_regular(file: &impl AsFd) -> bool {
    rustix::fs::fstat(file).is_ok_and(|stat| stat.st_mode & libc::S_IFMT == libc::S_IFREG)
}
