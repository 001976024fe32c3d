//! A piece of address space that is owned: mapped, advised, locked, accessed, unmapped on drop.
//!
//! Invariant: accesses are volatile, aligned and checked against the length, so that the compiler
//! drops none of them and none of them leaves the mapping.

use pagetax_core::network_memory::NetworkRegion;
use rustix::mm::{self, MapFlags, ProtFlags};
use std::fs::File;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::Arc;

/// What is mapped.
#[derive(Debug, Clone, Copy)]
pub enum Source<'a> {
    /// Private anonymous memory.
    Anon,
    /// Anonymous memory that forked children share.
    Shared,
    /// A file from its start on.
    File {
        /// At least as long as the mapping.
        file: &'a File,
        /// Writes stay in this process.
        private: bool,
        /// Stores are allowed. Locking private pages that could be written copies each of them.
        writable: bool,
    },
}

/// How it is mapped.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// What.
    pub source: Source<'a>,
    /// Bytes, rounded up to whole pages.
    pub len: usize,
    /// Alignment of the address: a power of two; at least the base page is taken.
    pub align: usize,
    /// From the hugetlb pool of pages of this size. For files: a memfd made with the same size.
    pub hugetlb: Option<usize>,
}

/// An owned mapping.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    len: usize,
    /// Network memory is mapped by its pager, which unmaps it when its last owner goes.
    pager: Option<Arc<dyn NetworkRegion>>,
}

