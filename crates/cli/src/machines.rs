//! `pagetax machines`: what jobs can run on, and where every subcommand finds the machine it is
//! given.

use crate::{exit, output, output::report::trust, output::text};
use anyhow::{Result, bail};
use clap::Subcommand;
use pagetax_core::job::nearest;
use pagetax_core::machine::{Machine, MachineSpec};
use pagetax_core::report::ReportMachine;
use pagetax_host::exec::{HostMachine, NullMachine};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  pagetax machines              list what jobs can run on
  pagetax machines show host    memory and page sizes of this machine";

/// Native machines: name, meaning, maker.
type Native = (&'static str, &'static str, fn() -> Box<dyn Machine>);
const NATIVE: &[Native] = &[
    ("host", "this machine, by real system calls", || Box::<HostMachine>::default()),
    ("null", "every access is generated and none made", || Box::new(NullMachine)),
];

/// List the machines that jobs can run on, or show one
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES, args_conflicts_with_subcommands = true)]
pub struct Args {
    #[command(subcommand)]
    action: Option<Action>,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Print what is known of a machine
    #[command(before_help = EXAMPLES)]
    Show {
        /// As given to `run --on`
        machine: String,
    },
}

/// `pagetax machines [show MACHINE]`
pub fn run(args: Args) -> Result<ExitCode> {
    output::print(&match args.action {
        None => list(),
        Some(Action::Show { machine }) => show(&open(&machine)?.spec()),
    })?;
    Ok(exit::FINE.into())
}

/// The machine of this name.
///
/// # Errors
/// For unknown names, with the nearest known one.
pub fn open(name: &str) -> Result<Box<dyn Machine>> {
    if let Some((.., make)) = NATIVE.iter().find(|(known, ..)| *known == name) {
        return Ok(make());
    }
    let known = NATIVE.iter().map(|(known, ..)| *known);
    let remedy = match nearest(name, known) {
        Some(near) => format!("did you mean `{near}`?"),
        None => "`pagetax machines` lists them".into(),
    };
    bail!("no machine is called `{name}`\n  remedy: {remedy}");
}

fn list() -> String {
    let rows = NATIVE.iter().map(|(name, what, _)| vec![name.to_string(), what.to_string()]);
    text::table(&["machine", "what it is"], &[], rows.collect())
        + "\nRun a job on some with `pagetax run JOB --on MACHINE,…`.\n"
}

fn show(spec: &MachineSpec) -> String {
    let MachineSpec { name, kind, validated, memory, base_page, page_sizes, cpus, .. } = spec;
    let machine = ReportMachine { name: name.clone(), kind: *kind, validated: *validated };
    let sizes: Vec<_> = page_sizes.iter().map(ToString::to_string).collect();
    let rows = [
        ("machine", name.clone()),
        ("its numbers are", trust(&machine).into()),
        ("memory", memory.to_string()),
        ("CPUs", cpus.to_string()),
        ("base page", base_page.to_string()),
        ("page sizes", sizes.join(", ")),
    ];
    text::table(&["", ""], &[], rows.into_iter().map(|(k, v)| vec![k.into(), v]).collect())
}
