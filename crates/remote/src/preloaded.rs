//! The settings that `pagetax remote` passes to the library that it preloads. They are in the
//! environment, so that they survive exec.

use crate::client::cluster::{self, Cluster};
use crate::pager::{EvictionMethod, Log};
use crate::store::embedded::EmbeddedStore;
use crate::store::{PageStore, StoreError};
use crate::tls::{ClientTls, Files};
use pagetax_core::units::Bytes;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

const RESIDENT: &str = "PAGETAX_REMOTE_RESIDENT";
const ADDRESS_SPACE: &str = "PAGETAX_REMOTE_ADDRESS_SPACE";
const SPIN_US: &str = "PAGETAX_REMOTE_SPIN_US";
const EVICTION: &str = "PAGETAX_REMOTE_EVICTION";
const AWAKE: &str = "PAGETAX_REMOTE_AWAKE";
const STATS: &str = "PAGETAX_REMOTE_STATS";
const EMBEDDED: &str = "PAGETAX_REMOTE_EMBEDDED";
const SERVERS: &str = "PAGETAX_REMOTE_SERVERS";
const DISCOVER: &str = "PAGETAX_REMOTE_DISCOVER";
const COPIES: &str = "PAGETAX_REMOTE_COPIES";
const UNREACHABLE_MS: &str = "PAGETAX_REMOTE_UNREACHABLE_MS";
const TLS_CERTIFICATE: &str = "PAGETAX_REMOTE_TLS_CERT";
const TLS_KEY: &str = "PAGETAX_REMOTE_TLS_KEY";
const TLS_AUTHORITY: &str = "PAGETAX_REMOTE_TLS_CA";
const TLS_NAME: &str = "PAGETAX_REMOTE_TLS_NAME";
const INSECURE: &str = "PAGETAX_REMOTE_INSECURE";
const PROGRAM: &str = "PAGETAX_REMOTE_PROGRAM";

/// The names of all variables that carry settings.
pub const VARIABLES: [&str; 17] = [
    RESIDENT,
    ADDRESS_SPACE,
    SPIN_US,
    EVICTION,
    AWAKE,
    STATS,
    EMBEDDED,
    SERVERS,
    DISCOVER,
    COPIES,
    UNREACHABLE_MS,
    TLS_CERTIFICATE,
    TLS_KEY,
    TLS_AUTHORITY,
    TLS_NAME,
    INSECURE,
    PROGRAM,
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
    /// True to keep idle CPUs awake while there are many faults.
    pub keep_awake: bool,
    /// The servers to evict to; `None` for a compressed store inside the process.
    pub servers: Option<ServerSettings>,
    /// The size of the store inside the process.
    pub embedded: Bytes,
    /// True to print at the end what was paged.
    pub stats: bool,
    /// The number of the process that was to be paged. Other processes inherited these settings
    /// from it.
    pub program: Option<u32>,
}

impl Settings {
    /// Returns the defaults, with this resident set.
    pub fn resident(resident: Bytes) -> Settings {
        Settings {
            resident,
            address_space: Bytes(1 << 40),
            spin: Duration::ZERO,
            eviction_method: EvictionMethod::Moved,
            keep_awake: false,
            servers: None,
            embedded: Bytes(64 << 30),
            stats: false,
            program: None,
        }
    }

    /// Returns the settings as variables and their values.
    pub fn to_environment(&self) -> Vec<(&'static str, OsString)> {
        let mut variables = vec![
            (RESIDENT, self.resident.0.to_string().into()),
            (ADDRESS_SPACE, self.address_space.0.to_string().into()),
            (SPIN_US, self.spin.as_micros().to_string().into()),
            (EMBEDDED, self.embedded.0.to_string().into()),
            (STATS, u64::from(self.stats).to_string().into()),
            (AWAKE, u64::from(self.keep_awake).to_string().into()),
            (EVICTION, self.eviction_method.name().into()),
        ];
        variables.extend(self.program.map(|number| (PROGRAM, number.to_string().into())));
        variables.extend(self.servers.iter().flat_map(ServerSettings::to_environment));
        variables
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
        if let Some(bytes) = number(EMBEDDED)? {
            settings.embedded = Bytes(bytes);
        }
        if let Some(name) = text(EVICTION)? {
            let no_way = || format!("{EVICTION}={name}: write moved, cheapest or copied");
            settings.eviction_method = EvictionMethod::named(&name).ok_or_else(no_way)?;
        }
        settings.keep_awake = number(AWAKE)?.is_some_and(|wanted| wanted > 0);
        settings.stats = number(STATS)?.is_some_and(|wanted| wanted > 0);
        settings.program = number(PROGRAM)?.map(|number| number as u32);
        settings.servers = ServerSettings::from_environment()?;
        Ok(Some(settings))
    }

    /// Opens the store that these settings name. The store logs events that its owner should see.
    ///
    /// # Errors
    /// A line for the user, if the store cannot be opened.
    pub fn open_store(&self, log: Log) -> Result<Arc<dyn PageStore>, String> {
        match &self.servers {
            None => Ok(Arc::new(EmbeddedStore::new(self.embedded))),
            Some(servers) => Ok(Arc::new(servers.connect(Some(log))?)),
        }
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
        let discover = number(DISCOVER)?.is_some_and(|wanted| wanted > 0);
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
            unreachable: number(UNREACHABLE_MS)?
                .map_or(cluster::UNREACHABLE, Duration::from_millis),
            tls,
            tls_name: text(TLS_NAME)?,
            insecure: number(INSECURE)?.is_some_and(|wanted| wanted > 0),
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
            log,
            ..cluster::ClusterOptions::new(self.named.clone())
        };
        Cluster::connect(options).map_err(|error: StoreError| error.to_string())
    }
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
        let named = vec!["a:1".to_string(), "b".to_string()];
        let servers = Some(ServerSettings {
            named,
            discover: true,
            copies: 2,
            unreachable: cluster::UNREACHABLE,
            tls,
            tls_name,
            insecure: false,
        });
        let settings = Settings { servers, program: Some(1), ..Settings::resident(Bytes(1 << 20)) };
        let set: std::collections::BTreeSet<_> =
            settings.to_environment().into_iter().map(|(name, _)| name).collect();
        assert_eq!(set, VARIABLES.into_iter().collect());
    }
}
