//! The network memory of a run: its regions, and the counts of their pagers.
//!
//! Invariant: a pager's threads do not belong to the job. They start before the job is watched and serve
//! it from outside, as the kernel does. Their own counts and clock measure them. With `serving =
//! "in-place"`, the job's threads fetch their pages themselves, and that time is the job's.

use super::figures::Readings;
use crate::procfs::{Root, schedstat};
use hdrhistogram::Histogram;
use pagetax_core::counter::{Provenance, Reading};
use pagetax_core::network_memory::{NetworkMemory, NetworkRegion, PagerCounts};
use pagetax_core::plan::{Backing, Region};
use pagetax_core::report::Table;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

/// The network memory of a run, and the regions that are mapped in it.
pub struct Network {
    memory: Arc<dyn NetworkMemory>,
    regions: Vec<Arc<dyn NetworkRegion>>,
}

/// The counts and latencies of all pagers.
#[derive(Debug, Clone, Default)]
pub struct Traffic {
    pub counts: PagerCounts,
    /// The number of demand page-ins by latency in nanoseconds.
    page_ins: BTreeMap<u64, u64>,
}

impl Network {
    /// Creates the network memory without any region.
    pub fn new(memory: Arc<dyn NetworkMemory>) -> Network {
        Network { memory, regions: Vec::new() }
    }

    /// Maps a region and starts its pager; `None` if the region is not network memory.
    pub fn map(&mut self, region: &Region) -> io::Result<Option<Arc<dyn NetworkRegion>>> {
        let Backing::Remote { resident_bytes, serving } = region.backing else { return Ok(None) };
        let mapped = self.memory.map(region.bytes, resident_bytes, serving)?;
        self.regions.push(mapped.clone());
        Ok(Some(mapped))
    }

    /// Returns the traffic of all pagers so far; `None` if the job has no network memory.
    pub fn traffic(&self) -> Option<Traffic> {
        if self.regions.is_empty() {
            return None;
        }
        let mut all = Traffic::default();
        for region in &self.regions {
            all.counts = all.counts.plus(&region.counts());
            for (ns, count) in region.page_in_latency() {
                *all.page_ins.entry(ns).or_default() += count;
            }
        }
        Some(all)
    }

    /// Returns the CPU time of this process's pager threads so far; `None` if schedstat cannot be read.
    pub fn cpu_ns(&self) -> Option<u64> {
        let root = Root::default();
        let is_pager = |tid: &u32| {
            let name = root.text(&format!("/proc/self/task/{tid}/comm"));
            name.is_ok_and(|name| self.memory.thread_names().contains(&name.trim()))
        };
        let tids = root.names("/proc/self/task").into_iter().filter_map(|name| name.parse().ok());
        let of = |tid| Some(schedstat(&root, std::process::id(), Some(tid)).ok()?.0);
        tids.filter(is_pager).map(of).sum()
    }

    /// Returns a table of the pagers' counts, with the store's description as its title.
    pub fn table(&self) -> Option<Table> {
        let PagerCounts {
            fault_count,
            zero_fault_count,
            soft_refault_count,
            demand_page_in_count,
            page_in_count,
            evicted_count,
            page_out_count,
            evicted_zero_count,
            evicted_clean_count,
            room_wait_ns_total,
            ..
        } = self.traffic()?.counts;
        let ahead = page_in_count.saturating_sub(demand_page_in_count);
        let rows = [
            ("faults", fault_count),
            ("  of pages never written", zero_fault_count),
            ("  of pages still on their way out", soft_refault_count),
            ("  of pages in the store", demand_page_in_count),
            ("pages fetched ahead of need", ahead),
            ("pages evicted", evicted_count),
            ("  put into the store", page_out_count),
            ("  unchanged there", evicted_clean_count),
            ("  all zeros", evicted_zero_count),
            ("microseconds that faults waited for room", room_wait_ns_total / 1000),
        ];
        Some(Table {
            title: format!("network memory: {}", self.memory.describe()),
            columns: vec!["pager".into(), "count".into()],
            rows: rows.map(|(name, count)| vec![name.into(), count.to_string()]).to_vec(),
            provenance: Provenance::Measured,
        })
    }
}

impl Traffic {
    /// Returns the difference from an earlier reading.
    pub fn since(&self, before: &Traffic) -> Traffic {
        let less = |(ns, count): (&u64, &u64)| {
            let count = count - before.page_ins.get(ns).copied().unwrap_or(0);
            (count > 0).then_some((*ns, count))
        };
        Traffic {
            counts: self.counts.since(&before.counts),
            page_ins: self.page_ins.iter().filter_map(less).collect(),
        }
    }

    /// Returns the job's counters. They exclude page-ins and page-outs of the rest of the machine.
    pub fn readings(&self) -> Readings {
        vec![
            ("page_in_count", Reading::Measured(self.counts.page_in_count)),
            ("page_out_count", Reading::Measured(self.counts.page_out_count)),
        ]
    }

    /// Returns columns for the series: faults by kind, page-ins and page-outs, and latencies of
    /// page-ins.
    pub fn columns(&self) -> Vec<(&'static str, u64)> {
        let PagerCounts { zero_fault_count, soft_refault_count, demand_page_in_count, .. } =
            self.counts;
        let mut columns = vec![
            ("zero_fill_count", zero_fault_count),
            ("soft_refault_count", soft_refault_count),
            ("demand_page_in_count", demand_page_in_count),
            ("page_in_count", self.counts.page_in_count),
            ("page_out_count", self.counts.page_out_count),
        ];
        let latency = self.latency();
        if !latency.is_empty() {
            let mean_ns = self.counts.page_in_ns_total / demand_page_in_count.max(1);
            columns.extend([
                ("page_in_latency_ns_min", latency.min()),
                ("page_in_latency_ns_mean", mean_ns),
                ("page_in_latency_ns_p50", latency.value_at_quantile(0.50)),
                ("page_in_latency_ns_p99", latency.value_at_quantile(0.99)),
            ]);
        }
        columns
    }

    /// Returns the latencies of demand page-ins, in the pager's buckets of 6 %.
    pub fn latency(&self) -> Histogram<u64> {
        let three_digits = Histogram::new(3);
        let mut histogram =
            three_digits.expect("three digits are a precision that hdrhistogram has");
        for (ns, count) in &self.page_ins {
            histogram
                .record_n(*ns, *count)
                .expect("a histogram without upper bound grows as needed");
        }
        histogram
    }
}
