//! Does the repairs that the replicator plans, and replaces damaged replicas that readers found.

use super::super::link::{LinkError, is_stale, unexpected, wait};
use super::super::peer::RequestKind;
use super::super::repair::Repair;
use super::super::replicator::{CHUNK_PAGES, ChunkAt};
use super::super::set::{ServerId, ServerSet};
use super::super::state::BadReplica;
use super::{POLL_INTERVAL, START, ServerMonitor};
use crate::page::{PAGE_BYTES, PageMac, RUN_PAGES_MAX};
use crate::store::RegionId;
use crate::wire::reply::{Failure, Reply};
use crate::wire::request::Request;
use crate::wire::{self, CHECKSUM_BYTES, WireChecksum, push_checksums};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The longest pause after a failed repair. The first pause is [`POLL_INTERVAL`].
const REPAIR_PAUSE_MAX: Duration = Duration::from_secs(5);

impl ServerMonitor {
    /// Repairs chunks for `slice`. Returns false if no chunk is left that needs a repair now.
    pub fn repair(&mut self, slice: Duration) -> bool {
        let until = Instant::now() + slice;
        while Instant::now() < until {
            // The read lock: neither readers nor writes that change no membership wait for this
            // search.
            let repairable = self.shared.replicator().next_repairable(self.repair_from);
            let Some(at) = repairable else {
                self.repair_from = START;
                return false;
            };
            let is_due =
                self.waiting_repairs.get(&at).is_none_or(|(due, _)| *due <= Instant::now());
            let work = if is_due { self.shared.replicator_mut().plan_repair(at) } else { None };
            let is_done = work.is_some_and(|work| match self.do_repair(&work) {
                Ok(()) => {
                    self.waiting_repairs.remove(&at);
                    true
                }
                Err(_) => {
                    self.postpone_repair(at);
                    false
                }
            });
            // A failed repair waits for the next pass, so the other chunks need not wait for it.
            self.repair_from = if is_done { at } else { ChunkAt { chunk: at.chunk + 1, ..at } };
        }
        true
    }

    /// Postpones a repair that cannot be done now: a server is gone, or no good replica is
    /// reachable.
    fn postpone_repair(&mut self, at: ChunkAt) {
        let now = Instant::now();
        let last = self.waiting_repairs.get(&at).map_or(POLL_INTERVAL / 2, |(_, pause)| *pause);
        let pause = (last * 2).min(REPAIR_PAUSE_MAX);
        self.waiting_repairs.retain(|_, (due, _)| *due + REPAIR_PAUSE_MAX > now);
        self.waiting_repairs.insert(at, (now + pause, pause));
    }

    fn do_repair(&mut self, work: &Repair) -> Result<(), LinkError> {
        match *work {
            Repair::Clean { at, server } => {
                let (first, count) = (at.chunk * CHUNK_PAGES, CHUNK_PAGES);
                // A writer that has not seen the removal yet may be about to put a page there. The
                // fence voids that put; otherwise the page would stay.
                let fenced = self.links.attach(server, at.region, true);
                let discarded = fenced.and_then(|_| {
                    self.links
                        .call_on(server, at.region, |on| Request::Discard { on, first, count })
                        .map(drop)
                });
                match discarded {
                    Ok(()) | Err(LinkError::NoRegion) => {}
                    Err(error) => {
                        return self.repair_failed(server, at.region, error, RequestKind::Write);
                    }
                }
                self.shared.replicator_mut().finish_clean(at, server);
            }
            Repair::Copy { at, from, to, version } => {
                self.copy(at, from, to)?;
                self.shared.replicator_mut().finish_copy(at, from, to, version);
            }
        }
        Ok(())
    }

    fn repair_failed(
        &mut self,
        server: ServerId,
        region: RegionId,
        error: LinkError,
        kind: RequestKind,
    ) -> Result<(), LinkError> {
        if is_stale(&error) {
            self.links.forget_lease(server, region);
        } else {
            if self.shared.record_error(server, region, &error, kind) {
                self.links.close(server);
            }
        }
        Err(error)
    }

