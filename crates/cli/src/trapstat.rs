//! `pagetax trapstat`: TLB misses by page size, side and mode, and the share of time they take.
//!
//! Invariant: where the numbers come from is the first thing said, and with which reason; what no
//! backend can tell is n/a.

pub mod backend;
mod perf;
pub mod profile;
pub mod record;

use crate::exit;
use crate::output;
use crate::output::trapstat::{Form, render};
use anyhow::{Context, Result, anyhow};
use backend::Choice;
use pagetax_core::trapstat::Listing;
use pagetax_core::units::Nanos;
use pagetax_host::procfs::CpuList;
use pagetax_host::sys::signal::StopSignals;
use serde_json::json;
use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

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
    brief: bool,

    /// By page size, too
    #[arg(short = 'T', conflicts_with = "brief")]
    by_size: bool,

    /// For scripts: nanoseconds, CPU, mode, page size in bytes, then each count and its percentage; a line
    /// with # names what those after it are of
    #[arg(short = 'P')]
    parsable: bool,

    /// Only these CPUs, such as 0,2-3; with the record backend, threads in the order of appearance
    #[arg(short = 'c', value_name = "CPUS")]
    cpus: Option<CpuList>,

    /// Of a running process (backends perf and ibs)
    #[arg(short = 'p', value_name = "PID")]
    pid: Option<u32>,

    /// Follow children, and what they execute
    #[arg(short = 'f', long)]
    follow: bool,

    /// Record bursts only, and state the error; for programs that take long. With --engine native the program only
    /// counts its instructions in between, which costs least
    #[arg(long, conflicts_with_all = ["words", "follow"])]
    sample: bool,

    /// Where numbers come from: hardware counters, or a recorder that feeds simulated machines
    #[arg(long, value_enum, default_value_t = Choice::Auto)]
    backend: Choice,

    /// Which recorder runs the program [default: valgrind, where it can]
    #[arg(long, value_enum)]
    engine: Option<record::EngineChoice>,

    /// Simulated machines that the record backend feeds
    #[arg(
        long,
        value_name = "MACHINE,…",
        value_delimiter = ',',
        default_value = "sim:x86-64-calibrated"
    )]
    on: Vec<String>,

    /// Page sizes, each shown by itself: real, a size for all data (2M), or segments (heap=4M+stack=64K;
    /// heap, stack, anon, file, all); segments that are not named have base pages
    #[arg(long, value_name = "PAGES,…", value_delimiter = ',', default_value = "real")]
    pages: Vec<String>,

    /// How many functions and places of memory are listed after the program's end
    #[arg(long, value_name = "N", default_value_t = 10)]
    top: usize,

    /// Print the tables into a file, apart from what the command prints
    #[arg(short = 'o', long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Write everything as JSON to a file, or instead of the tables to stdout (-)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// A trace in place of a command; seconds of each listing, of the simulated machine with the record
    /// backend; how many listings
    #[arg(value_name = "[TRACE] [INTERVAL [COUNT]]", num_args = 0..=3)]
    words: Vec<String>,

    #[arg(skip)]
    operands: Operands,

    /// The command and its arguments
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// What stands between the options and the command.
#[derive(Debug, Clone, Default, PartialEq)]
struct Operands {
    trace: Option<PathBuf>,
    interval: Option<f64>,
    count: Option<u64>,
}

impl Operands {
    fn parse(words: &[String]) -> Result<Operands> {
        let is_number = |word: &&String| word.parse::<f64>().is_ok();
        let trace = words.first().filter(|word| !is_number(word)).map(PathBuf::from);
        let numbers = &words[usize::from(trace.is_some())..];
        let remedy =
            "remedy: [TRACE] [INTERVAL [COUNT]], as in app.ptt 0.5 10; a command goes after --";
        let wrong = |word: &String, what| anyhow!("`{word}` is no {what}\n  {remedy}");
        let interval =
            numbers.first().map(|word| word.parse().map_err(|_| wrong(word, "interval")));
        let count = numbers.get(1).map(|word| word.parse().map_err(|_| wrong(word, "count")));
        match numbers.get(2) {
            Some(word) => Err(anyhow!("`{word}` is one word too many\n  {remedy}")),
            None => {
                Ok(Operands { trace, interval: interval.transpose()?, count: count.transpose()? })
            }
        }
    }
}

