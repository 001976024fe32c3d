//! The part `snoop`: direct reclaim and compaction in guests, by `pagetax stat` and by bcc's `drsnoop` and
//! `compactsnoop` at a time. They share no source: samples of stacks here, BPF programs on the kernel's
//! events there.

use super::small::between;
use super::{Disk, SmallGuest, fetch};
use crate::stat_document::seconds_of;
use crate::{book, packages, shell};
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

const LIMIT: u32 = 900;
const LOADS_SOURCE: &str = "xtask/src/bench/stat_loads.c";
/// The largest difference, as in `bench stat`.
const OFF_MAX: f64 = 0.15;

/// A tool of bcc, its guest, and the load.
struct Snoop {
    name: &'static str,
    /// The kernel. bcc 0.26 reads the events of compaction as they were until Linux 5.17.
    version: &'static str,
    /// The variables of the guest's script.
    script: &'static str,
    /// Rows of stat.
    rows: &'static [&'static str],
    has_disk: bool,
    memory: [&'static str; 2],
    /// Its programs, and libraries that it loads while it runs; with the packages that they come in.
    files: &'static [(&'static str, &'static str)],
}

const SNOOPS: &[Snoop] = &[
    Snoop {
        name: "drsnoop",
        version: "6.12",
        // The file is larger than memory.
        script: "load=reclaim mib=1500 words='/files/hole 1500' tool=drsnoop ready=5",
        rows: &["reclaim", "shootdown"],
        has_disk: true,
        memory: ["-m", "1024"],
        files: &[("/usr/sbin/drsnoop", "libbpf-tools")],
    },
    Snoop {
        name: "compactsnoop",
        version: "5.10",
        script: "load=compaction mib= words= ready=500\n\
            tool='python3.11 -u /bin/compactsnoop-bpfcc'\n\
            export PYTHONPATH=/usr/lib/python3/dist-packages LD_LIBRARY_PATH=/bin",
        rows: &["compaction"],
        has_disk: false,
        memory: ["-m", "3072"],
        files: &[
            ("/usr/sbin/compactsnoop-bpfcc", "bpfcc-tools"),
            ("/usr/bin/python3.11", "python3.11"),
            ("/usr/lib/x86_64-linux-gnu/libbcc.so.0", "libbpfcc"),
            ("/usr/lib/x86_64-linux-gnu/libffi.so.8", "libffi8"),
            ("/usr/lib/x86_64-linux-gnu/librt.so.1", "libc6"),
        ],
    },
];

/// Boots the guests. Fails if a tool and stat differ by more than the limit.
pub fn run(writes: bool) -> Result<()> {
    packages::provide_files(SNOOPS.iter().flat_map(|snoop| snoop.files))?;
    let pagetax = shell::pagetax()?;
    let folder = tempfile::tempdir_in("target")?;
    let loads = folder.path().join("stat_loads");
    let mut cc = Command::new("cc");
    shell::succeed(cc.args(["-O1", "-static", LOADS_SOURCE, "-o"]).arg(&loads))?;
    let loads = loads.to_string_lossy();
    let (mut rows, mut is_far_off) = (Vec::new(), false);
    for snoop in SNOOPS {
        let text = snoop.boot(&[&pagetax, &loads])?;
        let (seen_s, count) = snooped(&text)?;
        let stat_s = seconds_of_stat(&text, snoop.rows)?;
        let off = stat_s / seen_s - 1.0;
        is_far_off |= off.abs() > OFF_MAX;
        rows.push(vec![
            format!("{}, Linux {}", snoop.name, snoop.version),
            count.to_string(),
            format!("{seen_s:.2} s"),
            format!("{stat_s:.2} s"),
            format!("{:+.0} %", off * 100.0),
        ]);
    }
    let text = book::table(&["tool", "times", "the tool", "pagetax stat", "off by"], &rows);
    println!("{text}");
    if writes {
        book::write("cargo xtask kernels --only snoop --write", &format!("\n{text}\n"))?;
    }
    if is_far_off {
        bail!("stat and a tool of bcc differ by more than {:.0} %", OFF_MAX * 100.0);
    }
    Ok(())
}

impl Snoop {
    /// Boots the guest, and returns the output of its script.
    fn boot(&self, own: &[&str]) -> Result<String> {
        let tools =
            ["taskset", "renice", "mkfifo", "truncate"].map(|name| format!("/usr/bin/{name}"));
        let files = self.files.iter().map(|(file, _)| *file);
        let programs: Vec<&str> =
            own.iter().copied().chain(tools.iter().map(String::as_str)).chain(files).collect();
        let headers = (!self.has_disk).then(|| fetch::headers(self.version)).transpose()?;
        let bcc = Path::new("/usr/lib/python3/dist-packages/bcc");
        let python = Path::new("/usr/lib/python3.11");
        let modules = headers.as_ref().map(|headers| headers.join("lib/modules"));
        let sources = headers.as_ref().map(|headers| headers.join("usr/src"));
        let mut folders = Vec::new();
        if let Some((modules, sources)) = modules.as_deref().zip(sources.as_deref()) {
            folders.extend([
                (bcc, "/usr/lib/python3/dist-packages/bcc"),
                (python, "/usr/lib/python3.11"),
                (modules, "/lib/modules"),
                (sources, "/usr/src"),
            ]);
        }
        let disks: &[Disk<'_>] =
            if self.has_disk { &[Disk { bytes: 4 << 30, options: "" }] } else { &[] };
        let kernel = match self.has_disk {
            true => fetch::kernel(self.version)?,
            false => fetch::any_kernel(self.version)?,
        };
        let guest = SmallGuest {
            kernel: &kernel,
            script: &format!("{}\n{}", self.script, include_str!("snoop.sh")),
            programs: &programs,
            folders: &folders,
            disks,
            memory: &self.memory,
            limit: LIMIT,
            ..SmallGuest::default()
        };
        guest.run().with_context(|| self.name.to_string())
    }
}

/// Returns the seconds that a tool saw, and the number of times, by its lines. They have the milliseconds
/// as the last word but one.
fn snooped(text: &str) -> Result<(f64, usize)> {
    let lines = between(text, "@@tool\n", "@@stat\n")?;
    let latency = |line: &str| line.split_whitespace().rev().nth(1)?.parse::<f64>().ok();
    let all: Vec<f64> = lines.lines().filter_map(latency).collect();
    ensure!(!all.is_empty(), "the tool saw nothing:\n{lines}");
    Ok((all.iter().sum::<f64>() / 1e3, all.len()))
}

/// Returns the seconds of CPU time in some rows of stat.
fn seconds_of_stat(text: &str, ids: &[&str]) -> Result<f64> {
    let json = between(text, "@@stat\n", "@@end\n")?;
    let document: Value = serde_json::from_str(json).with_context(|| json.to_string())?;
    seconds_of(&document, ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_are_read_from_the_guest() {
        let text = "@@tool\nCOMM TID LAT(ms) PAGES\nstat_loads 71 1.5 32\nstat_loads 71 0.5 32\n@@stat\n\
            {\"intervals\": [{\"budget\": {\"cpu\": [{\"id\": \"reclaim\", \"ns\": 2000000}, {\"id\": \"swap\"}]}}]}\n@@end\n";
        assert_eq!(snooped(text).unwrap(), (0.002, 2));
        assert_eq!(seconds_of_stat(text, &["reclaim"]).unwrap(), 0.002);
        assert!(snooped("@@tool\nnothing\n@@stat\n").is_err());
    }
}
