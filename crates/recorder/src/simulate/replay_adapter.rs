//! An adapter from a trace to a simulation.
//!
//! A trace leaves out repeats of the page just used, which no TLB notices, so the counts equal those of
//! a recording. A trace has the segment of each page, but neither its real size nor the accessing
//! instruction: pages count as base pages.

use super::{PAGE_SHIFT, Simulation};
use crate::pages::{AccessKind, PageObserver, Thread};
use crate::places::Segment;
use crate::stream::{MappingHint, Writer};
use std::collections::HashMap;
use std::ops::Range;

/// A simulation that observes pages, with the segments of pages that no thread has used yet.
pub struct ReplayAdapter {
    /// The simulation that the pages feed.
    pub simulation: Simulation,
    found: HashMap<(u32, u64), Segment>,
}

impl ReplayAdapter {
    /// Wraps a simulation that has seen no access.
    pub fn new(simulation: Simulation) -> ReplayAdapter {
        ReplayAdapter { simulation, found: HashMap::new() }
    }

    fn simulated(&mut self, thread: Thread) -> usize {
        self.simulation.thread_of(writer(thread), 0)
    }
}

/// Returns a writer for each thread. Process IDs are 0, which no process has, so that none is looked up.
fn writer(thread: Thread) -> Writer {
    Writer { number: thread.number as usize, process: thread.process, pid: 0 }
}

impl PageObserver for ReplayAdapter {
    fn change(&mut self, thread: Thread, kind: AccessKind, page: u64) {
        let (simulated, address) = (self.simulated(thread), page << PAGE_SHIFT);
        let process = self.simulation.threads[simulated].process;
        let space = &mut self.simulation.processes[process].space;
        if space.known(address).is_none() {
            let segment = self.found.remove(&(thread.process, page));
            space.expect(segment.unwrap_or(Segment::Unknown));
        }
        match kind {
            AccessKind::Fetch => self.simulation.fetch(simulated, address, true),
            AccessKind::Load | AccessKind::DependentLoad | AccessKind::Store => {
                self.simulation.data(simulated, address, 0, true)
            }
        }
    }

    fn ran(&mut self, thread: Thread, instructions: u64, accesses: u64) {
        let simulated = self.simulated(thread);
        self.simulation.counts(simulated, instructions, accesses, true);
    }

    fn found(&mut self, process: u32, page: u64, segment: Segment) {
        self.found.insert((process, page), segment);
    }

    fn gone(&mut self, thread: Thread, pages: Range<u64>) {
        let (start, bytes) = (pages.start << PAGE_SHIFT, (pages.end - pages.start) << PAGE_SHIFT);
        self.simulation.mapping(writer(thread), start, bytes, MappingHint::Gone);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{MachineConfig, PagePolicy};
    use crate::counters::Side;
    use pagetax_sim::models;

    #[test]
    fn what_is_told_is_missed_by_side_and_segment() {
        let model = models::find("x86-64-calibrated").unwrap();
        let policies = PagePolicy::alternatives(["default", "heap=2M"]).unwrap();
        let config = |pages| MachineConfig::new(&model, pages).unwrap();
        let configs = policies.into_iter().map(config).collect();
        let mut adapter = ReplayAdapter::new(Simulation::new(configs));
        let thread = Thread { number: 3, process: 1 };
        let heap = 0x4_0000..0x4_0000 + 4096;
        heap.clone().for_each(|page| adapter.found(1, page, Segment::Heap));
        adapter.found(1, 0x400, Segment::File);
        adapter.change(thread, AccessKind::Fetch, 0x400);
        for page in heap.clone().chain(heap.clone()) {
            adapter.change(thread, AccessKind::Load, page);
        }
        adapter.ran(thread, 50_000, 9_000);
        let simulated = &adapter.simulation.threads()[0];
        assert_eq!((simulated.access_count, simulated.instruction_count), (9_000, 50_000));
        let misses = |config: usize, side| simulated.cpus[config].counters.total(side).tlb_count;
        assert_eq!([misses(0, Side::Data), misses(1, Side::Data)], [8192, 8]);
        assert_eq!(misses(0, Side::Code), 1);
        let places = adapter.simulation.places();
        let mut segments = (0..places.len()).map(|number| places.get(number as u16).segment);
        assert!(segments.any(|segment| segment == Segment::Heap));
        adapter.gone(thread, heap);
        adapter.change(thread, AccessKind::Load, 0x4_0000);
        assert_eq!(adapter.simulation.threads()[0].cpus[1].counters.total(Side::Data).tlb_count, 9);
    }
}
