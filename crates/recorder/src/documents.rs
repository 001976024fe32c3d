//! The JSON documents of commands that record: `trapstat`, `misscurve` and `whatif`.

use crate::counters::Side;
use crate::curves::Curves;
use crate::forecast::{BlockForecast, Bounded, Forecast, PartForecast, Prediction};
use crate::heatmap::HeatmapCounts;
use crate::known_tlbs::{KnownTlb, known_tlbs};
use crate::predict::{Faults, Walks};
use crate::profile::Profile;
use pagetax_core::calibration::WalkPattern;
use pagetax_core::counter::Provenance;
use pagetax_core::diagnosis::{Basis, Took};
use pagetax_core::document::Document;
use pagetax_core::trapstat::Listing;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// TLB misses by interval, page size and mode, and the code and memory that they belong to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Trapstat {
    /// `perf`, `ibs` or `record`.
    pub backend: String,
    /// The reason why this backend was chosen.
    pub why: String,
    /// The listings in order of time.
    pub listings: Vec<Listing>,
    /// A profile for each machine and page policy.
    pub profiles: Vec<Profile>,
    /// Limits of the numbers, for the reader.
    pub notes: Vec<String>,
    /// The elapsed time of the run under the backend.
    pub wall_ns: u64,
    /// The exit code of the command, as a shell has it.
    pub exit: u8,
}

impl Document for Trapstat {
    const KIND: &'static str = "trapstat";
}

/// The numbers of TLB entries that curves are given at: those of real TLBs, and some beyond.
const ENTRIES: &[u64] =
    &[16, 32, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 8192, 16_384, 65_536];

/// The TLB misses of a program for all TLB sizes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct MissCurves {
    /// The command or the trace.
    pub of: String,
    /// The exit code of the command, as a shell has it.
    pub exit: u8,
    /// The provenance of all counts of misses.
    pub provenance: Provenance,
    /// The accesses that are counted.
    pub side: Side,
    /// The counted accesses of all threads.
    pub access_count: u64,
    /// Threads that made accesses.
    pub thread_count: usize,
    /// Accesses of each interval of the working set.
    pub interval_access_count: u64,
    /// The miss curves, one for each page size.
    pub curves: Vec<MissCurve>,
    /// Page changes by time and address. Absent in documents of an earlier pagetax.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heatmap: Option<HeatmapCounts>,
    /// The second-level data TLBs of known CPUs, with their misses if they were fully associative.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub known_tlbs: Vec<KnownTlb>,
}

/// The TLB misses with one page size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct MissCurve {
    /// The page size of the curve in bytes.
    pub page_bytes: u64,
    /// False if only a sample of pages was followed.
    pub is_exact: bool,
    /// Pages that were touched, summed over threads.
    pub page_count: u64,
    /// Misses of fully associative LRU TLBs.
    pub misses: Vec<MissPoint>,
    /// The TLB that holds the wanted share of translations.
    pub reach: Reach,
    /// Pages that were used in each interval.
    pub working_set_page_counts: Vec<u64>,
}

/// A point of a curve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct MissPoint {
    /// The number of entries of the TLB.
    pub entries: u64,
    /// Accesses that it could not translate.
    pub tlb_miss_count: u64,
}

/// The fewest entries that translate a share of all accesses.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Reach {
    /// The share of accesses, in percent.
    pub percent: f64,
    /// The entries; absent where first touches miss more.
    pub entries: Option<u64>,
}

impl Document for MissCurves {
    const KIND: &'static str = "misscurve";
}

