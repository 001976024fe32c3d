//! A machine model as data: `machines/NAME.toml`.
//!
//! ```toml
//! title = "Sun SPARCstation 1, SunOS 4.0.3"
//! kernel = "sunos"            # the code that runs it
//! base = "sparcstation-1"     # optional: the model whose constants this file changes
//! validated_jobs = ["vmtest"] # jobs whose published figures were compared; not inherited
//! limits = "…"                # optional: published behaviour that it does not show; not inherited
//!
//! [machine]                   # the engine's constants: memory, page, cpus, hz, scheduler, …
//! memory = { value = 12, unit = "MiB", source = "Lawrence (Sun-Managers, 1990)" }
//!
//! [fault]                     # tables of the kernel and of the hardware
//! kernel_time = { value = 262, unit = "us", source = "fitted: regression over the table" }
//!
//! [job.vmtest]                # parameters with which the published figures were measured
//! size = "32M"
//! ```
//!
//! Invariant: every constant has a unit and a source: a citation, "fitted: …" or "assumed: …". A constant
//! without them, or one that no code reads, is an error.

use pagetax_core::quantity::Params;
use pagetax_core::units::{Bytes, Nanos, PageSize};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The reasons why a model cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file that is not TOML, or not in the form above.
    #[error(
        "{file}: {error}\n  hint: each constant is {{ value = 262, unit = \"us\", source = \"...\" }}; see the files in machines/"
    )]
    Syntax {
        /// The name of the model file.
        file: String,
        /// The parser's error, with line and column.
        error: Box<toml::de::Error>,
    },
    /// A constant that is absent, superfluous or invalid.
    #[error("{file}: {key}: {problem}\n  hint: {remedy}")]
    Constant {
        /// The name of the model file.
        file: String,
        /// The constant, as `table.name`.
        key: String,
        /// The problem with the constant.
        problem: String,
        /// The hint that ends the message.
        remedy: String,
    },
    /// `base` names a model that does not exist, or one that has a base itself.
    #[error("{file}: {problem}\n  hint: name one of {known}")]
    Base {
        /// The name of the model file.
        file: String,
        /// The problem with its `base`.
        problem: String,
        /// The models that can be a base.
        known: String,
    },
    /// An unknown model.
    #[error("no machine model `{name}`\n  hint: name one of {known}, or the path of a TOML file")]
    Unknown {
        /// The name that was requested.
        name: String,
        /// The names of the built-in models.
        known: String,
    },
    /// The file cannot be read.
    #[error("{file}: {error}\n  hint: check the path")]
    Read {
        /// The name of the model file.
        file: String,
        /// The error that the read returned.
        error: std::io::Error,
    },
}

/// A value with its unit and its source.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Constant {
    /// A number, or a word for a choice.
    pub value: toml::Value,
    /// The unit of the value: of time, of size, or the thing that is counted.
    pub unit: String,
    /// A citation, "fitted: …" or "assumed: …".
    pub source: String,
}

/// The content of a file.
#[derive(Debug, Clone, Default, Deserialize)]
struct File {
    title: Option<String>,
    kernel: Option<String>,
    base: Option<String>,
    #[serde(default)]
    validated_jobs: Vec<String>,
    limits: Option<String>,
    #[serde(default)]
    job: BTreeMap<String, Params>,
    #[serde(flatten)]
    tables: BTreeMap<String, BTreeMap<String, Constant>>,
}

/// A model: names, and constants by table and name.
#[derive(Debug, Clone)]
pub struct Model {
    /// The model's name, as in `sim:NAME`.
    pub name: String,
    /// The title, which fits on a line.
    pub title: String,
    /// The name of the kernel that runs it.
    pub kernel: String,
    /// The built-in jobs whose published figures were compared with this model. None if the model was
    /// changed, or comes from a user's file.
    pub validated_jobs: Vec<String>,
    /// The published behavior that this model does not show.
    pub limits: Option<String>,
    /// The parameters of jobs on this machine in the published figures.
    pub job_params: BTreeMap<String, Params>,
    tables: BTreeMap<String, BTreeMap<String, Constant>>,
    asked: AskedConstants,
}

/// The constants that were asked for, by table and name. Asking does not change the model for its readers, so
/// the set is behind a lock: machines are shared among threads.
#[derive(Debug, Default)]
struct AskedConstants(Mutex<BTreeSet<(String, String)>>);

impl AskedConstants {
    fn lock(&self) -> MutexGuard<'_, BTreeSet<(String, String)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Clone for AskedConstants {
    fn clone(&self) -> Self {
        AskedConstants(Mutex::new(self.lock().clone()))
    }
}

