//! Timed runs of a command on base pages and on other page sizes, in turns, with walks measured in between.

use pagetax_core::diagnosis::{Basis, Trial, compare_trials};
use pagetax_core::exit::Exit;
use pagetax_core::sequential::Stopping;
use pagetax_host::measure::budget::{Watch, Watched};
use pagetax_host::measure::calibrate::{Beside, CalibrateError};
use pagetax_host::measure::fault_log::{FaultLog, LoggedFaults};
use pagetax_host::measure::trial::rounds::{self, Ended, Schedule, Step};
use pagetax_host::measure::trial::{
    self, Finished, Outputs, Starts, TrialCommand, TrialError, trial_of,
};
use pagetax_host::pages::Recipe;

/// Timed runs; none of a trace.
#[derive(Debug, Default)]
pub struct Timed {
    /// The runs by recipe, base pages first.
    pub trials: Vec<Trial>,
    /// The time by which they are compared.
    pub basis: Basis,
    /// The exit of the last timed run.
    pub exit: Option<Exit>,
    /// Costs of faults and walks, measured between the runs.
    pub beside: Beside,
    /// The faults of the first run, on base pages, if they were asked for.
    pub logged: Option<LoggedFaults>,
}

/// The number of runs of each recipe.
#[derive(Debug, Clone, Copy)]
pub struct Rounds {
    /// Runs on base pages that only warm caches; at least one, which shows how much memory the command takes
    /// and how it uses its time.
    pub warmup: u32,
    /// Runs that are timed.
    pub timed: u32,
    /// True to log the faults of the first run.
    pub logs_faults: bool,
}

/// A run, or a measurement between runs, failed.
#[derive(Debug, thiserror::Error)]
pub enum TimingError {
    /// The command's run.
    #[error(transparent)]
    Trial(#[from] TrialError),
    /// The measurement of walks and faults.
    #[error(transparent)]
    Calibrate(#[from] CalibrateError),
    /// Faults cannot be logged here.
    #[error("{0}")]
    NoLog(String),
}

/// Runs the command under each recipe, in turns, in the order of [`rounds`]. The first run of all is on base
/// pages. Where there are several recipes, runs are compared as those of a diagnosis are: by CPU time beside
/// a probe of the machine's speed, where that would help.
///
/// # Errors
/// A run failed to start or was interrupted, walks could not be measured, or faults could not be logged.
pub fn time(
    launch: &mut TrialCommand,
    recipes: &[Recipe],
    rounds: Rounds,
    on_progress: impl FnMut(f64),
) -> Result<Timed, TimingError> {
    let schedule = Schedule {
        runs: Some(rounds.timed as usize),
        warmup: rounds.warmup.saturating_sub(1) as usize,
        ignore_failure: true,
        ..Schedule::default()
    };
    let log = rounds.logs_faults.then(FaultLog::start).transpose();
    let mut steps = Steps {
        starts: Starts::new(recipes, launch),
        launch,
        recipes,
        log: log.map_err(TimingError::NoLog)?,
        round: 0,
        failed: None,
        timed: Timed::default(),
    };
    let all = |finished: &[Vec<Finished>]| vec![true; finished.len()];
    let run = |planned: &[Step]| planned.iter().map(|step| steps.run(step)).collect();
    let ran = rounds::run(&schedule, recipes.len(), run, all, on_progress);
    if let Some(error) = steps.failed {
        return Err(error.into());
    }
    let ran = ran?;
    if ran.ended == Ended::Interrupted {
        return Err(TrialError::Interrupted.into());
    }
    let mut timed = steps.timed;
    timed.trials = recipes.iter().zip(&ran.finished).map(|(r, runs)| trial_of(r, runs)).collect();
    compare_trials(&mut timed.trials, Stopping::Fixed, timed.basis);
    Ok(timed)
}

/// Runs of the command, and what was learned from them so far.
struct Steps<'a> {
    launch: &'a mut TrialCommand,
    recipes: &'a [Recipe],
    starts: Starts,
    log: Option<FaultLog>,
    /// The round before which walks were last measured.
    round: usize,
    /// The reason why they could not be measured.
    failed: Option<CalibrateError>,
    timed: Timed,
}

impl Steps<'_> {
    fn run(&mut self, step: &Step) -> Result<Finished, TrialError> {
        let recipe = &self.recipes[step.trial];
        self.begin_round(step)?;
        let start_ns = match step.round {
            0 => None,
            _ => self.starts.measure(recipe, self.timed.basis, self.launch)?,
        };
        let mut watch = (step.budget && self.recipes.len() > 1).then(Watch::new);
        let mut finished = trial::run(self.launch, recipe, &Outputs::default(), watch.as_mut())?;
        self.timed.logged =
            self.timed.logged.take().or_else(|| self.log.take().map(FaultLog::finish));
        finished.start_ns = start_ns;
        self.launch.learn(&finished);
        self.timed.exit = Some(finished.exit);
        if step.round == 0 {
            self.starts.learn(&finished);
        }
        if let Some(watch) = watch {
            self.learn_occupation(&finished, &watch.finish());
        }
        Ok(finished)
    }

    /// Measures walks before each round, which frees the memory that the first run gets next.
    fn begin_round(&mut self, step: &Step) -> Result<(), TrialError> {
        if step.round == self.round {
            return Ok(());
        }
        self.round = step.round;
        self.timed.beside.measure(self.launch.memory_bytes).map_err(|error| {
            let is_stop = matches!(error, CalibrateError::Interrupted);
            self.failed = (!is_stop).then_some(error);
            TrialError::Interrupted
        })
    }

    /// Decides what the runs are compared by.
    fn learn_occupation(&mut self, finished: &Finished, watched: &Watched) {
        let seen = trial::occupation(finished, watched);
        self.launch.has_probe = trial::needs_probe(self.launch, seen);
        self.timed.basis = match self.launch.has_probe {
            true => Basis::Cpu,
            false => seen.unwrap_or_default().basis(),
        };
    }
}
