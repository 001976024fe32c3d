//! Bursts: after its timer's signal a thread goes on in translations of its code, for a while.
//!
//! Invariants. One thread at a time is in translated code. `Area::owner` names it, and it alone uses
//! [`Engine`]. Translated code runs with all signals blocked, so no handler of the program ever sees an
//! address in it. A burst ends early when a signal is pending and when an instruction faults ([`faults`]). It
//! ends between two instructions of the program, by rt_sigreturn(2). All registers and the signal mask are
//! then the program's, as if there had been no burst.

mod way;

use crate::area::{self, Area, Context, FRAMES, RIP, Reason, SLOTS, STATE_BYTES, State};
use crate::cache::{Cache, Kind};
use crate::calls::{self, Decision};
use crate::emit::Emitter;
use crate::faults;
use crate::heap;
use crate::maps::Maps;
use crate::recorder::{Phase, Recorder, SLOW};
use crate::status::{self, Inside, Off, catch, status};
use crate::stubs::{self, Stubs};
use crate::system;
use crate::taking::{self, ROUNDS, Taking};
use crate::threads::{self, Polls, Sent, THREADS};
use crate::translate::{INSTRUCTIONS, Translator};
use std::arch::asm;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering::*};
use way::{Pace, Way};

/// The length of bursts and the share of time that they take.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// The length of a warm-up, in instructions, until the consumer knows how long TLBs take to fill. The
    /// consumer sets the length before a burst: if the burst's own misses ended the warm-up, counting would
    /// begin where misses are frequent.
    pub warm: u64,
    /// A divisor: a warm-up longer than `warm` has at most 1/`warm_share` of the instructions of all bursts
    /// so far.
    pub warm_share: u64,
    /// A divisor: the counted part has 1/`counted_part` of the instructions of the warm-up.
    pub counted_part: u64,
    /// The share of the time that bursts take, in percent.
    pub share: u64,
    /// The longest interval between two polls of the counting translations' counter, in ns. The interval
    /// shrinks to `close_ns` when a burst is near.
    pub poll_ns: u64,
    pub close_ns: u64,
    /// The schedule of stress tests, in place of the one above.
    pub stress: Option<Stress>,
}

/// A schedule for stress tests: many short bursts of random length.
#[derive(Debug, Clone, Copy)]
pub struct Stress {
    /// The upper limit of a burst's length, in instructions.
    pub counted: u64,
    /// The time that a thread runs natively after each burst, in ns.
    pub gap_ns: u64,
    /// The instructions to run in counting translations before each burst, at least; 0: none.
    pub between: u64,
    /// The number of returns from translated code until the engine panics; 0: it never does.
    pub panic_at: u64,
}

/// The state of the thread that owns the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Out,
    /// In counting translations, until the next burst.
    Between,
    Warming,
    Counted,
}

/// The CPU time that a thread runs natively before it returns to translated code.
const AWAY_NS: u64 = 1_000_000;

/// Reasons why a burst ended, or did not begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    Done,
    Call,
    Code,
    Signal,
    Fault,
    Handler,
}

/// A system call that the engine makes in a burst.
#[derive(Debug, Clone, Copy, Default)]
struct Pending {
    next: u64,
    unmaps: Option<(u64, u64)>,
}

/// The state of the thread in translated code.
pub struct Engine {
    pub area: &'static mut Area,
    /// The caches of logging and of counting translations, by [`Kind`].
    caches: [Cache; 2],
    kind: Kind,
    translator: Translator,
    maps: Maps,
    recorder: Recorder,
    plan: Plan,
    stubs: Stubs,
    taking: Taking,
    polls: Option<Polls>,
    /// The signal frames, by thread number.
    frames: *mut Frame,
    stage: Stage,
    /// Instructions that are left of the stage, and that it has executed.
    left: i64,
    had: u64,
    /// Instructions of all bursts, and of counting translations.
    total: u64,
    between: u64,
    pace: Pace,
    /// The thread's CPU time when it last entered counting translations or was polled there.
    between_ns: u64,
    /// The distances to the next burst, by thread number.
    ways: Vec<Way>,
    pending: Pending,
    began_ns: u64,
    mean_ns: u64,
    /// The length of the burst's warm-up, in instructions.
    warm: u64,
    luck: u64,
    /// The address at which the program can go on natively with the area's context. None in the middle of a
    /// block.
    safe: Option<u64>,
    /// The number of returns from translated code; a test's [`Stress::panic_at`] needs it.
    came_back: u64,
}

