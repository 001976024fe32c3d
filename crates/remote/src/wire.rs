//! The protocol between a memory server and its clients, as bytes: no I/O, no clock, no state.
//!
//! A connection begins with one [`hello::Hello`] each way. Then the client sends requests. The
//! server answers each, in order, with a reply that carries the request's id. A frame is a
//! [`header::Header`], then its *meta*, then its pages. The meta is small, and the header's
//! checksum covers it. Each page has its own [`WireChecksum`]. The header determines the lengths of
//! meta and pages, within limits: no frame is longer than [`FRAME_BYTES_MAX`].
//!
//! Invariants: any bytes decode to a message or an error, never a panic. A message that was decoded
//! encodes to the same bytes. All numbers are little-endian.

pub mod header;
pub mod hello;
pub mod inbox;
pub mod reply;
pub mod request;

use crate::page::{PAGE_BYTES, RUN_PAGES_MAX};
use header::HEADER_BYTES;
use twox_hash::XxHash3_64;

/// The newest version of the protocol that this build speaks.
pub const VERSION: u32 = 5;

/// The oldest version that this build speaks. A change of the protocol raises [`VERSION`] alone, and servers
/// go on with clients of the older ones.
pub const VERSION_MIN: u32 = 3;

/// The first version with [`request::Request::Snapshot`].
pub const SNAPSHOTS_FROM: u32 = 4;

/// The first version with [`request::Request::CompressedPut`].
pub const COMPRESSED_FROM: u32 = 5;

/// Returns the version to speak with a client: the newest that both know. None if it is too old.
pub fn agreed_version(of_client: u32) -> Option<u32> {
    Some(of_client.min(VERSION)).filter(|version| *version >= VERSION_MIN)
}

/// The size in bytes of a page's checksum on the wire.
pub const CHECKSUM_BYTES: usize = 8;

/// The size in bytes of a region's token, and of the proof that a client knows it.
pub const TOKEN_BYTES: usize = 32;

/// The most pages that one [`request::Request::Held`] may cover.
pub const HELD_PAGES_MAX: usize = 4096;

/// The largest size of a report in bytes.
pub const REPORT_BYTES_MAX: usize = 48 << 10;

/// The largest size of a frame in bytes.
pub const FRAME_BYTES_MAX: usize = HEADER_BYTES + RUN_PAGES_MAX * (CHECKSUM_BYTES + PAGE_BYTES);

/// The reason why bytes do not decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The operation is not ours, or is of a newer version.
    #[error("unknown operation {0}")]
    UnknownOp(u8),
    /// A field exceeds the protocol's limit, or a field that must be zero is not.
    #[error("a field is out of bounds")]
    OutOfBounds,
    /// Header and meta do not match the checksum in the header.
    #[error("the checksum is wrong")]
    BadChecksum,
    /// The number of bytes is not the one in the header.
    #[error("the length is wrong")]
    BadLength,
    /// The other side sent a message of the wrong direction.
    #[error("a message of the wrong direction")]
    WrongDirection,
}

/// The checksum of a page on the wire: XXH3, 64 bits (Collet).
///
/// It detects accidental damage while the sender still has the page. It is unkeyed, so it proves
/// nothing against an attacker who holds the page. Against attackers, the page's owner keeps a
/// [`PageMac`](crate::page::PageMac), which no server may see.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct WireChecksum(pub u64);

impl WireChecksum {
    /// Returns the checksum of these bytes.
    #[inline]
    pub fn of(page: &[u8]) -> WireChecksum {
        WireChecksum(XxHash3_64::oneshot(page))
    }
}

/// Returns the checksums in a piece of meta.
pub fn checksums(bytes: &[u8]) -> impl ExactSizeIterator<Item = WireChecksum> + '_ {
    bytes.chunks_exact(CHECKSUM_BYTES).map(|checksum| WireChecksum(u64_at(checksum, 0)))
}

/// Appends checksums in their wire form.
pub fn push_checksums(out: &mut Vec<u8>, checksums: impl IntoIterator<Item = WireChecksum>) {
    out.extend(checksums.into_iter().flat_map(|checksum| checksum.0.to_le_bytes()));
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u16_at(bytes, at) as u32 | (u16_at(bytes, at + 2) as u32) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u32_at(bytes, at) as u64 | (u32_at(bytes, at + 4) as u64) << 32
}
