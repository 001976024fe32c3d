//! Reads that are asked for before they are wanted, so that servers and network work while the program
//! does.
//!
//! Invariants: they have links of their own, so that nobody waits behind a reply that may never be
//! wanted; what comes is a guess until its sums are proven, and whatever goes wrong here only means
//! that the pages are asked for again.

use super::cluster::Shared;
use super::link::{LinkError, Links, unexpected};
use super::replicator::{CHUNK_PAGES, ChunkAt};
use super::set::ServerId;
use crate::page::{PAGE_BYTES, PageRun};
use crate::store::RegionId;
use crate::wire::reply::Reply;
use crate::wire::request::Request;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// After something went wrong nothing is asked for ahead of need for so long: opening a link to a server
/// that says nothing takes time, which a fault would wait for. Until then it is known what is wrong.
const REST: Duration = Duration::from_secs(1);

/// Streams that can go on at once. More would need more buffers in the sockets.
const ASKED_MAX: usize = 4;

/// One thread's reads ahead.
#[derive(Debug)]
pub(super) struct Ahead {
    shared: Arc<Shared>,
    links: Links,
    /// To be asked for when what is wanted now is on its way.
    next: Option<(RegionId, PageRun)>,
    /// Oldest first.
    asked: VecDeque<Asked>,
    /// For what is longer than it turned out to be wanted.
    room: Vec<u8>,
    rests_since: Option<Instant>,
}

/// A read that is on its way.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked {
    region: RegionId,
    run: PageRun,
    server: ServerId,
    id: u32,
}

impl Ahead {
    pub fn new(shared: Arc<Shared>) -> Ahead {
        let links = shared.read_only_links();
        let asked = VecDeque::with_capacity(ASKED_MAX);
        Ahead { shared, links, next: None, asked, room: Vec::new(), rests_since: None }
    }

    /// As of [`Links::look_for_answers`].
    pub fn look_for_answers(&mut self, time: Duration) {
        self.links.look_for_answers(time);
    }

    /// Will be asked for when [`Ahead::go`] says so.
    pub fn expect(&mut self, region: RegionId, run: PageRun) {
        self.next = Some((region, run));
    }

    /// Asks for what is expected.
    pub fn go(&mut self) {
        let Some((region, run)) = self.next.take() else { return };
        if self.rests_since.is_some_and(|since| since.elapsed() < REST) {
            return;
        }
        let at = ChunkAt { region, chunk: run.first / CHUNK_PAGES };
        let is_whole = run.end().is_some_and(|end| (end - 1) / CHUNK_PAGES == at.chunk);
        let plan = {
            let replicator = self.shared.replicator();
            if !is_whole || !replicator.has_region(region) {
                return;
            }
            replicator.read_plan(at)
        };
        let Some(server) = plan.order().first().copied() else { return };
        match self.ask(server, region, run) {
            Ok(id) => {
                if self.asked.len() == ASKED_MAX {
                    self.asked.pop_front();
                }
                self.asked.push_back(Asked { region, run, server, id });
            }
            Err(_) => self.give_up(server),
        }
    }

    fn ask(&mut self, server: ServerId, region: RegionId, run: PageRun) -> Result<u32, LinkError> {
        let (connection, on) = self.links.leased(server, region)?;
        let count = run.count as u16;
        Ok(connection.send(&Request::Get { on, first: run.first, count, with_sums: false })?)
    }

    /// The read of pages from this one on, if one is on its way that has them all.
    pub fn take(&mut self, region: RegionId, first: u64, count: usize) -> Option<Asked> {
        let has = |asked: &Asked| {
            asked.region == region && asked.run.first == first && asked.run.count >= count as u64
        };
        let at = self.asked.iter().position(has)?;
        let taken = self.asked.remove(at)?;
        // What was asked before it on the same link is thrown away on the way to it.
        let mut before = 0..at;
        self.asked.retain(|asked| before.next().is_none() || asked.server != taken.server);
        Some(taken)
    }

    /// Waits for its pages, as many as there is room for; false if they do not come.
    pub fn receive(&mut self, asked: Asked, into: &mut [u8]) -> bool {
        let all = asked.run.count as usize * PAGE_BYTES;
        let came = if into.len() == all {
            self.wait(asked, into)
        } else {
            let mut room = std::mem::take(&mut self.room);
            room.resize(all, 0);
            let came = self.wait(asked, &mut room);
            into.copy_from_slice(&room[..into.len()]);
            self.room = room;
            came
        };
        if came.is_err() {
            self.give_up(asked.server);
        }
        came.is_ok()
    }

    fn wait(&mut self, asked: Asked, into: &mut [u8]) -> Result<(), LinkError> {
        let link = self.links.existing(asked.server).ok_or_else(unexpected)?;
        match link.connection.wait(asked.id, into)? {
            Reply::Pages { count, .. } if u64::from(count) == asked.run.count => Ok(()),
            _ => Err(unexpected()),
        }
    }

    /// Nothing is expected of a server any more, and of no other for a while.
    fn give_up(&mut self, server: ServerId) {
        self.rests_since = Some(Instant::now());
        self.links.close(server);
        self.asked.retain(|asked| asked.server != server);
    }
}
