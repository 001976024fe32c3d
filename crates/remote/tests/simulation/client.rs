//! A client in the simulated world: the real replicator decides; the calls around it are those of the
//! real writer, reader and control thread, in the same order.

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
pub const REGION_PAGES: u64 = 2 * CHUNK_PAGES;
const REPAIR_AFTER: u64 = 2000 * MS;
pub const UNREACHABLE: u64 = 30_000 * MS;
const STRIKES_MAX: u32 = 3;
const STRIKES_MAX_OF_FEW: u32 = 8;
const SHUN_FOR: u64 = 1000 * MS;

/// A mistake that is made on purpose, to see that the simulation notices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flaw {
    None,
    /// A write is called done when those it was first sent to have it, whoever joined meanwhile.
    ForgetsNewcomers,
    /// A repair overwrites what was written to the newcomer meanwhile.
    RepairOverwrites,
    /// What was sent before a connection was given up is not voided.
    NoFence,
    /// A server that comes back keeps what it should not have.
    NoCleaning,
    /// A server that comes back counts as cleaned also of chunks that it was put out of meanwhile.
    ForgetsLeaving,
    /// The owner does not hear that the last server with some of its pages is gone.
    KeepsLossesQuiet,
    /// What a server acknowledged counts though it was lost since, and is back with nothing.
    OldAcknowledgements,
    /// Servers that do not answer for 10 s are gone, and cleaned when they return.
    GivesUpEarly,
    /// Two names of one server are two servers.
    TwoNamesAreTwo,
    /// Who answers a hello is well, whatever it does with requests.
    TrustsHello,
    /// A link on which an answer is late is closed, and a server that turns new ones away counts as dead.
    ClosesLinks,
    /// A copy that was found damaged stays so, and ends the repair that finds it.
    LeavesDamage,
    /// A bitmap is believed to be as long as it was asked for.
    BelievesBitmaps,
    /// A server that is put out is cleaned, and what was sent to it before may come after.
    CleansWithoutFence,
    /// Nothing is known of failure domains.
    IgnoresDomains,
}

/// What a server is asked to do with pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RequestKind {
    Read,
    Write,
}

/// Why a call came to nothing.
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

/// What is decided and known by all tasks.
pub struct Client {
    pub world: World,
    pub replicator: RefCell<Replicator>,
    pub flaw: Flaw,
    copies: usize,
    epochs: RefCell<Vec<u64>>,
    remotes: RefCell<HashMap<ServerId, Remote>>,
    down_since: RefCell<HashMap<ServerId, u64>>,
    /// Names of servers that have another.
    aliases: RefCell<ServerSet>,
    strikes: RefCell<HashMap<(ServerId, RequestKind), u32>>,
    /// Until when servers are left alone, and how often they were.
    shunned: RefCell<HashMap<ServerId, (u64, u32)>>,
    /// Damaged copies that were read, with the right bytes.
    bad_replicas: RefCell<Vec<(ServerId, u64, Vec<u8>)>>,
    /// Puts that were refused for lack of room.
    pub full: Cell<u64>,
    pub longest_put: Cell<u64>,
    /// Nothing is written, which would repair damage by itself.
    pub is_resting: Cell<bool>,
    /// The version of each page whose put is done.
    pub done: RefCell<HashMap<u64, u64>>,
    /// Pages that are being written.
    pub busy: RefCell<Vec<u64>>,
    pub lost: Cell<u64>,
    /// Of these, in chunks of which it was not told that they lose pages.
    pub lost_untold: Cell<u64>,
    told: RefCell<HashSet<ChunkAt>>,
    pub puts: Cell<u64>,
    pub gets: Cell<u64>,
}

/// One task's connections.
#[derive(Default)]
pub struct Links {
    wires: HashMap<ServerId, (Wire, Option<Lease>)>,
    closed: ServerSet,
}

/// The bytes of a page in one of its versions.
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

/// Header and meta of a reply frame, and its pages.
fn parse(frame: &[u8]) -> (Reply<'_>, &[u8]) {
    let head: &[u8; HEADER_BYTES] = frame.first_chunk().expect("a header");
    let header = pagetax_remote::wire::header::Header::decode(head).expect("a reply");
    let (meta, pages) = frame[HEADER_BYTES..].split_at(header.meta_bytes());
    (Reply::decode_head(head, meta).expect("a reply").1, pages)
}

