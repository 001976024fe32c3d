//! Reports, schema 1: one versioned JSON document a run. Nanoseconds, bytes, snake_case.
//!
//! Invariant: keys are only ever added within a schema. A report can be read back ([`Run`] is both
//! written and read), which is what `compare` does.

use crate::budget::Budget;
use crate::counter::{Counters, Provenance, Reading, put};
use crate::document::{self, Document};
use crate::machine::{MachineKind, MachineSpec, Sink};
use crate::plan::{JobIdentity, Plan};
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A machine in a report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ReportMachine {
    /// The name, as given to `--on`.
    pub name: String,
    /// The kind: host, sim or null.
    pub kind: MachineKind,
    /// False if it is a model that was not checked against published figures of this job.
    pub validated: bool,
}

/// A phase in a report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ReportPhase {
    /// The phase's name in the job.
    pub name: String,
    /// The phase's start, since the start of the run.
    pub start_ns: u64,
    /// The phase's end, since the start of the run.
    pub end_ns: u64,
    /// The counters of this phase alone.
    pub counters: Counters,
}

/// Columns over time. `null` where a column was not seen.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Series {
    /// The nominal distance of the points; 0 without a series.
    pub interval_ns: u64,
    /// `time_ns`, and the machine's own columns.
    pub columns: BTreeMap<String, Vec<Option<u64>>>,
}

/// A latency histogram in brief.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Latency {
    /// The number of faults that were timed.
    pub count: u64,
    /// The number of all faults, timed or not; absent if that is not counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of_count: Option<u64>,
    /// The shortest latency of all that were timed.
    pub min_ns: u64,
    /// The arithmetic mean of the latencies.
    pub mean_ns: u64,
    /// The median latency, within 0.1 %.
    pub p50_ns: u64,
    /// The 90th percentile of the latencies.
    pub p90_ns: u64,
    /// The 99th percentile of the latencies.
    pub p99_ns: u64,
    /// The longest latency of all that were timed.
    pub max_ns: u64,
    /// The provenance of the times.
    pub provenance: Provenance,
    /// The histogram, from short to long. Buckets in which no fault lies are left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub buckets: Vec<LatencyBucket>,
}

/// The faults in one bucket of a latency histogram.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LatencyBucket {
    /// The longest latency of the bucket, which begins above the shorter one.
    pub up_to_ns: u64,
    /// The number of faults.
    pub count: u64,
}

/// The upper end of the first bucket. Faults take longer.
const FIRST_BUCKET_NS: u64 = 64;
/// The ratio of a bucket's ends: four buckets in each doubling.
const BUCKET_RATIO: f64 = 1.189_207_115;

impl Latency {
    /// Summarizes a histogram of nanoseconds.
    pub fn of(histogram: &Histogram<u64>, of_count: Option<u64>, provenance: Provenance) -> Self {
        Latency {
            count: histogram.len(),
            of_count,
            min_ns: histogram.min(),
            mean_ns: histogram.mean().round() as u64,
            p50_ns: histogram.value_at_quantile(0.50),
            p90_ns: histogram.value_at_quantile(0.90),
            p99_ns: histogram.value_at_quantile(0.99),
            max_ns: histogram.max(),
            provenance,
            buckets: buckets(histogram),
        }
    }
}

fn buckets(histogram: &Histogram<u64>) -> Vec<LatencyBucket> {
    let all = histogram.iter_log(FIRST_BUCKET_NS, BUCKET_RATIO);
    let bucket = |bucket: hdrhistogram::iterators::IterationValue<u64>| LatencyBucket {
        up_to_ns: bucket.value_iterated_to(),
        count: bucket.count_since_last_iteration(),
    };
    all.map(bucket).filter(|bucket| bucket.count > 0).collect()
}

/// Something to know about a run, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Warning {
    /// The warning's id: stable, in snake_case.
    pub id: String,
    /// The observation, in one sentence.
    pub text: String,
    /// The change that would remove the cause; may be empty.
    pub remedy: String,
}

/// A table in an old tool's words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Table {
    /// The tool's name: `hatcnt`, `trapstat -t`, …
    pub title: String,
    /// The headings of the columns, from the left.
    pub columns: Vec<String>,
    /// The cells of each row, as they are printed.
    pub rows: Vec<Vec<String>>,
    /// The provenance of the numbers.
    pub provenance: Provenance,
}

