//! A page store on several memory servers.
//!
//! Invariants: threads share decisions only through the [`Replicator`], under its lock. No thread
//! holds that lock across I/O. A thread that sees a server fail reports it here, and one thread at
//! a time probes that server.

use super::connection::{Connection, Endpoint, is_turned_away};
use super::control::{Control, ServerMonitor};
use super::link::{LinkError, ServerLinks, is_slow};
use super::reader::ReplicaReader;
use super::replicator::{Availability, CHUNK_PAGES, ChunkAt, Replicator};
use super::set::ServerId;
use super::writer::ReplicaWriter;
use crate::page::PageMac;
use crate::pager::Log;
use crate::random;
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

/// The default of [`ClusterOptions::unreachable`].
pub const UNREACHABLE: Duration = Duration::from_secs(30);

/// The settings of a client of memory servers.
#[derive(Clone)]
pub struct ClusterOptions {
    /// The host, or host and port, of each server.
    pub servers: Vec<String>,
    /// The number of replicas of each page, on as many servers: 1 to 3.
    pub copies: usize,
    /// True to look for more servers on the local network (mDNS).
    pub discover: bool,
    /// The settings for mutual TLS; `None` without TLS.
    pub tls: Option<ClientTls>,
    /// True to use servers beyond loopback without TLS. Anybody on the path can then read and
    /// change the pages.
    pub insecure: bool,
    /// The name under which the servers' reports list this client: by default, the program.
    pub name: String,
    /// The time after which a reader sends a hedged request to another replica.
    pub hedge_after: Duration,
    /// The time after which a server without a reply counts as down.
    pub answer_within: Duration,
    /// The time down after which other servers take a server's place, if other replicas are left.
    pub repair_after: Duration,
    /// The time without a reply after which nobody waits for a server any more. Accesses to pages
    /// that no other server has then fail, until the server returns.
    pub unreachable: Duration,
    /// The receiver of log lines, such as those on pages that are lost with their last server.
    pub log: Option<Log>,
}

impl fmt::Debug for ClusterOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterOptions")
            .field("servers", &self.servers)
            .field("copies", &self.copies)
            .field("discover", &self.discover)
            .field("tls", &self.tls.is_some())
            .finish_non_exhaustive()
    }
}

impl ClusterOptions {
    /// Returns the default settings for these servers.
    pub fn new(servers: Vec<String>) -> ClusterOptions {
        ClusterOptions {
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

impl ClusterOptions {
    /// Returns true if the client may use only servers on loopback.
    fn needs_tls(&self) -> bool {
        self.tls.is_none() && !self.insecure
    }
}

fn program_name() -> String {
    let comm = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
    comm.trim_end().to_string()
}

/// The counts of events since a client connected.
#[derive(Debug, Default)]
pub struct ClusterCounters {
    /// Reads that were sent to a second server because the first one was slow.
    pub hedges_total: AtomicU64,
    /// Reads that another server than the first one answered, for whatever reason.
    pub failovers_total: AtomicU64,
    /// Replicas that were damaged or stale. The client did not use them.
    pub bad_replicas_total: AtomicU64,
    /// Times that a server stopped answering, was restarted or was shunned.
    pub servers_down_total: AtomicU64,
    /// Pages that repairs copied from server to server.
    pub pages_repaired_total: AtomicU64,
    /// Times that a chunk of 1 MiB lost pages with the last server that had them.
    pub chunks_damaged_total: AtomicU64,
}

/// A kind of request for pages. The client counts the failures of each kind on its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RequestKind {
    Read,
    Write,
}

/// The number of consecutive failures of one kind after which the client shuns a server that is
/// alive.
const STRIKES_MAX: u32 = 3;
/// The same while no server is spare, so that shunning one leaves pages under-replicated.
const STRIKES_MAX_OF_FEW: u32 = 8;
/// The time for which a server is shunned at first. Each further time is twice as long.
const SHUN_FOR: Duration = Duration::from_secs(1);
/// The longest time for which a server is shunned. After as long without trouble, the backoff
/// starts again.
const SHUN_MAX: Duration = Duration::from_secs(64);
/// The handshakes to try before a server that hangs up counts as alive: a server that is being
/// killed hangs up, too.
const PROBES_MAX: u32 = 3;

/// The backoff of a server that this client has decided not to use.
#[derive(Debug, Clone, Copy, Default)]
struct Shunned {
    until: Option<Instant>,
    times: u32,
}

/// A client's state of one server.
#[derive(Debug)]
pub(super) struct Peer {
    pub endpoint: Endpoint,
    /// The server's epoch; 0 until the client first reaches it.
    pub epoch: AtomicU64,
    /// The machine that the server reports to run on.
    pub machine: AtomicU64,
    /// The address at which the client reached the server.
    address: Mutex<Option<SocketAddr>>,
    /// The server of which this name is an alias.
    alias_of: Mutex<Option<ServerId>>,
    /// The number of consecutive failed requests, by [`RequestKind`].
    strikes: [AtomicU32; 2],
    shunned: Mutex<Shunned>,
    /// The lock of the thread that probes the server.
    probe_lock: Mutex<()>,
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
            probe_lock: Mutex::default(),
        }
    }

