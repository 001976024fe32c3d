//! The control thread. It polls the servers' status, admits servers that join or rejoin, gives up
//! unreachable ones, and repairs chunks.
//!
//! Invariant: the client uses a server again only after two steps. A fence voids all earlier
//! requests to the server, and the client discards the server's stale pages.

use super::cluster::{BadReplica, ClusterState, Peer, RequestKind};
use super::connection::{Connection, Endpoint, is_turned_away};
use super::link::{LinkError, ServerLinks, is_slow, is_stale, unexpected, wait};
use super::prospects::{Prospects, Trial};
use super::repair::Repair;
use super::replicator::{Availability, CHUNK_PAGES, ChunkAt};
use super::set::{ServerId, ServerSet};
use crate::discovery::Finder;
use crate::page::{PAGE_BYTES, PageMac, RUN_PAGES_MAX};
use crate::store::{RegionId, StoreError};
use crate::wire::reply::{Failure, Reply, Status};
use crate::wire::request::Request;
use crate::wire::{self, CHECKSUM_BYTES, WireChecksum, push_checksums};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The interval between two polls of the servers' status.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The time for repairs before the servers are polled again.
const REPAIR_SLICE: Duration = Duration::from_millis(50);
/// The timeout of the connect to an announced server.
const TRIAL_PATIENCE: Duration = Duration::from_secs(1);
/// The longest wait for announcements in [`ServerMonitor::connect_all`].
const DISCOVERY_PATIENCE: Duration = Duration::from_secs(2);

/// The control thread's body. Threads that create or drop regions lock `watch` too.
pub(super) struct Control {
    pub shared: Arc<ClusterState>,
    pub monitor: Arc<Mutex<ServerMonitor>>,
}

/// The timeout of the connect to a server that is down, and of a reply on its old link.
const TRY_PATIENCE: Duration = Duration::from_millis(100);
/// The most silence that one poll may count. After a longer gap, this process was stopped, not the
/// server.
const SILENCE_PER_POLL_MAX: Duration = Duration::from_secs(2);
/// The longest pause after a failed repair. The first pause is [`POLL_INTERVAL`].
const REPAIR_PAUSE_MAX: Duration = Duration::from_secs(5);

impl Control {
    /// Runs the thread, and aborts the process if the thread panics. Without this thread, nobody
    /// notices a failed server or makes a replica: the pages would be unprotected. A panic is a bug
    /// in this program.
    pub fn run_or_abort(self) {
        let shared = self.shared.clone();
        if catch_unwind(AssertUnwindSafe(|| self.run())).is_err() {
            shared.log_line(
                "the thread that watches the memory servers has panicked: the process ends, as its pages would be \
                 protected no more; please report this",
            );
            std::process::abort();
        }
    }

    pub fn run(self) {
        while !self.shared.stopped.load(Ordering::Relaxed) {
            let seen = self.shared.change_count();
            let more = {
                let mut monitor = self.monitor.lock().unwrap_or_else(PoisonError::into_inner);
                monitor.poll_servers();
                monitor.repair_bad_replicas();
                monitor.repair(REPAIR_SLICE)
            };
            // Yield for 1 ms even if repairs remain: `create_region` needs the same lock.
            let pause = if more { Duration::from_millis(1) } else { POLL_INTERVAL };
            self.shared.wait_for_change(seen, Instant::now() + pause);
        }
    }
}

/// The state of a server that is unreachable.
#[derive(Debug, Clone, Copy)]
struct Outage {
    since: Instant,
    polled: Instant,
    /// The time without a reply. One poll adds at most [`SILENCE_PER_POLL_MAX`].
    silent: Duration,
    /// True if the server refused the last connection: it is alive.
    is_turned_away: bool,
    next_try: Instant,
    pause: Duration,
}

/// Returns a trial that does the handshake with a server as this client would.
fn trial(shared: &ClusterState) -> Trial {
    let (tls, name) = (shared.options.tls.clone(), shared.options.name.clone());
    Arc::new(move |address| {
        let endpoint = Endpoint::new(&address.to_string(), tls.clone());
        endpoint.is_ok_and(|endpoint| endpoint.connect(&name, TRIAL_PATIENCE).is_ok())
    })
}

/// A server's answer to a request to create a region.
enum CreateOutcome {
    Yes,
    No(Failure),
}

