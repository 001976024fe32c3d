//! The effects of states on a value that drifts, by the local level model of time series.
//!
//! A value is a level that wanders as a random walk, the effect of the state at that time, and noise. A
//! state that occurs once is compared with its neighbours in time; one that comes again and again, with
//! all of them. The ratio of wandering to noise is not known, so all ratios count by their likelihood. A
//! value far from its neighbours counts less.
//! Sources: the local level model and intervention analysis (Harvey 1989), the filter for regressors (de Jong
//! 1991), restricted likelihood (Patterson, Thompson 1971), weights of Student's distribution (Lange,
//! Little, Taylor 1989).

use crate::stats::student_interval;

/// The states beside the one that others are compared with.
const EFFECTS: usize = 2;
/// The variance of the wandering in the mean time between values ÷ that of the noise. Not 0: a small one
/// looks like none, but counts over many values.
const WANDERING: [f64; 6] = [0.03, 0.1, 0.3, 1.0, 3.0, 10.0];
/// The degrees of freedom of the noise's distribution: few, so that tails are long.
const TAIL: f64 = 4.0;
/// The rounds in which the weights settle.
const ROUNDS: usize = 5;

/// A value at a time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Value {
    /// The middle of the time over which it is a mean, in any unit.
    pub at: f64,
    /// The length of that time. Noise falls with it.
    pub length: f64,
    /// The value.
    pub value: f64,
    /// The state: 0 is compared with 1 and 2.
    pub state: usize,
}

/// The effects of states 1 and 2, compared with state 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Effects {
    means: [f64; EFFECTS],
    covariance: [[f64; EFFECTS]; EFFECTS],
    freedom: usize,
}

impl Effects {
    /// Estimates the effects from values in the order of time. None unless each state has a value, and
    /// there are more values than unknown ones.
    pub fn of(values: &[Value]) -> Option<Effects> {
        let has = |state: usize| values.iter().any(|value| value.state == state);
        let freedom = values.len().checked_sub(2 + EFFECTS)?;
        if !(0..=EFFECTS).all(has) {
            return None;
        }
        // With little wandering, values far off stand out; with more, their weights settle from there.
        let mut weights = vec![1.0; values.len()];
        let mut fits = Vec::new();
        for wandering in WANDERING {
            for _ in 0..ROUNDS {
                weights = Fit::of(values, &weights, wandering)?.weights(values).0;
            }
            let mut fit = Fit::of(values, &weights, wandering)?;
            fit.likelihood += fit.weights(values).1;
            fits.push(fit);
        }
        let best = fits.iter().map(|fit| fit.likelihood).fold(f64::NEG_INFINITY, f64::max);
        let shares: Vec<f64> = fits.iter().map(|fit| (fit.likelihood - best).exp()).collect();
        let all: f64 = shares.iter().sum();
        let mean = |of: &dyn Fn(&Fit) -> f64| {
            fits.iter().zip(&shares).map(|(fit, share)| of(fit) * share).sum::<f64>() / all
        };
        let means = [0, 1].map(|i| mean(&|fit| fit.means[i]));
        let of_pair = |i: usize, j: usize| {
            mean(&|fit| {
                fit.covariance[i][j] + (fit.means[i] - means[i]) * (fit.means[j] - means[j])
            })
        };
        let covariance = [0, 1].map(|i| [0, 1].map(|j| of_pair(i, j)));
        Some(Effects { means, covariance, freedom })
    }

    /// Returns the effect of a state, and its bounds with this error.
    pub fn of_state(&self, state: usize, error: f64) -> (f64, f64, f64) {
        let (mean, variance) = (self.means[state - 1], self.covariance[state - 1][state - 1]);
        let (low, high) = student_interval(mean, variance, self.freedom, error);
        (mean, low, high)
    }
}

/// A column of the model: the values themselves, or 1 in one of the states.
const COLUMNS: usize = 1 + EFFECTS;

/// The filter's state after a value.
#[derive(Debug, Clone, Copy)]
struct Filtered {
    levels: [f64; COLUMNS],
    /// The variance of the level relative to that of the noise, with this value, and before it.
    variance: f64,
    before: f64,
}

