//! The state machine that places replicas and plans their repair. Its callers report events and ask
//! it what to do. It does no I/O and reads no clock.
//!
//! Pages are placed by chunks. The servers of a chunk are in layers:
//!
//! - *complete* servers have the last put of every page of the chunk;
//! - *catching-up* servers have every page that was put since they joined. A server can be in an
//!   older layer as well: then others joined after it;
//! - *older* layers have what was put before a write that they missed, newest layer first. They are
//!   kept while no newer server is complete. They are also kept while a catching-up server has the
//!   pages that they missed. If the complete servers are lost then, both together have every page.
//!
//! A write goes to all complete and catching-up servers that are up. It is done when all servers
//! that are members *by then* have acknowledged it. A server that joined meanwhile gets the write
//! as well. A server that is down is no longer complete: a replica that missed a write does not
//! count. If too few members are left, another server joins before the write is done. So a repair
//! may copy old pages to a new member while a writer sends it new ones. The repair copies only
//! pages that the new member lacks.
//!
//! Invariants:
//! 1. A complete server has the bytes of the last put of every page whose put is done.
//! 2. All catching-up servers of a chunk have every page that was put since the last write to the
//!    newest older layer. Without older layers, complete servers have every page.
//! 3. A server that is up and no member of a chunk holds no page of it. Until the client has
//!    cleaned it, it is *leaving* and is not chosen.
//! 4. If a chunk has complete servers and older layers, it has a catching-up server. That server
//!    has the last put of every page whose put is done and that the newest older layer lacks.
//!
//! Readers do not trust this state for the bytes: they verify each page by its MAC. A mistake here
//! loses pages; it cannot pass off wrong ones.

pub use super::chunk::{CHUNK_PAGES, ChunkAt, ChunkMembers};

use super::chunk::RegionChunks;
use super::set::{SERVERS_MAX, ServerId, ServerSet};
use crate::store::{Capacity, RegionId};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// The availability of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Availability {
    /// A server that is usable for everything.
    Up,
    /// A server that is usable for everything except new pages: it is about to leave.
    Draining,
    /// A server that is unreachable or shunned. It may still hold its replicas.
    Down,
    /// A server that is lost with the replicas that it held.
    Gone,
}

/// The failure domain of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FailureDomain {
    /// A domain of its own, as far as is known.
    Own(ServerId),
    /// A domain that the server reports. All servers that report it fail together.
    Named(u64),
}

/// A server's state, as far as placement needs it.
#[derive(Debug, Clone, Copy)]
pub struct ServerState {
    /// The server's availability.
    pub availability: Availability,
    /// True once the server has been down for so long that other servers take its place.
    pub is_given_up: bool,
    /// The number of pages that the server last reported as its total.
    pub pages_total: u64,
    /// The number of free pages that it last reported, less those placed there since.
    pub pages_free: u64,
}

/// The reason why a write cannot be placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlacementError {
    /// Servers are up, but have no room.
    Full,
    /// No server is up that may take the chunk now.
    NoServer,
    /// The region is dropped.
    NoRegion,
}

/// The servers that have acknowledged a write. A loss voids the set: a server that was lost may be
/// back without the write.
#[derive(Debug, Clone, Copy, Default)]
pub struct Acked {
    servers: ServerSet,
    /// The value of [`Replicator::losses`] when the servers were chosen.
    losses: u64,
}

impl Acked {
    /// Records that a server has acknowledged the write.
    pub fn insert(&mut self, server: ServerId) {
        self.servers.insert(server);
    }

    /// Returns the servers that have acknowledged the write.
    pub fn servers(&self) -> ServerSet {
        self.servers
    }
}

/// The next step of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settled {
    /// Nothing: the caller may drop its own page.
    Done,
    /// A send to these servers, which lack the write.
    Send(ServerSet),
    /// A new call of [`Replicator::targets`]. Too few servers that have the write are up, or a
    /// server was lost since.
    Again,
}

/// The servers to ask for pages, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadPlan {
    servers: [ServerId; SERVERS_MAX],
    count: usize,
    /// The servers that are down and may have the pages when they return.
    pub waiting_for: ServerSet,
}

impl ReadPlan {
    /// Returns the servers to ask, best first.
    pub fn order(&self) -> &[ServerId] {
        &self.servers[..self.count]
    }

