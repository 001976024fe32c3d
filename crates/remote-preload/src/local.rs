//! Blocks and heap areas outside the paged region.
//!
//! The kernel allows a process only so many mappings (`vm.max_map_count`), and each change of protection inside the
//! region may make two more. When it allows no more there, it still allows new mappings, which it joins to their
//! neighbours: so memory is given out there, unpaged, and the program goes on.

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

/// What lies outside.
#[derive(Debug)]
pub struct Local {
    /// By the address that was given out.
    blocks: BTreeMap<usize, Block>,
    /// Lengths of mimalloc's areas, by address.
    areas: BTreeMap<usize, usize>,
}

static LOCAL: Mutex<Local> = Mutex::new(Local { blocks: BTreeMap::new(), areas: BTreeMap::new() });
/// Almost always false, which saves the lock.
static IS_ANY: AtomicBool = AtomicBool::new(false);

/// Keeps other threads out, also for a fork.
pub fn hold() -> MutexGuard<'static, Local> {
    LOCAL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Allocates zeros; null if there are none.
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

/// Frees what [`allocate`] gave out; false if it did not.
pub fn free(at: *mut c_void) -> bool {
    if !IS_ANY.load(Acquire) {
        return false;
    }
    let Some(block) = hold().blocks.remove(&(at as usize)) else { return false };
    // SAFETY: a mapping of `allocate`'s, whose owner gives it back. If it cannot be unmapped, it stays.
    let _ = unsafe { munmap(block.mapped_at as *mut c_void, block.mapped_bytes) };
    true
}

/// Bytes of what [`allocate`] gave out, if it did.
pub fn usable(at: *mut c_void) -> Option<usize> {
    if !IS_ANY.load(Acquire) {
        return None;
    }
    hold().blocks.get(&(at as usize)).map(|block| block.bytes)
}

/// Notes an area of mimalloc's.
pub fn note_area(at: *mut c_void, bytes: usize) {
    IS_ANY.store(true, Release);
    hold().areas.insert(at as usize, bytes);
}

/// Whether an address lies in an area of mimalloc's.
pub fn is_area(at: *mut c_void) -> bool {
    if !IS_ANY.load(Acquire) {
        return false;
    }
    let local = hold();
    let area = local.areas.range(..=at as usize).next_back();
    area.is_some_and(|(start, bytes)| at as usize - start < *bytes)
}

/// Notes that addresses are no longer mimalloc's.
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
