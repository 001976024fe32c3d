//! The seam: a Machine runs a whole Plan and pours what it saw into a Sink.
//!
//! Invariant: the seam is coarse, never `touch(addr)`. The host needs tight loops and real threads;
//! a simulated machine skips whole sweeps by arithmetic.

use crate::budget::Budget;
use crate::counter::{Provenance, Reading};
use crate::plan::{Mistake, Part, Plan};
use crate::quantity::Params;
use crate::report::{Environment, Table, Warning};
use crate::units::{Bytes, PageSize};
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The three kinds of machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum MachineKind {
    /// Real system calls.
    Host,
    /// A model on a virtual clock.
    Sim,
    /// Harness without memory.
    Null,
}

impl MachineKind {
    /// Returns the provenance of this machine's own numbers.
    pub fn provenance(self) -> Provenance {
        match self {
            MachineKind::Sim => Provenance::Modeled,
            MachineKind::Host | MachineKind::Null => Provenance::Measured,
        }
    }

    /// Returns a number of this machine as a reading.
    pub fn reading(self, value: u64) -> Reading {
        match self {
            MachineKind::Sim => Reading::Modeled(value),
            MachineKind::Host | MachineKind::Null => Reading::Measured(value),
        }
    }
}

/// The facts of a machine that a job needs before it can be resolved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineSpec {
    /// `host`, `null` or the model's name.
    pub name: String,
    /// Real, simulated or without memory.
    pub kind: MachineKind,
    /// The built-in jobs whose published figures were compared with this model; empty for other kinds.
    pub validated_jobs: Vec<String>,
    /// The physical memory, the `$memory` of job files.
    pub memory: Bytes,
    /// The smallest page, the `$page` of job files.
    pub base_page: PageSize,
    /// All page sizes that ordinary memory can have here, smallest first.
    pub page_sizes: Vec<PageSize>,
    /// The number of CPUs that run workers.
    pub cpus: u32,
    /// The parameters of built-in jobs as this machine was run with them, by job. They override the
    /// job's defaults, and the user overrides them.
    pub job_params: BTreeMap<String, Params>,
}

impl MachineSpec {
    /// Returns true if numbers of this job need no model, or one that was checked with the job.
    pub fn is_validated_for(&self, job: &str) -> bool {
        self.kind != MachineKind::Sim || self.validated_jobs.iter().any(|known| known == job)
    }
}

/// A demand of a plan that a machine does not meet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unmet {
    /// The demand, and the reason why it is not met.
    pub what: String,
    /// The change that would help.
    pub remedy: String,
    /// True if the machine refuses the plan, false if it runs without and warns.
    pub fatal: bool,
}

impl Unmet {
    /// Converts a mistake of a plan, with the name of its phase.
    fn of_mistake(plan: &Plan, mistake: Mistake) -> Unmet {
        let Mistake { part, what, remedy } = mistake;
        let what = match part {
            Part::Plan | Part::Region(_) => what,
            Part::Phase(phase) | Part::Operation(phase, _) => {
                format!("phase `{}`: {what}", plan.phases[phase].name)
            }
        };
        Unmet { what, remedy, fatal: true }
    }
}

/// The reason why a run ended early.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The preflight found something fatal.
    #[error("{}", list_unmet(.0))]
    Unmet(Vec<Unmet>),
    /// An operation failed.
    #[error("{op} failed: {why}\n  hint: {remedy}")]
    Op {
        /// The operation, with its region and size.
        op: String,
        /// The message of the system, without a hint.
        why: String,
        /// The change that would help.
        remedy: String,
    },
    /// A word did not hold what was written there.
    #[error(
        "memory does not hold what was written: region `{region}`, offset {offset:#x} (address \
         {address:#x}): expected {expected:#018x}, found {found:#018x}"
    )]
    Mismatch {
        /// The name of the region in the job.
        region: String,
        /// The offset of the word in the region.
        offset: u64,
        /// The address of the word in the process.
        address: u64,
        /// The word that was written.
        expected: u64,
        /// The word that was found instead.
        found: u64,
    },
    /// A simulation came to its stated cap.
    #[error("stopped at the cap: {0}")]
    Capped(String),
    /// A signal such as Ctrl-C stopped it; the sink has the data up to then.
    #[error("interrupted; the report covers what was seen so far")]
    Interrupted,
}

