//! The one thread that watches the servers: asks each how it does, takes those in that come (back),
//! gives up those that stay away, and moves copies.
//!
//! Invariant: a server is used again only after everything that was sent to it before is void (a new
//! lease) and what it should not have is discarded.

use super::cluster::Shared;
use super::connection::{Connection, Endpoint};
use super::link::{LinkError, Links, is_stale, unexpected, wait};
use super::prospects::{Prospects, Trial};
use super::repair::Repair;
use super::replicator::{CHUNK_PAGES, ChunkAt, Standing};
use super::set::{ServerId, ServerSet};
use crate::discovery::Finder;
use crate::page::{PAGE_BYTES, RUN_PAGES_MAX};
use crate::store::{RegionId, StoreError};
use crate::wire::SUM_BYTES;
use crate::wire::reply::{Failure, Reply, Status};
use crate::wire::request::Request;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Between two looks at the servers.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Of moving copies before servers are looked at again.
const REPAIR_SLICE: Duration = Duration::from_millis(50);
/// For a server that was announced.
const TRIAL_PATIENCE: Duration = Duration::from_secs(1);
/// How long to look around at the start.
const DISCOVERY_PATIENCE: Duration = Duration::from_secs(2);

/// The thread.
pub(super) struct Control {
    pub shared: Arc<Shared>,
    pub watch: Arc<Mutex<Watch>>,
}

impl Control {
    pub fn run(self) {
        while !self.shared.stopped.load(Ordering::Relaxed) {
            let seen = self.shared.change_count();
            let more = {
                let mut watch = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
                watch.look();
                watch.repair(REPAIR_SLICE)
            };
            // A moment even when there is more to do, for those who make regions.
            let pause = if more { Duration::from_millis(1) } else { LOOK_EVERY };
            self.shared.wait_for_change(seen, Instant::now() + pause);
        }
    }
}

/// Who is away, since when, and when to try again.
#[derive(Debug, Clone, Copy)]
struct Away {
    since: Instant,
    next_try: Instant,
    pause: Duration,
}

/// Finds out whether a server of ours answers, as this client would connect to it.
fn trial(shared: &Shared) -> Trial {
    let (tls, name) = (shared.options.tls.clone(), shared.options.name.clone());
    Arc::new(move |address| {
        let endpoint = Endpoint::new(&address.to_string(), tls.clone());
        endpoint.is_ok_and(|endpoint| endpoint.connect(&name, TRIAL_PATIENCE).is_ok())
    })
}

/// Whether a server has made a region.
enum Made {
    Yes,
    No(Failure),
}

/// The thread's state; those who make regions use its links too.
pub(super) struct Watch {
    shared: Arc<Shared>,
    links: Links,
    away: Vec<Option<Away>>,
    /// Where to go on with repairs.
    repair_from: ChunkAt,
    finder: Option<Finder>,
    /// That were found and have not answered yet.
    prospects: Prospects,
}

const START: ChunkAt = ChunkAt { region: RegionId(0), chunk: 0 };

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watch").field("away", &self.away).finish_non_exhaustive()
    }
}

impl Watch {
    pub fn new(shared: Arc<Shared>) -> Result<Watch, StoreError> {
        let finder = match shared.options.discover {
            true => Some(Finder::new().map_err(|error| StoreError::Refused {
                server: "discovery".into(),
                why: error.to_string(),
            })?),
            false => None,
        };
        let links = shared.links();
        let prospects = Prospects::new(trial(&shared));
        Ok(Watch { shared, links, away: Vec::new(), repair_from: START, finder, prospects })
    }

    /// Connects to all servers that are named or found; one of the problems, if there were any.
    ///
    /// # Errors
    /// For names that cannot be looked up.
    pub fn first_look(&mut self) -> Result<Option<StoreError>, StoreError> {
        for label in self.shared.options.servers.clone() {
            self.shared.add_peer(&label)?;
        }
        let until = Instant::now() + DISCOVERY_PATIENCE;
        while self.finder.is_some() && Instant::now() < until && !self.has_enough() {
            self.discover(Duration::from_millis(50));
            self.look();
        }
        let mut problem = None;
        for server in 0..self.server_count() {
            let patience = self.shared.options.answer_within.max(Duration::from_secs(1));
            let arrived =
                self.shared.peer(server).endpoint.connect(&self.shared.options.name, patience);
            match arrived.map(|connection| self.take_in(server, connection)) {
                Ok(_) => {}
                Err(error) => problem = Some(error),
            }
        }
        self.look();
        Ok(problem)
    }

