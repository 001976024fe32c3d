//! Predicts the cost of translation with other page sizes: feeds the program's pages to this machine's
//! TLBs and page walkers, once for each size.
//!
//! The heap and other private memory lie on large pages, aligned by address. Code, files and stacks stay
//! on base pages. A large page counts as one fault if at least half of it is used: only then did the
//! kernel likely have all of it in one mapping.
//! Invariant: all sizes see the same pages in the same order.

use crate::filter::PAGE_SHIFT;
use crate::pages::{AccessKind, PageObserver, Thread};
use crate::places::Segment;
use pagetax_sim::hardware::translation::Translation;
use std::collections::{HashMap, HashSet};
use std::ops::Range;

/// The walks of one page size, and their time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Walks {
    /// Walks of dependent loads.
    pub dependent_count: u64,
    /// The time of dependent loads' walks, in picoseconds.
    pub dependent_ps: u64,
    /// Walks of all other accesses. They may overlap.
    pub other_count: u64,
    /// Their time in picoseconds if they overlap as in the machine's calibration.
    pub other_ps: u64,
    /// Their time in picoseconds if none overlap.
    pub other_alone_ps: u64,
    /// The time of hits in lower TLB levels, in picoseconds.
    pub level_ps: u64,
}

impl Walks {
    /// Returns the best estimate and the lower and upper bound, in nanoseconds. Best: other walks
    /// overlap as those of random gathers do. Low: they hide behind other work. High: none overlap.
    pub fn ns(&self) -> (f64, f64, f64) {
        let ns = |ps: u64| ps as f64 / 1e3;
        let sure = self.dependent_ps + self.level_ps;
        (ns(sure + self.other_ps), ns(sure), ns(sure + self.other_alone_ps))
    }
}

/// Counts of first touches of private memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Faults {
    /// The number of faults on base pages.
    pub base_count: u64,
    /// Faults on the base page after the previous fault's: the program fills memory in order.
    pub base_filled_count: u64,
    /// Faults on large pages of which at least half is used.
    pub large_count: u64,
    /// Faults on large pages that were mostly filled in order.
    pub large_filled_count: u64,
}

/// The used base pages of a large page.
#[derive(Debug, Clone, Copy, Default)]
struct LargePageUse {
    pages: u64,
    in_order: u64,
}

/// The state of one page size.
struct PredictedSize {
    shift: u32,
    /// log2 of the page size in TLBs. Sizes that no array holds count as base pages.
    tlb_shift: u32,
    cpus: Vec<Translation>,
    walks: Walks,
    /// Large pages by process and number.
    large: HashMap<(u32, u64), LargePageUse>,
    faults: Faults,
}

/// An observer that predicts walks and faults for several page sizes.
pub struct Predictor {
    cpu: Translation,
    sizes: Vec<PredictedSize>,
    /// Each thread's last 2 MiB of addresses, and true if private memory is in them.
    last: Vec<((u32, u64), bool)>,
    private: HashSet<(u32, u64)>,
    /// The process and page of the last first touch.
    found: (u32, u64),
    /// Instructions of all threads.
    pub instruction_count: u64,
    /// Loads and stores of all threads.
    pub access_count: u64,
}

/// log2 of the unit in which private memory is distinguished, in base pages.
const PIECE_SHIFT: u32 = 21 - PAGE_SHIFT;

impl Predictor {
    /// Creates a predictor for a CPU and page sizes (log2), which include the base page.
    pub fn new(cpu: &Translation, shifts: &[u32]) -> Self {
        let size = |shift: &u32| PredictedSize {
            shift: *shift,
            tlb_shift: cpu.data().nearest_arrays(*shift).map_or(PAGE_SHIFT, |_| *shift),
            cpus: Vec::new(),
            walks: Walks::default(),
            large: HashMap::new(),
            faults: Faults::default(),
        };
        Predictor {
            cpu: cpu.clone(),
            sizes: shifts.iter().map(size).collect(),
            last: Vec::new(),
            private: HashSet::new(),
            found: (0, u64::MAX),
            instruction_count: 0,
            access_count: 0,
        }
    }

    /// Returns the number of threads that accessed memory.
    pub fn thread_count(&self) -> usize {
        self.sizes.first().map_or(0, |size| size.cpus.len())
    }

    /// Returns the walks of the page size with this index.
    pub fn walks(&self, size: usize) -> Walks {
        self.sizes[size].walks
    }

    /// Returns the faults of the page size with this index.
    pub fn faults(&self, size: usize) -> Faults {
        let size = &self.sizes[size];
        size.large.values().fold(size.faults, |faults, used| size.with(faults, *used))
    }
}

impl PredictedSize {
    /// Adds the faults of a large page that goes out of use.
    fn with(&self, mut faults: Faults, used: LargePageUse) -> Faults {
        let is_large = used.pages >= 1 << (self.shift - PAGE_SHIFT) >> 1 && self.shift > PAGE_SHIFT;
        if is_large {
            faults.large_count += 1;
            faults.large_filled_count += u64::from(used.in_order * 2 > used.pages);
        } else {
            faults.base_count += used.pages;
            faults.base_filled_count += used.in_order;
        }
        faults
    }
}

fn is_private(segment: Segment) -> bool {
    matches!(segment, Segment::Heap | Segment::Anon | Segment::Unknown)
}

