//! The perf and ibs backends: page walks as the CPU counts or samples them, of the whole system, a process or
//! a command.

use super::args::{Args, unmet};
use super::backend::{Backend, Finished, Sink};
use crate::exit;
use anyhow::{Context, Result, anyhow};
use pagetax_core::trapstat::Listing;
use pagetax_host::launch::Launcher;
use pagetax_host::launch::signals::ends_within;
use pagetax_host::measure::tlb_events::ibs::Sampler;
use pagetax_host::measure::tlb_events::{
    CountError, CountTarget, Counters, Counts, Family, has_unit, listing, since,
};
use pagetax_host::procfs::Root;
use pagetax_host::sys::process::Child;
use pagetax_host::sys::signal::{PassedOn, asked_to_stop};
use std::time::{Duration, Instant};

/// How often the end of the command, and of our patience, is looked for.
const LOOK: Duration = Duration::from_millis(20);
/// Without an interval and a command, as the original.
const DEFAULT_INTERVAL_NS: u64 = 1_000_000_000;

/// A source of CPU events, read interval by interval.
trait EventSource {
    fn name(&self) -> &'static str;

    /// Returns the first line, which names the source.
    fn title(&self) -> String;

    /// Collects pending samples. It is called each [`LOOK`].
    fn look(&mut self) {}

    /// Returns the listing of the time since the previous one.
    fn listing(&mut self, end_ns: u64, elapsed_ns: u64) -> Listing;
}

/// Events that count.
struct Counting {
    family: Family,
    counters: Counters,
    before: Vec<Counts>,
}

impl EventSource for Counting {
    fn name(&self) -> &'static str {
        "perf"
    }

    fn title(&self) -> String {
        format!("counters of {}", self.family.name)
    }

    fn listing(&mut self, end_ns: u64, elapsed_ns: u64) -> Listing {
        let now = self.counters.read();
        let listing = listing(&self.family, &since(&now, &self.before), end_ns, elapsed_ns);
        self.before = now;
        listing
    }
}

impl EventSource for Sampler {
    fn name(&self) -> &'static str {
        "ibs"
    }

    fn title(&self) -> String {
        "samples of AMD's instruction-based sampling (experimental: never run on such a CPU)".into()
    }

    fn look(&mut self) {
        Sampler::look(self);
    }

    fn listing(&mut self, end_ns: u64, elapsed_ns: u64) -> Listing {
        Sampler::listing(self, end_ns, elapsed_ns)
    }
}

/// Counters or samples at work.
pub struct Perf {
    source: Box<dyn EventSource>,
    why: String,
}

impl Perf {
    /// Finds the CPU's events and opens them for what `args` name; else says why not.
    pub fn open(args: &Args, why: &str) -> Result<Perf> {
        no_trace(args)?;
        let cpuinfo = Root::default().text("/proc/cpuinfo").map_err(|why| anyhow!(why))?;
        let family = Family::of_cpu(&cpuinfo, has_unit()).map_err(no_counters)?;
        let counters = Counters::open(&family, &target(args)).map_err(|error| match error {
            CountError::NoUnit => no_counters(error),
            error => exit::with(exit::UNMET, error),
        })?;
        let before = counters.read();
        Ok(Perf { source: Box::new(Counting { family, counters, before }), why: why.into() })
    }

    /// Opens instruction-based sampling of AMD.
    pub fn open_ibs(args: &Args, why: &str) -> Result<Perf> {
        no_trace(args)?;
        let sampler = Sampler::open(&target(args)).map_err(|error| match error {
            CountError::NoUnit => no_counters(
                "this machine has no instruction-based sampling of operations (AMD; virtual machines have it \
                 seldom)",
            ),
            error => exit::with(exit::UNMET, error),
        })?;
        Ok(Perf { source: Box::new(sampler), why: why.into() })
    }
}

fn no_counters(why: impl std::fmt::Display) -> anyhow::Error {
    unmet(format!("{why}\n  hint: record a command: --backend record -- COMMAND"))
}

fn no_trace(args: &Args) -> Result<()> {
    match args.operands.file {
        Some(_) => Err(unmet("counters do not read traces\n  hint: leave --backend out".into())),
        None => Ok(()),
    }
}

fn target(args: &Args) -> CountTarget {
    match (args.pids.is_empty(), args.command.is_empty()) {
        (false, _) => CountTarget::Processes(args.pids.clone()),
        (true, false) => CountTarget::NextCommand,
        (true, true) => CountTarget::Cpus(args.cpus.as_ref().map(|cpus| cpus.numbers())),
    }
}

impl Backend for Perf {
    fn name(&self) -> &'static str {
        self.source.name()
    }

    fn why(&self) -> String {
        format!("{}; {}", self.why, self.source.title())
    }

    fn run(&mut self, args: &Args, sink: &mut Sink<'_>) -> Result<Finished> {
        let start = Instant::now();
        let mut command = spawn(args)?;
        let by_default = command.is_none().then_some(DEFAULT_INTERVAL_NS);
        let interval_ns = args.operands.interval_ns()?.or(by_default).unwrap_or(u64::MAX);
        let (mut before_ns, mut listings) = (0, 0);
        loop {
            let pause = LOOK.min(Duration::from_nanos(interval_ns));
            let ends = match &mut command {
                Some((child, signals)) => ends_within(child, pause, signals)?,
                None => {
                    std::thread::sleep(pause);
                    asked_to_stop()
                }
            };
            self.source.look();
            let now_ns = start.elapsed().as_nanos() as u64;
            if ends || now_ns - before_ns >= interval_ns {
                sink(self.source.listing(now_ns, now_ns - before_ns))?;
                (before_ns, listings) = (now_ns, listings + 1);
            }
            let enough =
                command.is_none() && args.operands.count.is_some_and(|count| listings >= count);
            if ends || enough {
                let code = match &mut command {
                    Some((child, _)) => child.wait()?.0.shell_code(),
                    None => exit::FINE,
                };
                return Ok(Finished { code, wall_ns: now_ns, ..Finished::default() });
            }
        }
    }
}

/// Starts the command, if there is one. Its counters are open already, and begin at its exec.
fn spawn(args: &Args) -> Result<Option<(Child, PassedOn)>> {
    let Some((program, arguments)) = args.command.split_first() else { return Ok(None) };
    if !args.pids.is_empty() {
        return Err(anyhow!("a command and -p at once\n  hint: leave one of them out"));
    }
    let mut launcher = Launcher::new(program);
    launcher.command.args(arguments);
    if args.outputs.takes_stdout() {
        launcher.command.stdout(std::io::stderr());
    }
    let signals = PassedOn::watch().context("cannot watch for signals")?;
    let child = launcher.spawn().map_err(|error| exit::with(exit::of_program(&error), error))?;
    Ok(Some((child, signals)))
}
