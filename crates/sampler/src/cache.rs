//! Blocks of the program that have been copied: what they are, where they are, and how they are linked.
//! All lists have their final capacity from the start; when one is full, all blocks are thrown away.

use crate::area::{Addresses, Area, TABLE_BITS};
use crate::emit::{self, Emitter};
use crate::stubs::{self, Stubs};
use crate::taking::Taking;
use std::ops::Range;

/// `struct pn_access`
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Access {
    pub instruction: u64,
    pub offset: i64,
    pub bytes: u32,
    pub kind: u8,
    pub slot: u8,
    pub repeat: u8,
    pub flags: u8,
}
pub const LOAD: u8 = 2;
pub const STORE: u8 = 3;
/// Of the thread's own segment.
pub const FS: u8 = 1;
/// The first access of a repeated instruction.
pub const FIRST: u8 = 2;

/// `struct pn_block`
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Block {
    pub start: u64,
    pub bytes: u32,
    pub instructions: u32,
    pub accesses: *const Access,
    pub access_count: u32,
}

/// A direct way out of a block.
#[derive(Debug, Clone, Copy)]
pub struct Exit {
    /// Of its distance, in the code.
    pub at: usize,
    /// In the program.
    pub to: u64,
}

const BLOCKS: usize = 1 << 18;
const EXITS: usize = 1 << 19;
const ACCESSES: usize = 1 << 21;
const PLACES: usize = 1 << 20;
const RETURNS: usize = 1 << 18;
/// A block has less than that of each.
const ROOM: usize = 256;
const ROOM_BYTES: usize = 16 << 10;

/// What copies do besides what the program does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Log where it accesses memory.
    Logging,
    /// Count its instructions, nearly as fast as it is natively.
    Counting,
}

/// All copied blocks of a kind.
pub struct Cache {
    pub kind: Kind,
    pub addresses: Addresses,
    /// What runs each time, and apart from it, so that caches hold no more of it, what runs once.
    code: Range<usize>,
    once: Range<usize>,
    /// Of logging copies: what takes their frames.
    taking: Range<usize>,
    /// Where the next block's go.
    pub next: usize,
    pub next_taking: usize,
    pub next_once: usize,
    pub blocks: Vec<Block>,
    /// Where each can be entered.
    entries: Vec<usize>,
    pub exits: Vec<Exit>,
    pub accesses: Vec<Access>,
    /// Addresses that calls return to, and where returns land in copies.
    pub landings: Vec<(u64, usize)>,
    /// By hash of the program's address: the number of a block + 1.
    places: Vec<u32>,
    /// By hash of an address that a call returns to: that and the landing, if there is one.
    returns: Vec<(u64, u32)>,
    return_count: usize,
}

/// The register that counts as a table's index has so many bits.
const INDEX: u64 = (1 << TABLE_BITS) - 1;

impl Cache {
    /// Of no block, with code from `code` on.
    pub fn new(kind: Kind, addresses: Addresses, code: Range<usize>) -> Cache {
        let of_taking = if kind == Kind::Logging { code.len() / 2 } else { 0 };
        let taking = code.start..code.start + of_taking;
        let middle = (taking.end + code.end) / 2;
        let (code, once) = (taking.end..middle, middle..code.end);
        Cache {
            kind,
            addresses,
            next: code.start,
            next_once: once.start,
            next_taking: taking.start,
            code,
            once,
            taking,
            blocks: Vec::with_capacity(BLOCKS),
            entries: Vec::with_capacity(BLOCKS),
            exits: Vec::with_capacity(EXITS),
            accesses: Vec::with_capacity(ACCESSES),
            landings: Vec::with_capacity(ROOM),
            places: vec![0; PLACES],
            returns: vec![(0, 0); RETURNS],
            return_count: 0,
        }
    }

    /// Whether another block has room.
    pub fn has_room(&self) -> bool {
        self.next + ROOM_BYTES < self.code.end
            && self.next_once + ROOM_BYTES < self.once.end
            && (self.kind == Kind::Counting || self.next_taking + ROOM_BYTES < self.taking.end)
            && self.blocks.len() + ROOM < BLOCKS
            && self.exits.len() + ROOM < EXITS
            && self.accesses.len() + ROOM < ACCESSES
            && self.return_count + ROOM < RETURNS / 2
    }

