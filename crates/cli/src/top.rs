//! `pagetax top`: what virtual memory costs each process, live.

mod columns;
mod model;
mod page;
mod screen;

use crate::exit;
use crate::operands::Operands;
use crate::output::documents::Outputs;
use crate::output::text::terminal_columns;
use anyhow::{Result, anyhow, bail};
use columns::SORTS;
use model::{TopModel, View};
use page::PageShape;
use pagetax_core::calibration::Calibration;
use pagetax_core::top::SystemTop;
use pagetax_host::measure::calibrate::cached;
use pagetax_host::measure::system::LOOK_INTERVAL_NS;
use pagetax_host::measure::top::TopWatch;
use pagetax_host::sys::signal::{StopSignals, asked_to_stop};
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::{Duration, Instant};

const EXAMPLES: &str = "\
Examples:
  pagetax top                       all processes, every 2 seconds; ? lists the keys
  pagetax top --cgroups 5           by cgroup, every 5 seconds
  pagetax top --once --sort minor   a page as text: who faults most?
  pagetax top --json | jq '.processes[] | select(.figures.major_fault_count > 0)'";

/// The length of an interval without an operand, in nanoseconds.
const INTERVAL_NS: u64 = 2_000_000_000;
/// The shortest interval: samples of less show little.
const INTERVAL_NS_MIN: u64 = 200_000_000;
/// The interval that chooses the processes whose touched pages are sampled for a single page.
const FIRST: Duration = Duration::from_millis(500);
/// The rows of a page that no terminal limits.
const PAGE_HEIGHT: usize = 30;
/// The width of a page that no terminal limits.
const PAGE_WIDTH: usize = 120;

/// Show what virtual memory costs each process and cgroup, live
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// Print one page as text and end; also without a terminal on stdin and stdout
    #[arg(long)]
    once: bool,

    /// Show cgroups in place of processes
    #[arg(long)]
    cgroups: bool,

    /// Sort by this column [default: vm; without stacks: minor]
    #[arg(long, value_name = "COLUMN", value_parser = order)]
    sort: Option<usize>,

    #[command(flatten)]
    outputs: Outputs<SystemTop>,

    /// The length of an interval, in seconds or with a unit [default: 2]
    #[arg(value_name = "INTERVAL")]
    words: Vec<String>,
}

/// Parses the name of an order.
fn order(word: &str) -> Result<usize> {
    SORTS.iter().position(|sort| sort.id == word).ok_or_else(|| {
        let known: Vec<&str> = SORTS.iter().map(|sort| sort.id).collect();
        anyhow!("`{word}` is no column\n  hint: {}", known.join(", "))
    })
}

/// The watch, with the time of the next interval.
struct LiveSource {
    watch: TopWatch,
    calibration: Result<Calibration, String>,
    interval: Duration,
    due: Instant,
}

impl LiveSource {
    fn next(&mut self, model: &mut TopModel) {
        let calibration = self.calibration.as_ref().map_err(String::as_str);
        model.take(self.watch.interval(calibration));
    }
}

impl screen::IntervalSource for LiveSource {
    fn look(&mut self) {
        self.watch.look();
    }

    fn advance(&mut self, model: &mut TopModel) -> bool {
        let now = Instant::now();
        if now < self.due {
            return false;
        }
        self.next(model);
        self.due = now + self.interval;
        true
    }
}

/// Runs `pagetax top`.
pub fn run(args: Args) -> Result<ExitCode> {
    let operands = Operands::parse(&args.words)?;
    if operands.file.is_some() || operands.count.is_some() {
        bail!("`{}` is no interval\n  hint: pagetax top [INTERVAL]", args.words.join(" "));
    }
    args.outputs.check_writable()?;
    let interval_ns = operands.interval_ns()?.unwrap_or(INTERVAL_NS).max(INTERVAL_NS_MIN);
    let _stop = StopSignals::watch()?;
    let is_once = args.once || args.outputs.is_wanted() || !has_screen();
    let watch = TopWatch::start(is_once).map_err(|why| anyhow!("{why}"))?;
    let minor = SORTS.iter().position(|sort| sort.id == "minor").unwrap_or(0);
    let by = if watch.has_stacks() { 0 } else { minor };
    let view = if args.cgroups { View::Cgroups } else { View::Processes };
    let mut model = TopModel::new(interval_ns, args.sort.unwrap_or(by), view);
    let interval = Duration::from_nanos(interval_ns);
    let due = Instant::now() + interval.min(Duration::from_secs(1));
    let mut source = LiveSource { watch, calibration: cached(), interval, due };
    if is_once {
        once(&mut source, &mut model);
        args.outputs.print(&model.top, |_| plain(&model))?;
        return Ok(exit::FINE.into());
    }
    // The first page comes soon, the next ones at their interval.
    let choice = anstream::AutoStream::choice(&std::io::stdout());
    let has_color = choice != anstream::ColorChoice::Never;
    screen::show(&mut source, &mut model, is_ascii(), has_color)?;
    Ok(exit::FINE.into())
}

/// Returns true if a full screen can be shown.
fn has_screen() -> bool {
    let is_dumb = std::env::var_os("TERM").is_none_or(|term| term.is_empty() || term == "dumb");
    std::io::stdin().is_terminal() && std::io::stdout().is_terminal() && !is_dumb
}

/// Returns true if the locale or the terminal has no characters beyond ASCII.
fn is_ascii() -> bool {
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(variable);
    let is_utf8 = |locale: String| {
        let locale = locale.to_ascii_lowercase();
        locale.contains("utf-8") || locale.contains("utf8")
    };
    let term = variable("TERM").unwrap_or_default();
    !locale.is_none_or(is_utf8) || term == "linux" || term.starts_with("vt")
}

/// Waits for one whole interval. If touched pages can be sampled, an earlier one tells in which processes.
fn once(source: &mut LiveSource, model: &mut TopModel) {
    if source.watch.has_touches() {
        watch_for(source, FIRST.min(source.interval));
        source.watch.interval(Err("not yet"));
    }
    watch_for(source, source.interval);
    source.next(model);
}

fn watch_for(source: &mut LiveSource, time: Duration) {
    let due = Instant::now() + time;
    while Instant::now() < due && !asked_to_stop() {
        let left = due.saturating_duration_since(Instant::now());
        std::thread::sleep(left.min(Duration::from_nanos(LOOK_INTERVAL_NS)));
        source.watch.look();
    }
}

/// Returns the page as text.
fn plain(model: &TopModel) -> String {
    let width = terminal_columns().map_or(PAGE_WIDTH, usize::from);
    let shape = PageShape { width, height: PAGE_HEIGHT, is_ascii: is_ascii(), is_screen: false };
    let lines = page::lines(model, shape).into_iter();
    lines.map(|line| format!("{}\n", line.text.trim_end())).collect()
}
