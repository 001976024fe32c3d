//! The settings that `pagetax remote` passes to the library that it preloads. They are in the
//! environment, so that they survive exec.

use crate::client::cluster::{self, Cluster};
use crate::pager::{EvictionMethod, KeepAwake, Log};
use crate::store::embedded::EmbeddedStore;
use crate::store::redis::{EngineOptions, EngineTls, RedisStore};
use crate::store::{PageStore, StoreError};
use crate::tls::{ClientTls, Files};
use pagetax_core::units::Bytes;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

const RESIDENT: &str = "PAGETAX_REMOTE_RESIDENT";
const ADDRESS_SPACE: &str = "PAGETAX_REMOTE_ADDRESS_SPACE";
const SPIN_US: &str = "PAGETAX_REMOTE_SPIN_US";
const EVICTION: &str = "PAGETAX_REMOTE_EVICTION";
const AWAKE: &str = "PAGETAX_REMOTE_AWAKE";
const STATS: &str = "PAGETAX_REMOTE_STATS";
const EMBEDDED: &str = "PAGETAX_REMOTE_EMBEDDED";
const STORE: &str = "PAGETAX_REMOTE_STORE";
const SERVERS: &str = "PAGETAX_REMOTE_SERVERS";
const DISCOVER: &str = "PAGETAX_REMOTE_DISCOVER";
const COPIES: &str = "PAGETAX_REMOTE_COPIES";
const UNREACHABLE_MS: &str = "PAGETAX_REMOTE_UNREACHABLE_MS";
const TLS_CERTIFICATE: &str = "PAGETAX_REMOTE_TLS_CERT";
const TLS_KEY: &str = "PAGETAX_REMOTE_TLS_KEY";
const TLS_AUTHORITY: &str = "PAGETAX_REMOTE_TLS_CA";
const TLS_NAME: &str = "PAGETAX_REMOTE_TLS_NAME";
const INSECURE: &str = "PAGETAX_REMOTE_INSECURE";
const COMPRESS_TLS: &str = "PAGETAX_REMOTE_COMPRESS_TLS";
const PROGRAM: &str = "PAGETAX_REMOTE_PROGRAM";
const LAYOUT_ONLY: &str = "PAGETAX_REMOTE_LAYOUT_ONLY";

/// The names of all variables that carry settings.
pub const VARIABLES: [&str; 20] = [
    RESIDENT,
    ADDRESS_SPACE,
    SPIN_US,
    EVICTION,
    AWAKE,
    STATS,
    EMBEDDED,
    STORE,
    SERVERS,
    DISCOVER,
    COPIES,
    UNREACHABLE_MS,
    TLS_CERTIFICATE,
    TLS_KEY,
    TLS_AUTHORITY,
    TLS_NAME,
    INSECURE,
    COMPRESS_TLS,
    PROGRAM,
    LAYOUT_ONLY,
];

/// The memory servers to use, and the settings of their client.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ServerSettings {
    /// The hosts, with ports or without.
    pub named: Vec<String>,
    /// True to look for more servers on the local network.
    pub discover: bool,
    /// The number of replicas of each page, on as many servers.
    pub copies: usize,
    /// The time without a reply after which the client stops waiting for a server.
    pub unreachable: Duration,
    /// The files for mutual TLS; `None` without TLS.
    pub tls: Option<Files>,
    /// The name in the servers' certificates, if it is not the host's.
    pub tls_name: Option<String>,
    /// True to use servers beyond loopback without TLS, on a trusted network.
    pub insecure: bool,
    /// True to compress writes over slow links with TLS, too: see
    /// [`ClusterOptions::compress_tls`](cluster::ClusterOptions::compress_tls).
    pub compress_tls: bool,
}

/// A Redis or Valkey server or cluster to use, and the settings of its client.
#[derive(Clone, PartialEq, Eq)]
pub struct EngineSettings {
    /// The address, as [`EngineOptions::url`]. It may have a password, and must not be shown.
    pub url: String,
    /// The number of copies of each page, on as many masters.
    pub copies: usize,
    /// The time without a reply after which an access to a page fails.
    pub unreachable: Duration,
    /// The files for TLS.
    pub tls: EngineTls,
    /// True to use servers beyond loopback without TLS, on a trusted network.
    pub insecure: bool,
}

impl std::fmt::Debug for EngineSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineSettings").field("copies", &self.copies).finish_non_exhaustive()
    }
}

