//! Takes the log: code made for each block, which looks the block's accesses up in the page filter.
//!
//! A frame begins with the address of that code, so that each goes on to the next by itself. It tests all pages of a
//! block first; if all stand in their slots (recorder/engines/filter.h), stamping them is all that is to be done.
//! If one does not, C does the whole block, access by access. Accesses near each other from one logged
//! register have one test, and the stamp of the last of them; pages that share a slot are stamped in the order of
//! their accesses.

use crate::area::{Addresses, Area, FRAMES, SLOTS};
use crate::cache::{Access, Block, FS};
use crate::emit::{Emitter, R12, R14, R15, RAX, RBP, RBX, RCX, RDI, RDX, RSI};
use crate::recorder::{SLOT_COUNT, Sides};

/// Bytes that accesses with one test are apart, at most: few of them go over the end of a page.
const APART: i64 = 512;
/// Tests of a block, at most; C does a block that needs more.
const RUNS: usize = 16;
/// Bytes of a frame.
const FRAME: u8 = 8 * SLOTS as u8;
/// Of a slot: log2 of its size, and where its stamp is.
const SLOT_SHIFT: u32 = 4;
const STAMP: u32 = 8;
/// Instructions of a sum of counts, as many bits, for those of [`ROUNDS`] logs; accesses stand above them, so many of
/// a block.
const INSTRUCTION_BITS: u32 = 24;
const ACCESSES: u32 = 127;

/// Instructions and accesses of blocks that C has not done.
#[derive(Debug, Clone, Copy)]
pub struct Counts(u64);

impl Counts {
    pub fn instructions(self) -> u64 {
        self.0 % (1 << INSTRUCTION_BITS)
    }

    pub fn accesses(self) -> u64 {
        self.0 >> INSTRUCTION_BITS
    }
}

/// C does a block: its frame, the thread's segment and the clock; the clock.
pub type Slow = unsafe extern "C" fn(*const Block, *const u64, u64, u64) -> u64;
type Take = unsafe extern "C" fn(*const u64);

/// Full logs between two looks at how far a burst is, at most.
pub const ROUNDS: u32 = 16;

/// The code that is the same for all blocks, and what the filters are.
#[derive(Debug, Clone, Copy)]
pub struct Taking {
    pub sides: Sides,
    /// Takes the frames from one on, which is in rdi; uses no vector register.
    pub take: usize,
    done: usize,
    /// A block goes to C, which is in rdi.
    slow: usize,
}

/// Writes the common code. While a log is taken rbx is the frame, rbp the clock, r12 the thread's segment,
/// r14 counts, r15 the page that code was on.
pub fn make(out: &mut Emitter, addresses: Addresses, sides: Sides, slow: Slow) -> Taking {
    let take = out.at();
    out.bytes(&[0x53, 0x55, 0x41, 0x54, 0x41, 0x55, 0x41, 0x56, 0x41, 0x57]); // push rbx, rbp, r12 to r15
    out.bytes(&[0x48, 0x81, 0xec]); // sub rsp
    out.bytes(&SCRATCH.to_le_bytes());
    out.bytes(&[0x48, 0x89, 0xfb]); // mov rbx, rdi
    out.load(R12, addresses.fs());
    out.load(RBP, addresses.clock());
    out.bytes(&[0x45, 0x31, 0xf6]); // xor r14d, r14d
    no_code_page(out);
    out.bytes(&[0xff, 0x23]); // jmp [rbx]
    let done = out.at();
    out.store(addresses.clock(), RBP);
    out.with_address(&[0x4c, 0x01], 6, addresses.taken()); // add [taken], r14
    out.bytes(&[0x48, 0x81, 0xc4]); // add rsp
    out.bytes(&SCRATCH.to_le_bytes());
    out.bytes(&[0x41, 0x5f, 0x41, 0x5e, 0x41, 0x5d, 0x41, 0x5c, 0x5d, 0x5b, 0xc3]); // pop, ret
    let slow_at = out.at();
    out.bytes(&[0x48, 0x89, 0xde, 0x4c, 0x89, 0xe2, 0x48, 0x89, 0xe9]); // mov rsi, rbx; rdx, r12; rcx, rbp
    out.constant(RAX, slow as *const () as u64);
    out.bytes(&[0xff, 0xd0, 0x48, 0x89, 0xc5]); // call rax; mov rbp, rax
    no_code_page(out);
    next_frame(out);
    Taking { sides, take, done, slow: slow_at }
}

