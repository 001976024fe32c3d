//! Copies a block of the program's code, with instructions in between that log where it accesses memory.
//!
//! A block is entered at its first instruction and left behind its last one. Its frame of the log has the
//! block's number and the registers that its addresses are made of; what else is known of its accesses is
//! known once and for all ([`Access`]). Two registers are borrowed for that, one for the frame and one for
//! sums; what the program has in them is in memory meanwhile, and comes back before any instruction that
//! uses them and at the block's end. Nothing touches flags or the program's stack.
//!
//! Counting copies ([`Kind::Counting`]) log nothing: each begins with one instruction that adds how many it has, in
//! vector register 15, which the program has in memory meanwhile, but in blocks that use it.
//!
//! What is not plainly the same when it is copied is not copied: the program does it by itself, natively.

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

/// Of a block at most, so that its parts have room ([`Cache::has_room`]).
pub const INSTRUCTIONS: u32 = 64;
/// Slots that one instruction may need, and a repeated one.
const SLOTS_OF_ONE: usize = 2;
const SLOTS_OF_REPEATED: usize = 5;

/// Copies blocks.
pub struct Translator {
    info: InstructionInfoFactory,
    encoder: Encoder,
    stubs: Stubs,
    taking: Taking,
}

/// Registers as bits.
type Set = u16;

fn bit(register: u8) -> Set {
    1 << register
}

/// The number of a general register, of whatever part of it.
fn number(register: Register) -> Option<u8> {
    register.is_gpr().then(|| register.full_register().number() as u8)
}

/// Registers that may be borrowed, those of short instructions first.
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

/// What an instruction does to registers.
struct Uses {
    used: Set,
    written: Set,
}

/// A block under construction.
struct Builder<'a> {
    out: Emitter,
    addresses: Addresses,
    kind: Kind,
    stubs: Stubs,
    encoder: &'a mut Encoder,
    accesses: &'a mut Vec<Access>,
    /// Borrowed for the frame, and for sums.
    frame: Option<u8>,
    sum: Option<u8>,
    /// Borrowed by what leaves the block.
    last: Set,
    /// Whether the program has its vector register 15 in a counting copy.
    has_vector: bool,
    slots: usize,
    /// By register: the slot that has its present value.
    logged: [Option<u8>; 16],
}

/// The instruction cannot be copied.
struct Alien;

/// What was copied, and where it is.
struct Copied {
    entry: usize,
    /// Of a logging copy: where its frames' first word is, a constant.
    taker: usize,
    /// Of what runs each time, and what runs once.
    code_end: (usize, usize),
    /// Of the program's code.
    end: u64,
    instructions: u32,
    watched: Option<Watched>,
}

/// At a place of a copy.
#[derive(Debug, Clone, Copy)]
pub struct Watched {
    /// The program's instruction whose copy is there.
    pub instruction: u64,
    /// Registers that are where spilled ones are ([`Area::spilled`]).
    ///
    /// [`Area::spilled`]: crate::area::Area::spilled
    borrowed: Set,
    /// Whether the vector register 15 is the program's.
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

    /// The page filters are others.
    pub fn look_at(&mut self, sides: Sides) {
        self.taking.sides = sides;
    }

    /// Copies the block at `pc`, whose bytes begin with `bytes`; its number, or none if its first instruction
    /// cannot be copied. The cache must have room.
    pub fn block(&mut self, cache: &mut Cache, pc: u64, bytes: &[u8]) -> Option<usize> {
        let first = cache.accesses.len();
        let copied = self.copy(cache, pc, bytes, None)?;
        let accesses = &cache.accesses[first..];
        let block = Block {
            start: pc,
            bytes: (copied.end - pc) as u32,
            instructions: copied.instructions,
            // SAFETY: within the list, or at its end, if there are none; it never moves.
            accesses: unsafe { cache.accesses.as_ptr().add(first) },
            access_count: accesses.len() as u32,
        };
        let number = cache.add(block, copied.entry, copied.code_end);
        if cache.kind == Kind::Logging {
            let taking = cache.take(&self.taking, number);
            // SAFETY: the constant that `prologue` has written, of a block that was not run yet.
            unsafe { (copied.taker as *mut u32).write_unaligned(taking as u32) };
        }
        Some(number)
    }

    /// The program's state in the copy of the block at `pc`, so many bytes behind its entry. The block is copied
    /// once more for that, behind all others.
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

