//! Blocks and heap areas outside the paged region.
//!
//! The kernel limits the mappings of a process (`vm.max_map_count`), and each change of protection
//! inside the region may add two. At the limit the kernel still accepts new mappings elsewhere,
//! because it joins them to their neighbours. So further memory is allocated there, unpaged, and
//! the program goes on.

use libc::c_void;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::collections::BTreeMap;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::sync::{Mutex, MutexGuard, PoisonError};

const PAGE: usize = 4096;

/// A block of malloc.
#[derive(Debug, Clone, Copy)]
struct Block {
    mapped_at: usize,
    mapped_bytes: usize,
    bytes: usize,
}

/// The memory outside the region.
#[derive(Debug)]
pub struct Local {
    /// Blocks by the address that malloc returned.
    blocks: BTreeMap<usize, Block>,
    /// Lengths of mimalloc's areas, by address.
    areas: BTreeMap<usize, usize>,
}

static LOCAL: Mutex<Local> = Mutex::new(Local { blocks: BTreeMap::new(), areas: BTreeMap::new() });
/// True once there is any such memory. It is almost always false, which saves the lock.
static IS_ANY: AtomicBool = AtomicBool::new(false);

/// Keeps other threads out. A fork holds it too.
pub fn hold() -> MutexGuard<'static, Local> {
    LOCAL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The least addresses that are worth reserving.
const RESERVED_MIN: usize = 1 << 30;

/// Reserves up to so many bytes of addresses, as many as there are: recorders have less than the
/// kernel. Returns the address of the first, a multiple of [`RESERVED_MIN`], and their number.
pub fn reserve(bytes: usize) -> Option<(usize, usize)> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    let lengths = std::iter::successors(Some(bytes), |bytes| Some(bytes / 2));
    lengths.take_while(|bytes| *bytes >= RESERVED_MIN).find_map(|bytes| {
        let len = bytes + RESERVED_MIN;
        // SAFETY: a fresh mapping at a place of the kernel's choice.
        let at = unsafe { mmap_anonymous(ptr::null_mut(), len, ProtFlags::empty(), flags) };
        Some(((at.ok()? as usize).next_multiple_of(RESERVED_MIN), bytes))
    })
}

/// Allocates zeros. Returns null if the kernel refuses.
pub fn allocate(bytes: usize, align: usize) -> *mut c_void {
    let align = align.max(PAGE);
    let mapped_bytes =
        bytes.checked_add(align - PAGE).and_then(|sum| sum.checked_next_multiple_of(PAGE));
    let Some(mapped_bytes) = mapped_bytes.filter(|bytes| *bytes > 0) else {
        return ptr::null_mut();
    };
    let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: a fresh mapping at a place of the kernel's choice.
    let made = unsafe { mmap_anonymous(ptr::null_mut(), mapped_bytes, protection, flags) };
    let Ok(made) = made else { return ptr::null_mut() };
    let mapped_at = made as usize;
    let at = mapped_at.next_multiple_of(align);
    IS_ANY.store(true, Release);
    hold().blocks.insert(at, Block { mapped_at, mapped_bytes, bytes });
    at as *mut c_void
}

/// Frees a block of [`allocate`]. Returns false if it is not one.
pub fn free(at: *mut c_void) -> bool {
    if !IS_ANY.load(Acquire) {
        return false;
    }
    let Some(block) = hold().blocks.remove(&(at as usize)) else { return false };
    // SAFETY: a mapping of `allocate`, which its owner frees. If it cannot be unmapped, it stays.
    let _ = unsafe { munmap(block.mapped_at as *mut c_void, block.mapped_bytes) };
    true
}

/// Returns the size of a block of [`allocate`], if it is one.
pub fn usable(at: *mut c_void) -> Option<usize> {
    if !IS_ANY.load(Acquire) {
        return None;
    }
    hold().blocks.get(&(at as usize)).map(|block| block.bytes)
}

/// Records a heap area of mimalloc.
pub fn note_area(at: *mut c_void, bytes: usize) {
    IS_ANY.store(true, Release);
    hold().areas.insert(at as usize, bytes);
}

/// Returns true if an address lies in a heap area of mimalloc.
pub fn is_area(at: *mut c_void) -> bool {
    if !IS_ANY.load(Acquire) {
        return false;
    }
    let local = hold();
    let area = local.areas.range(..=at as usize).next_back();
    area.is_some_and(|(start, bytes)| at as usize - start < *bytes)
}

/// Removes addresses from the heap areas of mimalloc.
pub fn forget_area(at: *mut c_void, bytes: usize) {
    if !IS_ANY.load(Acquire) {
        return;
    }
    let (start, end) = (at as usize, (at as usize).saturating_add(bytes));
    let mut local = hold();
    let cut: Vec<(usize, usize)> = local
        .areas
        .range(..end)
        .map(|(area, bytes)| (*area, area + bytes))
        .filter(|(_, area_end)| *area_end > start)
        .collect();
    for (area, area_end) in cut {
        local.areas.remove(&area);
        if area < start {
            local.areas.insert(area, start - area);
        }
        if area_end > end {
            local.areas.insert(end, area_end - end);
        }
    }
}
