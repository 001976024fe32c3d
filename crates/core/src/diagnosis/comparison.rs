//! The comparison of trials with the command as it is, and which of them need more rounds.

use super::steady::steady;
use super::{AS_IS, BASE, Basis, GAIN_MIN, Trial, Worth, is_candidate, worth};
use crate::sequential::Stopping;
use crate::stats::{Ratio, median};
use std::collections::BTreeSet;

/// Two trials with page faults that differ by at most this share ran on the same pages. A huge page takes one
/// fault where base pages take 512.
const FAULTS_ALIKE: f64 = 0.05;

/// Fills in each trial's speed-ups against the trials named [`AS_IS`] and [`BASE`], and what it holds beyond
/// what the command touches. A trial that needed no more rounds than it has was decided by a look: its
/// intervals are those of that look, which later rounds of other trials do not change.
pub fn compare_trials(trials: &mut [Trial], stopping: Stopping, basis: Basis) {
    steady(trials);
    untouched(trials);
    let rounds: Vec<usize> = trials.iter().map(|trial| trial.runs_ns.len()).collect();
    let all = rounds.iter().copied().max().unwrap_or(0);
    for length in rounds.iter().copied().collect::<BTreeSet<_>>() {
        let was_dropped = stopping == Stopping::TimeUp && length < all;
        let stopping = if was_dropped { Stopping::Sequential } else { stopping };
        let compared = speedups(trials, length, stopping, basis);
        let of_length = trials.iter_mut().zip(compared).filter(|(t, _)| t.runs_ns.len() == length);
        of_length.for_each(|(trial, of)| (trial.speedup, trial.speedup_over_base) = of);
    }
}

/// Fills in the memory that each trial holds beyond a trial without large pages. On base pages, only what was
/// touched is resident.
fn untouched(trials: &mut [Trial]) {
    let is_base = |trial: &Trial| trial.took.bytes == Some(0) && trial.exit.success();
    let touched = trials.iter().filter(|trial| is_base(trial));
    let touched = touched.filter_map(|trial| trial.peak_resident_bytes).max();
    for trial in trials.iter_mut() {
        let beyond =
            trial.peak_resident_bytes.zip(touched).map(|(peak, of)| peak.saturating_sub(of));
        trial.untouched_bytes = beyond.filter(|_| !is_base(trial));
    }
}

/// Returns the speed-ups of all trials over [`AS_IS`] and [`BASE`] after the first `rounds`.
fn speedups(
    trials: &[Trial],
    rounds: usize,
    stopping: Stopping,
    basis: Basis,
) -> Vec<(Option<Ratio>, Option<Ratio>)> {
    let mut then: Vec<Trial> = trials.iter().map(|trial| trial.first_rounds(rounds)).collect();
    steady(&mut then);
    let times: Vec<Vec<u64>> = then.iter().map(|trial| basis.beyond_start_ns(trial)).collect();
    // A trial that ran once is not compared.
    let comparisons = times.iter().filter(|runs| runs.len() > 1).count().saturating_sub(1);
    let over = |name: &str, trial: &Trial, own: &[u64]| {
        let reference = then.iter().position(|t| t.name == name).filter(|_| trial.name != name)?;
        stopping.ratio(&times[reference], own, &times, comparisons)
    };
    let both = |(t, own): (&Trial, &Vec<u64>)| (over(AS_IS, t, own), over(BASE, t, own));
    then.iter().zip(&times).map(both).collect()
}

/// Returns which trials ran on the same pages as the command as it is: without large pages at the peak of
/// memory, and with as many page faults. Where that is true of all, it returns none of them: their times then
/// show that nothing helps.
pub fn on_same_pages(trials: &[Trial]) -> Vec<bool> {
    let Some(as_is) = trials.iter().find(|t| t.name == AS_IS) else {
        return vec![false; trials.len()];
    };
    let faults = |t: &Trial| median(&t.fault_counts).map(|count| count as f64);
    let is_same = |t: &Trial| {
        let ratio = faults(t).zip(faults(as_is)).map(|(count, of_as_is)| count / of_as_is);
        [t, as_is].iter().all(|t| t.took.bytes == Some(0))
            && ratio.is_some_and(|ratio| (ratio - 1.0).abs() <= FAULTS_ALIKE)
    };
    let is_all = trials.iter().filter(|t| is_candidate(t)).all(is_same);
    trials.iter().map(|t| is_candidate(t) && !is_all && is_same(t)).collect()
}

