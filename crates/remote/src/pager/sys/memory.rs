//! The pager's mappings: the paged region, the staging area and the pager's tables.
//!
//! They come from raw system calls, never from an allocator. The pager must work inside a program
//! whose allocator lives in paged memory.

use super::{move_to_high_number, replace_file};
use crate::page::PAGE_BYTES;
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{self, Advice, MapFlags, ProtFlags};
use std::io;
use std::ops::Deref;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64};

/// An owned private anonymous mapping, in whole pages.
#[derive(Debug)]
pub struct Pages {
    start: NonNull<u8>,
    count: usize,
}

// SAFETY: the mapping is owned memory, not tied to a thread.
unsafe impl Send for Pages {}
// SAFETY: shared access only yields addresses for the kernel, and `Pages::bytes`, whose rule is
// stated there.
unsafe impl Sync for Pages {}

impl Pages {
    /// Maps this many pages, none of them present, without reserving memory for them.
    pub fn reserve(count: usize) -> io::Result<Pages> {
        Pages::reserve_aligned(count, 1)
    }

    /// Maps pages as [`Self::reserve`] does, the first at a multiple of `align` pages.
    pub fn reserve_aligned(count: usize, align: usize) -> io::Result<Pages> {
        let more = align - 1;
        let len = count.checked_add(more).and_then(|pages| pages.checked_mul(PAGE_BYTES));
        let len = len.filter(|_| count > 0).ok_or(io::ErrorKind::OutOfMemory)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let start = unsafe { mm::mmap_anonymous(ptr::null_mut(), len, protection, flags) }?;
        let before = start.addr().next_multiple_of(align * PAGE_BYTES) - start.addr();
        let end = before + count * PAGE_BYTES;
        for (from, len) in [(0, before), (end, len - end)] {
            if len > 0 {
                // SAFETY: the part of that mapping on one side of these pages, which nothing uses.
                unsafe { mm::munmap(start.byte_add(from), len) }?;
            }
        }
        // SAFETY: inside that mapping.
        let start = NonNull::new(unsafe { start.byte_add(before) }.cast());
        let pages = Pages { start: start.ok_or(io::ErrorKind::OutOfMemory)?, count };
        // Pages are moved and dropped one by one. A kernel without huge pages refuses the advice,
        // which is harmless.
        let _ = pages.all().advise(Advice::LinuxNoHugepage);
        Ok(pages)
    }

    /// Returns the address of the first byte.
    pub fn address(&self) -> u64 {
        self.start.as_ptr() as u64
    }

    /// Returns a pointer to the first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Returns the whole mapping.
    pub fn all(&self) -> PageSpan<'_> {
        self.span(0, self.count)
    }

    /// Returns some pages of the mapping.
    ///
    /// # Panics
    /// If they are not inside.
    pub fn span(&self, first: usize, count: usize) -> PageSpan<'_> {
        assert!(first.checked_add(count).is_some_and(|end| end <= self.count));
        PageSpan { pages: self, first, count }
    }

    /// Returns the number of the page at an address, if it is inside.
    pub fn page_at(&self, address: u64) -> Option<usize> {
        let page = usize::try_from(address.checked_sub(self.address())?).ok()? / PAGE_BYTES;
        (page < self.count).then_some(page)
    }

    /// Returns the bytes of some pages, for the only holder of the mapping.
    ///
    /// # Panics
    /// If they are not inside.
    pub fn bytes_mut(&mut self, first: usize, count: usize) -> &mut [u8] {
        let span = self.span(first, count);
        // SAFETY: inside this live, writable mapping, to which `self` is the only path.
        unsafe { std::slice::from_raw_parts_mut(span.address() as *mut u8, span.bytes()) }
    }

    /// Returns the bytes of some pages.
    ///
    /// For mappings that only the kernel fills and empties, page by page: the pager's states say
    /// which pages stay put, and it reads no others.
    ///
    /// # Panics
    /// If they are not inside.
    pub(in crate::pager) fn bytes(&self, first: usize, count: usize) -> &[u8] {
        let span = self.span(first, count);
        // SAFETY: inside this live, readable mapping. No Rust code writes to it while it is shared;
        // pages that the pager is reading are neither moved nor dropped (see above), so the bytes
        // behind the reference do not change.
        unsafe { std::slice::from_raw_parts(span.address() as *const u8, span.bytes()) }
    }

    /// Reads a byte of a page, so that a missing page faults.
    ///
    /// # Panics
    /// If it is not inside.
    pub fn touch(&self, page: usize) {
        let at = self.span(page, 1).address() as *const u8;
        // SAFETY: inside this live, readable mapping; volatile, as another may write to it.
        unsafe { at.read_volatile() };
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped by `reserve`, and no reference is left. After an error, the mapping stays
        // until the process ends.
        let _ = unsafe { mm::munmap(self.start.as_ptr().cast(), self.count * PAGE_BYTES) };
    }
}

