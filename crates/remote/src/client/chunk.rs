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
    /// Servers that are not waited for any more. If nobody else has all that they had, they are taken back when they
    /// return.
    pub(super) former: ServerSet,
    /// A loss was declared: pages may be missing from all members.
    pub(super) is_damaged: bool,
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

    /// Stops writing to a server, which misses a write. What it has of before still counts in an older layer.
    pub(super) fn miss(&mut self, server: ServerId) {
        if !self.older.iter().any(|layer| layer.has(server)) {
            return self.put_out(server);
        }
        self.complete.remove(server);
        self.catching_up.remove(server);
        self.version += 1;
        self.put_out_spent();
    }

    /// Begins to write to servers that have nothing yet.
    pub(super) fn join(&mut self, chosen: ServerSet, up: ServerSet) {
        if chosen.is_empty() {
            return;
        }
        if !self.is_placed() {
            self.complete = chosen;
        } else if self.current().and(up).is_empty() {
            self.bury();
            self.catching_up = chosen;
        } else {
            if !self.older.is_empty() && !self.catching_up.is_empty() {
                // They have what the older layers missed, and the newcomers have not.
                self.older.insert(0, self.catching_up);
                self.catching_up = self.catching_up.and(up);
            }
            self.catching_up = self.catching_up.union(chosen);
        }
        self.version += 1;
    }

    /// Ends the newest older layer: `to` have all of it by now, and its own members have. Others that catch up have not,
    /// and are of no use any more.
    pub(super) fn spend_layer(&mut self, to: ServerSet) {
        let layer = self.older.remove(0);
        let lacking = self.catching_up.minus(to).minus(layer);
        lacking.iter().for_each(|server| self.miss(server));
        let kept = self.members();
        self.leaving = self.leaving.union(layer.minus(kept));
        if self.older.is_empty() {
            self.complete = self.complete.union(std::mem::take(&mut self.catching_up));
        }
        self.version += 1;
    }

    /// A server is back that was not waited for any more, with what it had. It becomes the oldest layer: whoever was
    /// written to since has newer pages.
    pub(super) fn take_back(&mut self, server: ServerId) {
        self.former.remove(server);
        if !self.is_placed() {
            self.complete.insert(server);
        } else if !self.complete.is_empty() {
            let partial = self.catching_up;
            partial.iter().for_each(|server| self.put_out(server));
            self.catching_up = std::mem::take(&mut self.complete);
            self.older = vec![ServerSet::one(server)];
        } else {
            self.older.push(ServerSet::one(server));
        }
        self.leaving.remove(server);
        self.version += 1;
    }

    /// Beside complete servers, older layers are of use only with somebody who has what they missed.
    pub(super) fn put_out_spent(&mut self) {
        if !self.complete.is_empty() && self.catching_up.is_empty() {
            let spent = self.older.drain(..).fold(ServerSet::EMPTY, ServerSet::union);
            self.leaving = self.leaving.union(spent.minus(self.complete));
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
        others.iter().for_each(|server| self.miss(server));
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
        self.is_damaged |= damaged;
        self.promote();
        damaged
    }
}

static UNPLACED: Chunk = Chunk {
    complete: ServerSet::EMPTY,
    catching_up: ServerSet::EMPTY,
    older: Vec::new(),
    leaving: ServerSet::EMPTY,
    former: ServerSet::EMPTY,
    is_damaged: false,
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

    /// Runs of chunks of which nothing is wanted from a server: first and count.
    pub(super) fn without(&self, server: ServerId) -> impl Iterator<Item = (u64, u64)> {
        let is_wanted = move |chunk: &Chunk| chunk.members().union(chunk.former).has(server);
        let held = self.placed.iter().filter(move |(_, chunk)| is_wanted(chunk));
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
