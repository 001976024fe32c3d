//! The command line as a whole: which subcommands there are, and who runs them.

use crate::output::documents;
use crate::{
    calibrate, cc, compare, diagnose, doctor, exit, jobs, machines, manual, misscurve, pagesize,
    pmap, ppgsz, record, remote, reproduce, run, serve, servers, trapstat, whatif, why,
};
use anyhow::Result;
use clap::{CommandFactory, Parser, Subcommand};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  pagetax diagnose -- sort big.txt       what would larger pages do for sort?
  pagetax ppgsz -o heap=2M ./server      start a command on large pages
  pagetax run tlb-gather                 run a built-in job on this machine
  pagetax trapstat -T -- ./server        which TLB misses does it take, and which code pays?
  pagetax record -o sort.ptt -- sort x   keep which pages it goes to, to run on other machines
  pagetax misscurve -- sort big.txt      how many TLB entries would it take?
  pagetax whatif -- sort big.txt         what would it take on 2M pages?
  pagetax doctor                         what can be measured here?
  pagetax calibrate                      measure what a fault costs here, once
  pagetax pmap -xs 1234                  which pages does a process have its memory on?
  pagetax why 1234                       why does it have no huge pages?
  pagetax jobs                           list the built-in jobs
  pagetax machines                       list what they can run on
  pagetax serve --memory 8G              lend memory to other programs and machines";

/// Shows what virtual memory costs a program, and how to stop paying
#[derive(Debug, Parser)]
#[command(
    name = "pagetax",
    version,
    before_help = EXAMPLES,
    after_help = exit::meanings(),
    disable_help_subcommand = true
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    Diagnose(diagnose::Args),
    Ppgsz(ppgsz::Args),
    Run(run::Args),
    Compare(compare::Args),
    Doctor(doctor::Args),
    Calibrate(calibrate::Args),
    Jobs(jobs::Args),
    Machines(machines::Args),
    Reproduce(reproduce::Args),
    Trapstat(trapstat::Args),
    Record(record::Args),
    Misscurve(misscurve::Args),
    Whatif(whatif::Args),
    Remote(remote::Args),
    Pmap(pmap::Args),
    Why(why::Args),
    Pagesize(pagesize::Args),
    Cc(cc::Args),
    /// Compile and link C++; the program puts its heap and stack on large pages by itself
    #[command(name = "c++")]
    Cxx(cc::Args),
    /// Compile and link Rust; the program puts its heap and stack on large pages by itself
    Rustc(cc::Args),
    Serve(serve::Args),
    Servers(servers::Args),
    #[command(hide = true)]
    Man(manual::ManArgs),
    #[command(hide = true)]
    Libraries(manual::LibrariesArgs),
    #[command(hide = true)]
    Completions(manual::CompletionsArgs),
}

impl Command {
    /// Runs the chosen subcommand.
    pub fn run(self) -> Result<ExitCode> {
        match self {
            Command::Diagnose(args) => diagnose::run(args),
            Command::Ppgsz(args) => ppgsz::run(args),
            Command::Compare(args) => compare::run(args),
            Command::Run(args) => run::run(args),
            Command::Doctor(args) => doctor::run(args),
            Command::Calibrate(args) => calibrate::run(args),
            Command::Jobs(args) => jobs::run(args),
            Command::Machines(args) => machines::run(args),
            Command::Reproduce(args) => reproduce::run(args),
            Command::Trapstat(args) => trapstat::run(args),
            Command::Record(args) => record::run(args),
            Command::Misscurve(args) => misscurve::run(args),
            Command::Whatif(args) => whatif::run(args),
            Command::Remote(args) => remote::run(args),
            Command::Pmap(args) => pmap::run(args),
            Command::Why(args) => why::run(args),
            Command::Pagesize(args) => pagesize::run(args),
            Command::Cc(args) => cc::run(args, cc::Driver::C),
            Command::Cxx(args) => cc::run(args, cc::Driver::Cxx),
            Command::Rustc(args) => cc::run(args, cc::Driver::Rust),
            Command::Serve(args) => serve::run(args),
            Command::Servers(args) => servers::run(args),
            Command::Man(args) => manual::man(args),
            Command::Libraries(args) => manual::libraries(args),
            Command::Completions(args) => manual::completions(args),
        }
    }
}

/// Refuses `--json FILE`, which is spelled `--json=FILE`. See [`documents::check_spelling`].
pub fn check_spelling() -> Result<()> {
    let words: Vec<String> =
        std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    documents::check_spelling(&Cli::command(), &words).map_err(|error| {
        let code = if is_wrapper() { exit::WRAPPER_FAILED } else { exit::BAD_INPUT };
        exit::with(code, error)
    })
}

/// Returns true if the subcommand has the exit codes of programs that start others.
fn is_wrapper() -> bool {
    std::env::args_os().nth(1).is_some_and(|word| word == "ppgsz")
}

/// Prints what is wrong with a command line, or the help that it asked for. Wrappers of other
/// programs have an exit code of their own for it.
pub fn refuse(error: &clap::Error) -> ExitCode {
    // With stderr gone there is nobody left to tell; the exit code still speaks.
    let _ = error.print();
    match (error.use_stderr(), is_wrapper()) {
        (false, _) => exit::FINE.into(),
        (true, false) => exit::BAD_INPUT.into(),
        (true, true) => exit::WRAPPER_FAILED.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_begins_with_examples(command: &clap::Command) {
        let before = command.get_before_help().map(ToString::to_string).unwrap_or_default();
        assert!(before.starts_with("Examples:\n  pagetax "), "{}: {before}", command.get_name());
        command.get_subcommands().for_each(assert_begins_with_examples);
    }

    #[test]
    fn every_help_begins_with_examples() {
        let command = Cli::command();
        command.clone().debug_assert();
        assert_begins_with_examples(&command);
    }
}
