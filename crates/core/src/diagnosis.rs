//! The diagnosis of a command, schema 1: trials under different page sizes and the verdict.
//!
//! Invariants: trials are compared with the command as it is; nothing is recommended unless its
//! interval lies above 1, the gain is worth having and the memory it costs is in proportion to it.

mod basis;
mod comparison;
mod parts;
mod states;
mod steady;
mod tax;

use basis::losses;
pub use basis::{BUSY_SHARE, Basis, Occupation, queued};
pub use comparison::{compare_trials, on_same_pages, undecided};
pub use parts::{GAIN_SHARE_MIN, MEMORY_SHARE_MAX, PARTS, PartsSearch};
pub use states::{Growth, MemoryState, StateTrials, judge_states, undecided_in_state};
pub use tax::{TAX_DISAGREES, tax_disagreement};

use crate::budget::Budget;
use crate::document::Document;
use crate::exit::Exit;
use crate::load::LoadFigures;
use crate::report::{Environment, Warning};
use crate::stats::{Ratio, median, ratio_of_pairs};
use crate::units::Nanos;
use serde::{Deserialize, Serialize};

/// The trial of the command as it is, which all others are compared with.
pub const AS_IS: &str = "as-is";
/// The trial on forced base pages.
pub const BASE: &str = "base";
/// The second trial of the command as it is (`--check`). It is never recommended.
pub const CHECK: &str = "check";

/// Gains below 2 % are not worth a change of settings.
pub const GAIN_MIN: f64 = 0.02;
/// Memory may grow by this many times the gain: a command that is 1.02 times as fast may need 10 %
/// more memory, one that is 1.3 times as fast may need 150 % more.
const GROWTH_PER_GAIN: f64 = 5.0;
/// Growth below this does not count: it is a handful of huge pages.
const GROWTH_FREE_BYTES: u64 = 16 << 20;
/// From this share of anonymous memory on, a program counts as running on large pages.
const MOSTLY: f64 = 0.5;

/// The memory of a trial that was on large pages, at the peak of resident memory.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Took {
    /// Bytes on pages larger than the base page; absent if they could not be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Their share of the anonymous memory, 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fraction: Option<f64>,
    /// The reason why it is not all memory, or why it could not be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// The runs of one mechanism.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Trial {
    /// The trial's name: `as-is`, `base`, `thp-2M`, …
    pub name: String,
    /// The page size asked for; absent for the command as it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page_bytes: Option<u64>,
    /// The mechanism, in a few words.
    pub mechanism: String,
    /// Elapsed time of each run, in the order of the rounds.
    pub runs_ns: Vec<u64>,
    /// The median elapsed time of its runs.
    pub median_ns: u64,
    /// User CPU time of each run, all processes.
    pub user_ns: Vec<u64>,
    /// Kernel CPU time of each run, all processes.
    pub kernel_ns: Vec<u64>,
    /// The mean time of a fixed piece of work of a probe on the CPU of each run; null for a run too short to
    /// tell, empty without a probe.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub probe_ns: Vec<Option<u64>>,
    /// The CPU time of each run at the mean speed of the machine, as the probe saw it; empty without a probe.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub steady_ns: Vec<u64>,
    /// Page faults of each run, minor and major, all processes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fault_counts: Vec<u64>,
    /// The time, on the same basis, of a program that does nothing, started the same way just before each
    /// run. It is measured for commands under 500 ms, and speed-ups are ratios of the times beyond it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub start_ns: Vec<u64>,
    /// The figures of the load for each run of a server; empty without a load.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub loads: Vec<LoadFigures>,
    /// The speed-up over the command as it is; absent for itself and for a single run.
    pub speedup: Option<Ratio>,
    /// The speed-up over base pages; absent for itself, without that trial and for a single run.
    pub speedup_over_base: Option<Ratio>,
    /// The memory that was on such pages.
    pub took: Took,
    /// The median of the runs' peaks, of all processes. It is absent if no reading came in time: the run took
    /// milliseconds, or the machine was busy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak_resident_bytes: Option<u64>,
    /// The peak beyond that on base pages: memory that large pages hold and the command never touched. It is
    /// absent without a trial on base pages, and for that trial.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub untouched_bytes: Option<u64>,
    /// The end of the first run that failed; else success.
    pub exit: Exit,
}

