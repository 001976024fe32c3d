//! Pages in Redis or Valkey, one server or a cluster, for users who run one already. The engine
//! does its own replication and failover.
//!
//! Invariants: the client refuses an engine that may evict its keys. Neighbouring pages are in one
//! hash, so that a run is one command or two. Keys expire unless this process renews them, so the
//! keys of a crashed process do not stay for ever. No text that is shown contains the password.
//!
//! The engine acknowledges a put before its replicas have it, so a failover may lose pages: `WAIT`
//! does not change that. With copies, each hash has as many keys, on different masters. The MAC
//! shows a loss; another copy then serves the page, and without one it is reported as lost.

mod address;
mod forked;
mod links;
mod placement;
mod renewer;
mod session;

pub use address::EngineTls;

use super::{Capacity, ChildStore, PageReader, PageStore, PageWriter, RegionId, StoreError};
use crate::client::cluster::UNREACHABLE;
use crate::pager::Log;
use crate::random;
use address::Address;
use placement::{Salts, SlotMap};
use redis::{Cmd, ErrorKind, FromRedisValue, RedisError, ServerErrorKind};
use renewer::Move;
use session::{RedisSession, on_key};
use std::collections::{BTreeMap, HashMap};
use std::error::Error;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The most copies of a page.
pub const COPIES_MAX: usize = 3;
/// The number of pages of a hash.
const TAG_PAGES: u64 = 64;
/// The memory that the engine needs for a page: its allocator's next size above 4 KiB, key and
/// entry. It serves to estimate how many pages fit before any is stored.
const STORED_BYTES: u64 = 5300;
/// The time to live of pages whose process is about to end, and the interval of their renewal until then.
const LIFE_AT_END: Duration = Duration::from_secs(30);
const RENEW_AT_END: Duration = Duration::from_secs(5);
/// The time after which another copy is asked, and puts go to other masters. The cluster itself replaces a
/// master that hangs after 15 s.
const HEDGE_AFTER: Duration = Duration::from_millis(500);
/// The most commands that are under way at a time when whole regions are dropped or renewed.
const BATCH: usize = 256;

/// The settings of a store in Redis or Valkey.
#[derive(Clone)]
pub struct EngineOptions {
    /// The address: `valkey://[[USER]:PASSWORD@]HOST[:PORT],…`. Several hosts belong to one cluster.
    /// `redis://` is the same; `valkeys://` and `rediss://` ask for TLS.
    pub url: String,
    /// The number of copies of each page, on as many masters: 1 to [`COPIES_MAX`].
    pub copies: usize,
    /// The files for TLS.
    pub tls: EngineTls,
    /// True to use servers beyond loopback without TLS. Anybody on the path can then read and
    /// change the pages.
    pub insecure: bool,
    /// The timeout of the connect and of each command.
    pub answer_within: Duration,
    /// The time without a reply after which an access to a page fails.
    pub unreachable: Duration,
    /// The time to live of pages that nobody renews: a client that is stopped for longer loses them.
    pub life: Duration,
    /// The interval between two renewals of all pages.
    pub renew_every: Duration,
    /// The interval between two looks at the slots of the cluster, if there are copies.
    pub check_every: Duration,
    /// The receiver of log lines, such as those on copies that are moved.
    pub log: Option<Log>,
}

impl EngineOptions {
    /// Returns the default settings for this address.
    pub fn new(url: impl Into<String>) -> EngineOptions {
        EngineOptions {
            url: url.into(),
            copies: 1,
            tls: EngineTls::default(),
            insecure: false,
            answer_within: Duration::from_secs(5),
            unreachable: UNREACHABLE,
            life: Duration::from_secs(3600),
            renew_every: Duration::from_secs(600),
            check_every: Duration::from_secs(1),
            log: None,
        }
    }
}

/// A store in Redis or Valkey.
#[derive(Debug)]
pub struct RedisStore {
    shared: Arc<RedisState>,
    renewer: Option<crate::threads::RunningThread>,
}

