//! Snapshots of a region on all servers, for the child of a fork.
//!
//! The caller holds the monitor's lock, so no repair moves pages meanwhile, and no writer is at work. So
//! what the replicator knows of a chunk is true of each server's snapshot.

use super::super::link::{LinkError, is_broken, unexpected};
use super::super::peer::Peer;
use super::super::set::ServerId;
use super::super::state::{ClusterSnapshot, ClusterState, RegionHandle};
use super::ServerMonitor;
use crate::store::{RegionId, StoreError};
use crate::wire::SNAPSHOTS_FROM;
use crate::wire::reply::Reply;
use crate::wire::request::Request;
use std::collections::BTreeMap;
use std::sync::PoisonError;
use std::time::Duration;

/// The time for which the client waits for a snapshot: a server takes some 0.1 µs for each page.
const PATIENCE: Duration = Duration::from_secs(10);

impl ServerMonitor {
    /// Makes a snapshot of a region on every server that is up.
    ///
    /// # Errors
    /// If no snapshot has some of the pages.
    pub fn snapshot(&mut self, region: RegionId) -> Result<ClusterSnapshot, StoreError> {
        let pages = self.shared.region_pages(region)?;
        let mut handles = BTreeMap::new();
        let mut problem: Option<(ServerId, String)> = None;
        let up = self.shared.replicator().up();
        for server in up.iter() {
            match self.snapshot_on(server, region) {
                Ok(Some(handle)) => drop(handles.insert(server, handle)),
                Ok(None) => {
                    problem =
                        Some((server, "its pagetax is older than this one; upgrade it".into()));
                }
                // The region was never created there.
                Err(LinkError::NoRegion) => {}
                Err(error) => {
                    if is_broken(&error) {
                        self.links.close(server);
                    }
                    problem = Some((server, reason(error)));
                }
            }
        }
        let mut replicator = self.shared.replicator().of_region(region);
        let missing = (0..self.server_count()).filter(|server| !handles.contains_key(server));
        let damaged: usize = missing.map(|server| replicator.mark_gone(server).len()).sum();
        if damaged > 0 {
            return Err(match problem {
                Some((server, why)) => StoreError::Refused {
                    server: self.shared.peer(server).endpoint.label.clone(),
                    why: format!("it cannot share pages with a child: {why}"),
                },
                None => self.shared.unreachable_error(),
            });
        }
        let mut options = self.shared.options.clone();
        options.tls = options.tls.map(|tls| tls.detached());
        let peers = self.shared.peers.read().unwrap_or_else(PoisonError::into_inner);
        let peers: Vec<Peer> =
            peers.iter().map(|peer| peer.for_child(options.tls.clone())).collect();
        Ok(ClusterSnapshot { options, replicator, peers, handles, region, pages })
    }

    /// Makes a snapshot on a server. Returns `None` if the server's protocol has none.
    fn snapshot_on(
        &mut self,
        server: ServerId,
        region: RegionId,
    ) -> Result<Option<RegionHandle>, LinkError> {
        if self.links.open(server)?.connection.version < SNAPSHOTS_FROM {
            return Ok(None);
        }
        let token = ClusterState::fresh_token().map_err(|_| unexpected())?;
        let made = self.links.with_lease(server, region, |links| {
            let (connection, on) = links.leased(server, region)?;
            connection.set_patience(PATIENCE)?;
            match links.call(server, &Request::Snapshot { on, token: &token })? {
                Reply::Created(lease) => Ok(Some(RegionHandle { number: lease.region, token })),
                _ => Err(unexpected()),
            }
        });
        if let Some(link) = self.links.existing(server) {
            link.connection.set_patience(self.shared.options.answer_within)?;
        }
        made
    }

    /// Attaches the links of a forked child's client to its region. Until a link is attached, a server
    /// keeps the snapshot only for its linger time.
    pub fn attach_snapshot(&mut self, region: RegionId) {
        for server in self.shared.replicator().up().iter() {
            if let Err(error) = self.links.attach(server, region, false)
                && is_broken(&error)
            {
                // The next poll finds out what happened to the server.
                self.links.close(server);
            }
        }
    }
}

fn reason(error: LinkError) -> String {
    match error {
        LinkError::Broken(error) => error.to_string(),
        LinkError::Failed(failure) => failure.to_string(),
        LinkError::Restarted => "it was restarted".into(),
        LinkError::NoRegion => "it does not have them".into(),
    }
}
