//! The part of the [`Replicator`] that brings chunks back to their number of replicas, after losses
//! and before a server leaves.

use super::chunk::{ChunkAt, ChunkMembers, RegionChunks};
use super::replicator::{Availability, Replicator};
use super::set::{ServerId, ServerSet};

/// A step that brings a chunk back to its number of replicas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Repair {
    /// A copy of the pages that the servers in `to` lack. [`Replicator::finish_copy`] ends it.
    Copy {
        /// The chunk whose pages are copied.
        at: ChunkAt,
        /// The server that has the pages.
        from: ServerId,
        /// The servers that lack the pages.
        to: ServerSet,
        /// The version of the chunk's membership at the start.
        version: u32,
    },
    /// A discard of a whole chunk on one server. [`Replicator::finish_clean`] ends it.
    Clean {
        /// The chunk whose pages are discarded.
        at: ChunkAt,
        /// The server, which is no member any more.
        server: ServerId,
    },
}

impl Replicator {
    /// Returns the first chunk at or after `from` that may need repair. It lacks complete replicas
    /// on servers that stay, has surplus members, is crowded or must be cleaned somewhere.
    pub fn next_repairable(&self, from: ChunkAt) -> Option<ChunkAt> {
        let stays = |server: &ServerId| self.server(*server).availability == Availability::Up;
        let staying: ServerSet = self.up.iter().filter(stays).collect();
        let roomy: ServerSet =
            staying.iter().filter(|server| self.server(*server).pages_free > 0).collect();
        let needs_repair = |chunk: &ChunkMembers| {
            let is_whole = chunk.members() == chunk.complete
                && chunk.complete.minus(staying).is_empty()
                && chunk.complete.len() == self.replicas_wanted;
            chunk.is_placed() && (!is_whole || self.is_crowded(chunk, roomy))
                || !chunk.leaving.and(self.up).is_empty()
        };
        self.regions.range(from.region..).find_map(|(region, chunks)| {
            let first = if *region == from.region { from.chunk } else { 0 };
            let chunk = chunks.placed_from(first).find(|(_, chunk)| needs_repair(chunk))?.0;
            Some(ChunkAt { region: *region, chunk })
        })
    }

    /// Returns the number of chunk replicas, complete and reachable, that are missing.
    pub fn replicas_missing(&self) -> u64 {
        let chunks =
            self.regions.values().flat_map(RegionChunks::placed).filter(|chunk| chunk.is_placed());
        let missing = |chunk: &ChunkMembers| {
            self.replicas_wanted.saturating_sub(chunk.complete.and(self.up).len()) as u64
        };
        chunks.map(missing).sum()
    }

    /// Records that a new member has no room for its chunk.
    pub fn record_full_member(&mut self, at: ChunkAt, server: ServerId) {
        self.mark_full(server);
        let up = self.up;
        let Some(chunk) = self.known_chunk(at).filter(|chunk| chunk.catching_up.has(server)) else {
            return;
        };
        let others = chunk.catching_up.minus(ServerSet::one(server)).and(up);
        let newest_layer = chunk.older_layers.first().copied().unwrap_or_default().and(up);
        if !chunk.complete.is_empty() || !others.is_empty() {
            chunk.stop_writes_to(server);
        } else if newest_layer.len() > 1 {
            // One of the servers with the older pages makes room for them: it is cleaned and joins
            // again.
            newest_layer.iter().take(1).for_each(|server| chunk.remove_server(server));
        }
    }

    /// Records that the servers in `to` have the copied pages. Returns false if the chunk changed
    /// meanwhile: repair looks at it again.
    pub fn finish_copy(
        &mut self,
        at: ChunkAt,
        from: ServerId,
        to: ServerSet,
        version: u32,
    ) -> bool {
        let Some(chunk) = self.known_chunk(at).filter(|chunk| chunk.version == version) else {
            return false;
        };
        if chunk.complete.has(from) {
            chunk.complete = chunk.complete.union(to);
            chunk.catching_up = chunk.catching_up.minus(to);
            chunk.remove_superseded_layers();
        } else {
            chunk.retire_newest_layer(to);
        }
        chunk.version += 1;
        true
    }

    /// Records that a server has discarded a chunk of which it is no member.
    pub fn finish_clean(&mut self, at: ChunkAt, server: ServerId) {
        if let Some(chunk) = self.known_chunk(at) {
            chunk.leaving.remove(server);
        }
    }