/// The store that pages are evicted to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreSettings {
    /// Compressed inside the process, in at most so many bytes.
    Inside(Bytes),
    /// On our own memory servers.
    Servers(ServerSettings),
    /// In Redis or Valkey.
    Engine(EngineSettings),
}

impl Default for StoreSettings {
    fn default() -> StoreSettings {
        StoreSettings::Inside(Bytes(64 << 30))
    }
}

/// The settings of a process that is paged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// The largest resident set of each process, in bytes.
    pub resident: Bytes,
    /// The size of the address space of the region, at most 16 TiB.
    pub address_space: Bytes,
    /// The time for which handlers poll for the next fault before they sleep.
    pub spin: Duration,
    /// The method by which pages are evicted.
    pub eviction_method: EvictionMethod,
    /// The time for which idle CPUs are kept awake.
    pub keep_awake: KeepAwake,
    /// The store to evict to.
    pub store: StoreSettings,
    /// True to print at the end what was paged.
    pub stats: bool,
    /// The number of the process that was to be paged. Other processes inherited these settings
    /// from it.
    pub program: Option<u32>,
    /// True if allocations only get the addresses that they would have, and nothing is paged. Recorders
    /// want that: they cannot run a pager.
    pub is_layout_only: bool,
}

impl Settings {
    /// Returns the defaults, with this resident set.
    pub fn resident(resident: Bytes) -> Settings {
        Settings {
            resident,
            address_space: Bytes(1 << 40),
            spin: Duration::ZERO,
            eviction_method: EvictionMethod::Moved,
            keep_awake: KeepAwake::Auto,
            store: StoreSettings::default(),
            stats: false,
            program: None,
            is_layout_only: false,
        }
    }

    /// Returns the settings as variables and their values.
    pub fn to_environment(&self) -> Vec<(&'static str, OsString)> {
        let mut variables = vec![
            (RESIDENT, self.resident.0.to_string().into()),
            (ADDRESS_SPACE, self.address_space.0.to_string().into()),
            (SPIN_US, self.spin.as_micros().to_string().into()),
            (STATS, u64::from(self.stats).to_string().into()),
            (AWAKE, self.keep_awake.name().into()),
            (EVICTION, self.eviction_method.name().into()),
            (LAYOUT_ONLY, u64::from(self.is_layout_only).to_string().into()),
        ];
        variables.extend(self.program.map(|number| (PROGRAM, number.to_string().into())));
        variables.extend(self.store.to_environment());
        variables
    }

    /// Opens the store. A descendant waits for servers that do not answer, as its program would: the
    /// program cannot know that it has to try again.
    ///
    /// # Errors
    /// A line for the user, if the store cannot be opened.
    pub fn open_store(&self, log: &Log) -> Result<Arc<dyn PageStore>, String> {
        let until = Instant::now() + self.store.unreachable();
        loop {
            match self.store.open(Some(log.clone())) {
                Err(_) if self.is_descendant() && Instant::now() < until => sleep(OPEN_PAUSE),
                done => return done,
            }
        }
    }

    /// Returns true if this process is a descendant of the one that was to be paged.
    pub fn is_descendant(&self) -> bool {
        self.program.is_some_and(|number| number != std::process::id())
    }

    /// Reads the settings of this process. Returns `None` if it has none.
    ///
    /// # Errors
    /// A line for the user, if a variable has an invalid value.
    pub fn from_environment() -> Result<Option<Settings>, String> {
        let Some(resident) = number(RESIDENT)? else { return Ok(None) };
        let mut settings = Settings::resident(Bytes(resident));
        if let Some(bytes) = number(ADDRESS_SPACE)? {
            settings.address_space = Bytes(bytes);
        }
        if let Some(micros) = number(SPIN_US)? {
            settings.spin = Duration::from_micros(micros);
        }
        if let Some(name) = text(EVICTION)? {
            let no_way = || format!("{EVICTION}={name}: write moved, cheapest or copied");
            settings.eviction_method = EvictionMethod::named(&name).ok_or_else(no_way)?;
        }
        if let Some(name) = text(AWAKE)? {
            let no_time = || format!("{AWAKE}={name}: write auto, always or never");
            settings.keep_awake = KeepAwake::named(&name).ok_or_else(no_time)?;
        }
        settings.stats = is_set(STATS)?;
        settings.is_layout_only = is_set(LAYOUT_ONLY)?;
        settings.program = number(PROGRAM)?.map(|number| number as u32);
        settings.store = StoreSettings::from_environment()?;
        Ok(Some(settings))
    }
}