/// The machine that a run ran on: kernel, settings, memory, CPU. Keys are free, in snake_case, with units
/// last.
pub type Environment = BTreeMap<String, serde_json::Value>;

/// The report of one run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Run {
    /// The job that ran, with its parameters.
    pub job: JobIdentity,
    /// The machine that it ran on.
    pub machine: ReportMachine,
    /// The elapsed time, real or virtual.
    pub wall_ns: u64,
    /// The values of the whole run, by counter id.
    pub counters: Counters,
    /// The phases, in the order of their start.
    pub phases: Vec<ReportPhase>,
    /// The counters at each point of the series.
    pub series: Series,
    /// The latency by kind of fault.
    pub latency: BTreeMap<String, Latency>,
    /// The budget of time and memory; absent if nothing is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget: Option<Budget>,
    /// Tables as old tools would have printed them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tables: Vec<Table>,
    /// Facts about the machine, its kernel and its settings.
    pub environment: Environment,
    /// Warnings that qualify the numbers, each with a hint.
    pub warnings: Vec<Warning>,
}

impl Document for Run {
    const KIND: &'static str = "run";
}

/// The reports of one command: of several machines, or of a sweep.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Runs {
    /// Parameters that have several values; empty if the runs are no sweep.
    #[serde(default)]
    pub swept: Vec<String>,
    /// Each run, in the order of the sweep's points, then of the machines.
    pub runs: Vec<Run>,
}

impl Document for Runs {
    const KIND: &'static str = "runs";

    /// Writes a single run as a document of kind `run`.
    fn to_json(&self) -> Result<String, serde_json::Error> {
        match self.runs.as_slice() {
            [run] => run.to_json(),
            _ => document::write(self),
        }
    }
}

/// A sink that makes a [`Run`] of what it receives.
pub struct Recording<'a> {
    run: Run,
    /// Minor and major faults together, and their number. Percentiles of the two cannot be added up later.
    all_faults: Option<(Histogram<u64>, Option<u64>)>,
    on_progress: Option<Box<dyn FnMut(f64) + 'a>>,
    on_sample: Option<OnSample<'a>>,
}

/// A function that receives each point of the series: the time and the values.
type OnSample<'a> = Box<dyn FnMut(u64, &[(&'static str, u64)]) + 'a>;

impl<'a> Recording<'a> {
    /// Begins the report of a plan on a machine.
    pub fn new(plan: &Plan, spec: &MachineSpec) -> Self {
        let validated = spec.is_validated_for(&plan.job.name);
        let machine = ReportMachine { name: spec.name.clone(), kind: spec.kind, validated };
        let interval_ns = plan.measure.interval.map_or(0, |interval| interval.0);
        let run = Run {
            job: plan.job.clone(),
            machine,
            wall_ns: 0,
            counters: Counters::new(),
            phases: Vec::new(),
            series: Series { interval_ns, columns: BTreeMap::new() },
            latency: BTreeMap::new(),
            budget: None,
            tables: Vec::new(),
            environment: Environment::new(),
            warnings: Vec::new(),
        };
        Recording { run, all_faults: None, on_progress: None, on_sample: None }
    }

    /// Calls `callback` with the share of the run that is done.
    pub fn on_progress(mut self, callback: impl FnMut(f64) + 'a) -> Self {
        self.on_progress = Some(Box::new(callback));
        self
    }

