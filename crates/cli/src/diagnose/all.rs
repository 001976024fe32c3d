//! `pagetax diagnose --all`: which running process pays most for virtual memory.

use crate::output::documents::Outputs;
use crate::output::{self, ranking as text};
use crate::{calibrate, exit};
use anyhow::{Result, anyhow};
use pagetax_core::ranking::Ranking;
use pagetax_core::units::Nanos;
use pagetax_host::measure::ranking::ranking;
use pagetax_host::procfs::Root;
use std::process::ExitCode;
use std::time::Duration;

/// The interval in which CPU times are counted, unless the user gives one.
const INTERVAL: Nanos = Nanos(5_000_000_000);

/// Ranks all processes.
pub fn run(outputs: &Outputs<Ranking>, interval: Option<Nanos>) -> Result<ExitCode> {
    outputs.check_writable()?;
    let calibration = calibrate::needed()?;
    let interval = interval.unwrap_or(INTERVAL);
    output::note(&format!(
        "watching all processes for {interval}; then DAMON, or else idle page tracking, samples each busy one of 4 \
         MiB or more. Where the kernel lacks both, each gets one clear_refs and one smaps_rollup, during which its page faults wait some milliseconds"
    ));
    let ranking = ranking(&Root::default(), &calibration, Duration::from_nanos(interval.0))
        .map_err(|why| exit::with(exit::UNMET, anyhow!(why)))?;
    outputs.print(&ranking, text::render)?;
    Ok(exit::FINE.into())
}
