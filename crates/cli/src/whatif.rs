//! `pagetax whatif`: the time a command would take with each page size on this machine, from one recording
//! of its pages. `recorder::forecast` predicts; this file has the arguments and prints.

pub mod by_part;
mod render;
mod sampled;

use crate::output::tables::TablesArgs;
use crate::output::{self, documents::Outputs, progress::Progress};
use crate::recorded::{EngineCommand, Recorded, Source, SourceOutcome};
use crate::{calibrate, exit, machines};
use anyhow::{Context, Result, anyhow, bail};
use by_part::ByPart;
use pagetax_core::address_pattern::AddressPart;
use pagetax_core::exit::Exit;
use pagetax_core::page_size::{MemoryPart, PageSizeRequest, PartSizes};
use pagetax_core::units::{Nanos, PageSize, UnitError};
use pagetax_host::measure::trial::TrialCommand;
use pagetax_host::pages::mechanism::{Conditions, select};
use pagetax_host::pages::{PageSettings, Recipe, Unavailable};
use pagetax_host::sys::signal::StopSignals;
use pagetax_recorder::documents::WhatIf;
use pagetax_recorder::engine::EngineKind;
use pagetax_recorder::forecast::{self, Forecast, Rounds, Timed, TimingError};
use pagetax_recorder::predict::{Predicted, Predictor};
use pagetax_sim::hardware::translation::Translation;
use pagetax_sim::hardware::{calibrated, configuration};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  pagetax whatif -- sort -S 2G big.txt           what would it take on 2M pages, and why?
  pagetax whatif --verify -- python3 report.py   with measured trials beside the prediction
  pagetax whatif --sample --runs 1 -- ./long-job   from bursts, for programs that run for more than some seconds
  pagetax whatif --by heap,stack,text,arena,mapping -- ./job   which part of memory deserves them?
  pagetax whatif app.ptt                         of a trace: what is saved, without a time of its own";

/// Predict a command's time with each page size, from the pages that it goes to
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// Page sizes to predict, of heap and other private memory; hugetlb:2M is timed on pages of the pool
    #[arg(long = "pages", alias = "sizes", value_name = "SIZE,…", value_delimiter = ',', default_value = "2M",
          value_parser = page_size)]
    sizes: Vec<(PageSize, PageSizeRequest)>,

    /// Runs that are timed, of each size with --verify
    #[arg(long, value_name = "N", default_value_t = 5,
          value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,

    /// Runs on base pages before these, which do not count; at least one: it shows how much memory it takes
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..=1000))]
    warmup: u32,

    /// Also time runs on each page size, and say by how much the prediction is off
    #[arg(long)]
    verify: bool,

    /// Record bursts only: faster, with a sampling error. The engine is native where it can run the program
    #[arg(long, conflicts_with_all = ["trace", "by", "follow"])]
    sample: bool,

    /// Split what 2M pages save by part of memory: heap, stack, text, arena, mapping
    #[arg(long, value_name = "PART,…", value_delimiter = ',')]
    by: Vec<AddressPart>,

    #[command(flatten)]
    tables: TablesArgs,

    #[command(flatten)]
    outputs: Outputs<WhatIf>,

    #[command(flatten)]
    source: Source,
}

/// Runs `pagetax whatif [TRACE] [-- COMMAND]`.
pub fn run(args: Args) -> Result<ExitCode> {
    args.outputs.check_writable()?;
    args.tables.check_writable()?;
    let mut source = args.source.open(&args.outputs, args.sample)?;
    let mut tables = args.tables.open(matches!(source, Recorded::Live(_)), &args.outputs)?;
    if args.verify && matches!(source, Recorded::Trace(_)) {
        bail!("a trace cannot be timed\n  hint: drop --verify, or name the command after --");
    }
    let by_part = by_part(&args, &mut source)?;
    let calibration = calibrate::needed()?;
    if calibration.walks.is_empty() {
        let why = calibration.notes.join("; ");
        let text = format!("the calibration lacks the cost of page walks: {why}");
        return Err(exit::with(exit::UNMET, anyhow!("{text}\n  hint: pagetax calibrate")));
    }
    let recipes = match source {
        Recorded::Live(_) => recipes(&args)?,
        Recorded::Trace(_) => Vec::new(),
    };
    let timed = time_runs(&args, &source, &recipes)?;
    if let Recorded::Live(command) = &source {
        say_cost(command, args.sample, &timed);
    }
    let mut model = machines::model_of(calibrated::MODEL, "this machine")?;
    calibrated::apply(&mut model, &timed.beside.pace(&calibration))?;
    let cpu = configuration::translation(&model)?;
    let sizes: Vec<PageSize> = args.sizes.iter().map(|(size, _)| *size).collect();
    let shifts: Vec<u32> = [PageSize::K4].iter().chain(&sizes).map(|size| size.shift()).collect();
    let (predicted, mut by_block, outcome) = match &source {
        Recorded::Live(command) if args.sample => {
            let logged = timed.logged.as_ref();
            let (predicted, outcome) = sampled::predict(command, &cpu, &shifts, logged)?;
            (predicted, None, outcome)
        }
        _ => of_all(&source, by_part.as_ref(), &cpu, &shifts)?,
    };
    let unknown = |error| exit::with(exit::UNMET, error);
    let mut forecast =
        Forecast::new(source.title(), &sizes, &predicted, &calibration, &timed).map_err(unknown)?;
    if let Some(pages) = &mut by_block {
        forecast.add_parts(&args.by, pages, &calibration, &timed).map_err(unknown)?;
    }
    forecast.notes.splice(0..0, outcome.notes);
    let why_no_log = by_part.and_then(|by_part| by_part.why_no_log);
    forecast.notes.extend(why_no_log.map(|why| {
        format!("parts are those of /proc/PID/maps, without the order of allocation: {why}")
    }));
    let code = timed.exit.map(Exit::shell_code);
    args.outputs.write(&WhatIf::new(&forecast, code))?;
    tables.print(&render::table(&forecast))?;
    forecast.notes.iter().for_each(|note| output::note(&format!("whatif: {note}")));
    Ok(code.unwrap_or(outcome.code).into())
}

