//! `pagetax calibrate`: what faults and page walks cost on this machine, measured once and kept.

use crate::exit;
use crate::output::{self, documents::Outputs, progress::Progress, text};
use anyhow::{Context, Result, anyhow};
use pagetax_core::calibration::{
    Calibration, FaultCost, Spread, TlbKind, TlbUnit, WalkCost, WalkPattern,
};
use pagetax_core::units::{Bytes, Nanos, PageSize};
use pagetax_host::measure::calibrate::{
    CalibrateError, Extent, cache_path, cached, calibrate, can_keep, save,
};
use pagetax_host::measure::trial;
use pagetax_host::sys::signal::StopSignals;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  pagetax calibrate             measure this machine, within a minute
  pagetax calibrate --quick     within ten seconds, less exactly
  pagetax calibrate --json      the figures as a document
  sudo pagetax calibrate --allow-sysfs
                                also the page sizes that are switched off";

/// Measure what faults and page walks cost on this machine, for budgets to use
///
/// A command that needs the costs and finds none measures them by itself, as --quick does; trapstat and run
/// only on a quiet machine.
/// The result is kept in $XDG_CACHE_HOME/pagetax/calibration.json (~/.cache without the variable),
/// with the machine's identity: another CPU, kernel or memory size asks for a new one. Page sizes
/// that are switched off are left out, with the command that would switch them on.
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// Fewer repetitions and working sets: at most ten seconds
    #[arg(long)]
    quick: bool,

    /// Switch page sizes that are off on for their measurement, then put them back; needs root
    #[arg(long)]
    allow_sysfs: bool,

    #[command(flatten)]
    outputs: Outputs<Calibration>,
}

/// Runs `pagetax calibrate`.
pub fn run(args: Args) -> Result<ExitCode> {
    let remedy = "\n  hint: see `pagetax doctor` for what this machine allows";
    let unmet = |error: anyhow::Error| exit::with(exit::UNMET, error);
    let path = cache_path().map_err(|error| unmet(error.into()))?;
    // From here on Ctrl-C ends the measurement, not us, so that settings are put back.
    let _stop = StopSignals::watch().context("cannot watch for Ctrl-C; this is not expected")?;
    let extent =
        Extent { quick: args.quick, change_settings: args.allow_sysfs, ..Extent::default() };
    let mut progress = Progress::start("calibrating");
    let calibration = calibrate(extent, |done| progress.update(done));
    drop(progress);
    if let Err(CalibrateError::Interrupted) = calibration {
        return Ok(exit::INTERRUPTED.into());
    }
    let calibration = calibration
        .with_context(|| format!("cannot calibrate this machine{remedy}"))
        .map_err(unmet)?;
    save(&calibration, &path)
        .context("the calibration was measured, but is lost\n  hint: free the folder it goes to")
        .map_err(unmet)?;
    args.outputs.print(&calibration, render)?;
    if !args.outputs.is_wanted() {
        output::note(&format!("kept in {}", path.display()));
    }
    Ok(exit::FINE.into())
}

/// Returns this machine's calibration. If none is kept, it says so, measures a quick one and keeps it.
pub fn needed() -> Result<Calibration> {
    cached().or_else(|_| {
        let how = "takes seconds, once; `pagetax calibrate` is more exact";
        output::note(&format!("calibrating this machine: {how}"));
        quick(false).map_err(refusal)
    })
}

/// Measures the costs of a machine that has none yet, for a command that can do without them. Returns true if
/// it did. Does nothing in a trial, whose time would grow, and if each command would have to measure again.
pub fn if_quiet() -> Result<bool> {
    if cached().is_ok() || trial::is_ours() || !can_keep() {
        return Ok(false);
    }
    match quick(true) {
        Ok(calibration) => {
            let took = Nanos(calibration.took_ns);
            output::note(&format!(
                "calibrated this machine in {took}, once; `pagetax calibrate` is more exact"
            ));
            Ok(true)
        }
        Err(CalibrateError::Busy(why)) => {
            output::note(&format!(
                "not calibrated: {why}; `pagetax calibrate` does it when the machine is quiet"
            ));
            Ok(false)
        }
        Err(error) => Err(refusal(error)),
    }
}

fn refusal(error: CalibrateError) -> anyhow::Error {
    match error {
        CalibrateError::Interrupted => exit::with(exit::INTERRUPTED, anyhow!("interrupted")),
        error => exit::with(exit::UNMET, anyhow!("cannot calibrate this machine: {error}")),
    }
}

/// Measures a quick calibration. A cache that cannot be written costs the next command the same seconds.
fn quick(only_if_quiet: bool) -> Result<Calibration, CalibrateError> {
    let _stop =
        StopSignals::watch().map_err(|error| CalibrateError::System("watch for Ctrl-C", error))?;
    let mut progress = Progress::start("calibrating");
    let extent = Extent { quick: true, change_settings: false, only_if_quiet };
    let calibration = calibrate(extent, |done| progress.update(done));
    drop(progress);
    let calibration = calibration?;
    if let Err(error) = cache_path().and_then(|path| save(&calibration, &path)) {
        output::note(&format!("warning: the calibration is not kept: {error}"));
    }
    Ok(calibration)
}

