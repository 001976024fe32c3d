//! The search of `pagetax diagnose --parts`: a program of which a sixth of the memory keeps the gain of large
//! pages, three times, and one whose whole memory gains alike.

use super::{Outcome, pagetax};
use crate::shell;
use anyhow::{Context, Result};
use pagetax_core::diagnosis::{Diagnosis, PartsSearch};
use serde_json::json;
use std::process::Command;

const MOSAICS: &str = "xtask/src/bench/mosaics.c";
const CORPUS: &str = "xtask/src/bench/whatif_corpus.c";
/// The most runs of a search.
const RUNS_MAX: u64 = 12;

/// A program, its arguments, how often it is searched, and true if there is a set.
const PROGRAMS: [(&str, &str, &[&str], usize, bool); 2] = [
    ("hot range", MOSAICS, &["hot", "80"], 3, true),
    ("uniform", CORPUS, &["uniform", "256", "40"], 1, false),
];

pub fn run() -> Result<Outcome> {
    let (pagetax, folder) = (pagetax()?, tempfile::tempdir()?);
    let (mut rows, mut results, mut is_kept) = (Vec::new(), Vec::new(), true);
    for (name, source, arguments, searches, has_set) in PROGRAMS {
        let program = folder.path().join(name);
        shell::succeed(Command::new("cc").args(["-O1", "-o"]).arg(&program).arg(source))?;
        for _ in 0..searches {
            let mut diagnose = Command::new(&pagetax);
            diagnose.args(["diagnose", "--parts", "--json", "--"]);
            let text = shell::output(diagnose.arg(&program).args(arguments))?;
            let diagnosis: Diagnosis = serde_json::from_str(&text)?;
            let search = diagnosis.parts.context("the diagnosis has no search")?;
            is_kept &= search.is_found == has_set && search.run_count <= RUNS_MAX;
            rows.push(row(name, &search));
            results.push(json!({ "program": name, "search": search }));
        }
    }
    Ok(Outcome {
        headings: vec!["program", "set", "memory", "gain predicted", "gain measured", "runs"],
        rows,
        json: json!(results),
        promise: (
            format!(
                "a set of a fifth of the memory with nine tenths of the gain is found in {RUNS_MAX} runs, \
                 and none where there is none"
            ),
            is_kept,
        ),
    })
}

fn row(program: &str, search: &PartsSearch) -> Vec<String> {
    let percent = |share: f64| format!("{:.0} %", share * 100.0);
    let or_none = |share: Option<f64>| share.map_or("–".into(), percent);
    let measured = search.gain_share.map_or("–".into(), |gain| {
        let (value, low, high) = (gain.value * 100.0, gain.low * 100.0, gain.high * 100.0);
        format!("{value:.0} % ({low:.0}–{high:.0})")
    });
    let set = match &search.patterns {
        Some(patterns) if search.is_found => format!("`{patterns}`"),
        _ => "none".into(),
    };
    vec![
        program.into(),
        set,
        or_none(search.memory_share),
        or_none(search.predicted_gain_share),
        measured,
        search.run_count.to_string(),
    ]
}
