//! The CPU ledger: user time by translation; kernel time by sampled stacks or by fault counts.

use super::{Totals, Translation, derived};
use crate::measure::stacks::{Profile, StackCounts, Work};
use pagetax_core::budget::Ledger;
use pagetax_core::calibration::{Calibration, FaultKind, Spread};
use pagetax_core::counter::Reading;
use pagetax_core::shares::{clopper_pearson, wilson};

/// With fewer kernel stacks, rows say "too few samples" and have an exact interval.
pub(in crate::measure) const FEW_SAMPLES: u64 = 30;

/// Adds the rows of user time.
pub(super) fn user_rows(
    ledger: &mut Ledger,
    totals: &Totals,
    translation: &Translation,
    calibration: Option<&Calibration>,
) {
    let user_ns = totals.user_ns;
    let (reading, how) = translation.of_user_time(user_ns, calibration);
    let (value, low, high) = match reading {
        Reading::Derived { value, low, high } => (value, low, high),
        Reading::Measured(ns) | Reading::Modeled(ns) => (ns, ns, ns),
        Reading::Missing(_) => (0, 0, user_ns),
    };
    let compute = Reading::Derived {
        value: user_ns - value.min(user_ns),
        low: user_ns - high.min(user_ns),
        high: user_ns - low.min(user_ns),
    };
    ledger.row("compute", compute, "user time less translation");
    ledger.row("translation", reading, how);
}

/// Adds the rows of kernel time.
pub(super) fn kernel_rows(
    ledger: &mut Ledger,
    totals: &Totals,
    profile: &Profile,
    calibration: Option<&Calibration>,
) {
    match &profile.stacks {
        Ok(counts) if counts.kernel_count() > 0 => from_stacks(ledger, totals, counts, profile),
        Ok(_) if totals.kernel_ns == 0 => {
            for work in Work::ALL {
                ledger.row(work.row(), Reading::Measured(0), "no time in the kernel");
            }
        }
        Ok(_) => {
            from_faults(ledger, totals, calibration, "too short a time in the kernel to sample")
        }
        Err(why) => from_faults(ledger, totals, calibration, why),
    }
}

fn from_stacks(ledger: &mut Ledger, totals: &Totals, counts: &StackCounts, profile: &Profile) {
    let samples = counts.kernel_count();
    let lost = match profile.lost_count {
        0 => String::new(),
        lost => format!("; {lost} records were lost"),
    };
    let few = if samples < FEW_SAMPLES { "too few samples: " } else { "" };
    for (work, count) in Work::ALL.into_iter().zip(counts.work_counts) {
        let (low, high) = share_bounds(count, samples);
        let part = |share: f64| totals.kernel_ns as f64 * share;
        let value = part(count as f64 / samples as f64);
        let reading = derived(value, part(low), part(high), totals.kernel_ns);
        ledger.row(work.row(), reading, format!("{few}{count} of {samples} kernel stacks{lost}"));
    }
}

/// Returns the bounds of a share at a confidence of 95 %: exact ones for few samples.
pub(in crate::measure) fn share_bounds(count: u64, samples: u64) -> (f64, f64) {
    match samples < FEW_SAMPLES {
        true => clopper_pearson(count, samples),
        false => wilson(count, samples),
    }
}

/// Adds fault counts × this machine's calibration, capped at the time in the kernel. The rest of that
/// time stays unexplained.
fn from_faults(
    ledger: &mut Ledger,
    totals: &Totals,
    calibration: Option<&Calibration>,
    why_no_stacks: &str,
) {
    let missing = || Reading::Missing(format!("no kernel stacks: {why_no_stacks}"));
    let costs = calibration.and_then(|c| {
        // The peak of huge pages took one fault each.
        let huge_bytes = totals.huge_page_bytes_max.value().unwrap_or(0);
        FaultCosts::of(c, totals.minor_fault_count, huge_bytes / c.huge_page_bytes.max(1))
    });
    match costs {
        Some(costs) => {
            let [fault, zero_copy] = costs.capped(totals.kernel_ns);
            let how = format!(
                "{} minor faults × calibrated cost, at most the kernel's time",
                totals.minor_fault_count
            );
            ledger.row("minor_fault", fault, how.clone());
            ledger.row("zero_copy", zero_copy, how);
        }
        None => {
            let why = format!(
                "no kernel stacks ({why_no_stacks}) and no calibration of this machine \
                 (`pagetax calibrate` makes one)"
            );
            ledger.row("minor_fault", Reading::Missing(why.clone()), "");
            ledger.row("zero_copy", Reading::Missing(why), "");
        }
    }
    for row in ["reclaim", "compaction", "swap", "other_kernel"] {
        ledger.row(row, missing(), "");
    }
}

/// The cost of a job's minor faults by calibration, as (best, low, high) in nanoseconds. The kernel does
/// not count faults by kind. The best estimate assumes new anonymous pages, the low one pages of cached
/// files, the high one copies.
pub(in crate::measure) struct FaultCosts {
    fault: (f64, f64, f64),
    zero_copy: (f64, f64, f64),
}

