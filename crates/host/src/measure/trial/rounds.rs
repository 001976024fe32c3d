//! The order of runs: warm-up, one run for the budget, then rounds. In each round every trial runs once,
//! each time in another order, so that drift of the machine affects all trials alike.
//!
//! This module knows nothing about commands: a function runs them, which tests replace.

use super::{Finished, TrialError};

/// The minimum of rounds for slow commands. Fewer give no useful interval.
const ROUNDS_MIN: usize = 3;
/// The minimum of rounds if they take less than [`PATIENCE_NS`].
const ROUNDS_USUAL: usize = 5;
/// The maximum of rounds. More of them hardly narrow the interval.
const ROUNDS_MAX: usize = 30;
/// The longest time for [`ROUNDS_USUAL`]: ten minutes.
const PATIENCE_NS: u64 = 600_000_000_000;

/// The amount of runs.
#[derive(Debug, Clone, Default)]
pub struct Schedule {
    /// The number of rounds; chosen from `time_ns` if `None`.
    pub runs: Option<usize>,
    /// The number of runs of the first trial that do not count.
    pub warmup: usize,
    /// The time that the rounds may take, if their number is chosen.
    pub time_ns: u64,
    /// True to go on after the command has failed.
    pub ignore_failure: bool,
}

/// The position of one run in the schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// The index of the trial in the diagnosis.
    pub trial: usize,
    /// The number of the round, from 1. It is 0 before the rounds.
    pub round: usize,
    /// True for the first run of all.
    pub first: bool,
    /// True for the run for the budget. It is watched more closely, and does not count.
    pub budget: bool,
}

/// The reason why the rounds ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// All runs are done.
    Complete,
    /// The user interrupted them. Finished runs are kept.
    Interrupted,
    /// The command failed in its first run, and no other was started.
    FirstFailed,
}

/// The runs of a schedule.
#[derive(Debug)]
pub struct Rounds<T> {
    /// The runs of each trial, in the order of the rounds.
    pub finished: Vec<Vec<T>>,
    /// The reason why there are not more.
    pub ended: Ended,
}

/// A run, as far as the schedule depends on it.
pub trait Ran {
    /// Returns its elapsed time.
    fn wall_ns(&self) -> u64;
    /// Returns true if it ended with status 0.
    fn success(&self) -> bool;
}

impl Ran for Finished {
    fn wall_ns(&self) -> u64 {
        self.wall_ns
    }

    fn success(&self) -> bool {
        self.exit.success()
    }
}

/// Returns the number of rounds if one takes `round_ns`.
fn rounds_for(schedule: &Schedule, round_ns: u64) -> usize {
    let round_ns = round_ns.max(1);
    let usual = round_ns.saturating_mul(ROUNDS_USUAL as u64) <= PATIENCE_NS;
    let least = if usual { ROUNDS_USUAL } else { ROUNDS_MIN };
    let fitting = usize::try_from(schedule.time_ns / round_ns).unwrap_or(ROUNDS_MAX);
    schedule.runs.unwrap_or(fitting.clamp(least, ROUNDS_MAX))
}

/// Runs the whole schedule. An interruption keeps the finished runs; any other error ends it.
pub fn run<T: Ran>(
    schedule: &Schedule,
    trials: usize,
    mut run_one: impl FnMut(Step) -> Result<T, TrialError>,
    mut progress: impl FnMut(f64),
) -> Result<Rounds<T>, TrialError> {
    let mut rounds =
        Rounds { finished: (0..trials).map(|_| Vec::new()).collect(), ended: Ended::Complete };
    let mut first = true;
    let mut total = 0;
    for before in 0..=schedule.warmup {
        let budget = before == schedule.warmup;
        let ran = match run_one(Step { trial: 0, round: 0, first, budget }) {
            Err(TrialError::Interrupted) if !first => return Ok(interrupted(rounds)),
            other => other?,
        };
        if first && !ran.success() && !schedule.ignore_failure {
            rounds.finished[0].push(ran);
            return Ok(Rounds { ended: Ended::FirstFailed, ..rounds });
        }
        (first, total) = (false, rounds_for(schedule, ran.wall_ns() * trials as u64));
    }
    for round in 0..total {
        for place in 0..trials {
            let trial = (round + place) % trials;
            match run_one(Step { trial, round: round + 1, first, budget: false }) {
                Err(TrialError::Interrupted) => return Ok(interrupted(rounds)),
                other => rounds.finished[trial].push(other?),
            }
            progress((round * trials + place + 1) as f64 / (total * trials) as f64);
        }
    }
    Ok(rounds)
}

