//! userfaultfd: the ioctls that the pager needs, as typed functions.
//!
//! Source: the kernel's ABI, `linux/userfaultfd.h`. Write protection of anonymous memory exists
//! since Linux 5.7, `UFFD_USER_MODE_ONLY` since 5.11, POISON since 6.6, MOVE since 6.8. The ABI is
//! written down here because the crates that wrap it lack the last two.

mod abi;

use super::memory::{EmptyFile, PageSpan, Pages};
use super::{move_to_high_number, replace_file};
use crate::page::PAGE_BYTES;
use crate::pager::options::Features;
use abi::*;
use pagetax_core::network_memory::Serving;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{self, Updater, opcode};
use rustix::mm::Advice;
use std::io;

const GROUP: u8 = 0xAA;
const API: u64 = 0xAA;
const FEATURE_WP: u64 = 1 << 0;
const FEATURE_SIGBUS: u64 = 1 << 7;
const FEATURE_THREAD_ID: u64 = 1 << 8;
const FEATURE_POISON: u64 = 1 << 14;
const FEATURE_MOVE: u64 = 1 << 16;
/// The features without which the pager cannot work.
const FEATURES: u64 = FEATURE_WP | FEATURE_THREAD_ID;
const MODE_MISSING: u64 = 1;
const MODE_WP: u64 = 2;
const DONT_WAKE: u64 = 1;
const PROTECT_DONT_WAKE: u64 = 1 << 1;
const EVENT_PAGEFAULT: u8 = 0x12;
const FLAG_WRITE: u64 = 1;
const FLAG_WP: u64 = 2;
const PROTECT: u64 = 1;

/// Returns the number of a read-write ioctl on a userfaultfd.
const fn number<T>(nr: u8) -> ioctl::Opcode {
    opcode::read_write::<T>(GROUP, nr)
}

const _: () = assert!(size_of::<UffdMessage>() == 32);
const _: () =
    assert!(number::<UffdTransfer>(5) == 0xC028_AA05 && number::<UffdFill>(8) == 0xC020_AA08);

/// A thread that waits for a page.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Fault {
    /// The address of the access.
    pub address: u64,
    /// True if the access is a write.
    pub is_write: bool,
    /// True if the page is present but protected from writes.
    pub is_protected: bool,
    /// The ID of the thread that waits.
    pub thread: u32,
}

/// The most faults that one read returns.
pub const FAULTS_MAX: usize = 32;

/// An open userfaultfd.
#[derive(Debug)]
pub struct Uffd {
    fd: OwnedFd,
    features: Features,
    /// The file that is mapped in place of lost pages, on kernels without poison.
    empty_file: Option<EmptyFile>,
    /// The number of fills to refuse with ENOMEM, for tests.
    #[cfg(test)]
    pub refusals: std::sync::atomic::AtomicUsize,
}

/// The faults that a userfaultfd serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// All faults, including those of system calls into missing pages.
    Full,
    /// Faults in user mode only. System calls into missing pages fail with EFAULT.
    UserModeOnly,
}

/// The reason for which this process cannot page.
#[derive(Debug, thiserror::Error)]
pub enum UffdError {
    /// The user lacks the right.
    #[error("userfaultfd: {source}; as root: {remedy}")]
    NotAllowed {
        /// The error of the system call.
        source: io::Error,
        /// The command that grants the right.
        remedy: &'static str,
    },
    /// The kernel was built without userfaultfd.
    #[error("this kernel was built without userfaultfd (CONFIG_USERFAULTFD)")]
    NotBuilt,
    /// The kernel lacks a feature that paging needs.
    #[error(
        "this kernel's userfaultfd cannot protect ordinary memory from writes, which paging needs \
         (Linux 5.10 and later)"
    )]
    TooOld,
    /// Any other error of the system.
    #[error("userfaultfd: {0}")]
    System(#[from] io::Error),
}

impl UffdError {
    /// Returns the error of the system behind it.
    pub fn errno(&self) -> Option<i32> {
        match self {
            UffdError::NotAllowed { source, .. } | UffdError::System(source) => {
                source.raw_os_error()
            }
            UffdError::NotBuilt => Some(libc::ENOSYS),
            UffdError::TooOld => Some(libc::EINVAL),
        }
    }

