//! The 32 bytes that begin every frame.

use super::{
    CHECKSUM_BYTES, HELD_PAGES_MAX, REPORT_BYTES_MAX, TOKEN_BYTES, WireError, u16_at, u32_at,
    u64_at,
};
use crate::page::{PAGE_BYTES, RUN_PAGES_MAX};
use twox_hash::XxHash3_64;

/// The size of a header in bytes.
pub const HEADER_BYTES: usize = 32;

/// The size of a server's status in bytes.
pub const STATUS_BYTES: usize = 48;

macro_rules! ops {
    ($($(#[$doc:meta])* $name:ident = $value:literal),* $(,)?) => {
        /// The operation of a frame. Requests are below 128, replies from 128 on.
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
    /// Create a region.
    Create = 1,
    /// Use a region on this connection.
    Attach = 2,
    /// Drop a region and its pages.
    Drop = 3,
    /// Read pages.
    Get = 4,
    /// Write pages.
    Put = 5,
    /// Discard pages.
    Discard = 6,
    /// Ask for a bitmap of the pages that are held.
    Held = 7,
    /// Ask for the status that placement needs.
    Status = 8,
    /// Ask for the report for users.
    Report = 9,
    /// Create a region with the pages that another one has now.
    Snapshot = 10,
    /// Write pages, which follow as one LZ4 block.
    CompressedPut = 11,
    /// The request is done.
    Done = 128,
    /// The region is created.
    Created = 129,
    /// The region can be used.
    Attached = 130,
    /// The pages that were read.
    Pages = 131,
    /// A bit for each page of the request.
    Bitmap = 132,
    /// The server's status.
    StatusIs = 133,
    /// The report, a JSON document.
    ReportIs = 134,
    /// The request has failed.
    Failed = 135,
}

/// The flag of `Create` that allows more pages than there is room for.
pub const OVERCOMMIT: u8 = 1;
/// The flag of `Attach` that voids all earlier leases.
pub const FENCE: u8 = 1;
/// The flag of `Drop` that postpones it until the client has gone.
pub const AT_END: u8 = 1;
/// The flag of `Get` and `Pages` for a reply with checksums.
pub const WITH_CHECKSUMS: u8 = 1;
/// The flag of both puts that keeps pages that are held already. A held page with the same checksum is
/// written again, which repairs a damaged one.
pub const IF_ABSENT: u8 = 1;

/// The head of a frame. The meaning of a field depends on the operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The operation that the frame requests or answers.
    pub op: Op,
    /// The flags of the operation, or the code of a failure.
    pub flags: u8,
    /// The number of pages of the run.
    pub count: u16,
    /// The id that the client chose, which the reply repeats.
    pub id: u32,
    /// The server's number of the region.
    pub region: u32,
    /// The lease on the region, from attach. A fence or a restart voids it.
    pub lease: u32,
    /// The first page of the run; of a compressed put the size of its block in bytes.
    pub page: u64,
}

impl Header {
    /// Returns a header whose other fields are zero.
    pub fn new(op: Op, id: u32) -> Header {
        Header { op, flags: 0, count: 0, id, region: 0, lease: 0, page: 0 }
    }

    /// Returns the header's bytes. Its checksum covers the meta as well.
    pub fn encode(&self, meta: &[u8]) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0] = self.op as u8;
        bytes[1] = self.flags;
        bytes[2..4].copy_from_slice(&self.count.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.id.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.region.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.lease.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.page.to_le_bytes());
        let checksum = seal(&bytes, meta);
        bytes[24..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Decodes a header. Does not verify the checksum, which needs the meta: see [`check`].
    ///
    /// # Errors
    /// If the operation is unknown, or a count exceeds its limit.
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
            Op::CompressedPut => {
                (1..=RUN_PAGES_MAX).contains(&count) && header.page < (count * PAGE_BYTES) as u64
            }
            Op::ReportIs => header.page <= REPORT_BYTES_MAX as u64,
            _ => true,
        };
        if fits { Ok(header) } else { Err(WireError::OutOfBounds) }
    }

    /// Returns the size in bytes of the meta that follows.
    pub fn meta_bytes(&self) -> usize {
        let count = self.count as usize;
        match self.op {
            Op::Create | Op::Attach | Op::Snapshot => TOKEN_BYTES,
            Op::Put => count * CHECKSUM_BYTES,
            Op::CompressedPut => size_of::<u64>() + count * CHECKSUM_BYTES,
            Op::Pages if self.flags & WITH_CHECKSUMS != 0 => count * CHECKSUM_BYTES,
            Op::Discard => 8,
            Op::Bitmap => count.div_ceil(8),
            Op::StatusIs => STATUS_BYTES,
            Op::ReportIs => self.page as usize,
            _ => 0,
        }
    }

    /// Returns the size in bytes of the pages that follow the meta.
    pub fn page_bytes(&self) -> usize {
        match self.op {
            Op::Put | Op::Pages => self.count as usize * PAGE_BYTES,
            Op::CompressedPut => self.page as usize,
            _ => 0,
        }
    }

    /// Returns the size of the whole frame in bytes.
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
    let meta_checksum = if meta.is_empty() { 0 } else { XxHash3_64::oneshot(meta) };
    XxHash3_64::oneshot_with_seed(meta_checksum, &header[..24])
}
