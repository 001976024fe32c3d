//! Statistics of repeated runs: medians and quantiles, intervals of ratios, outliers.
//!
//! Invariant: results depend only on the input and the seed, so the same runs give the same interval on
//! every machine. If an interval contains 1, no side is called faster.
//! Sources: percentile bootstrap over pairs (Efron, Tibshirani 1993, ch. 13). Student's interval on the
//! logarithms of pair ratios for few pairs. Modified z-score (Iglewicz, Hoaglin 1993).

use crate::access::Rng;
use serde::{Deserialize, Serialize};

/// Bootstrap resamples behind an interval.
const RESAMPLES: usize = 1_000;

/// With fewer pairs the bootstrap alone is too narrow, because it knows only the runs that it has.
const FEW_PAIRS: usize = 10;

/// Two-sided 95 % quantiles of Student's t for 1, 2, … degrees of freedom.
const STUDENT_T_95: [f64; 8] = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306];

/// The modified z-score of outliers. It is large because run times have a heavy tail, and users ignore
/// frequent warnings.
const OUTLIER_SCORE: f64 = 10.0;

/// A ratio and its 95 % interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Ratio {
    /// The ratio of the medians.
    pub value: f64,
    /// The lower end of the interval.
    pub low: f64,
    /// The upper end of the interval.
    pub high: f64,
}

impl Ratio {
    /// Returns true if the interval contains 1: no difference is shown.
    pub fn holds_one(&self) -> bool {
        self.low <= 1.0 && self.high >= 1.0
    }

    /// Returns the decimals that the interval supports, 1 to 3. A bound that is not 1 never reads as 1.
    fn decimals(&self) -> usize {
        let reach = (self.high - self.low) / 2.0;
        let supported = (-reach.log10()).ceil().clamp(1.0, 3.0) as usize;
        let reads_as_one = |decimals: usize, bound: f64| {
            let unit = 10f64.powi(decimals as i32);
            bound != 1.0 && (bound * unit).round() == unit
        };
        let is_clear =
            |decimals: &usize| ![self.low, self.high].iter().any(|b| reads_as_one(*decimals, *b));
        (supported..3).find(is_clear).unwrap_or(3)
    }
}

impl std::fmt::Display for Ratio {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let decimals = self.decimals();
        let [value, low, high] =
            [self.value, self.low, self.high].map(|number| format!("{number:.decimals$}"));
        // Two runs of each bound nothing; the digits of their interval would only look exact.
        let is_bounded = self.high < 100.0 * self.value || self.low > self.value / 100.0;
        let interval = if is_bounded { format!("{low}–{high}") } else { "too few runs".into() };
        f.pad(&format!("{value} ({interval})"))
    }
}

/// Returns the median, or the mean of the middle two: [`quantiles`] of 0.5, exact for numbers that `f64`
/// rounds. None if there are no values.
pub fn median(values: &[u64]) -> Option<u64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        n if n % 2 == 1 => Some(sorted[middle]),
        _ => Some(sorted[middle - 1].midpoint(sorted[middle])),
    }
}

/// Returns the quantiles of these shares, interpolated linearly; NaN if there are no values.
pub fn quantiles<const N: usize>(values: &[f64], shares: [f64; N]) -> [f64; N] {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    shares.map(|share| {
        let place = share * sorted.len().saturating_sub(1) as f64;
        let at = |index: f64| sorted.get(index as usize).copied().unwrap_or(f64::NAN);
        at(place.floor()) + (at(place.ceil()) - at(place.floor())) * place.fract()
    })
}

