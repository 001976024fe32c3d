//! The counters of runs as Prometheus text, for a node exporter's directory of text files.

use anyhow::Result;
use pagetax_core::cause::Account;
use pagetax_core::counter::counter;
use pagetax_core::report::Runs;
use pagetax_core::system_stat::{READINGS, SystemInterval};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;

type Labels = Vec<(&'static str, String)>;
type Gauges = Family<Labels, Gauge<f64, AtomicU64>>;

/// Renders a gauge for each counter, with a value for each run that has it. What is missing has no value.
pub fn render(document: &Runs) -> Result<String> {
    let mut gauges: BTreeMap<&str, Gauges> = BTreeMap::new();
    for run in &document.runs {
        for (id, reading) in &run.counters {
            let Some(value) = reading.value else { continue };
            let mut labels: Labels =
                vec![("job", run.job.name.clone()), ("machine", run.machine.name.clone())];
            labels.push(("params", params(&run.job.params)));
            labels.push(("provenance", reading.provenance.to_string()));
            gauges.entry(id).or_default().get_or_create(&labels).set(value as f64);
        }
    }
    let mut registry = Registry::with_prefix("pagetax");
    for (id, gauge) in gauges {
        let meaning = counter(id).map_or("a counter of the machine", |counter| counter.meaning);
        registry.register(id, meaning, gauge);
    }
    let mut text = String::new();
    encode(&mut text, &registry)?;
    Ok(text)
}

/// Renders the times and events of an interval: times in nanoseconds of each second, by cause.
pub fn of_system(scope: &str, interval: &SystemInterval) -> Result<String> {
    let times = Gauges::default();
    let per_second = |ns: u64| ns as f64 * 1e9 / interval.elapsed_ns.max(1) as f64;
    for row in Account::ALL.into_iter().flat_map(|account| interval.budget.rows(account)) {
        for (bound, ns) in [("value", row.ns), ("low", row.low_ns), ("high", row.high_ns)] {
            let Some(ns) = ns else { continue };
            let labels = [("scope", scope), ("cause", &row.id), ("bound", bound)];
            let labels: Labels = labels.map(|(name, value)| (name, value.to_string())).into();
            times.get_or_create(&labels).set(per_second(ns));
        }
    }
    let mut registry = Registry::with_prefix("pagetax_system");
    registry.register("ns_per_second", "the time of a cause in each second, over all tasks", times);
    for (id, _, meaning) in READINGS {
        let Some(value) = interval.value(id) else { continue };
        let gauge = Gauges::default();
        gauge.get_or_create(&vec![("scope", scope.to_string())]).set(per_second(value));
        registry.register(format!("{id}_per_second"), *meaning, gauge);
    }
    let mut text = String::new();
    encode(&mut text, &registry)?;
    Ok(text)
}

fn params(params: &BTreeMap<String, String>) -> String {
    params.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::super::jsonl;
    use super::*;
    use crate::run::tests::small_run;
    use pagetax_core::counter::{Reading, put};

    #[test]
    fn what_is_missing_has_no_value_and_no_name_breaks_a_line() {
        let mut run = small_run();
        run.machine.name = "a\"b\nc".into();
        put(&mut run.counters, "tlb_miss_count", Reading::Missing("no PMU".into()));
        let columns = [("time_ns", vec![Some(1), Some(2)]), ("x", vec![Some(7), None])];
        run.series.columns = columns.map(|(id, values)| (id.into(), values)).into();
        let runs = Runs { swept: Vec::new(), runs: vec![run] };
        let text = render(&runs).unwrap();
        assert!(
            text.contains("pagetax_minor_fault_count{job=\"tlb-gather\",machine=\"a\\\"b\\nc\"")
        );
        assert!(!text.contains("tlb_miss_count{"), "{text}");
        assert!(text.ends_with("# EOF\n"), "{text}");
        let lines = jsonl::render(&runs).unwrap();
        let points: Vec<serde_json::Value> =
            lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!((points[0]["x"].as_u64(), points[1]["x"].is_null()), (Some(7), true));
    }
}
