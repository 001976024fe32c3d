//! Translation hardware: the result and the time of each access's translation.
//!
//! Invariant: hardware has no policy. It translates by the entries that a kernel has loaded, faults
//! otherwise, and reports the time. It neither charges time nor counts events.

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

/// An address space: that of the main process and its threads, or of a forked child. Numbers are in the
/// order of creation and never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct SpaceId(pub usize);

/// The reason why [`Mmu::touch`] returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// No accesses are left.
    Done,
    /// The time limit is reached.
    Limit,
    /// The next access has no sufficient translation, so the kernel must handle a fault.
    Fault,
}

/// The result of [`Mmu::touch`]. The number of touches is the difference in [`Accesses::left`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Touched {
    /// Time spent on translation beside the accesses' own cost, in picoseconds.
    pub translation_ps: u64,
    /// The reason why the touch stopped.
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

    /// Returns the number of accesses since the last call that no TLB could translate; 0 without TLBs. A
    /// kernel on hardware with TLBs lists `tlb_miss_count` among its counters.
    fn take_tlb_misses(&mut self) -> u64 {
        0
    }

    /// Switches `cpu` to another space, and flushes the translations that the hardware loses by it. The
    /// engine has called [`crate::historic::kernel::Kernel::switch`] before.
    fn switch(&mut self, cpu: usize, space: SpaceId);

    /// Drops all translations of a space that has ended.
    fn drop_space(&mut self, space: SpaceId);
}

/// A translation, as kernels load it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pte {
    /// The virtual address, a multiple of the size.
    pub address: u64,
    /// The size of the page that it maps.
    pub size: PageSize,
    /// True if stores do not fault.
    pub writable: bool,
}

/// The bits that the hardware keeps of a page.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Used {
    /// True if a translation is loaded.
    pub present: bool,
    /// True if the page was touched since the bit was last cleared.
    pub referenced: bool,
    /// True if a store has changed the page since its translation was loaded.
    pub dirty: bool,
}

fn range_pages(range: &Range<u64>, size: PageSize) -> u64 {
    (range.end - range.start) / size.bytes()
}

/// Hardware with independent page-table entries. All kernels use it, except SunOS on the Sun-4.
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

    /// Returns the number of pages of this size that have a translation, in a range of whole pages.
    fn present_in(&self, space: SpaceId, range: Range<u64>, size: PageSize) -> u64 {
        let pages = range.step_by(size.bytes() as usize);
        pages.filter(|address| self.used(space, *address).present).count() as u64
    }

    /// Makes the present translations in the range read-only (copy-on-write after a fork).
    fn protect(&mut self, space: SpaceId, address: u64, bytes: u64);

    /// Returns the bits of the page at `address`.
    fn used(&self, space: SpaceId, address: u64) -> Used;

    /// Returns the bits of the page at `address` and clears "referenced".
    fn test_and_clear_referenced(&mut self, space: SpaceId, address: u64) -> Used;
}
