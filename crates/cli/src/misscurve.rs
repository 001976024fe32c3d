//! `pagetax misscurve`: how often a program would miss with TLBs of any size, from one look at it.

use crate::output::{self, text};
use crate::recorded::Source;
use anyhow::Result;
use pagetax_core::units::{Bytes, PageSize};
use pagetax_recorder::counters::Side;
use pagetax_recorder::curves::Curves;
use pagetax_sim::hardware::reuse::Following;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  pagetax misscurve -- sort big.txt               TLB misses for any number of entries, 4K to 1G pages
  pagetax misscurve app.ptt --csv curve.csv       of a trace (pagetax record)
  pagetax misscurve --reach 99.9 -- ./server      which TLB would hold all but 0.1 % of accesses?
  pagetax misscurve --sample 4096 -- ./server     by a sample of pages: faster, within a few percent";

/// Numbers of entries in the table: those of real TLBs, and some beyond.
const ENTRIES: &[u64] =
    &[16, 32, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 8192, 16_384, 65_536];

/// Show the TLB misses of a program for all TLB sizes and page sizes at once
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// Page sizes
    #[arg(long, value_name = "SIZE,…", value_delimiter = ',', default_value = "4K,64K,2M,1G")]
    pages: Vec<PageSize>,

    /// Of instruction fetches, rather than of loads and stores
    #[arg(long)]
    code: bool,

    /// The share of accesses, in percent, that shall find their translation
    #[arg(long, value_name = "PERCENT", default_value_t = 99.0, value_parser = percent)]
    reach: f64,

    /// Follow only so many pages of each size, a sample; all by default, which is exact
    #[arg(long, value_name = "PAGES", value_parser = clap::value_parser!(u64).range(64..))]
    sample: Option<u64>,

    /// Accesses of each interval that the working set is counted in
    #[arg(long, value_name = "ACCESSES", default_value_t = 10_000_000,
          value_parser = clap::value_parser!(u64).range(1000..))]
    interval: u64,

    /// Write everything as JSON to a file, or instead of the tables to stdout (-)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Write the curves as CSV to a file, or instead of the tables to stdout (-)
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,

    #[command(flatten)]
    source: Source,
}

fn percent(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(percent) if percent > 0.0 && percent < 100.0 => Ok(percent),
        _ => Err("write a share between 0 and 100, as in 99.9".into()),
    }
}

/// `pagetax misscurve [TRACE] [-- COMMAND]`
pub fn run(args: Args) -> Result<ExitCode> {
    args.json.iter().chain(&args.csv).try_for_each(|path| output::check_writable(path))?;
    let source = args.source.open()?;
    let following = args.sample.map_or(Following::All, Following::AtMost);
    let side = if args.code { Side::Code } else { Side::Data };
    let curves = Curves::new(&args.pages, following, side, args.interval);
    let (mut curves, outcome) = source.observe(curves)?;
    curves.finish();
    if let Some(path) = &args.json {
        let document = document(&curves, &args, &source.title(), outcome.code);
        output::write_document(path, &format!("{document:#}\n"))?;
    }
    if let Some(path) = &args.csv {
        output::write_document(path, &csv(&curves))?;
    }
    if ![&args.json, &args.csv].iter().any(|path| path.as_deref() == Some(Path::new("-"))) {
        output::print(&render(&curves, &args, &source.title()))?;
    }
    outcome.notes.iter().for_each(|note| output::note(&format!("misscurve: {note}")));
    Ok(outcome.code.into())
}

/// `12.3`, `0.0004`: three digits of a share in percent.
fn share(misses: u64, accesses: u64) -> String {
    if accesses == 0 {
        return text::MISSING.into();
    }
    let percent = misses as f64 * 100.0 / accesses as f64;
    match percent {
        0.0 => "0".into(),
        percent if percent >= 10.0 => format!("{percent:.1}"),
        percent => {
            format!("{percent:.*}", (2 - percent.log10().floor() as i32).clamp(2, 7) as usize)
        }
    }
}

