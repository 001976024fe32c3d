//! Reproduction: every published figure beside what the simulated machines say.
//!
//! The published tables and claims, with their tolerances, are data ([`published`]); runs give figures
//! ([`figure`]); expressions over figures ([`expression`]) are compared with what was published.
//! Invariant: a row passes only if its simulated median lies within its tolerance; what cannot be
//! simulated is listed with its reason, and never passes as simulated. Fewer than [`SEEDS_MIN`] seeds
//! assert nothing: the tolerances are those of medians.

mod compare;
pub mod expression;
pub mod figure;
pub mod published;
mod runs;
#[cfg(test)]
mod tests;

use crate::model::ModelError;
use pagetax_core::document::Document;
use pagetax_core::job::JobError;
use pagetax_core::machine::RunError;
use pagetax_core::stats::quantiles;
use published::Status;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Why nothing could be reproduced.
#[derive(Debug, thiserror::Error)]
pub enum ReproduceError {
    /// No such table or claims.
    #[error("nothing published is called `{name}`\n  hint: name one of {known}, or all")]
    Unknown {
        /// The name that was requested.
        name: String,
        /// The names that exist, as a list.
        known: String,
    },
    /// A file that contradicts itself.
    #[error("published/{file}: {problem}\n  hint: correct the file")]
    Data {
        /// The name of the file in `published/`.
        file: String,
        /// The problem, with its line.
        problem: String,
    },
    /// A machine that is none.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A job that does not resolve.
    #[error(transparent)]
    Job(#[from] JobError),
    /// A run that the machine refuses.
    #[error(transparent)]
    Run(#[from] RunError),
}

/// Tolerances hold for medians of at least so many seeds.
pub const SEEDS_MIN: u64 = 9;

/// Published figures beside simulated ones.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Reproduction {
    /// Seeds of every run: from 1 up to this number.
    pub seeds: u64,
    /// False if there are too few seeds to assert anything.
    pub asserts: bool,
    /// True if every row is within its tolerance.
    pub ok: bool,
    /// The tables, one for each file.
    pub tables: Vec<Compared>,
}

impl Document for Reproduction {
    const KIND: &'static str = "reproduction";
}

/// A file's figures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Compared {
    /// The name, as `reproduce` takes it.
    pub name: String,
    /// The title of the table.
    pub title: String,
    /// The source of the published figures.
    pub source: String,
    /// Notes on all figures, a paragraph each.
    pub notes: Vec<String>,
    /// The compared figures, in the order of the file.
    pub rows: Vec<Row>,
}

/// A figure, published and simulated.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Row {
    /// The row of a published table, by its heading; empty for single figures.
    pub key: BTreeMap<String, f64>,
    /// The quantity that is compared.
    pub figure: String,
    /// The number in the published report.
    pub published: f64,
    /// None if not reproducible, or if it could not be read.
    pub simulated: Option<Spread>,
    /// Values behind the median; 0 if no run gives it.
    pub value_count: usize,
    /// Each value is of the fastest of so many runs; 1 if every run counts.
    pub least_of: u64,
    /// Median over published; none where that has no meaning.
    pub ratio: Option<f64>,
    /// Least and most ratio that is right; none if it is only reported.
    pub tolerance: Option<[f64; 2]>,
    /// False if simulated and out of tolerance, or not to be read.
    pub ok: bool,
    /// The result of the comparison in a word.
    pub verdict: Verdict,
    /// The reason for agreement: fitted or predicted.
    pub status: Status,
    /// The reason why it is not reproducible or missing; else a remark, often empty.
    pub why: String,
}

/// The verdict of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// A figure within its tolerance.
    Ok,
    /// Out of its tolerance, or not to be read.
    Miss,
    /// Without a tolerance, or with too few seeds to assert it.
    Reported,
    /// Arithmetic or taken over: not compared.
    Derived,
    /// A figure that is not simulated.
    NotReproducible,
}

/// A figure over all seeds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Spread {
    /// The middle one; of an even number, the mean of both.
    pub median: f64,
    /// The smallest value over all seeds.
    pub low: f64,
    /// The largest value over all seeds.
    pub high: f64,
}

impl Spread {
    /// Computes the spread. Returns None for no values, or if any is not a number.
    fn of(values: &[f64]) -> Option<Spread> {
        if values.is_empty() || values.iter().any(|value| !value.is_finite()) {
            return None;
        }
        let [low, median, high] = quantiles(values, [0.0, 0.5, 1.0]);
        Some(Spread { median, low, high })
    }
}

/// Receives the share of the runs that have ended, 0 to 1, from any thread.
pub type OnProgress<'a> = &'a (dyn Fn(f64) + Sync);

/// Runs everything that the named files (all, if none is named) need, and compares.
///
/// # Errors
/// Names, files, models and jobs that are wrong. A figure out of tolerance is no error.
pub fn reproduce(
    names: &[String],
    seeds: u64,
    on_progress: OnProgress<'_>,
) -> Result<Reproduction, ReproduceError> {
    let names: Vec<String> = match names {
        [] => published::names().map(String::from).collect(),
        names => names.to_vec(),
    };
    let seeds = seeds.max(1);
    let share = 1.0 / names.len() as f64;
    let compare = |(nth, name): (usize, &String)| {
        let on_progress = |done: f64| on_progress((nth as f64 + done) * share);
        compare::compare(name, &published::find(name)?, seeds, &on_progress)
    };
    let tables = names.iter().enumerate().map(compare).collect::<Result<Vec<_>, _>>()?;
    Ok(Reproduction {
        seeds,
        asserts: seeds >= SEEDS_MIN,
        ok: tables.iter().flat_map(|table| &table.rows).all(|row| row.ok),
        tables,
    })
}
