//! `pagetax diagnose -p PID`: the tax of processes that run already, by an experiment that is undone.

use crate::exit;
use crate::output::documents::Outputs;
use crate::output::{self, live_tax, progress::Progress};
use anyhow::{Result, anyhow};
use pagetax_core::live_tax::LiveTax;
use pagetax_core::units::{Bytes, Nanos, PageSize};
use pagetax_host::measure::calibrate::cached;
use pagetax_host::measure::live::{Experiment, ExperimentLimits, ProgressSource};
use pagetax_host::pages::PageSettings;
use pagetax_host::pages::target::{Refusal, Target};
use pagetax_host::sys::signal::StopSignals;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

/// The time of an experiment, unless --for is given.
const TIME: Duration = Duration::from_secs(60);
/// The most memory that is collapsed, unless --memory is given.
const BYTES_MAX: u64 = 1 << 30;

/// Options for processes that run already.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Processes that run already")]
pub struct LiveArgs {
    /// Diagnose these processes: collapse their memory to huge pages and split it again, in turn, while their
    /// progress is counted. Nothing restarts, and all of it is undone
    #[arg(short = 'p', value_name = "PID,…", value_delimiter = ',', value_parser = crate::processes::pid)]
    #[arg(conflicts_with_all = ["command", "runs", "sizes", "settings", "side_by_side", "trace"])]
    pub pids: Vec<u32>,

    /// Rank all running processes by what virtual memory costs them, without a change to any of them
    #[arg(long, conflicts_with_all = ["command", "runs", "sizes", "settings", "side_by_side", "trace", "input", "pids"])]
    pub all: bool,

    /// The time to take at most [default: 1min], or with --all to watch [default: 5s]
    #[arg(long = "for", value_name = "TIME")]
    pub for_time: Option<Nanos>,

    /// The source of their progress: instructions (where the CPU counts them), calls (that read or write),
    /// probe:FUNCTION, probe:FILE:FUNCTION, or command:LINE for a shell command that prints a number
    #[arg(long, value_name = "SOURCE", requires = "pids")]
    progress: Option<ProgressSource>,

    /// The most memory to collapse at a time [default: 1G]
    #[arg(long, value_name = "SIZE", requires = "pids")]
    memory: Option<Bytes>,

    /// Show what would be done, and change nothing
    #[arg(long, requires = "pids")]
    dry_run: bool,

    /// Do not ask before pages are changed
    #[arg(short = 'y', long, requires = "pids")]
    yes: bool,
}

/// Runs `pagetax diagnose -p PID`.
pub fn run(args: &LiveArgs, outputs: &Outputs<LiveTax>) -> Result<ExitCode> {
    outputs.check_writable()?;
    let time = args.for_time.map_or(TIME, |time| Duration::from_nanos(time.0));
    let limits =
        ExperimentLimits { time, bytes_max: args.memory.map_or(BYTES_MAX, |bytes| bytes.0) };
    let _stop = StopSignals::watch()?;
    let targets = args.pids.iter().map(|pid| target(*pid)).collect::<Result<Vec<_>>>()?;
    let huge = PageSettings::host().pmd_size().unwrap_or(PageSize::M2);
    let experiment = Experiment::plan(targets, args.progress.clone(), &limits, huge);
    let experiment = experiment.map_err(|why| exit::with(exit::UNMET, anyhow!(why)))?;
    if args.dry_run || !(args.yes || may_go_on(&experiment, &limits)?) {
        output::print(&format!("{}\nNothing was changed.\n", plan(&experiment, &limits)))?;
        return Ok(exit::FINE.into());
    }
    let calibration = cached();
    let mut progress = Progress::start("diagnose");
    let calibration = calibration.as_ref().map_err(String::as_str);
    let live = experiment.run(&limits, calibration, |done| progress.update(done));
    drop(progress);
    outputs.print(&live, live_tax::render)?;
    Ok(exit::FINE.into())
}

fn target(pid: u32) -> Result<Target> {
    Target::open(pid, false).map_err(|refusal| {
        let code = match refusal {
            Refusal::Gone | Refusal::NoId | Refusal::Own => exit::BAD_INPUT,
            _ => exit::UNMET,
        };
        exit::with(code, anyhow!("process {pid}: {refusal}"))
    })
}

/// Says what will be done.
fn plan(experiment: &Experiment, limits: &ExperimentLimits) -> String {
    let live = experiment.planned();
    let names: Vec<_> =
        live.processes.iter().map(|one| format!("{} ({})", one.pid, one.command)).collect();
    let way = match experiment.is_remote() {
        true => "from outside, without stopping it",
        false => "by calls that it makes itself, in stops of a few milliseconds",
    };
    format!(
        "{}: for at most {}, {} of {} on base pages are collapsed to huge pages and split again, in turn, {way}. \
         It may grow by {}, which stays. Progress: {}.",
        names.join(", "),
        Nanos(limits.time.as_nanos() as u64),
        Bytes(live.tried_bytes),
        Bytes(live.base_bytes),
        Bytes(live.growth_bytes),
        live.progress,
    )
}

/// Asks, if there is somebody to ask.
fn may_go_on(experiment: &Experiment, limits: &ExperimentLimits) -> Result<bool> {
    if !std::io::stdin().is_terminal() || !std::io::stderr().is_terminal() {
        let plan = plan(experiment, limits);
        return Err(anyhow!(
            "{plan}\nNothing was changed\n  hint: add --yes to agree, or --dry-run"
        ));
    }
    eprint!("{}\nGo on? [y/N] ", plan(experiment, limits));
    std::io::stderr().flush()?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(answer.trim().eq_ignore_ascii_case("y"))
}
