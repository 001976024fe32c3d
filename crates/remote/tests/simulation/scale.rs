//! Many clients and servers at a time, with links of a limited rate: the balance of placement, what a
//! failure costs, and how fast all copies are back. Each client is the one of the stories.
//!
//! A page of a write or a repair stands for a run of 64, on the links and in what servers report as used.
//! Page-ins are of one page.
//!
//! `cargo xtask simulate` runs [`as_asked`] with PAGETAX_SCALE, for instance `clients=1000 servers=200`.

use super::client::{Client, Flaw, Links, Load, REGION, at};
use super::world::{MS, World};
use pagetax_core::access::Rng;
use pagetax_core::stats::quantiles;
use pagetax_remote::client::replicator::{Acked, CHUNK_PAGES, Replicator};
use pagetax_remote::client::set::SERVERS_MAX;
use pagetax_remote::page::{PAGE_BYTES, RUN_PAGES_MAX};
use pagetax_remote::server::pool::{Limits, Pool};
use pagetax_remote::server::region::Owner;
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::Pin;

const RUN_PAGES: u64 = RUN_PAGES_MAX as u64;
/// The pause between two rounds of a control thread.
const POLL_INTERVAL: u64 = 100 * MS;
/// The pause between two page-ins of a client.
const PAGE_IN_EVERY: u64 = 50 * MS;
/// The time for which page-ins are watched before the failure.
const CALM: u64 = 3_000 * MS;
/// The longest time until all copies are back.
const REPAIRED_MAX: u64 = 120_000 * MS;
/// The regions for which the memory of a server is measured.
const REGIONS: u32 = 10_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Failure {
    Server,
    Rack,
    /// No server fails, but a quarter of all frames is late by up to 400 ms, as after lost packets.
    LatePackets,
}

#[derive(Debug, Clone, Copy)]
struct Scale {
    clients: usize,
    servers: usize,
    racks: usize,
    /// The 1 MiB chunks of each client.
    chunks: u64,
    copies: usize,
    bytes_per_s: u64,
    failure: Failure,
}

impl Scale {
    fn rack(&self, server: usize) -> usize {
        server * self.racks / self.servers
    }

    /// Reads `clients=1000 servers=200 …`; what is not named is as in [`Scale::default`].
    fn of(text: &str) -> Scale {
        let mut scale = Scale::default();
        for word in text.split_whitespace() {
            let (name, value) = word.split_once('=').expect("NAME=VALUE");
            let number = || value.parse::<u64>().expect("a number");
            match name {
                "clients" => scale.clients = number() as usize,
                "servers" => scale.servers = number() as usize,
                "racks" => scale.racks = number() as usize,
                "chunks" => scale.chunks = number(),
                "copies" => scale.copies = number() as usize,
                "failure" => {
                    scale.failure = match value {
                        "server" => Failure::Server,
                        "rack" => Failure::Rack,
                        "late-packets" => Failure::LatePackets,
                        _ => panic!("a failure is server, rack or late-packets"),
                    };
                }
                _ => panic!("`{name}` is none of clients, servers, racks, chunks, copies, failure"),
            }
        }
        scale
    }
}

impl Default for Scale {
    fn default() -> Scale {
        Scale {
            clients: 10,
            servers: 20,
            racks: 20,
            chunks: 32,
            copies: 2,
            bytes_per_s: 1_250_000_000,
            failure: Failure::Rack,
        }
    }
}

/// The results of a run. Times are in nanoseconds.
#[derive(Debug, Default)]
struct Figures {
    /// The replicas on the fullest server ÷ those on the mean one.
    fullest: f64,
    /// The clients that used a failed server.
    affected: usize,
    /// The time from the failure until each of them knew.
    noticed: Vec<f64>,
    /// The time from the failure until each of them had all copies again.
    repaired: Vec<f64>,
    page_ins_before: Vec<f64>,
    page_ins_after: Vec<f64>,
    /// The bytes of repairs over the links of servers, each counted where it comes from.
    repaired_bytes: u64,
    /// Servers that clients took for down although they ran.
    false_alarms: u64,
    lost: u64,
}

