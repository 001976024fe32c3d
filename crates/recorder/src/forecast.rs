//! The time of a command with each page size, predicted from its pages, timed runs on base pages and this
//! machine's calibration.
//!
//! A page size saves walks, faults, filling and unmapping ([`Saved`]). The prediction subtracts them
//! from the time on base pages. Invariants: a prediction has a lower and an upper bound. A cost that the
//! calibration lacks is an error, not 0.

mod parts;
mod saving;
mod timing;

pub use parts::{AddressSet, BlockForecast, PartForecast, address_set};
pub use saving::{Bounded, Saved};
pub use timing::{Rounds, Timed, TimingError, time};

use crate::predict::{Faults, Predicted, Predictor, Walks};
use pagetax_core::address_pattern::AddressPart;
use pagetax_core::calibration::{Calibration, FaultKind, WalkPattern};
use pagetax_core::diagnosis::{Basis, Took, Trial};
use pagetax_core::stats::{Ratio, median};
use pagetax_core::units::{Bytes, Nanos, PageSize};

/// If the cost of walks differs from the calibration by this factor, a note asks for a new calibration.
const PACE_MAX: f64 = 2.0;

/// The calibration lacks the cost of a page size.
#[derive(Debug, thiserror::Error)]
#[error(
    "the calibration lacks the cost of {}: {}\n  hint: pagetax calibrate --allow-sysfs",
    Bytes(*page_bytes), kind.meaning()
)]
pub struct UnknownCost {
    kind: FaultKind,
    page_bytes: u64,
}

/// The prediction for one page size.
#[derive(Debug, Clone)]
pub struct Prediction {
    /// The page size of private memory.
    pub size: PageSize,
    /// The page walks with this page size.
    pub walks: Walks,
    /// First touches of private memory with it.
    pub faults: Faults,
    /// CPU time saved over base pages.
    pub saved: Saved,
    /// Elapsed time, where a run on base pages was timed.
    pub time_ns: Option<Bounded>,
    /// Time on base pages ÷ this time.
    pub speedup: Option<Bounded>,
    /// The measured speed-up, where trials ran on both sizes in turns.
    pub measured: Option<Ratio>,
    /// The trials' memory that was on such pages.
    pub took: Option<Took>,
}

impl Prediction {
    /// Returns the error of the predicted speed-up against the measured one, in percent.
    pub fn error_percent(&self) -> Option<f64> {
        Some((self.speedup?.value / self.measured?.value - 1.0) * 100.0)
    }
}

/// A command's time on base pages, and the prediction for each page size.
#[derive(Debug)]
pub struct Forecast {
    /// The command, or the trace.
    pub of: String,
    /// Median time on base pages.
    pub base_ns: Option<u64>,
    /// The time that this is, and that trials are compared by.
    pub basis: Basis,
    /// Translation on base pages.
    pub walks: Walks,
    /// First touches of private memory on base pages.
    pub faults: Faults,
    /// Cost of walks beside the runs ÷ their cost in the calibration, by pattern.
    pub paces: Vec<(WalkPattern, f64)>,
    /// Faults of all kinds in a run on base pages, minor and major; the median.
    pub measured_fault_count: Option<u64>,
    /// Predictions by page size.
    pub predictions: Vec<Prediction>,
    /// Parts of memory alone, if they were asked for.
    pub parts: Vec<PartForecast>,
    /// Blocks of 2 MiB of these parts.
    pub blocks: Vec<BlockForecast>,
    /// The loads and stores of the recording.
    pub access_count: u64,
    /// Limits of the prediction, for the reader.
    pub notes: Vec<String>,
}