impl MissCurves {
    /// Returns finished curves as a document. `reach_percent` of accesses shall find their translation.
    pub fn new(
        curves: &Curves,
        (of, exit): (String, u8),
        side: Side,
        interval_access_count: u64,
        reach_percent: f64,
    ) -> MissCurves {
        let curve = |(nr, size): (usize, &pagetax_core::units::PageSize)| MissCurve {
            page_bytes: size.bytes(),
            is_exact: curves.is_exact(nr),
            page_count: curves.pages(nr),
            misses: ENTRIES
                .iter()
                .map(|&entries| MissPoint { entries, tlb_miss_count: curves.misses(nr, entries) })
                .collect(),
            reach: Reach {
                percent: reach_percent,
                entries: curves.entries_for(nr, 1.0 - reach_percent / 100.0),
            },
            working_set_page_counts: curves.working_sets().iter().map(|pages| pages[nr]).collect(),
        };
        // They are TLBs of data.
        let sizes = if side == Side::Data { curves.page_sizes() } else { &[] };
        let known = sizes
            .iter()
            .enumerate()
            .flat_map(|(nr, size)| known_tlbs(*size, |entries| curves.misses(nr, entries)))
            .collect();
        MissCurves {
            of,
            exit,
            provenance: Provenance::Modeled,
            side,
            access_count: curves.accesses(),
            thread_count: curves.threads(),
            interval_access_count,
            curves: curves.page_sizes().iter().enumerate().map(curve).collect(),
            heatmap: Some(curves.heatmap().counts()),
            known_tlbs: known,
        }
    }
}

/// The predicted time of a command with each page size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WhatIf {
    /// The command or the trace.
    pub of: String,
    /// The exit code of the runs that were timed; absent for a trace.
    pub exit: Option<u8>,
    /// The loads and stores of the recording.
    pub access_count: u64,
    /// Cost of walks beside the runs ÷ their cost in the calibration.
    pub walk_paces: Vec<WalkPace>,
    /// The time of the command on base pages.
    pub base: WhatIfBase,
    /// The prediction for each page size.
    pub sizes: Vec<WhatIfSize>,
    /// Parts of memory alone on large pages (`--by`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<WhatIfPart>,
    /// Blocks of 2 MiB of these parts, in the order of their first use.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocks: Vec<WhatIfBlock>,
    /// Limits of the prediction, for the reader.
    pub notes: Vec<String>,
}

/// A part of memory alone on large pages.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WhatIfPart {
    /// The part: heap, stack, text, arena or mapping.
    pub part: String,
    /// Bytes on base pages that were touched; absent of text.
    pub touched_bytes: Option<u64>,
    /// CPU time saved over base pages; absent of text, whose walks have no calibrated cost.
    pub saved_ns: Option<Estimate>,
}

/// A block of 2 MiB of a part.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WhatIfBlock {
    /// The pattern of its addresses, such as `heap@0-2M`, or the name of its part.
    pub pattern: String,
    /// Bytes on base pages that were touched.
    pub touched_bytes: u64,
    /// The best estimate of the CPU time saved if all parts are on large pages.
    pub saved_ns: f64,
}

/// The pace of walks of one pattern.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WalkPace {
    /// The pattern of addresses.
    pub pattern: WalkPattern,
    /// Cost beside the runs ÷ cost in the calibration.
    pub value: f64,
    /// The provenance of the value.
    pub provenance: Provenance,
}

/// A command on base pages.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WhatIfBase {
    /// The median time, on the basis below; absent for a trace.
    pub time_ns: Option<u64>,
    /// The time by which runs are compared; absent for a trace. It is CPU time where trials had a probe of
    /// the machine's speed beside them.
    pub basis: Option<Basis>,
    /// The walks and faults behind it.
    pub why: WalksAndFaults,
    /// Faults of all kinds in the runs, minor and major; the median.
    pub measured_fault_count: Option<u64>,
}

/// A command on pages of one size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WhatIfSize {
    /// The page size of private memory.
    pub page_bytes: u64,
    /// The walks and faults behind the prediction.
    pub why: WalksAndFaults,
    /// CPU time saved over base pages.
    pub saved_ns: Estimate,
    /// The parts of the saved time, by cause.
    pub saved_parts_ns: BTreeMap<String, Estimate>,
    /// The trials' memory that was on such pages; absent without trials.
    pub took: Option<Took>,
    /// The predicted elapsed time; absent without a time on base pages.
    pub time_ns: Option<Estimate>,
    /// Time on base pages ÷ predicted time.
    pub speedup: Option<Estimate>,
    /// The same of trials; absent without trials.
    pub measured_speedup: Option<Estimate>,
    /// The error of the predicted speed-up, in percent.
    pub error_percent: Option<f64>,
}

/// A number with its bounds. A bound that is infinite is absent.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Estimate {
    /// The provenance of the value.
    pub provenance: Provenance,
    /// The best estimate; none if it is missing.
    pub value: Option<f64>,
    /// The lower bound; none if it is missing.
    pub low: Option<f64>,
    /// The upper bound; none if it is missing.
    pub high: Option<f64>,
}

