//! Pages in Redis or Valkey, one server or a cluster, for users who run one already. The engine
//! does its own replication and failover.
//!
//! Invariants: the client refuses an engine that may evict its keys. Neighbouring pages are in one
//! hash, so that a run is one command or two. Keys expire unless this process renews them, so the
//! keys of a crashed process do not stay for ever. No address that is shown contains the password.
//!
//! The engine acknowledges a put before its replicas have it, so a failover may lose pages. The MAC
//! shows the loss, and the pages are reported as lost.

use super::{
    Capacity, PageReader, PageStore, PageWriter, PutRun, RegionId, StoreError, check_discard,
    check_get, check_put,
};
use crate::page::{PAGE_BYTES, PageMac, PageRun};
use crate::random;
use redis::cluster::{ClusterClient, ClusterConnection};
use redis::{
    Cmd, Connection, ErrorKind, FromRedisValue, IntoConnectionInfo, RedisError, RedisResult,
};
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// The number of pages of a hash.
const TAG_PAGES: u64 = 64;
/// The memory that the engine needs for a page: its allocator's next size above 4 KiB, key and
/// entry. It serves to estimate how many pages fit before any is stored.
const STORED_BYTES: u64 = 5300;
/// The timeout of the connect and of each command.
const PATIENCE: Duration = Duration::from_secs(5);
/// The time to live of pages that nobody renews: a client that is stopped for longer loses them.
const LIFE: Duration = Duration::from_secs(3600);
/// The interval between two renewals of all pages.
const RENEW_EVERY: Duration = Duration::from_secs(600);

/// A store in Redis or Valkey at `redis://host:port`. Several addresses belong to one cluster.
#[derive(Debug)]
pub struct RedisStore {
    shared: Arc<RedisState>,
    renewer: Option<JoinHandle<()>>,
}

struct RedisState {
    /// The addresses, with passwords: they must not be shown.
    urls: Vec<String>,
    /// The time to live of pages; `renew_every` is the interval of their renewal.
    life: Duration,
    renew_every: Duration,
    stopped: Mutex<bool>,
    stop: Condvar,
    is_cluster: bool,
    /// The prefix of all keys, drawn by each store so that no other store uses them.
    prefix: String,
    regions: Mutex<HashMap<RegionId, RedisRegion>>,
    next_region: AtomicU64,
}

impl std::fmt::Debug for RedisState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedisState").field("at", &self.label()).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct RedisRegion {
    pages: u64,
    /// The hashes into which pages were put.
    used: BTreeMap<u64, Life>,
}

/// The expiry of a hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Life {
    Limited,
    /// A discard may have emptied the hash, which deletes it. A new hash of that name has no limit
    /// yet.
    Unlimited,
}

enum RedisLink {
    Single(Box<Connection>),
    Cluster(Box<ClusterConnection>),
}

impl RedisStore {
    /// Connects, and checks that the engine does not evict keys.
    ///
    /// # Errors
    /// If the engine is not reachable, or may evict pages.
    pub fn connect(urls: &[String]) -> Result<RedisStore, StoreError> {
        RedisStore::connect_with(urls, LIFE, RENEW_EVERY)
    }

    /// Connects, for pages with the time to live `life` that are renewed every `renew_every`.
    ///
    /// # Errors
    /// As [`RedisStore::connect`].
    pub fn connect_with(
        urls: &[String],
        life: Duration,
        renew_every: Duration,
    ) -> Result<RedisStore, StoreError> {
        let cannot = |source| StoreError::Unreachable { server: label(urls), source };
        let random: [u8; 8] = random::bytes().map_err(cannot)?;
        let mut shared = RedisState {
            urls: urls.to_vec(),
            life,
            renew_every,
            stopped: Mutex::new(false),
            stop: Condvar::new(),
            is_cluster: false,
            prefix: format!("pagetax:{:016x}", u64::from_le_bytes(random)),
            regions: Mutex::default(),
            next_region: AtomicU64::new(1),
        };
        let first = shared.urls.first().ok_or(StoreError::BadRequest("no address of Redis"))?;
        let info: String = shared.ask_node(first, redis::cmd("INFO").arg("cluster"))?;
        shared.is_cluster = field(&info, "cluster_enabled") == Some("1");
        for node in shared.nodes()? {
            let info = shared.memory_info(&node)?;
            // Policies that evict only keys with a time to live would evict ours.
            let policy = field(&info, "maxmemory_policy").unwrap_or("unknown");
            if policy != "noeviction" {
                return Err(StoreError::Refused {
                    server: label(&[node]),
                    why: format!(
                        "its maxmemory-policy is {policy}, so it may drop pages; set it to \
                         noeviction"
                    ),
                });
            }
        }
        let shared = Arc::new(shared);
        let renewing = shared.clone();
        let renewer =
            crate::threads::spawn("pagetax-renew", move || renewing.renew()).map_err(cannot)?;
        Ok(RedisStore { shared, renewer: Some(renewer) })
    }
}

