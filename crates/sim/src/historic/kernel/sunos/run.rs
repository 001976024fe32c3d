//! Runs of faults of a sweep in one pmeg, computed without a loop over accesses.

use crate::hardware::accesses::Accesses;
use crate::hardware::sun4::Geometry;

/// A run of faults in one pmeg.
#[derive(Debug, Clone, Copy)]
pub(super) struct FaultRun {
    /// The number of faults that are left.
    pub faults: u64,
    /// The entry of the next fault.
    entry: u32,
    /// Entries from one fault to the next.
    step: u32,
    /// Touches for each fault: its own and those that follow on the same page. Their sum is at most
    /// `left`.
    pub touches_each: u64,
    left: u64,
}

impl FaultRun {
    /// Computes the run that starts at `entry`, the next access's. `faulting` marks the entries
    /// that fault and can be served.
    pub fn of(accesses: &Accesses, geometry: &Geometry, faulting: u64, entry: u32) -> FaultRun {
        let (page_bytes, shift) = (geometry.page.bytes(), geometry.page.shift());
        let one = FaultRun { faults: 1, entry, step: 1, touches_each: 1, left: 1 };
        let Some(sweep) = accesses.sweep() else { return one };
        let left = sweep.left_in_lap().min(accesses.left());
        let ahead = faulting >> entry;
        if sweep.stride >= page_bytes {
            if sweep.stride & (page_bytes - 1) != 0 {
                return one;
            }
            let step = (sweep.stride >> shift).min(64) as u32;
            // A page that does not fault ends the run. Entries between those of the run do not
            // matter.
            let pages = (ahead | !every(step)).trailing_ones().min(geometry.ptes - entry);
            let faults = if step == 1 { pages } else { pages.div_ceil(step) };
            let faults = u64::from(faults).clamp(1, left);
            return FaultRun { faults, entry, step, touches_each: 1, left };
        }
        let on_page = page_bytes - (accesses.next_address() & (page_bytes - 1));
        let touches_each = page_bytes / sweep.stride;
        // The run needs equally many touches for each fault, so the next access must be the first
        // on its page.
        if page_bytes.is_multiple_of(sweep.stride) && on_page.div_ceil(sweep.stride) == touches_each
        {
            let pages = u64::from(ahead.trailing_ones().min(geometry.ptes - entry));
            let faults = pages.clamp(1, left.div_ceil(touches_each));
            return FaultRun { faults, entry, step: 1, touches_each, left };
        }
        one
    }

    /// Takes the first `count` faults, at least 1 and at most `faults`, out of the run.
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
    /// The entries of these faults, one bit each.
    pub entries: u64,
    /// Touches up to the next fault.
    pub touches: u64,
}

/// Returns bit 0 and every `step`-th bit after it; for a step of 64, only bit 0.
fn every(step: u32) -> u64 {
    match step {
        1 => u64::MAX,
        _ => (0..64).step_by(step as usize).fold(0, |mask, bit| mask | 1 << bit),
    }
}
