//! Several memory servers as one page store.
//!
//! Invariants: what threads decide together, they decide in the [`Replicator`], under its lock, which
//! is never held across I/O; who finds that a server fails says so here, and one thread finds out
//! how badly.

use super::connection::{Connection, Endpoint, is_turned_away};
use super::control::{Control, Watch};
use super::link::{LinkError, Links, is_slow};
use super::reader::Reader;
use super::replicator::{CHUNK_PAGES, ChunkAt, Replicator, Standing};
use super::set::ServerId;
use super::writer::Writer;
use crate::page::PageSum;
use crate::pager::Log;
use crate::secret;
use crate::store::{Capacity, PageReader, PageStore, PageWriter, RegionId, StoreError};
use crate::threads;
use crate::tls::ClientTls;
use crate::wire::reply::Failure;
use crate::wire::request::Token;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long servers that do not answer are waited for, unless told otherwise.
pub const UNREACHABLE: Duration = Duration::from_secs(30);

/// How a client uses its servers.
#[derive(Clone)]
pub struct Options {
    /// Host, or host and port, of each.
    pub servers: Vec<String>,
    /// Of each page, on as many servers: 1 to 3.
    pub copies: usize,
    /// Look for more servers on the local network.
    pub discover: bool,
    /// Mutual TLS.
    pub tls: Option<ClientTls>,
    /// Use servers beyond loopback without TLS: whoever is on the way can read and change the pages.
    pub insecure: bool,
    /// For people who look at the server: the program.
    pub name: String,
    /// A read that takes longer is sent to another copy too.
    pub hedge_after: Duration,
    /// A server that takes longer is taken for down.
    pub answer_within: Duration,
    /// A server that has been down for longer is replaced, as far as other copies are left.
    pub repair_after: Duration,
    /// A server that has not answered for longer is not waited for any more: accesses to pages that nobody else has
    /// fail until it returns.
    pub unreachable: Duration,
    /// Where lines for the log go: pages that are lost with their last server.
    pub log: Option<Log>,
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("servers", &self.servers)
            .field("copies", &self.copies)
            .field("discover", &self.discover)
            .field("tls", &self.tls.is_some())
            .finish_non_exhaustive()
    }
}

impl Options {
    /// For these servers, else with the defaults.
    pub fn new(servers: Vec<String>) -> Options {
        Options {
            servers,
            copies: 1,
            discover: false,
            tls: None,
            insecure: false,
            name: program_name(),
            hedge_after: Duration::from_millis(3),
            answer_within: Duration::from_millis(250),
            repair_after: Duration::from_secs(2),
            unreachable: UNREACHABLE,
            log: None,
        }
    }
}

impl Options {
    /// Whether only servers on loopback may be used.
    fn needs_tls(&self) -> bool {
        self.tls.is_none() && !self.insecure
    }
}

fn program_name() -> String {
    let comm = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
    comm.trim_end().to_string()
}

/// What has happened to a client.
#[derive(Debug, Default)]
pub struct Tally {
    /// Reads that were sent to a second server because the first took long.
    pub hedges_total: AtomicU64,
    /// Reads that were answered by another than the first server, of any reason.
    pub failovers_total: AtomicU64,
    /// Copies that were not what was put: damaged or out of date. They were not used.
    pub bad_copies_total: AtomicU64,
    /// Times that a server stopped answering.
    pub servers_down_total: AtomicU64,
    /// Pages copied from server to server.
    pub pages_repaired_total: AtomicU64,
    /// Times that a chunk of 1 MiB lost pages because the last server that had them was gone.
    pub chunks_damaged_total: AtomicU64,
}

/// What a server is asked to do with pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Deed {
    Read,
    Write,
}

/// Requests of one kind that fail in a row before a server is left, though it says that it is well.
const STRIKES_MAX: u32 = 3;
/// The same where pages have fewer copies without it.
const STRIKES_MAX_OF_FEW: u32 = 8;
/// The first time that a server is left, it is for so long; each further time twice as long as the time before.
const SHUN_FOR: Duration = Duration::from_secs(1);
/// But not longer; after as long without trouble it begins anew.
const SHUN_MAX: Duration = Duration::from_secs(64);
/// Tries to connect to a server that hangs up, before it counts as well: one that is being killed hangs up, too.
const GREETINGS: u32 = 3;

/// Until when a server is not used, by our own decision.
#[derive(Debug, Clone, Copy, Default)]
struct Shunned {
    until: Option<Instant>,
    times: u32,
}