/// Some pages of a mapping.
#[derive(Debug, Clone, Copy)]
pub struct PageSpan<'a> {
    pages: &'a Pages,
    first: usize,
    count: usize,
}

impl PageSpan<'_> {
    /// Returns the address of the first byte.
    pub fn address(self) -> u64 {
        self.pages.address() + (self.first * PAGE_BYTES) as u64
    }

    /// Returns the number of bytes.
    pub fn bytes(self) -> usize {
        self.count * PAGE_BYTES
    }

    /// Returns true if a page is not in memory; false if that is unknown.
    pub fn is_missing(self, page: usize) -> bool {
        let mut present = 1u8;
        let at = self.address() + (page * PAGE_BYTES) as u64;
        // SAFETY: mincore(2) of one page writes one byte, ours; it reads no memory.
        let result = unsafe { libc::mincore(at as *mut _, PAGE_BYTES, &mut present) };
        result == 0 && present & 1 == 0
    }

    /// Calls madvise(2). Only the pager gives advice that drops pages.
    pub(in crate::pager) fn advise(self, advice: Advice) -> Result<(), Errno> {
        // SAFETY: inside a live mapping of the pager. Advice leaves the mapping in place. Pages are
        // dropped only where the pager's states show that no thread reads them.
        unsafe { mm::madvise(self.address() as *mut _, self.bytes(), advice) }
    }
}

impl PageSpan<'_> {
    /// Maps zeros in place of the current mapping, as [`Pages::reserve`] does, but not inherited by
    /// a fork.
    pub(in crate::pager) fn map_zeros(self) -> Result<(), Errno> {
        let (at, protection) = (self.address() as *mut _, ProtFlags::READ | ProtFlags::WRITE);
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: replaces whole pages inside a mapping of the pager, whose owner still unmaps it.
        // The pager's states show that no thread relies on their bytes.
        unsafe { mm::mmap_anonymous(at, self.bytes(), protection, flags) }?;
        let _ = self.advise(Advice::LinuxNoHugepage);
        self.advise(Advice::LinuxDontFork)
    }
}

/// An empty file. An access to a page behind its end gets SIGBUS.
#[derive(Debug)]
pub struct EmptyFile(OwnedFd);

impl EmptyFile {
    /// Creates an empty file in memory (memfd_create(2)).
    pub fn open() -> io::Result<EmptyFile> {
        let file = rustix::fs::memfd_create("pagetax-lost", rustix::fs::MemfdFlags::CLOEXEC)?;
        Ok(EmptyFile(move_to_high_number(file)))
    }

    /// Maps it in place of these pages. The kernel merges the mappings of neighbours, because their
    /// file offsets are adjacent.
    pub(in crate::pager) fn replace(&self, at: PageSpan<'_>) -> Result<(), Errno> {
        let (address, offset) = (at.address() as *mut _, (at.first * PAGE_BYTES) as u64);
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: replaces whole pages inside a mapping of the pager, whose owner still unmaps it.
        // The pager's states show that no thread relies on their bytes.
        unsafe { mm::mmap(address, at.bytes(), protection, flags, &self.0, offset) }?;
        at.advise(Advice::LinuxDontFork)
    }
}

fn part_of(span: PageSpan<'_>) -> libc::iovec {
    libc::iovec { iov_base: span.address() as *mut libc::c_void, iov_len: span.bytes() }
}

