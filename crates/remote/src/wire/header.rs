//! The 32 bytes that begin every frame.

use super::{
    HELD_PAGES_MAX, REPORT_BYTES_MAX, SUM_BYTES, TOKEN_BYTES, WireError, u16_at, u32_at, u64_at,
};
use crate::page::{PAGE_BYTES, RUN_PAGES_MAX};
use twox_hash::XxHash3_64;

/// Bytes of a header.
pub const HEADER_BYTES: usize = 32;

/// Bytes of a server's status.
pub const STATUS_BYTES: usize = 48;

macro_rules! ops {
    ($($(#[$doc:meta])* $name:ident = $value:literal),* $(,)?) => {
        /// What a frame is. Requests are below 128, replies above.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(u8)]
        pub enum Op {
            $($(#[$doc])* $name = $value),*
        }

        impl TryFrom<u8> for Op {
            type Error = WireError;
            fn try_from(value: u8) -> Result<Op, WireError> {
                match value {
                    $($value => Ok(Op::$name),)*
                    other => Err(WireError::UnknownOp(other)),
                }
            }
        }
    };
}

ops! {
    /// Make a region.
    Create = 1,
    /// Use a region on this connection.
    Attach = 2,
    /// Forget a region and its pages.
    Drop = 3,
    /// Read pages.
    Get = 4,
    /// Write pages.
    Put = 5,
    /// Forget pages.
    Discard = 6,
    /// Which pages are held?
    Held = 7,
    /// How much room is there?
    Status = 8,
    /// Everything that people want to know.
    Report = 9,
    /// Done as asked.
    Done = 128,
    /// The region is made.
    Created = 129,
    /// The region can be used.
    Attached = 130,
    /// The pages that were read.
    Pages = 131,
    /// A bit for each page that was asked about.
    Bitmap = 132,
    /// How much room there is.
    StatusIs = 133,
    /// A JSON document.
    ReportIs = 134,
    /// It cannot be done.
    Failed = 135,
}

/// For `Create`: more pages than there is room for.
pub const OVERCOMMIT: u8 = 1;
/// For `Attach`: what was sent under earlier leases must not be done any more.
pub const FENCE: u8 = 1;
/// For `Drop`: when its client has gone.
pub const AT_END: u8 = 1;
/// For `Get` and `Pages`: with the sums.
pub const WITH_SUMS: u8 = 1;
/// For `Put`: pages that are held already stay as they are, unless they have the same checksum: such a page is written
/// again, which repairs a damaged one.
pub const IF_ABSENT: u8 = 1;

/// The head of a frame. What a field means depends on the operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// What the frame is.
    pub op: Op,
    /// Of the operation; the code of a failure.
    pub flags: u8,
    /// Pages in the extent.
    pub count: u16,
    /// Chosen by the client, repeated by the reply.
    pub id: u32,
    /// The server's number of the region.
    pub region: u32,
    /// The epoch of the region's use: handed out by attach, void after a fence or a restart.
    pub lease: u32,
    /// First page of the extent.
    pub page: u64,
}

impl Header {
    /// A header with all else zero.
    pub fn new(op: Op, id: u32) -> Header {
        Header { op, flags: 0, count: 0, id, region: 0, lease: 0, page: 0 }
    }

    /// The header's bytes, sealed together with the meta that follows it.
    pub fn encode(&self, meta: &[u8]) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0] = self.op as u8;
        bytes[1] = self.flags;
        bytes[2..4].copy_from_slice(&self.count.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.id.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.region.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.lease.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.page.to_le_bytes());
        let sum = seal(&bytes, meta);
        bytes[24..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Reads a header. The checksum is not looked at: it needs the meta, see [`check`].
    ///
    /// # Errors
    /// For unknown operations, and counts beyond the limits.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Header, WireError> {
        let header = Header {
            op: Op::try_from(bytes[0])?,
            flags: bytes[1],
            count: u16_at(bytes, 2),
            id: u32_at(bytes, 4),
            region: u32_at(bytes, 8),
            lease: u32_at(bytes, 12),
            page: u64_at(bytes, 16),
        };
        let count = header.count as usize;
        let fits = match header.op {
            Op::Get | Op::Put | Op::Pages => (1..=RUN_PAGES_MAX).contains(&count),
            Op::Held | Op::Bitmap => (1..=HELD_PAGES_MAX).contains(&count),
            Op::ReportIs => header.page <= REPORT_BYTES_MAX as u64,
            _ => true,
        };
        if fits { Ok(header) } else { Err(WireError::OutOfBounds) }
    }

    /// Bytes of meta that follow.
    pub fn meta_bytes(&self) -> usize {
        let count = self.count as usize;
        match self.op {
            Op::Create | Op::Attach => TOKEN_BYTES,
            Op::Put => count * SUM_BYTES,
            Op::Pages if self.flags & WITH_SUMS != 0 => count * SUM_BYTES,
            Op::Discard => 8,
            Op::Bitmap => count.div_ceil(8),
            Op::StatusIs => STATUS_BYTES,
            Op::ReportIs => self.page as usize,
            _ => 0,
        }
    }

    /// Bytes of pages that follow the meta.
    pub fn page_bytes(&self) -> usize {
        match self.op {
            Op::Put | Op::Pages => self.count as usize * PAGE_BYTES,
            _ => 0,
        }
    }

    /// Bytes of the whole frame.
    pub fn frame_bytes(&self) -> usize {
        HEADER_BYTES + self.meta_bytes() + self.page_bytes()
    }
}

/// Checks a header and its meta against the header's checksum.
///
/// # Errors
/// [`WireError::BadChecksum`].
pub fn check(header: &[u8; HEADER_BYTES], meta: &[u8]) -> Result<(), WireError> {
    if seal(header, meta) == u64_at(header, 24) { Ok(()) } else { Err(WireError::BadChecksum) }
}

fn seal(header: &[u8; HEADER_BYTES], meta: &[u8]) -> u64 {
    let meta_sum = if meta.is_empty() { 0 } else { XxHash3_64::oneshot(meta) };
    XxHash3_64::oneshot_with_seed(meta_sum, &header[..24])
}
