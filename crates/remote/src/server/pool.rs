//! All regions of a server, and the memory that they share. No I/O and no clock: callers pass the
//! time.
//!
//! Invariants: the pages never exceed the limit. A client reaches a region only with a proof that it
//! knows the token. A restarted server has another epoch and none of the old regions.
//!
//! A draining server creates no regions, but accepts puts into those that it has. A put that began
//! before the drain can then complete. Clients stop placing pages there when they next poll the
//! status, and move their replicas away.

use super::buffers::BufferPool;
use super::client::{Client, Clients};
use super::index;
use super::region::{Owner, RegionClient, StoredRegion};
use super::slab::Slab;
use crate::page::{PAGE_BYTES, PageRun};
use crate::secret::{self, Claim};
use crate::wire::reply::{Failure, Status};
use crate::wire::request::{Lease, Token};
use pagetax_core::access::mix64;
use pagetax_core::document::Document;
use pagetax_core::units::{Bytes, Nanos};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// The most bytes that a page costs in addition to its own: 8 for the checksum, and its part of the
/// index.
const INDEX_BYTES: u64 = 8 + index::BYTES_MAX;

/// The linger time of a region after its client announced its end. The client may still open a
/// link.
const END_LINGER_NS: u64 = 1_000_000_000;

/// The linger time of a snapshot: most children of forks end soon, by an exec or without notice.
const SNAPSHOT_LINGER_NS: u64 = 5_000_000_000;

/// The limits of a server.
#[derive(Debug, Clone)]
pub struct Limits {
    /// The memory for pages, their index and the large buffers of connections.
    pub memory: Bytes,
    /// The most regions of all clients together.
    pub regions_max: u32,
    /// The most connections at a time that have sent their hello.
    pub connections_max: u32,
    /// The memory for the pages of one client; `None` allows all of it.
    pub client_memory: Option<Bytes>,
    /// The most regions of one client.
    pub client_regions_max: u32,
    /// The most connections of one client at a time.
    pub client_connections_max: u32,
    /// The time for which a region without connections is kept.
    pub linger: Nanos,
    /// The same if the last connection ended because its client was silent. At least `linger`.
    pub linger_silent: Nanos,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            memory: Bytes(1 << 30),
            regions_max: 4096,
            connections_max: 4096,
            client_memory: None,
            client_regions_max: 1024,
            client_connections_max: 512,
            linger: Nanos(60_000_000_000),
            linger_silent: Nanos(600_000_000_000),
        }
    }
}

/// The counts of events since the server's start.
#[derive(Debug, Default)]
pub struct ServerCounters {
    /// The number of open connections that have sent their hello.
    pub connections: AtomicU32,
    /// Connections that were refused, for any reason.
    pub connections_refused_total: AtomicU64,
    /// Requests that were answered with a failure.
    pub requests_refused_total: AtomicU64,
    /// Requests that were refused for lack of room.
    pub full_total: AtomicU64,
    /// Pages that arrived with bytes that do not match their checksum.
    pub pages_damaged_total: AtomicU64,
    /// The number of pages that clients have put.
    pub pages_in_total: AtomicU64,
    /// The number of pages that clients have read.
    pub pages_out_total: AtomicU64,
}

/// The state of a server.
#[derive(Debug)]
pub struct Pool {
    /// The limits that the server was started with.
    pub limits: Limits,
    /// The server's epoch, drawn at its start.
    pub epoch: u64,
    /// The counts of events since the start.
    pub counters: ServerCounters,
    /// The memory that holds the pages.
    pub slab: Slab,
    /// The large buffers of connections.
    pub(super) buffers: BufferPool,
    clients: Clients,
    /// The most pages of one client.
    client_pages_max: u64,
    regions: RwLock<BTreeMap<u32, Arc<StoredRegion>>>,
    next_number: AtomicU32,
    next_lease: AtomicU32,
    draining: AtomicBool,
}

