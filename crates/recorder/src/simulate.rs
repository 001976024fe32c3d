//! The consumer that feeds TLB models: each thread has its own CPU in each configuration.
//!
//! Invariants: a record costs one lookup for each configuration. Only a TLB miss updates the attribution
//! and the counters. Time is modelled: the machine file's costs of instructions, far accesses and
//! translation.
//!
//! A far access is a modelled cache miss: its page is not among the eight used last with the same six
//! address bits, as in a cache of 2 MiB. Far accesses do not depend on page sizes. Nor do they depend on
//! the engine's filter, which holds none of these pages: [`crate::filter::INDEX_END`], [`WAYS_MAX`].

mod replay_adapter;
pub(crate) mod warm;

pub use replay_adapter::ReplayAdapter;
use warm::{WarmUps, WriterProgress};

use crate::bursts::{Burst, Bursts, RateEstimate};
use crate::config::{MachineConfig, PagePolicy};
use crate::counters::{CpuCounters, Side};
use crate::filter::{self, FilteredTlb, LARGE_SHIFT, PAGE_SHIFT};
use crate::places::{self, AddressSpace, PlaceList};
use crate::stream::{
    Consumer, Event, MappingHint, RawRecord, Record, SETS_MAX, SamplingStage, SideFilters,
    SizeClass, WAYS_MAX, Writer,
};
use pagetax_sim::hardware::set::{Replacement, TagArray};
use pagetax_sim::hardware::translation::{Lookup, Translation};
use std::collections::HashMap;

/// A simulation of a whole recording.
pub struct Simulation {
    configs: Vec<MachineConfig>,
    /// Page sizes by configuration.
    sizes: Vec<Sizes>,
    places: PlaceList,
    processes: Vec<Process>,
    threads: Vec<SimulatedThread>,
    /// Attributed misses by configuration.
    misses: Vec<Attribution>,
    /// Bursts of a sampled recording.
    bursts: Bursts,
    warm_ups: WarmUps,
}

/// The page sizes of one configuration, by number of the place.
#[derive(Default)]
struct Sizes {
    data: Vec<u32>,
    code: Vec<u32>,
}

/// A process and its address space.
struct Process {
    number: u32,
    pid: u32,
    space: AddressSpace,
}

/// A recorded thread, with TLBs of its own.
pub struct SimulatedThread {
    writer: usize,
    number: u16,
    /// The id of the thread's process.
    pub pid: u32,
    process: usize,
    /// The pages used last: accesses to them are not far.
    near: TagArray,
    /// The number of its instructions so far.
    pub instruction_count: u64,
    /// Instructions that count: all of them, unless the recording is sampled.
    pub counted_count: u64,
    /// Loads and stores so far, including those that the engine filtered.
    pub access_count: u64,
    /// The far accesses of counted instructions.
    pub far_count: u64,
    /// Its CPU in each configuration.
    pub cpus: Vec<Cpu>,
}

/// A simulated CPU in one configuration.
pub struct Cpu {
    /// The translation hardware.
    pub translation: Translation,
    /// Misses that count, and the modelled time.
    pub counters: CpuCounters,
    /// TLB misses, including those outside bursts.
    walk_count: u64,
}

/// The misses of an instruction or a place.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MissShare {
    /// Accesses that missed all TLB levels.
    pub count: u64,
    /// The time of these misses, in picoseconds.
    pub ps: u64,
}

/// The misses of one configuration by instruction and by place.
#[derive(Debug, Default)]
pub struct Attribution {
    /// Misses by process (in the order of appearance) and instruction address.
    by_instruction: HashMap<(usize, u64), MissShare>,
    /// Misses by number of the place.
    by_place: Vec<MissShare>,
    /// The last instruction's misses, cached because the next miss often has the same one.
    last: ((usize, u64), MissShare),
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
            self.by_place.resize(usize::from(place) + 1, MissShare::default());
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
    /// Creates a simulation of these configurations.
    pub fn new(configs: Vec<MachineConfig>) -> Self {
        let sizes = configs.iter().map(|_| Sizes::default()).collect();
        let warm_ups = WarmUps::new(configs.iter().map(|config| config.cpu.data().entries_max()));
        let misses = configs.iter().map(|_| Attribution::default()).collect();
        Simulation {
            configs,
            sizes,
            places: PlaceList::default(),
            processes: Vec::new(),
            threads: Vec::new(),
            misses,
            bursts: Bursts::default(),
            warm_ups,
        }
    }

