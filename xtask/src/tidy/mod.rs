//! `cargo xtask tidy`: the countable rules of docs/internals/style.md, and counts that a refactoring should
//! lower.

mod counts;
mod imports;
mod links;
mod prose;
mod rust;
mod types;

use crate::shell;
use anyhow::{Context, Result, bail};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The longest file, unless it is one table.
const FILE_LINES_MAX: usize = 600;

/// The start of a line that turns huge pages off for every program. A hint may not harm, so none has it.
const HARMFUL: &str = concat!("echo ", "never");

/// Options of the chore.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print counts of the tree instead of findings
    #[arg(long)]
    counts: bool,
    /// Another checkout, to compare with
    #[arg(long, default_value = ".")]
    tree: PathBuf,
}

impl Default for Args {
    fn default() -> Args {
        Args { counts: false, tree: ".".into() }
    }
}

/// A broken rule and its place.
#[derive(Debug)]
pub struct Finding {
    path: PathBuf,
    line: usize,
    text: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path.display(), self.line, self.text)
    }
}

/// A tracked file.
pub struct Source {
    path: PathBuf,
    text: String,
}

impl Source {
    fn is(&self, extension: &str) -> bool {
        self.path.extension().is_some_and(|own| own == extension)
    }

    /// Returns the directory of the file's crate, such as `crates/core`.
    fn crate_directory(&self) -> PathBuf {
        let parts = if self.path.starts_with("crates") { 2 } else { 1 };
        self.path.components().take(parts).collect()
    }
}

/// Checks every tracked file, or counts.
///
/// # Errors
/// Fails if a rule is broken, after it has printed each place.
pub fn run(args: &Args) -> Result<()> {
    let sources = sources(&args.tree)?;
    if args.counts {
        return counts::print(&args.tree, &sources);
    }
    let findings = findings(&args.tree, &sources)?;
    findings.iter().for_each(|finding| println!("{finding}"));
    match findings.len() {
        0 => Ok(()),
        count => bail!("{count} findings; docs/internals/style.md has the rules"),
    }
}

fn sources(tree: &Path) -> Result<Vec<Source>> {
    let list = ["ls-files", "-z", "--", "*.rs", "*.c", "*.h", "*.md"];
    let paths = shell::output(Command::new("git").arg("-C").arg(tree).args(list))?;
    let read = |path: &str| {
        let at = tree.join(path);
        let text = fs::read_to_string(&at).with_context(|| format!("{}", at.display()))?;
        Ok(Source { path: path.into(), text })
    };
    paths.split_terminator('\0').map(read).collect()
}

/// Checks comments of Rust and C, prose and links in Markdown.
fn findings(tree: &Path, sources: &[Source]) -> Result<Vec<Finding>> {
    let mut findings = types::findings(&types::definitions(sources)?);
    findings.extend(imports::findings(sources)?);
    links::check(tree, sources, |path, line, text| {
        findings.push(Finding { path: path.into(), line, text });
    });
    for source in sources {
        let lines = source.text.lines().count();
        if lines > FILE_LINES_MAX && !source.is("md") {
            let text = format!("{lines} lines (at most {FILE_LINES_MAX})");
            findings.push(Finding { path: source.path.clone(), line: 1, text });
        }
        let mut add = |line, text| findings.push(Finding { path: source.path.clone(), line, text });
        for (number, _) in source.text.lines().enumerate().filter(|(_, l)| l.contains(HARMFUL)) {
            add(number + 1, format!("`{HARMFUL}` turns huge pages off for every program"));
        }
        if source.is("rs") {
            rust::check(&source.text, &mut add)
                .with_context(|| format!("{}", source.path.display()))?;
        } else if source.is("md") {
            // `pagetax reproduce --markdown` writes this page.
            let is_generated = source.path == Path::new("docs/validation.md");
            prose::paragraphs(&source.text)
                .filter(|_| !is_generated)
                .for_each(|(line, text)| prose::check(&text, |found| add(line, found)));
        } else {
            prose::c_comments(&source.text)
                .for_each(|(line, text)| prose::check(&text, |found| add(line, found)));
        }
    }
    Ok(findings)
}