    /// Calls `callback` with each point of the series when it is taken.
    pub fn on_sample(mut self, callback: impl FnMut(u64, &[(&'static str, u64)]) + 'a) -> Self {
        self.on_sample = Some(Box::new(callback));
        self
    }

    /// Returns the report of what the sink received.
    pub fn finish(self) -> Run {
        self.run
    }
}

impl Sink for Recording<'_> {
    fn counter(&mut self, id: &'static str, reading: Reading) {
        if id == "wall_ns" {
            self.run.wall_ns = reading.value().unwrap_or(0);
        }
        put(&mut self.run.counters, id, reading);
    }

    fn phase(
        &mut self,
        name: &str,
        start_ns: u64,
        end_ns: u64,
        counters: &[(&'static str, Reading)],
    ) {
        let mut own = Counters::new();
        for (id, reading) in counters {
            put(&mut own, id, reading.clone());
        }
        self.run.phases.push(ReportPhase { name: name.into(), start_ns, end_ns, counters: own });
    }

    fn sample(&mut self, time_ns: u64, values: &[(&'static str, u64)]) {
        if let Some(callback) = &mut self.on_sample {
            callback(time_ns, values);
        }
        let columns = &mut self.run.series.columns;
        let before = columns.get("time_ns").map_or(0, Vec::len);
        for (id, value) in [("time_ns", time_ns)].iter().chain(values) {
            let column = columns.entry(id.to_string()).or_insert_with(|| vec![None; before]);
            column.resize(before, None);
            column.push(Some(*value));
        }
        columns.values_mut().for_each(|column| column.resize(before + 1, None));
    }

    fn latency(
        &mut self,
        kind: &'static str,
        histogram: &Histogram<u64>,
        of_count: Option<u64>,
        provenance: Provenance,
    ) {
        let mut put = |kind: &str, histogram: &Histogram<u64>, of_count| {
            if !histogram.is_empty() {
                let brief = Latency::of(histogram, of_count, provenance);
                self.run.latency.insert(kind.into(), brief);
            }
        };
        put(kind, histogram, of_count);
        if ["minor_fault", "major_fault"].contains(&kind) {
            let (all, all_count) = self.all_faults.get_or_insert_with(|| {
                let three_digits = Histogram::new(3);
                (three_digits.expect("three digits are a precision that hdrhistogram has"), None)
            });
            all.add(histogram).expect("a histogram without upper bound grows as needed");
            if let Some(count) = of_count {
                *all_count = Some(all_count.unwrap_or(0) + count);
            }
            put("fault", all, *all_count);
        }
    }

    fn budget(&mut self, budget: Budget) {
        self.run.budget = Some(budget);
    }

    fn table(&mut self, table: Table) {
        self.run.tables.push(table);
    }

    fn warning(&mut self, warning: Warning) {
        self.run.warnings.push(warning);
    }

    fn environment(&mut self, environment: Environment) {
        self.run.environment.extend(environment);
    }

    fn progress(&mut self, done: f64) {
        if let Some(callback) = &mut self.on_progress {
            callback(done);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Job;
    use crate::units::{Bytes, PageSize};

    #[test]
    fn buckets_hold_each_fault_once() {
        let mut histogram = Histogram::new(3).unwrap();
        let times = [50, 700, 701, 90_000, 3_000_000_000];
        times.iter().for_each(|ns| histogram.record(*ns).unwrap());
        let buckets = Latency::of(&histogram, None, Provenance::Measured).buckets;
        let counts: Vec<u64> = buckets.iter().map(|bucket| bucket.count).collect();
        assert_eq!(counts, [1, 2, 1, 1], "{buckets:?}");
        for (bucket, longest) in buckets.iter().zip([50, 701, 90_000, 3_000_000_000]) {
            let up_to = bucket.up_to_ns as f64;
            let is_near = up_to <= 64.0 || up_to < longest as f64 * BUCKET_RATIO * 1.01;
            assert!(bucket.up_to_ns >= longest && is_near, "{bucket:?}");
        }
        assert!(buckets.is_sorted_by_key(|bucket| bucket.up_to_ns));
    }

    #[test]
    fn all_faults_are_the_minor_and_the_major_ones() {
        let spec = MachineSpec {
            name: "host".into(),
            kind: MachineKind::Host,
            validated_jobs: Vec::new(),
            memory: Bytes(8 << 30),
            base_page: PageSize::K4,
            page_sizes: vec![PageSize::K4],
            cpus: 1,
            job_params: BTreeMap::new(),
        };
        let job = Job::builtin("tlb-gather").unwrap();
        let plan = job.resolve(&Default::default(), &spec, None).unwrap();
        let mut recording = Recording::new(&plan, &spec);
        for (kind, ns, of_count) in [
            ("minor_fault", 500, Some(7)),
            ("major_fault", 90_000, Some(1)),
            ("page_in", 80_000, None),
        ] {
            let mut histogram = Histogram::new(3).unwrap();
            histogram.record(ns).unwrap();
            recording.latency(kind, &histogram, of_count, Provenance::Measured);
        }
        let run = recording.finish();
        let fault = &run.latency["fault"];
        assert_eq!((fault.count, fault.of_count, fault.min_ns), (2, Some(8), 500));
        assert_eq!(fault.max_ns, run.latency["major_fault"].max_ns);
        assert_eq!(run.latency.len(), 4);
    }
}
