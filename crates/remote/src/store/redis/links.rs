//! The connections of one reader or writer: one to each master that it has used.
//!
//! Invariants: commands go to all masters before the first reply is awaited, so that none waits for
//! another. A connection that failed, or whose reply is late, is dropped: no late reply is taken for the
//! next one.

use super::RedisState;
use super::address::host_and_port;
use crate::store::StoreError;
use redis::{Cmd, Connection, ErrorKind, RedisError, RedisResult, ServerErrorKind, Value};
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

/// The retries of commands whose slot or master has changed. The pager itself waits for a cluster that does
/// not answer.
const RETRIES: u32 = 3;
const RETRY_WAIT: Duration = Duration::from_millis(20);

/// A slow link takes so long…
const STEP: Duration = Duration::from_millis(250);
/// …for so many bytes (8 Mbit/s), and no reply comes meanwhile.
const STEP_BYTES: usize = 256 << 10;

/// The place of a server: its host and port. None for the only server of a store that is no cluster.
type Place = Option<(String, u16)>;

/// Connections by server.
#[derive(Default)]
pub(super) struct MasterLinks {
    links: HashMap<Place, Link>,
}

struct Link {
    connection: Connection,
    /// The time for which it waits for a reply.
    patience: Duration,
}

/// The reason why a command has no reply.
enum NoReply {
    /// Its server was silent for too long.
    Silent(RedisError),
    /// The server refused it.
    Refused(RedisError),
    /// It may be right elsewhere, or on a new connection.
    Changed(RedisError),
}

/// Commands, and what came back for each.
struct Round<'a> {
    commands: &'a [Cmd],
    replies: Vec<Option<Value>>,
    /// The server that has the key's slot for now, for a command that was sent on by ASK.
    asked: HashMap<usize, Place>,
    failure: Option<NoReply>,
    /// The servers that did not answer in the last try.
    failed: Vec<(String, u16)>,
}

impl Round<'_> {
    /// Notes that a server refused a command.
    fn note_refusal(&mut self, nth: usize, place: &Place, error: RedisError) {
        self.asked.remove(&nth);
        let kind = match error.kind() {
            ErrorKind::Server(kind) => Some(kind),
            _ => None,
        };
        match kind {
            Some(ServerErrorKind::Ask) => {
                let place = error.redirect_node().and_then(|(place, _)| host_and_port(place));
                self.asked.extend(place.map(|place| (nth, Some(place))));
            }
            Some(
                ServerErrorKind::Moved | ServerErrorKind::TryAgain | ServerErrorKind::ReadOnly,
            ) => {}
            // It will serve again, as after a restart.
            Some(
                ServerErrorKind::ClusterDown
                | ServerErrorKind::MasterDown
                | ServerErrorKind::BusyLoading,
            ) => self.failed.extend(place.clone()),
            _ => return self.note(NoReply::Refused(error)),
        }
        self.note(NoReply::Changed(error));
    }

    fn note(&mut self, failure: NoReply) {
        let is_worse = |known: &NoReply| matches!(known, NoReply::Changed(_));
        if self.failure.as_ref().is_none_or(is_worse) {
            self.failure = Some(failure);
        }
    }
}

impl MasterLinks {
    /// Runs commands, each at the master of its key. Returns the replies that came, and the first error.
    pub fn run(
        &mut self,
        shared: &RedisState,
        commands: &[Cmd],
        patience: Duration,
    ) -> (Vec<Option<Value>>, Result<(), StoreError>) {
        let replies = vec![None; commands.len()];
        let (asked, failed) = (HashMap::new(), Vec::new());
        let mut round = Round { commands, replies, asked, failure: None, failed };
        for attempt in 0..=RETRIES {
            (round.failure, round.failed) = (None, Vec::new());
            self.send_and_receive(shared, &mut round, patience);
            match &round.failure {
                Some(NoReply::Changed(_)) if attempt < RETRIES => {}
                _ => break,
            }
            if attempt > 0 {
                std::thread::sleep(RETRY_WAIT);
            }
            if shared.is_cluster {
                // If nobody knows, the next try fails, too.
                let _ = shared.look_at_slots();
            }
        }
        round.failed.into_iter().for_each(|place| shared.suspect(place));
        let result = match round.failure {
            None => Ok(()),
            Some(NoReply::Silent(error) | NoReply::Refused(error) | NoReply::Changed(error)) => {
                Err(shared.error(error))
            }
        };
        (round.replies, result)
    }

