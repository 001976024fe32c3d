//! Writes of pages. A write is done when every server that must hold a replica has acknowledged it.
//!
//! Invariant: a write counts as done only if [`Replicator::settle`] counts it as done.
//!
//! [`Replicator::settle`]: super::replicator::Replicator::settle

use super::link::{LinkError, ServerLinks, is_broken, is_stale, unexpected, wait};
use super::peer::RequestKind;
use super::replicator::{Acked, CHUNK_PAGES, ChunkAt, PlacementError, Settled};
use super::set::{SERVERS_MAX, ServerId, ServerSet};
use super::state::ClusterState;
use crate::page::{PAGE_BYTES, PageRun};
use crate::store::{PageWriter, PutRun, RegionId, StoreError, check_discard, check_put};
use crate::wire::reply::Failure;
use crate::wire::request::Request;
use crate::wire::{CHECKSUM_BYTES, WireChecksum, checksums, push_checksums};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The most requests under way to a server before the writer reads their replies. The unread
/// replies must fit the socket's buffers.
const WINDOW: usize = 256;

/// The time for which the writer takes one server's replies before it goes on to the next.
const TURN: Duration = Duration::from_millis(20);

/// The writer of one thread.
#[derive(Debug)]
pub(super) struct ReplicaWriter {
    shared: Arc<ClusterState>,
    links: ServerLinks,
    /// The checksums of the runs that are being put, as on the wire.
    checksums: Vec<u8>,
}

/// The part of a run that lies in one chunk.
#[derive(Debug)]
struct Piece<'a> {
    at: ChunkAt,
    first: u64,
    pages: &'a [u8],
    /// The offset in bytes of the piece's checksums in [`ReplicaWriter::checksums`].
    checksums_at: usize,
    acked: Acked,
    wanted: ServerSet,
    done: bool,
}

impl Piece<'_> {
    /// Returns true if the pages still match the checksums that were sent with them. `all_checksums` is
    /// [`ReplicaWriter::checksums`].
    fn matches_sent_checksums(&self, all_checksums: &[u8]) -> bool {
        let pages = self.pages.chunks_exact(PAGE_BYTES);
        let sent = &all_checksums[self.checksums_at..][..pages.len() * CHECKSUM_BYTES];
        checksums(sent).eq(pages.map(WireChecksum::of))
    }
}

impl ReplicaWriter {
    pub fn new(shared: Arc<ClusterState>) -> ReplicaWriter {
        let links = shared.links();
        ReplicaWriter { shared, links, checksums: Vec::new() }
    }

