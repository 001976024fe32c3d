//! `pagetax hatstat`: what virtual memory has cost a machine since it booted, by the method of 1990.

use crate::output::documents::Outputs;
use crate::output::{self, hatstat as text};
use crate::{exit, run};
use anyhow::{Result, anyhow};
use pagetax_core::cause::{self, Account};
use pagetax_core::counter::{Reading, UnitReading};
use pagetax_core::hatstat::{HatCost, HatStat};
use pagetax_core::report::Run;
use pagetax_host::measure::calibrate::cached;
use pagetax_host::measure::hatstat::hatstat;
use pagetax_host::procfs::Root;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  pagetax hatstat                                  this machine since it booted
  pagetax hatstat --on sim:sparcstation-1 vmtest   the machine of 1990 after a job
  pagetax hatstat --json | jq .shared              page tables of shared memory, as JSON";

/// The faults that Lawrence estimates for each stolen pmeg: half of its entries.
const FAULTS_PER_STEAL: u64 = 32;

/// Add up what virtual memory has cost this machine since it booted
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// The machine: this one, or a simulated one that runs the job first
    #[arg(long, value_name = "MACHINE", default_value = "host")]
    on: String,

    #[command(flatten)]
    outputs: Outputs<HatStat>,

    /// The job that a simulated machine runs
    #[arg(value_name = "JOB", default_value = "vmtest")]
    job: String,
}

/// Runs `pagetax hatstat`.
pub fn run(args: Args) -> Result<ExitCode> {
    args.outputs.check_writable()?;
    let stat = match args.on.as_str() {
        "host" => {
            let calibration = cached();
            if calibration.is_err() {
                output::note(
                    "hatstat: without a calibration, faults have no price\n  hint: pagetax calibrate",
                );
            }
            let calibration = calibration.as_ref().map_err(String::as_str);
            hatstat(&Root::default(), calibration)
                .map_err(|why| exit::with(exit::UNMET, anyhow!(why)))?
        }
        _ => of_run(&run::quietly(&args.job, &args.on)?),
    };
    args.outputs.print(&stat, text::render)?;
    Ok(exit::FINE.into())
}

/// The counter of a row's events.
const EVENTS: &[(&str, &str)] = &[
    ("minor_fault", "minor_fault_count"),
    ("swap", "swap_in_count"),
    ("page_in", "page_in_count"),
];

/// Returns the same table of a run: the rows of its budget that virtual memory causes.
fn of_run(run: &Run) -> HatStat {
    let count = |id: &str| run.counters.get(id).map(|counter| (counter, counter.value));
    let rows = Account::ALL.into_iter().flat_map(|account| account.causes().filter(|c| c.is_tax));
    let cost = |cause: &cause::Cause| {
        let total_ns = run.budget.as_ref()?.row(cause.id)?.ns?;
        let event = EVENTS.iter().find(|(row, _)| *row == cause.id);
        let events = event.and_then(|(_, id)| count(id)?.1);
        let events = events.filter(|count| *count > 0);
        let counted = events.map_or(Reading::Missing("not counted".into()), Reading::Modeled);
        let each = events.map(|count| Reading::Modeled(total_ns / count));
        let each = each.unwrap_or(Reading::Missing("no events, or not counted".into()));
        let (account, total) = (cause.account.id(), Reading::Modeled(total_ns));
        Some(HatCost::new(cause.meaning, account, counted, each, total, "as the model charges it"))
    };
    let mut costs: Vec<HatCost> = rows.filter_map(cost).collect();
    costs.extend(count("pmeg_steal_count").and_then(|(steals, _)| estimate(steals, &costs)));
    HatStat {
        machine: format!("{} after {}", run.machine.name, run.job.name),
        uptime_ns: run.wall_ns,
        cpu_count: 1,
        costs,
        processes: Vec::new(),
        shared: Vec::new(),
    }
}

/// Returns the estimate of the report: "say 32 faults per stolen pmeg". It is no further cost.
fn estimate(steals: &UnitReading, costs: &[HatCost]) -> Option<HatCost> {
    let fault_ns = costs.iter().find(|cost| cost.what.contains("fault"))?.each_ns.value?;
    Some(HatCost::product(
        "stolen pmegs, at 32 faults each",
        "estimate",
        Reading::Modeled(steals.value?),
        Reading::Modeled(FAULTS_PER_STEAL * fault_ns),
        "the estimate of 1990, of the same time",
    ))
}