    /// Asks every server that is up how it does, and tries those that are not.
    pub fn look(&mut self) {
        self.discover(Duration::ZERO);
        for server in 0..self.server_count() {
            match self.shared.standing(server) {
                Standing::Up | Standing::Draining => {
                    self.away_mut(server).take();
                    match self.status(server) {
                        Ok(status) => self.heard(server, status),
                        Err(_) => {
                            self.links.close(server);
                            self.shared.failed(server);
                        }
                    }
                }
                Standing::Down | Standing::Gone => self.try_again(server),
            }
        }
    }

    /// Makes a region on every server that is up. Where it fails, it is made when that server is
    /// next taken in; until then its writes go elsewhere. Returns a server that takes no more regions, if
    /// there is one.
    pub fn create_everywhere(&mut self, region: RegionId, pages: u64) -> Option<ServerId> {
        let (up, mut refused) = (self.shared.replicator().up(), None);
        for server in up.iter() {
            match self.create(server, region, pages) {
                Ok(Made::No(Failure::TooMany)) => refused = Some(server),
                Err(LinkError::Broken(_)) => {
                    self.links.close(server);
                    self.shared.failed(server);
                }
                _ => {}
            }
        }
        refused
    }

    /// Forgets a region on every server that can be reached; the others will, in time.
    pub fn drop_everywhere(&mut self, region: RegionId) {
        for server in 0..self.server_count() {
            let up = self.shared.replicator().up().has(server);
            let is_there = up && self.shared.remote(region, server).is_some();
            if is_there && self.drop_on(server, region, false).is_err() {
                self.links.close(server);
            }
            self.shared.set_remote(region, server, None);
        }
    }

    /// Tells every server that can be reached that a region ends with this process.
    pub fn drop_at_end(&mut self, region: RegionId) {
        for server in 0..self.server_count() {
            let up = self.shared.replicator().up().has(server);
            if up && self.shared.remote(region, server).is_some() {
                // A server that is not told keeps the pages for a while.
                let _ = self.drop_on(server, region, true);
            }
        }
    }

    fn drop_on(
        &mut self,
        server: ServerId,
        region: RegionId,
        at_end: bool,
    ) -> Result<(), LinkError> {
        let drop_it = |on| Request::Drop { on, at_end };
        match self.links.call_on(server, region, drop_it) {
            // Another link's fence; a region that stays would keep its memory for as long as we are
            // connected.
            Err(error) if is_stale(&error) => {
                self.links.forget_lease(server, region);
                self.links.call_on(server, region, drop_it).map(drop)
            }
            done => done.map(drop),
        }
    }

    /// Moves copies for a while; whether there is more to do at once.
    pub fn repair(&mut self, slice: Duration) -> bool {
        let until = Instant::now() + slice;
        while Instant::now() < until {
            // Readers do not wait for this look, nor do writes for which nothing changes.
            let ailing = self.shared.replicator().next_ailing(self.repair_from);
            let Some(at) = ailing else {
                self.repair_from = START;
                return false;
            };
            let work = self.shared.replicator_mut().repair_of(at);
            let is_done = work.is_some_and(|work| self.do_repair(&work).is_ok());
            // Where it cannot be done, its turn comes again with the next look; the others need not wait.
            self.repair_from = if is_done { at } else { ChunkAt { chunk: at.chunk + 1, ..at } };
        }
        true
    }

    fn do_repair(&mut self, work: &Repair) -> Result<(), LinkError> {
        match *work {
            Repair::Clean { at, server } => {
                let (first, count) = (at.chunk * CHUNK_PAGES, CHUNK_PAGES);
                let discarded = self
                    .links
                    .call_on(server, at.region, |on| Request::Discard { on, first, count })
                    .map(drop);
                match discarded {
                    Ok(()) | Err(LinkError::NoRegion) => {}
                    Err(error) => return self.repair_failed(server, at.region, error),
                }
                self.shared.replicator_mut().cleaned(at, server);
            }
            Repair::Copy { at, from, to, version } => {
                self.copy(at, from, to)?;
                self.shared.replicator_mut().copied(at, from, to, version);
            }
        }
        Ok(())
    }

    fn repair_failed(
        &mut self,
        server: ServerId,
        region: RegionId,
        error: LinkError,
    ) -> Result<(), LinkError> {
        if is_stale(&error) {
            self.links.forget_lease(server, region);
        } else {
            self.links.close(server);
            self.shared.note(server, region, &error);
        }
        Err(error)
    }

