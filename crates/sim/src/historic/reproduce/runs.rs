//! Runs what figures are taken from: each run once a seed, over all cores.
//!
//! Invariant: the figures depend on names and seeds alone, not on how many cores there are. Where a
//! setup takes the least of several runs, all figures of a group are those of its fastest run.

use super::figure::Figure;
use super::published::Setup;
use super::{OnProgress, ReproduceError};
use crate::historic::machine::SimMachine;
use crate::models;
use pagetax_core::job::Job;
use pagetax_core::machine::{Machine, RunError};
use pagetax_core::report::{Recording, Run};
use pagetax_core::units::Nanos;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};

/// FigureValues by run and figure: a value for each seed or group of seeds, or why there is none.
pub type FigureValues = BTreeMap<String, BTreeMap<Figure, Vec<Result<f64, String>>>>;

/// Runs each setup with seeds from 1 on, and takes the wanted figures.
///
/// # Errors
/// Models and jobs that there are not, or that do not go together.
pub fn run(
    setups: &BTreeMap<String, Setup>,
    wanted: &BTreeMap<String, BTreeSet<Figure>>,
    seeds: u64,
    on_progress: OnProgress<'_>,
) -> Result<FigureValues, ReproduceError> {
    let setups: BTreeMap<&String, &Setup> =
        wanted.keys().filter_map(|name| setups.get_key_value(name)).collect();
    let simulations = simulations(&setups, wanted, seeds);
    let runs: Vec<(usize, u64)> = simulations
        .iter()
        .enumerate()
        .flat_map(|(index, simulation)| (1..=simulation.seeds).map(move |seed| (index, seed)))
        .collect();
    let (next, ended) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let work = || {
        let mut done = Vec::new();
        // The seeds of a run follow each other: its machine is booted once for all that come here.
        let mut ready: Option<(usize, Ready)> = None;
        while let Some((index, seed)) = runs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let Simulation { setup, figures, .. } = &simulations[*index];
            let known = ready.take().filter(|(known, _)| known == index);
            let one = known.map_or_else(|| Ready::new(setup), |(_, ready)| Ok(ready));
            let ran = one.and_then(|one| ready.insert((*index, one)).1.run(*seed));
            let outcome = ran.map(|(run, ended_early)| RunOutcome {
                ended_early,
                wall_ns: run.wall_ns,
                figures: figures.iter().map(|&f| (f.clone(), f.of(&run, ended_early))).collect(),
            });
            done.push((*index, *seed, outcome));
            let ended_count = ended.fetch_add(1, Ordering::Relaxed) + 1;
            on_progress(ended_count as f64 / runs.len() as f64);
        }
        done
    };
    let workers = std::thread::available_parallelism().map_or(1, usize::from).min(runs.len());
    let mut done: Vec<_> = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        handles.into_iter().flat_map(|handle| handle.join().expect("no panic in a run")).collect()
    });
    done.sort_by_key(|(index, seed, _)| (*index, *seed));
    let mut outcomes: Vec<Vec<RunOutcome>> = simulations.iter().map(|_| Vec::new()).collect();
    for (index, _, outcome) in done {
        outcomes[index].push(outcome?);
    }
    let mut figures = FigureValues::new();
    for (simulation, outcomes) in simulations.iter().zip(&outcomes) {
        for name in &simulation.names {
            let least_of = setups[name].least_of.get();
            let used = seeds_used(seeds, least_of) as usize;
            let fastest = fastest(&outcomes[..used], least_of as usize);
            figures.insert((*name).clone(), in_columns(fastest));
        }
    }
    Ok(figures)
}

/// A simulation that serves all runs that differ only in the choice of the fastest.
struct Simulation<'a> {
    setup: &'a Setup,
    names: Vec<&'a String>,
    figures: BTreeSet<&'a Figure>,
    seeds: u64,
}

fn simulations<'a>(
    setups: &BTreeMap<&'a String, &'a Setup>,
    wanted: &'a BTreeMap<String, BTreeSet<Figure>>,
    seeds: u64,
) -> Vec<Simulation<'a>> {
    let mut simulations: Vec<Simulation<'a>> = Vec::new();
    for (name, setup) in setups {
        let seeds = seeds_used(seeds, setup.least_of.get());
        let known = simulations.iter_mut().find(|known| known.setup.is_same_run(setup));
        match known {
            None => {
                let (names, figures) = (vec![*name], wanted[*name].iter().collect());
                simulations.push(Simulation { setup, names, figures, seeds });
            }
            Some(known) => {
                known.names.push(name);
                known.figures.extend(&wanted[*name]);
                known.seeds = known.seeds.max(seeds);
            }
        }
    }
    simulations
}

