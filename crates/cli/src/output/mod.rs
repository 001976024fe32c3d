//! Where text leaves the program. Renderers are pure and return a `String`; this prints it.
//!
//! Colour is stripped where it is not wanted (NO_COLOR, not a terminal), so renderers may style
//! freely; nothing may be said by colour alone.

pub mod budget;
pub mod columns;
pub mod diagnosis;
pub mod documents;
pub mod misscurve;
pub mod pagemap;
pub mod pages;
pub mod progress;
#[cfg(test)]
mod registry;
pub mod report;
pub mod reproduction;
pub mod sweep;
pub mod text;
pub mod trapstat;
pub mod why;

use crate::exit;
use anyhow::{Context, Result};
use std::io::Write;
use std::path::Path;

/// Prints a result to stdout. Fails quietly all the way up when the reader has gone (`| head`).
pub fn print(text: &str) -> Result<()> {
    let mut out = anstream::stdout().lock();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .context("cannot write to stdout; look at where it is redirected")
        .map_err(|error| exit::with(exit::UNMET, error))
}

/// Makes sure, before hours of work, that a document can be written to this file or to stdout.
pub fn check_writable(path: &Path) -> Result<()> {
    if path == Path::new("-") {
        return Ok(());
    }
    let opened = std::fs::OpenOptions::new().append(true).create(true).open(path);
    opened.map(drop).with_context(|| cannot_write(path))
}

fn cannot_write(path: &Path) -> String {
    format!("cannot write {}\n  remedy: name a file that you may write", path.display())
}

fn write_file(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).with_context(|| cannot_write(path))
}

/// Says something on stderr that is no result.
pub fn note(text: &str) {
    // With stderr gone there is nobody left to tell; the exit code still speaks.
    let _ = anstream::stderr().write_all(format!("{text}\n").as_bytes());
}

/// Prints an error to stderr: what failed, each cause on a line of its own, then what to do.
pub fn error(error: &anyhow::Error) {
    let style = anstyle::AnsiColor::Red.on_default().bold();
    let message = error.to_string();
    let (what, remedy) = match message.find("\n  remedy: ") {
        Some(at) => message.split_at(at),
        None => (message.as_str(), ""),
    };
    let causes: String =
        error.chain().skip(1).map(|cause| format!("\n  because: {cause}")).collect();
    note(&format!("{style}error:{style:#} {what}{causes}{remedy}"));
}
