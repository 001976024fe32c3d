//! The encoding of page changes. Most take one byte: programs return to recent pages, so a page is its
//! rank in a short list of them. A loop over pages is one byte repeated, which compresses to almost
//! nothing.
//!
//! A step is `kind:2 rank:6`. Rank 62: a page that is not in the list; its distance from the last page
//! follows. Rank 63: unmapped pages, or pages that a system call used; the first page and their number
//! follow. Rank 61: the same for pages of zeros. Data and code have a list each.

use crate::pages::AccessKind;
use crate::stream::MemoryUse;
use integer_encoding::VarInt;
use std::ops::Range;

/// The length of a list.
const RECENT: usize = 32;
const ZEROS: u8 = 61;
const OTHER: u8 = 62;
const RANGE: u8 = 63;

/// A step of a thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// The thread went to a page.
    Change(AccessKind, u64),
    /// The thread unmapped pages.
    Gone(Range<u64>),
    /// Pages were used in a way that no access shows.
    MemoryUse(MemoryUse, Range<u64>),
}

/// The recent pages of one side, the last one first.
#[derive(Debug, Clone)]
struct Recent([u64; RECENT]);

impl Recent {
    fn new() -> Self {
        Recent([u64::MAX; RECENT])
    }

    fn rank(&self, page: u64) -> Option<usize> {
        self.0.iter().position(|known| *known == page)
    }

    /// Moves the page at `rank` to the front.
    fn renew(&mut self, rank: usize) {
        self.0[..=rank].rotate_right(1);
    }

    fn push(&mut self, page: u64) {
        self.renew(RECENT - 1);
        self.0[0] = page;
    }
}

/// The lists of both sides.
#[derive(Debug, Clone)]
struct Lists {
    data: Recent,
    code: Recent,
}

impl Lists {
    fn new() -> Self {
        Lists { data: Recent::new(), code: Recent::new() }
    }

    fn of(&mut self, kind: AccessKind) -> &mut Recent {
        if kind == AccessKind::Fetch { &mut self.code } else { &mut self.data }
    }
}

/// An encoder of steps.
#[derive(Debug, Clone)]
pub struct Encoder {
    lists: Lists,
    bytes: Vec<u8>,
}

impl Default for Encoder {
    fn default() -> Self {
        Encoder { lists: Lists::new(), bytes: Vec::new() }
    }
}

impl Encoder {
    /// Appends a change of page.
    #[inline]
    pub fn change(&mut self, kind: AccessKind, page: u64) {
        let (list, top) = (self.lists.of(kind), (kind as u8) << 6);
        match list.rank(page) {
            Some(rank) => {
                list.renew(rank);
                self.bytes.push(top | rank as u8);
            }
            None => {
                let distance = page.wrapping_sub(list.0[0]) as i64;
                list.push(page);
                self.bytes.push(top | OTHER);
                self.number(distance);
            }
        }
    }

    /// Appends the end of a mapping.
    pub fn gone(&mut self, pages: Range<u64>) {
        self.range(RANGE, pages);
    }

    /// Appends a use of pages that no access shows.
    pub fn memory_use(&mut self, memory_use: MemoryUse, pages: Range<u64>) {
        let code = match memory_use {
            MemoryUse::Zeros => ZEROS,
            by_system_call => (by_system_call as u8) << 6 | RANGE,
        };
        self.range(code, pages);
    }

    fn range(&mut self, code: u8, pages: Range<u64>) {
        self.bytes.push(code);
        self.number(pages.start);
        self.number(pages.end.saturating_sub(pages.start));
    }

    fn number(&mut self, number: impl VarInt) {
        let mut buffer = [0; 10];
        let length = number.encode_var(&mut buffer);
        self.bytes.extend_from_slice(&buffer[..length]);
    }

    /// Returns the bytes; the next step begins with empty lists.
    pub fn take(&mut self) -> Vec<u8> {
        self.lists = Lists::new();
        std::mem::take(&mut self.bytes)
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Returns true if no step was appended.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }
}

/// A decoder of steps. It ends at the end, and at bytes that no encoder writes.
pub struct Decoder<'a> {
    lists: Lists,
    bytes: &'a [u8],
}

impl<'a> Decoder<'a> {
    /// Decodes the bytes of an encoder.
    pub fn new(bytes: &'a [u8]) -> Self {
        Decoder { lists: Lists::new(), bytes }
    }

    fn number<N: VarInt>(&mut self) -> Option<N> {
        let (number, length) = N::decode_var(self.bytes)?;
        self.bytes = &self.bytes[length..];
        Some(number)
    }
}

impl Iterator for Decoder<'_> {
    type Item = Step;

    #[inline]
    fn next(&mut self) -> Option<Step> {
        let (&byte, rest) = self.bytes.split_first()?;
        self.bytes = rest;
        let kind =
            [AccessKind::Load, AccessKind::DependentLoad, AccessKind::Store, AccessKind::Fetch]
                [usize::from(byte >> 6)];
        match byte & 63 {
            RANGE | ZEROS => {
                let (first, count): (u64, u64) = (self.number()?, self.number()?);
                let pages = first..first.saturating_add(count);
                Some(match byte >> 6 {
                    0 if byte == ZEROS => Step::MemoryUse(MemoryUse::Zeros, pages),
                    0 => Step::Gone(pages),
                    1 => Step::MemoryUse(MemoryUse::Read, pages),
                    2 => Step::MemoryUse(MemoryUse::Written, pages),
                    _ => Step::MemoryUse(MemoryUse::Dropped, pages),
                })
            }
            OTHER => {
                let distance: i64 = self.number()?;
                let list = self.lists.of(kind);
                list.push(list.0[0].wrapping_add(distance as u64));
                Some(Step::Change(kind, list.0[0]))
            }
            rank if usize::from(rank) < RECENT => {
                let list = self.lists.of(kind);
                list.renew(rank.into());
                Some(Step::Change(kind, list.0[0]))
            }
            _ => None,
        }
    }
}
