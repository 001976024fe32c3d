//! The first 64 bytes of a connection, in both directions and in every version of the protocol.

use super::{VERSION, WireError, u32_at, u64_at};
use twox_hash::XxHash3_64;

/// Bytes of a hello.
pub const HELLO_BYTES: usize = 64;

/// Bytes that a server draws for each connection, so that no proof serves twice.
pub const NONCE_BYTES: usize = 16;

const MAGIC: &[u8; 8] = b"pagetax\n";
const NAME_BYTES: usize = 16;

/// Who speaks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// The protocol it speaks: [`VERSION`] for one of ours.
    pub version: u32,
    /// Of a server: drawn at its start, so that a restarted one is another. Of a client: 0.
    pub epoch: u64,
    /// Of a server: drawn for this connection. Of a client: zeros.
    pub nonce: [u8; NONCE_BYTES],
    /// For people: the process of the client. Of a server: 0.
    pub pid: u32,
    /// For people: the client's program. At most 16 bytes are sent.
    pub name: String,
}

impl Hello {
    /// A client's, for this process, whose program has this name.
    pub fn client(name: &str) -> Hello {
        let pid = std::process::id();
        Hello { version: VERSION, epoch: 0, nonce: [0; NONCE_BYTES], pid, name: name.into() }
    }

    /// As it is sent.
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&self.version.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.pid.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[24..40].copy_from_slice(&self.nonce);
        let fits = |len: &usize| self.name.is_char_boundary(*len);
        let len = (0..=NAME_BYTES.min(self.name.len())).rev().find(fits).unwrap_or(0);
        bytes[40..40 + len].copy_from_slice(&self.name.as_bytes()[..len]);
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
        let name = &bytes[40..40 + NAME_BYTES];
        let name = String::from_utf8_lossy(name.split(|byte| *byte == 0).next().unwrap_or(name));
        let mut nonce = [0; NONCE_BYTES];
        nonce.copy_from_slice(&bytes[24..40]);
        Ok(Hello {
            version: u32_at(bytes, 8),
            epoch: u64_at(bytes, 16),
            nonce,
            pid: u32_at(bytes, 12),
            name: name.chars().map(|c| if c.is_control() { '?' } else { c }).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_version_can_be_told() {
        let hello =
            Hello { version: 77, epoch: 5, nonce: [3; NONCE_BYTES], pid: 9, name: "sort".into() };
        let mut bytes = hello.encode();
        assert_eq!(Hello::decode(&bytes), Ok(hello));
        bytes[30] ^= 1;
        assert_eq!(Hello::decode(&bytes), Err(WireError::BadChecksum));
        let long = Hello::client("ein-sehr-langer-ü-name");
        assert!(long.name.starts_with(&Hello::decode(&long.encode()).unwrap().name));
    }
}