impl Model {
    /// Parses `text`, the content of a file for the model `name`; `lookup` finds a base's text.
    pub fn parse<'a>(
        name: &str,
        text: &str,
        lookup: impl Fn(&str) -> Option<&'a str>,
    ) -> Result<Self, ModelError> {
        let file = parse_file(name, text)?;
        let base = match &file.base {
            None => File::default(),
            Some(base) => {
                let problem = |problem: String| ModelError::Base {
                    file: format!("{name}.toml"),
                    problem,
                    known: "the built-in models that have no base (`pagetax machines`)".into(),
                };
                let text = lookup(base).ok_or_else(|| problem(format!("no model `{base}`")))?;
                let parsed = parse_file(base, text)?;
                if parsed.base.is_some() {
                    return Err(problem(format!("the base `{base}` has a base itself")));
                }
                parsed
            }
        };
        Model::assemble(name, base, file)
    }

    fn assemble(name: &str, base: File, own: File) -> Result<Self, ModelError> {
        let absent = |key: &str| ModelError::Constant {
            file: format!("{name}.toml"),
            key: key.into(),
            problem: "is absent".into(),
            remedy: format!("add `{key} = …` at the top of the file"),
        };
        let (mut tables, mut job_params) = (base.tables, base.job);
        for (table, constants) in own.tables {
            tables.entry(table).or_default().extend(constants);
        }
        for (job, params) in own.job {
            job_params.entry(job).or_default().extend(params);
        }
        let model = Model {
            name: name.into(),
            title: own.title.or(base.title).ok_or_else(|| absent("title"))?,
            kernel: own.kernel.or(base.kernel).ok_or_else(|| absent("kernel"))?,
            // Figures of the base do not validate a machine that differs from it.
            validated_jobs: own.validated_jobs,
            limits: own.limits,
            job_params,
            tables,
            asked: AskedConstants::default(),
        };
        for (table, key, constant) in model.constants() {
            for (what, text) in [("unit", &constant.unit), ("source", &constant.source)] {
                if text.trim().is_empty() {
                    let remedy =
                        "say where the number comes from, or \"fitted: …\", \"assumed: …\"";
                    return Err(model.error(table, key, format!("its {what} is empty"), remedy));
                }
            }
        }
        Ok(model)
    }

    /// Returns every constant as (table, name, constant), sorted.
    pub fn constants(&self) -> impl Iterator<Item = (&str, &str, &Constant)> {
        self.tables.iter().flat_map(|(table, constants)| {
            constants.iter().map(move |(key, constant)| (table.as_str(), key.as_str(), constant))
        })
    }

    /// Returns true if the file has this table.
    pub fn has_table(&self, table: &str) -> bool {
        self.tables.contains_key(table)
    }

    /// Returns true if there is such a constant.
    pub fn has(&self, table: &str, key: &str) -> bool {
        self.tables.get(table).is_some_and(|constants| constants.contains_key(key))
    }

    /// Returns an error about a constant, in one form.
    pub fn error(
        &self,
        table: &str,
        key: &str,
        problem: impl Into<String>,
        remedy: &str,
    ) -> ModelError {
        ModelError::Constant {
            file: format!("{}.toml", self.name),
            key: format!("{table}.{key}"),
            problem: problem.into(),
            remedy: remedy.into(),
        }
    }

    /// Fails if no code has read a constant: it would have no effect.
    pub fn finish(&self) -> Result<(), ModelError> {
        let asked = self.asked.lock();
        match self.constants().find(|(t, k, _)| !asked.contains(&(t.to_string(), k.to_string()))) {
            None => Ok(()),
            Some((table, key, _)) => {
                let problem = "no part of this machine knows this constant";
                Err(self.error(table, key, problem, "correct its name or remove it"))
            }
        }
    }

    fn constant(&self, table: &str, key: &str) -> Result<&Constant, ModelError> {
        self.asked.lock().insert((table.into(), key.into()));
        self.tables.get(table).and_then(|constants| constants.get(key)).ok_or_else(|| {
            let remedy = "add it: { value = …, unit = \"…\", source = \"…\" }";
            self.error(table, key, "is absent", remedy)
        })
    }

    fn number(&self, table: &str, key: &str) -> Result<(f64, &str), ModelError> {
        let constant = self.constant(table, key)?;
        let value = match &constant.value {
            toml::Value::Integer(n) => *n as f64,
            toml::Value::Float(x) => *x,
            other => {
                let problem = format!("is {other}, not a number");
                return Err(self.error(table, key, problem, "write a number"));
            }
        };
        if !(value.is_finite() && value >= 0.0) {
            let problem = format!("is {value}, not a number of zero or more");
            return Err(self.error(table, key, problem, "write a number of zero or more"));
        }
        Ok((value, &constant.unit))
    }

    /// Returns a time in picoseconds; the unit must be ps, ns, us, ms, s, min or h.
    pub fn ps(&self, table: &str, key: &str) -> Result<u64, ModelError> {
        let (value, unit) = self.number(table, key)?;
        let factor = match unit {
            "ps" => Some(1.0),
            unit => format!("1{unit}").parse::<Nanos>().ok().map(|ns| ns.0 as f64 * 1e3),
        };
        let Some(factor) = factor else {
            let problem = format!("has the unit `{unit}`, which is no time");
            return Err(self.error(table, key, problem, "use ps, ns, us, ms, s, min or h"));
        };
        Ok((value * factor).round() as u64)
    }

    /// Returns a time in nanoseconds.
    pub fn ns(&self, table: &str, key: &str) -> Result<u64, ModelError> {
        Ok((self.ps(table, key)? + 500) / 1000)
    }

    /// Returns a size in bytes; the unit must be bytes, KiB, MiB, GiB or TiB.
    pub fn bytes(&self, table: &str, key: &str) -> Result<u64, ModelError> {
        let (value, unit) = self.number(table, key)?;
        let factor = match unit {
            "bytes" => Some(1.0),
            unit => format!("1{unit}").parse::<Bytes>().ok().map(|bytes| bytes.0 as f64),
        };
        let Some(factor) = factor else {
            let problem = format!("has the unit `{unit}`, which is no size");
            return Err(self.error(table, key, problem, "use bytes, KiB, MiB or GiB"));
        };
        Ok((value * factor).round() as u64)
    }

    /// Returns a page size: a size that is a power of two.
    pub fn page_size(&self, table: &str, key: &str) -> Result<PageSize, ModelError> {
        PageSize::new(self.bytes(table, key)?).map_err(|error| {
            self.error(table, key, error.to_string(), "page sizes are powers of two")
        })
    }

    /// Returns a whole number in the constant's unit.
    pub fn count(&self, table: &str, key: &str) -> Result<u64, ModelError> {
        let (value, unit) = self.number(table, key)?;
        if value.fract() != 0.0 || value > 1e15 {
            let problem = format!("is {value} {unit}, not a whole number");
            return Err(self.error(table, key, problem, "write a whole number"));
        }
        Ok(value as u64)
    }

    /// Returns a whole number of at least 1.
    pub fn positive(&self, table: &str, key: &str) -> Result<u64, ModelError> {
        match self.count(table, key)? {
            0 => Err(self.error(table, key, "is zero", "write a number of at least 1")),
            count => Ok(count),
        }
    }

    /// Returns a whole number that is a power of two.
    pub fn power_of_two(&self, table: &str, key: &str) -> Result<u64, ModelError> {
        let count = self.positive(table, key)?;
        if !count.is_power_of_two() {
            let problem = format!("is {count}, not a power of two");
            return Err(self.error(table, key, problem, "write a power of two"));
        }
        Ok(count)
    }

    /// Returns a share in parts per million; the unit must be percent, permille or 1.
    pub fn ppm(&self, table: &str, key: &str) -> Result<u64, ModelError> {
        let (value, unit) = self.number(table, key)?;
        let factor = match unit {
            "percent" => 1e4,
            "permille" => 1e3,
            "1" => 1e6,
            _ => {
                let problem = format!("has the unit `{unit}`, which is no share");
                return Err(self.error(table, key, problem, "use percent, permille or 1"));
            }
        };
        Ok((value * factor).round() as u64)
    }

    /// Returns a choice: one of `known`.
    pub fn word<T: Copy>(
        &self,
        table: &str,
        key: &str,
        known: &[(&str, T)],
    ) -> Result<T, ModelError> {
        let value = &self.constant(table, key)?.value;
        let found = known.iter().find(|(word, _)| value.as_str() == Some(word));
        found.map(|(_, choice)| *choice).ok_or_else(|| {
            let words: Vec<_> = known.iter().map(|(word, _)| *word).collect();
            let remedy = format!("use one of {}", words.join(", "));
            self.error(table, key, format!("is {value}, which is not known"), &remedy)
        })
    }

    /// Returns a text, such as a list of names.
    pub fn text(&self, table: &str, key: &str) -> Result<&str, ModelError> {
        let value = &self.constant(table, key)?.value;
        value.as_str().ok_or_else(|| {
            self.error(table, key, format!("is {value}, not a text"), "write it in quotes")
        })
    }

    /// Returns a truth value: `true` or `false`.
    pub fn flag(&self, table: &str, key: &str) -> Result<bool, ModelError> {
        let value = &self.constant(table, key)?.value;
        value.as_bool().ok_or_else(|| {
            self.error(table, key, format!("is {value}, not true or false"), "use true or false")
        })
    }

    /// Replaces a constant that exists, with its unit and source. For measured values.
    pub fn replace(
        &mut self,
        table: &str,
        key: &str,
        constant: Constant,
    ) -> Result<(), ModelError> {
        self.constant(table, key)?;
        self.validated_jobs.clear();
        if let Some(old) = self.tables.get_mut(table).and_then(|t| t.get_mut(key)) {
            *old = constant;
        }
        Ok(())
    }

    /// Replaces the value of a constant that exists; for what-if questions and ablations.
    pub fn set(
        &mut self,
        table: &str,
        key: &str,
        value: impl Into<toml::Value>,
    ) -> Result<(), ModelError> {
        self.constant(table, key)?;
        self.validated_jobs.clear();
        if let Some(constant) = self.tables.get_mut(table).and_then(|t| t.get_mut(key)) {
            constant.value = value.into();
            constant.source = "assumed: set by the caller".into();
        }
        Ok(())
    }
}

