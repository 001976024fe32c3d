//! The metrics of a server, in the OpenMetrics text format.

use super::pool::Pool;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, text};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The times from the start of a request's handling until its reply is ready.
#[derive(Debug, Clone)]
pub struct Latencies {
    /// The times of reads, in seconds.
    pub get: Histogram,
    /// The times of writes, in seconds.
    pub put: Histogram,
}

/// All metrics of a server.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// The histograms that connections record into.
    pub latencies: Latencies,
}

impl Metrics {
    /// Returns the metrics of this pool.
    pub fn new(pool: Arc<Pool>) -> Metrics {
        // 0.25 µs to 8 ms, by factors of two.
        let histogram = || Histogram::new(exponential_buckets(0.25e-6, 2.0, 16));
        let latencies = Latencies { get: histogram(), put: histogram() };
        let mut registry = Registry::with_prefix("pagetax");
        registry.register(
            "get_seconds",
            "Time to answer a read, without the network",
            latencies.get.clone(),
        );
        registry.register(
            "put_seconds",
            "Time to answer a write, without the network",
            latencies.put.clone(),
        );
        registry.register_collector(Box::new(PoolCollector(pool)));
        Metrics { registry, latencies }
    }

    /// Returns all metrics in the OpenMetrics text format.
    pub fn encode(&self) -> String {
        let mut out = String::new();
        // Writing to a String does not fail.
        let _ = text::encode(&mut out, &self.registry);
        out
    }
}

#[derive(Debug)]
struct PoolCollector(Arc<Pool>);

impl Collector for PoolCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let (pool, counters) = (&self.0, &self.0.counters);
        let gauges = [
            ("pages_held", "Pages that are held for clients", pool.pages_held()),
            ("pages_free", "Pages for which there is room", pool.slab.pages_free()),
            ("regions", "Regions of all clients", pool.region_count() as u64),
            (
                "connections",
                "Connections that are open",
                counters.connections.load(Ordering::Relaxed) as u64,
            ),
            ("draining", "1 while the server is draining", pool.is_draining() as u64),
        ];
        for (name, help, value) in gauges {
            let gauge = ConstGauge::new(value as i64);
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        let counters = [
            ("pages_in", "Pages that clients have put", &counters.pages_in_total),
            ("pages_out", "Pages that clients have read", &counters.pages_out_total),
            (
                "requests_refused",
                "Requests answered with a failure",
                &counters.requests_refused_total,
            ),
            ("requests_refused_full", "Requests refused for lack of room", &counters.full_total),
            ("pages_damaged", "Pages that arrived damaged", &counters.pages_damaged_total),
            (
                "connections_refused",
                "Connections that were refused",
                &counters.connections_refused_total,
            ),
        ];
        for (name, help, value) in counters {
            let counter = ConstCounter::new(value.load(Ordering::Relaxed));
            counter.encode(encoder.encode_descriptor(
                name,
                help,
                None,
                counter.metric_type(),
            )?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::pool::Limits;
    use pagetax_core::units::Bytes;

    /// Returns the names of our metrics in a text.
    fn names(text: &str) -> Vec<String> {
        let is_word = |c: char| c.is_ascii_lowercase() || c == '_';
        let words = text.split(|c| !is_word(c)).filter(|word| word.starts_with("pagetax_"));
        words.map(String::from).collect()
    }

    #[test]
    fn alerts_and_the_dashboard_use_metrics_that_exist() {
        let limits = Limits { memory: Bytes(8 << 20), ..Limits::default() };
        let pool = Pool::new(limits, 1);
        let exported = names(&Metrics::new(Arc::new(pool)).encode());
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/");
        for file in ["prometheus-alerts.yaml", "grafana-dashboard.json"] {
            let used = names(&std::fs::read_to_string(format!("{folder}{file}")).unwrap());
            assert!(used.len() > 5, "{file}");
            let missing: Vec<_> = used.iter().filter(|name| !exported.contains(name)).collect();
            assert!(missing.is_empty(), "{file}: {missing:?} of {exported:?}");
        }
    }
}
