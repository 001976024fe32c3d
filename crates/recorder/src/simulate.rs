//! The consumer that feeds TLB models: each thread has CPUs of its own, one for each view.
//!
//! Invariants: a record costs each view one lookup; what is not a walk touches neither tables of
//! attribution nor the tally. Time is modelled: instructions, far accesses and translation at the
//! machine's prices.
//!
//! A far access is one to a page that is not among the eight used last of those with the same six address
//! bits, as if it left a cache of 2 MB. This does not depend on page sizes, and not on the engine's filter
//! either, which holds no page that this one does not: [`crate::filter::INDEX_END`], [`WAYS_MAX`].

mod told;
mod warm;

pub use told::Told;
use warm::{Done, WarmUps};

use crate::bursts::{Burst, Bursts};
use crate::filter::{self, Fed, LARGE_SHIFT, PAGE_SHIFT};
use crate::machine::{Pages, View};
use crate::places::{self, AddressSpace, PlaceList};
use crate::stream::{
    Class, Consumer, Event, Hint, Phase, RawRecord, Record, SETS_MAX, Side, WAYS_MAX, Writer,
};
use crate::tally::{Access, Tally};
use pagetax_sim::hardware::set::{Replacement, TagArray};
use pagetax_sim::hardware::translation::{Lookup, Translation};
use std::collections::HashMap;

/// The simulation of a whole run.
pub struct Simulation {
    views: Vec<View>,
    /// Prices and page sizes by place, by view.
    sizes: Vec<Sizes>,
    places: PlaceList,
    processes: Vec<Process>,
    lanes: Vec<Lane>,
    /// What was missed, by view.
    misses: Vec<Attribution>,
    /// Of a sampled recording.
    bursts: Bursts,
    warm_ups: WarmUps,
}

/// Page sizes of one view by the number of the place.
#[derive(Default)]
struct Sizes {
    data: Vec<u32>,
    code: Vec<u32>,
}

/// An address space and who shares it.
struct Process {
    number: u32,
    pid: u32,
    space: AddressSpace,
}

/// A thread: of a process, with its own TLBs.
pub struct Lane {
    writer: usize,
    thread: u16,
    /// Of its process.
    pub pid: u32,
    process: usize,
    /// Pages that an access is not far from.
    near: TagArray,
    /// So far.
    pub instruction_count: u64,
    /// Of these, such whose accesses count: all, unless the recording is sampled.
    pub counted_count: u64,
    /// Loads and stores so far, the filtered ones included.
    pub access_count: u64,
    /// Of these, such to a page that was not used lately.
    pub far_count: u64,
    /// By view.
    pub cpus: Vec<Cpu>,
}

/// A CPU of one view.
pub struct Cpu {
    /// Its hardware.
    pub translation: Translation,
    /// What it has missed, and its clock.
    pub tally: Tally,
    /// Walks, those that do not count included.
    walk_count: u64,
}

/// Misses of an instruction or a place, and their time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Share {
    /// Accesses that no level could translate.
    pub count: u64,
    /// What that took, picoseconds.
    pub ps: u64,
}

/// Misses of one view by who caused them and where.
#[derive(Debug, Default)]
pub struct Attribution {
    /// By process (in the order of appearance) and instruction.
    by_instruction: HashMap<(usize, u64), Share>,
    /// By the number of the place.
    by_place: Vec<Share>,
    /// The instruction looked up last, as the next one is often the same.
    last: ((usize, u64), Share),
}

impl Attribution {
    #[inline]
    fn add(&mut self, process: usize, instruction: u64, place: u16, ps: u64) {
        if self.last.0 != (process, instruction) {
            self.flush();
            self.last.0 = (process, instruction);
        }
        self.last.1.count += 1;
        self.last.1.ps += ps;
        if self.by_place.len() <= usize::from(place) {
            self.by_place.resize(usize::from(place) + 1, Share::default());
        }
        self.by_place[usize::from(place)].count += 1;
        self.by_place[usize::from(place)].ps += ps;
    }

