//! Reads of pages: the first replica that matches its MAC wins.
//!
//! Invariant: a replica that does not match its MAC counts as missing.

use super::link::{LinkError, ServerLinks, is_broken, is_slow, is_stale, unexpected};
use super::peer::RequestKind;
use super::prefetch::Prefetcher;
use super::replicator::{CHUNK_PAGES, ChunkAt, ReadPlan};
use super::set::{SERVERS_MAX, ServerId, ServerSet};
use super::state::{BadReplica, ClusterState};
use crate::page::{PAGE_BYTES, PageMac, PageRun, RUN_PAGES_MAX};
use crate::store::{PageReader, RegionId, StoreError, check_get};
use crate::wire::reply::{Failure, Reply};
use crate::wire::request::Request;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The tries of a server with broken links before the reader skips it.
const TRIES: u32 = 2;
/// The pause before the reader asks silent servers again. A server that comes or goes ends it.
const RETRY_AFTER: Duration = Duration::from_millis(20);

/// The reader of one thread.
#[derive(Debug)]
pub(super) struct ReplicaReader {
    shared: Arc<ClusterState>,
    links: ServerLinks,
    /// Reads that were sent to a server and have no reply yet.
    pending: Vec<Pending>,
    /// The number of servers in the last round that returned other bytes.
    bad_replicas: usize,
    prefetcher: Prefetcher,
}

#[derive(Debug, Clone, Copy)]
struct Pending {
    server: ServerId,
    id: u32,
}

/// The result of asking servers for pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReadOutcome {
    /// The pages arrived, and match their MACs.
    Good,
    /// The server does not have the pages as they were put.
    Absent,
    /// A server that may have the pages has not answered.
    Unsure,
}

/// The wanted pages, all of one chunk.
#[derive(Debug, Clone, Copy)]
struct WantedPages<'a> {
    region: RegionId,
    first: u64,
    macs: &'a [PageMac],
}

impl WantedPages<'_> {
    fn chunk(&self) -> ChunkAt {
        ChunkAt { region: self.region, chunk: self.first / CHUNK_PAGES }
    }
}

impl ReplicaReader {
    pub fn new(shared: Arc<ClusterState>) -> ReplicaReader {
        let links = shared.read_only_links();
        let prefetcher = Prefetcher::new(shared.clone());
        ReplicaReader { shared, links, pending: Vec::with_capacity(4), bad_replicas: 0, prefetcher }
    }

    /// Reads pages that were prefetched. Returns false if they do not arrive or do not match their
    /// MACs. Pages that were put again after the prefetch do not match.
    fn get_prefetched(&mut self, want: WantedPages<'_>, into: &mut [u8]) -> bool {
        let taken = self.prefetcher.take(want.region, want.first, want.macs.len());
        let Some(asked) = taken else { return false };
        self.prefetcher.send_scheduled();
        self.prefetcher.receive(asked, into) && are_good(into, want.macs)
    }

    /// Asks all servers that may have the pages. Waits for those that are down until their pages
    /// count as lost.
    fn get_from_chunk(&mut self, want: WantedPages<'_>, into: &mut [u8]) -> Result<(), StoreError> {
        let patience = self.shared.options.unreachable + 2 * self.shared.options.answer_within;
        let mut until = None;
        loop {
            let seen = self.shared.change_count();
            let plan = {
                let replicator = self.shared.replicator();
                if !replicator.has_region(want.region) {
                    return Err(StoreError::NoRegion(want.region));
                }
                replicator.read_plan(want.chunk())
            };
            let answer = self.ask_all(&plan, want, into);
            self.pending.clear();
            if answer == ReadOutcome::Good {
                return Ok(());
            }
            // A server may have failed during the requests, which the plan does not know.
            let is_final = answer == ReadOutcome::Absent
                && plan.waiting_for.is_empty()
                && self.shared.change_count() == seen;
            let until = *until.get_or_insert_with(|| Instant::now() + patience);
            if is_final {
                return self.get_page_by_page(want, &plan, into);
            }
            if Instant::now() >= until {
                return Err(self.shared.unreachable_error());
            }
            let soon = Instant::now() + RETRY_AFTER;
            self.shared.wait_for_change(seen, until.min(soon));
        }
    }

