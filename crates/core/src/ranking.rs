//! All processes of a machine, ranked by what virtual memory costs them: pages touched in a short window ×
//! the calibrated price of a walk, plus faults × their calibrated price.
//!
//! Invariant: a figure that nobody measured is missing with its reason. It is never 0.

use crate::calibration::{Calibration, FaultKind, WalkPattern};
use crate::counter::{Reading, Unit, UnitReading};
use crate::document::Document;
use serde::{Deserialize, Serialize};

/// The processes of a machine, the one with the largest tax first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Ranking {
    /// The interval in which CPU times and faults were counted, in nanoseconds.
    pub elapsed_ns: u64,
    /// The number of CPUs online.
    pub cpu_count: u32,
    /// The CPU time that this machine takes to set an accessed bit. Estimates leave it out.
    pub mark_ns: f64,
    /// The method.
    pub how: String,
    /// The processes, by [`RankedProcess::key_ns`].
    pub processes: Vec<RankedProcess>,
}

impl Document for Ranking {
    const KIND: &'static str = "ranking";
}

/// A process, with the figures that its rank follows from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RankedProcess {
    /// The process.
    pub pid: u32,
    /// Its name.
    pub name: String,
    /// The user that it runs as: a name, or else a number.
    pub user: String,
    /// Its CPU time in the interval.
    pub cpu_ns: UnitReading,
    /// Its page faults in the interval.
    pub fault_count: UnitReading,
    /// Its resident memory.
    pub resident_bytes: UnitReading,
    /// The part of it on base pages.
    pub base_bytes: UnitReading,
    /// The base pages that it touched in the window, in bytes.
    pub touched_bytes: UnitReading,
    /// Its CPU time in the window.
    pub window_cpu_ns: UnitReading,
    /// The tax in the interval: the estimate, with bounds.
    pub tax_ns: UnitReading,
    /// The largest tax that it can have paid in the interval.
    pub tax_ns_max: UnitReading,
    /// The estimate as a share of its CPU time, from 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tax_share: Option<f64>,
}

impl RankedProcess {
    /// Returns the time that it is ranked by: the estimate, or else the bound.
    pub fn key_ns(&self) -> Option<u64> {
        self.tax_ns.value.or(self.tax_ns_max.value)
    }
}

impl Ranking {
    /// Sorts the processes. Those without any figure come last.
    pub fn sort(&mut self) {
        self.processes.sort_by_key(|process| {
            (std::cmp::Reverse(process.key_ns()), std::cmp::Reverse(process.cpu_ns.value))
        });
    }

    /// Returns the first process with an estimate, which `pagetax diagnose -p` can look at.
    pub fn first(&self) -> Option<&RankedProcess> {
        self.processes.iter().find(|process| process.tax_ns.value.is_some_and(|ns| ns > 0))
    }
}

/// The counters of a process over the interval.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessInterval {
    /// The CPU time in user mode.
    pub user_ns: u64,
    /// The CPU time in the kernel.
    pub kernel_ns: u64,
    /// The page faults.
    pub fault_count: u64,
    /// The resident bytes at its end.
    pub resident_bytes: u64,
}

/// A short time between two looks at the accessed bits of a process.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TouchWindow {
    /// The CPU time of the process, less half of the time of both looks.
    pub cpu_ns: u64,
    /// Bytes on base pages.
    pub base_bytes: u64,
    /// Bytes on base pages that were touched.
    pub touched_bytes: u64,
    /// The time that the processor takes to set an accessed bit. It is part of `cpu_ns`.
    pub mark_ns: f64,
}

/// The part of the window's CPU time that is left, at least, once accessed bits are set. Setting them
/// varies by more.
const REST_MIN: f64 = 0.05;
/// The part of the pages that a window can touch at most before accesses can no longer be estimated.
const TOUCHED_MAX: f64 = 0.95;

impl TouchWindow {
    /// Returns the CPU time between accesses to pages at random, in nanoseconds. A page that is accessed
    /// twice counts once in the window: n accesses to N pages touch N × (1 − e^(−n/N)) of them.
    pub fn access_ns(&self, page_bytes: u64) -> f64 {
        let pages = |bytes: u64| bytes as f64 / page_bytes as f64;
        let all = pages(self.base_bytes).max(1.0);
        let touched = pages(self.touched_bytes).min(all * TOUCHED_MAX);
        let accesses = -all * (1.0 - touched / all).ln();
        let cpu_ns = self.cpu_ns as f64;
        let rest_ns = (cpu_ns - pages(self.touched_bytes) * self.mark_ns).max(cpu_ns * REST_MIN);
        rest_ns / accesses.max(1e-9)
    }

