//! A reserved address range, at which mappings follow each other by MAP_FIXED.
//!
//! Invariant: between two mappings the range stays reserved. So no other thread's mapping gets there, and
//! MAP_FIXED replaces nothing but the reservation.

use super::mapping::unmap;
use rustix::mm::{self, MapFlags, ProtFlags};
use std::io;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, Ordering::AcqRel};

/// A reserved address range that has one mapping at a time, or none.
#[derive(Debug)]
pub struct AddressPlace {
    room: NonNull<u8>,
    room_len: usize,
    start: NonNull<u8>,
    len: usize,
    is_taken: AtomicBool,
}

// SAFETY: the range is owned, and only `map_at` and `munmap` use it; nothing in it depends on a thread.
unsafe impl Send for AddressPlace {}
// SAFETY: `is_taken` admits one user of the range at a time.
unsafe impl Sync for AddressPlace {}

impl AddressPlace {
    /// Reserves `len` bytes, a multiple of the page size, at an address that is a multiple of `align`.
    ///
    /// # Errors
    /// Fails as mmap(2) does.
    pub fn reserve(len: usize, align: usize) -> io::Result<AddressPlace> {
        let align = align.max(rustix::param::page_size());
        let room_len = len.checked_add(align).ok_or(io::ErrorKind::OutOfMemory)?;
        let room = reserve_at(ptr::null_mut(), room_len)?;
        let lead = room.as_ptr().align_offset(align);
        // `lead` is below `align`, so the range ends inside the room.
        let start = NonNull::new(room.as_ptr().wrapping_add(lead));
        let start = start.ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(AddressPlace { room, room_len, start, len, is_taken: AtomicBool::new(false) })
    }

    /// Takes the range for a mapping of this length, and returns its address.
    ///
    /// # Errors
    /// Fails if another mapping is there, or the range is too short.
    pub(super) fn take(&self, len: usize) -> io::Result<NonNull<u8>> {
        if len > self.len {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        if self.is_taken.swap(true, AcqRel) {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        Ok(self.start)
    }

    /// Gives the range back: its mapping is unmapped, and the range reserved again.
    pub(super) fn give_back(&self) {
        // If the kernel has no memory for the reservation, the range stays taken, and nobody maps there.
        if reserve_at(self.start.as_ptr(), self.len).is_ok() {
            self.is_taken.store(false, std::sync::atomic::Ordering::Release);
        }
    }
}

impl Drop for AddressPlace {
    fn drop(&mut self) {
        unmap(self.room.as_ptr(), self.room_len);
    }
}

/// Reserves addresses without memory at `place`, which the caller must own, or anywhere if it is null.
fn reserve_at(place: *mut u8, len: usize) -> io::Result<NonNull<u8>> {
    let mut flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    if !place.is_null() {
        flags |= MapFlags::FIXED;
    }
    // SAFETY: a fresh mapping at null; at a place, the caller owns that range.
    let start = unsafe { mm::mmap_anonymous(place.cast(), len, ProtFlags::empty(), flags) }?;
    NonNull::new(start.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

#[cfg(test)]
mod tests {
    use super::super::mapping::{OwnedMapping, Request, Source};
    use super::*;
    use std::sync::Arc;

    #[test]
    fn mappings_follow_each_other_at_one_address() {
        let place = Arc::new(AddressPlace::reserve(8192, 1 << 21).unwrap());
        let request = Request { source: Source::Anon, len: 8192, align: 0, hugetlb: None };
        let first = OwnedMapping::new_in(request, &place).unwrap();
        first.store(0, 7);
        let address = first.address();
        assert_eq!(address % (1 << 21), 0);
        assert!(OwnedMapping::new_in(request, &place).is_err(), "the place is taken");
        drop(first);
        let second = OwnedMapping::new_in(request, &place).unwrap();
        assert_eq!((second.address(), second.load(0)), (address, 0));
    }
}