    fn send_all(&mut self, region: RegionId, pieces: &mut [Piece<'_>]) -> Result<(), StoreError> {
        let options = &self.shared.options;
        let until = Instant::now() + options.unreachable + 2 * options.answer_within;
        loop {
            let seen = self.shared.change_count();
            let waits = self.place(pieces)?;
            self.send(region, pieces)?;
            self.settle(pieces);
            if pieces.iter().all(|piece| piece.done) {
                return Ok(());
            }
            if Instant::now() >= until {
                return Err(self.shared.unreachable_error());
            }
            if waits {
                self.shared.wait_for_change(seen, until);
            }
        }
    }

    /// Finds targets for pieces without targets. Returns true if a piece must wait for a server.
    /// Takes the write lock only if servers must join, so readers go on otherwise.
    fn place(&mut self, pieces: &mut [Piece<'_>]) -> Result<bool, StoreError> {
        let mut unplaced: Vec<&mut Piece<'_>> =
            pieces.iter_mut().filter(|piece| !piece.done && piece.wanted.is_empty()).collect();
        let replicator = self.shared.replicator();
        unplaced.retain_mut(|piece| {
            let known = replicator.known_targets(piece.at, &mut piece.acked);
            piece.wanted = known.unwrap_or_default();
            known.is_none()
        });
        drop(replicator);
        if unplaced.is_empty() {
            return Ok(false);
        }
        let (mut waits, pages_asked) = (false, unplaced.len() as u64);
        let mut replicator = self.shared.replicator_mut();
        for piece in unplaced {
            match replicator.targets(piece.at, &mut piece.acked) {
                Ok(targets) => piece.wanted = targets,
                Err(PlacementError::NoServer) => waits = true,
                Err(PlacementError::NoRegion) => return Err(StoreError::NoRegion(piece.at.region)),
                Err(PlacementError::Full) => {
                    let pages_free = replicator.capacity().pages_free;
                    return Err(StoreError::Full { pages_asked, pages_free });
                }
            }
        }
        Ok(waits)
    }

    /// Sends all servers their pieces, then takes the replies.
    fn send(&mut self, region: RegionId, pieces: &mut [Piece<'_>]) -> Result<(), StoreError> {
        let servers = wanted(pieces);
        let mut on_the_way = [const { VecDeque::new() }; SERVERS_MAX];
        for server in servers.iter() {
            match self.post(server, region, pieces) {
                Ok(ids) => on_the_way[server as usize] = ids,
                Err(error) => self.failed(server, &error, pieces)?,
            }
        }
        self.collect_all(servers, &mut on_the_way, pieces)
    }

    /// Takes the replies of all servers in turns, so that a single busy server shows. If that
    /// server takes longer than `answer_within` and another can take its place, the client shuns
    /// it.
    fn collect_all(
        &mut self,
        all: ServerSet,
        on_the_way: &mut [VecDeque<(usize, u32)>],
        pieces: &mut [Piece<'_>],
    ) -> Result<(), StoreError> {
        let (mut busy, mut last_done) = (all, Instant::now());
        while !busy.is_empty() {
            for server in busy.iter() {
                let is_last = all.len() > 1 && busy.len() == 1;
                let is_late = is_last && last_done.elapsed() > self.shared.options.answer_within;
                if is_late && self.shared.shun_if_slow(server) {
                    self.links.close(server);
                    return Ok(());
                }
                match self.collect(server, &mut on_the_way[server as usize], pieces) {
                    Ok(false) => continue,
                    Ok(true) => {}
                    Err(error) => self.failed(server, &error, pieces)?,
                }
                busy.remove(server);
                last_done = Instant::now();
            }
        }
        Ok(())
    }

    fn post(
        &mut self,
        server: ServerId,
        region: RegionId,
        pieces: &mut [Piece<'_>],
    ) -> Result<VecDeque<(usize, u32)>, LinkError> {
        let (connection, on) = self.links.leased(server, region)?;
        {
            let replicator = self.shared.replicator();
            for piece in pieces.iter_mut().filter(|piece| piece.wanted.has(server)) {
                if !replicator.is_current(piece.at, server) {
                    piece.wanted.remove(server);
                }
            }
        }
        let is_due = |piece: &&Piece<'_>| piece.wanted.has(server) && !piece.done;
        let puts: Vec<Request<'_>> = pieces
            .iter()
            .filter(is_due)
            .map(|piece| {
                let checksum_bytes = piece.pages.len() / PAGE_BYTES * CHECKSUM_BYTES;
                let checksums = &self.checksums[piece.checksums_at..][..checksum_bytes];
                Request::Put {
                    on,
                    first: piece.first,
                    if_absent: false,
                    checksums,
                    pages: piece.pages,
                }
            })
            .collect();
        let first = connection.send_all(&puts)?;
        let due = pieces.iter().enumerate().filter(|(_, piece)| is_due(piece));
        Ok(due.zip(0..).map(|((index, _), nth)| (index, first.wrapping_add(nth))).collect())
    }

    /// Takes a server's replies for one turn. Returns true if no reply is outstanding.
    fn collect(
        &mut self,
        server: ServerId,
        ids: &mut VecDeque<(usize, u32)>,
        pieces: &mut [Piece<'_>],
    ) -> Result<bool, LinkError> {
        let (begun, mut refused, mut is_damaged) = (Instant::now(), None, false);
        while begun.elapsed() < TURN
            && let Some((index, id)) = ids.pop_front()
        {
            let link = self.links.existing(server).ok_or_else(unexpected)?;
            match wait(&mut link.connection, id) {
                Ok(_) => {
                    pieces[index].acked.insert(server);
                    self.shared.peer(server).reset_strikes(RequestKind::Write);
                }
                // The replies to the other requests must still be read.
                Err(LinkError::Failed(Failure::Full { .. })) => {
                    refused.get_or_insert(index);
                }
                // Damaged on the way: the writer sends the pages again, and to another server if it
                // happens repeatedly.
                Err(LinkError::Failed(Failure::DamagedPage { .. }))
                    if pieces[index].matches_sent_checksums(&self.checksums) =>
                {
                    is_damaged = true;
                }
                Err(error) if is_stale(&error) => {
                    self.links.forget_lease(server, pieces[index].at.region);
                }
                Err(error) => return Err(error),
            }
        }
        if let Some(first) = refused {
            self.replace_full_server(server, first, pieces)?;
        }
        if is_damaged {
            return Err(LinkError::Broken(io::Error::other("pages are damaged on the way")));
        }
        Ok(ids.is_empty())
    }

    /// Replaces a full server in this piece, and in all later pieces that it has not acknowledged.
    fn replace_full_server(
        &mut self,
        server: ServerId,
        first: usize,
        pieces: &mut [Piece<'_>],
    ) -> Result<(), LinkError> {
        let mut replicator = self.shared.replicator_mut();
        for piece in &mut pieces[first..] {
            if piece.wanted.has(server) && !piece.acked.servers().has(server) && !piece.done {
                if !replicator.replace_full_server(piece.at, server) {
                    let pages_free = replicator.server(server).pages_free;
                    return Err(LinkError::Failed(Failure::Full { pages_free }));
                }
                piece.wanted = ServerSet::EMPTY;
            }
        }
        Ok(())
    }

    /// Decides if an error concerns one server only, or ends the write.
    ///
    /// Closes the link if replies may still be under way.
    fn failed(
        &mut self,
        server: ServerId,
        error: &LinkError,
        pieces: &mut [Piece<'_>],
    ) -> Result<(), StoreError> {
        match error {
            LinkError::Failed(Failure::Full { .. }) => {
                self.links.close(server);
                let pages_free = self.shared.replicator().capacity().pages_free;
                let left = pieces.iter().filter(|piece| !piece.done);
                let pages_asked = left.map(|piece| (piece.pages.len() / PAGE_BYTES) as u64).sum();
                Err(StoreError::Full { pages_asked, pages_free })
            }
            // The server takes no more regions: another one must take the pages.
            LinkError::NoRegion => {
                let placed = self.replace_full_server(server, 0, pieces);
                placed.or_else(|error| self.failed(server, &error, pieces))
            }
            error if is_broken(error) => {
                let region = pieces.first().map(|piece| piece.at.region);
                if region.is_none_or(|region| {
                    self.shared.record_error(server, region, error, RequestKind::Write)
                }) {
                    self.links.close(server);
                }
                Ok(())
            }
            LinkError::Failed(Failure::DamagedPage { page }) => Err(StoreError::Refused {
                server: self.shared.peer(server).endpoint.label.clone(),
                why: format!("page {page} was changed while it was written"),
            }),
            LinkError::Failed(_) => {
                Err(StoreError::BadRequest("a server does not understand this client"))
            }
            LinkError::Broken(_) | LinkError::Restarted => Ok(()),
        }
    }

    fn settle(&mut self, pieces: &mut [Piece<'_>]) {
        let replicator = self.shared.replicator();
        for piece in pieces.iter_mut().filter(|piece| !piece.done) {
            piece.done = replicator.is_settled(piece.at, piece.acked);
        }
        drop(replicator);
        if pieces.iter().all(|piece| piece.done) {
            return;
        }
        let mut replicator = self.shared.replicator_mut();
        for piece in pieces.iter_mut().filter(|piece| !piece.done) {
            match replicator.settle(piece.at, piece.acked) {
                Settled::Done => piece.done = true,
                Settled::Send(missing) => piece.wanted = missing,
                Settled::Again => piece.wanted = ServerSet::EMPTY,
            }
        }
    }

    /// Splits runs where chunks meet, and computes their checksums.
    fn split_runs<'a>(&mut self, region: RegionId, runs: &[PutRun<'a>]) -> Vec<Piece<'a>> {
        self.checksums.clear();
        let mut pieces = Vec::with_capacity(runs.len() + 1);
        for run in runs {
            let mut checksums_at = self.checksums.len();
            // Not `run.macs`: a server that knows MACs could forge pages.
            push_checksums(
                &mut self.checksums,
                run.pages.chunks_exact(PAGE_BYTES).map(WireChecksum::of),
            );
            let (mut first, mut pages) = (run.first, run.pages);
            while !pages.is_empty() {
                let before_seam = (CHUNK_PAGES - first % CHUNK_PAGES) as usize;
                let (piece, rest) = pages.split_at(pages.len().min(before_seam * PAGE_BYTES));
                let count = piece.len() / PAGE_BYTES;
                pieces.push(Piece {
                    at: ChunkAt { region, chunk: first / CHUNK_PAGES },
                    first,
                    pages: piece,
                    checksums_at,
                    acked: Acked::default(),
                    wanted: ServerSet::EMPTY,
                    done: false,
                });
                (first, pages) = (first + count as u64, rest);
                checksums_at += count * CHECKSUM_BYTES;
            }
        }
        pieces
    }

    fn discard_on(
        &mut self,
        server: ServerId,
        region: RegionId,
        runs: &[PageRun],
    ) -> Result<(), LinkError> {
        let (connection, on) = self.links.leased(server, region)?;
        for window in runs.chunks(WINDOW) {
            let mut ids = [0; WINDOW];
            for (id, run) in ids.iter_mut().zip(window) {
                let (first, count) = (run.first, run.count);
                *id = connection.send(&Request::Discard { on, first, count })?;
            }
            for (id, _) in ids.iter().zip(window) {
                wait(connection, *id)?;
            }
        }
        Ok(())
    }
}

fn wanted(pieces: &[Piece<'_>]) -> ServerSet {
    let open = pieces.iter().filter(|piece| !piece.done);
    open.fold(ServerSet::EMPTY, |all, piece| all.union(piece.wanted))
}

impl PageWriter for ReplicaWriter {
    fn put(&mut self, region: RegionId, runs: &[PutRun<'_>]) -> Result<(), StoreError> {
        check_put(self.shared.region_pages(region)?, runs)?;
        let mut pieces = self.split_runs(region, runs);
        pieces.chunks_mut(WINDOW).try_for_each(|window| self.send_all(region, window))
    }

    fn discard(&mut self, region: RegionId, runs: &[PageRun]) -> Result<(), StoreError> {
        check_discard(self.shared.region_pages(region)?, runs)?;
        let holders = {
            let replicator = self.shared.replicator();
            let chunks = runs.iter().flat_map(|run| {
                let last = (run.first + run.count).div_ceil(CHUNK_PAGES);
                run.first / CHUNK_PAGES..last
            });
            let holders =
                chunks.map(|chunk| replicator.reachable_members(ChunkAt { region, chunk }));
            holders.fold(ServerSet::EMPTY, ServerSet::union)
        };
        for server in holders.iter() {
            if let Err(error) = self.discard_on(server, region, runs) {
                self.links.close(server);
                self.shared.record_error(server, region, &error, RequestKind::Write);
            }
        }
        Ok(())
    }
}