impl FaultCosts {
    /// Returns the cost of so many faults, some of which got huge pages.
    pub(in crate::measure) fn of(
        calibration: &Calibration,
        fault_count: u64,
        huge_fault_count: u64,
    ) -> Option<FaultCosts> {
        let (base, huge) = (calibration.base_page_bytes, calibration.huge_page_bytes);
        let cost = |kind, bytes| calibration.fault(kind, bytes);
        let served = cost(FaultKind::ZeroRead, base)?;
        let anon = cost(FaultKind::AnonWrite, base)?;
        let low = cost(FaultKind::FileCachedRead, base).unwrap_or(served).low_ns.min(served.low_ns);
        let copy = cost(FaultKind::CowWrite, base).unwrap_or(anon);
        let huge_faults = huge_fault_count.min(fault_count) as f64;
        let base_faults = fault_count as f64 - huge_faults;
        let above = |s: Spread| (s.median_ns - served.median_ns).max(0.0);
        let per_huge = cost(FaultKind::AnonWrite, huge).map_or(0.0, above);
        let zeroing = base_faults * above(anon) + huge_faults * per_huge;
        let faults = base_faults + huge_faults;
        Some(FaultCosts {
            fault: (faults * served.median_ns, faults * low, faults * served.high_ns),
            zero_copy: (
                zeroing,
                huge_faults * per_huge,
                zeroing.max(base_faults * (copy.high_ns - served.low_ns) + huge_faults * per_huge),
            ),
        })
    }

    /// Returns both rows, scaled down in proportion if they exceed the time in the kernel.
    pub(in crate::measure) fn capped(&self, kernel_ns: u64) -> [Reading; 2] {
        let sum = self.fault.0 + self.zero_copy.0;
        let scale = if sum > kernel_ns as f64 { kernel_ns as f64 / sum } else { 1.0 };
        [self.fault, self.zero_copy].map(|(value, low, high)| {
            derived((value * scale).floor(), low * scale, high, kernel_ns)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::budget;
    use super::super::tests::{calibration, profile, totals};
    use super::*;
    use pagetax_core::cause::Account;
    use pagetax_core::counter::Provenance;

    #[test]
    fn without_stacks_faults_are_counted_and_the_rest_is_unexplained() {
        let mut no_stacks = profile();
        no_stacks.stacks = Err("perf_event_paranoid is 2".into());
        let c = calibration();
        let translation = Translation::WorkingSet(64 << 20);
        let b = budget(&totals(), &no_stacks, &translation, Some(&c));
        assert_eq!(b.row("minor_fault").unwrap().ns, Some(65_000_000));
        assert_eq!(b.row("zero_copy").unwrap().ns, Some(85_000_000));
        assert_eq!(b.unexplained_ns(Account::Cpu), 150_000_000);
        let reclaim = b.row("reclaim").unwrap();
        assert_eq!(reclaim.provenance, Provenance::Missing);
        assert!(reclaim.how.contains("paranoid"), "{}", reclaim.how);

        let b = budget(&totals(), &no_stacks, &translation, None);
        assert!(b.row("minor_fault").unwrap().how.contains("pagetax calibrate"));
        assert_eq!(b.unexplained_ns(Account::Cpu), 300_000_000);
    }

    #[test]
    fn counted_faults_never_exceed_the_kernels_time() {
        let mut no_stacks = profile();
        no_stacks.stacks = Err("not allowed".into());
        let short = Totals { kernel_ns: 15_000_000, ..totals() };
        let c = calibration();
        let b = budget(&short, &no_stacks, &Translation::WorkingSet(1 << 20), Some(&c));
        let ns = |id| b.row(id).unwrap().ns.unwrap();
        assert!(ns("minor_fault") + ns("zero_copy") <= 15_000_000);
        assert!(
            (0..10).contains(&b.unexplained_ns(Account::Cpu)),
            "{}",
            b.unexplained_ns(Account::Cpu)
        );
    }

    #[test]
    fn few_samples_are_named_and_widen_the_row() {
        let with = |counts: [u64; 6]| {
            let stacks = StackCounts { user_count: 60, work_counts: counts, unknown_count: 0 };
            let profile = Profile { stacks: Ok(stacks), ..profile() };
            budget(&totals(), &profile, &Translation::WorkingSet(64 << 20), None)
        };
        let few = with([16, 1, 0, 0, 0, 10]);
        let row = few.row("minor_fault").unwrap();
        assert_eq!(row.how, "too few samples: 16 of 27 kernel stacks");
        let enough = with([17, 2, 0, 0, 0, 11]);
        assert_eq!(enough.row("minor_fault").unwrap().how, "17 of 30 kernel stacks");
        let zeroing = few.row("zero_copy").unwrap();
        assert_eq!(zeroing.low_ns, Some(281_177), "Wilson's bound is 1.97 ms");
    }
}
