//! `pagetax`: shows what virtual memory costs a program, and how to stop paying.
//!
//! One file a subcommand. Invariants: results go to stdout through [`output::print`], progress and
//! diagnostics to stderr; a subcommand returns its exit code or an error, and only `main` ends the
//! process.
#![forbid(unsafe_code)]
#![warn(clippy::print_stdout)]

mod build;
mod calibrate;
mod ci;
mod cli;
mod compare;
mod diagnose;
mod doctor;
mod exit;
mod explain;
mod hatstat;
mod jobs;
mod machines;
mod manual;
mod memory_servers;
mod misscurve;
mod operands;
mod output;
mod pagesize;
mod pmap;
mod ppgsz;
mod processes;
mod record;
mod recorded;
mod remote;
mod report;
mod reproduce;
mod run;
mod serve;
mod servers;
mod stat;
mod top;
mod trapstat;
mod whatif;
mod why;
mod words;

use pagetax_host::launch::libraries::{self, CarriedLibrary};
use std::process::ExitCode;

/// The libraries inside this program: none in a debug build, which finds them where cargo built them.
#[cfg(all(not(debug_assertions), target_arch = "x86_64", target_os = "linux", target_env = "gnu"))]
const LIBRARIES: &[CarriedLibrary] = pagetax_carry::libraries![
    "libpagetax_preload.so",
    "libpagetax_remote_preload.so",
    "libpagetax_dbt.so",
    "libpagetax_interpose.a"
];
#[cfg(not(all(
    not(debug_assertions),
    target_arch = "x86_64",
    target_os = "linux",
    target_env = "gnu"
)))]
const LIBRARIES: &[CarriedLibrary] = &[];

/// Refuses architectures whose registers, page tables and programs pagetax does not know.
fn check_architecture(architecture: &str) -> anyhow::Result<()> {
    match architecture {
        "x86_64" => Ok(()),
        other => Err(exit::with(
            exit::UNMET,
            anyhow::anyhow!("pagetax measures on x86-64 Linux only, and this machine is {other}"),
        )),
    }
}

fn main() -> ExitCode {
    libraries::carry(LIBRARIES);
    let words = check_architecture(std::env::consts::ARCH).and_then(|()| cli::words());
    let result = words.and_then(|words| match cli::parse(words) {
        Ok(cli) => {
            cli.messages.apply();
            cli.command.run()
        }
        Err(error) => Ok(cli::refuse(&error)),
    });
    match result {
        Ok(code) => code,
        Err(error) if exit::is_closed_pipe(&error) => exit::CLOSED_PIPE.into(),
        Err(error) => {
            output::error(&error);
            exit::code_of(&error)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_architecture_gets_one_sentence_and_exit_code_3() {
        let error = check_architecture("aarch64").unwrap_err();
        assert_eq!(exit::code_of(&error), ExitCode::from(3));
        let text = error.to_string();
        assert!(
            text.contains("x86-64") && text.contains("aarch64") && !text.contains('\n'),
            "{text}"
        );
        assert!(check_architecture(std::env::consts::ARCH).is_ok());
    }
}
