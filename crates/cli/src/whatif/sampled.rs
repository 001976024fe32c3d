//! The prediction of a sampled recording.

use crate::exit;
use crate::recorded::{EngineCommand, SourceOutcome, notes};
use anyhow::{Result, anyhow};
use pagetax_host::measure::fault_log::LoggedFaults;
use pagetax_recorder::native::State;
use pagetax_recorder::predict::Predicted;
use pagetax_recorder::sampled::{SampledPredictor, first_touches};
use pagetax_recorder::session::SessionOutcome;
use pagetax_recorder::summary;
use pagetax_sim::hardware::translation::Translation;

/// Samples the command, and predicts from its bursts and from the logged faults of another run.
pub fn predict(
    command: &EngineCommand,
    cpu: &Translation,
    shifts: &[u32],
    logged: Option<&LoggedFaults>,
) -> Result<(Predicted, SourceOutcome)> {
    let mut pages = SampledPredictor::new(cpu, shifts, &command.program);
    let ended = command.record("whatif", &mut pages, true)?;
    let failed = |why: String| {
        let hint = "--engine valgrind, or no --sample";
        exit::with(exit::UNMET, anyhow!("{why}\n  hint: {hint}"))
    };
    if let Some(why) = summary::failure(&ended, pages.bursts()).or_else(|| stopped(&ended)) {
        return Err(failed(why));
    }
    let seen_share = seen_share(&ended);
    let faults = logged.map_or(&[][..], |logged| &logged.faults);
    let faults = first_touches(cpu, shifts, faults);
    let few =
        || failed(format!("{} bursts are too few for an interval", pages.bursts().list().len()));
    let predicted = pages.predicted(faults, seen_share).ok_or_else(few)?;
    let mut notes = notes(&ended);
    notes.push(format!(
        "sampled: {} bursts, which represent {:.0} % of its CPU time",
        pages.bursts().list().len(),
        seen_share * 100.0
    ));
    notes.extend(logged.into_iter().flat_map(limits));
    Ok((predicted, SourceOutcome { code: ended.exit.shell_code(), notes }))
}

/// Returns why the native engine did not sample the program to its end, if so.
fn stopped(ended: &SessionOutcome) -> Option<String> {
    let native = ended.native.as_ref().filter(|native| native.state != State::On)?;
    Some(native.report().join("; "))
}

/// Returns the share of the program's CPU time that its bursts represent.
fn seen_share(ended: &SessionOutcome) -> f64 {
    match &ended.native {
        Some(native) if native.cpu_ns > 0 && native.seen_ns > 0 => {
            (native.seen_ns as f64 / native.cpu_ns as f64).min(1.0)
        }
        _ => 1.0,
    }
}

/// Returns what the log of faults may lack.
fn limits(logged: &LoggedFaults) -> Vec<String> {
    let mut limits = Vec::new();
    if !logged.has_kernel {
        limits.push("first touches in system calls were not logged, which needs root".into());
    }
    if logged.lost_count > 0 {
        limits.push(format!("{} records of faults were lost", logged.lost_count));
    }
    limits
}
