//! The job file as written: serde types and the parser. Nothing is evaluated here.

use super::{JobError, line_and_column, nearest};
use crate::replay::RecordedProgram;
use serde::Deserialize;
use std::collections::BTreeMap;
use toml::Spanned;

/// A parsed job file.
#[derive(Debug, Clone)]
pub struct Job {
    /// The file's own text, for messages and for showing.
    pub text: String,
    /// The file's name in messages.
    pub place: String,
    /// The recorded program of `replay`; none for a job from a file.
    pub(super) recording: Option<RecordedProgram>,
    pub(super) document: JobDocument,
}

/// A parameter of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Param {
    /// Its default; several make a sweep.
    pub values: Vec<String>,
    /// The meaning in one line; may be empty.
    pub meaning: String,
}

/// A scalar as users write it: `16`, `0.99`, `"2M"`, `"$size / 2"`.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub(super) enum Scalar {
    Whole(u64),
    Fraction(f64),
    Text(String),
}

impl Scalar {
    pub(super) fn text(&self) -> String {
        match self {
            Scalar::Whole(number) => number.to_string(),
            Scalar::Fraction(number) => number.to_string(),
            Scalar::Text(text) => text.clone(),
        }
    }
}

/// A value with its place in the file.
pub(super) type Field = Spanned<Scalar>;
/// A word with its place in the file.
pub(super) type Word = Spanned<String>;

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct JobDocument {
    pub name: String,
    #[serde(default)]
    pub summary: String,
    #[serde(default)]
    pub source: String,
    #[serde(default = "default_seed")]
    pub seed: u64,
    #[serde(default)]
    pub params: BTreeMap<String, RawParam>,
    #[serde(default)]
    pub region: Vec<RawRegion>,
    #[serde(default)]
    pub phase: Vec<RawPhase>,
    #[serde(default)]
    pub measure: RawMeasure,
    #[serde(default)]
    pub native: RawNative,
}

fn default_seed() -> u64 {
    1
}

#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub(super) enum RawParam {
    Plain(Scalar),
    Sweep(Vec<Scalar>),
    Described(DescribedParam),
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DescribedParam {
    pub default: ScalarOrList,
    #[serde(default)]
    pub meaning: String,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub(super) enum ScalarOrList {
    One(Scalar),
    Many(Vec<Scalar>),
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawRegion {
    pub name: Word,
    pub size: Field,
    pub backing: Option<Word>,
    pub count: Option<Field>,
    pub page_size: Option<Word>,
    #[serde(default)]
    pub advice: Vec<Word>,
    pub mapped: Option<bool>,
    pub directory: Option<Word>,
    pub private: Option<bool>,
    pub resident: Option<Field>,
    pub serving: Option<Word>,
    pub places: Option<Field>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawPhase {
    pub name: Word,
    pub clients: Option<Field>,
    pub client_kind: Option<Word>,
    pub repeat: Option<Field>,
    pub time: Option<Field>,
    pub rate: Option<Field>,
    pub switch_rate: Option<Field>,
    pub for_each: Option<Word>,
    pub window: Option<Field>,
    pub ops: Vec<Spanned<RawOp>>,
    #[serde(default)]
    pub undo: Vec<Spanned<RawOp>>,
}

/// One operation: exactly one of the verbs, with its own options.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawOp {
    pub map: Option<Word>,
    pub unmap: Option<Word>,
    pub lock: Option<Word>,
    pub unlock: Option<Word>,
    pub advise: Option<Word>,
    pub touch: Option<Word>,
    pub replay: Option<Word>,
    pub sleep: Option<Field>,
    pub barrier: Option<bool>,
    // of lock
    pub chunk: Option<Field>,
    pub how: Option<Word>,
    // of advise
    pub advice: Option<Word>,
    // of touch
    pub access: Option<Word>,
    pub pattern: Option<Word>,
    pub stride: Option<Field>,
    pub theta: Option<Field>,
    pub count: Option<Field>,
    pub grain: Option<Field>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawMeasure {
    pub interval: Option<Field>,
    #[serde(default)]
    pub fault_latency: bool,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawNative {
    pub flip_byte_at: Option<Field>,
}

impl Job {
    /// Parses a job file. `place` is its name in messages.
    ///
    /// # Errors
    /// The first mistake, with line, column and remedy.
    pub fn parse(text: &str, place: &str) -> Result<Job, JobError> {
        let document =
            toml::from_str::<JobDocument>(text).map_err(|e| syntax_error(text, place, &e))?;
        let job = Job { text: text.into(), place: place.into(), recording: None, document };
        if job.document.phase.is_empty() {
            return Err(JobError {
                place: place.into(),
                message: format!("job `{}` has no phase, so there is nothing to run", job.name()),
                remedy: "add a [[phase]] with ops = [{ touch = \"REGION\" }]".into(),
            });
        }
        Ok(job)
    }

    /// Returns the name that the job file gives.
    pub fn name(&self) -> &str {
        &self.document.name
    }

    /// Returns a summary of one line.
    pub fn summary(&self) -> &str {
        &self.document.summary
    }

    /// Returns the source of the job; may be empty.
    pub fn source(&self) -> &str {
        &self.document.source
    }

    /// Returns the parameters with their defaults.
    pub fn params(&self) -> BTreeMap<String, Param> {
        let texts = |list: &[Scalar]| list.iter().map(Scalar::text).collect::<Vec<_>>();
        let param = |raw: &RawParam| match raw {
            RawParam::Plain(value) => Param { values: vec![value.text()], meaning: String::new() },
            RawParam::Sweep(values) => Param { values: texts(values), meaning: String::new() },
            RawParam::Described(described) => Param {
                values: match &described.default {
                    ScalarOrList::One(value) => vec![value.text()],
                    ScalarOrList::Many(values) => texts(values),
                },
                meaning: described.meaning.clone(),
            },
        };
        self.document.params.iter().map(|(name, raw)| (name.clone(), param(raw))).collect()
    }
}

/// Converts an error of TOML or serde, and adds a remedy.
fn syntax_error(text: &str, place: &str, error: &toml::de::Error) -> JobError {
    let place = match error.span() {
        Some(span) => {
            let (line, column) = line_and_column(text, span.start);
            format!("{place}:{line}:{column}")
        }
        None => place.to_string(),
    };
    let message = error.message().trim().replace('\n', "; ");
    let remedy = suggest(&message);
    JobError { place, message, remedy }
}

/// Returns "Did you mean" for serde's errors about unknown fields, else a general remedy.
fn suggest(message: &str) -> String {
    let quoted: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
    let general = "`pagetax jobs vmtest` prints a job to start from";
    match quoted.split_first() {
        Some((unknown, known)) if message.starts_with("unknown") => {
            match nearest(unknown, known.iter().copied()) {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("use one of the expected keys, or remove it; {general}"),
            }
        }
        Some((field, _)) if message.starts_with("missing field") => format!("add `{field} = …`"),
        _ => general.to_string(),
    }
}
