//! `pagetax diagnose`: trials of an unmodified command under several page sizes, and the verdict.
//!
//! The command's own output never mixes with the report; the exit status is the command's own.

mod all;
mod live;
mod load;
mod parts;
mod scratch;
mod states;
mod steps;
mod warnings;

use crate::output::{self, documents::Outputs, progress::Progress};
use crate::recorded::open_trace;
use crate::{calibrate, exit, machines, output::diagnosis};
use anyhow::{Context, Result};
use pagetax_core::budget::Budget;
use pagetax_core::counter::Reading;
use pagetax_core::diagnosis::{
    AS_IS, BASE, Basis, Diagnosis, MemoryState, PARTS, Skipped, Trial, Verdict, compare_trials,
    judge, judge_states, on_same_pages, translation, undecided,
};
use pagetax_core::exit::Exit;
use pagetax_core::page_size::{MemoryPart, PartSizes};
use pagetax_core::sequential::Stopping;
use pagetax_core::units::{Nanos, PageSize};
use pagetax_host::launch::program::Program;
use pagetax_host::measure::budget::{Totals, Translation, Watched, budget};
use pagetax_host::measure::calibrate::cached;
use pagetax_host::measure::environment::environment;
use pagetax_host::measure::trial::rounds::{self, Ended, Schedule};
use pagetax_host::measure::trial::{Finished, Peak, TrialCommand, trial_of};
use pagetax_host::pages::base_page;
use pagetax_host::pages::mechanism::{self, Conditions, Mechanism};
use pagetax_host::pages::{PageSettings, Recipe, Unavailable};
use pagetax_host::procfs::Root;
use pagetax_host::sys::signal::StopSignals;
use pagetax_recorder::predict::Predictor;
use pagetax_sim::hardware::{calibrated, configuration};
use scratch::{Input, Scratch};
use std::cell::Cell;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use steps::{Code, Steps};

const EXAMPLES: &str = "\
Examples:
  pagetax diagnose                                       the built-in job tlb-gather
  pagetax diagnose -- sort -S 2G big.txt                 what would larger pages do for sort?
  pagetax diagnose --runs 10 -- python3 report.py        tighter intervals
  pagetax diagnose --side-by-side -- python3 report.py   on a machine whose speed varies
  pagetax diagnose --when fragmented,forked -- ./job     does it still gain on memory that is not fresh?
  pagetax diagnose --load 'redis-benchmark -t get -q' --ready 6379 -- redis-server
                                                         a server, by what its load tells
  pagetax diagnose -p 1234                               a process that runs already: nothing restarts
  pagetax diagnose --pages 4K,2M,hugetlb:2M -- ./server  also pages of the hugetlb pool
  pagetax diagnose --json=before.json -- ./job           to compare later: pagetax compare
  pagetax diagnose --parts -- ./job                      which fifth of its memory is worth it?
  pagetax diagnose --all                                 which running process pays most?";

/// Seed of the resampling, so that the same runs give the same intervals.
const SEED: u64 = 2004;