/// A thread's own signal frame. The thread leaves translated code by returning from it.
#[repr(C)]
struct Frame {
    state: State,
    context: Context,
}

static ENGINE: AtomicPtr<Engine> = AtomicPtr::new(ptr::null_mut());
static OWNER: AtomicPtr<Area> = AtomicPtr::new(ptr::null_mut());
/// True if another thread waits for the engine.
static WANTED: AtomicBool = AtomicBool::new(false);
/// True if the thread in translated code is to be cancelled.
static IS_CANCELLED: AtomicBool = AtomicBool::new(false);
/// An owner that is no thread's id: the engine is closed.
const NOBODY: u32 = u32::MAX;

/// The CPU time until the program's first burst.
pub const FIRST_GAP_NS: u64 = 5_000_000;

/// The AMX tile state (XTILECFG, XTILEDATA), which is not saved: no translated instruction uses it.
const TILES: u64 = 3 << 17;

impl Engine {
    /// Creates the engine: its memory, stubs and caches. Returns an error if this machine does not allow
    /// that.
    pub fn start(recorder: Recorder, plan: Plan) -> Result<(), Off> {
        let (area, addresses, code) = area::make().ok_or(Off::NoMemory)?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let bytes = THREADS * size_of::<Frame>();
        let frames = system::map(bytes, protection, libc::MAP_32BIT).ok_or(Off::NoMemory)?;
        const AVX: u64 = 4;
        let state = enabled_state().filter(|state| state & AVX != 0).ok_or(Off::NoAvx)? & !TILES;
        // SAFETY: the code's part of the area is ours, and longer than the stubs.
        let mut out = unsafe { Emitter::new(code.start) };
        let taking = taking::make(&mut out, addresses, recorder.sides(), SLOW);
        taking.ends_full(area);
        let stubs = stubs::make(&mut out, addresses, state, taking.take, dispatch);
        let start = out.at().next_multiple_of(64);
        let middle = ((start + code.end) / 2).next_multiple_of(64);
        let mut caches = [
            Cache::new(Kind::Logging, addresses, start..middle),
            Cache::new(Kind::Counting, addresses, middle..code.end),
        ];
        caches.iter_mut().for_each(|cache| cache.clear(area, &stubs));
        OWNER.store(area, Release);
        let engine = Engine {
            area,
            caches,
            kind: Kind::Logging,
            translator: Translator::new(stubs, taking),
            maps: Maps::new(),
            recorder,
            plan,
            stubs,
            taking,
            polls: None,
            frames: frames as *mut Frame,
            stage: Stage::Out,
            left: 0,
            had: 0,
            total: 0,
            between: 0,
            pace: Pace::default(),
            between_ns: 0,
            ways: vec![Way::default(); THREADS],
            pending: Pending::default(),
            began_ns: 0,
            mean_ns: 2_000_000,
            warm: 0,
            luck: system::now_ns(libc::CLOCK_MONOTONIC) | 1,
            safe: None,
            came_back: 0,
        };
        ENGINE.store(Box::into_raw(Box::new(engine)), Release);
        Ok(())
    }

    fn draw(&mut self, below: u64) -> u64 {
        self.luck ^= self.luck << 13;
        self.luck ^= self.luck >> 7;
        self.luck ^= self.luck << 17;
        self.luck % below.max(1)
    }

    /// Begins with a thread that its timer has stopped at `pc`.
    fn begin(&mut self, pc: u64) {
        if faults::are_of_calls() || threads::has_shadow_stack() {
            self.leave(pc, Why::Handler);
        }
        self.look_at_maps();
        self.area.fs = threads::fs_base();
        self.know_thread();
        self.went_natively();
        self.begin_stage();
        self.go(pc);
    }