/// The pause before the next try of a descendant to open its store.
const OPEN_PAUSE: Duration = Duration::from_millis(100);

impl StoreSettings {
    fn to_environment(&self) -> Vec<(&'static str, OsString)> {
        match self {
            StoreSettings::Inside(bytes) => vec![(EMBEDDED, bytes.0.to_string().into())],
            StoreSettings::Servers(servers) => servers.to_environment(),
            StoreSettings::Engine(engine) => engine.to_environment(),
        }
    }

    fn from_environment() -> Result<StoreSettings, String> {
        if let Some(engine) = EngineSettings::from_environment()? {
            return Ok(StoreSettings::Engine(engine));
        }
        let servers = ServerSettings::from_environment()?.map(StoreSettings::Servers);
        let inside = number(EMBEDDED)?.map(|bytes| StoreSettings::Inside(Bytes(bytes)));
        Ok(servers.or(inside).unwrap_or_default())
    }

    /// Returns the time for which a program waits for servers that do not answer.
    fn unreachable(&self) -> Duration {
        match self {
            StoreSettings::Inside(_) => Duration::ZERO,
            StoreSettings::Servers(servers) => servers.unreachable,
            StoreSettings::Engine(engine) => engine.unreachable,
        }
    }

    /// Opens the store. It logs events that its owner should see.
    ///
    /// # Errors
    /// A line for the user, if the store cannot be opened.
    pub fn open(&self, log: Option<Log>) -> Result<Arc<dyn PageStore>, String> {
        Ok(match self {
            StoreSettings::Inside(bytes) => Arc::new(EmbeddedStore::new(*bytes)),
            StoreSettings::Servers(servers) => Arc::new(servers.connect(log)?),
            StoreSettings::Engine(engine) => Arc::new(engine.connect(log)?),
        })
    }
}

impl EngineSettings {
    fn to_environment(&self) -> Vec<(&'static str, OsString)> {
        let mut variables = vec![
            (STORE, self.url.clone().into()),
            (COPIES, self.copies.to_string().into()),
            (UNREACHABLE_MS, self.unreachable.as_millis().to_string().into()),
            (INSECURE, u64::from(self.insecure).to_string().into()),
        ];
        let client = self.tls.client.iter();
        variables.extend(client.flat_map(|(certificate, key)| {
            [(TLS_CERTIFICATE, certificate.into()), (TLS_KEY, key.into())]
        }));
        variables.extend(self.tls.authority.iter().map(|file| (TLS_AUTHORITY, file.into())));
        variables
    }

    fn from_environment() -> Result<Option<EngineSettings>, String> {
        let Some(url) = text(STORE)?.filter(|url| !url.is_empty()) else { return Ok(None) };
        let path = |name| std::env::var_os(name).map(PathBuf::from);
        Ok(Some(EngineSettings {
            url,
            copies: number(COPIES)?.unwrap_or(1) as usize,
            unreachable: unreachable()?,
            tls: EngineTls {
                authority: path(TLS_AUTHORITY),
                client: path(TLS_CERTIFICATE).zip(path(TLS_KEY)),
            },
            insecure: is_set(INSECURE)?,
        }))
    }

    /// Connects a client to this server or cluster.
    ///
    /// # Errors
    /// A line for the user, if the client cannot connect.
    pub fn connect(&self, log: Option<Log>) -> Result<RedisStore, String> {
        let options = EngineOptions {
            copies: self.copies,
            tls: self.tls.clone(),
            insecure: self.insecure,
            unreachable: self.unreachable,
            log,
            ..EngineOptions::new(self.url.clone())
        };
        RedisStore::connect(options).map_err(|error| error.to_string())
    }
}

impl ServerSettings {
    fn to_environment(&self) -> Vec<(&'static str, OsString)> {
        let mut variables = vec![
            (SERVERS, self.named.join(",").into()),
            (DISCOVER, u64::from(self.discover).to_string().into()),
            (COPIES, self.copies.to_string().into()),
            (UNREACHABLE_MS, self.unreachable.as_millis().to_string().into()),
            (INSECURE, u64::from(self.insecure).to_string().into()),
            (COMPRESS_TLS, u64::from(self.compress_tls).to_string().into()),
        ];
        if let Some(Files { certificate, key, authority }) = &self.tls {
            variables.extend([
                (TLS_CERTIFICATE, certificate.into()),
                (TLS_KEY, key.into()),
                (TLS_AUTHORITY, authority.into()),
            ]);
        }
        variables.extend(self.tls_name.iter().map(|name| (TLS_NAME, name.into())));
        variables
    }

