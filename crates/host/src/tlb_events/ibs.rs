//! Samples of AMD's instruction-based sampling: one micro-operation in so many is followed through the
//! pipeline, and the sample says whether the TLBs had its address, and how long the refill took.
//! This is the decoding; no backend opens the device yet.
//!
//! Invariant: what the hardware does not mark as valid is not decoded. A sample of every Nth operation
//! stands for N of them; the time of refills is no share of the program's, as refills overlap.
//! Sources: AMD64 Architecture Programmer's Manual volume 2, instruction-based sampling (IbsOpCtl,
//! IbsOpData3); the order of registers in a raw sample: Linux, arch/x86/events/amd/ibs.c.

use pagetax_core::trapstat::Cell;

/// A load or store that was sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryOp {
    /// Its linear address, if it is known.
    pub address: Option<u64>,
    /// What the TLBs had.
    pub found: Found,
    /// From the miss to the translation; loads only, else 0.
    pub refill_cycles: u16,
}

/// Where the translation of an address was; with log2 of the page size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// In the first level.
    First(u32),
    /// In the second level.
    Second(u32),
    /// In neither: a walk, to a page whose size is not told.
    Walk,
}

/// Words of a raw sample: its size and the capabilities, then seven registers.
const WORDS: usize = 8;
/// Bytes that the kernel states: all but the size itself.
const BYTES: u64 = 4 + 7 * 8;
const CTL: usize = 1;
const DATA3: usize = 5;
const LINEAR_ADDRESS: usize = 6;

/// Of IbsOpCtl: the sample is complete.
const VALID: u64 = 1 << 18;

/// Of IbsOpData3.
const LOAD: u64 = 1 << 0;
const STORE: u64 = 1 << 1;
const MISSED_FIRST: u64 = 1 << 2;
const MISSED_SECOND: u64 = 1 << 3;
const FIRST_2M: u64 = 1 << 4;
const FIRST_1G: u64 = 1 << 5;
const SECOND_2M: u64 = 1 << 6;
const ADDRESS_VALID: u64 = 1 << 17;
const SECOND_1G: u64 = 1 << 19;
const REFILL_SHIFT: u32 = 48;

impl MemoryOp {
    /// From the words of a `PERF_SAMPLE_RAW` field, its size first; none of what is no load or store.
    pub fn decode(raw: &[u64]) -> Option<MemoryOp> {
        let registers = raw.get(..WORDS).filter(|raw| raw[0] & 0xffff_ffff >= BYTES)?;
        let data = registers[DATA3];
        if registers[CTL] & VALID == 0 || data & (LOAD | STORE) == 0 {
            return None;
        }
        let is = |bit: u64| data & bit != 0;
        let size = |is_1g: bool, is_2m: bool| match (is_1g, is_2m) {
            (true, _) => 30,
            (false, true) => 21,
            (false, false) => 12,
        };
        let found = match (is(MISSED_FIRST), is(MISSED_SECOND)) {
            (false, _) => Found::First(size(is(FIRST_1G), is(FIRST_2M))),
            (true, false) => Found::Second(size(is(SECOND_1G), is(SECOND_2M))),
            (true, true) => Found::Walk,
        };
        Some(MemoryOp {
            address: is(ADDRESS_VALID).then_some(registers[LINEAR_ADDRESS]),
            found,
            refill_cycles: if is(LOAD) { (data >> REFILL_SHIFT) as u16 } else { 0 },
        })
    }
}

/// Samples of one CPU in one mode.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Loads and stores.
    pub memory_ops: u64,
    /// Of these, such that walked.
    pub walks: u64,
    /// Loads among the walks that told the time of their refill, and the sum.
    pub timed: u64,
    /// In cycles.
    pub refill_cycles: u64,
}

impl Tally {
    /// One more sample.
    pub fn add(&mut self, op: MemoryOp) {
        self.memory_ops += 1;
        if op.found == Found::Walk {
            self.walks += 1;
            self.timed += u64::from(op.refill_cycles > 0);
            self.refill_cycles += u64::from(op.refill_cycles);
        }
    }

