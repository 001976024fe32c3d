//! A client in the simulated world. The real replicator decides. The calls around it are those of
//! the real writer, reader and control thread, in the same order.
mod control;
mod flaw;
mod forking;
mod oracle;
mod paging;

pub use flaw::Flaw;

use crate::world::{MS, NoWire, Wire, World};
use pagetax_core::access::{Rng, derive_seed};
use pagetax_remote::client::repair::Repair;
use pagetax_remote::client::replicator::{
    Acked, Availability, CHUNK_PAGES, ChunkAt, PlacementError, Replicator, Settled,
};
use pagetax_remote::client::set::{ServerId, ServerSet};
use pagetax_remote::page::{PAGE_BYTES, PageRun};
use pagetax_remote::secret::{self, Claim};
use pagetax_remote::store::RegionId;
use pagetax_remote::wire::header::HEADER_BYTES;
use pagetax_remote::wire::reply::{Failure, Reply};
use pagetax_remote::wire::request::{Lease, Request};
use pagetax_remote::wire::{self, WireChecksum, push_checksums};
use std::cell::{Cell, RefCell};
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

pub const REGION: RegionId = RegionId(1);
const REPAIR_AFTER: u64 = 2000 * MS;
pub const UNREACHABLE: u64 = 30_000 * MS;
const STRIKES_MAX: u32 = 3;
const STRIKES_MAX_OF_FEW: u32 = 8;
const SHUN_FOR: u64 = 1000 * MS;

/// A kind of request for pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RequestKind {
    Read,
    Write,
}

/// The reason why a call failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    Broken,
    Restarted,
    Failed(Failure),
}

#[derive(Debug, Clone, Copy)]
struct Remote {
    number: u32,
    token: [u8; 32],
}

/// The amount of work of a client.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    pub region_pages: u64,
    /// The pages that each page of a write or a repair stands for: those of a run.
    pub run_pages: u64,
    /// True if other processes hold the CPU now and then.
    pub is_preempted: bool,
}

impl Default for Load {
    fn default() -> Load {
        Load { region_pages: 2 * CHUNK_PAGES, run_pages: 1, is_preempted: true }
    }
}

/// The state that all tasks of the client share.
pub struct Client {
    pub world: World,
    load: Load,
    /// The time at which it last took a server for down, and how often it did.
    pub last_down: Cell<Option<u64>>,
    pub downs: Cell<u64>,
    pub replicator: RefCell<Replicator>,
    pub flaw: Flaw,
    copies: usize,
    epochs: RefCell<Vec<u64>>,
    remotes: RefCell<HashMap<ServerId, Remote>>,
    down_since: RefCell<HashMap<ServerId, u64>>,
    /// The server names that are aliases of others.
    aliases: RefCell<ServerSet>,
    strikes: RefCell<HashMap<(ServerId, RequestKind), u32>>,
    /// The end of each server's shunning, and how often it was shunned.
    shunned: RefCell<HashMap<ServerId, (u64, u32)>>,
    /// Damaged replicas that readers found, with the right bytes.
    bad_replicas: RefCell<Vec<(ServerId, u64, Vec<u8>)>>,
    /// The number of puts that were refused for lack of room.
    pub full: Cell<u64>,
    pub longest_put: Cell<u64>,
    /// True while nothing is written, because a write would repair damage by itself.
    pub is_resting: Cell<bool>,
    /// True while the writer is at work.
    pub is_putting: Cell<bool>,
    /// True until the control task has made a child, and the child, unless it was refused.
    pub wants_child: Cell<bool>,
    pub child: RefCell<Option<Box<Client>>>,
    /// The version of each page whose put is done.
    pub done: RefCell<HashMap<u64, u64>>,
    /// The pages that a task is using.
    pub busy: RefCell<Vec<u64>>,
    pub lost: Cell<u64>,
    /// The number of lost pages in chunks whose loss was not reported.
    pub lost_unreported: Cell<u64>,
    reported: RefCell<HashSet<ChunkAt>>,
    pub puts: Cell<u64>,
    pub gets: Cell<u64>,
}

/// The connections of one task.
#[derive(Default)]
pub struct Links {
    wires: HashMap<ServerId, (Wire, Option<Lease>)>,
    closed: ServerSet,
}

/// Returns the bytes of a version of a page.
pub fn page_bytes(page: u64, version: u64) -> Vec<u8> {
    let mut rng = Rng::new(derive_seed(page, version, 0, 0));
    let mut bytes = vec![0; PAGE_BYTES];
    for word in bytes[..64].chunks_exact_mut(8) {
        word.copy_from_slice(&rng.next_u64().to_le_bytes());
    }
    bytes
}