    fn of_opening(source: io::Error) -> UffdError {
        match source.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => {
                UffdError::NotAllowed { source, remedy: remedy(has_device()) }
            }
            Some(libc::ENOSYS) => UffdError::NotBuilt,
            _ => UffdError::System(source),
        }
    }
}

/// Returns the command that gives an ordinary user the right to page: the user's group or, without
/// the device, all users.
pub fn remedy(has_device: bool) -> &'static str {
    match has_device {
        true => {
            "`chgrp GROUP /dev/userfaultfd && chmod 0660 /dev/userfaultfd` for the user's group"
        }
        false => {
            "`sysctl vm.unprivileged_userfaultfd=1` (Linux 6.1 and later have /dev/userfaultfd, which \
             has a group)"
        }
    }
}

fn has_device() -> bool {
    rustix::fs::access(DEVICE, rustix::fs::Access::EXISTS).is_ok()
}

const DEVICE: &str = "/dev/userfaultfd";

impl Uffd {
    /// Opens a userfaultfd. The device comes first, because it serves all faults and its mode says
    /// who may use it. Next is the system call, and last, if `user_mode_only`, the restricted form.
    /// In-place serving always uses the restricted form, because SIGBUS serves no system calls.
    /// Requests all of the wanted features that the kernel has.
    pub fn open(
        user_mode_only: bool,
        serving: Serving,
        wanted: Features,
    ) -> Result<(Uffd, Access), UffdError> {
        let in_place = serving == Serving::InPlace;
        let open_restricted = || {
            const USER_MODE_ONLY: u32 = 1;
            let opened = match open_call(USER_MODE_ONLY) {
                // Linux before 5.11 has no such flag.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => open_call(0),
                other => other,
            };
            Ok((opened?, Access::UserModeOnly))
        };
        let full = || open_device().or_else(|_| open_call(0)).map(|fd| (fd, Access::Full));
        let opened = if in_place { open_restricted() } else { full() };
        let opened = match opened {
            Err(_) if user_mode_only => open_restricted(),
            other => other,
        };
        let (fd, access) = opened.map_err(UffdError::of_opening)?;
        let mut uffd = Uffd {
            fd: move_to_high_number(fd),
            features: wanted,
            empty_file: None,
            #[cfg(test)]
            refusals: Default::default(),
        };
        uffd.features =
            uffd.negotiate_features(wanted, if in_place { FEATURE_SIGBUS } else { 0 })?;
        if !uffd.features.can_poison() {
            uffd.empty_file = Some(EmptyFile::open()?);
        }
        Ok((uffd, access))
    }

    /// Requests as many of these features as the kernel has, and returns them. After a refusal, the
    /// descriptor can be asked again.
    fn negotiate_features(&self, wanted: Features, also: u64) -> Result<Features, UffdError> {
        let bits = |features: Features| {
            let moves = if features.can_move() { FEATURE_MOVE } else { 0 };
            let poisons = if features.can_poison() { FEATURE_POISON } else { 0 };
            FEATURES | also | moves | poisons
        };
        let from = Features::ALL.iter().position(|each| *each == wanted).unwrap_or(0);
        for features in &Features::ALL[from..] {
            let mut api = UffdApi { api: API, features: bits(*features), ioctls: 0 };
            match self.control::<{ number::<UffdApi>(0x3F) }, _>(&mut api) {
                Ok(()) => return Ok(*features),
                Err(Errno::INVAL) => {}
                // Other errors are of features that need rights over other processes; none of ours
                // do.
                Err(error) => return Err(UffdError::System(error.into())),
            }
        }
        Err(UffdError::TooOld)
    }

    /// Returns the features in use.
    pub fn features(&self) -> Features {
        self.features
    }

