//! Changes of page as bytes. Most are one byte: programs go back to pages that they have just left, so a
//! page is its place in a short list of the last ones, and a loop over pages is one byte repeated, of
//! which compression leaves nothing.
//!
//! `kind:2 place:6`; place 62: another page, its distance from the last one follows; place 63: pages
//! that are unmapped, first and number follow. Data and code have a list each.

use crate::pages::AccessKind;
use integer_encoding::VarInt;
use std::ops::Range;

/// Pages in a list.
const RECENT: usize = 32;
const OTHER: u8 = 62;
const GONE: u8 = 63;

/// Something that a thread did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Went to a page.
    Change(AccessKind, u64),
    /// Unmapped pages.
    Gone(Range<u64>),
}

/// The last pages of one side, the very last one first.
#[derive(Debug, Clone)]
struct Recent([u64; RECENT]);

impl Recent {
    fn new() -> Self {
        Recent([u64::MAX; RECENT])
    }

    fn place(&self, page: u64) -> Option<usize> {
        self.0.iter().position(|known| *known == page)
    }

    /// Moves what is at `place` to the front.
    fn renew(&mut self, place: usize) {
        self.0[..=place].rotate_right(1);
    }

    fn push(&mut self, page: u64) {
        self.renew(RECENT - 1);
        self.0[0] = page;
    }
}

/// Both sides.
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

/// Writes steps.
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
    /// A change of page.
    #[inline]
    pub fn change(&mut self, kind: AccessKind, page: u64) {
        let (list, top) = (self.lists.of(kind), (kind as u8) << 6);
        match list.place(page) {
            Some(place) => {
                list.renew(place);
                self.bytes.push(top | place as u8);
            }
            None => {
                let distance = page.wrapping_sub(list.0[0]) as i64;
                list.push(page);
                self.bytes.push(top | OTHER);
                self.number(distance);
            }
        }
    }

    /// Pages are unmapped.
    pub fn gone(&mut self, pages: Range<u64>) {
        self.bytes.push(GONE);
        self.number(pages.start);
        self.number(pages.end.saturating_sub(pages.start));
    }

    fn number(&mut self, number: impl VarInt) {
        let mut buffer = [0; 10];
        let length = number.encode_var(&mut buffer);
        self.bytes.extend_from_slice(&buffer[..length]);
    }

    /// What was written; the next step begins anew.
    pub fn take(&mut self) -> Vec<u8> {
        self.lists = Lists::new();
        std::mem::take(&mut self.bytes)
    }

    /// How many bytes were written.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether nothing was.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }
}

/// Reads steps; ends at the end, and at bytes that no encoder writes.
pub struct Decoder<'a> {
    lists: Lists,
    bytes: &'a [u8],
}

impl<'a> Decoder<'a> {
    /// What an encoder wrote.
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
        let kind = [AccessKind::Load, AccessKind::Chase, AccessKind::Store, AccessKind::Fetch]
            [usize::from(byte >> 6)];
        match byte & 63 {
            GONE => {
                let (first, count): (u64, u64) = (self.number()?, self.number()?);
                Some(Step::Gone(first..first.saturating_add(count)))
            }
            OTHER => {
                let distance: i64 = self.number()?;
                let list = self.lists.of(kind);
                list.push(list.0[0].wrapping_add(distance as u64));
                Some(Step::Change(kind, list.0[0]))
            }
            place if usize::from(place) < RECENT => {
                let list = self.lists.of(kind);
                list.renew(place.into());
                Some(Step::Change(kind, list.0[0]))
            }
            _ => None,
        }
    }
}
