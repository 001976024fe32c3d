//! A swap device and a memory cgroup for the peers of a benchmark, both put back at its end.

use crate::at_end::AtEnd;
use crate::shell;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A swap area for this bench, removed at the end.
pub struct Swap {
    _end: AtEnd,
}

impl Swap {
    /// Makes a swap file of so many MiB, on the disk that holds the working directory.
    pub fn file(at: &Path, mib: u64) -> Result<Swap> {
        let place = at.display();
        let end = AtEnd::run(&format!("swapoff {place}; rm {place}"))?;
        // Written, not punched: swap files have no holes.
        let (size, to) = (format!("count={mib}"), format!("of={place}"));
        run("dd", &["if=/dev/zero", &to, "bs=1M", &size, "status=none"])?;
        run("chmod", &["600", &place.to_string()])?;
        Swap::enable(&place.to_string(), end)
    }

    /// Makes a zram device of so many MiB, with the kernel's default compressor.
    pub fn zram(mib: u64) -> Result<Swap> {
        const CONTROL: &str = "/sys/class/zram-control";
        let number = std::fs::read_to_string(format!("{CONTROL}/hot_add"));
        let number = number.context("the kernel has no zram")?.trim().to_string();
        let end = AtEnd::run(&format!(
            "swapoff /dev/zram{number}; echo {number} > {CONTROL}/hot_remove"
        ))?;
        std::fs::write(format!("/sys/block/zram{number}/disksize"), format!("{mib}M"))?;
        Swap::enable(&format!("/dev/zram{number}"), end)
    }

    fn enable(device: &str, end: AtEnd) -> Result<Swap> {
        run("mkswap", &["--quiet", device])?;
        run("swapon", &["--priority", "100", device])?;
        Ok(Swap { _end: end })
    }
}

fn run(program: &str, args: &[&str]) -> Result<()> {
    let quiet = std::process::Stdio::null;
    shell::succeed(Command::new(program).args(args).stdout(quiet()).stderr(quiet()))
}

/// The text for a peer that the kernel killed.
pub const KILLED: &str = "killed: out of memory";
/// How often one is started.
const TRIES: usize = 3;

/// Runs a peer with so many MiB of memory, and swap. The kernel sometimes kills one for lack of memory with
/// swap left. Then it runs again. Returns `None` if the kernel kills it each time.
pub fn run_limited<T>(
    peer: &str,
    mib: u64,
    _swap: Swap,
    run: impl Fn(&Limited) -> Result<T>,
) -> Result<Option<T>> {
    for number in 1..=TRIES {
        let limited = Limited::new(mib)?;
        let result = run(&limited);
        if !limited.ran_out_of_memory() {
            return result.map(Some);
        }
        eprintln!("{peer}: {KILLED}, try {number} of {TRIES}");
    }
    Ok(None)
}

/// A memory cgroup (version 1) with a limit.
pub struct Limited {
    directory: PathBuf,
    _end: AtEnd,
}

impl Limited {
    /// Makes a cgroup with so many MiB of memory, swap not counted.
    pub fn new(mib: u64) -> Result<Limited> {
        let root = Path::new("/sys/fs/cgroup/memory");
        if !root.join("memory.limit_in_bytes").exists() {
            bail!("needs the memory controller of cgroup version 1, and root");
        }
        let directory = root.join(format!("pagetax-bench-{}", std::process::id()));
        let place = directory.display();
        // What runs inside is what we started; it takes a moment to be gone.
        let end = AtEnd::run(&format!(
            "kill -9 $(cat {place}/tasks) 2> /dev/null; for i in $(seq 100); do rmdir {place} && exit; \
             sleep 0.1; done 2> /dev/null; exit 1"
        ))?;
        std::fs::create_dir(&directory)?;
        let limited = Limited { directory, _end: end };
        let set = |file: &str, value: String| std::fs::write(limited.directory.join(file), value);
        set("memory.limit_in_bytes", (mib << 20).to_string())?;
        set("memory.swappiness", "100".into())?;
        Ok(limited)
    }

    /// Returns true if the kernel killed a process of the cgroup because it could page nothing out.
    pub fn ran_out_of_memory(&self) -> bool {
        let control = std::fs::read_to_string(self.directory.join("memory.oom_control"));
        let kills = |line: &str| line.strip_prefix("oom_kill ")?.trim().parse::<u64>().ok();
        control.is_ok_and(|text| text.lines().filter_map(kills).any(|kills| kills > 0))
    }

    /// Returns shell text that runs the following command inside: another shell enters the cgroup, then
    /// becomes the command.
    pub fn shell(&self) -> String {
        let enter = format!("echo $$ > {}/tasks && exec \"$@\"", self.directory.display());
        format!("sh -c '{enter}' sh")
    }
}