/// Tell what virtual memory costs a command, and which page size would cure it
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// Rounds; each runs every trial once. By default they end once the answer is settled, or after --time
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=10_000))]
    runs: Option<u32>,

    /// Runs before the first round, which do not count
    #[arg(long, value_name = "N", default_value_t = 1)]
    warmup: u32,

    /// Time that the rounds may take when --runs is not given, all included; there are never fewer than three
    #[arg(long, value_name = "TIME", default_value = "2min")]
    time: Nanos,

    /// Page sizes to try: of the heap 4K for base pages, 64K and the like, 2M, hugetlb:2M, each a trial; by
    /// part of heap, stack and text (code), together one trial. Repeatable [default: 4K,64K,2M, stack=2M,
    /// text=2M and heap=2M,stack=2M,text=2M, as far as the kernel has them]
    #[arg(long = "pages", alias = "sizes", value_name = "SIZE,…|PART=SIZE,…")]
    sizes: Option<Vec<String>>,

    /// Also try settings that the command's allocator or runtime has for its memory, such as PYTHONMALLOC
    /// (docs/diagnose.md#settings)
    #[arg(long)]
    settings: bool,

    /// Find the part of memory that deserves large pages: at most a fifth of it, which keeps nine tenths of
    /// the gain. Records the command once, and takes at most 12 runs (docs/diagnose.md#parts)
    #[arg(long, conflicts_with_all = ["sizes", "settings", "check", "side_by_side", "when", "pids", "all", "load"])]
    parts: bool,

    /// Also try the command as it is a second time, and warn if it differs from itself
    #[arg(long)]
    check: bool,

    /// Run all trials of a round at a time on one CPU, and compare their CPU times: finds gains of a few
    /// percent sooner. For commands that may run several times at once, one task each
    #[arg(long, conflicts_with = "alone")]
    side_by_side: bool,

    /// Run nothing beside the command. By default a command of one task in a virtual machine shares a CPU
    /// with a probe of the machine's speed, which varies (docs/diagnose.md#speed-probe)
    #[arg(long)]
    alone: bool,

    /// States of memory to try as well: found, fragmented, compactable, pressed, forked
    /// (docs/diagnose.md#when). Fragmented memory is made on the whole machine, as root, and put back; --time
    /// counts for each state
    #[arg(long, value_name = "STATE,…", value_delimiter = ',')]
    #[arg(conflicts_with_all = ["side_by_side", "pids", "all"])]
    when: Vec<MemoryState>,

    /// Change page-size settings of the system during the trials that need it, then put them back
    #[arg(long, conflicts_with = "side_by_side")]
    allow_sysfs: bool,

    /// Standard input for each run: a file, or `null` for none [default: what stands on ours, read
    /// once, unless it is a terminal]
    #[arg(long, value_name = "FILE")]
    input: Option<PathBuf>,

    /// Keep standard output and error of every run in this directory, such as as-is.1.out
    #[arg(long = "keep-output", alias = "outputs", value_name = "DIR")]
    outputs: Option<PathBuf>,

    /// Print the output of the first run, on stderr
    #[arg(long)]
    show_output: bool,

    /// A trace of the same command (pagetax record): the budget's source of translation where there are
    /// no counters and trials do not tell
    #[arg(long, value_name = "FILE.ptt")]
    trace: Option<PathBuf>,

    /// Print all tables: each run's spread, the whole budget, each warning
    #[arg(long)]
    full: bool,

    /// Go on when the command fails
    #[arg(long)]
    ignore_failure: bool,

    #[command(flatten)]
    load: load::LoadArgs,

    #[command(flatten)]
    live: live::LiveArgs,

    #[command(flatten)]
    formats: Outputs<Diagnosis>,

    /// The command and its arguments; without one, the built-in job tlb-gather
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// The page sizes to try when none are given.
const SIZES: [&str; 4] = ["4K,64K,2M", "stack=2M", "text=2M", "heap=2M,stack=2M,text=2M"];

/// The remedies of a verdict that the runs left open, where they shared a CPU and where they did not.
const MORE_TIME: &str = "give it more time (--time 10min) or a quieter machine";
const SHARED_CPU: &str = "compare runs that share a CPU (--side-by-side) if it may run several times at \
                          once, or give it more time (--time 10min)";

