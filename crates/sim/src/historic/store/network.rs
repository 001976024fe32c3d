//! Network memory: servers that lend their memory as a backing store, and the cost of moving pages.
//!
//! A page travels in two halves because of the network's MTU. If the first half is lost, the client
//! sees the second arrive alone and requests both again. It spins for a while. If the page still
//! has not arrived, it sleeps, for a time that does not depend on the network. Source of the
//! mechanisms: the NMS report (2003); the constants come from the machine file.
//! Invariant: a server never holds more pages than it has room for.

use pagetax_core::access::Rng;
use pagetax_core::units::Bytes;

/// The choice of a server for a new page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// The next server in turn that has room.
    RoundRobin,
    /// The first server with room.
    FirstFit,
    /// The server with the most room; of equals, the first.
    MostFree,
}

impl Placement {
    /// The placements by their names in machine files.
    pub const NAMES: [(&str, Placement); 3] = [
        ("round_robin", Placement::RoundRobin),
        ("first_fit", Placement::FirstFit),
        ("most_free", Placement::MostFree),
    ];
}

/// Constants of the network and its servers. Times are in nanoseconds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkModel {
    /// Memory that each server lends; at least one server.
    pub server_bytes: Vec<u64>,
    /// The choice of a server for a new page.
    pub placement: Placement,
    /// Time to find the servers, spent once before the first page-out.
    pub discovery_ns: u64,
    /// Minimum time of an exchange: a request and both halves.
    pub exchange_ns_min: u64,
    /// Mean of the jitter that is added to `exchange_ns_min`.
    pub exchange_jitter_ns_mean: u64,
    /// First exchanges that lose a half, in parts per million.
    pub loss_ppm: u64,
    /// Retransmissions that lose a half, in parts per million.
    pub loss_again_ppm: u64,
    /// The longest time that the client spins for a page before it sleeps.
    pub spin_ns_max: u64,
    /// Shortest sleep for a page.
    pub sleep_ns_min: u64,
    /// Longest sleep for a page.
    pub sleep_ns_max: u64,
    /// Minimum time of a page-out, including its acknowledgement.
    pub page_out_ns_min: u64,
    /// Mean of the jitter that is added to `page_out_ns_min`.
    pub page_out_jitter_ns_mean: u64,
}

const PPM: u64 = 1_000_000;

/// The reasons why constants describe no possible network.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NetworkModelError {
    /// No server has memory for a page.
    #[error("a network store needs at least one server with at least one page of memory")]
    NoServer,
    /// A probability is above 1: the constant's name and its parts per million.
    #[error("{0} is {1} parts per million, more than all")]
    Share(&'static str, u64),
    /// The shortest sleep is above the longest; both in nanoseconds.
    #[error("the shortest sleep, {0} ns, is longer than the longest, {1} ns")]
    Sleep(u64, u64),
}

impl NetworkModel {
    /// Checks that the constants are possible.
    ///
    /// # Errors
    /// Returns the first impossible constant.
    pub fn check(&self, page_bytes: u64) -> Result<(), NetworkModelError> {
        if !self.server_bytes.iter().any(|bytes| *bytes >= page_bytes) {
            return Err(NetworkModelError::NoServer);
        }
        for (name, ppm) in [("loss", self.loss_ppm), ("loss_again", self.loss_again_ppm)] {
            if ppm > PPM {
                return Err(NetworkModelError::Share(name, ppm));
            }
        }
        match self.sleep_ns_min > self.sleep_ns_max {
            true => Err(NetworkModelError::Sleep(self.sleep_ns_min, self.sleep_ns_max)),
            false => Ok(()),
        }
    }

    /// Returns the memory of all servers.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.server_bytes.iter().sum())
    }
}

/// The error that no server has room for another page.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("all {servers} memory servers are full ({bytes} in all)")]
pub struct ServersFull {
    /// The number of servers, all of them full.
    pub servers: usize,
    /// The memory of all servers together.
    pub bytes: Bytes,
}

/// The costs of a page-in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageIn {
    /// Time waited on the CPU, spinning.
    pub spin_ns: u64,
    /// Time waited without the CPU, asleep.
    pub sleep_ns: u64,
    /// The number of requests, including the first.
    pub exchanges: u32,
}

/// The index of a server.
pub type Server = u16;

/// A server's memory, in pages.
#[derive(Debug, Clone)]
struct Room {
    capacity: u64,
    used: u64,
}

/// The servers as one client sees them.
#[derive(Debug, Clone)]
pub struct Network {
    model: NetworkModel,
    servers: Vec<Room>,
    /// The server at which the round robin continues.
    next: usize,
    discovered: bool,
}

impl Network {
    /// Returns empty servers that are not discovered yet. The model must have passed
    /// [`NetworkModel::check`].
    pub fn new(model: NetworkModel, page_bytes: u64) -> Self {
        debug_assert_eq!(model.check(page_bytes), Ok(()));
        let room = |bytes: &u64| Room { capacity: bytes / page_bytes, used: 0 };
        let servers = model.server_bytes.iter().map(room).collect();
        Network { model, servers, next: 0, discovered: false }
    }

    /// Returns each server's stored pages and its capacity in pages.
    pub fn pages(&self) -> Vec<(u64, u64)> {
        self.servers.iter().map(|room| (room.used, room.capacity)).collect()
    }

    /// Returns the nanoseconds to find the servers on the first call, before the first page-out,
    /// and 0 afterwards.
    pub fn discover_ns(&mut self) -> u64 {
        match std::mem::replace(&mut self.discovered, true) {
            true => 0,
            false => self.model.discovery_ns,
        }
    }

