//! Owned mappings: mapped, advised, locked, accessed, and unmapped on drop.
//!
//! Invariant: accesses are volatile, aligned and checked against the length. So the compiler removes
//! none of them, and none of them leaves the mapping.

use super::place::AddressPlace;
use pagetax_core::network_memory::NetworkRegion;
use rustix::mm::{self, MapFlags, ProtFlags};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

/// The backing of a mapping.
#[derive(Debug, Clone, Copy)]
pub enum Source<'a> {
    /// Private anonymous memory.
    Anon,
    /// Anonymous memory that forked children share.
    Shared,
    /// A file, from its first byte.
    File {
        /// A file that is at least as long as the mapping.
        file: &'a File,
        /// True if writes do not reach the file (MAP_PRIVATE).
        private: bool,
        /// True if stores are allowed. mlock(2) copies each private page that is writable.
        writable: bool,
    },
}

/// The arguments of mmap(2) for a mapping.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// The memory or file behind the mapping.
    pub source: Source<'a>,
    /// The length in bytes; it is rounded up to whole pages.
    pub len: usize,
    /// The alignment of the address, a power of two. Smaller ones mean the base page.
    pub align: usize,
    /// The page size of the hugetlb pool to take from. A file must be a memfd of the same page size.
    pub hugetlb: Option<usize>,
}

/// An owned mapping.
#[derive(Debug)]
pub struct OwnedMapping {
    start: NonNull<u8>,
    len: usize,
    /// The pager of network memory, which unmaps the range when its last owner drops it.
    pager: Option<Arc<dyn NetworkRegion>>,
    /// The reserved range that the mapping is in, and that stays reserved after it.
    place: Option<Arc<AddressPlace>>,
}

// SAFETY: the mapping is owned memory. Only this module's methods access it, as volatile words, and
// nothing in it depends on a thread.
unsafe impl Send for OwnedMapping {}
// SAFETY: on every 64-bit target that this crate supports, a volatile access of an aligned u64 is one
// instruction. No method returns a reference into the memory. So a thread that races reads an old word
// or a new one, and jobs race on purpose.
unsafe impl Sync for OwnedMapping {}

impl OwnedMapping {
    /// Maps memory or a file as requested.
    ///
    /// # Errors
    /// Fails as mmap(2) does.
    pub fn new(request: Request<'_>) -> io::Result<OwnedMapping> {
        let base = rustix::param::page_size();
        let align = request.align.max(base);
        let len = request
            .len
            .max(1)
            .checked_next_multiple_of(request.hugetlb.unwrap_or(base))
            .ok_or(io::ErrorKind::OutOfMemory)?;
        // The kernel aligns hugetlb mappings. Others are mapped too long and trimmed.
        let slack = if request.hugetlb.is_some() { 0 } else { align - base };
        let wide = len.checked_add(slack).ok_or(io::ErrorKind::OutOfMemory)?;
        if slack == 0 {
            let start = map_at(ptr::null_mut(), len, &request)?;
            return Ok(OwnedMapping { start, len, pager: None, place: None });
        }
        let room = map_at(ptr::null_mut(), wide, &Request { source: Source::Anon, ..request })?;
        let lead = room.as_ptr().align_offset(align);
        // SAFETY: lead ≤ align - base = slack, so the aligned range lies inside the fresh reservation.
        // Nothing else refers to it, and MAP_FIXED replaces exactly that part of it.
        let start = unsafe { map_at(room.as_ptr().add(lead), len, &request) };
        unmap(room.as_ptr(), lead);
        unmap(room.as_ptr().wrapping_add(lead + len), slack - lead);
        match start {
            Ok(start) => Ok(OwnedMapping { start, len, pager: None, place: None }),
            Err(error) => {
                unmap(room.as_ptr().wrapping_add(lead), len);
                Err(error)
            }
        }
    }

    /// Maps memory or a file at a reserved place, by MAP_FIXED.
    ///
    /// # Errors
    /// Fails as mmap(2) does, or if another mapping is there.
    pub fn new_in(request: Request<'_>, place: &Arc<AddressPlace>) -> io::Result<OwnedMapping> {
        let page = request.hugetlb.unwrap_or(rustix::param::page_size());
        let len = request.len.max(1).checked_next_multiple_of(page);
        let len = len.ok_or(io::ErrorKind::OutOfMemory)?;
        let start = place.take(len)?;
        match map_at(start.as_ptr(), len, &request) {
            Ok(start) => Ok(OwnedMapping { start, len, pager: None, place: Some(place.clone()) }),
            Err(error) => {
                place.give_back();
                Err(error)
            }
        }
    }

    /// Wraps network memory, which a pager in this process serves.
    pub fn of_pager(pager: Arc<dyn NetworkRegion>) -> OwnedMapping {
        // The safety contract of `NetworkRegion` makes this range ours until the pager is dropped.
        OwnedMapping { start: pager.start(), len: pager.bytes(), pager: Some(pager), place: None }
    }

    /// Returns the first address.
    pub fn address(&self) -> u64 {
        self.start.as_ptr() as u64
    }

