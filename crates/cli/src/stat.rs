//! `pagetax stat`: what virtual memory costs the whole system, a cgroup or running processes.

mod recording;

use crate::exit;
use crate::operands::Operands;
use crate::output::documents::{Outputs, prometheus};
use crate::output::{self, system_stat as text};
use crate::processes::pid;
use anyhow::{Result, anyhow, bail};
use pagetax_core::calibration::Calibration;
use pagetax_core::system_stat::{SystemInterval, SystemStat};
use pagetax_host::measure::calibrate::cached;
use pagetax_host::measure::system::{LOOK_INTERVAL_NS, Observation, Scope, SystemWatch, cost};
use pagetax_host::sys::signal::{StopSignals, asked_to_stop};
use recording::Recording;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

const EXAMPLES: &str = "\
Examples:
  pagetax stat 1                          the whole system, each second, until Ctrl-C
  pagetax stat 5 12                       one minute, in lines of 5 seconds
  pagetax stat -p 1234,1240 1             two processes that run already
  pagetax stat --cgroup /system.slice 1   a cgroup, and those below it
  pagetax stat --record day.stat.gz 1     keep what is seen, some 0.4 MB an hour
  pagetax stat day.stat.gz                show it again
  pagetax stat 1 --stream | jq .culprits  a JSON object each second";

/// Show what virtual memory costs the whole system in each second, by cause
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// Watch these processes only
    #[arg(short = 'p', value_name = "PID,…", value_delimiter = ',', value_parser = pid)]
    pids: Vec<u32>,

    /// Watch a cgroup, version 1 or 2, and those below it: its path below the mount
    #[arg(long, value_name = "PATH", conflicts_with = "pids")]
    cgroup: Option<String>,

    /// Print a JSON object for each interval when it has passed, in place of the table
    #[arg(long)]
    stream: bool,

    /// Keep all intervals in this file, to show them again
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,

    /// Write the last interval to this file as Prometheus text after each one, for a node exporter's
    /// directory of text files
    #[arg(long, value_name = "FILE")]
    prometheus: Option<PathBuf>,

    #[command(flatten)]
    outputs: Outputs<SystemStat>,

    /// A recording to show again; or the length of an interval, in seconds or with a unit, and the number
    /// of intervals [default: one of a second; without a number, until Ctrl-C]
    #[arg(value_name = "FILE|INTERVAL [COUNT]", num_args = 0..=3)]
    words: Vec<String>,
}

/// Runs `pagetax stat`.
pub fn run(args: Args) -> Result<ExitCode> {
    let operands = Operands::parse(&args.words)?;
    args.outputs.check_writable()?;
    if args.stream && args.outputs.takes_stdout() {
        bail!("stdout takes the stream\n  hint: give the document a file, as in --json=stat.json");
    }
    let written = args.record.iter().chain(&args.prometheus);
    written.into_iter().try_for_each(|path| output::check_writable(path))?;
    match &operands.file {
        Some(file) if args.record.is_some() || args.cgroup.is_some() || !args.pids.is_empty() => {
            bail!(
                "`{}` is no number, and something to watch was named\n  hint: a recording is shown by \
                 itself",
                file.display()
            )
        }
        Some(_) if operands.interval.is_some() => {
            bail!("a recording has intervals of its own\n  hint: leave the number out")
        }
        Some(file) => replay(&args, file),
        None => watch(&args, &operands),
    }
}

/// Prints intervals as they come.
struct IntervalPrinter<'a> {
    args: &'a Args,
    stat: SystemStat,
    lines: usize,
}

