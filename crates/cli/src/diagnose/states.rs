//! `pagetax diagnose --when STATES`: the same trials in other states of memory.

use super::scratch::Scratch;
use super::steps::Steps;
use super::{Args, budget_of, trials_of};
use crate::output::{self, progress::Progress};
use anyhow::Result;
use pagetax_core::budget::Budget;
use pagetax_core::cause::Account;
use pagetax_core::diagnosis::{
    AS_IS, Basis, Growth, MemoryState, StateTrials, Trial, undecided_in_state,
};
use pagetax_core::sequential::Stopping;
use pagetax_host::measure::trial::rounds::{self, Ended, Schedule, Step};
use pagetax_host::measure::trial::{Finished, Prepared, TrialCommand, TrialError};
use pagetax_host::pages::Recipe;
use std::cell::Cell;
use std::time::Duration;

/// A cause that grows by less than this share of the command's CPU time is not listed.
const GROWTH_MIN: f64 = 0.02;
/// The trials on fresh memory, which those in other states follow.
pub struct AfterFresh<'a> {
    pub args: &'a Args,
    pub recipes: &'a [Recipe],
    pub launch: &'a TrialCommand,
    pub trials: &'a [Trial],
    pub schedule: &'a Schedule,
    pub basis: Basis,
}

impl AfterFresh<'_> {
    /// Runs the trials in each state that was asked for. Returns true beside them if it was interrupted.
    pub fn run_all(&self, states: &[MemoryState]) -> Result<(Vec<StateTrials>, bool)> {
        let mut all: Vec<StateTrials> = Vec::new();
        for state in states.iter().filter(|state| **state != MemoryState::Fresh) {
            if all.iter().any(|done| done.state == *state) {
                continue;
            }
            let (ran, is_interrupted) = self.run(*state, self.recipes, self.schedule)?;
            all.push(ran);
            if is_interrupted {
                return Ok((all, true));
            }
        }
        Ok((all, false))
    }

    fn run(
        &self,
        state: MemoryState,
        recipes: &[Recipe],
        schedule: &Schedule,
    ) -> Result<(StateTrials, bool)> {
        let none = |why| StateTrials { state, why_not: Some(why), ..StateTrials::default() };
        output::note(&format!("diagnose: trials with memory {state}"));
        let mut prepared = match Prepared::make(state, self.needed_bytes()) {
            Ok(prepared) => prepared,
            Err(why) => return Ok((none(why), false)),
        };
        let schedule = Schedule { warmup: 0, side_by_side: Cell::new(false), ..schedule.clone() };
        let basis = Cell::new(self.basis);
        let scratch = Scratch::new(self.args.outputs.as_ref().map(|dir| dir.join(state.name())))?;
        let launch = self.launch.clone();
        let mut steps = Steps::new(self.args, recipes, launch, scratch, (&schedule, &basis));
        let mut progress = Progress::start(state.name());
        let rounds = rounds::run(
            &schedule,
            recipes.len(),
            |batch| self.run_step(&mut prepared, &mut steps, recipes, batch),
            |finished| {
                let trials = trials_of(recipes, finished, Stopping::Sequential, basis.get());
                undecided_in_state(&trials)
            },
            |done| progress.update(done),
        );
        drop(progress);
        let rounds = match rounds {
            Err(TrialError::Interrupted) => return Ok((none("interrupted".into()), true)),
            Err(error) => return Ok((none(error.to_string()), false)),
            Ok(rounds) => rounds,
        };
        let stopping = match (rounds.ended, schedule.runs) {
            (Ended::TimeUp, _) => Stopping::TimeUp,
            (_, Some(_)) => Stopping::Fixed,
            (_, None) => Stopping::Sequential,
        };
        let trials = trials_of(recipes, &rounds.finished, stopping, basis.get());
        if let Some(why) = self.ended_otherwise(&trials) {
            return Ok((none(why), false));
        }
        let mut ran = StateTrials {
            state,
            how: prepared.how(),
            why_not: rounds.failure.clone(),
            basis: basis.get(),
            free_blocks: std::mem::take(&mut prepared.free_blocks),
            trials,
            ..StateTrials::default()
        };
        let is_interrupted = rounds.ended == Ended::Interrupted;
        if !is_interrupted {
            self.explain_loss(&mut ran, &mut prepared, &mut steps, recipes);
        }
        Ok((ran, is_interrupted))
    }

    fn run_step(
        &self,
        prepared: &mut Prepared,
        steps: &mut Steps<'_>,
        recipes: &[Recipe],
        batch: &[Step],
    ) -> Result<Vec<Finished>, TrialError> {
        let trial = batch.first().map_or(0, |step| step.trial);
        let usual = Duration::from_nanos(self.usual_ns(&recipes[trial].mechanism.name()));
        prepared.before_run(&mut steps.launch, usual)?;
        if steps.launch.state != MemoryState::Found || steps.last == Some(trial) {
            return steps.run(batch);
        }
        // In practice a program runs again and again, on the memory that its last run has left. After a trial
        // on base pages, one on large pages would have to wait for blocks that the hypervisor took back.
        let first = steps.run(batch)?;
        let mut second = steps.run(batch)?;
        for (second, first) in second.iter_mut().zip(first) {
            second.step_ns += first.step_ns;
        }
        Ok(second)
    }

    /// Returns the memory that the command as it is needs. Large pages may need more.
    fn needed_bytes(&self) -> u64 {
        let as_is = self.trials.iter().find(|trial| trial.name == AS_IS);
        as_is.and_then(|trial| trial.peak_resident_bytes).unwrap_or(self.launch.memory_bytes)
    }

    /// Returns the time of a trial on fresh memory.
    fn usual_ns(&self, name: &str) -> u64 {
        let named = |name: &str| self.trials.iter().find(|trial| trial.name == name);
        named(name).or_else(|| named(AS_IS)).map_or(0, |trial| trial.median_ns)
    }

    /// Says how the command as it is ended, if that differs from fresh memory: then nothing compares.
    fn ended_otherwise(&self, trials: &[Trial]) -> Option<String> {
        let exit = |trials: &[Trial]| Some(trials.iter().find(|t| t.name == AS_IS)?.exit);
        let (usual, here) = (exit(self.trials)?, exit(trials)?);
        (usual != here).then(|| format!("the command as it is ended in another way: {here}"))
    }

    /// Runs the trial that loses most once more, and notes the causes that take longer in it.
    fn explain_loss(
        &self,
        ran: &mut StateTrials,
        prepared: &mut Prepared,
        steps: &mut Steps<'_>,
        recipes: &[Recipe],
    ) {
        let Some(loser) = ran.worst().map(|trial| trial.name.clone()) else { return };
        let Some(index) = recipes.iter().position(|r| r.mechanism.name() == loser) else { return };
        let Some(before) = self.budget(steps) else { return };
        let step = Step { trial: index, round: 0, first: false, budget: true };
        if self.run_step(prepared, steps, recipes, &[step]).is_err() {
            // The loss is shown; only its cause is not.
            return;
        }
        let Some(after) = self.budget(steps) else { return };
        ran.growth = growth(&before, &after);
        ran.loser = Some(loser);
    }

    /// Returns the budget of the run that was watched last.
    fn budget(&self, steps: &mut Steps<'_>) -> Option<Budget> {
        let (finished, watched) = steps.watched.take()?;
        Some(budget_of(&finished, &watched, self.trials, None))
    }
}

/// Returns the causes of CPU time that take longer in one run than in another, the largest first.
fn growth(before: &Budget, after: &Budget) -> Vec<Growth> {
    let least_ns = (before.total_ns(Account::Cpu) as f64 * GROWTH_MIN) as u64;
    let ns = |budget: &Budget, id: &str| budget.row(id).and_then(|row| row.ns).unwrap_or(0);
    let of =
        |id: &str| Growth { id: id.into(), before_ns: ns(before, id), after_ns: ns(after, id) };
    let causes = Account::Cpu.causes().filter(|cause| cause.is_tax);
    let mut all: Vec<Growth> = causes
        .map(|cause| of(cause.id))
        .filter(|growth| growth.after_ns > growth.before_ns + least_ns)
        .collect();
    all.sort_by_key(|growth| std::cmp::Reverse(growth.after_ns - growth.before_ns));
    all
}
