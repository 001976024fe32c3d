//! A page store on several memory servers.

pub use super::options::{ClusterOptions, UNREACHABLE};
pub use super::state::ClusterCounters;

use super::control::Control;
use super::monitor::ServerMonitor;
use super::peer::Peer;
use super::reader::ReplicaReader;
use super::state::{ClusterSnapshot, ClusterState};
use super::writer::ReplicaWriter;
use crate::store::{Capacity, ChildStore, PageReader, PageStore, PageWriter, RegionId, StoreError};
use crate::threads;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A page store on memory servers.
#[derive(Debug)]
pub struct Cluster {
    shared: Arc<ClusterState>,
    monitor: Arc<Mutex<ServerMonitor>>,
    next_region: AtomicU64,
    thread: Option<threads::RunningThread>,
}

impl Cluster {
    /// Connects to all servers that are reachable.
    ///
    /// # Errors
    /// If `copies` is not 1 to 3, fewer servers than `copies` answer, or a server refuses this
    /// client. Also if a server beyond loopback would be used with neither TLS nor `insecure`.
    pub fn connect(options: ClusterOptions) -> Result<Cluster, StoreError> {
        if !(1..=3).contains(&options.copies) {
            return Err(StoreError::BadRequest("there can be 1, 2 or 3 copies"));
        }
        if options.discover && options.needs_tls() {
            // The first program to send an announcement would get the pages.
            return Err(StoreError::Insecure { server: "a server that --discover finds".into() });
        }
        let copies = options.copies;
        let shared = Arc::new(ClusterState::new(options));
        let mut monitor = ServerMonitor::new(shared.clone())?;
        let problem = monitor.connect_all()?;
        let reached = shared.replicator().up().len();
        if reached < copies {
            return Err(problem.unwrap_or_else(|| StoreError::Unreachable {
                server: format!("{copies} memory servers for {copies} copies"),
                source: io::Error::other(format!("{reached} found")),
            }));
        }
        Cluster::start(shared, monitor, 1)
    }

    /// Connects the client of a forked child.
    fn of_child(snapshot: ClusterSnapshot) -> Result<Cluster, StoreError> {
        let region = snapshot.region;
        let shared = Arc::new(ClusterState::of_child(snapshot));
        let mut monitor = ServerMonitor::new(shared.clone())?;
        monitor.attach_snapshot(region);
        Cluster::start(shared, monitor, region.0 + 1)
    }

    fn start(
        shared: Arc<ClusterState>,
        monitor: ServerMonitor,
        next_region: u64,
    ) -> Result<Cluster, StoreError> {
        let monitor = Arc::new(Mutex::new(monitor));
        let control = Control { shared: shared.clone(), monitor: monitor.clone() };
        let spawned = threads::spawn("pagetax-control", move || control.run_or_abort())
            .map_err(|source| StoreError::Unreachable { server: "a thread".into(), source })?;
        let next_region = AtomicU64::new(next_region);
        Ok(Cluster { shared, monitor, next_region, thread: Some(spawned) })
    }

    /// Returns the counts of events since the client connected.
    pub fn counters(&self) -> &ClusterCounters {
        &self.shared.counters
    }

    /// Returns the number of servers that are up.
    pub fn servers_up(&self) -> usize {
        self.shared.replicator().up().len()
    }

    /// Returns the number of chunk replicas that are still missing until no chunk is
    /// under-replicated.
    pub fn replicas_missing(&self) -> u64 {
        self.shared.replicator().replicas_missing()
    }

