//! Finding memory servers on the local network by mDNS/DNS-SD (RFC 6762, RFC 6763).
//!
//! What is found is only where to ask: who may use what is settled by TLS and tokens.

use mdns_sd::{ServiceDaemon, ServiceEvent, ServiceInfo};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// The type of service that servers announce.
pub const SERVICE: &str = "_pagetax._tcp.local.";

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
    let properties: &[(&str, &str)] = &[("protocol", "1")];
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
}

impl Finder {
    /// Begins to look.
    ///
    /// # Errors
    /// When the system gives no multicast sockets.
    pub fn new() -> Result<Finder, DiscoveryError> {
        let daemon = ServiceDaemon::new()?;
        let events = daemon.browse(SERVICE)?;
        Ok(Finder { daemon, events })
    }

    /// Servers that were announced since the last call: one address of each. Waits this long for the
    /// first.
    pub fn poll(&self, patience: Duration) -> Vec<SocketAddr> {
        let deadline = Instant::now() + patience;
        let mut found = BTreeSet::new();
        while let Ok(event) = self.events.recv_deadline(deadline) {
            if let ServiceEvent::ServiceResolved(info) = event {
                let first = info.get_addresses_v4().into_iter().min();
                found.extend(first.map(|ip| SocketAddr::from((ip, info.get_port()))));
            }
        }
        found.into_iter().collect()
    }
}

impl Drop for Finder {
    fn drop(&mut self) {
        // It ends with the process at the latest.
        let _ = self.daemon.shutdown();
    }
}
