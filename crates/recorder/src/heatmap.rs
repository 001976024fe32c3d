//! A heatmap of a recorded program: how often it goes to another page, by time and address.
//!
//! Time is counted in accesses, which do not depend on the recorder's speed. Invariant: no count is lost. A
//! program of any length has between half of [`COLUMNS`] and all of them: at the last one, pairs are joined.

use crate::filter::PAGE_SHIFT;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, HashMap};

/// The most columns of a heatmap.
const COLUMNS: usize = 256;
/// The most rows.
const ROWS: usize = 64;
/// The accesses of a column at first.
const FIRST_WIDTH: u64 = 4096;
/// log2 of the bytes of a block, the finest unit of addresses.
const BLOCK_SHIFT: u32 = 21;

/// Counts of page changes so far.
#[derive(Debug)]
pub struct Heatmap {
    /// Counts by block, for each column.
    columns: Vec<HashMap<u64, u64>>,
    /// The accesses of a column.
    width: u64,
    /// The accesses of the last column so far.
    in_last: u64,
    /// The block of the last change, and its changes in a row that no column has yet: a program mostly stays
    /// in a block.
    pending: (u64, u64),
}

/// The counts of a heatmap. Rows are blocks of addresses that were used, in ascending order; addresses
/// between them are left out.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct HeatmapCounts {
    /// The accesses of each column. The last one may have fewer.
    pub column_access_count: u64,
    /// The first address of each row.
    pub row_starts: Vec<u64>,
    /// The address behind each row.
    pub row_ends: Vec<u64>,
    /// Page changes by row, then by column.
    pub page_change_counts: Vec<Vec<u64>>,
}

impl Default for Heatmap {
    fn default() -> Heatmap {
        Heatmap { columns: vec![HashMap::new()], width: FIRST_WIDTH, in_last: 0, pending: (0, 0) }
    }
}

impl Heatmap {
    /// Counts a change to a page of 4 KiB.
    #[inline]
    pub fn change(&mut self, page: u64) {
        let block = page >> (BLOCK_SHIFT - PAGE_SHIFT);
        if block != self.pending.0 {
            self.settle();
            self.pending.0 = block;
        }
        self.pending.1 += 1;
    }

    /// Counts the pending changes in the last column. Call it before reading counts.
    pub fn settle(&mut self) {
        let (block, count) = std::mem::take(&mut self.pending);
        if count > 0 {
            let column = self.columns.len() - 1;
            *self.columns[column].entry(block).or_default() += count;
        }
    }

    /// Lets accesses pass.
    pub fn ran(&mut self, accesses: u64) {
        self.in_last += accesses;
        while self.in_last >= self.width {
            self.in_last -= self.width;
            self.settle();
            if self.columns.len() == COLUMNS {
                self.join_pairs();
            }
            self.columns.push(HashMap::new());
        }
    }

    /// Makes each two columns one.
    fn join_pairs(&mut self) {
        let all = std::mem::take(&mut self.columns);
        let mut all = all.into_iter();
        while let Some(mut first) = all.next() {
            for (block, count) in all.next().into_iter().flatten() {
                *first.entry(block).or_default() += count;
            }
            self.columns.push(first);
        }
        self.width *= 2;
    }

    /// Returns the counts, with neighbouring blocks in one row if there are many.
    pub fn counts(&self) -> HeatmapCounts {
        let blocks: BTreeSet<u64> = self.columns.iter().flat_map(HashMap::keys).copied().collect();
        let blocks = Vec::from_iter(blocks);
        let rows: Vec<&[u64]> = blocks.chunks(blocks.len().div_ceil(ROWS).max(1)).collect();
        let in_row = |row: &&[u64], column: &HashMap<u64, u64>| {
            row.iter().filter_map(|block| column.get(block)).sum()
        };
        let counts = |row: &&[u64]| self.columns.iter().map(|column| in_row(row, column)).collect();
        HeatmapCounts {
            column_access_count: self.width,
            row_starts: rows.iter().map(|row| row[0] << BLOCK_SHIFT).collect(),
            row_ends: rows.iter().map(|row| (row[row.len() - 1] + 1) << BLOCK_SHIFT).collect(),
            page_change_counts: rows.iter().map(counts).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_program_has_few_columns_and_rows_and_all_its_counts() {
        let mut map = Heatmap::default();
        let steps = COLUMNS as u64 * 5;
        for step in 0..steps {
            // A block each step, in two parts of the address space.
            map.change((step % 200) << 9);
            map.change((1 << 30) + ((step % 3) << 9));
            map.ran(FIRST_WIDTH);
        }
        map.settle();
        let counts = map.counts();
        let columns = counts.page_change_counts[0].len();
        assert!(counts.row_starts.len() <= ROWS && (COLUMNS / 2..=COLUMNS).contains(&columns));
        assert_eq!(counts.page_change_counts.iter().flatten().sum::<u64>(), 2 * steps);
        assert_eq!(counts.column_access_count, FIRST_WIDTH * 8);
        assert!(counts.row_starts.is_sorted() && counts.row_starts[0] == 0);
        assert!(counts.row_ends.last().unwrap() >= &((1 << 42) + (3 << 21)));
    }

    #[test]
    fn an_empty_program_has_no_rows() {
        assert!(Heatmap::default().counts().row_starts.is_empty());
    }
}
