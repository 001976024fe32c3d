//! Frames: compressed, with a length and a checksum, so that readers notice damage before they use the
//! contents.

use lz4_flex::block::{compress, decompress};
use std::io::{self, Read};
use twox_hash::XxHash3_64;

pub const HEAD: u32 = u32::from_le_bytes(*b"PThd");
pub const BLOCK: u32 = u32::from_le_bytes(*b"PTbl");
pub const INDEX: u32 = u32::from_le_bytes(*b"PTix");

pub const HEADER_BYTES: usize = 20;
/// The most bytes of a frame that we write; a larger length is damage.
const BYTES_MAX: u32 = 1 << 30;
/// The most that a byte of LZ4 can expand to; a larger ratio is damage. Source: lz4_Block_format.md,
/// "match length".
pub const RATIO_MAX: u32 = 255;

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

/// Compresses bytes into a frame.
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

/// Reads and decompresses the next frame; returns its kind, its contents and its length in the file.
/// None if no whole frame follows.
pub fn unpack(reader: &mut impl Read) -> io::Result<Option<(u32, Vec<u8>, u64)>> {
    let mut header = [0; HEADER_BYTES];
    if !fill(reader, &mut header)? {
        return Ok(None);
    }
    let FrameHeader { kind, raw_bytes, packed_bytes, sum } = FrameHeader::parse(&header);
    if ![HEAD, BLOCK, INDEX].contains(&kind) || raw_bytes > BYTES_MAX || packed_bytes > BYTES_MAX {
        return Ok(None);
    }
    // A damaged length must not reserve memory.
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

/// Fills `bytes`; false if the file ended before.
fn fill(reader: &mut impl Read, bytes: &mut [u8]) -> io::Result<bool> {
    match reader.read_exact(bytes) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        other => other.map(|()| true),
    }
}
