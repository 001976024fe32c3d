//! The readings of a bill: what the kernel counts in several runs, what simulated TLBs count in a recording,
//! and what trials measure, if a limit needs it.

use super::CommandConfig;
use crate::output::progress::Progress;
use crate::recorded::EngineCommand;
use crate::{exit, machines};
use anyhow::{Context, Result, anyhow, bail};
use pagetax_core::bill::*;
use pagetax_core::counter::{Provenance, Unit};
use pagetax_core::diagnosis::Diagnosis;
use pagetax_core::document;
use pagetax_core::exit::Exit;
use pagetax_core::threshold::RangeThreshold;
use pagetax_core::units::PageSize;
use pagetax_host::measure::trial::{self, Finished, TrialCommand};
use pagetax_host::pages::Recipe;
use pagetax_host::sys::process::process_usage;
use pagetax_recorder::predict::Predictor;
use pagetax_sim::hardware::configuration;
use pagetax_sim::hardware::translation::Translation;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::process::{Command, Stdio};

/// Recordings of a program with threads, whose turns differ.
const RECORDINGS_OF_THREADS: usize = 3;

type Readings = BTreeMap<String, BillReading>;

/// Measures the bill of a command.
pub fn bill(config: &CommandConfig) -> Result<CommandBill> {
    let mut readings = counted(config)?;
    readings.extend(simulated(config)?);
    let is_timed = |limit: &RangeThreshold| [VM_TAX, SPEEDUP_LEFT].contains(&limit.id());
    if config.fail_if.iter().any(is_timed) {
        readings.extend(timed(config)?);
    }
    Ok(CommandBill {
        name: config.name.clone(),
        command: config.run.clone(),
        exit: Exit::Code(0),
        cpu: config.cpu.clone(),
        readings,
        findings: Vec::new(),
    })
}

fn words(config: &CommandConfig) -> Vec<OsString> {
    config.run.iter().map(OsString::from).collect()
}

/// Runs the command as it is. The first run fills the page cache, and does not count.
fn counted(config: &CommandConfig) -> Result<Readings> {
    let (argv, stdin) = (words(config), config.input.clone());
    let mut command = TrialCommand { argv, stdin, ..TrialCommand::default() };
    let mut progress = Progress::start(&format!("{}: counted runs", config.name));
    let mut finished: Vec<Finished> = Vec::new();
    for done in 0..=config.runs {
        let run = trial::run(&command, &Recipe::default(), &Default::default(), None);
        let run = run.map_err(exit::of_trial)?;
        command.learn(&run);
        let exit = run.exit;
        finished.push(run);
        progress.update((done + 1) as f64 / (config.runs + 1) as f64);
        if !exit.success() {
            bail!(
                "`{}` ends with {exit}\n  hint: see what it prints: {}",
                config.name,
                config.run.join(" ")
            );
        }
    }
    let counted = &finished[1..];
    let reading = |unit, of: &dyn Fn(&Finished) -> Option<u64>| {
        let values: Vec<u64> = counted.iter().filter_map(of).collect();
        match values.is_empty() {
            true => BillReading::missing(unit, "the runs were too small or too short to see it"),
            false => BillReading::of(unit, Provenance::Measured, &values),
        }
    };
    let faults = |run: &Finished| Some(run.usage.minor_fault_count);
    let major = |run: &Finished| Some(run.usage.major_fault_count);
    // The kernel starts a child's maximum at that of the process that forked. Below it, looks have to do.
    let own = process_usage().resident_bytes_max;
    let peak = |run: &Finished| {
        let looked = run.peak.filter(|peak| !peak.is_lower_bound).map(|peak| peak.resident_bytes);
        Some(run.usage.resident_bytes_max).filter(|bytes| *bytes > own).or(looked)
    };
    let tables = |run: &Finished| run.peak.map(|peak| peak.page_table_bytes);
    let readings = [
        (MINOR_FAULTS, reading(Unit::Count, &faults)),
        (MAJOR_FAULTS, reading(Unit::Count, &major)),
        (PEAK, reading(Unit::Bytes, &peak)),
        (PAGE_TABLES, reading(Unit::Bytes, &tables)),
    ];
    Ok(named(readings))
}

fn named<const N: usize>(readings: [(&str, BillReading); N]) -> Readings {
    readings.into_iter().map(|(id, reading)| (id.to_string(), reading)).collect()
}