    fn push(&mut self, set: ServerSet, first: u64) {
        let count = set.len() as u64;
        let skip = if count == 0 { 0 } else { (first % count) as usize };
        for server in set.iter().skip(skip).chain(set.iter().take(skip)) {
            if !self.order().contains(&server) {
                self.servers[self.count] = server;
                self.count += 1;
            }
        }
    }
}

/// The state machine of placement and repair.
#[derive(Debug, Clone)]
pub struct Replicator {
    pub(super) replicas_wanted: usize,
    pub(super) servers: Vec<ServerState>,
    pub(super) regions: BTreeMap<RegionId, RegionChunks>,
    /// The servers by availability. They duplicate `servers` so that reads need no loop.
    pub(super) up: ServerSet,
    pub(super) down: ServerSet,
    /// The servers that this client shuns: they answer, but requests to them fail. A subset of
    /// `down`.
    pub(super) shunned: ServerSet,
    /// The servers that were up once.
    pub(super) known: ServerSet,
    pub(super) domains: Vec<FailureDomain>,
    /// The number of times that a server was lost with its replicas.
    pub(super) losses: u64,
}

impl Replicator {
    /// Returns a state without servers and regions. `copies` is the number of replicas of each
    /// page.
    pub fn new(copies: usize) -> Replicator {
        Replicator {
            replicas_wanted: copies,
            servers: Vec::new(),
            regions: BTreeMap::new(),
            up: ServerSet::EMPTY,
            down: ServerSet::EMPTY,
            shunned: ServerSet::EMPTY,
            known: ServerSet::EMPTY,
            domains: Vec::new(),
            losses: 0,
        }
    }

    /// Adds a server about which nothing is known yet. Returns `None` if there are [`SERVERS_MAX`]
    /// already.
    pub fn add_server(&mut self) -> Option<ServerId> {
        let id = self.servers.len();
        (id < SERVERS_MAX).then(|| {
            self.servers.push(ServerState {
                availability: Availability::Gone,
                is_given_up: true,
                pages_total: 0,
                pages_free: 0,
            });
            self.domains.push(FailureDomain::Own(id as ServerId));
            id as ServerId
        })
    }

    /// Returns the state of a server.
    ///
    /// # Panics
    /// If the server was never added.
    pub fn server(&self, server: ServerId) -> ServerState {
        self.servers[server as usize]
    }

    /// Returns the servers that answer and are not shunned.
    pub fn up(&self) -> ServerSet {
        self.up
    }

    /// Adds a region of `pages` pages, none of them placed.
    pub fn add_region(&mut self, region: RegionId, pages: u64) {
        let count = pages.div_ceil(CHUNK_PAGES);
        self.regions.insert(region, RegionChunks::new(count));
    }

    /// Returns the same state without the other regions.
    pub fn of_region(&self, region: RegionId) -> Replicator {
        let mut state = self.clone();
        state.regions.retain(|other, _| *other == region);
        state
    }

    /// Forgets a region. Returns false if it is unknown.
    pub fn drop_region(&mut self, region: RegionId) -> bool {
        self.regions.remove(&region).is_some()
    }

    /// Returns the capacity of all servers that are up, in pages of the caller: divided by the
    /// number of replicas.
    pub fn capacity(&self) -> Capacity {
        let up = || self.up.iter().map(|server| self.server(server));
        let usable = up().filter(|state| state.availability == Availability::Up);
        let copies = self.replicas_wanted as u64;
        // Saturating, because servers may report any number.
        Capacity {
            pages_total: up().fold(0, |sum: u64, state| sum.saturating_add(state.pages_total))
                / copies,
            pages_free: usable.fold(0, |sum: u64, state| sum.saturating_add(state.pages_free))
                / copies,
        }
    }

    /// Returns the servers that still need a write, or `None` if other servers may have to join
    /// first. It changes no chunk, so the read lock suffices. After a loss it empties `acked`.
    pub fn known_targets(&self, at: ChunkAt, acked: &mut Acked) -> Option<ServerSet> {
        if acked.losses != self.losses {
            *acked = Acked { servers: ServerSet::EMPTY, losses: self.losses };
        }
        let chunk = self.find(at)?;
        let live = chunk.current().and(self.up);
        (live.len() >= self.replicas_wanted).then(|| live.minus(acked.servers))
    }