/// A server's report on itself for its users, also at `/report`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ServerReport {
    /// The version of the server's pagetax.
    pub version: String,
    /// The server's epoch, drawn at its start.
    pub epoch: u64,
    /// The time since the start, in nanoseconds.
    pub uptime_ns: u64,
    /// The limit of the server's memory, in bytes.
    pub memory_bytes: u64,
    /// The number of pages that fit that limit.
    pub pages_total: u64,
    /// The number of pages that are held.
    pub pages_held: u64,
    /// Pages that were put since the start.
    pub pages_in_total: u64,
    /// Pages that were read since the start.
    pub pages_out_total: u64,
    /// Requests that were answered with a failure since the start.
    pub requests_refused_total: u64,
    /// The number of open connections.
    pub connections: u32,
    /// True if the server creates no more regions, and clients should move their pages away.
    pub draining: bool,
    /// The owners of regions, by address and process.
    pub clients: Vec<ClientReport>,
}

impl Document for ServerReport {
    const KIND: &'static str = "server";
}

/// A server's report on one client.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ClientReport {
    /// The client's address, without the port.
    pub address: String,
    /// The process ID that the client reports.
    pub pid: u32,
    /// The name of the client's program.
    pub name: String,
    /// The number of its regions.
    pub regions: u64,
    /// The number of pages that are held for it.
    pub pages_held: u64,
    /// The number of pages that it has put.
    pub pages_in_total: u64,
    /// The number of pages that it has read.
    pub pages_out_total: u64,
}

impl Pool {
    /// Returns the state of a server that drew this epoch, without regions.
    pub fn new(limits: Limits, epoch: u64) -> Pool {
        let memory = limits.memory.0;
        let pages_in = |bytes: u64| bytes / (PAGE_BYTES as u64 + INDEX_BYTES);
        let slab = Slab::new(pages_in(memory - BufferPool::bytes_of(memory)));
        let client_pages = limits.client_memory.map(|bytes| pages_in(bytes.0));
        Pool {
            client_pages_max: client_pages.unwrap_or(u64::MAX).min(slab.pages_max()),
            buffers: BufferPool::new(memory),
            clients: Clients::default(),
            limits,
            epoch,
            counters: ServerCounters::default(),
            slab,
            regions: RwLock::default(),
            // Numbers of another epoch are void. Distant numbers make that visible in a log.
            next_number: AtomicU32::new(mix64(epoch) as u32),
            next_lease: AtomicU32::new((mix64(epoch) >> 32) as u32),
            draining: AtomicBool::new(false),
        }
    }

    /// Returns the client of this certificate or address.
    pub fn client(&self, identity: &str) -> Arc<Client> {
        self.clients.get(identity)
    }

