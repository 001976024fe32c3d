//! General registers: sets of them, and those that a translation may borrow.

use crate::emit::{RAX, RCX, RDX};
use iced_x86::Register;

/// A set of general registers, one bit each.
pub(super) type RegisterSet = u16;

pub(super) fn bit(register: u8) -> RegisterSet {
    1 << register
}

/// Returns the number of the general register that a register is part of. None for others.
pub(super) fn number(register: Register) -> Option<u8> {
    register.is_gpr().then(|| register.full_register().number() as u8)
}

/// The registers that may be borrowed, those with short encodings first.
pub(super) const BORROWED: [u8; 15] = [RCX, RDX, 6, 7, RAX, 3, 8, 9, 10, 11, 12, 13, 14, 15, 5];

pub(super) fn register(number: u8) -> Register {
    const ALL: [Register; 16] = [
        Register::RAX,
        Register::RCX,
        Register::RDX,
        Register::RBX,
        Register::RSP,
        Register::RBP,
        Register::RSI,
        Register::RDI,
        Register::R8,
        Register::R9,
        Register::R10,
        Register::R11,
        Register::R12,
        Register::R13,
        Register::R14,
        Register::R15,
    ];
    ALL[usize::from(number)]
}

/// The registers that an instruction uses.
pub(super) struct RegisterUses {
    pub(super) used: RegisterSet,
    pub(super) written: RegisterSet,
}