/// Returns which trials need more rounds, after [`compare_trials`]. None does once the answer is settled.
///
/// A trial needs none if it is surely worth having, or surely gains less than 2 %. Once another one is surely
/// worth having, it needs none either if it is surely slower than that, or has not been faster so far: the
/// verdict is a gain in any case. A trial on the same pages as the first one needs none. The first trial, and
/// that named `check`, run as long as any other.
pub fn undecided(trials: &[Trial]) -> Vec<bool> {
    let Some(as_is) = trials.iter().find(|t| t.name == AS_IS) else {
        return vec![false; trials.len()];
    };
    let is_sure = |t: &&Trial| t.speedup.is_some_and(|s| s.low >= 1.0 + GAIN_MIN);
    let candidates = trials.iter().filter(|t| is_candidate(t));
    let gains = candidates.filter(is_sure).filter(|t| worth(t, as_is) == Worth::Gain);
    let gains: Vec<Ratio> = gains.filter_map(|t| t.speedup).collect();
    let reached = gains.iter().map(|s| s.low).fold(1.0 + GAIN_MIN, f64::max);
    let best = gains.iter().map(|s| s.value).fold(0.0, f64::max);
    let is_open = |t: &Trial| {
        let may_win = t.speedup.is_none_or(|s| s.high >= reached && s.value > best);
        t.exit == as_is.exit && !is_sure(&t) && may_win
    };
    let same = on_same_pages(trials);
    let open: Vec<bool> = trials
        .iter()
        .zip(same)
        .map(|(t, is_same)| is_candidate(t) && !is_same && is_open(t))
        .collect();
    let any = open.contains(&true);
    trials.iter().zip(open).map(|(t, is_open)| is_open || (any && !is_candidate(t))).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::{trial, unclear};
    use super::super::{CHECK, Took};
    use super::*;
    use crate::exit::Exit;

    fn undecided_of(mut trials: Vec<Trial>) -> Vec<bool> {
        compare_trials(&mut trials, Stopping::Sequential, Basis::Elapsed);
        undecided(&trials)
    }

    #[test]
    fn rounds_go_on_for_what_could_still_be_the_answer() {
        let as_is = || trial(AS_IS, 1_300, 100, 0.0);
        let thp = |ms| trial("thp-2M", ms, 100, 0.98);
        assert_eq!(undecided_of(vec![as_is(), thp(1_000)]), [false; 2], "a clear gain");
        assert_eq!(undecided_of(vec![as_is(), thp(1_300)]), [false; 2], "no gain");
        assert_eq!(undecided_of(vec![as_is(), unclear()]), [true; 2]);
        let check = trial(CHECK, 1_300, 100, 0.0);
        assert_eq!(undecided_of(vec![as_is(), check, unclear()]), [true; 3]);
        let slower = undecided_of(vec![as_is(), unclear(), trial("all-2M", 600, 100, 1.0)]);
        assert_eq!(slower, [false; 3], "another one is surely faster");
        let others = [BASE, "stack-2M"].map(|name| trial(name, 1_300, 100, 0.0));
        let noisy_with = |ms| {
            let gain = trial("all-2M", ms, 100, 1.0);
            undecided_of([vec![as_is(), unclear(), gain], others.to_vec()].concat())
        };
        assert_eq!(noisy_with(1_150), [false; 5], "another one gains, and was faster so far");
        assert!(noisy_with(1_240)[1], "another one may gain");
        let mut crashed = unclear();
        crashed.exit = Exit::Signal(11);
        assert_eq!(undecided_of(vec![as_is(), crashed]), [false; 2]);
        let large = trial("thp-2M", 1_000, 1_000, 0.98);
        assert_eq!(undecided_of(vec![as_is(), unclear(), large]), [true, true, false]);
    }

    #[test]
    fn memory_beyond_that_on_base_pages_was_never_touched() {
        let of = |name, bytes, peak_mb| {
            let took = Took { bytes, ..Took::default() };
            Trial { took, ..trial(name, 1_000, peak_mb, 0.0) }
        };
        let untouched_of = |mut trials: Vec<Trial>| -> Vec<Option<u64>> {
            compare_trials(&mut trials, Stopping::Fixed, Basis::Elapsed);
            trials.iter().map(|trial| trial.untouched_bytes).collect()
        };
        let thp = || of("thp-2M", Some(80 << 20), 130);
        assert_eq!(untouched_of(vec![of(AS_IS, Some(0), 100), thp()]), [None, Some(30 << 20)]);
        let all = vec![of(AS_IS, Some(80 << 20), 120), of(BASE, Some(0), 90), thp()];
        assert_eq!(untouched_of(all), [Some(30 << 20), None, Some(40 << 20)]);
        assert_eq!(untouched_of(vec![of(AS_IS, None, 100), thp()]), [None; 2], "nothing is known");
    }

    #[test]
    fn later_rounds_of_others_leave_a_decision_as_it_was() {
        let with_probe = |name, ms, probe_ns: [u64; 3]| {
            let probe_ns = probe_ns.map(Some).to_vec();
            Trial { probe_ns, ..trial(name, ms, 100, 0.98) }
        };
        let mut trials = vec![
            with_probe(AS_IS, 1_300, [14_000, 15_000, 14_500]),
            with_probe("thp-2M", 1_000, [14_600, 14_100, 15_200]),
            with_probe("all-2M", 1_200, [14_300, 15_300, 14_200]),
        ];
        compare_trials(&mut trials, Stopping::Sequential, Basis::Cpu);
        let decided = trials[1].speedup;
        let was = trials[2].speedup;
        for at in [0, 2] {
            trials[at].runs_ns.extend([1_900_000_000, 1_500_000_000]);
            trials[at].user_ns.extend([1_900_000_000, 1_500_000_000]);
            trials[at].kernel_ns.extend([0, 0]);
            trials[at].probe_ns.extend([Some(14_000), Some(28_000)]);
        }
        compare_trials(&mut trials, Stopping::TimeUp, Basis::Cpu);
        assert_eq!(trials[1].speedup, decided);
        assert_ne!(trials[2].speedup, was);
    }

    #[test]
    fn a_trial_on_the_same_pages_runs_once() {
        let of = |name, bytes, faults: u64, runs| {
            let mut trial = Trial { took: Took::default(), ..trial(name, 1_300, 100, 0.0) };
            (trial.took.bytes, trial.fault_counts) = (bytes, vec![faults; runs]);
            trial.runs_ns.truncate(runs);
            trial
        };
        let after_first = |as_is, base, thp: (Option<u64>, u64)| {
            undecided_of(vec![
                of(AS_IS, as_is, 1_000, 1),
                of(BASE, base, 1_010, 1),
                of("thp-2M", thp.0, thp.1, 1),
            ])
        };
        let large = (Some(1 << 21), 500);
        assert_eq!(after_first(Some(0), Some(0), large), [true, false, true]);
        assert_eq!(
            after_first(Some(1 << 21), Some(0), large),
            [true; 3],
            "as it is has large pages"
        );
        assert_eq!(after_first(Some(0), None, large), [true; 3], "nothing is known");
        assert_eq!(
            after_first(Some(0), Some(0), (Some(0), 500)),
            [true, false, true],
            "gone early"
        );
        assert_eq!(after_first(Some(0), Some(0), (Some(0), 1_000)), [true; 3], "nothing helps");
    }
}
