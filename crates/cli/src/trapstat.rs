//! `pagetax trapstat`: TLB misses by page size, side and mode, and the share of time they take.
//!
//! Invariant: where the numbers come from is the first thing said, and with which reason; what no
//! backend can tell is n/a.

mod args;
mod backend;
mod perf;
mod record;
mod trap_table;

use crate::operands::Operands;
use crate::output;
use crate::output::tables::Tables;
use crate::output::trapstat::{Form, render};
use anyhow::{Context, Result, anyhow};
pub use args::Args;
use args::Choice;
use backend::Backend;
use pagetax_core::trapstat::Listing;
use pagetax_host::measure::tlb_events::CountError;
use pagetax_host::sys::signal::StopSignals;
use pagetax_recorder::documents::Trapstat;
use std::path::Path;
use std::process::ExitCode;

/// Runs `pagetax trapstat [INTERVAL [COUNT]] [-- COMMAND]`.
pub fn run(mut args: Args) -> Result<ExitCode> {
    args.trap_table.refuse()?;
    args.operands = Operands::parse(&args.words)?;
    if args.operands.file.is_some() && (!args.pids.is_empty() || !args.command.is_empty()) {
        return Err(anyhow!("a trace, and something to run\n  hint: leave one of them out"));
    }
    // Before counters are looked for, which this machine may lack.
    if let Some(pid) = args.pids.iter().find(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
        return Err(CountError::NoProcess(*pid).into());
    }
    args.outputs.check_writable()?;
    args.tables.check_writable()?;
    args.operands.interval_ns()?;
    let mut backend = choose(&args)?;
    // From here on Ctrl-C ends the program, not us, so that what was seen is printed.
    let _stop = StopSignals::watch().context("cannot watch for Ctrl-C; this is not expected")?;
    let said = format!("trapstat: backend {}: {}", backend.name(), backend.why());
    output::note(&said);
    let mut printer = Printer::new(&args)?;
    let finished = backend.run(&args, &mut |listing| printer.take(listing))?;
    if printer.form != Form::Parsable {
        let profiles = finished.profiles.iter().map(output::trapstat::profile);
        printer.tables.print(&profiles.collect::<String>())?;
    }
    finished.notes.iter().for_each(|note| output::note(&format!("trapstat: {note}")));
    args.outputs.write(&Trapstat {
        backend: backend.name().into(),
        why: backend.why(),
        listings: printer.listings,
        profiles: finished.profiles,
        notes: finished.notes,
        wall_ns: finished.wall_ns,
        exit: finished.code,
    })?;
    Ok(finished.code.into())
}

/// Prints listings as they come, and keeps them.
struct Printer {
    form: Form,
    tables: Tables,
    listings: Vec<Listing>,
}

impl Printer {
    fn new(args: &Args) -> Result<Printer> {
        let tables = args.tables.open(!args.command.is_empty(), &args.outputs)?;
        Ok(Printer { form: args.form(), tables, listings: Vec::new() })
    }

    fn take(&mut self, listing: Listing) -> Result<()> {
        let gap = if self.listings.is_empty() || self.form == Form::Parsable { "" } else { "\n" };
        let of_other = self.listings.last().is_none_or(|last| last.title != listing.title);
        let named = self.form == Form::Parsable && of_other;
        let title = if named { format!("# {}\n", listing.title) } else { String::new() };
        self.tables.print(&(gap.to_string() + &title + &render(&listing, self.form)))?;
        self.listings.push(listing);
        Ok(())
    }
}

/// Returns the backend that was asked for, or the best one that works here.
fn choose(args: &Args) -> Result<Box<dyn Backend>> {
    match args.backend {
        Choice::Perf | Choice::Ibs if args.sample => Err(anyhow!(
            "--sample is for recorded programs\n  hint: leave --sample or --backend out"
        )),
        Choice::Auto if args.sample => {
            Ok(Box::new(record::Record::new(args, "it can sample".into())?))
        }
        Choice::Perf => Ok(Box::new(perf::Perf::open(args, "asked for")?)),
        Choice::Ibs => Ok(Box::new(perf::Perf::open_ibs(args, "asked for")?)),
        Choice::Record => Ok(Box::new(record::Record::new(args, "asked for".into())?)),
        Choice::Auto if args.operands.file.is_some() => {
            Ok(Box::new(record::Record::new(args, "a trace was named".into())?))
        }
        Choice::Auto => match of_the_cpu(args) {
            Ok(perf) => Ok(Box::new(perf)),
            Err(error) if args.command.is_empty() => Err(error),
            Err(error) => {
                let why = error.to_string().lines().next().unwrap_or_default().to_string();
                Ok(Box::new(record::Record::new(args, why)?))
            }
        },
    }
}

/// Prefers counters, which see every walk, to samples.
fn of_the_cpu(args: &Args) -> Result<perf::Perf> {
    perf::Perf::open(args, "this CPU counts page walks").or_else(|why| {
        let first = why.to_string().lines().next().unwrap_or_default().to_string();
        perf::Perf::open_ibs(args, &first).map_err(|_| why)
    })
}
