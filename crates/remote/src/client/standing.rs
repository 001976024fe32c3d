//! Whether servers can be used, and what that means for the chunks that they hold: a part of the
//! [`Replicator`].

use super::chunk::{CHUNK_PAGES, ChunkAt, Chunks};
use super::replicator::{Domain, Replicator, ServerState, Standing};
use super::set::ServerId;
use crate::store::RegionId;

impl Replicator {
    /// In which failure domain a server says that it runs. Until then it has one of its own.
    pub fn server_is_in(&mut self, server: ServerId, failure_domain: u64) {
        self.domains[server as usize] = Domain::Named(failure_domain);
    }

    /// What a server says of itself, when it answers.
    pub fn server_says(&mut self, server: ServerId, total: u64, free: u64, draining: bool) {
        let standing = if draining { Standing::Draining } else { Standing::Up };
        let state = &mut self.servers[server as usize];
        *state = ServerState { standing, is_given_up: false, pages_total: total, pages_free: free };
        self.up.insert(server);
        self.known.insert(server);
        self.down.remove(server);
        self.shunned.remove(server);
    }

    /// It does not answer.
    pub fn server_down(&mut self, server: ServerId) {
        if self.up.has(server) {
            self.servers[server as usize].standing = Standing::Down;
            self.up.remove(server);
            self.down.insert(server);
        }
    }

    /// It answers, but does not do what it is asked. It is used like one that does not answer, only that it is still
    /// asked for pages that nobody else has.
    pub fn server_shunned(&mut self, server: ServerId) {
        self.server_down(server);
        if self.down.has(server) {
            self.shunned.insert(server);
        }
    }

    /// It has not answered for long: others are to take its place, though it may come back.
    pub fn give_up(&mut self, server: ServerId) {
        self.servers[server as usize].is_given_up = true;
    }

    /// What it held is lost: it was started again. These chunks have pages, if they were put, that no server has now;
    /// readers find out which by sums.
    #[must_use = "the owner should hear of losses before it reads"]
    pub fn server_gone(&mut self, server: ServerId) -> Vec<ChunkAt> {
        self.forget(server, false)
    }

    /// It is not waited for any more, though it may yet come back with what it held. The chunks are those of
    /// [`Replicator::server_gone`].
    #[must_use = "the owner should hear of losses before it reads"]
    pub fn server_silent(&mut self, server: ServerId) -> Vec<ChunkAt> {
        self.forget(server, true)
    }

    fn forget(&mut self, server: ServerId, may_return: bool) -> Vec<ChunkAt> {
        self.losses += 1;
        self.servers[server as usize] = ServerState {
            standing: Standing::Gone,
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
                    if chunk.forget(server) {
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

    /// A server is back after it was down: chunks of which nothing is wanted from it, as runs of pages of each region.
    /// They are to be discarded there before it is used again. Of those that it is put out of from now on it is
    /// *leaving*.
    pub fn strangers(&mut self, server: ServerId) -> Vec<(RegionId, u64, u64)> {
        for (_, chunk) in self.regions.values_mut().flat_map(Chunks::placed_mut) {
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

    /// A server is back that was not waited for any more, and is cleaned of its [`Replicator::strangers`]: its other
    /// pages count again, as far as their owner's checksums prove them.
    pub fn take_back(&mut self, server: ServerId) {
        for (_, chunk) in self.regions.values_mut().flat_map(Chunks::placed_mut) {
            if chunk.former.has(server) {
                chunk.take_back(server);
            }
        }
    }
}