/// Returns the addresses as they may be shown: without user and password.
fn label(urls: &[String]) -> String {
    let shown = |url: &String| match url.as_str().into_connection_info() {
        Ok(info) => info.addr().to_string(),
        Err(_) => "an address that is none".into(),
    };
    urls.iter().map(shown).collect::<Vec<_>>().join(", ")
}

/// Returns the URL of another node of a cluster. It has the node's address, and the scheme and the
/// password of the given URL.
fn url_of_node(given: &str, address: &str) -> String {
    let (scheme, rest) = given.split_once("://").unwrap_or(("redis", given));
    match rest.split('/').next().and_then(|authority| authority.rsplit_once('@')) {
        Some((credentials, _)) => format!("{scheme}://{credentials}@{address}"),
        None => format!("{scheme}://{address}"),
    }
}

/// Returns a field of the reply to INFO.
fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    let of_line = |line: &'a str| line.strip_prefix(name)?.strip_prefix(':').map(str::trim_end);
    info.lines().find_map(of_line)
}

impl RedisState {
    fn label(&self) -> String {
        label(&self.urls)
    }

    /// Renews all pages at intervals until the store ends. A failed renewal is tried again at the
    /// next interval, well before the pages expire.
    fn renew(self: Arc<Self>) {
        let mut stopped = self.stopped.lock().unwrap_or_else(PoisonError::into_inner);
        while !*stopped {
            let waited = self.stop.wait_timeout(stopped, self.renew_every);
            stopped = waited.unwrap_or_else(PoisonError::into_inner).0;
            if !*stopped {
                drop(stopped);
                let _ = self.renew_once();
                stopped = self.stopped.lock().unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    fn renew_once(self: &Arc<Self>) -> Result<(), StoreError> {
        let tags: Vec<(RegionId, u64)> = self
            .regions()
            .iter()
            .flat_map(|(id, region)| region.used.keys().map(|tag| (*id, *tag)))
            .collect();
        let mut user = RedisSession::new(self.clone())?;
        tags.into_iter().try_for_each(|(region, tag)| user.renew(region, tag))
    }

    fn regions(&self) -> MutexGuard<'_, HashMap<RegionId, RedisRegion>> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn region_pages(&self, id: RegionId) -> Result<u64, StoreError> {
        self.regions().get(&id).map(|region| region.pages).ok_or(StoreError::NoRegion(id))
    }

    fn error(&self, error: RedisError) -> StoreError {
        let server = self.label();
        match error.kind() {
            ErrorKind::Io => StoreError::Unreachable { server, source: io::Error::other(error) },
            _ if error.code() == Some("OOM") => StoreError::Full { pages_asked: 1, pages_free: 0 },
            _ => StoreError::Refused { server, why: error.to_string() },
        }
    }

    fn open_node(&self, url: &str) -> Result<Connection, StoreError> {
        let open = || -> RedisResult<Connection> {
            let connection = redis::Client::open(url)?.get_connection_with_timeout(PATIENCE)?;
            connection.set_read_timeout(Some(PATIENCE))?;
            connection.set_write_timeout(Some(PATIENCE))?;
            Ok(connection)
        };
        open().map_err(|error| self.error(error))
    }

    fn ask_node<T: FromRedisValue>(&self, url: &str, command: &Cmd) -> Result<T, StoreError> {
        command.query(&mut self.open_node(url)?).map_err(|error| self.error(error))
    }

    fn memory_info(&self, url: &str) -> Result<String, StoreError> {
        self.ask_node(url, redis::cmd("INFO").arg("memory"))
    }

    /// Returns the addresses of all primaries.
    fn nodes(&self) -> Result<Vec<String>, StoreError> {
        let first = &self.urls[0];
        if !self.is_cluster {
            return Ok(vec![first.clone()]);
        }
        let nodes: String = self.ask_node(first, redis::cmd("CLUSTER").arg("NODES"))?;
        // Each line: id, host:port@bus, flags, …
        let primary = |line: &str| {
            let mut words = line.split(' ').skip(1);
            let (address, flags) = (words.next()?, words.next()?);
            let address = address.split('@').next()?;
            let usable = flags.contains("master") && !flags.contains("fail");
            usable.then(|| url_of_node(first, address))
        };
        Ok(nodes.lines().filter_map(primary).collect())
    }

    fn capacity(&self) -> Result<Capacity, StoreError> {
        let mut capacity = Capacity::default();
        for node in self.nodes()? {
            let info = self.memory_info(&node)?;
            let number = |name| field(&info, name).and_then(|text| text.parse::<u64>().ok());
            let limit = number("maxmemory").filter(|limit| *limit > 0);
            let limit = limit.or(number("total_system_memory")).unwrap_or(0);
            let used = number("used_memory").unwrap_or(limit);
            capacity.pages_total += limit / STORED_BYTES;
            capacity.pages_free += limit.saturating_sub(used) / STORED_BYTES;
        }
        Ok(capacity)
    }

    fn open(&self) -> Result<RedisLink, StoreError> {
        if !self.is_cluster {
            return Ok(RedisLink::Single(Box::new(self.open_node(&self.urls[0])?)));
        }
        let open = || -> RedisResult<ClusterConnection> {
            let connection = ClusterClient::new(self.urls.clone())?.get_connection()?;
            connection.set_read_timeout(Some(PATIENCE))?;
            connection.set_write_timeout(Some(PATIENCE))?;
            Ok(connection)
        };
        Ok(RedisLink::Cluster(Box::new(open().map_err(|error| self.error(error))?)))
    }

    /// Returns the key of the hash that has the pages of this tag.
    fn key(&self, region: RegionId, tag: u64) -> String {
        format!("{}:{region}:{tag}", self.prefix)
    }
}

impl RedisLink {
    fn run<T: FromRedisValue>(&mut self, command: &Cmd) -> RedisResult<T> {
        match self {
            RedisLink::Single(connection) => command.query(connection.as_mut()),
            RedisLink::Cluster(connection) => command.query(connection.as_mut()),
        }
    }
}

impl PageStore for RedisStore {
    fn describe(&self) -> String {
        let kind = if self.shared.is_cluster { "Redis cluster" } else { "Redis" };
        format!("{kind} at {}", self.shared.label())
    }

    fn capacity(&self) -> Result<Capacity, StoreError> {
        self.shared.capacity()
    }

    fn create_region(&self, pages: u64, overcommit: bool) -> Result<RegionId, StoreError> {
        let pages_free = self.shared.capacity()?.pages_free;
        if !overcommit && pages > pages_free {
            return Err(StoreError::Full { pages_asked: pages, pages_free });
        }
        let id = RegionId(self.shared.next_region.fetch_add(1, Ordering::Relaxed));
        self.shared.regions().insert(id, RedisRegion { pages, used: BTreeMap::new() });
        Ok(id)
    }

    fn drop_region(&self, id: RegionId) -> Result<(), StoreError> {
        let region = self.shared.regions().remove(&id).ok_or(StoreError::NoRegion(id))?;
        let mut user = RedisSession::new(self.shared.clone())?;
        region.used.keys().try_for_each(|tag| {
            // DEL, not UNLINK, so that the memory can be reused at once.
            user.run(redis::cmd("DEL").arg(user.shared.key(id, *tag)))
        })
    }

    fn reader(&self) -> Result<Box<dyn PageReader>, StoreError> {
        Ok(Box::new(RedisSession::new(self.shared.clone())?))
    }

    fn writer(&self) -> Result<Box<dyn PageWriter>, StoreError> {
        Ok(Box::new(RedisSession::new(self.shared.clone())?))
    }
}

impl Drop for RedisStore {
    /// Drops all regions, because no other process knows their keys.
    fn drop(&mut self) {
        *self.shared.stopped.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.shared.stop.notify_all();
        if let Some(renewer) = self.renewer.take() {
            let _ = renewer.join();
        }
        let regions: Vec<RegionId> = self.shared.regions().keys().copied().collect();
        for region in regions {
            let _ = self.drop_region(region);
        }
    }
}

/// The reader or writer of one thread.
struct RedisSession {
    shared: Arc<RedisState>,
    link: RedisLink,
}

impl RedisSession {
    fn new(shared: Arc<RedisState>) -> Result<RedisSession, StoreError> {
        Ok(RedisSession { link: shared.open()?, shared })
    }

    /// Runs a command, and repeats it on a new connection if the old one broke. All commands of
    /// this store are idempotent.
    fn run<T: FromRedisValue>(&mut self, command: &Cmd) -> Result<T, StoreError> {
        match self.link.run(command) {
            Err(error) if error.kind() == ErrorKind::Io => {
                self.link = self.shared.open()?;
                self.link.run(command).map_err(|error| self.shared.error(error))
            }
            done => done.map_err(|error| self.shared.error(error)),
        }
    }

    /// Deletes pages of one hash.
    fn delete(&mut self, region: RegionId, first: u64, count: u64) -> Result<(), StoreError> {
        let mut command = redis::cmd("HDEL");
        command.arg(self.shared.key(region, first / TAG_PAGES));
        (first..first + count).for_each(|page| {
            command.arg(page);
        });
        self.run(&command)
    }

    /// Extends the life of a hash.
    fn renew(&mut self, region: RegionId, tag: u64) -> Result<(), StoreError> {
        let (key, life_ms) = (self.shared.key(region, tag), self.shared.life.as_millis() as u64);
        self.run(redis::cmd("PEXPIRE").arg(key).arg(life_ms))
    }
}

/// Splits a run where hashes meet. Returns the first page and the count of each part.
fn by_tag(first: u64, count: u64) -> impl Iterator<Item = (u64, u64)> {
    let end = first + count;
    let mut next = first;
    std::iter::from_fn(move || {
        let seam = (next / TAG_PAGES + 1) * TAG_PAGES;
        let part = (next, end.min(seam) - next);
        next += part.1;
        (part.1 > 0).then_some(part)
    })
}

impl PageReader for RedisSession {
    fn get(
        &mut self,
        id: RegionId,
        first: u64,
        macs: &[PageMac],
        into: &mut [u8],
    ) -> Result<(), StoreError> {
        check_get(self.shared.region_pages(id)?, first, macs, into)?;
        let lost = |page, why: &str| StoreError::PageLost { region: id, page, why: why.into() };
        for (start, count) in by_tag(first, macs.len() as u64) {
            let mut command = redis::cmd("HMGET");
            command.arg(self.shared.key(id, start / TAG_PAGES));
            (start..start + count).for_each(|page| {
                command.arg(page);
            });
            let pages: Vec<Option<Vec<u8>>> = self.run(&command)?;
            if pages.len() as u64 != count {
                return Err(StoreError::Refused {
                    server: self.shared.label(),
                    why: format!("it was asked for {count} pages and answered {}", pages.len()),
                });
            }
            for (page, bytes) in (start..).zip(pages) {
                let bytes = bytes.ok_or_else(|| lost(page, "the engine does not have it"))?;
                let at = (page - first) as usize;
                if bytes.len() != PAGE_BYTES || PageMac::of(&bytes) != macs[at] {
                    return Err(lost(page, "its bytes have changed"));
                }
                into[at * PAGE_BYTES..][..PAGE_BYTES].copy_from_slice(&bytes);
            }
        }
        Ok(())
    }
}

impl PageWriter for RedisSession {
    fn put(&mut self, id: RegionId, runs: &[PutRun<'_>]) -> Result<(), StoreError> {
        check_put(self.shared.region_pages(id)?, runs)?;
        for run in runs {
            for (start, count) in by_tag(run.first, run.macs.len() as u64) {
                let pages = &run.pages[(start - run.first) as usize * PAGE_BYTES..];
                let tag = start / TAG_PAGES;
                let mut command = redis::cmd("HSET");
                command.arg(self.shared.key(id, tag));
                for (page, bytes) in (start..start + count).zip(pages.chunks_exact(PAGE_BYTES)) {
                    command.arg(page).arg(bytes);
                }
                let mut regions = self.shared.regions();
                let life =
                    regions.get_mut(&id).and_then(|region| region.used.insert(tag, Life::Limited));
                drop(regions);
                self.run::<()>(&command)?;
                if life != Some(Life::Limited) {
                    self.renew(id, tag)?;
                }
            }
        }
        Ok(())
    }

    fn discard(&mut self, id: RegionId, runs: &[PageRun]) -> Result<(), StoreError> {
        check_discard(self.shared.region_pages(id)?, runs)?;
        for run in runs {
            for (start, count) in by_tag(run.first, run.count) {
                let tag = start / TAG_PAGES;
                let mut regions = self.shared.regions();
                let life = regions.get_mut(&id).and_then(|region| region.used.get_mut(&tag));
                let is_used = life.map(|life| *life = Life::Unlimited).is_some();
                drop(regions);
                if is_used {
                    self.delete(id, start, count)?;
                }
            }
        }
        Ok(())
    }
}