    /// Counts a connection of a client that has sent its hello. Returns false, and does not count
    /// it, if this client is at its limit. The last eighth of all connections is for clients that
    /// have regions: without a connection they would lose their pages.
    pub fn connect(&self, client: &Client) -> bool {
        let limits = &self.limits;
        let reserve = if client.regions() > 0 { 0 } else { limits.connections_max / 8 };
        let one_more = |open: u32| (open < limits.connections_max - reserve).then_some(open + 1);
        let open = &self.counters.connections;
        if client.connections() >= limits.client_connections_max
            || open.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).is_err()
        {
            return false;
        }
        client.connected();
        true
    }

    /// Counts the end of a connection that was counted.
    pub fn disconnect(&self, client: &Client) {
        client.disconnected();
        self.counters.connections.fetch_sub(1, Ordering::Relaxed);
    }

    /// Returns the number of pages that this client can still put.
    pub fn pages_free(&self, client: &Client) -> u64 {
        self.slab.pages_free().min(self.client_pages_max.saturating_sub(client.pages()))
    }

    /// Creates a region of this many pages.
    ///
    /// # Errors
    /// If there is no room, a limit of regions is reached, or the server is draining.
    pub fn create(
        &self,
        pages: u64,
        overcommit: bool,
        token: Token,
        owner: Owner,
        client: Arc<Client>,
    ) -> Result<(Arc<StoredRegion>, Lease), Failure> {
        if self.is_draining() {
            return Err(Failure::Draining);
        }
        let pages_free = self.pages_free(&client);
        if !overcommit && pages > pages_free {
            return Err(Failure::Full { pages_free });
        }
        let counted = client.clone();
        self.add_region(&counted, |lease| {
            let client = RegionClient { client, pages_max: self.client_pages_max };
            let Lease { region, lease } = lease;
            Ok(StoredRegion::new(region, lease, pages, owner, token, client))
        })
    }

    /// Creates a region that has the pages of another one as they are now. A draining server does it too:
    /// the new region's client moves them away.
    ///
    /// # Errors
    /// If the lease is void, or a limit of regions is reached.
    pub fn snapshot(
        &self,
        of: &StoredRegion,
        on: u32,
        token: Token,
        now_ns: u64,
    ) -> Result<Lease, Failure> {
        let copy =
            |lease: Lease| of.snapshot(&self.slab, on, (lease.region, lease.lease), token, now_ns);
        self.add_region(of.client(), copy).map(|(_, lease)| lease)
    }

    fn add_region(
        &self,
        client: &Client,
        make: impl FnOnce(Lease) -> Result<StoredRegion, Failure>,
    ) -> Result<(Arc<StoredRegion>, Lease), Failure> {
        let mut regions = self.regions_mut();
        if regions.len() >= self.limits.regions_max as usize
            || !client.take_region(self.limits.client_regions_max)
        {
            return Err(Failure::TooMany);
        }
        // The counter wraps around, and an old region may still have the number.
        let next_number = || self.next_number.fetch_add(1, Ordering::Relaxed);
        let free_number = std::iter::repeat_with(next_number).find(|n| !regions.contains_key(n));
        let number = free_number.ok_or(Failure::TooMany)?;
        let lease = Lease { region: number, lease: self.next_lease() };
        let region = make(lease).inspect_err(|_| client.release_region())?;
        let region = Arc::new(region);
        regions.insert(number, region.clone());
        Ok((region, lease))
    }

    /// Attaches a connection to a region, if the proof holds.
    ///
    /// # Errors
    /// If there is no such region, or the proof does not hold.
    pub fn open(
        &self,
        claim: &Claim,
        proof: &Token,
    ) -> Result<(Arc<StoredRegion>, Lease), Failure> {
        // Locked until it is attached, so that `reap` does not find it idle.
        let regions = self.regions();
        let region = regions.get(&claim.region).cloned().ok_or(Failure::NoRegion)?;
        if !secret::proves(&region.token, claim, proof) {
            return Err(Failure::Denied);
        }
        if claim.fence {
            region.fence(self.next_lease())?;
        }
        let lease = region.lease()?;
        region.attached.fetch_add(1, Ordering::Relaxed);
        Ok((region, Lease { region: claim.region, lease }))
    }

    /// Removes a region and wipes its pages.
    pub fn remove(&self, region: &StoredRegion) {
        self.regions_mut().remove(&region.number);
        region.clear(&self.slab);
    }

    /// Removes the regions that had no connection for their linger time. Returns their number.
    pub fn reap(&self, now_ns: u64) -> usize {
        let (linger_ns, silent_ns) = (self.limits.linger.0, self.limits.linger_silent.0);
        let linger_ns = |region: &StoredRegion| {
            if region.ends_with_client.load(Ordering::Relaxed) {
                linger_ns.min(END_LINGER_NS)
            } else if region.is_client_silent.load(Ordering::Relaxed) {
                linger_ns.max(silent_ns)
            } else if region.is_snapshot {
                linger_ns.min(SNAPSHOT_LINGER_NS)
            } else {
                linger_ns
            }
        };
        let is_idle = |region: &StoredRegion| {
            let since = region.idle_since_ns.load(Ordering::Relaxed);
            region.attached.load(Ordering::Relaxed) == 0
                && now_ns.saturating_sub(since) >= linger_ns(region)
        };
        // Found and removed under one lock, so that no connection attaches in between.
        let mut regions = self.regions_mut();
        let idle: Vec<_> = regions.values().filter(|region| is_idle(region)).cloned().collect();
        idle.iter().for_each(|region| drop(regions.remove(&region.number)));
        drop(regions);
        idle.iter().for_each(|region| region.clear(&self.slab));
        idle.len()
    }

    /// Refuses new regions from now on, and asks clients by the status to move their pages away.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Returns true if the server is draining.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// Returns the number of pages that are held.
    pub fn pages_held(&self) -> u64 {
        self.slab.pages_held()
    }

    /// Returns the number of regions.
    pub fn region_count(&self) -> usize {
        self.regions().len()
    }

    /// Returns the status for a client, which its placement needs.
    pub fn status(&self, client: &Client, uptime_ns: u64) -> Status {
        Status {
            pages_total: self.client_pages_max,
            pages_free: self.pages_free(client),
            regions: self.region_count() as u64,
            connections: self.counters.connections.load(Ordering::Relaxed) as u64,
            uptime_ns,
            draining: self.is_draining(),
        }
    }

    /// Returns the report for users. It lists the `clients_max` clients that hold most pages.
    pub fn report(&self, uptime_ns: u64, clients_max: usize) -> ServerReport {
        let mut clients: HashMap<&Owner, ClientReport> = HashMap::new();
        let regions: Vec<_> = self.regions().values().cloned().collect();
        for region in &regions {
            let client = clients.entry(&region.owner).or_insert_with(|| ClientReport {
                address: region.owner.address.clone(),
                pid: region.owner.pid,
                name: region.owner.name.clone(),
                regions: 0,
                pages_held: 0,
                pages_in_total: 0,
                pages_out_total: 0,
            });
            client.regions += 1;
            client.pages_held += region.pages_held();
            client.pages_in_total += region.pages_in_total.load(Ordering::Relaxed);
            client.pages_out_total += region.pages_out_total.load(Ordering::Relaxed);
        }
        let mut clients: Vec<ClientReport> = clients.into_values().collect();
        clients.sort_by(|a, b| b.pages_held.cmp(&a.pages_held).then(a.pid.cmp(&b.pid)));
        clients.truncate(clients_max);
        ServerReport {
            version: env!("CARGO_PKG_VERSION").into(),
            epoch: self.epoch,
            uptime_ns,
            memory_bytes: self.limits.memory.0,
            pages_total: self.slab.pages_max(),
            pages_held: self.pages_held(),
            pages_in_total: self.counters.pages_in_total.load(Ordering::Relaxed),
            pages_out_total: self.counters.pages_out_total.load(Ordering::Relaxed),
            requests_refused_total: self.counters.requests_refused_total.load(Ordering::Relaxed),
            connections: self.counters.connections.load(Ordering::Relaxed),
            draining: self.is_draining(),
            clients,
        }
    }

    /// Checks that a run lies in a region.
    pub(super) fn fits(region: &StoredRegion, run: PageRun) -> Result<(), Failure> {
        let inside = run.end().is_some_and(|end| end <= region.pages);
        if inside { Ok(()) } else { Err(Failure::BadRequest) }
    }

    /// Sets the number of the next region. For tests: the counter wraps around after 2^32 regions.
    #[doc(hidden)]
    pub fn set_next_number(&self, number: u32) {
        self.next_number.store(number, Ordering::Relaxed);
    }

    fn next_lease(&self) -> u32 {
        self.next_lease.fetch_add(1, Ordering::Relaxed)
    }

    fn regions_mut(&self) -> std::sync::RwLockWriteGuard<'_, BTreeMap<u32, Arc<StoredRegion>>> {
        self.regions.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn regions(&self) -> std::sync::RwLockReadGuard<'_, BTreeMap<u32, Arc<StoredRegion>>> {
        self.regions.read().unwrap_or_else(PoisonError::into_inner)
    }
}
