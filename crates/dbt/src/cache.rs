//! The code cache: translated blocks, their places and their links. All lists have their final capacity from
//! the start; when one is full, all blocks are evicted.

use crate::emit::{self, Emitter};
use crate::log_drain::LogDrain;
use crate::stubs::{self, Stubs};
use crate::thread_state::{Addresses, TABLE_BITS, ThreadState};
use std::ops::Range;

/// `struct pn_access` of the C half.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct LoggedAccess {
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
/// A flag: the address is relative to the FS base.
pub const FS: u8 = 1;
/// A flag: the first access of a repeated instruction.
pub const FIRST: u8 = 2;

/// `struct pn_block` of the C half.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Block {
    pub start: u64,
    pub bytes: u32,
    pub instructions: u32,
    pub accesses: *const LoggedAccess,
    pub access_count: u32,
}

/// A direct exit of a block.
#[derive(Debug, Clone, Copy)]
pub struct BlockExit {
    /// The address of the jump's distance, in the translation.
    pub at: usize,
    /// The target, in the program.
    pub to: u64,
}

const BLOCKS: usize = 1 << 18;
const EXITS: usize = 1 << 19;
const ACCESSES: usize = 1 << 21;
const PLACES: usize = 1 << 20;
const RETURNS: usize = 1 << 18;
/// An upper bound of the entries that a block needs in each list.
const ROOM: usize = 256;
const ROOM_BYTES: usize = 16 << 10;

/// The two kinds of translations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheKind {
    /// Translations that log the program's accesses.
    Logging,
    /// Translations that count the program's instructions, at nearly native speed.
    Counting,
}

/// All translated blocks of one kind.
pub struct CodeCache {
    pub kind: CacheKind,
    pub addresses: Addresses,
    /// The code that runs each time, and the code that runs once. They are apart, so that the processor's
    /// caches hold less code that does not run again.
    code: Range<usize>,
    once: Range<usize>,
    /// The code that drains frames, for logging translations.
    log_drain: Range<usize>,
    /// The free addresses in the three ranges.
    pub next: usize,
    pub next_taking: usize,
    pub next_once: usize,
    pub blocks: Vec<Block>,
    /// The entry address of each block.
    entries: Vec<usize>,
    pub exits: Vec<BlockExit>,
    pub accesses: Vec<LoggedAccess>,
    /// Return addresses of the new block's calls, and their return stubs; `add` moves them into `returns`.
    pub return_stubs: Vec<(u64, usize)>,
    /// A hash table from the program's address to the number of a block + 1.
    places: Vec<u32>,
    /// A hash table from a return address to its return stub; 0: there is none.
    returns: Vec<(u64, u32)>,
    return_count: usize,
}

/// The mask for the bits of an address that index a table of targets.
const INDEX: u64 = (1 << TABLE_BITS) - 1;

impl CodeCache {
    /// Creates a cache without blocks in the range `code`.
    pub fn new(kind: CacheKind, addresses: Addresses, code: Range<usize>) -> CodeCache {
        let of_taking = if kind == CacheKind::Logging { code.len() / 2 } else { 0 };
        let log_drain = code.start..code.start + of_taking;
        let middle = (log_drain.end + code.end) / 2;
        let (code, once) = (log_drain.end..middle, middle..code.end);
        CodeCache {
            kind,
            addresses,
            next: code.start,
            next_once: once.start,
            next_taking: log_drain.start,
            code,
            once,
            log_drain,
            blocks: Vec::with_capacity(BLOCKS),
            entries: Vec::with_capacity(BLOCKS),
            exits: Vec::with_capacity(EXITS),
            accesses: Vec::with_capacity(ACCESSES),
            return_stubs: Vec::with_capacity(ROOM),
            places: vec![0; PLACES],
            returns: vec![(0, 0); RETURNS],
            return_count: 0,
        }
    }

    /// Returns true if there is room for one more block.
    pub fn has_room(&self) -> bool {
        self.next + ROOM_BYTES < self.code.end
            && self.next_once + ROOM_BYTES < self.once.end
            && (self.kind == CacheKind::Counting
                || self.next_taking + ROOM_BYTES < self.log_drain.end)
            && self.blocks.len() + ROOM < BLOCKS
            && self.exits.len() + ROOM < EXITS
            && self.accesses.len() + ROOM < ACCESSES
            && self.return_count + ROOM < RETURNS / 2
    }