impl Trial {
    /// Returns the CPU time of each run, user and kernel.
    pub fn cpu_ns(&self) -> impl Iterator<Item = u64> {
        self.user_ns.iter().zip(&self.kernel_ns).map(|(user, kernel)| user + kernel)
    }

    /// Returns this trial as it was after the first `rounds`, without its comparisons.
    fn first_rounds(&self, rounds: usize) -> Trial {
        let mut then = Trial { speedup: None, speedup_over_base: None, ..self.clone() };
        let times = [&mut then.runs_ns, &mut then.user_ns, &mut then.kernel_ns, &mut then.start_ns];
        times.into_iter().for_each(|times| times.truncate(rounds));
        then.probe_ns.truncate(rounds);
        then.loads.truncate(rounds);
        then
    }
}

/// A trial that could not be made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Skipped {
    /// The trial's name: `mthp-64K`, …
    pub name: String,
    /// The page size that the trial asks for.
    pub page_bytes: u64,
    /// The reason, in one sentence for the user.
    pub why: String,
    /// The change that would make it possible.
    pub remedy: String,
}

/// The recommendation that follows from the trials.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Verdict {
    /// The name of the trial to follow; none when the command is best as it is.
    pub winner: Option<String>,
    /// The reason, in one sentence.
    pub reason: String,
    /// One line to paste into a shell; none if it would turn large pages off for every program.
    pub apply: Option<String>,
    /// Lines for a systemd unit, with absolute paths; none if settings of the system must change.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub systemd: Vec<String>,
    /// Lines for a Dockerfile, with absolute paths; none if settings of the system must change.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dockerfile: Vec<String>,
}

/// The cost of virtual memory for one command, and the page sizes that reduce it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Diagnosis {
    /// The command and its arguments.
    pub command: Vec<String>,
    /// The end of the command as it is.
    pub exit: Exit,
    /// The figure that speed-ups are ratios of; absent for elapsed time.
    #[serde(default, skip_serializing_if = "Basis::is_elapsed")]
    pub basis: Basis,
    /// True if the trials of a round shared one CPU; then their elapsed times mean little.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub side_by_side: bool,
    /// The trials on fresh memory, the command as it is first.
    pub trials: Vec<Trial>,
    /// The trials in other states of memory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub states: Vec<StateTrials>,
    /// The search for the part of memory that deserves large pages (`--parts`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parts: Option<PartsSearch>,
    /// Trials that could not be made.
    pub skipped: Vec<Skipped>,
    /// The recommendation that follows from the trials.
    pub verdict: Verdict,
    /// The budget of the command as it is; absent if nothing is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget: Option<Budget>,
    /// Facts about the machine, its kernel and its settings.
    pub environment: Environment,
    /// Warnings that qualify the verdict, each with a hint.
    pub warnings: Vec<Warning>,
}

impl Document for Diagnosis {
    const KIND: &'static str = "diagnosis";
}

/// Returns true if the trial could be recommended.
fn is_candidate(trial: &Trial) -> bool {
    ![AS_IS, CHECK].contains(&trial.name.as_str())
}

/// The worth of a trial against the command as it is.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Worth {
    /// Faster, in proportion to its memory.
    Gain,
    /// The interval holds 1, lies below it, or the gain is below [`GAIN_MIN`].
    NoGain,
    /// Faster, but this share of memory more is out of proportion.
    TooMuchMemory(f64),
    /// It did not end as the command as it is does.
    EndsDifferently,
}

/// Returns the growth of peak resident memory over the command as it is: 0.4 is 40 % more.
fn growth(trial: &Trial, as_is: &Trial) -> Option<f64> {
    let (with, without) = (trial.peak_resident_bytes?, as_is.peak_resident_bytes?);
    (without > 0).then(|| with as f64 / without as f64 - 1.0)
}

