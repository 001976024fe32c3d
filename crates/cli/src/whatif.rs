//! `pagetax whatif`: the time a command would take with each page size on this machine, from one look
//! at its pages.
//!
//! A run on base pages is timed; the recorder tells its pages, this machine's calibration what walks
//! and faults cost; what a page size would save of them is taken off. Invariant: a prediction has a low
//! and a high, and is never called measured; with `--verify` the trials stand beside it.

mod render;

use crate::output;
use crate::recorded::{Recorded, Source};
use crate::{exit, machines};
use anyhow::{Context, Result, anyhow, bail};
use pagetax_core::calibration::{Calibration, FaultKind};
use pagetax_core::diagnosis::Exit;
use pagetax_core::stats::{Ratio, median, ratio_of_pairs};
use pagetax_core::units::PageSize;
use pagetax_host::calibrate;
use pagetax_host::pagesize::{Mechanism, PageSettings, Recipe};
use pagetax_host::sys::signal::StopSignals;
use pagetax_host::trial::{self, Finished, Launch, Outputs};
use pagetax_recorder::predict::{Faults, Predictor, Walks};
use pagetax_sim::mmu::hardware;
use std::path::PathBuf;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  pagetax whatif -- sort -S 2G big.txt           what would it take on 2M pages, and why?
  pagetax whatif --verify -- python3 report.py   with measured trials beside the prediction
  pagetax whatif app.ptt                         of a trace: what is saved, without a time of its own";

/// Seed of the resampling, as in diagnose.
const SEED: u64 = 2004;

/// Predict a command's time with each page size, from the pages that it goes to
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// Page sizes to predict, of heap and other private memory
    #[arg(long, value_name = "SIZE,…", value_delimiter = ',', default_value = "2M")]
    sizes: Vec<PageSize>,

    /// Runs that are timed, of each size with --verify
    #[arg(long, value_name = "N", default_value_t = 5,
          value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,

    /// Also time runs on each page size, and say by how much the prediction is off
    #[arg(long)]
    verify: bool,

    /// Write everything as JSON to a file, or instead of the table to stdout (-)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    #[command(flatten)]
    source: Source,
}

/// A value with its bounds, in nanoseconds or as a ratio.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bounded {
    /// Best estimate.
    pub value: f64,
    /// Lower bound.
    pub low: f64,
    /// Upper bound.
    pub high: f64,
}

/// What is predicted for one page size.
#[derive(Debug, Clone)]
pub struct Prediction {
    /// Which.
    pub size: PageSize,
    /// Its translation.
    pub walks: Walks,
    /// Its first touches of private memory.
    pub faults: Faults,
    /// CPU time that it saves over base pages; negative where it costs.
    pub saved_ns: Bounded,
    /// Elapsed, where a run on base pages was timed.
    pub time_ns: Option<Bounded>,
    /// Time on base pages ÷ this.
    pub speedup: Option<Bounded>,
    /// Of trials on both, in turns.
    pub measured: Option<Ratio>,
}

impl Prediction {
    /// By how much the predicted speed-up is off the measured one, in percent.
    pub fn error_percent(&self) -> Option<f64> {
        Some((self.speedup?.value / self.measured?.value - 1.0) * 100.0)
    }
}

/// All that is known.
pub struct Forecast {
    /// The command, or the trace.
    pub of: String,
    /// Median on base pages.
    pub base_ns: Option<u64>,
    /// Translation on base pages.
    pub walks: Walks,
    /// First touches of private memory on base pages.
    pub faults: Faults,
    /// Walks that take the time of one, if they overlap.
    pub overlap: f64,
    /// By page size.
    pub predictions: Vec<Prediction>,
    /// Loads and stores.
    pub access_count: u64,
    /// What to know.
    pub notes: Vec<String>,
}

/// `pagetax whatif [TRACE] [-- COMMAND]`
pub fn run(args: Args) -> Result<ExitCode> {
    args.json.iter().try_for_each(|path| output::check_writable(path))?;
    let calibration = calibrate::cached()
        .map_err(|why| exit::with(exit::UNMET, anyhow!("{why}: a prediction needs its costs")))?;
    let model = machines::model_of(pagetax_sim::calibrated::MODEL, "this machine")?;
    let cpu = hardware::translation(&model)?;
    let source = args.source.open()?;
    if args.verify && matches!(source, Recorded::Trace(_)) {
        bail!("a trace cannot be timed\n  remedy: drop --verify, or name the command after --");
    }
    let (timed, code) = time(&args, &source)?;
    let shifts: Vec<u32> =
        [PageSize::K4].iter().chain(&args.sizes).map(|size| size.shift()).collect();
    let (seen, told) = source.tell(Predictor::new(&cpu, &shifts))?;
    let mut forecast = Forecast {
        of: source.title(),
        base_ns: timed.first().and_then(|runs| median(&wall(runs))),
        walks: seen.walks(0),
        faults: seen.faults(0),
        overlap: cpu.overlap(),
        predictions: Vec::new(),
        access_count: seen.access_count,
        notes: told.notes,
    };
    for (nr, size) in args.sizes.iter().enumerate() {
        let trials = timed.first().zip(timed.get(nr + 1));
        let measured =
            trials.and_then(|(base, runs)| ratio_of_pairs(&wall(base), &wall(runs), SEED));
        let prediction =
            predict(&forecast, *size, (seen.walks(nr + 1), seen.faults(nr + 1)), &calibration)?;
        let prediction = with_time(prediction, timed.first());
        forecast.predictions.push(Prediction { measured, ..prediction });
    }
    if let Some(path) = &args.json {
        output::write_document(path, &format!("{:#}\n", render::document(&forecast, code)))?;
    }
    if args.json.as_deref() != Some(std::path::Path::new("-")) {
        output::print(&render::table(&forecast))?;
    }
    forecast.notes.iter().for_each(|note| output::note(&format!("whatif: {note}")));
    Ok(code.unwrap_or(told.code).into())
}