    /// Replaces the parent's descriptor by one of the child's own under the same number, in the
    /// child of a fork.
    pub fn renew(&self, user_mode_only: bool, serving: Serving) -> io::Result<()> {
        let opened = Uffd::open(user_mode_only, serving, self.features);
        let (Uffd { fd: fresh, .. }, _) = opened.map_err(io::Error::other)?;
        replace_file(fresh, &self.fd)
    }

    fn control<const NUMBER: ioctl::Opcode, T>(&self, argument: &mut T) -> Result<(), Errno> {
        // SAFETY: each number in this file is paired with the structure that the kernel's header
        // gives it (asserted above where they share one), and the structures are plain integers. The
        // addresses in them are those of this crate's own mappings (`PageSpan`), registered with this
        // descriptor, so that the kernel fills, takes or drops only whole pages of theirs.
        unsafe { ioctl::ioctl(&self.fd, Updater::<NUMBER, T>::new(argument)) }
    }

    /// Registers a mapping: this descriptor reports missing pages, and writes to protected ones.
    pub fn register_paged(&self, at: PageSpan<'_>) -> Result<(), Errno> {
        self.register(at, MODE_MISSING | MODE_WP)
    }

    /// Registers a mapping as a target of moves. The kernel serves its missing pages: they read as
    /// zeros.
    pub fn register_target(&self, pages: &Pages) -> Result<(), Errno> {
        self.register(pages.all(), MODE_WP)
    }

    fn register(&self, at: PageSpan<'_>, mode: u64) -> Result<(), Errno> {
        let mut register = UffdRegister { range: range(at), mode, ioctls: 0 };
        self.control::<{ number::<UffdRegister>(0) }, _>(&mut register)
    }

    /// Blocks until threads wait for pages. Returns the number of faults written.
    pub fn wait(&self, faults: &mut [Fault; FAULTS_MAX]) -> io::Result<usize> {
        let mut messages = [UffdMessage::default(); FAULTS_MAX];
        // SAFETY: messages are plain integers, for which any bytes are valid; the slice covers
        // exactly the array.
        let bytes = unsafe {
            std::slice::from_raw_parts_mut(
                messages.as_mut_ptr().cast::<u8>(),
                size_of_val(&messages),
            )
        };
        let read = rustix::io::read(&self.fd, bytes)? / size_of::<UffdMessage>();
        let page_faults = messages[..read].iter().filter(|m| m.event == EVENT_PAGEFAULT);
        let mut count = 0;
        for (fault, message) in faults.iter_mut().zip(page_faults) {
            let is_write = message.flags & FLAG_WRITE != 0;
            let is_protected = message.flags & FLAG_WP != 0;
            let (address, thread) = (message.address, message.thread);
            *fault = Fault { address, is_write, is_protected, thread };
            count += 1;
        }
        Ok(count)
    }

