//! Translates a basic block of the program: its instructions, and others between them that log the accesses.
//!
//! A block is entered at its first instruction and left after its last one. Its frame of the log has the
//! address of the code that takes it, and the registers that the block's addresses consist of. All else about
//! the accesses is fixed at translation ([`Access`]). A translation borrows two registers: one for the
//! frame's place, one for sums. The program's values are in memory meanwhile. They are restored before each
//! instruction that uses them and at the block's end. Nothing changes flags or the program's stack.
//!
//! Counting translations ([`Kind::Counting`]) log nothing. Each begins with one instruction that adds the
//! number of the block's instructions to vector register 15. The program's value of that register is in
//! memory meanwhile, except in blocks that use it.
//!
//! An instruction that may behave differently elsewhere is not translated: the program executes it natively.

use crate::area::{Addresses, Reason, SLOTS};
use crate::cache::{Access, Block, Cache, Exit, FIRST, FS, Kind, LOAD, STORE};
use crate::emit::{Emitter, R11, RAX, RCX, RDX, RSP, link};
use crate::recorder::Sides;
use crate::stubs::{self, Stubs};
use crate::taking::Taking;
use iced_x86::{
    Code, CodeSize, Decoder, DecoderOptions, Encoder, FlowControl, Instruction,
    InstructionInfoFactory, MemoryOperand, Mnemonic, OpAccess, OpKind, Register, UsedMemory,
    UsedRegister,
};

/// The most instructions of a block, so that [`Cache::has_room`] can guarantee room for its parts.
pub const INSTRUCTIONS: u32 = 64;
/// The slots that an instruction may need, and those that a repeated one may need.
const SLOTS_OF_ONE: usize = 2;
const SLOTS_OF_REPEATED: usize = 5;

/// Translates basic blocks.
pub struct Translator {
    info: InstructionInfoFactory,
    encoder: Encoder,
    stubs: Stubs,
    taking: Taking,
}

/// A set of general registers, one bit each.
type Set = u16;

fn bit(register: u8) -> Set {
    1 << register
}

/// Returns the number of the general register that a register is part of. None for others.
fn number(register: Register) -> Option<u8> {
    register.is_gpr().then(|| register.full_register().number() as u8)
}

/// The registers that may be borrowed, those with short encodings first.
const BORROWED: [u8; 15] = [RCX, RDX, 6, 7, RAX, 3, 8, 9, 10, 11, 12, 13, 14, 15, 5];

fn register(number: u8) -> Register {
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
struct Uses {
    used: Set,
    written: Set,
}

/// A translation under construction.
struct Builder<'a> {
    out: Emitter,
    addresses: Addresses,
    kind: Kind,
    stubs: Stubs,
    encoder: &'a mut Encoder,
    accesses: &'a mut Vec<Access>,
    /// The registers that are borrowed for the frame's place, and for sums.
    frame: Option<u8>,
    sum: Option<u8>,
    /// The registers that the block's exit has borrowed.
    last: Set,
    /// True if vector register 15 has the program's value, in a counting translation.
    has_vector: bool,
    slots: usize,
    /// By register: the slot that has its present value.
    logged: [Option<u8>; 16],
}

/// An error: the instruction cannot be translated.
struct Alien;

/// A new translation and its place.
struct Copied {
    entry: usize,
    /// The address of the constant that goes into a frame's first word; 0 in counting translations.
    taker: usize,
    /// The ends of the code that runs each time, and of the code that runs once.
    code_end: (usize, usize),
    /// The end of the block in the program's code.
    end: u64,
    instructions: u32,
    watched: Option<Watched>,
}

/// The program's state at a place of a translation.
#[derive(Debug, Clone, Copy)]
pub struct Watched {
    /// The address of the program's instruction that is translated there.
    pub instruction: u64,
    /// Registers whose values are in [`Area::spilled`].
    ///
    /// [`Area::spilled`]: crate::area::Area::spilled
    borrowed: Set,
    /// True if vector register 15 has the program's value.
    pub has_vector: bool,
}

impl Watched {
    pub fn borrowed(self) -> impl Iterator<Item = u8> {
        (0..16).filter(move |number| self.borrowed & bit(*number) != 0)
    }
}

