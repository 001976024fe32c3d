//! Finding memory servers on the local network by mDNS/DNS-SD (RFC 6762, RFC 6763).
//!
//! What is found is only where to ask: who may use what is settled by TLS and tokens. Anybody on the network
//! can announce anything, so that what is remembered here is bounded.

use crate::threads;
use crate::wire::VERSION;
use mdns_sd::{ServiceDaemon, ServiceEvent, ServiceInfo};
use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// The type of service that servers announce.
pub const SERVICE: &str = "_pagetax._tcp.local.";

/// The property that says which protocol a server speaks.
const PROTOCOL: &str = "protocol";

/// Announcements that are remembered, to know which address goes with a withdrawal.
const NAMES_MAX: usize = 1024;

/// mDNS does not work here.
#[derive(Debug, thiserror::Error)]
#[error("cannot use mDNS: {0}; name the servers with --servers instead")]
pub struct DiscoveryError(#[from] mdns_sd::Error);

/// An announced server; withdrawn when dropped.
pub struct Announcement {
    daemon: ServiceDaemon,
    name: String,
}

/// Announces a server that listens at this address under a name of its own.
///
/// # Errors
/// When the system gives no multicast sockets.
pub fn announce(listen: SocketAddr, instance: &str) -> Result<Announcement, DiscoveryError> {
    let daemon = ServiceDaemon::new()?;
    let host = format!("{instance}.local.");
    let address =
        if listen.ip().is_unspecified() { String::new() } else { listen.ip().to_string() };
    let version = VERSION.to_string();
    let properties: &[(&str, &str)] = &[(PROTOCOL, &version)];
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
        // The goodbye is a courtesy: clients notice a server that is gone without it.
        if let Ok(done) = self.daemon.unregister(&self.name) {
            let _ = done.recv_timeout(Duration::from_millis(200));
        }
        let _ = self.daemon.shutdown();
    }
}

/// Looks for servers for as long as it lives.
pub struct Finder {
    daemon: ServiceDaemon,
    events: mdns_sd::Receiver<ServiceEvent>,
    /// Addresses of services by their full names.
    names: HashMap<String, SocketAddr>,
}

/// What has changed on the network.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct News {
    /// One address of each server of our protocol that was announced.
    pub announced: BTreeSet<SocketAddr>,
    /// Addresses of servers whose announcement was withdrawn, or is too old.
    pub withdrawn: BTreeSet<SocketAddr>,
}

impl Finder {
    /// Begins to look.
    ///
    /// # Errors
    /// When the system gives no multicast sockets.
    pub fn new() -> Result<Finder, DiscoveryError> {
        let daemon = threads::with_signals_blocked(ServiceDaemon::new)?;
        let events = daemon.browse(SERVICE)?;
        Ok(Finder { daemon, events, names: HashMap::new() })
    }

    /// Gathers for this long what is announced and withdrawn, and what was since the last call.
    pub fn poll(&mut self, patience: Duration) -> News {
        let deadline = Instant::now() + patience;
        let mut news = News::default();
        while let Ok(event) = self.events.recv_deadline(deadline) {
            match event {
                ServiceEvent::ServiceResolved(info)
                    if info.get_property_val_str(PROTOCOL) == Some(&VERSION.to_string()) =>
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
        // It ends with the process at the latest.
        let _ = self.daemon.shutdown();
    }
}
