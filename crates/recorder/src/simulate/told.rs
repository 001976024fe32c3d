//! A simulation that is told pages, by a trace, rather than a stream of records by an engine.
//!
//! What a trace leaves out (repeats of the page just used) no TLB notices, so the counts are those of
//! the recording itself. A trace tells what memory belongs to, not on which pages it lay: as real page
//! sizes it has base pages. It does not tell instructions either.

use super::{PAGE_SHIFT, Simulation};
use crate::pages::{Kind, Pages, Thread};
use crate::places::Segment;
use crate::stream::{Hint, Writer};
use std::collections::HashMap;
use std::ops::Range;

/// A simulation, and what it was told of pages that nobody has gone to yet.
pub struct Told {
    /// Of the machines.
    pub simulation: Simulation,
    found: HashMap<(u32, u64), Segment>,
}

impl Told {
    /// That has seen nothing.
    pub fn new(simulation: Simulation) -> Told {
        Told { simulation, found: HashMap::new() }
    }

    fn lane(&mut self, thread: Thread) -> usize {
        self.simulation.lane_of(writer(thread), 0)
    }
}

/// As if each thread had a stream of its own. No process has the number 0, so none is looked at.
fn writer(thread: Thread) -> Writer {
    Writer { number: thread.number as usize, process: thread.process, pid: 0 }
}

impl Pages for Told {
    fn change(&mut self, thread: Thread, kind: Kind, page: u64) {
        let (lane, address) = (self.lane(thread), page << PAGE_SHIFT);
        let process = self.simulation.lanes[lane].process;
        let space = &mut self.simulation.processes[process].space;
        if space.known(address).is_none() {
            let segment = self.found.remove(&(thread.process, page));
            space.expect(segment.unwrap_or(Segment::Unknown));
        }
        match kind {
            Kind::Fetch => self.simulation.fetch(lane, address, true),
            Kind::Load | Kind::Chase | Kind::Store => self.simulation.data(lane, address, 0, true),
        }
    }

    fn ran(&mut self, thread: Thread, instructions: u64, accesses: u64) {
        let lane = self.lane(thread);
        self.simulation.counts(lane, instructions, accesses, true);
    }

    fn found(&mut self, process: u32, page: u64, segment: Segment) {
        self.found.insert((process, page), segment);
    }

    fn gone(&mut self, thread: Thread, pages: Range<u64>) {
        let (start, bytes) = (pages.start << PAGE_SHIFT, (pages.end - pages.start) << PAGE_SHIFT);
        self.simulation.mapping(writer(thread), start, bytes, Hint::Gone);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::View;
    use crate::tally::Access;
    use pagetax_sim::models;

    #[test]
    fn what_is_told_is_missed_by_side_and_segment() {
        let model = models::find("x86-64-calibrated").unwrap();
        let views =
            ["real", "heap=2M"].map(|pages| View::new(&model, pages.parse().unwrap()).unwrap());
        let mut told = Told::new(Simulation::new(views.to_vec()));
        let thread = Thread { number: 3, process: 1 };
        let heap = 0x4_0000..0x4_0000 + 4096;
        heap.clone().for_each(|page| told.found(1, page, Segment::Heap));
        told.found(1, 0x400, Segment::File);
        told.change(thread, Kind::Fetch, 0x400);
        for page in heap.clone().chain(heap.clone()) {
            told.change(thread, Kind::Load, page);
        }
        told.ran(thread, 50_000, 9_000);
        let lane = &told.simulation.lanes()[0];
        assert_eq!((lane.access_count, lane.instruction_count), (9_000, 50_000));
        let misses = |view: usize, side| lane.cpus[view].tally.total(side).tlb_count;
        assert_eq!([misses(0, Access::Data), misses(1, Access::Data)], [8192, 8]);
        assert_eq!(misses(0, Access::Instruction), 1);
        let places = told.simulation.places();
        let mut segments = (0..places.len()).map(|number| places.get(number as u16).segment);
        assert!(segments.any(|segment| segment == Segment::Heap));
        told.gone(thread, heap);
        told.change(thread, Kind::Load, 0x4_0000);
        assert_eq!(told.simulation.lanes()[0].cpus[1].tally.total(Access::Data).tlb_count, 9);
    }
}
