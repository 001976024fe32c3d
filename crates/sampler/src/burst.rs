//! Bursts: a thread that was stopped by its timer goes on in copies of its code, for a while.
//!
//! Invariants. One thread at a time is in a burst, `Area::owner`, and has all of [`Engine`]. In a burst all
//! signals wait, so that no handler of the program ever sees an address of a copy; a burst ends early when one
//! waits, and when an instruction faults ([`faults`]). It ends between two instructions of the program, by the
//! system call that ends signal handlers: all registers and the signal mask are then the program's, as if there
//! had been no burst.

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

/// How long bursts are and how often they come.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Instructions that bring TLBs up to date until the consumer knows better, which it says before a burst: if
    /// it were this burst's own misses that end its warm-up, what counts would begin where there are many.
    pub warm: u64,
    /// A warm-up has at most this share of the instructions of all bursts so far.
    pub warm_share: u64,
    /// As many instructions count after a warm-up as it had, divided by this.
    pub counted_part: u64,
    /// Percent of the time that bursts take.
    pub share: u64,
    /// Between two looks at what counting copies have counted; less, down to `close_ns`, where a burst is near.
    pub poll_ns: u64,
    pub close_ns: u64,
    /// Tests: lengths are drawn, from 1 to so much, and the thread is native for so long.
    pub stress: Option<Stress>,
}

/// Of tests.
#[derive(Debug, Clone, Copy)]
pub struct Stress {
    /// Instructions of a burst at most.
    pub counted: u64,
    /// Nanoseconds natively, after each burst.
    pub gap_ns: u64,
    /// Instructions in counting copies at most, after each burst; 0: none.
    pub between: u64,
    /// Copies come back so often until the engine panics; 0: it does not.
    pub panic_at: u64,
}

/// What a burst is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Out,
    /// In counting copies, until the next burst.
    Between,
    Warming,
    Counted,
}

/// The next time in copies comes after so much of a thread's time natively.
const AWAY_NS: u64 = 1_000_000;

/// Why bursts ended before their time, or did not begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    Done,
    Call,
    Code,
    Signal,
    Fault,
    Handler,
}

/// Of a system call that is made in a burst.
#[derive(Debug, Clone, Copy, Default)]
struct Pending {
    next: u64,
    unmaps: Option<(u64, u64)>,
}

/// What the thread in a burst has.
pub struct Engine {
    pub area: &'static mut Area,
    /// Logging copies and counting ones.
    caches: [Cache; 2],
    kind: Kind,
    translator: Translator,
    maps: Maps,
    recorder: Recorder,
    plan: Plan,
    stubs: Stubs,
    taking: Taking,
    polls: Option<Polls>,
    /// By thread.
    frames: *mut Frame,
    stage: Stage,
    /// Instructions of the stage that are left, and that it had.
    left: i64,
    had: u64,
    /// Instructions of all bursts, and in counting copies.
    total: u64,
    between: u64,
    pace: Pace,
    /// The thread's CPU time when it went into counting copies.
    between_ns: u64,
    /// By thread.
    ways: Vec<Way>,
    pending: Pending,
    began_ns: u64,
    mean_ns: u64,
    /// Instructions of the burst's warm-up.
    warm: u64,
    luck: u64,
    /// Where the program can go on natively, with the area's context; none in the middle of a copy.
    safe: Option<u64>,
    /// How often copies came back, where a test asks for a panic.
    came_back: u64,
}

/// A thread's own signal frame, by which it leaves copies.
#[repr(C)]
struct Frame {
    state: State,
    context: Context,
}

static ENGINE: AtomicPtr<Engine> = AtomicPtr::new(ptr::null_mut());
static OWNER: AtomicPtr<Area> = AtomicPtr::new(ptr::null_mut());
/// Another thread is to have the copies.
static WANTED: AtomicBool = AtomicBool::new(false);
/// The thread in copies is to be cancelled.
static IS_CANCELLED: AtomicBool = AtomicBool::new(false);
/// No thread's id: the owner when all is over.
const NOBODY: u32 = u32::MAX;

/// Until the first burst of the program.
pub const FIRST_GAP_NS: u64 = 5_000_000;

/// Parts of the extended state that are saved: all but tiles, which no copied instruction uses.
const TILES: u64 = 3 << 17;

impl Engine {
    /// Makes everything ready; none where this machine does not let us.
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

    /// A thread comes, at `pc`.
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

    /// Copies of code that is no longer there are thrown away, with all others.
    fn look_at_maps(&mut self) {
        if !self.maps.look() {
            self.caches.iter_mut().for_each(|cache| cache.clear(self.area, &self.stubs));
        }
    }

