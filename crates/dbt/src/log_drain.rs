//! The code that drains the log. Each block has its own, which looks the block's accesses up in the page
//! filter.
//!
//! A frame begins with the address of its block's code, which jumps to that of the next frame. The code first
//! tests all pages of the block. If all are in their slots (recorder/engines/filter.h), it only stamps them.
//! Otherwise C processes the whole block, access by access. Accesses near each other from one logged register
//! share a test, and the stamp of the last of them. Pages that share a slot are stamped in the order of
//! their accesses.

use crate::cache::{Block, FS, LoggedAccess};
use crate::emit::{Emitter, R12, R14, R15, RAX, RBP, RBX, RCX, RDI, RDX, RSI};
use crate::recorder::{SLOT_COUNT, Sides};
use crate::thread_state::{Addresses, FRAMES, SLOTS, ThreadState};

/// The most bytes that accesses with one test span: few spans of this size cross the end of a page.
const APART: i64 = 512;
/// The most tests of a block. C processes a block that needs more.
const RUNS: usize = 16;
/// The size of a frame in bytes.
const FRAME: u8 = 8 * SLOTS as u8;
/// The layout of a slot: log2 of its bytes, and the offset of its stamp.
const SLOT_SHIFT: u32 = 4;
const STAMP: u32 = 8;
/// The bits of [`DrainCounts`] for instructions, enough for [`ROUNDS`] logs. Accesses are counted above them.
/// A block adds both counts as one 31-bit constant, so that it may have at most [`ACCESSES`].
const INSTRUCTION_BITS: u32 = 24;
const ACCESSES: u32 = 127;

/// Instructions and accesses of the blocks that C has not processed.
#[derive(Debug, Clone, Copy)]
pub struct DrainCounts(u64);

impl DrainCounts {
    pub fn instructions(self) -> u64 {
        self.0 % (1 << INSTRUCTION_BITS)
    }

    pub fn accesses(self) -> u64 {
        self.0 >> INSTRUCTION_BITS
    }
}

/// The C function that processes a block. Its arguments are the block, its frame, the FS base and the clock.
/// Returns the new clock.
pub type Slow = unsafe extern "C" fn(*const Block, *const u64, u64, u64) -> u64;
type DrainFunction = unsafe extern "C" fn(*const u64);

/// The most full logs between two checks of whether a burst is over.
pub const ROUNDS: u32 = 16;

/// The code that all blocks share, and the page filters.
#[derive(Debug, Clone, Copy)]
pub struct LogDrain {
    pub sides: Sides,
    /// The function that drains the frames from the one in rdi downwards. It uses no vector register.
    pub take: usize,
    done: usize,
    /// The code that makes C process the block in rdi.
    slow: usize,
}

/// Emits the shared code. While it drains a log, rbx has the frame, rbp the clock, r12 the FS base, r14 the
/// counts, and r15 the page of the previous block's code.
pub fn make(out: &mut Emitter, addresses: Addresses, sides: Sides, slow: Slow) -> LogDrain {
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
    LogDrain { sides, take, done, slow: slow_at }
}

/// Stack bytes for the slots of runs, of both filters. The size aligns the stack for the call of C.
const SCRATCH: u32 = 8 * RUNS as u32 + 8;

fn no_code_page(out: &mut Emitter) {
    out.bytes(&[0x45, 0x31, 0xff]); // xor r15d, r15d
}

fn next_frame(out: &mut Emitter) {
    out.bytes(&[0x48, 0x83, 0xc3, FRAME.wrapping_neg(), 0xff, 0x23]); // add rbx, -FRAME; jmp [rbx]
}

/// Accesses near each other, from one logged register.
#[derive(Debug, Clone, Copy, Default)]
struct AccessRun {
    slot: u8,
    is_fs: bool,
    /// Offsets of the first and the last byte from the register's value.
    low: i64,
    high: i64,
    /// The index of the run's last access in the block.
    last: u32,
}

/// The runs of a block, in the order of their first accesses.
struct AccessRuns {
    runs: [AccessRun; RUNS],
    count: usize,
}

