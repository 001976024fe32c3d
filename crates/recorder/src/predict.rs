//! Predicts the cost of translation with other page sizes: feeds the program's pages to this machine's
//! TLBs and page walkers, once for each size.
//!
//! The heap and other private memory lie on large pages, aligned by address. Code, files and stacks stay
//! on base pages, unless [`Predictor::by_part`] is asked about them. A large page counts as one fault if at
//! least half of it is used: only then did the kernel likely have all of it in one mapping.
//! Invariant: all sizes see the same pages in the same order.

use crate::filter::PAGE_SHIFT;
use crate::pages::{AccessKind, PageObserver, Thread};
use crate::places::Segment;
use pagetax_core::address_pattern::{AddressPart, AddressPattern};
use pagetax_host::pages::only::{Allocation, Allocations};
use pagetax_sim::hardware::translation::{Lookup, Translation};
use std::collections::HashMap;
use std::ops::{AddAssign, Range};

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
    fn add(&mut self, found: Lookup, is_dependent: bool) {
        self.level_ps += found.level_ps;
        if found.walked && is_dependent {
            self.dependent_count += 1;
            self.dependent_ps += found.refill_ps;
        } else if found.walked {
            self.other_count += 1;
            self.other_ps += found.refill_ps;
            self.other_alone_ps += found.alone_ps;
        }
    }

    /// The number of counts in [`Walks::counts`].
    pub(crate) const COUNTS: usize = 6;

    /// Returns all its counts.
    pub(crate) fn counts(&self) -> [u64; Walks::COUNTS] {
        let Walks {
            dependent_count,
            dependent_ps,
            other_count,
            other_ps,
            other_alone_ps,
            level_ps,
        } = *self;
        [dependent_count, dependent_ps, other_count, other_ps, other_alone_ps, level_ps]
    }

    /// Returns the walks with these counts.
    pub(crate) fn from_counts(counts: [u64; Walks::COUNTS]) -> Walks {
        let [dependent_count, dependent_ps, other_count, other_ps, other_alone_ps, level_ps] =
            counts;
        Walks { dependent_count, dependent_ps, other_count, other_ps, other_alone_ps, level_ps }
    }

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

impl AddAssign for Faults {
    fn add_assign(&mut self, more: Faults) {
        self.base_count += more.base_count;
        self.base_filled_count += more.base_filled_count;
        self.large_count += more.large_count;
        self.large_filled_count += more.large_filled_count;
    }
}

/// The used base pages of a large page.
#[derive(Debug, Clone, Copy, Default)]
struct LargePageUse {
    pages: u64,
    in_order: u64,
}

impl LargePageUse {
    /// Returns the faults of a page of this size.
    fn faults(self, shift: u32) -> Faults {
        let is_large = self.pages >= 1 << (shift - PAGE_SHIFT) >> 1 && shift > PAGE_SHIFT;
        match is_large {
            true => Faults {
                large_count: 1,
                large_filled_count: u64::from(self.in_order * 2 > self.pages),
                ..Faults::default()
            },
            false => Faults {
                base_count: self.pages,
                base_filled_count: self.in_order,
                ..Faults::default()
            },
        }
    }
}

/// A set of parts, a bit each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PartSet(u8);

impl PartSet {
    const ALLOCATED: PartSet =
        PartSet::of(&[AddressPart::Heap, AddressPart::Arena, AddressPart::Mapping]);

    const fn of(parts: &[AddressPart]) -> PartSet {
        let (mut bits, mut at) = (0, 0);
        while at < parts.len() {
            bits |= 1 << parts[at] as u8;
            at += 1;
        }
        PartSet(bits)
    }

    fn has(self, part: AddressPart) -> bool {
        self.0 & 1 << part as u8 != 0
    }
}

/// The state of one page size.
struct PredictedSize {
    /// log2 of the page size of `parts`.
    shift: u32,
    /// log2 of the page size in TLBs. Sizes that no array holds count as base pages.
    tlb_shift: u32,
    /// The parts on such pages; others are on base pages.
    parts: PartSet,
    cpus: Vec<Translation>,
    walks: Walks,
    /// Large pages by process and number, and the shift of each.
    large: HashMap<(u32, u64, u32), LargePageUse>,
    faults: Faults,
}

impl PredictedSize {
    fn shift_of(&self, part: AddressPart) -> u32 {
        if self.parts.has(part) { self.shift } else { PAGE_SHIFT }
    }
}

/// 2 MiB of a program's addresses, from their first use until they are unmapped.
#[derive(Debug, Clone)]
struct MemoryBlock {
    part: AddressPart,
    /// The memory that the preload library logged, and the block's offset in it.
    place: Option<(Allocation, u64)>,
    page_count: u64,
    /// Walks and faults on base pages, and with all parts on large pages.
    uses: [(Walks, Faults); 2],
}

