//! The soft refaults of a staging block, which show if all its pages come back.

use super::super::table::CLUSTER_PAGES;

/// The use of a staging block in one word, 0 while it has no soft refault. The high 32 bits are the
/// number of evicted pages at its first soft refault, the low ones its number of soft refaults.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BlockUse(pub u64);

impl BlockUse {
    /// Counts a soft refault after this many evicted pages. Also returns true if, at this rate, all
    /// pages of the block refault before the staged pages are replaced.
    pub fn refault(self, evicted: u64, staged: usize) -> (BlockUse, bool) {
        if self.0 == 0 {
            return (BlockUse(evicted << 32 | 1), false);
        }
        let times = (self.0 as u32 + 1) as usize;
        let since_first = (evicted - (self.0 >> 32)) as u32 as usize;
        (BlockUse(self.0 + 1), times * staged >= since_first * CLUSTER_PAGES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequent_refaults_are_those_of_a_whole_block() {
        let (once, is_whole) = BlockUse::default().refault(7, 1_000);
        assert!(!is_whole, "one refault shows no rate");
        // Two refaults in 62 evictions: all 32 pages in 992.
        assert!(once.refault(7 + 62, 1_000).1);
        assert!(!once.refault(7 + 63, 1_000).1);
        // The number of evictions wraps.
        let (once, _) = BlockUse::default().refault((1 << 32) - 1, 1_000);
        assert!(once.refault((1 << 32) + 1, 1_000).1);
    }
}