    /// Sends the commands that have no reply yet, and receives what comes.
    fn send_and_receive(&mut self, shared: &RedisState, round: &mut Round<'_>, patience: Duration) {
        let mut sent = Vec::new();
        for (place, wanted) in by_place(shared, round) {
            let packed = packed(round, &wanted);
            let patience = patience + STEP * (packed.len() / STEP_BYTES) as u32;
            match self.link(shared, &place, patience).and_then(|link| link.send(&packed)) {
                Ok(()) => sent.push((place, wanted)),
                Err(error) => self.failed(round, place, &wanted, error),
            }
        }
        for (place, wanted) in sent {
            let Some(link) = self.links.get_mut(&place) else { continue };
            if let Err(error) = link.receive(round, &place, &wanted) {
                self.failed(round, place, &wanted, error);
            }
        }
    }

    /// Notes that a server did not answer these commands.
    fn failed(&mut self, round: &mut Round<'_>, place: Place, wanted: &[usize], error: RedisError) {
        wanted.iter().for_each(|nth| drop(round.asked.remove(nth)));
        self.links.remove(&place);
        round.failed.extend(place);
        round.note(match error.is_timeout() {
            true => NoReply::Silent(error),
            false => NoReply::Changed(error),
        });
    }

    fn link(
        &mut self,
        shared: &RedisState,
        place: &Place,
        patience: Duration,
    ) -> RedisResult<&mut Link> {
        if !self.links.contains_key(place) {
            let address = match place {
                Some((host, port)) => shared.address.of_node(host, *port),
                None => shared.address.clone(),
            };
            let connection = address.within(patience).connect()?;
            self.links.insert(place.clone(), Link { connection, patience });
        }
        let link = self.links.get_mut(place).ok_or(closed())?;
        if link.patience != patience {
            link.connection.set_read_timeout(Some(patience))?;
            link.connection.set_write_timeout(Some(patience))?;
            link.patience = patience;
        }
        Ok(link)
    }
}

impl Link {
    fn send(&mut self, packed: &[u8]) -> RedisResult<()> {
        self.connection.send_packed_command(packed)
    }

    /// Receives the replies to these commands.
    fn receive(
        &mut self,
        round: &mut Round<'_>,
        place: &Place,
        wanted: &[usize],
    ) -> RedisResult<()> {
        for nth in wanted {
            if round.asked.contains_key(nth) {
                self.connection.recv_response()?;
            }
            match self.connection.recv_response()? {
                Value::ServerError(error) => round.note_refusal(*nth, place, error.into()),
                value => round.replies[*nth] = Some(value),
            }
        }
        Ok(())
    }
}

fn closed() -> RedisError {
    RedisError::from(std::io::Error::from(std::io::ErrorKind::NotConnected))
}

/// Returns the commands without a reply, by the server to send them to.
fn by_place(shared: &RedisState, round: &mut Round<'_>) -> BTreeMap<Place, Vec<usize>> {
    let slots = shared.slots();
    let mut groups: BTreeMap<Place, Vec<usize>> = BTreeMap::new();
    let missing = (0..round.commands.len()).filter(|nth| round.replies[*nth].is_none());
    for nth in missing.collect::<Vec<_>>() {
        let place = match round.asked.get(&nth) {
            Some(asked) => asked.clone(),
            None if shared.is_cluster => match slots.place_of(key_of(&round.commands[nth])) {
                Some(place) => Some(place.clone()),
                None => {
                    let what = "no master has the slot of a page";
                    round.note(NoReply::Changed(std::io::Error::other(what).into()));
                    continue;
                }
            },
            None => None,
        };
        groups.entry(place).or_default().push(nth);
    }
    groups
}

/// Returns commands as they are sent.
fn packed(round: &Round<'_>, wanted: &[usize]) -> Vec<u8> {
    let mut packed = Vec::new();
    for nth in wanted {
        if round.asked.contains_key(nth) {
            redis::cmd("ASKING").write_packed_command(&mut packed);
        }
        round.commands[*nth].write_packed_command(&mut packed);
    }
    packed
}

/// Returns the key of a command: its first argument.
fn key_of(command: &Cmd) -> &str {
    match command.args_iter().nth(1) {
        Some(redis::Arg::Simple(key)) => str::from_utf8(key).unwrap_or_default(),
        _ => "",
    }
}
