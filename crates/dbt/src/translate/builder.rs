//! The translation of one instruction: the accesses that it logs, and the registers that it borrows.

use crate::cache::{CacheKind, FIRST, FS, LOAD, LoggedAccess, STORE};
use crate::emit::{Emitter, RCX};
use crate::stubs::Stubs;
use crate::thread_state::{Addresses, SLOTS};
use iced_x86::{
    Code, Encoder, FlowControl, Instruction, InstructionInfoFactory, MemoryOperand, Mnemonic,
    OpAccess, Register, UsedMemory, UsedRegister,
};

use super::classify::*;
use super::exits::ExitEmitter;
use super::registers::*;

/// A translation under construction.
pub(super) struct BlockBuilder<'a> {
    pub(super) out: Emitter,
    pub(super) addresses: Addresses,
    pub(super) kind: CacheKind,
    pub(super) stubs: Stubs,
    pub(super) encoder: &'a mut Encoder,
    pub(super) accesses: &'a mut Vec<LoggedAccess>,
    /// The registers that are borrowed for the frame's place, and for sums.
    pub(super) frame: Option<u8>,
    pub(super) sum: Option<u8>,
    /// The registers that the block's exit has borrowed.
    pub(super) last: RegisterSet,
    /// True if vector register 15 has the program's value, in a counting translation.
    pub(super) has_vector: bool,
    pub(super) slots: usize,
    /// The slot with the present value of each register.
    pub(super) logged: [Option<u8>; 16],
}

/// An error: the instruction cannot be translated.
pub(super) struct Untranslatable;