/// The use of 2 MiB of a part.
#[derive(Debug, Clone)]
pub struct BlockUse {
    /// The part of memory.
    pub part: AddressPart,
    /// The pattern of this block alone; none of memory that no pattern names so closely.
    pub pattern: Option<AddressPattern<'static>>,
    /// Bytes on base pages that were touched.
    pub touched_bytes: u64,
    /// Walks and faults on base pages.
    pub base: (Walks, Faults),
    /// Walks and faults with all parts on large pages.
    pub large: (Walks, Faults),
}

/// The walks and the first touches of a program by page size, base pages first.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Predicted {
    /// The walks of each size.
    pub walks: Vec<Walks>,
    /// The first touches of each size.
    pub faults: Vec<Faults>,
    /// Half of the 95 % interval of the time of walks that each size saves, in nanoseconds: the error of the
    /// sample. Empty if all was recorded.
    pub sampling_error_ns: Vec<f64>,
    /// Loads and stores.
    pub access_count: u64,
}

/// An observer that predicts walks and faults for several page sizes.
pub struct Predictor {
    cpu: Translation,
    sizes: Vec<PredictedSize>,
    /// True to keep the use of each block, and to count the stack.
    is_by_part: bool,
    allocations: Allocations,
    /// Each thread's last 2 MiB of addresses, and the block there.
    last: Vec<((u32, u64), Option<usize>)>,
    /// Blocks in use by process and number.
    pieces: HashMap<(u32, u64), usize>,
    blocks: Vec<MemoryBlock>,
    /// The process and page of the last first touch.
    found: (u32, u64),
    /// Instructions of all threads.
    pub instruction_count: u64,
    /// Loads and stores of all threads.
    pub access_count: u64,
}

/// log2 of the unit in which memory is distinguished, in base pages.
const PIECE_SHIFT: u32 = 21 - PAGE_SHIFT;
const NOWHERE: ((u32, u64), Option<usize>) = ((0, u64::MAX), None);

impl Predictor {
    /// Creates a predictor for a CPU and page sizes (log2), which include the base page. Private memory other
    /// than stacks is on these pages.
    pub fn new(cpu: &Translation, shifts: &[u32]) -> Self {
        let configs = shifts.iter().map(|shift| (*shift, PartSet::ALLOCATED));
        Predictor::of(cpu, configs, Allocations::default(), false)
    }

    /// Creates a predictor for parts of memory on pages of one size (log2). Its results are for base pages,
    /// for all these parts on large pages, and for each part alone. The program logs its memory to
    /// `allocations`.
    pub fn by_part(
        cpu: &Translation,
        shift: u32,
        parts: &[AddressPart],
        allocations: Allocations,
    ) -> Self {
        let alone = parts.iter().map(|part| (shift, PartSet::of(&[*part])));
        let both = [(PAGE_SHIFT, PartSet(0)), (shift, PartSet::of(parts))];
        Predictor::of(cpu, both.into_iter().chain(alone), allocations, true)
    }

