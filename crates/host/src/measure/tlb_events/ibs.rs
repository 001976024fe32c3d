//! Samples of AMD's instruction-based sampling (IBS). It follows one micro-operation in every N through
//! the pipeline. The sample shows if the TLBs had the address, and how long the refill took.
//!
//! Invariant: fields that the hardware does not mark as valid are not decoded. A sample of every Nth
//! operation stands for N of them. The time of refills is not a share of the program's time, as refills
//! overlap. The device cannot exclude user or kernel mode, so each sample's mode separates them.
//!
//! Sources: AMD64 Architecture Programmer's Manual volume 2, instruction-based sampling (IbsOpCtl,
//! IbsOpData3). The order of registers in a raw sample: Linux, arch/x86/events/amd/ibs.c.

use super::open::{cpus_of, tasks};
use super::{CountError, CountTarget};
use crate::procfs::Root;
use crate::sys::perf::{self, Event, EventKind, EventSpec, Ring, Sampling};
use pagetax_core::counter::Provenance;
use pagetax_core::trapstat::{Cell, Cells, Listing, Mode, TrapstatRow};

/// A load or store that was sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryOp {
    /// The linear address; `None` if it is not valid.
    pub address: Option<u64>,
    /// The TLB level that had the translation.
    pub found: Found,
    /// The cycles from the miss to the translation; 0 for stores.
    pub refill_cycles: u16,
}

/// The place where the translation was found, with log2 of the page size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// The first-level TLB had it.
    First(u32),
    /// The second-level TLB had it.
    Second(u32),
    /// Both levels missed: a page walk, to a page of unknown size.
    Walk,
}

/// The words of a raw sample: its size and the capabilities, then seven registers.
const WORDS: usize = 8;
/// The size in bytes that the kernel states: all but the size field.
const BYTES: u64 = 4 + 7 * 8;
const CTL: usize = 1;
const DATA3: usize = 5;
const LINEAR_ADDRESS: usize = 6;

/// The bit of IbsOpCtl that marks a complete sample.
const VALID: u64 = 1 << 18;

/// The bits of IbsOpData3; the first marks a load.
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
    /// Decodes the words of a `PERF_SAMPLE_RAW` field, its size first; `None` if it is not a load or
    /// store.
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

/// The samples of one CPU in one mode.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OpCounts {
    /// The number of loads and stores.
    pub memory_ops: u64,
    /// The number of these that needed a page walk.
    pub walks: u64,
    /// The number of loads with a walk whose refill time is known.
    pub timed: u64,
    /// The sum of their refill times, in cycles.
    pub refill_cycles: u64,
}

impl OpCounts {
    /// Adds a sample to the counts.
    pub fn add(&mut self, op: MemoryOp) {
        self.memory_ops += 1;
        if op.found == Found::Walk {
            self.walks += 1;
            self.timed += u64::from(op.refill_cycles > 0);
            self.refill_cycles += u64::from(op.refill_cycles);
        }
    }

    fn merge(&mut self, other: &OpCounts) {
        self.memory_ops += other.memory_ops;
        self.walks += other.walks;
        self.timed += other.timed;
        self.refill_cycles += other.refill_cycles;
    }

    /// Returns the walks a second, where each sample stands for `period` operations.
    pub fn cell(&self, period: u64, elapsed_ns: u64) -> Cell {
        let seconds = elapsed_ns.max(1) as f64 / 1e9;
        Cell { per_s: Some((self.walks * period) as f64 / seconds), percent: None }
    }

    /// Returns the mean cycles of a refill; `None` if no sample has one.
    pub fn mean_refill_cycles(&self) -> Option<f64> {
        (self.timed > 0).then(|| self.refill_cycles as f64 / self.timed as f64)
    }
}

const DEVICE: &str = "/sys/bus/event_source/devices/ibs_op";
/// The operations per sample, for about ten thousand samples a second; a multiple of 16.
const PERIOD: u64 = 1 << 18;
/// The size of each CPU's ring, in pages: enough for a tenth of a second at that rate.
const RING_PAGES: usize = 64;

/// The IBS device as the kernel offers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Device {
    event_type: u32,
    /// The configuration bit that makes it count operations, not cycles.
    count_operations: u64,
}

impl Device {
    /// Finds the device; `None` if the CPU or the kernel lacks it, or if it cannot count operations.
    fn find(root: &Root) -> Option<Device> {
        let event_type = root.number(&format!("{DEVICE}/type")).ok()?;
        let format = root.text(&format!("{DEVICE}/format/cnt_ctl")).ok()?;
        let bit: u32 = format.strip_prefix("config:")?.parse().ok()?;
        Some(Device { event_type: event_type as u32, count_operations: 1u64.checked_shl(bit)? })
    }
}

