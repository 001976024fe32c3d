//! A swap device and a memory cgroup for the peers of a benchmark, both put back at its end.

use crate::shell;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// What the kernel pages to.
pub enum Swap {
    /// A file on the disk that holds the working directory.
    File(PathBuf),
    /// A zram device of its own.
    Zram(u32),
}

impl Swap {
    /// A swap file of so many MiB.
    pub fn file(at: &Path, mib: u64) -> Result<Swap> {
        // Written, not punched: swap files have no holes.
        let size = format!("count={mib}");
        let to = format!("of={}", at.display());
        run("dd", &["if=/dev/zero", &to, "bs=1M", &size, "status=none"])?;
        let swap = Swap::File(at.into());
        run("chmod", &["600", &swap.device()])?;
        swap.enable()
    }

    /// A zram device of so many MiB, with the kernel's default compressor.
    pub fn zram(mib: u64) -> Result<Swap> {
        const ADD: &str = "/sys/class/zram-control/hot_add";
        let number = std::fs::read_to_string(ADD).context("the kernel has no zram")?;
        let swap = Swap::Zram(number.trim().parse()?);
        let size = format!("/sys/block/zram{}/disksize", number.trim());
        std::fs::write(size, format!("{mib}M"))?;
        swap.enable()
    }

    fn enable(self) -> Result<Swap> {
        run("mkswap", &["--quiet", &self.device()])?;
        run("swapon", &["--priority", "100", &self.device()])?;
        Ok(self)
    }

    fn device(&self) -> String {
        match self {
            Swap::File(path) => path.display().to_string(),
            Swap::Zram(number) => format!("/dev/zram{number}"),
        }
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        let off = run("swapoff", &[&self.device()]);
        let gone = match self {
            Swap::File(path) => std::fs::remove_file(path),
            Swap::Zram(number) => {
                std::fs::write("/sys/class/zram-control/hot_remove", number.to_string())
            }
        };
        if let Some(error) = off.err().or(gone.err().map(Into::into)) {
            eprintln!("swap on {} is still there: {error}", self.device());
        }
    }
}

fn run(program: &str, args: &[&str]) -> Result<()> {
    let quiet = std::process::Stdio::null;
    shell::succeed(Command::new(program).args(args).stdout(quiet()).stderr(quiet()))
}

/// A memory cgroup (version 1) with a limit.
pub struct Limited {
    directory: PathBuf,
}

impl Limited {
    /// Of so many MiB, swap not counted.
    pub fn new(mib: u64) -> Result<Limited> {
        let root = Path::new("/sys/fs/cgroup/memory");
        if !root.join("memory.limit_in_bytes").exists() {
            bail!("needs the memory controller of cgroup version 1, and root");
        }
        let directory = root.join(format!("pagetax-bench-{}", std::process::id()));
        std::fs::create_dir(&directory)?;
        let limited = Limited { directory };
        let set = |file: &str, value: String| std::fs::write(limited.directory.join(file), value);
        set("memory.limit_in_bytes", (mib << 20).to_string())?;
        set("memory.swappiness", "100".into())?;
        Ok(limited)
    }

    /// What a shell writes before a command that is to run inside: another shell enters, then becomes it.
    pub fn shell(&self) -> String {
        let enter = format!("echo $$ > {}/tasks && exec \"$@\"", self.directory.display());
        format!("sh -c '{enter}' sh")
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir(&self.directory) {
            eprintln!("{} is still there: {error}", self.directory.display());
        }
    }
}
