//! The chunks of regions: by them pages are placed. Which servers are in which layer, and what moves
//! them between layers, [`super::replicator`] explains.

use super::set::{ServerId, ServerSet};
use crate::store::RegionId;
use std::collections::BTreeMap;

/// Pages of a chunk: 1 MiB.
pub const CHUNK_PAGES: u64 = 256;

/// A chunk of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkAt {
    /// The region.
    pub region: RegionId,
    /// Number of its first page over [`CHUNK_PAGES`].
    pub chunk: u64,
}

/// Who has what of a chunk.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Chunk {
    pub(super) complete: ServerSet,
    pub(super) catching_up: ServerSet,
    pub(super) older: Vec<ServerSet>,
    pub(super) leaving: ServerSet,
    /// Counts changes of membership, so that what was begun before a change is not finished after.
    pub(super) version: u32,
}

impl Chunk {
    pub(super) fn members(&self) -> ServerSet {
        self.older.iter().fold(self.current(), |all, set| all.union(*set))
    }

    /// Those that are written to.
    pub(super) fn current(&self) -> ServerSet {
        self.complete.union(self.catching_up)
    }

    pub(super) fn is_placed(&self) -> bool {
        !self.members().is_empty()
    }

    /// Puts a server out: it is cleaned when it can be reached.
    pub(super) fn put_out(&mut self, server: ServerId) {
        self.complete.remove(server);
        self.catching_up.remove(server);
        self.older.iter_mut().for_each(|layer| layer.remove(server));
        self.older.retain(|layer| !layer.is_empty());
        self.leaving.insert(server);
        self.version += 1;
        self.put_out_spent();
    }

    /// Beside complete servers, older layers are of use only with somebody who has what they missed.
    pub(super) fn put_out_spent(&mut self) {
        if !self.complete.is_empty() && self.catching_up.is_empty() {
            self.leaving = self.older.drain(..).fold(self.leaving, ServerSet::union);
        }
    }

    /// A write is done that these servers have, and other members missed.
    pub(super) fn was_written(&mut self, acked: ServerSet) {
        let missed = self.complete.minus(acked);
        // The newcomers have this write; the rest is where it was.
        if !missed.is_empty() && !self.catching_up.and(acked).is_empty() {
            self.complete = self.complete.and(acked);
            self.older.insert(0, missed);
            self.version += 1;
        }
        let others = self.current().minus(acked);
        others.iter().for_each(|server| self.put_out(server));
    }

    /// Moves complete and catching-up servers to the older layers: none of them is to be had.
    pub(super) fn bury(&mut self) {
        let layers = [self.catching_up, self.complete];
        self.older.splice(0..0, layers.into_iter().filter(|layer| !layer.is_empty()));
        (self.complete, self.catching_up) = (ServerSet::EMPTY, ServerSet::EMPTY);
        self.version += 1;
    }

    /// Makes the newest layer that is left the current one. With nothing older to be had, it has all
    /// that is left.
    fn promote(&mut self) {
        if self.complete.is_empty() && self.catching_up.is_empty() && !self.older.is_empty() {
            self.catching_up = self.older.remove(0);
        }
        if self.complete.is_empty() && self.older.is_empty() {
            self.complete = std::mem::take(&mut self.catching_up);
        }
    }

    /// What a member held is lost; whether nobody else has all of it.
    ///
    /// A complete server has everything; those that catch up beside it have it together with an older layer.
    /// Else each layer has something that the others have not.
    pub(super) fn forget(&mut self, server: ServerId) -> bool {
        let its = ServerSet::one(server);
        let layers = [self.complete, self.catching_up];
        let was_alone = layers.iter().chain(&self.older).any(|layer| *layer == its);
        let was_last_complete = self.complete == its;
        self.put_out(server);
        let is_whole = was_last_complete && !self.catching_up.is_empty() && !self.older.is_empty();
        let damaged = was_alone && self.complete.is_empty() && !is_whole;
        self.promote();
        damaged
    }
}

static UNPLACED: Chunk = Chunk {
    complete: ServerSet::EMPTY,
    catching_up: ServerSet::EMPTY,
    older: Vec::new(),
    leaving: ServerSet::EMPTY,
    version: 0,
};

/// The chunks of a region. Regions may be far larger than what is ever put: only chunks that were
/// placed take memory, or time in a scan.
#[derive(Debug)]
pub(super) struct Chunks {
    count: u64,
    placed: BTreeMap<u64, Chunk>,
}

impl Chunks {
    pub(super) fn new(count: u64) -> Chunks {
        Chunks { count, placed: BTreeMap::new() }
    }

    pub(super) fn get(&self, chunk: u64) -> Option<&Chunk> {
        (chunk < self.count).then(|| self.placed.get(&chunk).unwrap_or(&UNPLACED))
    }

    pub(super) fn get_mut(&mut self, chunk: u64) -> Option<&mut Chunk> {
        (chunk < self.count).then(|| self.placed.entry(chunk).or_default())
    }

    /// Those that were placed with their numbers, from one on.
    pub(super) fn placed_from(&self, first: u64) -> impl Iterator<Item = (u64, &Chunk)> {
        self.placed.range(first..).map(|(number, chunk)| (*number, chunk))
    }

    /// Those that were placed.
    pub(super) fn placed(&self) -> impl Iterator<Item = &Chunk> {
        self.placed.values()
    }

    /// Those that were placed with their numbers, to be changed.
    pub(super) fn placed_mut(&mut self) -> impl Iterator<Item = (u64, &mut Chunk)> {
        self.placed.iter_mut().map(|(number, chunk)| (*number, chunk))
    }

    /// Runs of chunks that a server is no member of: first and count.
    pub(super) fn without(&self, server: ServerId) -> impl Iterator<Item = (u64, u64)> {
        let held = self.placed.iter().filter(move |(_, chunk)| chunk.members().has(server));
        let ends = held.map(|(chunk, _)| *chunk).chain([self.count]);
        let mut first = 0;
        let gaps = ends.map(move |end| (std::mem::replace(&mut first, end + 1), end));
        gaps.filter(|(first, end)| first < end).map(|(first, end)| (first, end - first))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_chunks_that_were_placed_take_room() {
        let mut chunks = Chunks::new(1 << 40);
        for chunk in [3, 4, 1 << 39] {
            chunks.get_mut(chunk).unwrap().complete.insert(7);
        }
        assert_eq!(chunks.placed().count(), 3);
        let from_4 = chunks.placed_from(4).map(|(number, _)| number);
        assert_eq!(from_4.collect::<Vec<_>>(), [4, 1 << 39]);
        assert!(!chunks.get(0).unwrap().is_placed() && chunks.get(1 << 40).is_none());
        let gaps = [(0, 3), (5, (1 << 39) - 5), ((1 << 39) + 1, (1 << 39) - 1)];
        assert_eq!(chunks.without(7).collect::<Vec<_>>(), gaps);
        assert_eq!(chunks.without(6).collect::<Vec<_>>(), [(0, 1 << 40)]);
    }
}