/// The state that the tasks of all clients share.
struct Stage {
    scale: Scale,
    clients: Vec<Client>,
    is_over: Cell<bool>,
    filled: Cell<usize>,
    page_ins: RefCell<Vec<f64>>,
    lost: Cell<u64>,
    checked: Cell<usize>,
}

impl Stage {
    fn new(scale: Scale, world: &World, rng: &mut Rng) -> Stage {
        let load = Load {
            region_pages: scale.chunks * CHUNK_PAGES,
            run_pages: RUN_PAGES,
            is_preempted: false,
        };
        let client = |_| {
            let names = some_of(scale.servers, SERVERS_MAX, rng);
            let client =
                Client::new(world.for_client(names.clone()), scale.copies, Flaw::None, load);
            for (id, server) in (0..).zip(names) {
                let rack = scale.rack(server) as u64;
                client.replicator.borrow_mut().set_failure_domain(id, rack);
            }
            client
        };
        Stage {
            scale,
            clients: (0..scale.clients).map(client).collect(),
            is_over: Cell::new(false),
            filled: Cell::new(0),
            page_ins: RefCell::default(),
            lost: Cell::new(0),
            checked: Cell::new(0),
        }
    }

    async fn control(&self, client: &Client, seed: u64) {
        client.world.sleep(Rng::new(seed).below(POLL_INTERVAL)).await;
        let mut links = Links::default();
        while !self.is_over.get() {
            client.control(&mut links).await;
            client.world.sleep(POLL_INTERVAL).await;
        }
    }

    /// Writes all pages of a client, reads some until the end, and then reads all.
    async fn page(&self, client: &Client, seed: u64) {
        let (mut rng, mut links) = (Rng::new(seed), Links::default());
        client.world.sleep(1_000 * MS).await;
        let runs = self.scale.chunks * CHUNK_PAGES / RUN_PAGES;
        for run in 0..runs {
            while !client.put(&mut links, run * RUN_PAGES, 1).await {
                client.world.sleep(POLL_INTERVAL).await;
            }
        }
        self.filled.set(self.filled.get() + 1);
        while !self.is_over.get() {
            client.world.sleep(rng.below(2 * PAGE_IN_EVERY)).await;
            let begun = client.world.now();
            if !client.get(&mut links, rng.below(runs) * RUN_PAGES, 1).await {
                self.lost.set(self.lost.get() + 1);
            }
            self.page_ins.borrow_mut().push((client.world.now() - begun) as f64);
        }
        for run in 0..runs {
            if !client.get(&mut links, run * RUN_PAGES, 1).await {
                self.lost.set(self.lost.get() + 1);
            }
        }
        self.checked.set(self.checked.get() + 1);
    }

    /// Returns the replicas on each server.
    fn replicas(&self) -> Vec<u64> {
        let mut replicas = vec![0; self.scale.servers];
        for client in &self.clients {
            for chunk in 0..self.scale.chunks {
                let complete = client.replicator.borrow().complete(at(chunk * CHUNK_PAGES));
                complete.iter().for_each(|id| replicas[client.world.server_of(id as usize)] += 1);
            }
        }
        replicas
    }

    async fn story(&self, world: &World) -> Figures {
        let mut figures = Figures::default();
        while self.filled.get() < self.clients.len() {
            world.sleep(POLL_INTERVAL).await;
        }
        let replicas = self.replicas();
        let mean = replicas.iter().sum::<u64>() as f64 / replicas.len() as f64;
        figures.fullest = replicas.iter().copied().max().unwrap_or(0) as f64 / mean;
        self.page_ins.borrow_mut().clear();
        self.clients.iter().for_each(|client| client.downs.set(0));
        let idle_from = world.bytes_carried();
        world.sleep(CALM).await;
        let calm_bytes = world.bytes_carried() - idle_from;
        figures.page_ins_before = std::mem::take(&mut self.page_ins.borrow_mut());
        let (begun, bytes) = (world.now(), world.bytes_carried());
        let failed = self.fail(world);
        let uses = |client: &&Client| {
            (0..client.world.name_count()).any(|id| failed.contains(&client.world.server_of(id)))
        };
        let affected: Vec<&Client> = self.clients.iter().filter(uses).collect();
        if affected.is_empty() {
            world.sleep(CALM).await;
        }
        figures.affected = affected.len();
        while figures.repaired.len() < affected.len() && world.now() < begun + REPAIRED_MAX {
            world.sleep(20 * MS).await;
            note_repairs(&affected, begun, &failed, &mut figures);
        }
        let took = world.now() - begun;
        let usual = calm_bytes as u128 * u128::from(took) / u128::from(CALM);
        figures.repaired_bytes = (world.bytes_carried() - bytes).saturating_sub(usual as u64) / 2;
        figures.page_ins_after = std::mem::take(&mut self.page_ins.borrow_mut());
        if failed.is_empty() {
            figures.false_alarms = self.clients.iter().map(|client| client.downs.get()).sum();
            (0..self.scale.servers).for_each(|server| world.set_slow(server, false));
        }
        self.is_over.set(true);
        while self.checked.get() < self.clients.len() {
            world.sleep(POLL_INTERVAL).await;
        }
        figures.lost = self.lost.get();
        figures
    }

