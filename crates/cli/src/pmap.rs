//! `pagetax pmap`: what a process has mapped, and by pages of which size.
//!
//! Options, columns and exit codes are those of the Solaris command of that name; `--json` and
//! `--diff` are ours. Cores are not read.

use crate::exit;
use crate::output::{self, documents::Outputs, pagemap};
use crate::processes::{ProcessArgs, pid};
use anyhow::{Context, Result, bail};
use pagetax_core::document;
use pagetax_core::units::{Nanos, VirtAddr};
use pagetax_host::pages::pagemap::{PageMap, PageMapDiff, PageMaps, by_node, read};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

mod address;

const EXAMPLES: &str = "\
Examples:
  pagetax pmap -xs 1234                one row for each run of one page size
  pagetax pmap -xs -A 7f0000000000,7f0040000000 1234
  pagetax pmap --json 1234 > before.json
  pagetax pmap --diff before.json after.json
  pagetax pmap --diff 5s 1234          what changes within five seconds";

/// Show the memory map of a process, with page sizes
///
/// Zero, and no page, are shown as `-`. Mode is r, w, x, s (shared) and R (memory not reserved).
/// Page sizes between the base page and the huge page are seen by root alone. The exit code is 2 for
/// wrong usage, else the number of processes that could not be shown.
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// Extended: resident, anonymous and locked memory
    #[arg(short = 'x', conflicts_with_all = ["json", "reserved", "swap", "node"])]
    extended: bool,

    /// One row for each stretch of one page size, with the size
    #[arg(short = 's', conflicts_with_all = ["json", "swap", "node"])]
    sizes: bool,

    /// Count shared memory that is of no file as anonymous and as reserved, too
    #[arg(short = 'a')]
    anon_shared: bool,

    /// Only addresses that are reserved: without access, or without memory behind them
    #[arg(short = 'r', conflicts_with_all = ["json", "swap", "node"])]
    reserved: bool,

    /// Show swap reservations
    #[arg(short = 'S', conflicts_with_all = ["json", "node"])]
    swap: bool,

    /// The memory node (lgroup) that each stretch lies on
    #[arg(short = 'L', conflicts_with = "json")]
    node: bool,

    /// Whole paths of mapped files
    #[arg(short = 'l')]
    long: bool,

    /// Accepted and without effect: looking at a process takes no hold of it here
    #[arg(short = 'F', long)]
    force: bool,

    /// Only these addresses (hexadecimal); without an end, the mapping that holds the first
    #[arg(short = 'A', value_name = "START[,END]", value_parser = address::range)]
    address: Option<(VirtAddr, Option<VirtAddr>)>,

    #[command(flatten)]
    outputs: Outputs<PageMaps>,

    /// Show changes within a time (`5s`), or between this map and another, both written by --json; the other
    /// map stands in place of PID
    #[arg(long, value_name = "TIME|FILE", conflicts_with_all = ["swap", "node", "reserved"])]
    diff: Option<String>,

    #[command(flatten)]
    processes: ProcessArgs,
}

/// Runs `pagetax pmap`.
pub fn run(args: Args) -> Result<ExitCode> {
    match &args.diff {
        None => show(&args),
        Some(first) => match first.parse::<Nanos>() {
            Ok(time) => watch(&args, Duration::from_nanos(time.0)),
            Err(_) if !Path::new(first).exists() => bail!(
                "`{first}` is neither a time nor a file\n  hint: --diff 5s PID, or --diff BEFORE.json AFTER.json"
            ),
            Err(_) => compare(&args, Path::new(first)),
        },
    }
}

/// Reads all, prints what could be read, and counts what could not.
fn show(args: &Args) -> Result<ExitCode> {
    let mut failures = 0u8;
    let mut maps = Vec::new();
    for operand in args.processes.all() {
        let shown = map_of(args, operand).and_then(|map| {
            if !args.outputs.takes_stdout() {
                output::print(&render(args, &map)?)?;
            }
            Ok(map)
        });
        match shown {
            Ok(map) => {
                hints(args, &map);
                maps.push(map);
            }
            Err(error) if exit::is_closed_pipe(&error) => return Err(error),
            Err(error) => {
                output::error(&error.context(format!("cannot show {operand}")));
                failures = failures.saturating_add(1);
            }
        }
    }
    args.outputs.write(&PageMaps { maps })?;
    Ok(failures.into())
}

