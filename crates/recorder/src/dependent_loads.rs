//! Finds dependent loads: loads whose address comes from the same instruction's previous load, as in `p
//! = p->next`. Their page walks cannot overlap.
//!
//! The analysis decodes the program's code from the load along its loop and back. It tracks the
//! registers that hold values derived from the load. It does not track memory, so it misses chains
//! through spilled registers.

use crate::places::AddressSpace;
use iced_x86::{
    Code, Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, OpAccess,
    Register,
};
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::rc::Rc;

/// The furthest distance of the loop's ends from the load.
const REACH_BYTES: u64 = 512;
/// The most instructions that the analysis follows.
const STEPS_MAX: usize = 192;
/// The number of cached results.
const SLOTS: usize = 256;

/// Cached results by process and instruction.
pub struct DependentLoads {
    is_x86_64: bool,
    known: HashMap<(u32, u64), bool>,
    recent: [(u32, u64, bool); SLOTS],
    files: HashMap<Rc<str>, Option<File>>,
}

impl DependentLoads {
    /// Creates an empty cache. For other architectures than x86-64, no load counts as dependent.
    pub fn new(is_x86_64: bool) -> Self {
        let recent = [(u32::MAX, 0, false); SLOTS];
        DependentLoads { is_x86_64, known: HashMap::new(), recent, files: HashMap::new() }
    }

    /// Returns true if the load depends on the same instruction's previous load.
    #[inline]
    pub fn is_dependent(&mut self, process: u32, space: &AddressSpace, instruction: u64) -> bool {
        let slot = (instruction ^ instruction >> 8) as usize % SLOTS;
        let (of, at, is_dependent) = self.recent[slot];
        if (of, at) == (process, instruction) {
            return is_dependent;
        }
        let is_dependent = match self.known.get(&(process, instruction)) {
            Some(known) => *known,
            None => {
                let found = self.is_x86_64 && self.look(space, instruction).unwrap_or(false);
                self.known.insert((process, instruction), found);
                found
            }
        };
        self.recent[slot] = (process, instruction, is_dependent);
        is_dependent
    }

    /// Reads and analyses the code around an instruction; none if no file contains it.
    fn look(&mut self, space: &AddressSpace, instruction: u64) -> Option<bool> {
        let mapping = space.file_at(instruction)?;
        let file = self.files.entry(mapping.name.clone());
        let file = file.or_insert_with(|| File::open(&*mapping.name).ok()).as_ref()?;
        let first = instruction.saturating_sub(REACH_BYTES).max(mapping.range.start);
        let mut code = vec![0; 2 * REACH_BYTES as usize];
        let read = file.read_at(&mut code, first - mapping.range.start + mapping.offset).ok()?;
        code.truncate(read);
        Some(is_loop_carried(&code, first, instruction))
    }
}

/// Returns true if the address of `load` derives from its previous load. `code` begins at `first`.
fn is_loop_carried(code: &[u8], first: u64, load: u64) -> bool {
    let mut infos = InstructionInfoFactory::new();
    let mut at = load;
    let mut tainted = 0;
    for step in 0..STEPS_MAX {
        let Some(instruction) = decode(code, first, at) else { return false };
        let used = Registers::of(&mut infos, &instruction);
        if at == load {
            if step > 0 {
                return used.address & tainted != 0;
            }
            tainted = used.written;
        } else if used.read & tainted != 0 {
            tainted |= used.written;
        } else {
            tainted &= !used.written;
        }
        if tainted == 0 {
            return false;
        }
        let Some(next) = next(&instruction, load, first) else { return false };
        at = next;
    }
    false
}

fn decode(code: &[u8], first: u64, at: u64) -> Option<Instruction> {
    let bytes = code.get(at.checked_sub(first)? as usize..)?;
    let mut decoder = Decoder::with_ip(64, bytes, at, DecoderOptions::NONE);
    let instruction = decoder.decode();
    (instruction.code() != Code::INVALID).then_some(instruction)
}

/// Returns the likely next instruction of a loop around `load`: a backward jump that leads to it is
/// taken.
fn next(instruction: &Instruction, load: u64, first: u64) -> Option<u64> {
    let target = instruction.near_branch_target();
    let back = instruction.ip() >= load && (first..=load).contains(&target);
    match instruction.flow_control() {
        FlowControl::Next => Some(instruction.next_ip()),
        FlowControl::ConditionalBranch if back => Some(target),
        FlowControl::ConditionalBranch => Some(instruction.next_ip()),
        FlowControl::UnconditionalBranch => Some(target),
        _ => None,
    }
}

/// The general-purpose registers of an instruction, one bit each.
#[derive(Default)]
struct Registers {
    read: u32,
    written: u32,
    /// Registers of its memory operand's address.
    address: u32,
}

impl Registers {
    fn of(infos: &mut InstructionInfoFactory, instruction: &Instruction) -> Registers {
        let mut used = Registers {
            address: bit(instruction.memory_base()) | bit(instruction.memory_index()),
            ..Registers::default()
        };
        for register in infos.info(instruction).used_registers() {
            let (bit, access) = (bit(register.register()), register.access());
            if !matches!(access, OpAccess::Write | OpAccess::CondWrite) {
                used.read |= bit;
            }
            if !matches!(access, OpAccess::Read | OpAccess::CondRead) {
                used.written |= bit;
            }
        }
        used
    }
}

/// Returns 0 for registers that hold no addresses.
fn bit(register: Register) -> u32 {
    let full = register.full_register();
    if full.is_gpr64() && full != Register::RSP { 1 << full.number() } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_walks_depend_and_array_walks_do_not() {
        // mov rax,[rax+8]; add rdx,1; test rax,rax; jne back
        let list =
            [0x48, 0x8b, 0x40, 0x08, 0x48, 0x83, 0xc2, 0x01, 0x48, 0x85, 0xc0, 0x75, 0xf3, 0xc3];
        assert!(is_loop_carried(&list, 0x1000, 0x1000));
        // mov rax,[rbx+rcx*8]; mov rax,[rax]; add rcx,1; cmp rcx,rdx; jne back
        let array = [
            0x48, 0x8b, 0x04, 0xcb, 0x48, 0x8b, 0x00, 0x48, 0x83, 0xc1, 0x01, 0x48, 0x39, 0xd1,
            0x75, 0xf0, 0xc3,
        ];
        assert!(!is_loop_carried(&array, 0x1000, 0x1000), "the array itself");
        assert!(!is_loop_carried(&array, 0x1000, 0x1004), "what its elements point to");
    }

    #[test]
    fn an_index_that_is_loaded_is_an_address_too() {
        // mov edx,[rbx+rax*4]; mov eax,edx; dec ecx; jne back
        let indexed = [0x8b, 0x14, 0x83, 0x89, 0xd0, 0xff, 0xc9, 0x75, 0xf7, 0xc3];
        assert!(is_loop_carried(&indexed, 0x2000, 0x2000));
    }

    #[test]
    fn code_that_is_none_or_ends_is_no_loop() {
        assert!(!is_loop_carried(&[0x06, 0x06], 0, 0), "no instruction");
        assert!(!is_loop_carried(&[0x48, 0x8b, 0x40], 0, 0), "cut");
        assert!(!is_loop_carried(&[0x48, 0x8b, 0x00, 0xc3], 0, 0), "no loop");
        assert!(!is_loop_carried(&[], 0, 0));
    }
}
