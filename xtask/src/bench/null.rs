//! The cost of the harness: jobs on the machine that generates every access and makes none.

use super::{Outcome, number, pagetax, report};
use anyhow::Result;
use serde_json::json;

const LIMIT_NS: f64 = 2.0;
/// A sweep and a random job, as their generators differ.
const JOBS: &[&[&str]] = &[
    &["vmtest", "--set", "loops=20000", "--set", "switch_rate=1"],
    &["tlb-gather", "--set", "count=50_000_000"],
];

pub fn run() -> Result<Outcome> {
    let pagetax = pagetax()?;
    let (mut rows, mut results, mut worst) = (Vec::new(), Vec::new(), 0.0f64);
    for job in JOBS {
        let report = report(&pagetax, &[job, &["--on", "null"][..]].concat())?;
        let operations = number(&report, "/counters/access_count/value")?;
        // Other programs on the machine change the wall time only, so CPU time is compared.
        let cpu = ["user", "kernel"].map(|mode| format!("/counters/{mode}_ns/value"));
        let ns = (number(&report, &cpu[0])? + number(&report, &cpu[1])?) / operations;
        worst = worst.max(ns);
        rows.push(vec![job[0].into(), format!("{operations:.0}"), format!("{ns:.2}")]);
        results.push(json!({"job": job[0], "operations": operations, "cpu_ns_per_operation": ns}));
    }
    Ok(Outcome {
        headings: vec!["job", "operations", "CPU ns each"],
        rows,
        json: json!(results),
        promise: (format!("at most {LIMIT_NS} ns of CPU time an operation"), worst <= LIMIT_NS),
    })
}