struct RedisState {
    address: Address,
    options: EngineOptions,
    stopped: Mutex<bool>,
    stop: Condvar,
    /// The name that the engine gives itself.
    engine: &'static str,
    is_cluster: bool,
    /// A part of all keys that decides on their slots. A store draws it, and those of its forked children
    /// have it too.
    family: u64,
    /// A part of all keys that each store draws, so that no other store uses them.
    own: u64,
    regions: Mutex<HashMap<RegionId, RedisRegion>>,
    next_region: AtomicU64,
    /// True once the process is about to end.
    is_ending: AtomicBool,
    /// The slots of the cluster, as they were last seen.
    slots: Mutex<Arc<SlotMap>>,
    /// The masters that did not answer, and have not since. With copies, they are avoided.
    suspects: Mutex<Vec<(String, u16)>>,
    /// The hashes that puts have moved off them, and whose other pages are to follow.
    moves: Mutex<Vec<Move>>,
}

impl std::fmt::Debug for RedisState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedisState").field("at", &self.address.label()).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct RedisRegion {
    pages: u64,
    /// The hashes into which pages were put, by tag.
    used: BTreeMap<u64, Hash>,
}

/// A hash of up to [`TAG_PAGES`] pages, and its copies.
#[derive(Debug, Clone, Copy, Default)]
struct Hash {
    /// True if all copies expire. A discard may have emptied the hash, which deletes it. A new hash
    /// of that name has no limit yet.
    expires: bool,
    /// The keys of the copies.
    salts: Salts,
    /// The earlier keys, until all pages are copied to those of today.
    earlier: Option<Salts>,
    /// The number of puts that are under way. Copies do not move meanwhile.
    puts: u32,
    /// The number of losses of a master's pages that the places of the copies take into account.
    losses_seen: u32,
}

impl Hash {
    /// Returns true if no put to the keys of today is under way, and all pages are there.
    fn may_move(self) -> bool {
        self.puts == 0 && self.earlier.is_none()
    }

    fn has_moved(self, since: Hash) -> bool {
        (self.salts, self.earlier) != (since.salts, since.earlier)
    }
}

/// Returns true if the two sides did not agree on TLS, such as on a certificate.
fn is_of_tls(error: &RedisError) -> bool {
    let inner = error.source().and_then(|e| e.downcast_ref::<Arc<dyn Error + Send + Sync>>());
    let io = inner.and_then(|inner| inner.downcast_ref::<io::Error>());
    io.and_then(io::Error::get_ref).is_some_and(|inner| inner.is::<rustls::Error>())
}

impl RedisStore {
    /// Connects, and checks that the engine does not evict keys.
    ///
    /// # Errors
    /// If the engine is not reachable, may evict pages, or has fewer masters than there are copies.
    pub fn connect(options: EngineOptions) -> Result<RedisStore, StoreError> {
        let address = Address::parse(&options.url, &options.tls, options.answer_within)?;
        let server = || address.label();
        let cannot = |source| StoreError::Unreachable { server: server(), source };
        let family = drawn().map_err(cannot)?;
        let mut shared = RedisState::new(address.clone(), options, family).map_err(cannot)?;
        shared.check_path(&address)?;
        let info: String = shared.ask_node(&address, redis::cmd("INFO").arg("server"))?;
        if field(&info, "server_name") == Some("valkey") {
            shared.engine = "Valkey";
        }
        let info: String = shared.ask_node(&address, redis::cmd("INFO").arg("cluster"))?;
        shared.is_cluster = field(&info, "cluster_enabled") == Some("1");
        let nodes = shared.nodes()?;
        let masters = if shared.is_cluster { shared.slots().masters_with_slots() } else { 1 };
        if masters < shared.options.copies {
            let why = format!(
                "it has {masters} masters with slots, and {} copies need as many; use fewer copies or a larger \
                 cluster",
                shared.options.copies
            );
            return Err(StoreError::Refused { server: server(), why });
        }
        nodes.iter().try_for_each(|node| shared.check_node(node))?;
        RedisStore::start(shared)
    }

    /// Starts the thread that looks after the pages.
    fn start(shared: RedisState) -> Result<RedisStore, StoreError> {
        let server = shared.address.label();
        let shared = Arc::new(shared);
        let renewing = shared.clone();
        let renewer = crate::threads::spawn("pagetax-renew", move || renewing.renew())
            .map_err(|source| StoreError::Unreachable { server, source })?;
        Ok(RedisStore { shared, renewer: Some(renewer) })
    }
}

