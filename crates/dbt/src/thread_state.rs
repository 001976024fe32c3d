//! The memory that translated code works with. It is in the first 2 GiB, so that an instruction can address
//! all of it by a displacement, without a register.

use crate::cache::CacheKind;
use crate::system;
use std::mem::offset_of;
use std::sync::atomic::AtomicU32;

/// The words of a frame: the address of the code that drains it, and the values that its block has logged.
pub const SLOTS: usize = 8;
/// The number of frames in the log; the first one marks the log's end.
pub const FRAMES: usize = 1024;
/// log2 of the number of entries in a table of targets.
pub const TABLE_BITS: u32 = 16;
const STACK_BYTES: usize = 256 << 10;
/// The size of the signal stack in translated code. A signal frame has a thread's whole state.
const SIGNAL_STACK_BYTES: usize = 64 << 10;
/// The most bytes of extended state that the kernel saves: 2.7 KB with AVX-512, 11 KB with AMX.
pub const STATE_BYTES: usize = 16 << 10;
const CODE_BYTES: usize = 96 << 20;

/// Reasons why translated code has returned control ([`ThreadState::reason`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Reason {
    /// A burst, or counting, begins at `target`.
    Begin = 0,
    /// A direct jump is not linked; `number` is the exit's.
    Direct = 1,
    /// An indirect jump goes to `target`, which has no stub in the table.
    Indirect = 2,
    /// The log is full; `number` is the block that comes next.
    Full = 3,
    /// The program makes a system call; `number` is the block that ends with it.
    Call = 4,
    /// A translated instruction has faulted; `target` is its address.
    Fault = 6,
    /// The same fault, after the stub has restored the program's vector register.
    FaultKnown = 7,
    /// A return goes to `target`, which has no stub in the table.
    Return = 8,
}

/// The kernel's struct ucontext, up to the signal mask.
#[repr(C, align(16))]
#[derive(Debug, Clone, Copy)]
pub struct SignalContext {
    pub flags: u64,
    pub link: u64,
    /// The alternative stack: its address, flags and size.
    pub stack: [u64; 3],
    /// The values of r8 to r15, rdi, rsi, rbp, rbx, rdx, rax, rcx, rsp, rip and flags; then no registers.
    pub registers: [u64; 23],
    pub state: u64,
    pub reserved: [u64; 8],
    pub mask: u64,
}

impl SignalContext {
    /// Returns true if the program runs on its alternative stack.
    pub fn is_on_alternative_stack(&self) -> bool {
        let [start, flags, bytes] = self.stack;
        let is_there = flags as i32 & libc::SS_DISABLE == 0;
        is_there && self.registers[PLACES[4]].wrapping_sub(start) <= bytes
    }
}

/// The index in `SignalContext::registers` of each register, by its number in instructions.
pub const PLACES: [usize; 16] = [13, 14, 12, 11, 15, 10, 9, 8, 0, 1, 2, 3, 4, 5, 6, 7];
pub const RIP: usize = 16;
pub const FLAGS: usize = 17;

/// Extended state, as XSAVE writes it.
#[repr(C, align(64))]
pub struct ExtendedState(pub [u8; STATE_BYTES]);

#[repr(C)]
pub struct ThreadState {
    /// The program's values of the registers that translated code has borrowed, by register.
    pub spilled: [u64; 16],
    /// The offset from the log's start to the frame of the block that runs, in bytes.
    pub position: u64,
    pub target: u64,
    /// The address at which translated code goes on.
    pub resume: u64,
    pub reason: u32,
    pub number: u32,
    /// The FS base of the program's thread.
    pub fs: u64,
    /// The clock of stamps in the page filter.
    pub clock: u64,
    /// The instructions and accesses that were taken from full logs ([`crate::log_drain`]).
    pub taken: u64,
    /// Full logs until one returns control.
    pub rounds: u32,
    /// The number of the thread in translated code.
    pub thread: u32,
    /// The id of the thread in translated code; 0: none. The owner alone uses the thread state.
    pub owner: AtomicU32,
    /// The size of the state that the kernel has saved, in bytes.
    pub state_bytes: usize,
    /// The address at which a counting translation goes on.
    pub resume_counting: u64,
    /// The count of counting translations while none runs. While one runs, the vector register has the count,
    /// and `vector` has the program's value of that register.
    pub counter: u64,
    pub vector: [u64; 8],
    /// The values of rcx before and after a repeated instruction of a counting translation.
    pub repeated: [[u64; 2]; 2],
    pub context: SignalContext,
    pub state: ExtendedState,
    pub log: [[u64; SLOTS]; FRAMES],
    pub stack: [u8; STACK_BYTES],
    pub signal_stack: [u8; SIGNAL_STACK_BYTES],
    /// The targets by kind of translation.
    pub targets: [TargetTables; 2],
    pub counts: CountConstants,
}

