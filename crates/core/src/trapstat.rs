//! The listing of trapstat: TLB misses a second and the share of time that they took, by CPU, mode
//! and page size. Backends fill it in; renderers print it.
//!
//! Invariant: what is not known is none, never 0, and the listing says why it is not.
//! Source: Solaris' trapstat(1M), options -t, -T and -P.

use crate::counter::Provenance;
use crate::units::PageSize;
use serde::{Deserialize, Serialize};

/// Misses of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Cell {
    /// The misses per second; `None` if nothing counts them.
    pub per_s: Option<f64>,
    /// The share of the CPU's time, in percent; `None` if nothing measures it.
    pub percent: Option<f64>,
}

impl Cell {
    /// Returns a cell with both numbers.
    pub fn known(per_s: f64, percent: f64) -> Self {
        Cell { per_s: Some(per_s), percent: Some(percent) }
    }

    fn plus(self, other: Cell) -> Cell {
        let sum = |a: Option<f64>, b: Option<f64>| match (a, b) {
            (None, None) => None,
            (a, b) => Some(a.unwrap_or(0.0) + b.unwrap_or(0.0)),
        };
        Cell { per_s: sum(self.per_s, other.per_s), percent: sum(self.percent, other.percent) }
    }
}

/// The mode of the CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// `u`
    User,
    /// `k`
    Kernel,
}

impl Mode {
    /// Returns the letter that trapstat writes.
    pub fn letter(self) -> char {
        match self {
            Mode::User => 'u',
            Mode::Kernel => 'k',
        }
    }
}

/// The four kinds of misses, in the order of columns.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Cells {
    /// Instruction fetches that no TLB could translate.
    pub itlb: Cell,
    /// The part of them that missed the translation storage buffer as well.
    pub itsb: Cell,
    /// Loads and stores that no TLB could translate.
    pub dtlb: Cell,
    /// The part of them that missed the translation storage buffer as well.
    pub dtsb: Cell,
}

impl Cells {
    /// Returns the four cells in the order of columns.
    pub fn each(&self) -> [Cell; 4] {
        [self.itlb, self.itsb, self.dtlb, self.dtsb]
    }

    /// Returns the time of all four, in percent.
    pub fn percent(&self) -> Option<f64> {
        let known: Vec<f64> = self.each().iter().filter_map(|cell| cell.percent).collect();
        (!known.is_empty()).then(|| known.iter().sum())
    }

    fn plus(self, other: Cells) -> Cells {
        Cells {
            itlb: self.itlb.plus(other.itlb),
            itsb: self.itsb.plus(other.itsb),
            dtlb: self.dtlb.plus(other.dtlb),
            dtsb: self.dtsb.plus(other.dtsb),
        }
    }

    fn percent_over(mut self, cpus: usize) -> Cells {
        for cell in [&mut self.itlb, &mut self.itsb, &mut self.dtlb, &mut self.dtsb] {
            cell.percent = cell.percent.map(|percent| percent / cpus.max(1) as f64);
        }
        self
    }
}

/// Misses of one CPU, mode and page size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TrapstatRow {
    /// Number of the CPU, or of the thread where each has CPUs of its own.
    pub cpu: u32,
    /// The mode that the CPU was in.
    pub mode: Mode,
    /// The page size; `None` for all sizes together.
    pub page_bytes: Option<u64>,
    /// The misses and their time, by kind.
    #[serde(flatten)]
    pub cells: Cells,
}

/// One listing: of an interval, or of a whole run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Listing {
    /// The machine and page sizes, or the counters.
    pub title: String,
    /// The provenance of the numbers.
    pub provenance: Provenance,
    /// The end of the interval, since the start.
    pub end_ns: u64,
    /// The length of the interval.
    pub elapsed_ns: u64,
    /// The misses by CPU, mode and page size.
    pub rows: Vec<TrapstatRow>,
    /// Remarks on the numbers: reasons why some are missing, assumptions, scaling.
    pub notes: Vec<String>,
}

impl Listing {
    /// Returns rows without page sizes, as -t has them.
    pub fn by_mode(&self) -> Vec<TrapstatRow> {
        let mut rows: Vec<TrapstatRow> = Vec::new();
        for row in &self.rows {
            match rows.iter_mut().find(|sum| (sum.cpu, sum.mode) == (row.cpu, row.mode)) {
                Some(sum) => sum.cells = sum.cells.plus(row.cells),
                None => rows.push(TrapstatRow { page_bytes: None, ..row.clone() }),
            }
        }
        rows
    }

    /// Returns the line `ttl`: the sum of counts, and times averaged over CPUs.
    pub fn total(&self) -> Cells {
        let mut cpus: Vec<u32> = self.rows.iter().map(|row| row.cpu).collect();
        cpus.sort_unstable();
        cpus.dedup();
        let sum = self.rows.iter().fold(Cells::default(), |sum, row| sum.plus(row.cells));
        sum.percent_over(cpus.len())
    }
}

/// Returns a page size as trapstat writes it: `8k`, `64k`, `4m`.
pub fn size_name(bytes: u64) -> String {
    PageSize::new(bytes).map_or(bytes.to_string(), |size| size.to_string().to_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(cpu: u32, mode: Mode, page_bytes: u64, dtlb: Cell) -> TrapstatRow {
        TrapstatRow {
            cpu,
            mode,
            page_bytes: Some(page_bytes),
            cells: Cells { dtlb, ..Cells::default() },
        }
    }

    #[test]
    fn counts_add_up_and_times_are_averaged_over_cpus() {
        let listing = Listing {
            title: String::new(),
            provenance: Provenance::Modeled,
            end_ns: 0,
            elapsed_ns: 0,
            rows: vec![
                row(0, Mode::User, 8192, Cell::known(10.0, 40.0)),
                row(0, Mode::User, 4 << 20, Cell::known(5.0, 10.0)),
                row(0, Mode::Kernel, 8192, Cell::default()),
                row(1, Mode::User, 8192, Cell::known(1.0, 10.0)),
            ],
            notes: Vec::new(),
        };
        let by_mode = listing.by_mode();
        assert_eq!(by_mode.len(), 3);
        assert_eq!(by_mode[0].cells.dtlb, Cell::known(15.0, 50.0));
        assert_eq!(by_mode[1].cells.percent(), None, "unknown is not 0");
        let total = listing.total();
        assert_eq!(total.dtlb, Cell::known(16.0, 30.0));
        assert_eq!(total.itlb, Cell::default());
        assert_eq!(total.percent(), Some(30.0));
        assert_eq!((size_name(8192), size_name(4 << 20)), ("8k".into(), "4m".into()));
    }
}
