//! Where trapstat's numbers come from: one small trait, and the choice.

use super::profile::Profile;
use super::{Args, perf, record};
use anyhow::{Result, anyhow};
use pagetax_core::trapstat::Listing;

/// What the user asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Choice {
    /// Hardware counters where there are any, else the recorder
    Auto,
    /// Hardware counters
    Perf,
    /// Samples of AMD's instruction-based sampling
    Ibs,
    /// A recorder that feeds simulated machines
    Record,
}

/// Receives listings, oldest first.
pub type Sink<'a> = dyn FnMut(Listing) -> Result<()> + 'a;

/// A source of listings.
pub trait Backend {
    /// Its name, as in `--backend`.
    fn name(&self) -> &'static str;

    /// Why it was chosen, and what its numbers are.
    fn why(&self) -> String;

    /// Runs until the command, the count of listings or the user's patience ends.
    fn run(&mut self, args: &Args, sink: &mut Sink<'_>) -> Result<Finished>;
}

/// The end of a run.
#[derive(Debug, Default)]
pub struct Finished {
    /// The command's own exit code, or ours.
    pub code: u8,
    /// Elapsed time.
    pub wall_ns: u64,
    /// Which code and memory paid, by view.
    pub profiles: Vec<Profile>,
    /// What to know.
    pub notes: Vec<String>,
}

/// The backend that was asked for, or the best one that works here.
pub fn choose(args: &Args) -> Result<Box<dyn Backend>> {
    match args.backend {
        Choice::Perf | Choice::Ibs if args.sample => Err(anyhow!(
            "--sample is for recorded programs\n  remedy: leave --sample or --backend out"
        )),
        Choice::Auto if args.sample => {
            Ok(Box::new(record::Record::new(args, "it can sample".into())?))
        }
        Choice::Perf => Ok(Box::new(perf::Perf::open(args, "asked for")?)),
        Choice::Ibs => Ok(Box::new(perf::Perf::open_ibs(args, "asked for")?)),
        Choice::Record => Ok(Box::new(record::Record::new(args, "asked for".into())?)),
        Choice::Auto if args.operands.trace.is_some() => {
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

/// Counts, which are of all, before samples.
fn of_the_cpu(args: &Args) -> Result<perf::Perf> {
    perf::Perf::open(args, "this CPU counts page walks").or_else(|why| {
        let first = why.to_string().lines().next().unwrap_or_default().to_string();
        perf::Perf::open_ibs(args, &first).map_err(|_| why)
    })
}