    /// Returns the servers that still need a write. If a chunk has too few members, other servers
    /// join.
    ///
    /// # Errors
    /// If no server can take the chunk now, or the region is dropped.
    pub fn targets(&mut self, at: ChunkAt, acked: &mut Acked) -> Result<ServerSet, PlacementError> {
        match self.known_targets(at, acked) {
            Some(known) => Ok(known),
            None => Ok(self.place(at)?.minus(acked.servers)),
        }
    }

    /// Makes servers join a chunk that has too few. Returns all servers that need the write.
    fn place(&mut self, at: ChunkAt) -> Result<ServerSet, PlacementError> {
        let up = self.up;
        if self.find(at).is_none() {
            return Err(PlacementError::NoRegion);
        }
        let chunk = self.chunk(at);
        let live = chunk.current().and(up);
        let chosen = self.choose(chunk, self.replicas_wanted - live.len());
        if live.is_empty() && chosen.is_empty() {
            // A server that has older pages of the chunk, or must be cleaned of them, may take it
            // later.
            let later = chunk.members().union(chunk.leaving).and(self.up);
            let is_full = !self.up.is_empty() && later.is_empty();
            return Err(if is_full { PlacementError::Full } else { PlacementError::NoServer });
        }
        // Accept fewer replicas than asked for if servers are missing, but not if they are full.
        let possible = self.replicas_wanted.min(live.union(self.candidates(at)).len());
        if live.len() + chosen.len() < possible && !self.is_server_missing() {
            return Err(PlacementError::Full);
        }
        self.reserve_room(chosen);
        if !chosen.is_empty() {
            self.chunk_mut(at).add_members(chosen, up);
        }
        Ok(live.union(chosen))
    }

    /// Returns true if a write with these acknowledgements is done and changes no chunk.
    pub fn is_settled(&self, at: ChunkAt, acked: Acked) -> bool {
        self.find(at).is_some_and(|chunk| {
            let current = chunk.current();
            acked.losses == self.losses
                && acked.servers == current
                && current.and(self.up).len() >= self.replicas_wanted
        })
    }

    /// Ends a write with these acknowledgements, or returns what it still needs.
    pub fn settle(&mut self, at: ChunkAt, acked: Acked) -> Settled {
        let Some(chunk) = self.find(at) else { return Settled::Done };
        if acked.losses != self.losses {
            return Settled::Again;
        }
        let acked = acked.servers;
        let members = chunk.current();
        let missing = members.and(self.up).minus(acked);
        if !missing.is_empty() {
            return Settled::Send(missing);
        }
        let live = members.and(self.up);
        let may_join = live.len() < self.replicas_wanted;
        if members.and(acked).is_empty() || may_join && !self.choose(chunk, 1).is_empty() {
            return Settled::Again;
        }
        self.chunk_mut(at).complete_write(acked);
        Settled::Done
    }

    /// Replaces a member that has no room for a page of the chunk. Returns false if no server can
    /// take its place; then the chunk stays as it is.
    pub fn replace_full_server(&mut self, at: ChunkAt, server: ServerId) -> bool {
        self.mark_full(server);
        let Some(chunk) = self.find(at) else { return true };
        if !chunk.current().has(server) {
            return true;
        }
        let chosen = self.choose(chunk, 1);
        let its = ServerSet::one(server);
        let rest = chunk.current().minus(its).and(self.up);
        let may_do_with_fewer = !rest.is_empty() && self.is_server_missing();
        let others_are_whole = !chunk.complete.minus(its).and(self.up).is_empty();
        let is_only_whole = chunk.complete.has(server) && !others_are_whole && !rest.is_empty();
        if is_only_whole || chosen.is_empty() && !may_do_with_fewer {
            return false;
        }
        self.reserve_room(chosen);
        let up = self.up;
        let chunk = self.chunk_mut(at);
        if rest.is_empty() {
            // The server keeps the pages that it has.
            chunk.demote_current();
            chunk.catching_up = chosen;
        } else {
            chunk.stop_writes_to(server);
            chunk.add_members(chosen, up);
        }
        true
    }

    /// Returns true if a server that was up once is not up now.
    fn is_server_missing(&self) -> bool {
        !self.known.minus(self.up).is_empty()
    }

    pub(super) fn mark_full(&mut self, server: ServerId) {
        self.servers[server as usize].pages_free = 0;
    }

    /// Returns the servers that have the last put of every page of a chunk.
    ///
    /// # Panics
    /// If the chunk does not exist.
    pub fn complete(&self, at: ChunkAt) -> ServerSet {
        self.chunk(at).complete
    }