/// The control thread's state. Threads that create or drop regions use its links too.
pub(super) struct ServerMonitor {
    shared: Arc<ClusterState>,
    links: ServerLinks,
    away: Vec<Option<Outage>>,
    /// The chunk from which the search for repairs goes on.
    repair_from: ChunkAt,
    /// Repairs that failed: the time of the next try, and the pause before it.
    waiting_repairs: BTreeMap<ChunkAt, (Instant, Duration)>,
    finder: Option<Finder>,
    /// Servers that were announced and have not answered yet.
    prospects: Prospects,
}

const START: ChunkAt = ChunkAt { region: RegionId(0), chunk: 0 };

impl std::fmt::Debug for ServerMonitor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServerMonitor").field("away", &self.away).finish_non_exhaustive()
    }
}

impl ServerMonitor {
    pub fn new(shared: Arc<ClusterState>) -> Result<ServerMonitor, StoreError> {
        let finder = match shared.options.discover {
            true => Some(Finder::new().map_err(|error| StoreError::Refused {
                server: "discovery".into(),
                why: error.to_string(),
            })?),
            false => None,
        };
        let links = shared.links();
        let prospects = Prospects::new(trial(&shared));
        Ok(ServerMonitor {
            shared,
            links,
            away: Vec::new(),
            repair_from: START,
            waiting_repairs: BTreeMap::new(),
            finder,
            prospects,
        })
    }

    /// Connects to all servers that are named or announced. Returns one of the errors if some
    /// servers fail.
    ///
    /// # Errors
    /// If a name cannot be resolved, or a server beyond loopback is named without TLS.
    pub fn connect_all(&mut self) -> Result<Option<StoreError>, StoreError> {
        for label in self.shared.options.servers.clone() {
            self.shared.add_peer(&label)?;
        }
        let until = Instant::now() + DISCOVERY_PATIENCE;
        while self.finder.is_some() && Instant::now() < until && !self.has_enough() {
            self.discover(Duration::from_millis(50));
            self.poll_servers();
        }
        let mut problem = None;
        for server in 0..self.server_count() {
            let patience = self.shared.options.answer_within.max(Duration::from_secs(1));
            let peer = self.shared.peer(server);
            let arrived = peer.connect(&self.shared.options.name, patience);
            match arrived.map(|connection| self.admit(server, connection)) {
                Ok(_) => problem = self.alias_error(&peer).or(problem),
                Err(error) => problem = Some(error),
            }
        }
        self.poll_servers();
        Ok(problem)
    }

    /// Returns the error for a name that does not count, because it is an alias of another server.
    fn alias_error(&self, peer: &Peer) -> Option<StoreError> {
        let other = self.shared.peer(peer.alias_of()?);
        Some(StoreError::Refused {
            server: peer.endpoint.label.clone(),
            why: format!(
                "it is the same memory server as {}, and a server keeps one replica of a page; name {} different \
                 servers, or give a lower --copies",
                other.endpoint.label, self.shared.options.copies
            ),
        })
    }

    /// Polls every server that is up, and tries to reach the others.
    pub fn poll_servers(&mut self) {
        self.discover(Duration::ZERO);
        for server in 0..self.server_count() {
            match self.shared.availability(server) {
                Availability::Up | Availability::Draining => {
                    self.away_mut(server).take();
                    match self.status(server) {
                        Ok(status) => self.record_status(server, status),
                        Err(error) => {
                            // If the server was only stalled, it may have no room for a new
                            // connection when it goes on.
                            if self.shared.record_failure(server, None) || !is_slow(&error) {
                                self.links.close(server);
                            }
                        }
                    }
                }
                Availability::Down | Availability::Gone => self.try_to_reconnect(server),
            }
        }
    }

    /// Creates a region on every server that is up. Returns a server that takes no more regions, if
    /// there is one.
    ///
    /// If a creation fails, the client repeats it when it next admits the server. Until then the
    /// region's writes go to other servers.
    pub fn create_everywhere(&mut self, region: RegionId, pages: u64) -> Option<ServerId> {
        let (up, mut refused) = (self.shared.replicator().up(), None);
        for server in up.iter() {
            match self.create(server, region, pages) {
                Ok(CreateOutcome::No(Failure::TooMany)) => refused = Some(server),
                Err(LinkError::Broken(_)) => {
                    self.links.close(server);
                    self.shared.record_failure(server, None);
                }
                _ => {}
            }
        }
        refused
    }

