//! `pagetax pagesize`: the page sizes of this system.

use crate::exit;
use crate::output::documents::Outputs;
use anyhow::{Result, anyhow};
use pagetax_core::units::PageSize;
use pagetax_host::pages::PageSettings;
use pagetax_host::pages::documents::{PageSizeOffer, PageSizes};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  pagetax pagesize                the base page, in bytes
  pagetax pagesize -a             all page sizes that the kernel knows
  pagetax pagesize -a --json      and how each can be had now";

/// Print the page sizes of this system, in bytes
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// All of them: the base page, transparent huge pages of each size, hugetlb pages
    #[arg(short)]
    all: bool,

    #[command(flatten)]
    outputs: Outputs<PageSizes>,
}

/// Runs `pagetax pagesize [-a]`.
pub fn run(args: Args) -> Result<ExitCode> {
    let base = PageSize::new(rustix::param::page_size() as u64)
        .map_err(|error| exit::with(exit::UNMET, anyhow!(error)))?;
    let mut document = PageSizes::new(base, &PageSettings::host());
    document.sizes.retain(|offer| args.all || offer.base);
    let line = |offer: &PageSizeOffer| format!("{}\n", offer.page_bytes.bytes());
    args.outputs.print(&document, |document| document.sizes.iter().map(line).collect())?;
    Ok(exit::FINE.into())
}
