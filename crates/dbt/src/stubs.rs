//! The code between translated code and ours. It is emitted once.

use crate::emit::{Emitter, R11, RAX, RCX, RDI, RDX, RSP, Width};
use crate::thread_state::{Addresses, FLAGS, FRAMES, PLACES, Reason, SLOTS};

/// Addresses that translations jump to for work that is not in their own code.
#[derive(Debug, Clone, Copy)]
pub struct Stubs {
    /// Returns control to the dispatcher, with a reason.
    pub enter: usize,
    /// Drains a full log and goes on at `ThreadState::resume`. Returns control after `ThreadState::rounds`
    /// logs.
    pub full: usize,
    pub counting: Counting,
    /// The lookup stubs by kind of translation.
    pub lookup_stubs: [LookupStubs; 2],
}

/// Destinations of indirect jumps and returns that the tables do not resolve.
#[derive(Debug, Clone, Copy)]
pub struct LookupStubs {
    /// An indirect jump without a stub in the table, or with one of another address. rcx and r11 are
    /// spilled.
    pub no_jump: usize,
    /// A return without a stub, and a return with one of another address.
    pub no_return: usize,
    pub other_return: usize,
}

/// The stubs of counting translations.
#[derive(Debug, Clone, Copy)]
pub struct Counting {
    /// The width of the vector register that has the count.
    pub width: Width,
    pub enter: usize,
    /// Goes on at `ThreadState::resume_counting`.
    pub resume: usize,
    /// Returns control from a fault, when the vector register does not have the program's value.
    pub fault: usize,
}

/// Emits all stubs. `state` is the mask of the extended state to save. `take` drains a log
/// ([`crate::log_drain`]). `dispatch` decides where the program goes on.
pub fn make(
    out: &mut Emitter,
    addresses: Addresses,
    state: u64,
    take: usize,
    dispatch: extern "C" fn(),
) -> Stubs {
    let enter = out.at();
    save_registers(out, addresses);
    let saved = out.at();
    save_state(out, addresses, state);
    out.constant(RAX, dispatch as *const () as u64);
    out.bytes(&[0xff, 0xd0]); // call rax
    restore_state(out, addresses, state);
    restore_registers(out, addresses);
    let full = full(out, addresses, take, saved);
    let counting = counting(out, addresses, state, enter);
    let lookup_stubs = [enter, counting.enter].map(|enter| lookup_stubs(out, addresses, enter));
    Stubs { enter, full, counting, lookup_stubs }
}

/// Emits the stub that drains a full log. It need not save vector registers ([`save_state`]), as `take` uses
/// none.
fn full(out: &mut Emitter, addresses: Addresses, take: usize, saved: usize) -> usize {
    let start = out.at();
    save_registers(out, addresses);
    out.constant(RDI, u64::from(addresses.log()) + (8 * SLOTS * (FRAMES - 1)) as u64);
    out.call(take);
    out.store_constant(addresses.position(), (8 * SLOTS * FRAMES) as u32);
    out.store_constant(addresses.reason(), Reason::Full as u32);
    out.with_address(&[0xff], 1, addresses.rounds()); // dec
    out.jump_if_0(saved);
    restore_registers(out, addresses);
    start
}

/// Emits stores of the program's general registers and flags to the context, and the switch to our own stack.
fn save_registers(out: &mut Emitter, addresses: Addresses) {
    for (number, place) in PLACES.iter().enumerate() {
        out.store(addresses.register(*place), number as u8);
    }
    out.constant(RSP, u64::from(addresses.stack()));
    out.bytes(&[0x9c]); // pushfq
    out.with_address(&[0x8f], 0, addresses.register(FLAGS)); // pop
    out.bytes(&[0xfc]); // cld
}

/// Emits a store of the extended state. It overwrites rax and rdx.
fn save_state(out: &mut Emitter, addresses: Addresses, state: u64) {
    mask(out, state);
    out.with_address(&[0x48, 0x0f, 0xae], 4, addresses.state()); // xsave64
}

fn restore_state(out: &mut Emitter, addresses: Addresses, state: u64) {
    mask(out, state);
    out.with_address(&[0x48, 0x0f, 0xae], 5, addresses.state()); // xrstor64
}