    /// Drops a region on every server that is up. The others remove it as orphaned after their
    /// linger time.
    pub fn drop_everywhere(&mut self, region: RegionId) {
        for server in 0..self.server_count() {
            let up = self.shared.replicator().up().has(server);
            let is_there = up && self.shared.remote(region, server).is_some();
            if is_there && self.drop_on(server, region, false).is_err() {
                self.links.close(server);
            }
            self.shared.set_remote(region, server, None);
        }
    }

    /// Asks every server that is up to drop a region when this process ends.
    pub fn drop_at_end(&mut self, region: RegionId) {
        for server in 0..self.server_count() {
            let up = self.shared.replicator().up().has(server);
            if up && self.shared.remote(region, server).is_some() {
                // A server that misses the request keeps the orphaned region for its linger time.
                let _ = self.drop_on(server, region, true);
            }
        }
    }

    fn drop_on(
        &mut self,
        server: ServerId,
        region: RegionId,
        at_end: bool,
    ) -> Result<(), LinkError> {
        let drop_it = |on| Request::Drop { on, at_end };
        match self.links.call_on(server, region, drop_it) {
            // Another link's fence voided the lease. Without the second try, the server keeps the
            // region's memory for as long as this client is connected.
            Err(error) if is_stale(&error) => {
                self.links.forget_lease(server, region);
                self.links.call_on(server, region, drop_it).map(drop)
            }
            done => done.map(drop),
        }
    }

    /// Repairs chunks for `slice`. Returns false if no chunk is left that needs a repair now.
    pub fn repair(&mut self, slice: Duration) -> bool {
        let until = Instant::now() + slice;
        while Instant::now() < until {
            // The read lock: neither readers nor writes that change no membership wait for this
            // search.
            let repairable = self.shared.replicator().next_repairable(self.repair_from);
            let Some(at) = repairable else {
                self.repair_from = START;
                return false;
            };
            let is_due =
                self.waiting_repairs.get(&at).is_none_or(|(due, _)| *due <= Instant::now());
            let work = if is_due { self.shared.replicator_mut().plan_repair(at) } else { None };
            let is_done = work.is_some_and(|work| match self.do_repair(&work) {
                Ok(()) => {
                    self.waiting_repairs.remove(&at);
                    true
                }
                Err(_) => {
                    self.postpone_repair(at);
                    false
                }
            });
            // A failed repair waits for the next pass, so the other chunks need not wait for it.
            self.repair_from = if is_done { at } else { ChunkAt { chunk: at.chunk + 1, ..at } };
        }
        true
    }

    /// Postpones a repair that cannot be done now: a server is gone, or no good replica is
    /// reachable.
    fn postpone_repair(&mut self, at: ChunkAt) {
        let now = Instant::now();
        let last = self.waiting_repairs.get(&at).map_or(POLL_INTERVAL / 2, |(_, pause)| *pause);
        let pause = (last * 2).min(REPAIR_PAUSE_MAX);
        self.waiting_repairs.retain(|_, (due, _)| *due + REPAIR_PAUSE_MAX > now);
        self.waiting_repairs.insert(at, (now + pause, pause));
    }

    fn do_repair(&mut self, work: &Repair) -> Result<(), LinkError> {
        match *work {
            Repair::Clean { at, server } => {
                let (first, count) = (at.chunk * CHUNK_PAGES, CHUNK_PAGES);
                // A writer that has not seen the removal yet may be about to put a page there. The
                // fence voids that put; otherwise the page would stay.
                let fenced = self.links.attach(server, at.region, true);
                let discarded = fenced.and_then(|_| {
                    self.links
                        .call_on(server, at.region, |on| Request::Discard { on, first, count })
                        .map(drop)
                });
                match discarded {
                    Ok(()) | Err(LinkError::NoRegion) => {}
                    Err(error) => {
                        return self.repair_failed(server, at.region, error, RequestKind::Write);
                    }
                }
                self.shared.replicator_mut().finish_clean(at, server);
            }
            Repair::Copy { at, from, to, version } => {
                self.copy(at, from, to)?;
                self.shared.replicator_mut().finish_copy(at, from, to, version);
            }
        }
        Ok(())
    }

