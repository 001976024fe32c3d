//! The part `kswapd`: loads that keep kswapd busy for a known cause, each in a guest of 1 GB, and the
//! decisions of `pagetax explain kswapd` beside them.

use super::{Disk, SmallGuest, fetch};
use crate::{book, shell};
use anyhow::{Context, Result, bail};
use pagetax_core::explain::{Explanations, KswapdDecision};
use std::path::Path;
use std::process::Command;

const DEFAULT_VERSION: &str = "6.12";
const LIMIT: u32 = 400;
/// One node of 1 GiB.
const MEMORY: &[&str] = &["-m", "1024"];
/// Two nodes of 512 MiB, with a CPU each.
const NODES: &[&str] = &[
    "-m",
    "1024",
    "-object",
    "memory-backend-ram,size=512M,id=m0",
    "-object",
    "memory-backend-ram,size=512M,id=m1",
    "-numa",
    "node,nodeid=0,cpus=0,memdev=m0",
    "-numa",
    "node,nodeid=1,cpus=1,memdev=m1",
];
const GIB: u64 = 1 << 30;

/// A load: the id of the cause that it plants, what it does, its swap, its nodes, and options of the first
/// disk.
struct KswapdLoad {
    id: &'static str,
    what: &'static str,
    swap_bytes: u64,
    memory: &'static [&'static str],
    options: &'static str,
}

impl KswapdLoad {
    const fn new(id: &'static str, what: &'static str) -> KswapdLoad {
        KswapdLoad { id, what, swap_bytes: 2 * GIB, memory: MEMORY, options: "" }
    }
}

const PLANTS: [KswapdLoad; 8] = [
    KswapdLoad::new("working_set", "1200 MB of anonymous memory, touched in turn, on swap"),
    KswapdLoad::new("locked", "600 MB locked; a file of 500 MB is read in turn"),
    KswapdLoad::new("high_order", "every other page of 500 MB is held; huge pages are asked for"),
    KswapdLoad::new(
        "boosted_watermarks",
        "pipes are filled and emptied, while a file is read once between pages that stay",
    ),
    KswapdLoad::new("cgroup_limit", "a file of 300 MB is read in a cgroup of 150 MB"),
    KswapdLoad {
        memory: NODES,
        ..KswapdLoad::new("unbalanced", "600 MB bound to a node of 512 MB")
    },
    KswapdLoad {
        options: ",throttling.bps-write=4000000",
        ..KswapdLoad::new(
            "dirty",
            "a file is written faster than the disk takes it, while a hole is read",
        )
    },
    KswapdLoad {
        swap_bytes: 64 << 20,
        ..KswapdLoad::new(
            "swap_full",
            "820 MB held, swap of 64 MB; a file of 300 MB is read in turn",
        )
    },
];

/// Boots a guest for each load with one kernel; an error unless the planted cause comes first each time.
pub fn run(versions: &[String], writes: bool) -> Result<()> {
    let pagetax = shell::pagetax()?;
    let folder = tempfile::tempdir_in("target")?;
    let loads = folder.path().join("kswapd_loads");
    let mut cc = Command::new("cc");
    cc.args(["-O1", "-static", "xtask/src/kernels/kswapd_loads.c", "-o"]).arg(&loads);
    shell::succeed(&mut cc)?;
    let loads = loads.to_string_lossy();
    let programs = [&pagetax, &*loads, "/sbin/mkswap", "/sbin/swapon"];
    let version = versions.first().map_or(DEFAULT_VERSION, String::as_str);
    let kernel = fetch::kernel(version)?;
    let mut rows = Vec::new();
    let mut missed = Vec::new();
    for plant in &PLANTS {
        let decision = decide(plant, &kernel, &programs)?;
        let first = decision.causes.first();
        if first.is_none_or(|cause| cause.id != plant.id) {
            missed.push(plant.id);
        }
        let row = row(plant, &decision);
        println!("{}", row.join(" | "));
        rows.push(row);
    }
    let headings = ["Planted", "By", "kswapd, % of a CPU", "Decided", "Also shown", "Evidence"];
    let table = book::table(&headings, &rows);
    let text = format!("Linux {version}, guests of 1 GB.\n\n{table}");
    println!("{text}");
    if writes {
        book::write("cargo xtask kernels --only kswapd --write", &format!("\n{text}\n"))?;
    }
    if !missed.is_empty() {
        bail!("not decided as planted: {}", missed.join(", "));
    }
    Ok(())
}

fn decide(plant: &KswapdLoad, kernel: &Path, programs: &[&str]) -> Result<KswapdDecision> {
    let script = format!("plant={}\n{}", plant.id, include_str!("kswapd.sh"));
    let disks = [
        Disk { bytes: 4 * GIB, options: plant.options },
        Disk { bytes: plant.swap_bytes, options: "" },
    ];
    let guest = SmallGuest {
        kernel,
        script: &script,
        programs,
        disks: &disks,
        memory: plant.memory,
        limit: LIMIT,
        ..SmallGuest::default()
    };
    let text = guest.run()?;
    let (before, text) = text.split_once("@@decision\n").context("no decision")?;
    let (json, _) = text.split_once("@@end").context("no decision")?;
    let parsed: Explanations =
        serde_json::from_str(json).with_context(|| format!("{before}\n{json}"))?;
    parsed.kswapd.with_context(|| format!("no decision about kswapd\n{before}"))
}

fn row(plant: &KswapdLoad, decision: &KswapdDecision) -> Vec<String> {
    let sure = |is_certain: bool| if is_certain { "certain" } else { "likely" };
    let mut causes =
        decision.causes.iter().map(|cause| format!("{}, {}", cause.id, sure(cause.is_certain)));
    let first = causes.next().unwrap_or("nothing".into());
    let share = decision.cpu_share.map_or("missing".into(), |s| format!("{:.0}", s * 100.0));
    let evidence = decision.causes.first().map_or(String::new(), |cause| cause.evidence.clone());
    let others = causes.collect::<Vec<_>>().join("; ");
    [plant.id.into(), plant.what.into(), share, first, others, evidence].into()
}
