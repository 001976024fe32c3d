//! The code between the program's and ours, written once.

use crate::area::{Addresses, FLAGS, PLACES, Reason};
use crate::emit::{Emitter, RAX, RCX, RDX, RSP};
use crate::translate::Stubs;

/// All of it: what blocks jump to, and a system call that comes back afterwards. `state` are the parts of the
/// processor's extended state that are saved, `dispatch` decides what comes next.
pub fn make(
    out: &mut Emitter,
    addresses: Addresses,
    state: u64,
    dispatch: extern "C" fn(),
) -> (Stubs, usize) {
    let enter = out.at();
    save(out, addresses, state);
    out.constant(RAX, dispatch as *const () as u64);
    out.bytes(&[0xff, 0xd0]); // call rax
    restore(out, addresses, state);
    let indirect = look_up(out, addresses, enter);
    let call = out.at();
    out.bytes(&[0x0f, 0x05]); // syscall
    out.store_constant(addresses.reason(), Reason::Called as u32);
    out.jump(enter);
    (Stubs { enter, indirect }, call)
}

/// All that the program has in the processor, into the context; then we are on our own stack.
fn save(out: &mut Emitter, addresses: Addresses, state: u64) {
    for (number, place) in PLACES.iter().enumerate() {
        out.store(addresses.register(*place), number as u8);
    }
    time(out, addresses.came_back());
    out.constant(RSP, u64::from(addresses.stack()));
    out.bytes(&[0x9c]); // pushfq
    out.with_address(&[0x8f], 0, addresses.register(FLAGS)); // pop
    out.bytes(&[0xfc]); // cld
    mask(out, state);
    out.with_address(&[0x48, 0x0f, 0xae], 4, addresses.state()); // xsave64
}

fn restore(out: &mut Emitter, addresses: Addresses, state: u64) {
    mask(out, state);
    out.with_address(&[0x48, 0x0f, 0xae], 5, addresses.state()); // xrstor64
    out.with_address(&[0xff], 6, addresses.register(FLAGS)); // push
    out.bytes(&[0x9d]); // popfq
    time(out, addresses.resumed());
    for (number, place) in PLACES.iter().enumerate() {
        out.load(number as u8, addresses.register(*place));
    }
    out.with_address(&[0xff], 4, addresses.resume()); // jmp
}

/// The processor's clock.
fn time(out: &mut Emitter, to: u32) {
    out.bytes(&[0x0f, 0x31]); // rdtsc
    for (opcode_of, word) in [(RAX, 0), (RDX, 4)] {
        out.with_address(&[0x89], opcode_of, to + word); // mov [to], eax or edx
    }
}

fn mask(out: &mut Emitter, state: u64) {
    out.constant(RAX, state & 0xffff_ffff);
    out.constant(RDX, state >> 32);
}

/// Goes to the copy of `Area::target`, if it is in the table; where that begins.
fn look_up(out: &mut Emitter, addresses: Addresses, enter: usize) -> usize {
    const USED: [u8; 3] = [RCX, RDX, RAX];
    let give_back = |out: &mut Emitter| {
        USED.iter().for_each(|number| out.load(*number, addresses.spilled(*number)));
    };
    let hit = out.at();
    out.bytes(&[0x48, 0x8b, 0x14, 0xd5]); // mov rdx, [table + rdx * 8 + 8]
    out.bytes(&(addresses.table() + 8).to_le_bytes());
    out.store(addresses.resume(), RDX);
    give_back(out);
    out.with_address(&[0xff], 4, addresses.resume()); // jmp
    let start = out.at();
    USED.iter().for_each(|number| out.store(addresses.spilled(*number), *number));
    out.load(RCX, addresses.target());
    out.bytes(&[0x0f, 0xb7, 0xd1]); // movzx edx, cx
    out.bytes(&[0x48, 0x8d, 0x14, 0x12]); // lea rdx, [rdx + rdx]
    out.bytes(&[0x48, 0x8b, 0x04, 0xd5]); // mov rax, [table + rdx * 8]
    out.bytes(&addresses.table().to_le_bytes());
    out.bytes(&[0x48, 0x8d, 0x0c, 0x01]); // lea rcx, [rcx + rax]
    out.jump_if_rcx_is_0(hit);
    give_back(out);
    out.store_constant(addresses.reason(), Reason::Indirect as u32);
    out.jump(enter);
    start
}
