//! `pagetax why`: why a process has no huge pages.

use crate::exit;
use crate::output::{self, documents::Outputs, why};
use crate::processes::{ProcessArgs, pid};
use anyhow::Result;
use pagetax_host::pages::pagemap::PageMapError;
use pagetax_host::pages::why::{HugePageAnswers, explain};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  pagetax why 4711               why does this process have no huge pages?
  pagetax why -p 4711,4712       the same of two processes
  pagetax why --json 4711        the causes, with what shows them, as a document";

/// Show why a process has no huge pages, and the line that cures it
///
/// Each cause is certain or possible, with the files that show it. Causes are in the order of the bytes
/// that they explain. Root is needed for processes of other users only. The exit code is 0 if all processes
/// could be looked at, 2 if one does not exist, 3 if you may not look at it.
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    outputs: Outputs<HugePageAnswers>,

    #[command(flatten)]
    processes: ProcessArgs,
}

/// Runs `pagetax why`.
pub fn run(args: Args) -> Result<ExitCode> {
    let mut document = HugePageAnswers { processes: Vec::new() };
    let mut code = exit::FINE;
    for operand in args.processes.all() {
        let answer = pid(operand).and_then(|pid| Ok(explain(pid)?));
        match answer {
            Ok(answer) => document.processes.push(answer),
            Err(error) => {
                code = match error.downcast_ref() {
                    Some(PageMapError::NotPermitted(_)) => exit::UNMET,
                    _ => exit::BAD_INPUT,
                };
                output::error(&error);
            }
        }
    }
    args.outputs.print(&document, |document| why::render(&document.processes))?;
    Ok(code.into())
}