    /// Evicts all translations if some of the code that they come from has been unmapped.
    fn look_at_maps(&mut self) {
        if !self.maps.look() {
            self.caches.iter_mut().for_each(|cache| cache.clear(self.area, &self.stubs));
        }
    }

    /// Enters counting translations, or a burst if one is due.
    fn begin_stage(&mut self) {
        let is_between = match self.plan.stress {
            Some(stress) => stress.between > 0 && self.stage == Stage::Out,
            None => !self.is_close(),
        };
        if is_between {
            return self.enters(Stage::Between, 0);
        }
        self.began_ns = system::now_ns(libc::CLOCK_MONOTONIC);
        self.recorder.begin(self.area.thread);
        match self.plan.stress {
            Some(stress) => {
                let length = self.draw(stress.counted);
                self.enters(Stage::Counted, length);
            }
            None => {
                let at_most = self.plan.warm.max(self.total / self.plan.warm_share);
                self.warm = match self.recorder.warm_up() {
                    0 => self.plan.warm,
                    length => length.min(at_most),
                };
                // The counted part begins at the instruction that was drawn.
                let early = self.way().left.max(0) as u64;
                self.enters(Stage::Warming, early + self.warm);
            }
        }
    }

    /// Enters a stage of at most `instructions` instructions.
    fn enters(&mut self, stage: Stage, instructions: u64) {
        let before = std::mem::replace(&mut self.stage, stage);
        (self.left, self.had) = (instructions as i64, 0);
        self.kind = if stage == Stage::Between { Kind::Counting } else { Kind::Logging };
        let is_over = matches!(stage, Stage::Out | Stage::Between);
        if is_over && matches!(before, Stage::Counted | Stage::Warming) {
            self.recorder.phase(Phase::Skipped, 0);
        }
        match stage {
            Stage::Out => {}
            Stage::Between => {
                self.area.counter = 0;
                self.between_ns = system::now_ns(libc::CLOCK_THREAD_CPUTIME_ID);
                self.stop_counting(false);
                let next_ns = self.next_poll_ns();
                self.polls = Some(Polls::start(next_ns));
            }
            Stage::Warming => self.recorder.phase(Phase::Warming, 0),
            Stage::Counted => {
                let gap = self.weigh();
                self.recorder.phase(Phase::Counted, gap);
            }
        }
        self.empty_log();
    }

    fn empty_log(&mut self) {
        self.area.position = (FRAMES * SLOTS * 8) as u64;
        // No block has more than INSTRUCTIONS instructions.
        let rounds = self.left / (FRAMES as i64 * i64::from(INSTRUCTIONS));
        self.area.rounds = rounds.clamp(1, i64::from(ROUNDS)) as u32;
    }

    /// Sets whether the next counting block traps.
    fn stop_counting(&mut self, stop: bool) {
        stop_counting(self.area, stop);
    }

    fn cache(&mut self) -> &mut Cache {
        &mut self.caches[self.kind as usize]
    }

    /// Goes on in the translation of `pc`, or natively if it cannot be translated.
    fn go(&mut self, pc: u64) {
        match self.block(pc) {
            Some(number) => self.resume(number),
            None => self.leave(pc, Why::Code),
        }
    }

    fn resume(&mut self, number: usize) {
        let entry = self.cache().entry(number) as u64;
        (self.area.resume, self.area.resume_counting) = match self.kind {
            Kind::Logging => (entry, 0),
            Kind::Counting => (self.stubs.counting.resume as u64, entry),
        };
    }

    fn block(&mut self, pc: u64) -> Option<usize> {
        if let Some(number) = self.cache().find(pc) {
            return Some(number);
        }
        let bytes = self.maps.code_at(pc)?;
        if !self.cache().has_room() {
            self.take_log();
            self.caches[self.kind as usize].clear(self.area, &self.stubs);
        }
        self.translator.block(&mut self.caches[self.kind as usize], pc, bytes)
    }

    /// Sends the log to the recorder and empties it.
    fn take_log(&mut self) {
        if self.kind == Kind::Counting {
            return;
        }
        let from = (self.area.position as usize / (8 * SLOTS)).max(1);
        let counts = self.taking.take(self.area, from);
        let count = self.recorder.took(counts);
        self.left -= count as i64;
        self.had += count;
        self.total += count;
        status().instructions.store(self.total, Relaxed);
        if self.stage == Stage::Warming {
            self.way().gone += count;
        }
        self.empty_log();
    }

