//! One run: three servers, a program that fills and rewrites its memory, and one kind of failure of one
//! server.

use super::program::RewritingProgram;
use super::proxy::{Harm, Proxy};
use crate::bench::serve::Server;
use anyhow::{Context, Result, ensure};
use pagetax_core::access::Rng;
use pagetax_remote::client::cluster::{Cluster, ClusterOptions};
use pagetax_remote::page::{PAGE_BYTES, PageMac, RUN_PAGES_MAX};
use pagetax_remote::store::{PageStore, PutRun, StoreError};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

pub const SERVERS: usize = 3;
/// The memory limit of each server.
const MEMORY: &str = "64M";
/// For servers to be back, and every page to have its copies.
pub const WHOLE_PATIENCE: Duration = Duration::from_secs(30);
/// The time that the program runs before a failure.
const BEFORE: Duration = Duration::from_millis(500);
/// For a client to notice trouble, or to repair what it has found.
const NOTICE_PATIENCE: Duration = Duration::from_millis(300);
/// Reads of all pages until one finds no bad copy: a read may go to another server than the last one.
const PASSES_MAX: usize = 5;

/// The failure of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerFailure {
    /// Killed, and started again later.
    Killed,
    /// Stopped by SIGSTOP: it looks like a partition from outside.
    Silent,
    /// Answers slowly, all or some of the time.
    Gray,
    /// Another client takes all the memory that is free.
    Full,
    /// Killed and started again at once.
    Restarted,
    /// Has other bytes than those that were put, or gets other ones.
    Corrupted,
}

pub const FAILURES: [(ServerFailure, &str, u64); 6] = [
    (ServerFailure::Killed, "killed", 200),
    (ServerFailure::Silent, "silent", 40),
    (ServerFailure::Gray, "gray", 40),
    (ServerFailure::Full, "full", 40),
    (ServerFailure::Restarted, "restarted", 40),
    (ServerFailure::Corrupted, "corrupted", 40),
];

/// The servers of a run, of which one gets into trouble.
struct Scene {
    pagetax: String,
    servers: Vec<Server>,
    victim: usize,
    /// Before the victim, for troubles that servers do not make themselves.
    proxy: Option<Proxy>,
    harm: Harm,
}

/// Runs it; what scripts want to know.
pub fn run(pagetax: &str, kind: ServerFailure, seed: u64) -> Result<Value> {
    let mut rng = Rng::new(!seed);
    let mut scene = Scene::set(pagetax, kind, &mut rng)?;
    let repair_after = NOTICE_PATIENCE;
    let options = ClusterOptions { copies: 2, repair_after, ..ClusterOptions::new(scene.labels()) };
    let store = Arc::new(Cluster::connect(options)?);
    let mut program = RewritingProgram::fill(store.clone(), seed)?;
    let mut during = duration(&mut rng);
    if kind == ServerFailure::Gray {
        // Others are noticed at once.
        during *= 4;
    }
    let patience = during + WHOLE_PATIENCE;
    let is_whole = || store.servers_up() == SERVERS && store.replicas_missing() == 0;
    let fail = || scene.make(kind, during);
    let (longest, oversleep) = play(&mut program, patience, fail, is_whole)?;
    let passes = check(&store, &mut program)?;
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let tally = store.counters();
    Ok(json!({
        "kind": format!("{kind:?}"), "seed": seed,
        "longest_stall_ns": longest.map(|stall| stall.as_nanos() as u64),
        "longest_oversleep_ns": oversleep.as_nanos() as u64,
        "page_ins": program.page_ins(),
        "wrong_pages": program.wrong_pages,
        "bad_copies": count(&tally.bad_replicas_total),
        "pages_repaired": count(&tally.pages_repaired_total),
        "hedges": count(&tally.hedges_total),
        "times_down": count(&tally.servers_down_total),
        "passes": passes,
    }))
}

/// Returns how long a server fails.
pub fn duration(rng: &mut Rng) -> Duration {
    Duration::from_millis(200 + rng.below(800))
}

