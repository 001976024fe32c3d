//! Several runs beside each other: a column a run, each labelled measured or modeled.

use super::{budget::LedgerView, report, text};
use pagetax_core::counter::Unit;
use pagetax_core::report::Run;
use std::collections::BTreeSet;

/// Renders a table with a column for each run, then each run's warnings.
pub fn render(runs: &[Run]) -> String {
    let mut rows = vec![cells("", runs, |run| report::label(&run.machine).to_string())];
    let different = different_params(runs);
    for name in &different {
        rows.push(cells(name, runs, |run| {
            run.job.params.get(name).map_or(text::MISSING.into(), Clone::clone)
        }));
    }
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
    let mut out = text::table(&headings, &numeric, rows) + &not_the_same_job(runs, &different);
    for run in runs.iter().filter(|run| !run.warnings.is_empty()) {
        out += &text::heading(&format!("Warnings of {}", run.machine.name));
        out += report::warnings(&run.warnings).trim_start();
    }
    out
}

/// Names of parameters that are not the same in all runs.
pub(super) fn different_params(runs: &[Run]) -> Vec<String> {
    let differs = |name: &&String| {
        let value = |run: &Run| run.job.params.get(*name).cloned();
        runs.iter().any(|run| value(run) != value(&runs[0]))
    };
    let names = ids(runs, |run| run.job.params.keys());
    names.iter().filter(differs).cloned().collect()
}

/// Says that the columns are of different jobs, because machine files set parameters.
pub(super) fn not_the_same_job(runs: &[Run], different: &[String]) -> String {
    let sets = |run: &&Run| different.iter().any(|name| run.job.machine_params.contains_key(name));
    let mut machines: Vec<&str> =
        runs.iter().filter(sets).map(|r| r.machine.name.as_str()).collect();
    machines.dedup();
    if machines.is_empty() {
        return String::new();
    }
    format!(
        "These are not the same job: {} differ, as the machine files of {} set their own.\n  hint: give \
         them with --set\n",
        different.join(", "),
        machines.join(", ")
    )
}

fn cells(first: &str, runs: &[Run], cell: impl FnMut(&Run) -> String) -> Vec<String> {
    [first.to_string()].into_iter().chain(runs.iter().map(cell)).collect()
}

/// Returns every id that any of the runs has, sorted.
fn ids<'a, I: Iterator<Item = &'a String>>(
    runs: &'a [Run],
    of: impl Fn(&'a Run) -> I,
) -> BTreeSet<String> {
    runs.iter().flat_map(of).cloned().collect()
}

/// Returns one ledger's rows, as shares of each run's own total: times of different machines say little.
fn ledger(runs: &[Run], which: usize) -> Vec<Vec<String>> {
    let views: Vec<Option<LedgerView>> = runs
        .iter()
        .map(|run| run.budget.as_ref().map(|b| LedgerView::both(b).into_iter().nth(which))?)
        .collect();
    let Some(first) = views.iter().flatten().next() else { return Vec::new() };
    let ids = first.account.causes().map(|cause| cause.id).chain(["unexplained"]);
    let line = |id: &str| -> Option<Vec<String>> {
        let shares: Vec<_> =
            views.iter().map(|view| view.as_ref().and_then(|view| view.share(id))).collect();
        shares.iter().any(Option::is_some).then(|| {
            let cells = shares.into_iter().map(|share| share.unwrap_or(text::MISSING.into()));
            [format!("{} {id}", first.account.id())].into_iter().chain(cells).collect()
        })
    };
    ids.filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::tests::small_run;

    #[test]
    fn machines_that_ran_another_job_are_named() {
        let mut own = small_run();
        own.machine.name = "sim:own".into();
        own.job.params.insert("size".into(), "128M".into());
        own.job.machine_params.insert("size".into(), "128M".into());
        let text = render(&[small_run(), own.clone()]);
        let size = text.lines().find(|line| line.trim_start().starts_with("size")).unwrap();
        assert_eq!(size.split_whitespace().collect::<Vec<_>>(), ["size", "512M", "128M"]);
        assert!(text.contains("not the same job: size differ"), "{text}");
        assert!(text.contains("machine files of sim:own"), "{text}");
        assert!(report::render(&own).contains("set by the machine's file"), "one run says so, too");
        let text = render(&[small_run(), small_run()]);
        assert!(!text.contains("not the same job") && !text.contains("size"), "{text}");
    }
}