    /// Walks a second, where each sample stands for `period` operations.
    pub fn cell(&self, period: u64, elapsed_ns: u64) -> Cell {
        let seconds = elapsed_ns.max(1) as f64 / 1e9;
        Cell { per_s: Some((self.walks * period) as f64 / seconds), percent: None }
    }

    /// Cycles of a refill on the average; none if no sample had one.
    pub fn mean_refill_cycles(&self) -> Option<f64> {
        (self.timed > 0).then(|| self.refill_cycles as f64 / self.timed as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the kernel lays registers out.
    fn raw(ctl: u64, data3: u64, address: u64) -> [u64; WORDS] {
        let caps = 0x3ff;
        [BYTES | caps << 32, ctl, 0xffff_ffff_8204_aea7, 0, 0, data3, address, 0]
    }

    /// From AMD's own machines: see tests/data/tlb-events/captured/README.md, which has the addresses.
    const STORE_2M: (u64, u64, u64) =
        (0x0000_02c3_0006_186a, 0x0000_0000_3196_0092, 0xff11_0008_a539_8920);
    const LOAD_1G: (u64, u64) = (0x0000_0045_0007_0008, 0x0000_0068_1d17_00a1);

    #[test]
    fn captured_samples_are_what_their_decoder_said() {
        let (ctl, data3, address) = STORE_2M;
        let store = MemoryOp::decode(&raw(ctl, data3, address)).unwrap();
        let expected =
            MemoryOp { address: Some(address), found: Found::First(21), refill_cycles: 0 };
        assert_eq!(store, expected);
        let (ctl, data3) = LOAD_1G;
        let load = MemoryOp::decode(&raw(ctl, data3, 0x1000)).unwrap();
        assert_eq!((load.found, load.refill_cycles), (Found::First(30), 0), "the data came late");
    }

    /// Made after the manual's layout: nobody has published a sample that missed.
    #[test]
    fn misses_are_told_by_level_and_what_is_not_valid_is_not() {
        let (ctl, ..) = STORE_2M;
        let found = |data3: u64| MemoryOp::decode(&raw(ctl, data3, 0x7000)).map(|op| op.found);
        assert_eq!(found(LOAD), Some(Found::First(12)));
        assert_eq!(found(LOAD | MISSED_FIRST), Some(Found::Second(12)));
        assert_eq!(found(STORE | MISSED_FIRST | SECOND_2M), Some(Found::Second(21)));
        assert_eq!(found(LOAD | MISSED_FIRST | SECOND_1G), Some(Found::Second(30)));
        let walk = LOAD | MISSED_FIRST | MISSED_SECOND | 321 << REFILL_SHIFT;
        let op = MemoryOp::decode(&raw(ctl, walk, 0x7000)).unwrap();
        assert_eq!((op.found, op.refill_cycles, op.address), (Found::Walk, 321, None));
        assert_eq!(found(MISSED_FIRST), None, "no load and no store");
        assert_eq!(MemoryOp::decode(&raw(ctl & !VALID, walk, 0)), None);
        assert_eq!(MemoryOp::decode(&raw(ctl, walk, 0)[..7]), None, "cut short");
        let mut short = raw(ctl, walk, 0);
        short[0] = 12;
        assert_eq!(MemoryOp::decode(&short), None, "less than it should be");
    }

    #[test]
    fn a_sample_stands_for_its_period() {
        let walk = |refill_cycles| MemoryOp { address: None, found: Found::Walk, refill_cycles };
        let mut tally = Tally::default();
        assert_eq!(tally.mean_refill_cycles(), None);
        let hit = MemoryOp { found: Found::First(12), ..walk(0) };
        [walk(100), walk(0), walk(300), hit].into_iter().for_each(|op| tally.add(op));
        assert_eq!((tally.memory_ops, tally.walks), (4, 3));
        let cell = Cell { per_s: Some(600_000.0), percent: None };
        assert_eq!(tally.cell(100_000, 500_000_000), cell);
        assert_eq!(tally.mean_refill_cycles(), Some(200.0));
    }
}
