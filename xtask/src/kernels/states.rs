//! The part `states`: `diagnose --when` in a guest of 1 GB, with cgroups of version 2, and beside a program
//! that holds most of the memory.

use super::{Disk, SmallGuest, fetch};
use crate::{book, shell};
use anyhow::{Context, Result, bail};
use pagetax_core::diagnosis::{Diagnosis, StateTrials, Trial};
use pagetax_core::system_stat::huge_blocks;
use std::path::Path;

const DEFAULT_VERSION: &str = "6.12";
/// The states of the first diagnosis, beside fresh memory, and that of the second one.
const STATE_COUNTS: [usize; 2] = [4, 1];
const DISK_BYTES: u64 = 2 << 30;
const LIMIT: u32 = 1500;

/// Boots a guest; an error unless each state could be made.
pub fn run(versions: &[String], writes: bool) -> Result<()> {
    let pagetax = shell::pagetax()?;
    let programs = [&pagetax, "/usr/bin/sqlite3", "/sbin/mkswap", "/sbin/swapon"];
    let version = versions.first().map_or(DEFAULT_VERSION, String::as_str);
    let (mut rows, mut is_missing) = (Vec::new(), false);
    let diagnoses = diagnoses(&fetch::kernel(version)?, &programs)?;
    for (at, (diagnosis, count)) in diagnoses.iter().zip(STATE_COUNTS).enumerate() {
        is_missing |= diagnosis.states.iter().filter(|s| s.why_not.is_none()).count() != count;
        if at == 0 {
            rows.push(row("fresh", &[], &diagnosis.trials, ""));
        }
        rows.extend(diagnosis.states.iter().map(|state| row_of(state, at == 1)));
    }
    let headings =
        ["Memory", "Free blocks of 2M", "On 2M pages", "Speed-up on 2M", "How, or why not"];
    let table = book::table(&headings, &rows);
    let text = format!("Linux {version}.\n\n{table}");
    println!("{text}");
    if writes {
        book::write("cargo xtask kernels --only states --write", &format!("\n{text}\n"))?;
    }
    if is_missing {
        bail!("not all states could be made");
    }
    Ok(())
}

fn diagnoses(kernel: &Path, programs: &[&str]) -> Result<Vec<Diagnosis>> {
    let disk = Disk { bytes: DISK_BYTES, options: "" };
    let guest = SmallGuest {
        kernel,
        script: include_str!("states.sh"),
        programs,
        disks: &[disk, disk],
        memory: &["-m", "1024"],
        limit: LIMIT,
        ..SmallGuest::default()
    };
    let text = guest.run()?;
    let mut all = Vec::new();
    for part in text.split("@@diagnosis\n").skip(1) {
        let json = part.split("@@end").next().unwrap_or_default();
        all.push(serde_json::from_str(json).with_context(|| json.to_string())?);
    }
    if all.len() != STATE_COUNTS.len() {
        bail!("the guest made {} diagnoses:\n{text}", all.len());
    }
    Ok(all)
}

fn row_of(state: &StateTrials, is_held: bool) -> Vec<String> {
    let name = if is_held { "700 MB held by another program" } else { state.state.name() };
    let how = state.why_not.as_deref().unwrap_or(&state.how);
    row(name, &state.free_blocks, &state.trials, how)
}

fn row(name: &str, free: &[u64], trials: &[Trial], how: &str) -> Vec<String> {
    let large = trials.iter().find(|trial| trial.name == "thp-2M");
    let share = large.and_then(|trial| trial.took.fraction);
    let speedup = large.and_then(|trial| trial.speedup);
    vec![
        name.into(),
        if free.is_empty() { "–".into() } else { huge_blocks(free).to_string() },
        share.map_or("–".into(), |share| format!("{:.0} %", share * 100.0)),
        speedup.map_or("–".into(), |speedup| speedup.to_string()),
        how.into(),
    ]
}
