//! Prefetches: reads that are sent before their pages are needed, so that servers and network work
//! while the program runs.
//!
//! Invariants: prefetches have links of their own, so that no fault waits behind a reply that may
//! never be needed. Prefetched pages are a guess until they match their MACs. If anything fails
//! here, the reader only asks for the pages again.

use super::link::{LinkError, ServerLinks, unexpected};
use super::replicator::{CHUNK_PAGES, ChunkAt};
use super::set::ServerId;
use super::state::ClusterState;
use crate::page::{PAGE_BYTES, PageRun};
use crate::store::RegionId;
use crate::wire::reply::Reply;
use crate::wire::request::Request;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The pause of prefetching after a failure. A fault would wait while a link to a silent server is
/// opened. By the end of the pause, the failure is known.
const PREFETCH_PAUSE: Duration = Duration::from_secs(1);

/// The most streams that are prefetched at once. More would need larger buffers in the sockets.
const PREFETCHES_MAX: usize = 4;

/// The prefetches of one thread.
#[derive(Debug)]
pub(super) struct Prefetcher {
    shared: Arc<ClusterState>,
    links: ServerLinks,
    /// The run to ask for once the current read is under way.
    next: Option<(RegionId, PageRun)>,
    /// The prefetches under way, oldest first.
    asked: VecDeque<Prefetch>,
    /// A buffer for prefetches that are longer than the read that takes them.
    room: Vec<u8>,
    paused_since: Option<Instant>,
}

/// A prefetch under way.
#[derive(Debug, Clone, Copy)]
pub(super) struct Prefetch {
    region: RegionId,
    run: PageRun,
    server: ServerId,
    id: u32,
}

impl Prefetcher {
    pub fn new(shared: Arc<ClusterState>) -> Prefetcher {
        let links = shared.read_only_links();
        let asked = VecDeque::with_capacity(PREFETCHES_MAX);
        Prefetcher { shared, links, next: None, asked, room: Vec::new(), paused_since: None }
    }

    /// Sets the time to poll for replies: see [`ServerLinks::set_poll_time`].
    pub fn set_poll_time(&mut self, time: Duration) {
        self.links.set_poll_time(time);
    }

    /// Schedules a run for the next call of [`Prefetcher::send_scheduled`].
    pub fn schedule(&mut self, region: RegionId, run: PageRun) {
        self.next = Some((region, run));
    }

    /// Asks for the scheduled run.
    pub fn send_scheduled(&mut self) {
        let Some((region, run)) = self.next.take() else { return };
        if self.paused_since.is_some_and(|since| since.elapsed() < PREFETCH_PAUSE) {
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
                if self.asked.len() == PREFETCHES_MAX {
                    self.asked.pop_front();
                }
                self.asked.push_back(Prefetch { region, run, server, id });
            }
            Err(_) => self.give_up(server),
        }
    }

    fn ask(&mut self, server: ServerId, region: RegionId, run: PageRun) -> Result<u32, LinkError> {
        let (connection, on) = self.links.leased(server, region)?;
        let count = run.count as u16;
        Ok(connection.send(&Request::Get { on, first: run.first, count, with_checksums: false })?)
    }

    /// Returns the prefetch under way that starts at `first` and has at least `count` pages.
    pub fn take(&mut self, region: RegionId, first: u64, count: usize) -> Option<Prefetch> {
        let has = |asked: &Prefetch| {
            asked.region == region && asked.run.first == first && asked.run.count >= count as u64
        };
        let at = self.asked.iter().position(has)?;
        let taken = self.asked.remove(at)?;
        // The wait for this reply drops all earlier replies on the same link.
        let mut before = 0..at;
        self.asked.retain(|asked| before.next().is_none() || asked.server != taken.server);
        Some(taken)
    }

    /// Waits for a prefetch, and fills `into` with its first pages. Returns false if they do not
    /// arrive.
    pub fn receive(&mut self, asked: Prefetch, into: &mut [u8]) -> bool {
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

    fn wait(&mut self, asked: Prefetch, into: &mut [u8]) -> Result<(), LinkError> {
        let link = self.links.existing(asked.server).ok_or_else(unexpected)?;
        match link.connection.wait(asked.id, into)? {
            Reply::Pages { count, .. } if u64::from(count) == asked.run.count => Ok(()),
            _ => Err(unexpected()),
        }
    }

    /// Drops all prefetches from a server, and pauses prefetching from every server.
    fn give_up(&mut self, server: ServerId) {
        self.paused_since = Some(Instant::now());
        self.links.close(server);
        self.asked.retain(|asked| asked.server != server);
    }
}
