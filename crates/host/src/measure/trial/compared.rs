//! The parts of a fair comparison of runs: what a command does with its time, whether a probe shares its CPU,
//! and the start of our own programs.

use super::{Finished, TrialCommand, TrialError, run, took};
use crate::measure::budget::Watched;
use crate::measure::environment::is_guest;
use crate::measure::stacks::TaskState;
use crate::pages::Recipe;
use crate::procfs::Root;
use pagetax_core::diagnosis::{Basis, Occupation, Trial};
use pagetax_core::exit::Exit;
use pagetax_core::stats::median;

/// For shorter commands, the start of our own programs is measured beside each run and subtracted.
const SHORT_NS: u64 = 500_000_000;

/// Returns what a command did with its time while it was watched. The basis is chosen by it, before the
/// rounds, so that no result depends on which one is more favourable.
pub fn occupation(run: &Finished, watched: &Watched) -> Option<Occupation> {
    let line = watched.profile.line.as_ref().ok()?;
    Some(Occupation {
        running_ns: line.ns(TaskState::Running),
        queued_ns: line.ns(TaskState::Runnable),
        waiting_ns: line.waiting_ns(),
        cpu_ns: run.usage.user_ns + run.usage.kernel_ns,
    })
}

/// Returns true if a probe beside the runs would help: the speed of a virtual machine varies.
pub fn needs_probe(command: &TrialCommand, seen: Option<Occupation>) -> bool {
    let is_guest = is_guest(&Root::default());
    command.service.is_none() && is_guest && seen.is_some_and(Occupation::can_have_probe)
}

/// The starts of short commands: a program that does nothing, under the same recipe.
#[derive(Debug)]
pub struct Starts {
    /// None if all trials start the command itself.
    nothing: Option<TrialCommand>,
    is_short: bool,
}

impl Starts {
    /// Starts to learn whether these runs need it.
    pub fn new(recipes: &[Recipe], launch: &TrialCommand) -> Starts {
        // The load of a server does not see its start.
        let differ = launch.service.is_none() && recipes.iter().any(|r| !r.wrapper.is_empty());
        let (argv, tunables) = (vec!["true".into()], std::env::var("GLIBC_TUNABLES").ok());
        let nothing = TrialCommand { argv, tunables, ..TrialCommand::default() };
        Starts { nothing: differ.then_some(nothing), is_short: false }
    }

    /// Notes the length of the command in a run before the rounds.
    pub fn learn(&mut self, finished: &Finished) {
        self.is_short = finished.wall_ns < SHORT_NS;
    }

    /// Returns the start just before a run, if the command is short.
    pub fn measure(
        &self,
        recipe: &Recipe,
        basis: Basis,
        launch: &TrialCommand,
    ) -> Result<Option<u64>, TrialError> {
        let nothing = self.nothing.as_ref().filter(|_| self.is_short);
        let (spared, has_probe) = (launch.spared, launch.has_probe);
        let nothing = nothing.map(|command| TrialCommand { spared, has_probe, ..command.clone() });
        let started = nothing.map(|command| run(&command, recipe, &Default::default(), None));
        Ok(started.transpose()?.map(|finished| match basis {
            Basis::Elapsed => finished.wall_ns,
            _ => finished.usage.user_ns + finished.usage.kernel_ns,
        }))
    }
}

/// Returns the runs of one recipe as a trial, which is not compared yet.
pub fn trial_of(recipe: &Recipe, runs: &[Finished]) -> Trial {
    let column = |of: fn(&Finished) -> u64| runs.iter().map(of).collect::<Vec<_>>();
    let peaks: Vec<u64> = runs.iter().filter_map(|r| r.peak?.known_resident_bytes()).collect();
    let failed = runs.iter().map(|r| r.exit).find(|exit| !exit.success());
    Trial {
        name: recipe.mechanism.name(),
        page_bytes: recipe.mechanism.page_size().map(|size| size.bytes()),
        mechanism: recipe.words(),
        runs_ns: column(|r| r.wall_ns),
        median_ns: median(&column(|r| r.wall_ns)).unwrap_or(0),
        user_ns: column(|r| r.usage.user_ns),
        kernel_ns: column(|r| r.usage.kernel_ns),
        probe_ns: probes(runs),
        steady_ns: Vec::new(),
        fault_counts: column(|r| r.usage.minor_fault_count + r.usage.major_fault_count),
        start_ns: runs.iter().filter_map(|run| run.start_ns).collect(),
        loads: runs.iter().filter_map(|run| Some(run.load?.0)).collect(),
        speedup: None,
        speedup_over_base: None,
        took: took(&*recipe.mechanism, runs),
        peak_resident_bytes: median(&peaks),
        untouched_bytes: None,
        exit: failed.unwrap_or(Exit::Code(0)),
    }
}

/// Returns what the probe saw during each run; nothing if there was none.
fn probes(runs: &[Finished]) -> Vec<Option<u64>> {
    let seen: Vec<Option<u64>> = runs.iter().map(|run| run.probe_ns).collect();
    if seen.iter().all(Option::is_none) { Vec::new() } else { seen }
}
