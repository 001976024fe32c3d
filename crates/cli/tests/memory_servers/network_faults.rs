//! Servers on hosts of their own, behind a network that does what networks do: nothing that was put may be
//! lost or wrong as long as one of two servers that have it is well.

use crate::network::{Network, Wire, address};
use crate::pages::{put, try_get, try_put, wait_until};
use crate::serve::{PAGETAX, Serve};
use pagetax_core::access::Rng;
use pagetax_remote::client::ask;
use pagetax_remote::client::cluster::{Cluster, ClusterOptions};
use pagetax_remote::client::connection::Endpoint;
use pagetax_remote::page::PAGE_BYTES;
use pagetax_remote::pager::{self, PagerError, RemoteRegion};
use pagetax_remote::store::{PageReader, PageStore, PageWriter, RegionId, StoreError};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

/// The client is on this host, a server on each other.
const CLIENT: usize = 0;
const SERVERS: [usize; 3] = [1, 2, 3];

/// The servers of a network, by host.
struct Servers<'a> {
    network: &'a Network,
    running: Vec<Serve>,
}

impl<'a> Servers<'a> {
    fn start(network: &'a Network, memories: [&str; 3]) -> Servers<'a> {
        let start = |(host, memory)| start_on(network, host, memory);
        Servers { network, running: SERVERS.into_iter().zip(memories).map(start).collect() }
    }

    /// Kills a server with SIGKILL.
    fn kill(&mut self, host: usize) {
        self.running[host - 1].kill();
    }

    fn start_again(&mut self, host: usize) {
        self.running[host - 1] = start_on(self.network, host, "32M");
    }

    fn client(&self) -> Cluster {
        let labels = self.running.iter().map(|server| server.address.clone()).collect();
        let options = ClusterOptions {
            copies: 2,
            repair_after: Duration::from_millis(300),
            unreachable: Duration::from_secs(6),
            insecure: true,
            ..ClusterOptions::new(labels)
        };
        Cluster::connect(options).unwrap()
    }
}

fn start_on(network: &Network, host: usize, memory: &str) -> Serve {
    let listen = format!("{}:7070", address(host));
    network.on(host, || Serve::start(memory, &listen, &["--insecure"]))
}

fn wait_until_whole(store: &Cluster) {
    wait_until("all servers are back and every page has its copies", 40, || {
        store.servers_up() == SERVERS.len() && store.replicas_missing() == 0
    });
}

/// Pages that are written and read at random, each read checked.
struct Traffic {
    region: RegionId,
    reader: Box<dyn PageReader>,
    writer: Box<dyn PageWriter>,
    versions: Vec<u64>,
    rng: Rng,
    slowest: Duration,
}

impl Traffic {
    fn new(store: &Cluster, pages: u64) -> Traffic {
        let region = store.create_region(pages, false).unwrap();
        let (reader, mut writer) = (store.reader().unwrap(), store.writer().unwrap());
        (0..pages).for_each(|number| put(&mut *writer, region, number, 0));
        let versions = vec![0; pages as usize];
        Traffic { region, reader, writer, versions, rng: Rng::new(5), slowest: Duration::ZERO }
    }

    fn run(&mut self, steps: u64) {
        for _ in 0..steps {
            let begun = Instant::now();
            let number = self.rng.below(self.versions.len() as u64);
            let version = &mut self.versions[number as usize];
            if self.rng.below(3) == 0 {
                *version += 1;
                put(&mut *self.writer, self.region, number, *version);
            } else {
                try_get(&mut *self.reader, self.region, number, *version).unwrap();
            }
            self.slowest = self.slowest.max(begun.elapsed());
        }
    }