    /// Reads the pages one by one, because no server has all of them. A page that no server has is
    /// lost.
    fn get_page_by_page(
        &mut self,
        want: WantedPages<'_>,
        plan: &ReadPlan,
        into: &mut [u8],
    ) -> Result<(), StoreError> {
        if want.macs.len() == 1 {
            return Err(self.page_lost_error(want, plan));
        }
        let pages = (want.first..).zip(want.macs.chunks(1)).zip(into.chunks_mut(PAGE_BYTES));
        for ((first, macs), into) in pages {
            self.get_from_chunk(WantedPages { first, macs, ..want }, into)?;
        }
        Ok(())
    }

    fn page_lost_error(&self, want: WantedPages<'_>, plan: &ReadPlan) -> StoreError {
        let why = match (plan.order().len(), plan.waiting_for.len()) {
            (0, 0) => "it was never put, or every server that had a copy is lost".into(),
            (0, down) => format!("{down} servers that may have it do not answer"),
            (asked, down) => format!(
                "none of {asked} servers that were asked has it as it was put, {} of them other bytes, {down} down",
                self.bad_replicas
            ),
        };
        StoreError::PageLost { region: want.region, page: want.first, why }
    }

    /// Asks one server after the other, then waits for those that were slow.
    fn ask_all(&mut self, plan: &ReadPlan, want: WantedPages<'_>, into: &mut [u8]) -> ReadOutcome {
        let mut all = ReadOutcome::Absent;
        self.bad_replicas = 0;
        for (turn, server) in plan.order().iter().enumerate() {
            match self.ask_one(*server, want, into) {
                ReadOutcome::Good => {
                    add(&self.shared.counters.failovers_total, turn.min(1) as u64);
                    return ReadOutcome::Good;
                }
                ReadOutcome::Absent => {}
                ReadOutcome::Unsure => all = ReadOutcome::Unsure,
            }
        }
        if self.pending.is_empty() { all } else { self.wait_for_slow_servers(want, into) }
    }

    /// Asks one server, and asks again if its link was broken.
    fn ask_one(&mut self, server: ServerId, want: WantedPages<'_>, into: &mut [u8]) -> ReadOutcome {
        for _ in 0..TRIES {
            match self.ask(server, want, into) {
                Ok(answer) => return answer,
                Err(LinkError::NoRegion) => return ReadOutcome::Absent,
                Err(error) if is_slow(&error) => {
                    add(&self.shared.counters.hedges_total, 1);
                    return ReadOutcome::Unsure;
                }
                Err(error) if is_stale(&error) => self.links.forget_lease(server, want.region),
                Err(error) if is_broken(&error) => {
                    if self.shared.record_error(server, want.region, &error, RequestKind::Read) {
                        self.links.close(server);
                    }
                    if !self.shared.replicator().up().has(server) {
                        return ReadOutcome::Unsure;
                    }
                }
                Err(_) => return ReadOutcome::Unsure,
            }
        }
        ReadOutcome::Unsure
    }

    /// Sends a read, and waits for the reply until a hedged request is due.
    fn ask(
        &mut self,
        server: ServerId,
        want: WantedPages<'_>,
        into: &mut [u8],
    ) -> Result<ReadOutcome, LinkError> {
        // Only a read that was sent can be slow: a timeout before that breaks the link.
        let link = self.links.leased(server, want.region);
        let (connection, on) = link.map_err(|error| match is_slow(&error) {
            true => LinkError::Broken(io::ErrorKind::NotConnected.into()),
            false => error,
        })?;
        let count = want.macs.len() as u16;
        let get = Request::Get { on, first: want.first, count, with_checksums: false };
        let id = connection.send(&get)?;
        self.prefetcher.send_scheduled();
        let pending = Pending { server, id };
        let answer = self.answer(pending, want, into);
        if answer.as_ref().is_err_and(is_slow) {
            self.pending.push(pending);
        }
        answer
    }

