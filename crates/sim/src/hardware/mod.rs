//! Translation hardware: from a virtual address to "yes", "no" or "that took a while".
//!
//! Invariant: hardware decides nothing. It translates what a kernel has loaded, faults otherwise,
//! and says what time that took; it neither charges time nor counts events by itself.

pub mod accesses;
pub mod cached;
pub mod calibrated;
pub mod configuration;
pub mod flat;
pub mod page_table;
pub mod reuse;
pub mod set;
pub mod sun4;
pub mod tlb;
pub mod translation;
pub mod tsb;
pub mod walk;

use crate::hardware::accesses::Accesses;
use pagetax_core::units::PageSize;
use std::ops::Range;

/// An address space: of the main process and its threads, or of a forked child. Numbers are given in
/// the order of creation and never again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct SpaceId(pub usize);

/// Why [`Mmu::touch`] returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// No accesses are left.
    Done,
    /// The time limit is reached.
    Limit,
    /// The next access has no (or no sufficient) translation; the kernel's turn.
    Fault,
}

/// The result of [`Mmu::touch`]. The number of touches is the difference in [`Accesses::left`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Touched {
    /// Time spent on translation beside the accesses' own cost, in picoseconds.
    pub translation_ps: u64,
    /// The reason for its return.
    pub stop: Stop,
}

/// Translation hardware, as the engine drives it.
pub trait Mmu {
    /// Touches memory on `cpu` until the accesses are done, until one faults (it stays the next one),
    /// or until accesses (at [`Accesses::cost_ps`] each) and translation have taken `limit_ps`. The
    /// last access may overrun the limit. Makes progress whenever the first access does not fault.
    fn touch(
        &mut self,
        cpu: usize,
        space: SpaceId,
        accesses: &mut Accesses,
        limit_ps: u64,
    ) -> Touched;

    /// Accesses since it was last asked that no TLB could translate; 0 without TLBs. A kernel on
    /// hardware with TLBs lists `tlb_miss_count` among its counters.
    fn take_tlb_misses(&mut self) -> u64 {
        0
    }

    /// `cpu` goes on in another space: what the hardware itself loses by it (flushed translations).
    /// The kernel has been told before, in [`crate::historic::kernel::Kernel::switch`].
    fn switch(&mut self, cpu: usize, space: SpaceId);

    /// Drops all translations of a space that has ended.
    fn drop_space(&mut self, space: SpaceId);
}

/// A translation, as kernels load it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pte {
    /// Virtual address, a multiple of the size.
    pub address: u64,
    /// The page's size.
    pub size: PageSize,
    /// True if stores go through without a fault.
    pub writable: bool,
}

/// What the hardware has noted of a page since it was last asked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Used {
    /// A translation is loaded.
    pub present: bool,
    /// Touched since the bit was last cleared.
    pub referenced: bool,
    /// Stored to since it was loaded.
    pub dirty: bool,
}

fn range_pages(range: &Range<u64>, size: PageSize) -> u64 {
    (range.end - range.start) / size.bytes()
}

/// Hardware whose translations are page-table entries, each by itself; what kernels other than
/// SunOS on Sun-4 work with.
pub trait PageTables: Mmu {
    /// Makes a translation valid, or replaces it.
    fn load(&mut self, space: SpaceId, pte: Pte);

    /// Removes all translations that begin in the range, and flushes them from the TLBs of all CPUs.
    fn unload(&mut self, space: SpaceId, address: u64, bytes: u64);

    /// Loads a translation of a page of this size for each page of a range of whole pages. Returns how
    /// many of them had none before.
    fn load_range(
        &mut self,
        space: SpaceId,
        range: Range<u64>,
        size: PageSize,
        writable: bool,
    ) -> u64 {
        let new = range_pages(&range, size) - self.present_in(space, range.clone(), size);
        for address in range.step_by(size.bytes() as usize) {
            self.load(space, Pte { address, size, writable });
        }
        new
    }

    /// Returns the number of pages of this size of a range of whole pages have a translation.
    fn present_in(&self, space: SpaceId, range: Range<u64>, size: PageSize) -> u64 {
        let pages = range.step_by(size.bytes() as usize);
        pages.filter(|address| self.used(space, *address).present).count() as u64
    }

    /// Makes the present translations in the range read-only (copy-on-write after a fork).
    fn protect(&mut self, space: SpaceId, address: u64, bytes: u64);

    /// Reads the bits of the page at `address`.
    fn used(&self, space: SpaceId, address: u64) -> Used;

    /// Reads the bits of the page at `address` and clears "referenced".
    fn test_and_clear_referenced(&mut self, space: SpaceId, address: u64) -> Used;
}