impl AccessRuns {
    /// Groups a block's accesses into runs. Returns none if C must process the block.
    fn of(accesses: &[LoggedAccess]) -> Option<AccessRuns> {
        let mut of = AccessRuns { runs: [AccessRun::default(); RUNS], count: 0 };
        for (nth, access) in accesses.iter().enumerate() {
            let run = AccessRun {
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

    fn list(&self) -> &[AccessRun] {
        &self.runs[..self.count]
    }
}

impl AccessRun {
    /// Merges another run if it is near. Returns none otherwise.
    fn with(&mut self, other: &AccessRun) -> Option<()> {
        let (low, high) = (self.low.min(other.low), self.high.max(other.high));
        let is_near =
            (self.slot, self.is_fs) == (other.slot, other.is_fs) && high.checked_sub(low)? < APART;
        is_near.then(|| *self = AccessRun { low, high, last: other.last, ..*self })
    }
}

impl LogDrain {
    /// Makes the first frame of a log, which no block writes, the end of a full log.
    pub fn ends_full(&self, thread_state: &mut ThreadState) {
        thread_state.log[0][0] = self.done as u64;
    }

    /// Takes the frames of a log, from the last one down to `from`. Returns the counts of these and of the
    /// full logs before them.
    pub fn take(&self, thread_state: &mut ThreadState, from: usize) -> DrainCounts {
        thread_state.log[from - 1][0] = self.done as u64;
        // SAFETY: the code that `make` emitted. Each frame has the address of its block's code, and the one
        // below `from` has the address of the end.
        unsafe {
            let take = std::mem::transmute::<usize, DrainFunction>(self.take);
            take(thread_state.log[FRAMES - 1].as_ptr());
        }
        DrainCounts(std::mem::take(&mut thread_state.taken))
    }

    /// Emits the code that drains a block's frames. Its rare path goes to `once`. Returns the entry.
    pub fn block(&self, out: &mut Emitter, once: &mut Emitter, block: *const Block) -> usize {
        let slow = once.at();
        once.constant(RDI, block as u64);
        once.jump(self.slow);
        // SAFETY: a block of the cache's list, whose accesses live as long.
        let (block, accesses) = unsafe {
            let block = &*block;
            let accesses = match block.access_count {
                0 => &[][..],
                count => std::slice::from_raw_parts(block.accesses, count as usize),
            };
            (block, accesses)
        };
        let runs = AccessRuns::of(accesses).filter(|_| block.access_count <= ACCESSES);
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

    /// Emits the test of the block's code pages. A block on the page in r15, the page of the block before,
    /// needs none.
    fn test_code(&self, out: &mut Emitter, once: &mut Emitter, block: &Block, slow: usize) {
        let pages = CodePages::of(block);
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

    /// Returns the register that keeps the offset of a run's slot in the filter. None if the stack keeps it:
    /// with two filters, and for runs after the fifth.
    fn slot_register(&self, nth: usize) -> Option<u8> {
        let is_alone = self.sides.data.filters().count() == 1;
        [8, 9, 10, 11, 13].get(nth).copied().filter(|_| is_alone)
    }

    fn test_run(&self, out: &mut Emitter, nth: usize, run: &AccessRun, slow: usize) {
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
                out.bytes(&[0x48, 0x09, 0xd7]); // or rdi, rdx: bits in which the last byte and the first differ
            }
            out.shift_right(RDI, filter.page_shift as u8);
            out.jump_if_not_0(slow);
            if kept.is_none() {
                out.bytes(&[0x89, 0x74, 0x24, 8 * nth as u8 + place]); // mov [rsp + place], esi
            }
        }
    }

    /// Emits the stores of the stamp, which is in rax, into a run's slots.
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

/// An address on each page of a block's code: one or two.
struct CodePages {
    addresses: [u64; 2],
    count: usize,
}

impl CodePages {
    fn of(block: &Block) -> CodePages {
        let last = block.start + u64::from(block.bytes) - 1;
        CodePages {
            addresses: [block.start, last],
            count: 1 + usize::from(block.start >> 12 != last >> 12),
        }
    }

    fn list(&self) -> &[u64] {
        &self.addresses[..self.count]
    }

    /// Returns the first address of the last page.
    fn last(&self) -> u64 {
        self.addresses[1] >> 12 << 12
    }
}
