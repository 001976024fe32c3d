//! The session of one connection, from request frames to reply frames. No I/O, no clock.
//!
//! Invariant: a connection uses only regions that it created or proved to be its own.

use super::client::Client;
use super::pool::Pool;
use super::region::{Owner, StoredRegion};
use crate::page::{PAGE_BYTES, PageRun};
use crate::secret::Claim;
use crate::wire::hello::NONCE_BYTES;
use crate::wire::reply::{Failure, Reply};
use crate::wire::request::{Lease, Request};
use crate::wire::{self, REPORT_BYTES_MAX, WireChecksum, WireError};
use lz4_flex::block::decompress_into;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The most clients in a report, so that it fits its frame.
const REPORT_CLIENTS_MAX: usize = 150;

/// The way in which a connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectionEnd {
    /// The client closed it, its process ended, or it sent bytes that are no request.
    Closed,
    /// The client was silent: its machine is suspended or unreachable.
    Silent,
}

/// A connection's state in the pool.
#[derive(Debug)]
pub struct Session {
    pool: Arc<Pool>,
    nonce: [u8; NONCE_BYTES],
    owner: Owner,
    client: Arc<Client>,
    attached: BTreeMap<u32, Arc<StoredRegion>>,
}

impl Session {
    /// Returns the session of a connection whose client is identified by the owner's address.
    pub fn new(pool: Arc<Pool>, nonce: [u8; NONCE_BYTES], owner: Owner) -> Session {
        let client = pool.client(&owner.address);
        Session::of_client(pool, nonce, owner, client)
    }

    /// Returns the session of a connection of this client.
    pub fn of_client(
        pool: Arc<Pool>,
        nonce: [u8; NONCE_BYTES],
        owner: Owner,
        client: Arc<Client>,
    ) -> Session {
        Session { pool, nonce, owner, client, attached: BTreeMap::new() }
    }

    /// Executes the request in a frame, and appends the reply frame.
    ///
    /// # Errors
    /// If the frame cannot be parsed. The caller must close the connection then.
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

    /// Detaches the session from its regions.
    pub fn close(&mut self, now_ns: u64, ended: ConnectionEnd) {
        for region in std::mem::take(&mut self.attached).values() {
            region.is_client_silent.store(ended == ConnectionEnd::Silent, Ordering::Relaxed);
            detach(region, now_ns);
        }
    }

    fn count_refusal(&self, failure: Failure) {
        let counters = &self.pool.counters;
        counters.requests_refused_total.fetch_add(1, Ordering::Relaxed);
        match failure {
            Failure::Full { .. } => counters.full_total.fetch_add(1, Ordering::Relaxed),
            Failure::DamagedPage { .. } => {
                counters.pages_damaged_total.fetch_add(1, Ordering::Relaxed)
            }
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
            Request::Get { on, first, count, with_checksums } => {
                return self.get(
                    on,
                    PageRun { first, count: count as u64 },
                    with_checksums,
                    id,
                    out,
                );
            }
            Request::Put { on, first, if_absent, checksums, pages } => {
                self.put(on, first, if_absent, checksums, pages)?;
                Reply::Done
            }
            Request::CompressedPut { on, first, if_absent, checksums, block } => {
                // The pages are in the buffer of the replies for a moment: its size is limited.
                let at = out.len();
                let bytes = checksums.len() / wire::CHECKSUM_BYTES * PAGE_BYTES;
                out.resize(at + bytes, 0);
                if decompress_into(block, &mut out[at..]).ok() != Some(bytes) {
                    return Err(Failure::DamagedPage { page: first });
                }
                self.put(on, first, if_absent, checksums, &out[at..])?;
                out.truncate(at);
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
            Request::Snapshot { on, token } => {
                let region = self.region(on)?;
                Reply::Created(self.pool.snapshot(region, on.lease, *token, now_ns)?)
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
        with_checksums: bool,
        id: u32,
        out: &mut Vec<u8>,
    ) -> Result<(), Failure> {
        let region = self.region(on)?;
        Pool::fits(region, run)?;
        region.get(&self.pool.slab, on.lease, run, with_checksums, id, out)?;
        add(&self.pool.counters.pages_out_total, run.count);
        Ok(())
    }

    fn put(
        &self,
        on: Lease,
        first: u64,
        if_absent: bool,
        checksums: &[u8],
        pages: &[u8],
    ) -> Result<(), Failure> {
        let region = self.region(on)?;
        let count = checksums.len() / wire::CHECKSUM_BYTES;
        Pool::fits(region, PageRun { first, count: count as u64 })?;
        for ((page, bytes), checksum) in
            (first..).zip(pages.chunks_exact(PAGE_BYTES)).zip(wire::checksums(checksums))
        {
            if WireChecksum::of(bytes) != checksum {
                return Err(Failure::DamagedPage { page });
            }
        }
        region.put(
            &self.pool.slab,
            on.lease,
            first,
            if_absent,
            pages,
            wire::checksums(checksums),
        )?;
        add(&self.pool.counters.pages_in_total, count as u64);
        Ok(())
    }

    fn region(&self, on: Lease) -> Result<&Arc<StoredRegion>, Failure> {
        self.attached.get(&on.region).ok_or(Failure::Denied)
    }

    /// Records a region that the pool has attached.
    fn attach(&mut self, region: Arc<StoredRegion>, now_ns: u64) {
        if let Some(before) = self.attached.insert(region.number, region) {
            detach(&before, now_ns);
        }
    }
}

fn detach(region: &StoredRegion, now_ns: u64) {
    region.idle_since_ns.store(now_ns, Ordering::Relaxed);
    region.attached.fetch_sub(1, Ordering::Relaxed);
}

fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}
