//! The record backend: runs the command under a recorder and shows it to simulated machines.
//!
//! Time is the simulated machine's: intervals are of its clock, rates a second of it, and percentages
//! parts of it. Each thread has CPUs of its own, and a row for each.

use super::backend::{Backend, Finished, Sink};
use super::{Args, profile, seconds};
use crate::recorded::open_trace;
use crate::{exit, machines};
use anyhow::{Context, Result, anyhow};
use pagetax_core::counter::Provenance;
use pagetax_core::trapstat::{Cell, Cells, Listing, Mode, Row};
use pagetax_host::launch::program::Program;
use pagetax_host::procfs::CpuList;
use pagetax_host::sys::signal::asked_to_stop;
use pagetax_recorder::engine::{Engine, EngineError, EngineKind};
use pagetax_recorder::machine::{Pages, View};
use pagetax_recorder::native::Status;
use pagetax_recorder::pages::{self, Kind, Thread};
use pagetax_recorder::places::Segment;
use pagetax_recorder::session::{self, Ended, Exit, Recording};
use pagetax_recorder::simulate::{Simulation, Told};
use pagetax_recorder::tally::{Access, Misses, Tally};
use pagetax_recorder::trace::Trace;
use std::ffi::OsStr;
use std::ops::Range;
use std::time::Instant;

/// As on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum EngineChoice {
    /// A Valgrind tool: fastest on real programs, one thread at a time
    Valgrind,
    /// A plugin of QEMU's user mode: other instruction sets, threads in parallel
    Qemu,
    /// Copies of the program's own code, for trapstat --sample only: fastest, but for code made at run time
    Native,
}

/// An engine that is ready, and the machines to show the program to.
pub struct Record {
    source: Source,
    views: Vec<View>,
    why: String,
}

/// What is shown to them.
enum Source {
    /// A command, to be run under it.
    Engine(Engine),
    Trace(Box<Trace>),
}

impl Record {
    /// Prepares all that can fail before the program starts. `why`: why no other backend.
    pub fn new(args: &Args, why: String) -> Result<Record> {
        if args.pid.is_some() {
            let what = "the record backend runs commands; it cannot look into a running process";
            return Err(super::unmet(format!("{what}\n  remedy: name the command, after --")));
        }
        let views = views(args)?;
        if let Some(trace) = &args.operands.trace {
            return Ok(Record { source: Source::Trace(Box::new(open_trace(trace)?)), views, why });
        }
        let name = args
            .command
            .first()
            .context("no command to record\n  remedy: name one: pagetax trapstat -- COMMAND")?;
        let (engine, _) = engine_for(name, args.engine, args.follow, args.sample)?;
        if args.sample && engine.kind == EngineKind::Qemu {
            let what = format!("the {} engine records all, it cannot sample", engine.kind);
            return Err(super::unmet(format!("{what}\n  remedy: leave --sample out")));
        }
        Ok(Record { source: Source::Engine(engine), views, why })
    }

    fn record(&self, engine: &Engine, args: &Args, sink: &mut Sink<'_>) -> Result<Finished> {
        let mut simulation = Simulation::new(self.views.clone());
        let recording = Recording {
            engine,
            argv: &args.command,
            follow: args.follow,
            sample: args.sample,
            filters: simulation.filters(),
        };
        let mut intervals = Intervals::new(args, &simulation)?;
        let mut printed = Ok(());
        let ended = session::run(&recording, &mut simulation, |simulation| {
            if printed.is_ok() {
                printed = intervals.look(simulation, sink);
            }
        })?;
        printed?;
        intervals.finish(&simulation, sink)?;
        Ok(Finished {
            code: ended.exit.shell_code(),
            wall_ns: ended.wall_ns,
            profiles: self.profiles(&mut simulation, args.top),
            notes: notes(&ended, &simulation, engine.kind),
        })
    }

    /// The same from a trace, which tells no instructions: nothing is known by function.
    fn read(&self, trace: &Trace, args: &Args, sink: &mut Sink<'_>) -> Result<Finished> {
        let (simulation, begun) = (Simulation::new(self.views.clone()), Instant::now());
        let intervals = Intervals::new(args, &simulation)?;
        let mut reader = Reader { told: Told::new(simulation), intervals, sink, printed: Ok(()) };
        let read = trace.tell(&mut reader, |_| !asked_to_stop());
        reader.printed?;
        let Reader { told: Told { mut simulation, .. }, mut intervals, sink, .. } = reader;
        intervals.finish(&simulation, sink)?;
        let mut profiles = self.profiles(&mut simulation, args.top);
        profiles.iter_mut().for_each(|profile| profile.functions.clear());
        let mut notes = Vec::new();
        if let Err(error) = read {
            notes.push(format!("only what is before it was read: {error}"));
        }
        notes.push(summary(&simulation, "of a trace: real page sizes are taken for 4K"));
        let code = if asked_to_stop() { exit::INTERRUPTED } else { exit::FINE };
        Ok(Finished { code, wall_ns: begun.elapsed().as_nanos() as u64, profiles, notes })
    }