impl Translator {
    pub fn new(stubs: Stubs, taking: Taking) -> Translator {
        let (info, encoder) = (InstructionInfoFactory::new(), Encoder::new(64));
        Translator { info, encoder, stubs, taking }
    }

    /// Sets the page filters for the blocks to come.
    pub fn look_at(&mut self, sides: Sides) {
        self.taking.sides = sides;
    }

    /// Translates the block at `pc`, whose code begins with `bytes`. Returns its number, or none if its first
    /// instruction cannot be translated. The cache must have room.
    pub fn block(&mut self, cache: &mut Cache, pc: u64, bytes: &[u8]) -> Option<usize> {
        let first = cache.accesses.len();
        let copied = self.copy(cache, pc, bytes, None)?;
        let accesses = &cache.accesses[first..];
        let block = Block {
            start: pc,
            bytes: (copied.end - pc) as u32,
            instructions: copied.instructions,
            // SAFETY: within the list, or at its end if there are no accesses. The list never moves.
            accesses: unsafe { cache.accesses.as_ptr().add(first) },
            access_count: accesses.len() as u32,
        };
        let number = cache.add(block, copied.entry, copied.code_end);
        if cache.kind == Kind::Logging {
            let taking = cache.take(&self.taking, number);
            // SAFETY: the constant that `prologue` has written, in a block that has not run yet.
            unsafe { (copied.taker as *mut u32).write_unaligned(taking as u32) };
        }
        Some(number)
    }

    /// Returns the program's state `place` bytes after the entry of the translation of the block at `pc`.
    /// Translates the block once more for that, after all others, and discards the result.
    pub fn state_at(
        &mut self,
        cache: &mut Cache,
        pc: u64,
        bytes: &[u8],
        place: usize,
    ) -> Option<Watched> {
        let (accesses, exits, landings) =
            (cache.accesses.len(), cache.exits.len(), cache.landings.len());
        let copied = self.copy(cache, pc, bytes, Some(place));
        cache.accesses.truncate(accesses);
        cache.exits.truncate(exits);
        cache.landings.truncate(landings);
        copied?.watched
    }

    /// Translates a block into the cache's free room. `watched` is an offset to report the state at.
    fn copy(
        &mut self,
        cache: &mut Cache,
        pc: u64,
        bytes: &[u8],
        watched: Option<usize>,
    ) -> Option<Copied> {
        let nth = cache.blocks.len();
        // SAFETY: the cache has room, and only the thread in a burst, this one, uses the cache.
        let (mut out, mut once) =
            unsafe { (Emitter::new(cache.next), Emitter::new(cache.next_once)) };
        let is_logging = cache.kind == Kind::Logging;
        let (entry, taker) = match cache.kind {
            Kind::Logging => prologue(&mut out, &mut once, cache.addresses, self.stubs.full, nth),
            Kind::Counting => {
                out.count(cache.addresses.count(0));
                (cache.next, 0)
            }
        };
        let mut builder = Builder {
            out,
            addresses: cache.addresses,
            kind: cache.kind,
            stubs: self.stubs,
            encoder: &mut self.encoder,
            accesses: &mut cache.accesses,
            frame: is_logging.then_some(RCX),
            sum: None,
            last: 0,
            has_vector: false,
            slots: 1,
            logged: [None; 16],
        };
        let enter = if is_logging { self.stubs.enter } else { self.stubs.counting.enter };
        let mut exits =
            Exits { list: &mut cache.exits, landings: &mut cache.landings, once, enter, nth };
        let mut decoder = Decoder::with_ip(64, bytes, pc, DecoderOptions::NONE);
        let mut instruction = Instruction::default();
        let (mut count, mut end, mut found) = (0, pc, None);
        loop {
            let mut done = count == INSTRUCTIONS || !decoder.can_decode();
            if !done {
                decoder.decode_out(&mut instruction);
                let slots = match is_repeated(&instruction) {
                    true => SLOTS_OF_REPEATED,
                    false => SLOTS_OF_ONE,
                };
                done = builder.slots + slots > SLOTS
                    || instruction.is_invalid()
                    || is_alien(&instruction);
            }
            if !done {
                let from = (end - pc) as usize;
                let raw = &bytes[from..from + instruction.len()];
                let known = builder.accesses.len();
                let from = builder.out.at() - entry;
                match builder.instruction(&mut self.info, &instruction, raw, &mut exits) {
                    Ok(ends) => {
                        let copy = from..builder.out.at() - entry;
                        if watched.is_some_and(|watched| copy.contains(&watched)) {
                            let (borrowed, has_vector) = (builder.borrowed(), builder.has_vector);
                            let instruction = instruction.ip();
                            found = Some(Watched { instruction, borrowed, has_vector });
                        }
                        count += 1;
                        end = instruction.next_ip();
                        if ends {
                            break;
                        }
                        continue;
                    }
                    Err(Alien) => builder.accesses.truncate(known),
                }
            }
            if count == 0 {
                return None;
            }
            builder.give_back_all();
            exits.jump(&mut builder.out, builder.addresses, end);
            break;
        }
        if !is_logging {
            // SAFETY: the displacement of the block's first instruction, which has 9 bytes.
            unsafe { ((entry + 5) as *mut u32).write_unaligned(cache.addresses.count(count)) };
        }
        let code_end = (builder.out.at(), exits.once.at());
        Some(Copied { entry, taker, code_end, end, instructions: count, watched: found })
    }
}