impl IntervalPrinter<'_> {
    fn take(&mut self, interval: &SystemInterval) -> Result<()> {
        if let Some(path) = &self.args.prometheus {
            let text = prometheus::of_system(&self.stat.scope, interval)?;
            let new = path.with_extension("new");
            output::write_file(&new, &text)?;
            std::fs::rename(&new, path)?;
        }
        if self.args.stream {
            output::print(&(serde_json::to_string(interval)? + "\n"))?;
        } else if !self.args.outputs.takes_stdout() {
            let headings =
                if self.lines.is_multiple_of(20) { text::headings() } else { String::new() };
            output::print(&(headings + &text::line(interval)))?;
        }
        self.lines += 1;
        if self.args.outputs.is_wanted() {
            self.stat.intervals.push(interval.clone());
        }
        Ok(())
    }

    /// Prints the rows of all intervals with their bounds, and writes the documents.
    fn finish(&self) -> Result<ExitCode> {
        let is_text = !self.args.stream && !self.args.outputs.takes_stdout();
        if let Some(total) = self.stat.total.as_ref().filter(|_| is_text) {
            output::print(&text::total(total, &self.stat.scope))?;
        }
        self.args.outputs.write(&self.stat)?;
        Ok(exit::FINE.into())
    }
}

fn watch(args: &Args, operands: &Operands) -> Result<ExitCode> {
    let scope = match (&args.cgroup, &args.pids[..]) {
        (Some(path), _) => Scope::Cgroup(format!("/{}", path.trim_matches('/'))),
        (None, []) => Scope::System,
        (None, pids) => Scope::Processes(pids.to_vec()),
    };
    let interval_ns = operands.interval_ns()?.unwrap_or(1_000_000_000);
    let count = operands.count.or(operands.interval.is_none().then_some(1)).unwrap_or(u64::MAX);
    let _stop = StopSignals::watch()?;
    let calibration = cached();
    let mut watch = SystemWatch::start(scope.clone()).map_err(|why| anyhow!("{why}"))?;
    if let Some(why) = watch.without_stacks() {
        output::note(&format!("stat: no stacks, so most causes are missing: {why}"));
    }
    let cpu_count =
        pagetax_host::procfs::online_cpus(&Default::default()).map_or(1, |c| c.len() as u32);
    let stat = SystemStat { scope: scope.to_string(), cpu_count, ..SystemStat::default() };
    let mut recording = match &args.record {
        Some(path) => Some(Recording::create(path, &stat)?),
        None => None,
    };
    let mut printer = IntervalPrinter { args, stat, lines: 0 };
    let mut all: Option<Observation> = None;
    let mut due = Instant::now();
    for _ in 0..count {
        due += Duration::from_nanos(interval_ns);
        let goes_on = wait_until(due, &mut watch);
        let seen = watch.interval();
        let interval = cost_of(&seen, &calibration);
        if let Some(recording) = &mut recording {
            recording.write(&interval)?;
        }
        printer.take(&interval)?;
        match &mut all {
            Some(all) => all.add(&seen),
            None => all = Some(seen),
        }
        if !goes_on {
            break;
        }
    }
    printer.stat.total = all.map(|all| cost_of(&all, &calibration));
    if let Some(recording) = recording {
        recording.finish(printer.stat.total.as_ref())?;
    }
    printer.finish()
}

fn cost_of(seen: &Observation, calibration: &Result<Calibration, String>) -> SystemInterval {
    cost(seen, calibration.as_ref().map_err(String::as_str))
}

/// Waits, and reads what comes meanwhile. False to stop: on Ctrl-C, and when all processes have ended.
fn wait_until(due: Instant, watch: &mut SystemWatch) -> bool {
    loop {
        let left = due.saturating_duration_since(Instant::now());
        std::thread::sleep(left.min(Duration::from_nanos(LOOK_INTERVAL_NS)));
        if asked_to_stop() || !watch.goes_on() {
            return false;
        }
        if Instant::now() >= due {
            return true;
        }
        watch.look();
    }
}

fn replay(args: &Args, file: &Path) -> Result<ExitCode> {
    let recorded = recording::read(file)?;
    let stat = SystemStat { intervals: Vec::new(), ..recorded };
    let mut printer = IntervalPrinter { args, stat, lines: 0 };
    for interval in &recorded.intervals {
        printer.take(interval)?;
    }
    printer.finish()
}
