//! The order of runs: warm-up, one run for the budget, then rounds. In each round every trial runs once,
//! each time in another order, so that drift of the machine affects all trials alike. They end as soon as no
//! trial needs another one.
//!
//! This module knows nothing about commands: a function runs them, which tests replace.

use super::{Finished, TrialError};
use pagetax_core::sequential::is_look;
use std::cell::Cell;

/// The minimum of rounds for slow commands. Fewer give no useful interval.
const ROUNDS_MIN: usize = 3;
/// The minimum of rounds if they take less than [`PATIENCE_NS`].
const ROUNDS_USUAL: usize = 5;
/// The maximum of rounds, which only commands of milliseconds reach.
const ROUNDS_MAX: usize = 210;
/// The longest time for [`ROUNDS_USUAL`]: ten minutes.
const PATIENCE_NS: u64 = 600_000_000_000;

/// The amount of runs.
#[derive(Debug, Clone, Default)]
pub struct Schedule {
    /// The number of rounds. If `None`, they end once the answer is settled, or after `time_ns`.
    pub runs: Option<usize>,
    /// The number of runs of the first trial that do not count.
    pub warmup: usize,
    /// The time that the rounds may take, if their number is not given.
    pub time_ns: u64,
    /// True to go on after the command has failed.
    pub ignore_failure: bool,
    /// True to run all trials of a round at a time. It is read before each round.
    pub side_by_side: Cell<bool>,
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
    /// The time was up, and some trial needed more rounds.
    TimeUp,
    /// The user interrupted them. Finished runs are kept.
    Interrupted,
    /// The command failed in its first run, and no other was started.
    FirstFailed,
    /// A server, its load or the state of memory failed after the first run; see [`Rounds::failure`].
    /// Finished runs are kept.
    ServiceFailed,
}

/// The runs of a schedule.
#[derive(Debug)]
pub struct Rounds<T> {
    /// The runs of each trial, in the order of the rounds.
    pub finished: Vec<Vec<T>>,
    /// The reason why there are not more.
    pub ended: Ended,
    /// The failure that ended them, if one did.
    pub failure: Option<String>,
    /// The trials of which the server or its load failed, and how. They have no runs.
    pub given_up: Vec<(usize, String)>,
}

/// A run, as far as the schedule depends on it.
pub trait Ran {
    /// Returns the time that it took of the schedule: its preparation, the run, and its evaluation.
    fn step_ns(&self) -> u64;
    /// Returns true if it ended with status 0.
    fn success(&self) -> bool;
}