    /// Causes the failure. Returns the servers that are gone.
    fn fail(&self, world: &World) -> Vec<usize> {
        let servers = 0..self.scale.servers;
        let failed: Vec<usize> = match self.scale.failure {
            Failure::Server => vec![0],
            Failure::Rack => servers.filter(|server| self.scale.rack(*server) == 0).collect(),
            Failure::LatePackets => {
                servers.for_each(|server| world.set_slow(server, true));
                Vec::new()
            }
        };
        failed.iter().for_each(|server| world.crash(*server));
        failed
    }
}

/// Notes when clients have noticed the failure, and had all copies. The time of a client is that of the
/// first look at which it was done.
fn note_repairs(clients: &[&Client], begun: u64, failed: &[usize], figures: &mut Figures) {
    let (mut noticed, mut repaired) = (Vec::new(), 0);
    for client in clients {
        let mut ids = (0..client.world.name_count())
            .filter(|id| failed.contains(&client.world.server_of(*id)));
        let up = client.replicator.borrow().up();
        if ids.all(|id| !up.has(id as u8)) {
            noticed.extend(client.last_down.get().map(|at| (at - begun) as f64));
            repaired += usize::from(client.replicator.borrow().replicas_missing() == 0);
        }
    }
    figures.noticed = noticed;
    let now = clients.first().map_or(begun, |client| client.world.now());
    let new = repaired.saturating_sub(figures.repaired.len());
    figures.repaired.extend(std::iter::repeat_n((now - begun) as f64, new));
}

/// Returns at most so many of the servers, at random.
fn some_of(servers: usize, most: usize, rng: &mut Rng) -> Vec<usize> {
    let mut all: Vec<usize> = (0..servers).collect();
    for nth in 0..all.len() {
        let other = nth + rng.below((all.len() - nth) as u64) as usize;
        all.swap(nth, other);
    }
    all.truncate(most);
    all
}

fn play(scale: Scale, seed: u64) -> Figures {
    let mut rng = Rng::new(seed);
    let chunks = scale.clients as u64 * scale.chunks * scale.copies as u64;
    let pages_each = 2 * chunks * CHUNK_PAGES / scale.servers as u64 + CHUNK_PAGES;
    let world = World::new(seed, scale.servers, pages_each);
    world.limit_links(scale.bytes_per_s);
    let stage = Stage::new(scale, &world, &mut rng);
    let figures = RefCell::new(Figures::default());
    let main = async {
        let seen = stage.story(&world).await;
        figures.replace(seen);
    };
    let mut tasks: Vec<Pin<Box<dyn Future<Output = ()> + '_>>> = vec![Box::pin(main)];
    for client in &stage.clients {
        tasks.push(Box::pin(stage.control(client, rng.next_u64())));
        tasks.push(Box::pin(stage.page(client, rng.next_u64())));
    }
    world.run(tasks, u64::MAX);
    figures.into_inner()
}

/// Returns the median and the largest value, or the 99th percentile.
fn of(values: &[f64], shares: [f64; 2]) -> [f64; 2] {
    if values.is_empty() { [0.0; 2] } else { quantiles(values, shares) }
}

