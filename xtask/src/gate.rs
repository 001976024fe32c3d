//! `cargo xtask gate`: what CI runs on a fresh clone before a change lands. It is `cargo xtask test`, and then
//! what takes too long to run before each commit.

use crate::conformance;
use crate::test::{self, step};
use anyhow::Result;
use std::time::Instant;

/// Runs all parts, the quickest to fail first.
pub fn run() -> Result<()> {
    let started = Instant::now();
    test::run()?;
    step("conformance, a sample", || conformance::run(&conformance::Args::sample()))?;
    println!("the gate passed in {:.0} s", started.elapsed().as_secs_f64());
    Ok(())
}
