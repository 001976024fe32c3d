//! The part `snoop`: direct reclaim in a guest of 1 GB, by `pagetax stat` and by bcc's `drsnoop` at a time.
//! They share no source: samples of stacks here, BPF programs on the kernel's events there.

use super::{Disk, SmallGuest, fetch};
use crate::{book, packages, shell};
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::process::Command;

const DEFAULT_VERSION: &str = "6.12";
const LIMIT: u32 = 400;
const DRSNOOP: &str = "/usr/sbin/drsnoop";
const LOADS_SOURCE: &str = "xtask/src/bench/stat_loads.c";
/// The bytes of the file: more than the memory of the guest.
const FILE_BYTES: u64 = 1_500 << 20;
/// The largest difference, as in `bench stat`.
const OFF_MAX: f64 = 0.15;

/// Boots a guest; an error if the two differ by more than the limit.
pub fn run(versions: &[String], writes: bool) -> Result<()> {
    packages::provide_files([(DRSNOOP, "libbpf-tools")].iter())?;
    let pagetax = shell::pagetax()?;
    let folder = tempfile::tempdir_in("target")?;
    let loads = folder.path().join("stat_loads");
    let mut cc = Command::new("cc");
    shell::succeed(cc.args(["-O1", "-static", LOADS_SOURCE, "-o"]).arg(&loads))?;
    let loads = loads.to_string_lossy();
    let tools = ["/usr/bin/taskset", "/usr/bin/renice", "/usr/bin/mkfifo", DRSNOOP];
    let programs = [&[&*pagetax, &*loads][..], &tools].concat();
    let version = versions.first().map_or(DEFAULT_VERSION, String::as_str);
    let mib = FILE_BYTES >> 20;
    let script = format!("mib={mib}\n{}", include_str!("snoop.sh"));
    let guest = SmallGuest {
        kernel: &fetch::kernel(version)?,
        script: &script,
        programs: &programs,
        disks: &[Disk { bytes: 4 << 30, options: "" }],
        memory: &["-m", "1024"],
        append: "",
        limit: LIMIT,
    };
    let text = guest.run()?;
    let (snooped_s, count) = snooped(&text)?;
    let stat_s = seconds_of_stat(&text)?;
    let off = stat_s / snooped_s - 1.0;
    let row = vec![
        count.to_string(),
        format!("{snooped_s:.2} s"),
        format!("{stat_s:.2} s"),
        format!("{:+.0} %", off * 100.0),
    ];
    let table = book::table(&["Direct reclaims", "drsnoop", "pagetax stat", "Off by"], &[row]);
    let text = format!("Linux {version}.\n\n{table}");
    println!("{text}");
    if writes {
        book::write("cargo xtask kernels --only snoop --write", &format!("\n{text}\n"))?;
    }
    if off.abs() > OFF_MAX {
        bail!("stat and drsnoop differ by more than {:.0} %", OFF_MAX * 100.0);
    }
    Ok(())
}

/// Returns the text between two marks of the guest's script.
fn between<'a>(text: &'a str, from: &str, to: &str) -> Result<&'a str> {
    let part = text.split_once(from).and_then(|(_, rest)| rest.split_once(to));
    part.map(|(part, _)| part).with_context(|| format!("the guest did not print {from}:\n{text}"))
}

/// Returns the seconds in direct reclaim, and the number of times, by the lines of drsnoop: name, process,
/// milliseconds, pages.
fn snooped(text: &str) -> Result<(f64, usize)> {
    let lines = between(text, "@@drsnoop\n", "@@stat\n")?;
    let latency = |line: &str| line.split_whitespace().rev().nth(1)?.parse::<f64>().ok();
    let all: Vec<f64> = lines.lines().filter_map(latency).collect();
    ensure!(!all.is_empty(), "drsnoop saw no direct reclaim:\n{lines}");
    Ok((all.iter().sum::<f64>() / 1e3, all.len()))
}

/// Returns the seconds of CPU time that stat puts into reclaim.
fn seconds_of_stat(text: &str) -> Result<f64> {
    let json = between(text, "@@stat\n", "@@end\n")?;
    let document: Value = serde_json::from_str(json).with_context(|| json.to_string())?;
    let intervals = document["intervals"].as_array().context("no intervals")?;
    let rows = intervals.iter().filter_map(|one| one["budget"]["cpu"].as_array()).flatten();
    let rows = rows.filter(|row| row["id"] == "reclaim" || row["id"] == "shootdown");
    Ok(rows.filter_map(|row| row["ns"].as_f64()).sum::<f64>() / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_are_read_from_the_guest() {
        let text = "@@drsnoop\nCOMM TID LAT(ms) PAGES\nstat_loads 71 1.5 32\nstat_loads 71 0.5 32\n@@stat\n\
            {\"intervals\": [{\"budget\": {\"cpu\": [{\"id\": \"reclaim\", \"ns\": 2000000}, {\"id\": \"swap\"}]}}]}\n@@end\n";
        assert_eq!(snooped(text).unwrap(), (0.002, 2));
        assert_eq!(seconds_of_stat(text).unwrap(), 0.002);
        assert!(snooped("@@drsnoop\nnothing\n@@stat\n").is_err());
    }
}