    fn from_environment() -> Result<Option<ServerSettings>, String> {
        let named = text(SERVERS)?.unwrap_or_default();
        let discover = is_set(DISCOVER)?;
        if named.is_empty() && !discover {
            return Ok(None);
        }
        let path = |name| std::env::var_os(name).map(PathBuf::from);
        let tls = match (path(TLS_CERTIFICATE), path(TLS_KEY), path(TLS_AUTHORITY)) {
            (Some(certificate), Some(key), Some(authority)) => {
                Some(Files { certificate, key, authority })
            }
            (None, None, None) => None,
            _ => {
                return Err(format!("set all of {TLS_CERTIFICATE}, {TLS_KEY} and {TLS_AUTHORITY}"));
            }
        };
        Ok(Some(ServerSettings {
            named: named.split(',').filter(|name| !name.is_empty()).map(String::from).collect(),
            discover,
            copies: number(COPIES)?.unwrap_or(1) as usize,
            unreachable: unreachable()?,
            tls,
            tls_name: text(TLS_NAME)?,
            insecure: is_set(INSECURE)?,
            compress_tls: is_set(COMPRESS_TLS)?,
        }))
    }

    /// Connects a client to these servers.
    ///
    /// # Errors
    /// A line for the user, if the client cannot connect.
    pub fn connect(&self, log: Option<Log>) -> Result<Cluster, String> {
        let name = self.tls_name.clone();
        let tls = self.tls.as_ref().map(|files| ClientTls::new(files, name)).transpose();
        let options = cluster::ClusterOptions {
            copies: self.copies,
            unreachable: self.unreachable,
            discover: self.discover,
            tls: tls.map_err(|error| error.to_string())?,
            insecure: self.insecure,
            compress_tls: self.compress_tls,
            log,
            ..cluster::ClusterOptions::new(self.named.clone())
        };
        Cluster::connect(options).map_err(|error: StoreError| error.to_string())
    }
}

fn is_set(name: &str) -> Result<bool, String> {
    Ok(number(name)?.is_some_and(|wanted| wanted > 0))
}

fn unreachable() -> Result<Duration, String> {
    Ok(number(UNREACHABLE_MS)?.map_or(cluster::UNREACHABLE, Duration::from_millis))
}

fn text(name: &str) -> Result<Option<String>, String> {
    let value = std::env::var_os(name).map(OsString::into_string).transpose();
    value.map_err(|text| format!("{name}={}: not UTF-8", text.display()))
}

fn number(name: &str) -> Result<Option<u64>, String> {
    let Some(text) = text(name)? else { return Ok(None) };
    let number = text.parse();
    number.map(Some).map_err(|_| format!("{name}={text}: write a number, or run `pagetax remote`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_has_its_variable() {
        let file = |name: &str| PathBuf::from(name);
        let tls = Files { certificate: file("a"), key: file("b"), authority: file("c") };
        let (tls, tls_name) = (Some(tls), Some("name".into()));
        let servers = StoreSettings::Servers(ServerSettings {
            named: vec!["a:1".to_string(), "b".to_string()],
            discover: true,
            copies: 2,
            unreachable: cluster::UNREACHABLE,
            tls,
            tls_name,
            insecure: false,
            compress_tls: false,
        });
        let engine = StoreSettings::Engine(EngineSettings {
            url: "valkey://a".into(),
            copies: 2,
            unreachable: cluster::UNREACHABLE,
            tls: EngineTls::default(),
            insecure: false,
        });
        let names = |store: StoreSettings| {
            let settings =
                Settings { store, program: Some(1), ..Settings::resident(Bytes(1 << 20)) };
            settings.to_environment().into_iter().map(|(name, _)| name)
        };
        let set: std::collections::BTreeSet<_> =
            [servers, engine, StoreSettings::default()].into_iter().flat_map(names).collect();
        assert_eq!(set, VARIABLES.into_iter().collect());
    }
}