/// A server as its client knows it.
#[derive(Debug)]
pub(super) struct Peer {
    pub endpoint: Endpoint,
    /// 0 until it was first reached.
    pub epoch: AtomicU64,
    /// The machine that it runs on, as it says.
    pub machine: AtomicU64,
    /// Where it was met.
    address: Mutex<Option<SocketAddr>>,
    /// The server of which this is but another name.
    alias_of: Mutex<Option<ServerId>>,
    /// Failed requests in a row, by [`Deed`].
    strikes: [AtomicU32; 2],
    shunned: Mutex<Shunned>,
    /// Held by the one who finds out whether it lives.
    verdict: Mutex<()>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Peer {
    fn new(endpoint: Endpoint) -> Peer {
        Peer {
            endpoint,
            epoch: AtomicU64::new(0),
            machine: AtomicU64::new(0),
            address: Mutex::default(),
            alias_of: Mutex::default(),
            strikes: Default::default(),
            shunned: Mutex::default(),
            verdict: Mutex::default(),
        }
    }

    /// Connects to where it was met, or to any of its addresses if it was not yet.
    pub fn connect(&self, name: &str, patience: Duration) -> Result<Connection, StoreError> {
        let address = *locked(&self.address);
        self.endpoint.connect_at(address, name, patience)
    }

    /// From now on, only this address is its own; or any, if there is none.
    pub fn pin(&self, address: Option<SocketAddr>) {
        *locked(&self.address) = address;
    }

    pub fn alias_of(&self) -> Option<ServerId> {
        *locked(&self.alias_of)
    }

    pub fn set_alias_of(&self, server: Option<ServerId>) {
        *locked(&self.alias_of) = server;
    }

    /// Whether it is left alone for now.
    pub fn is_shunned(&self) -> bool {
        locked(&self.shunned).until.is_some_and(|until| Instant::now() < until)
    }

    /// It has done what it was asked.
    pub fn did(&self, deed: Deed) {
        let strikes = &self.strikes[deed as usize];
        if strikes.load(Ordering::Relaxed) != 0 {
            strikes.store(0, Ordering::Relaxed);
        }
    }

    /// It has not, though it says that it is well; for how long it is to be left, if it is.
    fn strike(&self, deed: Deed, strikes_max: u32) -> Option<Duration> {
        let strikes = self.strikes[deed as usize].fetch_add(1, Ordering::Relaxed) + 1;
        let mut shunned = locked(&self.shunned);
        let is_long_ago = |until: Instant| until.elapsed() > SHUN_MAX;
        if shunned.until.is_some_and(is_long_ago) {
            shunned.times = 0;
        }
        if strikes < strikes_max {
            return None;
        }
        self.did(deed);
        let time = (SHUN_FOR * (1 << shunned.times.min(6))).min(SHUN_MAX);
        *shunned = Shunned { until: Some(Instant::now() + time), times: shunned.times + 1 };
        Some(time)
    }
}

/// A copy that was read and is not what was put.
#[derive(Debug, Clone, Copy)]
pub(super) struct BadCopy {
    pub server: ServerId,
    pub region: RegionId,
    pub page: u64,
    /// What its owner wants it to be.
    pub sum: PageSum,
}

/// Bad copies that wait for their repair; more are found again when they are read again.
const BAD_COPIES_MAX: usize = 1024;

/// What a try to reach a server came to.
enum Probe {
    Alive,
    /// It lives, and takes no new connections.
    TurnsAway,
    Restarted,
    Dead,
}

/// A region as one server knows it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Remote {
    pub number: u32,
    pub token: Token,
}

/// What all threads of a client share.
#[derive(Debug)]
pub(super) struct Shared {
    pub options: Options,
    pub tally: Tally,
    pub replicator: RwLock<Replicator>,
    pub peers: RwLock<Vec<Arc<Peer>>>,
    pub remotes: RwLock<HashMap<(RegionId, ServerId), Remote>>,
    /// Pages of each region.
    pub regions: RwLock<BTreeMap<RegionId, u64>>,
    pub stopped: AtomicBool,
    /// To be repaired by the control thread.
    pub bad_copies: Mutex<VecDeque<BadCopy>>,
    /// Counts changes of servers' standing.
    changes: Mutex<u64>,
    changed: Condvar,
}

