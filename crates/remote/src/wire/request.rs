//! What clients ask.

use super::header::{
    AT_END, FENCE, HEADER_BYTES, Header, IF_ABSENT, OVERCOMMIT, Op, WITH_SUMS, check,
};
use super::{TOKEN_BYTES, WireError, u64_at};

/// A region's secret, or the proof that one knows it.
pub type Token = [u8; TOKEN_BYTES];

/// A region on a server, as one connection may use it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease {
    /// The server's number of it.
    pub region: u32,
    /// The epoch of its use.
    pub lease: u32,
}

/// A request. What it borrows lies in the frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request<'a> {
    /// Make a region.
    Create {
        /// How many pages it has.
        pages: u64,
        /// Also when there is not room for all of them.
        overcommit: bool,
        /// What will prove that it is ours.
        token: &'a Token,
    },
    /// Use a region on this connection.
    Attach {
        /// The server's number of it.
        region: u32,
        /// Void all earlier leases.
        fence: bool,
        /// HMAC-SHA256 under the token; see [`crate::secret::proof`].
        proof: &'a Token,
    },
    /// Forget a region.
    Drop {
        /// Which.
        on: Lease,
        /// Not now, but soon after no connection uses it any more.
        at_end: bool,
    },
    /// Read pages.
    Get {
        /// Of this region.
        on: Lease,
        /// From this one on.
        first: u64,
        /// 1 to 64.
        count: u16,
        /// The sums too.
        with_sums: bool,
    },
    /// Write pages.
    Put {
        /// Of this region.
        on: Lease,
        /// From this one on.
        first: u64,
        /// Those that are held already stay as they are.
        if_absent: bool,
        /// As on the wire; see [`super::sums`].
        sums: &'a [u8],
        /// As many pages.
        pages: &'a [u8],
    },
    /// Forget pages.
    Discard {
        /// Of this region.
        on: Lease,
        /// From this one on.
        first: u64,
        /// Any number; the end of the region ends it.
        count: u64,
    },
    /// Which of these pages are held?
    Held {
        /// Of this region.
        on: Lease,
        /// From this one on.
        first: u64,
        /// 1 to 4096.
        count: u16,
    },
    /// How much room is there?
    Status,
    /// Everything that people want to know.
    Report,
}

impl<'a> Request<'a> {
    /// Reads a whole frame of `header.frame_bytes()` bytes.
    ///
    /// # Errors
    /// When it is none.
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
            Op::Get => Request::Get { on, first, count, with_sums: header.flags & WITH_SUMS != 0 },
            Op::Put => {
                let if_absent = header.flags & IF_ABSENT != 0;
                Request::Put { on, first, if_absent, sums: meta, pages }
            }
            Op::Discard => Request::Discard { on, first, count: u64_at(meta, 0) },
            Op::Held => Request::Held { on, first, count },
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
            Request::Get { on, first, count, with_sums } => {
                with(Op::Get, on, with_sums, first, count)
            }
            Request::Put { on, first, if_absent, sums, .. } => {
                with(Op::Put, on, if_absent, first, (sums.len() / super::SUM_BYTES) as u16)
            }
            Request::Discard { on, first, .. } => with(Op::Discard, on, false, first, 0),
            Request::Held { on, first, count } => with(Op::Held, on, false, first, count),
            Request::Status => Header::new(Op::Status, id),
            Request::Report => Header::new(Op::Report, id),
        }
    }

    /// Appends header and meta; the pages of a put follow separately, from where they lie.
    pub fn encode_head(&self, id: u32, out: &mut Vec<u8>) {
        let count_bytes;
        let meta: &[u8] = match self {
            Request::Create { token, .. } => *token,
            Request::Attach { proof, .. } => *proof,
            Request::Put { sums, .. } => sums,
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
