//! `cargo xtask test`: the checks before a commit, and the first part of the gate.

use crate::skips::{self, Scanner, Skip};
use crate::{packages, shell, tidy};
use anyhow::{Context, Result, bail};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

/// All targets with tests. Documentation has none, and rustdoc would refuse these options.
const TARGETS: [&str; 2] = ["--workspace", "--tests"];
/// The number of slowest tests that are printed.
const SLOWEST: usize = 10;

/// Runs all checks, cheapest first.
pub fn run() -> Result<()> {
    let started = Instant::now();
    packages::provide()?;
    step("formatting", || shell::cargo(&["fmt", "--all", "--check"]))?;
    step("tidy", || tidy::run(&tidy::Args::default()))?;
    step("lints", || {
        let lints = ["--workspace", "--all-targets", "--", "-D", "warnings"];
        shell::cargo(&[&["clippy", "--quiet"][..], &lints].concat())
    })?;
    // The fuzz targets are a separate workspace, which the lints above do not cover.
    step("fuzz targets", || {
        shell::cargo(&["check", "--quiet", "--manifest-path", "fuzz/Cargo.toml"])
    })?;
    let mut skips = step("other architecture", other_architecture)?;
    skips.extend(step("dependency policy", deny)?);
    skips.extend(step("tests", tests)?);
    skips::report(&skips)?;
    println!("all passed in {:.0} s", started.elapsed().as_secs_f64());
    Ok(())
}

/// Prints the name of a part of a chore and the time that it took, and names it in its error.
pub fn step<T>(name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    println!("== {name}");
    let started = Instant::now();
    let result = work().with_context(|| format!("{name} failed"));
    println!("== {name}: {:.0} s", started.elapsed().as_secs_f64());
    result
}

/// Checks that pagetax compiles where it only refuses to run, if the compiler has that target.
fn other_architecture() -> Result<Vec<Skip>> {
    const TARGET: &str = "aarch64-unknown-linux-gnu";
    let libraries = shell::output(Command::new("rustc").args([
        "--print",
        "target-libdir",
        "--target",
        TARGET,
    ]))?;
    if !Path::new(libraries.trim()).is_dir() {
        let reason = format!("{TARGET} is not installed (rustup target add {TARGET})");
        return Ok(vec![Skip { test: "cargo check of another architecture".into(), reason }]);
    }
    shell::cargo(&["check", "--quiet", "--workspace", "--target", TARGET])?;
    Ok(Vec::new())
}

/// Checks licences, bans and sources. `cargo deny check advisories` is not included, as it needs the network.
/// CI installs the tool, unoptimized, as it runs once; developers need not have it.
fn deny() -> Result<Vec<Skip>> {
    let mut install =
        shell::cargo_command(&["install", "--quiet", "--locked", "--debug", "cargo-deny"]);
    install.env("CARGO_PROFILE_DEV_DEBUG", "0");
    let here = shell::has("cargo-deny")
        || (std::env::var_os("CI").is_some() && shell::succeed(&mut install).is_ok());
    if !here {
        let reason = "cargo-deny is not installed (cargo install --locked cargo-deny)".into();
        return Ok(vec![Skip { test: "cargo deny".into(), reason }]);
    }
    let checks = ["bans", "licenses", "sources"];
    shell::cargo(&[&["deny", "--log-level", "error", "check"][..], &checks].concat())?;
    Ok(Vec::new())
}

/// Runs all tests of the workspace. Does not list passing tests, but collects their skips.
fn tests() -> Result<Vec<Skip>> {
    // Tests run what users run: pagetax with its libraries beside it. `cargo test` alone does not build
    // those there.
    shell::cargo(&["build", "--quiet", "--workspace", "--bins", "--lib", "--examples"])?;
    shell::cargo(&[&["test", "--quiet", "--no-run"][..], &TARGETS].concat())?;
    let started = Instant::now();
    // Test names do not name their crate, so lines such as "Running unittests" stay visible.
    // Tests send signals. A shell may have started us with some of them ignored.
    let mut cargo = Command::new("env");
    cargo.args(["--default-signal=HUP,INT,QUIT", "cargo", "test"]).args(TARGETS);
    cargo.env_remove(shell::OF_CARGO_RUN);
    cargo.args(["--no-fail-fast", "--", "--show-output", "-Zunstable-options", "--report-time"]);
    // libtest reports times only if this variable makes it take the compiler for a nightly one. Only test
    // programs get it: cargo would rebuild everything.
    cargo.env("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER", "env RUSTC_BOOTSTRAP=1");
    let mut scanner = Scanner::default();
    let succeeded = stream(&mut cargo, |line| {
        if scanner.line(line) {
            println!("{line}");
        }
    })?;
    let count = scanner.took.len();
    println!("\n{count} tests passed in {:.0} s; the slowest:", started.elapsed().as_secs_f64());
    for (seconds, test) in scanner.slowest(SLOWEST) {
        println!("  {seconds:7.1} s  {test}");
    }
    if !succeeded {
        bail!("at least one test failed; see above");
    }
    Ok(scanner.skips)
}

/// Runs a command and calls `line` with each line of its stdout. Returns true if it succeeded.
fn stream(command: &mut Command, mut line: impl FnMut(&str)) -> Result<bool> {
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let stdout = child.stdout.take().context("stdout was not piped")?;
    for text in BufReader::new(stdout).lines() {
        line(&text?);
    }
    Ok(child.wait()?.success())
}
