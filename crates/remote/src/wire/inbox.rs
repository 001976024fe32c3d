//! Frames from a stream of bytes, which may arrive in pieces of any size.
//!
//! Invariant: the buffer grows to the largest frame that has begun to arrive, and never beyond
//! [`super::FRAME_BYTES_MAX`] and one read.

use super::header::{HEADER_BYTES, Header};
use super::{FRAME_BYTES_MAX, WireError};
use std::io::{self, IoSliceMut, Read};

/// The bytes of one read, which may contain many small requests.
const ROOM_BYTES: usize = 8 << 10;

/// A buffer of bytes that have arrived and are not used yet.
#[derive(Debug, Default)]
pub struct Inbox {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
    room: usize,
}

impl Inbox {
    /// Returns an empty buffer that reads up to `bytes` at once.
    pub fn with_room(bytes: usize) -> Inbox {
        Inbox { room: bytes, ..Inbox::default() }
    }

    /// Returns true if the next frame has arrived completely.
    ///
    /// # Errors
    /// As [`Inbox::frame`].
    pub fn is_whole(&self) -> Result<bool, WireError> {
        Ok(self.pending()?.is_some_and(|len| self.end - self.start >= len))
    }

    /// Returns true if no unused bytes are left.
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Returns the size of the frame that is arriving, or of a header.
    ///
    /// # Errors
    /// As [`Inbox::frame`].
    pub fn wanted(&self) -> Result<usize, WireError> {
        Ok(self.pending()?.unwrap_or(HEADER_BYTES))
    }

    /// Frees the memory of the buffer, if it is empty.
    pub fn shrink(&mut self) {
        if self.is_empty() {
            *self = Inbox::with_room(self.room);
        }
    }

    /// Moves bytes into `into`, for a caller that reads frames piece by piece. Returns their number.
    pub fn take(&mut self, into: &mut [IoSliceMut<'_>]) -> usize {
        let from = self.start;
        for piece in into {
            let len = piece.len().min(self.end - self.start);
            piece[..len].copy_from_slice(&self.bytes[self.start..self.start + len]);
            self.start += len;
        }
        self.start - from
    }

    /// Returns the next frame, or `None` if it has not arrived completely.
    ///
    /// # Errors
    /// If the bytes do not begin with a valid header.
    pub fn frame(&mut self) -> Result<Option<&[u8]>, WireError> {
        match self.pending()? {
            Some(len) if self.end - self.start >= len => {
                let at = self.start;
                self.start += len;
                Ok(Some(&self.bytes[at..at + len]))
            }
            _ => Ok(None),
        }
    }

    /// Reads once. Returns the number of bytes, or 0 at the end of the stream.
    ///
    /// # Errors
    /// The errors of the stream, and those of [`Inbox::frame`].
    pub fn fill(&mut self, stream: &mut impl Read) -> io::Result<usize> {
        let wanted = self.pending().map_err(io::Error::other)?.unwrap_or(HEADER_BYTES);
        debug_assert!(wanted <= FRAME_BYTES_MAX);
        self.bytes.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let room = wanted.max(self.room).max(ROOM_BYTES);
        if self.bytes.len() < room {
            self.bytes.resize(room, 0);
        }
        let came = stream.read(&mut self.bytes[self.end..])?;
        self.end += came;
        Ok(came)
    }

    /// Returns the size in bytes of the arriving frame, or `None` before its header has arrived.
    fn pending(&self) -> Result<Option<usize>, WireError> {
        match self.bytes[self.start..self.end].first_chunk() {
            Some(head) => Ok(Some(Header::decode(head)?.frame_bytes())),
            None => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::request::{Lease, Request};
    use super::*;
    use crate::page::PAGE_BYTES;
    use crate::wire::{WireChecksum, push_checksums};

    /// A stream that limits the bytes of each read.
    struct Drip<'a>(&'a [u8], usize);

    impl Read for Drip<'_> {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            let len = self.1.min(into.len());
            self.0.take(len as u64).read(into).inspect(|len| self.0 = &self.0[*len..])
        }
    }

    #[test]
    fn bytes_that_came_with_a_frame_can_be_had_piece_by_piece() {
        let mut stream = Vec::new();
        let on = Lease { region: 1, lease: 2 };
        for first in 0..3 {
            let get = Request::Get { on, first, count: 1, with_checksums: false };
            get.encode_head(first as u32, &mut stream);
        }
        let (mut inbox, mut drip) = (Inbox::with_room(1 << 16), Drip(&stream, usize::MAX));
        inbox.fill(&mut drip).unwrap();
        assert!(inbox.is_whole().unwrap());
        assert_eq!(inbox.frame().unwrap(), Some(&stream[..HEADER_BYTES]));
        let (mut head, mut rest) = ([0; 5], [0; 100]);
        let came = inbox.take(&mut [IoSliceMut::new(&mut head), IoSliceMut::new(&mut rest)]);
        assert_eq!(came, 2 * HEADER_BYTES);
        assert_eq!([&head[..], &rest[..came - 5]].concat(), stream[HEADER_BYTES..]);
        assert_eq!(inbox.take(&mut [IoSliceMut::new(&mut rest)]), 0);
        assert!(!inbox.is_whole().unwrap());
    }

    #[test]
    fn frames_come_whole_however_they_are_cut() {
        let page = [5u8; 2 * PAGE_BYTES];
        let mut checksums = Vec::new();
        push_checksums(&mut checksums, [WireChecksum::of(&page[..PAGE_BYTES]); 2]);
        let on = Lease { region: 1, lease: 2 };
        let mut stream = Vec::new();
        for id in 0..20 {
            let get = Request::Get { on, first: 3, count: 1, with_checksums: false };
            let put = Request::Put {
                on,
                first: 9,
                if_absent: false,
                checksums: &checksums,
                pages: &page,
            };
            get.encode_head(2 * id, &mut stream);
            put.encode_head(2 * id + 1, &mut stream);
            stream.extend_from_slice(&page);
        }
        for cut in [1, 31, 32, 33, 5000, 1 << 20] {
            let (mut inbox, mut drip, mut ids) = (Inbox::default(), Drip(&stream, cut), Vec::new());
            while inbox.fill(&mut drip).unwrap() > 0 {
                while let Some(frame) = inbox.frame().unwrap() {
                    let (header, request) = Request::decode(frame).unwrap();
                    ids.push(header.id);
                    assert_eq!(matches!(request, Request::Put { .. }), header.id % 2 == 1);
                }
            }
            assert!(ids.into_iter().eq(0..40), "cut at {cut}");
        }
    }
}