pub fn at(page: u64) -> ChunkAt {
    ChunkAt { region: REGION, chunk: page / CHUNK_PAGES }
}

fn put_frame(on: Lease, first: u64, if_absent: bool, pages: &[u8]) -> Vec<u8> {
    let mut checksums = Vec::new();
    push_checksums(&mut checksums, pages.chunks_exact(PAGE_BYTES).map(WireChecksum::of));
    let mut frame = Vec::new();
    Request::Put { on, first, if_absent, checksums: &checksums, pages }.encode_head(1, &mut frame);
    frame.extend_from_slice(pages);
    frame
}

fn frame(request: Request<'_>) -> Vec<u8> {
    let mut frame = Vec::new();
    request.encode_head(1, &mut frame);
    frame
}

/// Parses a reply frame. Returns the reply and its pages.
fn parse(frame: &[u8]) -> (Reply<'_>, &[u8]) {
    let head: &[u8; HEADER_BYTES] = frame.first_chunk().expect("a header");
    let header = pagetax_remote::wire::header::Header::decode(head).expect("a reply");
    let (meta, pages) = frame[HEADER_BYTES..].split_at(header.meta_bytes());
    (Reply::decode_head(head, meta).expect("a reply").1, pages)
}

impl Client {
    pub fn new(world: World, copies: usize, flaw: Flaw, load: Load) -> Client {
        let mut replicator = Replicator::new(copies);
        replicator.add_region(REGION, load.region_pages);
        let servers = world.name_count();
        (0..servers).for_each(|_| assert!(replicator.add_server().is_some()));
        Client {
            world,
            load,
            last_down: Cell::new(None),
            downs: Cell::new(0),
            replicator: RefCell::new(replicator),
            flaw,
            copies,
            epochs: RefCell::new(vec![0; servers]),
            remotes: RefCell::default(),
            down_since: RefCell::default(),
            aliases: RefCell::default(),
            strikes: RefCell::default(),
            shunned: RefCell::default(),
            bad_replicas: RefCell::default(),
            full: Cell::new(0),
            longest_put: Cell::new(0),
            is_resting: Cell::new(false),
            is_putting: Cell::new(false),
            wants_child: Cell::new(false),
            child: RefCell::default(),
            done: RefCell::default(),
            busy: RefCell::default(),
            lost: Cell::new(0),
            lost_unreported: Cell::new(0),
            reported: RefCell::default(),
            puts: Cell::new(0),
            gets: Cell::new(0),
        }
    }

    fn gone(&self, server: ServerId) {
        let damaged = self.replicator.borrow_mut().mark_gone(server);
        if self.flaw != Flaw::KeepsLossesQuiet {
            self.reported.borrow_mut().extend(damaged);
        }
    }

    fn silent(&self, server: ServerId) {
        let damaged = self.replicator.borrow_mut().mark_unreachable(server);
        self.reported.borrow_mut().extend(damaged);
    }

    fn reset_strikes(&self, server: ServerId, kind: RequestKind) {
        self.strikes.borrow_mut().remove(&(server, kind));
    }

    /// Counts a failed request to a server that is alive, and shuns the server at the limit.
    fn strike(&self, server: ServerId, kind: Option<RequestKind>) {
        let Some(kind) = kind.filter(|_| self.flaw != Flaw::TrustsHello) else { return };
        let mut strikes = self.strikes.borrow_mut();
        let count = strikes.entry((server, kind)).or_default();
        *count += 1;
        let (_, times) = self.shunned.borrow().get(&server).copied().unwrap_or_default();
        let are_spare = self.replicator.borrow().up().len() > self.copies;
        if *count >= if are_spare { STRIKES_MAX } else { STRIKES_MAX_OF_FEW } {
            *count = 0;
            let until = self.world.now() + (SHUN_FOR << times.min(6));
            self.shunned.borrow_mut().insert(server, (until, times + 1));
            self.replicator.borrow_mut().mark_shunned(server);
        }
    }

    fn is_shunned(&self, server: ServerId) -> bool {
        let shunned = self.shunned.borrow();
        shunned.get(&server).is_some_and(|(until, _)| self.world.now() < *until)
    }

    fn is_up(&self, server: ServerId) -> bool {
        self.replicator.borrow().up().has(server)
    }

    fn close(&self, links: &mut Links, server: ServerId) {
        if let Some((wire, _)) = links.wires.remove(&server) {
            self.world.give_up(wire);
            links.closed.insert(server);
        }
    }

