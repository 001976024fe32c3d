//! The monitor of the servers. It polls their status, admits servers that join or rejoin, gives up
//! unreachable ones, and repairs chunks.
//!
//! Invariant: the client uses a server again only after two steps. A fence voids all earlier
//! requests to the server, and the client discards the server's stale pages.

mod admission;
mod regions;
mod repairs;
mod snapshot;

use super::connection::Endpoint;
use super::link::{LinkError, ServerLinks, is_slow, unexpected};
use super::peer::Peer;
use super::prospects::{Prospects, Trial};
use super::replicator::{Availability, ChunkAt};
use super::set::ServerId;
use super::state::ClusterState;
use crate::discovery::Finder;
use crate::store::{RegionId, StoreError};
use crate::wire::reply::{Reply, Status};
use crate::wire::request::Request;
use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// The interval between two polls of the servers' status.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The timeout of the connect to an announced server.
const TRIAL_PATIENCE: Duration = Duration::from_secs(1);
/// The longest wait for announcements in [`ServerMonitor::connect_all`].
const DISCOVERY_PATIENCE: Duration = Duration::from_secs(2);

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
}
