//! The share of hits among samples, and the intervals that samples give it.

/// Returns the 95 % Wilson interval of the share `count` / `samples`. Unlike the normal approximation,
/// it holds for few samples, and its upper bound for a row without samples is above 0.
pub fn wilson(count: u64, samples: u64) -> (f64, f64) {
    const Z: f64 = 1.96;
    let (n, p) = (samples as f64, count as f64 / samples as f64);
    let middle = p + Z * Z / (2.0 * n);
    let reach = Z * (p * (1.0 - p) / n + Z * Z / (4.0 * n * n)).sqrt();
    let scale = 1.0 + Z * Z / n;
    (((middle - reach) / scale).max(0.0), ((middle + reach) / scale).min(1.0))
}

/// Returns the exact 95 % interval of the share `count` / `samples` (Clopper, Pearson 1934). It contains the
/// true share in at least 95 of 100 experiments; Wilson's falls to 83 for rare work and few samples.
pub fn clopper_pearson(count: u64, samples: u64) -> (f64, f64) {
    const TAIL: f64 = 0.025;
    // The probability of at most `most` hits falls as the share grows.
    let share_at = |most: u64, wanted: f64| {
        let (mut below, mut above) = (0.0, 1.0);
        for _ in 0..40 {
            let middle = (below + above) / 2.0;
            match at_most(most, samples, middle) > wanted {
                true => below = middle,
                false => above = middle,
            }
        }
        (below + above) / 2.0
    };
    let low = count.checked_sub(1).map_or(0.0, |fewer| share_at(fewer, 1.0 - TAIL));
    let high = if count == samples { 1.0 } else { share_at(count, TAIL) };
    (low, high)
}

/// Returns the binomial probability of at most `most` hits in `samples`, each of probability `share`.
fn at_most(most: u64, samples: u64, share: f64) -> f64 {
    let ways =
        |hits: u64| (0..hits).fold(1.0, |ways, i| ways * (samples - i) as f64 / (i + 1) as f64);
    let exactly = |hits: u64| {
        ways(hits) * share.powi(hits as i32) * (1.0 - share).powi((samples - hits) as i32)
    };
    (0..=most).map(exactly).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_intervals_are_those_of_tables_and_hold_for_each_share() {
        let near = |(low, high): (f64, f64), (l, h): (f64, f64)| {
            (low - l).abs() < 5e-5 && (high - h).abs() < 5e-5
        };
        assert!(near(clopper_pearson(0, 10), (0.0, 0.3085)));
        assert!(near(clopper_pearson(1, 10), (0.0025, 0.4450)));
        assert!(near(clopper_pearson(10, 20), (0.2720, 0.7280)));
        assert!(near(clopper_pearson(29, 29), (0.8806, 1.0)));
        let exactly = |hits, share| {
            at_most(hits, 10, share) - hits.checked_sub(1).map_or(0.0, |h| at_most(h, 10, share))
        };
        let coverage = |of: fn(u64, u64) -> (f64, f64), share: f64| -> f64 {
            let holds = |hits: &u64| {
                let (low, high) = of(*hits, 10);
                low <= share && share <= high
            };
            (0..=10).filter(holds).map(|hits| exactly(hits, share)).sum()
        };
        let shares = || (1..1_000).map(|share| f64::from(share) / 1_000.0);
        assert!(shares().all(|share| coverage(clopper_pearson, share) > 0.95));
        assert!(shares().any(|share| coverage(wilson, share) < 0.85));
    }

    #[test]
    fn intervals_hold_for_few_samples() {
        let (low, high) = wilson(0, 10);
        assert!(low == 0.0 && (0.2..0.35).contains(&high), "{high}");
        let (low, high) = wilson(500, 1000);
        assert!((0.46..0.47).contains(&low) && (0.53..0.54).contains(&high));
        assert_eq!(wilson(10, 10).1, 1.0);
    }
}
