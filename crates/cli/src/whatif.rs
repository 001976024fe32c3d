//! `pagetax whatif`: the time a command would take with each page size on this machine, from one look
//! at its pages.
//!
//! A run on base pages is timed; the recorder tells its pages, this machine's calibration what walks
//! and faults cost; what a page size would save of each of them ([`Saved`]) is taken off. Invariant: a
//! prediction has a low and a high, and is never called measured; what the calibration does not know is
//! missing; with `--verify` the trials stand beside it.

mod render;

use crate::output;
use crate::recorded::{Recorded, Source};
use crate::{exit, machines};
use anyhow::{Context, Result, anyhow, bail};
use pagetax_core::calibration::{Calibration, FaultKind, Spread, WalkPattern};
use pagetax_core::diagnosis::{Exit, Took};
use pagetax_core::stats::{Ratio, median, ratio_of_pairs};
use pagetax_core::units::{Bytes, Nanos, PageSize};
use pagetax_host::measure::calibrate::{self, Beside, CalibrateError};
use pagetax_host::measure::trial::{self, Finished, Launch, Outputs, TrialError};
use pagetax_host::pages::{Mechanism, PageSettings, Recipe};
use pagetax_host::sys::signal::StopSignals;
use pagetax_recorder::predict::{Faults, Predictor, Walks};
use pagetax_sim::hardware::configuration;
use std::path::PathBuf;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  pagetax whatif -- sort -S 2G big.txt           what would it take on 2M pages, and why?
  pagetax whatif --verify -- python3 report.py   with measured trials beside the prediction
  pagetax whatif app.ptt                         of a trace: what is saved, without a time of its own";

/// A calibration whose walks cost more times as much, or as little, is worth making again.
const PACE_MAX: f64 = 2.0;

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
    /// Over base pages.
    pub saved: Saved,
    /// Elapsed, where a run on base pages was timed.
    pub time_ns: Option<Bounded>,
    /// Time on base pages ÷ this.
    pub speedup: Option<Bounded>,
    /// Of trials on both, in turns.
    pub measured: Option<Ratio>,
    /// What of the trials' memory was on such pages.
    pub took: Option<Took>,
}

impl Bounded {
    fn of((value, low, high): (f64, f64, f64)) -> Bounded {
        Bounded { value, low: low.min(value), high: high.max(value) }
    }

    fn plus(self, other: Bounded) -> Bounded {
        let Bounded { value, low, high } = other;
        Bounded { value: self.value + value, low: self.low + low, high: self.high + high }
    }
}

/// What a page size saves over base pages, in nanoseconds of CPU time; negative where it costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Saved {
    /// Page walks.
    pub walks: Bounded,
    /// First touches: fewer, each of more zeroing.
    pub faults: Bounded,
    /// Filling new pages: what a fault leaves in the caches differs with the page.
    pub filling: Bounded,
    /// Giving the memory back.
    pub unmapping: Bounded,
}