// SAFETY: the mapping is owned memory that is only reached through this module's methods, which use
// volatile accesses of plain words; nothing in it is tied to a thread.
unsafe impl Send for Mapping {}
// SAFETY: concurrent volatile accesses of aligned u64 words are single instructions on every 64-bit
// target that this crate supports, and no reference into the memory is ever given out, so a racing
// client sees an old word or a new one. Racing is what the jobs ask for.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps; errors are the system's.
    pub fn new(request: Request<'_>) -> io::Result<Mapping> {
        let base = rustix::param::page_size();
        let align = request.align.max(base);
        let len = request
            .len
            .max(1)
            .checked_next_multiple_of(request.hugetlb.unwrap_or(base))
            .ok_or(io::ErrorKind::OutOfMemory)?;
        // hugetlb mappings are aligned by the kernel; others get room to be trimmed.
        let slack = if request.hugetlb.is_some() { 0 } else { align - base };
        let wide = len.checked_add(slack).ok_or(io::ErrorKind::OutOfMemory)?;
        if slack == 0 {
            let start = map_at(ptr::null_mut(), len, &request)?;
            return Ok(Mapping { start, len, pager: None });
        }
        let room = map_at(ptr::null_mut(), wide, &Request { source: Source::Anon, ..request })?;
        let lead = room.as_ptr().align_offset(align);
        // SAFETY: lead ≤ align - base = slack, so the aligned range lies inside the fresh reservation, which
        // nothing else refers to; MAP_FIXED replaces exactly that part of it.
        let start = unsafe { map_at(room.as_ptr().add(lead), len, &request) };
        unmap(room.as_ptr(), lead);
        unmap(room.as_ptr().wrapping_add(lead + len), slack - lead);
        match start {
            Ok(start) => Ok(Mapping { start, len, pager: None }),
            Err(error) => {
                unmap(room.as_ptr().wrapping_add(lead), len);
                Err(error)
            }
        }
    }

    /// Memory that is paged by a pager in this process.
    pub fn of_pager(pager: Arc<dyn NetworkRegion>) -> Mapping {
        // The safety contract of `NetworkRegion` makes this range ours until the pager is dropped.
        Mapping { start: pager.start(), len: pager.bytes(), pager: Some(pager) }
    }

    /// Its first address.
    pub fn address(&self) -> u64 {
        self.start.as_ptr() as u64
    }

    /// Bytes; whole pages.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: a mapping has at least one page.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// madvise(2) of the whole with a `MADV_` value that leaves the mapping in place.
    pub fn advise(&self, advice: i32) -> io::Result<()> {
        // SAFETY: the range is exactly this mapping. Advice may drop or move its pages, which only
        // changes what later volatile loads see; no reference into the memory exists.
        check(unsafe { libc::madvise(self.start.as_ptr().cast(), self.len, advice) })
    }

    /// Brings `len` bytes from `offset` on into memory, for reading; cut at the end of the mapping.
    pub fn populate(&self, offset: usize, len: usize) -> io::Result<()> {
        let offset = offset.min(self.len);
        let len = len.min(self.len - offset);
        // SAFETY: the range lies inside this mapping; the advice does not change its content.
        check(unsafe {
            libc::madvise(self.start.as_ptr().add(offset).cast(), len, libc::MADV_POPULATE_READ)
        })
    }

    /// mlock(2) of `len` bytes from `offset` on, cut at the end of the mapping.
    pub fn lock(&self, offset: usize, len: usize) -> io::Result<()> {
        let offset = offset.min(self.len);
        let len = len.min(self.len - offset);
        // SAFETY: the range lies inside this mapping; locking does not change its content.
        Ok(unsafe { mm::mlock(self.start.as_ptr().add(offset).cast(), len) }?)
    }

    /// munlock(2) of the whole.
    pub fn unlock(&self) -> io::Result<()> {
        // SAFETY: the range is exactly this mapping; unlocking does not change its content.
        Ok(unsafe { mm::munlock(self.start.as_ptr().cast(), self.len) }?)
    }

    /// Which base pages are in memory: one byte a page, bit 0 (mincore(2)).
    pub fn resident_pages(&self) -> io::Result<Vec<u8>> {
        let mut pages = vec![0; self.len.div_ceil(rustix::param::page_size())];
        // SAFETY: the range is this mapping and the vector has one byte for each of its pages.
        check(unsafe { libc::mincore(self.start.as_ptr().cast(), self.len, pages.as_mut_ptr()) })?;
        Ok(pages)
    }

    /// The aligned word that holds `offset`, if `bytes` bytes from there on are inside.
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
        // SAFETY: `word` is aligned (the mapping is page-aligned) and inside this mapping; if it is
        // not writable, the store faults and has no effect that anyone could see.
        unsafe { word.write_volatile(value) }
    }

    /// Stores `value` to each of `bytes` bytes from `offset` on, rounded down to 8, as memset does.
    ///
    /// # Panics
    /// If the range is not inside the mapping. A mapping that is not writable ends the process.
    pub fn set(&self, offset: u64, bytes: u64, value: u8) {
        let first = self.word(offset, bytes).expect("a range inside the mapping");
        // SAFETY: the whole range was checked, and no reference into the memory exists.
        unsafe { first.cast::<u8>().write_bytes(value, bytes as usize) }
    }

    /// Calls `visit` with the offset and the place of each whole word of `bytes` from `offset` on,
    /// checking the range once; stops at the first error.
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

/// A word of a mapping, for the length of one visit.
pub struct Word(*mut u64);

impl Word {
    /// Loads it.
    #[inline(always)]
    pub fn load(&self) -> u64 {
        // SAFETY: made by `each_word` from a checked range, and lent only while the mapping is.
        unsafe { self.0.read_volatile() }
    }

    /// Stores to it.
    #[inline(always)]
    pub fn store(&self, value: u64) {
        // SAFETY: as in `load`; a store to a mapping that is not writable faults, and nothing else.
        unsafe { self.0.write_volatile(value) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.pager.is_none() {
            unmap(self.start.as_ptr(), self.len);
        }
    }
}

/// Turns a C result into an io::Result.
pub(super) fn check(result: i32) -> io::Result<()> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Maps at a given place (which must be the caller's own) or, at null, wherever there is room.
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
fn unmap(start: *mut u8, len: usize) {
    if len > 0 {
        // SAFETY: only called with ranges that this module mapped and gives up here. An error
        // cannot be mended (the range is valid) and would leave the mapping to the process's end.
        let _ = unsafe { mm::munmap(start.cast(), len) };
    }
}