/// Emits loads of the program's registers, and the jump to where it goes on.
fn restore_registers(out: &mut Emitter, addresses: Addresses) {
    out.with_address(&[0xff], 6, addresses.register(FLAGS)); // push
    out.bytes(&[0x9d]); // popfq
    for (number, place) in PLACES.iter().enumerate() {
        out.load(number as u8, addresses.register(*place));
    }
    out.with_address(&[0xff], 4, addresses.resume()); // jmp
}

fn mask(out: &mut Emitter, state: u64) {
    out.constant(RAX, state & 0xffff_ffff);
    out.constant(RDX, state >> 32);
}

fn counting(out: &mut Emitter, addresses: Addresses, state: u64, enter_plain: usize) -> Counting {
    const AVX512: u64 = 0xe0;
    let width = if state & AVX512 == AVX512 { Width::Bytes64 } else { Width::Bytes32 };
    let fault = out.at();
    out.store_constant(addresses.reason(), Reason::FaultKnown as u32);
    let enter = out.at();
    out.store_count(addresses.counter());
    out.load_vector(addresses.vector(), width);
    out.jump(enter_plain);
    let resume = out.at();
    out.store_vector(addresses.vector(), width);
    out.load_count(addresses.counter());
    out.with_address(&[0xff], 4, addresses.resume_counting()); // jmp
    Counting { width, enter, resume, fault }
}

fn lookup_stubs(out: &mut Emitter, addresses: Addresses, enter: usize) -> LookupStubs {
    let no_return = out.at();
    // The translation has replaced the return address on the stack by the table's entry: restore it.
    out.bytes(&[0x48, 0x89, 0x4c, 0x24, 0xf8]); // mov [rsp - 8], rcx
    let other_return = out.at();
    out.bytes(&[0x48, 0x8b, 0x4c, 0x24, 0xf8]); // mov rcx, [rsp - 8]
    out.store(addresses.target(), RCX);
    out.store_constant(addresses.reason(), Reason::Return as u32);
    restore_jump(out, addresses);
    out.jump(enter);
    let no_jump = out.at();
    out.store_constant(addresses.reason(), Reason::Indirect as u32);
    restore_jump(out, addresses);
    out.jump(enter);
    LookupStubs { no_jump, no_return, other_return }
}

/// Emits stores of the registers that an indirect jump borrows.
pub fn borrow_jump(out: &mut Emitter, addresses: Addresses) {
    [RCX, R11].iter().for_each(|number| out.store(addresses.spilled(*number), *number));
}

fn restore_jump(out: &mut Emitter, addresses: Addresses) {
    [RCX, R11].iter().for_each(|number| out.load(*number, addresses.spilled(*number)));
}

/// Emits the stub of indirect jumps to `own`: the code that follows runs for these. Others go on at
/// `other`.
pub fn link_jump(out: &mut Emitter, addresses: Addresses, own: u64, other: usize) {
    out.constant(R11, own.wrapping_neg());
    out.bytes(&[0x4a, 0x8d, 0x0c, 0x19]); // lea rcx, [rcx + r11]
    out.bytes(&[0xe3, 13]); // jrcxz, over the next two
    out.load(RCX, addresses.target());
    out.jump(other);
    restore_jump(out, addresses);
}

/// Emits the return stub of `own`: the code that follows runs for these. Others go on at `other`.
pub fn link_return(out: &mut Emitter, addresses: Addresses, own: u64, other: usize) {
    out.bytes(&[0x48, 0x89, 0x4c, 0x24, 0xf8]); // mov [rsp - 8], rcx
    out.constant(R11, own.wrapping_neg());
    out.bytes(&[0x4a, 0x8d, 0x0c, 0x19]); // lea rcx, [rcx + r11]
    out.bytes(&[0xe3, 5]); // jrcxz, over the jump
    out.jump(other);
    restore_jump(out, addresses);
}

/// Emits a load of the table's entry for the address in rcx into r11.
pub fn entry_of_rcx(out: &mut Emitter, table: u32) {
    out.bytes(&[0x44, 0x0f, 0xb7, 0xd9]); // movzx r11d, cx
    out.bytes(&[0x46, 0x8b, 0x1c, 0x9d]); // mov r11d, [table + r11 * 4]
    out.bytes(&table.to_le_bytes());
}