    /// Copies a block to where the cache has room.
    fn copy(
        &mut self,
        cache: &mut Cache,
        pc: u64,
        bytes: &[u8],
        watched: Option<usize>,
    ) -> Option<Copied> {
        let nth = cache.blocks.len();
        // SAFETY: the cache has room, and only the thread in a burst, us, has the cache.
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

/// Takes the next frame; where there is none, comes back first. Returns the entry, and where the frame's first
/// word is, which is to be written.
fn prologue(
    out: &mut Emitter,
    once: &mut Emitter,
    addresses: Addresses,
    full: usize,
    nth: usize,
) -> (usize, usize) {
    // A short jump reaches no further.
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

/// Direct ways out of a block.
struct Exits<'a> {
    list: &'a mut Vec<Exit>,
    landings: &'a mut Vec<(u64, usize)>,
    /// Where code goes that is left for good once exits are linked.
    once: Emitter,
    enter: usize,
    nth: usize,
}

impl Exits<'_> {
    /// Leaves for an address of the program.
    fn jump(&mut self, out: &mut Emitter, addresses: Addresses, to: u64) {
        out.bytes(&[0xe9]);
        self.unlinked(out, addresses, to);
    }

    /// The distance of a jump that has been begun.
    fn unlinked(&mut self, out: &mut Emitter, addresses: Addresses, to: u64) {
        let at = out.at();
        out.relative(self.once.at());
        self.come_back(addresses, Exit { at, to });
    }

    /// Where an exit goes before it is linked.
    fn come_back(&mut self, addresses: Addresses, exit: Exit) {
        come_back(&mut self.once, addresses, self.enter, Reason::Direct, self.list.len());
        self.list.push(exit);
    }
}

fn is_repeated(instruction: &Instruction) -> bool {
    instruction.is_string_instruction()
        && (instruction.has_rep_prefix() || instruction.has_repne_prefix())
}

/// What is left to the program, or means something else where it is copied to.
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
    /// Copies an instruction; whether the block ends with it. Nothing of an alien one is left.
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

    /// What a counting copy does for an instruction.
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
        // One for each element, and one that finds no more.
        self.take_vector();
        let [before, after] = [0, 1].map(|nth| self.addresses.repeated(nth));
        self.out.store(before, RCX);
        self.out.count(before);
        self.copy(instruction, raw, uses)?;
        self.out.store(after, RCX);
        self.out.count_off(after);
        Ok(false)
    }

    /// The program's vector register is its own, until the next line takes it.
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

    /// Nothing is borrowed any more, of either side.
    fn give_back_all(&mut self) {
        self.give_back(Set::MAX);
        self.take_vector();
    }

    fn free(&self, uses: &Uses, other: Option<u8>) -> Option<u8> {
        let is_free = |number: &&u8| uses.used & bit(**number) == 0 && other != Some(**number);
        BORROWED.iter().find(is_free).copied()
    }

    /// Registers that are not the program's.
    fn borrowed(&self) -> Set {
        [self.frame, self.sum].into_iter().flatten().map(bit).sum::<Set>() | self.last
    }

    /// Gives the program its registers back.
    fn give_back(&mut self, which: Set) {
        for borrowed in [&mut self.frame, &mut self.sum] {
            if let Some(number) = borrowed.filter(|number| which & bit(*number) != 0) {
                self.out.load(number, self.addresses.spilled(number));
                *borrowed = None;
            }
        }
    }

    /// The register with the frame's place.
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

    /// A register for sums.
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

    /// The slot with a register's value.
    fn log(&mut self, number: u8, uses: &Uses) -> Result<u8, Alien> {
        let slot = self.slots as u8;
        if self.slots == SLOTS {
            return Err(Alien);
        }
        self.store_slot(slot, number, uses)?;
        self.slots += 1;
        Ok(slot)
    }

    /// Logs what is not known of an address.
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
        // Of a repeated instruction, what is known is the size of one element.
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

    /// The instruction itself; one relative to its own address gets that from a register.
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

    /// What goes somewhere else than to the next instruction.
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
                // LOOP and JRCXZ reach no further than their own opcode's next 127 bytes.
                out.bytes(&[raw[raw.len() - 2], 0]);
                let short = out.at();
                exits.jump(out, addresses, instruction.next_ip());
                let distance = out.at() - short;
                // SAFETY: the distance of the jump above; a way out takes 5 bytes.
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

    /// Calls, returns and indirect jumps, so that the processor foretells where returns go as it does natively: a
    /// call is one, whose return address is replaced by the program's; a return puts that of the landing in its
    /// place and returns, and the landing mends it.
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

    /// The target of an indirect jump or call; rcx and r11 are borrowed from here on.
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

    /// Where an indirect jump or call goes, into a register.
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

/// Whether an instruction means all vector registers without naming them.
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

/// Whether an address is a sum of general registers and a constant.
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