fn render(calibration: &Calibration) -> String {
    let identity = &calibration.identity;
    let mut out = format!(
        "{}, {} CPUs, {}, Linux {} ({}), measured in {}\n",
        identity.cpu_model,
        identity.cpu_count,
        Bytes(identity.memory_bytes),
        identity.kernel,
        match identity.hypervisor.as_str() {
            "none" => "bare metal".to_string(),
            hypervisor => format!("virtual machine, {hypervisor}"),
        },
        Nanos(calibration.took_ns),
    );
    out += &text::heading("CPU time of a fault, for each page (the middle half of repetitions)");
    let rows = calibration.faults.iter().map(fault_row).collect();
    out +=
        &text::table(&["what happens", "page", "median", "from – to", "per 4K"], &[1, 2, 4], rows);
    for fault in &calibration.faults {
        if let Some(why) = &fault.why {
            out += &format!("  {} {}: {why}\n", Bytes(fault.page_bytes), fault.kind.meaning());
        }
    }
    let huge = PageSize::new(calibration.huge_page_bytes).map_or("huge".into(), |s| s.to_string());
    out += &text::heading(&format!("CPU time of an access, base pages against {huge} pages"));
    let headings = ["addresses", "working set", "base", &huge, "base adds", "from – to"];
    let rows = calibration.walks.iter().map(walk_row).collect();
    out += &text::table(&headings, &[1, 2, 3, 4], rows);
    out += &tlbs(calibration);
    for note in &calibration.notes {
        out += &format!("  not measured: {note}\n");
    }
    for warning in &calibration.warnings {
        out += &format!("  in doubt: {warning}; calibrate again when the machine is quiet\n");
    }
    out
}

/// Renders the TLBs, as CPUID describes them and as accesses show them.
fn tlbs(calibration: &Calibration) -> String {
    let mut out = String::new();
    if !calibration.tlbs.is_empty() {
        out += &text::heading("TLBs, as the CPU describes them (CPUID)");
        let rows = calibration.tlbs.iter().map(tlb_row).collect();
        out += &text::table(&["for", "level", "pages", "entries", "ways"], &[1, 3, 4], rows);
    }
    let Some(reach) = calibration.base_reach else { return out };
    let [low, high] = [reach.low_pages, reach.high_pages].map(text::count);
    out + &format!("  measured: {low} base pages take no walk, {high} do\n")
}

fn tlb_row(unit: &TlbUnit) -> Vec<String> {
    let kind = match unit.kind {
        TlbKind::Data => "data",
        TlbKind::Load => "loads",
        TlbKind::Store => "stores",
        TlbKind::Instruction => "instructions",
        TlbKind::Unified => "all",
    };
    let sizes: Vec<String> = unit.page_bytes.iter().map(|size| Bytes(*size).to_string()).collect();
    vec![
        kind.into(),
        unit.level.to_string(),
        sizes.join(", "),
        text::count(unit.entries.into()),
        unit.ways.map_or("all".into(), |ways| ways.to_string()),
    ]
}

/// Formats a time to 0.1 ns below 100 ns; [`Nanos`] prints whole nanoseconds.
fn ns(ns: f64) -> String {
    if ns.abs() < 100.0 { format!("{ns:.1} ns") } else { Nanos(ns.round() as u64).to_string() }
}

fn range(spread: &Spread) -> String {
    format!("{} – {}", ns(spread.low_ns), ns(spread.high_ns))
}

fn fault_row(fault: &FaultCost) -> Vec<String> {
    let mut row = vec![fault.kind.meaning().into(), Bytes(fault.page_bytes).to_string()];
    row.extend(match &fault.cost {
        Some(cost) => {
            let each_4k = cost.median_ns * 4096.0 / fault.page_bytes as f64;
            [ns(cost.median_ns), range(cost), ns(each_4k)]
        }
        None => ["–".into(), String::new(), "–".into()],
    });
    row
}

fn walk_row(walk: &WalkCost) -> Vec<String> {
    let pattern = match walk.pattern {
        WalkPattern::Dependent => "each from the last (chase)",
        WalkPattern::Independent => "known beforehand (gather)",
        WalkPattern::InOrder => "page after page (sweep)",
    };
    vec![
        pattern.into(),
        Bytes(walk.working_set_bytes).to_string(),
        ns(walk.base.median_ns),
        ns(walk.huge.median_ns),
        ns(walk.extra.median_ns),
        range(&walk.extra),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetax_core::calibration::FaultKind;

    #[test]
    fn rows_have_units_and_missing_is_no_zero() {
        let cost = Spread { median_ns: 243_000.0, low_ns: 240e3, high_ns: 250e3, repetitions: 5 };
        let fault =
            |cost| FaultCost { kind: FaultKind::AnonWrite, page_bytes: 2 << 20, cost, why: None };
        assert_eq!(
            fault_row(&fault(Some(cost))),
            ["first write, anonymous", "2M", "243 µs", "240 µs – 250 µs", "475 ns"]
        );
        assert_eq!(fault_row(&fault(None))[2..], ["–", "", "–"]);
        assert_eq!(ns(-0.3), "-0.3 ns");
    }
}
