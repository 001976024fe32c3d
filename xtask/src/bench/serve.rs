//! A `pagetax serve` as a process.

use crate::at_end::AtEnd;
use anyhow::{Context, Result, ensure};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

/// The unit of times in /proc/PID/stat, whatever the kernel's own tick is (proc_pid_stat(5): USER_HZ).
const TICKS_PER_SECOND: f64 = 100.0;

/// A memory server, killed at the latest when it goes out of scope or this process ends.
pub struct Server {
    child: Child,
    pub address: String,
    /// Kills it, should we be killed.
    guard: AtEnd,
}

/// CPU time of a process, in seconds.
#[derive(Debug, Clone, Copy)]
pub struct Cpu {
    pub user: f64,
    pub system: f64,
}

impl Server {
    pub fn start(pagetax: &str, memory: &str, listen: &str) -> Result<Server> {
        let mut serve = Command::new(pagetax);
        Server::of(serve.args(["serve", "--memory", memory, "--listen", listen]))
    }

    /// Starts a server of any kind. Its address is the last word of its first line.
    pub fn of(command: &mut Command) -> Result<Server> {
        let mut child = command.stdout(Stdio::piped()).spawn()?;
        let guard = AtEnd::run(&format!("kill -9 {}", child.id()))?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().context("a pipe")?).read_line(&mut line)?;
        let address = line.trim_end().rsplit(' ').next().unwrap_or_default().to_string();
        Ok(Server { child, address, guard })
    }

    pub fn kill(&mut self) -> Result<()> {
        // First: its number may soon be another's.
        self.guard.forget();
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    pub fn resident_bytes(&self) -> Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB")).context("no VmRSS")?;
        Ok(kib.parse::<u64>()? << 10)
    }

    pub fn cpu(&self) -> Result<Cpu> {
        Cpu::of(&self.child.id().to_string())
    }

    /// Ties all of its threads, and those to come, to one CPU.
    pub fn pin(&self, cpu: &str) -> Result<()> {
        let mut taskset = Command::new("taskset");
        taskset.args(["-a", "-c", "-p", cpu, &self.child.id().to_string()]);
        ensure!(taskset.stdout(Stdio::null()).status()?.success(), "taskset failed");
        Ok(())
    }

    pub fn signal(&self, name: &str) -> Result<()> {
        let status = Command::new("kill").args([name, &self.child.id().to_string()]).status()?;
        ensure!(status.success(), "kill {name} failed");
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

impl Cpu {
    /// Reads the CPU time of a process in /proc, by number or `self`.
    pub fn of(process: &str) -> Result<Cpu> {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat"))?;
        // The program's name may have spaces; fields 14 and 15 of all, 12 and 13 after it.
        let (_, fields) = stat.rsplit_once(") ").context("no name in stat")?;
        let seconds = |at: usize| -> Result<f64> {
            let ticks: f64 = fields.split(' ').nth(at).context("a short stat")?.parse()?;
            Ok(ticks / TICKS_PER_SECOND)
        };
        Ok(Cpu { user: seconds(11)?, system: seconds(12)? })
    }
}