    fn monitor(&self) -> MutexGuard<'_, ServerMonitor> {
        self.monitor.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PageStore for Cluster {
    fn describe(&self) -> String {
        let peers = self.shared.peers.read().unwrap_or_else(PoisonError::into_inner);
        let labels: Vec<&str> = peers.iter().map(|peer| peer.endpoint.label.as_str()).collect();
        let (copies, labels) = (self.shared.options.copies, labels.join(", "));
        format!("{copies} {} on {labels}", if copies == 1 { "copy" } else { "copies" })
    }

    /// Returns warnings for the user, a line each: servers that run on the same machine. Empty
    /// without replicas to lose together (`copies` below 2).
    fn warnings(&self) -> Vec<String> {
        if self.shared.options.copies < 2 {
            return Vec::new();
        }
        let peers = self.shared.peers.read().unwrap_or_else(PoisonError::into_inner);
        let up = self.shared.replicator().up();
        let reached: Vec<&Arc<Peer>> =
            (0..).zip(peers.iter()).filter(|(id, _)| up.has(*id)).map(|(_, peer)| peer).collect();
        let machine = |peer: &Peer| peer.machine.load(Ordering::Relaxed);
        let lines = reached.iter().enumerate().filter_map(|(at, peer)| {
            let other = reached[..at].iter().find(|other| machine(other) == machine(peer))?;
            Some(format!(
                "{} and {} run on one machine: whatever takes it down takes both replicas of a page",
                other.endpoint.label, peer.endpoint.label
            ))
        });
        lines.collect()
    }

    fn capacity(&self) -> Result<Capacity, StoreError> {
        let replicator = self.shared.replicator();
        if replicator.up().is_empty() {
            return Err(self.shared.unreachable_error());
        }
        Ok(replicator.capacity())
    }

    fn create_region(&self, pages: u64, overcommit: bool) -> Result<RegionId, StoreError> {
        let pages_free = self.capacity()?.pages_free;
        if !overcommit && pages > pages_free {
            return Err(StoreError::Full { pages_asked: pages, pages_free });
        }
        let region = RegionId(self.next_region.fetch_add(1, Ordering::Relaxed));
        let mut monitor = self.monitor();
        self.shared.regions_mut().insert(region, pages);
        self.shared.replicator_mut().add_region(region, pages);
        let refused = monitor.create_everywhere(region, pages);
        let up = self.shared.replicator().up();
        let made = up.iter().filter(|server| self.shared.remote(region, *server).is_some()).count();
        if let Some(server) = refused.filter(|_| made < self.shared.options.copies) {
            // Refuse now: with no server to evict to, the program would run on over its memory
            // limit.
            monitor.drop_everywhere(region);
            self.shared.regions_mut().remove(&region);
            self.shared.replicator_mut().drop_region(region);
            return Err(StoreError::Refused {
                server: self.shared.peer(server).endpoint.label.clone(),
                why: "it has as many regions as it may, of this client or of all; raise its \
                      --client-regions-max or --regions-max, or use another server"
                    .into(),
            });
        }
        Ok(region)
    }

    fn drop_region(&self, region: RegionId) -> Result<(), StoreError> {
        let mut monitor = self.monitor();
        self.shared.regions_mut().remove(&region).ok_or(StoreError::NoRegion(region))?;
        self.shared.replicator_mut().drop_region(region);
        monitor.drop_everywhere(region);
        Ok(())
    }

    fn drop_region_at_end(&self, region: RegionId) {
        self.monitor().drop_at_end(region);
    }

    fn fork(&self, region: RegionId) -> Result<ChildStore, StoreError> {
        // Locked, so that no repair is under way.
        let snapshot = self.monitor().snapshot(region)?;
        Ok(Box::new(|| Ok(Arc::new(Cluster::of_child(snapshot)?))))
    }

    fn reader(&self) -> Result<Box<dyn PageReader>, StoreError> {
        Ok(Box::new(ReplicaReader::new(self.shared.clone())))
    }

    fn writer(&self) -> Result<Box<dyn PageWriter>, StoreError> {
        Ok(Box::new(ReplicaWriter::new(self.shared.clone())))
    }
}

impl Drop for Cluster {
    /// Ends the control thread, and drops all regions so that the servers can reuse their memory.
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::Relaxed);
        self.shared.notify();
        if let Some(thread) = self.thread.take() {
            thread.join();
        }
        let regions: Vec<RegionId> = self.shared.regions().keys().copied().collect();
        let mut monitor = self.monitor();
        regions.into_iter().for_each(|region| monitor.drop_everywhere(region));
    }
}

#[cfg(test)]
mod tests {
    use super::super::connection::Endpoint;
    use super::super::replicator::Availability;
    use super::*;
    use crate::server::listen::{self, Server};
    use std::net::Ipv4Addr;

    #[test]
    fn another_server_of_the_same_name_is_not_taken_for_the_one_that_was_met() {
        let start = |_| {
            Server::start((Ipv4Addr::LOCALHOST, 0).into(), listen::ServerOptions::default())
                .unwrap()
        };
        let [met, other] = [0, 1].map(start);
        let shared = Arc::new(ClusterState::new(ClusterOptions::new(Vec::new())));
        shared.replicator_mut().add_server().unwrap();
        let name = Endpoint::of(&[met.address(), other.address()]);
        shared.peers.write().unwrap().push(Arc::new(Peer::new(name)));
        let mut monitor = ServerMonitor::new(shared.clone()).unwrap();
        monitor.connect_all().unwrap();
        assert_eq!(shared.availability(0), Availability::Up);
        drop(met);
        shared.record_failure(0, None);
        // `Gone` would mean that its pages are lost, but it may come back with them.
        assert_eq!(shared.availability(0), Availability::Down);
        monitor.poll_servers();
        assert_eq!(shared.availability(0), Availability::Down);
    }
}
