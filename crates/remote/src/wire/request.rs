//! The requests of clients.

use super::header::{
    AT_END, FENCE, HEADER_BYTES, Header, IF_ABSENT, OVERCOMMIT, Op, WITH_CHECKSUMS, check,
};
use super::{CHECKSUM_BYTES, TOKEN_BYTES, WireError, u64_at};

/// A region's secret, or the proof that the client knows it.
pub type Token = [u8; TOKEN_BYTES];

/// A lease: the right to use a region on a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease {
    /// The server's number of the region.
    pub region: u32,
    /// The number of the lease. A fence voids all earlier ones.
    pub lease: u32,
}

/// A request, which borrows from its frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request<'a> {
    /// Create a region.
    Create {
        /// The size of the region in pages.
        pages: u64,
        /// True to allow more pages than there is room for.
        overcommit: bool,
        /// The secret of the region.
        token: &'a Token,
    },
    /// Use a region on this connection.
    Attach {
        /// The server's number of the region.
        region: u32,
        /// True to void all earlier leases.
        fence: bool,
        /// HMAC-SHA256 under the token; see [`crate::secret::proof`].
        proof: &'a Token,
    },
    /// Drop a region and its pages.
    Drop {
        /// The current lease on the region.
        on: Lease,
        /// True to drop it soon after the last connection to it has ended.
        at_end: bool,
    },
    /// Read pages.
    Get {
        /// The current lease on the region.
        on: Lease,
        /// The number of the first page.
        first: u64,
        /// The number of pages, 1 to 64.
        count: u16,
        /// True for a reply with checksums.
        with_checksums: bool,
    },
    /// Write pages.
    Put {
        /// The current lease on the region.
        on: Lease,
        /// The number of the first page.
        first: u64,
        /// True to keep pages that are held already: see [`IF_ABSENT`].
        if_absent: bool,
        /// The checksums in their wire form: see [`super::checksums`].
        checksums: &'a [u8],
        /// The bytes of the pages, in order.
        pages: &'a [u8],
    },
    /// Write pages that are compressed together.
    CompressedPut {
        /// The current lease on the region.
        on: Lease,
        /// The number of the first page.
        first: u64,
        /// True to keep pages that are held already: see [`IF_ABSENT`].
        if_absent: bool,
        /// The checksums of the pages in their wire form: see [`super::checksums`].
        checksums: &'a [u8],
        /// The LZ4 block of the pages, shorter than they are.
        block: &'a [u8],
    },
    /// Discard pages.
    Discard {
        /// The current lease on the region.
        on: Lease,
        /// The number of the first page.
        first: u64,
        /// The number of pages, which may extend beyond the region.
        count: u64,
    },
    /// Ask for a bitmap of the pages that are held.
    Held {
        /// The current lease on the region.
        on: Lease,
        /// The number of the first page.
        first: u64,
        /// The number of pages, 1 to 4096.
        count: u16,
    },
    /// Create a region with the pages that another one has now, for the child of a fork. The regions
    /// share their memory until one of them is written to. No connection is attached to the new one.
    Snapshot {
        /// The current lease on the region.
        on: Lease,
        /// The secret of the new region.
        token: &'a Token,
    },
    /// Ask for the status that placement needs.
    Status,
    /// Ask for the report for users.
    Report,
}

impl<'a> Request<'a> {
    /// Decodes a whole frame of `header.frame_bytes()` bytes.
    ///
    /// # Errors
    /// If it is no valid request.
    pub fn decode(frame: &'a [u8]) -> Result<(Header, Request<'a>), WireError> {
        let (head, rest) = frame.split_first_chunk().ok_or(WireError::BadLength)?;
        let header = Header::decode(head)?;
        if frame.len() != header.frame_bytes() {
            return Err(WireError::BadLength);
        }
        let (meta, pages) = rest.split_at(header.meta_bytes());
        check(head, meta)?;
        let request = Request::from_parts(&header, meta, pages)?;
        if request.header(header.id) != header {
            return Err(WireError::OutOfBounds);
        }
        Ok((header, request))
    }