    /// Connects to the pinned address, or to any address of the name if none is pinned.
    pub fn connect(&self, name: &str, patience: Duration) -> Result<Connection, StoreError> {
        let address = *locked(&self.address);
        self.endpoint.connect_at(address, name, patience)
    }

    /// Pins the server to one address. `None` allows any address of its name.
    pub fn pin(&self, address: Option<SocketAddr>) {
        *locked(&self.address) = address;
    }

    pub fn alias_of(&self) -> Option<ServerId> {
        *locked(&self.alias_of)
    }

    pub fn set_alias_of(&self, server: Option<ServerId>) {
        *locked(&self.alias_of) = server;
    }

    pub fn is_shunned(&self) -> bool {
        locked(&self.shunned).until.is_some_and(|until| Instant::now() < until)
    }

    /// Resets the count of failures of a kind, because a request succeeded.
    pub fn reset_strikes(&self, kind: RequestKind) {
        let strikes = &self.strikes[kind as usize];
        if strikes.load(Ordering::Relaxed) != 0 {
            strikes.store(0, Ordering::Relaxed);
        }
    }

    /// Counts a failed request to a server that is alive. Returns the time for which to shun the
    /// server, if it reaches the limit.
    fn strike(&self, kind: RequestKind, strikes_max: u32) -> Option<Duration> {
        let strikes = self.strikes[kind as usize].fetch_add(1, Ordering::Relaxed) + 1;
        let mut shunned = locked(&self.shunned);
        let is_long_ago = |until: Instant| until.elapsed() > SHUN_MAX;
        if shunned.until.is_some_and(is_long_ago) {
            shunned.times = 0;
        }
        if strikes < strikes_max {
            return None;
        }
        self.reset_strikes(kind);
        let time = (SHUN_FOR * (1 << shunned.times.min(6))).min(SHUN_MAX);
        *shunned = Shunned { until: Some(Instant::now() + time), times: shunned.times + 1 };
        Some(time)
    }
}

/// A replica that a reader found damaged or stale.
#[derive(Debug, Clone, Copy)]
pub(super) struct BadReplica {
    pub server: ServerId,
    pub region: RegionId,
    pub page: u64,
    /// The MAC that the owner keeps.
    pub mac: PageMac,
}

/// The most bad replicas that wait for repair. The next read finds the others again.
const BAD_REPLICAS_MAX: usize = 1024;

/// The result of a try to reach a server.
enum Probe {
    Alive,
    /// Alive, but the server takes no new connections.
    TurnsAway,
    Restarted,
    Dead,
}

/// A region's number and token on one server.
#[derive(Debug, Clone, Copy)]
pub(super) struct RegionHandle {
    pub number: u32,
    pub token: Token,
}