fn parse_file(name: &str, text: &str) -> Result<File, ModelError> {
    toml::from_str(text).map_err(|error| ModelError::Syntax {
        file: format!("{name}.toml"),
        error: Box::new(error),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: &str = r#"
        title = "A machine"
        kernel = "none"
        validated_jobs = ["vmtest"]
        limits = "does not sleep"
        [fault]
        time = { value = 1.04, unit = "us", source = "fitted: by hand" }
        pages = { value = 3, unit = "pages", source = "Lawrence (Sun-Managers, 1990)" }
        policy = { value = "fifo", unit = "policy", source = "assumed: simple" }
        [machine]
        page = { value = 4, unit = "KiB", source = "Lawrence (Sun-Managers, 1990)" }
        [job.vmtest]
        size = "32M"
    "#;

    fn parse(text: &str) -> Result<Model, ModelError> {
        Model::parse("test", text, |name| (name == "base").then_some(BASE))
    }

    fn message<T>(result: Result<T, ModelError>) -> String {
        result.err().expect("an error").to_string()
    }

    #[test]
    fn constants_have_units_and_choices() {
        let model = parse(BASE).unwrap();
        assert_eq!(model.ns("fault", "time").unwrap(), 1040);
        assert_eq!(model.count("fault", "pages").unwrap(), 3);
        assert_eq!(model.page_size("machine", "page").unwrap(), PageSize::K4);
        assert_eq!(model.word("fault", "policy", &[("lru", 1), ("fifo", 2)]).unwrap(), 2);
        assert_eq!(model.job_params["vmtest"]["size"], "32M");
        model.finish().unwrap();
    }

    #[test]
    fn overlays_change_what_they_name() {
        let overlay = "base = \"base\"\ntitle = \"Another\"\n[fault]\n\
                       pages = { value = 4, unit = \"pages\", source = \"assumed: more\" }";
        let model = parse(overlay).unwrap();
        assert_eq!(model.title, "Another");
        assert!(model.validated_jobs.is_empty() && model.limits.is_none(), "of the base alone");
        assert_eq!(model.count("fault", "pages").unwrap(), 4);
        assert_eq!(model.ns("fault", "time").unwrap(), 1040);
        assert!(message(parse("base = \"nobody\"")).contains("no model `nobody`"));
    }

    #[test]
    fn a_changed_model_is_not_the_one_that_was_checked() {
        let mut model = parse(BASE).unwrap();
        assert_eq!(model.validated_jobs, ["vmtest"]);
        model.set("fault", "pages", 4).unwrap();
        assert!(model.validated_jobs.is_empty());
        let constant = model.constant("fault", "time").unwrap().clone();
        let mut model = parse(BASE).unwrap();
        model.replace("fault", "time", constant).unwrap();
        assert!(model.validated_jobs.is_empty());
    }

    #[test]
    fn what_is_wrong_is_said() {
        let without_source = BASE.replace(", source = \"Lawrence (Sun-Managers, 1990)\"", "");
        assert!(message(parse(&without_source)).contains("missing field `source`"));
        let empty_source = BASE.replace("\"Lawrence (Sun-Managers, 1990)\"", "\" \"");
        assert!(message(parse(&empty_source)).contains("fault.pages: its source is empty"));
        let model = parse(BASE).unwrap();
        assert!(message(model.finish()).contains("no part of this machine knows"));
        assert!(message(model.count("fault", "time")).contains("not a whole number"));
        assert!(message(model.bytes("fault", "time")).contains("no size"));
        assert!(message(model.ns("fault", "pages")).contains("no time"));
        assert!(message(model.power_of_two("fault", "pages")).contains("not a power of two"));
        assert!(message(model.word("fault", "policy", &[("lru", ())])).contains("use one of lru"));
        assert!(message(model.ns("fault", "nothing")).contains("fault.nothing: is absent"));
        let zero = BASE.replace("value = 3", "value = 0");
        assert!(message(parse(&zero).unwrap().positive("fault", "pages")).contains("is zero"));
    }
}
