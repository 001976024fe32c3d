//! The part of user time that translation takes. The best available source counts: PMU counters, trials,
//! a recording, the plan's accesses, or a bound.

use super::derived;
use crate::measure::tlb_events::{Counts, Family, walk_share};
use pagetax_core::calibration::{Calibration, WalkPattern};
use pagetax_core::counter::Reading;
use pagetax_core::plan::{AccessClass, AccessKind};

/// The source of a job's translation time.
#[derive(Debug, Clone, PartialEq)]
pub enum Translation {
    /// PMU counters: the share of user cycles during which a page walk was active, 0 to 1.
    Counted {
        /// The share of user time, from 0 to 1.
        share: f64,
        /// The CPU family whose events were counted.
        family: String,
    },
    /// Trials: the share of user time that other page sizes saved, 0 to 1, with its interval.
    Trial {
        /// The lower bound of the share.
        share_low: f64,
        /// The best estimate of the share.
        share: f64,
        /// The upper bound of the share.
        share_high: f64,
    },
    /// A recording of the same command: its walks × their calibrated cost, in nanoseconds.
    Recorded {
        /// The lower bound of the time.
        low_ns: f64,
        /// The best estimate of the time.
        ns: f64,
        /// The upper bound of the time.
        high_ns: f64,
    },
    /// The plan's accesses, × the calibrated cost of each.
    Accesses(Vec<AccessClass>),
    /// The working set in bytes, which gives an upper bound only.
    WorkingSet(u64),
    /// No source; the text shows why.
    Unknown(String),
}

impl Translation {
    fn rank(&self) -> u32 {
        match self {
            Translation::Counted { .. } => 0,
            Translation::Trial { .. } => 1,
            Translation::Recorded { .. } => 2,
            Translation::Accesses(_) => 3,
            Translation::WorkingSet(_) => 4,
            Translation::Unknown(_) => 5,
        }
    }

    /// Returns the best of these sources; of two equal ones, the first.
    pub fn best(sources: impl IntoIterator<Item = Translation>) -> Translation {
        let best = sources.into_iter().min_by_key(Translation::rank);
        best.unwrap_or_else(|| Translation::Unknown("nothing was looked at".into()))
    }

    /// Returns the translation share from counts. The error names the family if an event was not counted.
    pub fn of_counts(family: &Family, counts: &[Counts]) -> Result<Translation, String> {
        let share = walk_share(family, counts)
            .ok_or_else(|| format!("not all events of {} could be counted", family.name))?;
        Ok(Translation::Counted { share, family: family.name.clone() })
    }

    /// Returns the row's reading and its method.
    pub(super) fn of_user_time(
        &self,
        user_ns: u64,
        calibration: Option<&Calibration>,
    ) -> (Reading, String) {
        let part = |share: f64| user_ns as f64 * share;
        let calibrated = || {
            calibration.ok_or(
                "no PMU, no trials, and no calibration of this machine; `pagetax \
                               calibrate` makes one, `pagetax diagnose` makes trials",
            )
        };
        let reading = match self {
            Translation::Unknown(why) => Err(why.as_str()),
            Translation::Counted { share, family } => {
                let how = format!(
                    "PMU: cycles with a page walk at work, {family}; upper bound: \
                                   other work goes on during some"
                );
                return (Reading::Measured((part(*share).round() as u64).min(user_ns)), how);
            }
            Translation::Recorded { low_ns, ns, high_ns } => Ok((
                derived(*ns, *low_ns, *high_ns, user_ns),
                "recorder: walks of a trace × calibrated cost of each".to_string(),
            )),
            Translation::Trial { share_low, share, share_high } => Ok((
                derived(part(*share), part(*share_low), part(*share_high), user_ns),
                "live trial: saved by huge pages".to_string(),
            )),
            Translation::Accesses(classes) => calibrated().map(|calibration| {
                let (value, low, high) = modelled(classes, calibration);
                let how = "model: accesses × calibrated cost of a walk".to_string();
                (derived(value, low, high, user_ns), how)
            }),
            Translation::WorkingSet(bytes) => calibrated().and_then(|calibration| {
                let most = calibration.walk_share_max(*bytes).ok_or("no calibrated walks")?;
                let how = "model, a bound: a pure pointer chase over as much memory \
                           would spend the upper end; trials (`pagetax diagnose`) tell"
                    .to_string();
                Ok((derived(0.0, 0.0, part(most), user_ns), how))
            }),
        };
        reading.unwrap_or_else(|why| (Reading::Missing(why.into()), String::new()))
    }
}