impl Args {
    fn interval_ns(&self) -> Result<Option<u64>> {
        let Some(seconds) = self.operands.interval else { return Ok(None) };
        if !(seconds.is_finite() && seconds >= 0.001) {
            return Err(anyhow!(
                "an interval of {seconds} s\n  remedy: name a millisecond or more, in seconds: 0.001"
            ));
        }
        Ok(Some((seconds * 1e9) as u64))
    }

    fn form(&self) -> Form {
        match (self.parsable, self.by_size) {
            (true, _) => Form::Parsable,
            (false, true) => Form::BySize,
            (false, false) => Form::Brief,
        }
    }
}

/// `pagetax trapstat [INTERVAL [COUNT]] [-- COMMAND]`
pub fn run(mut args: Args) -> Result<ExitCode> {
    args.operands = Operands::parse(&args.words)?;
    if args.operands.trace.is_some() && (args.pid.is_some() || !args.command.is_empty()) {
        return Err(anyhow!("a trace, and something to run\n  remedy: leave one of them out"));
    }
    for path in args.json.iter().chain(&args.output) {
        output::check_writable(path)?;
    }
    args.interval_ns()?;
    let mut backend = backend::choose(&args)?;
    // From here on Ctrl-C ends the program, not us, so that what was seen is printed.
    let _stop = StopSignals::watch().context("cannot watch for Ctrl-C; this is not expected")?;
    let said = format!("trapstat: backend {}: {}", backend.name(), backend.why());
    output::note(&said);
    let mut printer = Printer::new(&args)?;
    let finished = backend.run(&args, &mut |listing| printer.take(listing))?;
    if printer.form != Form::Parsable {
        let profiles = finished.profiles.iter().map(output::trapstat::profile);
        printer.print(&profiles.collect::<String>())?;
    }
    finished.notes.iter().for_each(|note| output::note(&format!("trapstat: {note}")));
    if let Some(path) = &args.json {
        let document = json!({
            "schema": 1, "kind": "trapstat", "backend": backend.name(), "why": backend.why(),
            "listings": printer.listings, "profiles": finished.profiles, "notes": finished.notes,
            "wall_ns": finished.wall_ns, "exit": finished.code,
        });
        output::write_document(path, &format!("{document:#}\n"))?;
    }
    Ok(finished.code.into())
}

/// Where tables go.
enum Out {
    Stdout,
    File(File),
    /// JSON takes stdout.
    Nowhere,
}

/// Prints listings as they come, and keeps them.
struct Printer {
    form: Form,
    out: Out,
    listings: Vec<Listing>,
}

impl Printer {
    fn new(args: &Args) -> Result<Printer> {
        let out = match &args.output {
            Some(path) => Out::File(File::create(path).with_context(|| {
                format!("cannot write {}\n  remedy: name a file that you may write", path.display())
            })?),
            None if args.json.as_deref() == Some(Path::new("-")) => Out::Nowhere,
            None => Out::Stdout,
        };
        Ok(Printer { form: args.form(), out, listings: Vec::new() })
    }

    fn print(&mut self, text: &str) -> Result<()> {
        match &mut self.out {
            Out::Stdout => output::print(text),
            Out::File(file) => {
                let plain = anstream::adapter::strip_str(text).to_string();
                file.write_all(plain.as_bytes())
                    .context("cannot write the tables; is the disk full?")
            }
            Out::Nowhere => Ok(()),
        }
    }

    fn take(&mut self, listing: Listing) -> Result<()> {
        let gap = if self.listings.is_empty() || self.form == Form::Parsable { "" } else { "\n" };
        let of_other = self.listings.last().is_none_or(|last| last.title != listing.title);
        let named = self.form == Form::Parsable && of_other;
        let title = if named { format!("# {}\n", listing.title) } else { String::new() };
        self.print(&(gap.to_string() + &title + &render(&listing, self.form)))?;
        self.listings.push(listing);
        Ok(())
    }
}

/// For messages: `1.5 s`.
fn seconds(ns: u64) -> String {
    Nanos(ns).to_string()
}

/// The error for something that this machine or backend lacks.
fn unmet(message: String) -> anyhow::Error {
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
        let numbers = parse(&["1", "10"]).unwrap();
        assert_eq!((numbers.trace, numbers.interval, numbers.count), (None, Some(1.0), Some(10)));
        for wrong in [&["a.ptt", "b"][..], &["1", "x"], &["1", "2", "3"], &["a", "1", "1.5"]] {
            assert!(parse(wrong).unwrap_err().to_string().contains("INTERVAL"), "{wrong:?}");
        }
    }
}