    /// Copies what the new members do not have. Pages that are written meanwhile reach them from the
    /// writer, and stay.
    fn copy(&mut self, at: ChunkAt, from: ServerId, to: ServerSet) -> Result<(), LinkError> {
        let held = match self.held(at, from) {
            Ok(held) => held,
            Err(error) => return self.repair_failed(from, at.region, error),
        };
        for (first, count) in held {
            let (sums, pages) = match self.fetch(at.region, from, first, count) {
                Ok(fetched) => fetched,
                // The owner has discarded some of them meanwhile: look again.
                Err(LinkError::Failed(failure @ Failure::NotHeld { .. })) => {
                    return Err(LinkError::Failed(failure));
                }
                Err(error) => return self.repair_failed(from, at.region, error),
            };
            for server in to.iter() {
                match self.give(at.region, server, first, &sums, &pages) {
                    Ok(()) => {}
                    Err(
                        error @ (LinkError::NoRegion | LinkError::Failed(Failure::Full { .. })),
                    ) => {
                        self.shared.replicator_mut().cannot_join(at, server);
                        return Err(error);
                    }
                    Err(error) => return self.repair_failed(server, at.region, error),
                }
            }
            let tally = &self.shared.tally.pages_repaired_total;
            tally.fetch_add(count as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Runs of pages of a chunk that a server has, none longer than one read.
    fn held(&mut self, at: ChunkAt, server: ServerId) -> Result<Vec<(u64, u16)>, LinkError> {
        let pages = self.shared.region_pages(at.region).map_err(|_| LinkError::NoRegion)?;
        let first = at.chunk * CHUNK_PAGES;
        let count = (pages - first).min(CHUNK_PAGES) as u16;
        let ask = |on| Request::Held { on, first, count };
        let Reply::Bitmap { bits, .. } = self.links.call_on(server, at.region, ask)? else {
            return Err(unexpected());
        };
        let mut runs: Vec<(u64, u16)> = Vec::new();
        let held = |page: &u64| bits[*page as usize / 8] >> (page % 8) & 1 == 1;
        for page in (0..count as u64).filter(held).map(|page| first + page) {
            match runs.last_mut() {
                Some((start, len))
                    if *start + *len as u64 == page && (*len as usize) < RUN_PAGES_MAX =>
                {
                    *len += 1;
                }
                _ => runs.push((page, 1)),
            }
        }
        Ok(runs)
    }

    fn fetch(
        &mut self,
        region: RegionId,
        server: ServerId,
        first: u64,
        count: u16,
    ) -> Result<(Vec<u8>, Vec<u8>), LinkError> {
        let ask = |on| Request::Get { on, first, count, with_sums: true };
        let sums = match self.links.call_on(server, region, ask)? {
            Reply::Pages { sums, .. } if sums.len() == count as usize * SUM_BYTES => sums.to_vec(),
            _ => return Err(unexpected()),
        };
        let link = self.links.existing(server).ok_or_else(unexpected)?;
        let pages = link.connection.pages_with_sums(count).to_vec();
        debug_assert_eq!(pages.len(), count as usize * PAGE_BYTES);
        Ok((sums, pages))
    }

    fn give(
        &mut self,
        region: RegionId,
        server: ServerId,
        first: u64,
        sums: &[u8],
        pages: &[u8],
    ) -> Result<(), LinkError> {
        let (connection, on) = self.links.leased(server, region)?;
        let id = connection.send(&Request::Put { on, first, if_absent: true, sums, pages })?;
        wait(connection, id).map(drop)
    }

    fn server_count(&self) -> ServerId {
        self.shared.peers.read().unwrap_or_else(PoisonError::into_inner).len() as ServerId
    }

    fn has_enough(&self) -> bool {
        self.shared.replicator().up().len() >= self.shared.options.copies
    }

    fn away_mut(&mut self, server: ServerId) -> &mut Option<Away> {
        let at = server as usize;
        self.away.resize(self.away.len().max(at + 1), None);
        &mut self.away[at]
    }

    fn discover(&mut self, patience: Duration) {
        let Some(finder) = &mut self.finder else { return };
        let (news, now) = (finder.poll(patience), Instant::now());
        news.withdrawn.into_iter().for_each(|address| self.prospects.withdrawn(address));
        news.announced.into_iter().for_each(|address| self.prospects.announced(address, now));
        for address in self.prospects.answered(now) {
            // It is watched from now on, unless there are too many.
            let _ = self.shared.add_peer(&address.to_string());
        }
    }

    fn status(&mut self, server: ServerId) -> Result<Status, LinkError> {
        match self.links.call(server, &Request::Status)? {
            Reply::Status(status) => Ok(status),
            _ => Err(unexpected()),
        }
    }

    fn heard(&mut self, server: ServerId, status: Status) {
        let (total, free) = (status.pages_total, status.pages_free);
        let mut replicator = self.shared.replicator_mut();
        replicator.server_says(server, total, free, status.draining);
    }

    /// Tries a server that is away, now and then; gives it up in two steps.
    fn try_again(&mut self, server: ServerId) {
        let now = Instant::now();
        let fresh = Away { since: now, next_try: now, pause: Duration::from_millis(50) };
        let away = *self.away_mut(server).get_or_insert(fresh);
        if now >= away.next_try {
            let patience = self.shared.options.answer_within.min(Duration::from_millis(100));
            let endpoint = &self.shared.peer(server).endpoint;
            if let Ok(connection) = endpoint.connect(&self.shared.options.name, patience)
                && self.take_in(server, connection).is_ok()
            {
                return;
            }
            let pause = (away.pause * 2).min(Duration::from_secs(1));
            *self.away_mut(server) = Some(Away { next_try: now + pause, pause, ..away });
        }
        let absent = now - away.since;
        if self.shared.standing(server) == Standing::Down {
            if absent >= self.shared.options.gone_after {
                self.shared.gone(server);
                self.shared.notify();
            } else if absent >= self.shared.options.repair_after {
                self.shared.replicator_mut().give_up(server);
            }
        }
    }

    /// A server is there, for the first time or again.
    fn take_in(&mut self, server: ServerId, connection: Connection) -> Result<(), LinkError> {
        let (peer, epoch) = (self.shared.peer(server), connection.epoch);
        self.links.adopt(server, connection)?;
        let is_same = peer.epoch.load(Ordering::Relaxed) == epoch;
        if !is_same || !self.void_and_clean(server)? {
            self.start_afresh(server)?;
            // After what is known of our regions there: who sees it sees that.
            peer.epoch.store(epoch, Ordering::Release);
        }
        let status = self.status(server)?;
        self.heard(server, status);
        self.away_mut(server).take();
        self.shared.notify();
        Ok(())
    }

    /// It is the server that it was: what was under way before is void, what it missed is discarded.
    /// False when it has not got our regions any more.
    fn void_and_clean(&mut self, server: ServerId) -> Result<bool, LinkError> {
        let regions: Vec<(RegionId, u64)> =
            self.shared.regions().iter().map(|(region, pages)| (*region, *pages)).collect();
        for (region, pages) in regions {
            match self.links.attach(server, region, true) {
                Ok(_) => {}
                Err(LinkError::NoRegion) => {
                    self.create(server, region, pages)?;
                }
                Err(LinkError::Failed(Failure::NoRegion | Failure::Denied)) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        let strangers = self.shared.replicator_mut().strangers(server);
        for (region, first, count) in strangers {
            match self.links.call_on(server, region, |on| Request::Discard { on, first, count }) {
                Ok(_) | Err(LinkError::NoRegion) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// It has nothing of ours: it was started anew, or has lost our regions.
    fn start_afresh(&mut self, server: ServerId) -> Result<(), LinkError> {
        self.shared.gone(server);
        let regions: Vec<(RegionId, u64)> =
            self.shared.regions().iter().map(|(region, pages)| (*region, *pages)).collect();
        for (region, pages) in regions {
            self.shared.set_remote(region, server, None);
            self.create(server, region, pages)?;
        }
        Ok(())
    }

    fn create(
        &mut self,
        server: ServerId,
        region: RegionId,
        pages: u64,
    ) -> Result<Made, LinkError> {
        let token = Shared::fresh_token().map_err(|_| unexpected())?;
        let request = Request::Create { pages, overcommit: true, token: &token };
        match self.links.call(server, &request) {
            Ok(Reply::Created(lease)) => {
                let remote = super::cluster::Remote { number: lease.region, token };
                self.shared.set_remote(region, server, Some(remote));
                Ok(Made::Yes)
            }
            Ok(_) => Err(unexpected()),
            // It takes no more regions; pages of this one go elsewhere.
            Err(LinkError::Failed(why @ (Failure::TooMany | Failure::Draining))) => {
                Ok(Made::No(why))
            }
            Err(error) => Err(error),
        }
    }
}
