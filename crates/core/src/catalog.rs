//! The lists of what pagetax knows by name: `pagetax jobs` and `pagetax machines`.

use crate::document::Document;
use crate::report::ReportMachine;
use serde::{Deserialize, Serialize};

/// The built-in jobs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct JobCatalog {
    /// The jobs, in the order of their introduction.
    pub jobs: Vec<JobEntry>,
}

/// A built-in job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct JobEntry {
    /// The name for `pagetax run`.
    pub name: String,
    /// The job's purpose, in a line.
    pub summary: String,
}

impl Document for JobCatalog {
    const KIND: &'static str = "jobs";
}

/// The machines that jobs can run on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct MachineCatalog {
    /// This machine first, then the models.
    pub machines: Vec<MachineEntry>,
}

/// A machine that jobs can run on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct MachineEntry {
    /// The machine as reports name it.
    #[serde(flatten)]
    pub machine: ReportMachine,
    /// The machine's description, in a line.
    pub title: String,
}

impl Document for MachineCatalog {
    const KIND: &'static str = "machines";
}
