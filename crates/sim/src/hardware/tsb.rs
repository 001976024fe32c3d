//! Software TLB refill, as Solaris does it on UltraSPARC. A trap handler looks the page up in the
//! translation storage buffer (TSB), a direct-mapped table in memory, then in the kernel's hash.
//!
//! Invariant: every tool except trapstat counts the handler's time as user time; see McDougall, 'Taming
//! Your Emu' (Sun BluePrints, 2004). Source: UltraSPARC User's Manual, 6.3 and 6.9.7 (two tables, for
//! small and for 4M pages).

/// Costs and sizes of the refill.
#[derive(Debug, Clone, PartialEq)]
pub struct HandlerSpec {
    /// The processor cycles of a miss that the TSB serves.
    pub handler_cycles: u32,
    /// The added processor cycles of a miss that the TSB does not serve.
    pub tsb_miss_cycles: u32,
    /// The entries of each of the two tables; a power of two.
    pub tsb_entries: u32,
}

/// An impossible size of a TSB.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("tsb_entries = {0}: a TSB has a power of two of entries")]
pub struct TsbSizeError(u32);

/// The log2 of the smallest page size in the second table.
const LARGE_SHIFT: u32 = 22;

/// The refill of one machine; its tables hold the entries of all processes.
#[derive(Debug, Clone)]
pub struct SoftwareRefill {
    handler_ps: u64,
    tsb_miss_ps: u64,
    small: Vec<u64>,
    large: Vec<u64>,
    misses: u64,
}

impl SoftwareRefill {
    /// Creates empty tables. The handler runs at `clock_mhz`.
    pub fn new(spec: &HandlerSpec, clock_mhz: u32) -> Result<Self, TsbSizeError> {
        if !spec.tsb_entries.is_power_of_two() {
            return Err(TsbSizeError(spec.tsb_entries));
        }
        let ps = |cycles: u32| u64::from(cycles) * 1_000_000 / u64::from(clock_mhz.max(1));
        let table = vec![0; spec.tsb_entries as usize];
        Ok(SoftwareRefill {
            handler_ps: ps(spec.handler_cycles),
            tsb_miss_ps: ps(spec.tsb_miss_cycles),
            large: table.clone(),
            small: table,
            misses: 0,
        })
    }

    /// Serves one TLB miss; returns its time in picoseconds.
    #[inline]
    pub fn refill(&mut self, asid: u16, address: u64, shift: u32) -> u64 {
        if self.enter(asid, address, shift) {
            return self.handler_ps;
        }
        self.misses += 1;
        self.handler_ps + self.tsb_miss_ps
    }

    /// Writes an entry, as the kernel does when it maps a page. Returns true if it was there already.
    #[inline]
    pub fn enter(&mut self, asid: u16, address: u64, shift: u32) -> bool {
        let table = if shift >= LARGE_SHIFT { &mut self.large } else { &mut self.small };
        let page = address >> shift;
        let tag = (page << 20) | (u64::from(asid) << 6) | u64::from(shift);
        let index = page as usize & (table.len() - 1);
        std::mem::replace(&mut table[index], tag) == tag
    }

    /// Removes the entries of an address space, or of a range of it.
    pub fn forget(&mut self, asid: u16, range: std::ops::Range<u64>) {
        for entry in self.small.iter_mut().chain(&mut self.large) {
            let (page, shift) = (*entry >> 20, *entry & 63);
            if *entry != 0
                && (*entry >> 6) as u16 & 0x3fff == asid
                && range.contains(&(page << shift))
            {
                *entry = 0;
            }
        }
    }

    /// Returns the number of misses that the TSB did not serve.
    pub fn tsb_misses(&self) -> u64 {
        self.misses
    }

    /// Returns the time of a miss that the TSB serves, in picoseconds.
    pub fn handler_ps(&self) -> u64 {
        self.handler_ps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refill() -> SoftwareRefill {
        let spec = HandlerSpec { handler_cycles: 189, tsb_miss_cycles: 900, tsb_entries: 512 };
        SoftwareRefill::new(&spec, 900).unwrap()
    }

    #[test]
    fn pages_that_were_entered_are_served_at_once() {
        let mut refill = refill();
        refill.enter(1, 0x10000, 13);
        assert_eq!(refill.refill(1, 0x10000, 13), 210_000);
        assert_eq!(refill.refill(2, 0x10000, 13), 1_210_000, "another process's page");
        assert_eq!(refill.tsb_misses(), 1);
    }

    #[test]
    fn the_tables_are_direct_mapped_and_4m_pages_have_their_own() {
        let mut refill = refill();
        refill.enter(1, 0, 13);
        refill.enter(1, 0, 22);
        assert_eq!(refill.refill(1, 0, 13), 210_000);
        refill.enter(1, 512 << 13, 13);
        assert_eq!(refill.refill(1, 0, 13), 1_210_000, "page 512 took page 0's place");
        assert_eq!(refill.refill(1, 0, 22), 210_000);
    }

    #[test]
    fn forgotten_pages_miss() {
        let mut refill = refill();
        refill.enter(1, 0x4000, 13);
        refill.enter(1, 0x8000, 13);
        refill.forget(1, 0x8000..0xa000);
        assert_eq!(refill.refill(1, 0x4000, 13), 210_000);
        assert_eq!(refill.refill(1, 0x8000, 13), 1_210_000);
    }

    #[test]
    fn odd_sizes_are_refused() {
        let spec = HandlerSpec { handler_cycles: 1, tsb_miss_cycles: 1, tsb_entries: 500 };
        assert_eq!(SoftwareRefill::new(&spec, 900).unwrap_err(), TsbSizeError(500));
    }
}