    /// Enters the next stage if this one is complete. Returns the reason if the burst is over.
    fn is_over(&mut self) -> Option<Why> {
        let is_done = self.left <= 0;
        match self.stage {
            Stage::Warming if is_done => {
                self.enters(Stage::Counted, self.warm / self.plan.counted_part)
            }
            Stage::Counted if is_done => return Some(Why::Done),
            _ => {}
        }
        self.must_leave().then_some(Why::Signal)
    }

    fn must_leave(&mut self) -> bool {
        threads::waiting_signals() & !self.area.context.mask != 0
            || status::is_closing()
            || IS_CANCELLED.load(Relaxed)
    }

    /// Handles a poll: a counting translation trapped at the start of block `number`.
    fn poll(&mut self, number: usize) {
        let pc = self.cache().blocks[number].start;
        self.take_count();
        self.stop_counting(false);
        if self.must_leave() || WANTED.swap(false, Relaxed) {
            self.leave(pc, Why::Signal);
        }
        let is_over = match self.plan.stress {
            Some(stress) => self.had > stress.between,
            None => self.is_close(),
        };
        if is_over {
            self.end_polls();
            self.begin_stage();
        } else {
            let next_ns = self.next_poll_ns();
            if let Some(polls) = &self.polls {
                polls.next(next_ns);
            }
        }
        self.go(pc);
    }

    fn end_polls(&mut self) {
        if let Some(polls) = self.polls.take() {
            polls.end();
        }
    }

    /// Ends a complete burst and draws the next one.
    fn done(&mut self, pc: u64) {
        self.take_log();
        ended(Why::Done);
        self.draw_way();
        if self.plan.stress.is_some_and(|stress| stress.between == 0) {
            self.leave(pc, Why::Done);
        }
        self.enters(Stage::Between, 0);
        self.go(pc);
    }

    fn direct(&mut self, exit: usize) {
        let to = self.cache().exits[exit].to;
        let before = self.cache().blocks.len();
        self.go(to);
        let cache = self.cache();
        // Unless `go` has cleared the cache, this exit with it.
        if let Some(number) = cache.find(to).filter(|_| cache.blocks.len() >= before) {
            cache.link(exit, number);
        }
    }

    fn indirect(&mut self, is_return: bool) {
        let to = self.area.target;
        self.go(to);
        let (cache, area) = (&mut self.caches[self.kind as usize], &mut *self.area);
        match cache.find(to) {
            _ if is_return => cache.return_lands(area, to),
            Some(number) => cache.jump_lands(area, number),
            None => {}
        }
    }

    fn full(&mut self, number: usize) {
        let pc = self.cache().blocks[number].start;
        self.take_log();
        match self.is_over() {
            Some(Why::Done) => self.done(pc),
            Some(why) => self.leave(pc, why),
            None => self.resume(number),
        }
    }

    fn before_call(&mut self, number: usize) {
        let block = self.cache().blocks[number];
        let next = block.start + u64::from(block.bytes);
        self.pending = Pending { next, unmaps: None };
        if calls::asks_for_large_pages(&self.area.context) {
            self.expect_large();
        }
        match calls::decide(&self.area.context, &self.maps) {
            Decision::Leave => self.leave(next - 2, Why::Call),
            Decision::Run => self.make_call(),
            Decision::Unmap(range) => {
                self.pending.unmaps = Some((range.start, range.end - range.start));
                self.make_call();
            }
            Decision::Try(place) => {
                let argument = self.area.context.registers[place];
                self.area.context.registers[place] = 0;
                let result = calls::make(&self.area.context);
                self.area.context.registers[place] = argument;
                match result {
                    0 if argument != 0 => self.leave(next - 2, Why::Call),
                    _ => self.called(result),
                }
            }
        }
    }

    fn make_call(&mut self) {
        let result = calls::make(&self.area.context);
        self.called(result);
    }