    /// Returns the bursts of a sampled recording.
    pub fn bursts(&self) -> &Bursts {
        &self.bursts
    }

    /// Returns the filters of data and of code that change no count in any configuration.
    pub fn filters(&self) -> (SideFilters, SideFilters) {
        let data =
            self.configs.iter().map(|v| FilteredTlb { tlb: v.cpu.data(), shifts: v.data_shifts() });
        let code = self
            .configs
            .iter()
            .map(|v| FilteredTlb { tlb: v.cpu.instructions(), shifts: v.code_shifts() });
        let (data, code): (Vec<_>, Vec<_>) = (data.collect(), code.collect());
        let large_on_demand = self.configs.iter().all(|config| config.pages == PagePolicy::Real)
            && !places::kernel_makes_large_pages();
        [&data, &code]
            .map(|fed| SideFilters {
                large_on_demand: large_on_demand.into(),
                ..filter::choose(fed)
            })
            .into()
    }

    /// Returns the configurations in the order in which they were given.
    pub fn configs(&self) -> &[MachineConfig] {
        &self.configs
    }

    /// Returns the threads in the order of appearance.
    pub fn threads(&self) -> &[SimulatedThread] {
        &self.threads
    }

    /// Returns all places that were looked up.
    pub fn places(&self) -> &PlaceList {
        &self.places
    }

    /// Returns process IDs and address spaces in the order of appearance.
    pub fn processes(&self) -> impl Iterator<Item = (u32, &AddressSpace)> {
        self.processes.iter().map(|process| (process.pid, &process.space))
    }

    /// Returns a configuration's misses by process and instruction.
    pub fn by_instruction(&mut self, config: usize) -> Vec<((usize, u64), MissShare)> {
        self.misses[config].flush();
        self.misses[config].by_instruction.iter().map(|(key, share)| (*key, *share)).collect()
    }

    /// Returns a configuration's misses by number of the place.
    pub fn by_place(&self, config: usize) -> &[MissShare] {
        &self.misses[config].by_place
    }

    fn process_of(&mut self, writer: Writer) -> usize {
        let known = self.processes.iter().position(|process| process.number == writer.process);
        known.unwrap_or_else(|| {
            let space = AddressSpace::new(writer.pid);
            self.processes.push(Process { number: writer.process, pid: writer.pid, space });
            self.processes.len() - 1
        })
    }

    fn thread_of(&mut self, writer: Writer, number: u16) -> usize {
        let known =
            self.threads.iter().position(|l| l.writer == writer.number && l.number == number);
        if let Some(thread) = known {
            return thread;
        }
        let process = self.process_of(writer);
        let cpu = |config: &MachineConfig| Cpu {
            translation: config.cpu.clone(),
            counters: CpuCounters::default(),
            walk_count: 0,
        };
        self.threads.push(SimulatedThread {
            writer: writer.number,
            number,
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
            cpus: self.configs.iter().map(cpu).collect(),
        });
        self.threads.len() - 1
    }

    /// Returns the place at an address. Maps its page in all configurations at the first touch.
    #[inline(always)]
    fn place(&mut self, thread: usize, address: u64) -> u16 {
        let process = self.threads[thread].process;
        match self.processes[process].space.known(address) {
            Some(place) => place,
            None => self.new_page(thread, address),
        }
    }

