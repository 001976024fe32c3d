//! All regions of a server and the memory that they share. No I/O, no clock: callers say what time
//! it is.
//!
//! Invariants: never more pages than the limit; a region is found only by who proves that he knows
//! its token; a server that is started again has another epoch, and none of the old regions.

use super::buffers::Buffers;
use super::client::{Client, Clients};
use super::index;
use super::region::{Owner, Region, RegionClient};
use super::slab::Slab;
use crate::page::{PAGE_BYTES, PageRun};
use crate::secret::{self, Claim};
use crate::wire::reply::{Failure, Status};
use crate::wire::request::{Lease, Token};
use pagetax_core::access::mix64;
use pagetax_core::units::{Bytes, Nanos};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// What finding and checking a page costs beside its bytes, at most: 8 for the sum, and its place in
/// the index.
const INDEX_BYTES: u64 = 8 + index::BYTES_MAX;

/// How long a region is kept whose client said that it ends: it may yet open a link again.
const END_LINGER_NS: u64 = 1_000_000_000;

/// What a server lends, to how many.
#[derive(Debug, Clone)]
pub struct Limits {
    /// For pages, what it takes to find them, and the large buffers of connections.
    pub memory: Bytes,
    /// Of all clients together.
    pub regions_max: u32,
    /// At the same time, of those that have said hello.
    pub connections_max: u32,
    /// Memory for the pages of one client; none: all of it.
    pub client_memory: Option<Bytes>,
    /// Of one client.
    pub client_regions_max: u32,
    /// Of one client, at the same time.
    pub client_connections_max: u32,
    /// How long a region is kept when no connection uses it.
    pub linger: Nanos,
    /// The same where the last connection ended because its client was silent. Not less than `linger`.
    pub linger_silent: Nanos,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            memory: Bytes(1 << 30),
            regions_max: 4096,
            connections_max: 1024,
            client_memory: None,
            client_regions_max: 1024,
            client_connections_max: 512,
            linger: Nanos(60_000_000_000),
            linger_silent: Nanos(600_000_000_000),
        }
    }
}

/// What has happened since the start.
#[derive(Debug, Default)]
pub struct Tally {
    /// Connections open now, of those that have said hello.
    pub connections: AtomicU32,
    /// Connections that were turned away, for any reason.
    pub connections_refused_total: AtomicU64,
    /// Requests that were answered with a failure.
    pub requests_refused_total: AtomicU64,
    /// Of these, for lack of room.
    pub full_total: AtomicU64,
    /// Pages that arrived with bytes that are not those of their sum.
    pub pages_damaged_total: AtomicU64,
    /// Pages taken in.
    pub pages_in_total: AtomicU64,
    /// Pages given out.
    pub pages_out_total: AtomicU64,
}

/// Everything that a server holds.
#[derive(Debug)]
pub struct Pool {
    /// As it was started.
    pub limits: Limits,
    /// Drawn at the start.
    pub epoch: u64,
    /// What has happened.
    pub tally: Tally,
    /// The pages.
    pub slab: Slab,
    /// The large buffers of connections.
    pub(super) buffers: Buffers,
    clients: Clients,
    /// Of one client.
    client_pages_max: u64,
    regions: RwLock<BTreeMap<u32, Arc<Region>>>,
    next_number: AtomicU32,
    next_lease: AtomicU32,
    draining: AtomicBool,
}

/// A server as people see it; also what its `/report` prints.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Of this document.
    pub schema: u32,
    /// Always `server`.
    pub kind: String,
    /// The server's pagetax.
    pub version: String,
    /// Drawn at its start.
    pub epoch: u64,
    /// Since then.
    pub uptime_ns: u64,
    /// Its limit.
    pub memory_bytes: u64,
    /// Pages within that limit.
    pub pages_total: u64,
    /// Pages held.
    pub pages_held: u64,
    /// Pages taken in since the start.
    pub pages_in_total: u64,
    /// Pages given out since the start.
    pub pages_out_total: u64,
    /// Requests answered with a failure since the start.
    pub requests_refused_total: u64,
    /// Open now.
    pub connections: u32,
    /// Takes nothing new.
    pub draining: bool,
    /// Who has regions here, by address and process.
    pub clients: Vec<ClientReport>,
}

