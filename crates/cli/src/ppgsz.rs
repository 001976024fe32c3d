//! `pagetax ppgsz`: page sizes for a command or for running processes, and whether it took.
//!
//! Options, operands and exit codes are those of the original; what it adds is written out in its
//! help. A command that can have its pages by its environment alone takes our place; else it is our
//! child, and its status becomes ours.

mod command;
mod processes;

use crate::exit;
use crate::output::{documents::Outputs, pages};
use anyhow::Result;
use pagetax_core::page_size::PartSizes;
use pagetax_host::pages::documents::{PageSizeChange, ProcessChange};
use pagetax_host::pages::{PageSettings, parts};
use std::ffi::OsString;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  pagetax ppgsz -o heap=2M,stack=2M ./server      start a command on huge pages
  pagetax ppgsz -o heap=2M,anon=2M -p 4711        give a running process huge pages now
  pagetax ppgsz -o anon=2M --follow -p 4711       and what it adds, and its children
  pagetax ppgsz --undo -p 4711                    back to base pages
  pagetax ppgsz -o text=2M --verify ./server      code by huge pages; did it take?
  pagetax ppgsz -o heap=hugetlb:2M -F ./job       pages of the hugetlb pool
  pagetax ppgsz -o heap=2M --only heap@0-64M ./job   the first 64M of its heap alone
  pagetax ppgsz -o heap=2M --dry-run ./server     only say what would be done";

const AFTER: &str = "\
Parts: heap is bss and brk, and of a command also what its malloc maps; stack is the main thread's; \
anon is private anonymous memory that exists; text, data and bss are those of the program and its \
libraries. Sizes: 4K, any size of /sys/kernel/mm/transparent_hugepage, hugetlb:SIZE, base, or \
default (0) for the kernel's choice.

Exit codes: the command's own, or 128 + its signal; 1 --undo left huge pages of code; 125 wrong usage, or a process could not be \
changed; 126 the command cannot be run; 127 it was not found.";

/// Set page sizes of a command or of running processes
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES, after_help = AFTER)]
pub struct Args {
    /// Page sizes by part: heap, stack, anon, text, data, bss
    #[arg(short = 'o', value_name = "PART=SIZE,…")]
    options: Vec<String>,

    /// Only this memory of the parts that -o names: heap@0-64M, arena, mapping:32M@0-96M, text:FILE
    /// (docs/large-pages.md#only)
    #[arg(long, value_name = "PATTERN,…", conflicts_with_all = ["processes", "follow"])]
    only: Option<String>,

    /// Also where it may end badly: seccomp filters, moved copies of code and data, hugetlb heaps
    #[arg(short = 'F', long)]
    force: bool,

    /// The operands are running processes: 4711, /proc/4711, or several as 4711,4712
    #[arg(short = 'p')]
    processes: bool,

    /// Back to base pages: of the parts that -o names, or of all
    #[arg(long, requires = "processes")]
    undo: bool,

    /// Keep at it: what is added, what copy-on-write made small, and forked children
    #[arg(short = 'f', long)]
    follow: bool,

    /// Say what would be done, and do nothing
    #[arg(long)]
    dry_run: bool,

    /// After a command has ended, say on stderr what became of it at its largest
    #[arg(long)]
    verify: bool,

    #[command(flatten)]
    outputs: Outputs<PageSizeChange>,

    /// A command and its arguments, or processes
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "CMD|PID"
    )]
    operands: Vec<OsString>,
}

/// Runs `pagetax ppgsz`.
pub fn run(args: Args) -> Result<ExitCode> {
    let own = |error| exit::with(exit::WRAPPER_FAILED, error);
    let options = args.options.iter().map(String::as_str);
    let system = PageSettings::host();
    let advice = match args.undo && args.options.is_empty() {
        true => Ok(parts::undoable()),
        false => PartSizes::parse(options),
    };
    let advice = advice.map_err(|error| own(error.into()))?;
    parts::check(&advice, &system).map_err(|error| own(error.into()))?;
    match args.processes {
        true => processes::run(&args, &advice, &system).map_err(own),
        false => command::run(&args, &advice),
    }
}

/// Renders the table of all verdicts; nothing if there are none.
fn table(processes: &[ProcessChange]) -> String {
    let verdicts: Vec<_> =
        processes.iter().filter_map(|process| process.verdict.as_ref()).collect();
    if verdicts.is_empty() { String::new() } else { pages::verdicts(&verdicts) }
}

/// Renders the table of processes that fill a huge page, and the number of all others.
fn table_of_large(mut processes: Vec<ProcessChange>, huge_bytes: u64) -> String {
    let all = processes.len();
    let resident = |process: &ProcessChange| {
        let parts = process.verdict.iter().flat_map(|verdict| &verdict.parts);
        parts.map(|part| part.resident_bytes).max().unwrap_or(0)
    };
    processes.sort_by_key(|process| std::cmp::Reverse(resident(process)));
    let large = processes.iter().filter(|process| resident(process) >= huge_bytes).count();
    processes.truncate(large.max(1));
    let rest = match all - processes.len() {
        0 => String::new(),
        1 => "  and 1 more process, with nothing to fill a huge page\n".into(),
        more => format!("  and {more} more processes, with nothing to fill a huge page\n"),
    };
    table(&processes) + &rest
}