/// The samples of one CPU.
#[derive(Debug)]
struct Feed {
    cpu: u32,
    ring: Ring,
    /// The event that owns the ring's memory; closing it would end the samples.
    _event: Event,
    /// The samples in user and in kernel mode since the last listing.
    tallies: [OpCounts; 2],
    lost: u64,
}

/// The device while it samples.
#[derive(Debug)]
pub struct Sampler {
    feeds: Vec<Feed>,
}

impl Sampler {
    /// Starts sampling. Fails with [`CountError::NoUnit`] if there is no such device.
    pub fn open(target: &CountTarget) -> Result<Sampler, CountError> {
        let device = Device::find(&Root::default()).ok_or(CountError::NoUnit)?;
        let feed = |(cpu, pid): (u32, i32)| {
            let event = Event::open(&EventSpec {
                pid,
                cpu: cpu as i32,
                sampling: Some(Sampling { period: PERIOD, fields: perf::FIELD_RAW }),
                inherit: pid != -1,
                exclude_kernel: false,
                enable_on_exec: *target == CountTarget::NextCommand,
                ..EventSpec::new(EventKind::Raw {
                    event_type: device.event_type,
                    config: device.count_operations,
                })
            });
            let event = event.map_err(|error| CountError::of(error, pid == -1))?;
            let ring = Ring::new(&event, RING_PAGES).map_err(CountError::System)?;
            Ok(Feed { cpu, ring, _event: event, tallies: Default::default(), lost: 0 })
        };
        let feeds: Result<_, CountError> = places(target)?.into_iter().map(feed).collect();
        Ok(Sampler { feeds: feeds? })
    }

    /// Reads the new samples. Call it several times in a tenth of a second, before a ring is full.
    pub fn look(&mut self) {
        for Feed { ring, tallies, lost, .. } in &mut self.feeds {
            ring.drain(|record| match record.kind {
                perf::RECORD_SAMPLE => {
                    let is_user = record.misc & perf::MISC_CPUMODE_MASK == perf::MISC_USER;
                    let op = MemoryOp::decode(record.words);
                    op.into_iter().for_each(|op| tallies[usize::from(!is_user)].add(op));
                }
                perf::RECORD_LOST => *lost += record.words.get(1).copied().unwrap_or(0),
                _ => {}
            });
        }
    }

    /// Returns the listing since the last one, or since the start.
    pub fn listing(&mut self, end_ns: u64, elapsed_ns: u64) -> Listing {
        self.look();
        let taken = self.feeds.iter_mut().map(|feed| {
            (feed.cpu, std::mem::take(&mut feed.tallies), std::mem::take(&mut feed.lost))
        });
        listing(&taken.collect::<Vec<_>>(), end_ns, elapsed_ns)
    }
}

/// Returns pairs of a CPU and a task; -1 means all tasks. A task needs a ring on each CPU.
fn places(target: &CountTarget) -> Result<Vec<(u32, i32)>, CountError> {
    let (cpus, tasks) = match target {
        CountTarget::Cpus(cpus) => (cpus_of(cpus.as_ref())?, vec![-1]),
        CountTarget::Processes(pids) => (cpus_of(None)?, tasks(pids)?),
        CountTarget::NextCommand => (cpus_of(None)?, vec![0]),
    };
    Ok(tasks.iter().flat_map(|task| cpus.iter().map(|cpu| (*cpu, *task))).collect())
}

/// Makes a listing from each CPU's samples in user and in kernel mode and its lost samples. Feeds of one
/// CPU are added.
fn listing(taken: &[(u32, [OpCounts; 2], u64)], end_ns: u64, elapsed_ns: u64) -> Listing {
    let mut sums: Vec<(u32, [OpCounts; 2])> = Vec::new();
    for (cpu, tallies, _) in taken {
        match sums.iter_mut().find(|(known, _)| known == cpu) {
            Some((_, sum)) => sum.iter_mut().zip(tallies).for_each(|(sum, more)| sum.merge(more)),
            None => sums.push((*cpu, *tallies)),
        }
    }
    let row = |cpu: u32, mode: Mode, tally: &OpCounts| {
        let cells = Cells { dtlb: tally.cell(PERIOD, elapsed_ns), ..Cells::default() };
        TrapstatRow { cpu, mode, page_bytes: None, cells }
    };
    let rows = sums.iter().flat_map(|(cpu, [user, kernel])| {
        [row(*cpu, Mode::User, user), row(*cpu, Mode::Kernel, kernel)]
    });
    let mut all = OpCounts::default();
    sums.iter().flat_map(|(_, tallies)| tallies).for_each(|tally| all.merge(tally));
    Listing {
        title: "instruction-based sampling".into(),
        provenance: Provenance::Derived,
        end_ns,
        elapsed_ns,
        rows: rows.collect(),
        notes: notes(&all, taken.iter().map(|(.., lost)| lost).sum()),
    }
}

