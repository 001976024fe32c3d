//! The page-ins that `pagetax remote --simulate` predicts from a trace, beside those of real runs.

use super::remote::Findings;
use super::{number, remote_programs};
use crate::shell;
use anyhow::{Context, Result, bail};
use pagetax_core::stats::quantiles;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Programs, and the resident memory that each has in turn, in MiB.
const CASES: [(&str, &[u64]); 4] = [
    ("sort-66M", &[50, 100]),
    ("python3", &[250]),
    ("sqlite3", &[50, 100, 200]),
    ("redis-server", &[50, 100]),
];
const RUNS: usize = 3;
/// The largest error of a prediction that is promised.
const ERROR_MAX: f64 = 0.1;
/// The most page-ins of the pager as a multiple of those of the better of LRU and ARC.
const BEST_MAX: f64 = 1.1;
/// The most page-ins of sort as a multiple of the optimum's.
const OPTIMUM_MAX: f64 = 1.5;
const POLICIES: [&str; 4] = ["pager", "lru", "arc", "optimum"];

/// Compares predictions and runs. A program that is not installed is a row of its own.
pub fn run(findings: &mut Findings, pagetax: &str, folder: &Path) -> Result<()> {
    let folder = folder.canonicalize()?;
    let pagetax = fs::canonicalize(pagetax)?.display().to_string();
    for (name, sizes) in CASES {
        let Some(script) = remote_programs::script(name, &folder)? else {
            findings.row(&[name, "not installed"], json!({"program": name}));
            continue;
        };
        let trace = folder.join("trace.ptt");
        let record = format!("{pagetax} record -q --for-remote -o {} --", trace.display());
        remote_programs::must_succeed(&script.replace("TOOL", &record))?;
        for mib in sizes {
            let predicted = predicted(&pagetax, &trace, *mib)?;
            let real = (0..RUNS).map(|_| page_ins(&pagetax, &script, &folder, *mib));
            let real: Vec<f64> = real.collect::<Result<_>>()?;
            row(findings, &format!("{name}, {mib}M"), predicted, &real);
        }
        fs::remove_file(trace)?;
    }
    Ok(())
}

fn row(findings: &mut Findings, what: &str, predicted: [f64; 4], real: &[f64]) {
    let [pager, lru, arc, optimum] = predicted;
    let [low, found, high] = quantiles(real, [0.0, 0.5, 1.0]);
    findings.row(
        &[
            what,
            &format!("{pager} predicted"),
            &format!("{found} real ({low} to {high})"),
            &format!("LRU {lru}, ARC {arc}"),
            &format!("optimum {optimum}"),
        ],
        json!({"what": what, "policies": POLICIES, "predicted": predicted, "real": real}),
    );
    let error = (pager / found.max(1.0) - 1.0).abs();
    findings.promise(&format!("{what}: error of the prediction"), error, ERROR_MAX, true);
    let best = lru.min(arc).max(1.0);
    findings.promise(
        &format!("{what}: real ÷ better of LRU and ARC"),
        found / best,
        BEST_MAX,
        true,
    );
    if what.starts_with("sort") {
        let ratio = found / optimum.max(1.0);
        findings.promise(&format!("{what}: real ÷ optimum"), ratio, OPTIMUM_MAX, true);
    }
}

/// Returns the page-ins that each policy would have.
fn predicted(pagetax: &str, trace: &Path, mib: u64) -> Result<[f64; 4]> {
    let resident = format!("{mib}M");
    let mut command = Command::new(pagetax);
    command.args(["remote", "--json", "--resident", &resident, "--simulate"]).arg(trace);
    let document: Value = serde_json::from_str(&shell::output(&mut command)?)?;
    let limits = document["limits"].as_array().context("the document has no limits")?;
    let at = limits.iter().find(|limit| limit["resident_bytes"] == mib << 20);
    let at = at.context("the document lacks the memory that was asked about")?;
    let mut found = [0.0; 4];
    for (place, name) in found.iter_mut().zip(POLICIES) {
        let policies = at["policies"].as_array().context("it has no policies")?;
        let policy =
            policies.iter().find(|one| one["policy"] == name).context("a policy is missing")?;
        *place = number(policy, "/page_in_count")?;
    }
    Ok(found)
}

/// Runs a program, and returns the page-ins that it waited for.
fn page_ins(pagetax: &str, script: &str, folder: &Path, mib: u64) -> Result<f64> {
    let counts = folder.join("counts");
    fs::write(&counts, "")?;
    let shown = counts.display();
    let tool = format!("{pagetax} remote --resident {mib}M --stats 2>> {shown} --");
    remote_programs::must_succeed(&script.replace("TOOL", &tool))?;
    let text = fs::read_to_string(&counts)?;
    let of_process = text.split("demand_page_in_count ").skip(1);
    let counts = of_process.filter_map(|rest| rest.split(',').next()?.parse::<f64>().ok());
    match counts.reduce(f64::max) {
        Some(count) => Ok(count),
        None => bail!("the program printed no counts: {text}"),
    }
}
