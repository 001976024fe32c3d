//! Warnings about a diagnosis, each with a hint.

use super::scratch::{Hashes, Scratch};
use pagetax_core::diagnosis::{
    AS_IS, Basis, CHECK, Diagnosis, MemoryState, Trial, queued, tax_disagreement,
};
use pagetax_core::report::Warning;
use pagetax_core::stats::{median, outliers};
use pagetax_core::units::Nanos;
use pagetax_host::measure::trial::Finished;
use pagetax_host::measure::trial::rounds::{Ended, Rounds};

/// Runs shorter than this are mostly fork, exec and exit.
const SHORT_NS: u64 = 5_000_000;
/// Backing the memory of a run by the hypervisor may take this share of its time.
const BACKING_SHARE: f64 = 0.05;
/// Watching should cost less than 2 %.
const WATCH_SHARE: u64 = 50;

fn warning(id: &str, text: impl Into<String>, remedy: &str) -> Warning {
    Warning { id: id.into(), text: text.into(), remedy: remedy.into() }
}

/// Returns all warnings of a diagnosis.
pub fn of(
    diagnosis: &Diagnosis,
    rounds: &Rounds<Finished>,
    hashes: &Hashes,
    scratch: &Scratch,
) -> Vec<Warning> {
    let mut all: Vec<Warning> = Vec::new();
    all.extend(ended(diagnosis, rounds, scratch));
    all.extend(diagnosis.trials.iter().filter_map(ends_differently(diagnosis)));
    all.extend(diagnosis.trials.iter().filter_map(far_off));
    all.extend(few_or_short(diagnosis));
    all.extend(busy(diagnosis));
    let budget = diagnosis.budget.as_ref();
    all.extend(budget.and_then(|b| tax_disagreement(&diagnosis.trials, b, super::SEED)));
    all.extend(diagnosis.trials.iter().find(|t| t.name == CHECK).and_then(differs_from_itself));
    let names: Vec<_> = hashes.different().iter().filter_map(|i| name_of(diagnosis, *i)).collect();
    // A server's own output has times and process ids.
    if !names.is_empty() && !diagnosis.basis.is_load() {
        all.push(warning(
            "output_differs",
            format!("the command printed something else under {}", names.join(", ")),
            "keep the outputs with --keep-output DIR and compare them before trusting the times",
        ));
    }
    let runs: Vec<&Finished> = rounds.finished.iter().flatten().collect();
    let is_shown = diagnosis.states.iter().any(|state| state.state == MemoryState::Found);
    all.extend(backing_ns(&runs).filter(|_| !is_shown).map(backing));
    all.extend(of_runs(&runs));
    all
}

/// Trials without runs are left out of a diagnosis, and only ever the last ones.
fn name_of(diagnosis: &Diagnosis, trial: usize) -> Option<String> {
    diagnosis.trials.get(trial).map(|t| format!("`{}`", t.name))
}

fn ended(diagnosis: &Diagnosis, rounds: &Rounds<Finished>, scratch: &Scratch) -> Option<Warning> {
    match rounds.ended {
        Ended::Complete | Ended::TimeUp => None,
        Ended::Interrupted => Some(warning(
            "interrupted",
            "interrupted: the report covers the runs that had finished",
            "let it end, or give fewer --runs",
        )),
        Ended::FirstFailed => {
            let words = scratch.first_words();
            let said =
                if words.is_empty() { String::new() } else { format!("; it said:\n{words}") };
            Some(warning(
                "command_failed",
                format!("the command failed in its first run, {}{said}", diagnosis.exit),
                "mend the command, or add --ignore-failure to diagnose it as it is",
            ))
        }
        Ended::ServiceFailed => Some(warning(
            "service_failed",
            rounds.failure.clone().unwrap_or_default(),
            "the report covers the runs before it",
        )),
    }
}

fn ends_differently(diagnosis: &Diagnosis) -> impl Fn(&Trial) -> Option<Warning> {
    let usual = diagnosis.exit;
    move |trial| {
        (trial.exit != usual).then(|| {
            warning(
                "exit_differs",
                format!("a run under `{}` ended with {}, not {usual}", trial.name, trial.exit),
                "keep the outputs with --keep-output DIR and see what went wrong",
            )
        })
    }
}

fn far_off(trial: &Trial) -> Option<Warning> {
    let far = outliers(&trial.runs_ns);
    let first = *far.first()?;
    let (what, remedy) = match (first, far.len()) {
        (0, 1) => ("its first run lies", "warm caches with more --warmup runs"),
        _ => ("some of its runs lie", "stop what else runs on this machine, or give more --runs"),
    };
    Some(warning(
        "outliers",
        format!(
            "`{}`: {what} far off the others ({} of {} runs, such as {} against a median of {})",
            trial.name,
            far.len(),
            trial.runs_ns.len(),
            Nanos(trial.runs_ns[first]),
            Nanos(trial.median_ns),
        ),
        remedy,
    ))
}

