//! Where text leaves the program. Renderers are pure and return a `String`; this prints it.
//!
//! Colour is stripped where it is not wanted (NO_COLOR, not a terminal), so renderers may style
//! freely; nothing may be said by colour alone.

pub mod bill;
pub mod budget;
pub mod chart;
pub mod columns;
pub mod comparison;
pub mod diagnosis;
pub mod documents;
pub mod explain;
pub mod hatstat;
pub mod live_tax;
pub mod misscurve;
pub mod pagemap;
pub mod pages;
pub mod progress;
pub mod ranking;
#[cfg(test)]
mod registry;
pub mod replacement;
pub mod report;
pub mod reproduction;
pub mod sweep;
pub mod system_stat;
pub mod tables;
pub mod text;
pub mod trapstat;
pub mod why;

use crate::exit;
use anyhow::{Context, Result};
use pagetax_core::threshold::Judgement;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::sync::OnceLock;

/// When output has colors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Color {
    /// On a terminal, unless NO_COLOR is set
    Auto,
    /// In files and pipes, too
    Always,
    /// Nowhere
    Never,
}

/// The options of every subcommand about what it prints beside its result.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Messages {
    /// Print results and errors only: no notes, no progress
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    quiet: bool,

    /// Print also which program, job, engine and calibration are used
    #[arg(short, long, global = true)]
    verbose: bool,

    /// Colors in the output
    #[arg(long, global = true, value_enum, value_name = "WHEN", default_value_t = Color::Auto)]
    color: Color,
}

/// How much goes to stderr, for the rest of the process.
static MESSAGES: OnceLock<Messages> = OnceLock::new();

impl Messages {
    /// Makes these options those of the process.
    pub fn apply(self) {
        self.color.apply();
        MESSAGES.get_or_init(|| self);
    }
}

impl Color {
    /// Makes this the choice for stdout and stderr.
    pub fn apply(self) {
        let choice = match self {
            Color::Auto => anstream::ColorChoice::Auto,
            Color::Always => anstream::ColorChoice::Always,
            Color::Never => anstream::ColorChoice::Never,
        };
        choice.write_global();
    }
}

/// Returns true if `--quiet` was given.
pub fn is_quiet() -> bool {
    MESSAGES.get().is_some_and(|messages| messages.quiet)
}

/// Prints a result to stdout. Fails quietly all the way up when the reader has gone (`| head`).
pub fn print(text: &str) -> Result<()> {
    let mut out = anstream::stdout().lock();
    out.write_all(without_error_numbers(text).as_bytes())
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

pub fn cannot_write(path: &Path) -> String {
    format!("cannot write {}\n  hint: name a file that you may write", path.display())
}

pub fn write_file(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, without_error_numbers(text)).with_context(|| cannot_write(path))
}

/// Prints a remark on stderr, unless `--quiet` was given.
pub fn note(text: &str) {
    if !is_quiet() {
        say(text);
    }
}

/// Prints a remark on stderr if `--verbose` was given.
pub fn detail(text: impl FnOnce() -> String) {
    if MESSAGES.get().is_some_and(|messages| messages.verbose) {
        say(&text());
    }
}

/// Prints a result on stderr, of a command whose stdout belongs to the program that it runs.
pub fn say(text: &str) {
    // With stderr gone there is nobody left to tell; the exit code still speaks.
    let _ = anstream::stderr().write_all(format!("{}\n", without_error_numbers(text)).as_bytes());
}

/// Prints what thresholds found, and returns the exit code: a failed threshold outweighs one that could not
/// be judged.
pub fn judged(judgements: impl Iterator<Item = Judgement>) -> ExitCode {
    let mut code = exit::FINE;
    for judgement in judgements {
        match judgement {
            Judgement::Passed => {}
            Judgement::Failed(why) => {
                say(&format!("threshold failed: {why}"));
                code = exit::THRESHOLD_FAILED;
            }
            Judgement::NotJudged(why) => {
                note(&format!(
                    "threshold not judged: {why}\n  hint: drop it, or run on a machine that \
                     has this reading (`pagetax doctor`)"
                ));
                code = if code == exit::FINE { exit::UNMET } else { code };
            }
        }
    }
    code.into()
}

/// Prints an error to stderr: what failed, each cause on a line of its own, then what to do.
pub fn error(error: &anyhow::Error) {
    let style = anstyle::AnsiColor::Red.on_default().bold();
    let message = error.to_string();
    let (what, hint) = match message.find("\n  hint: ") {
        Some(at) => message.split_at(at),
        None => (message.as_str(), ""),
    };
    say(&format!("{style}error:{style:#} {what}{}{hint}", causes(error)));
}

/// Returns a line for each cause that the text before it does not hold yet.
fn causes(error: &anyhow::Error) -> String {
    let mut said = error.to_string();
    let mut lines = String::new();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !said.contains(&cause) {
            lines += &format!("\n  because: {cause}");
        }
        said = cause;
    }
    lines
}

/// Returns a text without the numbers that Rust adds to the system's own words, as in `(os error 2)`.
fn without_error_numbers(text: &str) -> String {
    let mut parts = text.split(" (os error ");
    let mut out = String::from(parts.next().unwrap_or_default());
    for part in parts {
        match part.split_once(')') {
            Some((number, rest)) if number.bytes().all(|byte| byte.is_ascii_digit()) => out += rest,
            _ => out += &format!(" (os error {part}"),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;

    #[test]
    fn a_cause_is_said_once_and_without_a_number() {
        let missing = || std::io::Error::from_raw_os_error(2);
        let twice = anyhow::Error::from(missing()).context(format!("cannot read a: {}", missing()));
        assert_eq!(causes(&twice), "");
        let once = anyhow::Error::from(missing()).context("cannot read a");
        let line = without_error_numbers(&causes(&once));
        assert_eq!(line, "\n  because: No such file or directory");
        let chain = anyhow!("c").context("b").context("a");
        assert_eq!(causes(&chain), "\n  because: b\n  because: c");
        for text in ["", "a (os error", "a (os error x) b"] {
            assert_eq!(without_error_numbers(text), text);
        }
        assert_eq!(without_error_numbers("(a (os error 12)) b (os error 1)"), "(a) b");
    }
}
