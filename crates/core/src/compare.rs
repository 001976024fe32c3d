//! Two documents beside each other: runs with runs, a diagnosis with a diagnosis.
//!
//! Invariants: a ratio has an interval only where both sides have several runs; what makes the two
//! incomparable (another job, another machine) is listed, and the caller refuses or labels it.

use crate::counter::{Provenance, Unit};
use crate::diagnosis::{Diagnosis, Trial};
use crate::document::{self, Document, DocumentError};
use crate::report::{Environment, Run, Runs};
use crate::stats::{Ratio, median, ratio_of_groups};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// Seed of the resampling, so that the same documents give the same intervals.
const SEED: u64 = 2004;
/// Facts of an environment that make another machine of it.
const HARDWARE: &[&str] = &["cpu_model", "cpu_count", "hypervisor", "base_page_bytes"];
/// Memory may differ by this share: virtual machines get and give some while they run.
const MEMORY_SHARE: f64 = 0.1;
/// Settings that may explain a difference, but may also be what is being compared.
const SETTINGS: &[&str] = &[
    "kernel",
    "thp_enabled",
    "thp_defrag",
    "thp_shmem_enabled",
    "thp_enabled_by_size",
    "swappiness",
    "cpu_governor",
    "page_table_isolation",
    "cgroup_memory_limit_bytes",
];

/// Reports that can be compared with others of their kind.
#[derive(Debug, Clone, PartialEq)]
pub enum Comparable {
    /// Runs of one job on one machine, at least one.
    Runs(Vec<Run>),
    /// One diagnosis.
    Diagnosis(Box<Diagnosis>),
}

/// The reason why a text cannot be compared.
#[derive(Debug, thiserror::Error)]
pub enum ComparableError {
    /// No document of pagetax.
    #[error(transparent)]
    Document(#[from] DocumentError),
    /// JSON of somebody else.
    #[error(
        "it is no report of pagetax\n  hint: write one by `pagetax run --json=FILE` or `pagetax diagnose --json=FILE`"
    )]
    Foreign,
    /// A document of a kind that is not compared.
    #[error("a document of kind `{0}`; `run` and `diagnosis` can be compared")]
    Kind(String),
    /// No report, or reports that do not belong together.
    #[error("{0}; give one file for each job and machine")]
    Mixed(&'static str),
}

impl Comparable {
    /// Reads a file of reports; several runs may follow one another.
    ///
    /// # Errors
    /// See [`ComparableError`].
    pub fn parse(text: &str) -> Result<Comparable, ComparableError> {
        let mut runs = Vec::new();
        let mut diagnoses = Vec::new();
        for value in serde_json::Deserializer::from_str(text).into_iter::<Value>() {
            let value = value.map_err(DocumentError::from)?;
            match document::kind_of(&value)? {
                Some(Run::KIND) => runs.push(document::from_value(value)?),
                Some(Runs::KIND) => runs.extend(document::from_value::<Runs>(value)?.runs),
                Some(Diagnosis::KIND) => diagnoses.push(document::from_value(value)?),
                Some(kind) => return Err(ComparableError::Kind(kind.into())),
                None => return Err(ComparableError::Foreign),
            }
        }
        let alike = |run: &Run| run.job == runs[0].job && run.machine == runs[0].machine;
        match (runs.len(), diagnoses.len()) {
            (0, 0) => Err(ComparableError::Mixed("the file holds no report")),
            (0, 1) => Ok(Comparable::Diagnosis(Box::new(diagnoses.remove(0)))),
            (_, 0) if runs.iter().all(alike) => Ok(Comparable::Runs(runs)),
            (_, 0) => {
                Err(ComparableError::Mixed("the file holds runs of several jobs or machines"))
            }
            _ => Err(ComparableError::Mixed("the file holds a diagnosis and other reports")),
        }
    }

    fn environment(&self) -> &Environment {
        match self {
            Comparable::Runs(runs) => &runs[0].environment,
            Comparable::Diagnosis(diagnosis) => &diagnosis.environment,
        }
    }
}

/// One quantity on both sides.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Row {
    /// A counter's id, or a trial's name and quantity.
    pub id: String,
    /// The unit of the value on both sides.
    pub unit: Unit,
    /// The medians of the first and the second document.
    pub medians: [u64; 2],
    /// The provenance of both values.
    pub provenance: [Provenance; 2],
    /// The numbers of runs behind the medians.
    pub run_counts: [usize; 2],
    /// Second ÷ first, with its interval; absent for a single run on a side or a median of 0.
    pub ratio: Option<Ratio>,
}

