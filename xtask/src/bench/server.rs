//! What a memory server holds over the pages themselves, and how many pages a second one connection
//! puts in and gets out over loopback, with what that costs either side.

use super::serve::{Cpu, Server};
use super::{Outcome, pagetax};
use anyhow::Result;
use pagetax_core::access::Rng;
use pagetax_remote::client::cluster::{Cluster, ClusterOptions};
use pagetax_remote::page::{PAGE_BYTES, PageMac, RUN_PAGES_MAX};
use pagetax_remote::store::{PageStore, PutRun};
use serde_json::{Value, json};
use std::time::Instant;

/// Over the bytes of the pages held.
const OVERHEAD_LIMIT: f64 = 0.03;
/// 512 MiB.
const PAGES: u64 = 128 << 10;
const RANDOM_GETS: u64 = 50_000;
/// Runs of one put, as evictors make them.
const RUNS: usize = 16;

/// One way to use the server, timed.
struct Timed {
    what: &'static str,
    pages: u64,
    seconds: f64,
    server: Cpu,
    client: Cpu,
}

impl Timed {
    fn of(
        what: &'static str,
        pages: u64,
        server: &Server,
        work: impl FnOnce() -> Result<()>,
    ) -> Result<Timed> {
        let (server_before, client_before) = (server.cpu()?, Cpu::of("self")?);
        let begun = Instant::now();
        work()?;
        let seconds = begun.elapsed().as_secs_f64();
        let since = |now: Cpu, before: Cpu| Cpu {
            user: now.user - before.user,
            system: now.system - before.system,
        };
        let (server, client) =
            (since(server.cpu()?, server_before), since(Cpu::of("self")?, client_before));
        Ok(Timed { what, pages, seconds, server, client })
    }

    fn ns_per_page(&self) -> [f64; 4] {
        let times = [self.server.user, self.server.system, self.client.user, self.client.system];
        times.map(|seconds| seconds * 1e9 / self.pages as f64)
    }

    fn row(&self) -> Vec<String> {
        let rate = format!("{:.0}", self.pages as f64 / self.seconds);
        let costs = self.ns_per_page().map(|ns| format!("{ns:.0}"));
        [self.what.to_string(), rate].into_iter().chain(costs).collect()
    }

    fn json(&self) -> Value {
        json!({
            "what": self.what,
            "pages_per_second": self.pages as f64 / self.seconds,
            "ns_per_page": self.ns_per_page(),
        })
    }
}

pub fn run() -> Result<Outcome> {
    let server = Server::start(&pagetax()?, "1G", "127.0.0.1:0")?;
    let empty = server.resident_bytes()?;
    let store = Cluster::connect(ClusterOptions::new(vec![server.address.clone()]))?;
    let region = store.create_region(PAGES, false)?;
    let (mut reader, mut writer) = (store.reader()?, store.writer()?);
    let mut rng = Rng::new(1);
    let pages: Vec<u8> = std::iter::repeat_with(|| rng.next_u64().to_le_bytes())
        .take(RUNS * RUN_PAGES_MAX * PAGE_BYTES / 8)
        .flatten()
        .collect();
    let macs: Vec<PageMac> = pages.chunks(PAGE_BYTES).map(PageMac::of).collect();
    let fill = Timed::of("in, 64 at a time", PAGES, &server, || {
        (0..PAGES).step_by(RUNS * RUN_PAGES_MAX).try_for_each(|first| {
            let runs = pages.chunks(RUN_PAGES_MAX * PAGE_BYTES).zip(macs.chunks(RUN_PAGES_MAX));
            let runs: Vec<PutRun<'_>> = (first..)
                .step_by(RUN_PAGES_MAX)
                .zip(runs)
                .map(|(first, (pages, macs))| PutRun { first, pages, macs })
                .collect();
            Ok(writer.put(region, &runs)?)
        })
    })?;
    let overhead =
        (server.resident_bytes()? - empty) as f64 / (PAGES * PAGE_BYTES as u64) as f64 - 1.0;
    let mut into = vec![0; RUN_PAGES_MAX * PAGE_BYTES];
    let mut get = |first: u64, count: usize| -> Result<()> {
        let at = first as usize % macs.len();
        Ok(reader.get(region, first, &macs[at..at + count], &mut into[..count * PAGE_BYTES])?)
    };
    let sequential = Timed::of("out, 64 at a time", PAGES, &server, || {
        (0..PAGES).step_by(RUN_PAGES_MAX).try_for_each(|first| get(first, RUN_PAGES_MAX))
    })?;
    let random = Timed::of("out, one by one", RANDOM_GETS, &server, || {
        (0..RANDOM_GETS).try_for_each(|_| get(rng.below(PAGES), 1))
    })?;
    let all = [fill, sequential, random];
    Ok(Outcome {
        headings: vec![
            "pages",
            "a second",
            "ns a page: server, user",
            "server, system",
            "client, user",
            "client, system",
        ],
        rows: all.iter().map(Timed::row).collect(),
        json: json!({
            "pages_held": PAGES,
            "overhead": overhead,
            "rates": all.iter().map(Timed::json).collect::<Vec<_>>(),
        }),
        promise: (
            format!(
                "{:.2} % over {} MiB held, at most {} %",
                overhead * 100.0,
                PAGES >> 8,
                OVERHEAD_LIMIT * 100.0
            ),
            overhead <= OVERHEAD_LIMIT,
        ),
    })
}
