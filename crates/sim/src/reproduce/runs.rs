//! Runs what figures are taken from: each run once a seed, over all cores.
//!
//! Invariant: the figures depend on names and seeds alone, not on how many cores there are.

use super::ReproduceError;
use super::figure::Figure;
use super::published::Setup;
use crate::machine::SimMachine;
use crate::models;
use pagetax_core::job::Job;
use pagetax_core::machine::{Machine, RunError};
use pagetax_core::report::{Recording, Run};
use pagetax_core::units::Nanos;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Figures by run and figure: a value for each seed, or why there is none.
pub type Figures = BTreeMap<String, BTreeMap<Figure, Vec<Result<f64, String>>>>;

/// Runs each setup with seeds from 1 on, and takes the wanted figures.
///
/// # Errors
/// Models and jobs that there are not, or that do not go together.
pub fn run(
    setups: &BTreeMap<String, Setup>,
    wanted: &BTreeMap<String, BTreeSet<Figure>>,
    seeds: u64,
) -> Result<Figures, ReproduceError> {
    let runs: Vec<(&String, &Setup, u64)> = wanted
        .keys()
        .filter_map(|name| setups.get_key_value(name))
        .flat_map(|(name, setup)| {
            let seeds = setup.seeds_max.unwrap_or(seeds).min(seeds);
            (1..=seeds).map(move |seed| (name, setup, seed))
        })
        .collect();
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        // The seeds of a run follow each other: its machine is booted once for all that come here.
        let mut ready: Option<(&String, Ready)> = None;
        while let Some((name, setup, seed)) = runs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let known = ready.take().filter(|(known, _)| *known == *name);
            let one = known.map_or_else(|| Ready::new(setup), |(_, ready)| Ok(ready));
            let values = one.and_then(|one| ready.insert((name, one)).1.run(*seed));
            let values = values.map(|(run, ended_early)| {
                let value = |figure: &Figure| (figure.clone(), figure.of(&run, ended_early));
                wanted[*name].iter().map(value).collect::<Vec<_>>()
            });
            done.push(((*name).clone(), *seed, values));
        }
        done
    };
    let workers = std::thread::available_parallelism().map_or(1, usize::from).min(runs.len());
    let mut done: Vec<_> = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        handles.into_iter().flat_map(|handle| handle.join().expect("no panic in a run")).collect()
    });
    done.sort_by(|(a, a_seed, _), (b, b_seed, _)| (a, a_seed).cmp(&(b, b_seed)));
    let mut figures = Figures::new();
    for (name, _, values) in done {
        for (figure, value) in values? {
            figures.entry(name.clone()).or_default().entry(figure).or_default().push(value);
        }
    }
    Ok(figures)
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

    /// A report, and whether the run ended early.
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