    #[cold]
    fn new_page(&mut self, thread: usize, address: u64) -> u16 {
        let process = self.threads[thread].process;
        let place = self.processes[process].space.look_up(address, &mut self.places);
        for (config, sizes) in self.configs.iter().zip(&mut self.sizes) {
            for number in sizes.data.len()..self.places.len() {
                let place = self.places.get(number as u16);
                sizes.data.push(config.data_shift(place));
                sizes.code.push(config.code_shift(place));
            }
        }
        for (cpu, sizes) in self.threads[thread].cpus.iter_mut().zip(&self.sizes) {
            cpu.translation.mapped(address, sizes.data[usize::from(place)]);
        }
        place
    }

    #[inline(always)]
    fn data(&mut self, thread_number: usize, address: u64, instruction: u64, counts: bool) {
        let place = self.place(thread_number, address);
        let thread = &mut self.threads[thread_number];
        let is_far = !thread.near.touch(address >> PAGE_SHIFT, near_tag(address));
        thread.far_count += u64::from(is_far && counts);
        let configs = self.configs.iter().zip(&self.sizes).zip(&mut self.misses);
        for (cpu, ((config, sizes), misses)) in thread.cpus.iter_mut().zip(configs) {
            let shift = sizes.data[usize::from(place)];
            let found = cpu.translation.access(address, shift, false);
            cpu.walk_count += u64::from(found.walked);
            if !counts {
                continue;
            }
            cpu.counters.clock_ps += found.level_ps + if is_far { config.times.far_ps } else { 0 };
            if found.walked {
                cpu.missed(Side::Data, shift, found);
                misses.add(thread.process, instruction, place, found.refill_ps + found.tsb_ps);
            }
        }
    }

    #[inline(always)]
    fn fetch(&mut self, thread_number: usize, address: u64, counts: bool) {
        let place = self.place(thread_number, address);
        let thread = &mut self.threads[thread_number];
        let configs = self.sizes.iter().zip(&mut self.misses);
        for (cpu, (sizes, misses)) in thread.cpus.iter_mut().zip(configs) {
            let shift = sizes.code[usize::from(place)];
            let found = cpu.translation.fetch(address, shift);
            cpu.walk_count += u64::from(found.walked);
            if found.walked && counts {
                cpu.missed(Side::Code, shift, found);
                misses.add(thread.process, address, place, found.refill_ps + found.tsb_ps);
            }
        }
    }

    /// Updates the order of TLB entries: see [`Event::Touch`].
    #[inline(always)]
    fn touch(&mut self, thread_number: usize, address: u64, class: SizeClass, is_code: bool) {
        let place = usize::from(self.place(thread_number, address));
        let thread = &mut self.threads[thread_number];
        if !is_code && class != SizeClass::Large {
            thread.near.touch(address >> PAGE_SHIFT, near_tag(address));
        }
        for (cpu, sizes) in thread.cpus.iter_mut().zip(&self.sizes) {
            let shift = if is_code { sizes.code[place] } else { sizes.data[place] };
            if class == SizeClass::All || (class == SizeClass::Large) == (shift >= LARGE_SHIFT) {
                cpu.translation.refresh(address, shift, is_code);
            }
        }
    }

    fn counts(&mut self, thread: usize, instructions: u64, accesses: u64, counts: bool) {
        let thread = &mut self.threads[thread];
        thread.instruction_count += instructions;
        thread.access_count += accesses;
        if !counts {
            return;
        }
        thread.counted_count += instructions;
        for (cpu, config) in thread.cpus.iter_mut().zip(&self.configs) {
            cpu.counters.clock_ps += instructions * config.times.instruction_ps;
        }
    }

    /// Returns a writer's instructions and misses so far, in and outside bursts.
    fn done(&self, writer: Writer) -> WriterProgress {
        let threads = || self.threads.iter().filter(|thread| thread.writer == writer.number);
        let walks = |config: usize| threads().map(|thread| thread.cpus[config].walk_count).sum();
        WriterProgress {
            instructions: threads().map(|thread| thread.instruction_count).sum(),
            walks: (0..self.configs.len()).map(walks).collect(),
        }
    }