    /// Probes a server. Returns true if it accepts a new connection.
    async fn record_failure(&self, server: ServerId, kind: Option<RequestKind>) -> bool {
        if !self.is_up(server) {
            return false;
        }
        let wire = self.world.connect(server as usize).await;
        let epoch = self.epochs.borrow()[server as usize];
        match wire {
            Ok(wire) if wire.epoch == epoch => {
                self.world.give_up(wire);
                self.strike(server, kind);
            }
            Ok(wire) => {
                self.world.give_up(wire);
                if self.epochs.borrow()[server as usize] == epoch {
                    self.gone(server);
                }
            }
            Err(NoWire::TurnedAway) if self.flaw != Flaw::ClosesLinks => {}
            Err(_) => {
                self.last_down.set(Some(self.world.now()));
                self.downs.set(self.downs.get() + 1);
                self.replicator.borrow_mut().mark_down(server);
            }
        }
        wire.is_ok()
    }

    async fn attach(
        &self,
        links: &mut Links,
        server: ServerId,
        fence: bool,
    ) -> Result<(Wire, Lease), Trouble> {
        if let Entry::Vacant(entry) = links.wires.entry(server) {
            let wire = self.world.connect(server as usize).await;
            let wire = wire.map_err(|_| Trouble::Broken)?;
            let expected = self.epochs.borrow()[server as usize];
            if wire.epoch != expected {
                self.world.give_up(wire);
                return Err(Trouble::Restarted);
            }
            entry.insert((wire, None));
        }
        let (wire, lease) = links.wires[&server];
        if let (Some(lease), false) = (lease, fence) {
            return Ok((wire, lease));
        }
        let fence = (fence || links.closed.has(server)) && self.flaw != Flaw::NoFence;
        let remote = self.remotes.borrow().get(&server).copied();
        let remote = remote.ok_or(Trouble::Failed(Failure::NoRegion))?;
        let (nonce, epoch, region) = (wire.nonce, wire.epoch, remote.number);
        let proof = secret::proof(&remote.token, &Claim { nonce, epoch, region, fence });
        let request = frame(Request::Attach { region, fence, proof: &proof });
        let reply = self.world.call(wire, request).await.ok_or(Trouble::Broken)?;
        match parse(&reply).0 {
            Reply::Attached(lease) => {
                // One fence is enough: more would void the leases of other tasks, and theirs ours.
                links.closed.remove(server);
                links.wires.insert(server, (wire, Some(lease)));
                Ok((wire, lease))
            }
            Reply::Failed(failure) => Err(Trouble::Failed(failure)),
            other => panic!("{other:?}"),
        }
    }

    async fn call_on(
        &self,
        links: &mut Links,
        server: ServerId,
        request: impl FnOnce(Lease) -> Vec<u8>,
    ) -> Result<Vec<u8>, Trouble> {
        self.call_for(links, server, self.load.run_pages, request).await
    }

    /// Sends a request whose page stands for so many.
    async fn call_for(
        &self,
        links: &mut Links,
        server: ServerId,
        pages: u64,
        request: impl FnOnce(Lease) -> Vec<u8>,
    ) -> Result<Vec<u8>, Trouble> {
        let (wire, lease) = self.attach(links, server, false).await?;
        let call = self.world.call_of_run(wire, request(lease), pages);
        let reply = call.await.ok_or(Trouble::Broken)?;
        match parse(&reply).0 {
            Reply::Failed(failure) => Err(Trouble::Failed(failure)),
            _ => Ok(reply),
        }
    }

    /// Records the effect of a failed call on the links and on the server's availability.
    async fn record_error(
        &self,
        links: &mut Links,
        server: ServerId,
        trouble: Trouble,
        kind: Option<RequestKind>,
    ) {
        match trouble {
            Trouble::Failed(Failure::StaleLease) => {
                if let Some((_, lease)) = links.wires.get_mut(&server) {
                    *lease = None;
                }
            }
            Trouble::Failed(Failure::NoRegion | Failure::Denied) => {
                self.close(links, server);
                self.gone(server);
            }
            Trouble::Broken | Trouble::Restarted => {
                // On a slow link, requests are still done in order.
                let wire = links.wires.get(&server);
                let is_open = wire.is_some_and(|(wire, _)| self.world.is_open(*wire));
                let is_useless = self.record_failure(server, kind).await;
                if !is_open || is_useless || self.flaw == Flaw::ClosesLinks {
                    self.close(links, server);
                }
            }
            Trouble::Failed(_) => {}
        }
    }

    /// Sleeps now and then, because other processes may hold the CPU at any point, for long.
    async fn be_preempted(&self) {
        if self.load.is_preempted && self.world.below(30) == 0 {
            self.world.sleep(self.world.below(1000 * MS)).await;
        }
    }
}
