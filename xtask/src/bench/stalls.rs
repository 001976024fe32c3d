//! How long a program waits for its memory when servers fail: one of three at a time is killed, killed and
//! started again, or stops answering, while a program rewrites memory of which a quarter is resident.
//!
//! Servers are processes on loopback, killed by SIGKILL, and silenced by SIGSTOP, which looks like a
//! partition from outside; packets that are really lost have their tests in
//! `crates/cli/tests/memory_servers`. A page that is lost ends this process by SIGBUS, a wrong one by
//! an error: figures are of runs without either.

use super::serve::Server;
use super::{Outcome, pagetax};
use anyhow::{Context, Result, ensure};
use pagetax_core::access::Rng;
use pagetax_remote::client::cluster::{Cluster, Options};
use pagetax_remote::page::PAGE_BYTES;
use pagetax_remote::pager::{self, RemoteRegion};
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const RUNS: u64 = 200;
const SERVERS: usize = 3;
/// Of each server.
const MEMORY: &str = "64M";
const REGION_BYTES: u64 = 32 << 20;
const RESIDENT_BYTES: u64 = 8 << 20;
/// For the longest stall after a kill, at the 99th percentile of runs.
const STALL_LIMIT: Duration = Duration::from_millis(50);
/// For servers to be back, and every page to have its copies.
const WHOLE_PATIENCE: Duration = Duration::from_secs(30);

/// What happens to a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trouble {
    Killed,
    Restarted,
    Silent,
}

const TROUBLES: [Trouble; 3] = [Trouble::Killed, Trouble::Restarted, Trouble::Silent];

/// Memory whose words tell what was last written to them.
struct Program {
    memory: RemoteRegion,
    versions: Vec<u64>,
    rng: Rng,
}

impl Program {
    fn fill(store: &Arc<Cluster>, seed: u64) -> Result<Program> {
        let log: pager::Log = Arc::new(|line: &str| eprintln!("{line}"));
        let options = pager::Options { log: Some(log), ..pager::Options::resident(RESIDENT_BYTES) };
        let memory = RemoteRegion::map(store.clone(), REGION_BYTES, options)?;
        let versions = vec![0; memory.len() / PAGE_BYTES];
        let mut program = Program { memory, versions, rng: Rng::new(seed) };
        (0..program.versions.len()).try_for_each(|page| program.rewrite(page))?;
        Ok(program)
    }

    fn rewrite(&mut self, page: usize) -> Result<()> {
        self.check(page)?;
        self.versions[page] = self.rng.next_u64();
        let bytes = &mut self.memory.as_mut_slice()[page * PAGE_BYTES..][..PAGE_BYTES];
        bytes[..8].copy_from_slice(&self.versions[page].to_le_bytes());
        bytes[PAGE_BYTES - 8..].copy_from_slice(&self.versions[page].to_le_bytes());
        Ok(())
    }

    fn check(&self, page: usize) -> Result<()> {
        let bytes = &self.memory.as_slice()[page * PAGE_BYTES..][..PAGE_BYTES];
        let version = self.versions[page].to_le_bytes();
        let is_right = bytes[..8] == version && bytes[PAGE_BYTES - 8..] == version;
        ensure!(is_right, "page {page} is wrong");
        Ok(())
    }

    /// Rewrites random pages until told to stop; the longest wait that ended after `since`, which is
    /// in nanoseconds from `start`, and the longest before.
    fn rewrite_until(
        &mut self,
        start: Instant,
        since: &AtomicU64,
        mut is_over: impl FnMut() -> bool,
    ) -> Result<[Duration; 2]> {
        let mut longest = [Duration::ZERO; 2];
        let mut before = start.elapsed();
        while !is_over() {
            let page = self.rng.below(self.versions.len() as u64) as usize;
            self.rewrite(page)?;
            let now = start.elapsed();
            let after = (now.as_nanos() as u64 >= since.load(Ordering::Relaxed)) as usize;
            (longest[after], before) = (longest[after].max(now - before), now);
        }
        Ok(longest)
    }
}

/// The longest waits of one run: without trouble, and after each of [`TROUBLES`].
type Run = [Duration; 1 + TROUBLES.len()];

