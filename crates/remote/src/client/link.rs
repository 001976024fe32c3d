//! A thread's own connections to the servers, opened on first use.
//!
//! Invariant: if a link that carried changes is closed, its requests may still reach the server at
//! any time. So the next link voids them with a fence before it sends any request. Otherwise a late
//! write could undo a later one.

use super::connection::{Connection, is_timeout};
use super::set::{ServerId, ServerSet};
use super::state::ClusterState;
use crate::store::{RegionId, StoreError};
use crate::wire::reply::{Failure, Reply};
use crate::wire::request::{Lease, Request};
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// An error of a request over a link.
#[derive(Debug)]
pub enum LinkError {
    /// No connection, a broken connection or a timeout.
    Broken(io::Error),
    /// The server has another epoch: it was restarted, or is another server.
    Restarted,
    /// The region is not on this server.
    NoRegion,
    /// The server answered that it does not do it.
    Failed(Failure),
}

impl From<io::Error> for LinkError {
    fn from(error: io::Error) -> Self {
        LinkError::Broken(error)
    }
}

/// A connection, and the leases on it.
#[derive(Debug)]
pub struct ServerLink {
    /// The connection to the server.
    pub connection: Connection,
    /// The lease on each region, or `None` after another link's fence voided it. This link's own
    /// fence, if it needed one, is done. Another fence would only void the other link's lease in
    /// turn, for ever.
    leases: BTreeMap<RegionId, Option<Lease>>,
    /// True if requests of an earlier link may still be under way.
    fences: bool,
}

/// The links of one thread.
#[derive(Debug)]
pub struct ServerLinks {
    shared: Arc<ClusterState>,
    patience: Duration,
    /// The time to poll for a reply from this machine before sleeping.
    poll_time: Duration,
    /// True if the links carry no request that changes a server.
    is_read_only: bool,
    links: Vec<Option<ServerLink>>,
    /// The servers to which a link was closed.
    closed: ServerSet,
}

impl ServerLinks {
    pub(super) fn new(
        shared: Arc<ClusterState>,
        patience: Duration,
        is_read_only: bool,
    ) -> ServerLinks {
        let (links, closed) = (Vec::new(), ServerSet::EMPTY);
        ServerLinks { shared, patience, poll_time: Duration::ZERO, is_read_only, links, closed }
    }

    /// Sets the time to poll for replies on links that are opened from now on: see
    /// [`Connection::set_poll_time`].
    pub fn set_poll_time(&mut self, time: Duration) {
        self.poll_time = time;
    }

    /// Returns the link to a server, if it is open.
    pub fn existing(&mut self, server: ServerId) -> Option<&mut ServerLink> {
        self.links.get_mut(server as usize)?.as_mut()
    }

    /// Closes the link to a server. Nobody waits any more for its requests under way.
    pub fn close(&mut self, server: ServerId) {
        if let Some(Some(_)) = self.links.get_mut(server as usize).map(Option::take) {
            self.closed.insert(server);
        }
    }

    /// Forgets a lease that is void: the next use takes the current lease.
    pub fn forget_lease(&mut self, server: ServerId, region: RegionId) {
        if let Some(lease) = self.existing(server).and_then(|link| link.leases.get_mut(&region)) {
            *lease = None;
        }
    }

    /// Makes a call, and makes it once more if another link's fence voided the lease.
    ///
    /// # Errors
    /// Those of the call.
    pub fn with_lease<T>(
        &mut self,
        server: ServerId,
        region: RegionId,
        call: impl Fn(&mut ServerLinks) -> Result<T, LinkError>,
    ) -> Result<T, LinkError> {
        match call(self) {
            Err(error) if is_stale(&error) => {
                self.forget_lease(server, region);
                call(self)
            }
            done => done,
        }
    }

    /// Returns the link to a server, and opens it if necessary.
    ///
    /// # Errors
    /// If the server does not answer, or has another epoch now.
    pub fn open(&mut self, server: ServerId) -> Result<&mut ServerLink, LinkError> {
        let at = server as usize;
        if self.links.len() <= at {
            self.links.resize_with(at + 1, || None);
        }
        if self.links[at].is_none() {
            let peer = self.shared.peer(server);
            let options = &self.shared.options;
            let connection = peer.connect(&options.name, options.answer_within).map_err(as_io)?;
            if connection.epoch != peer.epoch.load(Ordering::Acquire) {
                return Err(LinkError::Restarted);
            }
            self.adopt(server, connection)?;
        }
        Ok(self.links[at].as_mut().expect("it was just opened"))
    }