/// Returns a random number.
fn drawn() -> io::Result<u64> {
    random::bytes().map(u64::from_le_bytes)
}

/// Returns a field of the reply to INFO.
fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    let of_line = |line: &'a str| line.strip_prefix(name)?.strip_prefix(':').map(str::trim_end);
    info.lines().find_map(of_line)
}

impl RedisState {
    /// Returns the state of a store that has not asked the engine anything.
    fn new(address: Address, options: EngineOptions, family: u64) -> io::Result<RedisState> {
        Ok(RedisState {
            engine: "Redis",
            is_cluster: false,
            family,
            own: drawn()?,
            regions: Mutex::default(),
            next_region: AtomicU64::new(1),
            stopped: Mutex::new(false),
            stop: Condvar::new(),
            is_ending: AtomicBool::new(false),
            slots: Mutex::new(Arc::new(SlotMap::parse(""))),
            suspects: Mutex::default(),
            moves: Mutex::default(),
            address,
            options,
        })
    }

    /// Refuses servers beyond loopback without TLS.
    fn check_path(&self, address: &Address) -> Result<(), StoreError> {
        match self.options.insecure || address.is_tls() || address.is_loopback() {
            true => Ok(()),
            false => Err(StoreError::Insecure { server: address.label() }),
        }
    }

    /// Refuses a server that may evict pages.
    fn check_node(&self, node: &Address) -> Result<(), StoreError> {
        self.check_path(node)?;
        let info = self.memory_info(node)?;
        // Policies that evict only keys with a time to live would evict ours.
        match field(&info, "maxmemory_policy").unwrap_or("unknown") {
            "noeviction" => Ok(()),
            policy => Err(StoreError::Refused {
                server: node.label(),
                why: format!(
                    "its maxmemory-policy is {policy}, so it may drop pages; set it to noeviction"
                ),
            }),
        }
    }

    fn regions(&self) -> MutexGuard<'_, HashMap<RegionId, RedisRegion>> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn slots(&self) -> Arc<SlotMap> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the time for which a command waits for its reply, if there is another way.
    fn hedge_after(&self) -> Duration {
        match self.options.copies {
            1 => self.options.answer_within,
            _ => HEDGE_AFTER.min(self.options.answer_within),
        }
    }

    fn suspects(&self) -> MutexGuard<'_, Vec<(String, u16)>> {
        self.suspects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a master did not answer.
    fn suspect(&self, place: (String, u16)) {
        let mut suspects = self.suspects();
        if self.options.copies > 1 && !suspects.contains(&place) {
            suspects.push(place);
        }
    }

    /// Returns true if there are copies, and this key has no working master or one that did not answer the
    /// last time.
    fn is_suspect(&self, key: &str) -> bool {
        self.options.copies > 1
            && self.slots().place_of(key).is_none_or(|place| self.suspects().contains(place))
    }

    /// Asks the cluster which master has which slots.
    fn look_at_slots(&self) -> Result<(), StoreError> {
        let mut known = self.slots().masters.clone();
        let suspects = self.suspects().clone();
        known.sort_by_key(|place| suspects.contains(place));
        let known = known.iter().map(|(host, port)| self.address.of_node(host, *port));
        let nodes = known.chain([self.address.clone()]);
        let mut answer = Err(self.unreachable("it has no servers"));
        for node in nodes {
            let node = node.within(self.hedge_after());
            answer = self.ask_node::<String>(&node, redis::cmd("CLUSTER").arg("NODES"));
            if answer.is_ok() {
                break;
            }
        }
        let now = SlotMap::parse(&answer?);
        *self.slots.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(now);
        Ok(())
    }

    fn region_pages(&self, id: RegionId) -> Result<u64, StoreError> {
        self.regions().get(&id).map(|region| region.pages).ok_or(StoreError::NoRegion(id))
    }

