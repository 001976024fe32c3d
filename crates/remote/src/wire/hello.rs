//! The first 64 bytes of a connection, in both directions and in every version of the protocol.

use super::{VERSION, WireError, u32_at, u64_at};
use twox_hash::XxHash3_64;

/// Bytes of a hello.
pub const HELLO_BYTES: usize = 64;

/// Bytes that a server draws for each connection, so that no proof serves twice.
pub const NONCE_BYTES: usize = 16;

const MAGIC: &[u8; 8] = b"pagetax\n";
const NAME_BYTES: usize = 16;

/// Where a server runs: what fails together. Hashes, of which only equality means something.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Location {
    /// The machine, since its last boot.
    pub machine: u64,
    /// What fails as a whole with the server: by default the machine, or whatever its operator names (a rack).
    pub failure_domain: u64,
}

impl Location {
    /// A location on the machine with this boot id, in the failure domain of this name, if it has one.
    pub fn new(boot_id: &str, failure_domain: Option<&str>) -> Location {
        let machine = XxHash3_64::oneshot(boot_id.as_bytes());
        let named = failure_domain.map(|name| XxHash3_64::oneshot(name.as_bytes()));
        Location { machine, failure_domain: named.unwrap_or(machine) }
    }
}

/// What a server that has no room for another connection of this client says in place of a process. It then
/// closes the connection.
const FULL: u32 = 1;

/// Who speaks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// The protocol it speaks: [`VERSION`] for one of ours.
    pub version: u32,
    /// Of a server: drawn at its start, so that a restarted one is another, and never 0. Of a client: 0.
    pub epoch: u64,
    /// Of a server: drawn for this connection. Of a client: zeros.
    pub nonce: [u8; NONCE_BYTES],
    /// For people: the process of the client. Of a server: 0, or that it is full.
    pub pid: u32,
    /// For people: the client's program. At most 16 bytes are sent. Of a server: empty.
    pub name: String,
    /// Of a server, in place of a name. Of a client: zeros.
    pub location: Location,
}

impl Hello {
    /// A client's, for this process, whose program has this name.
    pub fn client(name: &str) -> Hello {
        let (pid, name, nonce) = (std::process::id(), name.into(), [0; NONCE_BYTES]);
        Hello { version: VERSION, epoch: 0, nonce, pid, name, location: Location::default() }
    }

    /// A server's, on a connection for which it drew this nonce.
    pub fn server(epoch: u64, nonce: [u8; NONCE_BYTES], location: Location) -> Hello {
        Hello { version: VERSION, epoch, nonce, pid: 0, name: String::new(), location }
    }

    /// Only servers have an epoch; the two sides use the same 16 bytes for different things.
    fn is_from_server(&self) -> bool {
        self.epoch != 0
    }

    /// The same hello of a server that has no room for this connection: it lives, but closes it.
    pub fn full(self) -> Hello {
        Hello { pid: FULL, ..self }
    }

    /// Whether this server has no room for this connection.
    pub fn is_full(&self) -> bool {
        self.pid == FULL
    }

    /// As it is sent.
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
        let sum = XxHash3_64::oneshot(&bytes[..56]);
        bytes[56..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Reads a hello of any version.
    ///
    /// # Errors
    /// [`WireError::BadChecksum`] when this is no hello at all.
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
