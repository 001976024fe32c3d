//! The process and the cgroup that `pagetax stat` names for the work of kswapd and kcompactd, beside the
//! planted one: ten runs in a guest of 1 GB.

use super::Outcome;
use crate::kernels::{self, Disk, SmallGuest};
use crate::shell;
use anyhow::{Context, Result, ensure};
use pagetax_core::document;
use pagetax_core::system_stat::SystemStat;
use serde_json::json;
use std::process::Command;

const VERSION: &str = "6.12";
const SOURCE: &str = "xtask/src/bench/culprits/allocates.c";
/// The runs whose culprit stat has to name, of ten.
const PROMISED_OF_TEN: usize = 9;
/// A process is planted as the culprit if it took so many times as much as any other.
const LEAD_MIN: f64 = 2.0;

/// A planted culprit, and the total of `stat` over the run.
struct PlantedRun {
    pid: u32,
    /// The MiB that it took ÷ the most that another process took.
    lead: f64,
    cgroup: String,
    kind: String,
    stat: SystemStat,
}

impl PlantedRun {
    fn parse(text: &str) -> Result<PlantedRun> {
        let (head, rest) = text.split_once('\n').context("a run has a head")?;
        let words: Vec<&str> = head.split(' ').collect();
        let [pid, cgroup, kind] = words[..] else { anyhow::bail!("`{head}` names no culprit") };
        let (stat, rest) = rest.split_once("@@end").context("a run ends")?;
        let took = rest.lines().filter_map(|line| {
            let (pid, mib) = line.strip_prefix("@@took ")?.split_once(' ')?;
            Some((pid.to_string(), mib.parse::<f64>().ok()?))
        });
        let (own, others): (Vec<_>, Vec<_>) = took.partition(|(taker, _)| taker == pid);
        let own = own.first().context("the culprit does not say what it took")?.1;
        Ok(PlantedRun {
            lead: own / others.iter().map(|(_, mib)| *mib).fold(1.0, f64::max),
            pid: pid.parse()?,
            cgroup: cgroup.into(),
            kind: kind.into(),
            stat: document::from_json(stat.trim()).with_context(|| stat.to_string())?,
        })
    }
}

/// Runs the guest.
pub fn run() -> Result<Outcome> {
    let program = std::env::var("PAGETAX").or_else(|_| shell::pagetax())?;
    let folder = tempfile::tempdir()?;
    let allocates = folder.path().join("allocates");
    shell::succeed(Command::new("cc").args(["-O1", SOURCE, "-o"]).arg(&allocates))?;
    let text = SmallGuest {
        kernel: &kernels::kernel(VERSION)?,
        script: include_str!("guest.sh"),
        programs: &[&program, allocates.to_str().context("a folder with a plain name")?],
        disks: &[Disk { bytes: 4 << 30, options: "" }],
        memory: &["-m", "1024"],
        limit: 900,
        ..SmallGuest::default()
    }
    .run()?;
    let runs = text.split("@@run ").skip(1).map(PlantedRun::parse).collect::<Result<Vec<_>>>()?;
    ensure!(!runs.is_empty(), "no run:\n{text}");
    let (mut rows, mut results) = (Vec::new(), Vec::new());
    let (mut processes, mut cgroups) = (0, 0);
    for run in &runs {
        let total = run.stat.total.as_ref().context("stat has no interval")?;
        let first = total.culprits.first();
        processes += usize::from(first.is_some_and(|first| first.pid == run.pid));
        let is_named = first.and_then(|first| first.cgroup.as_deref()) == Some(&run.cgroup);
        cgroups += usize::from(is_named);
        let named = first.map_or("nobody".into(), |first| {
            let percent = |share: f64| format!("{:.0}", share * 100.0);
            let cgroup = first.cgroup.as_deref().unwrap_or("no cgroup");
            let shares = [first.share, first.low, first.high].map(percent);
            format!("{cgroup}: {} % ({}–{})", shares[0], shares[1], shares[2])
        });
        let ms = |id: &str| {
            let ns = total.budget.row(id).and_then(|row| row.ns);
            ns.map_or("–".into(), |ns| format!("{:.0} ms", ns as f64 / 1e6))
        };
        let daemons = ["background_reclaim", "background_compaction"].map(ms);
        ensure!(run.lead > LEAD_MIN, "{} took only {:.1} times as much", run.cgroup, run.lead);
        rows.push(
            vec![run.cgroup.clone(), run.kind.clone(), format!("{:.1}", run.lead), named]
                .into_iter()
                .chain(daemons)
                .collect(),
        );
        results.push(json!({"pid": run.pid, "cgroup": run.cgroup, "kind": run.kind, "lead": run.lead, "named": total.culprits}));
    }
    let count = runs.len();
    let summary = format!("process {processes} of {count}, cgroup {cgroups} of {count}");
    rows.push(vec![
        "named".into(),
        String::new(),
        String::new(),
        summary,
        String::new(),
        String::new(),
    ]);
    let enough = |hits: usize| hits * 10 >= PROMISED_OF_TEN * count;
    Ok(Outcome {
        headings: vec![
            "planted",
            "takes pages of",
            "times the next one",
            "first of stat (share of allocations)",
            "kswapd",
            "kcompactd",
        ],
        rows,
        json: json!(results),
        promise: (
            "stat names the planted process and its cgroup in at least 9 of 10 runs".into(),
            count >= 10 && enough(processes) && enough(cgroups),
        ),
    })
}