/// Of the stack: the slots of runs, of both filters. A call from below it finds the stack aligned.
const SCRATCH: u32 = 8 * RUNS as u32 + 8;

fn no_code_page(out: &mut Emitter) {
    out.bytes(&[0x45, 0x31, 0xff]); // xor r15d, r15d
}

fn next_frame(out: &mut Emitter) {
    out.bytes(&[0x48, 0x83, 0xc3, FRAME.wrapping_neg(), 0xff, 0x23]); // add rbx, -FRAME; jmp [rbx]
}

/// Accesses near each other, from one logged register.
#[derive(Debug, Clone, Copy, Default)]
struct Run {
    slot: u8,
    is_fs: bool,
    /// First and last byte, from the register's value.
    low: i64,
    high: i64,
    /// The last one's place among the block's.
    last: u32,
}

/// Runs of a block, in the order of their first accesses.
struct Runs {
    runs: [Run; RUNS],
    count: usize,
}

impl Runs {
    /// None where C must do the block.
    fn of(accesses: &[Access]) -> Option<Runs> {
        let mut of = Runs { runs: [Run::default(); RUNS], count: 0 };
        for (nth, access) in accesses.iter().enumerate() {
            let run = Run {
                slot: access.slot,
                is_fs: access.flags & FS != 0,
                low: access.offset,
                high: access.offset.checked_add(i64::from(access.bytes) - 1)?,
                last: nth as u32,
            };
            if access.repeat != 0 {
                return None;
            }
            match of.runs[..of.count].iter_mut().find_map(|before| before.with(&run)) {
                Some(()) => {}
                None if of.count < RUNS => {
                    of.runs[of.count] = run;
                    of.count += 1;
                }
                None => return None,
            }
        }
        Some(of)
    }

    fn list(&self) -> &[Run] {
        &self.runs[..self.count]
    }
}

impl Run {
    /// Takes another one in, if it is near.
    fn with(&mut self, other: &Run) -> Option<()> {
        let (low, high) = (self.low.min(other.low), self.high.max(other.high));
        let is_near =
            (self.slot, self.is_fs) == (other.slot, other.is_fs) && high.checked_sub(low)? < APART;
        is_near.then(|| *self = Run { low, high, last: other.last, ..*self })
    }
}

impl Taking {
    /// Lets the first frame of a log, which is never written, be the end of one that is full.
    pub fn ends_full(&self, area: &mut Area) {
        area.log[0][0] = self.done as u64;
    }

    /// Takes the frames of a log from `from` on, the last of them first; what it and full ones before it counted.
    pub fn take(&self, area: &mut Area, from: usize) -> Counts {
        area.log[from - 1][0] = self.done as u64;
        // SAFETY: the code above; each frame has the address of its block's code, the last one's next that of the end.
        unsafe {
            let take = std::mem::transmute::<usize, Take>(self.take);
            take(area.log[FRAMES - 1].as_ptr());
        }
        Counts(std::mem::take(&mut area.taken))
    }

    /// Writes the code that takes a block's frames, and apart from it, that of what C does; where it begins.
    pub fn block(&self, out: &mut Emitter, once: &mut Emitter, block: *const Block) -> usize {
        let slow = once.at();
        once.constant(RDI, block as u64);
        once.jump(self.slow);
        // SAFETY: a block of the cache's list, which has its accesses.
        let (block, accesses) = unsafe {
            let block = &*block;
            let accesses = match block.access_count {
                0 => &[][..],
                count => std::slice::from_raw_parts(block.accesses, count as usize),
            };
            (block, accesses)
        };
        let runs = Runs::of(accesses).filter(|_| block.access_count <= ACCESSES);
        let Some(runs) = runs else { return slow };
        let entry = out.at();
        self.test_code(out, once, block, slow);
        for (nth, run) in runs.list().iter().enumerate() {
            self.test_run(out, nth, run, slow);
        }
        let mut order: [usize; RUNS] = std::array::from_fn(|nth| nth);
        order[..runs.count].sort_unstable_by_key(|nth| runs.runs[*nth].last);
        for nth in &order[..runs.count] {
            out.add(RAX, RBP, 2 + runs.runs[*nth].last);
            self.stamp_run(out, *nth);
        }
        out.add(RBP, RBP, 1 + block.access_count);
        out.add(R14, R14, block.access_count << INSTRUCTION_BITS | block.instructions);
        next_frame(out);
        entry
    }