fn wall(runs: &[Finished]) -> Vec<u64> {
    runs.iter().map(|run| run.wall_ns).collect()
}

/// Runs on base pages, and with `--verify` on each size, in turns; none for a trace.
fn time(args: &Args, source: &Recorded) -> Result<(Vec<Vec<Finished>>, Option<u8>)> {
    let Recorded::Live(_) = source else { return Ok((Vec::new(), None)) };
    let recipes = recipes(args)?;
    let tunables = std::env::var("GLIBC_TUNABLES").ok();
    let launch = Launch { argv: args.source.command.clone(), stdin: None, tunables };
    let _stop = StopSignals::watch().context("cannot watch for Ctrl-C; this is not expected")?;
    let mut timed = vec![Vec::new(); recipes.len()];
    let mut code = 0;
    // The first round only warms caches.
    for round in 0..=args.runs {
        for (recipe, runs) in recipes.iter().zip(&mut timed) {
            let finished =
                trial::run(&launch, recipe, &Outputs::default(), None).map_err(exit::of_trial)?;
            code = match finished.exit {
                Exit::Code(code) => code as u8,
                Exit::Signal(signal) => 128 + signal as u8,
            };
            if round > 0 {
                runs.push(finished);
            }
        }
    }
    Ok((timed, Some(code)))
}

/// Base pages first; the sizes only where they are to be timed.
fn recipes(args: &Args) -> Result<Vec<Recipe>> {
    let system = PageSettings::host();
    let own = std::env::current_exe().context("cannot find this program")?;
    let tunables = std::env::var("GLIBC_TUNABLES").ok();
    let sizes = args.sizes.iter().filter(|_| args.verify).map(ToString::to_string);
    let words = ["4K".to_string()].into_iter().chain(sizes);
    let recipe = |word: String| -> Result<Recipe> {
        let mechanism =
            Mechanism::parse(&word, &system).with_context(|| format!("--sizes {word}"))?;
        let unavailable = |unavailable: pagetax_host::pagesize::Unavailable| {
            let text = format!("{word}: {}\n  remedy: {}", unavailable.why, unavailable.remedy);
            exit::with(exit::UNMET, anyhow!(text))
        };
        let recipe = mechanism.recipe(&system, tunables.as_deref()).map_err(unavailable)?;
        recipe.permitted(false).map_err(unavailable)?;
        Ok(recipe.through(&own.to_string_lossy()))
    };
    words.map(recipe).collect()
}

/// What a page size saves of walks and faults.
fn predict(
    forecast: &Forecast,
    size: PageSize,
    (walks, faults): (Walks, Faults),
    calibration: &Calibration,
) -> Result<Prediction> {
    let cost = |bytes: u64| {
        calibration.fault(FaultKind::AnonWrite, bytes).ok_or_else(|| {
            let size = pagetax_core::units::Bytes(bytes);
            let text = format!("the calibration does not know what a fault of {size} costs");
            let remedy = "pagetax calibrate --allow-sysfs";
            exit::with(exit::UNMET, anyhow!("{text}\n  remedy: {remedy}"))
        })
    };
    let (base, large) = (cost(calibration.base_page_bytes)?, cost(size.bytes())?);
    let fewer = forecast.faults.base_count.saturating_sub(faults.base_count) as f64;
    let more = faults.large_count as f64;
    let of_faults = |base_ns: f64, large_ns: f64| fewer * base_ns - more * large_ns;
    let (before, after) = (forecast.walks.ns(forecast.overlap), walks.ns(forecast.overlap));
    let saved = [before.0 - after.0, before.1 - after.1, before.2 - after.2];
    let (low, high) = (saved[1].min(saved[2]), saved[1].max(saved[2]));
    let saved_ns = Bounded {
        value: saved[0] + of_faults(base.median_ns, large.median_ns),
        low: low + of_faults(base.low_ns, large.high_ns),
        high: high + of_faults(base.high_ns, large.low_ns),
    };
    let (time_ns, speedup, measured) = (None, None, None);
    Ok(Prediction { size, walks, faults, saved_ns, time_ns, speedup, measured })
}

/// Takes what is saved off the time on base pages. Threads save at the same time: elapsed time shrinks
/// as CPU time does.
fn with_time(prediction: Prediction, base: Option<&Vec<Finished>>) -> Prediction {
    let runs = base.filter(|runs| !runs.is_empty());
    let Some((base_ns, runs)) = runs.and_then(|runs| Some((median(&wall(runs))? as f64, runs)))
    else {
        return prediction;
    };
    let cpu: Vec<u64> = runs.iter().map(|run| run.usage.user_ns + run.usage.kernel_ns).collect();
    let at_a_time = (median(&cpu).unwrap_or(0) as f64 / base_ns).max(1.0);
    // No saving leaves less than a tenth: the program's own work is not nothing.
    let less = |saved_ns: f64| (base_ns - saved_ns / at_a_time).max(base_ns / 10.0);
    let Bounded { value, low, high } = prediction.saved_ns;
    let time = Bounded { value: less(value), low: less(high), high: less(low) };
    let speedup =
        Bounded { value: base_ns / time.value, low: base_ns / time.high, high: base_ns / time.low };
    Prediction { time_ns: Some(time), speedup: Some(speedup), ..prediction }
}
