//! Reaches servers again after an outage, and admits them.

use super::super::connection::{Connection, is_turned_away};
use super::super::link::{LinkError, is_slow, unexpected};
use super::super::peer::Peer;
use super::super::replicator::Availability;
use super::super::set::ServerId;
use super::{Outage, ServerMonitor};
use crate::store::RegionId;
use crate::wire::reply::Failure;
use crate::wire::request::Request;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The timeout of the connect to a server that is down, and of a reply on its old link.
const TRY_PATIENCE: Duration = Duration::from_millis(100);
/// The most silence that one poll may count. After a longer gap, this process was stopped, not the
/// server.
const SILENCE_PER_POLL_MAX: Duration = Duration::from_secs(2);

impl ServerMonitor {
    /// Tries with backoff to reach a server that is down. After `repair_after`, other servers take
    /// its place. After `unreachable`, the client stops waiting for it.
    pub(super) fn try_to_reconnect(&mut self, server: ServerId) {
        let peer = self.shared.peer(server);
        let up = self.shared.replicator().up();
        if peer.is_shunned() || peer.alias_of().is_some_and(|primary| up.has(primary)) {
            return;
        }
        let now = Instant::now();
        let mut away = (*self.away_mut(server)).unwrap_or(Outage {
            since: now,
            polled: now,
            silent: Duration::ZERO,
            is_turned_away: false,
            next_try: now,
            pause: Duration::from_millis(50),
        });
        if now >= away.next_try {
            match self.connect_or_reuse(server, &peer) {
                Ok(()) => return,
                Err(is_turned_away) => away.is_turned_away = is_turned_away,
            }
            away.pause = (away.pause * 2).min(Duration::from_secs(1));
            away.next_try = now + away.pause;
        }
        let past = (now - away.polled).min(SILENCE_PER_POLL_MAX);
        away.silent += if away.is_turned_away { Duration::ZERO } else { past };
        away.polled = now;
        *self.away_mut(server) = Some(away);
        if self.shared.availability(server) == Availability::Down {
            if away.silent >= self.shared.options.unreachable {
                self.shared.silent(server);
                self.shared.notify();
            } else if now - away.since >= self.shared.options.repair_after {
                self.shared.replicator_mut().give_up(server);
            }
        }
    }

    /// Admits a server again, over its old link or a new one. Otherwise returns true if the server
    /// refused the connection.
    fn connect_or_reuse(&mut self, server: ServerId, peer: &Peer) -> Result<(), bool> {
        if self.is_old_link_alive(server, peer) && self.admit_again(server, peer).is_ok() {
            return Ok(());
        }
        let connection = peer
            .connect(&self.shared.options.name, TRY_PATIENCE.min(self.shared.options.answer_within))
            .map_err(|error| is_turned_away(&error))?;
        self.admit(server, connection).map_err(|_| false)
    }

    /// Returns true if the same server answers on its old link. A server that was stalled has room
    /// for its open links, but perhaps not for new ones.
    fn is_old_link_alive(&mut self, server: ServerId, peer: &Peer) -> bool {
        let answer_within = self.shared.options.answer_within;
        let Some(link) = self.links.existing(server) else { return false };
        let is_same = link.connection.epoch == peer.epoch.load(Ordering::Relaxed);
        let set = link.connection.set_patience(TRY_PATIENCE.min(answer_within));
        let status = self.status(server);
        let restored =
            self.links.existing(server).map(|link| link.connection.set_patience(answer_within));
        match status {
            Ok(_) => is_same && set.is_ok() && restored.is_some_and(|set| set.is_ok()),
            Err(error) => {
                if !is_slow(&error) {
                    self.links.close(server);
                }
                false
            }
        }
    }

    /// Admits a server that is reachable for the first time or again.
    pub(super) fn admit(
        &mut self,
        server: ServerId,
        connection: Connection,
    ) -> Result<(), LinkError> {
        let (peer, epoch) = (self.shared.peer(server), connection.epoch);
        let alias_of = self.shared.server_of_epoch(epoch, server);
        peer.set_alias_of(alias_of);
        if alias_of.is_some() {
            return Ok(());
        }
        let (location, address) = (connection.location, connection.address());
        self.links.adopt(server, connection)?;
        peer.machine.store(location.machine, Ordering::Relaxed);
        self.shared.replicator_mut().set_failure_domain(server, location.failure_domain);
        if peer.epoch.load(Ordering::Relaxed) == epoch {
            self.admit_again(server, &peer)?;
        } else {
            self.recreate_regions(server)?;
            // Last: a thread that sees the new epoch must see the new state of the regions there.
            peer.epoch.store(epoch, Ordering::Release);
            self.finish_admission(server)?;
        }
        peer.pin(address);
        Ok(())
    }

    /// Admits a server that was away. A link to it is open.
    fn admit_again(&mut self, server: ServerId, peer: &Peer) -> Result<(), LinkError> {
        if !self.fence_and_discard(server)? {
            self.recreate_regions(server)?;
            let epoch = self.links.existing(server).map(|link| link.connection.epoch);
            peer.epoch.store(epoch.ok_or_else(unexpected)?, Ordering::Release);
        }
        self.finish_admission(server)
    }

    fn finish_admission(&mut self, server: ServerId) -> Result<(), LinkError> {
        let status = self.status(server)?;
        self.shared.replicator_mut().readmit_server(server);
        self.record_status(server, status);
        self.away_mut(server).take();
        self.shared.notify();
        Ok(())
    }

    /// Voids all earlier requests to a server that kept its epoch, and discards the replicas that
    /// became stale. Returns false if the server no longer has our regions.
    fn fence_and_discard(&mut self, server: ServerId) -> Result<bool, LinkError> {
        let regions: Vec<(RegionId, u64)> =
            self.shared.regions().iter().map(|(region, pages)| (*region, *pages)).collect();
        for (region, pages) in regions {
            match self.links.attach(server, region, true) {
                Ok(_) => {}
                Err(LinkError::NoRegion) => {
                    self.create(server, region, pages)?;
                }
                Err(LinkError::Failed(Failure::NoRegion | Failure::Denied)) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        let stale_runs = self.shared.replicator_mut().stale_runs(server);
        for (region, first, count) in stale_runs {
            match self.links.call_on(server, region, |on| Request::Discard { on, first, count }) {
                Ok(_) | Err(LinkError::NoRegion) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Creates all regions on a server that has none of them: it is new, was restarted or has lost
    /// them. Its earlier replicas count as lost.
    fn recreate_regions(&mut self, server: ServerId) -> Result<(), LinkError> {
        self.shared.gone(server);
        let regions: Vec<(RegionId, u64)> =
            self.shared.regions().iter().map(|(region, pages)| (*region, *pages)).collect();
        for (region, pages) in regions {
            self.shared.set_remote(region, server, None);
            self.create(server, region, pages)?;
        }
        Ok(())
    }
}
