//! The record backend: runs the command under a recorder and shows it to simulated machines.
//!
//! Time is the simulated machine's: intervals are of its clock, rates a second of it, and percentages
//! parts of it. Each thread has CPUs of its own, and a row for each.

use super::args::{Args, unmet};
use super::backend::{Backend, Finished, Sink};
use crate::output::progress::Progress;
use crate::recorded::{engine_for, open_trace, streams};
use crate::{calibrate, exit, machines};
use anyhow::{Context, Result, anyhow};
use pagetax_host::sys::signal::asked_to_stop;
use pagetax_recorder::config::{MachineConfig, PagePolicy};
use pagetax_recorder::engine::Engine;
use pagetax_recorder::listing::ListingIntervals;
use pagetax_recorder::pages::{self, AccessKind, Thread};
use pagetax_recorder::places::Segment;
use pagetax_recorder::profile::{Profile, profile};
use pagetax_recorder::session::{self, RecordOptions};
use pagetax_recorder::simulate::{ReplayAdapter, Simulation};
use pagetax_recorder::summary;
use pagetax_recorder::trace::Trace;
use pagetax_sim::hardware::calibrated;
use std::ops::Range;
use std::time::Instant;

/// An engine that is ready, and the machines to show the program to.
pub struct Record {
    source: AccessSource,
    configs: Vec<MachineConfig>,
    why: String,
}

/// The source of accesses.
enum AccessSource {
    /// A command, to be run under it.
    Engine(Engine),
    Trace(Box<Trace>),
}

impl AccessSource {
    fn open(args: &Args) -> Result<AccessSource> {
        if let Some(trace) = &args.operands.file {
            return Ok(AccessSource::Trace(Box::new(open_trace(trace)?)));
        }
        let name = args
            .command
            .first()
            .context("no command to record\n  hint: name one: pagetax trapstat -- COMMAND")?;
        let (engine, _) = engine_for(name, args.engine, args.follow, args.sample)?;
        Ok(AccessSource::Engine(engine))
    }
}

impl Record {
    /// Prepares all that can fail before the program starts. `why`: why no other backend.
    pub fn new(args: &Args, why: String) -> Result<Record> {
        if !args.pids.is_empty() {
            let what = "the record backend runs commands; it cannot look into a running process";
            return Err(unmet(format!("{what}\n  hint: name the command, after --")));
        }
        let configs = configs(args)?;
        Ok(Record { source: AccessSource::open(args)?, configs, why })
    }

    fn record(&self, engine: &Engine, args: &Args, sink: &mut Sink<'_>) -> Result<Finished> {
        let mut simulation = Simulation::new(self.configs.clone());
        let options = RecordOptions {
            engine,
            argv: &args.command,
            follow: args.follow,
            sample: args.sample,
            zeros: false,
            filters: simulation.filters(),
            streams: streams(args.outputs.takes_stdout()),
            environment: &[],
        };
        let mut intervals = intervals(args, &simulation)?;
        let mut printed = Ok(());
        let mut progress =
            progress(args, |what| Progress::beside_program(what, args.outputs.takes_stdout()));
        let ended = session::run(&options, &mut simulation, |simulation, record_count| {
            progress.recorded(record_count);
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
            notes: summary::notes(&ended, &simulation, engine.kind),
        })
    }

    /// Reads a trace. It has no instruction addresses, so there is no profile by function.
    fn read(&self, trace: &Trace, args: &Args, sink: &mut Sink<'_>) -> Result<Finished> {
        let (simulation, begun) = (Simulation::new(self.configs.clone()), Instant::now());
        let intervals = intervals(args, &simulation)?;
        let mut reader =
            Reader { adapter: ReplayAdapter::new(simulation), intervals, sink, printed: Ok(()) };
        let mut progress = progress(args, Progress::start);
        let read = trace.replay(&mut reader, |done| {
            progress.update(done);
            !asked_to_stop()
        });
        drop(progress);
        reader.printed?;
        let Reader { adapter: ReplayAdapter { mut simulation, .. }, mut intervals, sink, .. } =
            reader;
        intervals.finish(&simulation, sink)?;
        let mut profiles = self.profiles(&mut simulation, args.top);
        profiles.iter_mut().for_each(|profile| profile.functions.clear());
        let mut notes = Vec::new();
        if let Err(error) = read {
            notes.push(format!("only what is before it was read: {error}"));
        }
        notes.push(summary::totals(&simulation, "of a trace: real page sizes are taken for 4K"));
        let code = if asked_to_stop() { exit::INTERRUPTED } else { exit::FINE };
        Ok(Finished { code, wall_ns: begun.elapsed().as_nanos() as u64, profiles, notes })
    }

