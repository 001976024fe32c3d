//! `pagetax misscurve`: how often a program would miss with TLBs of any size, from one look at it.

use crate::output::tables::TablesArgs;
use crate::output::{self, documents::Outputs, misscurve};
use crate::recorded::{Recorded, Source};
use anyhow::Result;
use pagetax_core::units::PageSize;
use pagetax_recorder::counters::Side;
use pagetax_recorder::curves::Curves;
use pagetax_recorder::documents::MissCurves;
use pagetax_sim::hardware::reuse::Following;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  pagetax misscurve -- sort big.txt               TLB misses for any number of entries, 4K to 1G pages
  pagetax misscurve app.ptt --csv=curve.csv       of a trace (pagetax record)
  pagetax misscurve --reach 99.9 -- ./server      which TLB would hold all but 0.1 % of accesses?
  pagetax misscurve --sample-pages 4096 -- ./server  by a sample of pages: faster, within a few percent";

/// Show the TLB misses of a program for all TLB sizes and page sizes at once
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// Page sizes to draw a curve for
    #[arg(long, value_name = "SIZE,…", value_delimiter = ',', default_value = "4K,64K,2M,1G")]
    pages: Vec<PageSize>,

    /// Count instruction fetches, rather than loads and stores
    #[arg(long)]
    code: bool,

    /// The share of accesses, in percent, that shall find their translation
    #[arg(long, value_name = "PERCENT", default_value_t = 99.0, value_parser = percent)]
    reach: f64,

    /// Follow only so many pages of each size, a sample; all by default, which is exact
    #[arg(long = "sample-pages", alias = "sample", value_name = "N", value_parser = clap::value_parser!(u64).range(64..))]
    sample: Option<u64>,

    /// Accesses of each interval that the working set is counted in
    #[arg(long, value_name = "ACCESSES", default_value_t = 10_000_000,
          value_parser = clap::value_parser!(u64).range(1000..))]
    interval: u64,

    #[command(flatten)]
    tables: TablesArgs,

    #[command(flatten)]
    outputs: Outputs<MissCurves>,

    #[command(flatten)]
    source: Source,
}

fn percent(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(percent) if percent > 0.0 && percent < 100.0 => Ok(percent),
        _ => Err("write a share between 0 and 100, as in 99.9".into()),
    }
}

/// Runs `pagetax misscurve [TRACE] [-- COMMAND]`.
pub fn run(args: Args) -> Result<ExitCode> {
    args.outputs.check_writable()?;
    args.tables.check_writable()?;
    let source = args.source.open(&args.outputs, false)?;
    let mut tables = args.tables.open(matches!(source, Recorded::Live(_)), &args.outputs)?;
    let following = args.sample.map_or(Following::All, Following::AtMost);
    let side = if args.code { Side::Code } else { Side::Data };
    let curves = Curves::new(&args.pages, following, side, args.interval);
    let (mut curves, outcome) = source.observe("misscurve", curves)?;
    curves.finish();
    let of = (source.title(), outcome.code);
    let document = MissCurves::new(&curves, of, side, args.interval, args.reach);
    args.outputs.write(&document)?;
    tables.print(&misscurve::render(&document))?;
    outcome.notes.iter().for_each(|note| output::note(&format!("misscurve: {note}")));
    Ok(outcome.code.into())
}