fn map_of(args: &Args, operand: &str) -> Result<PageMap> {
    let mut map = read(pid(operand)?)?;
    if let Some((start, end)) = args.address {
        match end {
            Some(end) => map.cut(start, end),
            None => map.mappings.retain(|m| m.start <= start && start < m.end),
        }
    }
    if args.reserved {
        let no_access =
            |m: &pagetax_host::pages::pagemap::Mapping| !(m.read || m.write || m.execute);
        map.mappings.retain(|mapping| mapping.no_reserve || no_access(mapping));
    }
    Ok(map)
}

fn render(args: &Args, map: &PageMap) -> Result<String> {
    let options = pagemap::Options {
        by_size: args.sizes,
        long_names: args.long,
        anon_shared: args.anon_shared,
    };
    Ok(match (args.node, args.swap, args.extended) {
        (true, ..) => pagemap::nodes(map, &by_node(map)?, options),
        (_, true, _) => pagemap::swap(map, options),
        (.., true) => pagemap::extended(map, options),
        _ => pagemap::plain(map, options),
    })
}

/// Prints remarks on rows that may mislead.
fn hints(args: &Args, map: &PageMap) {
    if map.unsettled {
        output::note(&format!(
            "note: process {} changed its mappings while they were read, six times in a row; rows may \
             disagree",
            map.pid
        ));
    }
    if (args.sizes || args.node) && map.mappings.iter().any(|mapping| mapping.unplaced.is_some()) {
        output::note(
            "note: this kernel tells page sizes by mapping (Linux 6.7 by address): where a mapping has huge pages \
             and others, its rows are in the order of their sizes, and only their lengths are right",
        );
    }
    if let Some(why) = map.folios_missing.as_ref().filter(|_| args.sizes || args.node) {
        output::note(&format!(
            "note: pages larger than {} but below a huge page show as {}: {why}",
            map.base_page, map.base_page
        ));
    }
}

/// Runs `--diff TIME PID…`.
fn watch(args: &Args, time: Duration) -> Result<ExitCode> {
    let before = args.processes.all().map(|operand| map_of(args, operand));
    let before = before.collect::<Result<Vec<_>>>()?;
    std::thread::sleep(time);
    let after = args.processes.all().map(|operand| map_of(args, operand));
    print_changes(args, &before, &after.collect::<Result<Vec<_>>>()?)
}

/// Runs `--diff BEFORE.json AFTER.json`.
fn compare(args: &Args, first: &Path) -> Result<ExitCode> {
    let [second] = args.processes.all().collect::<Vec<_>>()[..] else {
        bail!(
            "--diff {} is no time, so one other file is needed\n  hint: pagetax pmap --diff 5s PID, \
             or --diff BEFORE.json AFTER.json",
            first.display()
        );
    };
    let (before, after) = (load(first)?, load(Path::new(second))?);
    if before.maps.len() != after.maps.len() {
        bail!(
            "the files hold {} and {} processes\n  hint: write both with the same process ids",
            before.maps.len(),
            after.maps.len()
        );
    }
    print_changes(args, &before.maps, &after.maps)
}

fn load(path: &Path) -> Result<PageMaps> {
    let remedy = || format!("cannot use {}; write it with pagetax pmap --json PID", path.display());
    let text = std::fs::read_to_string(path).with_context(remedy)?;
    document::from_json(&text).with_context(remedy)
}

fn print_changes(args: &Args, before: &[PageMap], after: &[PageMap]) -> Result<ExitCode> {
    let document = PageMapDiff::new(before, after);
    args.outputs.for_kind().print(&document, |document: &PageMapDiff| {
        let maps = after.iter().zip(&document.processes);
        maps.map(|(map, of)| pagemap::changes(map, &of.changes, args.long)).collect()
    })?;
    Ok(exit::FINE.into())
}