    fn flush(&mut self) {
        let (key, share) = std::mem::take(&mut self.last);
        if share.count > 0 {
            let sum = self.by_instruction.entry(key).or_default();
            sum.count += share.count;
            sum.ps += share.ps;
        }
    }
}

impl Simulation {
    /// For these views, in this order.
    pub fn new(views: Vec<View>) -> Self {
        let sizes = views.iter().map(|_| Sizes::default()).collect();
        let warm_ups = WarmUps::new(views.iter().map(|view| view.cpu.data().entries_max()));
        let misses = views.iter().map(|_| Attribution::default()).collect();
        Simulation {
            views,
            sizes,
            places: PlaceList::default(),
            processes: Vec::new(),
            lanes: Vec::new(),
            misses,
            bursts: Bursts::default(),
            warm_ups,
        }
    }

    /// What a sampled recording counted.
    pub fn bursts(&self) -> &Bursts {
        &self.bursts
    }

    /// What engines may filter so that no view notices: of data, and of code.
    pub fn filters(&self) -> (Side, Side) {
        let data = self.views.iter().map(|v| Fed { tlb: v.cpu.data(), shifts: v.data_shifts() });
        let code =
            self.views.iter().map(|v| Fed { tlb: v.cpu.instructions(), shifts: v.code_shifts() });
        let (data, code): (Vec<_>, Vec<_>) = (data.collect(), code.collect());
        let large_on_demand = self.views.iter().all(|view| view.pages == Pages::Real)
            && !places::kernel_makes_large_pages();
        [&data, &code]
            .map(|fed| Side { large_on_demand: large_on_demand.into(), ..filter::choose(fed) })
            .into()
    }

    /// As given.
    pub fn views(&self) -> &[View] {
        &self.views
    }

    /// Threads in the order of appearance.
    pub fn lanes(&self) -> &[Lane] {
        &self.lanes
    }

    /// All places seen.
    pub fn places(&self) -> &PlaceList {
        &self.places
    }

    /// Processes in the order of appearance: their numbers and address spaces.
    pub fn processes(&self) -> impl Iterator<Item = (u32, &AddressSpace)> {
        self.processes.iter().map(|process| (process.pid, &process.space))
    }

    /// A view's misses by process and instruction.
    pub fn by_instruction(&mut self, view: usize) -> Vec<((usize, u64), Share)> {
        self.misses[view].flush();
        self.misses[view].by_instruction.iter().map(|(key, share)| (*key, *share)).collect()
    }

    /// A view's misses by the number of the place.
    pub fn by_place(&self, view: usize) -> &[Share] {
        &self.misses[view].by_place
    }

    fn process_of(&mut self, writer: Writer) -> usize {
        let known = self.processes.iter().position(|process| process.number == writer.process);
        known.unwrap_or_else(|| {
            let space = AddressSpace::new(writer.pid);
            self.processes.push(Process { number: writer.process, pid: writer.pid, space });
            self.processes.len() - 1
        })
    }

    fn lane_of(&mut self, writer: Writer, thread: u16) -> usize {
        let known = self.lanes.iter().position(|l| l.writer == writer.number && l.thread == thread);
        if let Some(lane) = known {
            return lane;
        }
        let process = self.process_of(writer);
        let cpu = |view: &View| Cpu {
            translation: view.cpu.clone(),
            tally: Tally::default(),
            walk_count: 0,
        };
        self.lanes.push(Lane {
            writer: writer.number,
            thread,
            pid: writer.pid,
            process,
            near: TagArray::new(
                (SETS_MAX * WAYS_MAX) as usize,
                WAYS_MAX as usize,
                Replacement::Lru,
            ),
            instruction_count: 0,
            counted_count: 0,
            access_count: 0,
            far_count: 0,
            cpus: self.views.iter().map(cpu).collect(),
        });
        self.lanes.len() - 1
    }

