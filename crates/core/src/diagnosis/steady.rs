//! The CPU times of trials at the mean speed of the machine.
//!
//! Beside each run, a probe does a fixed piece of work on the same CPU. Where pieces take longer, so does the
//! program: its CPU time goes with a power of theirs. That power is a property of the program. It is
//! estimated from the differences between runs of one round, less the mean of their trial. So an effect of
//! page sizes does not enter it. The probe's memory does not depend on the trial.
//! Source: analysis of covariance (Fisher 1932), with a normal prior of the coefficient.

use super::Trial;

/// The power of a program that slows down as the probe does. Programs have 0.5 to 1.4.
const POWER: f64 = 1.0;
/// The weight of [`POWER`], in squared log times of the probe. It is the variance of a pair of runs after
/// the correction (1.5 % of each) divided by that of powers (0.4 squared).
const POWER_WEIGHT: f64 = 2.0 * 0.015 * 0.015 / (0.4 * 0.4);
/// The largest power that is believed.
const POWER_MAX: f64 = 1.5;

/// Fills in the CPU times at the mean speed of all runs with a probe. A run without one keeps its time.
pub(super) fn steady(trials: &mut [Trial]) {
    trials.iter_mut().for_each(|trial| trial.steady_ns.clear());
    let logs: Vec<f64> = trials.iter().flat_map(probe_logs).flatten().collect();
    if logs.is_empty() {
        return;
    }
    let (mean, power) = (logs.iter().sum::<f64>() / logs.len() as f64, power(trials));
    for trial in trials {
        let at_mean_speed = |(cpu_ns, log): (u64, Option<f64>)| {
            let slower = log.map_or(0.0, |log| log - mean);
            (cpu_ns as f64 * (-power * slower).exp()).round() as u64
        };
        trial.steady_ns = trial.cpu_ns().zip(probe_logs(trial)).map(at_mean_speed).collect();
    }
}

/// Returns the logarithm of the probe's time for each run.
fn probe_logs(trial: &Trial) -> impl Iterator<Item = Option<f64>> {
    trial.probe_ns.iter().map(|ns| ns.filter(|ns| *ns > 0).map(|ns| (ns as f64).ln()))
}

/// Returns the power of the probe's time that the program's time goes with.
fn power(trials: &[Trial]) -> f64 {
    let Some((first, others)) = trials.split_first() else { return POWER };
    power_within(&others.iter().map(|trial| differences(first, trial)).collect::<Vec<_>>())
}

/// Returns that power by the logarithms of both times, or their differences. Those of one group differ by
/// nothing else.
fn power_within(groups: &[Vec<(f64, f64)>]) -> f64 {
    let (mut squares, mut products) = (POWER_WEIGHT, POWER_WEIGHT * POWER);
    for pairs in groups {
        let mean = |of: fn(&(f64, f64)) -> f64| {
            pairs.iter().map(of).sum::<f64>() / pairs.len().max(1) as f64
        };
        let (of_probe, of_time) = (mean(|pair| pair.0), mean(|pair| pair.1));
        for (probe, time) in pairs {
            squares += (probe - of_probe).powi(2);
            products += (probe - of_probe) * (time - of_time);
        }
    }
    (products / squares).clamp(0.0, POWER_MAX)
}

/// Returns the log ratios of the probe's times and of the CPU times, for each round that both ran in.
fn differences(first: &Trial, trial: &Trial) -> Vec<(f64, f64)> {
    let runs = |trial: &Trial| -> Vec<(Option<f64>, f64)> {
        probe_logs(trial).zip(trial.cpu_ns().map(|ns| (ns as f64).max(1.0).ln())).collect()
    };
    let of = |((probe, time), (other, other_time)): ((Option<f64>, f64), (Option<f64>, f64))| {
        Some((probe? - other?, time - other_time))
    };
    runs(trial).into_iter().zip(runs(first)).filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::trial;
    use super::super::{AS_IS, BASE, Basis, compare_trials};
    use super::*;
    use crate::access::Rng;
    use crate::sequential::Stopping;

    /// Makes trials whose speed varies by 20 %, which the program feels with this power.
    fn varying(power: f64, gains: &[(&str, f64)], rounds: usize) -> Vec<Trial> {
        let mut rng = Rng::new(1990);
        let mut of = |(name, gain): &(&str, f64)| {
            let mut made = trial(name, 1_000, 100, 0.9);
            let slow: Vec<f64> = (0..rounds).map(|_| rng.unit() * 0.4 - 0.2).collect();
            let run = |slow: &f64| (1e9 / gain * (power * slow).exp()) as u64;
            made.user_ns = slow.iter().map(run).collect();
            made.runs_ns = made.user_ns.clone();
            made.kernel_ns = vec![0; rounds];
            made.probe_ns = slow.iter().map(|slow| Some((14_000.0 * slow.exp()) as u64)).collect();
            made
        };
        gains.iter().map(&mut of).collect()
    }

    #[test]
    fn what_slows_the_probe_is_taken_out() {
        for power in [0.5, 1.0, 1.4] {
            let all = [(AS_IS, 1.0), (BASE, 1.0), ("thp-2M", 1.1), ("all-2M", 1.1)];
            let mut trials = varying(power, &all, 5);
            compare_trials(&mut trials, Stopping::Sequential, Basis::Cpu);
            let gain = trials[2].speedup.unwrap();
            assert!(gain.low > 1.07 && gain.high < 1.13, "{power}: {gain}");
            assert!(trials[1].speedup.unwrap().holds_one(), "{power}: {:?}", trials[1].speedup);
            // Without the probe the same runs say nothing.
            trials.iter_mut().for_each(|trial| trial.probe_ns.clear());
            compare_trials(&mut trials, Stopping::Sequential, Basis::Cpu);
            assert!(trials[2].speedup.unwrap().holds_one());
        }
    }

    #[test]
    fn a_machine_of_one_speed_needs_no_correction() {
        let mut trials = varying(1.0, &[(AS_IS, 1.0), ("thp-2M", 1.2)], 3);
        for trial in &mut trials {
            trial.user_ns = vec![1_000_000_000; 3];
            trial.probe_ns = vec![Some(14_000), None, Some(14_000)];
        }
        steady(&mut trials);
        assert_eq!(trials[1].steady_ns, [1_000_000_000; 3]);
        trials.iter_mut().for_each(|trial| trial.probe_ns = vec![None; 3]);
        steady(&mut trials);
        assert!(trials[0].steady_ns.is_empty(), "no probe at all");
    }
}
