//! The code between the program's and ours, written once.

use crate::area::{Addresses, FLAGS, FRAMES, PLACES, Reason, SLOTS};
use crate::emit::{Emitter, R11, RAX, RCX, RDI, RDX, RSP, Width};

/// Where copies go when there is something to do that is not in their code, and how they go on.
#[derive(Debug, Clone, Copy)]
pub struct Stubs {
    /// Comes back, with a reason.
    pub enter: usize,
    /// Takes a full log, and goes on at `Area::resume`; comes back now and then.
    pub full: usize,
    pub counting: Counting,
    /// By kind of copies.
    pub landings: [Landings; 2],
}

/// Where indirect jumps and returns go that land nowhere.
#[derive(Debug, Clone, Copy)]
pub struct Landings {
    /// An indirect jump that has no landing in the table, or another one's. rcx and r11 are spilled.
    pub no_jump: usize,
    /// A return that has none, and one that has another one's.
    pub no_return: usize,
    pub other_return: usize,
}

/// Those of counting copies.
#[derive(Debug, Clone, Copy)]
pub struct Counting {
    /// Of the vector register that they count in.
    pub width: Width,
    pub enter: usize,
    /// Goes on at `Area::resume_counting`.
    pub resume: usize,
    /// Comes back from a fault, where the vector register is not the program's.
    pub fault: usize,
}

/// All of them. `state` are the parts of the processor's extended state that are saved, `take` takes a log
/// ([`crate::taking`]), `dispatch` decides what comes next.
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
    let landings = [enter, counting.enter].map(|enter| landings(out, addresses, enter));
    Stubs { enter, full, counting, landings }
}

/// Takes the log, which is full, without all that [`save_state`] takes.
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

/// The program's general registers and flags, into the context; then we are on our own stack.
fn save_registers(out: &mut Emitter, addresses: Addresses) {
    for (number, place) in PLACES.iter().enumerate() {
        out.store(addresses.register(*place), number as u8);
    }
    out.constant(RSP, u64::from(addresses.stack()));
    out.bytes(&[0x9c]); // pushfq
    out.with_address(&[0x8f], 0, addresses.register(FLAGS)); // pop
    out.bytes(&[0xfc]); // cld
}

/// And all other registers.
fn save_state(out: &mut Emitter, addresses: Addresses, state: u64) {
    mask(out, state);
    out.with_address(&[0x48, 0x0f, 0xae], 4, addresses.state()); // xsave64
}

fn restore_state(out: &mut Emitter, addresses: Addresses, state: u64) {
    mask(out, state);
    out.with_address(&[0x48, 0x0f, 0xae], 5, addresses.state()); // xrstor64
}

/// Goes on where the program was.
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

fn landings(out: &mut Emitter, addresses: Addresses, enter: usize) -> Landings {
    let no_return = out.at();
    // The table's entry was put over the address to return to.
    out.bytes(&[0x48, 0x89, 0x4c, 0x24, 0xf8]); // mov [rsp - 8], rcx
    let other_return = out.at();
    out.bytes(&[0x48, 0x8b, 0x4c, 0x24, 0xf8]); // mov rcx, [rsp - 8]
    out.store(addresses.target(), RCX);
    out.store_constant(addresses.reason(), Reason::Return as u32);
    give_back_jump(out, addresses);
    out.jump(enter);
    let no_jump = out.at();
    out.store_constant(addresses.reason(), Reason::Indirect as u32);
    give_back_jump(out, addresses);
    out.jump(enter);
    Landings { no_jump, no_return, other_return }
}

/// The registers that an indirect jump borrows.
pub fn borrow_jump(out: &mut Emitter, addresses: Addresses) {
    [RCX, R11].iter().for_each(|number| out.store(addresses.spilled(*number), *number));
}

fn give_back_jump(out: &mut Emitter, addresses: Addresses) {
    [RCX, R11].iter().for_each(|number| out.load(*number, addresses.spilled(*number)));
}

/// Where indirect jumps land that go to `own`. What follows is run if they do; `other` is for
/// those that do not.
pub fn jump_lands(out: &mut Emitter, addresses: Addresses, own: u64, other: usize) {
    out.constant(R11, own.wrapping_neg());
    out.bytes(&[0x4a, 0x8d, 0x0c, 0x19]); // lea rcx, [rcx + r11]
    out.bytes(&[0xe3, 13]); // jrcxz, over the next two
    out.load(RCX, addresses.target());
    out.jump(other);
    give_back_jump(out, addresses);
}

/// The same of returns.
pub fn return_lands(out: &mut Emitter, addresses: Addresses, own: u64, other: usize) {
    out.bytes(&[0x48, 0x89, 0x4c, 0x24, 0xf8]); // mov [rsp - 8], rcx
    out.constant(R11, own.wrapping_neg());
    out.bytes(&[0x4a, 0x8d, 0x0c, 0x19]); // lea rcx, [rcx + r11]
    out.bytes(&[0xe3, 5]); // jrcxz, over the jump
    out.jump(other);
    give_back_jump(out, addresses);
}

/// r11: the table's entry of the address in rcx.
pub fn entry_of_rcx(out: &mut Emitter, table: u32) {
    out.bytes(&[0x44, 0x0f, 0xb7, 0xd9]); // movzx r11d, cx
    out.bytes(&[0x46, 0x8b, 0x1c, 0x9d]); // mov r11d, [table + r11 * 4]
    out.bytes(&table.to_le_bytes());
}
