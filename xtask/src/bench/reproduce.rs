//! What `pagetax reproduce all` takes: every published figure, 9 seeds, on one core.

use super::{Outcome, pagetax};
use crate::shell;
use anyhow::{Context, Result};
use pagetax_core::stats::quantiles;
use serde_json::json;
use std::process::Command;

const LIMIT_S: f64 = 2.0;
const ROUNDS: usize = 3;

pub fn run() -> Result<Outcome> {
    let pagetax = pagetax()?;
    let user_s = (0..ROUNDS).map(|_| user_seconds(&pagetax)).collect::<Result<Vec<_>>>()?;
    let [least, median, most] = quantiles(&user_s, [0.0, 0.5, 1.0]);
    let row = |name: &str, s: f64| vec![name.to_string(), format!("{s:.2}")];
    Ok(Outcome {
        headings: vec!["reproduce all, 9 seeds, one core", "user s"],
        rows: vec![row("least", least), row("median", median), row("most", most)],
        json: json!({"user_s": user_s}),
        promise: (format!("at most {LIMIT_S} s of user time in the median"), median <= LIMIT_S),
    })
}

/// Returns the user time, because a busy neighbour stretches the wall clock only. It comes from the shell's
/// `times`, whose second line covers its children.
fn user_seconds(pagetax: &str) -> Result<f64> {
    let script = "taskset -c 0 \"$0\" reproduce all --seeds 9 > /dev/null && times";
    let times = shell::output(Command::new("sh").args(["-c", script, pagetax]))?;
    let user = times.lines().nth(1).and_then(|line| line.split_whitespace().next());
    let parsed = user.and_then(|user| {
        let (minutes, seconds) = user.strip_suffix('s')?.split_once('m')?;
        Some(minutes.parse::<f64>().ok()? * 60.0 + seconds.parse::<f64>().ok()?)
    });
    parsed.with_context(|| format!("`times` of the shell printed {times:?}"))
}
