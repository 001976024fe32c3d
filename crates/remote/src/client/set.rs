//! A set of servers, in one word.

use std::fmt;

/// A server, by its place in the list of those that a client knows.
pub type ServerId = u8;

/// Most servers that one client uses.
pub const SERVERS_MAX: usize = 64;

/// Some of the servers.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct ServerSet(u64);

impl ServerSet {
    /// None.
    pub const EMPTY: ServerSet = ServerSet(0);

    /// Just this one.
    pub fn one(server: ServerId) -> ServerSet {
        ServerSet(1 << server)
    }

    /// Those of both.
    pub fn union(self, other: ServerSet) -> ServerSet {
        ServerSet(self.0 | other.0)
    }

    /// Those of this set that are in the other too.
    pub fn and(self, other: ServerSet) -> ServerSet {
        ServerSet(self.0 & other.0)
    }

    /// Those of this set that are not in the other.
    pub fn minus(self, other: ServerSet) -> ServerSet {
        ServerSet(self.0 & !other.0)
    }

    /// Whether this one is among them.
    pub fn has(self, server: ServerId) -> bool {
        self.0 & (1 << server) != 0
    }

    /// Adds one.
    pub fn insert(&mut self, server: ServerId) {
        self.0 |= 1 << server;
    }

    /// Takes one away.
    pub fn remove(&mut self, server: ServerId) {
        self.0 &= !(1 << server);
    }

    /// Whether there is none.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// How many.
    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Each, lowest first.
    pub fn iter(self) -> impl Iterator<Item = ServerId> {
        let mut rest = self.0;
        std::iter::from_fn(move || {
            let server = (rest != 0).then(|| rest.trailing_zeros() as ServerId)?;
            rest &= rest - 1;
            Some(server)
        })
    }
}

impl FromIterator<ServerId> for ServerSet {
    fn from_iter<T: IntoIterator<Item = ServerId>>(servers: T) -> Self {
        servers.into_iter().fold(ServerSet::EMPTY, |set, one| set.union(ServerSet::one(one)))
    }
}

impl fmt::Debug for ServerSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}