/// The store.
#[derive(Debug)]
pub struct Cluster {
    shared: Arc<Shared>,
    watch: Arc<Mutex<Watch>>,
    next_region: AtomicU64,
    thread: Option<JoinHandle<()>>,
}

impl Cluster {
    /// Connects to all servers that can be reached.
    ///
    /// # Errors
    /// When they are too few for the copies that are asked for, one refuses us, or the network would have to
    /// be trusted.
    pub fn connect(options: Options) -> Result<Cluster, StoreError> {
        if !(1..=3).contains(&options.copies) {
            return Err(StoreError::BadRequest("there can be 1, 2 or 3 copies"));
        }
        if options.discover && options.needs_tls() {
            // Whoever announces first would be sent the pages.
            return Err(StoreError::Insecure { server: "a server that --discover finds".into() });
        }
        let copies = options.copies;
        let shared = Arc::new(Shared::new(options));
        let mut watch = Watch::new(shared.clone())?;
        let problem = watch.first_look()?;
        let reached = shared.replicator().up().len();
        if reached < copies {
            return Err(problem.unwrap_or_else(|| StoreError::Unreachable {
                server: format!("{copies} memory servers for {copies} copies"),
                source: io::Error::other(format!("{reached} found")),
            }));
        }
        let watch = Arc::new(Mutex::new(watch));
        let control = Control { shared: shared.clone(), watch: watch.clone() };
        let spawned = threads::spawn("pagetax-control", move || control.run_or_end())
            .map_err(|source| StoreError::Unreachable { server: "a thread".into(), source })?;
        let next_region = AtomicU64::new(1);
        Ok(Cluster { shared, watch, next_region, thread: Some(spawned) })
    }

    /// What has happened so far.
    pub fn tally(&self) -> &Tally {
        &self.shared.tally
    }

    /// Servers that answer now.
    pub fn servers_up(&self) -> usize {
        self.shared.replicator().up().len()
    }

    /// What the user should know of the servers that were reached, though it works: lines for people.
    pub fn warnings(&self) -> Vec<String> {
        if self.shared.options.copies < 2 {
            return Vec::new();
        }
        let peers = self.shared.peers.read().unwrap_or_else(PoisonError::into_inner);
        let up = self.shared.replicator().up();
        let reached: Vec<&Arc<Peer>> =
            (0..).zip(peers.iter()).filter(|(id, _)| up.has(*id)).map(|(_, peer)| peer).collect();
        let machine = |peer: &Peer| peer.machine.load(Ordering::Relaxed);
        let lines = reached.iter().enumerate().filter_map(|(at, peer)| {
            let other = reached[..at].iter().find(|other| machine(other) == machine(peer))?;
            Some(format!(
                "{} and {} run on one machine: whatever takes it down takes both replicas of a page",
                other.endpoint.label, peer.endpoint.label
            ))
        });
        lines.collect()
    }

    /// Copies that are still to be made so that every page has as many as it should.
    pub fn copies_missing(&self) -> u64 {
        self.shared.replicator().copies_missing()
    }

