//! Documents of `pagetax stat`.

use anyhow::{Context, Result};
use serde_json::Value;

/// Returns the seconds of CPU time in some rows of a document of stat.
pub fn seconds_of(document: &Value, ids: &[&str]) -> Result<f64> {
    let intervals = document["intervals"].as_array().context("no intervals")?;
    let rows = intervals.iter().filter_map(|one| one["budget"]["cpu"].as_array()).flatten();
    let rows = rows.filter(|row| ids.iter().any(|id| row["id"] == *id));
    Ok(rows.filter_map(|row| row["ns"].as_f64()).sum::<f64>() / 1e9)
}
