//! `pagetax man`, `pagetax completions` and `pagetax libraries`: the files that packagers install beside the
//! binary, all of them made from what it contains.

use crate::{cli, exit, output};
use anyhow::{Context, Result};
use pagetax_host::launch::libraries;
use std::path::PathBuf;
use std::process::ExitCode;

/// Write the manual pages, one for each subcommand
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:\n  pagetax man target/man && man target/man/pagetax.1")]
pub struct ManArgs {
    /// Directory to write to; made if it is not there
    directory: PathBuf,
}

/// Print a completion script for a shell
#[derive(Debug, clap::Args)]
#[command(
    before_help = "Examples:\n  pagetax completions bash > /etc/bash_completion.d/pagetax\n  \
                   pagetax completions fish > ~/.config/fish/completions/pagetax.fish"
)]
pub struct CompletionsArgs {
    /// The shell that reads the script
    shell: clap_complete::Shell,
}

/// Runs `pagetax man DIRECTORY`.
pub fn man(args: ManArgs) -> Result<ExitCode> {
    let directory = &args.directory;
    std::fs::create_dir_all(directory)
        .and_then(|()| clap_mangen::generate_to(cli::command(), directory))
        .with_context(|| {
            format!(
                "cannot write manual pages to {}; name a directory that you may write to",
                directory.display()
            )
        })?;
    Ok(exit::FINE.into())
}

/// Write the libraries that this build carries
///
/// pagetax uses those in ../lib/pagetax if they are the same, and its own copy otherwise.
#[derive(Debug, clap::Args)]
#[command(before_help = "Examples:\n  pagetax libraries /usr/lib/pagetax")]
pub struct LibrariesArgs {
    /// Directory to write to; made if it is not there
    directory: PathBuf,
}

/// Runs `pagetax libraries DIRECTORY`.
pub fn libraries(args: LibrariesArgs) -> Result<ExitCode> {
    let directory = &args.directory;
    libraries::write_all(directory).with_context(|| {
        format!(
            "cannot write libraries to {}; name a directory that you may write to",
            directory.display()
        )
    })?;
    Ok(exit::FINE.into())
}

/// Runs `pagetax completions SHELL`.
pub fn completions(args: CompletionsArgs) -> Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut cli::command(), "pagetax", &mut script);
    output::print(&String::from_utf8(script)?)?;
    Ok(exit::FINE.into())
}