    fn watch(&self) -> MutexGuard<'_, Watch> {
        self.watch.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PageStore for Cluster {
    fn describe(&self) -> String {
        let peers = self.shared.peers.read().unwrap_or_else(PoisonError::into_inner);
        let labels: Vec<&str> = peers.iter().map(|peer| peer.endpoint.label.as_str()).collect();
        let (copies, labels) = (self.shared.options.copies, labels.join(", "));
        format!("{copies} {} on {labels}", if copies == 1 { "copy" } else { "copies" })
    }

    fn capacity(&self) -> Result<Capacity, StoreError> {
        let replicator = self.shared.replicator();
        if replicator.up().is_empty() {
            return Err(self.shared.nobody());
        }
        Ok(replicator.capacity())
    }

    fn create_region(&self, pages: u64, overcommit: bool) -> Result<RegionId, StoreError> {
        let pages_free = self.capacity()?.pages_free;
        if !overcommit && pages > pages_free {
            return Err(StoreError::Full { pages_asked: pages, pages_free });
        }
        let region = RegionId(self.next_region.fetch_add(1, Ordering::Relaxed));
        let mut watch = self.watch();
        self.shared.regions_mut().insert(region, pages);
        self.shared.replicator_mut().add_region(region, pages);
        let refused = watch.create_everywhere(region, pages);
        let up = self.shared.replicator().up();
        let made = up.iter().filter(|server| self.shared.remote(region, *server).is_some()).count();
        if let Some(server) = refused.filter(|_| made < self.shared.options.copies) {
            // Without a place for its pages the program would run on, over its limit.
            watch.drop_everywhere(region);
            self.shared.regions_mut().remove(&region);
            self.shared.replicator_mut().drop_region(region);
            return Err(StoreError::Refused {
                server: self.shared.peer(server).endpoint.label.clone(),
                why: "it has as many regions as it may, of this client or of all; raise its \
                      --client-regions-max or --regions-max, or use another server"
                    .into(),
            });
        }
        Ok(region)
    }

    fn drop_region(&self, region: RegionId) -> Result<(), StoreError> {
        let mut watch = self.watch();
        self.shared.regions_mut().remove(&region).ok_or(StoreError::NoRegion(region))?;
        self.shared.replicator_mut().drop_region(region);
        watch.drop_everywhere(region);
        Ok(())
    }

    fn drop_region_at_end(&self, region: RegionId) {
        self.watch().drop_at_end(region);
    }

    fn reader(&self) -> Result<Box<dyn PageReader>, StoreError> {
        Ok(Box::new(Reader::new(self.shared.clone())))
    }

    fn writer(&self) -> Result<Box<dyn PageWriter>, StoreError> {
        Ok(Box::new(Writer::new(self.shared.clone())))
    }
}

impl Drop for Cluster {
    /// Ends the thread, and tells the servers that they can have their memory back.
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::Relaxed);
        self.shared.notify();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let regions: Vec<RegionId> = self.shared.regions().keys().copied().collect();
        let mut watch = self.watch();
        regions.into_iter().for_each(|region| watch.drop_everywhere(region));
    }
}