    /// Into counting copies, or a burst, if it is time.
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
                // What counts begins where it was drawn.
                let early = self.way().left.max(0) as u64;
                self.enters(Stage::Warming, early + self.warm);
            }
        }
    }

    /// The next stage, of so many instructions at most.
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
        // None of them has more instructions.
        let rounds = self.left / (FRAMES as i64 * i64::from(INSTRUCTIONS));
        self.area.rounds = rounds.clamp(1, i64::from(ROUNDS)) as u32;
    }

    /// Whether the next counting copy comes back.
    fn stop_counting(&mut self, stop: bool) {
        stop_counting(self.area, stop);
    }

    fn cache(&mut self) -> &mut Cache {
        &mut self.caches[self.kind as usize]
    }

    /// Goes on in the copy of `pc`, or natively, if there cannot be one.
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

    /// Hands on what was logged; the log is empty then.
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

    /// Goes on to the next stage where this one has all that it needs; why the burst is over, if it is.
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

    /// A counting copy was stopped before a block.
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

    /// A burst is done: the next one is drawn.
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
        // Not if all blocks were thrown away meanwhile, this exit with them.
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

    /// A call was made here. It leaves two registers as it does natively.
    fn called(&mut self, result: i64) {
        let registers = &mut self.area.context.registers;
        registers[calls::RAX] = result as u64;
        registers[R11] = registers[area::FLAGS];
        registers[RCX] = self.pending.next;
        self.safe = Some(self.pending.next);
        self.after_call();
    }

    /// The code that takes logs is to look for large pages, too.
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
        // Their signals are to come now.
        if [-i64::from(libc::EPIPE), -i64::from(libc::EFBIG)].contains(&result) {
            self.leave(next, Why::Signal);
        }
        if self.must_leave() {
            self.leave(next, Why::Signal);
        }
        self.go(next);
    }

    /// A copied instruction has faulted. The program does it again.
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
            // Not of a copy: let it be as if nobody had stood in.
            faults::stand_back(faulted);
            self.area.resume = at as u64;
            return;
        };
        for number in state.borrowed().map(usize::from) {
            self.area.context.registers[area::PLACES[number]] = self.area.spilled[number];
        }
        self.safe = Some(state.instruction);
        // Of the block's frame not all is there.
        self.area.position += 8 * SLOTS as u64;
        self.leave(state.instruction, Why::Fault);
    }

    /// Ends the burst: the program goes on at `pc`, natively.
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
        // The next one must not come before the program has its own alternative stack.
        threads::block_signals();
        threads::next_burst(thread, self.plan.stress.map_or(AWAY_NS, |stress| stress.gap_ns));
        self.depart(pc)
    }

    /// The program goes on at `pc`, natively, with its signals, which are blocked until then.
    fn depart(&mut self, pc: u64) -> ! {
        self.area.context.registers[RIP] = pc;
        faults::stand_back(faulted);
        if IS_CANCELLED.swap(false, Relaxed) {
            threads::cancel_again();
        }
        // SAFETY: as many frames as threads have numbers; only this thread uses this one.
        let frame = unsafe { &mut *self.frames.add(self.area.thread as usize) };
        let bytes = self.area.state_bytes;
        frame.context = self.area.context;
        frame.context.state = &raw const frame.state as u64;
        frame.state.0[..bytes].copy_from_slice(&self.area.state.0[..bytes]);
        // SAFETY: rt_sigreturn takes what we have got from the kernel, with other values of registers. Once there is
        // no owner, all but this thread's frame may be another thread's, the stack too.
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

/// Of [`Context::registers`].
const R11: usize = area::PLACES[11];
const RCX: usize = area::PLACES[1];

/// A burst has ended, or was not begun.
fn ended(why: Why) {
    status().ends[why as usize].fetch_add(1, Relaxed);
}

impl Engine {
    /// Copied code comes back; decides where it goes on.
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

    /// Where the program is when a copy comes back, unless it is in the middle of one.
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

    /// After a panic: the program goes on natively, now or where the copy that it is in comes back.
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

    /// Lets the program go on at `pc`, and nothing else.
    fn give_up(&mut self, pc: u64) -> ! {
        self.end_polls();
        threads::block_signals();
        self.depart(pc)
    }
}

/// Copied code comes back.
extern "C" fn dispatch() {
    let engine = ENGINE.load(Acquire);
    // SAFETY: the thread in a burst has the engine, and nothing of the first use is left in the second.
    unsafe {
        if catch(|| (*engine).dispatch()).is_none() {
            (*engine).recover();
        }
    }
}

/// Lets the next counting copy come back, or go on.
fn stop_counting(area: *const Area, stop: bool) {
    // SAFETY: only the address of a field.
    let counts = unsafe { &raw const (*area).counts } as usize;
    let protection = if stop { libc::PROT_NONE } else { libc::PROT_READ } as usize;
    let arguments = [counts, size_of::<area::Counts>(), protection, 0, 0, 0];
    // SAFETY: a page that only counting copies read, whose faults are ours.
    unsafe { system::call(libc::SYS_mprotect, arguments) };
}

/// A timer of ours has fired.
pub extern "C" fn handler(
    _signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: the kernel hands handlers both, a context at least as long as ours.
    let (sent, context) = unsafe { (threads::sent(info), &mut *context.cast::<Context>()) };
    let area = OWNER.load(Acquire);
    if area.is_null() {
        return;
    }
    // SAFETY: only the owner's field, an atomic.
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

/// Lets the calling thread leave copies, if it is there: whether it is.
pub fn leaves_soon() -> bool {
    let area = OWNER.load(Acquire);
    // SAFETY: only the owner's field, an atomic.
    let is_in_copies =
        !area.is_null() && unsafe { (*area).owner.load(Relaxed) } == system::thread();
    if is_in_copies {
        IS_CANCELLED.store(true, Relaxed);
        faults::stand_in(faulted);
        stop_counting(area, true);
    }
    is_in_copies
}

/// A thread's timer has fired: a burst begins when the handler returns, if there is none.
fn came(area: *mut Area, owner: &AtomicU32, context: &mut Context, thread: u32) {
    if context.is_on_alternative_stack() {
        // Ours cannot take its place.
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

/// Stands in for the program's handlers of faults while there is a burst.
extern "C" fn faulted(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let area = OWNER.load(Acquire);
    // SAFETY: only the owner's field, an atomic; there is an area, as there was a burst.
    if unsafe { (*area).owner.load(Relaxed) } != system::thread() {
        return faults::hand_on(signal, info, context);
    }
    // SAFETY: the kernel hands handlers both. This thread is in the burst, so that the area is its own.
    let (area, context, code) =
        unsafe { (&mut *area, &mut *context.cast::<Context>(), (*info).si_code) };
    if code <= 0 {
        // Somebody has sent it. It waits until the burst is over, which is soon.
        context.mask |= 1 << (signal - 1);
        return faults::send_again(signal, info);
    }
    area.target = context.registers[RIP];
    area.reason = Reason::Fault as u32;
    // SAFETY: written once, before the first timer.
    context.registers[RIP] = unsafe { (*ENGINE.load(Acquire)).stubs.enter as u64 };
}

/// Makes the thread go on in a burst; none if the kernel has not saved what we know.
unsafe fn take_over(area: &mut Area, context: &mut Context, thread: u32) -> Option<()> {
    const MAGIC: u32 = 0x4650_5853;
    let state = context.state as *const u8;
    if state.is_null() {
        return None;
    }
    // SAFETY: the legacy part of the state has 512 bytes, and what is behind is said in its reserved ones.
    let (magic, bytes) = unsafe {
        let at = state.add(464).cast::<u32>();
        (at.read_unaligned(), at.add(1).read_unaligned() as usize)
    };
    if magic != MAGIC || bytes > STATE_BYTES {
        return None;
    }
    // SAFETY: as many bytes as the kernel says.
    unsafe { ptr::copy_nonoverlapping(state, area.state.0.as_mut_ptr(), bytes) };
    // SAFETY: written once, before the first timer.
    let enter = unsafe { (*ENGINE.load(Acquire)).stubs.enter };
    let mask = !(faults::stand_in(faulted) | threads::signal_bit());
    area.context = *context;
    let [_, flags, stack_bytes] = &mut area.context.stack;
    if *stack_bytes == 0 {
        // The kernel may call a stack of no bytes enabled, but does not take such a one back.
        *flags = libc::SS_DISABLE as u64;
    }
    area.state_bytes = bytes;
    area.target = context.registers[RIP];
    area.reason = Reason::Begin as u32;
    area.thread = thread;
    context.registers[RIP] = enter as u64;
    context.mask = mask;
    // The program may be on a stack without room, or we on ours while its alternative one is in use.
    let signal_stack = &raw const area.signal_stack;
    context.stack = [signal_stack as u64, 0, size_of_val(&area.signal_stack) as u64];
    Some(())
}

/// The processor's parts of extended state that are in use.
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

/// Ends all for good: waits until no thread is in copies, and everything is read. Natively.
pub fn close() {
    let (area, engine) = (OWNER.load(Acquire), ENGINE.load(Acquire));
    if area.is_null() || engine.is_null() || !threads::is_ours() {
        return;
    }
    status::close_soon();
    // Ends a burst, if we are in one, as bursts do not make it.
    // SAFETY: touches no memory.
    unsafe { system::call(libc::SYS_getppid, [0; 6]) };
    for nth in 0..TRIES {
        // SAFETY: only the owner's field, an atomic.
        let owner = unsafe { &(*area).owner };
        if owner.compare_exchange(0, NOBODY, Acquire, Relaxed).is_ok() {
            // SAFETY: ours from here on, for good.
            return unsafe { (*engine).recorder.close() };
        }
        if owner.load(Relaxed) == NOBODY {
            return;
        }
        system::pause(nth);
    }
}
/// Some seconds.
const TRIES: u32 = 50_000;

/// The kernel is about to refuse system calls, ours among them: makes none from here on.
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

/// How bursts ended, in words; for tests.
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
