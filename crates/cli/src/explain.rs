//! `pagetax explain`: what a cause of time is and what cures it; of kswapd, why it works now.

use crate::exit;
use crate::output::documents::Outputs;
use crate::output::{explain as text, progress::Progress};
use anyhow::{Result, anyhow};
use pagetax_core::explain::{Explanations, all, find};
use pagetax_core::units::Nanos;
use pagetax_host::measure::kswapd::watch;
use pagetax_host::procfs::Root;
use std::process::ExitCode;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  pagetax explain                  all causes, one line each
  pagetax explain shootdown        what it is, what shows it, what cures it
  pagetax explain kswapd           why does kswapd work on this machine, now?
  pagetax explain kswapd --for 1min";

/// Explain a cause of time, or why kswapd works
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// The time for which kswapd is watched
    #[arg(long = "for", value_name = "TIME", default_value = "5s")]
    time: Nanos,

    #[command(flatten)]
    outputs: Outputs<Explanations>,

    /// Causes, as budgets name them, or kswapd [default: all]
    #[arg(value_name = "CAUSE")]
    causes: Vec<String>,
}

/// Runs `pagetax explain`.
pub fn run(args: Args) -> Result<ExitCode> {
    args.outputs.check_writable()?;
    let (of_kswapd, causes): (Vec<&String>, Vec<&String>) =
        args.causes.iter().partition(|name| *name == "kswapd");
    let causes: Vec<_> = match args.causes.is_empty() {
        true => all().collect(),
        false => causes
            .into_iter()
            .map(|id| find(id).ok_or_else(|| unknown(id)))
            .collect::<Result<_>>()?,
    };
    let kswapd = (!of_kswapd.is_empty()).then(|| {
        let _progress = Progress::start("explain kswapd");
        watch(&Root::default(), Duration::from_nanos(args.time.0))
    });
    let document = Explanations { causes, kswapd };
    let is_short = args.causes.is_empty();
    args.outputs.print(&document, |document| text::render(document, is_short))?;
    Ok(exit::FINE.into())
}

fn unknown(id: &str) -> anyhow::Error {
    let known: Vec<String> = all().map(|explanation| explanation.id).collect();
    anyhow!("no cause is called `{id}`\n  hint: there are {}, and kswapd", known.join(", "))
}
