//! Emits the instructions that surround the program's own. None changes a flag unless its comment says so.
//! None uses the program's stack, except those that replace a call or a return.

/// A general register, by its number in instructions.
pub type Register = u8;
pub const RAX: Register = 0;
pub const RCX: Register = 1;
pub const RDX: Register = 2;
pub const RBX: Register = 3;
pub const RSP: Register = 4;
pub const RBP: Register = 5;
pub const RSI: Register = 6;
pub const RDI: Register = 7;
pub const R11: Register = 11;
pub const R12: Register = 12;
pub const R14: Register = 14;
pub const R15: Register = 15;

/// The width of vector registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Width {
    Bytes32,
    Bytes64,
}

/// The end of the code that was emitted so far.
#[derive(Debug, Clone, Copy)]
pub struct Emitter {
    at: usize,
}

impl Emitter {
    /// Starts to emit code at an address.
    ///
    /// # Safety
    /// From `at` on there must be room for all that is emitted, in memory that nobody else uses.
    pub unsafe fn new(at: usize) -> Self {
        Emitter { at }
    }

    pub fn at(&self) -> usize {
        self.at
    }

    pub fn bytes(&mut self, bytes: &[u8]) {
        // SAFETY: the caller of `new` promises room.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at as *mut u8, bytes.len()) };
        self.at += bytes.len();
    }

    fn word(&mut self, word: u32) {
        self.bytes(&word.to_le_bytes());
    }

    /// Emits an instruction with a register and a word at an address.
    fn absolute(&mut self, opcode: u8, register: Register, address: u32) {
        self.bytes(&[0x48 | (register >> 3) << 2, opcode, 0x04 | (register & 7) << 3, 0x25]);
        self.word(address);
    }

    pub fn store(&mut self, address: u32, register: Register) {
        self.absolute(0x89, register, address);
    }

    pub fn load(&mut self, register: Register, address: u32) {
        self.absolute(0x8b, register, address);
    }

    /// Emits a store of a constant to a word of 32 bits.
    pub fn store_constant(&mut self, address: u32, value: u32) {
        self.bytes(&[0xc7, 0x04, 0x25]);
        self.word(address);
        self.word(value);
    }

    pub fn constant(&mut self, register: Register, value: u64) {
        match u32::try_from(value) {
            Ok(value) => {
                if register >= 8 {
                    self.bytes(&[0x41]);
                }
                self.bytes(&[0xb8 | register & 7]);
                self.word(value);
            }
            Err(_) => {
                self.bytes(&[0x48 | register >> 3, 0xb8 | register & 7]);
                self.bytes(&value.to_le_bytes());
            }
        }
    }

    /// Emits `mov [base + displacement], register`.
    pub fn store_at(&mut self, base: Register, displacement: u32, register: Register) {
        self.based(0x89, register, base, displacement);
    }

    /// Emits `mov register, [base + displacement]`.
    pub fn load_at(&mut self, register: Register, base: Register, displacement: u32) {
        self.based(0x8b, register, base, displacement);
    }

    /// Emits `lea register, [base + displacement]`.
    pub fn add(&mut self, register: Register, base: Register, displacement: u32) {
        self.based(0x8d, register, base, displacement);
    }

    /// Emits a store of a constant to a word of 64 bits, sign-extended.
    pub fn store_constant_at(&mut self, base: Register, displacement: u32, value: u32) {
        self.based(0xc7, 0, base, displacement);
        self.word(value);
    }

    fn based(&mut self, opcode: u8, register: Register, base: Register, displacement: u32) {
        let short = i8::try_from(displacement as i32);
        let mode = if short.is_ok() { 0x40 } else { 0x80 };
        let prefix = 0x48 | (register >> 3) << 2 | base >> 3;
        self.bytes(&[prefix, opcode, mode | (register & 7) << 3 | base & 7]);
        if base & 7 == RSP {
            self.bytes(&[0x24]);
        }
        match short {
            Ok(short) => self.bytes(&[short as u8]),
            Err(_) => self.word(displacement),
        }
    }

    pub fn jump(&mut self, to: usize) {
        self.bytes(&[0xe9]);
        self.relative(to);
    }