fn few_or_short(diagnosis: &Diagnosis) -> Option<Warning> {
    let as_is = diagnosis.trials.iter().find(|t| t.name == AS_IS)?;
    if as_is.median_ns < SHORT_NS {
        return Some(warning(
            "short_command",
            format!("a run takes only {}: mostly its start and end", Nanos(as_is.median_ns)),
            "give the command more to do",
        ));
    }
    (as_is.runs_ns.len() == 1 && diagnosis.trials.len() > 1).then(|| {
        warning("single_run", "one run of each trial has no interval", "give --runs 5 or more")
    })
}

/// Warns if the second trial of the command as it is differs from the first.
fn differs_from_itself(check: &Trial) -> Option<Warning> {
    let speedup = check.speedup.filter(|speedup| !speedup.holds_one())?;
    Some(warning(
        "check_differs",
        format!("the command differs from itself: its second trial was {speedup} times as fast"),
        "do not trust this verdict; stop what else runs on this machine and diagnose again",
    ))
}

/// Warns if the command's tasks waited for CPUs that other programs had.
fn busy(diagnosis: &Diagnosis) -> Option<Warning> {
    let waited = queued(diagnosis.budget.as_ref()?)?;
    let basis = if diagnosis.basis == Basis::Cpu { ", so trials compare CPU time" } else { "" };
    Some(warning(
        "busy_machine",
        format!("the command waited {waited}{basis}"),
        "stop it, or give more --runs; the intervals are as wide as the disturbance",
    ))
}

fn of_runs(runs: &[&Finished]) -> Vec<Warning> {
    let mut all: Vec<Warning> = Vec::new();
    if let Some(most) = runs.iter().map(|run| run.left_running).max().filter(|n| *n > 0) {
        all.push(warning(
            "left_running",
            format!("the command left {most} processes running; they were ended after each run"),
            "run a server in the foreground, under a client that ends it",
        ));
    }
    if let Some(most) = runs.iter().map(|run| run.brief_count).max().filter(|n| *n > 0) {
        all.push(warning(
            "brief_processes",
            format!(
                "{most} processes of the command or more came and went within two looks at its memory: \
                 its peak is of those that were seen, and may have been higher"
            ),
            "diagnose one of these processes by itself where its memory matters",
        ));
    }
    let watched: u64 = runs.iter().map(|run| run.watch_ns).sum();
    let total: u64 = runs.iter().map(|run| run.wall_ns).sum();
    if watched * WATCH_SHARE > total && total / SHORT_NS > runs.len() as u64 {
        all.push(warning(
            "watching_costs",
            format!("watching took {} of {}", Nanos(watched), Nanos(total)),
            "it falls on all trials alike; with a CPU to spare it does not slow the command",
        ));
    }
    all
}

/// Returns the time in which the memory of a run came back from the hypervisor, if that is much.
fn backing_ns(runs: &[&Finished]) -> Option<u64> {
    let column = |of: fn(&Finished) -> u64| runs.iter().map(|run| of(run)).collect::<Vec<_>>();
    let ns = median(&column(|run| run.backing_ns))?;
    let run_ns = median(&column(|run| run.wall_ns))?;
    Some(ns).filter(|ns| *ns as f64 > BACKING_SHARE * run_ns as f64)
}

fn backing(ns: u64) -> Warning {
    warning(
        "memory_taken_back",
        format!(
            "the memory of a run took {} to come back from the hypervisor, which the times leave out: a start \
             after a pause pays it",
            Nanos(ns)
        ),
        "turn free page reporting off for this machine, if its starts have to be fast",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetax_core::stats::Ratio;

    #[test]
    fn a_command_that_differs_from_itself_is_named() {
        let trial = |low, high| Trial {
            name: CHECK.into(),
            page_bytes: None,
            mechanism: String::new(),
            runs_ns: vec![1, 1],
            median_ns: 1,
            user_ns: vec![1, 1],
            kernel_ns: vec![0, 0],
            probe_ns: Vec::new(),
            steady_ns: Vec::new(),
            fault_counts: vec![0, 0],
            start_ns: Vec::new(),
            loads: Vec::new(),
            speedup: Some(Ratio { value: 1.05, low, high }),
            speedup_over_base: None,
            took: Default::default(),
            peak_resident_bytes: None,
            untouched_bytes: None,
            exit: pagetax_core::exit::Exit::Code(0),
        };
        assert_eq!(differs_from_itself(&trial(0.99, 1.1)), None);
        let warning = differs_from_itself(&trial(1.01, 1.1)).unwrap();
        assert!(warning.text.contains("differs from itself") && warning.text.contains("1.05"));
        assert!(differs_from_itself(&trial(1.06, 1.1)).is_some());
    }
}