/// Returns the median of `over[i] / under[i]`, for pairs of runs that share the disturbances of their
/// round. Use it if rounds differ more from each other than the two runs of a round do. None as for
/// [`ratio_of_pairs`].
pub fn median_of_ratios(over: &[u64], under: &[u64], seed: u64) -> Option<Ratio> {
    let pairs = over.len().min(under.len());
    let (over, under) = (&over[..pairs], &under[..pairs]);
    if under.contains(&0) {
        return None;
    }
    let ratios: Vec<f64> = over.iter().zip(under).map(|(o, u)| *o as f64 / *u as f64).collect();
    let middle = |ratios: &[f64]| quantiles(ratios, [0.5])[0];
    let mut interval = bootstrap(pairs, pairs, seed, |first, _| {
        Some(middle(&first.iter().map(|i| ratios[*i]).collect::<Vec<_>>()))
    })?;
    if pairs < FEW_PAIRS {
        interval = widest(interval, student(over, under)?);
    }
    Some(around(middle(&ratios), interval))
}

/// Returns `median(over) / median(under)` of interleaved runs. `over[i]` and `under[i]` ran in the same
/// round and share its disturbances, so whole rounds are resampled. Ignores runs without a partner. None
/// for fewer than two pairs, or if a median is 0.
pub fn ratio_of_pairs(over: &[u64], under: &[u64], seed: u64) -> Option<Ratio> {
    let pairs = over.len().min(under.len());
    let (over, under) = (&over[..pairs], &under[..pairs]);
    let value = ratio_of_medians(over, under)?;
    let mut interval = bootstrap(pairs, pairs, seed, |first, _| {
        let pick = |from: &[u64]| first.iter().map(|i| from[*i]).collect::<Vec<_>>();
        ratio_of_medians(&pick(over), &pick(under))
    })?;
    if pairs < FEW_PAIRS {
        interval = widest(interval, student(over, under)?);
    }
    Some(around(value, interval))
}

/// Returns the same ratio for runs that were not interleaved, such as those of two reports. Each side is
/// resampled separately. None for fewer than two runs on a side, or if a median is 0.
pub fn ratio_of_groups(over: &[u64], under: &[u64], seed: u64) -> Option<Ratio> {
    let value = ratio_of_medians(over, under)?;
    let mut interval = bootstrap(over.len(), under.len(), seed, |first, second| {
        let first: Vec<_> = first.iter().map(|i| over[*i]).collect();
        let second: Vec<_> = second.iter().map(|i| under[*i]).collect();
        ratio_of_medians(&first, &second)
    })?;
    if over.len().min(under.len()) < FEW_PAIRS {
        interval = widest(interval, student_groups(over, under)?);
    }
    Some(around(value, interval))
}

/// Returns the indices of outliers. Empty for fewer than four runs.
pub fn outliers(values: &[u64]) -> Vec<usize> {
    let Some(middle) = median(values).filter(|_| values.len() >= 4) else { return Vec::new() };
    let distances: Vec<u64> = values.iter().map(|v| v.abs_diff(middle)).collect();
    // Runs that differ by less than a thousandth are alike, however close the others are.
    let spread = median(&distances).unwrap_or(0).max(middle / 1_000).max(1) as f64;
    let score = |distance: u64| 0.6745 * distance as f64 / spread;
    (0..values.len()).filter(|i| score(distances[*i]) > OUTLIER_SCORE).collect()
}

/// Returns the two-sided 95 % quantile of Student's t, within 0.005; infinite without a degree of
/// freedom.
pub fn student_t_95(freedom: usize) -> f64 {
    let beyond = |freedom: f64| 1.96 + 2.37 / freedom + 2.8 / freedom.powi(2);
    match freedom.checked_sub(1) {
        None => f64::INFINITY,
        Some(row) => STUDENT_T_95.get(row).copied().unwrap_or_else(|| beyond(freedom as f64)),
    }
}

pub(crate) fn ratio_of_medians(over: &[u64], under: &[u64]) -> Option<f64> {
    match (median(over)?, median(under)?) {
        (0, _) | (_, 0) => None,
        (over, under) => Some(over as f64 / under as f64),
    }
}

fn widest(one: (f64, f64), other: (f64, f64)) -> (f64, f64) {
    (one.0.min(other.0), one.1.max(other.1))
}

fn around(value: f64, (low, high): (f64, f64)) -> Ratio {
    Ratio { value, low: low.min(value), high: high.max(value) }
}