impl PageObserver for Predictor {
    #[inline]
    fn change(&mut self, thread: Thread, kind: AccessKind, page: u64) {
        if kind == AccessKind::Fetch {
            return;
        }
        let number = thread.number as usize;
        if self.last.len() <= number {
            self.last.resize(number + 1, ((0, u64::MAX), false));
            let cpu = &self.cpu;
            self.sizes.iter_mut().for_each(|size| size.cpus.resize(number + 1, cpu.clone()));
        }
        let piece = (thread.process, page >> PIECE_SHIFT);
        if self.last[number].0 != piece {
            self.last[number] = (piece, self.private.contains(&piece));
        }
        let is_private = self.last[number].1;
        for size in &mut self.sizes {
            let shift = if is_private { size.tlb_shift } else { PAGE_SHIFT };
            let alone = kind == AccessKind::DependentLoad;
            let found = size.cpus[number].access(page << PAGE_SHIFT, shift, alone);
            let walks = &mut size.walks;
            walks.level_ps += found.level_ps;
            if found.walked && alone {
                walks.dependent_count += 1;
                walks.dependent_ps += found.refill_ps;
            } else if found.walked {
                walks.other_count += 1;
                walks.other_ps += found.refill_ps;
                walks.other_alone_ps += found.alone_ps;
            }
        }
    }

    fn ran(&mut self, _: Thread, instructions: u64, accesses: u64) {
        self.instruction_count += instructions;
        self.access_count += accesses;
    }

    fn found(&mut self, process: u32, page: u64, segment: Segment) {
        if !is_private(segment) {
            return;
        }
        if self.private.insert((process, page >> PIECE_SHIFT)) {
            self.last.fill(((0, u64::MAX), false));
        }
        let in_order = self.found == (process, page.wrapping_sub(1));
        self.found = (process, page);
        for size in &mut self.sizes {
            let large = page >> (size.shift - PAGE_SHIFT);
            let used = size.large.entry((process, large)).or_default();
            used.pages += 1;
            used.in_order += u64::from(in_order);
        }
    }

    fn gone(&mut self, thread: Thread, pages: Range<u64>) {
        let process = thread.process;
        for size in &mut self.sizes {
            let by = size.shift - PAGE_SHIFT;
            let numbers = pages.start >> by..pages.end.div_ceil(1 << by);
            let is_gone = |key: &(u32, u64)| key.0 == process && numbers.contains(&key.1);
            // Searches the shorter of the two: the range or the table.
            let keys: Vec<(u32, u64)> = match numbers.end.saturating_sub(numbers.start) {
                count if count < size.large.len() as u64 => {
                    numbers.clone().map(|number| (process, number)).collect()
                }
                _ => size.large.keys().filter(|key| is_gone(key)).copied().collect(),
            };
            for key in keys {
                if let Some(used) = size.large.remove(&key) {
                    size.faults = size.with(size.faults, used);
                }
            }
            for cpu in &mut size.cpus {
                cpu.unmapped(pages.start << PAGE_SHIFT..pages.end << PAGE_SHIFT);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetax_sim::{hardware::configuration, models};

    fn predictor() -> Predictor {
        let model = models::find("x86-64-calibrated").unwrap();
        Predictor::new(&configuration::translation(&model).unwrap(), &[12, 16, 21])
    }

    /// Touches a line in each page of 64 MiB, twice.
    fn sweep(predictor: &mut Predictor, kind: AccessKind, segment: Segment) {
        let thread = Thread::default();
        let pages = 0x40_0000..0x40_4000;
        pages.clone().for_each(|page| predictor.found(0, page, segment));
        for page in pages.clone().chain(pages) {
            predictor.change(thread, kind, page);
        }
    }

    #[test]
    fn large_pages_save_walks_and_faults_of_private_memory() {
        let mut predictor = predictor();
        sweep(&mut predictor, AccessKind::Load, Segment::Anon);
        let walks = [0, 1, 2].map(|size| predictor.walks(size));
        assert_eq!(walks[0].other_count, 2 * 16_384);
        assert_eq!(walks[1], walks[0], "no TLB has 64K");
        assert_eq!(walks[2].other_count, 32);
        let base = Faults { base_count: 16_384, base_filled_count: 16_383, ..Faults::default() };
        let large =
            |count| Faults { large_count: count, large_filled_count: count, ..Faults::default() };
        let expected = [base, large(1_024), large(32)];
        assert_eq!([0, 1, 2].map(|size| predictor.faults(size)), expected);
        predictor.gone(Thread::default(), 0x40_0000..0x40_4000);
        assert_eq!([0, 1, 2].map(|size| predictor.faults(size)), expected, "they were faulted in");
    }

    #[test]
    fn files_stay_on_base_pages_and_chases_do_not_overlap() {
        let mut predictor = predictor();
        sweep(&mut predictor, AccessKind::DependentLoad, Segment::File);
        assert_eq!(predictor.walks(2), predictor.walks(0));
        assert_eq!(predictor.faults(2), Faults::default());
        let walks = predictor.walks(0);
        assert_eq!((walks.dependent_count, walks.other_count), (2 * 16_384, 0));
        let (value, low, high) = walks.ns();
        assert!(low == value && value == high && value > 1e5, "{low} {value} {high}");
        let mut predictor = self::predictor();
        sweep(&mut predictor, AccessKind::Load, Segment::File);
        let (value, low, high) = predictor.walks(0).ns();
        assert!(low < value && value < high && high > 1e5, "{low} {value} {high}");
    }
}