impl Estimate {
    fn new(provenance: Provenance, (value, low, high): (f64, f64, f64)) -> Estimate {
        let [value, low, high] = [value, low, high].map(|n| n.is_finite().then_some(n));
        Estimate { provenance, value, low, high }
    }
}

impl From<Bounded> for Estimate {
    fn from(Bounded { value, low, high }: Bounded) -> Estimate {
        Estimate::new(Provenance::Derived, (value, low, high))
    }
}

/// Page walks, and first touches of private memory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WalksAndFaults {
    /// Walks of dependent loads.
    pub chased_walk_count: u64,
    /// The walks that belong to no dependent load.
    pub other_walk_count: u64,
    /// The time that all walks take.
    pub translation_ns: Estimate,
    /// First touches of base pages.
    pub base_fault_count: u64,
    /// Faults on base pages of memory that is filled in order.
    pub base_filled_count: u64,
    /// First touches of large pages.
    pub large_fault_count: u64,
    /// Faults on large pages of memory that is filled in order.
    pub large_filled_count: u64,
}

impl WalksAndFaults {
    fn new(walks: &Walks, faults: Faults) -> WalksAndFaults {
        WalksAndFaults {
            chased_walk_count: walks.dependent_count,
            other_walk_count: walks.other_count,
            translation_ns: Estimate::new(Provenance::Derived, walks.ns()),
            base_fault_count: faults.base_count,
            base_filled_count: faults.base_filled_count,
            large_fault_count: faults.large_count,
            large_filled_count: faults.large_filled_count,
        }
    }
}

impl Document for WhatIf {
    const KIND: &'static str = "whatif";
}

impl WhatIf {
    /// Returns a forecast as a document; `exit` is that of its timed runs.
    pub fn new(forecast: &Forecast, exit: Option<u8>) -> WhatIf {
        let pace =
            |&(pattern, value)| WalkPace { pattern, value, provenance: Provenance::Measured };
        WhatIf {
            of: forecast.of.clone(),
            exit,
            access_count: forecast.access_count,
            walk_paces: forecast.paces.iter().map(pace).collect(),
            base: WhatIfBase {
                time_ns: forecast.base_ns,
                basis: forecast.base_ns.map(|_| forecast.basis),
                why: WalksAndFaults::new(&forecast.walks, forecast.faults),
                measured_fault_count: forecast.measured_fault_count,
            },
            sizes: forecast.predictions.iter().map(WhatIfSize::new).collect(),
            parts: forecast.parts.iter().map(WhatIfPart::new).collect(),
            blocks: forecast.blocks.iter().map(WhatIfBlock::new).collect(),
            notes: forecast.notes.clone(),
        }
    }
}

impl WhatIfPart {
    fn new(forecast: &PartForecast) -> WhatIfPart {
        WhatIfPart {
            part: forecast.part.to_string(),
            touched_bytes: forecast.touched_bytes,
            saved_ns: forecast.saved.map(|saved| saved.total().into()),
        }
    }
}

impl WhatIfBlock {
    fn new(forecast: &BlockForecast) -> WhatIfBlock {
        let pattern = forecast.pattern.as_ref().map(ToString::to_string);
        WhatIfBlock {
            pattern: pattern.unwrap_or_else(|| forecast.part.to_string()),
            touched_bytes: forecast.touched_bytes,
            saved_ns: forecast.saved_ns,
        }
    }
}

impl WhatIfSize {
    fn new(prediction: &Prediction) -> WhatIfSize {
        let parts = prediction.saved.parts().map(|(name, ns)| (name.replace(' ', "_"), ns.into()));
        WhatIfSize {
            page_bytes: prediction.size.bytes(),
            why: WalksAndFaults::new(&prediction.walks, prediction.faults),
            saved_ns: prediction.saved.total().into(),
            saved_parts_ns: parts.into(),
            took: prediction.took.clone(),
            time_ns: prediction.time_ns.map(Estimate::from),
            speedup: prediction.speedup.map(Estimate::from),
            measured_speedup: prediction.measured.map(|ratio| {
                Estimate::new(Provenance::Measured, (ratio.value, ratio.low, ratio.high))
            }),
            error_percent: prediction.error_percent(),
        }
    }
}
