//! One run as text: counters, phases, latency, budget, memory, tables, warnings.

use super::{budget, chart, text};
use pagetax_core::counter::{Counters, Provenance, Unit, UnitReading, counter};
use pagetax_core::machine::MachineKind;
use pagetax_core::report::{Latency, ReportMachine, ReportPhase, Run, Table, Warning};
use std::collections::BTreeSet;

/// Renders the whole report.
pub fn render(run: &Run) -> String {
    let mut out = title(run);
    out += &counters(&run.counters);
    out += &phases(&run.phases);
    out += &chart::series(run);
    out += &latencies(run);
    if let Some(budget) = &run.budget {
        out += &budget::render(budget);
    }
    run.tables.iter().for_each(|table| out += &old_table(table));
    out += &warnings(&run.warnings);
    out
}

/// Describes the trust in a machine's numbers.
pub fn trust(machine: &ReportMachine) -> &'static str {
    match (machine.kind, machine.validated) {
        (MachineKind::Host, _) => "measured",
        (MachineKind::Null, _) => "measured; the harness alone, no memory is touched",
        (MachineKind::Sim, true) => "modeled, checked against published figures of this job",
        (MachineKind::Sim, false) => "modeled, not checked against published figures",
    }
}

/// Does the same as [`trust`], short enough for a column.
pub fn label(machine: &ReportMachine) -> &'static str {
    match (machine.kind, machine.validated) {
        (MachineKind::Host, _) => "measured",
        (MachineKind::Null, _) => "measured, no memory",
        (MachineKind::Sim, true) => "modeled",
        (MachineKind::Sim, false) => "modeled, unchecked",
    }
}

/// Renders job, parameters and machine.
fn title(run: &Run) -> String {
    let params = run.job.params.iter().map(|(key, value)| format!("{key}={value} "));
    let bold = anstyle::Style::new().bold();
    format!(
        "{bold}{}{bold:#} on {} ({}): {}\n  {}seed={}\n",
        run.job.name,
        run.machine.name,
        trust(&run.machine),
        text::value(Unit::Ns, run.wall_ns),
        params.collect::<String>(),
        run.job.seed,
    ) + &of_machine(run)
}

/// Renders the parameters that the machine's file sets to another value than the job's default.
fn of_machine(run: &Run) -> String {
    let params = run.job.machine_params.iter().map(|(key, value)| format!("{key}={value}"));
    match params.collect::<Vec<_>>().join(" ") {
        none if none.is_empty() => String::new(),
        params => format!("  set by the machine's file, not the job's defaults: {params}\n"),
    }
}

/// Renders a line for each counter; those that are 0 share a line for each provenance.
fn counters(counters: &Counters) -> String {
    if counters.is_empty() {
        return String::new();
    }
    let (still, moved): (Vec<_>, Vec<_>) =
        counters.iter().partition(|(_, reading)| reading.value == Some(0));
    let rows = moved.into_iter().map(|(id, reading)| counter_row(id, reading));
    let mut out = text::heading("Counters")
        + &text::table(&["", "value", "provenance", "meaning"], &[1], rows.collect());
    for provenance in [Provenance::Measured, Provenance::Modeled, Provenance::Derived] {
        let of = still.iter().filter(|(_, reading)| reading.provenance == provenance);
        let ids: Vec<_> = of.map(|(id, _)| id.as_str()).collect();
        if !ids.is_empty() {
            out += &format!("  0, {provenance}: {}\n", ids.join(", "));
        }
    }
    out
}

fn counter_row(id: &str, reading: &UnitReading) -> Vec<String> {
    let meaning = counter(id).map_or("", |c| c.meaning);
    let note = match &reading.why {
        Some(why) => format!("{meaning}: {why}"),
        None => meaning.to_string(),
    };
    let range = text::range(reading.unit, reading.low, reading.high);
    let provenance = format!("{} {range}", reading.provenance).trim_end().to_string();
    vec![id.to_string(), text::reading(reading), provenance, note]
}

