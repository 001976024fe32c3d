//! Two documents beside each other: runs with runs, a diagnosis with a diagnosis.
//!
//! Invariants: a ratio has an interval only where both sides have several runs; what makes the two
//! incomparable (another job, another machine) is listed, and the caller refuses or labels it.

use crate::counter::{Provenance, Unit};
use crate::diagnosis::{Diagnosis, Trial};
use crate::document::{self, Document, DocumentError};
use crate::report::{Environment, Run, Runs};
use crate::stats::{Ratio, median, ratio_of_groups};
use crate::threshold::{Judgement, Range, RangeThreshold};
use crate::units::{Bytes, Nanos};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// The rows about elapsed time, of runs and of diagnoses.
const WALL: &str = "wall_ns";
const AS_IS_WALL: &str = "as-is wall_ns";
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
    /// Runs of one job on one machine, at least one. Their parameters are equal.
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
    /// The names of the two reports.
    #[serde(default)]
    pub names: [String; 2],
    /// Differences that are meant: parameters of the job, its seed, arguments of the command.
    #[serde(default)]
    pub parameters: Vec<String>,
    /// The sentence about the elapsed time, and what changed most with it. Null if a side has no time.
    #[serde(default)]
    pub verdict: Option<String>,
}

impl Document for Comparison {
    const KIND: &'static str = "comparison";
}

/// Comparisons of one report with each of several others. That of two alone is written as [`Comparison`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Comparisons {
    /// One for each other report, in their order.
    pub comparisons: Vec<Comparison>,
}

impl Document for Comparisons {
    const KIND: &'static str = "comparisons";

    fn to_json(&self) -> Result<String, serde_json::Error> {
        match &self.comparisons[..] {
            [one] => one.to_json(),
            _ => document::write(self),
        }
    }
}

/// A report and its name.
pub type Side<'a> = (&'a str, &'a Comparable);

/// Compares. Documents of different kinds have no rows in common.
pub fn compare(first: Side<'_>, second: Side<'_>) -> Comparison {
    let names = [first.0, second.0].map(String::from);
    let (first, second) = (first.1, second.1);
    let (mut incomparable, parameters) = match (first, second) {
        (Comparable::Runs(a), Comparable::Runs(b)) => {
            (jobs_differ(&a[0], &b[0]), parameters_differ(&a[0], &b[0]))
        }
        (Comparable::Diagnosis(a), Comparable::Diagnosis(b)) => commands_differ(a, b),
        _ => (vec!["one is a run, the other a diagnosis".into()], Vec::new()),
    };
    let (a, b) = (first.environment(), second.environment());
    incomparable.extend(HARDWARE.iter().filter_map(|key| facts_differ(key, a, b)));
    incomparable.extend(memory_differs(a, b));
    let rows = match (first, second) {
        (Comparable::Runs(a), Comparable::Runs(b)) => rows_of_runs(a, b),
        (Comparable::Diagnosis(a), Comparable::Diagnosis(b)) => rows_of_trials(a, b),
        _ => Vec::new(),
    };
    Comparison {
        incomparable,
        settings: SETTINGS.iter().filter_map(|key| facts_differ(key, a, b)).collect(),
        verdict: verdict(&names, &rows),
        rows,
        names,
        parameters,
    }
}

/// Returns the sentence about the elapsed time.
fn verdict(names: &[String; 2], rows: &[Row]) -> Option<String> {
    let time = rows.iter().find(|row| [WALL, AS_IS_WALL].contains(&row.id.as_str()))?;
    let [first, second] = names;
    let [before, after] = time.medians.map(Nanos);
    let sentence = match time.ratio {
        None => format!(
            "`{second}` takes {after} and `{first}` {before}; one run on a side shows no more than that"
        ),
        Some(ratio) if ratio.holds_one() => format!(
            "no difference in time is shown: `{second}` takes {ratio} times as long as `{first}`"
        ),
        Some(ratio) => format!("`{second}` takes {ratio} times as long as `{first}`"),
    };
    let changed = rows.iter().filter(|row| row.unit != Unit::Ns && row.change() > 0.0);
    let most = changed.max_by(|a, b| a.change().total_cmp(&b.change()));
    Some(match most {
        None => sentence,
        Some(row) => format!("{sentence}; {}", row.in_words()),
    })
}

