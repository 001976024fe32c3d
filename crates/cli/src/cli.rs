//! The command line as a whole: which subcommands there are, and who runs them.

use crate::{calibrate, compare, diagnose, doctor, exit, jobs, machines, manual, reproduce, run};
use anyhow::Result;
use clap::{Parser, Subcommand};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  pagetax diagnose -- sort big.txt       what would larger pages do for sort?
  pagetax run tlb-gather                 run a built-in job on this machine
  pagetax doctor                         what can be measured here?
  pagetax calibrate                      measure what a fault costs here, once
  pagetax jobs                           list the built-in jobs
  pagetax machines                       list what they can run on";

/// What virtual memory costs a program, and how to stop paying
#[derive(Debug, Parser)]
#[command(
    name = "pagetax",
    version,
    before_help = EXAMPLES,
    after_help = exit::meanings(),
    disable_help_subcommand = true
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    Diagnose(diagnose::Args),
    Run(run::Args),
    Compare(compare::Args),
    Doctor(doctor::Args),
    Calibrate(calibrate::Args),
    Jobs(jobs::Args),
    Machines(machines::Args),
    Reproduce(reproduce::Args),
    #[command(hide = true)]
    Man(manual::ManArgs),
    #[command(hide = true)]
    Completions(manual::CompletionsArgs),
}

impl Command {
    /// Does what was asked for.
    pub fn run(self) -> Result<ExitCode> {
        match self {
            Command::Diagnose(args) => diagnose::run(args),
            Command::Compare(args) => compare::run(args),
            Command::Run(args) => run::run(args),
            Command::Doctor(args) => doctor::run(args),
            Command::Calibrate(args) => calibrate::run(args),
            Command::Jobs(args) => jobs::run(args),
            Command::Machines(args) => machines::run(args),
            Command::Reproduce(args) => reproduce::run(args),
            Command::Man(args) => manual::man(args),
            Command::Completions(args) => manual::completions(args),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn assert_begins_with_examples(command: &clap::Command) {
        let before = command.get_before_help().map(ToString::to_string).unwrap_or_default();
        assert!(before.starts_with("Examples:\n  pagetax "), "{}: {before}", command.get_name());
        command.get_subcommands().for_each(assert_begins_with_examples);
    }

    #[test]
    fn every_help_begins_with_examples() {
        let command = Cli::command();
        command.clone().debug_assert();
        assert_begins_with_examples(&command);
    }
}
