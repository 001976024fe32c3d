//! What brings chunks back to their number of copies, after losses and before departures: the second
//! half of the [`Replicator`].

use super::chunk::{Chunk, ChunkAt, Chunks};
use super::replicator::{Replicator, Standing};
use super::set::{ServerId, ServerSet};

/// Work that brings a chunk back to its number of copies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Repair {
    /// Copy what `to` do not have, then say so with [`Replicator::copied`].
    Copy {
        /// The chunk.
        at: ChunkAt,
        /// Who has the pages.
        from: ServerId,
        /// Who needs them.
        to: ServerSet,
        /// Of the chunk's membership.
        version: u32,
    },
    /// Discard the chunk there, then say so with [`Replicator::cleaned`].
    Clean {
        /// The chunk.
        at: ChunkAt,
        /// Who is no member any more.
        server: ServerId,
    },
}

impl Replicator {
    /// The first chunk from this one on that may need work: not all of its copies are whole, on servers that stay.
    pub fn next_ailing(&self, from: ChunkAt) -> Option<ChunkAt> {
        let stays = |server: &ServerId| self.server(*server).standing == Standing::Up;
        let staying: ServerSet = self.up.iter().filter(stays).collect();
        let is_ailing = |chunk: &Chunk| {
            let is_whole = chunk.members() == chunk.complete
                && chunk.complete.minus(staying).is_empty()
                && chunk.complete.len() == self.copies;
            chunk.is_placed() && !is_whole || !chunk.leaving.and(self.up).is_empty()
        };
        self.regions.range(from.region..).find_map(|(region, chunks)| {
            let first = if *region == from.region { from.chunk } else { 0 };
            let chunk = chunks.placed_from(first).find(|(_, chunk)| is_ailing(chunk))?.0;
            Some(ChunkAt { region: *region, chunk })
        })
    }

    /// Copies of chunks, complete and within reach, that there should be more.
    pub fn copies_missing(&self) -> u64 {
        let chunks =
            self.regions.values().flat_map(Chunks::placed).filter(|chunk| chunk.is_placed());
        let missing =
            |chunk: &Chunk| self.copies.saturating_sub(chunk.complete.and(self.up).len()) as u64;
        chunks.map(missing).sum()
    }

    /// A server that was to get a chunk has no room for it.
    pub fn cannot_join(&mut self, at: ChunkAt, server: ServerId) {
        self.has_no_room(server);
        if let Some(chunk) = self.known_chunk(at)
            && chunk.catching_up.has(server)
            && !chunk.complete.is_empty()
        {
            chunk.put_out(server);
        }
    }

    /// The servers have what was to be copied to them. False when the chunk has changed meanwhile:
    /// it will be looked at again.
    pub fn copied(&mut self, at: ChunkAt, from: ServerId, to: ServerSet, version: u32) -> bool {
        let Some(chunk) = self.known_chunk(at).filter(|chunk| chunk.version == version) else {
            return false;
        };
        if chunk.complete.has(from) {
            chunk.complete = chunk.complete.union(to);
            chunk.catching_up = chunk.catching_up.minus(to);
            chunk.put_out_spent();
        } else {
            // The layer is spent; who was not there to get it is of no use any more.
            let layer = chunk.older[0];
            let absent = chunk.catching_up.minus(to);
            layer.union(absent).iter().for_each(|server| chunk.put_out(server));
            if chunk.older.is_empty() {
                chunk.complete = std::mem::take(&mut chunk.catching_up);
            }
        }
        chunk.version += 1;
        true
    }

    /// A server has discarded what it held of a chunk that it is no member of.
    pub fn cleaned(&mut self, at: ChunkAt, server: ServerId) {
        if let Some(chunk) = self.known_chunk(at) {
            chunk.leaving.remove(server);
        }
    }

    /// Work on a chunk that can be done now.
    pub fn repair_of(&mut self, at: ChunkAt) -> Option<Repair> {
        self.find(at)?;
        self.put_out_superfluous(at);
        self.invite(at);
        let up = self.up;
        let chunk = self.chunk(at);
        let to = chunk.catching_up.and(up);
        let newest_layer = chunk.older.first().copied().unwrap_or_default();
        let sources = if chunk.complete.is_empty() { newest_layer } else { chunk.complete };
        if let (Some(from), false) = (sources.and(up).iter().next(), to.is_empty()) {
            return Some(Repair::Copy { at, from, to, version: chunk.version });
        }
        let server = chunk.leaving.and(up).iter().next()?;
        Some(Repair::Clean { at, server })
    }

    /// With enough complete copies on servers that stay, no other is needed.
    fn put_out_superfluous(&mut self, at: ChunkAt) {
        let (copies, up) = (self.copies, self.up);
        let chunk = self.chunk(at);
        let stays = |server: &ServerId| self.server(*server).standing == Standing::Up;
        let staying: ServerSet = chunk.complete.and(up).iter().filter(stays).take(copies).collect();
        if staying.len() >= copies {
            let superfluous = chunk.members().minus(staying);
            superfluous.iter().for_each(|server| self.chunk_mut(at).put_out(server));
        }
    }

    /// Adds servers to a chunk that has too few which will stay, if there is anything to copy.
    fn invite(&mut self, at: ChunkAt) {
        let chunk = self.chunk(at);
        let can_copy = !chunk.complete.and(self.up).is_empty();
        if !can_copy || !chunk.catching_up.is_empty() {
            return;
        }
        let counts = |server: &ServerId| {
            let state = self.server(*server);
            match state.standing {
                Standing::Up => true,
                Standing::Down => !state.is_given_up,
                Standing::Draining | Standing::Gone => false,
            }
        };
        let staying = chunk.complete.iter().filter(counts).count();
        let chosen = self.choose(chunk, self.copies.saturating_sub(staying));
        if !chosen.is_empty() {
            self.take_room(chosen);
            let chunk = self.chunk_mut(at);
            chunk.catching_up = chosen;
            chunk.version += 1;
        }
    }
}
