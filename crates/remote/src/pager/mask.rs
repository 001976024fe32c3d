//! Sets of pages of one cluster, as bit masks.

use super::table::CLUSTER_PAGES;

/// One bit for each page of a cluster.
pub type PageMask = u64;
const _: () = assert!(CLUSTER_PAGES <= PageMask::BITS as usize);

/// Returns the indices of the set bits.
pub fn bits(mask: PageMask) -> impl Iterator<Item = usize> {
    (0..CLUSTER_PAGES).filter(move |bit| mask & 1 << bit != 0)
}

/// Returns runs of adjacent bits: the first bit and the count.
pub fn runs(mut mask: PageMask) -> impl Iterator<Item = (usize, usize)> {
    std::iter::from_fn(move || {
        let bit = mask.trailing_zeros() as usize;
        let count = (mask.checked_shr(bit as u32)?).trailing_ones() as usize;
        mask &= !run_of(bit, count);
        Some((bit, count))
    })
}

/// Returns the first bit, and the one after the last.
pub fn ends(mask: PageMask) -> (usize, usize) {
    (mask.trailing_zeros() as usize, (PageMask::BITS - mask.leading_zeros()) as usize)
}

/// Returns a mask of these bits.
pub fn mask_of(bits: impl Iterator<Item = usize>) -> PageMask {
    bits.fold(0, |mask, bit| mask | 1 << bit)
}

/// Returns a mask of `count` bits from one bit on.
pub fn run_of(bit: usize, count: usize) -> PageMask {
    match count {
        0 => 0,
        count => (PageMask::MAX >> (PageMask::BITS as usize - count)) << bit,
    }
}