/// Returns the middle 95 % of `statistic` over resampled indices below `first` and below `second`.
fn bootstrap(
    first: usize,
    second: usize,
    seed: u64,
    statistic: impl Fn(&[usize], &[usize]) -> Option<f64>,
) -> Option<(f64, f64)> {
    if first < 2 || second < 2 {
        return None;
    }
    let mut rng = Rng::new(seed);
    let mut draw = |n: usize| (0..n).map(|_| rng.below(n as u64) as usize).collect::<Vec<_>>();
    let mut seen: Vec<f64> =
        (0..RESAMPLES).filter_map(|_| statistic(&draw(first), &draw(second))).collect();
    seen.sort_by(f64::total_cmp);
    let cut = seen.len() / 40;
    Some((*seen.get(cut)?, *seen.get(seen.len() - 1 - cut)?))
}

pub(crate) fn mean_and_variance(values: &[f64]) -> (f64, f64) {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let squares: f64 = values.iter().map(|v| (v - mean).powi(2)).sum();
    (mean, squares / (values.len() - 1) as f64)
}

pub(crate) fn logarithms(values: &[u64]) -> Vec<f64> {
    values.iter().map(|v| (*v as f64).ln()).collect()
}

fn exp_interval(middle: f64, reach: f64) -> (f64, f64) {
    ((middle - reach).exp(), (middle + reach).exp())
}

/// Returns Student's interval of a mean with this variance, degrees of freedom and error of two sides.
pub(crate) fn student_interval(mean: f64, variance: f64, freedom: usize, error: f64) -> (f64, f64) {
    let reach = student_t(freedom, error) * variance.sqrt();
    (mean - reach, mean + reach)
}

/// Returns the quantile of Student's t with this error of two sides.
fn student_t(freedom: usize, error: f64) -> f64 {
    // The angle whose tangent is t / √freedom.
    let (mut low, mut high) = (0.0, std::f64::consts::FRAC_PI_2);
    for _ in 0..60 {
        let middle = f64::midpoint(low, high);
        match student_within(freedom, middle) < 1.0 - error {
            true => low = middle,
            false => high = middle,
        }
    }
    high.tan() * (freedom as f64).sqrt()
}

/// Returns the probability that Student's |t| is at most √freedom × tan(angle) (Abramowitz, Stegun 1964,
/// 26.7.3 and 26.7.4).
fn student_within(freedom: usize, angle: f64) -> f64 {
    let is_odd = freedom % 2 == 1;
    let (mut term, mut sum) = (if is_odd { angle.cos() } else { 1.0 }, 0.0);
    for place in (if is_odd { 1 } else { 0 }..freedom.saturating_sub(1)).step_by(2) {
        sum += term;
        term *= angle.cos().powi(2) * (place + 1) as f64 / (place + 2) as f64;
    }
    match is_odd {
        true => (angle + angle.sin() * sum) * std::f64::consts::FRAC_2_PI,
        false => angle.sin() * sum,
    }
}

/// Returns Student's interval of the mean log ratio; needs at least two pairs.
fn student(over: &[u64], under: &[u64]) -> Option<(f64, f64)> {
    let t = student_t_95(over.len().checked_sub(1).filter(|freedom| *freedom > 0)?);
    let logs: Vec<f64> =
        logarithms(over).iter().zip(logarithms(under)).map(|(o, u)| o - u).collect();
    let (mean, variance) = mean_and_variance(&logs);
    Some(exp_interval(mean, t * (variance / logs.len() as f64).sqrt()))
}

