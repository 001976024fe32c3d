//! Timed runs of a command on base pages and on other page sizes, in turns, with walks measured in between.

use pagetax_core::exit::Exit;
use pagetax_host::measure::calibrate::{Beside, CalibrateError};
use pagetax_host::measure::fault_log::{FaultLog, LoggedFaults};
use pagetax_host::measure::trial::{self, Finished, Outputs, TrialCommand, TrialError};
use pagetax_host::pages::Recipe;

/// Timed runs; none of a trace.
#[derive(Default)]
pub struct Timed {
    /// Runs by recipe, base pages first.
    pub runs: Vec<Vec<Finished>>,
    /// The exit of the last timed run.
    pub exit: Option<Exit>,
    /// Costs of faults and walks, measured between the runs.
    pub beside: Beside,
    /// The faults of the first run that warms caches, on base pages, if they were asked for.
    pub logged: Option<LoggedFaults>,
}

/// The number of runs of each recipe.
#[derive(Debug, Clone, Copy)]
pub struct Rounds {
    /// Runs that only warm caches; at least one, which shows how much memory the command takes.
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
    Calibrate(CalibrateError),
    /// Faults cannot be logged here.
    #[error("{0}")]
    NoLog(String),
}

impl From<CalibrateError> for TimingError {
    fn from(error: CalibrateError) -> Self {
        match error {
            CalibrateError::Interrupted => TrialError::Interrupted.into(),
            error => TimingError::Calibrate(error),
        }
    }
}

/// Runs the command under each recipe, in turns. The first run of all is on base pages. Each round begins
/// with another recipe: what is measured before a round leaves other caches, and other free memory, to its
/// first run.
pub fn time(
    launch: &mut TrialCommand,
    recipes: &[Recipe],
    rounds: Rounds,
    mut on_progress: impl FnMut(f64),
) -> Result<Timed, TimingError> {
    let warmup = rounds.warmup.max(1);
    let all = (warmup + rounds.timed) as usize * recipes.len();
    let mut ended = 0;
    let mut timed = Timed { runs: vec![Vec::new(); recipes.len()], ..Timed::default() };
    let mut log = match rounds.logs_faults {
        true => Some(FaultLog::start().map_err(TimingError::NoLog)?),
        false => None,
    };
    for round in 0..warmup + rounds.timed {
        if round >= warmup {
            // Frees the memory that the first run gets next.
            timed.beside.measure(launch.memory_bytes)?;
        }
        for place in 0..recipes.len() {
            let nth = (round as usize + place) % recipes.len();
            let finished = trial::run(launch, &recipes[nth], &Outputs::default(), None)?;
            timed.logged = timed.logged.take().or_else(|| log.take().map(FaultLog::finish));
            launch.learn(&finished);
            timed.exit = Some(finished.exit);
            ended += 1;
            on_progress(ended as f64 / all as f64);
            if round >= warmup {
                timed.runs[nth].push(finished);
            }
        }
    }
    Ok(timed)
}
