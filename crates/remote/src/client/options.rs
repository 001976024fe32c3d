//! The settings of a client of memory servers.

use crate::pager::Log;
use crate::tls::ClientTls;
use std::fmt;
use std::time::Duration;

/// The default of [`ClusterOptions::unreachable`].
pub const UNREACHABLE: Duration = Duration::from_secs(30);

/// The settings of a client of memory servers.
#[derive(Clone)]
pub struct ClusterOptions {
    /// The host, or host and port, of each server.
    pub servers: Vec<String>,
    /// The number of replicas of each page, on as many servers: 1 to 3.
    pub copies: usize,
    /// True to look for more servers on the local network (mDNS).
    pub discover: bool,
    /// The settings for mutual TLS; `None` without TLS.
    pub tls: Option<ClientTls>,
    /// True to use servers beyond loopback without TLS. Anybody on the path can then read and
    /// change the pages.
    pub insecure: bool,
    /// True to compress writes over slow links with TLS, too. The sizes of encrypted blocks then tell how
    /// well pages compress.
    pub compress_tls: bool,
    /// The name under which the servers' reports list this client: by default, the program.
    pub name: String,
    /// The time after which a reader sends a hedged request to another replica.
    pub hedge_after: Duration,
    /// The time after which a server without a reply counts as down.
    pub answer_within: Duration,
    /// The time down after which other servers take a server's place, if other replicas are left.
    pub repair_after: Duration,
    /// The time without a reply after which the client stops waiting for a server. Accesses to
    /// pages that no other server has then fail, until the server returns.
    pub unreachable: Duration,
    /// The receiver of log lines, such as those on pages that are lost with their last server.
    pub log: Option<Log>,
}

impl fmt::Debug for ClusterOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterOptions")
            .field("servers", &self.servers)
            .field("copies", &self.copies)
            .field("discover", &self.discover)
            .field("tls", &self.tls.is_some())
            .finish_non_exhaustive()
    }
}

impl ClusterOptions {
    /// Returns the default settings for these servers.
    pub fn new(servers: Vec<String>) -> ClusterOptions {
        ClusterOptions {
            servers,
            copies: 1,
            discover: false,
            tls: None,
            insecure: false,
            compress_tls: false,
            name: program_name(),
            hedge_after: Duration::from_millis(3),
            answer_within: Duration::from_millis(250),
            repair_after: Duration::from_secs(2),
            unreachable: UNREACHABLE,
            log: None,
        }
    }

    /// Returns true if the client may use only servers on loopback.
    pub(super) fn needs_tls(&self) -> bool {
        self.tls.is_none() && !self.insecure
    }
}

fn program_name() -> String {
    let comm = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
    comm.trim_end().to_string()
}