    /// Returns the error for the caller. One that may pass is [`StoreError::Unreachable`], which the
    /// pager waits for.
    fn error(&self, error: RedisError) -> StoreError {
        let may_pass = match error.kind() {
            ErrorKind::Io | ErrorKind::AuthenticationFailed => true,
            ErrorKind::Server(kind) => matches!(
                kind,
                ServerErrorKind::BusyLoading
                    | ServerErrorKind::Moved
                    | ServerErrorKind::Ask
                    | ServerErrorKind::TryAgain
                    | ServerErrorKind::ClusterDown
                    | ServerErrorKind::MasterDown
                    | ServerErrorKind::ReadOnly
            ),
            _ => false,
        };
        match error.code() {
            Some("OOM") => StoreError::Full { pages_asked: 1, pages_free: 0 },
            _ if may_pass => self.unreachable(error.to_string()),
            _ => StoreError::Refused { server: self.address.label(), why: error.to_string() },
        }
    }

    /// Returns the error of a store that may answer again.
    fn unreachable(&self, why: impl Into<Box<dyn Error + Send + Sync>>) -> StoreError {
        StoreError::Unreachable { server: self.address.label(), source: io::Error::other(why) }
    }

    fn ask_node<T: FromRedisValue>(&self, node: &Address, command: &Cmd) -> Result<T, StoreError> {
        let ask = || command.query(&mut node.connect()?);
        ask().map_err(|error: RedisError| match error.kind() {
            // At the start, a wrong password or certificate is a mistake.
            ErrorKind::AuthenticationFailed => {
                StoreError::Refused { server: node.label(), why: error.to_string() }
            }
            _ if is_of_tls(&error) => StoreError::Refused {
                server: node.label(),
                why: format!("{error}; check --tls-ca, --tls-cert and the name in the address"),
            },
            _ => self.error(error),
        })
    }

    fn memory_info(&self, node: &Address) -> Result<String, StoreError> {
        self.ask_node(node, redis::cmd("INFO").arg("memory"))
    }

    /// Returns the addresses of all masters.
    fn nodes(&self) -> Result<Vec<Address>, StoreError> {
        if !self.is_cluster {
            return Ok(vec![self.address.clone()]);
        }
        self.look_at_slots()?;
        let of = |(host, port): &(String, u16)| self.address.of_node(host, *port);
        Ok(self.slots().masters.iter().map(of).collect())
    }

    fn capacity(&self) -> Result<Capacity, StoreError> {
        let mut capacity = Capacity::default();
        let stored = STORED_BYTES * self.options.copies as u64;
        for node in self.nodes()? {
            let info = self.memory_info(&node)?;
            let number = |name| field(&info, name).and_then(|text| text.parse::<u64>().ok());
            let limit = number("maxmemory").filter(|limit| *limit > 0);
            let limit = limit.or(number("total_system_memory")).unwrap_or(0);
            let used = number("used_memory").unwrap_or(limit);
            capacity.pages_total += limit / stored;
            capacity.pages_free += limit.saturating_sub(used) / stored;
        }
        Ok(capacity)
    }

    /// Returns the key of one copy of the hash that has the pages of this tag.
    fn key(&self, region: RegionId, tag: u64, salt: u8) -> String {
        // The slot is that of the part between the braces, which a child's key has too.
        format!("pagetax:{{{:016x}:{region}:{tag}:{salt}}}:{:016x}", self.family, self.own)
    }

    /// Returns the keys of all copies of a hash.
    fn keys(&self, region: RegionId, tag: u64, salts: Salts) -> Vec<String> {
        salts[..self.options.copies].iter().map(|salt| self.key(region, tag, *salt)).collect()
    }

    /// Returns the keys of all copies that may have pages of a hash: those of today first, and those on
    /// suspects last.
    fn keys_to_read(&self, region: RegionId, tag: u64, hash: Hash) -> Vec<String> {
        let mut keys = self.keys(region, tag, hash.salts);
        for key in hash.earlier.map(|salts| self.keys(region, tag, salts)).unwrap_or_default() {
            if !keys.contains(&key) {
                keys.push(key);
            }
        }
        if keys.len() > 1 {
            keys.sort_by_cached_key(|key| self.is_suspect(key));
        }
        keys
    }