    /// The place at an address; a page that is touched for the first time is mapped.
    #[inline(always)]
    fn place(&mut self, lane: usize, address: u64) -> u16 {
        let process = self.lanes[lane].process;
        match self.processes[process].space.known(address) {
            Some(place) => place,
            None => self.new_page(lane, address),
        }
    }

    #[cold]
    fn new_page(&mut self, lane: usize, address: u64) -> u16 {
        let process = self.lanes[lane].process;
        let place = self.processes[process].space.look_up(address, &mut self.places);
        for (view, sizes) in self.views.iter().zip(&mut self.sizes) {
            for number in sizes.data.len()..self.places.len() {
                let place = self.places.get(number as u16);
                sizes.data.push(view.data_shift(place));
                sizes.code.push(view.code_shift(place));
            }
        }
        for (cpu, sizes) in self.lanes[lane].cpus.iter_mut().zip(&self.sizes) {
            cpu.translation.mapped(address, sizes.data[usize::from(place)]);
        }
        place
    }

    #[inline(always)]
    fn data(&mut self, lane_number: usize, address: u64, instruction: u64, counts: bool) {
        let place = self.place(lane_number, address);
        let lane = &mut self.lanes[lane_number];
        let is_far = !lane.near.touch(address >> PAGE_SHIFT, near_tag(address));
        lane.far_count += u64::from(is_far && counts);
        let views = self.views.iter().zip(&self.sizes).zip(&mut self.misses);
        for (cpu, ((view, sizes), misses)) in lane.cpus.iter_mut().zip(views) {
            let shift = sizes.data[usize::from(place)];
            let found = cpu.translation.access(address, shift, false);
            cpu.walk_count += u64::from(found.walked);
            if !counts {
                continue;
            }
            cpu.tally.clock_ps += found.level_ps + if is_far { view.times.far_ps } else { 0 };
            if found.walked {
                cpu.missed(Access::Data, shift, found);
                misses.add(lane.process, instruction, place, found.refill_ps + found.tsb_ps);
            }
        }
    }

    #[inline(always)]
    fn fetch(&mut self, lane_number: usize, address: u64, counts: bool) {
        let place = self.place(lane_number, address);
        let lane = &mut self.lanes[lane_number];
        let views = self.sizes.iter().zip(&mut self.misses);
        for (cpu, (sizes, misses)) in lane.cpus.iter_mut().zip(views) {
            let shift = sizes.code[usize::from(place)];
            let found = cpu.translation.fetch(address, shift);
            cpu.walk_count += u64::from(found.walked);
            if found.walked && counts {
                cpu.missed(Access::Instruction, shift, found);
                misses.add(lane.process, address, place, found.refill_ps + found.tsb_ps);
            }
        }
    }

    /// See [`Event::Touch`].
    #[inline(always)]
    fn touch(&mut self, lane_number: usize, address: u64, class: Class, is_code: bool) {
        let place = usize::from(self.place(lane_number, address));
        let lane = &mut self.lanes[lane_number];
        if !is_code && class != Class::Large {
            lane.near.touch(address >> PAGE_SHIFT, near_tag(address));
        }
        for (cpu, sizes) in lane.cpus.iter_mut().zip(&self.sizes) {
            let shift = if is_code { sizes.code[place] } else { sizes.data[place] };
            if class == Class::All || (class == Class::Large) == (shift >= LARGE_SHIFT) {
                cpu.translation.refresh(address, shift, is_code);
            }
        }
    }

    fn counts(&mut self, lane: usize, instructions: u64, accesses: u64, counts: bool) {
        let lane = &mut self.lanes[lane];
        lane.instruction_count += instructions;
        lane.access_count += accesses;
        if !counts {
            return;
        }
        lane.counted_count += instructions;
        for (cpu, view) in lane.cpus.iter_mut().zip(&self.views) {
            cpu.tally.clock_ps += instructions * view.times.instruction_ps;
        }
    }

