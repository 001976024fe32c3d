//! Translates a basic block of the program: its instructions, and others between them that log the accesses.
//!
//! A block is entered at its first instruction and left after its last one. Its frame of the log has the
//! address of the code that takes it, and the registers that the block's addresses consist of. All else about
//! the accesses is fixed at translation ([`LoggedAccess`]). A translation borrows two registers: one for the
//! frame's place, one for sums. The program's values are in memory meanwhile. They are restored before each
//! instruction that uses them and at the block's end. Nothing changes flags or the program's stack.
//!
//! Counting translations ([`CacheKind::Counting`]) log nothing. Each begins with one instruction that adds
//! the number of the block's instructions to vector register 15. The program's value of that register is in
//! memory meanwhile, except in blocks that use it.
//!
//! An instruction that may behave differently elsewhere is not translated: the program executes it natively.

mod builder;
mod classify;
mod exits;
mod registers;

use crate::cache::{Block, CacheKind, CodeCache};
use crate::emit::{Emitter, RCX};
use crate::log_drain::LogDrain;
use crate::recorder::Sides;
use crate::stubs::Stubs;
use crate::thread_state::{Addresses, SLOTS};
use iced_x86::{Decoder, DecoderOptions, Encoder, Instruction, InstructionInfoFactory};

use builder::{BlockBuilder, Untranslatable};
use classify::{is_repeated, is_untranslatable};
use exits::ExitEmitter;
use registers::{RegisterSet, bit};

/// The most instructions of a block, so that [`CodeCache::has_room`] can guarantee room for its parts.
pub const INSTRUCTIONS: u32 = 64;
/// The slots that an instruction may need, and those that a repeated one may need.
const SLOTS_OF_ONE: usize = 2;
const SLOTS_OF_REPEATED: usize = 5;

/// Translates basic blocks.
pub struct Translator {
    info: InstructionInfoFactory,
    encoder: Encoder,
    stubs: Stubs,
    log_drain: LogDrain,
}

/// A new translation and its place.
struct Translation {
    entry: usize,
    /// The address of the constant that goes into a frame's first word; 0 in counting translations.
    taker: usize,
    /// The ends of the code that runs each time, and of the code that runs once.
    code_end: (usize, usize),
    /// The end of the block in the program's code.
    end: u64,
    instructions: u32,
    watched: Option<ProgramState>,
}

/// The program's state at a place of a translation.
#[derive(Debug, Clone, Copy)]
pub struct ProgramState {
    /// The address of the program's instruction that is translated there.
    pub instruction: u64,
    /// Registers whose values are in [`ThreadState::spilled`].
    ///
    /// [`ThreadState::spilled`]: crate::thread_state::ThreadState::spilled
    borrowed: RegisterSet,
    /// True if vector register 15 has the program's value.
    pub has_vector: bool,
}

impl ProgramState {
    pub fn borrowed(self) -> impl Iterator<Item = u8> {
        (0..16).filter(move |number| self.borrowed & bit(*number) != 0)
    }
}

impl Translator {
    pub fn new(stubs: Stubs, log_drain: LogDrain) -> Translator {
        let (info, encoder) = (InstructionInfoFactory::new(), Encoder::new(64));
        Translator { info, encoder, stubs, log_drain }
    }

    /// Sets the page filters for the blocks to come.
    pub fn set_filters(&mut self, sides: Sides) {
        self.log_drain.sides = sides;
    }

    /// Translates the block at `pc`, whose code begins with `bytes`. Returns its number, or none if its first
    /// instruction cannot be translated. The cache must have room.
    pub fn block(&mut self, cache: &mut CodeCache, pc: u64, bytes: &[u8]) -> Option<usize> {
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
        if cache.kind == CacheKind::Logging {
            let log_drain = cache.take(&self.log_drain, number);
            // SAFETY: the constant that `prologue` has written, in a block that has not run yet.
            unsafe { (copied.taker as *mut u32).write_unaligned(log_drain as u32) };
        }
        Some(number)
    }

    /// Returns the program's state `place` bytes after the entry of the translation of the block at `pc`.
    /// Translates the block once more for that, after all others, and discards the result.
    pub fn state_at(
        &mut self,
        cache: &mut CodeCache,
        pc: u64,
        bytes: &[u8],
        place: usize,
    ) -> Option<ProgramState> {
        let (accesses, exits, return_stubs) =
            (cache.accesses.len(), cache.exits.len(), cache.return_stubs.len());
        let copied = self.copy(cache, pc, bytes, Some(place));
        cache.accesses.truncate(accesses);
        cache.exits.truncate(exits);
        cache.return_stubs.truncate(return_stubs);
        copied?.watched
    }

    /// Translates a block into the cache's free room. `watched` is an offset to report the state at.
    fn copy(
        &mut self,
        cache: &mut CodeCache,
        pc: u64,
        bytes: &[u8],
        watched: Option<usize>,
    ) -> Option<Translation> {
        let nth = cache.blocks.len();
        // SAFETY: the cache has room, and only the thread in a burst, this one, uses the cache.
        let (mut out, mut once) =
            unsafe { (Emitter::new(cache.next), Emitter::new(cache.next_once)) };
        let is_logging = cache.kind == CacheKind::Logging;
        let (entry, taker) = match cache.kind {
            CacheKind::Logging => {
                prologue(&mut out, &mut once, cache.addresses, self.stubs.full, nth)
            }
            CacheKind::Counting => {
                out.count(cache.addresses.count(0));
                (cache.next, 0)
            }
        };
        let mut builder = BlockBuilder {
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
        let mut exits = ExitEmitter {
            list: &mut cache.exits,
            return_stubs: &mut cache.return_stubs,
            once,
            enter,
            nth,
        };
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
                    || is_untranslatable(&instruction);
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
                            found = Some(ProgramState { instruction, borrowed, has_vector });
                        }
                        count += 1;
                        end = instruction.next_ip();
                        if ends {
                            break;
                        }
                        continue;
                    }
                    Err(Untranslatable) => builder.accesses.truncate(known),
                }
            }
            if count == 0 {
                return None;
            }
            builder.restore_all();
            exits.jump(&mut builder.out, builder.addresses, end);
            break;
        }
        if !is_logging {
            // SAFETY: the displacement of the block's first instruction, which has 9 bytes.
            unsafe { ((entry + 5) as *mut u32).write_unaligned(cache.addresses.count(count)) };
        }
        let code_end = (builder.out.at(), exits.once.at());
        Some(Translation { entry, taker, code_end, end, instructions: count, watched: found })
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
