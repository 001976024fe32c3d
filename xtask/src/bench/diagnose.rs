//! The accuracy of `diagnose`: its speed-ups of real programs beside a plain A/B test of the same commands
//! without sampling. Their outputs must agree.

use super::programs::{Workshop, chosen};
use super::{Outcome, pagetax};
use crate::shell;
use anyhow::{Context, Result};
use pagetax_core::diagnosis::Diagnosis;
use pagetax_core::stats::{Ratio, ratio_of_pairs};
use serde_json::json;
use std::path::Path;
use std::process::Command;

const ROUNDS: usize = 8;
const TUNABLE: (&str, &str) = ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1");

/// Benches the named programs, or all.
pub fn run(names: &[String]) -> Result<Outcome> {
    let (pagetax, workshop) = (pagetax()?, Workshop::new(1)?);
    let (mut rows, mut results, mut fine) = (Vec::new(), Vec::new(), true);
    for program in chosen(names)? {
        let Some(script) = workshop.script(program)? else {
            rows.push(vec![program.name.into(), "not installed".into()]);
            continue;
        };
        eprintln!("{}: {ROUNDS} rounds of each", program.name);
        let (plain, expected) = measured(&script, &workshop)?;
        let kept = workshop.path(&format!("outputs-{}", program.name));
        let told = diagnosed(&pagetax, &script, &kept)?;
        let overlap = told.low <= plain.high && plain.low <= told.high;
        let unharmed = all_hold(&kept, &expected)?;
        fine &= overlap && unharmed;
        rows.push(vec![
            program.name.into(),
            told.to_string(),
            plain.to_string(),
            if overlap { "agree" } else { "DIFFER" }.into(),
            if unharmed { "the same" } else { "CHANGED" }.into(),
        ]);
        results.push(json!({"program": program.name, "diagnose": told, "plain": plain,
            "agree": overlap, "output_unharmed": unharmed}));
    }
    Ok(Outcome {
        headings: vec!["program", "diagnose: 2M speed-up", "plain A/B", "", "output"],
        rows,
        json: json!(results),
        promise: (
            "intervals of diagnose and a plain A/B overlap, outputs are the same".into(),
            fine,
        ),
    })
}

/// Returns the speed-up by diagnose, and keeps the outputs of all runs.
fn diagnosed(pagetax: &str, script: &str, kept: &Path) -> Result<Ratio> {
    let runs = ROUNDS.to_string();
    let options = ["diagnose", "--json", "--sizes", "2M", "--runs", &runs, "--outputs"];
    let mut command = Command::new(pagetax);
    command.args(options).arg(kept).args(["--", "sh", "-c", script]);
    let diagnosis: Diagnosis = serde_json::from_str(&shell::output(&mut command)?)?;
    let trial = diagnosis.trials.iter().find(|t| t.name == "thp-2M");
    trial
        .and_then(|t| t.speedup)
        .context("no trial on 2M pages; set /sys/kernel/mm/transparent_hugepage/enabled to madvise")
}

/// Returns the time as is ÷ the time with the tunable, in alternating order, and the program's output.
fn measured(script: &str, workshop: &Workshop) -> Result<(Ratio, Vec<u8>)> {
    let expected = workshop.run(script, &[])?.output;
    let (mut plain, mut tuned) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        for turn in 0..2 {
            let (variables, times): (&[_], _) = match (round + turn) % 2 {
                0 => (&[], &mut plain),
                _ => (&[TUNABLE], &mut tuned),
            };
            times.push(workshop.run(script, variables)?.wall_ns);
        }
    }
    Ok((ratio_of_pairs(&plain, &tuned, 1).context("runs without a time")?, expected))
}

/// Returns true if the standard output of every run is as expected.
fn all_hold(kept: &Path, expected: &[u8]) -> Result<bool> {
    let mut outputs = Vec::new();
    for entry in std::fs::read_dir(kept)? {
        let path = entry?.path();
        if path.extension().is_some_and(|ending| ending == "out") {
            outputs.push(std::fs::read(path)?);
        }
    }
    Ok(outputs.len() > 2 * ROUNDS && outputs.iter().all(|output| output == expected))
}
