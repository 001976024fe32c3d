//! The time of random reads over 1 GiB on base pages ÷ on large pages, by each way to get these.

use super::{Outcome, pagetax};
use crate::shell;
use anyhow::{Context, Result, bail};
use pagetax_core::stats::ratio_of_pairs;
use serde_json::{Value, json};
use std::process::Command;

const ROUNDS: usize = 5;
const JOB: &[&str] = &["run", "tlb-gather", "--set", "size=1G", "--set", "count=30_000_000"];
const HEADINGS: [&str; 2] = ["way", "time on 4K ÷ time on it (95 %)"];
const POOLS: &str = "/sys/kernel/mm/hugepages";

/// A name, the options of `ppgsz` if the job runs under it, and the job's page size.
const WAYS: &[(&str, &[&str], &str)] = &[
    ("advice (madvise)", &[], "2M"),
    ("collapsed as it grows (ppgsz --follow)", &["ppgsz", "--follow", "-o", "anon=2M"], "default"),
    ("hugetlb 2M", &[], "hugetlb:2M"),
    ("hugetlb 1G", &[], "hugetlb:1G"),
];

/// Pages that a benchmark adds to a hugetlb pool. Dropping it restores the pool.
pub(super) struct Pool {
    path: String,
    before: String,
}

impl Pool {
    /// Adds `pages` to a pool; none if the system refuses.
    pub(super) fn fill(kilobytes: u64, pages: u64) -> Option<Pool> {
        let path = format!("{POOLS}/hugepages-{kilobytes}kB/nr_hugepages");
        let before = std::fs::read_to_string(&path).ok()?.trim().to_string();
        let wanted = before.parse::<u64>().ok()? + pages;
        std::fs::write(&path, wanted.to_string()).ok()?;
        let pool = Pool { path, before };
        let now = std::fs::read_to_string(&pool.path).ok()?.trim().parse::<u64>().ok()?;
        (now >= wanted).then_some(pool)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if let Err(error) = std::fs::write(&self.path, &self.before) {
            eprintln!("put {} back into {}: {error}", self.before, self.path);
        }
    }
}

pub fn run() -> Result<Outcome> {
    let pagetax = pagetax()?;
    let pools = [Pool::fill(2048, 513), Pool::fill(1 << 20, 1)];
    let usable = |size: &str| match size {
        "hugetlb:2M" => pools[0].is_some(),
        "hugetlb:1G" => pools[1].is_some(),
        _ => true,
    };
    let ways: Vec<_> = WAYS.iter().filter(|(_, _, size)| usable(size)).collect();
    let mut base = Vec::new();
    let mut times = vec![Vec::new(); ways.len()];
    gather_ns(&pagetax, &[], "base")?;
    for _ in 0..ROUNDS {
        base.push(gather_ns(&pagetax, &[], "base")?);
        for (way, times) in ways.iter().zip(&mut times) {
            times.push(gather_ns(&pagetax, way.1, way.2)?);
        }
    }
    let (mut rows, mut results) = (Vec::new(), Vec::new());
    for (way, times) in ways.iter().zip(&times) {
        let ratio = ratio_of_pairs(&base, times, 1).context("runs without a time")?;
        rows.push(vec![way.0.to_string(), ratio.to_string()]);
        results.push(json!({"way": way.0, "base_ns": base, "ns": times, "ratio": ratio}));
    }
    let skipped = WAYS.iter().filter(|(_, _, size)| !usable(size));
    rows.extend(skipped.map(|way| vec![way.0.into(), "the pool cannot be filled here".into()]));
    let gains =
        results.first().and_then(|r| r["ratio"]["low"].as_f64()).is_some_and(|low| low > 1.0);
    Ok(Outcome {
        headings: HEADINGS.to_vec(),
        rows,
        json: json!(results),
        promise: ("2M pages by advice gain beyond the noise".into(), gains),
    })
}

/// Returns the time of the phase that reads at random.
fn gather_ns(pagetax: &str, wrapper: &[&str], page_size: &str) -> Result<u64> {
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("report.json");
    let mut command = Command::new(pagetax);
    let own = [pagetax];
    let through: &[&str] = if wrapper.is_empty() { &[] } else { &own };
    command.args(wrapper).args(through).args(JOB);
    command.args(["--set", &format!("page_size={page_size}")]);
    command.arg(format!("--json={}", file.display()));
    shell::succeed(command.stdout(std::process::Stdio::null()))?;
    let report: Value = serde_json::from_str(&std::fs::read_to_string(&file)?)?;
    let phases = report["phases"].as_array().context("a report without phases")?;
    let gather = phases.iter().find(|phase| phase["name"] == "gather").context("no such phase")?;
    match (gather["start_ns"].as_u64(), gather["end_ns"].as_u64()) {
        (Some(start), Some(end)) if end > start => Ok(end - start),
        _ => bail!("a phase without a time: {gather}"),
    }
}
