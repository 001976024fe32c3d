//! `pagetax reproduce`: every published figure beside what the simulated machines say.

use crate::output::{documents::Outputs, progress::Progress, reproduction};
use crate::{exit, output};
use anyhow::Result;
use pagetax_sim::historic::reproduce::{Reproduction, published, reproduce};
use std::process::ExitCode;
use std::sync::Mutex;

const EXAMPLES: &str = "\
Examples:
  pagetax reproduce                       a line for each report, and what misses
  pagetax reproduce --full                every published table and claim
  pagetax reproduce alpha-nms             the table of one report
  pagetax reproduce --seeds 25            over more seeds
  pagetax reproduce --json=validation.json
  pagetax reproduce --list                what there is";

/// Compare published figures with simulated ones
///
/// The exit code is 1 if any figure misses its tolerance.
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// Tables to reproduce (`--list`); all if none is given, or `all`
    #[arg(value_name = "NAME")]
    names: Vec<String>,

    /// Seeds to run everything with; figures are medians. Fewer than 9 assert nothing
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u64).range(1..=1000))]
    seeds: u64,

    #[command(flatten)]
    outputs: Outputs<Reproduction>,

    /// Print the tables; names alone print them too
    #[arg(long)]
    full: bool,

    /// List what can be reproduced
    #[arg(long)]
    list: bool,
}

/// Runs `pagetax reproduce [NAME…]`.
pub fn run(args: Args) -> Result<ExitCode> {
    if args.list {
        output::print(&list()?)?;
        return Ok(exit::FINE.into());
    }
    let all = args.names.iter().any(|name| name == "all");
    let names = if all { &[] } else { args.names.as_slice() };
    let progress = Mutex::new(Progress::start("reproduce"));
    let on_progress = |done| progress.lock().unwrap_or_else(|lock| lock.into_inner()).update(done);
    let document = reproduce(names, args.seeds, &on_progress)?;
    drop(progress);
    let is_full = args.full || !names.is_empty();
    args.outputs
        .print(&document, if is_full { reproduction::render } else { reproduction::summary })?;
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
