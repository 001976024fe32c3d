//! Pages of one cluster, as bits.

use super::table::CLUSTER_PAGES;

/// One bit for each page of a cluster.
pub type Mask = u64;
const _: () = assert!(CLUSTER_PAGES <= Mask::BITS as usize);

/// Those that are set.
pub fn bits(mask: Mask) -> impl Iterator<Item = usize> {
    (0..CLUSTER_PAGES).filter(move |bit| mask & 1 << bit != 0)
}

/// Adjacent bits: the first, and how many.
pub fn runs(mut mask: Mask) -> impl Iterator<Item = (usize, usize)> {
    std::iter::from_fn(move || {
        let bit = mask.trailing_zeros() as usize;
        let count = (mask.checked_shr(bit as u32)?).trailing_ones() as usize;
        mask &= !run_of(bit, count);
        Some((bit, count))
    })
}

/// The first bit, and the one after the last.
pub fn ends(mask: Mask) -> (usize, usize) {
    (mask.trailing_zeros() as usize, (Mask::BITS - mask.leading_zeros()) as usize)
}

/// A mask of these bits.
pub fn mask_of(bits: impl Iterator<Item = usize>) -> Mask {
    bits.fold(0, |mask, bit| mask | 1 << bit)
}

/// Bits from one on.
pub fn run_of(bit: usize, count: usize) -> Mask {
    match count {
        0 => 0,
        count => (Mask::MAX >> (Mask::BITS as usize - count)) << bit,
    }
}