fn notes(all: &OpCounts, lost: u64) -> Vec<String> {
    let percent = 196.0 / (all.walks.max(1) as f64).sqrt();
    let mut notes = vec![format!(
        "one operation in {PERIOD} was sampled: {} loads and stores, {} of them with a walk, ±{percent:.0} % \
         (95 %); page sizes of walks, fetches and shares of time are not told",
        all.memory_ops, all.walks
    )];
    if let Some(cycles) = all.mean_refill_cycles() {
        let timed = all.timed;
        notes.push(format!("a refill took {cycles:.0} cycles on average, by {timed} loads"));
    }
    if lost > 0 {
        notes.push(format!("{lost} samples were lost: misses are more than shown"));
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lays registers out as the kernel does.
    fn raw(ctl: u64, data3: u64, address: u64) -> [u64; WORDS] {
        let caps = 0x3ff;
        [BYTES | caps << 32, ctl, 0xffff_ffff_8204_aea7, 0, 0, data3, address, 0]
    }

    /// Samples of AMD's own machines; tests/data/tlb-events/captured/README.md has the addresses.
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

    /// Follows the manual's layout: there is no published sample of a miss.
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
        let mut tally = OpCounts::default();
        assert_eq!(tally.mean_refill_cycles(), None);
        let hit = MemoryOp { found: Found::First(12), ..walk(0) };
        [walk(100), walk(0), walk(300), hit].into_iter().for_each(|op| tally.add(op));
        assert_eq!((tally.memory_ops, tally.walks), (4, 3));
        let cell = Cell { per_s: Some(600_000.0), percent: None };
        assert_eq!(tally.cell(100_000, 500_000_000), cell);
        assert_eq!(tally.mean_refill_cycles(), Some(200.0));
    }

    #[test]
    fn the_device_is_found_where_it_counts_operations() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        assert_eq!(Device::find(&root), None);
        std::fs::create_dir_all(root.path(&format!("{DEVICE}/format"))).unwrap();
        let write =
            |name: &str, text: &str| std::fs::write(root.path(&format!("{DEVICE}/{name}")), text);
        write("type", "11\n").unwrap();
        assert_eq!(Device::find(&root), None, "it counts cycles");
        write("format/cnt_ctl", "config:19\n").unwrap();
        assert_eq!(Device::find(&root), Some(Device { event_type: 11, count_operations: 1 << 19 }));
    }

    #[test]
    fn feeds_of_one_cpu_add_up_and_the_listing_says_what_it_lacks() {
        let tally = OpCounts { memory_ops: 500, walks: 100, timed: 10, refill_cycles: 2_000 };
        let none = OpCounts::default();
        let taken = [(0, [tally, none], 0), (1, [none, tally], 7), (0, [tally, none], 0)];
        let listing = listing(&taken, 3_000_000_000, 2_000_000_000);
        let per_s = |cpu, mode| {
            let row = listing.rows.iter().find(|row| (row.cpu, row.mode) == (cpu, mode)).unwrap();
            assert_eq!(
                (row.page_bytes, row.cells.itlb.per_s, row.cells.percent()),
                (None, None, None)
            );
            row.cells.dtlb.per_s.unwrap() / PERIOD as f64
        };
        assert_eq!(listing.rows.len(), 4);
        assert_eq!([per_s(0, Mode::User), per_s(0, Mode::Kernel)], [100.0, 0.0]);
        assert_eq!([per_s(1, Mode::User), per_s(1, Mode::Kernel)], [0.0, 50.0]);
        let notes = listing.notes.join("\n");
        assert!(notes.contains("300 of them with a walk, ±11 %"), "{notes}");
        assert!(notes.contains("200 cycles") && notes.contains("7 samples were lost"), "{notes}");
    }

    #[test]
    fn without_the_device_it_says_so() {
        if Device::find(&Root::default()).is_none() {
            let error = Sampler::open(&CountTarget::NextCommand).unwrap_err();
            assert!(matches!(error, CountError::NoUnit), "{error}");
        }
    }
}
