//! The part of the [`Replicator`] that tracks the servers' availability, and its effect on their
//! chunks.

use super::chunk::{CHUNK_PAGES, ChunkAt, RegionChunks};
use super::replicator::{Availability, FailureDomain, Replicator, ServerState};
use super::set::ServerId;
use crate::store::RegionId;

impl Replicator {
    /// Records the failure domain that a server reports. Until then the server has a domain of its
    /// own.
    pub fn set_failure_domain(&mut self, server: ServerId, failure_domain: u64) {
        self.domains[server as usize] = FailureDomain::Named(failure_domain);
    }

    /// Records the status that a server reports, and marks the server as up.
    pub fn record_status(&mut self, server: ServerId, total: u64, free: u64, draining: bool) {
        let availability = if draining { Availability::Draining } else { Availability::Up };
        let state = &mut self.servers[server as usize];
        *state =
            ServerState { availability, is_given_up: false, pages_total: total, pages_free: free };
        self.up.insert(server);
        self.known.insert(server);
        self.down.remove(server);
        self.shunned.remove(server);
    }

    /// Marks a server that does not answer as down. Its replicas still count.
    pub fn mark_down(&mut self, server: ServerId) {
        if self.up.has(server) {
            self.servers[server as usize].availability = Availability::Down;
            self.up.remove(server);
            self.down.insert(server);
        }
    }

    /// Marks a server that answers but fails its requests. It counts as down, but readers still ask
    /// it for pages that no other server has.
    pub fn mark_shunned(&mut self, server: ServerId) {
        self.mark_down(server);
        if self.down.has(server) {
            self.shunned.insert(server);
        }
    }

    /// Marks a server that has not answered for long. Other servers take its place, though it may
    /// come back.
    pub fn give_up(&mut self, server: ServerId) {
        self.servers[server as usize].is_given_up = true;
    }

    /// Marks a server as restarted, with its replicas lost. Returns the chunks of which no server
    /// has all pages now. Readers find the lost pages by their MACs.
    #[must_use = "the owner should hear of losses before it reads"]
    pub fn mark_gone(&mut self, server: ServerId) -> Vec<ChunkAt> {
        self.lose_replicas_on(server, false)
    }

    /// Stops waiting for a server, which may yet come back with its replicas. Returns chunks as
    /// [`Replicator::mark_gone`] does.
    #[must_use = "the owner should hear of losses before it reads"]
    pub fn mark_unreachable(&mut self, server: ServerId) -> Vec<ChunkAt> {
        self.lose_replicas_on(server, true)
    }

    fn lose_replicas_on(&mut self, server: ServerId, may_return: bool) -> Vec<ChunkAt> {
        self.losses += 1;
        self.servers[server as usize] = ServerState {
            availability: Availability::Gone,
            is_given_up: true,
            pages_total: 0,
            pages_free: 0,
        };
        self.up.remove(server);
        self.down.remove(server);
        self.shunned.remove(server);
        let mut damaged = Vec::new();
        for (region, chunks) in &mut self.regions {
            for (number, chunk) in chunks.placed_mut() {
                chunk.former.remove(server);
                if chunk.members().has(server) {
                    if chunk.lose_server(server) {
                        damaged.push(ChunkAt { region: *region, chunk: number });
                    }
                    if may_return {
                        chunk.former.insert(server);
                    }
                }
                chunk.leaving.remove(server);
            }
        }
        damaged
    }

    /// Returns the runs of pages, by region, of which a server that is back after an outage holds
    /// no needed replica. The client must discard them before it uses the server again. A later
    /// removal from a chunk makes the server *leaving* again.
    pub fn stale_runs(&mut self, server: ServerId) -> Vec<(RegionId, u64, u64)> {
        for (_, chunk) in self.regions.values_mut().flat_map(RegionChunks::placed_mut) {
            chunk.leaving.remove(server);
            if !chunk.is_damaged {
                chunk.former.remove(server);
            }
        }
        let runs = self.regions.iter().flat_map(|(region, chunks)| {
            let runs = chunks.without(server);
            runs.map(|(first, count)| (*region, first * CHUNK_PAGES, count * CHUNK_PAGES))
        });
        runs.collect()
    }

    /// Admits a server again that the client had stopped waiting for, once its
    /// [`Replicator::stale_runs`] are discarded. Its other pages count again, as far as the owner's
    /// MACs verify them.
    pub fn readmit_server(&mut self, server: ServerId) {
        for (_, chunk) in self.regions.values_mut().flat_map(RegionChunks::placed_mut) {
            if chunk.former.has(server) {
                chunk.readmit_server(server);
            }
        }
    }
}
