//! The hello: the first 64 bytes of a connection, in both directions and in every protocol version.

use super::{VERSION, WireError, u32_at, u64_at};
use twox_hash::XxHash3_64;

/// The size of a hello in bytes.
pub const HELLO_BYTES: usize = 64;

/// The size in bytes of a nonce. A server draws one for each connection, so that no proof can be
/// replayed.
pub const NONCE_BYTES: usize = 16;

const MAGIC: &[u8; 8] = b"pagetax\n";
const NAME_BYTES: usize = 16;

/// The location of a server, for the placement of replicas. The fields are hashes: only their
/// equality has a meaning.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Location {
    /// The hash of the machine's boot ID.
    pub machine: u64,
    /// The hash of the failure domain: the machine, or one that the operator names, such as a rack.
    pub failure_domain: u64,
}

impl Location {
    /// Returns the location on the machine with this boot ID. Without a name, the machine is the
    /// failure domain.
    pub fn new(boot_id: &str, failure_domain: Option<&str>) -> Location {
        let machine = XxHash3_64::oneshot(boot_id.as_bytes());
        let named = failure_domain.map(|name| XxHash3_64::oneshot(name.as_bytes()));
        Location { machine, failure_domain: named.unwrap_or(machine) }
    }
}

/// The value of a server's `pid` field if it has no room for another connection of this client. The
/// server then closes the connection.
const FULL: u32 = 1;

/// The hello of a client or a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// The version of the protocol: of a client the newest that it speaks, of a server the one that it
    /// speaks on this connection.
    pub version: u32,
    /// The epoch that a server draws at its start, never 0. A client sends 0.
    pub epoch: u64,
    /// The nonce that a server draws for this connection. A client sends zeros.
    pub nonce: [u8; NONCE_BYTES],
    /// The client's process ID, for reports. A server sends 0, or 1 if it is full.
    pub pid: u32,
    /// The name of the client's program, for reports. At most 16 bytes are sent; empty for a server.
    pub name: String,
    /// The server's location, in place of a name; zeros for a client.
    pub location: Location,
}

impl Hello {
    /// Returns the hello of a client in this process, whose program has this name.
    pub fn client(name: &str) -> Hello {
        let (pid, name, nonce) = (std::process::id(), name.into(), [0; NONCE_BYTES]);
        Hello { version: VERSION, epoch: 0, nonce, pid, name, location: Location::default() }
    }

    /// Returns the hello of a server on the connection for which it drew this nonce.
    pub fn server(epoch: u64, nonce: [u8; NONCE_BYTES], location: Location) -> Hello {
        Hello { version: VERSION, epoch, nonce, pid: 0, name: String::new(), location }
    }

    /// Returns true if the hello has an epoch, as only those of servers have. The last 16 bytes
    /// differ: a name from a client, a location from a server.
    fn is_from_server(&self) -> bool {
        self.epoch != 0
    }

    /// Returns the same hello for a server that is alive but has no room for this connection.
    pub fn full(self) -> Hello {
        Hello { pid: FULL, ..self }
    }

    /// Returns true if the server has no room for this connection.
    pub fn is_full(&self) -> bool {
        self.pid == FULL
    }

    /// Returns the bytes of the hello.
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&self.version.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.pid.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[24..40].copy_from_slice(&self.nonce);
        if self.is_from_server() {
            bytes[40..48].copy_from_slice(&self.location.machine.to_le_bytes());
            bytes[48..56].copy_from_slice(&self.location.failure_domain.to_le_bytes());
        } else {
            let fits = |len: &usize| self.name.is_char_boundary(*len);
            let len = (0..=NAME_BYTES.min(self.name.len())).rev().find(fits).unwrap_or(0);
            bytes[40..40 + len].copy_from_slice(&self.name.as_bytes()[..len]);
        }
        let checksum = XxHash3_64::oneshot(&bytes[..56]);
        bytes[56..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Decodes a hello of any version.
    ///
    /// # Errors
    /// [`WireError::BadChecksum`] if the bytes are no hello.
    pub fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<Hello, WireError> {
        if bytes[..8] != *MAGIC || XxHash3_64::oneshot(&bytes[..56]) != u64_at(bytes, 56) {
            return Err(WireError::BadChecksum);
        }
        let mut nonce = [0; NONCE_BYTES];
        nonce.copy_from_slice(&bytes[24..40]);
        let mut hello = Hello {
            version: u32_at(bytes, 8),
            pid: u32_at(bytes, 12),
            ..Hello::server(u64_at(bytes, 16), nonce, Location::default())
        };
        if hello.is_from_server() {
            let (machine, failure_domain) = (u64_at(bytes, 40), u64_at(bytes, 48));
            hello.location = Location { machine, failure_domain };
        } else {
            let name = &bytes[40..40 + NAME_BYTES];
            let text = name.split(|byte| *byte == 0).next().unwrap_or(name);
            let shown = |c: char| if c.is_control() { '?' } else { c };
            hello.name = String::from_utf8_lossy(text).chars().map(shown).collect();
        }
        Ok(hello)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_version_can_be_told() {
        let location = Location::new("boot", Some("rack 7"));
        assert_ne!(location.machine, location.failure_domain);
        let alone = Location::new("boot", None);
        assert_eq!(alone, Location { machine: location.machine, failure_domain: alone.machine });
        let server = Hello { version: 77, ..Hello::server(5, [3; NONCE_BYTES], location) };
        assert_eq!(Hello::decode(&server.encode()), Ok(server));
        let hello = Hello { version: 77, ..Hello::client("sort") };
        let mut bytes = hello.encode();
        assert_eq!(Hello::decode(&bytes), Ok(hello));
        bytes[30] ^= 1;
        assert_eq!(Hello::decode(&bytes), Err(WireError::BadChecksum));
        let long = Hello::client("ein-sehr-langer-ü-name");
        assert!(long.name.starts_with(&Hello::decode(&long.encode()).unwrap().name));
    }
}
