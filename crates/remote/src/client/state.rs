//! The state that all threads of a client share.
//!
//! Invariants: threads share decisions only through the [`Replicator`], under its lock. No thread
//! holds that lock across I/O. A thread that sees a server fail reports it here, and one thread at
//! a time probes that server.

use super::connection::{Endpoint, is_turned_away};
use super::link::{LinkError, ServerLinks, is_slow};
use super::options::ClusterOptions;
use super::peer::{Peer, RequestKind, locked};
use super::replicator::{Availability, CHUNK_PAGES, ChunkAt, Replicator};
use super::set::ServerId;
use crate::page::PageMac;
use crate::random;
use crate::store::{RegionId, StoreError};
use crate::wire::reply::Failure;
use crate::wire::request::Token;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

/// The number of consecutive failures of one kind after which the client shuns a server that is
/// alive.
const STRIKES_MAX: u32 = 3;
/// The same while no server is spare, so that shunning one leaves pages under-replicated.
const STRIKES_MAX_OF_FEW: u32 = 8;
/// The handshakes to try before a server that hangs up counts as alive: a server that is being
/// killed hangs up, too.
const PROBES_MAX: u32 = 3;

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

/// A region as it is at a fork, for the client of the child. It shares no lock and no connection with
/// the parent's.
#[derive(Debug)]
pub(super) struct ClusterSnapshot {
    pub options: ClusterOptions,
    /// The state of this one region. Servers without a snapshot count as lost.
    pub replicator: Replicator,
    pub peers: Vec<Peer>,
    /// The region's number and token on each server that has a snapshot.
    pub handles: BTreeMap<ServerId, RegionHandle>,
    pub region: RegionId,
    /// The size of the region in pages.
    pub pages: u64,
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

impl ClusterState {
    pub fn new(options: ClusterOptions) -> ClusterState {
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

    /// Returns the state of a forked child's client.
    pub fn of_child(snapshot: ClusterSnapshot) -> ClusterState {
        let ClusterSnapshot { options, replicator, peers, handles, region, pages } = snapshot;
        let handles = handles.into_iter().map(|(server, handle)| ((region, server), handle));
        ClusterState {
            replicator: RwLock::new(replicator),
            peers: RwLock::new(peers.into_iter().map(Arc::new).collect()),
            remotes: RwLock::new(handles.collect()),
            regions: RwLock::new(BTreeMap::from([(region, pages)])),
            ..ClusterState::new(options)
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

    pub fn regions_mut(&self) -> std::sync::RwLockWriteGuard<'_, BTreeMap<RegionId, u64>> {
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
