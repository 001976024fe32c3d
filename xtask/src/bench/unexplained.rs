//! How much of the built-in jobs' time the budget cannot place.

use super::{Outcome, number, pagetax, report};
use anyhow::Result;
use serde_json::json;

const LIMIT: f64 = 0.10;
const JOBS: &[&[&str]] = &[
    &["mlock-cycle", "--set", "file_size=8M"],
    &["mmap3", "--set", "size=256M"],
    &["tlb-gather"],
    &["vmtest", "--set", "loops=20000"],
];

pub fn run() -> Result<Outcome> {
    let pagetax = pagetax()?;
    let (mut rows, mut results, mut worst) = (Vec::new(), Vec::new(), 0.0f64);
    for job in JOBS {
        let report = report(&pagetax, job)?;
        let mut shares = Vec::new();
        for ledger in ["cpu", "wall"] {
            let rest = number(&report, &format!("/budget/{ledger}_unexplained_ns"))?;
            shares.push(rest / number(&report, &format!("/budget/{ledger}_total_ns"))?);
        }
        worst = shares.iter().fold(worst, |worst, share| worst.max(share.abs()));
        let percent = shares.iter().map(|share| format!("{:.1} %", share * 100.0));
        rows.push([job[0].to_string()].into_iter().chain(percent).collect());
        results.push(json!({"job": job[0], "cpu": shares[0], "wall": shares[1]}));
    }
    Ok(Outcome {
        headings: vec!["job", "CPU unexplained", "wall unexplained"],
        rows,
        json: json!(results),
        promise: (format!("at most {:.0} % of either ledger", LIMIT * 100.0), worst <= LIMIT),
    })
}
