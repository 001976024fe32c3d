//! The place of the tables of a command that may run a program.
//!
//! Invariant: stdout belongs to the program that runs, so that `pagetax trapstat -- sort f > sorted` leaves
//! in `sorted` what sort wrote. Tables go to stderr then. A document that the user wants on stdout (`--json`)
//! takes stdout; then the program's own output goes to stderr.

use super::documents::{Output, Outputs};
use super::{cannot_write, check_writable, print, say};
use anyhow::{Context, Result};
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

/// The option that names a file for the tables.
#[derive(Debug, Clone, clap::Args)]
pub struct TablesArgs {
    /// Print the tables into a file [default: stderr if a command runs, whose stdout is its own; else
    /// stdout]. With --json, the output of a command goes to stderr
    #[arg(short = 'o', long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// The place of the tables.
pub enum Tables {
    /// A file that the user named.
    File(File),
    /// No program runs.
    Stdout,
    /// A program has stdout.
    Stderr,
    /// A document takes the place of text.
    Nowhere,
}

impl TablesArgs {
    /// Makes sure, before hours of work, that the file can be written.
    pub fn check_writable(&self) -> Result<()> {
        self.output.iter().try_for_each(|path| check_writable(path))
    }

    /// Opens the place of the tables beside these documents, for a command that runs a program or does not.
    pub fn open<D: Output>(&self, runs_program: bool, documents: &Outputs<D>) -> Result<Tables> {
        Ok(match (&self.output, documents.takes_stdout(), runs_program) {
            (Some(path), ..) => {
                Tables::File(File::create(path).with_context(|| cannot_write(path))?)
            }
            (None, true, _) => Tables::Nowhere,
            (None, false, true) => Tables::Stderr,
            (None, false, false) => Tables::Stdout,
        })
    }
}

impl Tables {
    /// Prints a text of whole lines.
    pub fn print(&mut self, text: &str) -> Result<()> {
        match self {
            Tables::File(file) => {
                let plain = anstream::adapter::strip_str(text).to_string();
                file.write_all(plain.as_bytes())
                    .context("cannot write the tables; is the disk full?")
            }
            Tables::Stdout => print(text),
            Tables::Stderr if text.is_empty() => Ok(()),
            Tables::Stderr => {
                say(text.strip_suffix('\n').unwrap_or(text));
                Ok(())
            }
            Tables::Nowhere => Ok(()),
        }
    }
}
