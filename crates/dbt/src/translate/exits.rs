//! The exits of a block: jumps, calls and returns.

use crate::cache::BlockExit;
use crate::emit::{Emitter, R11, RCX, RSP, link};
use crate::stubs;
use crate::thread_state::{Addresses, Reason};
use iced_x86::{Code, FlowControl, Instruction, MemoryOperand, OpKind};

use super::builder::{BlockBuilder, Untranslatable};
use super::registers::*;

pub(super) fn return_to_dispatcher(
    out: &mut Emitter,
    addresses: Addresses,
    enter: usize,
    why: Reason,
    number: usize,
) {
    out.store_constant(addresses.reason(), why as u32);
    out.store_constant(addresses.number(), number as u32);
    out.jump(enter);
}

/// The direct exits of a block.
pub(super) struct ExitEmitter<'a> {
    pub(super) list: &'a mut Vec<BlockExit>,
    pub(super) return_stubs: &'a mut Vec<(u64, usize)>,
    /// The code that no longer runs once exits are linked.
    pub(super) once: Emitter,
    pub(super) enter: usize,
    pub(super) nth: usize,
}

impl ExitEmitter<'_> {
    /// Emits an exit to an address of the program.
    pub(super) fn jump(&mut self, out: &mut Emitter, addresses: Addresses, to: u64) {
        out.bytes(&[0xe9]);
        self.unlinked(out, addresses, to);
    }

    /// Emits the distance of a jump whose opcode was emitted: it leads to the dispatcher until the exit is
    /// linked.
    pub(super) fn unlinked(&mut self, out: &mut Emitter, addresses: Addresses, to: u64) {
        let at = out.at();
        out.relative(self.once.at());
        self.return_to_dispatcher(addresses, BlockExit { at, to });
    }

    /// Emits the code that an exit leads to before it is linked.
    fn return_to_dispatcher(&mut self, addresses: Addresses, exit: BlockExit) {
        return_to_dispatcher(
            &mut self.once,
            addresses,
            self.enter,
            Reason::Direct,
            self.list.len(),
        );
        self.list.push(exit);
    }
}