    /// Evicts all blocks and their stubs.
    pub fn clear(&mut self, thread_state: &mut ThreadState, stubs: &Stubs) {
        self.next = self.code.start;
        self.next_once = self.once.start;
        self.next_taking = self.log_drain.start;
        self.blocks.clear();
        self.entries.clear();
        self.exits.clear();
        self.accesses.clear();
        self.places.fill(0);
        self.return_stubs.clear();
        self.returns.fill((0, 0));
        self.return_count = 0;
        let return_stubs = &mut thread_state.targets[self.kind as usize];
        return_stubs.jumps.fill(stubs.lookup_stubs[self.kind as usize].no_jump as u32);
        return_stubs.returns.fill(stubs.lookup_stubs[self.kind as usize].no_return as u32);
    }

    /// Puts the return stub of an address into the table, if there is one.
    pub fn link_return(&self, thread_state: &mut ThreadState, to: u64) {
        let (_, code) = self.returns[self.return_at(to)];
        if code != 0 {
            thread_state.targets[self.kind as usize].returns[(to & INDEX) as usize] = code;
        }
    }

    fn return_at(&self, to: u64) -> usize {
        let mut place = (to.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 46) as usize;
        while self.returns[place].1 != 0 && self.returns[place].0 != to {
            place = (place + 1) % RETURNS;
        }
        place
    }

    /// Creates the stub of indirect jumps to a block. It chains to the stub of the same lower bits
    /// before it.
    pub fn link_jump(&mut self, thread_state: &mut ThreadState, number: usize) {
        // SAFETY: `has_room` reserves enough.
        let mut out = unsafe { Emitter::new(self.next_once) };
        let to = self.blocks[number].start;
        let head = &mut thread_state.targets[self.kind as usize].jumps[(to & INDEX) as usize];
        stubs::link_jump(&mut out, self.addresses, to, *head as usize);
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

    /// Returns the number of the block at an address of the program.
    pub fn find(&self, pc: u64) -> Option<usize> {
        (self.places[self.place(pc)] as usize).checked_sub(1)
    }

    /// Returns the entry address of a block.
    pub fn entry(&self, number: usize) -> usize {
        self.entries[number]
    }

    /// Returns the block whose translation contains an address, and the offset from its entry.
    pub fn block_at(&self, at: usize) -> Option<(usize, usize)> {
        let number = self.entries.partition_point(|entry| *entry <= at).checked_sub(1)?;
        (at < self.next).then(|| (number, at - self.entries[number]))
    }

    /// Emits the code that drains the frames of the newest block. Returns its address.
    pub fn take(&mut self, log_drain: &LogDrain, number: usize) -> usize {
        // SAFETY: there is room, and `next_once` is after the code that was added with the block.
        let (mut out, mut once) =
            unsafe { (Emitter::new(self.next_taking), Emitter::new(self.next_once)) };
        let entry = log_drain.block(&mut out, &mut once, &self.blocks[number]);
        (self.next_taking, self.next_once) = (out.at(), once.at());
        entry
    }

    /// Adds a block whose two parts of code end at `end`. Returns its number.
    pub fn add(&mut self, block: Block, entry: usize, end: (usize, usize)) -> usize {
        let place = self.place(block.start);
        self.blocks.push(block);
        self.entries.push(entry);
        self.places[place] = self.blocks.len() as u32;
        self.next = end.0.next_multiple_of(16);
        self.next_once = end.1;
        while let Some((to, code)) = self.return_stubs.pop() {
            let place = self.return_at(to);
            self.return_count += usize::from(self.returns[place].1 == 0);
            self.returns[place] = (to, code as u32);
        }
        self.blocks.len() - 1
    }

    /// Links an exit to a block: from now on it jumps there directly.
    pub fn link(&mut self, exit: usize, number: usize) {
        // SAFETY: the distance of a jump in our own code. Only the thread in translated code, this one,
        // executes it.
        unsafe { emit::link(self.exits[exit].at, self.entries[number]) };
    }
}
