//! The thread of a store in Redis or Valkey: it renews the life of all hashes, and makes copies anew that
//! were lost with a master, or that a change of the cluster has put on one master.

use super::address::Address;
use super::placement::{Salts, SlotMap};
use super::session::{RedisSession, expire, on_key};
use super::{Hash, RENEW_AT_END, RedisState, field};
use crate::store::{RegionId, StoreError};
use crate::threads;
use redis::{Cmd, Connection, Value};
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, mpsc};
use std::time::{Duration, Instant};

/// The time for which a slot may have no master before its copies are made again elsewhere. A failover is
/// over by then, as a rule.
const WITHOUT_MASTER: Duration = Duration::from_secs(20);

/// A copy of a hash that has to move.
#[derive(Debug)]
pub(super) struct Move {
    region: RegionId,
    tag: u64,
    /// The keys to read the pages from, the most trustworthy first.
    before: Vec<String>,
    after: Vec<String>,
}

/// The state of the copies, as far as it was looked after.
struct Watch {
    /// The slots for which all copies are in their places.
    settled: Arc<SlotMap>,
    /// The time of the first change since then.
    changed: Option<Instant>,
    /// The hashes that have new keys, to which their pages are not all copied yet.
    moves: Vec<Move>,
    runs: MasterRuns,
    /// True for each slot whose master has lost its pages since the copies were settled.
    distrusted: Vec<bool>,
    /// The number of looks that found pages lost.
    losses: u32,
    /// True once the log says that copies wait.
    has_said: bool,
}

/// The runs of the masters, by the id that each draws at its start. One that starts anew at its old place,
/// as a service does after a crash, is in no list of changes, and has lost its pages.
#[derive(Default)]
struct MasterRuns(HashMap<(String, u16), MasterRun>);

#[derive(Default)]
struct MasterRun {
    link: Option<Connection>,
    id: String,
}

impl MasterRuns {
    /// Returns the masters that were started anew since the last call. One that does not answer is left for
    /// the next call, and does not hold up the others: all are asked at a time.
    fn restarted(&mut self, shared: &RedisState, slots: &SlotMap) -> Vec<(String, u16)> {
        slots.masters.iter().for_each(|place| {
            self.0.entry(place.clone()).or_default();
        });
        let known = self.0.iter_mut().filter(|(place, _)| slots.masters.contains(place));
        let asked: Vec<_> = known
            .filter_map(|(place, run)| {
                let node = shared.address.of_node(&place.0, place.1).within(shared.hedge_after());
                let (link, (answer, answered)) = (run.link.take(), mpsc::channel());
                let ask = move || drop(answer.send(ask_run_id(link, &node)));
                threads::spawn("pagetax-ask", ask).ok().map(|_| (place, run, answered))
            })
            .collect();
        let restarted = asked.into_iter().filter_map(|(place, run, answered)| {
            let (link, id) = answered.recv().ok().flatten()?;
            run.link = Some(link);
            shared.suspects().retain(|suspect| suspect != place);
            let before = std::mem::replace(&mut run.id, id);
            (!before.is_empty() && before != run.id).then(|| place.clone())
        });
        restarted.collect()
    }
}

/// Asks a master for the id of its run. Returns the connection, too.
fn ask_run_id(link: Option<Connection>, node: &Address) -> Option<(Connection, String)> {
    // A connection ends with the run.
    let is_new = link.is_none();
    let mut link = link.or_else(|| node.connect().ok())?;
    match redis::cmd("INFO").arg("server").query::<String>(&mut link) {
        Ok(info) => {
            let id = field(&info, "run_id").map(str::to_string)?;
            Some((link, id))
        }
        Err(error) if is_new || error.is_timeout() => None,
        Err(_) => ask_run_id(None, node),
    }
}