    /// A block on the page of the one before it, whose first address is in r15, is as good as that.
    fn test_code(&self, out: &mut Emitter, once: &mut Emitter, block: &Block, slow: usize) {
        let pages = Pages::of(block);
        let constant = once.at();
        once.bytes(&pages.last().to_le_bytes());
        let other = once.at();
        for page in pages.list() {
            for filter in self.sides.code.filters() {
                once.constant(RAX, filter.page(*page));
                once.compare(filter.slot(*page), RAX);
                once.jump_if_not_0(slow);
            }
        }
        once.add(RAX, RBP, 1);
        for page in pages.list() {
            self.sides
                .code
                .filters()
                .for_each(|filter| once.store(filter.slot(*page) + STAMP, RAX));
        }
        once.load(R15, constant as u32);
        if pages.count > 1 {
            out.jump(other);
        } else {
            out.compare(constant as u32, R15);
            out.jump_if_not_0(other);
        }
        once.jump(out.at());
    }

    /// Where a run's slot is, from the table's first, while a block is taken: in these registers, the first
    /// ones of blocks that are looked up in one filter, or in memory.
    fn slot_register(&self, nth: usize) -> Option<u8> {
        let is_alone = self.sides.data.filters().count() == 1;
        [8, 9, 10, 11, 13].get(nth).copied().filter(|_| is_alone)
    }

    fn test_run(&self, out: &mut Emitter, nth: usize, run: &Run, slow: usize) {
        match run.slot {
            0 => out.constant(RCX, run.low as u64),
            slot => {
                out.load_at(RCX, RBX, 8 * u32::from(slot));
                if run.low != 0 {
                    out.add(RCX, RCX, run.low as u32);
                }
            }
        }
        if run.is_fs {
            out.bytes(&[0x4c, 0x01, 0xe1]); // add rcx, r12
        }
        out.add(RDX, RCX, (run.high - run.low) as u32);
        out.bytes(&[0x48, 0x31, 0xca]); // xor rdx, rcx
        for (filter, place) in self.sides.data.filters().zip([0, 4]) {
            let kept = self.slot_register(nth);
            let slot = kept.unwrap_or(RSI);
            out.move_to(slot, RCX);
            out.shift_right(slot, (filter.page_shift - SLOT_SHIFT) as u8);
            out.and(slot, (SLOT_COUNT - 1) << SLOT_SHIFT);
            out.move_to(RDI, RCX);
            out.xor_at(RDI, slot, filter.slots);
            if place == 0 {
                out.bytes(&[0x48, 0x09, 0xd7]); // or rdi, rdx: the last byte and the first differ
            }
            out.shift_right(RDI, filter.page_shift as u8);
            out.jump_if_not_0(slow);
            if kept.is_none() {
                out.bytes(&[0x89, 0x74, 0x24, 8 * nth as u8 + place]); // mov [rsp + place], esi
            }
        }
    }

    /// With the stamp in rax.
    fn stamp_run(&self, out: &mut Emitter, nth: usize) {
        for (filter, place) in self.sides.data.filters().zip([0, 4]) {
            let slot = self.slot_register(nth).unwrap_or_else(|| {
                out.bytes(&[0x8b, 0x74, 0x24, 8 * nth as u8 + place]); // mov esi, [rsp + place]
                RSI
            });
            out.store_at(slot, filter.slots + STAMP, RAX);
        }
    }
}

/// Addresses on the pages that a block's code is on: two at most.
struct Pages {
    addresses: [u64; 2],
    count: usize,
}

impl Pages {
    fn of(block: &Block) -> Pages {
        let last = block.start + u64::from(block.bytes) - 1;
        Pages {
            addresses: [block.start, last],
            count: 1 + usize::from(block.start >> 12 != last >> 12),
        }
    }

    fn list(&self) -> &[u64] {
        &self.addresses[..self.count]
    }

    /// The first address of the last one.
    fn last(&self) -> u64 {
        self.addresses[1] >> 12 << 12
    }
}
