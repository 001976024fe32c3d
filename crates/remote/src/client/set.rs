//! A set of servers, in one 64-bit word.

use std::fmt;

/// The index of a server in its client's list.
pub type ServerId = u8;

/// The most servers that one client uses.
pub const SERVERS_MAX: usize = 64;

/// A set of servers, one bit each.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct ServerSet(u64);

impl ServerSet {
    /// The empty set.
    pub const EMPTY: ServerSet = ServerSet(0);

    /// Returns the set of this one server.
    pub fn one(server: ServerId) -> ServerSet {
        ServerSet(1 << server)
    }

    /// Returns the servers that are in either set.
    pub fn union(self, other: ServerSet) -> ServerSet {
        ServerSet(self.0 | other.0)
    }

    /// Returns the servers that are in both sets.
    pub fn and(self, other: ServerSet) -> ServerSet {
        ServerSet(self.0 & other.0)
    }

    /// Returns the servers of this set that are not in `other`.
    pub fn minus(self, other: ServerSet) -> ServerSet {
        ServerSet(self.0 & !other.0)
    }

    /// Returns true if the server is in the set.
    pub fn has(self, server: ServerId) -> bool {
        self.0 & (1 << server) != 0
    }

    /// Adds a server to the set.
    pub fn insert(&mut self, server: ServerId) {
        self.0 |= 1 << server;
    }

    /// Removes a server, if it is in the set.
    pub fn remove(&mut self, server: ServerId) {
        self.0 &= !(1 << server);
    }

    /// Returns true if no server is in the set.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns the number of servers.
    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Returns each server, lowest first.
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