/// Records the command, and simulates the TLBs of its CPU. One recording is like the other, unless threads
/// take turns: then there are several.
fn simulated(config: &CommandConfig) -> Result<Readings> {
    let model = machines::model_of(&config.cpu, &config.cpu)?;
    let cpu = configuration::translation(&model)
        .with_context(|| format!("{} has no TLBs to simulate", config.cpu))?;
    let mut recordings = vec![recorded(config, &cpu)?];
    if recordings[0].thread_count() > 1 {
        for _ in 1..RECORDINGS_OF_THREADS {
            recordings.push(recorded(config, &cpu)?);
        }
    }
    let reading = |of: &dyn Fn(&Predictor) -> u64| {
        let values: Vec<u64> = recordings.iter().map(of).collect();
        BillReading::of(Unit::Count, Provenance::Modeled, &values)
    };
    let misses =
        |size| reading(&|pages| pages.walks(size).dependent_count + pages.walks(size).other_count);
    let touched =
        |size| reading(&|pages| pages.faults(size).base_count + pages.faults(size).large_count);
    Ok(named([
        (INSTRUCTIONS, reading(&|pages| pages.instruction_count)),
        (ACCESSES, reading(&|pages| pages.access_count)),
        (MISSES_4K, misses(0)),
        (MISSES_2M, misses(1)),
        (FAULTS_4K, touched(0)),
        (FAULTS_2M, touched(1)),
    ]))
}

fn recorded(config: &CommandConfig, cpu: &Translation) -> Result<Predictor> {
    let command = EngineCommand::apart(&words(config), config.input.clone(), config.follow)?;
    let shifts = [PageSize::K4, PageSize::M2].map(PageSize::shift);
    let what = format!("{}: simulated TLBs", config.name);
    let (pages, outcome) = command.observe(&what, Predictor::new(cpu, &shifts))?;
    match outcome.code {
        0 => Ok(pages),
        code => bail!(
            "`{}` ends with exit status {code} under the recorder\n  hint: docs/trapstat.md has its limits",
            config.name
        ),
    }
}

/// Has the command diagnosed.
fn timed(config: &CommandConfig) -> Result<Readings> {
    let own = std::env::current_exe().context("cannot find this program")?;
    let mut diagnose = Command::new(own);
    diagnose.args(["diagnose", "--json", "--pages", "4K,2M"]);
    diagnose.arg("--input").arg(config.input.as_deref().unwrap_or("null".as_ref()));
    let output = diagnose.arg("--").args(&config.run).stderr(Stdio::inherit()).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let diagnosis: Diagnosis = document::from_json(&text).map_err(|error| {
        exit::with(exit::UNMET, anyhow!("`{}` cannot be diagnosed: {error}", config.name))
    })?;
    Ok(named([(VM_TAX, tax(&diagnosis)), (SPEEDUP_LEFT, speedup(&diagnosis))]))
}

fn tax(diagnosis: &Diagnosis) -> BillReading {
    let Some(tax) = diagnosis.budget.as_ref().and_then(|budget| budget.vm_tax()) else {
        return BillReading::missing(Unit::Count, "the diagnosis has no budget");
    };
    match (tax.value, tax.low, tax.high) {
        (Some(value), low, high) => BillReading {
            unit: Unit::Count,
            provenance: tax.provenance,
            value: Some(value),
            low: Some(low.unwrap_or(value)),
            high: Some(high.unwrap_or(1.0)),
            why: None,
        },
        _ => BillReading::missing(Unit::Count, tax.why.clone().unwrap_or_default()),
    }
}

/// Returns the speed-up of the winner, or 1 if the command is best as it is.
fn speedup(diagnosis: &Diagnosis) -> BillReading {
    let winner = diagnosis.verdict.winner.as_deref();
    let trial = diagnosis.trials.iter().find(|trial| Some(trial.name.as_str()) == winner);
    let (value, low, high) = match trial.and_then(|trial| trial.speedup) {
        Some(ratio) => (ratio.value, ratio.low, ratio.high),
        None => (1.0, 1.0, 1.0),
    };
    BillReading {
        unit: Unit::Count,
        provenance: Provenance::Measured,
        value: Some(value),
        low: Some(low),
        high: Some(high),
        why: None,
    }
}