/// The state that all threads of a client share.
#[derive(Debug)]
pub(super) struct ClusterState {
    pub options: ClusterOptions,
    pub counters: ClusterCounters,
    pub replicator: RwLock<Replicator>,
    pub peers: RwLock<Vec<Arc<Peer>>>,
    pub remotes: RwLock<HashMap<(RegionId, ServerId), RegionHandle>>,
    /// The number of pages of each region.
    pub regions: RwLock<BTreeMap<RegionId, u64>>,
    pub stopped: AtomicBool,
    /// The replicas that the control thread must repair.
    pub bad_replicas: Mutex<VecDeque<BadReplica>>,
    /// The number of changes of servers' availability.
    changes: Mutex<u64>,
    changed: Condvar,
}

/// A page store on memory servers.
#[derive(Debug)]
pub struct Cluster {
    shared: Arc<ClusterState>,
    monitor: Arc<Mutex<ServerMonitor>>,
    next_region: AtomicU64,
    thread: Option<JoinHandle<()>>,
}

impl Cluster {
    /// Connects to all servers that are reachable.
    ///
    /// # Errors
    /// If `copies` is not 1 to 3, fewer servers than `copies` answer, or a server refuses this
    /// client. Also if a server beyond loopback would be used with neither TLS nor `insecure`.
    pub fn connect(options: ClusterOptions) -> Result<Cluster, StoreError> {
        if !(1..=3).contains(&options.copies) {
            return Err(StoreError::BadRequest("there can be 1, 2 or 3 copies"));
        }
        if options.discover && options.needs_tls() {
            // The first program to send an announcement would get the pages.
            return Err(StoreError::Insecure { server: "a server that --discover finds".into() });
        }
        let copies = options.copies;
        let shared = Arc::new(ClusterState::new(options));
        let mut monitor = ServerMonitor::new(shared.clone())?;
        let problem = monitor.connect_all()?;
        let reached = shared.replicator().up().len();
        if reached < copies {
            return Err(problem.unwrap_or_else(|| StoreError::Unreachable {
                server: format!("{copies} memory servers for {copies} copies"),
                source: io::Error::other(format!("{reached} found")),
            }));
        }
        let monitor = Arc::new(Mutex::new(monitor));
        let control = Control { shared: shared.clone(), monitor: monitor.clone() };
        let spawned = threads::spawn("pagetax-control", move || control.run_or_abort())
            .map_err(|source| StoreError::Unreachable { server: "a thread".into(), source })?;
        let next_region = AtomicU64::new(1);
        Ok(Cluster { shared, monitor, next_region, thread: Some(spawned) })
    }

    /// Returns the counts of events since the client connected.
    pub fn counters(&self) -> &ClusterCounters {
        &self.shared.counters
    }

    /// Returns the number of servers that are up.
    pub fn servers_up(&self) -> usize {
        self.shared.replicator().up().len()
    }

    /// Returns warnings for the user, a line each: servers that run on the same machine. Empty
    /// without replicas to lose together (`copies` below 2).
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

    /// Returns the number of chunk replicas that are still missing until no chunk is
    /// under-replicated.
    pub fn replicas_missing(&self) -> u64 {
        self.shared.replicator().replicas_missing()
    }