    /// Copies the pages that the new members lack. Pages that are put meanwhile reach them from the
    /// writer, and the copy does not overwrite them.
    fn copy(&mut self, at: ChunkAt, from: ServerId, to: ServerSet) -> Result<(), LinkError> {
        let held = match self.held(at, from) {
            Ok(held) => held,
            Err(error) => return self.repair_failed(from, at.region, error, RequestKind::Read),
        };
        for (first, count) in held {
            let fetched = match self.fetch(at.region, from, first, count) {
                Ok(fetched) => fetched,
                // The owner has discarded some of these pages meanwhile: the repair must list them
                // again.
                Err(LinkError::Failed(failure @ Failure::NotHeld { .. })) => {
                    return Err(LinkError::Failed(failure));
                }
                Err(error) => return self.repair_failed(from, at.region, error, RequestKind::Read),
            };
            if fetched.is_good() {
                self.put_to_all(at, to, first, &fetched)?;
            } else {
                for nth in 0..count {
                    self.copy_page(at, from, to, first + nth as u64, fetched.page(nth))?;
                }
            }
            let counters = &self.shared.counters.pages_repaired_total;
            counters.fetch_add(count as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    fn put_to_all(
        &mut self,
        at: ChunkAt,
        to: ServerSet,
        first: u64,
        pages: &Fetched,
    ) -> Result<(), LinkError> {
        for server in to.iter() {
            match self.put_pages(at.region, server, first, pages) {
                Ok(()) => self.shared.peer(server).reset_strikes(RequestKind::Write),
                Err(error @ (LinkError::NoRegion | LinkError::Failed(Failure::Full { .. }))) => {
                    self.shared.replicator_mut().record_full_member(at, server);
                    return Err(error);
                }
                Err(error) => {
                    return self.repair_failed(server, at.region, error, RequestKind::Write);
                }
            }
        }
        Ok(())
    }

    /// Copies one page of a run that has damaged pages. A damaged page comes from another server of
    /// the same layer, and `from` gets the good bytes too. If no server can have a good replica,
    /// the page is lost and is left out. A server that is up and did not answer may have one.
    fn copy_page(
        &mut self,
        at: ChunkAt,
        from: ServerId,
        to: ServerSet,
        page: u64,
        fetched: Fetched,
    ) -> Result<(), LinkError> {
        if fetched.is_good() {
            return self.put_to_all(at, to, page, &fetched);
        }
        self.shared.counters.bad_replicas_total.fetch_add(1, Ordering::Relaxed);
        let layer = self.shared.replicator().layer_of(at, from);
        let others = layer.minus(ServerSet::one(from));
        match self.fetch_good_replica(at.region, others, page, Fetched::is_good)? {
            Some(good) => self.put_to_all(at, to.union(ServerSet::one(from)), page, &good),
            None if others.minus(self.shared.replicator().up()).is_empty() => {
                self.shared.log_line(&format!(
                    "page {page} of region {} is damaged on {}, and no other memory server has it",
                    at.region,
                    self.shared.peer(from).endpoint.label
                ));
                Ok(())
            }
            // A server that is down may have a good replica.
            None => Err(unexpected()),
        }
    }

    /// Returns a page from the first of `servers` whose replica passes `is_good`; none if no server that is
    /// up has one.
    ///
    /// # Errors
    /// If a server that may have one did not answer.
    fn fetch_good_replica(
        &mut self,
        region: RegionId,
        servers: ServerSet,
        page: u64,
        is_good: impl Fn(&Fetched) -> bool,
    ) -> Result<Option<Fetched>, LinkError> {
        let up = self.shared.replicator().up();
        let mut failed = Ok(None);
        for server in servers.and(up).iter() {
            match self.fetch(region, server, page, 1) {
                Ok(fetched) if is_good(&fetched) => return Ok(Some(fetched)),
                Ok(_) | Err(LinkError::Failed(Failure::NotHeld { .. })) => {}
                Err(error) => {
                    failed =
                        self.repair_failed(server, region, error, RequestKind::Read).map(|()| None);
                }
            }
        }
        failed
    }

    /// Repairs damaged replicas that readers found. A page that was put again meanwhile stays: a
    /// server replaces its page only by bytes of the same checksum.
    pub fn repair_bad_replicas(&mut self) {
        let bad: Vec<BadReplica> = {
            let mut queue = self.shared.bad_replicas.lock().unwrap_or_else(PoisonError::into_inner);
            queue.drain(..).collect()
        };
        for BadReplica { server, region, page, mac } in bad {
            let at = ChunkAt { region, chunk: page / CHUNK_PAGES };
            let others =
                self.shared.replicator().reachable_members(at).minus(ServerSet::one(server));
            let is_good = |fetched: &Fetched| PageMac::of(&fetched.pages) == mac;
            let Ok(Some(good)) = self.fetch_good_replica(region, others, page, is_good) else {
                continue;
            };
            // Compute the checksum anew: the checksum on the source server may be damaged as well.
            let good = Fetched::of(good.pages);
            if let Err(error) = self.put_pages(region, server, page, &good) {
                let _ = self.repair_failed(server, region, error, RequestKind::Write);
            } else {
                self.shared.counters.pages_repaired_total.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Returns the runs of pages of a chunk that a server holds. No run exceeds [`RUN_PAGES_MAX`],
    /// the limit of a read.
    fn held(&mut self, at: ChunkAt, server: ServerId) -> Result<Vec<(u64, u16)>, LinkError> {
        let pages = self.shared.region_pages(at.region).map_err(|_| LinkError::NoRegion)?;
        let first = at.chunk * CHUNK_PAGES;
        let count = (pages - first).min(CHUNK_PAGES) as u16;
        let ask = |on| Request::Held { on, first, count };
        let bits = match self.links.call_on(server, at.region, ask)? {
            Reply::Bitmap { count: said, bits } if said == count => bits.to_vec(),
            _ => return Err(unexpected()),
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
    ) -> Result<Fetched, LinkError> {
        let ask = |on| Request::Get { on, first, count, with_checksums: true };
        let checksums = match self.links.call_on(server, region, ask)? {
            Reply::Pages { checksums, .. }
                if checksums.len() == count as usize * CHECKSUM_BYTES =>
            {
                checksums.to_vec()
            }
            _ => return Err(unexpected()),
        };
        let link = self.links.existing(server).ok_or_else(unexpected)?;
        let pages = link.connection.pages_with_checksums(count).to_vec();
        self.shared.peer(server).reset_strikes(RequestKind::Read);
        Ok(Fetched { checksums, pages })
    }

    fn put_pages(
        &mut self,
        region: RegionId,
        server: ServerId,
        first: u64,
        Fetched { checksums, pages }: &Fetched,
    ) -> Result<(), LinkError> {
        let (connection, on) = self.links.leased(server, region)?;
        let id = connection.send(&Request::Put { on, first, if_absent: true, checksums, pages })?;
        wait(connection, id).map(drop)
    }
}

/// Pages from a server, and the server's checksums of them.
struct Fetched {
    checksums: Vec<u8>,
    pages: Vec<u8>,
}

impl Fetched {
    /// Computes the checksums of pages that are known to be good.
    fn of(pages: Vec<u8>) -> Fetched {
        let mut checksums = Vec::new();
        push_checksums(&mut checksums, pages.chunks_exact(PAGE_BYTES).map(WireChecksum::of));
        Fetched { checksums, pages }
    }

    /// Returns true if every page matches its checksum.
    fn is_good(&self) -> bool {
        self.pages
            .chunks_exact(PAGE_BYTES)
            .map(WireChecksum::of)
            .eq(wire::checksums(&self.checksums))
    }

    fn page(&self, nth: u16) -> Fetched {
        let nth = nth as usize;
        Fetched {
            checksums: self.checksums[nth * CHECKSUM_BYTES..][..CHECKSUM_BYTES].to_vec(),
            pages: self.pages[nth * PAGE_BYTES..][..PAGE_BYTES].to_vec(),
        }
    }
}