/// The code that indirect jumps and returns go to, by the lower bits of their target.
#[repr(C)]
pub struct TargetTables {
    pub jumps: [u32; 1 << TABLE_BITS],
    pub returns: [u32; 1 << TABLE_BITS],
}

/// The constants that counting translations add: n instructions add `[n, 0]`. To stop counting translations,
/// the engine makes this page unreadable.
#[repr(C, align(4096))]
pub struct CountConstants(pub [[u64; 2]; 256]);

/// The addresses of the thread state's fields, for use in instructions.
#[derive(Debug, Clone, Copy)]
pub struct Addresses {
    base: u32,
}

impl Addresses {
    pub fn spilled(self, register: u8) -> u32 {
        self.base + (offset_of!(ThreadState, spilled) + 8 * usize::from(register)) as u32
    }
    pub fn register(self, place: usize) -> u32 {
        self.base
            + (offset_of!(ThreadState, context) + offset_of!(SignalContext, registers) + 8 * place)
                as u32
    }
    pub fn position(self) -> u32 {
        self.base + offset_of!(ThreadState, position) as u32
    }
    pub fn target(self) -> u32 {
        self.base + offset_of!(ThreadState, target) as u32
    }
    pub fn fs(self) -> u32 {
        self.base + offset_of!(ThreadState, fs) as u32
    }
    pub fn clock(self) -> u32 {
        self.base + offset_of!(ThreadState, clock) as u32
    }
    pub fn taken(self) -> u32 {
        self.base + offset_of!(ThreadState, taken) as u32
    }
    pub fn rounds(self) -> u32 {
        self.base + offset_of!(ThreadState, rounds) as u32
    }
    pub fn resume(self) -> u32 {
        self.base + offset_of!(ThreadState, resume) as u32
    }
    pub fn reason(self) -> u32 {
        self.base + offset_of!(ThreadState, reason) as u32
    }
    pub fn number(self) -> u32 {
        self.base + offset_of!(ThreadState, number) as u32
    }
    pub fn resume_counting(self) -> u32 {
        self.base + offset_of!(ThreadState, resume_counting) as u32
    }
    pub fn counter(self) -> u32 {
        self.base + offset_of!(ThreadState, counter) as u32
    }
    pub fn vector(self) -> u32 {
        self.base + offset_of!(ThreadState, vector) as u32
    }
    pub fn repeated(self, nth: usize) -> u32 {
        self.base + (offset_of!(ThreadState, repeated) + 16 * nth) as u32
    }
    pub fn jumps(self, kind: CacheKind) -> u32 {
        let of_kind = kind as usize * size_of::<TargetTables>() + offset_of!(TargetTables, jumps);
        self.base + (offset_of!(ThreadState, targets) + of_kind) as u32
    }
    pub fn returns(self, kind: CacheKind) -> u32 {
        self.jumps(kind)
            + (offset_of!(TargetTables, returns) - offset_of!(TargetTables, jumps)) as u32
    }
    pub fn count(self, instructions: u32) -> u32 {
        self.base + offset_of!(ThreadState, counts) as u32 + 16 * instructions
    }
    pub fn state(self) -> u32 {
        self.base + offset_of!(ThreadState, state) as u32
    }
    pub fn log(self) -> u32 {
        self.base + offset_of!(ThreadState, log) as u32
    }
    /// Returns the upper end of the stack, 16-byte aligned.
    pub fn stack(self) -> u32 {
        self.base + ((offset_of!(ThreadState, stack) + STACK_BYTES) & !15) as u32
    }
}

/// Creates the thread state. Returns none if the kernel gives no memory below 2 GiB, or none that is
/// writable and executable.
pub fn make() -> Option<(&'static mut ThreadState, Addresses, std::ops::Range<usize>)> {
    let data = size_of::<ThreadState>().next_multiple_of(1 << 20);
    let protection = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
    let start = system::map(data + CODE_BYTES, protection, libc::MAP_32BIT)?;
    let end = start + data + CODE_BYTES;
    if end > 1 << 31 {
        return None;
    }
    // SAFETY: fresh zeroed memory of that size on a page boundary. Zeros are a valid ThreadState, and nobody else
    // has it.
    let thread_state = unsafe { &mut *(start as *mut ThreadState) };
    thread_state.counts.0.iter_mut().enumerate().for_each(|(n, count)| count[0] = n as u64);
    Some((thread_state, Addresses { base: start as u32 }, start + data..end))
}
