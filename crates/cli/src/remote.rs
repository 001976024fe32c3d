//! `pagetax remote`: runs a command whose memory may be larger than this machine's.

use crate::exit;
use anyhow::{Context, Result, anyhow};
use pagetax_core::units::{Bytes, Nanos};
use pagetax_remote::preloaded::Settings;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  pagetax remote --resident 4G -- ./big-program        at most 4 GiB of it in memory, the rest compressed
  pagetax remote --resident 100M --stats -- sort big.txt";

/// Run a command with its memory in a page store, and only so much of it resident
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// Most bytes of each process that stay in this machine's memory, beside its code and stacks
    #[arg(long, value_name = "SIZE", value_parser = parse_resident)]
    resident: Bytes,

    /// Addresses to give out; they cost nothing until they are used
    #[arg(long, value_name = "SIZE", default_value = "1T")]
    address_space: Bytes,

    /// How long fault handlers look for the next fault before they sleep; 0s is best on few CPUs
    #[arg(long, value_name = "TIME", default_value = "0s")]
    spin: Nanos,

    /// At its end, each process says on stderr what was paged
    #[arg(long)]
    stats: bool,

    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

fn parse_resident(text: &str) -> Result<Bytes> {
    match text.parse::<Bytes>()? {
        small if small.0 < 1 << 20 => Err(anyhow!("at least 1M must be resident")),
        bytes => Ok(bytes),
    }
}

/// `pagetax remote -- COMMAND`
pub fn run(args: Args) -> Result<ExitCode> {
    let library = library().map_err(|error| exit::with(exit::WRAPPER_FAILED, error))?;
    let [name, arguments @ ..] = &args.command[..] else {
        return Err(anyhow!("no command\n  remedy: write it after `--`"));
    };
    let program = along_path(name)
        .ok_or_else(|| anyhow!("`{}` was not found\n  remedy: check PATH", name.display()))
        .map_err(|error| exit::with(exit::NOT_FOUND, error))?;
    check(&program).map_err(|error| exit::with(exit::NOT_EXECUTABLE, error))?;
    let settings = Settings {
        address_space: args.address_space,
        spin: Duration::from_nanos(args.spin.0),
        stats: args.stats,
        ..Settings::resident(args.resident)
    };
    let mut command = Command::new(&program);
    command.arg0(name).args(arguments).envs(settings.to_environment());
    let mut preload = library.into_os_string();
    if let Some(before) = std::env::var_os("LD_PRELOAD").filter(|text| !text.is_empty()) {
        preload.push(":");
        preload.push(before);
    }
    let error = command.env("LD_PRELOAD", preload).exec();
    let code = match error.kind() {
        io::ErrorKind::NotFound => exit::NOT_FOUND,
        _ => exit::NOT_EXECUTABLE,
    };
    let message = format!("`{}` cannot be run: {error}\n  remedy: check the file", name.display());
    Err(exit::with(code, anyhow!(message)))
}

/// The library, where the program was built or installed.
fn library() -> Result<PathBuf> {
    const NAME: &str = "libpagetax_remote_preload.so";
    if let Some(path) = std::env::var_os("PAGETAX_REMOTE_LIBRARY") {
        return Ok(path.into());
    }
    let here = std::env::current_exe().context("the program's own path cannot be read")?;
    let folder = here.parent().unwrap_or(Path::new("/"));
    let places = [folder.join(NAME), folder.join("../lib").join(NAME)];
    places.into_iter().find(|path| path.is_file()).ok_or_else(|| {
        anyhow!(
            "{NAME} is not beside {}\n  remedy: cargo build --release -p pagetax-remote-preload, or \
             name it in PAGETAX_REMOTE_LIBRARY",
            here.display()
        )
    })
}

fn along_path(name: &OsString) -> Option<PathBuf> {
    let is_program = |path: &PathBuf| path.metadata().is_ok_and(|m| m.is_file());
    if Path::new(name).components().count() > 1 {
        return Some(name.into()).filter(is_program);
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(is_program)
}

/// Refuses programs that the library would not reach: they would run with all of their memory here.
fn check(program: &Path) -> Result<()> {
    let name = program.display();
    let file = program.metadata().with_context(|| format!("`{name}` cannot be looked at"))?;
    let is_root = file.uid() == 0 && rustix_is_root();
    if file.permissions().mode() & 0o6000 != 0 && !is_root {
        return Err(anyhow!(
            "`{name}` is set-id: the loader ignores LD_PRELOAD for it\n  remedy: run it as its owner"
        ));
    }
    let mut bytes = Vec::new();
    let open = File::open(program).with_context(|| format!("`{name}` cannot be read"))?;
    open.take(1 << 16).read_to_end(&mut bytes)?;
    if bytes.starts_with(b"#!") {
        let line = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
        let text = String::from_utf8_lossy(&line[2..]).into_owned();
        let interpreter = text.split_whitespace().next().unwrap_or_default();
        return check(Path::new(interpreter));
    }
    match is_static(&bytes) {
        Some(true) => Err(anyhow!(
            "`{name}` is linked statically: nothing can be preloaded into it, so that its memory \
             cannot be paged\n  remedy: link it dynamically"
        )),
        _ => Ok(()),
    }
}

fn rustix_is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0)
}

/// Whether an ELF file of this machine's word size names no loader (PT_INTERP); none if it is no ELF.
fn is_static(file: &[u8]) -> Option<bool> {
    const PT_INTERP: u32 = 3;
    if !file.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let number = |at: usize, len: usize| -> Option<usize> {
        let bytes = file.get(at..at + len)?;
        Some(bytes.iter().rev().fold(0, |sum, byte| sum << 8 | *byte as usize))
    };
    let (table, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
    let kinds = (0..count).filter_map(|index| number(table + index * size, 4));
    Some(kinds.into_iter().all(|kind| kind as u32 != PT_INTERP))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn static_programs_are_told() {
        let mut file = vec![0; 200];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        (file[32], file[54], file[56]) = (64, 56, 2);
        assert_eq!(is_static(&file), Some(true));
        file[64 + 56] = 3;
        assert_eq!(is_static(&file), Some(false));
        assert_eq!(is_static(b"#!/bin/sh"), None);
        assert_eq!(is_static(b"\x7fELF\x02\x01"), None);
    }
}
