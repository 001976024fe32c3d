//! Trapstat's arguments.

use super::trap_table::TrapTableArgs;
use crate::exit;
use crate::operands::Operands;
use crate::output::documents::Outputs;
use crate::output::tables::TablesArgs;
use crate::output::trapstat::Form;
use crate::processes::pid;
use crate::recorded::EngineChoice;
use anyhow::anyhow;
use pagetax_host::procfs::CpuList;
use pagetax_recorder::documents::Trapstat;
use std::ffi::OsString;

/// The source of numbers, as `--backend` names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Choice {
    /// Hardware counters where there are any, else the recorder
    Auto,
    /// Hardware counters
    Perf,
    /// Experimental, never run on such a CPU: samples of AMD's instruction-based sampling
    Ibs,
    /// A recorder that feeds simulated machines
    Record,
}

const EXAMPLES: &str = "\
Examples:
  pagetax trapstat -T -- sort big.txt                    misses by page size, and which code pays
  pagetax trapstat --pages 4K,2M -- python3 app.py       as it would be on base and on huge pages
  pagetax trapstat -T --on sim:ultrasparc-3plus-900 --pages 8K,heap=4M -- ./program
  pagetax trapstat -t 1 10                               the whole system, where the CPU counts
  pagetax trapstat -f --top 5 -- make                    children and what they run, too
  pagetax trapstat -T --pages 4K,2M sort.ptt             of a trace (pagetax record)
  pagetax trapstat --sample -- ./long-program            bursts of it, with the error that this makes";

/// TLB misses of a program on any machine, with or without hardware counters
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// Totals by mode (the default)
    #[arg(short = 't')]
    pub(super) brief: bool,

    /// Split the counts by page size
    #[arg(short = 'T', conflicts_with = "brief")]
    pub(super) by_size: bool,

    /// Print for scripts: nanoseconds, CPU, mode, page size in bytes, then each count and its percentage; a
    /// line with # names the source of the lines after it
    #[arg(short = 'P')]
    pub(super) parsable: bool,

    /// Only these CPUs, such as 0,2-3; with the record backend, threads in the order of appearance
    #[arg(short = 'c', visible_short_alias = 'C', value_name = "CPUS")]
    pub(super) cpus: Option<CpuList>,

    /// Observe running processes (backends perf and ibs)
    #[arg(short = 'p', value_name = "PID,…", value_delimiter = ',', value_parser = pid)]
    pub(super) pids: Vec<u32>,

    /// Follow children, and what they execute
    #[arg(short = 'f', long)]
    pub(super) follow: bool,

    /// Record bursts only, and state the error; for programs that take long. With --engine native the program
    /// only counts its instructions in between, which costs least
    #[arg(long, conflicts_with_all = ["words", "follow"])]
    pub(super) sample: bool,

    /// The source of the numbers: hardware counters, or a recorder that feeds simulated machines
    #[arg(long, value_enum, default_value_t = Choice::Auto)]
    pub(super) backend: Choice,

    /// The recorder that runs the program [default: valgrind, where it can]
    #[arg(long, value_enum)]
    pub(super) engine: Option<EngineChoice>,

    /// Simulated machines that the record backend feeds
    #[arg(
        long,
        value_name = "MACHINE,…",
        value_delimiter = ',',
        default_value = "sim:x86-64-calibrated"
    )]
    pub(super) on: Vec<String>,

    /// Page sizes: default (those that the process really has) or sizes for heap, stack and anon (4K,2M),
    /// each shown by itself; by part heap=4M,stack=64K, shown together, with base pages elsewhere. Repeatable
    #[arg(long, value_name = "SIZE,…|PART=SIZE,…", default_value = "default")]
    pub(super) pages: Vec<String>,

    /// The number of functions and places of memory to list after the program's end
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub(super) top: usize,

    #[command(flatten)]
    pub(super) tables: TablesArgs,

    #[command(flatten)]
    pub(super) outputs: Outputs<Trapstat>,

    /// A trace in place of a command; the interval of listings, in seconds or with a unit (with the record
    /// backend, of the simulated machine); how many listings
    #[arg(value_name = "[TRACE] [INTERVAL [COUNT]]", num_args = 0..=3)]
    pub(super) words: Vec<String>,

    #[command(flatten)]
    pub(super) trap_table: TrapTableArgs,

    #[arg(skip)]
    pub(super) operands: Operands,

    /// The command and its arguments
    #[arg(last = true, value_name = "COMMAND")]
    pub(super) command: Vec<OsString>,
}

impl Args {
    pub(super) fn form(&self) -> Form {
        match (self.parsable, self.by_size) {
            (true, _) => Form::Parsable,
            (false, true) => Form::BySize,
            (false, false) => Form::Brief,
        }
    }
}

/// Returns the error for something that this machine or backend lacks.
pub(super) fn unmet(message: String) -> anyhow::Error {
    exit::with(exit::UNMET, anyhow!(message))
}
