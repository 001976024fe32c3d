//! Trapstat's arguments.

use super::trap_table::TrapTableArgs;
use crate::exit;
use crate::output::documents::Outputs;
use crate::output::tables::TablesArgs;
use crate::output::trapstat::Form;
use crate::processes::pid;
use crate::recorded::EngineChoice;
use anyhow::{Result, anyhow};
use pagetax_core::units::Nanos;
use pagetax_host::procfs::CpuList;
use pagetax_recorder::documents::Trapstat;
use std::ffi::OsString;
use std::path::PathBuf;

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

/// The words between the options and the command.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Operands {
    pub(super) trace: Option<PathBuf>,
    pub(super) interval: Option<f64>,
    pub(super) count: Option<u64>,
}

/// Parses an interval: seconds, or a time with its unit.
fn seconds(word: &str) -> Option<f64> {
    word.parse().ok().or_else(|| Some(word.parse::<Nanos>().ok()?.0 as f64 / 1e9))
}

impl Operands {
    pub(super) fn parse(words: &[String]) -> Result<Operands> {
        let trace = words.first().filter(|word| seconds(word).is_none()).map(PathBuf::from);
        let numbers = &words[usize::from(trace.is_some())..];
        let hint = "hint: [TRACE] [INTERVAL [COUNT]], as in app.ptt 0.5 10";
        let wrong = |word: &String, what| anyhow!("`{word}` is no {what}\n  {hint}");
        let interval = numbers.first().map(|word| seconds(word).ok_or(wrong(word, "interval")));
        let count = numbers.get(1).map(|word| word.parse().map_err(|_| wrong(word, "count")));
        match numbers.get(2) {
            Some(word) => Err(anyhow!("`{word}` is one word too many\n  {hint}")),
            None => {
                Ok(Operands { trace, interval: interval.transpose()?, count: count.transpose()? })
            }
        }
    }
}

impl Args {
    pub(super) fn interval_ns(&self) -> Result<Option<u64>> {
        let Some(seconds) = self.operands.interval else { return Ok(None) };
        if !(seconds.is_finite() && seconds >= 0.001) {
            return Err(anyhow!(
                "an interval of {seconds} s\n  hint: name a millisecond or more, in seconds: 0.001"
            ));
        }
        Ok(Some((seconds * 1e9) as u64))
    }

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_stands_before_the_numbers() {
        let parse = |words: &[&str]| {
            Operands::parse(&words.iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        let trace = Some(PathBuf::from("a.ptt"));
        assert_eq!(parse(&[]).unwrap(), Operands::default());
        let all = parse(&["a.ptt", "0.5", "3"]).unwrap();
        assert_eq!(all, Operands { trace, interval: Some(0.5), count: Some(3) });
        assert_eq!(parse(&["500ms"]).unwrap().interval, Some(0.5));
        let numbers = parse(&["1", "10"]).unwrap();
        assert_eq!((numbers.trace, numbers.interval, numbers.count), (None, Some(1.0), Some(10)));
        for wrong in [&["a.ptt", "b"][..], &["1", "x"], &["1", "2", "3"], &["a", "1", "1.5"]] {
            assert!(parse(wrong).unwrap_err().to_string().contains("INTERVAL"), "{wrong:?}");
        }
    }
}