    fn monitor(&self) -> MutexGuard<'_, ServerMonitor> {
        self.monitor.lock().unwrap_or_else(PoisonError::into_inner)
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
            return Err(self.shared.unreachable_error());
        }
        Ok(replicator.capacity())
    }

    fn create_region(&self, pages: u64, overcommit: bool) -> Result<RegionId, StoreError> {
        let pages_free = self.capacity()?.pages_free;
        if !overcommit && pages > pages_free {
            return Err(StoreError::Full { pages_asked: pages, pages_free });
        }
        let region = RegionId(self.next_region.fetch_add(1, Ordering::Relaxed));
        let mut monitor = self.monitor();
        self.shared.regions_mut().insert(region, pages);
        self.shared.replicator_mut().add_region(region, pages);
        let refused = monitor.create_everywhere(region, pages);
        let up = self.shared.replicator().up();
        let made = up.iter().filter(|server| self.shared.remote(region, *server).is_some()).count();
        if let Some(server) = refused.filter(|_| made < self.shared.options.copies) {
            // Refuse now: with no server to evict to, the program would run on over its memory
            // limit.
            monitor.drop_everywhere(region);
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
        let mut monitor = self.monitor();
        self.shared.regions_mut().remove(&region).ok_or(StoreError::NoRegion(region))?;
        self.shared.replicator_mut().drop_region(region);
        monitor.drop_everywhere(region);
        Ok(())
    }

    fn drop_region_at_end(&self, region: RegionId) {
        self.monitor().drop_at_end(region);
    }

    fn reader(&self) -> Result<Box<dyn PageReader>, StoreError> {
        Ok(Box::new(ReplicaReader::new(self.shared.clone())))
    }

    fn writer(&self) -> Result<Box<dyn PageWriter>, StoreError> {
        Ok(Box::new(ReplicaWriter::new(self.shared.clone())))
    }
}

impl Drop for Cluster {
    /// Ends the control thread, and drops all regions so that the servers can reuse their memory.
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::Relaxed);
        self.shared.notify();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let regions: Vec<RegionId> = self.shared.regions().keys().copied().collect();
        let mut monitor = self.monitor();
        regions.into_iter().for_each(|region| monitor.drop_everywhere(region));
    }
}