    /// Takes over a connection that is already open.
    pub(super) fn adopt(&mut self, server: ServerId, mut connection: Connection) -> io::Result<()> {
        connection.set_patience(self.patience)?;
        connection.set_poll_time(self.poll_time);
        connection.set_compress_tls(self.shared.options.compress_tls);
        let at = server as usize;
        if self.links.len() <= at {
            self.links.resize_with(at + 1, || None);
        }
        self.close(server);
        let fences = !self.is_read_only && self.closed.has(server);
        self.links[at] = Some(ServerLink { connection, leases: BTreeMap::new(), fences });
        Ok(())
    }

    /// Returns the connection to a server, and a lease on a region there.
    ///
    /// # Errors
    /// As [`ServerLinks::open`], or if the region is not on the server.
    pub fn leased(
        &mut self,
        server: ServerId,
        region: RegionId,
    ) -> Result<(&mut Connection, Lease), LinkError> {
        let known = self.existing(server).and_then(|link| link.leases.get(&region).copied());
        let lease = match known {
            Some(Some(lease)) => lease,
            Some(None) => self.attach(server, region, false)?,
            None => {
                let fences = self.open(server)?.fences;
                self.attach(server, region, fences)?
            }
        };
        let link = self.open(server)?;
        Ok((&mut link.connection, lease))
    }

    /// Proves to a server that a region is ours. With `fence`, voids all earlier leases on it.
    ///
    /// # Errors
    /// As [`ServerLinks::leased`].
    pub fn attach(
        &mut self,
        server: ServerId,
        region: RegionId,
        fence: bool,
    ) -> Result<Lease, LinkError> {
        let (patience, answer_within) = (self.patience, self.shared.options.answer_within);
        // Open the link first: the region's token must be of the same epoch as the link, or of a
        // later one.
        self.open(server)?;
        let remote = self.shared.remote(region, server).ok_or(LinkError::NoRegion)?;
        let link = self.open(server)?;
        // Not the patience of a read: a server that is farther away could never be used.
        link.connection.set_patience(answer_within)?;
        let id = link.connection.send_attach(remote.number, fence, &remote.token)?;
        let Reply::Attached(lease) = wait(&mut link.connection, id)? else {
            return Err(unexpected());
        };
        link.connection.set_patience(patience)?;
        link.leases.insert(region, Some(lease));
        Ok(lease)
    }

    /// Sends a request and returns its reply, which borrows from the connection.
    ///
    /// # Errors
    /// As [`ServerLinks::open`], or the failure that the server answers.
    pub fn call(
        &mut self,
        server: ServerId,
        request: &Request<'_>,
    ) -> Result<Reply<'_>, LinkError> {
        let connection = &mut self.open(server)?.connection;
        let id = connection.send(request)?;
        wait(connection, id)
    }

    /// Sends a request about a region and returns its reply.
    ///
    /// # Errors
    /// As [`ServerLinks::call`] and [`ServerLinks::leased`].
    pub fn call_on(
        &mut self,
        server: ServerId,
        region: RegionId,
        request: impl FnOnce(Lease) -> Request<'static>,
    ) -> Result<Reply<'_>, LinkError> {
        let (connection, lease) = self.leased(server, region)?;
        let id = connection.send(&request(lease))?;
        wait(connection, id)
    }
}

/// Waits for a reply that has no pages, or pages with checksums.
///
/// # Errors
/// A timeout is [`LinkError::Broken`]. A failure that the server answers is [`LinkError::Failed`].
pub fn wait(connection: &mut Connection, id: u32) -> Result<Reply<'_>, LinkError> {
    match connection.wait(id, &mut [])? {
        Reply::Failed(failure) => Err(LinkError::Failed(failure)),
        reply => Ok(reply),
    }
}

/// Returns true if another link's fence voided the lease.
pub fn is_stale(error: &LinkError) -> bool {
    matches!(error, LinkError::Failed(Failure::StaleLease))
}

/// Returns the error for a reply that does not fit its request.
pub fn unexpected() -> LinkError {
    LinkError::Broken(io::Error::other("a reply that does not fit the request"))
}

/// Returns true if the link itself is of no further use.
pub fn is_broken(error: &LinkError) -> bool {
    match error {
        LinkError::Broken(_) | LinkError::Restarted => true,
        LinkError::Failed(Failure::NoRegion | Failure::Denied) => true,
        LinkError::NoRegion | LinkError::Failed(_) => false,
    }
}

fn as_io(error: StoreError) -> LinkError {
    match error {
        StoreError::Unreachable { source, .. } => LinkError::Broken(source),
        other => LinkError::Broken(io::Error::other(other)),
    }
}

/// Returns true if the error is a timeout, so that the reply may still come.
pub fn is_slow(error: &LinkError) -> bool {
    matches!(error, LinkError::Broken(error) if is_timeout(error))
}