/// Both documents beside each other.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Comparison {
    /// Reasons why the two should not be compared; empty if they may be.
    pub incomparable: Vec<String>,
    /// Settings of the machine that differ between the sides.
    pub settings: Vec<String>,
    /// Quantities that both have.
    pub rows: Vec<Row>,
}

impl Document for Comparison {
    const KIND: &'static str = "comparison";
}

/// Compares. Documents of different kinds have no rows in common.
pub fn compare(first: &Comparable, second: &Comparable) -> Comparison {
    let mut incomparable = match (first, second) {
        (Comparable::Runs(a), Comparable::Runs(b)) => jobs_differ(&a[0], &b[0]),
        (Comparable::Diagnosis(a), Comparable::Diagnosis(b)) => {
            different("command", &a.command.join(" "), &b.command.join(" ")).into_iter().collect()
        }
        _ => vec!["one is a run, the other a diagnosis".into()],
    };
    let (a, b) = (first.environment(), second.environment());
    incomparable.extend(HARDWARE.iter().filter_map(|key| facts_differ(key, a, b)));
    incomparable.extend(memory_differs(a, b));
    Comparison {
        incomparable,
        settings: SETTINGS.iter().filter_map(|key| facts_differ(key, a, b)).collect(),
        rows: match (first, second) {
            (Comparable::Runs(a), Comparable::Runs(b)) => rows_of_runs(a, b),
            (Comparable::Diagnosis(a), Comparable::Diagnosis(b)) => rows_of_trials(a, b),
            _ => Vec::new(),
        },
    }
}

fn different(what: &str, a: &str, b: &str) -> Option<String> {
    (a != b).then(|| format!("{what}: `{a}` and `{b}`"))
}

