//! The memory that copied code works with. It lies in the first 2 GiB, so that an instruction can name any
//! of it by a displacement, without a register.

use crate::cache::Kind;
use crate::system;
use std::mem::offset_of;
use std::sync::atomic::AtomicU32;

/// Words of a frame: the address of what takes it, and what its block has logged.
pub const SLOTS: usize = 8;
/// Blocks that run until their log is taken.
pub const FRAMES: usize = 1024;
/// log2 of the entries of the tables of landings.
pub const TABLE_BITS: u32 = 16;
const STACK_BYTES: usize = 256 << 10;
/// Of the stack that signals come on in copies: a frame has a thread's whole state.
const SIGNAL_STACK_BYTES: usize = 64 << 10;
/// Extended state of a processor, as the kernel saves it: 2.7 KB with AVX-512, 11 KB with AMX.
pub const STATE_BYTES: usize = 16 << 10;
const CODE_BYTES: usize = 96 << 20;

/// Why copied code has come back ([`Area::reason`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Reason {
    /// A burst begins at `target`.
    Begin = 0,
    /// A direct jump that is not linked; `number` is the exit's.
    Direct = 1,
    /// An indirect one to `target`, which has no landing in the table.
    Indirect = 2,
    /// The log is full; `number` is the block that comes next.
    Full = 3,
    /// Before a system call; `number` is the block that ends with it.
    Call = 4,
    /// A copied instruction has faulted; `target` is its address.
    Fault = 6,
    /// It still has, and the vector register is the program's again.
    FaultKnown = 7,
    /// A copy returns to `target`, which has no landing in the table.
    Return = 8,
}

/// The kernel's ucontext, to the signal mask.
#[repr(C, align(16))]
#[derive(Debug, Clone, Copy)]
pub struct Context {
    pub flags: u64,
    pub link: u64,
    /// The alternative stack: where it is, its flags, its size.
    pub stack: [u64; 3],
    /// r8 to r15, rdi, rsi, rbp, rbx, rdx, rax, rcx, rsp, rip, flags, and what is no register.
    pub registers: [u64; 23],
    pub state: u64,
    pub reserved: [u64; 8],
    pub mask: u64,
}

impl Context {
    /// Whether the program is on its alternative stack.
    pub fn is_on_alternative_stack(&self) -> bool {
        let [start, flags, bytes] = self.stack;
        let is_there = flags as i32 & libc::SS_DISABLE == 0;
        is_there && self.registers[PLACES[4]].wrapping_sub(start) <= bytes
    }
}

/// Where in `Context::registers` each register is, by its number in instructions.
pub const PLACES: [usize; 16] = [13, 14, 12, 11, 15, 10, 9, 8, 0, 1, 2, 3, 4, 5, 6, 7];
pub const RIP: usize = 16;
pub const FLAGS: usize = 17;

/// Extended state, as XSAVE writes it.
#[repr(C, align(64))]
pub struct State(pub [u8; STATE_BYTES]);

#[repr(C)]
pub struct Area {
    /// By register: what the program has in it, while copied code uses it.
    pub spilled: [u64; 16],
    /// Bytes from the log's start to the frame of the block that runs.
    pub position: u64,
    pub target: u64,
    /// Where copied code goes on.
    pub resume: u64,
    pub reason: u32,
    pub number: u32,
    /// The thread's segment.
    pub fs: u64,
    /// Of stamps in the page filter.
    pub clock: u64,
    /// Instructions and accesses that were taken from full logs ([`crate::taking`]).
    pub taken: u64,
    /// Full logs until the next that comes back.
    pub rounds: u32,
    /// The number of the thread in a burst.
    pub thread: u32,
    /// Its id; 0: there is none. Whoever has it has all of this.
    pub owner: AtomicU32,
    /// Bytes of `state` that the kernel has saved.
    pub state_bytes: usize,
    /// Where a counting copy goes on.
    pub resume_counting: u64,
    /// What counting copies have counted, when none runs; and what the program has in the vector register that
    /// they count in, while one runs.
    pub counter: u64,
    pub vector: [u64; 8],
    /// rcx before and after a repeated instruction of a counting copy.
    pub repeated: [[u64; 2]; 2],
    pub context: Context,
    pub state: State,
    pub log: [[u64; SLOTS]; FRAMES],
    pub stack: [u8; STACK_BYTES],
    pub signal_stack: [u8; SIGNAL_STACK_BYTES],
    /// By kind of copies.
    pub landings: [Landings; 2],
    pub counts: Counts,
}

