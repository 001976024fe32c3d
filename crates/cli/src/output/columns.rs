//! Several runs beside each other: a column a run, each labelled measured or modeled.

use super::{report, text};
use pagetax_core::budget::{Budget, TimeRow};
use pagetax_core::counter::Unit;
use pagetax_core::report::Run;
use std::collections::BTreeSet;

/// A table with a column for each run, then each run's warnings.
pub fn render(runs: &[Run]) -> String {
    let mut rows = vec![cells("", runs, |run| report::trust(&run.machine).to_string())];
    rows.push(cells("wall_ns", runs, |run| text::value(Unit::Ns, run.wall_ns)));
    for id in ids(runs, |run| run.counters.keys()).iter().filter(|id| *id != "wall_ns") {
        rows.push(cells(id, runs, |run| {
            run.counters.get(id).map_or(text::MISSING.into(), text::reading)
        }));
    }
    for kind in ids(runs, |run| run.latency.keys()) {
        rows.push(cells(&format!("p99_{kind}_ns"), runs, |run| {
            run.latency.get(&kind).map_or(text::MISSING.into(), |l| text::value(Unit::Ns, l.p99_ns))
        }));
    }
    rows.extend(ledger(runs, "cpu", |b| (&b.cpu, b.cpu_total_ns, b.cpu_unexplained_ns)));
    rows.extend(ledger(runs, "wall", |b| (&b.wall, b.wall_total_ns, b.wall_unexplained_ns)));
    let names: Vec<_> = runs.iter().map(|run| run.machine.name.as_str()).collect();
    let headings: Vec<_> = [runs.first().map_or("", |run| run.job.name.as_str())]
        .into_iter()
        .chain(names)
        .collect();
    let numeric: Vec<_> = (1..headings.len()).collect();
    let mut out = text::table(&headings, &numeric, rows);
    for run in runs.iter().filter(|run| !run.warnings.is_empty()) {
        out += &text::heading(&format!("Warnings of {}", run.machine.name));
        out += &report::warnings(&run.warnings);
    }
    out
}

fn cells(first: &str, runs: &[Run], cell: impl FnMut(&Run) -> String) -> Vec<String> {
    [first.to_string()].into_iter().chain(runs.iter().map(cell)).collect()
}

/// Every id that any of the runs has, sorted.
fn ids<'a, I: Iterator<Item = &'a String>>(
    runs: &'a [Run],
    of: impl Fn(&'a Run) -> I,
) -> BTreeSet<String> {
    runs.iter().flat_map(of).cloned().collect()
}

/// One ledger's rows, as shares of each run's own total: times of different machines say little.
fn ledger<'a>(
    runs: &'a [Run],
    prefix: &str,
    of: impl Fn(&'a Budget) -> (&'a Vec<TimeRow>, u64, i64),
) -> Vec<Vec<String>> {
    let ledgers: Vec<_> = runs.iter().map(|run| run.budget.as_ref().map(&of)).collect();
    let share = |ns: Option<f64>, total: u64| match ns {
        Some(ns) if total > 0 => format!("{:.1} %", ns / total as f64 * 100.0),
        _ => text::MISSING.into(),
    };
    let mut names: Vec<&str> = Vec::new();
    for row in ledgers.iter().flatten().flat_map(|(rows, ..)| rows.iter()) {
        if !names.contains(&row.id.as_str()) {
            names.push(&row.id);
        }
    }
    let line = |name: &str, ns_of: &dyn Fn(&(&Vec<TimeRow>, u64, i64)) -> Option<f64>| {
        let shares = ledgers.iter().map(|ledger| match ledger {
            Some(ledger) => share(ns_of(ledger), ledger.1),
            None => text::MISSING.into(),
        });
        [format!("{prefix} {name}")].into_iter().chain(shares).collect::<Vec<_>>()
    };
    let mut lines = Vec::new();
    for name in &names {
        lines.push(line(name, &|(rows, ..)| {
            rows.iter().find(|row| row.id == *name)?.ns.map(|ns| ns as f64)
        }));
    }
    if !names.is_empty() {
        lines.push(line("unexplained", &|(.., rest)| Some(*rest as f64)));
    }
    lines
}