/// Seeds that fill whole groups; all, if there is not even one group.
fn seeds_used(seeds: u64, group: u64) -> u64 {
    if seeds < group { seeds } else { seeds - seeds % group }
}

/// The figures of one run.
struct RunOutcome {
    ended_early: bool,
    wall_ns: u64,
    figures: Vec<(Figure, Result<f64, String>)>,
}

/// Returns the run with the least elapsed time of each group of consecutive runs; one that ended early only
/// if all of them did.
fn fastest(outcomes: &[RunOutcome], group: usize) -> Vec<&RunOutcome> {
    let least = |runs: &'_ [RunOutcome]| -> Option<usize> {
        (0..runs.len()).min_by_key(|index| (runs[*index].ended_early, runs[*index].wall_ns))
    };
    let groups = outcomes.chunks(group);
    groups.filter_map(|runs| least(runs).map(|index| &runs[index])).collect()
}

fn in_columns(outcomes: Vec<&RunOutcome>) -> BTreeMap<Figure, Vec<Result<f64, String>>> {
    let mut columns: BTreeMap<Figure, Vec<Result<f64, String>>> = BTreeMap::new();
    for (figure, value) in outcomes.into_iter().flat_map(|outcome| &outcome.figures) {
        columns.entry(figure.clone()).or_default().push(value.clone());
    }
    columns
}

/// A machine that has booted, and the job for it.
struct Ready<'a> {
    setup: &'a Setup,
    machine: SimMachine,
    job: Job,
}

impl<'a> Ready<'a> {
    fn new(setup: &'a Setup) -> Result<Self, ReproduceError> {
        let mut model = models::find(&setup.machine)?;
        for (path, value) in &setup.set {
            let (table, key) = path.split_once('.').unwrap_or((path, ""));
            model.set(table, key, value.clone())?;
        }
        let machine = SimMachine::new(model)?;
        let job = Job::builtin(&setup.job).ok_or_else(|| ReproduceError::Data {
            file: setup.machine.clone(),
            problem: format!("there is no built-in job `{}`", setup.job),
        })?;
        Ok(Ready { setup, machine, job })
    }

    /// Runs a simulation. Returns its report, and true if it ended early.
    fn run(&mut self, seed: u64) -> Result<(Run, bool), ReproduceError> {
        let spec = self.machine.spec();
        let mut plan = self.job.resolve(&self.setup.params, &spec, Some(seed))?;
        if let Some(text) = &self.setup.interval {
            let interval = text.parse::<Nanos>().map_err(|error| ReproduceError::Data {
                file: self.setup.machine.clone(),
                problem: error.to_string(),
            })?;
            plan.measure.interval = Some(interval);
        }
        let mut recording = Recording::new(&plan, &spec);
        let end = self.machine.run(&plan, &mut recording);
        if let Err(RunError::Unmet(unmet)) = end {
            return Err(ReproduceError::Run(RunError::Unmet(unmet)));
        }
        Ok((recording.finish(), end.is_err()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(wall_ns: u64, faults: f64) -> RunOutcome {
        let figure = Figure { name: "faults".into(), args: Vec::new() };
        RunOutcome { ended_early: false, wall_ns, figures: vec![(figure, Ok(faults))] }
    }

    #[test]
    fn the_fastest_run_of_a_group_gives_all_its_figures() {
        let mut outcomes = vec![outcome(5, 1.0), outcome(3, 9.0), outcome(4, 2.0), outcome(7, 8.0)];
        outcomes.extend([outcome(6, 4.0), outcome(9, 0.0)]);
        let columns = in_columns(fastest(&outcomes, 3));
        assert_eq!(columns.into_values().next(), Some(vec![Ok(9.0), Ok(4.0)]));
        outcomes[1].ended_early = true;
        assert_eq!(fastest(&outcomes, 3)[0].wall_ns, 4, "a run that ended early is no fast run");
    }

    #[test]
    fn seeds_that_fill_no_group_are_not_run() {
        assert_eq!([9, 25, 61, 201].map(|seeds| seeds_used(seeds, 3)), [9, 24, 60, 201]);
        assert_eq!(
            [1, 2].map(|seeds| seeds_used(seeds, 3)),
            [1, 2],
            "but all of one that is not full"
        );
    }
}
