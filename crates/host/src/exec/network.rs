//! Network memory of a run: its regions, and what their pagers did.
//!
//! Invariant: a pager's threads are not the job's. They are started before the job is watched, and serve
//! it from outside, as the kernel does; what they did is told by their own counts and clock. Where the job's
//! threads serve themselves (`serving = "in-place"`), their time is the job's.

use super::figures::Readings;
use crate::procfs::{Root, schedstat};
use hdrhistogram::Histogram;
use pagetax_core::counter::{Provenance, Reading};
use pagetax_core::plan::{self, Backing, Region};
use pagetax_core::report::Table;
use pagetax_remote::pager::{Counts, Leaving, Log, Options, RemoteRegion, Serving, THREADS};
use pagetax_remote::store::PageStore;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

/// Where pages go, and the regions whose pages go there.
pub struct Network {
    store: Arc<dyn PageStore>,
    log: Option<Log>,
    regions: Vec<Arc<RemoteRegion>>,
}

/// What pagers did so far.
#[derive(Debug, Clone, Default)]
pub struct Traffic {
    pub counts: Counts,
    /// How many demand page-ins took how many nanoseconds.
    page_ins: BTreeMap<u64, u64>,
}

impl Network {
    /// Without regions.
    pub fn new(store: Arc<dyn PageStore>, log: Option<Log>) -> Network {
        Network { store, log, regions: Vec::new() }
    }

    /// Starts to page a region, if it is network memory.
    pub fn map(&mut self, region: &Region) -> io::Result<Option<Arc<RemoteRegion>>> {
        let Backing::Remote { resident_bytes, serving } = region.backing else { return Ok(None) };
        let serving = match serving {
            plan::Serving::Thread => Serving::Thread,
            plan::Serving::InPlace => Serving::InPlace,
        };
        // Workers only touch it: no device does, and no system call.
        let leaving = Leaving::Cheapest;
        let options = Options {
            log: self.log.clone(),
            serving,
            leaving,
            ..Options::resident(resident_bytes)
        };
        let mapped = RemoteRegion::map(self.store.clone(), region.bytes, options);
        let mapped = Arc::new(mapped.map_err(io::Error::other)?);
        self.regions.push(mapped.clone());
        Ok(Some(mapped))
    }

    /// What their pagers did so far; none of a job that has no network memory.
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

    /// CPU time of the pagers of this process so far, where it can be read.
    pub fn cpu_ns(&self) -> Option<u64> {
        let root = Root::default();
        let is_pager = |tid: &u32| {
            let name = root.text(&format!("/proc/self/task/{tid}/comm"));
            name.is_ok_and(|name| THREADS.contains(&name.trim()))
        };
        let tids = root.names("/proc/self/task").into_iter().filter_map(|name| name.parse().ok());
        let of = |tid| Some(schedstat(&root, std::process::id(), Some(tid)).ok()?.0);
        tids.filter(is_pager).map(of).sum()
    }

    /// The store, and what the pagers did with it.
    pub fn table(&self) -> Option<Table> {
        let Counts {
            fault_count,
            zero_fault_count,
            rescue_count,
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
            ("  of pages still on their way out", rescue_count),
            ("  of pages in the store", demand_page_in_count),
            ("pages fetched ahead of need", ahead),
            ("pages evicted", evicted_count),
            ("  put into the store", page_out_count),
            ("  unchanged there", evicted_clean_count),
            ("  all zeros", evicted_zero_count),
            ("microseconds that faults waited for room", room_wait_ns_total / 1000),
        ];
        Some(Table {
            title: format!("network memory: {}", self.store.describe()),
            columns: vec!["pager".into(), "count".into()],
            rows: rows.map(|(name, count)| vec![name.into(), count.to_string()]).to_vec(),
            provenance: Provenance::Measured,
        })
    }
}

impl Traffic {
    /// Since an earlier time.
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

    /// As counters of the job: pages of the whole machine's files and disks are not among them.
    pub fn readings(&self) -> Readings {
        vec![
            ("page_in_count", Reading::Measured(self.counts.page_in_count)),
            ("page_out_count", Reading::Measured(self.counts.page_out_count)),
        ]
    }

    /// As columns of the series: faults by what they found, rates, and latencies of page-ins.
    pub fn columns(&self) -> Vec<(&'static str, u64)> {
        let Counts { zero_fault_count, rescue_count, demand_page_in_count, .. } = self.counts;
        let mut columns = vec![
            ("zero_fill_count", zero_fault_count),
            ("rescue_count", rescue_count),
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

    /// Of demand page-ins, within the pager's steps of 6 %.
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