/// Prepares a recording by part, if one is asked for.
fn by_part(args: &Args, source: &mut Recorded) -> Result<Option<ByPart>> {
    if args.by.is_empty() {
        return Ok(None);
    }
    let is_huge = matches!(args.sizes[..], [(PageSize::M2, _)]);
    if !is_huge {
        bail!("--by splits what 2M pages save, and no other size\n  hint: leave out --pages");
    }
    if let Some(twice) = args.by.iter().enumerate().find(|(at, part)| args.by[..*at].contains(part))
    {
        bail!("--by names {} twice", twice.1);
    }
    let command = match source {
        Recorded::Live(command) => Some(&mut **command),
        Recorded::Trace(_) => None,
    };
    ByPart::prepare(&args.by, command).map(Some)
}

/// Predicts from all accesses of the source; also returns the predictor, if it has the use of each block.
fn of_all(
    source: &Recorded,
    by_part: Option<&ByPart>,
    cpu: &Translation,
    shifts: &[u32],
) -> Result<(Predicted, Option<Predictor>, SourceOutcome)> {
    let predictor = match by_part {
        Some(by_part) => by_part.predictor(cpu),
        None => Predictor::new(cpu, shifts),
    };
    let (pages, outcome) = source.observe("whatif", predictor)?;
    Ok((pages.predicted(), by_part.is_some().then_some(pages), outcome))
}

/// Says how long the recording will take, before it starts.
fn say_cost(command: &EngineCommand, sample: bool, timed: &Timed) {
    let Some(base) = timed.trials.first() else { return };
    let times = match (sample, command.engine.kind) {
        (true, EngineKind::Native) => "1.5 to 3 times as long",
        (true, _) => "up to 100 times as long",
        (false, _) => "40 to 190 times as long; --sample is faster",
    };
    let run = Nanos(timed.basis.median_ns(base));
    output::note(&format!("whatif: a run took {run}; the recording takes some {times}"));
}

/// Times runs on base pages, and with `--verify` on each size; none of a trace.
fn time_runs(args: &Args, source: &Recorded, recipes: &[Recipe]) -> Result<Timed> {
    let Recorded::Live(_) = source else { return Ok(Timed::default()) };
    let tunables = std::env::var("GLIBC_TUNABLES").ok();
    let argv = args.source.command.clone();
    let mut launch = TrialCommand { argv, tunables, ..TrialCommand::default() };
    let _stop = StopSignals::watch().context("cannot watch for Ctrl-C; this is not expected")?;
    let mut progress = Progress::start("whatif: timed runs");
    let rounds = Rounds { warmup: args.warmup, timed: args.runs, logs_faults: args.sample };
    let timed = forecast::time(&mut launch, recipes, rounds, |done| progress.update(done));
    timed.map_err(|error| match error {
        TimingError::Trial(error) => exit::of_trial(error),
        TimingError::NoLog(_) => exit::with(exit::UNMET, error),
        error => error.into(),
    })
}

/// Returns the recipe of base pages, and with `--verify` those of the sizes.
fn recipes(args: &Args) -> Result<Vec<Recipe>> {
    let system = PageSettings::host();
    let own = std::env::current_exe().context("cannot find this program")?;
    let tunables = std::env::var("GLIBC_TUNABLES").ok();
    let conditions = Conditions { system: &system, tunables: tunables.as_deref(), has_code: true };
    let requests = args.sizes.iter().filter(|_| args.verify).map(|(_, request)| *request);
    let recipe = |request: PageSizeRequest| -> Result<Recipe> {
        let sizes = PartSizes::of(&[MemoryPart::Heap], request);
        let mechanism = select(&sizes, &system).with_context(|| format!("--pages {request}"))?;
        let unavailable = |unavailable: Unavailable| {
            let text = format!("{request}: {}\n  hint: {}", unavailable.why, unavailable.remedy);
            exit::with(exit::UNMET, anyhow!(text))
        };
        let recipe = Recipe::new(mechanism, &conditions).map_err(unavailable)?;
        recipe.permitted(false).map_err(unavailable)?;
        Ok(recipe.through(&own.to_string_lossy()))
    };
    [PageSizeRequest::preferred(PageSize::K4)].into_iter().chain(requests).map(recipe).collect()
}

/// Parses a page size to predict: the system's choice is none.
fn page_size(text: &str) -> Result<(PageSize, PageSizeRequest), UnitError> {
    let request: PageSizeRequest = text.parse()?;
    let size = request.size(PageSize::K4).ok_or_else(|| UnitError::NoPageSize(text.into()))?;
    Ok((size, request))
}
