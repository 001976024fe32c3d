//! Discovery of memory servers on the local network by mDNS/DNS-SD (RFC 6762, RFC 6763).
//!
//! An announcement only shows where a server may be: TLS and tokens decide on access. Anybody on
//! the network can announce anything, so the number of remembered announcements is bounded.

use crate::threads;
use crate::wire::{VERSION, VERSION_MIN};
use mdns_sd::{ServiceDaemon, ServiceEvent, ServiceInfo};
use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// The service type that servers announce.
pub const SERVICE: &str = "_pagetax._tcp.local.";

/// The property that has the versions of a server's protocol, separated by commas.
const PROTOCOL: &str = "protocol";

/// The most announcements that are remembered: a withdrawal has the name only, and needs its
/// address.
const NAMES_MAX: usize = 1024;

/// A failure of mDNS on this machine.
#[derive(Debug, thiserror::Error)]
#[error("cannot use mDNS: {0}; name the servers with --servers instead")]
pub struct DiscoveryError(#[from] mdns_sd::Error);

/// Returns true if this build speaks one of the versions that a server announces.
fn is_spoken(versions: &str) -> bool {
    let known = |version: &str| version.parse().is_ok_and(|v| (VERSION_MIN..=VERSION).contains(&v));
    versions.split(',').any(known)
}

/// An announced server. Dropping it withdraws the announcement.
pub struct Announcement {
    daemon: ServiceDaemon,
    name: String,
}

/// Announces a server that listens at this address, under an instance name of its own.
///
/// # Errors
/// If the system provides no multicast sockets.
pub fn announce(listen: SocketAddr, instance: &str) -> Result<Announcement, DiscoveryError> {
    let daemon = ServiceDaemon::new()?;
    let host = format!("{instance}.local.");
    let address =
        if listen.ip().is_unspecified() { String::new() } else { listen.ip().to_string() };
    let versions: Vec<String> =
        (VERSION_MIN..=VERSION).map(|version| version.to_string()).collect();
    let properties: &[(&str, &str)] = &[(PROTOCOL, &versions.join(","))];
    let mut info =
        ServiceInfo::new(SERVICE, instance, &host, address.as_str(), listen.port(), properties)?;
    if listen.ip().is_unspecified() {
        info = info.enable_addr_auto();
    }
    let name = info.get_fullname().to_string();
    daemon.register(info)?;
    Ok(Announcement { daemon, name })
}

impl Drop for Announcement {
    fn drop(&mut self) {
        // The goodbye is a courtesy: clients notice without it that a server is gone.
        if let Ok(done) = self.daemon.unregister(&self.name) {
            let _ = done.recv_timeout(Duration::from_millis(200));
        }
        let _ = self.daemon.shutdown();
    }
}

/// A search for servers that goes on until it is dropped.
pub struct Finder {
    daemon: ServiceDaemon,
    events: mdns_sd::Receiver<ServiceEvent>,
    /// The address of each service, by its full name.
    names: HashMap<String, SocketAddr>,
}

/// The changes on the network since the last poll.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct News {
    /// One IPv4 address of each announced server that speaks one of our protocol versions.
    pub announced: BTreeSet<SocketAddr>,
    /// The addresses of servers whose announcement was withdrawn or has expired.
    pub withdrawn: BTreeSet<SocketAddr>,
}

impl Finder {
    /// Starts a search for announced servers.
    ///
    /// # Errors
    /// If the system provides no multicast sockets.
    pub fn new() -> Result<Finder, DiscoveryError> {
        let daemon = threads::with_signals_blocked(ServiceDaemon::new)?;
        let events = daemon.browse(SERVICE)?;
        Ok(Finder { daemon, events, names: HashMap::new() })
    }

    /// Returns the announcements and withdrawals since the last call, and those of the next
    /// `patience`.
    pub fn poll(&mut self, patience: Duration) -> News {
        let deadline = Instant::now() + patience;
        let mut news = News::default();
        while let Ok(event) = self.events.recv_deadline(deadline) {
            match event {
                ServiceEvent::ServiceResolved(info)
                    if info.get_property_val_str(PROTOCOL).is_some_and(is_spoken) =>
                {
                    let Some(ip) = info.get_addresses_v4().into_iter().min() else { continue };
                    let address = SocketAddr::from((ip, info.get_port()));
                    if self.names.len() < NAMES_MAX {
                        self.names.insert(info.get_fullname().to_string(), address);
                    }
                    news.withdrawn.remove(&address);
                    news.announced.insert(address);
                }
                ServiceEvent::ServiceRemoved(_, name) => {
                    if let Some(address) = self.names.remove(&name) {
                        news.announced.remove(&address);
                        news.withdrawn.insert(address);
                    }
                }
                _ => {}
            }
        }
        news
    }
}

impl Drop for Finder {
    fn drop(&mut self) {
        // The daemon ends with the process at the latest.
        let _ = self.daemon.shutdown();
    }
}