/// The model with one ratio of wandering to noise.
#[derive(Debug)]
struct Fit {
    means: [f64; EFFECTS],
    covariance: [[f64; EFFECTS]; EFFECTS],
    /// The variance of the noise of a value of mean length.
    noise: f64,
    likelihood: f64,
    filtered: Vec<Filtered>,
}

impl Fit {
    fn of(values: &[Value], weights: &[f64], wandering: f64) -> Option<Fit> {
        let (first, last) = (values.first()?, values.last()?);
        let apart = (last.at - first.at) / (values.len() - 1) as f64;
        let noises = noises(values, weights);
        let mut filtered =
            vec![Filtered { levels: columns(first), variance: noises[0], before: 0.0 }];
        let mut rows = Vec::new();
        let mut log_variances = 0.0;
        for (pair, noise) in values.windows(2).zip(&noises[1..]) {
            let at = filtered[filtered.len() - 1];
            let before = at.variance + wandering * (pair[1].at - pair[0].at) / apart;
            let (sum, new) = (before + noise, columns(&pair[1]));
            let surprise: [f64; COLUMNS] = std::array::from_fn(|i| new[i] - at.levels[i]);
            let gain = before / sum;
            let levels = std::array::from_fn(|i| at.levels[i] + gain * surprise[i]);
            filtered.push(Filtered { levels, variance: before * (1.0 - gain), before });
            rows.push(surprise.map(|part| part / sum.sqrt()));
            log_variances += sum.ln();
        }
        let product = |i: usize, j: usize| rows.iter().map(|row| row[i] * row[j]).sum::<f64>();
        let (a, b, c) = (product(1, 1), product(1, 2), product(2, 2));
        let determinant = a * c - b * b;
        if determinant.is_nan() || determinant <= 0.0 {
            return None;
        }
        let inverse = [[c, -b], [-b, a]].map(|row| row.map(|part| part / determinant));
        let right = [product(0, 1), product(0, 2)];
        let means = inverse.map(|row| row[0] * right[0] + row[1] * right[1]);
        let rest = |row: &[f64; COLUMNS]| (row[0] - means[0] * row[1] - means[1] * row[2]).powi(2);
        let freedom = rows.len().checked_sub(EFFECTS).filter(|freedom| *freedom > 0)? as f64;
        let squares = rows.iter().map(rest).sum::<f64>().max(f64::MIN_POSITIVE);
        let noise = squares / freedom;
        Some(Fit {
            means,
            // The weights make the noise seem smaller.
            covariance: inverse
                .map(|row| row.map(|part| part * noise * (TAIL + 3.0) / (TAIL + 1.0))),
            noise,
            likelihood: -0.5 * (log_variances + determinant.ln() + freedom * squares.ln()),
            filtered,
        })
    }

    /// Returns the weight of each value, by its distance from the smoothed level. Also returns the gain
    /// of the logarithmic likelihood if Student's distribution replaces the weighted normal one.
    fn weights(&self, values: &[Value]) -> (Vec<f64>, f64) {
        let noises = noises(values, &vec![1.0; values.len()]);
        let of_value = |((value, level), noise): ((&Value, f64), &f64)| {
            let effect = value.state.checked_sub(1).map_or(0.0, |index| self.means[index]);
            let distance = (value.value - effect - level).powi(2) / (noise * self.noise);
            let weight = (TAIL + 1.0) / (TAIL + distance);
            let tail = -(TAIL + 1.0) / 2.0 * (distance / TAIL).ln_1p();
            (weight, tail + (weight * distance - weight.ln()) / 2.0)
        };
        let all = values.iter().zip(self.smoothed()).zip(&noises).map(of_value);
        let (weights, gains): (Vec<f64>, Vec<f64>) = all.unzip();
        (weights, gains.iter().sum())
    }

    /// Returns the level at each value by all values.
    fn smoothed(&self) -> Vec<f64> {
        let level = |at: &Filtered| {
            at.levels[0] - self.means[0] * at.levels[1] - self.means[1] * at.levels[2]
        };
        let mut smoothed = self.filtered.last().map_or(0.0, level);
        let mut levels = vec![smoothed];
        for pair in self.filtered.windows(2).rev() {
            let (now, next) = (&pair[0], &pair[1]);
            smoothed = level(now) + now.variance / next.before * (smoothed - level(now));
            levels.push(smoothed);
        }
        levels.reverse();
        levels
    }
}