/// Runs `pagetax diagnose -- COMMAND`.
pub fn run(args: Args) -> Result<ExitCode> {
    if args.live.all {
        return all::run(&args.formats.for_kind(), args.live.for_time);
    }
    if !args.live.pids.is_empty() {
        return live::run(&args.live, &args.formats.for_kind());
    }
    let tunables = std::env::var("GLIBC_TUNABLES").ok();
    let (mut recipes, mut skipped) = recipes(&args, tunables.as_deref(), &PageSettings::host())?;
    let recorded = args.trace.as_deref().map(recorded).transpose()?;
    let input = Input::new(args.input.as_deref())?;
    let (argv, stdin) = (argv(&args)?, input.path.clone());
    let mut parts = match args.parts {
        true => Some(parts::search(&argv, stdin.clone(), tunables.as_deref(), &mut recipes)?),
        false => None,
    };
    let service = args.load.service(&args.command)?;
    let basis = Cell::new(load::basis(service.as_ref()));
    let launch = TrialCommand { argv, stdin, tunables, service, ..TrialCommand::default() };
    // From here on Ctrl-C ends the trials, not us, so that everything is cleaned up.
    let _stop = StopSignals::watch().context("cannot watch for Ctrl-C; this is not expected")?;
    let scratch = Scratch::new(args.outputs.clone())?;
    let schedule = Schedule {
        runs: args.runs.map(|n| n as usize).or(args.parts.then_some(parts::ROUNDS)),
        warmup: args.warmup as usize,
        time_ns: args.time.0,
        ignore_failure: args.ignore_failure,
        side_by_side: Cell::new(false),
    };
    let stopping = if schedule.runs.is_some() { Stopping::Fixed } else { Stopping::Sequential };
    let mut steps = Steps::new(&args, &recipes, launch, scratch, (&schedule, &basis));
    let mut progress = Progress::start("diagnose");
    let rounds = rounds::run(
        &schedule,
        recipes.len(),
        |batch| steps.run(batch),
        |finished| undecided(&trials_of(&recipes, finished, stopping, basis.get())),
        |done| progress.update(done),
    );
    drop(progress);
    let rounds = rounds.map_err(exit::of_trial)?;
    let Steps { launch, scratch, hashes, watched, .. } = steps;
    let is_time_up = rounds.ended == Ended::TimeUp;
    let stopping = if is_time_up { Stopping::TimeUp } else { stopping };
    let remedies = if args.side_by_side { MORE_TIME } else { SHARED_CPU };
    let trials = trials_of(&recipes, &rounds.finished, stopping, basis.get());
    skipped.extend(rounds.given_up.iter().map(|(trial, why)| {
        let remedy = "mend that, or leave the trial out with --pages".into();
        not_tried(&*recipes[*trial].mechanism, Unavailable { why: why.clone(), remedy })
    }));
    let fresh = states::AfterFresh {
        args: &args,
        recipes: &recipes,
        launch: &launch,
        trials: &trials,
        schedule: &schedule,
        basis: basis.get(),
    };
    let is_complete = matches!(rounds.ended, Ended::Complete | Ended::TimeUp);
    let (states, verdict, is_interrupted) = match is_complete {
        true => {
            let (states, is_interrupted) = fresh.run_all(&args.when)?;
            let verdict = judge_states(&trials, &states, basis.get(), remedies);
            (states, verdict, is_interrupted)
        }
        false => (Vec::new(), judge(&trials, basis.get(), remedies), false),
    };
    let verdict = match &mut parts {
        Some(search) => {
            let rounds: usize = trials.iter().map(|trial| trial.runs_ns.len()).sum();
            search.run_count += u64::from(args.warmup) + 1 + rounds as u64;
            search.judge(&trials, parts::ALL, basis.get());
            // The set is what was asked for, if there is one.
            let loser = if search.is_found { parts::ALL } else { PARTS };
            let others: Vec<Trial> =
                trials.iter().filter(|trial| trial.name != loser).cloned().collect();
            parts::concluded(search, judge(&others, basis.get(), remedies))
        }
        None => verdict,
    };
    let mut diagnosis = diagnosis_of(&launch, &recipes, skipped, trials, verdict, basis.get());
    diagnosis.states = states;
    diagnosis.parts = parts;
    diagnosis.side_by_side = schedule.side_by_side.get();
    let budget = |(run, watched): (Finished, Watched)| {
        budget_of(&run, &watched, &diagnosis.trials, recorded)
    };
    diagnosis.budget = watched.map(budget);
    diagnosis.warnings = warnings::of(&diagnosis, &rounds, &hashes, &scratch);
    args.formats.print(&diagnosis, if args.full { diagnosis::full } else { diagnosis::render })?;
    Ok(match rounds.ended {
        ended if is_interrupted || ended == Ended::Interrupted => exit::INTERRUPTED.into(),
        Ended::ServiceFailed => exit::BAD_INPUT.into(),
        _ => diagnosis.exit.shell_code().into(),
    })
}