    /// Returns keys on different masters for a hash, none of them `avoided`. Keeps those of `before`, if
    /// their slots are not `distrusted`.
    fn place(
        &self,
        region: RegionId,
        tag: u64,
        before: Option<Salts>,
        distrusted: &[bool],
        avoided: &[(String, u16)],
    ) -> Option<Salts> {
        match self.options.copies {
            1 => Some(before.unwrap_or_default()),
            copies => {
                let key = |salt| self.key(region, tag, salt);
                self.slots().place(copies, before, distrusted, avoided, key)
            }
        }
    }

    /// Returns a hash with the keys to put it to. If a copy is on a suspect and there is another master, it
    /// leaves: the hash's other pages follow.
    fn place_to_put(&self, region: RegionId, tag: u64, known: Option<Hash>) -> Option<Hash> {
        let suspects = self.suspects().clone();
        let Some(mut hash) = known else {
            let placed = self.place(region, tag, None, &[], &suspects);
            let placed = placed.or_else(|| self.place(region, tag, None, &[], &[]));
            return placed.map(|salts| Hash { salts, ..Hash::default() });
        };
        let has_copies = self.options.copies > 1;
        let is_held_up =
            || self.keys(region, tag, hash.salts).iter().any(|key| self.is_suspect(key));
        if has_copies && hash.may_move() && is_held_up() {
            let after = self.place(region, tag, Some(hash.salts), &[], &suspects);
            if let Some(after) = after.filter(|after| *after != hash.salts) {
                let moved = self.give_keys(region, tag, &mut hash, after);
                self.moves.lock().unwrap_or_else(PoisonError::into_inner).push(moved);
            }
        }
        Some(hash)
    }

    /// Returns the hash of a tag as it is now; the default for one without pages.
    fn hash(&self, region: RegionId, tag: u64) -> Hash {
        let regions = self.regions();
        regions.get(&region).and_then(|region| region.used.get(&tag)).copied().unwrap_or_default()
    }

    /// Returns the time to live of pages.
    fn life(&self) -> Duration {
        match self.is_ending.load(Ordering::Relaxed) {
            true => LIFE_AT_END.min(self.options.life),
            false => self.options.life,
        }
    }

    fn log(&self, line: &str) {
        if let Some(log) = &self.options.log {
            log(line);
        }
    }
}

impl PageStore for RedisStore {
    fn describe(&self) -> String {
        let shared = &self.shared;
        let kind = if shared.is_cluster { " cluster" } else { "" };
        let copies = match shared.options.copies {
            1 => String::new(),
            copies => format!("{copies} copies on "),
        };
        format!("{copies}{}{kind} at {}", shared.engine, shared.address.label())
    }

    fn unreachable_limit(&self) -> Option<Duration> {
        Some(self.shared.options.unreachable)
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
        let shared = &self.shared;
        let region = shared.regions().remove(&id).ok_or(StoreError::NoRegion(id))?;
        let mut session = RedisSession::new(shared.clone());
        let keys: Vec<String> = region
            .used
            .iter()
            .flat_map(|(tag, hash)| shared.keys_to_read(id, *tag, *hash))
            .collect();
        // DEL, not UNLINK, so that the memory can be reused at once.
        session.run_each(&keys, |key| on_key("DEL", key))
    }

    fn drop_region_at_end(&self, _: RegionId) {
        self.shared.is_ending.store(true, Ordering::Relaxed);
        let _ = self.shared.renew_once();
        self.shared.stop.notify_all();
    }

    fn fork(&self, region: RegionId) -> Result<ChildStore, StoreError> {
        self.shared.fork(region)
    }

    fn reader(&self) -> Result<Box<dyn PageReader>, StoreError> {
        Ok(Box::new(RedisSession::new(self.shared.clone())))
    }

    fn writer(&self) -> Result<Box<dyn PageWriter>, StoreError> {
        Ok(Box::new(RedisSession::new(self.shared.clone())))
    }
}

impl Drop for RedisStore {
    /// Drops all regions, because no other process knows their keys.
    fn drop(&mut self) {
        *self.shared.stopped.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.shared.stop.notify_all();
        if let Some(renewer) = self.renewer.take() {
            renewer.join();
        }
        let regions: Vec<RegionId> = self.shared.regions().keys().copied().collect();
        for region in regions {
            let _ = self.drop_region(region);
        }
    }
}