/// Returns Student's interval for two groups. It uses the smaller group's degrees of freedom, so it is
/// never too narrow.
fn student_groups(over: &[u64], under: &[u64]) -> Option<(f64, f64)> {
    let freedom = over.len().min(under.len()).checked_sub(1).filter(|freedom| *freedom > 0)?;
    let t = student_t_95(freedom);
    let (mean_over, variance_over) = mean_and_variance(&logarithms(over));
    let (mean_under, variance_under) = mean_and_variance(&logarithms(under));
    let variance = variance_over / over.len() as f64 + variance_under / under.len() as f64;
    Some(exp_interval(mean_over - mean_under, t * variance.sqrt()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::Rng;
    use proptest::prelude::{ProptestConfig, any, prop_assert, prop_assert_eq, proptest};

    #[test]
    fn medians_of_odd_even_and_no_values() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[7]), Some(7));
        assert_eq!(median(&[9, 1, 5]), Some(5));
        assert_eq!(median(&[u64::MAX, u64::MAX - 2]), Some(u64::MAX - 1));
    }

    #[test]
    fn quantiles_of_student_are_those_of_tables() {
        let table = [(1, 12.706), (8, 2.306), (9, 2.262), (15, 2.131), (30, 2.042), (120, 1.980)];
        for (freedom, expected) in table {
            assert!((student_t_95(freedom) - expected).abs() < 0.005, "{freedom}");
        }
        assert_eq!(student_t_95(0), f64::INFINITY);
    }

    #[test]
    fn quantiles_of_student_for_any_error_are_those_of_tables() {
        let table = [(1, 0.05, 12.706), (2, 0.01, 9.925), (5, 0.001, 6.869), (8, 0.01, 3.355)];
        for (freedom, error, expected) in table {
            let found = student_t(freedom, error);
            assert!((found - expected).abs() < 0.001, "{freedom} {error}: {found}");
        }
        assert!((student_t(15, 0.002) - 3.733).abs() < 0.001);
    }

    #[test]
    fn quantiles_lie_between_neighbours() {
        assert_eq!(quantiles(&[4.0, 1.0, 3.0, 2.0], [0.0, 0.5, 1.0]), [1.0, 2.5, 4.0]);
        assert_eq!(quantiles(&[7.0], [0.1, 0.9]), [7.0, 7.0]);
        assert!(quantiles(&[], [0.5])[0].is_nan());
    }

    #[test]
    fn what_rounds_share_leaves_the_median_of_ratios_alone() {
        // Rounds differ by more than the 2 % that the test looks for.
        let under = [1_000, 2_000, 1_500, 1_200, 3_000, 1_000, 2_500, 1_100, 1_900, 2_300];
        let over: Vec<u64> = under.iter().map(|ns| ns * 102 / 100).collect();
        let ratio = median_of_ratios(&over, &under, 1).unwrap();
        assert!(ratio.low > 1.019 && ratio.high < 1.021, "{ratio}");
        assert_eq!(median_of_ratios(&[1, 1], &[0, 1], 1), None);
        assert_eq!(median_of_ratios(&[1], &[1], 1), None);
    }

    #[test]
    fn digits_follow_the_interval() {
        let shown = |value, low, high| Ratio { value, low, high }.to_string();
        assert_eq!(shown(1.475, 1.251, 1.799), "1.5 (1.3–1.8)");
        assert_eq!(shown(1.0061, 1.0022, 1.0094), "1.006 (1.002–1.009)");
        assert_eq!(shown(1.12, 1.04, 1.21), "1.12 (1.04–1.21)", "1.04 is not 1.0");
        assert_eq!(shown(1.0, 0.0, 795.517), "1.0 (too few runs)");
        assert_eq!(shown(1.0, 1.0, 1.0), "1.000 (1.000–1.000)");
    }

    #[test]
    fn one_run_has_no_interval_and_equal_runs_show_no_difference() {
        assert_eq!(ratio_of_pairs(&[10], &[20], 1), None);
        assert_eq!(ratio_of_pairs(&[0, 0], &[1, 1], 1), None);
        let same = ratio_of_pairs(&[100, 100, 100], &[100, 100, 100], 1).unwrap();
        assert!(same.holds_one() && same.value == 1.0);
    }

    #[test]
    fn a_clear_difference_is_shown_by_few_runs() {
        let slow = [1_300, 1_310, 1_290];
        let fast = [1_000, 1_004, 997];
        let ratio = ratio_of_pairs(&slow, &fast, 1).unwrap();
        assert!((ratio.value - 1.3).abs() < 1e-9);
        assert!(ratio.low > 1.2 && ratio.high < 1.4, "{ratio}");
    }

    #[test]
    fn what_rounds_share_does_not_widen_the_interval_of_pairs() {
        let slow = [1_100, 2_200, 1_650, 1_100, 3_300, 1_100, 2_200, 1_100, 1_650, 2_750];
        let fast: Vec<u64> = slow.iter().map(|ns| ns * 10 / 11).collect();
        let pairs = ratio_of_pairs(&slow, &fast, 1).unwrap();
        let groups = ratio_of_groups(&slow, &fast, 1).unwrap();
        assert!(!pairs.holds_one() && groups.holds_one(), "{pairs} {groups}");
    }

    #[test]
    fn outliers_stand_far_off() {
        assert!(outliers(&[100, 101, 99]).is_empty());
        assert!(outliers(&[1000, 1010, 990, 1005, 1040]).is_empty());
        assert_eq!(outliers(&[3000, 1010, 990, 1005, 1000]), [0]);
        assert!(outliers(&[1000, 1000, 1000, 1000, 1001]).is_empty());
    }

    /// Returns a run time with 3 % of log-normal noise: a sum of twelve uniforms is nearly normal.
    fn noisy(rng: &mut Rng, middle: f64) -> u64 {
        let normal: f64 = (0..12).map(|_| rng.unit()).sum::<f64>() - 6.0;
        (middle * (0.03 * normal).exp()) as u64
    }

    /// Returns how many of 100 experiments have intervals that contain the true ratio, for each method.
    fn coverage(runs: usize) -> [f64; 3] {
        let mut rng = Rng::new(runs as u64);
        let mut held = [0; 3];
        for seed in 0..100 {
            let over: Vec<u64> = (0..runs).map(|_| noisy(&mut rng, 1.1e9)).collect();
            let under: Vec<u64> = (0..runs).map(|_| noisy(&mut rng, 1.0e9)).collect();
            for (held, ratio) in
                held.iter_mut().zip([ratio_of_pairs, ratio_of_groups, median_of_ratios])
            {
                let ratio: Ratio = ratio(&over, &under, seed).unwrap();
                *held += u32::from(ratio.low <= 1.1 && ratio.high >= 1.1);
            }
        }
        held.map(|held| f64::from(held) / 100.0)
    }

    #[test]
    fn intervals_hold_the_truth_nine_times_in_ten_or_more() {
        for runs in [3, 5, 12] {
            let held = coverage(runs);
            assert!(held.iter().all(|share| *share >= 0.9), "{runs} runs: {held:?}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn intervals_are_ordered_deterministic_and_know_no_unit(
            over in proptest::collection::vec(1_000u64..1 << 40, 2..9),
            under in proptest::collection::vec(1_000u64..1 << 40, 2..9),
            seed in any::<u64>(),
        ) {
            for f in [ratio_of_pairs, ratio_of_groups, median_of_ratios] {
                let ratio = f(&over, &under, seed).unwrap();
                prop_assert!(ratio.low <= ratio.value && ratio.value <= ratio.high);
                prop_assert_eq!(f(&over, &under, seed).unwrap(), ratio);
                let double = |v: &[u64]| v.iter().map(|x| x * 2).collect::<Vec<_>>();
                let scaled = f(&double(&over), &double(&under), seed).unwrap();
                prop_assert!((scaled.value / ratio.value - 1.0).abs() < 1e-2);
            }
        }

        #[test]
        fn a_program_against_itself_shuffled_shows_no_difference_of_pairs(
            runs in proptest::collection::vec(1_000u64..1 << 40, 2..9),
            seed in any::<u64>(),
        ) {
            prop_assert!(ratio_of_pairs(&runs, &runs, seed).unwrap().holds_one());
        }
    }
}