fn jobs_differ(a: &Run, b: &Run) -> Vec<String> {
    let params = |run: &Run| {
        let pairs = run.job.params.iter().map(|(key, value)| format!("{key}={value}"));
        pairs.collect::<Vec<_>>().join(" ")
    };
    let seed = |run: &Run| run.job.seed.to_string();
    [
        different("job", &a.job.name, &b.job.name),
        different("parameters", &params(a), &params(b)),
        different("seed", &seed(a), &seed(b)),
        different("machine", &a.machine.name, &b.machine.name),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Facts that one side does not know are no difference.
fn facts_differ(key: &str, a: &Environment, b: &Environment) -> Option<String> {
    let (a, b) = (a.get(key)?, b.get(key)?);
    let known = !a.is_null() && !b.is_null();
    let text = |value: &Value| value.as_str().map_or(value.to_string(), str::to_string);
    if known { different(key, &text(a), &text(b)) } else { None }
}

fn memory_differs(a: &Environment, b: &Environment) -> Option<String> {
    let memory = |facts: &Environment| facts.get("memory_bytes")?.as_f64();
    let (a, b) = (memory(a)?, memory(b)?);
    let differs = (a - b).abs() > MEMORY_SHARE * a.max(b);
    differs.then(|| format!("memory_bytes: {a} and {b}"))
}

type Column = (Vec<u64>, Unit, Provenance);

/// Collects the values of each counter over the runs. The elapsed time is one of them.
fn columns(runs: &[Run]) -> BTreeMap<&str, Column> {
    let mut columns = BTreeMap::new();
    for (id, reading) in runs.iter().flat_map(|run| &run.counters) {
        let empty = || (Vec::new(), reading.unit, reading.provenance);
        let (values, ..) = columns.entry(id.as_str()).or_insert_with(empty);
        values.extend(reading.value);
    }
    columns
}

fn rows_of_runs(a: &[Run], b: &[Run]) -> Vec<Row> {
    let (first, mut second) = (columns(a), columns(b));
    first.into_iter().filter_map(|(id, a)| row(id.into(), a, second.remove(id)?)).collect()
}

fn rows_of_trials(a: &Diagnosis, b: &Diagnosis) -> Vec<Row> {
    let mut rows = Vec::new();
    for first in &a.trials {
        let Some(second) = b.trials.iter().find(|t| t.name == first.name) else { continue };
        let times = |t: &Trial| (t.runs_ns.clone(), Unit::Ns, Provenance::Measured);
        rows.extend(row(format!("{} wall_ns", first.name), times(first), times(second)));
        let peak = |t: &Trial| {
            (t.peak_resident_bytes.into_iter().collect(), Unit::Bytes, Provenance::Measured)
        };
        let id = format!("{} peak_resident_bytes", first.name);
        rows.extend(row(id, peak(first), peak(second)));
    }
    rows
}

/// Returns None if a side has no value.
fn row(id: String, a: Column, b: Column) -> Option<Row> {
    Some(Row {
        id,
        unit: a.1,
        medians: [median(&a.0)?, median(&b.0)?],
        provenance: [a.2, b.2],
        run_counts: [a.0.len(), b.0.len()],
        ratio: ratio_of_groups(&b.0, &a.0, SEED),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counter::{Reading, put};
    use serde_json::json;

    fn run(wall_ns: u64) -> Run {
        let value = json!({
            "schema": 1, "kind": "run",
            "job": {"name": "j", "params": {"size": "1M"}, "seed": 1},
            "machine": {"name": "host", "kind": "host", "validated": true},
            "wall_ns": wall_ns, "counters": {}, "phases": [],
            "series": {"interval_ns": 0, "columns": {}}, "latency": {},
            "environment": {"cpu_model": "A", "kernel": "6.18", "memory_bytes": 1000},
            "warnings": [],
        });
        let mut run = Run::deserialize(value).unwrap();
        put(&mut run.counters, "wall_ns", Reading::Measured(wall_ns));
        put(&mut run.counters, "tlb_miss_count", Reading::Missing("no PMU".into()));
        run
    }

    fn runs(times: &[u64]) -> Comparable {
        Comparable::Runs(times.iter().map(|ns| run(*ns)).collect())
    }

    #[test]
    fn several_runs_have_an_interval_and_single_ones_none() {
        let several = compare(&runs(&[100, 101, 102]), &runs(&[200, 202, 201]));
        assert!(several.incomparable.is_empty());
        let ids: Vec<_> = several.rows.iter().map(|row| row.id.as_str()).collect();
        assert_eq!(ids, ["wall_ns"], "what is missing on both sides is no row");
        let ratio = several.rows[0].ratio.unwrap();
        assert!(ratio.low > 1.9 && ratio.high < 2.1, "{ratio}");
        let single = compare(&runs(&[100]), &runs(&[200]));
        assert_eq!((single.rows[0].medians, single.rows[0].ratio), ([100, 200], None));
    }

    #[test]
    fn other_jobs_and_machines_are_incomparable_other_settings_are_told() {
        let changed = |change: fn(&mut Run)| {
            let mut run = run(100);
            change(&mut run);
            compare(&runs(&[100]), &Comparable::Runs(vec![run]))
        };
        assert!(changed(|run| run.job.seed = 2).incomparable[0].contains("seed"));
        assert!(changed(|run| run.machine.name = "null".into()).incomparable[0].contains("null"));
        let cpu = changed(|run| {
            run.environment.insert("cpu_model".into(), "B".into());
        });
        assert_eq!(cpu.incomparable, ["cpu_model: `A` and `B`"]);
        let memory = changed(|run| {
            run.environment.insert("memory_bytes".into(), 2000.into());
        });
        assert_eq!(memory.incomparable.len(), 1);
        let kernel = changed(|run| {
            run.environment.insert("kernel".into(), "6.19".into());
            run.environment.insert("memory_bytes".into(), 1050.into());
            run.environment.insert("cpu_count".into(), 2.into());
        });
        assert!(kernel.incomparable.is_empty());
        assert_eq!(kernel.settings, ["kernel: `6.18` and `6.19`"]);
    }

    #[test]
    fn documents_are_read_back() {
        let text = |run: &Run| run.to_json().unwrap();
        let stream = text(&run(1)) + "\n" + &text(&run(2));
        assert!(
            matches!(Comparable::parse(&stream).unwrap(), Comparable::Runs(runs) if runs.len() == 2)
        );
        let list = json!({"schema": 1, "kind": "runs", "runs": [run(1), run(2)]}).to_string();
        assert!(
            matches!(Comparable::parse(&list).unwrap(), Comparable::Runs(runs) if runs.len() == 2)
        );
    }

    #[test]
    fn what_is_no_document_says_why() {
        let error = |text: &str| Comparable::parse(text).unwrap_err().to_string();
        assert!(error("").contains("no report"));
        assert!(error("{").contains("--json"));
        assert!(error(r#"{"schema":2,"kind":"run"}"#).contains("newer"));
        assert!(error(r#"{"schema":1,"kind":"song"}"#).contains("song"));
        assert!(error(r#"{"schema":1,"kind":"run"}"#).contains("missing field"));
        let mut other = run(1);
        other.job.name = "k".into();
        let mixed = run(1).to_json().unwrap() + &other.to_json().unwrap();
        assert!(error(&mixed).contains("several jobs"));
    }
}
