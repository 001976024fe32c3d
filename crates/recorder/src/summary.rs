//! The notes under a simulation's figures: its totals, and the error of a sampled recording.

use crate::bursts::Bursts;
use crate::config::MachineConfig;
use crate::counters::Side;
use crate::engine::EngineKind;
use crate::native::Status;
use crate::session::SessionOutcome;
use crate::simulate::{SimulatedThread, Simulation};
use pagetax_core::exit::Exit;
use pagetax_core::units::Nanos;

/// Returns the totals of all threads, followed by `more`.
pub fn totals(simulation: &Simulation, more: &str) -> String {
    let sum =
        |of: fn(&SimulatedThread) -> u64| -> u64 { simulation.threads().iter().map(of).sum() };
    let (instructions, accesses) = (sum(|l| l.instruction_count), sum(|l| l.access_count));
    let threads = simulation.threads().len();
    format!("{instructions} instructions, {accesses} loads and stores, {threads} threads; {more}")
}

/// Returns the notes of a recording that has ended.
pub fn notes(ended: &SessionOutcome, simulation: &Simulation, engine: EngineKind) -> Vec<String> {
    let wall = Nanos(ended.wall_ns);
    let more = format!("{} page changes; {wall} under the recorder", ended.record_count);
    let mut notes = vec![totals(simulation, &more)];
    if ended.unrecorded_count > 0 {
        notes.push(format!(
            "{} processes or threads were not recorded: more than 64 ran at a time",
            ended.unrecorded_count
        ));
    }
    if let Exit::Signal(signal) = ended.exit {
        notes.push(format!("the program was ended by signal {signal}"));
    }
    if simulation.threads().is_empty() {
        notes.push("the program had no instructions to record".into());
    }
    match failure(ended, simulation.bursts()) {
        Some(failure) => notes.push(failure),
        None => notes.extend(sampling(simulation, engine)),
    }
    let said = ended.native.as_ref().map(Status::report).unwrap_or_default();
    notes.extend(said.into_iter().map(|line| format!("recorder: {line}")));
    notes.extend(ended.log.lines().take(20).map(|line| format!("recorder: {line}")));
    notes
}

/// Returns the error that makes a native recording invalid.
pub fn failure(ended: &SessionOutcome, bursts: &Bursts) -> Option<String> {
    let native = ended.native.as_ref()?;
    let checked = bursts.check(native.cpu_ns + TICK_NS);
    let impossible = |error| format!("the recording failed: {error}; its figures are invalid");
    native.failure().or_else(|| checked.err().map(impossible))
}

/// The resolution of a process's CPU time in /proc/PID/stat.
const TICK_NS: u64 = 10_000_000;

/// Returns the rates of a recording, with their errors if it is sampled.
fn sampling(simulation: &Simulation, engine: EngineKind) -> Vec<String> {
    let bursts = simulation.bursts();
    if !bursts.is_sampled() {
        return rates(simulation);
    }
    let sum =
        |of: fn(&SimulatedThread) -> u64| -> u64 { simulation.threads().iter().map(of).sum() };
    let counted = sum(|l| l.counted_count);
    let share = match engine {
        EngineKind::Native => format!("{counted} instructions, of a total that is n/a"),
        _ => {
            let share = counted as f64 / sum(|l| l.instruction_count).max(1) as f64;
            format!("{:.1} % of the instructions", share * 100.0)
        }
    };
    let mut notes = vec![format!(
        "sampled: {} bursts, {share}; counts are of bursts, rates and percentages of the program",
        bursts.list().len(),
    )];
    if engine == EngineKind::Native {
        notes.push(
            "slow parts of the program have more bursts, so tables overstate them; the misses in a million instructions \
             below weight each burst by the instructions that it represents"
                .into(),
        );
    }
    for (nth, config) in simulation.configs().iter().enumerate() {
        for (side, name) in SIDES {
            let Some(found) = simulation.estimate(nth, side) else {
                notes.push("too few bursts for an interval: record without --sample".into());
                return notes;
            };
            notes.push(format!(
                "{}: {name} misses in a million instructions: {:.1} ± {:.1} ({:.1} %), 95 % interval",
                config.name(),
                found.value * 1e6,
                found.error * 1e6,
                found.error / found.value.max(f64::MIN_POSITIVE) * 100.0
            ));
        }
    }
    notes
}

/// Returns the rates of a full recording, in the form of a sampled one.
fn rates(simulation: &Simulation) -> Vec<String> {
    let instructions: u64 = simulation.threads().iter().map(|thread| thread.counted_count).sum();
    let rate = |nth: usize, side| {
        let counters = simulation.threads().iter().map(|thread| &thread.cpus[nth].counters);
        let misses: u64 = counters.map(|counters| counters.total(side).tlb_count).sum();
        misses as f64 / instructions.max(1) as f64 * 1e6
    };
    let line = |(nth, config): (usize, &MachineConfig)| {
        SIDES.map(|(side, name)| {
            let rate = rate(nth, side);
            format!("{}: {name} misses in a million instructions: {rate:.1}", config.name())
        })
    };
    simulation.configs().iter().enumerate().flat_map(line).collect()
}

const SIDES: [(Side, &str); 2] = [(Side::Data, "data"), (Side::Code, "instruction")];
