//! The soft refaults of a staging block, which show how many of its pages come back.
//!
//! The clock is the number of pages made resident. In the long run it is that of evictions, but those
//! come in batches, and when a batch ends depends on the store and the scheduler.

use super::super::table::CLUSTER_PAGES;

/// The use of a staging block in one word, 0 while it has no soft refault. The high 32 bits are the
/// number of pages made resident by its first soft refault, the low ones its number of soft refaults.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BlockUse(pub u64);

impl BlockUse {
    /// Counts a soft refault after this many pages were made resident. Also returns true if, at this
    /// rate, at least half of the block's pages refault before the staged pages are replaced.
    pub fn refault(self, made_resident: u64, staged: usize) -> (BlockUse, bool) {
        if self.0 == 0 {
            return (BlockUse(made_resident << 32 | 1), false);
        }
        let times = (self.0 as u32 + 1) as usize;
        let since_first = (made_resident - (self.0 >> 32)) as u32 as usize;
        (BlockUse(self.0 + 1), times * staged >= since_first * CLUSTER_PAGES / 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequent_refaults_are_those_of_half_a_block() {
        let (once, is_whole) = BlockUse::default().refault(7, 1_000);
        assert!(!is_whole, "one refault shows no rate");
        // Two refaults while 125 pages came: 16 of the 32 pages while 1,000 come.
        assert!(once.refault(7 + 125, 1_000).1);
        assert!(!once.refault(7 + 126, 1_000).1);
        // The number of pages wraps.
        let (once, _) = BlockUse::default().refault((1 << 32) - 1, 1_000);
        assert!(once.refault((1 << 32) + 1, 1_000).1);
    }
}
