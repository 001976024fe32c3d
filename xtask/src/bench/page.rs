//! The time in which the page of a large document opens: from the start of the navigation to the first frame
//! with its charts, in a real browser.

use super::Outcome;
use crate::{shell, web};
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// A line of `web/bench/open.js`.
#[derive(Deserialize, Serialize)]
struct Case {
    case: String,
    json_bytes: u64,
    milliseconds_median: f64,
    limit_ms: f64,
}

pub fn run() -> Result<Outcome> {
    web::prepare()?;
    let printed = shell::output(web::in_sources("node").arg("bench/open.js"))?;
    let lines = printed.lines().filter(|line| line.starts_with('{'));
    let cases: Vec<Case> = lines
        .map(serde_json::from_str)
        .collect::<Result<_, _>>()
        .with_context(|| format!("web/bench/open.js printed: {printed}"))?;
    let row = |case: &Case| {
        vec![
            case.case.clone(),
            format!("{:.1} MB", case.json_bytes as f64 / 1e6),
            format!("{:.0} ms", case.milliseconds_median),
        ]
    };
    let holds = |case: &Case| case.milliseconds_median <= case.limit_ms;
    Ok(Outcome {
        headings: vec!["document", "JSON", "opens in, median of 5"],
        rows: cases.iter().map(row).collect(),
        promise: ("each opens in at most 1 s".into(), !cases.is_empty() && cases.iter().all(holds)),
        json: json!(cases),
    })
}
