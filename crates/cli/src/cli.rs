//! The command line as a whole: which subcommands there are, and who runs them.

use crate::{exit, jobs, manual};
use anyhow::Result;
use clap::{Parser, Subcommand};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  pagetax jobs                           list the built-in jobs
  pagetax jobs show vmtest               read one";

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
    Jobs(jobs::Args),
    #[command(hide = true)]
    Man(manual::ManArgs),
    #[command(hide = true)]
    Completions(manual::CompletionsArgs),
}

impl Command {
    /// Does what was asked for.
    pub fn run(self) -> Result<ExitCode> {
        match self {
            Command::Jobs(args) => jobs::run(args),
            Command::Man(args) => manual::man(args),
            Command::Completions(args) => manual::completions(args),
        }
    }
}
