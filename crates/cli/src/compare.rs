//! `pagetax compare`: reports beside each other, or a refusal.

use crate::output::{self, comparison, documents::Outputs};
use anyhow::{Context, Result, bail};
use pagetax_core::compare::{Comparable, Comparison, Comparisons, compare};
use pagetax_core::threshold::RangeThreshold;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  pagetax compare before.json after.json                 of `run --json` or `diagnose --json`
  for i in 1 2 3; do pagetax run vmtest --json; done > before.json
                                                         several runs give an interval
  pagetax compare 4K.json 64K.json 2M.json --html=sizes.html
                                                         each of the others with the first
  pagetax compare old.json new.json --fail-if 'wall_ns>1.05'
                                                         exit code 1 when it is surely 5 % slower";

/// Compare reports of the same job on the same machine
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// The report to compare with: JSON, or a page of --html
    first: PathBuf,

    /// The reports to compare; their values are divided by those of the first
    #[arg(required = true, value_name = "OTHER")]
    others: Vec<PathBuf>,

    /// Compare even though jobs or machines differ, and say so
    #[arg(long)]
    force: bool,

    /// Exit with 1 when this holds for a ratio and its whole interval, as in 'wall_ns>1.05'; may be given
    /// several times
    #[arg(long, value_name = "EXPR")]
    fail_if: Vec<RangeThreshold>,

    #[command(flatten)]
    outputs: Outputs<Comparisons>,
}

/// Runs `pagetax compare A.json B.json…`.
pub fn run(args: Args) -> Result<ExitCode> {
    let name = |path: &PathBuf| path.display().to_string();
    let (name_of_first, first) = (name(&args.first), read(&args.first)?);
    let compared =
        |path: &PathBuf| Ok(compare((&name_of_first, &first), (&name(path), &read(path)?)));
    let comparisons = args.others.iter().map(compared).collect::<Result<Vec<_>>>()?;
    let comparisons = Comparisons { comparisons };
    let refused = |one: &&Comparison| !one.incomparable.is_empty() && !args.force;
    if let Some(one) = comparisons.comparisons.iter().find(refused) {
        bail!(
            "{} and {} should not be compared; they differ in\n  {}\n  hint: compare reports \
             of the same job on the same machine, or add --force to have it labelled",
            one.names[0],
            one.names[1],
            one.incomparable.join("\n  ")
        );
    }
    args.outputs.print(&comparisons, comparison::render)?;
    Ok(judge(&comparisons, &args.fail_if))
}

fn read(path: &Path) -> Result<Comparable> {
    let documents = crate::report::read(path)?;
    let text: String = documents.into_iter().map(|document| document.text).collect();
    Comparable::parse(&text).with_context(|| path.display().to_string())
}

/// Judges all comparisons by all thresholds.
fn judge(comparisons: &Comparisons, thresholds: &[RangeThreshold]) -> ExitCode {
    let of = |one| thresholds.iter().map(move |threshold| Comparison::judge(one, threshold));
    output::judged(comparisons.comparisons.iter().flat_map(of))
}