fn worth(trial: &Trial, as_is: &Trial) -> Worth {
    if trial.exit != as_is.exit {
        return Worth::EndsDifferently;
    }
    let Some(speedup) = trial.speedup.filter(|s| s.low > 1.0 && s.value >= 1.0 + GAIN_MIN) else {
        return Worth::NoGain;
    };
    let growth_bytes = trial
        .peak_resident_bytes
        .unwrap_or(0)
        .saturating_sub(as_is.peak_resident_bytes.unwrap_or(0));
    match growth(trial, as_is) {
        Some(growth)
            if growth_bytes > GROWTH_FREE_BYTES
                && growth > GROWTH_PER_GAIN * (speedup.value - 1.0) =>
        {
            Worth::TooMuchMemory(growth)
        }
        _ => Worth::Gain,
    }
}

/// Returns the winner, if there is one, and the reason. Trials come in the order of intrusion: of those that
/// do not differ significantly, the first wins. A verdict that is open names `remedies`.
pub fn judge(trials: &[Trial], basis: Basis, remedies: &str) -> Verdict {
    let none = |reason: String| Verdict { reason, ..Verdict::default() };
    let Some(as_is) = trials.iter().find(|t| t.name == AS_IS) else {
        return none(
            "the command was not run as it is, so there is nothing to compare with".into(),
        );
    };
    if !as_is.exit.success() && trials.len() == 1 {
        return none(format!("the command failed in its first run: {}", as_is.exit));
    }
    if let Some(refusal) = too_short(as_is, trials, basis) {
        return none(refusal);
    }
    let others = || trials.iter().filter(|t| is_candidate(t));
    let gains = || others().filter(|t| worth(t, as_is) == Worth::Gain);
    let value = |t: &Trial| t.speedup.map_or(0.0, |s| s.value);
    let Some(best) = gains().max_by(|a, b| value(a).total_cmp(&value(b))) else {
        return none(why_none(as_is, trials, remedies));
    };
    let alike = |t: &&Trial| t.speedup.is_some_and(|s| s.high >= value(best));
    let winner = gains().find(alike).unwrap_or(best);
    let by = match basis {
        Basis::Elapsed => String::new(),
        other => format!(" by {}", other.heading()),
    };
    Verdict {
        winner: Some(winner.name.clone()),
        reason: format!(
            "`{}` runs the command {} times as fast as it is now{by}, {}{}{}",
            winner.name,
            winner.speedup.map(|s| s.to_string()).unwrap_or_default(),
            memory_words(growth(winner, as_is)),
            start_words(winner, as_is),
            losses(winner, as_is, basis),
        ),
        ..Verdict::default()
    }
}

/// Returns the reason why the command is too short for a verdict: its start takes most of its time, or all of
/// the time of a run in some trial.
fn too_short(as_is: &Trial, trials: &[Trial], basis: Basis) -> Option<String> {
    let start_ns = |trial: &Trial| median(&trial.start_ns);
    let is_all_start =
        |trial: &&Trial| start_ns(trial).is_some() && basis.beyond_start_ns(trial).contains(&0);
    let is_most = start_ns(as_is)? * 2 > basis.median_ns(as_is);
    let short = if is_most { Some(as_is) } else { trials.iter().find(is_all_start) }?;
    Some(format!(
        "no verdict: of {}, the start of a program that does nothing takes {}; give the command more to do",
        Nanos(basis.median_ns(short)),
        Nanos(start_ns(short)?)
    ))
}

/// Says what the winner's start costs. Its speed-up lacks that cost.
fn start_words(winner: &Trial, as_is: &Trial) -> String {
    match (median(&winner.start_ns), median(&as_is.start_ns)) {
        (Some(with), Some(without)) if with > without => {
            format!("; its start takes {} more, which is not counted", Nanos(with - without))
        }
        _ => String::new(),
    }
}