/// Drops pages with one call. Returns true if all are dropped. After a partial failure, the caller
/// may drop them one by one, even those that are dropped already.
pub(in crate::pager) fn drop_all(spans: &[PageSpan<'_>]) -> bool {
    /// `PIDFD_SELF_THREAD` of `linux/pidfd.h`: the calling thread.
    const CALLER: libc::c_int = -10_000;
    let parts: Vec<libc::iovec> = spans.iter().copied().map(part_of).collect();
    // SAFETY: reads the parts, and drops whole pages inside live mappings of the pager. Only the
    // pager calls this, where its states show that no thread reads the pages.
    let dropped = unsafe {
        let (number, advice) = (libc::SYS_process_madvise, libc::MADV_DONTNEED);
        libc::syscall(number, CALLER, parts.as_ptr(), parts.len(), advice, 0)
    };
    usize::try_from(dropped) == Ok(spans.iter().map(|span| span.bytes()).sum())
}

/// This process's memory as a file. A read of it fails at a missing page instead of waiting, when
/// no thread may be there to fetch it.
#[derive(Debug)]
pub struct OwnMemory {
    /// A handle on /proc, which a process no longer finds after it has changed its root directory.
    proc: OwnedFd,
    file: OwnedFd,
}

impl OwnMemory {
    /// Opens the calling process's memory.
    pub fn open() -> io::Result<OwnMemory> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let proc = move_to_high_number(rustix::fs::open("/proc", flags, Mode::empty())?);
        Ok(OwnMemory { file: Self::file_in(&proc)?, proc })
    }

    /// Replaces the parent's memory under the same descriptor by the child's, in the child of a
    /// fork.
    pub fn renew(&self) -> io::Result<()> {
        // A child with a descriptor table of its own does not have the parent's /proc.
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let anew = || Self::file_in(&rustix::fs::open("/proc", flags, Mode::empty())?);
        replace_file(Self::file_in(&self.proc).or_else(|_| anew())?, &self.file)
    }

    fn file_in(proc: &OwnedFd) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        Ok(move_to_high_number(rustix::fs::openat(proc, "self/mem", flags, Mode::empty())?))
    }

    /// Copies pages of the program, which may be writing to them, to as many pages of the pager
    /// that no thread reads yet. Returns the number of pages, fewer if one is missing or may not be
    /// read. The kernel copies, so a concurrent change of the mapping cannot make the pager fault.
    pub(in crate::pager) fn copy(&self, to: PageSpan<'_>, from: PageSpan<'_>) -> usize {
        let len = to.bytes().min(from.bytes());
        // SAFETY: reads and writes whole pages inside live mappings of the pager, and fails where
        // that is not allowed. The caller promises that no reference to the target exists.
        let copied = unsafe {
            let into = to.address() as *mut libc::c_void;
            libc::pread64(self.file.as_raw_fd(), into, len, from.address() as i64)
        };
        usize::try_from(copied).unwrap_or(0) / PAGE_BYTES
    }
}

/// Types for which a page of zeros is an array of valid values.
///
/// # Safety
/// All-zero bytes must be a valid value, and shared access must be safe from any thread.
pub unsafe trait Zeroed: Sync {}

// SAFETY: an atomic zero.
unsafe impl Zeroed for AtomicU32 {}
// SAFETY: an atomic zero.
unsafe impl Zeroed for AtomicU64 {}

/// A table of zeros that takes memory only where it is written to.
#[derive(Debug)]
pub struct ZeroedTable<T> {
    pages: Pages,
    len: usize,
    entries: std::marker::PhantomData<T>,
}

impl<T: Zeroed> ZeroedTable<T> {
    /// Creates a table with this many entries.
    pub fn new(len: usize) -> io::Result<ZeroedTable<T>> {
        let bytes = len.checked_mul(size_of::<T>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let pages = Pages::reserve(bytes.div_ceil(PAGE_BYTES).max(1))?;
        Ok(ZeroedTable { pages, len, entries: std::marker::PhantomData })
    }

    /// Prefetches an entry into the CPU's cache, without waiting for it.
    pub fn prefetch(&self, index: usize) {
        let entry: *const T = &self[index];
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch changes nothing, and cannot fault.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(entry.cast());
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = entry;
    }
}

impl<T: Zeroed> Deref for ZeroedTable<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the mapping is page-aligned, at least `len` entries long, and begins as zeros,
        // which are valid entries; they are changed only through `&T`.
        unsafe { std::slice::from_raw_parts(self.pages.as_ptr().cast(), self.len) }
    }
}