impl ClusterState {
    fn new(options: ClusterOptions) -> ClusterState {
        ClusterState {
            replicator: RwLock::new(Replicator::new(options.copies)),
            options,
            counters: ClusterCounters::default(),
            peers: RwLock::default(),
            remotes: RwLock::default(),
            regions: RwLock::default(),
            stopped: AtomicBool::new(false),
            // Allocated now: readers must not allocate.
            bad_replicas: Mutex::new(VecDeque::with_capacity(BAD_REPLICAS_MAX)),
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

    pub fn remote(&self, region: RegionId, server: ServerId) -> Option<RegionHandle> {
        let remotes = self.remotes.read().unwrap_or_else(PoisonError::into_inner);
        remotes.get(&(region, server)).copied()
    }

    pub fn set_remote(&self, region: RegionId, server: ServerId, remote: Option<RegionHandle>) {
        let mut remotes = self.remotes.write().unwrap_or_else(PoisonError::into_inner);
        match remote {
            Some(remote) => remotes.insert((region, server), remote),
            None => remotes.remove(&(region, server)),
        };
    }

    pub fn peer(&self, server: ServerId) -> Arc<Peer> {
        self.peers.read().unwrap_or_else(PoisonError::into_inner)[server as usize].clone()
    }

    /// Adds a server to monitor, unless it is known. Returns false if there are too many.
    pub fn add_peer(&self, label: &str) -> Result<bool, StoreError> {
        // Before the lock: this resolves a name, and readers must not wait for that.
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

    /// Probes a server after a link to it broke or timed out, and records its new availability. Callers
    /// take turns, and skip the probe if the server is no longer up. If the server is alive but
    /// requests of kind `kind` fail again and again, the client shuns it for a while.
    ///
    /// Returns true if a new link is better than the old one. It is not if the server refuses
    /// connections, or is silent: a silent server may yet answer on the old link.
    pub fn record_failure(&self, server: ServerId, kind: Option<RequestKind>) -> bool {
        let peer = self.peer(server);
        let _one = locked(&peer.probe_lock);
        if !self.replicator().up().has(server) {
            return false;
        }
        let probe = self.probe(&peer);
        let takes_links = matches!(probe, Probe::Alive | Probe::Restarted);
        match probe {
            // Threads that have a link to it go on.
            Probe::TurnsAway => return false,
            Probe::Alive => {
                let are_spare = self.replicator().up().len() > self.options.copies;
                let strikes_max = if are_spare { STRIKES_MAX } else { STRIKES_MAX_OF_FEW };
                let time = kind.and_then(|kind| peer.strike(kind, strikes_max));
                let Some(time) = time else { return takes_links };
                self.shun(server, "answers, but requests to it fail", time);
                return takes_links;
            }
            Probe::Restarted => self.gone(server),
            Probe::Dead => self.replicator_mut().mark_down(server),
        }
        self.counters.servers_down_total.fetch_add(1, Ordering::Relaxed);
        self.notify();
        takes_links
    }

    /// Shuns a server that is still busy long after all others are done. Does nothing if pages
    /// would become under-replicated. Returns true if it shuns the server.
    pub fn shun_if_slow(&self, server: ServerId) -> bool {
        let peer = self.peer(server);
        let _one = locked(&peer.probe_lock);
        let up = self.replicator().up();
        if !up.has(server) || up.len() <= self.options.copies {
            return false;
        }
        let time = peer.strike(RequestKind::Write, 1);
        time.inspect(|time| self.shun(server, "answers far more slowly than others", *time))
            .is_some()
    }

    fn shun(&self, server: ServerId, why: &str, time: Duration) {
        self.replicator_mut().mark_shunned(server);
        let label = &self.peer(server).endpoint.label;
        self.log_line(&format!("{label} {why}: it is not used for {} s", time.as_secs()));
        self.counters.servers_down_total.fetch_add(1, Ordering::Relaxed);
        self.notify();
    }

    fn probe(&self, peer: &Peer) -> Probe {
        let patience = self.options.answer_within.min(Duration::from_millis(100));
        for _ in 0..PROBES_MAX {
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

    pub fn log_line(&self, line: &str) {
        if let Some(log) = &self.options.log {
            log(line);
        }
    }

    /// Returns the server other than `but` that drew this epoch.
    pub fn server_of_epoch(&self, epoch: u64, but: ServerId) -> Option<ServerId> {
        let peers = self.peers.read().unwrap_or_else(PoisonError::into_inner);
        let is_it = |(id, peer): &(ServerId, &Arc<Peer>)| {
            *id != but && peer.alias_of().is_none() && peer.epoch.load(Ordering::Relaxed) == epoch
        };
        (0..).zip(peers.iter()).find(is_it).map(|(id, _)| id)
    }

    /// Queues a bad replica for repair from another one, if its server should have the page as it
    /// was last put.
    pub fn queue_bad_replica(&self, bad: BadReplica) {
        let at = ChunkAt { region: bad.region, chunk: bad.page / CHUNK_PAGES };
        let should_be_good = {
            let replicator = self.replicator();
            replicator.has_region(bad.region) && replicator.complete(at).has(bad.server)
        };
        let mut queue = locked(&self.bad_replicas);
        if should_be_good && queue.len() < BAD_REPLICAS_MAX {
            queue.push_back(bad);
        }
    }

    /// Records that a server's pages are lost. Logs at once which of them no other server has: a
    /// read may come too late to act on the loss.
    pub fn gone(&self, server: ServerId) {
        let damaged = self.replicator_mut().mark_gone(server);
        self.log_damage(server, "is gone", &damaged);
    }

    /// Stops waiting for a server that has not answered for [`ClusterOptions::unreachable`].
    pub fn silent(&self, server: ServerId) {
        let damaged = self.replicator_mut().mark_unreachable(server);
        let time = self.options.unreachable.as_secs_f64();
        self.log_damage(server, &format!("has not answered for {time:.0} s"), &damaged);
        // It may come back at another address.
        self.peer(server).pin(None);
    }

    fn log_damage(&self, server: ServerId, what: &str, damaged: &[ChunkAt]) {
        let Some(first) = damaged.first() else { return };
        self.counters.chunks_damaged_total.fetch_add(damaged.len() as u64, Ordering::Relaxed);
        let label = &self.peer(server).endpoint.label;
        let (count, page) = (damaged.len(), first.chunk * CHUNK_PAGES);
        self.log_line(&format!(
            "{label} {what}, with pages that no other memory server has: in {count} MiB from page {page} of region \
             {} on; keep more copies",
            first.region
        ));
    }

    /// Returns the error for the case that no server answers.
    pub fn unreachable_error(&self) -> StoreError {
        let peers = self.peers.read().unwrap_or_else(PoisonError::into_inner);
        let labels: Vec<&str> = peers.iter().map(|peer| peer.endpoint.label.as_str()).collect();
        let server = if labels.is_empty() { "any server".into() } else { labels.join(", ") };
        StoreError::Unreachable { server, source: io::ErrorKind::NotConnected.into() }
    }

    /// Wakes all threads that wait for a server.
    pub fn notify(&self) {
        *self.changes.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.changed.notify_all();
    }

    /// Returns the number of changes so far. Callers read it before they check a condition, so that
    /// [`ClusterState::wait_for_change`] misses no change.
    pub fn change_count(&self) -> u64 {
        *self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the number of changes differs from `seen`, `until` has passed or the client
    /// stops.
    pub fn wait_for_change(&self, seen: u64, until: Instant) {
        let changes = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        let left = until.saturating_duration_since(Instant::now());
        let still = |changes: &mut u64| *changes == seen && !self.stopped.load(Ordering::Relaxed);
        drop(self.changed.wait_timeout_while(changes, left, still));
    }

    /// Draws the token of a region on one server.
    pub fn fresh_token() -> Result<Token, StoreError> {
        random::bytes()
            .map_err(|source| StoreError::Unreachable { server: "random numbers".into(), source })
    }

    pub fn availability(&self, server: ServerId) -> Availability {
        self.replicator().server(server).availability
    }

    /// Records what a link's error shows about its server. Returns true if the caller should close
    /// the link.
    pub fn record_error(
        &self,
        server: ServerId,
        region: RegionId,
        error: &LinkError,
        kind: RequestKind,
    ) -> bool {
        let is_useless = match error {
            LinkError::Broken(_) | LinkError::Restarted => self.record_failure(server, Some(kind)),
            LinkError::Failed(Failure::NoRegion | Failure::Denied) => {
                // The server has dropped our region, unless this client dropped it.
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

    /// Returns links for a thread that changes pages on servers.
    pub fn links(self: &Arc<Self>) -> ServerLinks {
        ServerLinks::new(self.clone(), self.options.answer_within, false)
    }

    /// Returns links for a thread that reads and sends hedged requests.
    pub fn read_only_links(self: &Arc<Self>) -> ServerLinks {
        ServerLinks::new(self.clone(), self.options.hedge_after, true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::listen::{self, Server};
    use std::net::Ipv4Addr;

    #[test]
    fn another_server_of_the_same_name_is_not_taken_for_the_one_that_was_met() {
        let start = |_| {
            Server::start((Ipv4Addr::LOCALHOST, 0).into(), listen::ServerOptions::default())
                .unwrap()
        };
        let [met, other] = [0, 1].map(start);
        let shared = Arc::new(ClusterState::new(ClusterOptions::new(Vec::new())));
        shared.replicator_mut().add_server().unwrap();
        let name = Endpoint::of(&[met.address(), other.address()]);
        shared.peers.write().unwrap().push(Arc::new(Peer::new(name)));
        let mut monitor = ServerMonitor::new(shared.clone()).unwrap();
        monitor.connect_all().unwrap();
        assert_eq!(shared.availability(0), Availability::Up);
        drop(met);
        shared.record_failure(0, None);
        // `Gone` would mean that its pages are lost, but it may come back with them.
        assert_eq!(shared.availability(0), Availability::Down);
        monitor.poll_servers();
        assert_eq!(shared.availability(0), Availability::Down);
    }
}
