//! Sweeps: settings with several values, and the runs that follow from them.
//!
//! `size=2M..96M:2M` is a range with its step, `size=2M,4M,8M` a list. A job's own parameter may be a
//! list too. Several of them give every combination; the last one changes fastest. Invariant: a sweep
//! has at most [`POINTS_MAX`] points.

use crate::job::{Job, JobError};
use crate::quantity::{Dimension, Params, Quantity, evaluate};
use crate::units::Bytes;

/// The most runs of a sweep.
pub const POINTS_MAX: usize = 10_000;

/// The runs of a sweep.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sweep {
    /// The parameters with several values, in the given order.
    pub swept: Vec<String>,
    /// The settings of each run; a single run if nothing is swept.
    pub points: Vec<Params>,
}

impl Sweep {
    /// Expands settings as given to `--set`. If a name occurs twice, the last value counts.
    ///
    /// # Errors
    /// A range has no step, does not end, or mixes units, or the sweep has too many points.
    pub fn new(job: &Job, settings: &[(String, String)]) -> Result<Sweep, JobError> {
        let mut axes: Vec<(String, Vec<String>)> = Vec::new();
        for (name, text) in settings {
            axes.retain(|(known, _)| known != name);
            axes.push((name.clone(), values(name, text)?));
        }
        for (name, param) in job.params() {
            if param.values.len() > 1 && !axes.iter().any(|(known, _)| *known == name) {
                axes.push((name, param.values));
            }
        }
        let total = axes.iter().try_fold(1usize, |total, (_, v)| total.checked_mul(v.len()));
        if total.is_none_or(|total| total > POINTS_MAX) {
            let message = format!("makes more than {POINTS_MAX} runs");
            return Err(error("", &message, "sweep over fewer values"));
        }
        let mut points = vec![Params::new()];
        for (name, values) in &axes {
            let extended = |point: &Params| {
                let with = |value: &String| {
                    let mut point = point.clone();
                    point.insert(name.clone(), value.clone());
                    point
                };
                values.iter().map(with).collect::<Vec<_>>()
            };
            points = points.iter().flat_map(extended).collect();
        }
        let swept = axes.into_iter().filter(|(_, values)| values.len() > 1).map(|(name, _)| name);
        Ok(Sweep { swept: swept.collect(), points })
    }
}

fn error(setting: &str, message: &str, remedy: &str) -> JobError {
    let place = format!("--set {setting}").trim_end().to_string();
    JobError { place, message: message.into(), remedy: remedy.into() }
}

/// Returns the values of one setting: lists of values and ranges.
fn values(name: &str, text: &str) -> Result<Vec<String>, JobError> {
    let mut values = Vec::new();
    for part in text.split(',').map(str::trim) {
        match range(name, part)? {
            Some(range) => values.extend(range),
            None => values.push(part.to_string()),
        }
    }
    Ok(values)
}

/// Expands `FIRST..LAST:STEP`. None if the text is not a range, such as a path with two dots.
fn range(name: &str, text: &str) -> Result<Option<Vec<String>>, JobError> {
    let literal = |text: &str| evaluate(text, &Params::new()).ok();
    let Some((first, rest)) = text.split_once("..") else { return Ok(None) };
    let Some(first) = literal(first) else { return Ok(None) };
    let setting = format!("{name}={text}");
    let wrong = |message: &str| {
        Err(error(&setting, message, "write FIRST..LAST:STEP in one unit, as in 2M..96M:2M"))
    };
    let (Some(last), Some(step)) = rest
        .split_once(':')
        .map_or((literal(rest), None), |(last, step)| (literal(last), literal(step)))
    else {
        return wrong("is a range without an end or a step");
    };
    if first.dimension != last.dimension || first.dimension != step.dimension {
        return wrong("mixes sizes, times and plain numbers");
    }
    if step.value <= 0.0 || last.value < first.value {
        return wrong("does not come to its end");
    }
    // The small addition gives 0.1..0.3:0.1 three values.
    let count = ((last.value - first.value) / step.value + 1e-9).floor() as usize + 1;
    if count > POINTS_MAX {
        return wrong("has too many values");
    }
    let value = |i: usize| write(Quantity { value: first.value + i as f64 * step.value, ..first });
    Ok(Some((0..count).map(value).collect()))
}

