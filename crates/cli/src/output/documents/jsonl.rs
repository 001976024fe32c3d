//! The series of runs as JSON Lines: one object a point, for programs that read line by line.

use anyhow::Result;
use pagetax_core::report::{Run, Runs};
use serde_json::{Map, Value};

/// Renders a line for each point. What is missing at a point is null.
pub fn render(document: &Runs) -> Result<String> {
    document.runs.iter().map(lines).collect()
}

fn lines(run: &Run) -> Result<String> {
    let columns = &run.series.columns;
    let count = columns.values().map(Vec::len).max().unwrap_or(0);
    let point = |nth: usize| -> Result<String> {
        let mut point = Map::new();
        point.insert("job".into(), run.job.name.clone().into());
        point.insert("machine".into(), run.machine.name.clone().into());
        for (id, values) in columns {
            point.insert(
                id.clone(),
                values.get(nth).copied().flatten().map_or(Value::Null, Value::from),
            );
        }
        Ok(serde_json::to_string(&point)? + "\n")
    };
    (0..count).map(point).collect()
}