    /// Completes a system call with `result`. Sets rcx and r11 as the syscall instruction does.
    fn called(&mut self, result: i64) {
        let registers = &mut self.area.context.registers;
        registers[calls::RAX] = result as u64;
        registers[R11] = registers[area::FLAGS];
        registers[RCX] = self.pending.next;
        self.safe = Some(self.pending.next);
        self.after_call();
    }

    /// Makes the code that takes logs check the filter of large pages, too.
    fn expect_large(&mut self) {
        self.take_log();
        if self.recorder.expect_large() {
            self.translator.look_at(self.recorder.sides());
            self.caches[Kind::Logging as usize].clear(self.area, &self.stubs);
        }
    }

    fn after_call(&mut self) {
        let Pending { next, unmaps } = self.pending;
        let result = self.area.context.registers[calls::RAX] as i64;
        if let (Some((start, length)), true, Kind::Logging) = (unmaps, result >= 0, self.kind) {
            self.take_log();
            self.recorder.gone(start, length);
        }
        // The kernel has sent SIGPIPE or SIGXFSZ, which must be delivered now.
        if [-i64::from(libc::EPIPE), -i64::from(libc::EFBIG)].contains(&result) {
            self.leave(next, Why::Signal);
        }
        if self.must_leave() {
            self.leave(next, Why::Signal);
        }
        self.go(next);
    }

    /// Handles a fault of a translated instruction: the program repeats the instruction natively.
    fn fault(&mut self, is_known: bool) {
        let at = self.area.target as usize;
        let copy = self.cache().copy_at(at);
        if let (Some((number, 0)), Kind::Counting) = (copy, self.kind) {
            if is_known {
                self.safe = Some(self.cache().blocks[number].start);
                return self.poll(number);
            }
            self.area.resume = self.stubs.counting.fault as u64;
            return;
        }
        let state = copy.and_then(|(number, place)| {
            let start = self.cache().blocks[number].start;
            let bytes = self.maps.code_at(start)?;
            let cache = &mut self.caches[self.kind as usize];
            self.translator.state_at(cache, start, bytes, place)
        });
        let is_ours = state.is_none_or(|state| !state.has_vector);
        if self.kind == Kind::Counting && is_ours && !is_known {
            self.area.resume = self.stubs.counting.fault as u64;
            return;
        }
        let Some(state) = state else {
            // The fault was not in a translation: let the program's handler have it.
            faults::stand_back(faulted);
            self.area.resume = at as u64;
            return;
        };
        for number in state.borrowed().map(usize::from) {
            self.area.context.registers[area::PLACES[number]] = self.area.spilled[number];
        }
        self.safe = Some(state.instruction);
        // The block has not filled its frame: drop the frame.
        self.area.position += 8 * SLOTS as u64;
        self.leave(state.instruction, Why::Fault);
    }

    /// Ends the burst. The program goes on at `pc`, natively.
    fn leave(&mut self, pc: u64, why: Why) -> ! {
        match self.stage {
            Stage::Out => {}
            Stage::Between => self.take_count(),
            Stage::Warming | Stage::Counted => self.take_log(),
        }
        if why != Why::Done && self.stage != Stage::Between {
            ended(why);
        }
        if why != Why::Done && self.stage == Stage::Counted {
            self.draw_way();
        }
        self.end_polls();
        self.enters(Stage::Out, 0);
        let thread = self.area.thread;
        self.way().since_ns = system::now_ns(libc::CLOCK_THREAD_CPUTIME_ID);
        // Until the program has its own alternative stack again, no timer may fire.
        threads::block_signals();
        threads::next_burst(thread, self.plan.stress.map_or(AWAY_NS, |stress| stress.gap_ns));
        self.depart(pc)
    }

