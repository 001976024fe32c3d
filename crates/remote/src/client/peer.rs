//! A client's state of one server, and the backoff of a server that the client shuns.

use super::connection::{Connection, Endpoint};
use super::set::ServerId;
use crate::store::StoreError;
use crate::tls::ClientTls;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A kind of request for pages. The client counts the failures of each kind on its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RequestKind {
    Read,
    Write,
}

/// The time for which a server is shunned at first. Each further time is twice as long.
const SHUN_FOR: Duration = Duration::from_secs(1);
/// The longest time for which a server is shunned. After as long without trouble, the backoff
/// starts again.
const SHUN_MAX: Duration = Duration::from_secs(64);

/// The backoff of a server that this client has decided not to use.
#[derive(Debug, Clone, Copy, Default)]
struct Shunned {
    until: Option<Instant>,
    times: u32,
}

/// A client's state of one server.
#[derive(Debug)]
pub(super) struct Peer {
    pub endpoint: Endpoint,
    /// The server's epoch; 0 until the client first reaches it.
    pub epoch: AtomicU64,
    /// The machine that the server reports to run on.
    pub machine: AtomicU64,
    /// The address at which the client reached the server.
    address: Mutex<Option<SocketAddr>>,
    /// The server of which this name is an alias.
    alias_of: Mutex<Option<ServerId>>,
    /// The number of consecutive failed requests, by [`RequestKind`].
    strikes: [AtomicU32; 2],
    shunned: Mutex<Shunned>,
    /// The lock of the thread that probes the server.
    pub probe_lock: Mutex<()>,
}

pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Peer {
    pub fn new(endpoint: Endpoint) -> Peer {
        Peer {
            endpoint,
            epoch: AtomicU64::new(0),
            machine: AtomicU64::new(0),
            address: Mutex::default(),
            alias_of: Mutex::default(),
            strikes: Default::default(),
            shunned: Mutex::default(),
            probe_lock: Mutex::default(),
        }
    }

    /// Returns the same server for the client of a forked child, as if no request had failed.
    pub fn for_child(&self, tls: Option<ClientTls>) -> Peer {
        Peer {
            epoch: AtomicU64::new(self.epoch.load(Ordering::Acquire)),
            machine: AtomicU64::new(self.machine.load(Ordering::Relaxed)),
            address: Mutex::new(*locked(&self.address)),
            alias_of: Mutex::new(self.alias_of()),
            ..Peer::new(self.endpoint.with_tls(tls))
        }
    }

    /// Connects to the pinned address, or to any address of the name if none is pinned.
    pub fn connect(&self, name: &str, patience: Duration) -> Result<Connection, StoreError> {
        let address = *locked(&self.address);
        self.endpoint.connect_at(address, name, patience)
    }

    /// Pins the server to one address. `None` allows any address of its name.
    pub fn pin(&self, address: Option<SocketAddr>) {
        *locked(&self.address) = address;
    }

    pub fn alias_of(&self) -> Option<ServerId> {
        *locked(&self.alias_of)
    }

    pub fn set_alias_of(&self, server: Option<ServerId>) {
        *locked(&self.alias_of) = server;
    }

    pub fn is_shunned(&self) -> bool {
        locked(&self.shunned).until.is_some_and(|until| Instant::now() < until)
    }

    /// Resets the count of failures of a kind, because a request succeeded.
    pub fn reset_strikes(&self, kind: RequestKind) {
        let strikes = &self.strikes[kind as usize];
        if strikes.load(Ordering::Relaxed) != 0 {
            strikes.store(0, Ordering::Relaxed);
        }
    }

    /// Counts a failed request to a server that is alive. Returns the time for which to shun the
    /// server, if it reaches the limit.
    pub fn strike(&self, kind: RequestKind, strikes_max: u32) -> Option<Duration> {
        let strikes = self.strikes[kind as usize].fetch_add(1, Ordering::Relaxed) + 1;
        let mut shunned = locked(&self.shunned);
        let is_long_ago = |until: Instant| until.elapsed() > SHUN_MAX;
        if shunned.until.is_some_and(is_long_ago) {
            shunned.times = 0;
        }
        if strikes < strikes_max {
            return None;
        }
        self.reset_strikes(kind);
        let time = (SHUN_FOR * (1 << shunned.times.min(6))).min(SHUN_MAX);
        *shunned = Shunned { until: Some(Instant::now() + time), times: shunned.times + 1 };
        Some(time)
    }
}