    /// Updates a chunk's members, and returns a repair of it that can start now, if there is one.
    pub fn plan_repair(&mut self, at: ChunkAt) -> Option<Repair> {
        self.find(at)?;
        self.remove_surplus_members(at);
        self.add_replicas(at);
        let up = self.up;
        while self.has_superseded_layer(at) {
            self.chunk_mut(at).retire_newest_layer(ServerSet::EMPTY);
        }
        let chunk = self.chunk(at);
        let newest_layer = chunk.older_layers.first().copied().unwrap_or_default();
        let sources = if chunk.complete.is_empty() { newest_layer } else { chunk.complete };
        let to = chunk.catching_up.and(up).minus(sources);
        let from = sources.and(up).iter().next().filter(|_| !to.is_empty());
        let copy = from.map(|from| Repair::Copy { at, from, to, version: chunk.version });
        let leaving = chunk.leaving.and(up).iter().next();
        let clean = leaving.map(|server| Repair::Clean { at, server });
        // If no server has room, one that is cleaned may have.
        let is_full = to.iter().all(|server| self.server(server).pages_free == 0);
        if is_full { clean.or(copy) } else { copy.or(clean) }
    }

    /// Returns true if all catching-up servers that are up have the newest older layer.
    fn has_superseded_layer(&self, at: ChunkAt) -> bool {
        let chunk = self.chunk(at);
        let live = chunk.catching_up.and(self.up);
        chunk.complete.is_empty()
            && !live.is_empty()
            && chunk.older_layers.first().is_some_and(|layer| live.minus(*layer).is_empty())
    }

    /// Returns the servers of the same layer as `server`, which have the same pages of the chunk.
    pub fn layer_of(&self, at: ChunkAt, server: ServerId) -> ServerSet {
        let Some(chunk) = self.find(at) else { return ServerSet::EMPTY };
        let layers = [chunk.complete].into_iter().chain(chunk.older_layers.iter().copied());
        layers.into_iter().find(|layer| layer.has(server)).unwrap_or_default()
    }

    /// Removes members that are surplus, once enough complete replicas are on servers that stay.
    fn remove_surplus_members(&mut self, at: ChunkAt) {
        let chunk = self.chunk(at);
        let stays = |server: &ServerId| self.server(*server).availability == Availability::Up;
        let staying: Vec<ServerId> = chunk.complete.and(self.up).iter().filter(stays).collect();
        let staying = self.spread(staying, self.replicas_wanted, ServerSet::EMPTY);
        if staying.len() >= self.replicas_wanted {
            let superfluous = chunk.members().minus(staying);
            superfluous.iter().for_each(|server| self.chunk_mut(at).remove_server(server));
        }
    }

    /// Adds members to a chunk, if a source is up. The chunk has too few members that will stay, or
    /// one failure takes several of its replicas.
    fn add_replicas(&mut self, at: ChunkAt) {
        let chunk = self.chunk(at);
        let newest_layer = chunk.older_layers.first().copied().unwrap_or_default();
        let sources = if chunk.complete.is_empty() { newest_layer } else { chunk.complete };
        if sources.and(self.up).is_empty() {
            return;
        }
        let counts = |server: &ServerId| {
            let state = self.server(*server);
            match state.availability {
                Availability::Up => true,
                Availability::Down => !state.is_given_up,
                Availability::Draining | Availability::Gone => false,
            }
        };
        let staying = chunk.current().iter().filter(counts).count();
        let is_crowded = chunk.catching_up.is_empty() && self.is_crowded(chunk, self.up);
        let missing = self.replicas_wanted.saturating_sub(staying).max(is_crowded as usize);
        let chosen = self.choose(chunk, missing);
        self.reserve_room(chosen);
        let up = self.up;
        self.chunk_mut(at).add_members(chosen, up);
    }

    /// Returns true if one failure takes several of the complete replicas, and a server in another
    /// failure domain is available.
    fn is_crowded(&self, chunk: &ChunkMembers, roomy: ServerSet) -> bool {
        let domain = |server: ServerId| self.domains[server as usize];
        let is_shared = |server: ServerId| {
            let others = chunk.complete.minus(ServerSet::one(server));
            others.iter().any(|other| domain(other) == domain(server))
        };
        let is_elsewhere = |server: ServerId| {
            let state = self.server(server);
            let can_take = state.availability == Availability::Up && state.pages_free > 0;
            can_take && !chunk.complete.iter().any(|other| domain(other) == domain(server))
        };
        chunk.complete.iter().any(is_shared)
            && roomy.minus(chunk.members()).minus(chunk.leaving).iter().any(is_elsewhere)
    }
}