    /// Throws all blocks away.
    pub fn clear(&mut self, area: &mut Area, stubs: &Stubs) {
        self.next = self.code.start;
        self.next_once = self.once.start;
        self.next_taking = self.taking.start;
        self.blocks.clear();
        self.entries.clear();
        self.exits.clear();
        self.accesses.clear();
        self.places.fill(0);
        self.landings.clear();
        self.returns.fill((0, 0));
        self.return_count = 0;
        let landings = &mut area.landings[self.kind as usize];
        landings.jumps.fill(stubs.landings[self.kind as usize].no_jump as u32);
        landings.returns.fill(stubs.landings[self.kind as usize].no_return as u32);
    }

    /// Puts the landing of returns to an address into the table, if there is one.
    pub fn return_lands(&self, area: &mut Area, to: u64) {
        let (_, code) = self.returns[self.return_at(to)];
        if code != 0 {
            area.landings[self.kind as usize].returns[(to & INDEX) as usize] = code;
        }
    }

    fn return_at(&self, to: u64) -> usize {
        let mut place = (to.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 46) as usize;
        while self.returns[place].1 != 0 && self.returns[place].0 != to {
            place = (place + 1) % RETURNS;
        }
        place
    }

    /// Makes the landing of indirect jumps to a block, and of those with the same lower bits behind it.
    pub fn jump_lands(&mut self, area: &mut Area, number: usize) {
        // SAFETY: `has_room` keeps some for it.
        let mut out = unsafe { Emitter::new(self.next_once) };
        let to = self.blocks[number].start;
        let head = &mut area.landings[self.kind as usize].jumps[(to & INDEX) as usize];
        stubs::jump_lands(&mut out, self.addresses, to, *head as usize);
        out.jump(self.entries[number]);
        *head = self.next_once as u32;
        self.next_once = out.at();
    }

    fn place(&self, pc: u64) -> usize {
        let mut place = (pc.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 44) as usize;
        loop {
            match self.places[place] {
                0 => return place,
                number if self.blocks[number as usize - 1].start == pc => return place,
                _ => place = (place + 1) % PLACES,
            }
        }
    }

    /// The number of the block at an address of the program.
    pub fn find(&self, pc: u64) -> Option<usize> {
        (self.places[self.place(pc)] as usize).checked_sub(1)
    }

    /// Where a block is entered.
    pub fn entry(&self, number: usize) -> usize {
        self.entries[number]
    }

    /// The block whose copy an address is in, and how far from its entry.
    pub fn copy_at(&self, at: usize) -> Option<(usize, usize)> {
        let number = self.entries.partition_point(|entry| *entry <= at).checked_sub(1)?;
        (at < self.next).then(|| (number, at - self.entries[number]))
    }

    /// Writes what takes the frames of a block, the last one.
    pub fn take(&mut self, taking: &Taking, number: usize) -> usize {
        // SAFETY: there is room; the once's last part was added with the block.
        let (mut out, mut once) =
            unsafe { (Emitter::new(self.next_taking), Emitter::new(self.next_once)) };
        let entry = taking.block(&mut out, &mut once, &self.blocks[number]);
        (self.next_taking, self.next_once) = (out.at(), once.at());
        entry
    }

    /// Adds a block whose two parts of code end at `end`.
    pub fn add(&mut self, block: Block, entry: usize, end: (usize, usize)) -> usize {
        let place = self.place(block.start);
        self.blocks.push(block);
        self.entries.push(entry);
        self.places[place] = self.blocks.len() as u32;
        self.next = end.0.next_multiple_of(16);
        self.next_once = end.1;
        while let Some((to, code)) = self.landings.pop() {
            let place = self.return_at(to);
            self.return_count += usize::from(self.returns[place].1 == 0);
            self.returns[place] = (to, code as u32);
        }
        self.blocks.len() - 1
    }

    /// Lets an exit go straight to a block from now on.
    pub fn link(&mut self, exit: usize, number: usize) {
        // SAFETY: the distance of a jump in our own code, which runs in the thread of the burst only: us.
        unsafe { emit::link(self.exits[exit].at, self.entries[number]) };
    }
}
