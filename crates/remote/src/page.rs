//! Pages, runs of pages, and the MAC that proves that a page is the one that was written.
//!
//! The MAC is AEGIS-128L (RFC 10032), truncated to 64 bits. This process draws the key, and neither
//! the key nor a MAC ever leaves it. A server knows a page's bytes but never sees its MAC. Of a
//! forged page, it learns only that the client refused it. Each attempt succeeds with probability
//! 2^-64, and each failure counts as a bad copy. Servers may see an unkeyed checksum, so they could
//! forge a page that matches it.
//!
//! A page-in takes some 10 µs. The cost of one page on an AMD EPYC guest:
//!
//! | Algorithm | µs |
//! |---|---|
//! | unkeyed XXH3 | 0.08 |
//! | AEGIS-128L | 0.20 |
//! | BLAKE3 | 1.4 |
//! | GMAC | 2.2 |
//! | HMAC-SHA256 | 2.4 |

use crate::random;
use aegis::aegis128l::Aegis128LMac;
use std::fmt;
use std::io;
use std::sync::OnceLock;

/// The size of a page in bytes, here and on the wire, whatever page sizes the machine has.
pub const PAGE_BYTES: usize = 4096;

/// The most pages of one read, and of one run of a write.
pub const RUN_PAGES_MAX: usize = 64;

/// The MAC under this process's key, before the first byte. A child of a fork keeps it, so it can
/// read the pages that it inherited.
static MAC: OnceLock<Aegis128LMac<16>> = OnceLock::new();

/// Draws this process's key, unless it has one.
///
/// # Errors
/// If the system provides no random numbers.
pub(crate) fn draw_key() -> io::Result<()> {
    if MAC.get().is_none() {
        // If another thread is faster, its key is as good.
        let _ = MAC.set(Aegis128LMac::new(&random::bytes()?));
    }
    Ok(())
}

fn mac() -> Aegis128LMac<16> {
    let fresh = || {
        let key = random::bytes().expect("the system gives random numbers");
        Aegis128LMac::new(&key)
    };
    MAC.get_or_init(fresh).clone()
}

/// The MAC of a page's bytes. Only the page's owner may know it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct PageMac(pub u64);

impl PageMac {
    /// Returns the MAC of these bytes under this process's key.
    ///
    /// # Panics
    /// If no region was mapped before, so that the key is drawn here, and the system provides no
    /// random numbers.
    #[inline]
    pub fn of(page: &[u8]) -> PageMac {
        let mut mac = mac();
        mac.update(page);
        let [a, b, c, d, e, f, g, h, ..] = mac.finalize();
        PageMac(u64::from_le_bytes([a, b, c, d, e, f, g, h]))
    }
}

impl fmt::Display for PageMac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Returns true if all bytes are zero. The pager records such pages instead of sending them.
#[inline]
pub fn is_zero(page: &[u8]) -> bool {
    // Blocks that the compiler vectorizes; the first one settles most pages.
    page.chunks(256).all(|block| block.iter().fold(0, |seen, byte| seen | byte) == 0)
}

/// A run of adjacent pages of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageRun {
    /// The number of the first page: its offset in the region divided by [`PAGE_BYTES`].
    pub first: u64,
    /// The number of pages of the run.
    pub count: u64,
}

impl PageRun {
    /// Returns the number after the last page, or `None` if it overflows.
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
        let mac = PageMac::of(&page);
        for at in [0, 255, 256, PAGE_BYTES - 1] {
            page[at] = 1;
            assert!(!is_zero(&page));
            assert_ne!(PageMac::of(&page), mac);
            page[at] = 0;
        }
        assert_eq!(PageMac::of(&page), mac);
    }
}