fn memory_words(growth: Option<f64>) -> String {
    match growth {
        None => "at a peak of memory that could not be seen".into(),
        Some(g) if g.abs() < 0.01 => "with the same memory".into(),
        Some(g) if g > 0.0 => format!("with {:.0} % more memory", g * 100.0),
        Some(g) => format!("with {:.0} % less memory", -g * 100.0),
    }
}

fn why_none(as_is: &Trial, trials: &[Trial], remedies: &str) -> String {
    let others: Vec<_> = trials.iter().filter(|t| is_candidate(t)).collect();
    if others.is_empty() {
        return "no other page size could be tried".into();
    }
    if others.iter().all(|t| t.speedup.is_none()) {
        return "too few finished runs to compare: an interval needs two runs of each trial".into();
    }
    let costly = others.iter().find_map(|t| match worth(t, as_is) {
        Worth::TooMuchMemory(growth) => Some((t, growth)),
        _ => None,
    });
    if let Some((trial, growth)) = costly {
        return format!(
            "`{}` would be {} times as fast, but with {:.0} % more memory: more than {:.0} times \
             the gain, so not recommended",
            trial.name,
            trial.speedup.map(|s| s.to_string()).unwrap_or_default(),
            growth * 100.0,
            GROWTH_PER_GAIN,
        );
    }
    if let Some(trial) = others.iter().find(|t| worth(t, as_is) == Worth::EndsDifferently) {
        return format!("`{}` made the command end differently: {}", trial.name, trial.exit);
    }
    let already = as_is.took.fraction.is_some_and(|f| f >= MOSTLY);
    match as_is.speedup_over_base {
        Some(over_base) if already && over_base.low > 1.0 => format!(
            "the command already runs on large pages, and is {over_base} times as fast as on base \
             pages"
        ),
        _ => match (open_trial(trials), others.iter().find(|t| took_mostly(t))) {
            (Some((trial, speedup)), _) => format!(
                "undecided after {} rounds: `{}` runs the command {speedup} times as fast, so a gain of {:.0} % is \
                 neither shown nor ruled out; {remedies}",
                trial.runs_ns.len(),
                trial.name,
                GAIN_MIN * 100.0
            ),
            (None, Some(took)) => format!(
                "nothing helps: `{}` put the memory on large pages, and no trial was faster by {:.0} \
                 % or more",
                took.name,
                GAIN_MIN * 100.0
            ),
            (None, None) => format!(
                "nothing that was tried helps: no trial was faster by {:.0} % or more, but none put most of the \
                 memory on large pages either",
                GAIN_MIN * 100.0
            ),
        },
    }
}

/// Returns the trial that needs more rounds and could gain most, with its speed-up.
fn open_trial(trials: &[Trial]) -> Option<(&Trial, Ratio)> {
    let open = trials.iter().zip(undecided(trials)).filter(|(t, more)| *more && is_candidate(t));
    let with_speedup = open.filter_map(|(trial, _)| Some((trial, trial.speedup?)));
    with_speedup.max_by(|(_, one), (_, other)| one.high.total_cmp(&other.high))
}

fn took_mostly(trial: &Trial) -> bool {
    trial.name != BASE && trial.took.fraction.is_some_and(|f| f >= MOSTLY)
}

/// A share of user time, 0 to 1, within bounds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Share {
    /// The best estimate, from 0 to 1.
    pub value: f64,
    /// The lower bound, from 0 to 1.
    pub low: f64,
    /// The upper bound, from 0 to 1.
    pub high: f64,
}

