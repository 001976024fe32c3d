//! The part `guest`: `mlock-cycle` under pressure on the whole memory of a guest in QEMU. Its root is the
//! program with a shell, and its files are on a disk of its own.

use super::{Outcome, ReclaimSeen, last_seconds, number, outcome};
use crate::kernels::{self, Disk, SmallGuest};
use anyhow::{Context, Result};
use serde_json::Value;

const VERSION: &str = "6.12";
/// The time limit in seconds: an emulated guest is an order of magnitude slower.
const LIMIT: u32 = 900;

/// Boots the guest, and returns what its runs and `pagetax stat` beside them saw.
pub fn run(program: &str) -> Result<Outcome> {
    let kernel = kernels::kernel(VERSION)?;
    let text = SmallGuest {
        kernel: &kernel,
        script: include_str!("guest.sh"),
        programs: &[program],
        disks: &[Disk { bytes: 4 << 30, options: "" }],
        memory: &["-m", "1024"],
        limit: LIMIT,
        ..SmallGuest::default()
    }
    .run()?;
    let text = text.split("@@done").next().unwrap_or_default();
    let seen: Vec<ReclaimSeen> = text.split("@@run ").skip(1).map(seen).collect::<Result<_>>()?;
    outcome(&seen, (format!("all loads end within {LIMIT} s"), true))
}

/// Parses the two documents of one load.
fn seen(text: &str) -> Result<ReclaimSeen> {
    let (name, rest) = text.split_once('\n').context("a load has a name")?;
    let (report, rest) = rest.split_once("@@stat ").context("no report of stat")?;
    let (_, rest) = rest.split_once('\n').context("no report of stat")?;
    let stat = rest.split("@@end").next().unwrap_or_default();
    let report: Value = serde_json::from_str(report).with_context(|| report.to_string())?;
    let stat: Value = serde_json::from_str(stat).with_context(|| stat.to_string())?;
    let intervals = stat["intervals"].as_array().context("no intervals")?;
    let wall_ns = number(&report, "/wall_ns")?;
    let series = |id: &str| -> Vec<f64> {
        let value = |one: &Value| one["readings"][id]["value"].as_f64().unwrap_or(0.0);
        last_seconds(&intervals.iter().map(value).collect::<Vec<_>>(), wall_ns)
    };
    let sum = |id: &str| series(id).iter().sum::<f64>();
    let (direct, background) = (sum("direct_scan_count"), sum("background_scan_count"));
    let share = background / (direct + background);
    Ok(ReclaimSeen {
        name: format!("{name}, guest of 1 GB"),
        report,
        stalls_ms: series("memory_some_ns").iter().map(|ns| ns / 1e6).collect(),
        background_share: share.is_finite().then_some(share),
        efficiency_range: None,
    })
}