    /// What a writer did so far, counted or not.
    fn done(&self, writer: Writer) -> Done {
        let lanes = || self.lanes.iter().filter(|lane| lane.writer == writer.number);
        let walks = |view: usize| lanes().map(|lane| lane.cpus[view].walk_count).sum();
        Done {
            instructions: lanes().map(|lane| lane.instruction_count).sum(),
            walks: (0..self.views.len()).map(walks).collect(),
        }
    }

    /// What was counted of a writer so far.
    fn counted(&self, writer: Writer) -> Burst {
        let views = self.views.len();
        let mut total = Burst { walks: vec![[0; 2]; views], ..Burst::default() };
        for lane in self.lanes.iter().filter(|lane| lane.writer == writer.number) {
            total.instructions += lane.counted_count;
            for (walks, cpu) in total.walks.iter_mut().zip(&lane.cpus) {
                for side in [Access::Instruction, Access::Data] {
                    walks[side as usize] += cpu.tally.total(side).tlb_count;
                }
            }
        }
        total
    }

    fn mapping(&mut self, writer: Writer, start: u64, bytes: u64, hint: Hint) {
        let process = self.process_of(writer);
        self.processes[process].space.changed(start, bytes, hint);
        if hint == Hint::Gone {
            let lanes = self.lanes.iter_mut().filter(|lane| lane.process == process);
            for cpu in lanes.flat_map(|lane| &mut lane.cpus) {
                cpu.translation.unmapped(start..start.saturating_add(bytes));
            }
        }
    }
}

/// Tags are not 0.
fn near_tag(address: u64) -> u64 {
    (address >> PAGE_SHIFT) + 1
}

impl Cpu {
    fn missed(&mut self, side: Access, shift: u32, found: Lookup) {
        self.tally.clock_ps += found.refill_ps + found.tsb_ps;
        let misses = self.tally.misses_mut(side, shift);
        misses.tlb_count += 1;
        misses.tlb_ps += found.refill_ps;
        misses.tsb_count += u64::from(found.tsb_missed);
        misses.tsb_ps += found.tsb_ps;
    }
}

impl Consumer for Simulation {
    fn take(&mut self, writer: Writer, records: &[RawRecord]) {
        let (mut thread, mut lane) = (None, 0);
        let mut counts = self.bursts.phase(writer.number) == Phase::Counted;
        for Record { thread: of, event } in records.iter().filter_map(|record| record.decode()) {
            // Of processes; before the first thread runs, too.
            if let Event::Mapping { start, bytes, hint } = event {
                self.mapping(writer, start, bytes, hint);
                continue;
            }
            if let Event::Phase { phase, gap, is_first } = event {
                let total = self.counted(writer);
                self.bursts.enters((writer.number, of), phase, (gap, is_first), total);
                let done = self.done(writer);
                self.warm_ups.enters(writer.number, phase, gap, done);
                counts = phase == Phase::Counted;
                continue;
            }
            if thread != Some(of) {
                thread = Some(of);
                lane = self.lane_of(writer, of);
            }
            match event {
                Event::Load { address, instruction } | Event::Store { address, instruction } => {
                    self.data(lane, address, instruction, counts);
                }
                Event::Fetch { address } => self.fetch(lane, address, counts),
                Event::Counts { instructions, accesses } => {
                    self.counts(lane, instructions, accesses, counts);
                }
                Event::Touch { address, class, is_code } => {
                    self.touch(lane, address, class, is_code);
                }
                Event::Mapping { .. } | Event::Phase { .. } => {}
            }
        }
    }

    fn warm_up(&self, writer: Writer) -> u32 {
        self.warm_ups.length(writer.number)
    }

    /// What a thread has missed stays part of the whole.
    fn ended(&mut self, _writer: Writer) {}
}
