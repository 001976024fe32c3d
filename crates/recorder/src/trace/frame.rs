//! Frames: compressed, with a length and a sum, so that a damaged one is known before it is used.

use lz4_flex::block::{compress, decompress};
use std::io::{self, Read};
use twox_hash::XxHash3_64;

pub const HEAD: u32 = u32::from_le_bytes(*b"PThd");
pub const BLOCK: u32 = u32::from_le_bytes(*b"PTbl");
pub const INDEX: u32 = u32::from_le_bytes(*b"PTix");

pub const HEADER_BYTES: usize = 20;
/// No frame that we write is larger; one that says so is damaged.
const BYTES_MAX: u32 = 1 << 30;
/// A byte of LZ4 stands for 255 at most: a frame that unpacks to more than that is damaged.
/// Source: lz4_Block_format.md, "match length".
pub const RATIO_MAX: u32 = 255;

/// What stands before the packed bytes.
struct FrameHeader {
    kind: u32,
    raw_bytes: u32,
    packed_bytes: u32,
    sum: u64,
}

impl FrameHeader {
    fn parse(bytes: &[u8; HEADER_BYTES]) -> FrameHeader {
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| bytes[at + i]));
        let sum = u64::from(word(12)) | u64::from(word(16)) << 32;
        FrameHeader { kind: word(0), raw_bytes: word(4), packed_bytes: word(8), sum }
    }
}

/// A frame as it is written.
pub fn pack(kind: u32, raw: &[u8]) -> Vec<u8> {
    let packed = compress(raw);
    let mut frame = Vec::with_capacity(HEADER_BYTES + packed.len());
    for word in [kind, raw.len() as u32, packed.len() as u32] {
        frame.extend_from_slice(&word.to_le_bytes());
    }
    frame.extend_from_slice(&XxHash3_64::oneshot(&packed).to_le_bytes());
    frame.extend_from_slice(&packed);
    frame
}

/// The next frame of a reader, unpacked, and how many bytes it had. None where there is no whole one.
pub fn unpack(reader: &mut impl Read) -> io::Result<Option<(u32, Vec<u8>, u64)>> {
    let mut header = [0; HEADER_BYTES];
    if !fill(reader, &mut header)? {
        return Ok(None);
    }
    let FrameHeader { kind, raw_bytes, packed_bytes, sum } = FrameHeader::parse(&header);
    if ![HEAD, BLOCK, INDEX].contains(&kind) || raw_bytes > BYTES_MAX || packed_bytes > BYTES_MAX {
        return Ok(None);
    }
    // Never reserves what a damaged length asks for.
    let mut packed = Vec::new();
    reader.take(packed_bytes.into()).read_to_end(&mut packed)?;
    if packed.len() != packed_bytes as usize || XxHash3_64::oneshot(&packed) != sum {
        return Ok(None);
    }
    if raw_bytes > packed_bytes.saturating_mul(RATIO_MAX) {
        return Ok(None);
    }
    let raw = decompress(&packed, raw_bytes as usize).ok();
    let raw = raw.filter(|raw| raw.len() == raw_bytes as usize);
    Ok(raw.map(|raw| (kind, raw, HEADER_BYTES as u64 + u64::from(packed_bytes))))
}

/// Whether there was enough.
fn fill(reader: &mut impl Read, bytes: &mut [u8]) -> io::Result<bool> {
    match reader.read_exact(bytes) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        other => other.map(|()| true),
    }
}
