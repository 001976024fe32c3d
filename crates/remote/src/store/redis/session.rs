//! The reader or writer of one thread, on a connection of its own.

use super::{BATCH, Hash, RedisState, TAG_PAGES};
use crate::page::{PAGE_BYTES, PageMac, PageRun};
use crate::store::{
    PageReader, PageWriter, PutRun, RegionId, StoreError, check_discard, check_get, check_put,
};
use redis::cluster::{ClusterConnection, cluster_pipe};
use redis::{Cmd, Connection, ErrorKind, RedisError, RedisResult, Value};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// The reason why a page is lost that is there, but cannot be proved.
const CHANGED: &str = "its bytes have changed";

/// A connection to one server, or to a cluster.
pub(super) enum RedisLink {
    Single(Box<Connection>),
    Cluster(Box<ClusterConnection>),
}

impl RedisLink {
    /// Sends all commands before it waits for the first reply.
    fn run(&mut self, commands: Vec<Cmd>) -> RedisResult<Vec<Value>> {
        match self {
            RedisLink::Single(connection) => {
                let mut pipe = redis::pipe();
                commands.into_iter().for_each(|command| {
                    pipe.add_command(command);
                });
                pipe.query(connection.as_mut())
            }
            RedisLink::Cluster(connection) => {
                let mut pipe = cluster_pipe();
                commands.into_iter().for_each(|command| {
                    pipe.add_command(command);
                });
                pipe.query(connection.as_mut())
            }
        }
    }
}

/// The reader or writer of one thread.
pub(super) struct RedisSession {
    pub(super) shared: Arc<RedisState>,
    /// None after an error, so that no late reply is taken for the next one.
    link: Option<RedisLink>,
}

impl RedisSession {
    pub fn new(shared: Arc<RedisState>) -> Result<RedisSession, StoreError> {
        Ok(RedisSession { link: Some(shared.open()?), shared })
    }

    /// Runs commands, and repeats them on a new connection if the old one broke. All commands of
    /// this store are idempotent.
    pub fn run(&mut self, commands: impl Fn() -> Vec<Cmd>) -> Result<Vec<Value>, StoreError> {
        let is_new = self.link.is_none();
        match self.run_once(&commands) {
            Err(StoreError::Unreachable { .. }) if !is_new => self.run_once(&commands),
            done => done,
        }
    }

    /// Runs a command on each of these keys, so many at a time that no reply has to wait for long. A master
    /// that is down does not keep those of the others from it.
    ///
    /// # Errors
    /// The first one.
    pub fn run_each(
        &mut self,
        keys: &[String],
        command: impl Fn(&str) -> Cmd,
    ) -> Result<(), StoreError> {
        let mut all = Ok(());
        for keys in self.shared.slots().by_master(keys) {
            let done = keys.chunks(BATCH).try_for_each(|keys| {
                self.run(|| keys.iter().map(|key| command(key)).collect()).map(|_| ())
            });
            all = all.and(done);
        }
        all
    }

    fn run_once(&mut self, commands: &impl Fn() -> Vec<Cmd>) -> Result<Vec<Value>, StoreError> {
        let mut link = match self.link.take() {
            Some(link) => link,
            None => self.shared.open()?,
        };
        let done = link.run(commands());
        // What the engine refuses leaves the connection as it was.
        let is_whole = |error: &RedisError| matches!(error.kind(), ErrorKind::Server(_));
        if done.as_ref().err().is_none_or(is_whole) {
            self.link = Some(link);
        }
        done.map_err(|error| self.shared.error(error))
    }

    /// Reads a run of pages of one hash from one of its copies. Bytes that were changed on the way come right
    /// on another connection.
    fn get_copy(
        &mut self,
        key: &str,
        first: u64,
        macs: &[PageMac],
        into: &mut [u8],
    ) -> Result<Result<(), (u64, &'static str)>, StoreError> {
        match self.get_copy_once(key, first, macs, into)? {
            Err((_, CHANGED)) => {
                self.link = None;
                self.get_copy_once(key, first, macs, into)
            }
            done => Ok(done),
        }
    }

    fn get_copy_once(
        &mut self,
        key: &str,
        first: u64,
        macs: &[PageMac],
        into: &mut [u8],
    ) -> Result<Result<(), (u64, &'static str)>, StoreError> {
        let pages = first..first + macs.len() as u64;
        let values = self.run(|| vec![on_pages("HMGET", key, pages.clone())])?;
        let values = values.into_iter().next();
        let pages = self.pages_of(values, macs.len())?;
        let wanted = macs.iter().zip(into.chunks_exact_mut(PAGE_BYTES));
        for ((page, bytes), (mac, into)) in (first..).zip(pages).zip(wanted) {
            match bytes {
                Value::BulkString(bytes) if proves(&bytes, mac) => into.copy_from_slice(&bytes),
                Value::Nil => return Ok(Err((page, "the engine does not have it"))),
                _ => return Ok(Err((page, CHANGED))),
            }
        }
        Ok(Ok(()))
    }