impl Comparison {
    /// Judges a ratio. One without an interval is taken as it is: single runs of a simulated machine are
    /// exact, and those of another machine have noise that is not known.
    pub fn judge(&self, threshold: &RangeThreshold) -> Judgement {
        let row = self.rows.iter().find(|row| row.id == threshold.id());
        let ids = self.rows.iter().map(|row| row.id.as_str());
        let why = row.map(|_| "the first report has 0".into());
        match threshold.judge(ids, row.and_then(Row::range), why) {
            Judgement::Passed => Judgement::Passed,
            Judgement::Failed(text) => Judgement::Failed(format!("{}: {text}", self.names[1])),
            Judgement::NotJudged(why) => Judgement::NotJudged(format!("{}: {why}", self.names[1])),
        }
    }
}

impl Row {
    /// Returns the ratio with its ends. None if it divides by 0.
    fn range(&self) -> Option<Range> {
        let (low, high, words) = match (self.ratio, self.medians) {
            (Some(ratio), _) => (ratio.low, ratio.high, ratio.to_string()),
            (None, [0, 0]) => (1.0, 1.0, "1".into()),
            (None, [0, _]) => return None,
            (None, [first, second]) => {
                let ratio = second as f64 / first as f64;
                (ratio, ratio, format!("{ratio:.3}, of one run on a side"))
            }
        };
        Some(Range { low, high, unit: Unit::Count, words })
    }

    /// Returns how far the ratio is certainly from 1, as a logarithm; 0 if it may be 1.
    fn change(&self) -> f64 {
        match (self.ratio, self.medians) {
            (Some(ratio), _) if ratio.holds_one() => 0.0,
            (Some(ratio), _) => ratio.low.ln().abs().min(ratio.high.ln().abs()),
            (None, [0, _] | [_, 0]) => 0.0,
            (None, [first, second]) => (second as f64 / first as f64).ln().abs(),
        }
    }

    fn in_words(&self) -> String {
        let [before, after] = self.medians.map(|value| match self.unit {
            Unit::Ns => Nanos(value).to_string(),
            Unit::Bytes => Bytes(value).to_string(),
            Unit::Count => value.to_string(),
        });
        format!("{} changes most, from {before} to {after}", self.id)
    }
}

fn different(what: &str, a: &str, b: &str) -> Option<String> {
    (a != b).then(|| format!("{what}: `{a}` and `{b}`"))
}

fn jobs_differ(a: &Run, b: &Run) -> Vec<String> {
    let job = different("job", &a.job.name, &b.job.name);
    job.into_iter().chain(different("machine", &a.machine.name, &b.machine.name)).collect()
}

/// Returns the parameters that differ, and the seed if it does.
fn parameters_differ(a: &Run, b: &Run) -> Vec<String> {
    let names: BTreeSet<&String> = a.job.params.keys().chain(b.job.params.keys()).collect();
    let value =
        |run: &Run, name: &String| run.job.params.get(name).cloned().unwrap_or("absent".into());
    let params = names.iter().filter_map(|name| different(name, &value(a, name), &value(b, name)));
    let seed = different("seed", &a.job.seed.to_string(), &b.job.seed.to_string());
    params.chain(seed).collect()
}