impl Shared {
    fn new(options: Options) -> Shared {
        Shared {
            replicator: RwLock::new(Replicator::new(options.copies)),
            options,
            tally: Tally::default(),
            peers: RwLock::default(),
            remotes: RwLock::default(),
            regions: RwLock::default(),
            stopped: AtomicBool::new(false),
            // Readers must not allocate.
            bad_copies: Mutex::new(VecDeque::with_capacity(BAD_COPIES_MAX)),
            changes: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    pub fn replicator(&self) -> std::sync::RwLockReadGuard<'_, Replicator> {
        self.replicator.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn replicator_mut(&self) -> std::sync::RwLockWriteGuard<'_, Replicator> {
        self.replicator.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn regions(&self) -> std::sync::RwLockReadGuard<'_, BTreeMap<RegionId, u64>> {
        self.regions.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn regions_mut(&self) -> std::sync::RwLockWriteGuard<'_, BTreeMap<RegionId, u64>> {
        self.regions.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn region_pages(&self, region: RegionId) -> Result<u64, StoreError> {
        self.regions().get(&region).copied().ok_or(StoreError::NoRegion(region))
    }

    pub fn remote(&self, region: RegionId, server: ServerId) -> Option<Remote> {
        let remotes = self.remotes.read().unwrap_or_else(PoisonError::into_inner);
        remotes.get(&(region, server)).copied()
    }

    pub fn set_remote(&self, region: RegionId, server: ServerId, remote: Option<Remote>) {
        let mut remotes = self.remotes.write().unwrap_or_else(PoisonError::into_inner);
        match remote {
            Some(remote) => remotes.insert((region, server), remote),
            None => remotes.remove(&(region, server)),
        };
    }

    pub fn peer(&self, server: ServerId) -> Arc<Peer> {
        self.peers.read().unwrap_or_else(PoisonError::into_inner)[server as usize].clone()
    }

    /// A server more to be watched, unless it is known; false when there are too many.
    pub fn add_peer(&self, label: &str) -> Result<bool, StoreError> {
        // Before the lock: a name is looked up, which readers must not wait for.
        let endpoint = Endpoint::new(label, self.options.tls.clone())?;
        if self.options.needs_tls() && !endpoint.is_loopback() {
            return Err(StoreError::Insecure { server: label.into() });
        }
        let mut peers = self.peers.write().unwrap_or_else(PoisonError::into_inner);
        if peers.iter().any(|peer| peer.endpoint.is_same_place(&endpoint)) {
            return Ok(true);
        }
        let added = self.replicator_mut().add_server().is_some();
        if added {
            peers.push(Arc::new(Peer::new(endpoint)));
        }
        Ok(added)
    }

    /// Someone's connection to a server broke, or the server took too long, with something that it was asked to do or
    /// just by itself. Finds out whether it still lives, once for all who ask at the same time. One that says so, and
    /// fails again and again, is left for a while.
    ///
    /// Returns whether a new link is better than the old one: not if the server takes none, or is silent, in which case
    /// it may yet answer on the link that there is.
    pub fn failed(&self, server: ServerId, deed: Option<Deed>) -> bool {
        let peer = self.peer(server);
        let _one = locked(&peer.verdict);
        if !self.replicator().up().has(server) {
            return false;
        }
        let probe = self.probe(&peer);
        let takes_links = matches!(probe, Probe::Alive | Probe::Restarted);
        match probe {
            // Whoever has a link to it goes on.
            Probe::TurnsAway => return false,
            Probe::Alive => {
                let are_spare = self.replicator().up().len() > self.options.copies;
                let strikes_max = if are_spare { STRIKES_MAX } else { STRIKES_MAX_OF_FEW };
                let time = deed.and_then(|deed| peer.strike(deed, strikes_max));
                let Some(time) = time else { return takes_links };
                self.leave(server, "answers, but requests to it fail", time);
                return takes_links;
            }
            Probe::Restarted => self.gone(server),
            Probe::Dead => self.replicator_mut().server_down(server),
        }
        self.tally.servers_down_total.fetch_add(1, Ordering::Relaxed);
        self.notify();
        takes_links
    }

    /// A server answers so slowly that all others were done long before. It is left for a while, unless pages would
    /// have fewer copies without it; whether it is.
    pub fn is_left_as_slow(&self, server: ServerId) -> bool {
        let peer = self.peer(server);
        let _one = locked(&peer.verdict);
        let up = self.replicator().up();
        if !up.has(server) || up.len() <= self.options.copies {
            return false;
        }
        let time = peer.strike(Deed::Write, 1);
        time.inspect(|time| self.leave(server, "answers far more slowly than others", *time))
            .is_some()
    }

    fn leave(&self, server: ServerId, why: &str, time: Duration) {
        self.replicator_mut().server_shunned(server);
        let label = &self.peer(server).endpoint.label;
        self.say(&format!("{label} {why}: it is not used for {} s", time.as_secs()));
        self.tally.servers_down_total.fetch_add(1, Ordering::Relaxed);
        self.notify();
    }

    fn probe(&self, peer: &Peer) -> Probe {
        let patience = self.options.answer_within.min(Duration::from_millis(100));
        for _ in 0..GREETINGS {
            match peer.connect(&self.options.name, patience) {
                Ok(found) if found.epoch == peer.epoch.load(Ordering::Relaxed) => {
                    return Probe::Alive;
                }
                Ok(_) => return Probe::Restarted,
                Err(error) if is_turned_away(&error) => {
                    std::thread::sleep(Duration::from_millis(2))
                }
                Err(_) => return Probe::Dead,
            }
        }
        Probe::TurnsAway
    }

    pub fn say(&self, line: &str) {
        if let Some(log) = &self.options.log {
            log(line);
        }
    }

    /// The server, other than this one, that drew this epoch.
    pub fn server_of_epoch(&self, epoch: u64, but: ServerId) -> Option<ServerId> {
        let peers = self.peers.read().unwrap_or_else(PoisonError::into_inner);
        let is_it = |(id, peer): &(ServerId, &Arc<Peer>)| {
            *id != but && peer.alias_of().is_none() && peer.epoch.load(Ordering::Relaxed) == epoch
        };
        (0..).zip(peers.iter()).find(is_it).map(|(id, _)| id)
    }

    /// A copy is bad that should be good: it will be repaired from another.
    pub fn found_bad(&self, bad: BadCopy) {
        let at = ChunkAt { region: bad.region, chunk: bad.page / CHUNK_PAGES };
        let should_be_good = {
            let replicator = self.replicator();
            replicator.has_region(bad.region) && replicator.complete(at).has(bad.server)
        };
        let mut queue = locked(&self.bad_copies);
        if should_be_good && queue.len() < BAD_COPIES_MAX {
            queue.push_back(bad);
        }
    }

    /// What a server held is lost. Says so at once where nobody else has it: a read may come too late
    /// to do anything about it.
    pub fn gone(&self, server: ServerId) {
        let damaged = self.replicator_mut().server_gone(server);
        self.say_damaged(server, "is gone", &damaged);
    }

    /// A server is not waited for any more.
    pub fn silent(&self, server: ServerId) {
        let damaged = self.replicator_mut().server_silent(server);
        let time = self.options.unreachable.as_secs_f64();
        self.say_damaged(server, &format!("has not answered for {time:.0} s"), &damaged);
        // Perhaps it comes back elsewhere.
        self.peer(server).pin(None);
    }

    fn say_damaged(&self, server: ServerId, what: &str, damaged: &[ChunkAt]) {
        let Some(first) = damaged.first() else { return };
        self.tally.chunks_damaged_total.fetch_add(damaged.len() as u64, Ordering::Relaxed);
        let label = &self.peer(server).endpoint.label;
        let (count, page) = (damaged.len(), first.chunk * CHUNK_PAGES);
        self.say(&format!(
            "{label} {what}, with pages that no other memory server has: in {count} MiB from page {page} of region \
             {} on; keep more copies",
            first.region
        ));
    }

    /// The error when no server answers.
    pub fn nobody(&self) -> StoreError {
        let peers = self.peers.read().unwrap_or_else(PoisonError::into_inner);
        let labels: Vec<&str> = peers.iter().map(|peer| peer.endpoint.label.as_str()).collect();
        let server = if labels.is_empty() { "any server".into() } else { labels.join(", ") };
        StoreError::Unreachable { server, source: io::ErrorKind::NotConnected.into() }
    }

    /// Wakes everybody who waits for a server.
    pub fn notify(&self) {
        *self.changes.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.changed.notify_all();
    }

    /// How many changes there were; to be taken before looking, and handed to `wait_for_change`.
    pub fn change_count(&self) -> u64 {
        *self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until there is a change after that count, or the time is over.
    pub fn wait_for_change(&self, seen: u64, until: Instant) {
        let changes = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        let left = until.saturating_duration_since(Instant::now());
        let still = |changes: &mut u64| *changes == seen && !self.stopped.load(Ordering::Relaxed);
        drop(self.changed.wait_timeout_while(changes, left, still));
    }

    /// The token of a region on one server.
    pub fn fresh_token() -> Result<Token, StoreError> {
        secret::random()
            .map_err(|source| StoreError::Unreachable { server: "random numbers".into(), source })
    }

    /// Whether a server is down for now, or for good.
    pub fn standing(&self, server: ServerId) -> Standing {
        self.replicator().server(server).standing
    }

    /// What a link's error says of its server; whether the link is of no more use.
    pub fn note(&self, server: ServerId, region: RegionId, error: &LinkError, deed: Deed) -> bool {
        let is_useless = match error {
            LinkError::Broken(_) | LinkError::Restarted => self.failed(server, Some(deed)),
            LinkError::Failed(Failure::NoRegion | Failure::Denied) => {
                // It has dropped what is ours, unless it is ours no more.
                if self.regions().contains_key(&region) {
                    self.gone(server);
                    self.notify();
                }
                true
            }
            LinkError::NoRegion | LinkError::Failed(_) => false,
        };
        is_useless || !is_slow(error)
    }

    /// For a thread that changes what servers hold.
    pub fn links(self: &Arc<Self>) -> Links {
        Links::new(self.clone(), self.options.answer_within, false)
    }

    /// For a thread that reads, and hedges.
    pub fn read_only_links(self: &Arc<Self>) -> Links {
        Links::new(self.clone(), self.options.hedge_after, true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::listen::{self, Server};
    use std::net::Ipv4Addr;

    #[test]
    fn another_server_of_the_same_name_is_not_taken_for_the_one_that_was_met() {
        let start =
            |_| Server::start((Ipv4Addr::LOCALHOST, 0).into(), listen::Options::default()).unwrap();
        let [met, other] = [0, 1].map(start);
        let shared = Arc::new(Shared::new(Options::new(Vec::new())));
        shared.replicator_mut().add_server().unwrap();
        let name = Endpoint::of(&[met.address(), other.address()]);
        shared.peers.write().unwrap().push(Arc::new(Peer::new(name)));
        let mut watch = Watch::new(shared.clone()).unwrap();
        watch.first_look().unwrap();
        assert_eq!(shared.standing(0), Standing::Up);
        drop(met);
        shared.failed(0, None);
        // Gone would mean that its pages are lost, though it may come back with them.
        assert_eq!(shared.standing(0), Standing::Down);
        watch.look();
        assert_eq!(shared.standing(0), Standing::Down);
    }
}
