//! Pages in Redis or Valkey, one server or a cluster, for those who run one already: replicas and
//! failover are its own.
//!
//! Invariants: an engine that may evict our keys by itself is refused; keys of one region and
//! neighbourhood lie in one slot (hash tag), so a run is one command or two.

use super::{
    Capacity, PageReader, PageStore, PageWriter, PutRun, RegionId, StoreError, check_discard,
    check_get, check_put,
};
use crate::page::{PAGE_BYTES, PageRun, PageSum};
use crate::secret;
use redis::cluster::{ClusterClient, ClusterConnection};
use redis::{Cmd, Connection, ErrorKind, FromRedisValue, RedisError, RedisResult};
use std::collections::{BTreeSet, HashMap};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Pages whose keys share a hash tag.
const TAG_PAGES: u64 = 64;
/// What the engine needs for a page: its allocator's next size above 4 KiB, key and entry. Used to
/// tell how many pages fit before any is stored.
const STORED_BYTES: u64 = 5300;
/// For connecting and for each command.
const PATIENCE: Duration = Duration::from_secs(5);

/// Where the engine is: `redis://host:port`; several addresses are a cluster's.
#[derive(Debug)]
pub struct RedisStore {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    urls: Vec<String>,
    is_cluster: bool,
    /// Drawn by each store, so that its keys are nobody else's.
    prefix: String,
    regions: Mutex<HashMap<RegionId, Region>>,
    next_region: AtomicU64,
}

#[derive(Debug)]
struct Region {
    pages: u64,
    /// Tags under which something was put.
    used: BTreeSet<u64>,
}

enum Link {
    Single(Box<Connection>),
    Cluster(Box<ClusterConnection>),
}

impl RedisStore {
    /// Connects, and looks whether the engine can be trusted to keep what it has.
    ///
    /// # Errors
    /// When it cannot be reached, or may evict pages.
    pub fn connect(urls: &[String]) -> Result<RedisStore, StoreError> {
        let cannot = |source| StoreError::Unreachable { server: urls.join(","), source };
        let random: [u8; 8] = secret::random().map_err(cannot)?;
        let mut shared = Shared {
            urls: urls.to_vec(),
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
            // Policies of this kind evict only keys that expire; ours do not.
            let policy = field(&info, "maxmemory_policy").unwrap_or("unknown");
            if policy != "noeviction" && !policy.starts_with("volatile-") {
                return Err(StoreError::Refused {
                    server: node,
                    why: format!(
                        "its maxmemory-policy is {policy}, so it may drop pages; set it to \
                         noeviction"
                    ),
                });
            }
        }
        Ok(RedisStore { shared: Arc::new(shared) })
    }
}

/// A field of what INFO says.
fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    let of_line = |line: &'a str| line.strip_prefix(name)?.strip_prefix(':').map(str::trim_end);
    info.lines().find_map(of_line)
}

impl Shared {
    fn regions(&self) -> MutexGuard<'_, HashMap<RegionId, Region>> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn region_pages(&self, id: RegionId) -> Result<u64, StoreError> {
        self.regions().get(&id).map(|region| region.pages).ok_or(StoreError::NoRegion(id))
    }

    fn error(&self, error: RedisError) -> StoreError {
        let server = self.urls.join(",");
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

    /// Addresses of all primaries.
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
            usable.then(|| format!("redis://{address}"))
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

    fn open(&self) -> Result<Link, StoreError> {
        if !self.is_cluster {
            return Ok(Link::Single(Box::new(self.open_node(&self.urls[0])?)));
        }
        let open = || -> RedisResult<ClusterConnection> {
            let connection = ClusterClient::new(self.urls.clone())?.get_connection()?;
            connection.set_read_timeout(Some(PATIENCE))?;
            connection.set_write_timeout(Some(PATIENCE))?;
            Ok(connection)
        };
        Ok(Link::Cluster(Box::new(open().map_err(|error| self.error(error))?)))
    }

    fn key(&self, region: RegionId, page: u64) -> String {
        format!("{{{}:{region}:{}}}:{page}", self.prefix, page / TAG_PAGES)
    }
}

impl Link {
    fn run<T: FromRedisValue>(&mut self, command: &Cmd) -> RedisResult<T> {
        match self {
            Link::Single(connection) => command.query(connection.as_mut()),
            Link::Cluster(connection) => command.query(connection.as_mut()),
        }
    }
}

impl PageStore for RedisStore {
    fn describe(&self) -> String {
        let kind = if self.shared.is_cluster { "Redis cluster" } else { "Redis" };
        format!("{kind} at {}", self.shared.urls.join(", "))
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
        self.shared.regions().insert(id, Region { pages, used: BTreeSet::new() });
        Ok(id)
    }