/// Returns why two commands should not be compared, and how their arguments differ if they may be.
fn commands_differ(a: &Diagnosis, b: &Diagnosis) -> (Vec<String>, Vec<String>) {
    let differs = different("command", &a.command.join(" "), &b.command.join(" "));
    let differs = differs.into_iter().collect();
    match a.command.first() == b.command.first() {
        true => (Vec::new(), differs),
        false => (differs, Vec::new()),
    }
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

    fn pair(first: &Comparable, second: &Comparable) -> Comparison {
        compare(("a", first), ("b", second))
    }

    #[test]
    fn the_verdict_is_a_sentence_with_what_changed_most() {
        let faults = |ns, count| {
            let mut run = run(ns);
            put(&mut run.counters, "minor_fault_count", Reading::Measured(count));
            run
        };
        let first = Comparable::Runs(vec![faults(100, 10), faults(101, 10), faults(102, 10)]);
        let second = Comparable::Runs(vec![faults(200, 30), faults(201, 30), faults(202, 30)]);
        let verdict = pair(&first, &second).verdict.unwrap();
        assert!(verdict.starts_with("`b` takes 1.9"), "{verdict}");
        assert!(verdict.ends_with("minor_fault_count changes most, from 10 to 30"), "{verdict}");
        let same = pair(&first, &first).verdict.unwrap();
        assert!(same.starts_with("no difference") && !same.contains("most"), "{same}");
        let comparison = pair(&first, &second);
        let alone = Comparisons { comparisons: vec![comparison.clone()] };
        assert_eq!(alone.to_json().unwrap(), comparison.to_json().unwrap());
    }

    #[test]
    fn ratios_are_judged_by_their_whole_interval() {
        let judge = |text: &str, first: &[u64], second: &[u64]| {
            pair(&runs(first), &runs(second)).judge(&text.parse().unwrap())
        };
        let (fast, slow) = ([100, 101, 102], [200, 201, 202]);
        assert!(matches!(judge("wall_ns>1.05", &fast, &slow), Judgement::Failed(_)));
        assert_eq!(judge("wall_ns > 1.05", &fast, &fast), Judgement::Passed);
        assert_eq!(judge("wall_ns>1", &fast, &[99, 103, 104]), Judgement::Passed);
        assert!(matches!(judge("wall_ns>1.05", &[100], &[110]), Judgement::Failed(_)));
        let Judgement::NotJudged(why) = judge("wall_nz>1", &fast, &slow) else { panic!() };
        assert!(why.contains("did you mean `wall_ns`"), "{why}");
        assert!(matches!(judge("wall_ns>1ms", &fast, &slow), Judgement::NotJudged(_)));
        for bad in ["wall_ns", "wall_ns>"] {
            assert!(bad.parse::<RangeThreshold>().is_err(), "{bad}");
        }
    }

    #[test]
    fn several_runs_have_an_interval_and_single_ones_none() {
        let several = pair(&runs(&[100, 101, 102]), &runs(&[200, 202, 201]));
        assert!(several.incomparable.is_empty());
        let ids: Vec<_> = several.rows.iter().map(|row| row.id.as_str()).collect();
        assert_eq!(ids, ["wall_ns"], "what is missing on both sides is no row");
        let ratio = several.rows[0].ratio.unwrap();
        assert!(ratio.low > 1.9 && ratio.high < 2.1, "{ratio}");
        let single = pair(&runs(&[100]), &runs(&[200]));
        assert_eq!((single.rows[0].medians, single.rows[0].ratio), ([100, 200], None));
    }

    #[test]
    fn other_jobs_and_machines_are_incomparable_other_settings_are_told() {
        let changed = |change: fn(&mut Run)| {
            let mut run = run(100);
            change(&mut run);
            pair(&runs(&[100]), &Comparable::Runs(vec![run]))
        };
        let seed = changed(|run| run.job.seed = 2);
        assert_eq!(
            (seed.incomparable.len(), &*seed.parameters),
            (0, &["seed: `1` and `2`".into()][..])
        );
        let size = changed(|run| *run.job.params.get_mut("size").unwrap() = "2M".into());
        assert_eq!(size.parameters, ["size: `1M` and `2M`"]);
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