    fn of(
        cpu: &Translation,
        configs: impl Iterator<Item = (u32, PartSet)>,
        allocations: Allocations,
        is_by_part: bool,
    ) -> Self {
        let size = |(shift, parts): (u32, PartSet)| PredictedSize {
            shift,
            tlb_shift: cpu.data().nearest_arrays(shift).map_or(PAGE_SHIFT, |_| shift),
            parts,
            cpus: Vec::new(),
            walks: Walks::default(),
            large: HashMap::new(),
            faults: Faults::default(),
        };
        Predictor {
            cpu: cpu.clone(),
            sizes: configs.map(size).collect(),
            is_by_part,
            allocations,
            last: Vec::new(),
            pieces: HashMap::new(),
            blocks: Vec::new(),
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
        let mut faults = size.faults;
        size.large.iter().for_each(|((.., shift), used)| faults += used.faults(*shift));
        faults
    }

    /// Returns what was predicted, of all that it was shown.
    pub fn predicted(&self) -> Predicted {
        let sizes = 0..self.sizes.len();
        Predicted {
            walks: sizes.clone().map(|size| self.walks(size)).collect(),
            faults: sizes.map(|size| self.faults(size)).collect(),
            sampling_error_ns: Vec::new(),
            access_count: self.access_count,
        }
    }

    /// Returns the use of each block of memory, of a predictor by part.
    pub fn blocks(&mut self) -> Vec<BlockUse> {
        self.allocations.read();
        for (piece, number) in &self.pieces {
            let block = &mut self.blocks[*number];
            if block.place.is_none() && block.part.is_allocated() {
                block.locate(
                    &self.allocations,
                    piece.1,
                    (piece.1 + 1) << PIECE_SHIFT << PAGE_SHIFT,
                );
            }
        }
        let mut blocks = self.blocks.clone();
        for (size, used_by) in self.sizes.iter().take(2).zip(0..) {
            for ((process, large, shift), used) in &size.large {
                let piece = (*process, large << (shift - PAGE_SHIFT) >> PIECE_SHIFT);
                if let Some(number) = self.pieces.get(&piece) {
                    let uses: &mut [(Walks, Faults); 2] = &mut blocks[*number].uses;
                    uses[used_by].1 += used.faults(*shift);
                }
            }
        }
        blocks.into_iter().map(BlockUse::from).collect()
    }

    /// Returns the block of a thread's access; none of files.
    #[inline]
    fn block(&mut self, thread: Thread, page: u64) -> Option<usize> {
        let number = thread.number as usize;
        if self.last.len() <= number {
            self.last.resize(number + 1, NOWHERE);
            let cpu = &self.cpu;
            self.sizes.iter_mut().for_each(|size| size.cpus.resize(number + 1, cpu.clone()));
        }
        let piece = (thread.process, page >> PIECE_SHIFT);
        let last = &mut self.last[number];
        if last.0 != piece {
            *last = (piece, self.pieces.get(&piece).copied());
        }
        last.1
    }

    fn forget_last(&mut self) {
        self.last.fill(NOWHERE);
    }
}

impl MemoryBlock {
    fn locate(&mut self, allocations: &Allocations, piece: u64, address: u64) {
        if let Some(known) = allocations.at_address(address) {
            let start = piece << PIECE_SHIFT << PAGE_SHIFT;
            let offset = known.offset + start.saturating_sub(known.addresses.start);
            self.part = known.part;
            self.place = Some((known.clone(), offset));
        }
    }
}

impl From<MemoryBlock> for BlockUse {
    fn from(block: MemoryBlock) -> BlockUse {
        // Under the recorder memory lies elsewhere, and large pages begin at other offsets.
        let nearest = |offset: u64| (offset + (1 << 20)) >> 21 << 21;
        let pattern = block
            .place
            .as_ref()
            .map(|(known, offset)| known.pattern(nearest(*offset)..nearest(*offset) + (2 << 20)));
        let [base, large] = block.uses;
        let touched_bytes = block.page_count << PAGE_SHIFT;
        BlockUse { part: block.part, pattern, touched_bytes, base, large }
    }
}

/// Returns the part that memory belongs to unless the log names another; none of files and the kernel's
/// memory.
fn part_of(segment: Segment) -> Option<AddressPart> {
    match segment {
        Segment::Heap => Some(AddressPart::Heap),
        Segment::Anon | Segment::Unknown => Some(AddressPart::Mapping),
        Segment::Stack => Some(AddressPart::Stack),
        Segment::File | Segment::Kernel => None,
    }
}

impl PageObserver for Predictor {
    #[inline]
    fn change(&mut self, thread: Thread, kind: AccessKind, page: u64) {
        if kind == AccessKind::Fetch {
            return;
        }
        let block = self.block(thread, page);
        let part = block.map(|number| self.blocks[number].part);
        let alone = kind == AccessKind::DependentLoad;
        for (index, size) in self.sizes.iter_mut().enumerate() {
            let is_large = part.is_some_and(|part| size.parts.has(part));
            let shift = if is_large { size.tlb_shift } else { PAGE_SHIFT };
            let cpu = &mut size.cpus[thread.number as usize];
            let found = cpu.access(page << PAGE_SHIFT, shift, alone);
            size.walks.add(found, alone);
            if let (true, Some(number)) = (self.is_by_part && index < 2, block) {
                self.blocks[number].uses[index].0.add(found, alone);
            }
        }
    }

    fn ran(&mut self, _: Thread, instructions: u64, accesses: u64) {
        self.instruction_count += instructions;
        self.access_count += accesses;
    }

    fn found(&mut self, process: u32, page: u64, segment: Segment) {
        let Some(part) = part_of(segment) else { return };
        let piece = (process, page >> PIECE_SHIFT);
        let known = self.pieces.get(&piece).copied();
        let number = known.unwrap_or(self.blocks.len());
        if known.is_none() {
            self.blocks.push(MemoryBlock {
                part,
                place: None,
                page_count: 0,
                uses: Default::default(),
            });
            self.pieces.insert(piece, number);
        }
        let block = &mut self.blocks[number];
        let before = block.part;
        if part.is_allocated() && !block.part.is_allocated() {
            block.part = part;
        }
        if self.is_by_part && block.place.is_none() && part.is_allocated() {
            self.allocations.read();
            block.locate(&self.allocations, piece.1, page << PAGE_SHIFT);
        }
        let is_counted = part.is_allocated() || self.is_by_part && part == AddressPart::Stack;
        block.page_count += u64::from(is_counted || self.is_by_part);
        let part = block.part;
        if known.is_none() || part != before {
            self.forget_last();
        }
        if !is_counted {
            return;
        }
        let in_order = self.found == (process, page.wrapping_sub(1));
        self.found = (process, page);
        for size in &mut self.sizes {
            let shift = size.shift_of(part);
            let large = page >> (shift - PAGE_SHIFT);
            let used = size.large.entry((process, large, shift)).or_default();
            used.pages += 1;
            used.in_order += u64::from(in_order);
        }
    }

