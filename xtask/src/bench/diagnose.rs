//! The accuracy of `diagnose`: the speed-up that it promises beside that of the line that it prints, in a
//! plain A/B test of the bare command and that line. Their outputs must agree.

use super::programs::{ProgramRun, Workshop, chosen};
use super::{Outcome, pagetax};
use crate::shell;
use anyhow::{Context, Result};
use pagetax_core::diagnosis::{Basis, Diagnosis};
use pagetax_core::stats::{Ratio, ratio_of_pairs};
use serde_json::json;
use std::path::Path;
use std::process::{Child, Command};

const ROUNDS: usize = 24;
/// The part that keeps all CPUs busy.
const BUSY: &str = "busy";
/// Without a recommendation, this stands in for the line: glibc's own way to get large pages.
const TUNABLE: &str = "GLIBC_TUNABLES=glibc.malloc.hugetlb=1";

/// Benches the named programs, or all; after `busy`, beside as many loops as there are CPUs.
pub fn run(parts: &[String]) -> Result<Outcome> {
    let (busy, names): (Vec<_>, Vec<_>) = parts.iter().cloned().partition(|part| part == BUSY);
    let _loops = if busy.is_empty() { None } else { Some(BusyLoops::start()?) };
    let (pagetax, workshop) = (pagetax()?, Workshop::new(1)?);
    let (mut rows, mut results, mut fine) = (Vec::new(), Vec::new(), true);
    for program in chosen(&names)? {
        let Some(script) = workshop.script(program)? else {
            rows.push(vec![program.name.into(), "not installed".into()]);
            continue;
        };
        eprintln!("{}: diagnose, then {ROUNDS} rounds of its line", program.name);
        let kept = workshop.path(&format!("outputs-{}", program.name));
        let outputs = kept.to_str().context("a path that is no text")?;
        let diagnosis = diagnosed(&pagetax, &["--outputs", outputs], &script)?;
        let (line, told) = promise(&diagnosis)?;
        let cured = line.clone().unwrap_or(format!("export {TUNABLE}; {script}"));
        let (by_hand, expected) = measured(&script, &cured, &diagnosis.basis, &workshop)?;
        let overlap = told.low <= by_hand.high && by_hand.low <= told.high;
        let unharmed = all_hold(&kept, &expected)?;
        fine &= overlap && unharmed;
        rows.push(vec![
            program.name.into(),
            told.to_string(),
            by_hand.to_string(),
            if line.is_some() { "the line" } else { "glibc's tunable" }.into(),
            if overlap { "agree" } else { "DIFFER" }.into(),
            if unharmed { "the same" } else { "CHANGED" }.into(),
        ]);
        results.push(json!({"program": program.name, "line": line, "diagnose": told,
            "by_hand": by_hand, "agree": overlap, "output_unharmed": unharmed}));
    }
    Ok(Outcome {
        headings: vec!["program", "diagnose", "by hand", "what", "", "output"],
        rows,
        json: json!(results),
        promise: (
            "intervals of diagnose and of its line by hand overlap, outputs are the same".into(),
            fine,
        ),
    })
}

/// Returns the diagnosis of a script.
pub fn diagnosed(pagetax: &str, options: &[&str], script: &str) -> Result<Diagnosis> {
    let mut command = Command::new(pagetax);
    command.args(["diagnose", "--json"]).args(options).args(["--", "sh", "-c", script]);
    Ok(serde_json::from_str(&shell::output(&mut command)?)?)
}

/// Returns the line of the verdict and the speed-up of its trial; without a line, the speed-up on 2M pages.
fn promise(diagnosis: &Diagnosis) -> Result<(Option<String>, Ratio)> {
    let verdict = &diagnosis.verdict;
    let name = verdict.winner.as_deref().unwrap_or("thp-2M");
    let trial = diagnosis.trials.iter().find(|trial| trial.name == name);
    let speedup = trial.and_then(|trial| trial.speedup).with_context(|| {
        format!("no trial `{name}`; set /sys/kernel/mm/transparent_hugepage/enabled to madvise")
    })?;
    Ok((verdict.apply.clone(), speedup))
}

/// Returns the time as is ÷ the time cured, in alternating order, and the program's output. Each run that
/// counts follows one of the same command, as where it runs again and again: else those on large pages would
/// wait for blocks of memory that the hypervisor took back.
fn measured(
    script: &str,
    cured: &str,
    basis: &Basis,
    workshop: &Workshop,
) -> Result<(Ratio, Vec<u8>)> {
    let time = |run: ProgramRun| match basis {
        Basis::Cpu => run.cpu_ns,
        _ => run.wall_ns,
    };
    let expected = workshop.run(script, &[])?.output;
    let (mut plain, mut faster) = (Vec::new(), Vec::new());
    let mut last = "";
    for round in 0..ROUNDS {
        for turn in 0..2 {
            let (script, times) = match (round + turn) % 2 {
                0 => (script, &mut plain),
                _ => (cured, &mut faster),
            };
            if last != script {
                workshop.run(script, &[])?;
            }
            last = script;
            times.push(time(workshop.run(script, &[])?));
        }
    }
    Ok((ratio_of_pairs(&plain, &faster, 1).context("runs without a time")?, expected))
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
    Ok(outputs.len() > 2 && outputs.iter().all(|output| output == expected))
}

/// Loops that keep each CPU busy, until this is dropped.
struct BusyLoops(Vec<Child>);

impl BusyLoops {
    fn start() -> Result<BusyLoops> {
        let mut loops = BusyLoops(Vec::new());
        for _ in 0..std::thread::available_parallelism()?.get() {
            loops.0.push(Command::new("sh").args(["-c", "while :; do :; done"]).spawn()?);
        }
        Ok(loops)
    }
}

impl Drop for BusyLoops {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