    /// Returns the values of a reply to HMGET.
    fn pages_of(&self, reply: Option<Value>, count: usize) -> Result<Vec<Value>, StoreError> {
        match reply {
            Some(Value::Array(pages)) if pages.len() == count => Ok(pages),
            _ => Err(StoreError::Refused {
                server: self.shared.address.label(),
                why: format!("it was asked for {count} pages and answered otherwise"),
            }),
        }
    }

    /// Reads a run of pages of one hash from the first copy that can prove all of them.
    fn get_hash(
        &mut self,
        id: RegionId,
        first: u64,
        macs: &[PageMac],
        into: &mut [u8],
    ) -> Result<(), StoreError> {
        let tag = first / TAG_PAGES;
        let hash = self.shared.hash(id, tag);
        match self.get_from(&self.shared.keys_to_read(id, tag, hash), (id, first), macs, into) {
            // It was moved meanwhile.
            Err(StoreError::PageLost { .. }) if self.shared.hash(id, tag).has_moved(hash) => {
                self.get_hash(id, first, macs, into)
            }
            done => done,
        }
    }

    fn get_from(
        &mut self,
        keys: &[String],
        (region, first): (RegionId, u64),
        macs: &[PageMac],
        into: &mut [u8],
    ) -> Result<(), StoreError> {
        let (mut lost, mut failed, mut damaged) = ((first, "it has no copy"), None, Vec::new());
        for key in keys {
            match self.get_copy(key, first, macs, into) {
                Ok(Ok(())) => {
                    self.mend(&damaged, first, into);
                    return Ok(());
                }
                Ok(Err(page)) => {
                    lost = if damaged.is_empty() { page } else { lost };
                    damaged.push(key);
                }
                Err(error @ StoreError::Unreachable { .. }) => failed = Some(error),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        // A page is not lost while a copy may come back.
        let lost = StoreError::PageLost { region, page: lost.0, why: lost.1.into() };
        Err(failed.unwrap_or(lost))
    }

    /// Writes pages to copies of their hash that lacked them. Ignores errors, as the caller has its pages.
    fn mend(&mut self, damaged: &[&String], first: u64, pages: &[u8]) {
        if !damaged.is_empty() {
            let life = self.shared.life();
            let write = |key: &&String| [store(key, first, pages), expire(key, life)];
            let _ = self.run(|| damaged.iter().flat_map(write).collect());
        }
    }

    /// Notes that a put to these hashes is under way. Returns the keys of their copies, and those of
    /// the hashes that do not expire yet.
    fn begin_put(
        &self,
        id: RegionId,
        tags: &[u64],
    ) -> Result<Vec<(Vec<String>, bool)>, StoreError> {
        let shared = &self.shared;
        let mut regions = shared.regions();
        let region = regions.get_mut(&id).ok_or(StoreError::NoRegion(id))?;
        let mut keys = Vec::new();
        for (index, tag) in tags.iter().enumerate() {
            let known = region.used.get(tag).copied();
            let placed = known.map(|hash| hash.salts).or_else(|| shared.place(id, *tag, None, &[]));
            let Some(salts) = placed else {
                tags[..index].iter().for_each(|tag| {
                    region.used.entry(*tag).and_modify(|hash| hash.puts -= 1);
                });
                return Err(shared.unreachable("too few masters are up for so many copies"));
            };
            let hash = region.used.entry(*tag).or_insert(Hash { salts, ..Hash::default() });
            hash.puts += 1;
            keys.push((shared.keys(id, *tag, salts), hash.expires));
        }
        Ok(keys)
    }

    /// Notes the end of a put, and that its hashes expire if it succeeded.
    fn end_put(&self, id: RegionId, tags: &[u64], expires: bool) {
        if let Some(region) = self.shared.regions().get_mut(&id) {
            for tag in tags {
                region.used.entry(*tag).and_modify(|hash| {
                    hash.puts -= 1;
                    hash.expires |= expires;
                });
            }
        }
    }
}

/// Returns true if these are the bytes of a page with this MAC.
fn proves(bytes: &[u8], mac: &PageMac) -> bool {
    bytes.len() == PAGE_BYTES && PageMac::of(bytes) == *mac
}

/// Returns a command on a key, to which more arguments can be added.
pub(super) fn on_key(name: &str, key: &str) -> Cmd {
    let mut command = redis::cmd(name);
    command.arg(key);
    command
}

/// Returns a command on pages of a hash.
fn on_pages(name: &str, key: &str, pages: Range<u64>) -> Cmd {
    let mut command = on_key(name, key);
    command.arg(pages.collect::<Vec<u64>>());
    command
}

/// Returns the command that writes adjacent pages of a hash.
fn store(key: &str, first: u64, pages: &[u8]) -> Cmd {
    let mut command = on_key("HSET", key);
    for (page, bytes) in (first..).zip(pages.chunks_exact(PAGE_BYTES)) {
        command.arg(page).arg(bytes);
    }
    command
}

/// Returns the command that sets the life of a hash.
pub(super) fn expire(key: &str, life: Duration) -> Cmd {
    let mut command = on_key("PEXPIRE", key);
    command.arg(life.as_millis() as u64);
    command
}

/// Splits a run where hashes meet. Returns the first page and the count of each part.
fn by_tag(first: u64, count: u64) -> impl Iterator<Item = (u64, u64)> {
    let end = first + count;
    let mut next = first;
    std::iter::from_fn(move || {
        let seam = (next / TAG_PAGES + 1) * TAG_PAGES;
        let part = (next, end.min(seam) - next);
        next += part.1;
        (part.1 > 0).then_some(part)
    })
}

impl PageReader for RedisSession {
    fn get(
        &mut self,
        id: RegionId,
        first: u64,
        macs: &[PageMac],
        into: &mut [u8],
    ) -> Result<(), StoreError> {
        check_get(self.shared.region_pages(id)?, first, macs, into)?;
        for (start, count) in by_tag(first, macs.len() as u64) {
            let at = (start - first) as usize;
            let (from, to) = (at, at + count as usize);
            let into = &mut into[from * PAGE_BYTES..to * PAGE_BYTES];
            self.get_hash(id, start, &macs[from..to], into)?;
        }
        Ok(())
    }

    fn get_each(
        &mut self,
        id: RegionId,
        wanted: &[(u64, PageMac)],
        good: &mut dyn FnMut(usize, &[u8]),
    ) {
        let shared = self.shared.clone();
        let command = |(page, _): &(u64, PageMac)| {
            let tag = page / TAG_PAGES;
            let salt = shared.hash(id, tag).salts[0];
            on_pages("HMGET", &shared.key(id, tag, salt), *page..page + 1)
        };
        let Ok(values) = self.run(|| wanted.iter().map(command).collect()) else { return };
        for (nth, (value, (_, mac))) in values.into_iter().zip(wanted).enumerate() {
            let bytes = self.pages_of(Some(value), 1).ok().and_then(|mut pages| pages.pop());
            if let Some(Value::BulkString(bytes)) = bytes
                && proves(&bytes, mac)
            {
                good(nth, &bytes);
            }
        }
    }
}

impl PageWriter for RedisSession {
    fn put(&mut self, id: RegionId, runs: &[PutRun<'_>]) -> Result<(), StoreError> {
        check_put(self.shared.region_pages(id)?, runs)?;
        let parts: Vec<(u64, &[u8])> = runs
            .iter()
            .flat_map(|run| {
                by_tag(run.first, run.macs.len() as u64).map(|(start, count)| {
                    let from = (start - run.first) as usize * PAGE_BYTES;
                    (start, &run.pages[from..from + count as usize * PAGE_BYTES])
                })
            })
            .collect();
        let tags: Vec<u64> = parts.iter().map(|(start, _)| start / TAG_PAGES).collect();
        let keys = self.begin_put(id, &tags)?;
        let life = self.shared.life();
        let commands = || {
            let mut commands = Vec::new();
            for ((start, pages), (keys, expires)) in parts.iter().zip(&keys) {
                for key in keys {
                    commands.push(store(key, *start, pages));
                    commands.extend((!expires).then(|| expire(key, life)));
                }
            }
            commands
        };
        let done = self.run(commands).map(|_| ());
        self.end_put(id, &tags, done.is_ok());
        done
    }

    fn discard(&mut self, id: RegionId, runs: &[PageRun]) -> Result<(), StoreError> {
        check_discard(self.shared.region_pages(id)?, runs)?;
        let mut parts = Vec::new();
        for (start, count) in runs.iter().flat_map(|run| by_tag(run.first, run.count)) {
            let tag = start / TAG_PAGES;
            let mut regions = self.shared.regions();
            let used = regions.get_mut(&id).and_then(|region| region.used.get_mut(&tag));
            if let Some(hash) = used {
                hash.expires = false;
                parts.push((start..start + count, self.shared.keys(id, tag, hash.salts)));
            }
        }
        let delete = |(pages, keys): &(Range<u64>, Vec<String>)| -> Vec<Cmd> {
            keys.iter().map(|key| on_pages("HDEL", key, pages.clone())).collect()
        };
        parts.chunks(BATCH).try_for_each(|parts| {
            match self.run(|| parts.iter().flat_map(delete).collect()) {
                // They take room until their hash is copied anew, which a master that is down brings about.
                Err(StoreError::Unreachable { .. }) if self.shared.options.copies > 1 => Ok(()),
                done => done.map(|_| ()),
            }
        })
    }
}
