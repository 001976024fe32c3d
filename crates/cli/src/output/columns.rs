//! Several runs beside each other: a column a run, each labelled measured or modeled.

use super::{budget::LedgerView, report, text};
use pagetax_core::counter::Unit;
use pagetax_core::report::Run;
use std::collections::BTreeSet;

/// A table with a column for each run, then each run's warnings.
pub fn render(runs: &[Run]) -> String {
    let mut rows = vec![cells("", runs, |run| report::label(&run.machine).to_string())];
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
    rows.extend((0..2).flat_map(|which| ledger(runs, which)));
    let names: Vec<_> = runs.iter().map(|run| run.machine.name.as_str()).collect();
    let headings: Vec<_> =
        [runs.first().map_or("", |run| run.job.name.as_str())].into_iter().chain(names).collect();
    let numeric: Vec<_> = (1..headings.len()).collect();
    let mut out = text::table(&headings, &numeric, rows);
    for run in runs.iter().filter(|run| !run.warnings.is_empty()) {
        out += &text::heading(&format!("Warnings of {}", run.machine.name));
        out += report::warnings(&run.warnings).trim_start();
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
fn ledger(runs: &[Run], which: usize) -> Vec<Vec<String>> {
    let views: Vec<Option<LedgerView>> = runs
        .iter()
        .map(|run| run.budget.as_ref().map(|b| LedgerView::both(b).into_iter().nth(which))?)
        .collect();
    let Some(first) = views.iter().flatten().next() else { return Vec::new() };
    let ids = first.known.iter().map(|(id, _)| *id).chain(["unexplained"]);
    let line = |id: &str| -> Option<Vec<String>> {
        let shares: Vec<_> =
            views.iter().map(|view| view.as_ref().and_then(|view| view.share(id))).collect();
        shares.iter().any(Option::is_some).then(|| {
            let cells = shares.into_iter().map(|share| share.unwrap_or(text::MISSING.into()));
            [format!("{} {id}", first.id)].into_iter().chain(cells).collect()
        })
    };
    ids.filter_map(line).collect()
}