/// Runs the program while a server fails, recovers, and gets its copies back. Returns the longest waits of
/// the program before and after the failure, and the longest wait for a CPU of a thread that only sleeps.
pub fn play(
    program: &mut RewritingProgram,
    patience: Duration,
    fail: impl FnOnce() -> Result<()> + Send,
    is_whole: impl Fn() -> bool,
) -> Result<([Duration; 2], Duration)> {
    let is_over = AtomicBool::new(false);
    let (start, since) = (Instant::now(), AtomicU64::new(u64::MAX));
    let until = start + BEFORE + patience;
    thread::scope(|scope| {
        let metronome = scope.spawn(|| longest_oversleep(&is_over));
        let maker = scope.spawn(|| -> Result<()> {
            thread::sleep(BEFORE);
            since.store(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
            fail()?;
            thread::sleep(NOTICE_PATIENCE);
            Ok(())
        });
        let longest = program.rewrite_until(start, &since, || {
            maker.is_finished() && (is_whole() || Instant::now() >= until)
        });
        is_over.store(true, Ordering::Relaxed);
        let oversleep = metronome.join().expect("it does not panic");
        maker.join().expect("it does not panic")?;
        ensure!(is_whole(), "servers are down or copies missing, too long after");
        Ok((longest, oversleep))
    })
}

/// Returns the longest wait for a CPU of a thread that only sleeps. The machine adds as much to any wait.
fn longest_oversleep(is_over: &AtomicBool) -> Duration {
    let (nap, mut longest) = (Duration::from_millis(1), Duration::ZERO);
    while !is_over.load(Ordering::Relaxed) {
        let begun = Instant::now();
        thread::sleep(nap);
        longest = longest.max(begun.elapsed() - nap);
    }
    longest
}

/// Reads all pages until no bad copy is found. Returns how often.
fn check(store: &Cluster, program: &mut RewritingProgram) -> Result<usize> {
    for pass in 1..=PASSES_MAX {
        let bad_copies = || store.counters().bad_replicas_total.load(Ordering::Relaxed);
        let before = bad_copies();
        program.check_all();
        if bad_copies() == before {
            return Ok(pass);
        }
        thread::sleep(NOTICE_PATIENCE);
    }
    anyhow::bail!("bad copies are still found after {PASSES_MAX} reads of all pages")
}

impl Scene {
    fn set(pagetax: &str, kind: ServerFailure, rng: &mut Rng) -> Result<Scene> {
        let start = |_| Server::start(pagetax, MEMORY, "127.0.0.1:0");
        let servers: Vec<Server> = (0..SERVERS).map(start).collect::<Result<_>>()?;
        let victim = rng.below(SERVERS as u64) as usize;
        // All of a kind's shades, from now and then to always.
        let share = 0.1 + 0.9 * rng.below(101) as f64 / 100.0;
        let harm = match kind {
            ServerFailure::Gray => Harm::Delays { share },
            ServerFailure::Corrupted => Harm::Damages { share: share / 10.0 },
            _ => Harm::Nothing,
        };
        // Others go without: a proxy whose server has gone looks like one that turns clients away.
        let proxy = match harm {
            Harm::Nothing => None,
            _ => Some(Proxy::start(&servers[victim].address, rng.next_u64())?),
        };
        Ok(Scene { pagetax: pagetax.into(), servers, victim, proxy, harm })
    }

    fn labels(&self) -> Vec<String> {
        let mut labels: Vec<String> =
            self.servers.iter().map(|server| server.address.clone()).collect();
        if let Some(proxy) = &self.proxy {
            labels[self.victim].clone_from(&proxy.address);
        }
        labels
    }

    fn make(&mut self, kind: ServerFailure, during: Duration) -> Result<()> {
        let victim = &mut self.servers[self.victim];
        match kind {
            ServerFailure::Killed | ServerFailure::Restarted => {
                victim.kill()?;
                if kind == ServerFailure::Killed {
                    thread::sleep(during);
                }
                *victim = Server::start(&self.pagetax, MEMORY, &victim.address)?;
            }
            ServerFailure::Silent => {
                victim.signal("-STOP")?;
                thread::sleep(during);
                victim.signal("-CONT")?;
            }
            ServerFailure::Full => take_all(&victim.address, during)?,
            ServerFailure::Gray | ServerFailure::Corrupted => {
                let proxy = self.proxy.as_ref().context("a proxy")?;
                proxy.set(self.harm);
                thread::sleep(during);
                proxy.set(Harm::Nothing);
            }
        }
        Ok(())
    }
}

/// Takes all memory of a server that is free or becomes free, for a time.
fn take_all(address: &str, time: Duration) -> Result<()> {
    let store = Cluster::connect(ClusterOptions::new(vec![address.into()]))?;
    let pages_total = store.capacity()?.pages_total;
    let region = store.create_region(pages_total, true)?;
    let mut writer = store.writer()?;
    let bytes = vec![1; RUN_PAGES_MAX * PAGE_BYTES];
    let macs = vec![PageMac::of(&bytes[..PAGE_BYTES]); RUN_PAGES_MAX];
    let (mut first, mut count, until) = (0, RUN_PAGES_MAX, Instant::now() + time);
    while Instant::now() < until && first < pages_total {
        count = count.min((pages_total - first) as usize);
        let run = PutRun { first, pages: &bytes[..count * PAGE_BYTES], macs: &macs[..count] };
        match writer.put(region, &[run]) {
            Ok(()) => first += count as u64,
            Err(StoreError::Full { .. }) => {
                count = 1;
                thread::sleep(Duration::from_millis(1));
            }
            Err(error) => return Err(error.into()),
        }
    }
    ensure!(count == 1, "the server did not become full");
    Ok(())
}