#[test]
fn a_rack_takes_one_copy_of_each_of_many_clients() {
    let scale = Scale { clients: 12, servers: 16, racks: 4, chunks: 4, ..Scale::default() };
    let figures = play(scale, 1990);
    assert_eq!(figures.lost, 0);
    assert_eq!((figures.affected, figures.repaired.len()), (12, 12), "all copies are back");
    assert!(figures.repaired_bytes > 0 && figures.fullest < 2.0, "{figures:?}");
    // The check can fail.
    let lost = play(Scale { copies: 1, ..scale }, 1990).lost;
    assert!(lost > 0, "one copy cannot survive its rack");
}

#[test]
#[ignore = "cargo xtask simulate runs it"]
fn as_asked() {
    let text = std::env::var("PAGETAX_SCALE").unwrap_or_default();
    let scale = Scale::of(&text);
    let begun = std::time::Instant::now();
    let figures = play(scale, 1);
    let ms = |values: &[f64], shares| of(values, shares).map(|ns| ns / 1e6);
    let used = scale.servers.min(SERVERS_MAX);
    let links = scale.clients * used / scale.servers;
    let (before, after) =
        (ms(&figures.page_ins_before, [0.5, 0.99]), ms(&figures.page_ins_after, [0.5, 0.99]));
    let (noticed, repaired) = (ms(&figures.noticed, [0.5, 1.0]), ms(&figures.repaired, [0.5, 1.0]));
    println!(
        "{{\"clients\":{},\"servers\":{},\"racks\":{},\"copies\":{},\"client_bytes\":{},\
         \"clients_of_a_server\":{links},\"fullest\":{:.3},\"noticed_ms\":{noticed:?},\
         \"affected\":{},\"repaired_count\":{},\"repaired_ms\":{repaired:?},\"repaired_bytes\":{},\
         \"page_in_before_ms\":{before:?},\"page_in_after_ms\":{after:?},\"page_in_count\":{},\
         \"false_alarms\":{},\"lost\":{},\"seconds\":{:.1}}}",
        scale.clients,
        scale.servers,
        scale.racks,
        scale.copies,
        scale.chunks * CHUNK_PAGES * PAGE_BYTES as u64,
        figures.fullest,
        figures.affected,
        figures.repaired.len(),
        figures.repaired_bytes,
        figures.page_ins_after.len(),
        figures.false_alarms,
        figures.lost,
        begun.elapsed().as_secs_f64(),
    );
}

/// Returns the bytes of this process in memory.
fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages = text.split_whitespace().nth(1).expect("a second field");
    pages.parse::<u64>().expect("a number") * PAGE_BYTES as u64
}

#[test]
#[ignore = "cargo xtask simulate runs it"]
fn tables() {
    const GIB: u64 = 64;
    let before = resident_bytes();
    let mut replicator = Replicator::new(2);
    let chunks = GIB << 30 >> 20;
    replicator.add_region(REGION, chunks * CHUNK_PAGES);
    for _ in 0..SERVERS_MAX {
        let server = replicator.add_server().expect("there is room");
        replicator.readmit_server(server);
        replicator.record_status(server, 1 << 40, 1 << 40, false);
    }
    for chunk in 0..chunks {
        let placed = replicator.targets(at(chunk * CHUNK_PAGES), &mut Acked::default());
        assert_eq!(placed.map(|servers| servers.len()), Ok(2));
    }
    let client = (resident_bytes() - before) / GIB;
    let limits = Limits { regions_max: REGIONS, client_regions_max: REGIONS, ..Limits::default() };
    let pool = Pool::new(limits, 1);
    let owner = Owner { address: "sim".into(), pid: 1, name: "sim".into() };
    let of = pool.client("sim");
    let before = resident_bytes();
    for number in 0..REGIONS as u64 {
        let mut token = [0; 32];
        token[..8].copy_from_slice(&number.to_le_bytes());
        assert!(pool.create(CHUNK_PAGES, true, token, owner.clone(), of.clone()).is_ok());
    }
    let server = (resident_bytes() - before) / REGIONS as u64;
    println!("{{\"client_bytes_per_gib\":{client},\"server_bytes_per_region\":{server}}}");
}
