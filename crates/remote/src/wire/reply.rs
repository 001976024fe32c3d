//! The replies of servers.

use super::header::{HEADER_BYTES, Header, Op, STATUS_BYTES, WITH_CHECKSUMS, check};
use super::request::Lease;
use super::{WireError, u64_at};

/// The reason why a request failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The server has no room.
    #[error("the server is full ({pages_free} pages free)")]
    Full {
        /// The number of pages that it would still take.
        pages_free: u64,
    },
    /// The server does not have the region: it was dropped, or lost in a restart.
    #[error("the server has no such region")]
    NoRegion,
    /// A fence voided the lease.
    #[error("the lease on the region is void")]
    StaleLease,
    /// The page was never put, or was discarded.
    #[error("page {page} is not held")]
    NotHeld {
        /// The number of the first such page.
        page: u64,
    },
    /// The bytes of a page do not match the checksum that came with them.
    #[error("page {page} arrived damaged")]
    DamagedPage {
        /// The number of the first such page.
        page: u64,
    },
    /// The request is invalid, such as a run outside its region.
    #[error("the server finds the request wrong")]
    BadRequest,
    /// The proof is wrong, or the connection is not attached to the region.
    #[error("the server denies it: not your region, or not from this place")]
    Denied,
    /// A limit on regions is reached.
    #[error("the server has as many regions as it may")]
    TooMany,
    /// The server is draining and creates no regions.
    #[error("the server is draining")]
    Draining,
}

impl Failure {
    fn code(self) -> (u8, u64) {
        match self {
            Failure::Full { pages_free } => (1, pages_free),
            Failure::NoRegion => (2, 0),
            Failure::StaleLease => (3, 0),
            Failure::NotHeld { page } => (4, page),
            Failure::DamagedPage { page } => (5, page),
            Failure::BadRequest => (6, 0),
            Failure::Denied => (7, 0),
            Failure::TooMany => (8, 0),
            Failure::Draining => (9, 0),
        }
    }

    fn from_code(code: u8, value: u64) -> Result<Failure, WireError> {
        Ok(match code {
            1 => Failure::Full { pages_free: value },
            2 => Failure::NoRegion,
            3 => Failure::StaleLease,
            4 => Failure::NotHeld { page: value },
            5 => Failure::DamagedPage { page: value },
            6 => Failure::BadRequest,
            7 => Failure::Denied,
            8 => Failure::TooMany,
            9 => Failure::Draining,
            _ => return Err(WireError::OutOfBounds),
        })
    }
}

/// The status of a server, which placement needs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Status {
    /// The number of pages that this client may put.
    pub pages_total: u64,
    /// The number of pages that it can still put.
    pub pages_free: u64,
    /// The number of regions of all clients.
    pub regions: u64,
    /// The number of open connections.
    pub connections: u64,
    /// The time since the server's start, in nanoseconds.
    pub uptime_ns: u64,
    /// True if the server is draining.
    pub draining: bool,
}

impl Status {
    fn encode(&self) -> [u8; STATUS_BYTES] {
        let fields = [
            self.pages_total,
            self.pages_free,
            self.regions,
            self.connections,
            self.uptime_ns,
            self.draining as u64,
        ];
        let mut bytes = [0; STATUS_BYTES];
        for (into, field) in bytes.chunks_exact_mut(8).zip(fields) {
            into.copy_from_slice(&field.to_le_bytes());
        }
        bytes
    }

    fn decode(bytes: &[u8]) -> Result<Status, WireError> {
        if bytes.len() != STATUS_BYTES || u64_at(bytes, 40) > 1 {
            return Err(WireError::OutOfBounds);
        }
        Ok(Status {
            pages_total: u64_at(bytes, 0),
            pages_free: u64_at(bytes, 8),
            regions: u64_at(bytes, 16),
            connections: u64_at(bytes, 24),
            uptime_ns: u64_at(bytes, 32),
            draining: u64_at(bytes, 40) == 1,
        })
    }
}