    /// Lets the program go on at `pc`, natively. Its signals stay blocked until then.
    fn depart(&mut self, pc: u64) -> ! {
        self.area.context.registers[RIP] = pc;
        faults::stand_back(faulted);
        if IS_CANCELLED.swap(false, Relaxed) {
            threads::cancel_again();
        }
        // SAFETY: there is a frame for each thread number, and only this thread uses this one.
        let frame = unsafe { &mut *self.frames.add(self.area.thread as usize) };
        let bytes = self.area.state_bytes;
        frame.context = self.area.context;
        frame.context.state = &raw const frame.state as u64;
        frame.state.0[..bytes].copy_from_slice(&self.area.state.0[..bytes]);
        // SAFETY: rt_sigreturn takes the context that the kernel gave us, with other values of registers.
        // Once `owner` is 0, another thread may use all of the area, the stack too. Only this thread's frame
        // is safe.
        unsafe {
            asm!(
                "mov rsp, {context}",
                "mov dword ptr [{owner}], 0",
                "mov eax, 15",
                "syscall",
                "ud2",
                context = in(reg) &raw const frame.context,
                owner = in(reg) self.area.owner.as_ptr(),
                options(noreturn)
            )
        }
    }
}

/// Indices into [`Context::registers`].
const R11: usize = area::PLACES[11];
const RCX: usize = area::PLACES[1];

/// Counts a burst that has ended or did not begin.
fn ended(why: Why) {
    status().ends[why as usize].fetch_add(1, Relaxed);
}

impl Engine {
    /// Decides where translated code goes on after it returned control.
    fn dispatch(&mut self) {
        let (reason, number) = (self.area.reason, self.area.number as usize);
        self.safe = self.program_at(reason, number);
        if let (true, Some(pc)) = (status::has_failed(), self.safe) {
            self.give_up(pc);
        }
        self.came_back += 1;
        if self.plan.stress.is_some_and(|stress| stress.panic_at == self.came_back) {
            panic!("asked for by a test");
        }
        match reason {
            _ if heap::is_short() => panic!("no memory is left for the engine"),
            reason if reason == Reason::Begin as u32 => self.begin(self.area.target),
            reason if reason == Reason::Direct as u32 => self.direct(number),
            reason if reason == Reason::Indirect as u32 => self.indirect(false),
            reason if reason == Reason::Return as u32 => self.indirect(true),
            reason if reason == Reason::Full as u32 => self.full(number),
            reason if reason == Reason::Call as u32 => self.before_call(number),
            reason if reason == Reason::Fault as u32 => self.fault(false),
            reason if reason == Reason::FaultKnown as u32 => self.fault(true),
            _ => unreachable!("a copy came back for no reason"),
        }
    }

    /// Returns where the program is when translated code returns control. None in the middle of a block.
    fn program_at(&self, reason: u32, number: usize) -> Option<u64> {
        let cache = &self.caches[self.kind as usize];
        let block = || cache.blocks.get(number);
        match reason {
            reason if reason == Reason::Direct as u32 => {
                cache.exits.get(number).map(|exit| exit.to)
            }
            reason if reason == Reason::Full as u32 => block().map(|block| block.start),
            reason if reason == Reason::Call as u32 => {
                block().map(|block| block.start + u64::from(block.bytes) - 2)
            }
            reason
                if [Reason::Begin, Reason::Indirect, Reason::Return]
                    .map(|of| of as u32)
                    .contains(&reason) =>
            {
                Some(self.area.target)
            }
            _ => None,
        }
    }

    /// Recovers from a panic. The program goes on natively, now or at the next return of its translated code.
    fn recover(&mut self) {
        stop_counting(self.area, false);
        if let Some(pc) = self.safe {
            self.give_up(pc);
        }
        let at = self.area.target;
        (self.area.resume, self.area.resume_counting) = match self.area.reason {
            reason if reason == Reason::FaultKnown as u32 => {
                (self.stubs.counting.resume as u64, at)
            }
            _ => (at, at),
        };
    }

    /// Lets the program go on at `pc` and records nothing more.
    fn give_up(&mut self, pc: u64) -> ! {
        self.end_polls();
        threads::block_signals();
        self.depart(pc)
    }
}

/// Receives control from translated code, by way of the stubs.
extern "C" fn dispatch() {
    let engine = ENGINE.load(Acquire);
    // SAFETY: the thread in the burst owns the engine, and the second use begins after the first has ended.
    unsafe {
        if catch(|| (*engine).dispatch()).is_none() {
            (*engine).recover();
        }
    }
}

