//! Runs of faults of a sweep in one pmeg, by arithmetic.

use crate::accesses::Accesses;
use crate::mmu::sun4::Geometry;

/// A run of faults in one pmeg.
#[derive(Debug, Clone, Copy)]
pub(super) struct Run {
    /// That are left.
    pub faults: u64,
    /// Of the first of them.
    entry: u32,
    /// Entries from one fault to the next.
    step: u32,
    /// Touches that belong to a fault: its own and those that follow on the same page; no more than
    /// `left` in all.
    pub touches_each: u64,
    left: u64,
}

impl Run {
    /// `faulting` are the entries that fault and can be served; `entry`, the next access's, is one.
    pub fn of(accesses: &Accesses, geometry: &Geometry, faulting: u64, entry: u32) -> Run {
        let (page_bytes, shift) = (geometry.page.bytes(), geometry.page.shift());
        let one = Run { faults: 1, entry, step: 1, touches_each: 1, left: 1 };
        let Some(sweep) = accesses.sweep() else { return one };
        let left = sweep.left_in_lap().min(accesses.left());
        let ahead = faulting >> entry;
        if sweep.stride >= page_bytes {
            if sweep.stride & (page_bytes - 1) != 0 {
                return one;
            }
            let step = (sweep.stride >> shift).min(64) as u32;
            // What does not fault ends the run; entries between those of the run do not matter.
            let pages = (ahead | !every(step)).trailing_ones().min(geometry.ptes - entry);
            let faults = if step == 1 { pages } else { pages.div_ceil(step) };
            let faults = u64::from(faults).clamp(1, left);
            return Run { faults, entry, step, touches_each: 1, left };
        }
        let on_page = page_bytes - (accesses.next_address() & (page_bytes - 1));
        let touches_each = page_bytes / sweep.stride;
        // Whole pages only: the touches of all faults are as many.
        if page_bytes.is_multiple_of(sweep.stride) && on_page.div_ceil(sweep.stride) == touches_each
        {
            let pages = u64::from(ahead.trailing_ones().min(geometry.ptes - entry));
            let faults = pages.clamp(1, left.div_ceil(touches_each));
            return Run { faults, entry, step: 1, touches_each, left };
        }
        one
    }

    /// The first `count` faults, at most as many as there are, go.
    #[inline]
    pub fn take(&mut self, count: u64) -> Served {
        let pages = (count - 1) * u64::from(self.step) + 1;
        let entries = (every(self.step) & (u64::MAX >> (64 - pages))) << self.entry;
        let touches = (count * self.touches_each).min(self.left);
        self.faults -= count;
        self.left -= touches;
        self.entry += self.step * count as u32;
        Served { faults: count, entries, touches }
    }
}

/// Faults that are served together.
#[derive(Debug, Clone, Copy)]
pub(super) struct Served {
    pub faults: u64,
    /// Their entries, a bit each.
    pub entries: u64,
    /// Touches up to the fault after them.
    pub touches: u64,
}

/// Bit 0 and every `step`-th after it; a step of 64 leaves bit 0 alone.
fn every(step: u32) -> u64 {
    match step {
        1 => u64::MAX,
        _ => (0..64).step_by(step as usize).fold(0, |mask, bit| mask | 1 << bit),
    }
}
