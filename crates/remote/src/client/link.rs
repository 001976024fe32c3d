//! A thread's own connections to the servers, opened when they are first needed.
//!
//! Invariant: when a link on which something was changed is closed, what was sent on it may still
//! reach the server, at any time. So the next link voids it with a fence before anything is sent
//! again: a write that comes late must not undo a later one.

use super::cluster::Shared;
use super::connection::{Connection, is_timeout};
use super::set::{ServerId, ServerSet};
use crate::store::{RegionId, StoreError};
use crate::wire::reply::{Failure, Reply};
use crate::wire::request::{Lease, Request};
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Why something could not be done over a link.
#[derive(Debug)]
pub enum LinkError {
    /// No connection, or it broke, or it took too long.
    Broken(io::Error),
    /// It is another server by now.
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

/// A connection, and the regions that can be used on it.
#[derive(Debug)]
pub struct Link {
    /// The connection.
    pub connection: Connection,
    /// None for a lease that was voided by another's fence: this link's own fence, if it needed one,
    /// is done, and another would only void the other's lease in turn, for ever.
    leases: BTreeMap<RegionId, Option<Lease>>,
    /// Something sent on an earlier link may still be under way.
    fences: bool,
}

/// One thread's links.
#[derive(Debug)]
pub struct Links {
    shared: Arc<Shared>,
    patience: Duration,
    /// How long to look for an answer from this machine before sleeping.
    looks_for: Duration,
    /// They carry nothing that changes a server.
    is_read_only: bool,
    links: Vec<Option<Link>>,
    /// Servers to which a link was closed.
    closed: ServerSet,
}

impl Links {
    pub(super) fn new(shared: Arc<Shared>, patience: Duration, is_read_only: bool) -> Links {
        let (links, closed) = (Vec::new(), ServerSet::EMPTY);
        Links { shared, patience, looks_for: Duration::ZERO, is_read_only, links, closed }
    }

    /// From now on, links that are opened look for answers from this machine for so long, before they sleep.
    pub fn look_for_answers(&mut self, time: Duration) {
        self.looks_for = time;
    }

    /// The link to a server, if it is open.
    pub fn existing(&mut self, server: ServerId) -> Option<&mut Link> {
        self.links.get_mut(server as usize)?.as_mut()
    }

    /// Closes the link to a server: what was on its way there is not waited for any more.
    pub fn close(&mut self, server: ServerId) {
        if let Some(Some(_)) = self.links.get_mut(server as usize).map(Option::take) {
            self.closed.insert(server);
        }
    }

    /// The lease on a region is void: the next use takes the current one.
    pub fn forget_lease(&mut self, server: ServerId, region: RegionId) {
        if let Some(lease) = self.existing(server).and_then(|link| link.leases.get_mut(&region)) {
            *lease = None;
        }
    }

    /// The link to a server, opened if need be.
    ///
    /// # Errors
    /// When it does not answer, or is not the one that it was.
    pub fn open(&mut self, server: ServerId) -> Result<&mut Link, LinkError> {
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

    /// Takes over a connection that is open already.
    pub(super) fn adopt(&mut self, server: ServerId, mut connection: Connection) -> io::Result<()> {
        connection.set_patience(self.patience)?;
        connection.look_for_answers(self.looks_for)?;
        let at = server as usize;
        if self.links.len() <= at {
            self.links.resize_with(at + 1, || None);
        }
        self.close(server);
        let fences = !self.is_read_only && self.closed.has(server);
        self.links[at] = Some(Link { connection, leases: BTreeMap::new(), fences });
        Ok(())
    }

    /// The link to a server, and how a region is used there.
    ///
    /// # Errors
    /// As `open`, and when the region is not there.
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

    /// Proves to a server that a region is ours, and with `fence` voids what went before.
    ///
    /// # Errors
    /// As `leased`.
    pub fn attach(
        &mut self,
        server: ServerId,
        region: RegionId,
        fence: bool,
    ) -> Result<Lease, LinkError> {
        let (patience, answer_within) = (self.patience, self.shared.options.answer_within);
        // First: what is known of the region is of the server's start that the link is to, or a later one.
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

    /// One request and its reply, which lies in the connection.
    ///
    /// # Errors
    /// As `open`; and what the server does not do.
    pub fn call(
        &mut self,
        server: ServerId,
        request: &Request<'_>,
    ) -> Result<Reply<'_>, LinkError> {
        let connection = &mut self.open(server)?.connection;
        let id = connection.send(request)?;
        wait(connection, id)
    }

    /// The same for a request that is about a region.
    ///
    /// # Errors
    /// As `call`.
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

/// Waits for a reply that has no pages, or has them with sums.
///
/// # Errors
/// A time-out counts as broken; a failure is told apart.
pub fn wait(connection: &mut Connection, id: u32) -> Result<Reply<'_>, LinkError> {
    match connection.wait(id, &mut [])? {
        Reply::Failed(failure) => Err(LinkError::Failed(failure)),
        reply => Ok(reply),
    }
}

/// Whether a lease was voided by another link's fence.
pub fn is_stale(error: &LinkError) -> bool {
    matches!(error, LinkError::Failed(Failure::StaleLease))
}

/// A reply that does not fit the request.
pub fn unexpected() -> LinkError {
    LinkError::Broken(io::Error::other("a reply that does not fit the request"))
}

/// Whether the link itself is of no further use.
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

/// Whether it only takes longer.
pub fn is_slow(error: &LinkError) -> bool {
    matches!(error, LinkError::Broken(error) if is_timeout(error))
}
