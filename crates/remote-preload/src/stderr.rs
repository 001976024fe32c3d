//! Lines for people. They go where stderr went when the program started, or nowhere.
//!
//! Invariants: a program that closed stderr, and opened a file of its own under that number, never finds a line in
//! it. Nobody waits for room in a pipe: a line that does not fit at once is dropped, and counted.
//!
//! The pager's threads have descriptors of their own ([`crate::agent`]). They do not keep stderr open, or whoever
//! reads from it would not see its end when the program closes it. They borrow it for each line.

use crate::threads::is_pager_thread;
use libc::c_int;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::io::{Errno, IoSlice, ReadWriteFlags};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering::Relaxed};

/// A file, by its device and its number there.
type FileId = (u64, u64);

/// What stderr was at the start; none if it was closed.
static AT_START: OnceLock<Option<FileId>> = OnceLock::new();
/// The pager's threads have it open all the time.
static IS_KEPT: AtomicBool = AtomicBool::new(false);
/// A descriptor of this process, of the pager's threads; -1 where there is none.
static PROCESS: AtomicI32 = AtomicI32::new(-1);
static DROPPED: AtomicU64 = AtomicU64::new(0);

fn stderr() -> BorrowedFd<'static> {
    // SAFETY: a number that everybody may use; where nothing is open, calls say so.
    unsafe { BorrowedFd::borrow_raw(libc::STDERR_FILENO) }
}

fn id_of(file: impl AsFd) -> Option<FileId> {
    rustix::fs::fstat(file).ok().map(|stat| (stat.st_dev, stat.st_ino))
}

/// Notes what stderr is, when nothing of the program has run yet.
pub fn note() {
    let _ = AT_START.set(id_of(stderr()));
}

/// Whether a descriptor still is what stderr was at the start.
fn is_stderr(file: impl AsFd) -> bool {
    let at_start = AT_START.get().copied().flatten();
    at_start.is_some() && id_of(file) == at_start
}

/// Makes the calling thread's descriptors the pager's, apart from the program's, and closes what the program had
/// open. With `keep`, stderr stays open: for what is to be said after the program has closed it.
///
/// # Errors
/// When the kernel does not give threads descriptors of their own.
pub fn part_descriptors(keep: bool) -> Result<(), Errno> {
    let (first, last) = (libc::STDERR_FILENO + 1, libc::c_uint::MAX);
    // SAFETY: closes nothing of the program's, whose table this thread leaves by the same call; nothing of ours is
    // open yet.
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
    // Where a sandbox does not let us borrow it, it is kept.
    let keep = (keep || borrowed().is_err()) && is_stderr(stderr());
    IS_KEPT.store(keep, Relaxed);
    if !keep {
        put_under(&nothing, libc::STDERR_FILENO);
    }
    Ok(())
}

/// Occupies a standard number, so that no file of the pager's gets it.
fn put_under(file: &OwnedFd, number: c_int) {
    // SAFETY: in this thread's own table, where nobody else uses the number.
    unsafe { libc::dup3(file.as_raw_fd(), number, libc::O_CLOEXEC) };
}

/// What the program has open as stderr now.
fn borrowed() -> Result<OwnedFd, Errno> {
    let (process, number) = (PROCESS.load(Relaxed), libc::STDERR_FILENO);
    // SAFETY: plain numbers; the result is checked.
    match unsafe { libc::syscall(libc::SYS_pidfd_getfd, process, number, 0) } as c_int {
        -1 => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL)),
        // SAFETY: a new descriptor that nobody else owns.
        file => Ok(unsafe { OwnedFd::from_raw_fd(file) }),
    }
}

/// Writes a line, for the thread that calls: one of the pager's, or the program's while nothing else of it runs.
pub fn write_line(line: &str) {
    let dropped = DROPPED.swap(0, Relaxed);
    let more = match dropped {
        0 => String::new(),
        count => format!("pagetax remote: {count} lines before this one found no room\n"),
    };
    let text = format!("{more}pagetax remote: {line}\n");
    let is_written = match is_pager_thread() && !IS_KEPT.load(Relaxed) {
        // Where the program has closed it, there is nobody to tell.
        true => borrowed().map_or(true, |file| write_to(&file, &text)),
        false => write_to(&stderr(), &text),
    };
    if !is_written {
        DROPPED.fetch_add(dropped + 1, Relaxed);
    }
}

/// Writes at once or not at all; false if there was no room.
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
        // Not for this kind of file. Such a one does not keep a writer waiting whom poll(2) let through.
        Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL | Errno::SPIPE) => {
            rustix::io::write(file, text.as_bytes()).is_ok()
        }
        // A disk that is busy is waited for.
        Err(Errno::AGAIN) if is_regular(file) => rustix::io::write(file, text.as_bytes()).is_ok(),
        Err(_) => false,
    }
}

fn is_regular(file: &impl AsFd) -> bool {
    rustix::fs::fstat(file).is_ok_and(|stat| stat.st_mode & libc::S_IFMT == libc::S_IFREG)
}