    /// Returns the length in bytes, a multiple of the page size.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns false: a mapping has at least one page. (Clippy asks for it beside `len`.)
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Calls madvise(2) for the whole mapping. `advice` is a `MADV_` value that keeps the mapping.
    pub fn advise(&self, advice: i32) -> io::Result<()> {
        // SAFETY: the range is exactly this mapping. Advice may drop or move its pages, which changes
        // only what later volatile loads return; no reference into the memory exists.
        check(unsafe { libc::madvise(self.start.as_ptr().cast(), self.len, advice) })
    }

    /// Calls madvise(2) for `len` bytes at `offset`, or fewer if the mapping ends before.
    pub fn advise_range(&self, offset: usize, len: usize, advice: i32) -> io::Result<()> {
        let offset = offset.min(self.len);
        let len = len.min(self.len - offset);
        // SAFETY: the range lies inside this mapping; for the rest see `advise`.
        check(unsafe { libc::madvise(self.start.as_ptr().add(offset).cast(), len, advice) })
    }

    /// Has a pipe hold the page at `offset` (vmsplice(2)): it can be neither moved nor freed before the pipe.
    pub fn hold_page(&self, offset: usize, pipe: BorrowedFd<'_>) -> io::Result<()> {
        let page = rustix::param::page_size();
        let whole = offset.checked_add(page).is_some_and(|end| end <= self.len);
        let range = whole.then(|| libc::iovec {
            iov_base: self.start.as_ptr().wrapping_add(offset).cast(),
            iov_len: page,
        });
        let range = range.ok_or(io::ErrorKind::InvalidInput)?;
        let flags = libc::SPLICE_F_NONBLOCK;
        // SAFETY: the range is a page of this mapping, which the pipe only reads.
        let held = unsafe { libc::vmsplice(pipe.as_raw_fd(), &range, 1, flags) };
        check(if held == page as isize { 0 } else { -1 })
    }

    /// Populates `len` bytes at `offset` for reading, or fewer if the mapping ends before.
    pub fn populate(&self, offset: usize, len: usize) -> io::Result<()> {
        let offset = offset.min(self.len);
        let len = len.min(self.len - offset);
        // SAFETY: the range lies inside this mapping; the advice does not change its content.
        check(unsafe {
            libc::madvise(self.start.as_ptr().add(offset).cast(), len, libc::MADV_POPULATE_READ)
        })
    }

    /// Locks `len` bytes at `offset` with mlock(2), or fewer if the mapping ends before.
    pub fn lock(&self, offset: usize, len: usize) -> io::Result<()> {
        let offset = offset.min(self.len);
        let len = len.min(self.len - offset);
        // SAFETY: the range lies inside this mapping; locking does not change its content.
        Ok(unsafe { mm::mlock(self.start.as_ptr().add(offset).cast(), len) }?)
    }

    /// Locks `len` bytes at `offset` with mlock2(2), without their pages: each is locked when it is touched.
    pub fn lock_on_fault(&self, offset: usize, len: usize) -> io::Result<()> {
        let offset = offset.min(self.len);
        let len = len.min(self.len - offset);
        let flags = mm::MlockFlags::ONFAULT;
        // SAFETY: the range lies inside this mapping; locking does not change its content.
        Ok(unsafe { mm::mlock_with(self.start.as_ptr().add(offset).cast(), len, flags) }?)
    }

    /// Unlocks the whole mapping with munlock(2).
    pub fn unlock(&self) -> io::Result<()> {
        // SAFETY: the range is exactly this mapping; unlocking does not change its content.
        Ok(unsafe { mm::munlock(self.start.as_ptr().cast(), self.len) }?)
    }

    /// Returns one byte for each base page, whose bit 0 means resident (mincore(2)).
    pub fn resident_pages(&self) -> io::Result<Vec<u8>> {
        let mut pages = vec![0; self.len.div_ceil(rustix::param::page_size())];
        // SAFETY: the range is this mapping and the vector has one byte for each of its pages.
        check(unsafe { libc::mincore(self.start.as_ptr().cast(), self.len, pages.as_mut_ptr()) })?;
        Ok(pages)
    }

    /// Returns true if the base page at `offset` is resident (mincore(2)).
    pub fn is_resident(&self, offset: usize) -> io::Result<bool> {
        let page = rustix::param::page_size();
        let offset = offset.min(self.len - page) / page * page;
        let mut resident = 0;
        // SAFETY: the range is a page of this mapping, and one byte is all that is written.
        check(unsafe {
            libc::mincore(self.start.as_ptr().add(offset).cast(), page, &mut resident)
        })?;
        Ok(resident & 1 == 1)
    }

    /// Returns the aligned word at `offset`, or none if `bytes` bytes from there leave the mapping.
    #[inline(always)]
    fn word(&self, offset: u64, bytes: u64) -> Option<*mut u64> {
        let end = offset.checked_add(bytes)?;
        // SAFETY: offset + bytes ≤ len, so the pointer stays inside this mapping.
        (end <= self.len as u64)
            .then(|| unsafe { self.start.as_ptr().add(offset as usize & !7) }.cast())
    }