    fn check(&mut self) {
        for (number, version) in (0..).zip(&self.versions) {
            try_get(&mut *self.reader, self.region, number, *version).unwrap();
        }
        println!("longest stall: {:?}", self.slowest);
    }
}

/// Checks traffic before, during and after a fault that ends.
fn through(trouble: impl FnOnce(&Network, &mut Servers<'_>, &mut Traffic) + Send) {
    let Some(network) = Network::new(1 + SERVERS.len()) else { return };
    let mut servers = Servers::start(&network, ["32M"; 3]);
    network.on(CLIENT, || {
        let store = servers.client();
        let mut traffic = Traffic::new(&store, 600);
        traffic.run(100);
        trouble(&network, &mut servers, &mut traffic);
        network.repair();
        traffic.run(100);
        wait_until_whole(&store);
        traffic.run(100);
        traffic.check();
        store.drop_region(traffic.region).unwrap();
        for server in &servers.running {
            let report = ask::report(&Endpoint::new(&server.address, None).unwrap()).unwrap();
            assert_eq!(report.pages_held, 0, "what is dropped is given back: {report:?}");
        }
    });
}

#[test]
fn packets_that_are_lost_doubled_and_late() {
    let millis = Duration::from_millis;
    through(|network, _, traffic| {
        network.set_wire(Wire { loss: 20, doubled: 20, delay: millis(0), jitter: millis(3) });
        traffic.run(300);
    });
}

#[test]
fn a_partition_and_its_end() {
    through(|network, _, traffic| {
        network.cut(CLIENT, 1);
        traffic.run(500);
    });
}

#[test]
fn requests_arrive_and_replies_do_not() {
    through(|network, _, traffic| {
        network.cut_way(2, CLIENT);
        traffic.run(500);
    });
}

#[test]
fn a_server_dies_unheard_and_another_takes_its_address() {
    through(|network, servers, traffic| {
        network.cut(CLIENT, 3);
        traffic.run(50);
        servers.kill(3);
        servers.start_again(3);
        traffic.run(300);
        // The client's end of the old connections is still open when the wire works again.
    });
}

#[test]
fn a_server_is_killed_and_restarted_at_once() {
    through(|_, servers, traffic| {
        for host in [1, 2] {
            servers.kill(host);
            traffic.run(200);
            servers.start_again(host);
            traffic.run(200);
            thread::sleep(Duration::from_secs(1));
        }
    });
}

/// Drains a server from its own host, as it listens on that host's address alone.
#[test]
fn a_drained_host_leaves_its_pages_with_the_others() {
    let Some(network) = Network::new(1 + SERVERS.len()) else { return };
    let mut servers = Servers::start(&network, ["32M"; 3]);
    let drain = |servers: &Servers<'_>, from: usize| {
        let listen = servers.running[0].address.clone();
        let args = ["serve", "--drain", "--listen", &listen];
        network.on(from, || Command::new(PAGETAX).args(args).output().unwrap())
    };
    network.on(CLIENT, || {
        let store = servers.client();
        let mut traffic = Traffic::new(&store, 600);
        let denied = drain(&servers, CLIENT);
        let said = String::from_utf8_lossy(&denied.stderr).into_owned();
        assert!(!denied.status.success() && said.contains("answers a drain request"), "{said}");
        thread::scope(|scope| {
            let drained = scope.spawn(|| drain(&servers, SERVERS[0]));
            while !drained.is_finished() {
                traffic.run(1);
            }
            let drained = drained.join().unwrap();
            assert!(drained.status.success(), "{drained:?}");
        });
        wait_until("it has ended", 5, || servers.running[0].child.try_wait().unwrap().is_some());
        traffic.check();
    });
}

#[test]
fn servers_that_are_all_far_away_are_used_all_the_same() {
    let Some(network) = Network::new(1 + SERVERS.len()) else { return };
    let servers = Servers::start(&network, ["32M"; 3]);
    network.set_wire(Wire { delay: Duration::from_millis(10), ..Wire::default() });
    network.on(CLIENT, || {
        let store = servers.client();
        let mut traffic = Traffic::new(&store, 40);
        traffic.run(40);
        traffic.check();
        assert_eq!(store.servers_up(), SERVERS.len());
    });
}

#[test]
fn a_slow_server_is_not_waited_for() {
    let Some(network) = Network::new(1 + SERVERS.len()) else { return };
    let servers = Servers::start(&network, ["32M"; 3]);
    network.on(CLIENT, || {
        let store = servers.client();
        let mut traffic = Traffic::new(&store, 600);
        network.set_slow(1);
        traffic.run(200);
        assert!(store.counters().hedges_total.load(Ordering::Relaxed) > 0);
        network.repair();
        traffic.check();
    });
}

#[test]
fn full_servers_keep_what_they_have() {
    let Some(network) = Network::new(1 + SERVERS.len()) else { return };
    let servers = Servers::start(&network, ["1M", "4M", "5M"]);
    network.on(CLIENT, || {
        let store = servers.client();
        let room = store.capacity().unwrap();
        let too_large = store.create_region(room.pages_free + 1, false);
        assert!(matches!(too_large, Err(StoreError::Full { .. })), "{too_large:?}");
        let region = store.create_region(4 * room.pages_free, true).unwrap();
        let (mut reader, mut writer) = (store.reader().unwrap(), store.writer().unwrap());
        let mut stored = 0;
        let error = loop {
            match try_put(&mut *writer, region, stored, 0) {
                Ok(()) => stored += 1,
                Err(error) => break error,
            }
        };
        assert!(matches!(error, StoreError::Full { .. }), "{error}");
        println!("{stored} pages of {} stored before `{error}`", room.pages_free);
        // Two copies of each: the two larger servers take 4M together, but for what a chunk cuts off.
        assert!(stored >= (3 << 20) / PAGE_BYTES as u64, "{stored}");
        (0..stored).for_each(|number| try_get(&mut *reader, region, number, 0).unwrap());
    });
}

/// Maps memory on these servers. Prints a skip and returns None if this user may not page.
fn map(store: &Arc<Cluster>, bytes: u64, resident_bytes: u64) -> Option<RemoteRegion> {
    match RemoteRegion::map(store.clone(), bytes, pager::PagerOptions::resident(resident_bytes)) {
        Err(error @ PagerError::Uffd(_)) => {
            println!("SKIP: {error}");
            None
        }
        other => Some(other.unwrap()),
    }
}

/// Kills, restarts, cuts off, half connects or slows one server at a time, while a program rewrites memory of
/// which a quarter is resident. The long version is `cargo xtask bench stalls`.
#[test]
fn memory_of_a_program_outlives_whatever_happens_to_one_server() {
    let Some(network) = Network::new(1 + SERVERS.len()) else { return };
    let mut servers = Servers::start(&network, ["32M"; 3]);
    network.on(CLIENT, || {
        let store = Arc::new(servers.client());
        let Some(mut memory) = map(&store, 6 << 20, 3 << 19) else { return };
        let words = memory.len() / PAGE_BYTES;
        let mut versions = vec![0u64; words];
        let (mut rng, mut slowest) = (Rng::new(11), Duration::ZERO);
        for trouble in 0..5 {
            let host = 1 + rng.below(3) as usize;
            match trouble {
                0 => servers.kill(host),
                1 => {
                    servers.kill(host);
                    servers.start_again(host);
                }
                2 => network.cut(CLIENT, host),
                3 => network.cut_way(host, CLIENT),
                _ => network.set_slow(host),
            }
            for _ in 0..4000 {
                let page = rng.below(words as u64) as usize;
                let at = page * PAGE_BYTES;
                let begun = Instant::now();
                let word = &mut memory.as_mut_slice()[at..at + 8];
                let value = versions[page];
                assert_eq!(*word, value.to_le_bytes(), "page {page} after trouble {trouble}");
                versions[page] = rng.next_u64();
                word.copy_from_slice(&versions[page].to_le_bytes());
                slowest = slowest.max(begun.elapsed());
            }
            if trouble == 0 {
                servers.start_again(host);
            }
            network.repair();
            wait_until_whole(&store);
        }
        println!("longest stall: {slowest:?}; {} page-ins", memory.counts().page_in_count);
    });
}
