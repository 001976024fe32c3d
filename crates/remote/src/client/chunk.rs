//! The chunks of a region, the unit of placement. [`super::replicator`] explains the layers, and
//! what moves servers between them.

use super::set::{ServerId, ServerSet};
use crate::store::RegionId;
use std::collections::BTreeMap;

/// The number of pages of a chunk, which is 1 MiB.
pub const CHUNK_PAGES: u64 = 256;

/// The place of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkAt {
    /// The region that the chunk belongs to.
    pub region: RegionId,
    /// The number of the chunk's first page divided by [`CHUNK_PAGES`].
    pub chunk: u64,
}

/// The members of a chunk, by layer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChunkMembers {
    pub(super) complete: ServerSet,
    pub(super) catching_up: ServerSet,
    pub(super) older_layers: Vec<ServerSet>,
    pub(super) leaving: ServerSet,
    /// The servers that the client no longer waits for. If no other server has all of their pages,
    /// they become members again when they return.
    pub(super) former: ServerSet,
    /// True once a loss was declared: pages may be missing from all members.
    pub(super) is_damaged: bool,
    /// The number of changes of membership. Work that began before a change must not complete after
    /// it.
    pub(super) version: u32,
}

impl ChunkMembers {
    pub(super) fn members(&self) -> ServerSet {
        self.older_layers.iter().fold(self.current(), |all, set| all.union(*set))
    }

    /// Returns the members that writes go to.
    pub(super) fn current(&self) -> ServerSet {
        self.complete.union(self.catching_up)
    }

    pub(super) fn is_placed(&self) -> bool {
        !self.members().is_empty()
    }

    /// Removes a member. Repair cleans the server when it is reachable.
    pub(super) fn remove_server(&mut self, server: ServerId) {
        self.complete.remove(server);
        self.catching_up.remove(server);
        self.older_layers.iter_mut().for_each(|layer| layer.remove(server));
        self.older_layers.retain(|layer| !layer.is_empty());
        self.leaving.insert(server);
        self.version += 1;
        self.remove_superseded_layers();
    }

    /// Stops writes to a server that missed one. Its earlier pages still count if it is in an older
    /// layer.
    pub(super) fn stop_writes_to(&mut self, server: ServerId) {
        if !self.older_layers.iter().any(|layer| layer.has(server)) {
            return self.remove_server(server);
        }
        self.complete.remove(server);
        self.catching_up.remove(server);
        self.version += 1;
        self.remove_superseded_layers();
    }

    /// Adds servers that have no page of the chunk, and starts writes to them.
    pub(super) fn add_members(&mut self, chosen: ServerSet, up: ServerSet) {
        if chosen.is_empty() {
            return;
        }
        if !self.is_placed() {
            self.complete = chosen;
        } else if self.current().and(up).is_empty() {
            self.demote_current();
            self.catching_up = chosen;
        } else {
            if !self.older_layers.is_empty() && !self.catching_up.is_empty() {
                // They have the pages that the older layers missed; the new members do not.
                self.older_layers.insert(0, self.catching_up);
                self.catching_up = self.catching_up.and(up);
            }
            self.catching_up = self.catching_up.union(chosen);
        }
        self.version += 1;
    }

    /// Ends the newest older layer: the servers in `to` have all of it by now, and so have its own
    /// members. Other catching-up servers lack its pages and are of no use any more.
    pub(super) fn retire_newest_layer(&mut self, to: ServerSet) {
        let layer = self.older_layers.remove(0);
        let lacking = self.catching_up.minus(to).minus(layer);
        lacking.iter().for_each(|server| self.stop_writes_to(server));
        let kept = self.members();
        self.leaving = self.leaving.union(layer.minus(kept));
        if self.older_layers.is_empty() {
            self.complete = self.complete.union(std::mem::take(&mut self.catching_up));
        }
        self.version += 1;
    }

    /// Adds a server that returned with its pages after the client had stopped waiting for it. It
    /// becomes the oldest layer: servers that were written to since have newer pages.
    pub(super) fn readmit_server(&mut self, server: ServerId) {
        self.former.remove(server);
        if !self.is_placed() {
            self.complete.insert(server);
        } else if !self.complete.is_empty() {
            let partial = self.catching_up;
            partial.iter().for_each(|server| self.remove_server(server));
            self.catching_up = std::mem::take(&mut self.complete);
            self.older_layers = vec![ServerSet::one(server)];
        } else {
            self.older_layers.push(ServerSet::one(server));
        }
        self.leaving.remove(server);
        self.version += 1;
    }

