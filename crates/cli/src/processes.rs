//! Running processes, as `pmap` and `why` are given them.

use anyhow::{Result, anyhow, bail};
use pagetax_host::pages::target::pid_of;
use std::path::Path;

/// The processes that a command looks at.
#[derive(Debug, Clone, clap::Args)]
pub struct ProcessArgs {
    /// The processes, separated by commas
    #[arg(short = 'p', value_name = "PID,…", value_delimiter = ',')]
    listed: Vec<String>,

    /// Process ids, or their folders in /proc
    #[arg(value_name = "PID", required_unless_present = "listed")]
    operands: Vec<String>,
}

impl ProcessArgs {
    /// Returns all of them in the order of the command line.
    pub fn all(&self) -> impl Iterator<Item = &String> {
        self.listed.iter().chain(&self.operands)
    }
}

/// Parses a process id or the folder of a process in /proc.
pub fn pid(operand: &str) -> Result<u32> {
    match pid_of(operand) {
        Some(pid) => Ok(pid),
        None if Path::new(operand).is_file() => {
            bail!("{operand} is a file; core files are not read\n  hint: name a process: ps -e")
        }
        None => Err(anyhow!("`{operand}` is no process id\n  hint: list processes with ps -e")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_and_folders_are_processes() {
        assert_eq!(pid("12").unwrap(), 12);
        assert_eq!(pid("/proc/12/").unwrap(), 12);
        for bad in ["", "-1", "x", "/proc/", "/etc/passwd", "99999999999"] {
            assert!(pid(bad).unwrap_err().to_string().contains("hint"), "{bad}");
        }
    }
}