    /// Emits the distance of a jump or call, which follows its opcode.
    pub fn relative(&mut self, to: usize) {
        self.word((to as u32).wrapping_sub(self.at as u32 + 4));
    }

    /// Emits a short jump (jrcxz, -128 to 127 bytes) that is taken if rcx is 0.
    pub fn jump_if_rcx_is_0(&mut self, to: usize) {
        let short = (to as isize - (self.at as isize + 2)) as i8;
        self.bytes(&[0xe3, short as u8]);
    }

    /// Emits a comparison of a word at an address with a register. It changes flags, so only our own code may
    /// use it.
    pub fn compare(&mut self, address: u32, register: Register) {
        self.absolute(0x39, register, address);
    }

    pub fn call(&mut self, to: usize) {
        self.bytes(&[0xe8]);
        self.relative(to);
    }

    /// Emits a conditional jump, which only our own code may use: it depends on flags.
    pub fn jump_if_0(&mut self, to: usize) {
        self.bytes(&[0x0f, 0x84]);
        self.relative(to);
    }

    pub fn jump_if_not_0(&mut self, to: usize) {
        self.bytes(&[0x0f, 0x85]);
        self.relative(to);
    }

    pub fn move_to(&mut self, to: Register, from: Register) {
        self.between(0x89, from, to);
    }

    pub fn shift_right(&mut self, register: Register, bits: u8) {
        self.between(0xc1, 5, register);
        self.bytes(&[bits]);
    }

    pub fn and(&mut self, register: Register, mask: u32) {
        self.between(0x81, 4, register);
        self.word(mask);
    }

    /// Emits `xor register, [base + displacement]`, which changes flags.
    pub fn xor_at(&mut self, register: Register, base: Register, displacement: u32) {
        self.based(0x33, register, base, displacement);
    }

    fn between(&mut self, opcode: u8, register: Register, other: Register) {
        let prefix = 0x48 | (register >> 3) << 2 | other >> 3;
        self.bytes(&[prefix, opcode, 0xc0 | (register & 7) << 3 | other & 7]);
    }

    /// Emits an addition to xmm15, which has the count in counting translations.
    pub fn count(&mut self, address: u32) {
        self.with_address(&[0xc5, 0x01, 0xd4], 7, address); // vpaddq xmm15, xmm15, [address]
    }

    pub fn count_off(&mut self, address: u32) {
        self.with_address(&[0xc5, 0x01, 0xfb], 7, address); // vpsubq
    }

    pub fn store_count(&mut self, address: u32) {
        self.with_address(&[0xc5, 0x79, 0xd6], 7, address); // vmovq [address], xmm15
    }

    pub fn load_count(&mut self, address: u32) {
        self.with_address(&[0xc5, 0x7a, 0x7e], 7, address); // vmovq xmm15, [address]
    }

    /// Emits a store of the program's whole vector register 15.
    pub fn store_vector(&mut self, address: u32, width: Width) {
        self.vector(0x7f, address, width);
    }

    pub fn load_vector(&mut self, address: u32, width: Width) {
        self.vector(0x6f, address, width);
    }

    fn vector(&mut self, opcode: u8, address: u32, width: Width) {
        match width {
            Width::Bytes32 => self.with_address(&[0xc5, 0x7e, opcode], 7, address), // vmovdqu ymm15
            Width::Bytes64 => self.with_address(&[0x62, 0x71, 0xfe, 0x48, opcode], 7, address), // vmovdqu64 zmm15
        }
    }

    /// Emits an instruction with one memory operand at an address, from its opcode and opcode extension.
    pub fn with_address(&mut self, opcode: &[u8], extension: u8, address: u32) {
        self.bytes(opcode);
        self.bytes(&[0x04 | extension << 3, 0x25]);
        self.word(address);
    }
}

/// Changes the target of the jump whose distance is at `at`.
///
/// # Safety
/// `at` must be the address of four bytes of code that nobody executes meanwhile.
pub unsafe fn link(at: usize, to: usize) {
    let distance = (to as u32).wrapping_sub(at as u32 + 4);
    // SAFETY: the caller promises it.
    unsafe { (at as *mut u32).write_unaligned(distance) };
}
