//! One connection's dealings with the pool: from request frames to reply frames. No I/O, no clock.
//!
//! Invariant: a connection touches only regions that it made or proved to be its own.

use super::client::Client;
use super::pool::Pool;
use super::region::{Owner, Region};
use crate::page::{PAGE_BYTES, PageRun};
use crate::secret::Claim;
use crate::wire::hello::NONCE_BYTES;
use crate::wire::reply::{Failure, Reply};
use crate::wire::request::{Lease, Request};
use crate::wire::{self, Checksum, REPORT_BYTES_MAX, WireError};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Clients in a report, so that it fits its frame.
const REPORT_CLIENTS_MAX: usize = 150;

/// How a connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The client closed it, or its process ended; also by what is no request.
    Closed,
    /// Nothing was heard of the client any more: its machine is suspended, or cannot be reached.
    Silent,
}

/// A connection, as the server's logic sees it.
#[derive(Debug)]
pub struct Session {
    pool: Arc<Pool>,
    nonce: [u8; NONCE_BYTES],
    owner: Owner,
    client: Arc<Client>,
    attached: BTreeMap<u32, Arc<Region>>,
}

impl Session {
    /// A connection that was greeted with this nonce, of whoever comes from the owner's address.
    pub fn new(pool: Arc<Pool>, nonce: [u8; NONCE_BYTES], owner: Owner) -> Session {
        let client = pool.client(&owner.address);
        Session::of_client(pool, nonce, owner, client)
    }

    /// A connection of this client.
    pub fn of_client(
        pool: Arc<Pool>,
        nonce: [u8; NONCE_BYTES],
        owner: Owner,
        client: Arc<Client>,
    ) -> Session {
        Session { pool, nonce, owner, client, attached: BTreeMap::new() }
    }

    /// Does what a frame asks, and appends the reply frame.
    ///
    /// # Errors
    /// When the frame is none; the connection is of no use then.
    pub fn handle(
        &mut self,
        frame: &[u8],
        now_ns: u64,
        out: &mut Vec<u8>,
    ) -> Result<(), WireError> {
        let (header, request) = Request::decode(frame)?;
        let before = out.len();
        if let Err(failure) = self.answer(request, header.id, now_ns, out) {
            out.truncate(before);
            self.count_refusal(failure);
            Reply::Failed(failure).encode_head(header.id, out);
        }
        Ok(())
    }

    /// Leaves its regions to other connections, or to be reaped.
    pub fn close(&mut self, now_ns: u64, ended: Ended) {
        for region in std::mem::take(&mut self.attached).values() {
            region.is_client_silent.store(ended == Ended::Silent, Ordering::Relaxed);
            detach(region, now_ns);
        }
    }

    fn count_refusal(&self, failure: Failure) {
        let tally = &self.pool.tally;
        tally.requests_refused_total.fetch_add(1, Ordering::Relaxed);
        match failure {
            Failure::Full { .. } => tally.full_total.fetch_add(1, Ordering::Relaxed),
            Failure::BadSum { .. } => tally.pages_damaged_total.fetch_add(1, Ordering::Relaxed),
            _ => 0,
        };
    }

    fn answer(
        &mut self,
        request: Request<'_>,
        id: u32,
        now_ns: u64,
        out: &mut Vec<u8>,
    ) -> Result<(), Failure> {
        let reply = match request {
            Request::Get { on, first, count, with_sums } => {
                return self.get(on, PageRun { first, count: count as u64 }, with_sums, id, out);
            }
            Request::Put { on, first, if_absent, sums, pages } => {
                self.put(on, first, if_absent, sums, pages)?;
                Reply::Done
            }
            Request::Create { pages, overcommit, token } => {
                let (owner, client) = (self.owner.clone(), self.client.clone());
                let made = self.pool.create(pages, overcommit, *token, owner, client)?;
                self.attached.insert(made.0.number, made.0);
                Reply::Created(made.1)
            }
            Request::Attach { region, fence, proof } => {
                let claim = Claim { nonce: self.nonce, epoch: self.pool.epoch, region, fence };
                let (region, lease) = self.pool.open(&claim, proof)?;
                self.attach(region, now_ns);
                Reply::Attached(lease)
            }
            Request::Drop { on, at_end } => {
                let region = self.region(on)?;
                if region.lease()? != on.lease {
                    return Err(Failure::StaleLease);
                }
                if at_end {
                    region.ends_with_client.store(true, Ordering::Relaxed);
                } else {
                    self.pool.remove(region);
                    self.attached.remove(&on.region);
                }
                Reply::Done
            }
            Request::Discard { on, first, count } => {
                let region = self.region(on)?;
                let count = count.min(region.pages.saturating_sub(first));
                region.discard(&self.pool.slab, on.lease, PageRun { first, count })?;
                Reply::Done
            }
            Request::Held { on, first, count } => {
                let run = PageRun { first, count: count as u64 };
                let region = self.region(on)?;
                Pool::fits(region, run)?;
                let bits = region.held(on.lease, run)?;
                Reply::Bitmap { count, bits: &bits }.encode_head(id, out);
                return Ok(());
            }
            Request::Status => Reply::Status(self.pool.status(&self.client, now_ns)),
            Request::Report => {
                let report = self.pool.report(now_ns, REPORT_CLIENTS_MAX);
                let json = serde_json::to_vec(&report).unwrap_or_default();
                debug_assert!(json.len() <= REPORT_BYTES_MAX);
                Reply::Report(&json).encode_head(id, out);
                return Ok(());
            }
        };
        reply.encode_head(id, out);
        Ok(())
    }

    fn get(
        &self,
        on: Lease,
        run: PageRun,
        with_sums: bool,
        id: u32,
        out: &mut Vec<u8>,
    ) -> Result<(), Failure> {
        let region = self.region(on)?;
        Pool::fits(region, run)?;
        region.get(&self.pool.slab, on.lease, run, with_sums, id, out)?;
        add(&self.pool.tally.pages_out_total, run.count);
        Ok(())
    }

    fn put(
        &self,
        on: Lease,
        first: u64,
        if_absent: bool,
        sums: &[u8],
        pages: &[u8],
    ) -> Result<(), Failure> {
        let region = self.region(on)?;
        let count = sums.len() / wire::SUM_BYTES;
        Pool::fits(region, PageRun { first, count: count as u64 })?;
        for ((page, bytes), sum) in
            (first..).zip(pages.chunks_exact(PAGE_BYTES)).zip(wire::sums(sums))
        {
            if Checksum::of(bytes) != sum {
                return Err(Failure::BadSum { page });
            }
        }
        region.put(&self.pool.slab, on.lease, first, if_absent, pages, wire::sums(sums))?;
        add(&self.pool.tally.pages_in_total, count as u64);
        Ok(())
    }

    fn region(&self, on: Lease) -> Result<&Arc<Region>, Failure> {
        self.attached.get(&on.region).ok_or(Failure::Denied)
    }

    /// Keeps a region that the pool has attached.
    fn attach(&mut self, region: Arc<Region>, now_ns: u64) {
        if let Some(before) = self.attached.insert(region.number, region) {
            detach(&before, now_ns);
        }
    }
}

fn detach(region: &Region, now_ns: u64) {
    region.idle_since_ns.store(now_ns, Ordering::Relaxed);
    region.attached.fetch_sub(1, Ordering::Relaxed);
}

fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}
