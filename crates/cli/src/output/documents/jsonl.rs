//! The series of runs as JSON Lines: one object a point, for programs that read line by line.

use anyhow::Result;
use pagetax_core::report::{Run, Runs};
use serde_json::{Map, Value};

/// Renders a line for each point. What is missing at a point is null.
pub fn render(document: &Runs) -> Result<String> {
    Ok(document.runs.iter().enumerate().map(|(nth, run)| lines(nth, run)).collect())
}

fn lines(nth: usize, run: &Run) -> String {
    let columns = &run.series.columns;
    let count = columns.values().map(Vec::len).max().unwrap_or(0);
    let at = |point: usize| {
        let value = move |(id, values): (&String, &Vec<Option<u64>>)| {
            (id.clone(), values.get(point).copied().flatten())
        };
        line(nth, (&run.job.name, &run.machine.name), columns.iter().map(value))
    };
    (0..count).map(at).collect()
}

/// Renders one point of the series of a run, whose number among the command's runs begins at 0.
pub fn line(
    nth: usize,
    (job, machine): (&str, &str),
    values: impl Iterator<Item = (String, Option<u64>)>,
) -> String {
    let head = [("run", Value::from(nth + 1)), ("job", job.into()), ("machine", machine.into())];
    let head = head.into_iter().map(|(key, value)| (key.to_string(), value));
    let values = values.map(|(id, value)| (id, value.map_or(Value::Null, Value::from)));
    Value::Object(head.chain(values).collect::<Map<_, _>>()).to_string() + "\n"
}
