//! Running other programs, cargo above all.

use anyhow::{Context, Result, bail};
use std::process::{Command, Stdio};

/// The variable that `cargo run` sets for us. The build script of ring depends on it: a cargo that inherits
/// it, and one that does not, would each build ring and all that needs it anew.
pub const OF_CARGO_RUN: &str = "CARGO_MANIFEST_DIR";

/// Returns the cargo that runs us, with arguments.
pub fn cargo_command(args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    command.args(args).env_remove(OF_CARGO_RUN);
    command
}

/// Runs cargo and shows what it prints.
pub fn cargo(args: &[&str]) -> Result<()> {
    succeed(&mut cargo_command(args))
}

/// Returns cargo's standard output.
pub fn cargo_output(args: &[&str]) -> Result<String> {
    output(&mut cargo_command(args))
}

/// Runs a command. Fails unless it succeeds.
pub fn succeed(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start {command:?}"))?;
    if !status.success() {
        bail!("{command:?} failed: {status}");
    }
    Ok(())
}

/// Returns a command's standard output, or an error unless it succeeds.
pub fn output(command: &mut Command) -> Result<String> {
    command.stderr(Stdio::inherit());
    let output = command.output().with_context(|| format!("cannot start {command:?}"))?;
    if !output.status.success() {
        bail!("{command:?} failed: {}", output.status);
    }
    Ok(String::from_utf8(output.stdout)?)
}

/// Returns true if a program is on the PATH.
pub fn has(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory| directory.join(program).is_file())
}

/// Builds the release binary of pagetax and returns its path.
pub fn pagetax() -> Result<String> {
    cargo(&["build", "--quiet", "--release", "--package", "pagetax"])?;
    Ok("target/release/pagetax".into())
}