impl Forecast {
    /// Predicts the time with each of `sizes`. `pages` has base pages first, then `sizes` in this order.
    /// `timed` holds base pages first, then `sizes` or nothing.
    ///
    /// # Errors
    /// The calibration lacks the fault costs of a size.
    pub fn new(
        of: String,
        sizes: &[PageSize],
        pages: &Predicted,
        calibration: &Calibration,
        timed: &Timed,
    ) -> Result<Forecast, UnknownCost> {
        let base = timed.trials.first().map(|trial| (trial, timed.basis));
        let walks = timed.beside.walks();
        let paces = walks.iter().filter_map(|now| Some((now.pattern, calibration.pace(now)?)));
        let mut forecast = Forecast {
            of,
            base_ns: base.and_then(|(trial, basis)| median(&basis.beyond_start_ns(trial))),
            basis: timed.basis,
            walks: pages.walks[0],
            faults: pages.faults[0],
            paces: paces.collect(),
            measured_fault_count: base.and_then(|(trial, _)| median(&trial.fault_counts)),
            predictions: Vec::new(),
            parts: Vec::new(),
            blocks: Vec::new(),
            access_count: pages.access_count,
            notes: calibration.warnings.iter().map(|w| format!("calibration: {w}")).collect(),
        };
        forecast.note_paces();
        let paced = timed.beside.pace(calibration);
        for (nth, size) in sizes.iter().enumerate() {
            let after = (pages.walks[nth + 1], pages.faults[nth + 1]);
            let error_ns = pages.sampling_error_ns.get(nth + 1).copied().unwrap_or(0.0);
            let mut prediction = forecast.predict(*size, after, error_ns, &paced, base)?;
            if let Some(trial) = timed.trials.get(nth + 1) {
                prediction.measured = trial.speedup_over_base;
                prediction.took = Some(trial.took.clone());
            }
            forecast.predictions.push(prediction);
        }
        Ok(forecast)
    }

    /// Adds the prediction by part, from a predictor by these parts.
    ///
    /// # Errors
    /// The calibration lacks the fault costs of the size.
    pub fn add_parts(
        &mut self,
        parts: &[AddressPart],
        pages: &mut Predictor,
        calibration: &Calibration,
        timed: &Timed,
    ) -> Result<(), UnknownCost> {
        let Some(size) = self.predictions.first().map(|prediction| prediction.size) else {
            return Ok(());
        };
        let paced = timed.beside.pace(calibration);
        (self.parts, self.blocks) =
            parts::predict(size, parts, pages, &paced, self.measured_fault_count)?;
        Ok(())
    }

    fn note_paces(&mut self) {
        if self.paces.iter().any(|(_, pace)| !(1.0 / PACE_MAX..PACE_MAX).contains(pace)) {
            self.notes.push(
                "page walks cost more or less than in the calibration: fragmentation of free memory has changed\n  hint: \
                 echo 1 > /proc/sys/vm/compact_memory (as root), then pagetax calibrate"
                    .into(),
            );
        }
    }

    fn predict(
        &mut self,
        size: PageSize,
        (walks, faults): (Walks, Faults),
        sampling_error_ns: f64,
        paced: &Calibration,
        base: Option<(&Trial, Basis)>,
    ) -> Result<Prediction, UnknownCost> {
        let mut saved = Saved::new(
            size,
            (self.walks, self.faults),
            (walks, faults),
            paced,
            self.measured_fault_count,
        )?;
        saved.walks.low -= sampling_error_ns;
        saved.walks.high += sampling_error_ns;
        let (time_ns, speedup) = match base.map(|base| with_time(saved.total(), base)) {
            Some(Ok((time, speedup))) => (Some(time), Some(speedup)),
            Some(Err(why)) => {
                self.notes.push(format!("{size}: {why}"));
                (None, None)
            }
            None => (None, None),
        };
        Ok(Prediction { size, walks, faults, saved, time_ns, speedup, measured: None, took: None })
    }
}

/// Returns time and speed-up if runs save this much CPU time, or the reason for no prediction. Elapsed
/// time shrinks in proportion to CPU time, since threads save at the same time.
fn with_time(
    saved: Bounded,
    (trial, basis): (&Trial, Basis),
) -> Result<(Bounded, Bounded), String> {
    let base_ns = median(&basis.beyond_start_ns(trial)).ok_or("nothing was timed")? as f64;
    let cpu_ns = match basis {
        Basis::Cpu => base_ns,
        _ => median(&trial.cpu_ns().collect::<Vec<_>>()).unwrap_or(0) as f64,
    };
    if saved.value >= cpu_ns {
        return Err(format!(
            "walks and faults are modelled as {} of {} of CPU time: no prediction\n  hint: pagetax \
             calibrate, when the machine is quiet",
            Nanos(saved.value as u64),
            Nanos(cpu_ns as u64)
        ));
    }
    let at_a_time = (cpu_ns / base_ns).max(1.0);
    // A bound that saves all CPU time leaves no time: it is not a bound.
    let less = |saved_ns: f64| match saved_ns < cpu_ns {
        true => (base_ns - saved_ns / at_a_time).max(0.0),
        false => 0.0,
    };
    let time = Bounded { value: less(saved.value), low: less(saved.high), high: less(saved.low) };
    let speedup =
        Bounded { value: base_ns / time.value, low: base_ns / time.high, high: base_ns / time.low };
    Ok((time, speedup))
}