/// Emits the code that takes the next frame of the log, or goes to `full` if there is none. Returns the
/// entry, and the address of the constant for the frame's first word, which the caller fills in.
fn prologue(
    out: &mut Emitter,
    once: &mut Emitter,
    addresses: Addresses,
    full: usize,
    nth: usize,
) -> (usize, usize) {
    // jrcxz reaches 127 bytes at most, so it needs this jump.
    let no_frame = out.at();
    out.jump(once.at());
    let entry = out.at();
    once.load(RCX, addresses.spilled(RCX));
    once.store_constant(addresses.number(), nth as u32);
    once.store_constant(addresses.resume(), entry as u32);
    once.jump(full);
    out.store(addresses.spilled(RCX), RCX);
    out.load(RCX, addresses.position());
    out.add(RCX, RCX, (8 * SLOTS as u32).wrapping_neg());
    out.store(addresses.position(), RCX);
    out.jump_if_rcx_is_0(no_frame);
    out.store_constant_at(RCX, addresses.log(), 0);
    (entry, out.at() - 4)
}

fn come_back(out: &mut Emitter, addresses: Addresses, enter: usize, why: Reason, number: usize) {
    out.store_constant(addresses.reason(), why as u32);
    out.store_constant(addresses.number(), number as u32);
    out.jump(enter);
}

/// The direct exits of a block.
struct Exits<'a> {
    list: &'a mut Vec<Exit>,
    landings: &'a mut Vec<(u64, usize)>,
    /// The code that no longer runs once exits are linked.
    once: Emitter,
    enter: usize,
    nth: usize,
}

impl Exits<'_> {
    /// Emits an exit to an address of the program.
    fn jump(&mut self, out: &mut Emitter, addresses: Addresses, to: u64) {
        out.bytes(&[0xe9]);
        self.unlinked(out, addresses, to);
    }

    /// Emits the distance of a jump whose opcode was emitted: it leads to the dispatcher until the exit is
    /// linked.
    fn unlinked(&mut self, out: &mut Emitter, addresses: Addresses, to: u64) {
        let at = out.at();
        out.relative(self.once.at());
        self.come_back(addresses, Exit { at, to });
    }

    /// Emits the code that an exit leads to before it is linked.
    fn come_back(&mut self, addresses: Addresses, exit: Exit) {
        come_back(&mut self.once, addresses, self.enter, Reason::Direct, self.list.len());
        self.list.push(exit);
    }
}

fn is_repeated(instruction: &Instruction) -> bool {
    instruction.is_string_instruction()
        && (instruction.has_rep_prefix() || instruction.has_repne_prefix())
}