/// A client of a server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClientReport {
    /// Its address, without the port.
    pub address: String,
    /// Its process there.
    pub pid: u32,
    /// Its program.
    pub name: String,
    /// How many regions it has here.
    pub regions: u64,
    /// Pages held for it.
    pub pages_held: u64,
    /// Pages taken in from it.
    pub pages_in_total: u64,
    /// Pages given out to it.
    pub pages_out_total: u64,
}

impl Pool {
    /// An empty one, of a server that drew this epoch.
    pub fn new(limits: Limits, epoch: u64) -> Pool {
        let memory = limits.memory.0;
        let pages_in = |bytes: u64| bytes / (PAGE_BYTES as u64 + INDEX_BYTES);
        let slab = Slab::new(pages_in(memory - Buffers::bytes_of(memory)));
        let client_pages = limits.client_memory.map(|bytes| pages_in(bytes.0));
        Pool {
            client_pages_max: client_pages.unwrap_or(u64::MAX).min(slab.pages_max()),
            buffers: Buffers::new(memory),
            clients: Clients::default(),
            limits,
            epoch,
            tally: Tally::default(),
            slab,
            regions: RwLock::default(),
            // Numbers of another epoch mean nothing here; distant ones make that plain in a log.
            next_number: AtomicU32::new(mix64(epoch) as u32),
            next_lease: AtomicU32::new((mix64(epoch) >> 32) as u32),
            draining: AtomicBool::new(false),
        }
    }

    /// Returns the client of this certificate or address.
    pub fn client(&self, identity: &str) -> Arc<Client> {
        self.clients.get(identity)
    }

    /// Counts a connection of a client that has said hello. Returns false, and does not count it, where this
    /// client has enough of them, or the last ones are for those who have regions here: they would lose what
    /// they cannot reach.
    pub fn connect(&self, client: &Client) -> bool {
        let limits = &self.limits;
        let reserve = if client.regions() > 0 { 0 } else { limits.connections_max / 8 };
        let one_more = |open: u32| (open < limits.connections_max - reserve).then_some(open + 1);
        let open = &self.tally.connections;
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
        self.tally.connections.fetch_sub(1, Ordering::Relaxed);
    }

    /// Returns how many more pages this client can put.
    pub fn pages_free(&self, client: &Client) -> u64 {
        self.slab.pages_free().min(self.client_pages_max.saturating_sub(client.pages()))
    }

    /// Makes a region.
    ///
    /// # Errors
    /// Without room, beyond a limit of regions, or when draining.
    pub fn create(
        &self,
        pages: u64,
        overcommit: bool,
        token: Token,
        owner: Owner,
        client: Arc<Client>,
    ) -> Result<(Arc<Region>, Lease), Failure> {
        if self.is_draining() {
            return Err(Failure::Draining);
        }
        let pages_free = self.pages_free(&client);
        if !overcommit && pages > pages_free {
            return Err(Failure::Full { pages_free });
        }
        let mut regions = self.regions_mut();
        if regions.len() >= self.limits.regions_max as usize
            || !client.take_region(self.limits.client_regions_max)
        {
            return Err(Failure::TooMany);
        }
        // They wrap around, and an old region may still have the number.
        let mut next_number = || self.next_number.fetch_add(1, Ordering::Relaxed);
        let free_number =
            std::iter::repeat_with(&mut next_number).find(|n| !regions.contains_key(n));
        let number = free_number.ok_or(Failure::TooMany)?;
        let lease = self.next_lease();
        let client = RegionClient { client, pages_max: self.client_pages_max };
        let region = Arc::new(Region::new(number, lease, pages, owner, token, client));
        regions.insert(number, region.clone());
        Ok((region, Lease { region: number, lease }))
    }

