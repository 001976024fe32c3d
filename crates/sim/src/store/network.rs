//! Network memory: servers that lend their memory as a backing store, and what a page costs on the way.
//!
//! A page travels in two halves, for the sake of the network's MTU. Now and then the first half is
//! lost; the client sees the second arrive alone and asks for both again. It spins for a while; if the
//! page is still not there it is put to sleep, and how long that lasts has nothing to do with the
//! network. Source of the mechanisms: report 004 (NMS, 2003); constants come from the machine file.
//! Invariant: a server never holds more pages than it has room for.

use pagetax_core::access::Rng;
use pagetax_core::units::Bytes;

/// Which server takes a new page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// One after the other, leaving out those that are full.
    RoundRobin,
    /// The first with room.
    FirstFit,
    /// The one with the most room.
    MostFree,
}

impl Placement {
    /// As machine files name them.
    pub const NAMES: [(&str, Placement); 3] = [
        ("round_robin", Placement::RoundRobin),
        ("first_fit", Placement::FirstFit),
        ("most_free", Placement::MostFree),
    ];
}

/// Constants of the network and its servers. Times in nanoseconds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkModel {
    /// Memory that each server lends; at least one server.
    pub server_bytes: Vec<u64>,
    /// Which server takes a new page.
    pub placement: Placement,
    /// Waited once, before the first page goes out, to find the servers.
    pub discovery_ns: u64,
    /// A request and both halves, at the least.
    pub exchange_ns_min: u64,
    /// What an exchange takes on top, in the mean.
    pub exchange_jitter_ns_mean: u64,
    /// First exchanges that lose a half, in parts per million.
    pub loss_ppm: u64,
    /// Retransmissions that lose a half, in parts per million.
    pub loss_again_ppm: u64,
    /// How long the client spins for a page before it is put to sleep.
    pub spin_ns_max: u64,
    /// How long such a sleep lasts at the least.
    pub sleep_ns_min: u64,
    /// How long such a sleep lasts at the most.
    pub sleep_ns_max: u64,
    /// Sending a page out and hearing that it arrived, at the least.
    pub page_out_ns_min: u64,
    /// What a page-out takes on top, in the mean.
    pub page_out_jitter_ns_mean: u64,
}

const PPM: u64 = 1_000_000;

/// Constants that no network can have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NetworkModelError {
    /// Network memory needs a server.
    #[error("a network store needs at least one server with at least one page of memory")]
    NoServer,
    /// Not a probability.
    #[error("{0} is {1} parts per million, more than all")]
    Share(&'static str, u64),
    /// Shortest above longest.
    #[error("the shortest sleep, {0} ns, is longer than the longest, {1} ns")]
    Sleep(u64, u64),
}

impl NetworkModel {
    /// Whether there can be such a network.
    ///
    /// # Errors
    /// The first constant that is impossible.
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

    /// Memory of all servers.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.server_bytes.iter().sum())
    }
}

/// No server has room for another page.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("all {servers} memory servers are full ({bytes} in all)")]
pub struct ServersFull {
    /// How many there are.
    pub servers: usize,
    /// What they lend together.
    pub bytes: Bytes,
}

/// How a page came in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageIn {
    /// Spent on the CPU, waiting.
    pub spin_ns: u64,
    /// Spent asleep, waiting.
    pub sleep_ns: u64,
    /// Requests, the first included.
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
    /// Where the round robin stands.
    next: usize,
    discovered: bool,
}

impl Network {
    /// All servers empty, none found yet. The model has passed [`NetworkModel::check`].
    pub fn new(model: NetworkModel, page_bytes: u64) -> Self {
        debug_assert_eq!(model.check(page_bytes), Ok(()));
        let room = |bytes: &u64| Room { capacity: bytes / page_bytes, used: 0 };
        let servers = model.server_bytes.iter().map(room).collect();
        Network { model, servers, next: 0, discovered: false }
    }

    /// Pages on each server, and how many it has room for.
    pub fn pages(&self) -> Vec<(u64, u64)> {
        self.servers.iter().map(|room| (room.used, room.capacity)).collect()
    }

    /// The wait for the servers to be found: only once, before the first page-out.
    pub fn discover_ns(&mut self) -> u64 {
        match std::mem::replace(&mut self.discovered, true) {
            true => 0,
            false => self.model.discovery_ns,
        }
    }

    /// Room for a page that no server holds yet.
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

    /// A server drops its copy of a page.
    pub fn release(&mut self, server: Server) {
        self.servers[server as usize].used -= 1;
    }

    /// Sends a page out and waits until it has arrived.
    pub fn page_out_ns(&self, rng: &mut Rng) -> u64 {
        self.model.page_out_ns_min + jitter_ns(rng, self.model.page_out_jitter_ns_mean)
    }

    /// Fetches a page.
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

/// Uniform from 0 to twice its mean.
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