    fn drop_region(&self, id: RegionId) -> Result<(), StoreError> {
        let region = self.shared.regions().remove(&id).ok_or(StoreError::NoRegion(id))?;
        let mut user = User::new(self.shared.clone())?;
        region.used.iter().try_for_each(|tag| user.delete(id, *tag * TAG_PAGES, TAG_PAGES))
    }

    fn reader(&self) -> Result<Box<dyn PageReader>, StoreError> {
        Ok(Box::new(User::new(self.shared.clone())?))
    }

    fn writer(&self) -> Result<Box<dyn PageWriter>, StoreError> {
        Ok(Box::new(User::new(self.shared.clone())?))
    }
}

impl Drop for RedisStore {
    /// Nobody else knows the keys.
    fn drop(&mut self) {
        let regions: Vec<RegionId> = self.shared.regions().keys().copied().collect();
        for region in regions {
            let _ = self.drop_region(region);
        }
    }
}

/// One thread's reader or writer.
struct User {
    shared: Arc<Shared>,
    link: Link,
}

impl User {
    fn new(shared: Arc<Shared>) -> Result<User, StoreError> {
        Ok(User { link: shared.open()?, shared })
    }

    /// Runs a command, again on a new connection if the old one broke. All of ours may be repeated.
    fn run<T: FromRedisValue>(&mut self, command: &Cmd) -> Result<T, StoreError> {
        match self.link.run(command) {
            Err(error) if error.kind() == ErrorKind::Io => {
                self.link = self.shared.open()?;
                self.link.run(command).map_err(|error| self.shared.error(error))
            }
            done => done.map_err(|error| self.shared.error(error)),
        }
    }

    /// Deletes at once, so that the room can be used at once.
    fn delete(&mut self, region: RegionId, first: u64, count: u64) -> Result<(), StoreError> {
        let mut command = redis::cmd("DEL");
        (first..first + count).for_each(|page| {
            command.arg(self.shared.key(region, page));
        });
        self.run(&command)
    }
}

/// Cuts a run where tags meet: first page and count of each part.
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

impl PageReader for User {
    fn get(
        &mut self,
        id: RegionId,
        first: u64,
        sums: &[PageSum],
        into: &mut [u8],
    ) -> Result<(), StoreError> {
        check_get(self.shared.region_pages(id)?, first, sums, into)?;
        let lost = |page, why: &str| StoreError::PageLost { region: id, page, why: why.into() };
        for (start, count) in by_tag(first, sums.len() as u64) {
            let mut command = redis::cmd("MGET");
            (start..start + count).for_each(|page| {
                command.arg(self.shared.key(id, page));
            });
            let pages: Vec<Option<Vec<u8>>> = self.run(&command)?;
            for (page, bytes) in (start..).zip(pages) {
                let bytes = bytes.ok_or_else(|| lost(page, "the engine does not have it"))?;
                let at = (page - first) as usize;
                if bytes.len() != PAGE_BYTES || PageSum::of(&bytes) != sums[at] {
                    return Err(lost(page, "its bytes have changed"));
                }
                into[at * PAGE_BYTES..][..PAGE_BYTES].copy_from_slice(&bytes);
            }
        }
        Ok(())
    }
}

impl PageWriter for User {
    fn put(&mut self, id: RegionId, runs: &[PutRun<'_>]) -> Result<(), StoreError> {
        check_put(self.shared.region_pages(id)?, runs)?;
        for run in runs {
            for (start, count) in by_tag(run.first, run.sums.len() as u64) {
                let pages = &run.pages[(start - run.first) as usize * PAGE_BYTES..];
                let mut command = redis::cmd("MSET");
                for (page, bytes) in (start..start + count).zip(pages.chunks_exact(PAGE_BYTES)) {
                    command.arg(self.shared.key(id, page)).arg(bytes);
                }
                if let Some(region) = self.shared.regions().get_mut(&id) {
                    region.used.insert(start / TAG_PAGES);
                }
                self.run::<()>(&command)?;
            }
        }
        Ok(())
    }

    fn discard(&mut self, id: RegionId, runs: &[PageRun]) -> Result<(), StoreError> {
        check_discard(self.shared.region_pages(id)?, runs)?;
        for run in runs {
            for (start, count) in by_tag(run.first, run.count) {
                let tag = start / TAG_PAGES;
                let regions = self.shared.regions();
                let is_used = regions.get(&id).is_some_and(|region| region.used.contains(&tag));
                drop(regions);
                if is_used {
                    self.delete(id, start, count)?;
                }
            }
        }
        Ok(())
    }
}