/// Returns true for an instruction that the program must execute natively, or that behaves differently
/// elsewhere.
fn is_alien(instruction: &Instruction) -> bool {
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

impl Builder<'_> {
    /// Translates an instruction. Returns true if the block ends with it. After an error no access of it is
    /// to be kept.
    fn instruction(
        &mut self,
        info: &mut InstructionInfoFactory,
        instruction: &Instruction,
        raw: &[u8],
        exits: &mut Exits<'_>,
    ) -> Result<bool, Alien> {
        let info = info.info(instruction);
        let mut uses = Uses { used: 0, written: 0 };
        for part in info.used_registers() {
            let Some(number) = number(part.register()) else { continue };
            uses.used |= bit(number);
            if !matches!(part.access(), OpAccess::Read | OpAccess::CondRead) {
                uses.written |= bit(number);
            }
        }
        if info.used_memory().iter().any(|memory| !is_plain(memory)) {
            return Err(Alien);
        }
        let is_repeated = is_repeated(instruction);
        self.give_back(uses.used);
        if self.kind == Kind::Counting {
            let is_of_vector = |part: &UsedRegister| {
                part.register().is_vector_register() && part.register().number() == 15
            };
            if info.used_registers().iter().any(is_of_vector) || is_of_all_vectors(instruction) {
                self.give_vector();
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
    fn counted(
        &mut self,
        instruction: &Instruction,
        raw: &[u8],
        uses: &Uses,
        is_repeated: bool,
        exits: &mut Exits<'_>,
    ) -> Result<bool, Alien> {
        if instruction.flow_control() != FlowControl::Next {
            self.transfer(instruction, raw, exits)?;
            return Ok(true);
        }
        if !is_repeated {
            self.copy(instruction, raw, uses)?;
            return Ok(false);
        }
        // Adds the number of elements. The block's own count has one more for the instruction.
        self.take_vector();
        let [before, after] = [0, 1].map(|nth| self.addresses.repeated(nth));
        self.out.store(before, RCX);
        self.out.count(before);
        self.copy(instruction, raw, uses)?;
        self.out.store(after, RCX);
        self.out.count_off(after);
        Ok(false)
    }

    /// Restores the program's vector register 15, until [`Self::take_vector`].
    fn give_vector(&mut self) {
        if !self.has_vector {
            self.out.store_count(self.addresses.counter());
            self.out.load_vector(self.addresses.vector(), self.stubs.counting.width);
            self.has_vector = true;
        }
    }

    fn take_vector(&mut self) {
        if self.has_vector {
            self.out.store_vector(self.addresses.vector(), self.stubs.counting.width);
            self.out.load_count(self.addresses.counter());
            self.has_vector = false;
        }
    }

    /// Restores all borrowed registers, the vector register too.
    fn give_back_all(&mut self) {
        self.give_back(Set::MAX);
        self.take_vector();
    }

    fn free(&self, uses: &Uses, other: Option<u8>) -> Option<u8> {
        let is_free = |number: &&u8| uses.used & bit(**number) == 0 && other != Some(**number);
        BORROWED.iter().find(is_free).copied()
    }

    /// Returns the registers that do not have the program's values.
    fn borrowed(&self) -> Set {
        [self.frame, self.sum].into_iter().flatten().map(bit).sum::<Set>() | self.last
    }

    /// Restores those of the borrowed registers that are in a set.
    fn give_back(&mut self, which: Set) {
        for borrowed in [&mut self.frame, &mut self.sum] {
            if let Some(number) = borrowed.filter(|number| which & bit(*number) != 0) {
                self.out.load(number, self.addresses.spilled(number));
                *borrowed = None;
            }
        }
    }

    /// Returns the register with the frame's place; borrows one if there is none.
    fn frame(&mut self, uses: &Uses) -> Result<u8, Alien> {
        if let Some(number) = self.frame {
            return Ok(number);
        }
        let number = self.free(uses, self.sum).ok_or(Alien)?;
        self.out.store(self.addresses.spilled(number), number);
        self.out.load(number, self.addresses.position());
        self.frame = Some(number);
        Ok(number)
    }

    /// Returns the register for sums; borrows one if there is none.
    fn sum(&mut self, uses: &Uses) -> Result<u8, Alien> {
        if let Some(number) = self.sum {
            return Ok(number);
        }
        let number = self.free(uses, self.frame).ok_or(Alien)?;
        self.out.store(self.addresses.spilled(number), number);
        self.sum = Some(number);
        Ok(number)
    }

    fn store_slot(&mut self, slot: u8, from: u8, uses: &Uses) -> Result<(), Alien> {
        let frame = self.frame(uses)?;
        self.out.store_at(frame, self.addresses.log() + 8 * u32::from(slot), from);
        Ok(())
    }

    /// Logs a register's value. Returns its slot.
    fn log(&mut self, number: u8, uses: &Uses) -> Result<u8, Alien> {
        let slot = self.slots as u8;
        if self.slots == SLOTS {
            return Err(Alien);
        }
        self.store_slot(slot, number, uses)?;
        self.slots += 1;
        Ok(slot)
    }

    /// Logs the part of an address that is only known at run time, and adds the accesses to the cache's list.
    fn memory(
        &mut self,
        instruction: &Instruction,
        memory: &UsedMemory,
        uses: &Uses,
        repeat: u8,
    ) -> Result<(), Alien> {
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
                    .map_err(|_| Alien)?;
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
            self.accesses.push(Access {
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

    fn encode(&mut self, instruction: &Instruction) -> Result<(), Alien> {
        let result = self.encoder.encode(instruction, self.out.at() as u64);
        let mut bytes = self.encoder.take_buffer();
        if result.is_ok() {
            self.out.bytes(&bytes);
        }
        bytes.clear();
        self.encoder.set_buffer(bytes);
        result.map(|_| ()).map_err(|_| Alien)
    }

    /// Emits the instruction itself. One relative to its own address gets that address from a register.
    fn copy(&mut self, instruction: &Instruction, raw: &[u8], uses: &Uses) -> Result<(), Alien> {
        if !instruction.is_ip_rel_memory_operand() {
            self.out.bytes(raw);
            return Ok(());
        }
        let address = instruction.ip_rel_memory_address();
        if instruction.mnemonic() == Mnemonic::Lea {
            let number = number(instruction.op0_register())
                .filter(|_| instruction.op0_register().is_gpr64());
            self.out.constant(number.ok_or(Alien)?, address);
            return Ok(());
        }
        if instruction.memory_base() != Register::RIP {
            return Err(Alien);
        }
        let sum = self.sum(uses)?;
        self.out.constant(sum, address);
        let mut moved = *instruction;
        moved.set_memory_base(register(sum));
        moved.set_memory_displacement64(0);
        moved.set_memory_displ_size(0);
        self.encode(&moved)
    }

    /// Translates an instruction that transfers control.
    fn transfer(
        &mut self,
        instruction: &Instruction,
        raw: &[u8],
        exits: &mut Exits<'_>,
    ) -> Result<(), Alien> {
        self.give_back_all();
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
                come_back(out, addresses, exits.enter, Reason::Call, exits.nth);
            }
            _ => self.foretold(instruction, exits)?,
        }
        Ok(())
    }

    /// Translates calls, returns and indirect jumps such that the processor predicts returns as well as it
    /// does natively. A call stays a call; the program's return address then replaces its own. A return puts
    /// the landing's address in place of the program's and returns. The landing restores the program's.
    fn foretold(&mut self, instruction: &Instruction, exits: &mut Exits<'_>) -> Result<(), Alien> {
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
        exits.landings.push((next, self.out.at()));
        let other_return = self.stubs.landings[self.kind as usize].other_return;
        stubs::return_lands(&mut self.out, addresses, next, other_return);
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
    fn target_to_rcx(&mut self, instruction: &Instruction) -> Result<(), Alien> {
        self.last = bit(RCX) | bit(R11);
        stubs::borrow_jump(&mut self.out, self.addresses);
        self.load_target(instruction, RCX)
    }

    fn jump_to_rcx(&mut self) {
        self.out.store(self.addresses.target(), RCX);
        stubs::entry_of_rcx(&mut self.out, self.addresses.jumps(self.kind));
        self.out.bytes(&[0x41, 0xff, 0xe3]); // jmp r11
    }

    /// Loads the target of an indirect jump or call into a register.
    fn load_target(&mut self, instruction: &Instruction, number: u8) -> Result<(), Alien> {
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
        self.encode(&load.map_err(|_| Alien)?)
    }
}

/// Returns true if an instruction uses all vector registers without naming them.
fn is_of_all_vectors(instruction: &Instruction) -> bool {
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
fn is_plain(memory: &UsedMemory) -> bool {
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