    /// Returns the members of a chunk that are up.
    pub fn reachable_members(&self, at: ChunkAt) -> ServerSet {
        self.find(at).map_or(ServerSet::EMPTY, ChunkMembers::members).and(self.up)
    }

    /// Returns true if writes to the chunk go to this server. A writer must take its lease before
    /// it asks. Repair cleans a removed server under a fence. The fence voids earlier requests, and
    /// later ones must not be sent.
    pub fn is_current(&self, at: ChunkAt, server: ServerId) -> bool {
        self.find(at).is_some_and(|chunk| chunk.current().has(server))
    }

    /// Returns true if the region was added and not dropped.
    pub fn has_region(&self, region: RegionId) -> bool {
        self.regions.contains_key(&region)
    }

    /// Returns the servers to ask for a page of a chunk.
    ///
    /// # Panics
    /// If the chunk does not exist.
    pub fn read_plan(&self, at: ChunkAt) -> ReadPlan {
        let chunk = self.chunk(at);
        let mut plan = ReadPlan {
            servers: [0; SERVERS_MAX],
            count: 0,
            waiting_for: chunk.members().and(self.down),
        };
        plan.push(chunk.complete.and(self.up), at.chunk);
        plan.push(chunk.catching_up.and(self.up), at.chunk);
        chunk.older_layers.iter().for_each(|layer| plan.push(layer.and(self.up), at.chunk));
        // Better than waiting: readers verify what a shunned server sends.
        plan.push(chunk.members().and(self.shunned), at.chunk);
        plan
    }

    /// Returns the servers that could take a new replica if they had room.
    fn candidates(&self, at: ChunkAt) -> ServerSet {
        let chunk = self.chunk(at);
        let taken = chunk.members().union(chunk.leaving);
        let usable = |server: &ServerId| self.server(*server).availability == Availability::Up;
        self.up.minus(taken).iter().filter(usable).collect()
    }

    /// Chooses up to `count` servers for new replicas. It prefers failure domains without a replica
    /// of the chunk, then the most free memory.
    pub(super) fn choose(&self, chunk: &ChunkMembers, count: usize) -> ServerSet {
        if count == 0 {
            return ServerSet::EMPTY;
        }
        let taken = chunk.members().union(chunk.leaving);
        let has_room = |server: &ServerId| {
            let state = self.server(*server);
            state.availability == Availability::Up && state.pages_free > 0
        };
        let mut usable: Vec<ServerId> = self.up.minus(taken).iter().filter(has_room).collect();
        usable.sort_by_key(|server| (Reverse(self.server(*server).pages_free), *server));
        self.spread(usable, count, chunk.current().and(self.up))
    }

    /// Returns the first `count` of `servers`. Servers that share no failure domain with each other
    /// or with `beside` come first.
    pub(super) fn spread(
        &self,
        mut servers: Vec<ServerId>,
        count: usize,
        beside: ServerSet,
    ) -> ServerSet {
        let domain = |server: ServerId| self.domains[server as usize];
        let mut chosen = ServerSet::EMPTY;
        while chosen.len() < count && !servers.is_empty() {
            let used = chosen.union(beside);
            let is_apart =
                |server: &ServerId| !used.iter().any(|other| domain(other) == domain(*server));
            let best = servers.iter().position(is_apart).unwrap_or(0);
            chosen.insert(servers.remove(best));
        }
        chosen
    }

    pub(super) fn reserve_room(&mut self, chosen: ServerSet) {
        for server in chosen.iter() {
            let free = &mut self.servers[server as usize].pages_free;
            *free = free.saturating_sub(CHUNK_PAGES).max((*free).min(1));
        }
    }

    /// Returns a chunk, or `None` if its region was dropped meanwhile.
    pub(super) fn find(&self, at: ChunkAt) -> Option<&ChunkMembers> {
        self.regions.get(&at.region)?.get(at.chunk)
    }

    pub(super) fn chunk(&self, at: ChunkAt) -> &ChunkMembers {
        self.find(at).expect("a chunk of the region")
    }

    /// Returns a chunk to change, or `None` if its region was dropped meanwhile.
    pub(super) fn known_chunk(&mut self, at: ChunkAt) -> Option<&mut ChunkMembers> {
        self.regions.get_mut(&at.region)?.get_mut(at.chunk)
    }

    pub(super) fn chunk_mut(&mut self, at: ChunkAt) -> &mut ChunkMembers {
        self.known_chunk(at).expect("a region that was added")
    }
}
