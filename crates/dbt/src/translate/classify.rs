//! Properties of instructions that decide how, and if, they are translated.

use iced_x86::{
    Code, CodeSize, FlowControl, Instruction, Mnemonic, OpAccess, OpKind, Register, UsedMemory,
};

pub(super) fn is_repeated(instruction: &Instruction) -> bool {
    instruction.is_string_instruction()
        && (instruction.has_rep_prefix() || instruction.has_repne_prefix())
}

/// Returns true for an instruction that the program must execute natively, or that behaves differently
/// elsewhere.
pub(super) fn is_untranslatable(instruction: &Instruction) -> bool {
    let has_segment = (0..instruction.op_count()).any(|nth| {
        instruction.op_kind(nth) == OpKind::Register
            && instruction.op_register(nth).is_segment_register()
    });
    let is_known_flow = match instruction.flow_control() {
        FlowControl::Next => true,
        FlowControl::UnconditionalBranch | FlowControl::ConditionalBranch => {
            instruction.op0_kind() == OpKind::NearBranch64
                && !matches!(
                    instruction.code(),
                    Code::Jecxz_rel8_64
                        | Code::Loop_rel8_64_ECX
                        | Code::Loope_rel8_64_ECX
                        | Code::Loopne_rel8_64_ECX
                )
        }
        FlowControl::IndirectBranch => instruction.code() == Code::Jmp_rm64,
        FlowControl::IndirectCall => instruction.code() == Code::Call_rm64,
        FlowControl::Call => matches!(instruction.code(), Code::Call_rel32_64 | Code::Syscall),
        FlowControl::Return => matches!(instruction.code(), Code::Retnq | Code::Retnq_imm16),
        _ => false,
    };
    let is_odd = matches!(
        instruction.mnemonic(),
        Mnemonic::Wrfsbase
            | Mnemonic::Wrgsbase
            | Mnemonic::Enter
            | Mnemonic::Hlt
            | Mnemonic::In
            | Mnemonic::Out
            | Mnemonic::Incsspq
            | Mnemonic::Rstorssp
            | Mnemonic::Saveprevssp
            | Mnemonic::Setssbsy
            | Mnemonic::Wrssq
            | Mnemonic::Wrssd
    );
    has_segment || !is_known_flow || is_odd || instruction.memory_segment() == Register::GS
}

/// Returns true if an instruction uses all vector registers without naming them.
pub(super) fn is_of_all_vectors(instruction: &Instruction) -> bool {
    matches!(
        instruction.mnemonic(),
        Mnemonic::Vzeroupper
            | Mnemonic::Vzeroall
            | Mnemonic::Fxsave
            | Mnemonic::Fxsave64
            | Mnemonic::Fxrstor
            | Mnemonic::Fxrstor64
            | Mnemonic::Xsave
            | Mnemonic::Xsave64
            | Mnemonic::Xsavec
            | Mnemonic::Xsavec64
            | Mnemonic::Xsaveopt
            | Mnemonic::Xsaveopt64
            | Mnemonic::Xrstor
            | Mnemonic::Xrstor64
    )
}

/// Returns true if an address is a sum of general registers and a constant.
pub(super) fn is_plain(memory: &UsedMemory) -> bool {
    let is_general = |register: Register| {
        register == Register::None || register.is_gpr64() || register.is_gpr32()
    };
    memory.vsib_size() == 0
        && is_general(memory.base())
        && is_general(memory.index())
        && memory.address_size() != CodeSize::Code16
        && memory.segment() != Register::GS
        || matches!(memory.access(), OpAccess::None | OpAccess::NoMemAccess)
}
