//! The stream of page changes, which engines write and consumers read. The layout equals that of
//! `engines/stream.h`.

/// A filter in an engine: the pages that every TLB certainly holds, which are those used last in each
/// set.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Filter {
    /// log2 of the smallest page that it distinguishes.
    pub page_shift: u32,
    /// The set of an address is `(address >> index_shift) & index_mask`.
    pub index_shift: u32,
    /// The number of sets less one; below [`SETS_MAX`].
    pub index_mask: u32,
    /// Pages in a set, at most [`WAYS_MAX`]. With 0 the filter drops everything.
    pub ways: u32,
}

/// The most sets of a filter.
pub const SETS_MAX: u32 = 64;
/// The most pages of a set.
pub const WAYS_MAX: u32 = 8;

/// The filters of one side, data or code. An engine drops an access if both hold its page.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SideFilters {
    /// The filter of small pages; always in use.
    pub small: Filter,
    /// The filter of pages from 1 MiB on, if there are any.
    pub large: Filter,
    /// A flag: large pages exist only after a system call that requests them.
    pub large_on_demand: u32,
}

/// The page sizes that a touch concerns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SizeClass {
    /// Pages of all sizes.
    All,
    /// Pages below 1 MiB.
    Small,
    /// Pages of 1 MiB and more.
    Large,
}

/// A record in the ring.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RawRecord {
    /// Address or count (48 bits), kind (4), thread (12).
    pub what: u64,
    /// The instruction's address, a count, or a length with a hint.
    pub argument: u64,
}

/// The flag of the code side, in a touch.
const CODE: u64 = 4;
/// The flag of a thread's first burst, in a stage.
const FIRST: u64 = 1 << 63;

const VALUE_BITS: u32 = 48;
const VALUE_MASK: u64 = (1 << VALUE_BITS) - 1;

/// A hint about changed memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MappingHint {
    /// No hint.
    None,
    /// The break moved over the memory.
    Heap,
    /// A thread's stack may grow into the memory.
    Stack,
    /// The memory was unmapped.
    Gone,
}

/// A use of memory that no instruction of the program shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryUse {
    /// A system call reads the memory.
    Read = 1,
    /// A system call has written to the memory.
    Written = 2,
    /// A system call has dropped the memory's content.
    Dropped = 3,
    /// The memory was not used for a while. All its bytes are zero until its next use.
    Zeros = 4,
}

/// A stage of a sampled recording. Stages determine the use of accesses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SamplingStage {
    /// Accesses are not recorded.
    Skipped,
    /// Accesses are recorded to fill the TLBs, and do not count.
    Warming,
    /// Accesses are recorded, and count.
    Counted,
}

/// An event in the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// An instruction fetch from another page.
    Fetch {
        /// The first byte of the instruction on the page.
        address: u64,
    },
    /// A load from another page.
    Load {
        /// The first byte on the page.
        address: u64,
        /// The address of the loading instruction.
        instruction: u64,
    },
    /// A store to another page.
    Store {
        /// The first byte on the page.
        address: u64,
        /// The address of the storing instruction.
        instruction: u64,
    },
    /// A thread's counts since its last such record, filtered accesses included.
    Counts {
        /// The instructions since the last record.
        instructions: u64,
        /// Loads and stores since then.
        accesses: u64,
    },
    /// A page was used after its last record, and after the pages touched before it. It is a hit: no
    /// count changes, only the order of replacement.
    Touch {
        /// An address on the accessed page.
        address: u64,
        /// The filter that held the page.
        class: SizeClass,
        /// True for instruction fetches.
        is_code: bool,
    },
    /// A change of mapping: memory was mapped, unmapped or moved.
    Mapping {
        /// The first address of the range.
        start: u64,
        /// The length of the memory.
        bytes: u64,
        /// The new use of the memory.
        hint: MappingHint,
    },
    /// A use of memory that no instruction of the program shows.
    MemoryUse {
        /// The first address of the range.
        start: u64,
        /// The length of the memory.
        bytes: u64,
        /// The use of that memory.
        memory_use: MemoryUse,
    },
    /// The begin of a stage for all accesses of the process.
    Stage {
        /// The sampling stage that begins here.
        stage: SamplingStage,
        /// The thread's instructions since its last burst, if accesses count from now on; 0 where bursts
        /// are equally likely everywhere.
        gap: u64,
        /// True for the thread's first burst. An earlier thread may have had its number.
        is_first: bool,
    },
}

/// An event with its thread's number, which is unique in the process at any one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// The number of the thread.
    pub thread: u16,
    /// The event of that thread.
    pub event: Event,
}