    /// Returns the same write with its pages as an LZ4 block; any other request as it is.
    pub fn with_block(self, block: &'a [u8]) -> Request<'a> {
        match self {
            Request::Put { on, first, if_absent, checksums, .. } => {
                Request::CompressedPut { on, first, if_absent, checksums, block }
            }
            other => other,
        }
    }

    fn from_parts(header: &Header, meta: &'a [u8], pages: &'a [u8]) -> Result<Self, WireError> {
        let on = Lease { region: header.region, lease: header.lease };
        let (first, count) = (header.page, header.count);
        let token = || meta.first_chunk().ok_or(WireError::BadLength);
        Ok(match header.op {
            Op::Create => Request::Create {
                pages: first,
                overcommit: header.flags & OVERCOMMIT != 0,
                token: token()?,
            },
            Op::Attach => Request::Attach {
                region: on.region,
                fence: header.flags & FENCE != 0,
                proof: token()?,
            },
            Op::Drop => Request::Drop { on, at_end: header.flags & AT_END != 0 },
            Op::Get => Request::Get {
                on,
                first,
                count,
                with_checksums: header.flags & WITH_CHECKSUMS != 0,
            },
            Op::Put => {
                let if_absent = header.flags & IF_ABSENT != 0;
                Request::Put { on, first, if_absent, checksums: meta, pages }
            }
            Op::CompressedPut => {
                let if_absent = header.flags & IF_ABSENT != 0;
                let (first, checksums) = meta.split_first_chunk().ok_or(WireError::BadLength)?;
                let first = u64::from_le_bytes(*first);
                Request::CompressedPut { on, first, if_absent, checksums, block: pages }
            }
            Op::Discard => Request::Discard { on, first, count: u64_at(meta, 0) },
            Op::Held => Request::Held { on, first, count },
            Op::Snapshot => Request::Snapshot { on, token: token()? },
            Op::Status => Request::Status,
            Op::Report => Request::Report,
            _ => return Err(WireError::WrongDirection),
        })
    }

    fn header(&self, id: u32) -> Header {
        let with = |op, on: Lease, flags: bool, page, count| Header {
            flags: flags as u8,
            count,
            region: on.region,
            lease: on.lease,
            page,
            ..Header::new(op, id)
        };
        let none = Lease { region: 0, lease: 0 };
        match *self {
            Request::Create { pages, overcommit, .. } => {
                with(Op::Create, none, overcommit, pages, 0)
            }
            Request::Attach { region, fence, .. } => {
                with(Op::Attach, Lease { region, lease: 0 }, fence, 0, 0)
            }
            Request::Drop { on, at_end } => with(Op::Drop, on, at_end, 0, 0),
            Request::Get { on, first, count, with_checksums } => {
                with(Op::Get, on, with_checksums, first, count)
            }
            Request::Put { on, first, if_absent, checksums, .. } => {
                with(Op::Put, on, if_absent, first, (checksums.len() / CHECKSUM_BYTES) as u16)
            }
            Request::CompressedPut { on, if_absent, checksums, block, .. } => with(
                Op::CompressedPut,
                on,
                if_absent,
                block.len() as u64,
                (checksums.len() / CHECKSUM_BYTES) as u16,
            ),
            Request::Discard { on, first, .. } => with(Op::Discard, on, false, first, 0),
            Request::Held { on, first, count } => with(Op::Held, on, false, first, count),
            Request::Snapshot { on, .. } => with(Op::Snapshot, on, false, 0, 0),
            Request::Status => Header::new(Op::Status, id),
            Request::Report => Header::new(Op::Report, id),
        }
    }

    /// Appends header and meta. The caller sends the pages of a put, which need no copy so.
    pub fn encode_head(&self, id: u32, out: &mut Vec<u8>) {
        let (count_bytes, first_and_checksums);
        let meta: &[u8] = match self {
            Request::Create { token, .. } | Request::Snapshot { token, .. } => *token,
            Request::Attach { proof, .. } => *proof,
            Request::Put { checksums, .. } => checksums,
            Request::CompressedPut { first, checksums, .. } => {
                first_and_checksums = [&first.to_le_bytes(), *checksums].concat();
                &first_and_checksums
            }
            Request::Discard { count, .. } => {
                count_bytes = count.to_le_bytes();
                &count_bytes
            }
            _ => &[],
        };
        let header: [u8; HEADER_BYTES] = self.header(id).encode(meta);
        out.extend_from_slice(&header);
        out.extend_from_slice(meta);
    }
}
