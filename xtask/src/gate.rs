//! `cargo xtask gate`: CI's checks of a fresh clone before a change lands. It runs `cargo xtask test`, and
//! then the checks that take too long for each commit.

use crate::test::{self, step};
use crate::{conformance, dist, journey, kernels, shell, web};
use anyhow::Result;
use std::time::Instant;

/// Seeds of each story of the replication's simulation; 37 s on one core.
const SEEDS: &str = "10000";

/// Runs all parts, the quickest to fail first.
pub fn run() -> Result<()> {
    let started = Instant::now();
    test::run()?;
    step("simulation of the replication", simulation)?;
    step("page of reports", web::check)?;
    step("conformance, a sample", || conformance::run(&conformance::Args::sample()))?;
    step("packages", dist::check)?;
    step("journey of a newcomer", || journey::run(false))?;
    step("kernels", || kernels::run(&kernels::Args::default()))?;
    println!("the gate passed in {:.0} s", started.elapsed().as_secs_f64());
    Ok(())
}

fn simulation() -> Result<()> {
    let mut test =
        shell::cargo_command(&["test", "--quiet", "-p", "pagetax-remote", "--test", "simulation"]);
    shell::succeed(test.env("PAGETAX_SEEDS", SEEDS))
}
