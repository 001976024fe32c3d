//! `pagetax run`: a job on one or several machines, as a report each.

use crate::machines::Here;
use crate::memory_servers::CopiesArgs;
use crate::output::documents::{Outputs, jsonl};
use crate::output::{self, columns, progress::Progress, report, sweep};
use crate::{calibrate, exit, jobs, machines};
use anyhow::{Result, anyhow, bail};
use clap::{Args as _, FromArgMatches as _};
use pagetax_core::job::Job;
use pagetax_core::machine::{Machine, MachineKind, MachineSpec, Preflight, RunError, Sink};
use pagetax_core::plan::Plan;
use pagetax_core::quantity::Params;
use pagetax_core::report::{Recording, Run, Runs, Warning};
use pagetax_core::sweep::Sweep;
use pagetax_core::threshold::Threshold;
use pagetax_core::units::Nanos;
use pagetax_host::measure::budget::counts_walks;
use pagetax_host::pages::base_page;
use pagetax_host::run::guard::Limits;
use pagetax_remote::pager::Log;
use pagetax_remote::preloaded::StoreSettings;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const EXAMPLES: &str = "\
Examples:
  pagetax run tlb-gather                                 on this machine
  pagetax run tlb-gather --set size=1G --fault-latency   larger, with the latency of faults
  pagetax run vmtest --on host,null                      beside what the harness itself costs
  pagetax run vmtest --set size=2M..32M:2M --on sim:sparcstation-1 --csv=sweep.csv
  pagetax run mine.toml --json=report.json               your own job, as a document
  pagetax run mmap3 --set backing=remote,size=1200M,resident=256M --servers a,b --copies 2
                                                         on the memory of other machines
  pagetax run mmap3 --stream | jq .minor_fault_count     each second of the series when it has passed
  pagetax run mmap3 --fail-if 'p99_fault_ns>20000'       exit code 1 when faults are slow";

/// Run a job and report what its memory costs
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// Name of a built-in job (`pagetax jobs`), or a job file
    job: String,

    /// Set a parameter of the job, or several (size=1G,unit=8); may be given several times. A list
    /// (2M,4M) or a range with its step (2M..96M:2M) makes a sweep
    #[arg(long = "set", value_name = "NAME=VALUE", value_parser = parse_settings)]
    settings: Vec<Settings>,

    /// Machines to run it on, one after another (`pagetax machines`)
    #[arg(long, value_name = "MACHINE,…", value_delimiter = ',', default_value = "host")]
    on: Vec<String>,

    /// Seed of all random accesses; the job's own if not given. Same seed, same accesses
    #[arg(long)]
    seed: Option<u64>,

    /// Record a series, one point each interval, such as 1s
    #[arg(long, value_name = "TIME", value_parser = parse_interval)]
    interval: Option<Nanos>,

    /// Measure the latency of faults: of the first 10,000, then of a sixth
    #[arg(long)]
    fault_latency: bool,

    #[command(flatten)]
    outputs: Outputs<Runs>,

    /// Write each point of the series to stdout when it is taken, as a line of JSON; the report goes to
    /// stderr
    #[arg(long)]
    stream: bool,

    /// Most of this machine's memory that the job may lock, in percent; others need the last 10
    #[arg(long, value_name = "PERCENT", default_value_t = 25,
          value_parser = clap::value_parser!(u8).range(0..=90))]
    lock_limit: u8,

    #[command(flatten)]
    copies: CopiesArgs,

    /// Exit with 1 when this holds, as in 'p99_fault_ns>20000'; may be given several times. A
    /// threshold on fault latency turns --fault-latency on
    #[arg(long, value_name = "EXPR")]
    fail_if: Vec<Threshold>,
}

/// Names and values.
type Settings = Vec<(String, String)>;

/// Parses `NAME=VALUE,…`. A part without a name is a further value of the setting before it.
fn parse_settings(text: &str) -> Result<Settings> {
    let mut settings = Settings::new();
    for part in text.split(',') {
        match (part.split_once('='), settings.last_mut()) {
            (Some((name, value)), _) if !name.trim().is_empty() => {
                settings.push((name.trim().into(), value.trim().into()));
            }
            (None, Some((_, values))) => *values += &format!(",{}", part.trim()),
            _ => bail!("write NAME=VALUE, as in size=64M"),
        }
    }
    Ok(settings)
}

fn parse_interval(text: &str) -> Result<Nanos> {
    match text.parse::<Nanos>()? {
        Nanos(0) => bail!("an interval must be longer than 0; write for example 1s"),
        interval => Ok(interval),
    }
}