/// Returns the best estimate, the lower and the upper bound, in nanoseconds.
fn modelled(classes: &[AccessClass], calibration: &Calibration) -> (f64, f64, f64) {
    let mut sum = (0.0, 0.0, 0.0);
    for class in classes {
        let pattern = match class.kind {
            AccessKind::Dependent => WalkPattern::Dependent,
            _ => WalkPattern::Independent,
        };
        let Some(extra) = calibration.walk_extra(pattern, class.working_set_bytes) else {
            continue;
        };
        let (value, low) = match class.kind {
            AccessKind::Sweep => (0.0, 0.0),
            AccessKind::Skewed => (extra.median_ns, 0.0),
            AccessKind::Independent | AccessKind::Dependent => (extra.median_ns, extra.low_ns),
        };
        let count = class.count as f64;
        sum.0 += count * value;
        sum.1 += count * low;
        sum.2 += count * extra.high_ns;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::super::tests::calibration;
    use super::*;
    use crate::measure::tlb_events::{Counted, Role};
    use crate::sys::perf::Scaled;
    use pagetax_core::trapstat::Mode;

    const SET: u64 = 64 << 20;

    #[test]
    fn trials_beat_models_and_both_stay_within_user_time() {
        let trial = Translation::Trial { share_low: 0.1, share: 0.2, share_high: 1.5 };
        let (reading, _) = trial.of_user_time(1_000, None);
        assert_eq!(reading, Reading::Derived { value: 200, low: 100, high: 1_000 });
        let class =
            AccessClass { kind: AccessKind::Dependent, working_set_bytes: SET, count: 1_000 };
        let model = Translation::Accesses(vec![class]);
        let (reading, how) = model.of_user_time(100_000, Some(&calibration()));
        assert_eq!(reading, Reading::Derived { value: 24_000, low: 21_000, high: 27_000 });
        assert!(how.contains("model"), "{how}");
        let (capped, _) = model.of_user_time(10_000, Some(&calibration()));
        assert_eq!(capped, Reading::Derived { value: 10_000, low: 10_000, high: 10_000 });
    }

    /// Returns the counts of a CPU with this many cycles, and walks active in this many of them.
    fn counted(family: &Family, cycles: u64, walks: u64) -> Vec<Counts> {
        let data_walks = family.events().iter().filter(|e| e.role == Role::DataCycles).count();
        let value = |counted: &Counted| {
            let value = match counted.role {
                Role::Cycles => cycles,
                // Loads and stores may have an event each.
                Role::DataCycles => walks / data_walks as u64,
                _ => 0,
            };
            // Another event had the counter for half of the time.
            Some(Scaled { value: value / 2, enabled_ns: 1_000, running_ns: 500 })
        };
        let values: Vec<_> = family.events().iter().map(value).collect();
        let kernel = Counts { cpu: 0, mode: Mode::Kernel, values: values.clone() };
        vec![Counts { cpu: 0, mode: Mode::User, values }, kernel]
    }

    #[test]
    fn counters_beat_trials_and_say_whose_they_are() {
        let families = Family::all().unwrap();
        let family = families.iter().find(|family| family.has_cycles()).unwrap();
        let pmu = Translation::of_counts(family, &counted(family, 4_000, 1_000)).unwrap();
        let trial = Translation::Trial { share_low: 0.1, share: 0.2, share_high: 0.3 };
        let recorded = Translation::Recorded { low_ns: 100.0, ns: 300.0, high_ns: 9_000.0 };
        let bound = Translation::WorkingSet(SET);
        let sources = [bound.clone(), recorded.clone(), trial.clone(), pmu.clone()];
        let mut of = Vec::new();
        for known in (1..=sources.len()).rev() {
            let best = Translation::best(sources[..known].to_vec());
            let (reading, how) = best.of_user_time(1_000, Some(&calibration()));
            of.push((reading, how.split([':', ',']).next().unwrap().to_string()));
        }
        let derived = |value, low, high| Reading::Derived { value, low, high };
        assert_eq!(of[0], (Reading::Measured(250), "PMU".into()));
        assert_eq!(of[1], (derived(200, 100, 300), "live trial".into()));
        assert_eq!(of[2], (derived(300, 100, 1_000), "recorder".into()));
        assert_eq!(of[3].1, "model");
        assert!(matches!(Translation::best([]), Translation::Unknown(_)));
    }

    #[test]
    fn counters_that_do_not_count_are_no_source() {
        let families = Family::all().unwrap();
        let with = families.iter().find(|family| family.has_cycles()).unwrap();
        let mut counts = counted(with, 4_000, 1_000);
        counts[0].values.fill(None);
        assert!(Translation::of_counts(with, &counts).unwrap_err().contains(&with.name));
        assert!(Translation::of_counts(with, &counted(with, 0, 0)).is_err());
        if let Some(without) = families.iter().find(|family| !family.has_cycles()) {
            assert!(Translation::of_counts(without, &counted(without, 4_000, 0)).is_err());
        }
    }

    #[test]
    fn a_bound_has_no_lower_end_and_no_source_is_missing() {
        let (reading, _) = Translation::WorkingSet(SET).of_user_time(32_000, Some(&calibration()));
        let Reading::Derived { value: 0, low: 0, high } = reading else { panic!("{reading:?}") };
        assert!((24_000..=27_000).contains(&high), "{high}");
        let (reading, _) = Translation::WorkingSet(SET).of_user_time(32_000, None);
        assert!(matches!(reading, Reading::Missing(why) if why.contains("pagetax calibrate")));
    }
}