/// Returns the time of a trace's walks on base pages, at this machine's costs.
fn recorded(path: &Path) -> Result<Translation> {
    let trace = open_trace(path)?;
    let mut model = machines::model_of(calibrated::MODEL, "this machine")?;
    let calibration = calibrate::needed()?;
    for warning in &calibration.warnings {
        output::note(&format!("diagnose: calibration: {warning}"));
    }
    calibrated::apply(&mut model, &calibration)?;
    let mut seen = Predictor::new(&configuration::translation(&model)?, &[PageSize::K4.shift()]);
    trace.replay(&mut seen, |_| true)?;
    let (ns, low_ns, high_ns) = seen.walks(0).ns();
    Ok(Translation::Recorded { low_ns, ns, high_ns })
}

/// Returns the command, or this program with the built-in job.
fn argv(args: &Args) -> Result<Vec<OsString>> {
    if !args.command.is_empty() {
        return Ok(args.command.clone());
    }
    let own = std::env::current_exe().context("cannot find this program; name a command")?;
    Ok([own.into(), "run".into(), "tlb-gather".into()].into())
}

/// Returns the trials that can run, the command as it is first, and those that cannot.
fn recipes(
    args: &Args,
    tunables: Option<&str>,
    system: &PageSettings,
) -> Result<(Vec<Recipe>, Vec<Skipped>)> {
    let (mut recipes, mut skipped) = (vec![Recipe::default()], Vec::new());
    recipes.extend(args.check.then(Recipe::check));
    let own = std::env::current_exe().context("cannot find this program")?;
    let has_code = !Code::of(&args.command).files.is_empty();
    let program = args.command.first().and_then(|name| Program::find(name).ok());
    let conditions = Conditions { system, tunables, has_code };
    let words: Vec<&str> = match &args.sizes {
        Some(words) => words.iter().map(String::as_str).collect(),
        None if args.parts => ["2M"].into(),
        None => SIZES.into(),
    };
    let option = || format!("--pages {}", words.join(" --pages "));
    let heap = [MemoryPart::Heap];
    let all = PartSizes::alternatives(words.iter().copied(), &heap).with_context(option)?;
    for sizes in &all {
        let mechanism = match mechanism::select(sizes, system) {
            // Nobody asked for it.
            Err(_) if args.sizes.is_none() => {
                skipped.extend(not_of_this_kernel(sizes, system));
                continue;
            }
            selected => selected.with_context(option)?,
        };
        if sizes.parts() != heap && args.command.is_empty() {
            // A built-in job is all heap.
            continue;
        }
        let recipe = Recipe::new(mechanism.clone(), &conditions);
        let recipe = recipe.map(|recipe| match args.command.is_empty() {
            true => of_job(recipe, sizes),
            false => recipe.through(&own.to_string_lossy()),
        });
        let usable = recipe.and_then(|r| r.permitted(args.allow_sysfs).map(|()| r));
        let usable = usable.and_then(|r| r.heeded_by(program.as_ref()).map(|()| r));
        let usable = usable.and_then(|r| match not_side_by_side(&r, sizes) {
            Some(why) if args.side_by_side => {
                Err(Unavailable { why: why.into(), remedy: "leave out --side-by-side".into() })
            }
            _ => Ok(r),
        });
        let is_known = recipes.iter().any(|known| known.mechanism.name() == mechanism.name());
        match usable {
            Ok(recipe) if !is_known => recipes.push(recipe),
            Ok(_) => {}
            Err(unavailable) => skipped.push(not_tried(&*mechanism, unavailable)),
        }
    }
    for setting in mechanism::settings_of(&args.command, args.settings) {
        let recipe = Recipe::new(setting.clone(), &conditions);
        let recipe = recipe.and_then(|r| r.permitted(args.allow_sysfs).map(|()| r));
        match recipe.and_then(|r| r.heeded_by(program.as_ref()).map(|()| r)) {
            Ok(recipe) if args.settings => recipes.push(recipe.through(&own.to_string_lossy())),
            // Nobody asked for it, but it may be what the pages of other trials do not reach.
            Ok(_) if setting.page_size().is_some() => {
                let why = "a setting of the program's own (--settings)".into();
                let remedy = "add --settings".into();
                skipped.push(not_tried(&*setting, Unavailable { why, remedy }));
            }
            Err(unavailable) if args.settings => skipped.push(not_tried(&*setting, unavailable)),
            _ => {}
        }
    }
    Ok((recipes, skipped))
}