/// Runs `pagetax run JOB`.
pub fn run(args: Args) -> Result<ExitCode> {
    let job = jobs::load(&args.job)?;
    let sweep = Sweep::new(&job, &args.settings.concat())?;
    let here = here(&args)?;
    let open = |on: &String| Ok((machines::full_name(on), machines::open_here(on, &here)?));
    let opened = args.on.iter().map(open).collect::<Result<Vec<Opened>>>()?;
    let points = sweep.points.iter();
    let cases = points
        .flat_map(|point| opened.iter().map(|on| Case::new(&job, on, point, &args)))
        .collect::<Result<Vec<_>>>()?;
    args.outputs.check_writable()?;
    if args.stream {
        check_stream(&args, &cases)?;
    }
    if cases.iter().any(Case::needs_costs) && !counts_walks() {
        calibrate::if_quiet()?;
    }
    let mut ended_early = None;
    let mut runs = Vec::new();
    for (run, error) in run_all(&cases, args.stream) {
        runs.push(run);
        ended_early = ended_early.or(error);
    }
    let runs = Runs { swept: sweep.swept, runs };
    if args.stream {
        args.outputs.write(&runs)?;
        output::say(text(&runs).trim_end());
    } else {
        args.outputs.print(&runs, text)?;
    }
    match ended_early {
        Some(error) => Err(exit::with(code_of(&error), error)),
        None => Ok(judge(&runs.runs, &args.fail_if)),
    }
}

/// Runs a job with its defaults on a machine, and prints nothing but its progress.
pub fn quietly(job: &str, on: &str) -> Result<Run> {
    let command = Args::augment_args(clap::Command::new("run").no_binary_name(true));
    let args = Args::from_arg_matches(&command.try_get_matches_from([job, "--on", on])?)?;
    let job = jobs::load(&args.job)?;
    let opened = (machines::full_name(on), machines::open_here(on, &here(&args)?)?);
    let case = Case::new(&job, &opened, &Params::default(), &args)?;
    let mut progress = Progress::start(&format!("{} on {on}", case.plan.job.name));
    let (run, error) = case.run(None, |done| progress.update(done));
    match error {
        Some(error) => Err(exit::with(code_of(&error), error)),
        None => Ok(run),
    }
}

/// Refuses a stream that would be empty, or that another document would interrupt.
fn check_stream(args: &Args, cases: &[Case]) -> Result<()> {
    if args.outputs.takes_stdout() {
        bail!(
            "stdout takes the stream\n  hint: give the document a file, as in --json=report.json"
        );
    }
    if cases.iter().all(|case| case.plan.measure.interval.is_none()) {
        bail!("there is no series to stream\n  hint: add --interval 1s");
    }
    Ok(())
}

/// Opens memory servers for regions with backing=remote.
fn here(args: &Args) -> Result<Here> {
    let lock_share_max = f64::from(args.lock_limit) / 100.0;
    let limits = Limits { lock_share_max, ..Limits::default() };
    let store = match args.copies.store()? {
        StoreSettings::Inside(_) => None,
        settings => {
            let log: Log = Arc::new(|line: &str| output::note(line));
            let opened = settings.open(Some(log)).map_err(|why| anyhow!(why));
            let store = opened.map_err(|error| exit::with(exit::UNMET, error))?;
            store.warnings().iter().for_each(|line| output::note(line));
            Some(store)
        }
    };
    Ok(Here { limits, store })
}

/// A report, and why it ended early, if it did.
type Outcome = (Run, Option<RunError>);

/// Runs simulations first, on all cores. Measured runs follow one after another, with the machine to
/// themselves. Reports are in the order of the cases. A measured run that ended early is the last one.
fn run_all(cases: &[Case], is_streamed: bool) -> Vec<Outcome> {
    let mut outcomes: Vec<Option<Outcome>> = cases.iter().map(|_| None).collect();
    let simulated: Vec<usize> = (0..cases.len()).filter(|i| cases[*i].is_simulated()).collect();
    if simulated.len() > 1 {
        for (index, outcome) in in_parallel(cases, &simulated, is_streamed) {
            outcomes[index] = Some(outcome);
        }
    }
    for (nth, outcome) in outcomes.iter_mut().enumerate().filter(|(_, done)| done.is_none()) {
        let case = &cases[nth];
        let mut progress = Progress::start(&format!("{} on {}", case.plan.job.name, case.on));
        let stream = is_streamed.then_some(nth);
        let (_, error) = outcome.insert(case.run(stream, |done| progress.update(done)));
        if error.is_some() {
            break;
        }
    }
    outcomes.into_iter().flatten().collect()
}