    /// Loads the word at `offset`, rounded down to 8.
    ///
    /// # Panics
    /// If the word is not inside the mapping.
    #[inline(always)]
    pub fn load(&self, offset: u64) -> u64 {
        let word = self.word(offset, 8).expect("an access inside the mapping");
        // SAFETY: `word` is aligned (the mapping is page-aligned) and inside this readable mapping.
        unsafe { word.read_volatile() }
    }

    /// Stores a word at `offset`, rounded down to 8.
    ///
    /// # Panics
    /// If the word is not inside the mapping. A mapping that is not writable ends the process.
    #[inline(always)]
    pub fn store(&self, offset: u64, value: u64) {
        let word = self.word(offset, 8).expect("an access inside the mapping");
        // SAFETY: `word` is aligned (the mapping is page-aligned) and inside this mapping. If it is not
        // writable, the store faults and changes nothing.
        unsafe { word.write_volatile(value) }
    }

    /// Stores `value` to each of `bytes` bytes at `offset`, rounded down to 8, as memset(3) does.
    ///
    /// # Panics
    /// If the range is not inside the mapping. A mapping that is not writable ends the process.
    pub fn set(&self, offset: u64, bytes: u64, value: u8) {
        let first = self.word(offset, bytes).expect("a range inside the mapping");
        // SAFETY: the whole range was checked, and no reference into the memory exists.
        unsafe { first.cast::<u8>().write_bytes(value, bytes as usize) }
    }

    /// Calls `visit` with the offset and the place of each whole word of `bytes` bytes at `offset`. Checks
    /// the range once, and stops at the first error.
    ///
    /// # Panics
    /// If the range is not inside the mapping.
    #[inline(always)]
    pub fn each_word<E>(
        &self,
        offset: u64,
        bytes: u64,
        mut visit: impl FnMut(u64, Word) -> Result<(), E>,
    ) -> Result<(), E> {
        let first = self.word(offset, bytes).expect("an access inside the mapping");
        for index in 0..bytes / 8 {
            // SAFETY: index × 8 + 8 ≤ bytes, and the whole range was checked above.
            visit((offset & !7) + index * 8, Word(unsafe { first.add(index as usize) }))?;
        }
        Ok(())
    }
}

/// A word of a mapping, valid during one visit.
pub struct Word(*mut u64);

impl Word {
    /// Loads the word, as a volatile access.
    #[inline(always)]
    pub fn load(&self) -> u64 {
        // SAFETY: `each_word` made it from a checked range, and lends it while it borrows the mapping.
        unsafe { self.0.read_volatile() }
    }

    /// Stores the word, as a volatile access.
    #[inline(always)]
    pub fn store(&self, value: u64) {
        // SAFETY: as in `load`; a store to a mapping that is not writable faults and changes nothing.
        unsafe { self.0.write_volatile(value) }
    }
}

impl Drop for OwnedMapping {
    fn drop(&mut self) {
        match (&self.pager, &self.place) {
            (Some(_), _) => {}
            (None, Some(place)) => place.give_back(),
            (None, None) => unmap(self.start.as_ptr(), self.len),
        }
    }
}

/// Converts the result of a C call: -1 is the error in errno.
pub(super) fn check(result: i32) -> io::Result<()> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Maps at `place`, which the caller must own, or anywhere if it is null.
fn map_at(place: *mut u8, len: usize, request: &Request<'_>) -> io::Result<NonNull<u8>> {
    let mut flags = match request.source {
        Source::Anon | Source::File { private: true, .. } => MapFlags::PRIVATE,
        Source::Shared | Source::File { private: false, .. } => MapFlags::SHARED,
    };
    if !place.is_null() {
        flags |= MapFlags::FIXED;
    }
    let mut protection = ProtFlags::READ;
    let read_only = matches!(request.source, Source::File { writable: false, .. });
    protection.set(ProtFlags::WRITE, !read_only);
    let start = match request.source {
        Source::File { file, .. } => {
            // SAFETY: a fresh mapping at null; at a place, the caller owns that range.
            unsafe { mm::mmap(place.cast(), len, protection, flags, file, 0) }?
        }
        Source::Anon | Source::Shared => {
            if let Some(size) = request.hugetlb {
                flags |= MapFlags::HUGETLB
                    | MapFlags::from_bits_retain(size.trailing_zeros() << libc::MAP_HUGE_SHIFT);
            }
            // SAFETY: a fresh mapping at null; at a place, the caller owns that range.
            unsafe { mm::mmap_anonymous(place.cast(), len, protection, flags) }?
        }
    };
    NonNull::new(start.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

/// Unmaps a range that its caller owns.
pub(super) fn unmap(start: *mut u8, len: usize) {
    if len > 0 {
        // SAFETY: callers pass only ranges that this module mapped and no longer uses. The range is valid,
        // so an error leaves nothing to do: the mapping would stay until the process ends.
        let _ = unsafe { mm::munmap(start.cast(), len) };
    }
}