    /// Returns the share of user time that walks take: the estimate, the lower and the upper bound.
    ///
    /// Accesses that come faster than a chain of dependent loads allows overlap their walks. Those that come
    /// much slower read in order, or compute.
    pub fn walk_share(&self, calibration: &Calibration) -> Option<(f64, f64, f64)> {
        let access_ns = self.access_ns(calibration.base_page_bytes);
        let part = |pattern, bytes| {
            let extra = calibration.walk_extra(pattern, bytes)?;
            let base_ns = calibration.walk_base(pattern, bytes)?.median_ns.max(1.0);
            let slowest_ns = access_ns.max(base_ns);
            Some((base_ns, extra.median_ns / slowest_ns, extra.high_ns / slowest_ns))
        };
        let (fast_ns, overlapped, _) = part(WalkPattern::Independent, self.base_bytes)?;
        let (slow_ns, dependent, dependent_high) = part(WalkPattern::Dependent, self.base_bytes)?;
        let weight = match access_ns {
            ns if ns <= fast_ns || slow_ns <= fast_ns => 0.0,
            ns if ns <= slow_ns => (ns - fast_ns) / (slow_ns - fast_ns),
            ns => slow_ns / ns,
        };
        let value = overlapped + weight * (dependent - overlapped).max(0.0);
        let (_, low, _) = part(WalkPattern::Independent, self.touched_bytes)?;
        // Fewer pages that are touched more often look alike.
        let high = dependent_high.max(calibration.walk_share_max(self.touched_bytes)?);
        Some((value.min(1.0), low.min(value), high.clamp(value, 1.0)))
    }
}

impl ProcessInterval {
    fn faults_ns(&self, calibration: &Calibration) -> Option<(f64, f64, f64)> {
        let fault = |kind| calibration.fault(kind, calibration.base_page_bytes);
        let anon = fault(FaultKind::AnonWrite)?;
        let cached = fault(FaultKind::FileCachedRead).unwrap_or(anon);
        let copied = fault(FaultKind::CowWrite).unwrap_or(anon);
        let most_ns = self.kernel_ns as f64;
        let price = |ns: f64| (self.fault_count as f64 * ns).min(most_ns);
        Some((price(anon.median_ns), price(cached.low_ns), price(copied.high_ns)))
    }

    /// Returns the estimate of the tax and the bound.
    ///
    /// # Arguments
    /// * `window`: the pages touched, or the reason why nobody looked at them.
    pub fn tax(
        &self,
        window: &Result<TouchWindow, String>,
        calibration: &Calibration,
    ) -> (Reading, Reading) {
        let lacking = || Reading::Missing("the calibration lacks this cost".into());
        let faults = self.faults_ns(calibration);
        let most = calibration.walk_share_max(self.resident_bytes);
        let (Some((fault, fault_low, fault_high)), Some(most)) = (faults, most) else {
            return (lacking(), lacking());
        };
        let user_ns = self.user_ns as f64;
        let all_ns = self.user_ns + self.kernel_ns;
        let reading = |value: f64, low: f64, high: f64| {
            let ns = |ns: f64| (ns.max(0.0).round() as u64).min(all_ns);
            Reading::Derived {
                value: ns(value),
                low: ns(low.min(value)),
                high: ns(high.max(value)),
            }
        };
        let window = match window {
            Ok(window) => window,
            Err(why) => {
                let bound = user_ns * most + fault_high;
                return (Reading::Missing(why.clone()), reading(bound, fault_low, bound));
            }
        };
        let Some((share, low, high)) = window.walk_share(calibration) else {
            return (lacking(), lacking());
        };
        let high_ns = user_ns * high + fault_high;
        let (value, low) = (user_ns * share + fault, user_ns * low + fault_low);
        (reading(value, low, high_ns), reading(high_ns, low, high_ns))
    }

    /// Returns the same for a process whose resident memory the TLB can hold.
    pub fn small_tax(&self, calibration: &Calibration) -> (Reading, Reading) {
        let window = TouchWindow {
            cpu_ns: self.user_ns.max(1),
            base_bytes: self.resident_bytes,
            touched_bytes: 0,
            mark_ns: 0.0,
        };
        self.tax(&Ok(window), calibration)
    }
}