/// A value of a phase that others make: its name, and how it is made.
type Rate = (&'static str, fn(&ReportPhase) -> Option<String>);

/// The values that are made of a phase's counters.
const RATES: [Rate; 3] = [
    ("time ÷ access", |phase| per(phase, "access_count", length(phase))),
    ("kernel time ÷ fault", |phase| {
        let faults = count(phase, "minor_fault_count")? + count(phase, "major_fault_count")?;
        nanos(count(phase, "kernel_ns")?, faults)
    }),
    ("kernel daemons, % of a CPU", |phase| {
        let busy = count(phase, "kernel_daemon_ns").filter(|ns| *ns > 0)?;
        Some(format!("{:.1}", busy as f64 * 100.0 / length(phase).max(1) as f64))
    }),
];

fn length(phase: &ReportPhase) -> u64 {
    phase.end_ns.saturating_sub(phase.start_ns)
}

fn count(phase: &ReportPhase, id: &str) -> Option<u64> {
    phase.counters.get(id)?.value
}

fn per(phase: &ReportPhase, id: &str, ns: u64) -> Option<String> {
    nanos(ns, count(phase, id)?)
}

/// Returns a time divided by a number of events; none if there were none.
fn nanos(ns: u64, events: u64) -> Option<String> {
    (events > 0).then(|| format!("{:.3} ns", ns as f64 / events as f64)).map(|exact| {
        match ns / events {
            0..10 => exact,
            whole => text::value(Unit::Ns, whole),
        }
    })
}

/// Renders a column for each phase, without counters that are 0 in all phases.
fn phases(phases: &[ReportPhase]) -> String {
    if phases.is_empty() {
        return String::new();
    }
    let line = |name: &str, cell: &dyn Fn(&ReportPhase) -> String| -> Vec<String> {
        [name.to_string()].into_iter().chain(phases.iter().map(cell)).collect()
    };
    let mut rows = vec![
        line("start", &|phase| text::value(Unit::Ns, phase.start_ns)),
        line("length", &|phase| text::value(Unit::Ns, length(phase))),
    ];
    let moved = |phase: &ReportPhase| {
        let of = phase.counters.iter().filter(|(_, reading)| reading.value != Some(0));
        of.map(|(id, _)| id.clone()).collect::<Vec<_>>()
    };
    let ids: BTreeSet<String> = phases.iter().flat_map(moved).collect();
    for id in ids.iter().filter(|id| *id != "wall_ns") {
        rows.push(line(id, &|phase| {
            phase.counters.get(id).map_or(text::MISSING.into(), text::reading)
        }));
    }
    for (name, of) in RATES {
        if phases.iter().any(|phase| of(phase).is_some()) {
            rows.push(line(name, &|phase| of(phase).unwrap_or(text::MISSING.into())));
        }
    }
    let names = phases.iter().map(|phase| phase.name.as_str());
    let headings: Vec<&str> = [""].into_iter().chain(names).collect();
    let numeric: Vec<_> = (1..headings.len()).collect();
    text::heading("Phases") + &text::table(&headings, &numeric, rows)
}

/// Returns `84 000`, or if there were more, `84 000 of 336 000`.
fn seen(latency: &Latency) -> String {
    let seen = text::count(latency.count);
    match latency.of_count.filter(|of_count| *of_count > latency.count) {
        Some(of_count) => format!("{seen} of {}", text::count(of_count)),
        None => seen,
    }
}

fn latencies(run: &Run) -> String {
    if run.latency.is_empty() {
        return String::new();
    }
    let rows = run.latency.iter().map(|(kind, latency)| {
        let Latency { min_ns, mean_ns, p50_ns, p90_ns, p99_ns, max_ns, provenance, .. } = latency;
        let times = [min_ns, mean_ns, p50_ns, p90_ns, p99_ns, max_ns];
        let times = times.map(|ns| text::value(Unit::Ns, *ns));
        let first = [kind.clone(), seen(latency)];
        first.into_iter().chain(times).chain([provenance.to_string()]).collect()
    });
    let headings = ["", "count", "min", "mean", "p50", "p90", "p99", "max", "provenance"];
    text::heading("Latency")
        + &text::table(&headings, &[1, 2, 3, 4, 5, 6, 7], rows.collect())
        + &chart::histograms(&run.latency)
}

fn old_table(table: &Table) -> String {
    let headings: Vec<&str> = table.columns.iter().map(String::as_str).collect();
    let is_number = |column: &usize| {
        let cell = |row: &Vec<String>| {
            row.get(*column).is_none_or(|c| c.chars().any(|d| d.is_ascii_digit()))
        };
        table.rows.iter().all(cell)
    };
    let numeric: Vec<_> = (0..headings.len()).filter(is_number).collect();
    text::heading(&format!("{} ({})", table.title, table.provenance))
        + &text::table(&headings, &numeric, table.rows.clone())
}

/// Renders each warning with its hint.
pub fn warnings(warnings: &[Warning]) -> String {
    let style = anstyle::AnsiColor::Yellow.on_default().bold();
    let mut out = String::new();
    for Warning { text, remedy, .. } in warnings {
        out += &format!("\n{style}warning:{style:#} {text}\n");
        if !remedy.is_empty() {
            out += &format!("  hint: {remedy}\n");
        }
    }
    out
}