    fn profiles(&self, simulation: &mut Simulation, top: usize) -> Vec<profile::Profile> {
        let views = self.views.iter().enumerate();
        views.map(|(nr, view)| profile::of(simulation, nr, &title(view), top)).collect()
    }
}

/// Takes a trace, and prints as its time goes on.
struct Reader<'a, 'b> {
    told: Told,
    intervals: Intervals,
    sink: &'a mut Sink<'b>,
    printed: Result<()>,
}

impl pages::Pages for Reader<'_, '_> {
    #[inline]
    fn change(&mut self, thread: Thread, kind: Kind, page: u64) {
        self.told.change(thread, kind, page);
    }

    fn ran(&mut self, thread: Thread, instructions: u64, accesses: u64) {
        self.told.ran(thread, instructions, accesses);
        if self.printed.is_ok() {
            self.printed = self.intervals.look(&self.told.simulation, self.sink);
        }
    }

    fn found(&mut self, process: u32, page: u64, segment: Segment) {
        self.told.found(process, page, segment);
    }

    fn gone(&mut self, thread: Thread, pages: Range<u64>) {
        self.told.gone(thread, pages);
    }
}

/// The engine that runs a command best, or the one asked for; and what the command is.
pub fn engine_for(
    name: &OsStr,
    asked: Option<EngineChoice>,
    follow: bool,
    sample: bool,
) -> Result<(Engine, Program)> {
    let program =
        Program::find(name).map_err(|error| exit::with(exit::of_program(&error), error))?;
    let asked = asked.map(|engine| match engine {
        EngineChoice::Valgrind => EngineKind::Valgrind,
        EngineChoice::Qemu => EngineKind::Qemu,
        EngineChoice::Native => EngineKind::Native,
    });
    let engine = Engine::choose(&program, asked).map_err(engine_error)?;
    if engine.kind == EngineKind::Native && !sample {
        let what = "the native engine records samples only";
        return Err(super::unmet(format!(
            "{what}\n  remedy: trapstat --sample --engine native, or --engine valgrind for all of the program"
        )));
    }
    if follow && engine.kind == EngineKind::Native {
        let what = "the native engine does not follow forks and execs";
        return Err(super::unmet(format!("{what}\n  remedy: --engine valgrind, or no --follow")));
    }
    Ok((engine, program))
}

fn engine_error(error: EngineError) -> anyhow::Error {
    let code = match error {
        EngineError::SetId(_) => exit::WRAPPER_FAILED,
        EngineError::NoProgram(_) => exit::NOT_EXECUTABLE,
        EngineError::Build(_) | EngineError::Architecture { .. } | EngineError::Native(_) => {
            exit::UNMET
        }
    };
    exit::with(code, error)
}

/// Every machine with every page policy.
fn views(args: &Args) -> Result<Vec<View>> {
    let mut views = Vec::new();
    for machine in &args.on {
        let Some(name) = machine.strip_prefix("sim:") else {
            return Err(anyhow!(
                "`{machine}` is no simulated machine\n  remedy: name one as sim:NAME; `pagetax machines` lists them"
            ));
        };
        let model = machines::model_of(name, machine)?;
        if !model.has_table("dtlb_1a") {
            return Err(anyhow!(
                "{machine} has no TLB to miss\n  remedy: name a machine with one, such as sim:x86-64-calibrated"
            ));
        }
        for pages in &args.pages {
            let pages: Pages = pages.parse().with_context(|| format!("--pages {pages}"))?;
            views.push(View::new(&model, pages)?);
        }
    }
    Ok(views)
}

impl Backend for Record {
    fn name(&self) -> &'static str {
        "record"
    }

    fn why(&self) -> String {
        let by = match &self.source {
            Source::Engine(Engine { kind, why, .. }) => format!("engine {kind} ({why})"),
            Source::Trace(trace) => trace.head.title(),
        };
        format!("{}; {by}; all numbers are modelled", self.why)
    }

    fn run(&mut self, args: &Args, sink: &mut Sink<'_>) -> Result<Finished> {
        match &self.source {
            Source::Engine(engine) => self.record(engine, args, sink),
            Source::Trace(trace) => self.read(trace, args, sink),
        }
    }
}

/// What was simulated in all, and a word more.
fn summary(simulation: &Simulation, more: &str) -> String {
    let sum = |of: fn(&pagetax_recorder::simulate::Lane) -> u64| -> u64 {
        simulation.lanes().iter().map(of).sum()
    };
    let (instructions, accesses) = (sum(|l| l.instruction_count), sum(|l| l.access_count));
    let threads = simulation.lanes().len();
    format!("{instructions} instructions, {accesses} loads and stores, {threads} threads; {more}")
}