/// Writes a quantity as a text that `--set` parses without loss.
fn write(quantity: Quantity) -> String {
    let whole = quantity.value.round() as u64;
    match quantity.dimension {
        Dimension::Number => {
            let rounded = (quantity.value * 1e9).round() / 1e9;
            rounded.to_string()
        }
        Dimension::Time => format!("{whole}ns"),
        Dimension::Size => {
            let short = Bytes(whole).to_string();
            match short.parse::<Bytes>() {
                Ok(Bytes(same)) if same == whole => short,
                _ => format!("{whole}B"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sweep(settings: &[(&str, &str)]) -> Result<Sweep, JobError> {
        let job = Job::builtin("vmtest").unwrap();
        let settings: Vec<_> =
            settings.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
        Sweep::new(&job, &settings)
    }

    fn sizes(text: &str) -> Vec<String> {
        let points = sweep(&[("size", text)]).unwrap().points;
        points.into_iter().map(|mut point| point.remove("size").unwrap()).collect()
    }

    #[test]
    fn ranges_and_lists_are_values() {
        assert_eq!(sizes("2M..8M:2M"), ["2M", "4M", "6M", "8M"]);
        assert_eq!(sizes("2M..7M:2M"), ["2M", "4M", "6M"]);
        assert_eq!(sizes("1M,4M..6M:1M"), ["1M", "4M", "5M", "6M"]);
        assert_eq!(sizes("1..3:1"), ["1", "2", "3"]);
        assert_eq!(sizes("0.1..0.3:0.1"), ["0.1", "0.2", "0.3"]);
        assert_eq!(sizes("1K..1.5K:100B"), ["1K", "1124B", "1224B", "1324B", "1424B", "1524B"]);
        assert_eq!(sizes("40ms..60ms:20ms"), ["40000000ns", "60000000ns"]);
        assert_eq!(sizes("$memory / 4"), ["$memory / 4"]);
        assert_eq!(sizes("../data"), ["../data"]);
    }

    #[test]
    fn several_make_every_combination() {
        let sweep = sweep(&[("size", "2M,4M"), ("loops", "3"), ("switch_rate", "20,50")]).unwrap();
        assert_eq!(sweep.swept, ["size", "switch_rate"]);
        let pairs: Vec<_> =
            sweep.points.iter().map(|p| (p["size"].as_str(), p["switch_rate"].as_str())).collect();
        assert_eq!(pairs, [("2M", "20"), ("2M", "50"), ("4M", "20"), ("4M", "50")]);
        assert!(sweep.points.iter().all(|point| point["loops"] == "3"));
    }

    #[test]
    fn nothing_swept_is_one_run() {
        assert_eq!(sweep(&[]).unwrap().points, [Params::new()]);
        let last = sweep(&[("size", "2M,4M"), ("size", "8M")]).unwrap();
        assert_eq!((last.points.len(), last.swept.len()), (1, 0));
    }

    #[test]
    fn a_jobs_own_list_is_swept() {
        let text = "name = \"mine\"\n[params]\nsize = [\"1M\", \"2M\"]\n[[region]]\nname = \"r\"\n\
                    size = \"$size\"\n[[phase]]\nname = \"p\"\nops = [{ touch = \"r\" }]\n";
        let job = Job::parse(text, "mine.toml").unwrap();
        assert_eq!(Sweep::new(&job, &[]).unwrap().points.len(), 2);
        let chosen = [("size".to_string(), "1M".to_string())];
        assert_eq!(Sweep::new(&job, &chosen).unwrap().points.len(), 1);
    }

    #[test]
    fn mistakes_are_named() {
        let message = |text: &str| sweep(&[("size", text)]).unwrap_err().to_string();
        assert!(message("2M..8M").contains("without an end or a step"));
        assert!(message("2M..8s:1M").contains("mixes"));
        assert!(message("8M..2M:2M").contains("does not come to its end"));
        assert!(message("2M..8M:0M").contains("does not come to its end"));
        assert!(message("1..1000000000:1").contains("too many values"));
        let many = sweep(&[("size", "1..200:1"), ("loops", "1..200:1")]).unwrap_err();
        assert!(many.to_string().contains("more than 10000 runs"));
    }
}