    /// Attaches a connection to the region of this number, if it proves that it may use it.
    ///
    /// # Errors
    /// When there is none, or the proof does not hold.
    pub fn open(&self, claim: &Claim, proof: &Token) -> Result<(Arc<Region>, Lease), Failure> {
        // Held until it is attached: who reaps must not take it for idle.
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

    /// Forgets a region and wipes its pages.
    pub fn remove(&self, region: &Region) {
        self.regions_mut().remove(&region.number);
        region.clear(&self.slab);
    }

    /// Removes regions that nobody has used for the linger time, or briefly where that was to be expected;
    /// how many.
    pub fn reap(&self, now_ns: u64) -> usize {
        let (linger_ns, silent_ns) = (self.limits.linger.0, self.limits.linger_silent.0);
        let linger_ns = |region: &Region| {
            if region.ends_with_client.load(Ordering::Relaxed) {
                linger_ns.min(END_LINGER_NS)
            } else if region.is_client_silent.load(Ordering::Relaxed) {
                linger_ns.max(silent_ns)
            } else {
                linger_ns
            }
        };
        let is_idle = |region: &Region| {
            let since = region.idle_since_ns.load(Ordering::Relaxed);
            region.attached.load(Ordering::Relaxed) == 0
                && now_ns.saturating_sub(since) >= linger_ns(region)
        };
        // Found and removed under one lock: nobody can attach in between.
        let mut regions = self.regions_mut();
        let idle: Vec<_> = regions.values().filter(|region| is_idle(region)).cloned().collect();
        idle.iter().for_each(|region| drop(regions.remove(&region.number)));
        drop(regions);
        idle.iter().for_each(|region| region.clear(&self.slab));
        idle.len()
    }

    /// Takes nothing new from here on.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Whether it takes nothing new.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// Pages in use.
    pub fn pages_held(&self) -> u64 {
        self.slab.pages_max() - self.slab.pages_free()
    }

    /// Regions there are.
    pub fn region_count(&self) -> usize {
        self.regions().len()
    }

    /// What a client wants to know.
    pub fn status(&self, client: &Client, uptime_ns: u64) -> Status {
        Status {
            pages_total: self.client_pages_max,
            pages_free: self.pages_free(client),
            regions: self.region_count() as u64,
            connections: self.tally.connections.load(Ordering::Relaxed) as u64,
            uptime_ns,
            draining: self.is_draining(),
        }
    }

    /// What people want to know, with at most so many clients: those that hold most.
    pub fn report(&self, uptime_ns: u64, clients_max: usize) -> Report {
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
        Report {
            schema: pagetax_core::report::SCHEMA,
            kind: "server".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            epoch: self.epoch,
            uptime_ns,
            memory_bytes: self.limits.memory.0,
            pages_total: self.slab.pages_max(),
            pages_held: self.pages_held(),
            pages_in_total: self.tally.pages_in_total.load(Ordering::Relaxed),
            pages_out_total: self.tally.pages_out_total.load(Ordering::Relaxed),
            requests_refused_total: self.tally.requests_refused_total.load(Ordering::Relaxed),
            connections: self.tally.connections.load(Ordering::Relaxed),
            draining: self.is_draining(),
            clients,
        }
    }

    /// Whether a run lies in a region.
    pub(super) fn fits(region: &Region, run: PageRun) -> Result<(), Failure> {
        let inside = run.end().is_some_and(|end| end <= region.pages);
        if inside { Ok(()) } else { Err(Failure::BadRequest) }
    }

    /// Goes on with this number for the next region. For tests: the counter wraps around after 2^32 regions.
    #[doc(hidden)]
    pub fn set_next_number(&self, number: u32) {
        self.next_number.store(number, Ordering::Relaxed);
    }

    fn next_lease(&self) -> u32 {
        self.next_lease.fetch_add(1, Ordering::Relaxed)
    }

    fn regions_mut(&self) -> std::sync::RwLockWriteGuard<'_, BTreeMap<u32, Arc<Region>>> {
        self.regions.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn regions(&self) -> std::sync::RwLockReadGuard<'_, BTreeMap<u32, Arc<Region>>> {
        self.regions.read().unwrap_or_else(PoisonError::into_inner)
    }
}