fn notes(ended: &Ended, simulation: &Simulation, engine: EngineKind) -> Vec<String> {
    let wall = seconds(ended.wall_ns);
    let more = format!("{} page changes; {wall} under the recorder", ended.record_count);
    let mut notes = vec![summary(simulation, &more)];
    if ended.unrecorded_count > 0 {
        notes.push(format!(
            "{} processes or threads were not recorded: more than 64 ran at a time",
            ended.unrecorded_count
        ));
    }
    if let Exit::Signal(signal) = ended.exit {
        notes.push(format!("the program was ended by signal {signal}"));
    }
    if simulation.lanes().is_empty() {
        notes.push("the program did nothing that could be recorded".into());
    }
    match failure(ended, simulation) {
        Some(failure) => notes.push(failure),
        None => notes.extend(sampling(simulation, engine)),
    }
    let said = ended.native.as_ref().map(Status::report).unwrap_or_default();
    notes.extend(said.into_iter().map(|line| format!("recorder: {line}")));
    notes.extend(ended.log.lines().take(20).map(|line| format!("recorder: {line}")));
    notes
}

/// Returns what makes a native recording void.
fn failure(ended: &Ended, simulation: &Simulation) -> Option<String> {
    let native = ended.native.as_ref()?;
    let checked = simulation.bursts().check(native.cpu_ns + TICK_NS);
    let impossible = |error| format!("the recording failed: {error}; its numbers are void");
    native.failure().or_else(|| checked.err().map(impossible))
}

/// The kernel counts a process' CPU time in ticks.
const TICK_NS: u64 = 10_000_000;

/// What a sampled recording is worth.
fn sampling(simulation: &Simulation, engine: EngineKind) -> Vec<String> {
    let bursts = simulation.bursts();
    if !bursts.is_sampled() {
        return rates(simulation);
    }
    let sum = |of: fn(&pagetax_recorder::simulate::Lane) -> u64| -> u64 {
        simulation.lanes().iter().map(of).sum()
    };
    let counted = sum(|l| l.counted_count);
    let share = match engine {
        EngineKind::Native => format!("{counted} instructions, of how many is n/a"),
        _ => {
            let share = counted as f64 / sum(|l| l.instruction_count).max(1) as f64;
            format!("{:.1} % of the instructions", share * 100.0)
        }
    };
    let mut notes = vec![format!(
        "sampled: {} bursts, {share}; counts are theirs, rates and percentages stand for all",
        bursts.list().len(),
    )];
    if engine == EngineKind::Native {
        notes.push(
            "bursts come more often where the program is slow: tables have such parts above their share; in the misses \
             in a million instructions below, each burst counts for the instructions between two"
                .into(),
        );
    }
    for (nth, view) in simulation.views().iter().enumerate() {
        for (side, name) in SIDES {
            let Some(found) = bursts.estimate(nth, side) else {
                notes.push("too few bursts for an interval: record without --sample".into());
                return notes;
            };
            notes.push(format!(
                "{}: {name} misses in a million instructions: {:.1} ± {:.1} ({:.1} %), 95 % interval",
                title(view),
                found.value * 1e6,
                found.error * 1e6,
                found.error / found.value.max(f64::MIN_POSITIVE) * 100.0
            ));
        }
    }
    notes
}

/// What a full recording has found, in the words of a sampled one.
fn rates(simulation: &Simulation) -> Vec<String> {
    let instructions: u64 = simulation.lanes().iter().map(|lane| lane.counted_count).sum();
    let rate = |nth: usize, side| {
        let tallies = simulation.lanes().iter().map(|lane| &lane.cpus[nth].tally);
        let misses: u64 = tallies.map(|tally| tally.total(side).tlb_count).sum();
        misses as f64 / instructions.max(1) as f64 * 1e6
    };
    let line = |(nth, view): (usize, &View)| {
        SIDES.map(|(side, name)| {
            let rate = rate(nth, side);
            format!("{}: {name} misses in a million instructions: {rate:.1}", title(view))
        })
    };
    simulation.views().iter().enumerate().flat_map(line).collect()
}

const SIDES: [(Access, &str); 2] = [(Access::Data, "data"), (Access::Instruction, "instruction")];

fn title(view: &View) -> String {
    format!("{}, {}", view.machine, view.pages)
}

/// Cuts each view's time into listings.
struct Intervals {
    interval_ps: Option<u64>,
    count: Option<u64>,
    cpus: Option<CpuList>,
    views: Vec<Cut>,
}

