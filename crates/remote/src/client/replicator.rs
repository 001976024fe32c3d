//! Where the copies of pages are, and what must still happen to them. A pure state machine: it is
//! told what happened and says what to do; it knows no sockets and no time.
//!
//! Pages are placed by chunks. The servers of a chunk are in layers:
//!
//! - *complete* servers have every page of the chunk as it was last put;
//! - servers that are *catching up* have whatever was put since they joined. A server can be in an older layer as well:
//!   then others joined after it;
//! - *older* layers have what was put before a write that they missed. They are kept, newest first, while
//!   nobody newer is complete, or while somebody catches up who has what they missed: should the complete
//!   ones be lost now, both together have everything.
//!
//! Writes go to all complete and catching-up servers that are up, and are done when all that are
//! members *by then* have acknowledged: who joined meanwhile is written to as well, and who is down is
//! no longer complete (a copy that missed a write is none). Where that leaves too few, another joins before the
//! write is done. So a repair may copy old pages to a newcomer while new ones are written to it, if it copies only
//! what the newcomer does not have.
//!
//! Invariants:
//! 1. A complete server has, of every page whose put is done, the bytes of the last put.
//! 2. All servers that are catching up in a chunk have whatever was put since the newest older layer was written last.
//!    Without older layers, complete servers have everything.
//! 3. A server that is up and no member of a chunk holds no page of it; until it is cleaned, it is
//!    *leaving*, and is not chosen.
//! 4. Where there are complete servers and older layers, somebody is catching up who has, of every page whose put
//!    is done and that the newest older layer has not, the bytes of the last put.
//!
//! Nothing here is trusted for the bytes: readers prove them by sums. A mistake here loses pages; it
//! cannot pass off wrong ones.

pub use super::chunk::{CHUNK_PAGES, Chunk, ChunkAt};

use super::chunk::Chunks;
use super::set::{SERVERS_MAX, ServerId, ServerSet};
use crate::store::{Capacity, RegionId};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Whether a server can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// For everything.
    Up,
    /// For everything but new pages: it is about to leave.
    Draining,
    /// It does not answer. What it holds may still be there.
    Down,
    /// What it held is lost.
    Gone,
}

/// What fails together with a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Domain {
    /// Nothing, as far as is known.
    Own(ServerId),
    /// All servers that say so.
    Named(u64),
}

/// A server as placement sees it.
#[derive(Debug, Clone, Copy)]
pub struct ServerState {
    /// Whether it can be used.
    pub standing: Standing,
    /// Has been down for so long that its copies are to be replaced.
    pub is_given_up: bool,
    /// As it last said.
    pub pages_total: u64,
    /// As it last said, less what was placed there since.
    pub pages_free: u64,
}

/// A write cannot be placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoPlace {
    /// Servers are up, but have no room.
    Full,
    /// No server is up that may take it now.
    Nobody,
    /// The region is dropped.
    NoRegion,
}

/// Who has acknowledged a write, and when: a server that was lost since may be back, and have nothing of it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Acked {
    servers: ServerSet,
    /// [`Replicator::losses`] when they were to be asked.
    losses: u64,
}

impl Acked {
    /// Another has.
    pub fn insert(&mut self, server: ServerId) {
        self.servers.insert(server);
    }

    /// Who has.
    pub fn servers(&self) -> ServerSet {
        self.servers
    }
}

/// What is left to do for a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settled {
    /// Nothing: the caller may drop its own copy.
    Done,
    /// These have it not yet.
    Send(ServerSet),
    /// Too few who have it are up, or a server was lost since they were asked: ask for targets again.
    Again,
}

/// Whom to ask for pages, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadPlan {
    servers: [ServerId; SERVERS_MAX],
    count: usize,
    /// Who is down and may have them when he comes back.
    pub waiting_for: ServerSet,
}

