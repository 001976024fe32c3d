//! The stream of page changes: what engines write and consumers take. The layout is the one of
//! `engines/stream.h`.

/// Pages that every TLB holds for sure, in an engine: the last ones used of each set.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Filter {
    /// log2 of the pages that it tells apart.
    pub page_shift: u32,
    /// The set of an address is `(address >> index_shift) & index_mask`.
    pub index_shift: u32,
    /// Sets less one; below [`SETS_MAX`].
    pub index_mask: u32,
    /// Pages that a set holds, at most [`WAYS_MAX`]; 0: drops everything, as far as it is concerned.
    pub ways: u32,
}

/// Sets of a filter at most.
pub const SETS_MAX: u32 = 64;
/// Pages of a set at most.
pub const WAYS_MAX: u32 = 8;

/// The filters of one side, data or code. An access is dropped when both hold its page.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SideFilters {
    /// Always used.
    pub small: Filter,
    /// For pages of a megabyte and more, if there are any.
    pub large: Filter,
    /// Not 0: there are none before the program makes a system call that asks for some.
    pub large_on_demand: u32,
}

/// Pages that a filter speaks of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SizeClass {
    /// Of any size.
    All,
    /// Those below a megabyte.
    Small,
    /// The others.
    Large,
}

/// A record as it lies in the ring.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RawRecord {
    /// Address or count (48 bits), kind (4), thread (12).
    pub what: u64,
    /// The instruction, a count, or a length with a hint.
    pub place: u64,
}

/// In the place of a touch.
const CODE: u64 = 4;
/// In the place of a stage.
const FIRST: u64 = 1 << 63;

const VALUE_BITS: u32 = 48;
const VALUE_MASK: u64 = (1 << VALUE_BITS) - 1;

/// What an engine knows of memory that has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MappingHint {
    /// Nothing.
    None,
    /// The break has moved over it.
    Heap,
    /// A thread's stack may grow into it.
    Stack,
    /// It is unmapped.
    Gone,
}

/// What a sampled recording does with accesses, from some moment on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SamplingStage {
    /// Leaves them out.
    Skipped,
    /// Records them, so that TLBs are what they should be when counting begins.
    Warming,
    /// Records them, and they count.
    Counted,
}

/// Something that happened in the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// An instruction was fetched from another page.
    Fetch {
        /// Of the instruction, or of its part on the page.
        address: u64,
    },
    /// A load from another page.
    Load {
        /// Its first byte on the page.
        address: u64,
        /// Who loads.
        instruction: u64,
    },
    /// A store to another page.
    Store {
        /// Its first byte on the page.
        address: u64,
        /// Who stores.
        instruction: u64,
    },
    /// What the thread did since its last such record, filtered accesses included.
    Counts {
        /// Instructions.
        instructions: u64,
        /// Loads and stores.
        accesses: u64,
    },
    /// The page was used since its last record, and after the pages before it: a hit that no count
    /// changes by, but the order in which pages make room.
    Touch {
        /// On the page.
        address: u64,
        /// Pages of which sizes are meant.
        class: SizeClass,
        /// The instruction side's.
        is_code: bool,
    },
    /// Memory was mapped, unmapped or moved.
    Mapping {
        /// First address.
        start: u64,
        /// How much.
        bytes: u64,
        /// What is known of it.
        hint: MappingHint,
    },
    /// The accesses of the process are worth something else from here on.
    Stage {
        /// What they are worth.
        stage: SamplingStage,
        /// Of one that counts: the thread's instructions since it last counted; 0: bursts are as likely everywhere.
        gap: u64,
        /// Whether the thread counts for the first time. Another one may have had its number before.
        is_first: bool,
    },
}

/// An event and its thread: a number that is unique in the process at any one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// Whose.
    pub thread: u16,
    /// What.
    pub event: Event,
}

impl RawRecord {
    /// None for a kind that this version does not know.
    #[inline]
    pub fn decode(self) -> Option<Record> {
        let (value, place) = (self.what & VALUE_MASK, self.place);
        let event = match (self.what >> VALUE_BITS) & 15 {
            1 => Event::Fetch { address: value },
            2 => Event::Load { address: value, instruction: place },
            3 => Event::Store { address: value, instruction: place },
            4 => Event::Counts { instructions: value, accesses: place },
            5 => {
                let hint = match place >> 56 {
                    1 => MappingHint::Heap,
                    2 => MappingHint::Stack,
                    3 => MappingHint::Gone,
                    _ => MappingHint::None,
                };
                Event::Mapping { start: value, bytes: place & VALUE_MASK, hint }
            }
            7 => {
                let stage = match value {
                    0 => SamplingStage::Skipped,
                    1 => SamplingStage::Warming,
                    _ => SamplingStage::Counted,
                };
                Event::Stage { stage, gap: place & !FIRST, is_first: place & FIRST != 0 }
            }
            6 => {
                let class = match place & 3 {
                    1 => SizeClass::Small,
                    2 => SizeClass::Large,
                    _ => SizeClass::All,
                };
                Event::Touch { address: value, class, is_code: place & CODE != 0 }
            }
            _ => return None,
        };
        Some(Record { thread: (self.what >> 52) as u16, event })
    }

    /// The inverse of [`RawRecord::decode`], as engines do it.
    pub fn encode(record: Record) -> Self {
        let (kind, value, place) = match record.event {
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
        RawRecord { what, place }
    }
}

/// One source of records: a process, or a thread of it. Numbers are never given twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Writer {
    /// In the order of appearance, from 0.
    pub number: usize,
    /// Its address space: threads share one, and an exec makes a new one.
    pub process: u32,
    /// Of its process.
    pub pid: u32,
}

/// Takes the stream: a simulation, a trace.
pub trait Consumer {
    /// Records of one writer, in their order. Those of other writers may come before or after.
    fn take(&mut self, writer: Writer, records: &[RawRecord]);

    /// Instructions that its TLBs should warm up for, in its next burst; 0: not known.
    fn warm_up(&self, _writer: Writer) -> u32 {
        0
    }

    /// No more records of this writer will come.
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
            Event::Touch { address: 0x20_0000, class: SizeClass::Large, is_code: true },
            Event::Touch { address: 0x3000, class: SizeClass::All, is_code: false },
            Event::Stage { stage: SamplingStage::Counted, gap: 1 << 50, is_first: false },
            Event::Stage { stage: SamplingStage::Counted, gap: 7, is_first: true },
        ];
        for event in events {
            let record = Record { thread: 4095, event };
            assert_eq!(RawRecord::encode(record).decode(), Some(record));
        }
        assert_eq!(RawRecord { what: 15 << VALUE_BITS, place: 0 }.decode(), None);
    }
}