fn render(curves: &Curves, args: &Args, title: &str) -> String {
    let what = if args.code { "instruction fetches" } else { "loads and stores" };
    let mut out = format!(
        "{title}: {} {what}, {} threads; TLBs that are fully associative, LRU: modelled\n",
        text::count(curves.accesses()),
        curves.threads()
    );
    let sizes = curves.page_sizes().iter().enumerate();
    let names: Vec<String> = sizes
        .clone()
        .map(|(nr, size)| format!("{}{size}", if curves.is_exact(nr) { "" } else { "≈" }))
        .collect();
    let headings: Vec<&str> =
        ["entries"].into_iter().chain(names.iter().map(String::as_str)).collect();
    let numeric: Vec<usize> = (0..headings.len()).collect();
    out += &text::heading("misses, % of accesses");
    let row = |entries: &u64| {
        let of_size = |nr| share(curves.misses(nr, *entries), curves.accesses());
        [text::count(*entries)].into_iter().chain((0..names.len()).map(of_size)).collect()
    };
    out += &text::table(&headings, &numeric, ENTRIES.iter().map(row).collect());
    out += &text::heading(&format!("TLB reach for {} % of accesses", args.reach));
    let rows = sizes.clone().map(|(nr, size)| reach_row(curves, nr, *size, args.reach)).collect();
    out += &text::table(&["pages", "entries", "reach", "pages touched"], &[0, 1, 2, 3], rows);
    out += &text::heading(&format!(
        "working set, in intervals of {} accesses",
        text::count(args.interval)
    ));
    let rows = sizes.map(|(nr, size)| working_set_row(curves, nr, *size)).collect();
    out + &text::table(&["pages", "least", "median", "most"], &[0, 1, 2, 3], rows)
}

fn reach_row(curves: &Curves, nr: usize, size: PageSize, reach: f64) -> Vec<String> {
    let entries = curves.entries_for(nr, 1.0 - reach / 100.0);
    vec![
        size.to_string(),
        entries.map_or("none: first touches miss more".into(), text::count),
        entries.map_or(text::MISSING.into(), |entries| bytes(entries, size)),
        text::count(curves.pages(nr)),
    ]
}

fn bytes(pages: u64, size: PageSize) -> String {
    Bytes(pages.saturating_mul(size.bytes())).to_string()
}

fn working_set_row(curves: &Curves, nr: usize, size: PageSize) -> Vec<String> {
    let mut pages: Vec<u64> = curves.working_sets().iter().map(|interval| interval[nr]).collect();
    pages.sort_unstable();
    let at = |place: Option<&u64>| place.map_or(text::MISSING.into(), |pages| bytes(*pages, size));
    vec![size.to_string(), at(pages.first()), at(pages.get(pages.len() / 2)), at(pages.last())]
}

fn document(curves: &Curves, args: &Args, title: &str, code: u8) -> serde_json::Value {
    let curve = |(nr, size): (usize, &PageSize)| {
        let misses: Vec<_> = ENTRIES
            .iter()
            .map(|entries| json!({"entries": entries, "tlb_miss_count": curves.misses(nr, *entries)}))
            .collect();
        let intervals: Vec<u64> =
            curves.working_sets().iter().map(|interval| interval[nr]).collect();
        json!({
            "page_bytes": size.bytes(), "is_exact": curves.is_exact(nr),
            "page_count": curves.pages(nr), "misses": misses,
            "reach": {"percent": args.reach, "entries": curves.entries_for(nr, 1.0 - args.reach / 100.0)},
            "working_set_page_counts": intervals,
        })
    };
    json!({
        "schema": 1, "kind": "misscurve", "of": title, "exit": code, "provenance": "modeled",
        "side": if args.code { "code" } else { "data" },
        "access_count": curves.accesses(), "thread_count": curves.threads(),
        "interval_access_count": args.interval,
        "curves": curves.page_sizes().iter().enumerate().map(curve).collect::<Vec<_>>(),
    })
}

fn csv(curves: &Curves) -> String {
    let mut out = String::from("page_bytes,entries,tlb_miss_count,access_count,is_exact\n");
    for (nr, size) in curves.page_sizes().iter().enumerate() {
        for entries in ENTRIES {
            out += &format!(
                "{},{entries},{},{},{}\n",
                size.bytes(),
                curves.misses(nr, *entries),
                curves.accesses(),
                curves.is_exact(nr)
            );
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_keep_three_digits() {
        let shares =
            [(1, 3), (1, 1000), (3, 100_000_000), (0, 5), (1, 0)].map(|(m, a)| share(m, a));
        assert_eq!(shares, ["33.3", "0.100", "0.0000030", "0", "–"]);
    }
}