fn in_parallel(cases: &[Case], wanted: &[usize], is_streamed: bool) -> Vec<(usize, Outcome)> {
    let next = AtomicUsize::new(0);
    let work = || {
        let take = || wanted.get(next.fetch_add(1, Ordering::Relaxed)).copied();
        let run = |nth: usize| (nth, cases[nth].run(is_streamed.then_some(nth), |_| {}));
        std::iter::from_fn(take).map(run).collect()
    };
    let workers = std::thread::available_parallelism().map_or(1, usize::from).min(wanted.len());
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        let done = |thread: std::thread::ScopedJoinHandle<'_, Vec<_>>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().flat_map(done).collect()
    })
}

/// A machine and its name, as given to `--on`.
type Opened = (String, Box<dyn Machine>);

/// A plan that passed the preflight of its machine.
struct Case<'a> {
    on: &'a str,
    machine: &'a dyn Machine,
    spec: MachineSpec,
    plan: Plan,
    checked: Preflight,
}

impl<'a> Case<'a> {
    fn new(job: &Job, on: &'a Opened, settings: &Params, args: &Args) -> Result<Case<'a>> {
        let (on, machine) = (on.0.as_str(), &*on.1);
        let spec = machine.spec();
        let mut plan = job.resolve(settings, &spec, args.seed)?;
        plan.measure.interval = args.interval.or(plan.measure.interval);
        plan.measure.fault_latency |=
            args.fault_latency || args.fail_if.iter().any(Threshold::needs_fault_latency);
        let checked =
            machine.preflight(&plan).map_err(|error| exit::with(exit::UNMET, anyhow!(error)))?;
        Ok(Case { on, machine, spec, plan, checked })
    }

    fn is_simulated(&self) -> bool {
        self.spec.kind == MachineKind::Sim
    }

    /// Returns true if its budget prices page walks: without hardware counters, from a calibration alone.
    fn needs_costs(&self) -> bool {
        let accesses = self.plan.access_classes(base_page().bytes(), None);
        self.spec.kind == MachineKind::Host && !accesses.is_empty()
    }

    /// Returns the report, also of a run that ended early; then with the reason. Streams the series if it
    /// gets the run's number.
    fn run(&self, stream: Option<usize>, on_progress: impl FnMut(f64)) -> Outcome {
        let mut recording = Recording::new(&self.plan, &self.spec).on_progress(on_progress);
        if let Some(nth) = stream {
            recording = recording.on_sample(self.streamed(nth));
        }
        let error = self.machine.run_checked(&self.plan, &self.checked, &mut recording).err();
        if let Some(error) = &error {
            recording.warning(Warning {
                id: "ended_early".into(),
                text: format!("this run ended early: {error}"),
                remedy: "take none of its numbers for those of a whole run".into(),
            });
        }
        (recording.finish(), error)
    }

    /// Returns a function that prints points of this run's series. After an error it says so once and is
    /// silent: the run itself goes on.
    fn streamed(&self, nth: usize) -> impl FnMut(u64, &[(&'static str, u64)]) {
        let mut is_open = true;
        move |time_ns, values| {
            let values = [("time_ns", time_ns)].into_iter().chain(values.iter().copied());
            let values = values.map(|(id, value)| (id.to_string(), Some(value)));
            let line = jsonl::line(nth, (&self.plan.job.name, &self.spec.name), values);
            if is_open && let Err(error) = output::print(&line) {
                output::error(&error);
                is_open = false;
            }
        }
    }
}

fn code_of(error: &RunError) -> u8 {
    match error {
        RunError::Mismatch { .. } | RunError::Capped(_) => exit::THRESHOLD_FAILED,
        RunError::Unmet(_) | RunError::Op { .. } => exit::UNMET,
        RunError::Interrupted => exit::INTERRUPTED,
    }
}

/// Renders one report whole, several beside each other and a sweep as a table.
fn text(document: &Runs) -> String {
    match document.runs.as_slice() {
        [run] => report::render(run),
        runs if document.swept.is_empty() => columns::render(runs),
        runs => sweep::render(runs, &document.swept),
    }
}

/// Judges all reports by all thresholds.
fn judge(runs: &[Run], thresholds: &[Threshold]) -> ExitCode {
    let of_all = |threshold| runs.iter().map(move |run| Threshold::judge(threshold, run));
    output::judged(thresholds.iter().flat_map(of_all))
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use pagetax_core::budget::{Budget, Ledger};
    use pagetax_core::cause::Account;
    use pagetax_core::counter::{Provenance, Reading};
    use pagetax_core::document::Document;

    /// Makes the report of a small job on an invented machine.
    pub fn small_run() -> Run {
        let job = Job::builtin("tlb-gather").unwrap();
        let spec = crate::machines::open("null").unwrap().spec();
        let plan = job.resolve(&Params::new(), &spec, None).unwrap();
        let mut sink = Recording::new(&plan, &spec);
        sink.counter("wall_ns", Reading::Measured(1_000_000));
        sink.counter("minor_fault_count", Reading::Measured(3));
        sink.counter("swap_in_count", Reading::Measured(0));
        sink.counter("swap_out_count", Reading::Measured(0));
        sink.counter("resident_bytes_max", Reading::Measured(2 << 20));
        sink.counter("tlb_miss_count", Reading::Missing("no PMU here".into()));
        let mut faults = hdrhistogram::Histogram::new(3).unwrap();
        (1..=100).for_each(|us| faults.record(us * 1000).unwrap());
        sink.latency("minor_fault", &faults, None, Provenance::Measured);
        let mut cpu = Ledger::new(Account::Cpu, 900_000);
        cpu.row("compute", Reading::Measured(600_000), "getrusage");
        cpu.row("swap", Reading::Missing("no samples".into()), "");
        sink.budget(Budget::new(cpu, Ledger::new(Account::Wall, 1_000_000), Vec::new()));
        sink.sample(10, &[("minor_fault_count", 3)]);
        sink.phase("fill", 0, 700, &[("minor_fault_count", Reading::Measured(3))]);
        sink.finish()
    }

    #[test]
    fn the_report_says_measured_missing_and_unexplained() {
        let text = report::render(&small_run());
        let line = |id: &str| text.lines().find(|l| l.trim_start().starts_with(id)).unwrap();
        assert!(line("minor_fault_count").contains("3  measured"), "{text}");
        assert!(line("tlb_miss_count").contains("–  missing"), "{text}");
        assert!(line("tlb_miss_count").contains("no PMU here"), "{text}");
        assert_eq!(line("0, measured"), "  0, measured: swap_in_count, swap_out_count");
        assert!(line("unexplained").contains("300 µs"), "{text}");
        assert!(line("length").contains("700 ns"), "{text}");
    }

    #[test]
    fn several_runs_stand_beside_each_other() {
        let mut other = small_run();
        other.machine.name = "sim:other".into();
        other.machine.kind = pagetax_core::machine::MachineKind::Sim;
        other.counters.remove("minor_fault_count");
        let text = columns::render(&[small_run(), other]);
        let faults = text.lines().find(|l| l.contains("minor_fault_count")).unwrap();
        assert_eq!(faults.split_whitespace().collect::<Vec<_>>(), ["minor_fault_count", "3", "–"]);
        assert!(text.contains("measured") && text.contains("modeled"), "{text}");
    }

    #[test]
    fn csv_has_counters_phases_and_series() {
        let runs = Runs { swept: Vec::new(), runs: vec![small_run()] };
        let text = crate::output::documents::csv::render(&runs).unwrap();
        let has = |line: &str| assert!(text.lines().any(|l| l == line), "{line} in {text}");
        has("tlb-gather,null,,,minor_fault_count,measured,3,,,");
        has("tlb-gather,null,,,tlb_miss_count,missing,,,,no PMU here");
        has("tlb-gather,null,fill,,minor_fault_count,measured,3,,,");
        has("tlb-gather,null,,10,minor_fault_count,measured,3,,,");
    }

    #[test]
    fn json_is_one_document() {
        let read = |text: String| serde_json::from_str::<serde_json::Value>(&text).unwrap();
        let json = |runs| Runs { swept: Vec::new(), runs }.to_json().unwrap();
        let one = read(json(vec![small_run()]));
        assert_eq!((one["schema"].as_u64(), one["kind"].as_str()), (Some(1), Some("run")));
        let two = read(json(vec![small_run(), small_run()]));
        assert_eq!(two["runs"].as_array().unwrap().len(), 2);
    }

    #[test]
    fn settings_need_a_name() {
        let parsed = |text| parse_settings(text).unwrap();
        let named = |name: &str, value: &str| (name.to_string(), value.to_string());
        assert_eq!(parsed("size = 64M"), [named("size", "64M")]);
        assert_eq!(parsed("size=2M,4M,unit=8"), [named("size", "2M,4M"), named("unit", "8")]);
        assert!(parse_settings("=3").is_err());
        assert!(parse_settings("size").is_err());
        assert!(parse_interval("0s").is_err());
    }
}