    /// Returns a writer's counts so far, of bursts only.
    fn counted(&self, writer: Writer) -> Burst {
        let configs = self.configs.len();
        let mut total = Burst { counts: vec![0; configs * 2], ..Burst::default() };
        for thread in self.threads.iter().filter(|thread| thread.writer == writer.number) {
            total.instructions += thread.counted_count;
            for (nth, cpu) in thread.cpus.iter().enumerate() {
                for side in [Side::Code, Side::Data] {
                    total.counts[walks_of(nth, side)] += cpu.counters.total(side).tlb_count;
                }
            }
        }
        total
    }

    /// Estimates the misses of a configuration on a side for each instruction of the program, from bursts.
    pub fn estimate(&self, config: usize, side: Side) -> Option<RateEstimate> {
        self.bursts.estimate(|burst| burst.count(walks_of(config, side)))
    }

    fn mapping(&mut self, writer: Writer, start: u64, bytes: u64, hint: MappingHint) {
        let process = self.process_of(writer);
        self.processes[process].space.changed(start, bytes, hint);
        if hint == MappingHint::Gone {
            let threads = self.threads.iter_mut().filter(|thread| thread.process == process);
            for cpu in threads.flat_map(|thread| &mut thread.cpus) {
                cpu.translation.unmapped(start..start.saturating_add(bytes));
            }
        }
    }
}

/// Returns the index of a burst's misses.
fn walks_of(config: usize, side: Side) -> usize {
    config * 2 + side as usize
}

/// Returns a tag, which must not be 0.
fn near_tag(address: u64) -> u64 {
    (address >> PAGE_SHIFT) + 1
}

impl Cpu {
    fn missed(&mut self, side: Side, shift: u32, found: Lookup) {
        self.counters.clock_ps += found.refill_ps + found.tsb_ps;
        let misses = self.counters.misses_mut(side, shift);
        misses.tlb_count += 1;
        misses.tlb_ps += found.refill_ps;
        misses.tsb_count += u64::from(found.tsb_missed);
        misses.tsb_ps += found.tsb_ps;
    }
}

impl Consumer for Simulation {
    fn take(&mut self, writer: Writer, records: &[RawRecord]) {
        let (mut current, mut thread) = (None, 0);
        let mut counts = self.bursts.stage(writer.number) == SamplingStage::Counted;
        for Record { thread: of, event } in records.iter().filter_map(|record| record.decode()) {
            // Mappings concern a process, and come before its first thread runs as well.
            if let Event::Mapping { start, bytes, hint } = event {
                self.mapping(writer, start, bytes, hint);
                continue;
            }
            if let Event::Stage { stage, gap, is_first } = event {
                let total = self.counted(writer);
                self.bursts.enters((writer.number, of), stage, (gap, is_first), total);
                let done = self.done(writer);
                self.warm_ups.enters(writer.number, stage, gap, done);
                counts = stage == SamplingStage::Counted;
                continue;
            }
            if current != Some(of) {
                current = Some(of);
                thread = self.thread_of(writer, of);
            }
            match event {
                Event::Load { address, instruction } | Event::Store { address, instruction } => {
                    self.data(thread, address, instruction, counts);
                }
                Event::Fetch { address } => self.fetch(thread, address, counts),
                Event::Counts { instructions, accesses } => {
                    self.counts(thread, instructions, accesses, counts);
                }
                Event::Touch { address, class, is_code } => {
                    self.touch(thread, address, class, is_code);
                }
                Event::Mapping { .. } | Event::Stage { .. } | Event::MemoryUse { .. } => {}
            }
        }
    }

    fn warm_up(&self, writer: Writer) -> u32 {
        self.warm_ups.length(writer.number)
    }

    /// Keeps the threads, whose misses remain in the totals.
    fn ended(&mut self, _writer: Writer) {}
}