    /// Returns the server to ask first for each page, or `None` if no server can be asked now.
    fn plan_each(
        &self,
        region: RegionId,
        wanted: &[(u64, PageMac)],
    ) -> [Option<ServerId>; RUN_PAGES_MAX] {
        let mut servers = [None; RUN_PAGES_MAX];
        let replicator = self.shared.replicator();
        if replicator.has_region(region) {
            for (server, (page, _)) in servers.iter_mut().zip(wanted) {
                let plan = replicator.read_plan(ChunkAt { region, chunk: page / CHUNK_PAGES });
                *server = plan.order().first().copied();
            }
        }
        servers
    }

    /// Asks a server for several pages with one write. Returns the id of the first reply.
    fn ask_each(
        &mut self,
        server: ServerId,
        region: RegionId,
        pages: impl Iterator<Item = u64>,
    ) -> Result<u32, LinkError> {
        let (connection, on) = self.links.leased(server, region)?;
        if !connection.is_between_replies() {
            return Err(unexpected());
        }
        let get = |first| Request::Get { on, first, count: 1, with_checksums: false };
        Ok(connection.send_small(pages.map(get))?)
    }

    /// Takes the replies to [`ReplicaReader::ask_each`], as far as they arrive in time. `places` has the
    /// index in `wanted` of each requested page, in order.
    fn take_each(
        &mut self,
        server: ServerId,
        first_id: u32,
        mut places: impl Iterator<Item = usize>,
        wanted: &[(u64, PageMac)],
        good: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), LinkError> {
        let mut next_id = first_id;
        let mut place = places.next();
        while let Some(at) = place {
            let link = self.links.existing(server).ok_or_else(unexpected)?;
            let (id, reply, bytes) = link.connection.next_reply()?;
            if id != next_id {
                continue;
            }
            match reply {
                Reply::Pages { count: 1, checksums: [] } if PageMac::of(bytes) == wanted[at].1 => {
                    good(at, bytes);
                }
                Reply::Pages { .. } => add(&self.shared.counters.bad_replicas_total, 1),
                _ => {}
            }
            (next_id, place) = (next_id.wrapping_add(1), places.next());
        }
        Ok(())
    }

    /// Waits for the reply to a read.
    fn answer(
        &mut self,
        pending: Pending,
        want: WantedPages<'_>,
        into: &mut [u8],
    ) -> Result<ReadOutcome, LinkError> {
        let link = self.links.existing(pending.server).ok_or_else(unexpected)?;
        let reply = match link.connection.wait(pending.id, into) {
            Ok(reply) => reply,
            Err(error) => {
                link.connection.leave(into);
                return Err(error.into());
            }
        };
        match reply {
            Reply::Pages { count, .. } if count as usize == want.macs.len() => {
                self.shared.peer(pending.server).reset_strikes(RequestKind::Read);
                if are_good(into, want.macs) {
                    return Ok(ReadOutcome::Good);
                }
                add(&self.shared.counters.bad_replicas_total, 1);
                self.report_bad_replicas(pending.server, want, into);
                self.bad_replicas += 1;
                Ok(ReadOutcome::Absent)
            }
            Reply::Failed(Failure::NotHeld { .. }) => Ok(ReadOutcome::Absent),
            Reply::Failed(failure) => Err(LinkError::Failed(failure)),
            _ => Err(unexpected()),
        }
    }

    /// Reports the pages that do not match their MACs, so that repair replaces them.
    fn report_bad_replicas(&self, server: ServerId, want: WantedPages<'_>, pages: &[u8]) {
        let all = (want.first..).zip(want.macs).zip(pages.chunks_exact(PAGE_BYTES));
        for ((page, mac), bytes) in all {
            if PageMac::of(bytes) != *mac {
                self.shared.queue_bad_replica(BadReplica {
                    server,
                    region: want.region,
                    page,
                    mac: *mac,
                });
            }
        }
    }