impl BlockBuilder<'_> {
    /// Translates an instruction that transfers control.
    pub(super) fn transfer(
        &mut self,
        instruction: &Instruction,
        raw: &[u8],
        exits: &mut ExitEmitter<'_>,
    ) -> Result<(), Untranslatable> {
        self.restore_all();
        let (out, addresses) = (&mut self.out, self.addresses);
        match instruction.flow_control() {
            FlowControl::UnconditionalBranch => {
                exits.jump(out, addresses, instruction.near_branch64());
            }
            FlowControl::ConditionalBranch if instruction.is_jcc_short_or_near() => {
                let condition = instruction.condition_code() as u8 - 1;
                out.bytes(&[0x0f, 0x80 | condition]);
                exits.unlinked(out, addresses, instruction.near_branch64());
                exits.jump(out, addresses, instruction.next_ip());
            }
            FlowControl::ConditionalBranch => {
                // LOOP and JRCXZ reach only 127 bytes.
                out.bytes(&[raw[raw.len() - 2], 0]);
                let short = out.at();
                exits.jump(out, addresses, instruction.next_ip());
                let distance = out.at() - short;
                // SAFETY: the distance of the jump above; an exit takes 5 bytes.
                unsafe { ((short - 1) as *mut u8).write(distance as u8) };
                exits.jump(out, addresses, instruction.near_branch64());
            }
            FlowControl::Call if instruction.code() == Code::Syscall => {
                return_to_dispatcher(out, addresses, exits.enter, Reason::Call, exits.nth);
            }
            _ => self.transfer_predicted(instruction, exits)?,
        }
        Ok(())
    }

    /// Translates calls, returns and indirect jumps such that the processor predicts returns as well as it
    /// does natively. A call stays a call; the program's return address then replaces its own. A return puts
    /// the return stub's address in place of the program's and returns. The return stub restores the
    /// program's.
    pub(super) fn transfer_predicted(
        &mut self,
        instruction: &Instruction,
        exits: &mut ExitEmitter<'_>,
    ) -> Result<(), Untranslatable> {
        let addresses = self.addresses;
        let is_call = match instruction.flow_control() {
            FlowControl::Return if instruction.code() == Code::Retnq => {
                self.last = bit(RCX) | bit(R11);
                stubs::borrow_jump(&mut self.out, addresses);
                self.out.load_at(RCX, RSP, 0);
                stubs::entry_of_rcx(&mut self.out, addresses.returns(self.kind));
                self.out.store_at(RSP, 0, R11);
                self.out.bytes(&[0xc3]); // ret
                return Ok(());
            }
            FlowControl::Return => {
                self.last = bit(RCX) | bit(R11);
                stubs::borrow_jump(&mut self.out, addresses);
                self.out.load_at(RCX, RSP, 0);
                self.out.add(RSP, RSP, 8 + u32::from(instruction.immediate16()));
                self.jump_to_rcx();
                return Ok(());
            }
            flow => flow != FlowControl::IndirectBranch,
        };
        if !is_call {
            self.target_to_rcx(instruction)?;
            self.jump_to_rcx();
            return Ok(());
        }
        if instruction.flow_control() == FlowControl::IndirectCall {
            self.target_to_rcx(instruction)?;
        }
        let next = instruction.next_ip();
        let constant = exits.once.at();
        exits.once.bytes(&next.to_le_bytes());
        self.out.bytes(&[0xe8]); // call
        let distance = self.out.at();
        self.out.bytes(&[0; 4]);
        exits.return_stubs.push((next, self.out.at()));
        let other_return = self.stubs.lookup_stubs[self.kind as usize].other_return;
        stubs::link_return(&mut self.out, addresses, next, other_return);
        exits.jump(&mut self.out, addresses, next);
        // SAFETY: the distance of the call above.
        unsafe { link(distance, self.out.at()) };
        self.out.add(RSP, RSP, 8);
        self.out.with_address(&[0xff], 6, constant as u32); // push
        if instruction.flow_control() == FlowControl::IndirectCall {
            self.jump_to_rcx();
        } else {
            exits.jump(&mut self.out, addresses, instruction.near_branch64());
        }
        Ok(())
    }

    /// Loads the target of an indirect jump or call into rcx. rcx and r11 are borrowed from here on.
    pub(super) fn target_to_rcx(
        &mut self,
        instruction: &Instruction,
    ) -> Result<(), Untranslatable> {
        self.last = bit(RCX) | bit(R11);
        stubs::borrow_jump(&mut self.out, self.addresses);
        self.load_target(instruction, RCX)
    }

    pub(super) fn jump_to_rcx(&mut self) {
        self.out.store(self.addresses.target(), RCX);
        stubs::entry_of_rcx(&mut self.out, self.addresses.jumps(self.kind));
        self.out.bytes(&[0x41, 0xff, 0xe3]); // jmp r11
    }

    /// Loads the target of an indirect jump or call into a register.
    pub(super) fn load_target(
        &mut self,
        instruction: &Instruction,
        number: u8,
    ) -> Result<(), Untranslatable> {
        let load = match instruction.op0_kind() {
            OpKind::Register => {
                Instruction::with2(Code::Mov_r64_rm64, register(number), instruction.op0_register())
            }
            _ if instruction.is_ip_rel_memory_operand() => {
                self.out.constant(number, instruction.ip_rel_memory_address());
                let operand = MemoryOperand::with_base(register(number));
                Instruction::with2(Code::Mov_r64_rm64, register(number), operand)
            }
            _ => {
                let operand = MemoryOperand::new(
                    instruction.memory_base(),
                    instruction.memory_index(),
                    instruction.memory_index_scale(),
                    instruction.memory_displacement64() as i64,
                    instruction.memory_displ_size(),
                    false,
                    instruction.segment_prefix(),
                );
                Instruction::with2(Code::Mov_r64_rm64, register(number), operand)
            }
        };
        self.encode(&load.map_err(|_| Untranslatable)?)
    }
}