    /// Returns true if threads wait for pages, now or within this time.
    pub fn poll(&self, nanoseconds: i64) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let time = Timespec { tv_sec: 0, tv_nsec: nanoseconds };
        poll(&mut [PollFd::new(&self.fd, PollFlags::IN)], Some(&time)).is_ok_and(|ready| ready > 0)
    }

    /// Fills missing pages with these bytes and wakes the threads that wait. Present pages keep
    /// theirs.
    pub fn copy(&self, to: PageSpan<'_>, bytes: &[u8]) -> Result<(), Errno> {
        self.fill(to, bytes, 0)
    }

    /// Does the same as `copy`, but wakes no thread.
    pub fn copy_without_wake(&self, to: PageSpan<'_>, bytes: &[u8]) -> Result<(), Errno> {
        self.fill(to, bytes, DONT_WAKE)
    }

    fn fill(&self, to: PageSpan<'_>, bytes: &[u8], mode: u64) -> Result<(), Errno> {
        let len = to.bytes().min(bytes.len()) as u64;
        let (start, src) = (to.address(), bytes.as_ptr() as u64);
        self.refuse_for_a_test()?;
        each_part(start, len, |at, len| {
            let src = src + (at - start);
            let mut transfer = UffdTransfer { dst: at, src, len, mode, done: 0 };
            let result = self.control::<{ number::<UffdTransfer>(3) }, _>(&mut transfer);
            (result, transfer.done)
        })?;
        Ok(())
    }

    /// Fills missing pages with zeros and wakes the threads that wait. Returns how many were
    /// missing.
    pub fn zero(&self, to: PageSpan<'_>) -> Result<usize, Errno> {
        let UffdRange { start, len } = range(to);
        self.refuse_for_a_test()?;
        each_part(start, len, |start, len| {
            let mut place = UffdFill { range: UffdRange { start, len }, mode: 0, done: 0 };
            let result = self.control::<{ number::<UffdFill>(4) }, _>(&mut place);
            (result, place.done)
        })
    }

    /// Fails with ENOMEM if a test asks for it.
    fn refuse_for_a_test(&self) -> Result<(), Errno> {
        #[cfg(test)]
        {
            use std::sync::atomic::Ordering::Relaxed;
            let left = |left: usize| left.checked_sub(1);
            if self.refusals.fetch_update(Relaxed, Relaxed, left).is_ok() {
                return Err(Errno::NOMEM);
            }
        }
        Ok(())
    }

    /// Moves pages, not their bytes, to where none are. Holes stay holes; no thread is woken. Stops
    /// at a page that is shared, pinned or locked. Returns the number of pages (and holes) that are
    /// done, and the error that stopped it.
    ///
    /// `UFFDIO_MOVE_MODE_ALLOW_SRC_HOLES` is never used. With it, Linux 6.18 loops for ever at a
    /// hole that it finds on a retry, such as a page that the program drops meanwhile. Without it,
    /// the kernel stops at a hole (ENOENT). It then also fails to count a page that it has moved:
    /// it returns EEXIST, because the page exists at its target.
    pub fn move_pages(&self, to: PageSpan<'_>, from: PageSpan<'_>) -> (usize, Option<Errno>) {
        let len = to.bytes().min(from.bytes()) as u64;
        let (mut moved, mut retries) = (0, 0);
        if let Err(refused) = self.refuse_for_a_test() {
            return (0, Some(refused));
        }
        while moved < len {
            let mut transfer = UffdTransfer {
                dst: to.address() + moved,
                src: from.address() + moved,
                len: len - moved,
                mode: DONT_WAKE,
                done: 0,
            };
            let result = self.control::<{ number::<UffdTransfer>(5) }, _>(&mut transfer);
            moved += transfer.done.max(0) as u64;
            match result {
                Err(Errno::AGAIN) if transfer.done > 0 || retries < 100 => retries += 1,
                Err(Errno::EXIST | Errno::NOENT)
                    if from.is_missing(moved as usize / PAGE_BYTES) =>
                {
                    moved += PAGE_BYTES as u64;
                }
                Err(stopped) => return (moved as usize / PAGE_BYTES, Some(stopped)),
                Ok(()) => {}
            }
        }
        (moved as usize / PAGE_BYTES, None)
    }

    /// Makes writes to the present pages wait, from the return of this call on. Otherwise lets
    /// writes pass again, and wakes the threads that wait.
    pub fn protect(&self, at: PageSpan<'_>, is_protected: bool) -> Result<(), Errno> {
        let mode = if is_protected { PROTECT } else { 0 };
        let mut protect = UffdProtect { range: range(at), mode };
        self.control::<{ number::<UffdProtect>(6) }, _>(&mut protect)
    }

    /// Wakes the threads that wait for these pages. They fault again if their page is missing.
    pub fn wake(&self, at: PageSpan<'_>) {
        let mut range = range(at);
        const WAKE: ioctl::Opcode = opcode::read::<UffdRange>(GROUP, 2);
        // A wake of a registered range cannot fail.
        let _ = self.control::<WAKE, _>(&mut range);
    }

    /// Makes accesses to a missing page get SIGBUS. Wakes no thread. A page that is present, or no
    /// longer paged, stays as it is.
    ///
    /// On kernels without poison, an empty file is mapped in place of the page. That takes a
    /// mapping, and a process has few (`vm.max_map_count`). Mappings of neighbours are merged.
    pub fn poison(&self, at: PageSpan<'_>) -> Result<(), Errno> {
        if let Some(empty_file) = &self.empty_file {
            return if self.is_paged(at) { empty_file.replace(at) } else { Ok(()) };
        }
        loop {
            let mut place = UffdFill { range: range(at), mode: 0, done: 0 };
            match self.control::<{ number::<UffdFill>(8) }, _>(&mut place) {
                Ok(()) | Err(Errno::EXIST | Errno::NOENT | Errno::SRCH) => return Ok(()),
                // The mappings of the process are changing at this moment.
                Err(Errno::AGAIN) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Makes poisoned memory read as zeros again; its faults are served as before.
    pub fn unpoison(&self, at: PageSpan<'_>) -> Result<(), Errno> {
        if self.empty_file.is_some() && !self.is_paged(at) {
            at.map_zeros()?;
            self.register(at, MODE_MISSING | MODE_WP)?;
        }
        // Drops the poison, and bytes that were written between the two calls.
        at.advise(Advice::LinuxDontNeed)
    }

    /// Returns true if this descriptor gets the faults of these pages.
    fn is_paged(&self, at: PageSpan<'_>) -> bool {
        // Present pages stay writable, and waiting threads go on waiting. A kernel without poison
        // cannot move pages either, so all paged memory is registered for write protection.
        let mut protect = UffdProtect { range: range(at), mode: PROTECT_DONT_WAKE };
        self.control::<{ number::<UffdProtect>(6) }, _>(&mut protect).is_ok()
    }
}

/// Calls an ioctl until a whole range is done, and skips pages that are present already. Returns
/// how many pages it did.
fn each_part(
    start: u64,
    len: u64,
    mut call: impl FnMut(u64, u64) -> (Result<(), Errno>, i64),
) -> Result<usize, Errno> {
    let (mut at, end, mut pages) = (start, start + len, 0);
    while at < end {
        let (result, done) = call(at, end - at);
        let done = done.max(0) as u64;
        pages += done as usize / PAGE_BYTES;
        at += done;
        match result {
            Ok(()) => {}
            Err(Errno::EXIST) => at += PAGE_BYTES as u64,
            Err(Errno::AGAIN) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(pages)
}

fn range(span: PageSpan<'_>) -> UffdRange {
    UffdRange { start: span.address(), len: span.bytes() as u64 }
}

fn open_device() -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let device = rustix::fs::open(DEVICE, flags, Mode::empty())?;
    NewFd { flags: OFlags::CLOEXEC.bits() }.on(device)
}

/// `USERFAULTFD_IOC_NEW`: its argument is a number, its result a descriptor.
struct NewFd {
    flags: u32,
}

impl NewFd {
    fn on(self, device: impl AsFd) -> io::Result<OwnedFd> {
        // SAFETY: the ioctl takes flags by value and touches no memory; see the trait below.
        Ok(unsafe { ioctl::ioctl(device, self) }?)
    }
}

// SAFETY: the number is USERFAULTFD_IOC_NEW; the pointer is the flags as a number, which the kernel
// does not follow; a successful result is a new descriptor that nobody else owns.
unsafe impl ioctl::Ioctl for NewFd {
    type Output = OwnedFd;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> ioctl::Opcode {
        opcode::none(GROUP, 0)
    }

    fn as_ptr(&mut self) -> *mut std::ffi::c_void {
        std::ptr::without_provenance_mut(self.flags as usize)
    }

    unsafe fn output_from_ptr(
        out: ioctl::IoctlOutput,
        _: *mut std::ffi::c_void,
    ) -> rustix::io::Result<OwnedFd> {
        use std::os::fd::FromRawFd;
        // SAFETY: as above: fresh and ours.
        Ok(unsafe { OwnedFd::from_raw_fd(out) })
    }
}

fn open_call(flags: u32) -> io::Result<OwnedFd> {
    use rustix::mm::{UserfaultfdFlags, userfaultfd};
    let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::from_bits_retain(flags);
    // SAFETY: a new descriptor changes no memory until something is registered with it.
    Ok(unsafe { userfaultfd(flags) }?)
}

#[cfg(test)]
mod tests;
