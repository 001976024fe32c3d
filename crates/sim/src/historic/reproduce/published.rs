//! The published tables and claims, as data: `published/*.toml` and the tables beside them.
//!
//! A file names runs (machine, job, parameters), sweeps over the rows of a published table, and
//! checks of single claims. Invariant: every figure says whether the model's constants were fitted to
//! it (calibrated) or not (predicted). FigureValues that no report prints are counted apart (consistency),
//! what no wrong model can miss is never checked (derived), and all of these say why.

use super::ReproduceError;
use super::expression::Expression;
use pagetax_core::quantity::Params;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU64;

/// Name and text of each file, in the order of reports.
const BUILTIN: &[(&str, &str)] = &[
    ("sun-4", include_str!("../../../../../published/sun-4.toml")),
    ("ultrasparc", include_str!("../../../../../published/ultrasparc.toml")),
    ("linux-24", include_str!("../../../../../published/linux-24.toml")),
    ("alpha-nms", include_str!("../../../../../published/alpha-nms.toml")),
];

/// The tables that the files name.
const TABLES: &[(&str, &str)] = &[
    (
        "sparcstation1-sunos403-vmtest.csv",
        include_str!("../../../../../published/sparcstation1-sunos403-vmtest.csv"),
    ),
    (
        "sparcstation1-pmeg-patch-vmtest.csv",
        include_str!("../../../../../published/sparcstation1-pmeg-patch-vmtest.csv"),
    ),
    (
        "sparcstation1plus-pmeg-patch-vmtest.csv",
        include_str!("../../../../../published/sparcstation1plus-pmeg-patch-vmtest.csv"),
    ),
];

/// How a simulated figure relates to the published one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// A constant of the model was fitted to it.
    Calibrated,
    /// It follows from constants that were not fitted to it.
    Predicted,
    /// The report makes the claim in words, or the number is this project's own. Checked like the
    /// others, and counted apart from published figures.
    Consistency,
    /// Arithmetic of published figures, or a number taken over from the report: no wrong model can
    /// miss it. Shown, and never checked.
    Derived,
    /// The model cannot say it.
    NotReproducible,
}

impl Status {
    /// Returns true if the number stands in a report and the model can miss it.
    pub fn is_published(self) -> bool {
        matches!(self, Status::Calibrated | Status::Predicted)
    }
}

/// A file.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Published {
    /// The title of the published table.
    pub title: String,
    /// The source of the published figures.
    pub source: String,
    /// Notes on all figures, such as how runs become figures; a paragraph each.
    #[serde(default)]
    pub notes: Vec<String>,
    /// Runs that figures are taken from.
    #[serde(default)]
    pub run: BTreeMap<String, Setup>,
    /// Runs over the rows of a table.
    #[serde(default)]
    pub sweep: Vec<TableSweep>,
    /// The checks of single figures.
    #[serde(default)]
    pub check: Vec<Check>,
}

/// How to run something.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Setup {
    /// The simulated machine that runs the job.
    pub machine: String,
    /// The built-in job that it runs.
    pub job: String,
    /// Parameters of the job, beside the machine's own.
    #[serde(default)]
    pub params: Params,
    /// Constants of the model that are another here, as `table.name`.
    #[serde(default)]
    pub set: BTreeMap<String, toml::Value>,
    /// The number of consecutive seeds of which only the run with the least elapsed time counts, with all its
    /// figures. Seeds that fill no such group are not run.
    #[serde(default = "one")]
    pub least_of: NonZeroU64,
    /// The interval of the series, such as `1s`, if the job has none.
    pub interval: Option<String>,
}

impl Setup {
    /// Returns true if one simulation serves both, whichever of its runs they take.
    pub fn is_same_run(&self, other: &Setup) -> bool {
        *self == Setup { least_of: self.least_of, ..other.clone() }
    }
}

/// A run for each row of a published table, named `NAME@KEY`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableSweep {
    /// The first part of its runs' names.
    pub name: String,
    /// The table's file in `published/`.
    pub table: String,
    /// The column that tells rows apart.
    pub key: String,
    /// Only these rows, if given.
    pub keys: Option<Vec<f64>>,
    /// The parameter of the job that takes the key, with `unit` behind it.
    pub param: String,
    /// The unit of the keys: `M`, or nothing.
    #[serde(default)]
    pub unit: String,
    /// The setup that all rows share.
    pub setup: Setup,
    /// The compared columns; may be empty, when only checks use the runs.
    #[serde(default)]
    pub column: Vec<Column>,
    /// False if its rows are for checks of the whole only, as those of an ablation are.
    #[serde(default = "yes")]
    pub listed: bool,
}

fn yes() -> bool {
    true
}

fn one() -> NonZeroU64 {
    NonZeroU64::MIN
}

/// A column of a sweep's table.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Column {
    /// The table's heading, or several with ` + ` between them.
    pub figure: String,
    /// The table's heading, where the figure is called something else.
    pub heading: Option<String>,
    /// An expression in which `row` is the run of the row, and `row.key` its key.
    pub value: String,
    /// The reason for agreement: fitted or predicted.
    pub status: Status,
    /// The accepted ratios by key. Rows in no band are reported, and not asserted.
    #[serde(default)]
    pub tolerance: Vec<Band>,
}

/// A tolerance for some rows.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Band {
    /// The first key of the band.
    #[serde(default)]
    pub from: f64,
    /// The last key of the band.
    #[serde(default = "infinity")]
    pub to: f64,
    /// Simulated over published, least and most.
    pub ratio: Option<[f64; 2]>,
    /// Simulated less published, least and most.
    pub difference: Option<[f64; 2]>,
}

fn infinity() -> f64 {
    f64::INFINITY
}