fn interrupted<T>(rounds: Rounds<T>) -> Rounds<T> {
    Rounds { ended: Ended::Interrupted, ..rounds }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::program::ProgramError;

    /// A run of so many seconds that succeeded or failed.
    struct Fake(u64, bool);

    impl Ran for Fake {
        fn wall_ns(&self) -> u64 {
            self.0 * 1_000_000_000
        }

        fn success(&self) -> bool {
            self.1
        }
    }

    fn schedule(runs: Option<usize>, warmup: usize) -> Schedule {
        Schedule { runs, warmup, time_ns: 60_000_000_000, ignore_failure: false }
    }

    #[test]
    fn every_round_begins_with_another_trial() {
        let mut order = Vec::new();
        let note = |step: Step| {
            order.push((step.round, step.trial));
            Ok(Fake(1, true))
        };
        run(&schedule(Some(2), 1), 3, note, |_| {}).unwrap();
        assert_eq!(order, [(0, 0), (0, 0), (1, 0), (1, 1), (1, 2), (2, 1), (2, 2), (2, 0)]);
    }

    fn rounds_of(seconds: u64, runs: Option<usize>, warmup: usize) -> usize {
        let rounds = run(&schedule(runs, warmup), 3, |_| Ok(Fake(seconds, true)), |_| {}).unwrap();
        assert!(rounds.finished.iter().all(|runs| runs.len() == rounds.finished[0].len()));
        rounds.finished[0].len()
    }

    #[test]
    fn short_commands_run_more_often_than_long_ones() {
        assert_eq!(rounds_of(0, None, 1), 30);
        assert_eq!(rounds_of(2, None, 1), 10);
        assert_eq!(rounds_of(2, None, 0), 10);
        assert_eq!(rounds_of(20, None, 1), 5);
        assert_eq!(rounds_of(600, None, 1), 3);
        assert_eq!(rounds_of(600, Some(2), 1), 2);
    }

    #[test]
    fn an_interruption_keeps_what_has_finished() {
        let mut left = 7;
        let mut run_one = |_| {
            left -= 1;
            if left == 0 { Err(TrialError::Interrupted) } else { Ok(Fake(1, true)) }
        };
        let rounds = run(&schedule(Some(9), 1), 3, &mut run_one, |_| {}).unwrap();
        let lengths: Vec<_> = rounds.finished.iter().map(Vec::len).collect();
        assert_eq!((lengths, rounds.ended), (vec![1, 2, 1], Ended::Interrupted));
    }

    #[test]
    fn a_command_that_fails_at_first_runs_once() {
        for warmup in [0, 1] {
            let rounds = run(&schedule(None, warmup), 3, |_| Ok(Fake(1, false)), |_| {}).unwrap();
            let lengths: Vec<_> = rounds.finished.iter().map(Vec::len).collect();
            assert_eq!((lengths, rounds.ended), (vec![1, 0, 0], Ended::FirstFailed));
        }
        let stubborn = Schedule { ignore_failure: true, ..schedule(Some(2), 1) };
        let rounds = run(&stubborn, 3, |_| Ok(Fake(1, false)), |_| {}).unwrap();
        assert_eq!((rounds.finished[2].len(), rounds.ended), (2, Ended::Complete));
    }

    #[test]
    fn progress_comes_to_one() {
        let mut last = 0.0;
        run(&schedule(Some(3), 1), 2, |_| Ok(Fake(1, true)), |done| last = done).unwrap();
        assert_eq!(last, 1.0);
    }

    #[test]
    fn what_cannot_be_run_is_an_error() {
        let missing = |_| Err::<Fake, _>(TrialError::Program(ProgramError::NotFound("x".into())));
        assert!(run(&schedule(None, 1), 2, missing, |_| {}).is_err());
    }
}