fn not_tried(mechanism: &dyn Mechanism, unavailable: Unavailable) -> Skipped {
    Skipped {
        name: mechanism.name(),
        page_bytes: mechanism.page_size().map_or(0, |size| size.bytes()),
        why: unavailable.why,
        remedy: unavailable.remedy,
    }
}

/// Returns why the kernel shows runs of a trial and those beside it as one; none if it does not.
fn not_side_by_side(recipe: &Recipe, sizes: &PartSizes) -> Option<&'static str> {
    if sizes.get(MemoryPart::Text).is_some() {
        return Some("all runs of a program share its code");
    }
    recipe.folio_size.map(|_| "pages of this size are counted for the whole system")
}

/// Returns the entry for a page size that this kernel lacks.
fn not_of_this_kernel(sizes: &PartSizes, system: &PageSettings) -> Option<Skipped> {
    let size = sizes.uniform()?.size(base_page())?;
    let unavailable = Unavailable::no_size(size, system);
    Some(Skipped {
        name: size.to_string(),
        page_bytes: size.bytes(),
        why: unavailable.why,
        remedy: unavailable.remedy,
    })
}

/// Returns the recipe for a built-in job, which takes its page size as a parameter.
fn of_job(recipe: Recipe, sizes: &PartSizes) -> Recipe {
    let page_size = match sizes.uniform() {
        Some(request) if recipe.mechanism.name() != BASE => request.to_string(),
        _ => BASE.into(),
    };
    recipe.by_arguments(vec!["--set".into(), format!("page_size={page_size}")])
}

/// Returns the trials that have runs, compared with the command as it is.
fn trials_of(
    recipes: &[Recipe],
    finished: &[Vec<Finished>],
    stopping: Stopping,
    basis: Basis,
) -> Vec<Trial> {
    let with_runs = recipes.iter().zip(finished).filter(|(_, runs)| !runs.is_empty());
    let mut trials: Vec<Trial> = with_runs.map(|(recipe, runs)| trial_of(recipe, runs)).collect();
    compare_trials(&mut trials, stopping, basis);
    let same = on_same_pages(&trials);
    for (trial, is_same) in trials.iter_mut().zip(same) {
        if is_same && trial.runs_ns.len() == 1 {
            trial.took.why = Some("the same pages as without it, so it ran once".into());
        }
    }
    trials
}

/// Assembles the diagnosis, without its warnings.
fn diagnosis_of(
    launch: &TrialCommand,
    recipes: &[Recipe],
    skipped: Vec<Skipped>,
    trials: Vec<Trial>,
    mut verdict: Verdict,
    basis: Basis,
) -> Diagnosis {
    let command: Vec<String> =
        launch.argv.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let winner = recipes.iter().find(|r| Some(r.mechanism.name()) == verdict.winner);
    if let Some(winner) = winner.filter(|_| launch.argv.iter().all(|word| word.to_str().is_some()))
    {
        apply(winner, &command, launch.tunables.as_deref(), &mut verdict);
    }
    let as_is = trials.iter().find(|t| t.name == AS_IS);
    Diagnosis {
        command,
        exit: as_is.map_or(Exit::Code(0), |t| t.exit),
        basis,
        side_by_side: false,
        states: Vec::new(),
        parts: None,
        skipped,
        verdict,
        budget: None,
        environment: environment(&Root::default()),
        warnings: Vec::new(),
        trials,
    }
}

/// Fills in the lines that apply the verdict: for a shell, a systemd unit and a Dockerfile. The latter two
/// start in this directory, as arguments may be relative paths.
fn apply(winner: &Recipe, command: &[String], tunables: Option<&str>, verdict: &mut Verdict) {
    let called = std::env::args().next().unwrap_or_else(|| "pagetax".into());
    verdict.apply = winner.shell_line(command, tunables, &called);
    if let Some(cost) = winner.mechanism.cost() {
        verdict.reason += &format!("; {cost}");
    }
    if winner.turns_pages_off() {
        verdict.reason += "; no line applies it: it needs larger pages off for every program";
    }
    let own = std::env::current_exe().ok().and_then(|path| Some(path.to_str()?.to_string()));
    let here = std::env::current_dir().ok().and_then(|path| Some(path.to_str()?.to_string()));
    let (Some(own), Some(here)) = (own, here) else { return };
    let lines = |lines: Option<Vec<String>>, directive: &str| -> Vec<String> {
        lines.map_or(Vec::new(), |lines| [vec![format!("{directive}{here}")], lines].concat())
    };
    verdict.systemd = lines(winner.systemd_lines(command, &own), "WorkingDirectory=");
    verdict.dockerfile = lines(winner.dockerfile_lines(command, &own), "WORKDIR ");
}

