//! The smallest set of addresses that keeps most of the gain (`diagnose --parts`).

use super::{Basis, Trial};
use crate::sequential::Stopping;
use crate::stats::Ratio;
use serde::{Deserialize, Serialize};

/// A set may have at most this share of the memory.
pub const MEMORY_SHARE_MAX: f64 = 0.2;
/// A set must keep this share of the gain.
pub const GAIN_SHARE_MIN: f64 = 0.9;
/// The trial of the set.
pub const PARTS: &str = "parts-2M";

/// A search for the part of memory that deserves large pages.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PartsSearch {
    /// The patterns of the set that a recording suggests (`ppgsz --only`); none without one.
    pub patterns: Option<String>,
    /// Bytes on base pages that were touched there.
    pub touched_bytes: Option<u64>,
    /// Their share of all private memory that was touched, 0 to 1.
    pub memory_share: Option<f64>,
    /// The share of the gain that the recording predicts for the set.
    pub predicted_gain_share: Option<f64>,
    /// The measured share of the gain of all memory on large pages, with its interval; none without trials.
    pub gain_share: Option<Ratio>,
    /// True if the set has at most a fifth of the memory and keeps nine tenths of the gain, as measured.
    pub is_found: bool,
    /// The reason why there is no set, or why the trials do not show its share.
    pub why_not: Option<String>,
    /// Runs of the command so far: the recording, those before the rounds, and those in rounds.
    pub run_count: u64,
}

impl PartsSearch {
    /// Judges the set by trials of it and of all memory on large pages. The interval of the share is
    /// conservative: it combines the ends of both ratios' intervals.
    pub fn judge(&mut self, trials: &[Trial], all: &str, basis: Basis) {
        if self.patterns.is_none() {
            return;
        }
        let named = |name: &str| trials.iter().find(|trial| trial.name == name);
        let Some(((set, all), gain)) =
            named(PARTS).zip(named(all)).and_then(|both| Some((both, both.1.speedup?)))
        else {
            self.why_not = Some("too few finished runs to compare".into());
            return;
        };
        let times: Vec<Vec<u64>> =
            trials.iter().map(|trial| basis.beyond_start_ns(trial)).collect();
        let (of_set, of_all) = (basis.beyond_start_ns(set), basis.beyond_start_ns(all));
        let slower =
            Stopping::Fixed.ratio(&of_set, &of_all, &times, trials.len().saturating_sub(1));
        if gain.low <= 1.0 {
            self.why_not = Some(format!(
                "no gain is shown to keep: with all memory on large pages it runs {gain} times as fast"
            ));
            return;
        }
        let Some(slower) = slower else { return };
        let share = |gain: f64, slower: f64| (gain - slower) / (gain - 1.0);
        let value = share(gain.value, slower.value);
        let ends = [share(gain.low, slower.high), share(gain.high, slower.low)];
        let (low, high) = (ends[0].min(value), ends[1].max(value));
        self.gain_share = Some(Ratio { value, low, high });
        let is_small = self.memory_share.is_some_and(|share| share <= MEMORY_SHARE_MAX);
        self.is_found = is_small && value >= GAIN_SHARE_MIN;
        self.why_not = (!self.is_found).then(|| {
            format!(
                "the best set of a fifth of its memory keeps {:.0} % of the gain ({:.0} to {:.0} %)",
                value * 100.0,
                low * 100.0,
                high * 100.0
            )
        });
    }

    /// Returns the result in a line.
    pub fn sentence(&self) -> String {
        let runs = self.run_count;
        match (&self.patterns, self.memory_share, self.gain_share, &self.why_not) {
            (Some(patterns), Some(memory), Some(gain), None) => format!(
                "parts: {patterns} is {:.0} % of its memory and keeps {:.0} % of the gain ({:.0} to {:.0} %); {runs} runs",
                memory * 100.0,
                gain.value * 100.0,
                gain.low * 100.0,
                gain.high * 100.0,
            ),
            (_, _, _, Some(why)) if self.predicted_gain_share.is_none() => {
                format!("parts: not searched: {why}; {runs} runs")
            }
            // The interval says how much three rounds can tell.
            (_, _, Some(gain), Some(why)) if gain.high >= GAIN_SHARE_MIN => {
                format!("parts: no such set is shown: {why}; {runs} runs")
            }
            (_, _, _, Some(why)) => format!("parts: there is no such set: {why}; {runs} runs"),
            _ => format!("parts: the trials do not show the set's share; {runs} runs"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::trial;
    use super::super::{AS_IS, compare_trials};
    use super::*;

    fn judged(parts_ms: u64, all_ms: u64, memory_share: f64) -> PartsSearch {
        let mut trials = vec![
            trial(AS_IS, 1_300, 100, 0.0),
            trial(PARTS, parts_ms, 100, 0.1),
            trial("thp-2M", all_ms, 100, 1.0),
        ];
        compare_trials(&mut trials, Stopping::Fixed, Basis::Elapsed);
        let mut search = PartsSearch {
            patterns: Some("heap@0-8M".into()),
            memory_share: Some(memory_share),
            run_count: 12,
            ..PartsSearch::default()
        };
        search.judge(&trials, "thp-2M", Basis::Elapsed);
        search
    }

    #[test]
    fn a_set_must_be_small_and_keep_the_gain() {
        let found = judged(1_015, 1_000, 0.1);
        assert!(found.is_found, "{found:?}");
        let share = found.gain_share.unwrap();
        assert!((share.value - 0.95).abs() < 0.01 && share.low < share.value, "{share:?}");
        assert!(found.sentence().contains("heap@0-8M is 10 % of its memory and keeps 95 %"));
        assert!(!judged(1_015, 1_000, 0.3).is_found, "too much memory");
        let half = judged(1_150, 1_000, 0.1);
        assert!(!half.is_found && half.sentence().contains("keeps 50 %"), "{}", half.sentence());
        let none = judged(1_300, 1_300, 0.1);
        assert!(none.sentence().contains("no gain is shown"), "{}", none.sentence());
        let gain_share = Some(Ratio { value: 0.8, low: -0.3, high: 1.2 });
        let open = PartsSearch { gain_share, predicted_gain_share: Some(0.9), ..none };
        assert!(open.sentence().starts_with("parts: no such set is shown"), "{}", open.sentence());
        let impossible = PartsSearch { why_not: Some("static".into()), ..PartsSearch::default() };
        assert_eq!(impossible.sentence(), "parts: not searched: static; 0 runs");
    }
}