impl RawRecord {
    /// Decodes a record; none for a kind that this version does not know.
    #[inline]
    pub fn decode(self) -> Option<Record> {
        let (value, argument) = (self.what & VALUE_MASK, self.argument);
        let event = match (self.what >> VALUE_BITS) & 15 {
            1 => Event::Fetch { address: value },
            2 => Event::Load { address: value, instruction: argument },
            3 => Event::Store { address: value, instruction: argument },
            4 => Event::Counts { instructions: value, accesses: argument },
            5 => {
                let hint = match argument >> 56 {
                    1 => MappingHint::Heap,
                    2 => MappingHint::Stack,
                    3 => MappingHint::Gone,
                    _ => MappingHint::None,
                };
                Event::Mapping { start: value, bytes: argument & VALUE_MASK, hint }
            }
            8 => {
                let memory_use = match argument >> 56 {
                    1 => MemoryUse::Read,
                    2 => MemoryUse::Written,
                    3 => MemoryUse::Dropped,
                    4 => MemoryUse::Zeros,
                    _ => return None,
                };
                Event::MemoryUse { start: value, bytes: argument & VALUE_MASK, memory_use }
            }
            7 => {
                let stage = match value {
                    0 => SamplingStage::Skipped,
                    1 => SamplingStage::Warming,
                    _ => SamplingStage::Counted,
                };
                Event::Stage { stage, gap: argument & !FIRST, is_first: argument & FIRST != 0 }
            }
            6 => {
                let class = match argument & 3 {
                    1 => SizeClass::Small,
                    2 => SizeClass::Large,
                    _ => SizeClass::All,
                };
                Event::Touch { address: value, class, is_code: argument & CODE != 0 }
            }
            _ => return None,
        };
        Some(Record { thread: (self.what >> 52) as u16, event })
    }

    /// Encodes a record as engines do, the inverse of [`RawRecord::decode`].
    pub fn encode(record: Record) -> Self {
        let (kind, value, argument) = match record.event {
            Event::Fetch { address } => (1, address, address),
            Event::Load { address, instruction } => (2, address, instruction),
            Event::Store { address, instruction } => (3, address, instruction),
            Event::Counts { instructions, accesses } => (4, instructions, accesses),
            Event::Mapping { start, bytes, hint } => {
                let hint = match hint {
                    MappingHint::None => 0u64,
                    MappingHint::Heap => 1,
                    MappingHint::Stack => 2,
                    MappingHint::Gone => 3,
                };
                (5, start, (bytes & VALUE_MASK) | (hint << 56))
            }
            Event::MemoryUse { start, bytes, memory_use } => {
                (8, start, (bytes & VALUE_MASK) | (memory_use as u64) << 56)
            }
            Event::Stage { stage, gap, is_first } => {
                (7, stage as u64, gap | if is_first { FIRST } else { 0 })
            }
            Event::Touch { address, class, is_code } => {
                let class = match class {
                    SizeClass::All => 0,
                    SizeClass::Small => 1,
                    SizeClass::Large => 2,
                };
                (6, address, class | if is_code { CODE } else { 0 })
            }
        };
        let what = (value & VALUE_MASK) | (kind << VALUE_BITS) | (u64::from(record.thread) << 52);
        RawRecord { what, argument }
    }
}

/// A source of records: a process, or a thread of it. Numbers are never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Writer {
    /// The number in the order of appearance, from 0.
    pub number: usize,
    /// The number of its address space. Threads share one; exec makes a new one.
    pub process: u32,
    /// The id of the writer's process.
    pub pid: u32,
}

/// A consumer of the stream, such as a simulation or a trace.
pub trait Consumer {
    /// Takes records of one writer, in order. Those of other writers may come before or after.
    fn take(&mut self, writer: Writer, records: &[RawRecord]);

    /// Returns the instructions of the writer's next warm-up; 0 if not known.
    fn warm_up(&self, _writer: Writer) -> u32 {
        0
    }

    /// Takes note that a writer has no more records.
    fn ended(&mut self, writer: Writer);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_keep_what_they_say() {
        let events = [
            Event::Fetch { address: 0x7fff_ffff_f000 },
            Event::Load { address: 1, instruction: 0x40_1000 },
            Event::Store { address: VALUE_MASK, instruction: 0 },
            Event::Counts { instructions: 12_345, accesses: u64::from(u32::MAX) },
            Event::Mapping { start: 0x1000, bytes: 1 << 40, hint: MappingHint::Gone },
            Event::MemoryUse { start: 0x5000, bytes: 4096, memory_use: MemoryUse::Zeros },
            Event::Touch { address: 0x20_0000, class: SizeClass::Large, is_code: true },
            Event::Touch { address: 0x3000, class: SizeClass::All, is_code: false },
            Event::Stage { stage: SamplingStage::Counted, gap: 1 << 50, is_first: false },
            Event::Stage { stage: SamplingStage::Counted, gap: 7, is_first: true },
        ];
        for event in events {
            let record = Record { thread: 4095, event };
            assert_eq!(RawRecord::encode(record).decode(), Some(record));
        }
        assert_eq!(RawRecord { what: 15 << VALUE_BITS, argument: 0 }.decode(), None);
    }
}
