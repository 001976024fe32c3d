//! A sweep as one table: a line for each point, machines beside each other.

use super::{columns, report, text};
use pagetax_core::counter::Unit;
use pagetax_core::report::{Run, Warning};
use std::collections::BTreeSet;

/// Renders elapsed time and faults of each machine at each point, labelled measured or modeled.
pub fn render(runs: &[Run], swept: &[String]) -> String {
    let mut machines: Vec<&Run> = Vec::new();
    let mut points: Vec<Vec<String>> = Vec::new();
    for run in runs {
        if machines.iter().all(|known| known.machine.name != run.machine.name) {
            machines.push(run);
        }
        let point = point(run, swept);
        if !points.contains(&point) {
            points.push(point);
        }
    }
    let mut headings: Vec<String> = swept.to_vec();
    let mut labels = vec![String::new(); swept.len()];
    for run in &machines {
        headings.extend([run.machine.name.clone(), "faults".into()]);
        labels.extend([report::label(&run.machine).to_string(), String::new()]);
    }
    let row = |point: &Vec<String>| {
        let cells = machines.iter().flat_map(|machine| {
            let run = runs.iter().find(|run| {
                run.machine.name == machine.machine.name && self::point(run, swept) == *point
            });
            run.map_or([text::MISSING.to_string(), text::MISSING.to_string()], cells)
        });
        point.iter().cloned().chain(cells).collect()
    };
    let rows = [labels].into_iter().chain(points.iter().map(row)).collect();
    let numeric: Vec<usize> = (0..headings.len()).collect();
    let headings: Vec<&str> = headings.iter().map(String::as_str).collect();
    let different: Vec<String> = columns::different_params(runs)
        .into_iter()
        .filter(|name| {
            !swept.contains(name) && runs.iter().any(|r| r.job.machine_params.contains_key(name))
        })
        .collect();
    text::table(&headings, &numeric, rows)
        + &columns::not_the_same_job(runs, &different)
        + &warnings(runs)
}

/// Returns the values of the swept parameters.
fn point(run: &Run, swept: &[String]) -> Vec<String> {
    swept.iter().map(|name| run.job.params.get(name).cloned().unwrap_or_default()).collect()
}

/// Returns elapsed time and faults. Translation faults include minor and major ones, and are preferred if the
/// machine counts them.
fn cells(run: &Run) -> [String; 2] {
    let count = |id: &str| run.counters.get(id).and_then(|reading| reading.value);
    let others = || count("minor_fault_count").map(|n| n + count("major_fault_count").unwrap_or(0));
    let faults = count("translation_fault_count").or_else(others);
    [text::value(Unit::Ns, run.wall_ns), faults.map_or(text::MISSING.into(), text::count)]
}

/// Renders each warning once, for however many points it was given.
fn warnings(runs: &[Run]) -> String {
    let mut seen = BTreeSet::new();
    let is_new = |warning: &&Warning| seen.insert((warning.id.clone(), warning.text.clone()));
    let all: Vec<Warning> =
        runs.iter().flat_map(|run| &run.warnings).filter(is_new).cloned().collect();
    match all.as_slice() {
        [] => String::new(),
        all => text::heading("Warnings") + report::warnings(all).trim_start(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::documents::csv;
    use crate::run::tests::small_run;
    use pagetax_core::report::Runs;

    fn runs() -> Vec<Run> {
        let with = |size: &str, name: &str| {
            let mut run = small_run();
            run.job.params.insert("size".into(), size.into());
            run.machine.name = name.into();
            run
        };
        vec![with("2M", "host"), with("2M", "null"), with("4M", "host")]
    }

    #[test]
    fn machines_stand_beside_each_other() {
        let text = render(&runs(), &["size".into()]);
        let lines: Vec<Vec<&str>> =
            text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0], ["size", "host", "faults", "null", "faults"]);
        assert_eq!(lines[1].iter().filter(|word| word.starts_with("measured")).count(), 2);
        assert_eq!(lines[2], ["2M", "1.00", "ms", "3", "1.00", "ms", "3"]);
        assert_eq!(lines[3], ["4M", "1.00", "ms", "3", "–", "–"]);
    }

    #[test]
    fn csv_has_a_column_for_what_is_swept() {
        let text = csv::render(&Runs { swept: vec!["size".into()], runs: runs() }).unwrap();
        assert!(text.starts_with("job,machine,size,phase,"), "{text}");
        let line = "tlb-gather,host,4M,,,minor_fault_count,measured,3,,,";
        assert!(text.lines().any(|l| l == line), "{text}");
    }
}