    fn profiles(&self, simulation: &mut Simulation, top: usize) -> Vec<Profile> {
        let configs = self.configs.iter().enumerate();
        configs.map(|(nr, config)| profile(simulation, nr, &config.name(), top)).collect()
    }
}

/// Takes a trace, and prints as its time goes on.
struct Reader<'a, 'b> {
    adapter: ReplayAdapter,
    intervals: ListingIntervals,
    sink: &'a mut Sink<'b>,
    printed: Result<()>,
}

impl pages::PageObserver for Reader<'_, '_> {
    #[inline]
    fn change(&mut self, thread: Thread, kind: AccessKind, page: u64) {
        self.adapter.change(thread, kind, page);
    }

    fn ran(&mut self, thread: Thread, instructions: u64, accesses: u64) {
        self.adapter.ran(thread, instructions, accesses);
        if self.printed.is_ok() {
            self.printed = self.intervals.look(&self.adapter.simulation, self.sink);
        }
    }

    fn found(&mut self, process: u32, page: u64, segment: Segment) {
        self.adapter.found(process, page, segment);
    }

    fn gone(&mut self, thread: Thread, pages: Range<u64>) {
        self.adapter.gone(thread, pages);
    }
}

/// Returns true if a machine has the costs of this one.
fn takes_costs(args: &Args) -> bool {
    args.on.iter().any(|machine| machines::model_name(machine) == Some(calibrated::MODEL))
}

/// Returns each machine with each page policy.
fn configs(args: &Args) -> Result<Vec<MachineConfig>> {
    let mut configs = Vec::new();
    for machine in &args.on {
        let Some(name) = machines::model_name(machine) else {
            return Err(anyhow!(
                "`{machine}` is no simulated machine\n  hint: name one as sim:NAME; `pagetax machines` lists them"
            ));
        };
        let model = machines::model_of(name, machine)?;
        if !model.has_table("dtlb_1a") {
            return Err(anyhow!(
                "{machine} has no TLB to miss\n  hint: name a machine with one, such as sim:x86-64-calibrated"
            ));
        }
        let texts = args.pages.iter().map(String::as_str);
        let policies = PagePolicy::alternatives(texts)
            .with_context(|| format!("--pages {}", args.pages.join(" --pages ")))?;
        for policy in policies {
            configs.push(MachineConfig::new(&model, policy)?);
        }
    }
    Ok(configs)
}

impl Backend for Record {
    fn name(&self) -> &'static str {
        "record"
    }

    fn why(&self) -> String {
        let by = match &self.source {
            AccessSource::Engine(Engine { kind, why, .. }) => format!("engine {kind} ({why})"),
            AccessSource::Trace(trace) => trace.head.title(),
        };
        format!("{}; {by}; all numbers are modelled", self.why)
    }

    fn run(&mut self, args: &Args, sink: &mut Sink<'_>) -> Result<Finished> {
        if takes_costs(args) && calibrate::if_quiet()? {
            self.configs = configs(args)?;
        }
        match &self.source {
            AccessSource::Engine(engine) => self.record(engine, args, sink),
            AccessSource::Trace(trace) => self.read(trace, args, sink),
        }
    }
}

/// Begins a progress, unless listings by interval show how far the program is.
fn progress(args: &Args, start: impl FnOnce(&str) -> Progress) -> Progress {
    if args.operands.interval.is_some() { Progress::hidden() } else { start("trapstat") }
}

fn intervals(args: &Args, simulation: &Simulation) -> Result<ListingIntervals> {
    let interval_ns = args.operands.interval_ns()?;
    Ok(ListingIntervals::new(interval_ns, args.operands.count, args.cpus.clone(), simulation))
}
