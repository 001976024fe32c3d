//! The reader or writer of one thread, on connections of its own.

use super::links::MasterLinks;
use super::{BATCH, Hash, RedisState, TAG_PAGES};
use crate::page::{PAGE_BYTES, PageMac, PageRun};
use crate::store::{
    PageReader, PageWriter, PutRun, RegionId, StoreError, check_discard, check_get, check_put,
};
use redis::{Cmd, Value};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// The reason why a page is lost that is there, but cannot be proved.
const CHANGED: &str = "its bytes have changed";

/// The reader or writer of one thread.
pub(super) struct RedisSession {
    pub(super) shared: Arc<RedisState>,
    links: MasterLinks,
}

impl RedisSession {
    /// Creates a session, which connects when it is used.
    pub fn new(shared: Arc<RedisState>) -> RedisSession {
        RedisSession { links: MasterLinks::default(), shared }
    }

    /// Runs commands. All commands of this store are idempotent: on a new connection or another master they
    /// are repeated.
    pub fn run(&mut self, commands: &[Cmd]) -> Result<Vec<Value>, StoreError> {
        self.run_within(self.shared.options.answer_within, commands)
    }

    /// Runs commands, and waits no longer for a master.
    fn run_within(
        &mut self,
        patience: Duration,
        commands: &[Cmd],
    ) -> Result<Vec<Value>, StoreError> {
        let (replies, done) = self.links.run(&self.shared, commands, patience);
        done.map(|()| replies.into_iter().flatten().collect())
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
                let commands: Vec<Cmd> = keys.iter().map(|key| command(key)).collect();
                self.run(&commands).map(|_| ())
            });
            all = all.and(done);
        }
        all
    }

    /// Reads a run of pages of one hash from one of its copies. Bytes that were changed on the way come right
    /// on another connection.
    fn get_copy(
        &mut self,
        (key, patience): (&str, Duration),
        first: u64,
        macs: &[PageMac],
        into: &mut [u8],
    ) -> Result<Result<(), (u64, &'static str)>, StoreError> {
        match self.get_copy_once((key, patience), first, macs, into)? {
            Err((_, CHANGED)) => {
                self.links = MasterLinks::default();
                self.get_copy_once((key, patience), first, macs, into)
            }
            done => Ok(done),
        }
    }

    fn get_copy_once(
        &mut self,
        (key, patience): (&str, Duration),
        first: u64,
        macs: &[PageMac],
        into: &mut [u8],
    ) -> Result<Result<(), (u64, &'static str)>, StoreError> {
        let pages = first..first + macs.len() as u64;
        let values = self.run_within(patience, &[on_pages("HMGET", key, pages)])?;
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
        for (nth, key) in keys.iter().enumerate() {
            let patience = match nth + 1 == keys.len() {
                true => self.shared.options.answer_within,
                false => self.shared.hedge_after(),
            };
            match self.get_copy((key, patience), first, macs, into) {
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
            let commands: Vec<Cmd> = damaged.iter().flat_map(write).collect();
            let _ = self.run_within(self.shared.hedge_after(), &commands);
        }
    }

    /// Puts runs of pages, each of one hash.
    fn put_parts(
        &mut self,
        id: RegionId,
        parts: &[(u64, &[u8])],
        tags: &[u64],
        patience: Duration,
    ) -> Result<(), StoreError> {
        let keys = self.begin_put(id, tags)?;
        let life = self.shared.life();
        let mut commands = Vec::new();
        for ((start, pages), (keys, expires)) in parts.iter().zip(&keys) {
            for key in keys {
                commands.push(store(key, *start, pages));
                commands.extend((!expires).then(|| expire(key, life)));
            }
        }
        let done = self.run_within(patience, &commands).map(|_| ());
        self.end_put(id, tags, done.is_ok());
        done
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
            let Some(hash) = shared.place_to_put(id, *tag, known) else {
                tags[..index].iter().for_each(|tag| {
                    region.used.entry(*tag).and_modify(|hash| hash.puts -= 1);
                });
                return Err(shared.unreachable("too few masters are up for so many copies"));
            };
            keys.push((shared.keys(id, *tag, hash.salts), hash.expires));
            region.used.insert(*tag, Hash { puts: hash.puts + 1, ..hash });
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
            let keys = shared.keys_to_read(id, tag, shared.hash(id, tag));
            on_pages("HMGET", &keys[0], *page..page + 1)
        };
        let commands: Vec<Cmd> = wanted.iter().map(command).collect();
        // Those of a master that does not answer are fetched from another copy, one by one.
        let (values, _) = self.links.run(&shared, &commands, shared.hedge_after());
        for (nth, (value, (_, mac))) in values.into_iter().zip(wanted).enumerate() {
            let bytes = self.pages_of(value, 1).ok().and_then(|mut pages| pages.pop());
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
        // Each try may find another master that does not answer. The next one goes elsewhere, if it can.
        let hedge_after = self.shared.hedge_after();
        for _ in 1..self.shared.options.copies {
            match self.put_parts(id, &parts, &tags, hedge_after) {
                Err(StoreError::Unreachable { .. }) => {}
                done => return done,
            }
        }
        self.put_parts(id, &parts, &tags, self.shared.options.answer_within)
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
                let mut keys = self.shared.keys(id, tag, hash.salts);
                // A suspect keeps its pages, which take room until the hash is put again or expires.
                keys.retain(|key| !self.shared.is_suspect(key));
                parts.push((start..start + count, keys));
            }
        }
        let delete = |(pages, keys): &(Range<u64>, Vec<String>)| -> Vec<Cmd> {
            keys.iter().map(|key| on_pages("HDEL", key, pages.clone())).collect()
        };
        let patience = self.shared.hedge_after();
        parts.chunks(BATCH).try_for_each(|parts| {
            let commands: Vec<Cmd> = parts.iter().flat_map(delete).collect();
            match self.run_within(patience, &commands) {
                // They take room until their hash is copied anew, which a master that is down brings about.
                Err(StoreError::Unreachable { .. }) if self.shared.options.copies > 1 => Ok(()),
                done => done.map(|_| ()),
            }
        })
    }
}