/// A single figure.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Check {
    /// The quantity with its unit.
    pub figure: String,
    /// The number that was published, or that the claim amounts to.
    pub published: f64,
    /// An expression; none if it is not reproducible.
    pub value: Option<String>,
    /// Simulated over published, least and most.
    pub ratio: Option<[f64; 2]>,
    /// The simulated value, least and most.
    pub range: Option<[f64; 2]>,
    /// The reason for agreement: fitted or predicted.
    pub status: Status,
    /// Needed where it is not reproducible; a remark elsewhere.
    #[serde(default)]
    pub why: String,
}

/// A row of a published table: heading and number, where there is one.
pub type Cells = BTreeMap<String, f64>;

/// A published table.
#[derive(Debug, Clone, PartialEq)]
pub struct Table {
    /// The rows, in the order of the file.
    pub rows: Vec<Cells>,
}

/// Returns the names of all files.
pub fn names() -> impl Iterator<Item = &'static str> {
    BUILTIN.iter().map(|(name, _)| *name)
}

fn problem(file: &str, problem: impl ToString) -> ReproduceError {
    ReproduceError::Data { file: file.into(), problem: problem.to_string() }
}

/// Returns a published file by name.
///
/// # Errors
/// If there is none, or if it contradicts itself.
pub fn find(name: &str) -> Result<Published, ReproduceError> {
    let (_, text) = BUILTIN.iter().find(|(known, _)| *known == name).ok_or_else(|| {
        let known = names().collect::<Vec<_>>().join(", ");
        ReproduceError::Unknown { name: name.into(), known }
    })?;
    parse(name, text)
}

/// Parses and checks a file.
pub(super) fn parse(name: &str, text: &str) -> Result<Published, ReproduceError> {
    let published: Published = toml::from_str(text).map_err(|error| problem(name, error))?;
    for check in &published.check {
        check.consistent().map_err(|text| problem(name, format!("`{}` {text}", check.figure)))?;
    }
    published.check_expressions().map_err(|text| problem(name, text))?;
    Ok(published)
}

/// Returns a table by its file's name.
///
/// # Errors
/// If there is none, or if it is not made of numbers.
pub fn table(name: &str) -> Result<Table, ReproduceError> {
    let (_, text) = TABLES
        .iter()
        .find(|(known, _)| *known == name)
        .ok_or_else(|| problem(name, "is no table in published/"))?;
    let mut lines = text.lines();
    let headings: Vec<&str> = lines.next().unwrap_or_default().split(',').collect();
    let row = |line: &str| {
        let cells = headings.iter().zip(line.split(',')).filter(|(_, cell)| !cell.is_empty());
        let number = |(heading, cell): (&&str, &str)| match cell.parse() {
            Ok(number) => Ok((heading.to_string(), number)),
            Err(_) => Err(problem(name, format!("`{cell}` is no number"))),
        };
        cells.map(number).collect::<Result<Cells, _>>()
    };
    Ok(Table { rows: lines.map(row).collect::<Result<_, _>>()? })
}

impl Check {
    /// Checks that status, value, tolerance and reason go together.
    fn consistent(&self) -> Result<(), &'static str> {
        let impossible = self.status == Status::NotReproducible;
        let asserted = self.ratio.is_some() || self.range.is_some();
        match self.status {
            _ if impossible != self.value.is_none() || (impossible && self.why.is_empty()) => {
                Err("needs a value, or the status not_reproducible and why")
            }
            Status::Consistency | Status::Derived if self.why.is_empty() => {
                Err("stands in no report, and does not say why it is here")
            }
            Status::Derived if asserted => Err("is derived: no model can miss its tolerance"),
            _ => Ok(()),
        }
    }
}

impl TableSweep {
    /// Returns the rows that are wanted: key and published numbers.
    ///
    /// # Errors
    /// If the table is not there.
    pub fn rows(&self) -> Result<Vec<(f64, Cells)>, ReproduceError> {
        let rows = table(&self.table)?.rows.into_iter();
        let keyed = rows.filter_map(|row| row.get(&self.key).copied().map(|key| (key, row)));
        let wanted = |key: &f64| self.keys.as_ref().is_none_or(|keys| keys.contains(key));
        Ok(keyed.filter(|(key, _)| wanted(key)).collect())
    }

    /// Returns the run of a row.
    pub fn run_name(&self, key: f64) -> String {
        format!("{}@{key}", self.name)
    }
}

impl Published {
    /// Returns every run by name.
    ///
    /// # Errors
    /// If a table is not there.
    pub fn setups(&self) -> Result<BTreeMap<String, Setup>, ReproduceError> {
        let mut setups = self.run.clone();
        for sweep in &self.sweep {
            for (key, _) in sweep.rows()? {
                let mut setup = sweep.setup.clone();
                setup.params.insert(sweep.param.clone(), format!("{key}{}", sweep.unit));
                setups.insert(sweep.run_name(key), setup);
            }
        }
        Ok(setups)
    }

    /// Checks that every expression parses and names runs that exist.
    fn check_expressions(&self) -> Result<(), String> {
        let known: BTreeSet<String> =
            self.setups().map_err(|error| error.to_string())?.into_keys().collect();
        let columns = self.sweep.iter().flat_map(|sweep| &sweep.column);
        let texts = columns.map(|column| column.value.as_str());
        for text in texts.chain(self.check.iter().filter_map(|check| check.value.as_deref())) {
            let expression =
                Expression::parse(text).map_err(|error| format!("`{text}`: {error}"))?;
            for (run, _) in expression.terms() {
                if run != "row" && !known.contains(run) {
                    return Err(format!("`{text}`: there is no run `{run}`"));
                }
            }
        }
        Ok(())
    }
}