impl ReadPlan {
    /// Whom to ask, in this order.
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

/// The state machine.
#[derive(Debug)]
pub struct Replicator {
    pub(super) copies: usize,
    pub(super) servers: Vec<ServerState>,
    pub(super) regions: BTreeMap<RegionId, Chunks>,
    /// Servers by what they can be used for: kept beside `servers` so that reads need no loop.
    pub(super) up: ServerSet,
    pub(super) down: ServerSet,
    /// Servers that are down by our own decision, as they answer without doing what they are asked.
    pub(super) shunned: ServerSet,
    /// Servers that were up once.
    pub(super) known: ServerSet,
    pub(super) domains: Vec<Domain>,
    /// How often a server was lost with what it held.
    pub(super) losses: u64,
}

impl Replicator {
    /// Without servers and regions yet.
    pub fn new(copies: usize) -> Replicator {
        Replicator {
            copies,
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

    /// Another server, of which nothing is known yet; none when there are too many.
    pub fn add_server(&mut self) -> Option<ServerId> {
        let id = self.servers.len();
        (id < SERVERS_MAX).then(|| {
            self.servers.push(ServerState {
                standing: Standing::Gone,
                is_given_up: true,
                pages_total: 0,
                pages_free: 0,
            });
            self.domains.push(Domain::Own(id as ServerId));
            id as ServerId
        })
    }

    /// A server.
    pub fn server(&self, server: ServerId) -> ServerState {
        self.servers[server as usize]
    }

    /// Those that answer.
    pub fn up(&self) -> ServerSet {
        self.up
    }

    /// A region of this many pages, none of them placed.
    pub fn add_region(&mut self, region: RegionId, pages: u64) {
        let count = pages.div_ceil(CHUNK_PAGES);
        self.regions.insert(region, Chunks::new(count));
    }

    /// Forgets a region; whether it was there.
    pub fn drop_region(&mut self, region: RegionId) -> bool {
        self.regions.remove(&region).is_some()
    }

    /// What all servers that answer have, in pages of the caller.
    pub fn capacity(&self) -> Capacity {
        let up = || self.up.iter().map(|server| self.server(server));
        let usable = up().filter(|state| state.standing == Standing::Up);
        let copies = self.copies as u64;
        // Servers may say anything.
        Capacity {
            pages_total: up().fold(0, |sum: u64, state| sum.saturating_add(state.pages_total))
                / copies,
            pages_free: usable.fold(0, |sum: u64, state| sum.saturating_add(state.pages_free))
                / copies,
        }
    }

    /// Where a write to this chunk goes, beside those who have acknowledged it: if nothing has to change for that, so
    /// that others may look meanwhile. After a loss, none has acknowledged it.
    pub fn known_targets(&self, at: ChunkAt, acked: &mut Acked) -> Option<ServerSet> {
        if acked.losses != self.losses {
            *acked = Acked { servers: ServerSet::EMPTY, losses: self.losses };
        }
        let chunk = self.find(at)?;
        let live = chunk.current().and(self.up);
        (live.len() >= self.copies).then(|| live.minus(acked.servers))
    }

    /// The same, where servers may have to join.
    ///
    /// # Errors
    /// When there is no place for it.
    pub fn targets(&mut self, at: ChunkAt, acked: &mut Acked) -> Result<ServerSet, NoPlace> {
        match self.known_targets(at, acked) {
            Some(known) => Ok(known),
            None => Ok(self.place(at)?.minus(acked.servers)),
        }
    }

    /// Has servers join where there are too few; who is to be written to then.
    fn place(&mut self, at: ChunkAt) -> Result<ServerSet, NoPlace> {
        let up = self.up;
        if self.find(at).is_none() {
            return Err(NoPlace::NoRegion);
        }
        let chunk = self.chunk(at);
        let live = chunk.current().and(up);
        let chosen = self.choose(chunk, self.copies - live.len());
        if live.is_empty() && chosen.is_empty() {
            // Who has older pages of it, or is to be cleaned of them, may take it later.
            let later = chunk.members().union(chunk.leaving).and(self.up);
            let is_full = !self.up.is_empty() && later.is_empty();
            return Err(if is_full { NoPlace::Full } else { NoPlace::Nobody });
        }
        // Fewer copies than asked for are taken when servers are missing, not when they are full.
        let possible = self.copies.min(live.union(self.candidates(at)).len());
        if live.len() + chosen.len() < possible && !self.is_short_handed() {
            return Err(NoPlace::Full);
        }
        self.take_room(chosen);
        if !chosen.is_empty() {
            self.chunk_mut(at).join(chosen, up);
        }
        Ok(live.union(chosen))
    }

    /// Whether a write that these servers have acknowledged is done, and nothing has to change for that.
    pub fn is_settled(&self, at: ChunkAt, acked: Acked) -> bool {
        self.find(at).is_some_and(|chunk| {
            let current = chunk.current();
            acked.losses == self.losses
                && acked.servers == current
                && current.and(self.up).len() >= self.copies
        })
    }

    /// A write that these servers have acknowledged: is it done?
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
        let may_join = live.len() < self.copies;
        if members.and(acked).is_empty() || may_join && !self.choose(chunk, 1).is_empty() {
            return Settled::Again;
        }
        self.chunk_mut(at).was_written(acked);
        Settled::Done
    }

    /// A server has no room for a page of this chunk: another takes its place. False when there is
    /// none, and nothing changes.
    pub fn refuse(&mut self, at: ChunkAt, server: ServerId) -> bool {
        self.has_no_room(server);
        let Some(chunk) = self.find(at) else { return true };
        if !chunk.current().has(server) {
            return true;
        }
        let chosen = self.choose(chunk, 1);
        let its = ServerSet::one(server);
        let rest = chunk.current().minus(its).and(self.up);
        let may_do_with_fewer = !rest.is_empty() && self.is_short_handed();
        let others_are_whole = !chunk.complete.minus(its).and(self.up).is_empty();
        let is_only_whole = chunk.complete.has(server) && !others_are_whole && !rest.is_empty();
        if is_only_whole || chosen.is_empty() && !may_do_with_fewer {
            return false;
        }
        self.take_room(chosen);
        let up = self.up;
        let chunk = self.chunk_mut(at);
        if rest.is_empty() {
            // It keeps what it has.
            chunk.bury();
            chunk.catching_up = chosen;
        } else {
            chunk.miss(server);
            chunk.join(chosen, up);
        }
        true
    }

    /// Whether servers that were up once are not.
    fn is_short_handed(&self) -> bool {
        !self.known.minus(self.up).is_empty()
    }

    pub(super) fn has_no_room(&mut self, server: ServerId) {
        self.servers[server as usize].pages_free = 0;
    }

    /// Servers that have every page of a chunk as it was last put.
    ///
    /// # Panics
    /// For chunks that are not there.
    pub fn complete(&self, at: ChunkAt) -> ServerSet {
        self.chunk(at).complete
    }

    /// Members of a chunk that can be reached.
    pub fn holders(&self, at: ChunkAt) -> ServerSet {
        self.find(at).map_or(ServerSet::EMPTY, Chunk::members).and(self.up)
    }

    /// Whether a server is written to. To be asked by a writer that has a lease on it already: a server that is put out is
    /// cleaned under a fence, so that what was sent before is void, and must not be sent after.
    pub fn is_current(&self, at: ChunkAt, server: ServerId) -> bool {
        self.find(at).is_some_and(|chunk| chunk.current().has(server))
    }

    /// Whether it was added and not dropped.
    pub fn has_region(&self, region: RegionId) -> bool {
        self.regions.contains_key(&region)
    }

    /// Whom to ask for a page of this chunk.
    ///
    /// # Panics
    /// For chunks that are not there.
    pub fn read_plan(&self, at: ChunkAt) -> ReadPlan {
        let chunk = self.chunk(at);
        let mut plan = ReadPlan {
            servers: [0; SERVERS_MAX],
            count: 0,
            waiting_for: chunk.members().and(self.down),
        };
        plan.push(chunk.complete.and(self.up), at.chunk);
        plan.push(chunk.catching_up.and(self.up), at.chunk);
        chunk.older.iter().for_each(|layer| plan.push(layer.and(self.up), at.chunk));
        // Better than to wait: what it answers is proven by checksums.
        plan.push(chunk.members().and(self.shunned), at.chunk);
        plan
    }

    /// Servers that could take a new copy, had they room.
    fn candidates(&self, at: ChunkAt) -> ServerSet {
        let chunk = self.chunk(at);
        let taken = chunk.members().union(chunk.leaving);
        let usable = |server: &ServerId| self.server(*server).standing == Standing::Up;
        self.up.minus(taken).iter().filter(usable).collect()
    }

    /// Up to `count` servers for new copies: in other failure domains than those that have the chunk, as far as there
    /// are such, and with the most memory free.
    pub(super) fn choose(&self, chunk: &Chunk, count: usize) -> ServerSet {
        if count == 0 {
            return ServerSet::EMPTY;
        }
        let taken = chunk.members().union(chunk.leaving);
        let has_room = |server: &ServerId| {
            let state = self.server(*server);
            state.standing == Standing::Up && state.pages_free > 0
        };
        let mut usable: Vec<ServerId> = self.up.minus(taken).iter().filter(has_room).collect();
        usable.sort_by_key(|server| (Reverse(self.server(*server).pages_free), *server));
        self.spread(usable, count, chunk.current().and(self.up))
    }

    /// The first `count` of some servers, with those first that share no failure domain with each other or with
    /// `beside`.
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

    pub(super) fn take_room(&mut self, chosen: ServerSet) {
        for server in chosen.iter() {
            let free = &mut self.servers[server as usize].pages_free;
            *free = free.saturating_sub(CHUNK_PAGES).max((*free).min(1));
        }
    }

    /// A chunk, unless its region was dropped meanwhile.
    pub(super) fn find(&self, at: ChunkAt) -> Option<&Chunk> {
        self.regions.get(&at.region)?.get(at.chunk)
    }

    pub(super) fn chunk(&self, at: ChunkAt) -> &Chunk {
        self.find(at).expect("a chunk of the region")
    }

    /// A chunk that is to be changed, unless its region was dropped meanwhile.
    pub(super) fn known_chunk(&mut self, at: ChunkAt) -> Option<&mut Chunk> {
        self.regions.get_mut(&at.region)?.get_mut(at.chunk)
    }

    pub(super) fn chunk_mut(&mut self, at: ChunkAt) -> &mut Chunk {
        self.known_chunk(at).expect("a region that was added")
    }
}