    /// Removes older layers that have no use. With complete servers, they need a catching-up server
    /// that has the pages that they missed.
    pub(super) fn remove_superseded_layers(&mut self) {
        if !self.complete.is_empty() && self.catching_up.is_empty() {
            let superseded = self.older_layers.drain(..).fold(ServerSet::EMPTY, ServerSet::union);
            self.leaving = self.leaving.union(superseded.minus(self.complete));
        }
    }

    /// Ends a write that the servers in `acked` have and other members missed.
    pub(super) fn complete_write(&mut self, acked: ServerSet) {
        let missed = self.complete.minus(acked);
        // The new members have this write; the other pages are where they were.
        if !missed.is_empty() && !self.catching_up.and(acked).is_empty() {
            self.complete = self.complete.and(acked);
            self.older_layers.insert(0, missed);
            self.version += 1;
        }
        let others = self.current().minus(acked);
        others.iter().for_each(|server| self.stop_writes_to(server));
    }

    /// Moves complete and catching-up servers to the older layers, because none of them can take
    /// writes.
    pub(super) fn demote_current(&mut self) {
        let layers = [self.catching_up, self.complete];
        self.older_layers.splice(0..0, layers.into_iter().filter(|layer| !layer.is_empty()));
        (self.complete, self.catching_up) = (ServerSet::EMPTY, ServerSet::EMPTY);
        self.version += 1;
    }

    /// Makes the newest older layer the current one if there is no other. If no older layer is left
    /// then, it counts as complete: no server has more.
    fn promote(&mut self) {
        if self.complete.is_empty() && self.catching_up.is_empty() && !self.older_layers.is_empty()
        {
            self.catching_up = self.older_layers.remove(0);
        }
        if self.complete.is_empty() && self.older_layers.is_empty() {
            self.complete = std::mem::take(&mut self.catching_up);
        }
    }

    /// Removes a member whose pages are lost. Returns true if the other members do not have all of
    /// them.
    ///
    /// A complete server has every page. While there is one, the catching-up servers and an older
    /// layer together have every page as well. Otherwise each layer has pages that the others lack.
    pub(super) fn lose_server(&mut self, server: ServerId) -> bool {
        let its = ServerSet::one(server);
        let layers = [self.complete, self.catching_up];
        let was_alone = layers.iter().chain(&self.older_layers).any(|layer| *layer == its);
        let was_last_complete = self.complete == its;
        self.remove_server(server);
        let is_whole =
            was_last_complete && !self.catching_up.is_empty() && !self.older_layers.is_empty();
        let damaged = was_alone && self.complete.is_empty() && !is_whole;
        self.is_damaged |= damaged;
        self.promote();
        damaged
    }
}

static UNPLACED: ChunkMembers = ChunkMembers {
    complete: ServerSet::EMPTY,
    catching_up: ServerSet::EMPTY,
    older_layers: Vec::new(),
    leaving: ServerSet::EMPTY,
    former: ServerSet::EMPTY,
    is_damaged: false,
    version: 0,
};

/// The placed chunks of a region. A region may be far larger than the pages that are ever put.
/// Other chunks take neither memory nor time in a scan.
#[derive(Debug, Clone)]
pub(super) struct RegionChunks {
    count: u64,
    placed: BTreeMap<u64, ChunkMembers>,
}

impl RegionChunks {
    pub(super) fn new(count: u64) -> RegionChunks {
        RegionChunks { count, placed: BTreeMap::new() }
    }

    pub(super) fn get(&self, chunk: u64) -> Option<&ChunkMembers> {
        (chunk < self.count).then(|| self.placed.get(&chunk).unwrap_or(&UNPLACED))
    }

    pub(super) fn get_mut(&mut self, chunk: u64) -> Option<&mut ChunkMembers> {
        (chunk < self.count).then(|| self.placed.entry(chunk).or_default())
    }

    /// Returns the placed chunks from number `first` on, with their numbers.
    pub(super) fn placed_from(&self, first: u64) -> impl Iterator<Item = (u64, &ChunkMembers)> {
        self.placed.range(first..).map(|(number, chunk)| (*number, chunk))
    }

    pub(super) fn placed(&self) -> impl Iterator<Item = &ChunkMembers> {
        self.placed.values()
    }

    pub(super) fn placed_mut(&mut self) -> impl Iterator<Item = (u64, &mut ChunkMembers)> {
        self.placed.iter_mut().map(|(number, chunk)| (*number, chunk))
    }

    /// Returns the runs of chunks for which a server holds no needed replica: first chunk and
    /// count.
    pub(super) fn without(&self, server: ServerId) -> impl Iterator<Item = (u64, u64)> {
        let is_wanted = move |chunk: &ChunkMembers| chunk.members().union(chunk.former).has(server);
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
        let mut chunks = RegionChunks::new(1 << 40);
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