    fn repair_failed(
        &mut self,
        server: ServerId,
        region: RegionId,
        error: LinkError,
        kind: RequestKind,
    ) -> Result<(), LinkError> {
        if is_stale(&error) {
            self.links.forget_lease(server, region);
        } else {
            if self.shared.record_error(server, region, &error, kind) {
                self.links.close(server);
            }
        }
        Err(error)
    }

    /// Copies the pages that the new members lack. Pages that are put meanwhile reach them from the
    /// writer, and the copy does not overwrite them.
    fn copy(&mut self, at: ChunkAt, from: ServerId, to: ServerSet) -> Result<(), LinkError> {
        let held = match self.held(at, from) {
            Ok(held) => held,
            Err(error) => return self.repair_failed(from, at.region, error, RequestKind::Read),
        };
        for (first, count) in held {
            let fetched = match self.fetch(at.region, from, first, count) {
                Ok(fetched) => fetched,
                // The owner has discarded some of these pages meanwhile: the repair must list them
                // again.
                Err(LinkError::Failed(failure @ Failure::NotHeld { .. })) => {
                    return Err(LinkError::Failed(failure));
                }
                Err(error) => return self.repair_failed(from, at.region, error, RequestKind::Read),
            };
            if fetched.is_good() {
                self.put_to_all(at, to, first, &fetched)?;
            } else {
                for nth in 0..count {
                    self.copy_page(at, from, to, first + nth as u64, fetched.page(nth))?;
                }
            }
            let counters = &self.shared.counters.pages_repaired_total;
            counters.fetch_add(count as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    fn put_to_all(
        &mut self,
        at: ChunkAt,
        to: ServerSet,
        first: u64,
        pages: &Fetched,
    ) -> Result<(), LinkError> {
        for server in to.iter() {
            match self.put_pages(at.region, server, first, pages) {
                Ok(()) => self.shared.peer(server).reset_strikes(RequestKind::Write),
                Err(error @ (LinkError::NoRegion | LinkError::Failed(Failure::Full { .. }))) => {
                    self.shared.replicator_mut().record_full_member(at, server);
                    return Err(error);
                }
                Err(error) => {
                    return self.repair_failed(server, at.region, error, RequestKind::Write);
                }
            }
        }
        Ok(())
    }

    /// Copies one page of a run that has damaged pages. A damaged page comes from another server of
    /// the same layer, and `from` gets the good bytes too. If no server can have a good replica,
    /// the page is lost and is left out.
    fn copy_page(
        &mut self,
        at: ChunkAt,
        from: ServerId,
        to: ServerSet,
        page: u64,
        fetched: Fetched,
    ) -> Result<(), LinkError> {
        if fetched.is_good() {
            return self.put_to_all(at, to, page, &fetched);
        }
        self.shared.counters.bad_replicas_total.fetch_add(1, Ordering::Relaxed);
        let layer = self.shared.replicator().layer_of(at, from);
        let others = layer.minus(ServerSet::one(from));
        match self.fetch_good_replica(at.region, others, page, Fetched::is_good) {
            Some(good) => self.put_to_all(at, to.union(ServerSet::one(from)), page, &good),
            None if others.minus(self.shared.replicator().up()).is_empty() => {
                self.shared.log_line(&format!(
                    "page {page} of region {} is damaged on {}, and no other memory server has it",
                    at.region,
                    self.shared.peer(from).endpoint.label
                ));
                Ok(())
            }
            // A server that is down may have a good replica.
            None => Err(unexpected()),
        }
    }

    /// Returns a page from the first of `servers` whose replica passes `is_good`.
    fn fetch_good_replica(
        &mut self,
        region: RegionId,
        servers: ServerSet,
        page: u64,
        is_good: impl Fn(&Fetched) -> bool,
    ) -> Option<Fetched> {
        let up = self.shared.replicator().up();
        servers.and(up).iter().find_map(|server| match self.fetch(region, server, page, 1) {
            Ok(fetched) => Some(fetched).filter(&is_good),
            Err(LinkError::Failed(Failure::NotHeld { .. })) => None,
            Err(error) => {
                let _ = self.repair_failed(server, region, error, RequestKind::Read);
                None
            }
        })
    }

    /// Repairs damaged replicas that readers found. A page that was put again meanwhile stays: a
    /// server replaces its page only by bytes of the same checksum.
    pub fn repair_bad_replicas(&mut self) {
        let bad: Vec<BadReplica> = {
            let mut queue = self.shared.bad_replicas.lock().unwrap_or_else(PoisonError::into_inner);
            queue.drain(..).collect()
        };
        for BadReplica { server, region, page, mac } in bad {
            let at = ChunkAt { region, chunk: page / CHUNK_PAGES };
            let others =
                self.shared.replicator().reachable_members(at).minus(ServerSet::one(server));
            let is_good = |fetched: &Fetched| PageMac::of(&fetched.pages) == mac;
            let Some(good) = self.fetch_good_replica(region, others, page, is_good) else {
                continue;
            };
            // Compute the checksum anew: the checksum on the source server may be damaged as well.
            let good = Fetched::of(good.pages);
            if let Err(error) = self.put_pages(region, server, page, &good) {
                let _ = self.repair_failed(server, region, error, RequestKind::Write);
            } else {
                self.shared.counters.pages_repaired_total.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Returns the runs of pages of a chunk that a server holds. No run exceeds [`RUN_PAGES_MAX`],
    /// the limit of a read.
    fn held(&mut self, at: ChunkAt, server: ServerId) -> Result<Vec<(u64, u16)>, LinkError> {
        let pages = self.shared.region_pages(at.region).map_err(|_| LinkError::NoRegion)?;
        let first = at.chunk * CHUNK_PAGES;
        let count = (pages - first).min(CHUNK_PAGES) as u16;
        let ask = |on| Request::Held { on, first, count };
        let bits = match self.links.call_on(server, at.region, ask)? {
            Reply::Bitmap { count: said, bits } if said == count => bits.to_vec(),
            _ => return Err(unexpected()),
        };
        let mut runs: Vec<(u64, u16)> = Vec::new();
        let held = |page: &u64| bits[*page as usize / 8] >> (page % 8) & 1 == 1;
        for page in (0..count as u64).filter(held).map(|page| first + page) {
            match runs.last_mut() {
                Some((start, len))
                    if *start + *len as u64 == page && (*len as usize) < RUN_PAGES_MAX =>
                {
                    *len += 1;
                }
                _ => runs.push((page, 1)),
            }
        }
        Ok(runs)
    }

    fn fetch(
        &mut self,
        region: RegionId,
        server: ServerId,
        first: u64,
        count: u16,
    ) -> Result<Fetched, LinkError> {
        let ask = |on| Request::Get { on, first, count, with_checksums: true };
        let checksums = match self.links.call_on(server, region, ask)? {
            Reply::Pages { checksums, .. }
                if checksums.len() == count as usize * CHECKSUM_BYTES =>
            {
                checksums.to_vec()
            }
            _ => return Err(unexpected()),
        };
        let link = self.links.existing(server).ok_or_else(unexpected)?;
        let pages = link.connection.pages_with_checksums(count).to_vec();
        self.shared.peer(server).reset_strikes(RequestKind::Read);
        Ok(Fetched { checksums, pages })
    }

    fn put_pages(
        &mut self,
        region: RegionId,
        server: ServerId,
        first: u64,
        Fetched { checksums, pages }: &Fetched,
    ) -> Result<(), LinkError> {
        let (connection, on) = self.links.leased(server, region)?;
        let id = connection.send(&Request::Put { on, first, if_absent: true, checksums, pages })?;
        wait(connection, id).map(drop)
    }

    fn server_count(&self) -> ServerId {
        self.shared.peers.read().unwrap_or_else(PoisonError::into_inner).len() as ServerId
    }

    fn has_enough(&self) -> bool {
        self.shared.replicator().up().len() >= self.shared.options.copies
    }

    fn away_mut(&mut self, server: ServerId) -> &mut Option<Outage> {
        let at = server as usize;
        self.away.resize(self.away.len().max(at + 1), None);
        &mut self.away[at]
    }

    fn discover(&mut self, patience: Duration) {
        let Some(finder) = &mut self.finder else { return };
        let (news, now) = (finder.poll(patience), Instant::now());
        news.withdrawn.into_iter().for_each(|address| self.prospects.withdrawn(address));
        news.announced.into_iter().for_each(|address| self.prospects.announced(address, now));
        for address in self.prospects.answered(now) {
            // The control thread watches the server from now on, unless there are too many servers.
            let _ = self.shared.add_peer(&address.to_string());
        }
    }

    fn status(&mut self, server: ServerId) -> Result<Status, LinkError> {
        match self.links.call(server, &Request::Status)? {
            Reply::Status(status) => Ok(status),
            _ => Err(unexpected()),
        }
    }

    fn record_status(&mut self, server: ServerId, status: Status) {
        let (total, free) = (status.pages_total, status.pages_free);
        let mut replicator = self.shared.replicator_mut();
        replicator.record_status(server, total, free, status.draining);
    }

    /// Tries with backoff to reach a server that is down. After `repair_after`, other servers take
    /// its place. After `unreachable`, nobody waits for it any more.
    fn try_to_reconnect(&mut self, server: ServerId) {
        let peer = self.shared.peer(server);
        let up = self.shared.replicator().up();
        if peer.is_shunned() || peer.alias_of().is_some_and(|primary| up.has(primary)) {
            return;
        }
        let now = Instant::now();
        let mut away = (*self.away_mut(server)).unwrap_or(Outage {
            since: now,
            polled: now,
            silent: Duration::ZERO,
            is_turned_away: false,
            next_try: now,
            pause: Duration::from_millis(50),
        });
        if now >= away.next_try {
            match self.connect_or_reuse(server, &peer) {
                Ok(()) => return,
                Err(is_turned_away) => away.is_turned_away = is_turned_away,
            }
            away.pause = (away.pause * 2).min(Duration::from_secs(1));
            away.next_try = now + away.pause;
        }
        let past = (now - away.polled).min(SILENCE_PER_POLL_MAX);
        away.silent += if away.is_turned_away { Duration::ZERO } else { past };
        away.polled = now;
        *self.away_mut(server) = Some(away);
        if self.shared.availability(server) == Availability::Down {
            if away.silent >= self.shared.options.unreachable {
                self.shared.silent(server);
                self.shared.notify();
            } else if now - away.since >= self.shared.options.repair_after {
                self.shared.replicator_mut().give_up(server);
            }
        }
    }

    /// Admits a server again, over its old link or a new one. Otherwise returns true if the server
    /// refused the connection.
    fn connect_or_reuse(&mut self, server: ServerId, peer: &Peer) -> Result<(), bool> {
        if self.is_old_link_alive(server, peer) && self.admit_again(server, peer).is_ok() {
            return Ok(());
        }
        let connection = peer
            .connect(&self.shared.options.name, TRY_PATIENCE.min(self.shared.options.answer_within))
            .map_err(|error| is_turned_away(&error))?;
        self.admit(server, connection).map_err(|_| false)
    }

    /// Returns true if the same server answers on its old link. A server that was stalled has room
    /// for its open links, but perhaps not for new ones.
    fn is_old_link_alive(&mut self, server: ServerId, peer: &Peer) -> bool {
        let answer_within = self.shared.options.answer_within;
        let Some(link) = self.links.existing(server) else { return false };
        let is_same = link.connection.epoch == peer.epoch.load(Ordering::Relaxed);
        let set = link.connection.set_patience(TRY_PATIENCE.min(answer_within));
        let status = self.status(server);
        let restored =
            self.links.existing(server).map(|link| link.connection.set_patience(answer_within));
        match status {
            Ok(_) => is_same && set.is_ok() && restored.is_some_and(|set| set.is_ok()),
            Err(error) => {
                if !is_slow(&error) {
                    self.links.close(server);
                }
                false
            }
        }
    }

    /// Admits a server that is reachable for the first time or again.
    fn admit(&mut self, server: ServerId, connection: Connection) -> Result<(), LinkError> {
        let (peer, epoch) = (self.shared.peer(server), connection.epoch);
        let alias_of = self.shared.server_of_epoch(epoch, server);
        peer.set_alias_of(alias_of);
        if alias_of.is_some() {
            return Ok(());
        }
        let (location, address) = (connection.location, connection.address());
        self.links.adopt(server, connection)?;
        peer.machine.store(location.machine, Ordering::Relaxed);
        self.shared.replicator_mut().set_failure_domain(server, location.failure_domain);
        if peer.epoch.load(Ordering::Relaxed) == epoch {
            self.admit_again(server, &peer)?;
        } else {
            self.recreate_regions(server)?;
            // Last: a thread that sees the new epoch must see the new state of the regions there.
            peer.epoch.store(epoch, Ordering::Release);
            self.finish_admission(server)?;
        }
        peer.pin(address);
        Ok(())
    }

    /// Admits a server that was away. A link to it is open.
    fn admit_again(&mut self, server: ServerId, peer: &Peer) -> Result<(), LinkError> {
        if !self.fence_and_discard(server)? {
            self.recreate_regions(server)?;
            let epoch = self.links.existing(server).map(|link| link.connection.epoch);
            peer.epoch.store(epoch.ok_or_else(unexpected)?, Ordering::Release);
        }
        self.finish_admission(server)
    }

    fn finish_admission(&mut self, server: ServerId) -> Result<(), LinkError> {
        let status = self.status(server)?;
        self.shared.replicator_mut().readmit_server(server);
        self.record_status(server, status);
        self.away_mut(server).take();
        self.shared.notify();
        Ok(())
    }

    /// Voids all earlier requests to a server that kept its epoch, and discards the replicas that
    /// became stale. Returns false if the server no longer has our regions.
    fn fence_and_discard(&mut self, server: ServerId) -> Result<bool, LinkError> {
        let regions: Vec<(RegionId, u64)> =
            self.shared.regions().iter().map(|(region, pages)| (*region, *pages)).collect();
        for (region, pages) in regions {
            match self.links.attach(server, region, true) {
                Ok(_) => {}
                Err(LinkError::NoRegion) => {
                    self.create(server, region, pages)?;
                }
                Err(LinkError::Failed(Failure::NoRegion | Failure::Denied)) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        let stale_runs = self.shared.replicator_mut().stale_runs(server);
        for (region, first, count) in stale_runs {
            match self.links.call_on(server, region, |on| Request::Discard { on, first, count }) {
                Ok(_) | Err(LinkError::NoRegion) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Creates all regions on a server that has none of them: it is new, was restarted or has lost
    /// them. Its earlier replicas count as lost.
    fn recreate_regions(&mut self, server: ServerId) -> Result<(), LinkError> {
        self.shared.gone(server);
        let regions: Vec<(RegionId, u64)> =
            self.shared.regions().iter().map(|(region, pages)| (*region, *pages)).collect();
        for (region, pages) in regions {
            self.shared.set_remote(region, server, None);
            self.create(server, region, pages)?;
        }
        Ok(())
    }

    fn create(
        &mut self,
        server: ServerId,
        region: RegionId,
        pages: u64,
    ) -> Result<CreateOutcome, LinkError> {
        let token = ClusterState::fresh_token().map_err(|_| unexpected())?;
        let request = Request::Create { pages, overcommit: true, token: &token };
        match self.links.call(server, &request) {
            Ok(Reply::Created(lease)) => {
                let remote = super::cluster::RegionHandle { number: lease.region, token };
                self.shared.set_remote(region, server, Some(remote));
                Ok(CreateOutcome::Yes)
            }
            Ok(_) => Err(unexpected()),
            // The server takes no more regions: the pages of this one go elsewhere.
            Err(LinkError::Failed(why @ (Failure::TooMany | Failure::Draining))) => {
                Ok(CreateOutcome::No(why))
            }
            Err(error) => Err(error),
        }
    }
}

/// Pages from a server, and the server's checksums of them.
struct Fetched {
    checksums: Vec<u8>,
    pages: Vec<u8>,
}

impl Fetched {
    /// Computes the checksums of pages that are known to be good.
    fn of(pages: Vec<u8>) -> Fetched {
        let mut checksums = Vec::new();
        push_checksums(&mut checksums, pages.chunks_exact(PAGE_BYTES).map(WireChecksum::of));
        Fetched { checksums, pages }
    }

    /// Returns true if every page matches its checksum.
    fn is_good(&self) -> bool {
        self.pages
            .chunks_exact(PAGE_BYTES)
            .map(WireChecksum::of)
            .eq(wire::checksums(&self.checksums))
    }

    fn page(&self, nth: u16) -> Fetched {
        let nth = nth as usize;
        Fetched {
            checksums: self.checksums[nth * CHECKSUM_BYTES..][..CHECKSUM_BYTES].to_vec(),
            pages: self.pages[nth * PAGE_BYTES..][..PAGE_BYTES].to_vec(),
        }
    }
}