/// Where indirect jumps and returns land, by the lower bits of where they go.
#[repr(C)]
pub struct Landings {
    pub jumps: [u32; 1 << TABLE_BITS],
    pub returns: [u32; 1 << TABLE_BITS],
}

/// What counting copies add: n instructions are `[n, 0]`. To stop them it is made so that it cannot be read.
#[repr(C, align(4096))]
pub struct Counts(pub [[u64; 2]; 256]);

/// Addresses of parts of the area, for instructions.
#[derive(Debug, Clone, Copy)]
pub struct Addresses {
    base: u32,
}

impl Addresses {
    pub fn spilled(self, register: u8) -> u32 {
        self.base + (offset_of!(Area, spilled) + 8 * usize::from(register)) as u32
    }
    pub fn register(self, place: usize) -> u32 {
        self.base + (offset_of!(Area, context) + offset_of!(Context, registers) + 8 * place) as u32
    }
    pub fn position(self) -> u32 {
        self.base + offset_of!(Area, position) as u32
    }
    pub fn target(self) -> u32 {
        self.base + offset_of!(Area, target) as u32
    }
    pub fn fs(self) -> u32 {
        self.base + offset_of!(Area, fs) as u32
    }
    pub fn clock(self) -> u32 {
        self.base + offset_of!(Area, clock) as u32
    }
    pub fn taken(self) -> u32 {
        self.base + offset_of!(Area, taken) as u32
    }
    pub fn rounds(self) -> u32 {
        self.base + offset_of!(Area, rounds) as u32
    }
    pub fn resume(self) -> u32 {
        self.base + offset_of!(Area, resume) as u32
    }
    pub fn reason(self) -> u32 {
        self.base + offset_of!(Area, reason) as u32
    }
    pub fn number(self) -> u32 {
        self.base + offset_of!(Area, number) as u32
    }
    pub fn resume_counting(self) -> u32 {
        self.base + offset_of!(Area, resume_counting) as u32
    }
    pub fn counter(self) -> u32 {
        self.base + offset_of!(Area, counter) as u32
    }
    pub fn vector(self) -> u32 {
        self.base + offset_of!(Area, vector) as u32
    }
    pub fn repeated(self, nth: usize) -> u32 {
        self.base + (offset_of!(Area, repeated) + 16 * nth) as u32
    }
    pub fn jumps(self, kind: Kind) -> u32 {
        let of_kind = kind as usize * size_of::<Landings>() + offset_of!(Landings, jumps);
        self.base + (offset_of!(Area, landings) + of_kind) as u32
    }
    pub fn returns(self, kind: Kind) -> u32 {
        self.jumps(kind) + (offset_of!(Landings, returns) - offset_of!(Landings, jumps)) as u32
    }
    pub fn count(self, instructions: u32) -> u32 {
        self.base + offset_of!(Area, counts) as u32 + 16 * instructions
    }
    pub fn state(self) -> u32 {
        self.base + offset_of!(Area, state) as u32
    }
    pub fn log(self) -> u32 {
        self.base + offset_of!(Area, log) as u32
    }
    /// Its upper end, 16-aligned.
    pub fn stack(self) -> u32 {
        self.base + ((offset_of!(Area, stack) + STACK_BYTES) & !15) as u32
    }
}

/// Makes the area; none where the kernel gives no such memory, or none that is both written and executed.
pub fn make() -> Option<(&'static mut Area, Addresses, std::ops::Range<usize>)> {
    let data = size_of::<Area>().next_multiple_of(1 << 20);
    let protection = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
    let start = system::map(data + CODE_BYTES, protection, libc::MAP_32BIT)?;
    let end = start + data + CODE_BYTES;
    if end > 1 << 31 {
        return None;
    }
    // SAFETY: fresh zeroed memory of that size on a page boundary; zeros are a valid Area; nobody else
    // has it.
    let area = unsafe { &mut *(start as *mut Area) };
    area.counts.0.iter_mut().enumerate().for_each(|(n, count)| count[0] = n as u64);
    Some((area, Addresses { base: start as u32 }, start + data..end))
}
