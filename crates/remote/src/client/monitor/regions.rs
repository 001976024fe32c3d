//! Creates and drops regions on servers.

use super::super::link::{LinkError, unexpected};
use super::super::set::ServerId;
use super::super::state::{ClusterState, RegionHandle};
use super::ServerMonitor;
use crate::store::RegionId;
use crate::wire::reply::{Failure, Reply};
use crate::wire::request::Request;

/// A server's answer to a request to create a region.
pub(super) enum CreateOutcome {
    Yes,
    No(Failure),
}

impl ServerMonitor {
    /// Creates a region on every server that is up. Returns a server that takes no more regions, if
    /// there is one.
    ///
    /// If a creation fails, the client repeats it when it next admits the server. Until then the
    /// region's writes go to other servers.
    pub fn create_everywhere(&mut self, region: RegionId, pages: u64) -> Option<ServerId> {
        let (up, mut refused) = (self.shared.replicator().up(), None);
        for server in up.iter() {
            match self.create(server, region, pages) {
                Ok(CreateOutcome::No(Failure::TooMany)) => refused = Some(server),
                Err(LinkError::Broken(_)) => {
                    self.links.close(server);
                    self.shared.record_failure(server, None);
                }
                _ => {}
            }
        }
        refused
    }

    /// Drops a region on every server that is up. The others remove it as orphaned after their
    /// linger time.
    pub fn drop_everywhere(&mut self, region: RegionId) {
        for server in 0..self.server_count() {
            let up = self.shared.replicator().up().has(server);
            let is_there = up && self.shared.remote(region, server).is_some();
            if is_there && self.drop_on(server, region, false).is_err() {
                self.links.close(server);
            }
            self.shared.set_remote(region, server, None);
        }
    }

    /// Asks every server that is up to drop a region when this process ends.
    pub fn drop_at_end(&mut self, region: RegionId) {
        for server in 0..self.server_count() {
            let up = self.shared.replicator().up().has(server);
            if up && self.shared.remote(region, server).is_some() {
                // A server that misses the request keeps the orphaned region for its linger time.
                let _ = self.drop_on(server, region, true);
            }
        }
    }

    fn drop_on(
        &mut self,
        server: ServerId,
        region: RegionId,
        at_end: bool,
    ) -> Result<(), LinkError> {
        let drop_it = |on| Request::Drop { on, at_end };
        // Without a second try, the server may keep the region's memory for as long as this client is
        // connected.
        self.links
            .with_lease(server, region, |links| links.call_on(server, region, drop_it).map(drop))
    }

    pub(super) fn create(
        &mut self,
        server: ServerId,
        region: RegionId,
        pages: u64,
    ) -> Result<CreateOutcome, LinkError> {
        let token = ClusterState::fresh_token().map_err(|_| unexpected())?;
        let request = Request::Create { pages, overcommit: true, token: &token };
        match self.links.call(server, &request) {
            Ok(Reply::Created(lease)) => {
                let remote = RegionHandle { number: lease.region, token };
                self.shared.set_remote(region, server, Some(remote));
                Ok(CreateOutcome::Yes)
            }
            Ok(_) => Err(unexpected()),
            // The server takes no more regions: the pages of this one go elsewhere.
            Err(LinkError::Failed(why @ (Failure::TooMany | Failure::Draining))) => {
                Ok(CreateOutcome::No(why))
            }
            Err(error) => Err(error),
        }
    }
}