impl Saved {
    /// The parts, by name.
    pub fn parts(&self) -> [(&'static str, Bounded); 4] {
        [
            ("page walks", self.walks),
            ("faults", self.faults),
            ("filling", self.filling),
            ("unmapping", self.unmapping),
        ]
    }

    /// All of it.
    pub fn total(&self) -> Bounded {
        let sum = |sum: Bounded, (_, part): (&str, Bounded)| sum.plus(part);
        self.parts().into_iter().fold(Bounded::of((0.0, 0.0, 0.0)), sum)
    }
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
    /// How many times what they did in the calibration walks of a pattern cost beside the runs.
    pub paces: Vec<(WalkPattern, f64)>,
    /// Faults served from memory that a run on base pages had, of all kinds; the median.
    pub measured_fault_count: Option<u64>,
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
    let source = args.source.open()?;
    let calibration = calibrate::cached()
        .map_err(|why| exit::with(exit::UNMET, anyhow!("{why}: a prediction needs its costs")))?;
    if calibration.walks.is_empty() {
        let why = calibration.notes.join("; ");
        let text = format!("the calibration does not know what page walks cost: {why}");
        return Err(exit::with(exit::UNMET, anyhow!("{text}\n  remedy: pagetax calibrate")));
    }
    if args.verify && matches!(source, Recorded::Trace(_)) {
        bail!("a trace cannot be timed\n  remedy: drop --verify, or name the command after --");
    }
    let recipes = match source {
        Recorded::Live(_) => recipes(&args)?,
        Recorded::Trace(_) => Vec::new(),
    };
    let Timed { timed, code, beside } = time(&args, &source, &recipes)?;
    let paced = beside.pace(&calibration);
    let mut model = machines::model_of(pagetax_sim::hardware::calibrated::MODEL, "this machine")?;
    pagetax_sim::hardware::calibrated::apply(&mut model, &paced)?;
    let cpu = configuration::translation(&model)?;
    let shifts: Vec<u32> =
        [PageSize::K4].iter().chain(&args.sizes).map(|size| size.shift()).collect();
    let (seen, told) = source.tell(Predictor::new(&cpu, &shifts))?;
    let mut forecast = Forecast {
        of: source.title(),
        base_ns: timed.first().and_then(|runs| median(&wall(runs))),
        walks: seen.walks(0),
        faults: seen.faults(0),
        paces: beside
            .walks()
            .iter()
            .filter_map(|now| Some((now.pattern, calibration.pace(now)?)))
            .collect(),
        measured_fault_count: timed.first().and_then(|runs| {
            median(&runs.iter().map(|run| run.usage.minor_fault_count).collect::<Vec<_>>())
        }),
        predictions: Vec::new(),
        access_count: seen.access_count,
        notes: told.notes,
    };
    forecast.notes.extend(calibration.warnings.iter().map(|w| format!("calibration: {w}")));
    if forecast.paces.iter().any(|(_, pace)| !(1.0 / PACE_MAX..PACE_MAX).contains(pace)) {
        forecast.notes.push(
            "walks cost other than when calibrated: free memory is scattered in another way\n  remedy: \
             echo 1 > /proc/sys/vm/compact_memory (as root), then pagetax calibrate"
                .into(),
        );
    }
    for (nr, size) in args.sizes.iter().enumerate() {
        let trials = timed.first().zip(timed.get(nr + 1));
        let measured =
            trials.and_then(|(base, runs)| ratio_of_pairs(&wall(base), &wall(runs), SEED));
        let saved = saved(&forecast, *size, (seen.walks(nr + 1), seen.faults(nr + 1)), &paced)?;
        let (walks, faults) = (seen.walks(nr + 1), seen.faults(nr + 1));
        let took = timed.get(nr + 1).filter(|runs| !runs.is_empty());
        let took = took.map(|runs| trial::took(recipes[nr + 1].mechanism, runs));
        let (time_ns, speedup) = match timed.first().map(|runs| with_time(saved.total(), runs)) {
            Some(Ok((time, speedup))) => (Some(time), Some(speedup)),
            Some(Err(why)) => {
                forecast.notes.push(format!("{size}: {why}"));
                (None, None)
            }
            None => (None, None),
        };
        forecast.predictions.push(Prediction {
            size: *size,
            walks,
            faults,
            saved,
            time_ns,
            speedup,
            measured,
            took,
        });
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

/// What was timed.
#[derive(Default)]
struct Timed {
    /// By recipe.
    timed: Vec<Vec<Finished>>,
    /// The command's own.
    code: Option<u8>,
    /// What faults and walks cost meanwhile.
    beside: Beside,
}

/// Runs on base pages, and with `--verify` on each size, in turns; none for a trace.
fn time(args: &Args, source: &Recorded, recipes: &[Recipe]) -> Result<Timed> {
    let Recorded::Live(_) = source else { return Ok(Timed::default()) };
    let tunables = std::env::var("GLIBC_TUNABLES").ok();
    let argv = args.source.command.clone();
    let mut launch = Launch { argv, stdin: None, tunables, memory_bytes: 0 };
    let _stop = StopSignals::watch().context("cannot watch for Ctrl-C; this is not expected")?;
    let mut timed = vec![Vec::new(); recipes.len()];
    let (mut code, mut beside) = (0, Beside::default());
    // The first round only warms caches.
    for round in 0..=args.runs {
        if round > 0 {
            // Frees what the first run gets next.
            beside.measure(launch.memory_bytes).map_err(|error| match error {
                CalibrateError::Interrupted => exit::of_trial(TrialError::Interrupted),
                other => other.into(),
            })?;
        }
        for (recipe, runs) in recipes.iter().zip(&mut timed) {
            let finished =
                trial::run(&launch, recipe, &Outputs::default(), None).map_err(exit::of_trial)?;
            launch.learn(&finished);
            code = match finished.exit {
                Exit::Code(code) => code as u8,
                Exit::Signal(signal) => 128 + signal as u8,
            };
            if round > 0 {
                runs.push(finished);
            }
        }
    }
    Ok(Timed { timed, code: Some(code), beside })
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
        let unavailable = |unavailable: pagetax_host::pages::Unavailable| {
            let text = format!("{word}: {}\n  remedy: {}", unavailable.why, unavailable.remedy);
            exit::with(exit::UNMET, anyhow!(text))
        };
        let recipe = mechanism.recipe(&system, tunables.as_deref()).map_err(unavailable)?;
        recipe.permitted(false).map_err(unavailable)?;
        Ok(recipe.through(&own.to_string_lossy()))
    };
    words.map(recipe).collect()
}

/// What a page size saves.
fn saved(
    forecast: &Forecast,
    size: PageSize,
    (walks, faults): (Walks, Faults),
    calibration: &Calibration,
) -> Result<Saved> {
    let (base, large) = (Prices::of(calibration, calibration.base_page_bytes)?, size.bytes());
    let large = Prices::of(calibration, large)?;
    let before = forecast.faults;
    // Where a run had fewer faults than its pages say, the run is right.
    let modelled = before.base_count.max(1) as f64;
    let real =
        forecast.measured_fault_count.map_or(1.0, |count| (count as f64 / modelled).min(1.0));
    let fewer = |before: u64, after: u64| before.saturating_sub(after) as f64 * real;
    let pages = fewer(before.base_count, faults.base_count);
    let filled = fewer(before.base_filled_count, faults.base_filled_count);
    let part = |count: f64, base: Spread, more: u64, large: Spread| {
        let more = more as f64 * real;
        Bounded::of((
            count * base.median_ns - more * large.median_ns,
            count * base.low_ns - more * large.high_ns,
            count * base.high_ns - more * large.low_ns,
        ))
    };
    let [(value, low, high), (value_after, low_after, high_after)] =
        [forecast.walks.ns(), walks.ns()];
    let ends = [low - low_after, high - high_after];
    Ok(Saved {
        walks: Bounded::of((value - value_after, ends[0].min(ends[1]), ends[0].max(ends[1]))),
        faults: part(pages, base.fault, faults.large_count, large.fault),
        filling: part(filled, base.filling, faults.large_filled_count, large.filling),
        unmapping: part(pages, base.unmapping, faults.large_count, large.unmapping),
    })
}

/// Of private pages of one size.
struct Prices {
    fault: Spread,
    /// Beside the fault.
    filling: Spread,
    unmapping: Spread,
}

impl Prices {
    fn of(calibration: &Calibration, bytes: u64) -> Result<Prices> {
        let cost = |kind: FaultKind| {
            calibration.fault(kind, bytes).ok_or_else(|| {
                let (what, size) = (kind.meaning(), Bytes(bytes));
                let text = format!("the calibration does not know what {size} cost: {what}");
                let remedy = "pagetax calibrate --allow-sysfs";
                exit::with(exit::UNMET, anyhow!("{text}\n  remedy: {remedy}"))
            })
        };
        let (fault, filled) = (cost(FaultKind::AnonWrite)?, cost(FaultKind::AnonFill)?);
        let filling = Spread {
            median_ns: filled.median_ns - fault.median_ns,
            low_ns: filled.low_ns - fault.high_ns,
            high_ns: filled.high_ns - fault.low_ns,
            repetitions: filled.repetitions,
        };
        Ok(Prices { fault, filling, unmapping: cost(FaultKind::Unmap)? })
    }
}

/// Time and speed-up when so much is saved of these runs. Threads save at the same time: elapsed time
/// shrinks as CPU time does. Why not, where more is saved than there is.
fn with_time(saved: Bounded, runs: &[Finished]) -> Result<(Bounded, Bounded), String> {
    let base_ns = median(&wall(runs)).ok_or("nothing was timed")? as f64;
    let cpu: Vec<u64> = runs.iter().map(|run| run.usage.user_ns + run.usage.kernel_ns).collect();
    let cpu_ns = median(&cpu).unwrap_or(0) as f64;
    if saved.value >= cpu_ns {
        return Err(format!(
            "walks and faults are modelled as {} of {} of CPU time: no prediction\n  remedy: pagetax \
             calibrate, when the machine is quiet",
            Nanos(saved.value as u64),
            Nanos(cpu_ns as u64)
        ));
    }
    let at_a_time = (cpu_ns / base_ns).max(1.0);
    // A bound that saves all CPU time is none, and says so by no time left.
    let less = |saved_ns: f64| match saved_ns < cpu_ns {
        true => (base_ns - saved_ns / at_a_time).max(0.0),
        false => 0.0,
    };
    let time = Bounded { value: less(saved.value), low: less(saved.high), high: less(saved.low) };
    let speedup =
        Bounded { value: base_ns / time.value, low: base_ns / time.high, high: base_ns / time.low };
    Ok((time, speedup))
}
