//! Pages, runs of them, and the sum that tells whether a page is what it was.
//!
//! Source of the sum: XXH3, 64 bits (Collet); not a defence against forgers, who are kept out by
//! the transport.

use std::fmt;
use twox_hash::XxHash3_64;

/// Bytes of a page, here and on the wire, whatever page sizes the machine has.
pub const PAGE_BYTES: usize = 4096;

/// Most pages of one read, and of one run of a write.
pub const RUN_PAGES_MAX: usize = 64;

/// The sum of a page's bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct PageSum(pub u64);

impl PageSum {
    /// The sum of these bytes.
    #[inline]
    pub fn of(page: &[u8]) -> PageSum {
        PageSum(XxHash3_64::oneshot(page))
    }
}

impl fmt::Display for PageSum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Whether all bytes are zero. Such pages are remembered, not sent.
#[inline]
pub fn is_zero(page: &[u8]) -> bool {
    // Blocks that the compiler turns into vector code; the first one settles most pages.
    page.chunks(256).all(|block| block.iter().fold(0, |seen, byte| seen | byte) == 0)
}

/// Adjacent pages of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageRun {
    /// Number of the first page: its offset in the region over [`PAGE_BYTES`].
    pub first: u64,
    /// How many.
    pub count: u64,
}

impl PageRun {
    /// The number after the last page; none if there is no such number.
    pub fn end(self) -> Option<u64> {
        self.first.checked_add(self.count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_bit_makes_a_page_another() {
        let mut page = vec![0u8; PAGE_BYTES];
        assert!(is_zero(&page));
        let sum = PageSum::of(&page);
        for at in [0, 255, 256, PAGE_BYTES - 1] {
            page[at] = 1;
            assert!(!is_zero(&page));
            assert_ne!(PageSum::of(&page), sum);
            page[at] = 0;
        }
        assert_eq!(PageSum::of(&page), sum);
    }
}