/// Makes the next counting block trap, or lets it run: protects the page that it reads.
fn stop_counting(area: *const Area, stop: bool) {
    // SAFETY: takes only the address of a field.
    let counts = unsafe { &raw const (*area).counts } as usize;
    let protection = if stop { libc::PROT_NONE } else { libc::PROT_READ } as usize;
    let arguments = [counts, size_of::<area::Counts>(), protection, 0, 0, 0];
    // SAFETY: only counting translations read this page, and we handle their faults.
    unsafe { system::call(libc::SYS_mprotect, arguments) };
}

/// Handles the signal of our timers.
pub extern "C" fn handler(
    _signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: the kernel passes both to handlers, the context at least as long as ours.
    let (sent, context) = unsafe { (threads::sent(info), &mut *context.cast::<Context>()) };
    let area = OWNER.load(Acquire);
    if area.is_null() {
        return;
    }
    // SAFETY: touches only the owner's field, an atomic.
    let owner = unsafe { &(*area).owner };
    let is_in_copies = owner.load(Relaxed) == system::thread();
    match sent {
        Some(Sent::Poll) if is_in_copies => {
            faults::stand_in(faulted);
            stop_counting(area, true);
        }
        Some(Sent::Begin(thread)) if !is_in_copies => {
            let inside = Inside::enter();
            if inside.is_some() && catch(|| came(area, owner, context, thread)).is_none() {
                let _ = owner.compare_exchange(system::thread(), 0, Release, Relaxed);
            }
        }
        _ => {}
    }
}

/// Makes the calling thread leave translated code soon. Returns false if it runs natively.
pub fn leaves_soon() -> bool {
    let area = OWNER.load(Acquire);
    // SAFETY: touches only the owner's field, an atomic.
    let is_in_copies =
        !area.is_null() && unsafe { (*area).owner.load(Relaxed) } == system::thread();
    if is_in_copies {
        IS_CANCELLED.store(true, Relaxed);
        faults::stand_in(faulted);
        stop_counting(area, true);
    }
    is_in_copies
}

/// Handles a thread's timer: a burst begins when the handler returns, unless another thread is in one.
fn came(area: *mut Area, owner: &AtomicU32, context: &mut Context, thread: u32) {
    if context.is_on_alternative_stack() {
        // Our signal stack cannot replace the alternative stack while the program uses it.
        ended(Why::Signal);
        return threads::next_burst(thread, AWAY_NS);
    }
    if owner.compare_exchange(0, system::thread(), Acquire, Relaxed).is_err() {
        WANTED.store(true, Relaxed);
        return threads::next_burst(thread, 1);
    }
    // SAFETY: the area is ours now.
    if unsafe { take_over(&mut *area, context, thread) }.is_none() {
        owner.store(0, Release);
    }
}

/// Replaces the program's handlers of faults while there is a burst.
extern "C" fn faulted(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let area = OWNER.load(Acquire);
    // SAFETY: touches only the owner's field, an atomic; there is an area because there was a burst.
    if unsafe { (*area).owner.load(Relaxed) } != system::thread() {
        return faults::hand_on(signal, info, context);
    }
    // SAFETY: the kernel passes both to handlers. This thread is in the burst, so the area is its own.
    let (area, context, code) =
        unsafe { (&mut *area, &mut *context.cast::<Context>(), (*info).si_code) };
    if code <= 0 {
        // A process has sent the signal. It stays pending until the burst is over, which is soon.
        context.mask |= 1 << (signal - 1);
        return faults::send_again(signal, info);
    }
    area.target = context.registers[RIP];
    area.reason = Reason::Fault as u32;
    // SAFETY: the engine was written once, before the first timer.
    context.registers[RIP] = unsafe { (*ENGINE.load(Acquire)).stubs.enter as u64 };
}

