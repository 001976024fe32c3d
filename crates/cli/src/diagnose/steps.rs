//! The runs of a diagnosis: what is done before, beside and after each.

use super::Args;
use super::scratch::{Hashes, Scratch};
use crate::output;
use pagetax_core::diagnosis::{Basis, Occupation};
use pagetax_core::units::Bytes;
use pagetax_host::launch::program::Program;
use pagetax_host::measure::budget::{Watch, Watched};
use pagetax_host::measure::trial::rounds::{Schedule, Step};
use pagetax_host::measure::trial::{
    self, Finished, Outputs, Starts, TrialCommand, TrialError, needs_probe, occupation,
};
use pagetax_host::pages::{Mechanism, Recipe, text};
use std::cell::Cell;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// The runs of a diagnosis, and what was learned from them so far.
pub struct Steps<'a> {
    args: &'a Args,
    recipes: &'a [Recipe],
    schedule: &'a Schedule,
    basis: &'a Cell<Basis>,
    starts: Starts,
    code: Code,
    pub launch: TrialCommand,
    pub scratch: Scratch,
    pub hashes: Hashes,
    /// The run for the budget.
    pub watched: Option<(Finished, Watched)>,
    /// The trial that ran last.
    pub last: Option<usize>,
}

impl<'a> Steps<'a> {
    /// Makes runs that decide on the schedule and the basis after the run for the budget.
    pub fn new(
        args: &'a Args,
        recipes: &'a [Recipe],
        launch: TrialCommand,
        scratch: Scratch,
        (schedule, basis): (&'a Schedule, &'a Cell<Basis>),
    ) -> Steps<'a> {
        let (starts, code) = (Starts::new(recipes, &launch), Code::of(&launch.argv));
        let hashes = Hashes::new(recipes.len());
        Steps {
            args,
            recipes,
            schedule,
            basis,
            starts,
            code,
            launch,
            scratch,
            hashes,
            watched: None,
            last: None,
        }
    }

    /// Runs steps at a time, usually one.
    pub fn run(&mut self, steps: &[Step]) -> Result<Vec<Finished>, TrialError> {
        let begun = Instant::now();
        let outputs: Vec<_> = steps.iter().map(|step| self.outputs(step)).collect();
        let start_ns = self.starts_of(steps)?;
        let mut finished = self.run_commands(steps, &outputs)?;
        self.last = steps.last().map(|step| step.trial);
        for ((step, finished), start_ns) in steps.iter().zip(&mut finished).zip(start_ns) {
            finished.start_ns = start_ns;
            self.launch.learn(finished);
            if step.round == 0 {
                self.starts.learn(finished);
            }
        }
        for (step, outputs) in steps.iter().zip(&outputs) {
            let noted = self.hashes.note(*step, outputs);
            noted.map_err(|e| TrialError::System("read the output", e))?;
            if step.first && self.args.show_output {
                output::note(&self.scratch.first_output());
            }
            self.scratch.discard(outputs);
        }
        let step_ns = begun.elapsed().as_nanos() as u64 / steps.len() as u64;
        finished.iter_mut().for_each(|finished| finished.step_ns = step_ns);
        Ok(finished)
    }

    fn recipe(&self, step: &Step) -> &'a Recipe {
        &self.recipes[step.trial]
    }

    fn outputs(&mut self, step: &Step) -> Outputs {
        let name = self.recipe(step).mechanism.name();
        self.scratch.outputs(&name, step.round)
    }

    fn starts_of(&self, steps: &[Step]) -> Result<Vec<Option<u64>>, TrialError> {
        let basis = self.basis.get();
        let of = |step: &Step| match step.round {
            0 => Ok(None),
            _ => self.starts.measure(self.recipe(step), basis, &self.launch),
        };
        steps.iter().map(of).collect()
    }

    fn run_commands(
        &mut self,
        steps: &[Step],
        outputs: &[Outputs],
    ) -> Result<Vec<Finished>, TrialError> {
        let ([step], [outputs]) = (steps, outputs) else {
            let planned: Vec<_> = steps.iter().map(|step| self.recipe(step)).zip(outputs).collect();
            return trial::run_side_by_side(&self.launch, &planned);
        };
        let (recipe, mut watch) = (self.recipe(step), step.budget.then(Watch::new));
        self.code.settle_for(&recipe.mechanism);
        let finished = trial::run(&self.launch, recipe, outputs, watch.as_mut())?;
        if let Some(watch) = watch {
            self.learn_occupation(&finished, watch.finish());
        }
        Ok(vec![finished])
    }

    /// Decides how the trials run, and what they are compared by.
    fn learn_occupation(&mut self, finished: &Finished, watched: Watched) {
        let seen = occupation(finished, &watched);
        self.launch.learn(finished);
        let shared = self.args.side_by_side && can_share(&self.launch, seen, self.recipes.len());
        self.schedule.side_by_side.set(shared);
        self.launch.has_probe = !shared && !self.args.alone && needs_probe(&self.launch, seen);
        if !self.basis.get().is_load() {
            self.basis.set(match shared || self.launch.has_probe {
                true => Basis::Cpu,
                false => seen.unwrap_or_default().basis(),
            });
        }
        self.watched = Some((finished.clone(), watched));
    }
}

/// The command's code in the page cache, which a trial leaves to the next one.
pub struct Code {
    pub files: Vec<PathBuf>,
    last: Option<Arc<dyn Mechanism>>,
}

impl Code {
    /// Files whose code could lie on huge pages.
    pub fn of(argv: &[OsString]) -> Code {
        let program = argv.first().and_then(|name| Program::find(name).ok());
        let files = program.map(|program| program.files()).unwrap_or_default();
        let files = files.into_iter().filter(|path| text::has_code(path)).collect();
        Code { files, last: None }
    }

    /// Undoes what the trial before this one left in the page cache, unless both are of one mechanism.
    fn settle_for(&mut self, mechanism: &Arc<dyn Mechanism>) {
        let last = self.last.replace(mechanism.clone());
        if let Some(last) = last.filter(|last| last.name() != mechanism.name()) {
            last.undo(&self.files);
        }
    }
}

/// Returns true if so many runs of the command can share a CPU; else says why each runs alone.
fn can_share(command: &TrialCommand, seen: Option<Occupation>, runs: usize) -> bool {
    let why = match seen {
        None => "it cannot be seen whether the command is one task".into(),
        Some(seen) if !seen.can_share() => {
            "the command waits, or has several tasks at a time".into()
        }
        Some(_) if !command.fits(runs) => {
            format!("{runs} runs of {} each leave too little memory", Bytes(command.memory_bytes))
        }
        Some(_) => return true,
    };
    output::note(&format!("trials run one after another: {why}"));
    false
}
