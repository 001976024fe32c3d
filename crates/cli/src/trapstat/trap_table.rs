//! The options of Solaris's trapstat about entries of SPARC's trap table, which other CPUs do not have.

use anyhow::{Result, anyhow};

/// Options that only refuse, so that a user of the original learns what to type instead.
#[derive(Debug, clap::Args)]
pub struct TrapTableArgs {
    #[arg(short = 'e', hide = true, value_name = "ENTRIES", num_args = 0..=1, default_missing_value = "")]
    entries: Option<String>,

    #[arg(short = 'l', hide = true)]
    list: bool,

    #[arg(short = 'a', hide = true)]
    accumulate: bool,

    #[arg(short = 'r', hide = true, value_name = "HZ", num_args = 0..=1, default_missing_value = "")]
    rate: Option<String>,
}

/// The reason why there is nothing to list.
const NO_TRAPS: &str = "this CPU has no trap table: its hardware walks page tables without a trap";

impl TrapTableArgs {
    /// Refuses the options, with those that do what their users want.
    pub fn refuse(&self) -> Result<()> {
        let asked = [
            (self.entries.is_some(), "-e selects entries", "-T splits misses by page size"),
            (self.list, "-l lists the entries", "`pagetax doctor` shows what this machine counts"),
            (
                self.accumulate,
                "-a accumulates counts of entries",
                "without an interval, totals are printed",
            ),
            (
                self.rate.is_some(),
                "-r is the rate of counts of entries",
                "name an interval in seconds: trapstat 0.1",
            ),
        ];
        match asked.into_iter().find(|(is_asked, ..)| *is_asked) {
            Some((_, what, instead)) => {
                Err(anyhow!("{what} of SPARC's trap table, and {NO_TRAPS}\n  hint: {instead}"))
            }
            None => Ok(()),
        }
    }
}
