//! `pagetax reproduce`: every published figure beside what the simulated machines say.

use crate::{exit, output, output::reproduction};
use anyhow::Result;
use pagetax_sim::historic::reproduce::{published, reproduce};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  pagetax reproduce                       every published table and claim
  pagetax reproduce alpha-nms             those of one report
  pagetax reproduce --seeds 25            over more seeds
  pagetax reproduce --json validation.json
  pagetax reproduce --list                what there is";

/// Compare published figures with simulated ones; exit code 1 while any misses its tolerance
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// What to reproduce (`--list`); everything if not given, or `all`
    #[arg(value_name = "NAME")]
    names: Vec<String>,

    /// Seeds to run everything with; figures are medians. Fewer than 9 assert nothing
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u64).range(1..=1000))]
    seeds: u64,

    /// Write the document as JSON to a file, or instead of the tables to stdout (-)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Write the tables as Markdown to a file, as docs/validation.md has them, or to stdout (-)
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,

    /// List what can be reproduced
    #[arg(long)]
    list: bool,
}

/// `pagetax reproduce [NAME…]`
pub fn run(args: Args) -> Result<ExitCode> {
    if args.list {
        output::print(&list()?)?;
        return Ok(exit::FINE.into());
    }
    let all = args.names.iter().any(|name| name == "all");
    let names = if all { &[] } else { args.names.as_slice() };
    let document = reproduce(names, args.seeds)?;
    if let Some(path) = &args.json {
        output::write_document(path, &(serde_json::to_string_pretty(&document)? + "\n"))?;
    }
    if let Some(path) = &args.markdown {
        output::write_document(path, &reproduction::markdown(&document))?;
    }
    let to_stdout = |path: &Option<PathBuf>| path.as_deref() == Some(Path::new("-"));
    if !to_stdout(&args.json) && !to_stdout(&args.markdown) {
        output::print(&reproduction::render(&document))?;
    }
    Ok(if document.ok { exit::FINE } else { exit::THRESHOLD_FAILED }.into())
}

fn list() -> Result<String> {
    let row = |name: &str| -> Result<Vec<String>> {
        let published = published::find(name)?;
        Ok(vec![name.into(), published.title, published.source])
    };
    let rows = published::names().map(row).collect::<Result<_>>()?;
    Ok(output::text::table(&["name", "what it is", "published in"], &[], rows))
}