impl RedisState {
    /// Renews all pages at intervals until the store ends, and looks after their copies. What failed is
    /// tried again at the next interval, well before the pages expire.
    pub(super) fn renew(self: Arc<Self>) {
        let options = &self.options;
        let every = match self.is_cluster && options.copies > 1 {
            true => options.check_every.min(options.renew_every),
            false => options.renew_every,
        };
        let mut renewed = Instant::now();
        let mut watch = Watch {
            settled: self.slots(),
            changed: None,
            moves: Vec::new(),
            runs: MasterRuns::default(),
            distrusted: Vec::new(),
            losses: 0,
            has_said: false,
        };
        if options.copies > 1 {
            watch.runs.restarted(&self, &watch.settled);
        }
        let mut stopped = self.stopped.lock().unwrap_or_else(PoisonError::into_inner);
        while !*stopped {
            let is_ending = self.is_ending.load(Ordering::Relaxed);
            let (renew_every, every) = match is_ending {
                true => (RENEW_AT_END, every.min(RENEW_AT_END)),
                false => (options.renew_every, every),
            };
            let waited = self.stop.wait_timeout(stopped, every);
            stopped = waited.unwrap_or_else(PoisonError::into_inner).0;
            if *stopped {
                break;
            }
            drop(stopped);
            if renewed.elapsed() >= renew_every {
                renewed = Instant::now();
                let _ = self.renew_once();
            }
            if options.copies > 1 {
                self.look_after_copies(&mut watch);
            }
            stopped = self.stopped.lock().unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(super) fn renew_once(self: &Arc<Self>) -> Result<(), StoreError> {
        let keys: Vec<String> = self
            .regions()
            .iter()
            .flat_map(|(id, region)| {
                region.used.iter().flat_map(|(tag, hash)| self.keys(*id, *tag, hash.salts))
            })
            .collect();
        let mut session = RedisSession::new(self.clone());
        session.run_each(&keys, |key| expire(key, self.life()))
    }

    /// Moves copies if the slots have changed since they were settled.
    fn look_after_copies(self: &Arc<Self>, watch: &mut Watch) {
        if self.look_at_slots().is_err() {
            return;
        }
        watch.moves.append(&mut self.moves.lock().unwrap_or_else(PoisonError::into_inner));
        let slots = self.slots();
        let restarted = watch.runs.restarted(self, &slots);
        if !restarted.is_empty() {
            slots.distrust(&restarted, &mut watch.distrusted);
            watch.losses += 1;
        }
        if slots == watch.settled && watch.moves.is_empty() && watch.distrusted.is_empty() {
            watch.changed = None;
            return;
        }
        let since = *watch.changed.get_or_insert_with(Instant::now);
        if !slots.is_whole() && since.elapsed() < WITHOUT_MASTER {
            return;
        }
        if slots.failed_over(&watch.settled, &mut watch.distrusted) {
            watch.losses += 1;
        }
        let (moves, is_all) = self.misplaced(&watch.distrusted, watch.losses);
        watch.moves.extend(moves);
        let count = watch.moves.len();
        let moved = self.move_all(&mut watch.moves);
        match &moved {
            Ok(()) if count > 0 => self.log(&format!(
                "masters of the cluster have changed or do not answer: {count} parts of the memory were copied \
                 anew"
            )),
            Err(error) if !watch.has_said => {
                self.log(&format!("copies wait for another master: {error}"));
            }
            _ => {}
        }
        watch.has_said = moved.is_err();
        if is_all && watch.moves.is_empty() {
            (watch.settled, watch.changed) = (slots, None);
            watch.distrusted.clear();
        }
    }

    /// Moves hashes, and leaves those that failed.
    fn move_all(self: &Arc<Self>, moves: &mut Vec<Move>) -> Result<(), StoreError> {
        if moves.is_empty() {
            return Ok(());
        }
        let slots = self.slots();
        let suspects = self.suspects().clone();
        let is_suspect = |at: &usize| suspects.contains(&slots.masters[*at]);
        let silent = (0..slots.masters.len()).filter(is_suspect).map(|at| Some(at as u16));
        let mut mover = Mover {
            session: RedisSession::new(self.clone()),
            silent: silent.collect(),
            slots: slots.clone(),
        };
        let mut done = Ok(());
        moves.retain(|one| {
            let moved = mover.move_hash(one);
            let has_failed = moved.is_err();
            done = std::mem::replace(&mut done, Ok(())).and(moved);
            has_failed
        });
        done
    }

    /// Gives misplaced hashes new keys, which puts use from now on. Returns true if no hash has to wait.
    fn misplaced(&self, distrusted: &[bool], losses: u32) -> (Vec<Move>, bool) {
        let (mut moves, mut is_all) = (Vec::new(), true);
        for (id, region) in self.regions().iter_mut() {
            for (tag, hash) in &mut region.used {
                let distrusted = if hash.losses_seen < losses { distrusted } else { &[] };
                let after = self.place(*id, *tag, Some(hash.salts), distrusted, &[]);
                let Some(after) = after.filter(|after| *after == hash.salts || hash.may_move())
                else {
                    is_all = false;
                    continue;
                };
                hash.losses_seen = losses;
                if after == hash.salts {
                    continue;
                }
                moves.push(self.give_keys(*id, *tag, hash, after));
            }
        }
        (moves, is_all)
    }

    /// Gives a hash new keys, which puts use from now on.
    pub(super) fn give_keys(
        &self,
        region: RegionId,
        tag: u64,
        hash: &mut Hash,
        after: Salts,
    ) -> Move {
        let mut before = self.keys(region, tag, hash.salts);
        let keys = self.keys(region, tag, after);
        // A copy that stays is on a master that was there all the time.
        before.sort_by_key(|key| !keys.contains(key));
        hash.earlier.get_or_insert(hash.salts);
        (hash.salts, hash.expires) = (after, false);
        Move { region, tag, before, after: keys }
    }
}

/// The state of one round over all moves.
struct Mover {
    session: RedisSession,
    slots: Arc<SlotMap>,
    /// The masters that did not answer in this round. Each would hold up every hash for its timeout, and with
    /// that the renewal of all.
    silent: Vec<Option<u16>>,
}

impl Mover {
    /// Copies a hash to its new keys, from all old keys that answer. Pages that are there already, as a put
    /// or a better copy wrote them, stay.
    ///
    /// # Errors
    /// If an old key may still have pages that were not copied.
    fn move_hash(&mut self, one: &Move) -> Result<(), StoreError> {
        let new: Vec<&String> = one.after.iter().filter(|key| !one.before.contains(key)).collect();
        let mut copied = Err(StoreError::BadRequest("a hash has a copy"));
        let (mut is_whole, mut unread) = (false, None);
        for key in &one.before {
            match self.copy_hash(key, &new) {
                Ok(()) => {
                    copied = Ok(());
                    is_whole |= one.after.contains(key);
                }
                // A master that was started anew answers, and has nothing. It does not stand for this one.
                Err(error) if self.slots.master(key).is_some() => unread = Some(error),
                Err(error) => copied = copied.or(Err(error)),
            }
        }
        match unread {
            Some(error) if !is_whole => return Err(error),
            _ => copied?,
        }
        let shared = &self.session.shared;
        if let Some(region) = shared.regions().get_mut(&one.region) {
            region.used.entry(one.tag).and_modify(|hash| hash.earlier = None);
        }
        // A key whose master is gone expires.
        for key in one.before.iter().filter(|key| !one.after.contains(key)) {
            let _ = self.run(&[key], &[on_key("DEL", key)]);
        }
        Ok(())
    }

    fn copy_hash(&mut self, from: &String, to: &[&String]) -> Result<(), StoreError> {
        let reply = self.run(&[from], &[on_key("HGETALL", from)])?;
        let Some(Value::Array(fields)) = reply.into_iter().next() else {
            return Ok(());
        };
        let life = self.session.shared.life();
        let put = |key: &&String| -> Vec<Cmd> {
            let set = |pair: &[Value]| match pair {
                [Value::BulkString(page), Value::BulkString(bytes)] => {
                    let mut command = on_key("HSETNX", key);
                    command.arg(page).arg(bytes);
                    Some(command)
                }
                _ => None,
            };
            let pages = fields.chunks_exact(2).filter_map(set);
            pages.chain([expire(key, life)]).collect()
        };
        self.run(to, &to.iter().flat_map(put).collect::<Vec<Cmd>>())?;
        Ok(())
    }

    /// Runs commands on these keys, unless a master of theirs is silent.
    fn run(&mut self, keys: &[&String], commands: &[Cmd]) -> Result<Vec<Value>, StoreError> {
        let masters = keys.iter().map(|key| self.slots.master(key));
        if masters.clone().any(|master| self.silent.contains(&master)) {
            let why = "a master of the cluster does not answer";
            return Err(self.session.shared.unreachable(why));
        }
        let done = self.session.run(commands);
        if matches!(done, Err(StoreError::Unreachable { .. })) {
            self.silent.extend(masters);
        }
        done
    }
}