    /// Waits for the servers that have not answered yet, because no other has the pages.
    fn wait_for_slow_servers(&mut self, want: WantedPages<'_>, into: &mut [u8]) -> ReadOutcome {
        let until = Instant::now() + self.shared.options.answer_within;
        let mut all = ReadOutcome::Absent;
        while !self.pending.is_empty() && Instant::now() < until {
            let pending = self.pending.remove(0);
            match self.answer(pending, want, into) {
                Ok(ReadOutcome::Good) => {
                    self.pending.clear();
                    return ReadOutcome::Good;
                }
                Ok(answer) => all = if answer == ReadOutcome::Unsure { answer } else { all },
                Err(error) if is_slow(&error) => self.pending.push(pending),
                Err(error) => {
                    all = ReadOutcome::Unsure;
                    if self.shared.record_error(
                        pending.server,
                        want.region,
                        &error,
                        RequestKind::Read,
                    ) {
                        self.links.close(pending.server);
                    }
                }
            }
        }
        while let Some(pending) = self.pending.pop() {
            all = ReadOutcome::Unsure;
            if self.shared.record_failure(pending.server, Some(RequestKind::Read)) {
                self.links.close(pending.server);
            }
        }
        all
    }
}

/// Returns true if all pages match their MACs.
fn are_good(pages: &[u8], macs: &[PageMac]) -> bool {
    pages.chunks_exact(PAGE_BYTES).zip(macs).all(|(page, mac)| PageMac::of(page) == *mac)
}

fn add(counter: &AtomicU64, times: u64) {
    if times > 0 {
        counter.fetch_add(times, Ordering::Relaxed);
    }
}

impl PageReader for ReplicaReader {
    fn get(
        &mut self,
        region: RegionId,
        first: u64,
        macs: &[PageMac],
        into: &mut [u8],
    ) -> Result<(), StoreError> {
        check_get(self.shared.region_pages(region)?, first, macs, into)?;
        if self.get_prefetched(WantedPages { region, first, macs }, into) {
            return Ok(());
        }
        let before_seam = (CHUNK_PAGES - first % CHUNK_PAGES).min(macs.len() as u64) as usize;
        let (macs, more_macs) = macs.split_at(before_seam);
        let (into, more) = into.split_at_mut(before_seam * PAGE_BYTES);
        self.get_from_chunk(WantedPages { region, first, macs }, into)?;
        if !more_macs.is_empty() {
            let first = first + before_seam as u64;
            self.get_from_chunk(WantedPages { region, first, macs: more_macs }, more)?;
        }
        Ok(())
    }

    fn get_each(
        &mut self,
        region: RegionId,
        wanted: &[(u64, PageMac)],
        good: &mut dyn FnMut(usize, &[u8]),
    ) {
        let servers = &self.plan_each(region, wanted)[..wanted.len()];
        let places = |of: ServerId| (0..servers.len()).filter(move |at| servers[*at] == Some(of));
        let all: ServerSet = servers.iter().flatten().copied().collect();
        let mut asked = [None; SERVERS_MAX];
        for server in all.iter() {
            let pages = places(server).map(|at| wanted[at].0);
            // Errors are found and reported when the caller reads the pages one by one.
            asked[server as usize] = self.ask_each(server, region, pages).ok();
        }
        for server in all.iter() {
            let Some(first_id) = asked[server as usize] else { continue };
            match self.take_each(server, first_id, places(server), wanted, good) {
                Err(error) if !is_slow(&error) => self.links.close(server),
                _ => {}
            }
        }
    }

    fn announce(&mut self, region: RegionId, run: PageRun) {
        self.prefetcher.schedule(region, run);
    }

    fn set_poll_time(&mut self, time: Duration) {
        self.links.set_poll_time(time);
        self.prefetcher.set_poll_time(time);
    }
}