/// Makes the thread go on in a burst. Returns none if the kernel saved extended state in an unknown form.
unsafe fn take_over(area: &mut Area, context: &mut Context, thread: u32) -> Option<()> {
    const MAGIC: u32 = 0x4650_5853;
    let state = context.state as *const u8;
    if state.is_null() {
        return None;
    }
    // SAFETY: the legacy part of the state has 512 bytes. Its reserved bytes give the size of the rest.
    let (magic, bytes) = unsafe {
        let at = state.add(464).cast::<u32>();
        (at.read_unaligned(), at.add(1).read_unaligned() as usize)
    };
    if magic != MAGIC || bytes > STATE_BYTES {
        return None;
    }
    // SAFETY: the kernel says that so many bytes are there.
    unsafe { ptr::copy_nonoverlapping(state, area.state.0.as_mut_ptr(), bytes) };
    // SAFETY: the engine was written once, before the first timer.
    let enter = unsafe { (*ENGINE.load(Acquire)).stubs.enter };
    let mask = !(faults::stand_in(faulted) | threads::signal_bit());
    area.context = *context;
    let [_, flags, stack_bytes] = &mut area.context.stack;
    if *stack_bytes == 0 {
        // The kernel may report a stack of no bytes as enabled, but does not accept one.
        *flags = libc::SS_DISABLE as u64;
    }
    area.state_bytes = bytes;
    area.target = context.registers[RIP];
    area.reason = Reason::Begin as u32;
    area.thread = thread;
    context.registers[RIP] = enter as u64;
    context.mask = mask;
    // The program's stack may be too small for a signal frame. And while we run on our own stack, the kernel
    // would deliver signals on the program's alternative stack, which is in use.
    let signal_stack = &raw const area.signal_stack;
    context.stack = [signal_stack as u64, 0, size_of_val(&area.signal_stack) as u64];
    Some(())
}

/// Returns XCR0, the processor's enabled state components. None without XSAVE.
fn enabled_state() -> Option<u64> {
    let has_xsave = std::arch::x86_64::__cpuid(1).ecx & 1 << 27 != 0;
    if !has_xsave {
        return None;
    }
    let (low, high): (u32, u32);
    // SAFETY: allowed where the system uses XSAVE.
    unsafe { asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high) };
    Some(u64::from(high) << 32 | u64::from(low))
}

/// Closes the engine: waits until no thread is in translated code and the consumer has read all records.
pub fn close() {
    let (area, engine) = (OWNER.load(Acquire), ENGINE.load(Acquire));
    if area.is_null() || engine.is_null() || !threads::is_ours() {
        return;
    }
    status::close_soon();
    // getppid(2) ends the burst if we are in one, as no burst makes this call.
    // SAFETY: touches no memory.
    unsafe { system::call(libc::SYS_getppid, [0; 6]) };
    for nth in 0..TRIES {
        // SAFETY: touches only the owner's field, an atomic.
        let owner = unsafe { &(*area).owner };
        if owner.compare_exchange(0, NOBODY, Acquire, Relaxed).is_ok() {
            // SAFETY: the engine is ours from here on, for good.
            return unsafe { (*engine).recorder.close() };
        }
        if owner.load(Relaxed) == NOBODY {
            return;
        }
        system::pause(nth);
    }
}
/// The number of pauses before a wait is given up: at least 5 s.
const TRIES: u32 = 50_000;

/// Stops the engine before a seccomp filter may forbid its system calls. It makes none from here on.
pub fn stop(why: Off) {
    if status::is_closing() || OWNER.load(Acquire).is_null() || !threads::is_ours() {
        return;
    }
    status::off(why);
    threads::stop();
    close();
    for nth in (0..TRIES).take_while(|_| Inside::is_anybody()) {
        system::pause(nth);
    }
}

/// Returns a summary of how bursts ended, for tests. None if the engine does not run in this process.
pub fn report() -> Option<String> {
    if ENGINE.load(Acquire).is_null() || !threads::is_ours() {
        return None;
    }
    let count = |of: &AtomicU64| of.load(Relaxed);
    let [done, call, code, signal, fault, handler] = status().ends.each_ref().map(count);
    let failed =
        if status::has_failed() { format!(" failed: {};", status::text()) } else { String::new() };
    Some(format!(
        "{done} bursts to their end;{failed} ended early: {call} at a system call, {code} at code, {signal} for a signal, \
         {fault} at an instruction that faults; not begun: {handler}; instructions in bursts: {}, counted between \
         them: {}",
        count(&status().instructions),
        count(&status().counted),
    ))
}