impl Client {
    pub fn new(world: World, copies: usize, flaw: Flaw) -> Client {
        let mut replicator = Replicator::new(copies);
        replicator.add_region(REGION, REGION_PAGES);
        let servers = world.name_count();
        (0..servers).for_each(|_| assert!(replicator.add_server().is_some()));
        Client {
            world,
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
            done: RefCell::default(),
            busy: RefCell::default(),
            lost: Cell::new(0),
            lost_untold: Cell::new(0),
            told: RefCell::default(),
            puts: Cell::new(0),
            gets: Cell::new(0),
        }
    }

    fn gone(&self, server: ServerId) {
        let damaged = self.replicator.borrow_mut().mark_gone(server);
        if self.flaw != Flaw::KeepsLossesQuiet {
            self.told.borrow_mut().extend(damaged);
        }
    }

    fn silent(&self, server: ServerId) {
        let damaged = self.replicator.borrow_mut().mark_unreachable(server);
        self.told.borrow_mut().extend(damaged);
    }

    fn reset_strikes(&self, server: ServerId, kind: RequestKind) {
        self.strikes.borrow_mut().remove(&(server, kind));
    }

    /// A server fails though it is well.
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

    /// Finds out whether a server still lives.
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
            Err(_) => self.replicator.borrow_mut().mark_down(server),
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
                // Once is enough: more would void the leases of other tasks, and theirs ours.
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
        let (wire, lease) = self.attach(links, server, false).await?;
        let reply = self.world.call(wire, request(lease)).await.ok_or(Trouble::Broken)?;
        match parse(&reply).0 {
            Reply::Failed(failure) => Err(Trouble::Failed(failure)),
            _ => Ok(reply),
        }
    }

    /// What trouble with a server means for the links and for its availability.
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
                // On a link that is only slow, whatever was sent is done in order.
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

    /// At any time others may have the processor, for long.
    async fn held_up(&self) {
        if self.world.below(30) == 0 {
            self.world.sleep(self.world.below(1000 * MS)).await;
        }
    }

    /// Writes a new version of a page; whether it is done.
    pub async fn put(&self, links: &mut Links, page: u64, version: u64) -> bool {
        let begun = self.world.now();
        let is_done = self.try_to_put(links, page, version).await;
        self.longest_put.set(self.longest_put.get().max(self.world.now() - begun));
        is_done
    }

    async fn try_to_put(&self, links: &mut Links, page: u64, version: u64) -> bool {
        let until = self.world.now() + UNREACHABLE + 1000 * MS;
        let bytes = page_bytes(page, version);
        let (mut acked, mut wanted) = (Acked::default(), ServerSet::EMPTY);
        while self.world.now() < until {
            if wanted.is_empty() {
                let targets = self.replicator.borrow_mut().targets(at(page), &mut acked);
                match targets {
                    Ok(targets) => wanted = targets,
                    Err(PlacementError::Full) => {
                        self.full.set(self.full.get() + 1);
                        return false;
                    }
                    Err(_) => {
                        self.world.sleep(50 * MS).await;
                        continue;
                    }
                }
            }
            let mut is_refused = false;
            for server in wanted.iter() {
                // The lease first: what is sent under it is void if the server is put out from now on.
                let leased = self.attach(links, server, false).await;
                let is_current = self.replicator.borrow().is_current(at(page), server);
                if leased.is_ok() && !is_current && self.flaw != Flaw::CleansWithoutFence {
                    continue;
                }
                self.held_up().await;
                let sent = match leased {
                    Ok((wire, lease)) => {
                        let frame = put_frame(lease, page, false, &bytes);
                        let reply = self.world.call(wire, frame).await.ok_or(Trouble::Broken);
                        reply.and_then(|reply| match parse(&reply).0 {
                            Reply::Failed(failure) => Err(Trouble::Failed(failure)),
                            _ => Ok(()),
                        })
                    }
                    Err(trouble) => Err(trouble),
                };
                match sent {
                    Ok(_) => {
                        acked.insert(server);
                        self.reset_strikes(server, RequestKind::Write);
                    }
                    Err(Trouble::Failed(Failure::Full { .. })) => {
                        if !self.replicator.borrow_mut().replace_full_server(at(page), server) {
                            self.full.set(self.full.get() + 1);
                            return false;
                        }
                        is_refused = true;
                    }
                    Err(trouble) => {
                        self.record_error(links, server, trouble, Some(RequestKind::Write)).await
                    }
                }
                self.held_up().await;
            }
            if is_refused {
                wanted = ServerSet::EMPTY;
                continue;
            }
            if self.flaw == Flaw::ForgetsNewcomers && wanted.minus(acked.servers()).is_empty() {
                return true;
            }
            if self.flaw == Flaw::OldAcknowledgements {
                let servers = acked.servers();
                acked = Acked::default();
                let _ = self.replicator.borrow_mut().targets(at(page), &mut acked);
                servers.iter().for_each(|server| acked.insert(server));
            }
            if self.replicator.borrow().is_settled(at(page), acked) {
                return true;
            }
            let settled = self.replicator.borrow_mut().settle(at(page), acked);
            match settled {
                Settled::Done => return true,
                Settled::Send(missing) => wanted = missing,
                Settled::Again => wanted = ServerSet::EMPTY,
            }
        }
        false
    }

    /// Reads a page: true when it is there, false when it is lost. Panics on wrong bytes that prove
    /// right, which cannot be.
    pub async fn get(&self, links: &mut Links, page: u64, version: u64) -> bool {
        let until = self.world.now() + UNREACHABLE + 1000 * MS;
        let right = page_bytes(page, version);
        while self.world.now() < until {
            let plan = self.replicator.borrow().read_plan(at(page));
            let mut unsure = !plan.waiting_for.is_empty();
            for server in plan.order() {
                let ask =
                    |on| frame(Request::Get { on, first: page, count: 1, with_checksums: false });
                match self.call_on(links, *server, ask).await {
                    Ok(reply) if parse(&reply).1 == right => {
                        self.reset_strikes(*server, RequestKind::Read);
                        return true;
                    }
                    Ok(_) if self.replicator.borrow().complete(at(page)).has(*server) => {
                        self.bad_replicas.borrow_mut().push((*server, page, right.clone()));
                    }
                    Ok(_) | Err(Trouble::Failed(Failure::NotHeld { .. })) => {}
                    Err(trouble) => {
                        unsure = true;
                        self.record_error(links, *server, trouble, Some(RequestKind::Read)).await;
                    }
                }
            }
            if !unsure && plan == self.replicator.borrow().read_plan(at(page)) {
                let untold = !self.told.borrow().contains(&at(page));
                self.lost_untold.set(self.lost_untold.get() + untold as u64);
                return false;
            }
            self.world.sleep(20 * MS).await;
        }
        false
    }

    /// The control thread, one round: look at the servers, then move copies.
    pub async fn control(&self, links: &mut Links) {
        for server in 0..self.world.name_count() as ServerId {
            let availability = self.replicator.borrow().server(server).availability;
            let looked = match availability {
                Availability::Up | Availability::Draining => self.status(links, server).await,
                Availability::Down | Availability::Gone => {
                    self.try_to_reconnect(links, server).await
                }
            };
            if let Err(trouble) = looked {
                self.record_error(links, server, trouble, None).await;
            }
        }
        self.repair_bad_replicas(links).await;
        let mut from = ChunkAt { region: REGION, chunk: 0 };
        loop {
            let repairable = self.replicator.borrow().next_repairable(from);
            let Some(at) = repairable else { return };
            from = ChunkAt { chunk: at.chunk + 1, ..at };
            let work = self.replicator.borrow_mut().plan_repair(at);
            let Some(work) = work else { continue };
            match self.repair(links, work).await {
                Ok(()) => from = at,
                Err((server, kind, trouble)) => {
                    self.record_error(links, server, trouble, Some(kind)).await;
                }
            }
        }
    }

    async fn status(&self, links: &mut Links, server: ServerId) -> Result<(), Trouble> {
        let (wire, _) = self.attach(links, server, false).await?;
        let reply = self.world.call(wire, frame(Request::Status)).await.ok_or(Trouble::Broken)?;
        let Reply::Status(status) = parse(&reply).0 else { return Err(Trouble::Broken) };
        self.replicator.borrow_mut().record_status(
            server,
            status.pages_total,
            status.pages_free,
            status.draining,
        );
        self.down_since.borrow_mut().remove(&server);
        Ok(())
    }

    /// The server answers on the link that it still has.
    async fn answers(&self, links: &Links, server: ServerId) -> Option<Wire> {
        let (wire, _) = links.wires.get(&server).copied()?;
        let is_same = wire.epoch == self.epochs.borrow()[server as usize];
        self.world.call(wire, frame(Request::Status)).await.filter(|_| is_same).map(|_| wire)
    }

    async fn try_to_reconnect(&self, links: &mut Links, server: ServerId) -> Result<(), Trouble> {
        if self.flaw == Flaw::ClosesLinks {
            self.close(links, server);
        }
        let now = self.world.now();
        let since = *self.down_since.borrow_mut().entry(server).or_insert(now);
        if self.is_shunned(server) {
            // Not a silence of its own.
            self.down_since.borrow_mut().insert(server, now);
            return Ok(());
        }
        let wire = match self.answers(links, server).await {
            Some(wire) => Ok(wire),
            None => self.world.connect(server as usize).await,
        };
        let wire = match wire {
            Ok(wire) => wire,
            Err(why) => {
                if why == NoWire::TurnedAway && self.flaw != Flaw::ClosesLinks {
                    self.down_since.borrow_mut().insert(server, now);
                }
                let early = matches!(self.flaw, Flaw::GivesUpEarly | Flaw::ClosesLinks);
                let unreachable = if early { UNREACHABLE / 3 } else { UNREACHABLE };
                if self.replicator.borrow().server(server).availability == Availability::Down {
                    match now - since {
                        absent if absent >= unreachable && early => self.gone(server),
                        absent if absent >= unreachable => self.silent(server),
                        absent if absent >= REPAIR_AFTER => {
                            self.replicator.borrow_mut().give_up(server);
                        }
                        _ => {}
                    }
                }
                return Ok(());
            }
        };
        let is_other = |(other, epoch): (ServerId, &u64)| {
            other != server && *epoch == wire.epoch && !self.aliases.borrow().has(other)
        };
        if self.flaw != Flaw::TwoNamesAreTwo && (0..).zip(&*self.epochs.borrow()).any(is_other) {
            self.aliases.borrow_mut().insert(server);
            self.world.give_up(wire);
            return Ok(());
        }
        self.aliases.borrow_mut().remove(server);
        if links.wires.get(&server).is_some_and(|(known, _)| *known != wire) {
            self.close(links, server);
        }
        links.wires.insert(server, (wire, None));
        let known = self.epochs.borrow()[server as usize];
        let is_same = known == wire.epoch;
        if !is_same || !self.fence_and_discard(links, server).await? {
            self.recreate_regions(links, server, wire).await?;
        }
        self.replicator.borrow_mut().readmit_server(server);
        self.status(links, server).await
    }

    /// Repairs copies that were found damaged.
    async fn repair_bad_replicas(&self, links: &mut Links) {
        let bad = std::mem::take(&mut *self.bad_replicas.borrow_mut());
        for (server, page, right) in bad {
            if self.flaw != Flaw::LeavesDamage {
                let put = |on| put_frame(on, page, true, &right);
                if let Err(trouble) = self.call_on(links, server, put).await {
                    self.record_error(links, server, trouble, Some(RequestKind::Write)).await;
                }
            }
        }
    }

    async fn fence_and_discard(
        &self,
        links: &mut Links,
        server: ServerId,
    ) -> Result<bool, Trouble> {
        match self.attach(links, server, true).await {
            Ok(_) => {}
            Err(Trouble::Failed(Failure::NoRegion | Failure::Denied)) => return Ok(false),
            Err(trouble) => return Err(trouble),
        }
        let stale_runs = self.replicator.borrow_mut().stale_runs(server);
        if self.flaw != Flaw::NoCleaning {
            for (_, first, count) in stale_runs {
                let discard = |on| frame(Request::Discard { on, first, count });
                self.call_on(links, server, discard).await?;
            }
        }
        self.held_up().await;
        if self.flaw == Flaw::ForgetsLeaving {
            self.replicator.borrow_mut().stale_runs(server);
        }
        Ok(true)
    }

    async fn recreate_regions(
        &self,
        links: &mut Links,
        server: ServerId,
        wire: Wire,
    ) -> Result<(), Trouble> {
        self.gone(server);
        let mut token = [0; 32];
        token[..8].copy_from_slice(&self.world.below(u64::MAX).to_le_bytes());
        let create = Request::Create { pages: REGION_PAGES, overcommit: true, token: &token };
        let reply = self.world.call(wire, frame(create)).await.ok_or(Trouble::Broken)?;
        let Reply::Created(lease) = parse(&reply).0 else { return Err(Trouble::Broken) };
        self.remotes.borrow_mut().insert(server, Remote { number: lease.region, token });
        links.wires.insert(server, (wire, Some(lease)));
        self.epochs.borrow_mut()[server as usize] = wire.epoch;
        Ok(())
    }

    async fn repair(
        &self,
        links: &mut Links,
        work: Repair,
    ) -> Result<(), (ServerId, RequestKind, Trouble)> {
        match work {
            Repair::Clean { at, server } => {
                let (first, count) = (at.chunk * CHUNK_PAGES, CHUNK_PAGES);
                let discard = |on| frame(Request::Discard { on, first, count });
                let fence = self.flaw != Flaw::CleansWithoutFence;
                let fenced = self.attach(links, server, fence).await;
                fenced.map_err(|trouble| (server, RequestKind::Write, trouble))?;
                let done = self.call_on(links, server, discard).await;
                done.map_err(|trouble| (server, RequestKind::Write, trouble))?;
                self.replicator.borrow_mut().finish_clean(at, server);
            }
            Repair::Copy { at, from, to, version } => {
                let first = at.chunk * CHUNK_PAGES;
                let held = |on| frame(Request::Held { on, first, count: CHUNK_PAGES as u16 });
                let reply = self.call_on(links, from, held).await;
                let reply = reply.map_err(|trouble| (from, RequestKind::Read, trouble))?;
                let Reply::Bitmap { bits, count } = parse(&reply).0 else { panic!("no bitmap") };
                if count != CHUNK_PAGES as u16 && self.flaw != Flaw::BelievesBitmaps {
                    return Err((from, RequestKind::Read, Trouble::Broken));
                }
                let held = |page: &u64| bits[*page as usize / 8] >> (page % 8) & 1 == 1;
                for page in (0..CHUNK_PAGES).filter(held).map(|page| first + page) {
                    self.copy(links, page, from, to).await?;
                }
                self.replicator.borrow_mut().finish_copy(at, from, to, version);
            }
        }
        Ok(())
    }

    /// A page from a server; none if it is damaged there.
    async fn fetch(
        &self,
        links: &mut Links,
        page: u64,
        from: ServerId,
    ) -> Result<Option<Vec<u8>>, (ServerId, RequestKind, Trouble)> {
        let get = |on| frame(Request::Get { on, first: page, count: 1, with_checksums: true });
        let reply = self.call_on(links, from, get).await;
        let reply = reply.map_err(|trouble| (from, RequestKind::Read, trouble))?;
        let (Reply::Pages { checksums, .. }, bytes) = parse(&reply) else { panic!("no pages") };
        let is_good = wire::checksums(checksums).eq([WireChecksum::of(bytes)]);
        Ok(is_good.then(|| bytes.to_vec()))
    }

    async fn copy(
        &self,
        links: &mut Links,
        page: u64,
        from: ServerId,
        to: ServerSet,
    ) -> Result<(), (ServerId, RequestKind, Trouble)> {
        let mut to = to;
        let mut fetched = self.fetch(links, page, from).await?;
        if fetched.is_none() {
            if self.flaw == Flaw::LeavesDamage {
                return Err((
                    from,
                    RequestKind::Read,
                    Trouble::Failed(Failure::DamagedPage { page }),
                ));
            }
            let others = self.replicator.borrow().layer_of(at(page), from);
            let others = others.minus(ServerSet::one(from));
            let up = self.replicator.borrow().up();
            for server in others.and(up).iter() {
                fetched = fetched.or(self.fetch(links, page, server).await.unwrap_or_default());
            }
            if fetched.is_none() && !others.minus(up).is_empty() {
                return Err((
                    from,
                    RequestKind::Read,
                    Trouble::Failed(Failure::DamagedPage { page }),
                ));
            }
            to.insert(from);
        }
        let Some(bytes) = fetched else { return Ok(()) };
        let if_absent = self.flaw != Flaw::RepairOverwrites;
        for server in to.iter() {
            let given = self.call_on(links, server, |on| put_frame(on, page, if_absent, &bytes));
            match given.await {
                Ok(_) => self.reset_strikes(server, RequestKind::Write),
                Err(trouble @ Trouble::Failed(Failure::Full { .. })) => {
                    self.replicator.borrow_mut().record_full_member(at(page), server);
                    return Err((server, RequestKind::Write, trouble));
                }
                Err(trouble) => return Err((server, RequestKind::Write, trouble)),
            }
        }
        Ok(())
    }

    /// Servers that are known by one name or more.
    pub fn servers_known(&self) -> usize {
        self.world.name_count() - self.aliases.borrow().len()
    }

    /// Changes a byte of a page on a server, if it has it.
    pub fn damage(&self, server: ServerId, page: u64) {
        let Some(pool) = self.world.pool(server as usize) else { return };
        let Some(remote) = self.remotes.borrow().get(&server).copied() else { return };
        let claim =
            Claim { nonce: [0; 16], epoch: pool.epoch, region: remote.number, fence: false };
        let opened = pool.open(&claim, &secret::proof(&remote.token, &claim));
        let Ok((region, lease)) = opened else { return };
        let (mut reply, run) = (Vec::new(), PageRun { first: page, count: 1 });
        if region.get(&pool.slab, lease.lease, run, true, 1, &mut reply).is_err() {
            return;
        }
        let (Reply::Pages { checksums, .. }, bytes) = parse(&reply) else { panic!("no pages") };
        let mut bytes = bytes.to_vec();
        bytes[1000] ^= 1;
        let put =
            region.put(&pool.slab, lease.lease, page, false, &bytes, wire::checksums(checksums));
        put.expect("it is held");
    }

    /// Whether a complete copy of each page that is not being written has the version whose put was
    /// done last. A server that has crashed unnoticed has nothing and is passed over.
    pub fn broken_promise(&self) -> Option<String> {
        let (done, busy) = (self.done.borrow(), self.busy.borrow());
        for (page, version) in done.iter().filter(|(page, _)| !busy.contains(page)) {
            let complete = self.replicator.borrow().complete(at(*page));
            for server in complete.iter().filter(|server| self.is_up(*server)) {
                if let Some(bytes) = self.peek(server, *page)
                    && bytes.as_deref() != Some(&page_bytes(*page, *version)[..])
                {
                    let what = if bytes.is_some() { "other bytes" } else { "nothing" };
                    return Some(format!("page {page} on complete server {server}: {what}"));
                }
            }
        }
        None
    }

    /// What a server really has of a page; none when it is not the server that we know.
    fn peek(&self, server: ServerId, page: u64) -> Option<Option<Vec<u8>>> {
        let pool = self.world.pool(server as usize)?;
        let is_known = pool.epoch == self.epochs.borrow()[server as usize];
        if !is_known {
            return None;
        }
        let remote = self.remotes.borrow().get(&server).copied()?;
        let claim =
            Claim { nonce: [0; 16], epoch: pool.epoch, region: remote.number, fence: false };
        let opened = pool.open(&claim, &secret::proof(&remote.token, &claim));
        let Ok((region, lease)) = opened else { return is_known.then_some(None) };
        let mut reply = Vec::new();
        let run = PageRun { first: page, count: 1 };
        let got = region.get(&pool.slab, lease.lease, run, false, 1, &mut reply);
        Some(got.ok().map(|()| parse(&reply).1.to_vec()))
    }
}
