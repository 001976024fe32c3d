//! `pagetax report`: documents as one page for a browser, and back.

use crate::output::documents::html::{self, NamedJson};
use crate::output::{note, write_file};
use anyhow::{Context, Result, bail};
use pagetax_host::launch::program::on_path;
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

const EXAMPLES: &str = "\
Examples:
  pagetax report run.json --open                         of any command's --json=FILE
  pagetax report before.json after.json -o both.html     both on one page
  pagetax report both.html --json                        the documents of a page, byte for byte";

/// Make one page of JSON documents, to look at in a browser
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// JSON documents, or pages of pagetax; - is stdin
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,

    /// The page to write; - is stdout
    #[arg(short, long, value_name = "PAGE", default_value = "report.html")]
    output: PathBuf,

    /// Show the page in the browser of this desktop
    #[arg(long, conflicts_with = "json")]
    open: bool,

    /// Print the documents as they were written, instead of a page
    #[arg(long, conflicts_with = "output")]
    json: bool,
}

/// Runs `pagetax report FILE…`.
pub fn run(args: Args) -> Result<ExitCode> {
    let mut documents = Vec::new();
    for file in &args.files {
        documents.extend(read(file)?);
    }
    match args.json {
        true => print(&documents)?,
        false => write_page(&args, &documents)?,
    }
    Ok(crate::exit::FINE.into())
}

/// Returns the documents of a file: a page, or JSON documents one after another.
pub fn read(path: &Path) -> Result<Vec<NamedJson>> {
    let text = read_text(path).with_context(|| {
        format!("cannot read {}\n  hint: write it with --json=FILE or --html=FILE", path.display())
    })?;
    let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
    match html::is_page(&text) {
        true => html::documents(&text),
        false => html::split(&name, &text),
    }
    .with_context(|| path.display().to_string())
}

fn read_text(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    match path == Path::new("-") {
        true => std::io::stdin().read_to_string(&mut text),
        false => std::fs::File::open(path)?.read_to_string(&mut text),
    }?;
    Ok(text)
}

/// Writes the documents to stdout, with each byte as it was.
fn print(documents: &[NamedJson]) -> Result<()> {
    let mut out = std::io::stdout().lock();
    for document in documents {
        out.write_all(document.text.as_bytes()).context("cannot write to stdout")?;
    }
    Ok(out.flush()?)
}

fn write_page(args: &Args, documents: &[NamedJson]) -> Result<()> {
    let page = html::page(documents)?;
    if args.output == Path::new("-") {
        return crate::output::print(&page);
    }
    check_replaceable(&args.output)?;
    write_file(&args.output, &page)?;
    note(&format!("wrote {}", args.output.display()));
    if args.open { open(&args.output) } else { Ok(()) }
}

/// Refuses to replace a file that no command of pagetax wrote as a page.
fn check_replaceable(path: &Path) -> Result<()> {
    let is_replaceable = match std::fs::read_to_string(path) {
        Ok(text) => text.is_empty() || html::is_page(&text),
        Err(error) => error.kind() == ErrorKind::NotFound,
    };
    match is_replaceable || !path.is_file() {
        true => Ok(()),
        false => bail!(
            "{} exists, and is no page of pagetax\n  hint: name another file with -o",
            path.display()
        ),
    }
}

fn open(page: &Path) -> Result<()> {
    const OPENER: &str = "xdg-open";
    if !on_path(OPENER) {
        bail!(
            "cannot open {}: no {OPENER} on PATH\n  hint: open the file in a browser, or install xdg-utils",
            page.display()
        );
    }
    let mut command = Command::new(OPENER);
    command.arg(page).stdin(Stdio::null()).stdout(Stdio::null());
    let status = command.status().with_context(|| format!("cannot start {OPENER}"))?;
    match status.success() {
        true => Ok(()),
        false => bail!(
            "{OPENER} could not open {}: {status}\n  hint: open the file in a browser",
            page.display()
        ),
    }
}