fn list_unmet(unmet: &[Unmet]) -> String {
    let lines: Vec<_> = unmet.iter().map(|u| format!("{}\n  hint: {}", u.what, u.remedy)).collect();
    lines.join("\n")
}

/// The result of a preflight that found nothing fatal. Only a preflight makes one, so a run that takes it was
/// checked, and once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Preflight {
    /// The demands that the run will do without.
    lacking: Vec<Unmet>,
}

/// A machine that runs plans. Any number of runs may share it: a run changes nothing of the machine.
pub trait Machine: Send + Sync {
    /// Returns the facts that jobs need to know of the machine.
    fn spec(&self) -> MachineSpec;

    /// Returns the demands of a valid plan that this machine cannot meet. Cheap, and changes nothing.
    fn limits(&self, plan: &Plan) -> Vec<Unmet>;

    /// Runs a plan that passed the preflight. Callers use [`Machine::run`] or [`Machine::run_checked`].
    fn execute(&self, plan: &Plan, out: &mut dyn Sink) -> Result<(), RunError>;

    /// Returns the reason why no machine can run the plan, or else the limits of this one.
    fn check(&self, plan: &Plan) -> Vec<Unmet> {
        match plan.check() {
            Ok(()) => self.limits(plan),
            Err(mistake) => vec![Unmet::of_mistake(plan, mistake)],
        }
    }

    /// Checks a plan before its run.
    ///
    /// # Errors
    /// Returns all fatal findings.
    fn preflight(&self, plan: &Plan) -> Result<Preflight, RunError> {
        let (fatal, lacking): (Vec<_>, Vec<_>) =
            self.check(plan).into_iter().partition(|unmet| unmet.fatal);
        if fatal.is_empty() { Ok(Preflight { lacking }) } else { Err(RunError::Unmet(fatal)) }
    }

    /// Runs a plan that this machine has checked. However it ends, nothing is left behind, and the sink holds
    /// what was seen, with a warning for each demand that the run did without.
    fn run_checked(
        &self,
        plan: &Plan,
        checked: &Preflight,
        out: &mut dyn Sink,
    ) -> Result<(), RunError> {
        for Unmet { what, remedy, .. } in &checked.lacking {
            let (id, text, remedy) = ("unmet".into(), what.clone(), remedy.clone());
            out.warning(Warning { id, text, remedy });
        }
        self.execute(plan, out)
    }

    /// Checks a plan and runs it.
    fn run(&self, plan: &Plan, out: &mut dyn Sink) -> Result<(), RunError> {
        self.run_checked(plan, &self.preflight(plan)?, out)
    }
}

/// A receiver of a machine's readings. [`crate::report::Recording`] makes a report of them.
pub trait Sink {
    /// Receives the whole run's value of a counter in [`crate::counter::COUNTERS`].
    fn counter(&mut self, id: &'static str, reading: Reading);

    /// Receives a phase that has ended, with its times since the start of the run.
    fn phase(
        &mut self,
        name: &str,
        start_ns: u64,
        end_ns: u64,
        counters: &[(&'static str, Reading)],
    );

    /// Receives one point of the series. Columns are free-form ids with their unit last; a column that is
    /// absent from a point was not seen then.
    fn sample(&mut self, time_ns: u64, values: &[(&'static str, u64)]);

    /// Receives a latency histogram in nanoseconds, such as `minor_fault`, `page_in` or `lock`. It may
    /// hold a part of the events; then `of_count` is the number of all.
    fn latency(
        &mut self,
        kind: &'static str,
        histogram: &Histogram<u64>,
        of_count: Option<u64>,
        provenance: Provenance,
    );

    /// Receives the budget of time and memory.
    fn budget(&mut self, budget: Budget);

    /// Receives a table in an old tool's words (hatcnt, trapstat, pmap, a kernel profile).
    fn table(&mut self, table: Table);

    /// Receives a warning about this run.
    fn warning(&mut self, warning: Warning);

    /// Receives facts of the environment, by name.
    fn environment(&mut self, environment: Environment);

    /// Receives the share of the run that is done, 0 to 1. It may be called often.
    fn progress(&mut self, _done: f64) {}
}
