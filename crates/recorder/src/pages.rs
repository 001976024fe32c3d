//! The page interface: what observers (a trace, miss curves, a prediction) learn from a live recording,
//! a trace or an imported trace.
//!
//! Invariant: for each thread and side (data, code), each change of page is reported once, in order. A
//! page is reported as found, with its segment, before the first change to it.

use crate::dependent_loads::DependentLoads;
use crate::filter::PAGE_SHIFT;
use crate::places::{AddressSpace, PlaceList, Segment};
use crate::stream::{
    Consumer, Event, Filter, MappingHint, MemoryUse, RawRecord, Record, SideFilters, Writer,
};
use object::Architecture;
use pagetax_host::launch::program::Program;
use std::ops::Range;

/// A thread of a recorded program and its process, both numbered in the order of appearance.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Thread {
    /// The number among all threads.
    pub number: u32,
    /// The number of its address space.
    pub process: u32,
}

/// The access that moved the thread to another page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessKind {
    /// An independent load.
    Load = 0,
    /// A dependent load: its address comes from the same instruction's previous load, so their walks
    /// cannot overlap.
    DependentLoad = 1,
    /// A store.
    Store = 2,
    /// An instruction fetch.
    Fetch = 3,
}

/// An observer of the pages that threads use.
pub trait PageObserver {
    /// Reports that a thread goes to another page (4 KiB) than its last one on this side.
    fn change(&mut self, thread: Thread, kind: AccessKind, page: u64);

    /// Reports a thread's instructions and accesses since the last such report.
    fn ran(&mut self, thread: Thread, instructions: u64, accesses: u64);

    /// Reports that a process will use a page for the first time since it was mapped.
    fn found(&mut self, process: u32, page: u64, segment: Segment);

    /// Reports that pages are unmapped.
    fn gone(&mut self, thread: Thread, pages: Range<u64>);

    /// Reports a use of pages that is no access of the program, unless only those count.
    fn memory_use(&mut self, _: Thread, _: MemoryUse, _pages: Range<u64>) {}
}

/// The most pages that a system call reads or writes: the kernel's limit (MAX_RW_COUNT) is 2 GiB.
pub const SYSTEM_CALL_PAGES_MAX: u64 = 1 << (31 - PAGE_SHIFT);

/// Returns the filters for page observers: engines drop accesses to the page of the previous access.
pub fn filters() -> (SideFilters, SideFilters) {
    let last_page =
        Filter { page_shift: PAGE_SHIFT, index_shift: PAGE_SHIFT, index_mask: 0, ways: 1 };
    let side = SideFilters { small: last_page, ..SideFilters::default() };
    (side, side)
}

/// An adapter from an engine's records to a page observer.
pub struct RecordAdapter<P> {
    /// The observer of its pages.
    pub pages: P,
    processes: Vec<(u32, AddressSpace)>,
    /// Threads by writer and the writer's number for them.
    threads: Vec<(usize, u16, Thread)>,
    places: PlaceList,
    dependent_loads: DependentLoads,
}

impl<P: PageObserver> RecordAdapter<P> {
    /// Creates the adapter for a recording of a program.
    pub fn new(pages: P, program: &Program) -> Self {
        let (processes, threads) = (Vec::new(), Vec::new());
        let places = PlaceList::default();
        let dependent_loads =
            DependentLoads::new(program.architecture == Some(Architecture::X86_64));
        RecordAdapter { pages, processes, threads, places, dependent_loads }
    }

    fn process_of(&mut self, writer: Writer) -> u32 {
        let known = self.processes.iter().position(|(number, _)| *number == writer.process);
        known.unwrap_or_else(|| {
            self.processes.push((writer.process, AddressSpace::new(writer.pid)));
            self.processes.len() - 1
        }) as u32
    }

    fn thread_of(&mut self, writer: Writer, thread: u16) -> Thread {
        let known = self.threads.iter().find(|(of, nr, _)| (*of, *nr) == (writer.number, thread));
        if let Some((.., thread)) = known {
            return *thread;
        }
        let process = self.process_of(writer);
        let found = Thread { number: self.threads.len() as u32, process };
        self.threads.push((writer.number, thread, found));
        found
    }

    #[inline]
    fn find(&mut self, thread: Thread, address: u64) {
        let space = &mut self.processes[thread.process as usize].1;
        if space.known(address).is_none() {
            let place = space.look_up(address, &mut self.places);
            let segment = self.places.get(place).segment;
            self.pages.found(thread.process, address >> PAGE_SHIFT, segment);
        }
    }

    fn memory_use(&mut self, thread: Thread, start: u64, bytes: u64, memory_use: MemoryUse) {
        let first = start >> PAGE_SHIFT;
        let mut end = start.saturating_add(bytes).div_ceil(1 << PAGE_SHIFT);
        if memory_use != MemoryUse::Dropped {
            end = end.min(first + SYSTEM_CALL_PAGES_MAX);
            (first..end).for_each(|page| self.find(thread, page << PAGE_SHIFT));
        }
        self.pages.memory_use(thread, memory_use, first..end);
    }

    #[inline]
    fn change(&mut self, thread: Thread, kind: AccessKind, address: u64) {
        self.find(thread, address);
        self.pages.change(thread, kind, address >> PAGE_SHIFT);
    }

    #[inline]
    fn load(&mut self, thread: Thread, address: u64, instruction: u64) {
        let space = &self.processes[thread.process as usize].1;
        let is_dependent = self.dependent_loads.is_dependent(thread.process, space, instruction);
        self.change(
            thread,
            if is_dependent { AccessKind::DependentLoad } else { AccessKind::Load },
            address,
        );
    }

    fn mapping(&mut self, thread: Thread, start: u64, bytes: u64, hint: MappingHint) {
        self.processes[thread.process as usize].1.changed(start, bytes, hint);
        if hint == MappingHint::Gone {
            let end = start.saturating_add(bytes).div_ceil(1 << PAGE_SHIFT);
            self.pages.gone(thread, start >> PAGE_SHIFT..end);
        }
    }
}

impl<P: PageObserver> Consumer for RecordAdapter<P> {
    fn take(&mut self, writer: Writer, records: &[RawRecord]) {
        let mut current: Option<(u16, Thread)> = None;
        for Record { thread: number, event } in records.iter().filter_map(|r| r.decode()) {
            let thread = match current {
                Some((of, thread)) if of == number => thread,
                _ => self.thread_of(writer, number),
            };
            current = Some((number, thread));
            match event {
                Event::Load { address, instruction } => self.load(thread, address, instruction),
                Event::Store { address, .. } => self.change(thread, AccessKind::Store, address),
                Event::Fetch { address } => self.change(thread, AccessKind::Fetch, address),
                Event::Counts { instructions, accesses } => {
                    self.pages.ran(thread, instructions, accesses);
                }
                Event::Mapping { start, bytes, hint } => self.mapping(thread, start, bytes, hint),
                Event::MemoryUse { start, bytes, memory_use } => {
                    self.memory_use(thread, start, bytes, memory_use);
                }
                // Page observers need no order within a page, and no bursts.
                Event::Touch { .. } | Event::Stage { .. } => {}
            }
        }
    }

    fn ended(&mut self, _writer: Writer) {}
}