    fn gone(&mut self, thread: Thread, pages: Range<u64>) {
        let process = thread.process;
        for (index, size) in self.sizes.iter_mut().enumerate() {
            let by = |shift: u32| shift - PAGE_SHIFT;
            let is_gone = |key: &(u32, u64, u32)| {
                let (start, end) = (pages.start >> by(key.2), pages.end.div_ceil(1 << by(key.2)));
                key.0 == process && (start..end).contains(&key.1)
            };
            // Searches the shorter of the two: the range or the table.
            let shifts = [Some(PAGE_SHIFT), (size.shift != PAGE_SHIFT).then_some(size.shift)];
            let keys: Vec<_> = match pages.end.saturating_sub(pages.start) {
                count if count < size.large.len() as u64 => {
                    let numbers = |shift: u32| {
                        let numbers = pages.start >> by(shift)..pages.end.div_ceil(1 << by(shift));
                        numbers.map(move |number| (process, number, shift))
                    };
                    shifts.into_iter().flatten().flat_map(numbers).collect()
                }
                _ => size.large.keys().filter(|key| is_gone(key)).copied().collect(),
            };
            for key in keys {
                let Some(used) = size.large.remove(&key) else { continue };
                let faults = used.faults(key.2);
                size.faults += faults;
                let piece = (process, key.1 << by(key.2) >> PIECE_SHIFT);
                if let (true, Some(number)) = (index < 2, self.pieces.get(&piece)) {
                    self.blocks[*number].uses[index].1 += faults;
                }
            }
            for cpu in &mut size.cpus {
                cpu.unmapped(pages.start << PAGE_SHIFT..pages.end << PAGE_SHIFT);
            }
        }
        if self.is_by_part {
            // Other memory may come there, and is another block.
            let whole = pages.start.div_ceil(1 << PIECE_SHIFT)..pages.end >> PIECE_SHIFT;
            self.pieces.retain(|(of, piece), _| *of != process || !whole.contains(piece));
            self.forget_last();
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

    #[test]
    fn parts_save_alone_what_they_save_together() {
        let model = models::find("x86-64-calibrated").unwrap();
        let cpu = configuration::translation(&model).unwrap();
        let log = tempfile::NamedTempFile::new().unwrap();
        let heap = 0x40_0000_u64 << 12;
        std::fs::write(log.path(), format!("heap 0 8388608 {heap} {}\n", 64 << 20)).unwrap();
        let parts = [AddressPart::Heap, AddressPart::Mapping];
        let allocations = Allocations::at(log.path());
        let mut predictor = Predictor::by_part(&cpu, 21, &parts, allocations);
        // The log knows that this is heap, wherever it lies.
        sweep(&mut predictor, AccessKind::Load, Segment::Anon);
        let thread = Thread::default();
        let other = 0x80_0000..0x80_2000;
        other.clone().for_each(|page| predictor.found(0, page, Segment::Anon));
        other.for_each(|page| predictor.change(thread, AccessKind::Load, page));
        let count = |size: usize| {
            let walks = predictor.walks(size);
            walks.dependent_count + walks.other_count
        };
        let [base, whole, heap, mapping] = [0, 1, 2, 3].map(count);
        assert_eq!((base, whole), (2 * 16_384 + 8_192, 32 + 16));
        assert_eq!((heap, mapping), (32 + 8_192, 2 * 16_384 + 16));
        let large = [0, 1, 2, 3].map(|size| predictor.faults(size).large_count);
        assert_eq!(large, [0, 48, 32, 16]);
        let blocks = predictor.blocks();
        let of_heap: Vec<_> = blocks.iter().filter(|b| b.part == AddressPart::Heap).collect();
        assert_eq!(of_heap.len(), 32);
        assert_eq!(of_heap[0].pattern.as_ref().unwrap().to_string(), "heap@8M-10M");
        let walks = |of: fn(&BlockUse) -> &(Walks, Faults)| -> u64 {
            of_heap.iter().map(|block| of(block).0.other_count).sum()
        };
        assert_eq!((walks(|b| &b.base), walks(|b| &b.large)), (2 * 16_384, 32));
        assert!(of_heap.iter().all(|b| b.base.1.base_count == 512 && b.large.1.large_count == 1));
    }
}