impl Ran for Finished {
    fn step_ns(&self) -> u64 {
        self.step_ns
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

/// Runs the whole schedule. An interruption keeps the finished runs; any other error ends it. `run_steps`
/// runs the steps that it gets at a time. `needs_more` returns which trials need more rounds; it is asked
/// after the first round, which shows the pages of each trial, and after each round that is a look. It
/// returns an answer for each trial that has runs.
pub fn run<T: Ran>(
    schedule: &Schedule,
    trials: usize,
    mut run_steps: impl FnMut(&[Step]) -> Result<Vec<T>, TrialError>,
    mut needs_more: impl FnMut(&[Vec<T>]) -> Vec<bool>,
    mut progress: impl FnMut(f64),
) -> Result<Rounds<T>, TrialError> {
    let finished = (0..trials).map(|_| Vec::new()).collect();
    let mut rounds =
        Rounds { finished, ended: Ended::Complete, failure: None, given_up: Vec::new() };
    let mut first = true;
    let mut total = 0;
    for before in 0..=schedule.warmup {
        let budget = before == schedule.warmup;
        let ran = match run_steps(&[Step { trial: 0, round: 0, first, budget }]) {
            Err(TrialError::Interrupted) if !first => return Ok(interrupted(rounds)),
            other => other?,
        };
        let Some(ran) = ran.into_iter().next() else { continue };
        if first && !ran.success() && !schedule.ignore_failure {
            rounds.finished[0].push(ran);
            return Ok(Rounds { ended: Ended::FirstFailed, ..rounds });
        }
        (first, total) = (false, rounds_for(schedule, ran.step_ns() * trials as u64));
    }
    let (mut remaining, mut round, mut spent_ns) = (vec![true; trials], 0, 0);
    while round < total {
        let mut round_ns = 0;
        let order = (0..trials).map(|place| (round + place) % trials);
        let steps: Vec<Step> = order
            .filter(|trial| remaining[*trial])
            .map(|trial| Step { trial, round: round + 1, first, budget: false })
            .collect();
        let at_a_time = if schedule.side_by_side.get() { steps.len() } else { 1 };
        for steps in steps.chunks(at_a_time) {
            let ran = match run_steps(steps) {
                Err(TrialError::Interrupted) => return Ok(interrupted(rounds)),
                // Others may still run: only this change of the server failed.
                Err(TrialError::Service(why)) if steps.len() == 1 && steps[0].trial > 0 => {
                    let trial = steps[0].trial;
                    rounds.finished[trial].clear();
                    rounds.given_up.push((trial, why));
                    remaining[trial] = false;
                    continue;
                }
                Err(TrialError::Service(why) | TrialError::State(why)) => {
                    return Ok(Rounds {
                        ended: Ended::ServiceFailed,
                        failure: Some(why),
                        ..rounds
                    });
                }
                other => other?,
            };
            for (step, ran) in steps.iter().zip(ran) {
                round_ns += ran.step_ns();
                rounds.finished[step.trial].push(ran);
            }
        }
        (round, spent_ns) = (round + 1, spent_ns + round_ns);
        if schedule.runs.is_none() {
            if round == 1 || is_look(round) {
                let needed = needs_more(&rounds.finished);
                let with_runs = remaining.iter_mut().zip(&rounds.finished);
                let with_runs = with_runs.filter(|(_, runs)| !runs.is_empty());
                with_runs.zip(needed).for_each(|((still, _), more)| *still &= more);
            }
            // Trials that need no more rounds make the next ones shorter.
            let mean_ns = spent_ns / round as u64;
            let left_ns = schedule.time_ns.saturating_sub(spent_ns);
            let fitting = round + usize::try_from(left_ns / round_ns.max(1)).unwrap_or(ROUNDS_MAX);
            total = fitting.clamp(rounds_for(schedule, mean_ns).min(ROUNDS_USUAL), ROUNDS_MAX);
            total = if remaining.contains(&true) { total } else { round };
        }
        progress((round as f64 / total as f64).min(1.0));
    }
    let is_open = schedule.runs.is_none() && remaining.contains(&true);
    Ok(if is_open { Rounds { ended: Ended::TimeUp, ..rounds } } else { rounds })
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
        fn step_ns(&self) -> u64 {
            self.0 * 1_000_000_000
        }

        fn success(&self) -> bool {
            self.1
        }
    }

    fn schedule(runs: Option<usize>, warmup: usize) -> Schedule {
        Schedule { runs, warmup, time_ns: 60_000_000_000, ..Schedule::default() }
    }

    fn all(finished: &[Vec<Fake>]) -> Vec<bool> {
        vec![true; finished.len()]
    }

    #[test]
    fn rounds_end_once_no_trial_needs_more() {
        let mut asked = Vec::new();
        let needs_more = |finished: &[Vec<Fake>]| {
            let done: Vec<usize> = finished.iter().map(Vec::len).collect();
            let needed = if done[0] < 8 { vec![true, false, true] } else { vec![false; 3] };
            asked.push(done);
            needed
        };
        let ran = |steps: &[Step]| Ok(steps.iter().map(|_| Fake(1, true)).collect());
        let rounds = run(&schedule(None, 1), 3, ran, needs_more, |_| {}).unwrap();
        let lengths: Vec<_> = rounds.finished.iter().map(Vec::len).collect();
        assert_eq!((lengths, rounds.ended), (vec![8, 1, 8], Ended::Complete));
        assert_eq!(asked, [[1, 1, 1], [3, 1, 3], [5, 1, 5], [8, 1, 8]]);
        let none = |finished: &[Vec<Fake>]| vec![false; finished.len()];
        let fixed = run(&schedule(Some(9), 1), 3, ran, none, |_| {}).unwrap();
        assert_eq!(fixed.finished[2].len(), 9, "a given number is kept");
    }

    #[test]
    fn every_round_begins_with_another_trial() {
        let mut order = Vec::new();
        let note = |steps: &[Step]| {
            order.extend(steps.iter().map(|step| (step.round, step.trial)));
            Ok(vec![Fake(1, true)])
        };
        run(&schedule(Some(2), 1), 3, note, all, |_| {}).unwrap();
        assert_eq!(order, [(0, 0), (0, 0), (1, 0), (1, 1), (1, 2), (2, 1), (2, 2), (2, 0)]);
    }

    #[test]
    fn side_by_side_all_trials_of_a_round_run_at_a_time() {
        let mut groups = Vec::new();
        let note = |steps: &[Step]| {
            groups.push(steps.iter().map(|step| step.trial).collect::<Vec<_>>());
            Ok(steps.iter().map(|_| Fake(1, true)).collect())
        };
        let schedule = Schedule { side_by_side: Cell::new(true), ..schedule(Some(2), 0) };
        let rounds = run(&schedule, 3, note, all, |_| {}).unwrap();
        assert_eq!(groups, [vec![0], vec![0, 1, 2], vec![1, 2, 0]]);
        assert!(rounds.finished.iter().all(|runs| runs.len() == 2));
    }

    fn rounds_of(seconds: u64, runs: Option<usize>, warmup: usize) -> usize {
        let rounds =
            run(&schedule(runs, warmup), 3, |_| Ok(vec![Fake(seconds, true)]), all, |_| {})
                .unwrap();
        assert!(rounds.finished.iter().all(|runs| runs.len() == rounds.finished[0].len()));
        rounds.finished[0].len()
    }

    #[test]
    fn short_commands_run_more_often_than_long_ones() {
        assert_eq!(rounds_of(0, None, 1), 210);
        assert_eq!(rounds_of(2, None, 1), 10);
        assert_eq!(rounds_of(2, None, 0), 10);
        assert_eq!(rounds_of(20, None, 1), 5);
        assert_eq!(rounds_of(600, None, 1), 3);
        assert_eq!(rounds_of(600, Some(2), 1), 2);
    }

    #[test]
    fn a_server_that_fails_in_one_trial_leaves_the_others() {
        let run_one = |steps: &[Step]| match (steps[0].trial, steps[0].round) {
            (1, 2) => Err(TrialError::Service("it died".into())),
            _ => Ok(vec![Fake(1, true)]),
        };
        let needs_more = |finished: &[Vec<Fake>]| {
            let with_runs = finished.iter().filter(|runs| !runs.is_empty());
            with_runs.map(|runs| runs.len() < 5).collect()
        };
        let rounds = run(&schedule(None, 0), 3, run_one, needs_more, |_| {}).unwrap();
        let lengths: Vec<_> = rounds.finished.iter().map(Vec::len).collect();
        assert_eq!((lengths, rounds.ended), (vec![5, 0, 5], Ended::Complete));
        assert_eq!(rounds.given_up, [(1, "it died".to_string())]);
        let always = |steps: &[Step]| match steps[0].round {
            0 => Ok(vec![Fake(1, true)]),
            _ => Err::<Vec<Fake>, _>(TrialError::Service("it died".into())),
        };
        let rounds = run(&schedule(None, 0), 3, always, all, |_| {}).unwrap();
        assert_eq!(rounds.ended, Ended::ServiceFailed, "so does the command as it is");
    }

    #[test]
    fn an_interruption_keeps_what_has_finished() {
        let mut left = 7;
        let run_one = |_: &[Step]| {
            left -= 1;
            if left == 0 { Err(TrialError::Interrupted) } else { Ok(vec![Fake(1, true)]) }
        };
        let rounds = run(&schedule(Some(9), 1), 3, run_one, all, |_| {}).unwrap();
        let lengths: Vec<_> = rounds.finished.iter().map(Vec::len).collect();
        assert_eq!((lengths, rounds.ended), (vec![1, 2, 1], Ended::Interrupted));
    }

    #[test]
    fn a_command_that_fails_at_first_runs_once() {
        for warmup in [0, 1] {
            let rounds =
                run(&schedule(None, warmup), 3, |_| Ok(vec![Fake(1, false)]), all, |_| {}).unwrap();
            let lengths: Vec<_> = rounds.finished.iter().map(Vec::len).collect();
            assert_eq!((lengths, rounds.ended), (vec![1, 0, 0], Ended::FirstFailed));
        }
        let stubborn = Schedule { ignore_failure: true, ..schedule(Some(2), 1) };
        let rounds = run(&stubborn, 3, |_| Ok(vec![Fake(1, false)]), all, |_| {}).unwrap();
        assert_eq!((rounds.finished[2].len(), rounds.ended), (2, Ended::Complete));
    }

    #[test]
    fn progress_comes_to_one() {
        let mut last = 0.0;
        run(&schedule(Some(3), 1), 2, |_| Ok(vec![Fake(1, true)]), all, |done| last = done)
            .unwrap();
        assert_eq!(last, 1.0);
    }

    #[test]
    fn what_cannot_be_run_is_an_error() {
        let missing = |_: &[Step]| {
            Err::<Vec<Fake>, _>(TrialError::Program(ProgramError::NotFound("x".into())))
        };
        assert!(run(&schedule(None, 1), 2, missing, all, |_| {}).is_err());
    }
}