/// Returns the value, and 1 for its state.
fn columns(value: &Value) -> [f64; COLUMNS] {
    std::array::from_fn(|column| match column {
        0 => value.value,
        state => f64::from(u8::from(value.state == state)),
    })
}

/// Returns the variance of each value's noise, relative to that of a value of mean length.
fn noises(values: &[Value], weights: &[f64]) -> Vec<f64> {
    let mean = values.iter().map(|value| value.length).sum::<f64>() / values.len() as f64;
    values.iter().zip(weights).map(|(value, weight)| mean / value.length / weight).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::Rng;

    /// Returns the states in the order of an experiment: pages as found, in order, and cycles.
    fn states(cycles: usize) -> Vec<usize> {
        let cycle = [1, 2, 1].into_iter();
        let cycles = std::iter::repeat_n(cycle, cycles).flatten();
        std::iter::repeat_n(0, 24).chain(std::iter::repeat_n(1, 8)).chain(cycles).collect()
    }

    /// Returns about a normal value.
    fn normal(rng: &mut Rng) -> f64 {
        (0..12).map(|_| rng.unit()).sum::<f64>() - 6.0
    }

    /// Makes a series with effects of -0.1 and -0.3, that wanders and has some values far off.
    fn series(rng: &mut Rng, wandering: f64, far_share: f64) -> Vec<Value> {
        let mut level = 1.0;
        let value = |(index, state): (usize, usize)| {
            level += wandering * normal(rng);
            let far = if rng.unit() < far_share { 10.0 } else { 1.0 };
            let effect = [0.0, -0.1, -0.3][state];
            let value = level + effect + 0.01 * far * normal(rng);
            Value { at: index as f64, length: 1.0, value, state }
        };
        states(10).into_iter().enumerate().map(value).collect()
    }

    #[test]
    fn intervals_hold_the_truth_as_often_as_they_say_however_it_drifts() {
        for (wandering, far_share) in
            [(0.0, 0.0), (0.0, 0.1), (0.003, 0.0), (0.01, 0.1), (0.05, 0.0)]
        {
            let mut rng = Rng::new(7);
            let (mut held, mut width) = (0, 0.0);
            for _ in 0..400 {
                let effects = Effects::of(&series(&mut rng, wandering, far_share)).unwrap();
                let (_, low, high) = effects.of_state(2, 0.05);
                held += u32::from(low < -0.3 && -0.3 < high);
                width += (high - low) / 400.0;
            }
            println!("{wandering} {far_share}: {held} of 400, {width:.4}");
            assert!(held >= 370, "{wandering} {far_share}: {held} of 400");
        }
    }

    #[test]
    fn a_few_values_far_off_hardly_widen_an_interval() {
        let width = |far_share: f64| {
            let mut rng = Rng::new(11);
            let of_one = |_| {
                let effects = Effects::of(&series(&mut rng, 0.0, far_share)).unwrap();
                let (_, low, high) = effects.of_state(1, 0.05);
                high - low
            };
            (0..50).map(of_one).sum::<f64>()
        };
        assert!(width(0.05) < 1.5 * width(0.0), "{} {}", width(0.05), width(0.0));
    }

    #[test]
    fn each_state_needs_a_value() {
        let at = |index: usize, state| Value { at: index as f64, length: 1.0, value: 1.0, state };
        let of = |states: &[usize]| {
            let values: Vec<Value> = states.iter().enumerate().map(|(i, s)| at(i, *s)).collect();
            Effects::of(&values)
        };
        assert_eq!(of(&[0, 0, 0, 1, 1, 1]), None);
        assert_eq!(of(&[0, 1, 2]), None);
        let same = of(&[0, 0, 1, 1, 2, 1, 2]).unwrap();
        assert!(same.of_state(2, 0.05).0.abs() < 1e-9);
        assert_eq!(Effects::of(&[]), None);
    }
}