/// Where a view's last listing ended.
#[derive(Default)]
struct Cut {
    /// Handed out. Fewer than intervals where the program passed several between two looks.
    listings: u64,
    intervals: u64,
    /// By lane.
    tallies: Vec<Tally>,
}

impl Intervals {
    fn new(args: &Args, simulation: &Simulation) -> Result<Intervals> {
        Ok(Intervals {
            interval_ps: args.interval_ns()?.map(|ns| ns * 1000),
            count: args.operands.count,
            cpus: args.cpus.clone(),
            views: simulation.views().iter().map(|_| Cut::default()).collect(),
        })
    }

    /// Hands out the listings of intervals that are over: those that a view's foremost thread passed.
    fn look(&mut self, simulation: &Simulation, sink: &mut Sink<'_>) -> Result<()> {
        let Some(interval_ps) = self.interval_ps else { return Ok(()) };
        for view in 0..self.views.len() {
            let clocks = simulation.lanes().iter().map(|lane| lane.cpus[view].tally.clock_ps);
            let clock_ps = clocks.max().unwrap_or(0);
            let cut = &self.views[view];
            if clock_ps >= (cut.intervals + 1) * interval_ps
                && self.count.is_none_or(|count| cut.listings < count)
            {
                self.cut(simulation, view, clock_ps / interval_ps, sink)?;
            }
        }
        Ok(())
    }

    /// The last listing: of the whole run without intervals, of what is left with them.
    fn finish(&mut self, simulation: &Simulation, sink: &mut Sink<'_>) -> Result<()> {
        for view in 0..self.views.len() {
            let Cut { listings, intervals, .. } = self.views[view];
            if self.count.is_none_or(|count| listings < count) && !simulation.lanes().is_empty() {
                self.cut(simulation, view, intervals + 1, sink)?;
            }
        }
        Ok(())
    }

    fn cut(
        &mut self,
        simulation: &Simulation,
        view: usize,
        intervals: u64,
        sink: &mut Sink<'_>,
    ) -> Result<()> {
        let cut = &mut self.views[view];
        let now: Vec<Tally> =
            simulation.lanes().iter().map(|lane| lane.cpus[view].tally.clone()).collect();
        cut.tallies.resize(now.len(), Tally::default());
        let since: Vec<(u32, Tally)> = now
            .iter()
            .zip(&cut.tallies)
            .map(|(now, before)| now.since(before))
            .enumerate()
            .map(|(lane, tally)| (lane as u32, tally))
            .filter(|(lane, tally)| {
                tally.clock_ps > 0 && self.cpus.as_ref().is_none_or(|cpus| cpus.contains(*lane))
            })
            .collect();
        let end_ns = now.iter().map(|tally| tally.clock_ps).max().unwrap_or(0) / 1000;
        cut.tallies = now;
        (cut.listings, cut.intervals) = (cut.listings + 1, intervals);
        sink(listing(&simulation.views()[view], &since, end_ns))
    }
}

fn listing(view: &View, since: &[(u32, Tally)], end_ns: u64) -> Listing {
    let mut rows = Vec::new();
    for (cpu, tally) in since {
        for shift in &view.shifts {
            let cells = user(view, tally, *shift);
            rows.push(Row { cpu: *cpu, mode: Mode::User, page_bytes: Some(1 << shift), cells });
        }
        for shift in &view.shifts {
            let cells = Cells::default();
            rows.push(Row { cpu: *cpu, mode: Mode::Kernel, page_bytes: Some(1 << shift), cells });
        }
    }
    let elapsed_ps = since.iter().map(|(_, tally)| tally.clock_ps).max().unwrap_or(0);
    let mut notes = vec!["n/a: the recorder sees user code only".to_string()];
    if view.cpu.handler_ps().is_none() {
        notes.push("n/a: a page walker has no translation storage buffer".into());
    }
    Listing {
        title: title(view),
        provenance: Provenance::Modeled,
        end_ns,
        elapsed_ns: elapsed_ps / 1000,
        rows,
        notes,
    }
}

fn user(view: &View, tally: &Tally, shift: u32) -> Cells {
    let clock_ps = tally.clock_ps.max(1) as f64;
    let cell = |count: u64, ps: u64| {
        Cell::known(count as f64 / (clock_ps / 1e12), ps as f64 / clock_ps * 100.0)
    };
    let tlb = |misses: Misses| cell(misses.tlb_count, misses.tlb_ps);
    let tsb = |misses: Misses| match view.cpu.handler_ps() {
        Some(_) => cell(misses.tsb_count, misses.tsb_ps),
        None => Cell::default(),
    };
    let (code, data) =
        (tally.misses(Access::Instruction, shift), tally.misses(Access::Data, shift));
    Cells { itlb: tlb(code), itsb: tsb(code), dtlb: tlb(data), dtsb: tsb(data) }
}