/// Returns the share of user time that the command as it is spends on translation: the time that larger
/// pages saved in trials. Low is the certain part of it; high adds the time that memory without large pages
/// might have saved. The error is the reason why trials do not show it.
pub fn translation(trials: &[Trial], seed: u64) -> Result<Share, &'static str> {
    let as_is = trials
        .iter()
        .find(|t| t.name == AS_IS)
        .ok_or("the command was not run to its end as it is")?;
    if took_mostly(as_is) {
        return Err("it already runs on large pages: trials show what they save, not what is left");
    }
    let saved = |t: &Trial| ratio_of_pairs(&t.user_ns, &as_is.user_ns, seed);
    let (ratio, fraction) = trials
        .iter()
        .filter(|t| took_mostly(t))
        .filter_map(|t| Some((saved(t)?, t.took.fraction?)))
        .min_by(|(a, _), (b, _)| a.value.total_cmp(&b.value))
        .ok_or("no trial put most of the memory on large pages")?;
    let share = |saved: f64| saved.clamp(0.0, 1.0);
    Ok(Share {
        value: share(1.0 - ratio.value),
        low: share(1.0 - ratio.high),
        high: share((1.0 - ratio.low) / fraction.min(1.0)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sequential::Stopping;

    /// Returns a trial with three runs around `ms`, a peak in MiB and a share on large pages.
    pub(super) fn trial(name: &str, ms: u64, peak_mb: u64, fraction: f64) -> Trial {
        let mut noise = [998, 1_000, 1_002];
        noise.rotate_left(name.len() % 3);
        let runs_ns: Vec<u64> = noise.iter().map(|k| ms * k * 1_000).collect();
        Trial {
            name: name.into(),
            page_bytes: None,
            mechanism: String::new(),
            median_ns: ms * 1_000_000,
            user_ns: runs_ns.clone(),
            kernel_ns: vec![0; 3],
            probe_ns: Vec::new(),
            steady_ns: Vec::new(),
            fault_counts: vec![1_000; 3],
            start_ns: Vec::new(),
            loads: Vec::new(),
            runs_ns,
            speedup: None,
            speedup_over_base: None,
            took: Took { bytes: Some(1), fraction: Some(fraction), why: None },
            peak_resident_bytes: Some(peak_mb << 20),
            untouched_bytes: None,
            exit: Exit::Code(0),
        }
    }

    fn verdict(mut trials: Vec<Trial>) -> Verdict {
        compare_trials(&mut trials, Stopping::Fixed, Basis::Elapsed);
        judge(&trials, Basis::Elapsed, "give it more time")
    }

    /// Returns a trial that may be faster or slower.
    pub(super) fn unclear() -> Trial {
        let runs_ns = [1_200, 1_290, 1_310].map(|ms| ms * 1_000_000).into();
        Trial { runs_ns, ..trial("thp-2M", 1_280, 100, 0.98) }
    }

    #[test]
    fn verdicts() {
        let as_is = || trial(AS_IS, 1_300, 100, 0.0);
        let base = || trial(BASE, 1_300, 100, 0.0);
        let thp = |ms, peak| trial("thp-2M", ms, peak, 0.98);
        let cases = [
            (vec![as_is(), base(), thp(1_000, 103)], Some("thp-2M"), "1.300 ("),
            (vec![as_is(), base(), thp(1_000, 103)], Some("thp-2M"), "3 % more memory"),
            (vec![as_is(), base(), thp(1_000, 200)], Some("thp-2M"), "100 % more memory"),
            (vec![as_is(), base(), thp(1_260, 140)], None, "40 % more memory: more than 5 times"),
            (vec![as_is(), base(), thp(1_260, 105)], Some("thp-2M"), "5 % more"),
            (vec![as_is(), base(), thp(1_300, 100)], None, "nothing helps: `thp-2M` put"),
            (
                vec![as_is(), base(), thp(1_280, 100)],
                None,
                "undecided after 3 rounds: `thp-2M` runs",
            ),
            (vec![as_is(), trial("thp-2M", 1_300, 100, 0.1)], None, "none put most"),
            (vec![as_is()], None, "no other page size could be tried"),
            (vec![base()], None, "not run as it is"),
            (vec![trial(AS_IS, 900, 100, 0.9), base()], None, "already runs on large pages"),
            (vec![as_is(), trial(BASE, 1_000, 90, 0.0)], Some(BASE), "10 % less memory"),
            (vec![as_is(), unclear()], None, "undecided after 3 rounds: `thp-2M` runs"),
        ];
        for (trials, winner, words) in cases {
            let verdict = verdict(trials);
            assert_eq!(verdict.winner.as_deref(), winner, "{}", verdict.reason);
            assert!(verdict.reason.contains(words), "{} holds {words}", verdict.reason);
        }
    }

    #[test]
    fn of_trials_that_cannot_be_told_apart_the_less_intrusive_wins() {
        let hugetlb = trial("hugetlb-2M", 999, 100, 1.0);
        let trials =
            vec![trial(AS_IS, 1_300, 100, 0.0), trial("thp-2M", 1_000, 100, 0.98), hugetlb];
        assert_eq!(verdict(trials).winner.as_deref(), Some("thp-2M"));
    }

    #[test]
    fn a_trial_that_ends_differently_never_wins() {
        let mut crashed = trial("thp-2M", 500, 100, 0.98);
        crashed.exit = Exit::Signal(11);
        let verdict = verdict(vec![trial(AS_IS, 1_300, 100, 0.0), crashed]);
        assert_eq!(verdict.winner, None);
        assert!(verdict.reason.contains("killed by signal 11"), "{}", verdict.reason);
    }

    #[test]
    fn a_single_run_proves_nothing() {
        let mut trials = vec![trial(AS_IS, 1_300, 100, 0.0), trial("thp-2M", 1_000, 100, 0.98)];
        trials.iter_mut().for_each(|t| t.runs_ns.truncate(1));
        let verdict = verdict(trials);
        assert!(verdict.winner.is_none() && verdict.reason.contains("two runs"));
    }

    #[test]
    fn a_check_is_never_recommended() {
        let trials = vec![trial(AS_IS, 1_300, 100, 0.0), trial(CHECK, 1_000, 100, 0.0)];
        assert_eq!(verdict(trials).winner, None);
    }

    #[test]
    fn starts_are_subtracted_and_a_verdict_on_starts_is_refused() {
        let start = |mut trial: Trial, ms: u64| {
            trial.start_ns = vec![ms * 1_000_000; 3];
            trial
        };
        let as_is = || start(trial(AS_IS, 22, 100, 0.0), 2);
        // 7 ms of start hide a gain from 20 to 16 ms.
        let told = verdict(vec![as_is(), start(trial("thp-2M", 25, 100, 1.0), 9)]);
        assert_eq!(told.winner.as_deref(), Some("thp-2M"), "{}", told.reason);
        let words = ["1.25", "start takes 7.00 ms more"];
        assert!(words.iter().all(|words| told.reason.contains(words)), "{}", told.reason);
        let told =
            verdict(vec![start(trial(AS_IS, 3, 1, 0.0), 2), start(trial(BASE, 2, 1, 0.0), 1)]);
        assert!(told.winner.is_none() && told.reason.starts_with("no verdict"), "{}", told.reason);
        // A disturbed start, longer than one of the runs.
        let mut disturbed = start(trial("stack-2M", 25, 1, 0.0), 9);
        disturbed.runs_ns[0] = 8_000_000;
        let told = verdict(vec![as_is(), disturbed]);
        assert!(told.winner.is_none() && told.reason.starts_with("no verdict"), "{}", told.reason);
    }

    #[test]
    fn translation_is_what_large_pages_saved() {
        let trials = [trial(AS_IS, 1_300, 100, 0.0), trial("thp-2M", 1_000, 100, 0.8)];
        let Share { value, low, high } = translation(&trials, 1).unwrap();
        assert!((value - 0.3 / 1.3).abs() < 1e-3);
        assert!(low <= value && value < high);
        assert!(high >= value / 0.8, "what did not take might have saved a quarter more");
    }

    #[test]
    fn translation_without_large_pages_is_missing() {
        let without = [trial(AS_IS, 1_300, 100, 0.0), trial("thp-2M", 1_000, 100, 0.1)];
        assert!(translation(&without, 1).unwrap_err().contains("no trial"));
        let already = [trial(AS_IS, 1_000, 100, 0.9), trial("thp-2M", 1_000, 100, 0.9)];
        assert!(translation(&already, 1).unwrap_err().contains("what is left"));
    }
}