/// The figures of a process before they make a row.
#[derive(Debug, Clone, PartialEq)]
pub struct ProcessFigures {
    /// The process.
    pub pid: u32,
    /// Its name.
    pub name: String,
    /// The user that it runs as.
    pub user: String,
    /// Its counters.
    pub interval: Result<ProcessInterval, String>,
    /// Its touched pages.
    pub window: Result<TouchWindow, String>,
    /// True if its memory is so small that the window is not needed.
    pub is_small: bool,
}

impl ProcessFigures {
    /// Makes its row.
    pub fn row(self, calibration: &Calibration) -> RankedProcess {
        let of_interval = |unit, of: fn(&ProcessInterval) -> u64| {
            let value = self.interval.as_ref().map(of).map_err(String::clone);
            UnitReading::new(unit, value.map_or_else(Reading::Missing, Reading::Measured))
        };
        let of_window = |unit, of: fn(&TouchWindow) -> u64| {
            let value = self.window.as_ref().map(of).map_err(String::clone);
            UnitReading::new(unit, value.map_or_else(Reading::Missing, Reading::Measured))
        };
        let (tax, tax_max) = match &self.interval {
            Ok(interval) if self.is_small => interval.small_tax(calibration),
            Ok(interval) => interval.tax(&self.window, calibration),
            Err(why) => (Reading::Missing(why.clone()), Reading::Missing(why.clone())),
        };
        let cpu_ns = of_interval(Unit::Ns, |interval| interval.user_ns + interval.kernel_ns);
        let share = |ns: u64| Some(ns as f64 / cpu_ns.value.filter(|ns| *ns > 0)? as f64);
        RankedProcess {
            tax_share: tax.value().and_then(share),
            fault_count: of_interval(Unit::Count, |interval| interval.fault_count),
            resident_bytes: of_interval(Unit::Bytes, |interval| interval.resident_bytes),
            base_bytes: of_window(Unit::Bytes, |window| window.base_bytes),
            touched_bytes: of_window(Unit::Bytes, |window| window.touched_bytes),
            window_cpu_ns: of_window(Unit::Ns, |window| window.cpu_ns),
            tax_ns: UnitReading::new(Unit::Ns, tax),
            tax_ns_max: UnitReading::new(Unit::Ns, tax_max),
            cpu_ns,
            pid: self.pid,
            name: self.name,
            user: self.user,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calibration::{
        CALIBRATION_VERSION, FaultCost, Identity, Spread, WalkCost, WalkPattern::*,
    };
    use crate::counter::Provenance;

    const MIB: u64 = 1 << 20;
    const SECOND: u64 = 1_000_000_000;

    /// Returns the calibration of a 2-core Xeon guest.
    fn calibration() -> Calibration {
        let spread = |median_ns: f64| Spread {
            median_ns,
            low_ns: median_ns * 0.9,
            high_ns: median_ns * 1.1,
            repetitions: 5,
        };
        let walk = |pattern, mib: u64, base: f64, huge: f64| WalkCost {
            pattern,
            working_set_bytes: mib * MIB,
            base: spread(base),
            huge: spread(huge),
            extra: spread(base - huge),
        };
        let fault =
            |kind, ns| FaultCost { kind, page_bytes: 4096, cost: Some(spread(ns)), why: None };
        Calibration {
            version: CALIBRATION_VERSION,
            identity: Identity {
                cpu_model: "Xeon".into(),
                cpu_count: 2,
                kernel: "6.18".into(),
                memory_bytes: 24 << 30,
                hypervisor: "kvm".into(),
                page_table_isolation: false,
            },
            quick: true,
            taken_unix_s: 0,
            took_ns: 0,
            base_page_bytes: 4096,
            huge_page_bytes: 2 << 20,
            faults: vec![
                fault(FaultKind::AnonWrite, 1_877.0),
                fault(FaultKind::FileCachedRead, 284.0),
                fault(FaultKind::CowWrite, 4_180.0),
            ],
            walks: vec![
                walk(Dependent, 4, 42.7, 44.4),
                walk(Dependent, 16, 126.1, 105.1),
                walk(Dependent, 64, 157.8, 127.6),
                walk(Dependent, 256, 212.1, 142.6),
                walk(Independent, 4, 21.4, 21.5),
                walk(Independent, 16, 48.2, 43.0),
                walk(Independent, 64, 59.7, 53.5),
                walk(Independent, 256, 73.4, 59.1),
            ],
            tlbs: vec![],
            base_reach: None,
            notes: Vec::new(),
            warnings: Vec::new(),
        }
    }

    /// Returns the figures of a process that had a second of CPU time.
    fn process(pid: u32, base_mib: u64, window: Result<TouchWindow, String>) -> ProcessFigures {
        let interval = ProcessInterval {
            user_ns: SECOND,
            kernel_ns: 0,
            fault_count: 0,
            resident_bytes: base_mib * MIB,
        };
        ProcessFigures {
            pid,
            name: pid.to_string(),
            user: "root".into(),
            interval: Ok(interval),
            window,
            is_small: false,
        }
    }

    fn window(cpu_ns: u64, base_mib: u64, touched_pages: u64) -> Result<TouchWindow, String> {
        let (base_bytes, touched_bytes) = (base_mib * MIB, touched_pages * 4096);
        Ok(TouchWindow { cpu_ns, base_bytes, touched_bytes, mark_ns: 338.0 })
    }

    fn ranked(figures: Vec<ProcessFigures>) -> Vec<RankedProcess> {
        let calibration = calibration();
        let processes = figures.into_iter().map(|figures| figures.row(&calibration)).collect();
        let mut ranking =
            Ranking { elapsed_ns: SECOND, cpu_count: 2, mark_ns: 338.0, how: "".into(), processes };
        ranking.sort();
        ranking.processes
    }

    #[test]
    fn captured_windows_rank_random_before_sequential_before_computing() {
        let mut faulting = process(5, 64, window(5_395_755, 50, 3_336));
        let interval = faulting.interval.as_mut().unwrap();
        (interval.kernel_ns, interval.user_ns) = (SECOND * 9 / 10, SECOND / 10);
        interval.fault_count = 500_000;
        let rows = ranked(vec![
            process(1, 513, window(6_435_088, 513, 4)),
            process(2, 65, window(5_455_265, 65, 6_717)),
            process(3, 257, window(7_674_612, 257, 16_100)),
            faulting,
            process(6, 513, window(8_296_430, 513, 5_318)),
        ]);
        let pids: Vec<u32> = rows.iter().map(|row| row.pid).collect();
        assert_eq!(pids, [5, 3, 2, 6, 1]);
        assert!(rows[1].tax_share.unwrap() > 0.15, "{:?}", rows[1]);
        assert!(rows[3].tax_share.unwrap() < 0.1 && rows[4].tax_share.unwrap() < 0.001);
        for row in &rows {
            let tax = &row.tax_ns;
            assert!(tax.low <= tax.value && tax.value <= tax.high, "{row:?}");
            assert_eq!(tax.high, row.tax_ns_max.value);
            assert!(tax.high <= row.cpu_ns.value);
        }
    }

    #[test]
    fn a_process_that_cannot_be_looked_at_has_a_bound_and_its_reason() {
        let why = "/proc/7/clear_refs: Permission denied";
        let mut gone = process(8, 1, Err("it ended".into()));
        gone.interval = Err("it ended".into());
        let rows = ranked(vec![gone, process(7, 256, Err(why.into()))]);
        assert_eq!((rows[0].pid, rows[0].tax_ns.why.as_deref()), (7, Some(why)));
        let bound = rows[0].tax_ns_max.value.unwrap() as f64 / SECOND as f64;
        assert!((0.3..0.4).contains(&bound), "{bound}");
        assert_eq!((rows[0].touched_bytes.value, rows[0].tax_share), (None, None));
        let gone = &rows[1];
        assert!(gone.key_ns().is_none() && gone.cpu_ns.provenance == Provenance::Missing);
    }

    #[test]
    fn small_memory_pays_for_faults_only() {
        let mut small = process(1, 2, Err("small".into()));
        small.is_small = true;
        let interval = small.interval.as_mut().unwrap();
        (interval.kernel_ns, interval.fault_count) = (SECOND, 100_000);
        let rows = ranked(vec![small]);
        assert_eq!(rows[0].tax_ns.value, Some(187_700_000));
        assert_eq!(rows[0].touched_bytes.value, None);
    }

    #[test]
    fn accesses_count_more_than_pages_once_most_are_touched() {
        // Half of all pages: ln 2 × all accesses.
        let half = TouchWindow { mark_ns: 0.0, ..window(1_000_000, 8, 1_024).unwrap() };
        assert!(
            (half.access_ns(4096) - 1_000_000.0 / (2_048.0 * std::f64::consts::LN_2)).abs() < 0.01
        );
        let all = TouchWindow { mark_ns: 1_000.0, ..window(1_000_000, 8, 2_048).unwrap() };
        assert!(all.access_ns(4096).is_finite() && all.access_ns(4096) > 0.0);
        let none = TouchWindow { touched_bytes: 0, base_bytes: 0, ..half };
        assert_eq!(none.walk_share(&calibration()).unwrap().0, 0.0);
    }
}