impl BlockBuilder<'_> {
    /// Translates an instruction. Returns true if the block ends with it. After an error no access of it is
    /// to be kept.
    pub(super) fn instruction(
        &mut self,
        info: &mut InstructionInfoFactory,
        instruction: &Instruction,
        raw: &[u8],
        exits: &mut ExitEmitter<'_>,
    ) -> Result<bool, Untranslatable> {
        let info = info.info(instruction);
        let mut uses = RegisterUses { used: 0, written: 0 };
        for part in info.used_registers() {
            let Some(number) = number(part.register()) else { continue };
            uses.used |= bit(number);
            if !matches!(part.access(), OpAccess::Read | OpAccess::CondRead) {
                uses.written |= bit(number);
            }
        }
        if info.used_memory().iter().any(|memory| !is_plain(memory)) {
            return Err(Untranslatable);
        }
        let is_repeated = is_repeated(instruction);
        self.restore(uses.used);
        if self.kind == CacheKind::Counting {
            let is_of_vector = |part: &UsedRegister| {
                part.register().is_vector_register() && part.register().number() == 15
            };
            if info.used_registers().iter().any(is_of_vector) || is_of_all_vectors(instruction) {
                self.restore_vector();
            }
            return self.counted(instruction, raw, &uses, is_repeated, exits);
        }
        let mut repeat = 0;
        for memory in info.used_memory() {
            if is_repeated && repeat == 0 {
                repeat = self.log(RCX, &uses)?;
                self.slots += 1;
            }
            self.memory(instruction, memory, &uses, repeat)?;
        }
        match instruction.flow_control() {
            FlowControl::Next => {
                self.copy(instruction, raw, &uses)?;
                if repeat != 0 {
                    self.store_slot(repeat + 1, RCX, &uses)?;
                }
                for number in 0..16 {
                    if uses.written & bit(number) != 0 {
                        self.logged[usize::from(number)] = None;
                    }
                }
                Ok(false)
            }
            _ => {
                self.transfer(instruction, raw, exits)?;
                Ok(true)
            }
        }
    }

    /// Translates an instruction in a counting translation.
    pub(super) fn counted(
        &mut self,
        instruction: &Instruction,
        raw: &[u8],
        uses: &RegisterUses,
        is_repeated: bool,
        exits: &mut ExitEmitter<'_>,
    ) -> Result<bool, Untranslatable> {
        if instruction.flow_control() != FlowControl::Next {
            self.transfer(instruction, raw, exits)?;
            return Ok(true);
        }
        if !is_repeated {
            self.copy(instruction, raw, uses)?;
            return Ok(false);
        }
        // Adds the number of elements. The block's own count has one more for the instruction.
        self.borrow_vector();
        let [before, after] = [0, 1].map(|nth| self.addresses.repeated(nth));
        self.out.store(before, RCX);
        self.out.count(before);
        self.copy(instruction, raw, uses)?;
        self.out.store(after, RCX);
        self.out.count_off(after);
        Ok(false)
    }

    /// Restores the program's vector register 15, until [`Self::borrow_vector`].
    pub(super) fn restore_vector(&mut self) {
        if !self.has_vector {
            self.out.store_count(self.addresses.counter());
            self.out.load_vector(self.addresses.vector(), self.stubs.counting.width);
            self.has_vector = true;
        }
    }

    pub(super) fn borrow_vector(&mut self) {
        if self.has_vector {
            self.out.store_vector(self.addresses.vector(), self.stubs.counting.width);
            self.out.load_count(self.addresses.counter());
            self.has_vector = false;
        }
    }

    /// Restores all borrowed registers, the vector register too.
    pub(super) fn restore_all(&mut self) {
        self.restore(RegisterSet::MAX);
        self.borrow_vector();
    }

    pub(super) fn free(&self, uses: &RegisterUses, other: Option<u8>) -> Option<u8> {
        let is_free = |number: &&u8| uses.used & bit(**number) == 0 && other != Some(**number);
        BORROWED.iter().find(is_free).copied()
    }

    /// Returns the registers that do not have the program's values.
    pub(super) fn borrowed(&self) -> RegisterSet {
        [self.frame, self.sum].into_iter().flatten().map(bit).sum::<RegisterSet>() | self.last
    }

    /// Restores those of the borrowed registers that are in a set.
    pub(super) fn restore(&mut self, which: RegisterSet) {
        for borrowed in [&mut self.frame, &mut self.sum] {
            if let Some(number) = borrowed.filter(|number| which & bit(*number) != 0) {
                self.out.load(number, self.addresses.spilled(number));
                *borrowed = None;
            }
        }
    }

    /// Returns the register with the frame's place; borrows one if there is none.
    pub(super) fn frame(&mut self, uses: &RegisterUses) -> Result<u8, Untranslatable> {
        if let Some(number) = self.frame {
            return Ok(number);
        }
        let number = self.free(uses, self.sum).ok_or(Untranslatable)?;
        self.out.store(self.addresses.spilled(number), number);
        self.out.load(number, self.addresses.position());
        self.frame = Some(number);
        Ok(number)
    }

    /// Returns the register for sums; borrows one if there is none.
    pub(super) fn sum(&mut self, uses: &RegisterUses) -> Result<u8, Untranslatable> {
        if let Some(number) = self.sum {
            return Ok(number);
        }
        let number = self.free(uses, self.frame).ok_or(Untranslatable)?;
        self.out.store(self.addresses.spilled(number), number);
        self.sum = Some(number);
        Ok(number)
    }

    pub(super) fn store_slot(
        &mut self,
        slot: u8,
        from: u8,
        uses: &RegisterUses,
    ) -> Result<(), Untranslatable> {
        let frame = self.frame(uses)?;
        self.out.store_at(frame, self.addresses.log() + 8 * u32::from(slot), from);
        Ok(())
    }

    /// Logs a register's value. Returns its slot.
    pub(super) fn log(&mut self, number: u8, uses: &RegisterUses) -> Result<u8, Untranslatable> {
        let slot = self.slots as u8;
        if self.slots == SLOTS {
            return Err(Untranslatable);
        }
        self.store_slot(slot, number, uses)?;
        self.slots += 1;
        Ok(slot)
    }

    /// Logs the part of an address that is only known at run time, and adds the accesses to the cache's list.
    pub(super) fn memory(
        &mut self,
        instruction: &Instruction,
        memory: &UsedMemory,
        uses: &RegisterUses,
        repeat: u8,
    ) -> Result<(), Untranslatable> {
        let kinds: &[u8] = match memory.access() {
            OpAccess::Read | OpAccess::CondRead => &[LOAD],
            OpAccess::Write | OpAccess::CondWrite => &[STORE],
            OpAccess::ReadWrite | OpAccess::ReadCondWrite => &[LOAD, STORE],
            OpAccess::None | OpAccess::NoMemAccess => return Ok(()),
        };
        let base = memory.base();
        let mut offset = memory.displacement() as i64;
        let slot = match number(base) {
            None if memory.index() == Register::None => 0,
            Some(number) if memory.index() == Register::None && base.is_gpr64() => {
                match self.logged[usize::from(number)] {
                    Some(slot) => slot,
                    None => {
                        let slot = self.log(number, uses)?;
                        self.logged[usize::from(number)] = Some(slot);
                        slot
                    }
                }
            }
            _ => {
                let sum = self.sum(uses)?;
                let operand = MemoryOperand::new(
                    memory.base(),
                    memory.index(),
                    memory.scale(),
                    offset,
                    if base.is_gpr32() || memory.index().is_gpr32() { 4 } else { 8 },
                    false,
                    Register::None,
                );
                offset = 0;
                let lea = Instruction::with2(Code::Lea_r64_m, register(sum), operand)
                    .map_err(|_| Untranslatable)?;
                self.encode(&lea)?;
                self.log(sum, uses)?
            }
        };
        let is_fs = memory.segment() == Register::FS;
        // For a repeated instruction, only the size of one element is known.
        let size = if repeat == 0 { memory.memory_size() } else { instruction.memory_size() };
        let bytes = match size.size() {
            0 => 64,
            bytes => bytes as u32,
        };
        for kind in kinds {
            let is_first = repeat != 0
                && self.accesses.last().is_none_or(|last| last.instruction != instruction.ip());
            let flags = if is_fs { FS } else { 0 } | if is_first { FIRST } else { 0 };
            let instruction = instruction.ip();
            self.accesses.push(LoggedAccess {
                instruction,
                offset,
                bytes,
                kind: *kind,
                slot,
                repeat,
                flags,
            });
        }
        Ok(())
    }

    pub(super) fn encode(&mut self, instruction: &Instruction) -> Result<(), Untranslatable> {
        let result = self.encoder.encode(instruction, self.out.at() as u64);
        let mut bytes = self.encoder.take_buffer();
        if result.is_ok() {
            self.out.bytes(&bytes);
        }
        bytes.clear();
        self.encoder.set_buffer(bytes);
        result.map(|_| ()).map_err(|_| Untranslatable)
    }

    /// Emits the instruction itself. One relative to its own address gets that address from a register.
    pub(super) fn copy(
        &mut self,
        instruction: &Instruction,
        raw: &[u8],
        uses: &RegisterUses,
    ) -> Result<(), Untranslatable> {
        if !instruction.is_ip_rel_memory_operand() {
            self.out.bytes(raw);
            return Ok(());
        }
        let address = instruction.ip_rel_memory_address();
        if instruction.mnemonic() == Mnemonic::Lea {
            let number = number(instruction.op0_register())
                .filter(|_| instruction.op0_register().is_gpr64());
            self.out.constant(number.ok_or(Untranslatable)?, address);
            return Ok(());
        }
        if instruction.memory_base() != Register::RIP {
            return Err(Untranslatable);
        }
        let sum = self.sum(uses)?;
        self.out.constant(sum, address);
        let mut moved = *instruction;
        moved.set_memory_base(register(sum));
        moved.set_memory_displacement64(0);
        moved.set_memory_displ_size(0);
        self.encode(&moved)
    }
}