/// A reply, which borrows from its frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reply<'a> {
    /// The request is done.
    Done,
    /// The region is created, and attached to this connection.
    Created(Lease),
    /// The region is attached to this connection.
    Attached(Lease),
    /// The pages that were read follow, with their checksums or without.
    Pages {
        /// The number of pages, 1 to 64.
        count: u16,
        /// The checksums in their wire form: see [`super::checksums`]. Empty unless the request asks for
        /// them.
        checksums: &'a [u8],
    },
    /// A bit for each page of the request, from the lowest bit of the first byte on.
    Bitmap {
        /// The number of pages that it covers.
        count: u16,
        /// The bits. Those after the last page are zero.
        bits: &'a [u8],
    },
    /// The server's status.
    Status(Status),
    /// The report, a JSON document.
    Report(&'a [u8]),
    /// The request has failed.
    Failed(Failure),
}

impl<'a> Reply<'a> {
    /// Decodes header and meta of a frame. The pages, if any, follow.
    ///
    /// # Errors
    /// If they are no valid reply.
    pub fn decode_head(
        head: &[u8; HEADER_BYTES],
        meta: &'a [u8],
    ) -> Result<(Header, Reply<'a>), WireError> {
        let header = Header::decode(head)?;
        if meta.len() != header.meta_bytes() {
            return Err(WireError::BadLength);
        }
        check(head, meta)?;
        let lease = Lease { region: header.region, lease: header.lease };
        let reply = match header.op {
            Op::Done => Reply::Done,
            Op::Created => Reply::Created(lease),
            Op::Attached => Reply::Attached(lease),
            Op::Pages => Reply::Pages { count: header.count, checksums: meta },
            Op::Bitmap => Reply::Bitmap { count: header.count, bits: meta },
            Op::StatusIs => Reply::Status(Status::decode(meta)?),
            Op::ReportIs => Reply::Report(meta),
            Op::Failed => Reply::Failed(Failure::from_code(header.flags, header.page)?),
            _ => return Err(WireError::WrongDirection),
        };
        if reply.header(header.id) != header {
            return Err(WireError::OutOfBounds);
        }
        Ok((header, reply))
    }

    fn header(&self, id: u32) -> Header {
        let leased = |op, lease: &Lease| Header {
            region: lease.region,
            lease: lease.lease,
            ..Header::new(op, id)
        };
        match self {
            Reply::Done => Header::new(Op::Done, id),
            Reply::Created(lease) => leased(Op::Created, lease),
            Reply::Attached(lease) => leased(Op::Attached, lease),
            Reply::Pages { count, checksums } => {
                let flags = if checksums.is_empty() { 0 } else { WITH_CHECKSUMS };
                Header { flags, count: *count, ..Header::new(Op::Pages, id) }
            }
            Reply::Bitmap { count, .. } => Header { count: *count, ..Header::new(Op::Bitmap, id) },
            Reply::Status(_) => Header::new(Op::StatusIs, id),
            Reply::Report(json) => {
                Header { page: json.len() as u64, ..Header::new(Op::ReportIs, id) }
            }
            Reply::Failed(failure) => {
                let (flags, page) = failure.code();
                Header { flags, page, ..Header::new(Op::Failed, id) }
            }
        }
    }

    /// Appends header and meta. The caller sends the pages.
    pub fn encode_head(&self, id: u32, out: &mut Vec<u8>) {
        let status;
        let meta: &[u8] = match self {
            Reply::Pages { checksums, .. } => checksums,
            Reply::Bitmap { bits, .. } => bits,
            Reply::Report(json) => json,
            Reply::Status(what) => {
                status = what.encode();
                &status
            }
            _ => &[],
        };
        out.extend_from_slice(&self.header(id).encode(meta));
        out.extend_from_slice(meta);
    }
}