/// The bench; its only part is how many runs.
pub fn run(parts: &[String]) -> Result<Outcome> {
    let runs = parts.first().map_or(Ok(RUNS), |runs| runs.parse()).context("how many runs?")?;
    ensure!(runs > 0, "at least one run");
    let pagetax = pagetax()?;
    let mut servers: Vec<Server> = (0..SERVERS)
        .map(|_| Server::start(&pagetax, MEMORY, "127.0.0.1:0"))
        .collect::<Result<_>>()?;
    let mut all = Vec::new();
    let mut pages = 0;
    for seed in 0..runs {
        let (run, page_ins) = one_run(&pagetax, &mut servers, seed)?;
        pages += page_ins;
        all.push(run);
    }
    let names = ["none, for comparison", "killed", "killed and restarted", "silent"];
    let of = |at: usize| Distribution::of(all.iter().map(|run| run[at]).collect());
    let columns: Vec<Distribution> = (0..names.len()).map(of).collect();
    let row = |(name, column): (&&str, &Distribution)| {
        let cells = column.0.iter().map(|(_, stall)| format!("{:.1}", stall.as_secs_f64() * 1e3));
        [name.to_string()].into_iter().chain(cells).collect()
    };
    let p99 = columns[1].at("p99").max(columns[2].at("p99"));
    Ok(Outcome {
        headings: vec!["server; longest stall of a run, ms", "p50", "p90", "p99", "max"],
        rows: names.iter().zip(&columns).map(row).collect(),
        json: json!({
            "runs": runs, "page_ins": pages, "wrong_pages": 0, "lost_pages": 0,
            "longest_stall_ns": all.iter()
                .map(|run| run.map(|stall| stall.as_nanos() as u64)).collect::<Vec<_>>(),
        }),
        promise: (
            format!(
                "{runs} runs, {pages} page-ins, none wrong, none lost; after a kill p99 {:.1} ms, at \
                 most {} ms",
                p99.as_secs_f64() * 1e3,
                STALL_LIMIT.as_millis()
            ),
            p99 <= STALL_LIMIT,
        ),
    })
}

fn one_run(pagetax: &str, servers: &mut [Server], seed: u64) -> Result<(Run, u64)> {
    let labels = servers.iter().map(|server| server.address.clone()).collect();
    let repair_after = Duration::from_millis(300);
    let options = Options { copies: 2, repair_after, ..Options::new(labels) };
    let store = Arc::new(Cluster::connect(options)?);
    let mut program = Program::fill(&store, seed)?;
    let mut longest = Run::default();
    let mut rng = Rng::new(!seed);
    let first = rng.below(3) as usize;
    for turn in 0..TROUBLES.len() {
        let kind = (first + turn) % TROUBLES.len();
        let victim = &mut servers[rng.below(SERVERS as u64) as usize];
        let pauses = [100 + rng.below(50), 100 + rng.below(700)].map(Duration::from_millis);
        let [before, after] =
            trouble(pagetax, victim, TROUBLES[kind], pauses, &store, &mut program)?;
        longest[0] = longest[0].max(before);
        longest[1 + kind] = after;
    }
    (0..program.versions.len()).try_for_each(|page| program.check(page))?;
    Ok((longest, program.memory.counts().page_in_count))
}

/// The program goes on while the server gets into trouble, is well again, and has its copies back.
fn trouble(
    pagetax: &str,
    victim: &mut Server,
    kind: Trouble,
    [before, during]: [Duration; 2],
    store: &Cluster,
    program: &mut Program,
) -> Result<[Duration; 2]> {
    let (start, since) = (Instant::now(), AtomicU64::new(u64::MAX));
    let until = start + before + during + WHOLE_PATIENCE;
    let whole = || store.servers_up() == SERVERS && store.copies_missing() == 0;
    thread::scope(|scope| {
        let maker = scope.spawn(|| -> Result<()> {
            thread::sleep(before);
            since.store(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
            match kind {
                Trouble::Silent => victim.signal("-STOP")?,
                Trouble::Killed | Trouble::Restarted => victim.kill()?,
            }
            if kind != Trouble::Restarted {
                thread::sleep(during);
            }
            match kind {
                Trouble::Silent => victim.signal("-CONT")?,
                Trouble::Killed | Trouble::Restarted => {
                    *victim = Server::start(pagetax, MEMORY, &victim.address)?;
                }
            }
            // So that the client has noticed.
            thread::sleep(Duration::from_millis(300));
            Ok(())
        });
        let longest = program.rewrite_until(start, &since, || {
            maker.is_finished() && (whole() || Instant::now() >= until)
        })?;
        maker.join().expect("it does not panic")?;
        ensure!(whole(), "copies are still missing {WHOLE_PATIENCE:?} after a server was {kind:?}");
        Ok(longest)
    })
}

/// Values at percentiles, named.
struct Distribution([(&'static str, Duration); 4]);

impl Distribution {
    fn of(mut values: Vec<Duration>) -> Distribution {
        values.sort_unstable();
        // The smallest value that so many percent of all do not exceed.
        let at = |percent: usize| values[(values.len() * percent).div_ceil(100) - 1];
        Distribution([("p50", at(50)), ("p90", at(90)), ("p99", at(99)), ("max", at(100))])
    }

    fn at(&self, name: &str) -> Duration {
        self.0.iter().find(|(known, _)| *known == name).expect("a known percentile").1
    }
}