/// Returns the budget of one run of the command as it is, with translation from the best source.
fn budget_of(
    run: &Finished,
    watched: &Watched,
    trials: &[Trial],
    recorded: Option<Translation>,
) -> Budget {
    let peak = |of: fn(&Peak) -> u64| match &run.peak {
        Some(peak) => Reading::Measured(of(peak)),
        None => Reading::Missing("the run was over before its memory could be looked at".into()),
    };
    let totals = Totals {
        wall_ns: run.wall_ns,
        user_ns: run.usage.user_ns,
        kernel_ns: run.usage.kernel_ns,
        minor_fault_count: run.usage.minor_fault_count,
        major_fault_count: run.usage.major_fault_count,
        resident_bytes_max: peak(|p| p.resident_bytes),
        huge_page_bytes_max: peak(|p| p.thp_bytes + p.hugetlb_bytes),
        page_table_bytes_max: peak(|p| p.page_table_bytes),
        paging: None,
    };
    let tried = translation(trials, SEED).map(|share| Translation::Trial {
        share_low: share.low,
        share: share.value,
        share_high: share.high,
    });
    let touched = totals.resident_bytes_max.value().map(Translation::WorkingSet);
    let why = tried.as_ref().err().map(|why| Translation::Unknown(why.to_string()));
    let sources = watched.counted.clone().into_iter().chain(tried);
    let translation = Translation::best(sources.chain(recorded).chain(touched).chain(why));
    let calibration = cached().ok();
    budget(&totals, &watched.profile, &translation, calibration.as_ref())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    /// Makes the settings of a kernel before Linux 6.8: one size, under the setting of the whole system.
    fn without_medium_sizes() -> (tempfile::TempDir, PageSettings) {
        let directory = tempfile::tempdir().unwrap();
        let thp = directory.path().join("transparent_hugepage");
        std::fs::create_dir(&thp).unwrap();
        std::fs::write(thp.join("enabled"), "always [madvise] never\n").unwrap();
        std::fs::write(thp.join("hpage_pmd_size"), "2097152\n").unwrap();
        let system = PageSettings::at(directory.path());
        (directory, system)
    }

    #[test]
    fn a_size_that_nobody_asked_for_is_not_tried_where_the_kernel_lacks_it() {
        let (_keep, system) = without_medium_sizes();
        for command in [&["diagnose"][..], &["diagnose", "--", "/bin/sh"]] {
            let args = Line::parse_from(command).args;
            let (recipes, skipped) = recipes(&args, None, &system).unwrap();
            assert!(recipes.iter().any(|recipe| recipe.mechanism.name() == "thp-2M"));
            let lacking: Vec<_> = skipped.iter().filter(|one| one.name == "64K").collect();
            assert_eq!(lacking.len(), 1, "{skipped:?}");
            assert_eq!(lacking[0].why, "the kernel has no 64K pages (Linux 6.8)");
        }
        let asked = Line::parse_from(["diagnose", "--pages", "4K,64K"]).args;
        let error = recipes(&asked, None, &system).unwrap_err();
        assert!(format!("{error:#}").contains("--pages 4K,64K"), "{error:#}");
        let nothing = tempfile::tempdir().unwrap();
        let args = Line::parse_from(["diagnose"]).args;
        let (recipes, skipped) = recipes(&args, None, &PageSettings::at(nothing.path())).unwrap();
        assert_eq!(recipes.len(), 2, "{recipes:?}");
        assert!(skipped.iter().any(|one| one.why.contains("no transparent huge pages")));
    }
}