    /// Reserves room for a page that no server holds yet. Returns an error if all servers are full.
    pub fn place(&mut self) -> Result<Server, ServersFull> {
        let servers = self.servers.len();
        let free = |server: &usize| self.servers[*server].capacity - self.servers[*server].used;
        let mut with_room = (0..servers).filter(|server| free(server) > 0);
        let chosen = match self.model.placement {
            Placement::FirstFit => with_room.next(),
            Placement::MostFree => with_room.max_by_key(|server| (free(server), servers - server)),
            Placement::RoundRobin => {
                (self.next..servers).chain(0..self.next).find(|server| free(server) > 0)
            }
        };
        let server = chosen.ok_or(ServersFull { servers, bytes: self.model.bytes() })?;
        self.next = (server + 1) % servers;
        self.servers[server].used += 1;
        Ok(server as Server)
    }

    /// Frees a server's room for a page whose replica it drops.
    pub fn release(&mut self, server: Server) {
        self.servers[server as usize].used -= 1;
    }

    /// Returns the nanoseconds of a page-out, including its acknowledgement.
    pub fn page_out_ns(&self, rng: &mut Rng) -> u64 {
        self.model.page_out_ns_min + jitter_ns(rng, self.model.page_out_jitter_ns_mean)
    }

    /// Fetches a page, with retransmissions until the spin time is over.
    pub fn page_in(&self, rng: &mut Rng) -> PageIn {
        let (mut waited_ns, mut exchanges) = (0, 0);
        while waited_ns <= self.model.spin_ns_max {
            waited_ns += self.model.exchange_ns_min.max(1)
                + jitter_ns(rng, self.model.exchange_jitter_ns_mean);
            let loss_ppm =
                if exchanges == 0 { self.model.loss_ppm } else { self.model.loss_again_ppm };
            exchanges += 1;
            if rng.below(PPM) >= loss_ppm {
                break;
            }
        }
        let spin_ns = waited_ns.min(self.model.spin_ns_max);
        let sleep_ns = if waited_ns > spin_ns { self.sleep_ns(rng) } else { 0 };
        PageIn { spin_ns, sleep_ns: sleep_ns.max(waited_ns - spin_ns), exchanges }
    }

    fn sleep_ns(&self, rng: &mut Rng) -> u64 {
        let (min, max) = (self.model.sleep_ns_min, self.model.sleep_ns_max);
        min + rng.below(max - min + 1)
    }
}

/// Returns a uniformly distributed time from 0 to twice its mean.
pub(crate) fn jitter_ns(rng: &mut Rng, mean_ns: u64) -> u64 {
    rng.below(2 * mean_ns + 1)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn model(server_bytes: &[u64]) -> NetworkModel {
        NetworkModel {
            server_bytes: server_bytes.to_vec(),
            placement: Placement::RoundRobin,
            discovery_ns: 4_000_000_000,
            exchange_ns_min: 230_000,
            exchange_jitter_ns_mean: 0,
            loss_ppm: 0,
            loss_again_ppm: 0,
            spin_ns_max: 800_000,
            sleep_ns_min: 10_000_000,
            sleep_ns_max: 50_000_000,
            page_out_ns_min: 400_000,
            page_out_jitter_ns_mean: 44_000,
        }
    }

    fn network(model: NetworkModel) -> Network {
        Network::new(model, 8192)
    }

    #[test]
    fn a_lost_half_costs_a_second_exchange() {
        let net = network(NetworkModel { loss_ppm: PPM, ..model(&[8192]) });
        let mut rng = Rng::new(1);
        assert_eq!(net.page_in(&mut rng), PageIn { spin_ns: 460_000, sleep_ns: 0, exchanges: 2 });
    }

    #[test]
    fn what_does_not_come_while_spinning_is_slept_for() {
        let jam = NetworkModel { loss_ppm: PPM, loss_again_ppm: PPM, ..model(&[8192]) };
        let page_in = network(jam).page_in(&mut Rng::new(1));
        assert_eq!((page_in.spin_ns, page_in.exchanges), (800_000, 4));
        assert!((10_000_000..=50_000_000).contains(&page_in.sleep_ns));
    }

    #[test]
    fn full_servers_are_left_out_and_then_an_error() {
        let order = |placement| {
            let mut net = network(NetworkModel { placement, ..model(&[8192, 4 * 8192]) });
            let order: Vec<_> = std::iter::from_fn(|| net.place().ok()).collect();
            assert_eq!(net.pages(), [(1, 1), (4, 4)]);
            let full = net.place().unwrap_err();
            assert_eq!(full.to_string(), "all 2 memory servers are full (40K in all)");
            net.release(1);
            assert_eq!(net.place(), Ok(1));
            order
        };
        assert_eq!(order(Placement::RoundRobin), [0, 1, 1, 1, 1]);
        assert_eq!(order(Placement::FirstFit), [0, 1, 1, 1, 1]);
        assert_eq!(order(Placement::MostFree), [1, 1, 1, 0, 1]);
    }

    #[test]
    fn impossible_networks_are_refused() {
        let refuse = |model: NetworkModel| model.check(8192).unwrap_err();
        assert_eq!(refuse(model(&[])), NetworkModelError::NoServer);
        assert_eq!(refuse(model(&[4096])), NetworkModelError::NoServer);
        let lossy = NetworkModel { loss_ppm: PPM + 1, ..model(&[8192]) };
        assert_eq!(refuse(lossy), NetworkModelError::Share("loss", PPM + 1));
        let sleepy = NetworkModel { sleep_ns_min: 2, sleep_ns_max: 1, ..model(&[8192]) };
        assert_eq!(refuse(sleepy), NetworkModelError::Sleep(2, 1));
    }
}
