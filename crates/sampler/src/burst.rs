//! Bursts: a thread that was stopped by its timer goes on in copies of its code, for a while.
//!
//! Invariants. One thread at a time is in a burst, `Area::owner`, and has all of [`Engine`]. In a burst all
//! signals wait, so that no handler of the program ever sees an address of a copy; a burst ends early when one
//! waits, and when an instruction faults ([`faults`]). It ends between two instructions of the program, by the
//! system call that ends signal handlers: all registers and the signal mask are then the program's, as if there
//! had been no burst.

use crate::area::{
    self, Area, Context, FRAMES, RIP, Reason, SLOTS, STATE_BYTES, State, TABLE_BITS, Target,
};
use crate::cache::Cache;
use crate::calls::{self, Decision};
use crate::emit::Emitter;
use crate::faults;
use crate::maps::Maps;
use crate::recorder::{Phase, Recorder};
use crate::stubs;
use crate::system;
use crate::threads::{self, THREADS};
use crate::translate::Translator;
use std::arch::asm;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering::*};

/// How long bursts are and how often they come.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Instructions whose time is taken, at the burst's start.
    pub timed: u64,
    /// Instructions that bring TLBs up to date, at most, where that is more than `warm_share`th of all that
    /// bursts had so far.
    pub warm: u64,
    pub warm_share: u64,
    /// Instructions that count, at least: as many as it took to warm up, if these are more.
    pub counted: u64,
    /// Time between two bursts for each time in one.
    pub gap: u64,
    /// Tests: lengths are drawn, from 1 to `counted`, and the next burst comes after so many nanoseconds.
    pub stress_ns: Option<u64>,
}

/// What a burst is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Out,
    /// Nothing is recorded; the time is taken.
    Timed,
    Warming,
    Counted,
}

/// How fast the program is, by the processor's clock.
#[derive(Debug, Clone, Copy, Default)]
struct Pace {
    instructions: u64,
    ticks: u64,
    /// Since the log was empty, in copies alone.
    since: u64,
}

/// More is not the program's: a processor was taken away.
const TICKS_MAX: u64 = 4_000_000;

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
const WHYS: usize = 6;

/// Of a system call that is made in a burst.
#[derive(Debug, Clone, Copy, Default)]
struct Pending {
    at: u64,
    next: u64,
    /// Its number, the register that was made 0, and what was there.
    tried: Option<(u64, usize, u64)>,
    unmaps: Option<(u64, u64)>,
}

/// What the thread in a burst has.
pub struct Engine {
    pub area: &'static mut Area,
    cache: Cache,
    translator: Translator,
    maps: Maps,
    recorder: Recorder,
    plan: Plan,
    enter: usize,
    call: usize,
    /// By thread: where it goes on from when its burst ends.
    frames: *mut Frame,
    fs: u64,
    stage: Stage,
    /// Instructions of the stage that are left, and that it had.
    left: i64,
    had: u64,
    /// Instructions of all bursts.
    total: u64,
    pace: Pace,
    /// The processor's clock and the time, at the start.
    clocks: (u64, u64),
    /// By thread: the mean time between two bursts, when the next one was drawn.
    gaps: Vec<u64>,
    pending: Pending,
    began_ns: u64,
    mean_ns: u64,
    luck: u64,
    pub ends: [u64; WHYS],
}

/// A signal frame of our own.
#[repr(C)]
struct Frame {
    state: State,
    context: Context,
}

static ENGINE: AtomicPtr<Engine> = AtomicPtr::new(ptr::null_mut());
static OWNER: AtomicPtr<Area> = AtomicPtr::new(ptr::null_mut());
/// No more bursts.
static CLOSING: AtomicBool = AtomicBool::new(false);

/// Until the first burst of the program.
pub const FIRST_GAP_NS: u64 = 5_000_000;

/// Parts of the extended state that are saved: all but tiles, which no copied instruction uses.
const TILES: u64 = 3 << 17;

impl Engine {
    /// Makes everything ready; none where this machine does not let us.
    pub fn start(recorder: Recorder, plan: Plan) -> Option<()> {
        let (area, addresses, code) = area::make()?;
        let frames =
            system::map(THREADS * size_of::<Frame>(), libc::PROT_READ | libc::PROT_WRITE, 0)?
                as *mut Frame;
        let state = enabled_state()? & !TILES;
        // SAFETY: the code's part of the area is ours, and longer than the stubs.
        let mut out = unsafe { Emitter::new(code.start) };
        let (known, call) = stubs::make(&mut out, addresses, state, dispatch);
        let code = out.at().next_multiple_of(64)..code.end;
        OWNER.store(area, Release);
        let engine = Engine {
            area,
            cache: Cache::new(addresses, code),
            translator: Translator::new(known),
            maps: Maps::new(),
            recorder,
            plan,
            enter: known.enter,
            call,
            frames,
            fs: 0,
            stage: Stage::Out,
            left: 0,
            had: 0,
            total: 0,
            pace: Pace::default(),
            clocks: (ticks(), system::now_ns(libc::CLOCK_MONOTONIC)),
            gaps: vec![FIRST_GAP_NS; THREADS],
            pending: Pending::default(),
            began_ns: 0,
            mean_ns: 10_000_000,
            luck: system::now_ns(libc::CLOCK_MONOTONIC) | 1,
            ends: [0; WHYS],
        };
        ENGINE.store(Box::into_raw(Box::new(engine)), Release);
        Some(())
    }

    fn draw(&mut self, below: u64) -> u64 {
        self.luck ^= self.luck << 13;
        self.luck ^= self.luck >> 7;
        self.luck ^= self.luck << 17;
        self.luck % below.max(1)
    }

    /// A burst begins at `pc`.
    fn begin(&mut self, pc: u64) {
        self.began_ns = system::now_ns(libc::CLOCK_MONOTONIC);
        if faults::are_of_calls() || threads::has_shadow_stack() {
            self.leave(pc, Why::Handler);
        }
        if !self.maps.look() {
            self.cache.clear(self.area);
        }
        self.fs = threads::fs_base();
        self.recorder.begin(self.area.thread);
        match self.plan.stress_ns {
            Some(_) => {
                let length = self.draw(self.plan.counted);
                self.enters(Stage::Counted, length);
            }
            None => {
                self.pace = Pace::default();
                self.enters(Stage::Timed, self.plan.timed);
            }
        }
        self.go(pc);
    }

    /// The next stage, of so many instructions at most.
    fn enters(&mut self, stage: Stage, instructions: u64) {
        (self.stage, self.left, self.had) = (stage, instructions as i64, 0);
        match stage {
            Stage::Out => self.recorder.phase(Phase::Skipped, 0),
            Stage::Timed => {}
            Stage::Warming => self.recorder.phase(Phase::Warming, 0),
            Stage::Counted => self.recorder.phase(Phase::Counted, self.stands_for()),
        }
        self.empty_log();
    }

    fn empty_log(&mut self) {
        self.area.position = (FRAMES * SLOTS * 8) as u64;
        self.pace.since = 0;
    }

    /// Of how many instructions the burst was drawn: those of the mean time between two, at the pace that the
    /// program had when it began. 0: not known.
    fn stands_for(&self) -> u64 {
        let ticks_since = ticks() - self.clocks.0;
        let ns_since = system::now_ns(libc::CLOCK_MONOTONIC) - self.clocks.1;
        let ns = self.pace.ticks as f64 * ns_since as f64 / ticks_since as f64;
        let gap = self.gaps[self.area.thread as usize] as f64;
        if self.pace.ticks == 0 { 0 } else { (gap * self.pace.instructions as f64 / ns) as u64 }
    }

    /// Goes on in the copy of `pc`, or natively, if there cannot be one.
    fn go(&mut self, pc: u64) {
        match self.block(pc) {
            Some(number) => self.area.resume = self.cache.entry(number) as u64,
            None => self.leave(pc, Why::Code),
        }
    }

    fn block(&mut self, pc: u64) -> Option<usize> {
        if let Some(number) = self.cache.find(pc) {
            return Some(number);
        }
        let bytes = self.maps.code_at(pc)?;
        if !self.cache.has_room() {
            self.take_log();
            self.cache.clear(self.area);
        }
        self.translator.block(&mut self.cache, pc, bytes)
    }

    /// Hands on what was logged; the log is empty then.
    fn take_log(&mut self) {
        let from = (self.area.position as usize / (8 * SLOTS)).max(1);
        let log = &self.area.log[from..];
        let count = if self.stage == Stage::Timed {
            let count = self.recorder.count(&self.cache.blocks, log);
            if self.pace.since < TICKS_MAX {
                self.pace.instructions += count;
                self.pace.ticks += self.pace.since;
            }
            count
        } else {
            self.recorder.take(&self.cache.blocks, log, self.fs)
        };
        self.left -= count as i64;
        self.had += count;
        self.total += count;
        self.empty_log();
    }

    /// Goes on to the next stage where this one has all that it needs; why the burst is over, if it is.
    fn is_over(&mut self) -> Option<Why> {
        let is_done = self.left <= 0;
        match self.stage {
            Stage::Timed if is_done => {
                self.enters(Stage::Warming, self.plan.warm.max(self.total / self.plan.warm_share));
            }
            Stage::Warming if is_done || self.recorder.is_warm() => {
                self.enters(Stage::Counted, self.had.max(self.plan.counted));
            }
            Stage::Counted if is_done => return Some(Why::Done),
            _ => {}
        }
        let is_signalled = threads::waiting_signals() & !self.area.context.mask != 0;
        let is_closing = CLOSING.load(Relaxed);
        (is_signalled || is_closing).then_some(Why::Signal)
    }

    fn direct(&mut self, exit: usize) {
        let to = self.cache.exits[exit].to;
        let before = self.cache.blocks.len();
        self.go(to);
        // Not if all blocks were thrown away meanwhile, this exit with them.
        if let Some(number) = self.cache.find(to).filter(|_| self.cache.blocks.len() >= before) {
            self.cache.link(exit, number);
        }
    }

    fn indirect(&mut self) {
        let to = self.area.target;
        self.go(to);
        let place = to as usize % (1 << TABLE_BITS);
        self.area.table[place] = Target { minus: to.wrapping_neg(), code: self.area.resume };
    }

    fn full(&mut self, number: usize) {
        let pc = self.cache.blocks[number].start;
        self.take_log();
        match self.is_over() {
            Some(why) => self.leave(pc, why),
            None => self.area.resume = self.cache.entry(number) as u64,
        }
    }

    fn before_call(&mut self, number: usize) {
        let block = self.cache.blocks[number];
        let next = block.start + u64::from(block.bytes);
        self.pending = Pending { at: next - 2, next, ..Pending::default() };
        let registers = &mut self.area.context.registers;
        let number = registers[calls::RAX];
        match calls::decide(&self.area.context, &self.maps) {
            Decision::Leave => self.leave(next - 2, Why::Call),
            Decision::Run => {}
            Decision::Unmap(range) => {
                self.pending.unmaps = Some((range.start, range.end - range.start));
            }
            Decision::Try(place) => {
                let argument = &mut self.area.context.registers[place];
                self.pending.tried = Some((number, place, std::mem::take(argument)));
            }
        }
        self.area.resume = self.call as u64;
    }

    fn after_call(&mut self) {
        let Pending { at, next, tried, unmaps } = self.pending;
        let registers = &mut self.area.context.registers;
        let result = registers[calls::RAX] as i64;
        registers[RCX] = next;
        if let Some((number, place, argument)) = tried {
            registers[place] = argument;
            if result == 0 && argument != 0 {
                registers[calls::RAX] = number;
                self.leave(at, Why::Call);
            }
        }
        if let (Some((start, length)), true) = (unmaps, result >= 0) {
            self.take_log();
            self.recorder.gone(start, length);
        }
        // Their signals are to come now.
        if [-i64::from(libc::EPIPE), -i64::from(libc::EFBIG)].contains(&result) {
            self.leave(next, Why::Signal);
        }
        if threads::waiting_signals() & !self.area.context.mask != 0 {
            self.leave(next, Why::Signal);
        }
        self.go(next);
    }

    /// A copied instruction has faulted. The program does it again.
    fn fault(&mut self) {
        let at = self.area.target as usize;
        let state = self.cache.copy_at(at).and_then(|(number, place)| {
            let start = self.cache.blocks[number].start;
            let bytes = self.maps.code_at(start)?;
            self.translator.state_at(&mut self.cache, start, bytes, place)
        });
        let Some((pc, borrowed)) = state else {
            // Not of a copy: let it be as if nobody had stood in.
            faults::stand_back(faulted);
            self.area.resume = at as u64;
            return;
        };
        for number in borrowed.map(usize::from) {
            self.area.context.registers[area::PLACES[number]] = self.area.spilled[number];
        }
        // Of the block's frame not all is there.
        self.area.position += 8 * SLOTS as u64;
        self.leave(pc, Why::Fault);
    }

    /// Ends the burst: the program goes on at `pc`, natively.
    fn leave(&mut self, pc: u64, why: Why) -> ! {
        if self.stage != Stage::Out {
            self.take_log();
            self.enters(Stage::Out, 0);
        }
        self.ends[why as usize] += 1;
        let thread = self.area.thread;
        // What the program waits for, be it for the reader of the log or for a processor.
        let took = system::now_ns(libc::CLOCK_MONOTONIC) - self.began_ns;
        self.mean_ns = (self.mean_ns * 15 + took) / 16;
        let mean = (self.mean_ns * self.plan.gap).max(1_000_000);
        let gap = match self.plan.stress_ns {
            Some(gap) => gap,
            None => mean / 2 + self.draw(mean),
        };
        self.gaps[thread as usize] = mean;
        threads::next_burst(thread, gap);
        self.area.context.registers[RIP] = pc;
        faults::stand_back(faulted);
        // SAFETY: as many frames as threads have numbers; only this thread uses this one.
        let frame = unsafe { &mut *self.frames.add(thread as usize) };
        frame.context = self.area.context;
        frame.context.state = &raw const frame.state as u64;
        frame.state.0[..].copy_from_slice(&self.area.state.0);
        let (owner, context) = (&raw const self.area.owner, &raw const frame.context);
        // SAFETY: rt_sigreturn takes what we have got from the kernel, with other values of registers. From
        // the store on, all but this thread's frame may be somebody else's.
        unsafe {
            asm!(
                "mov dword ptr [{owner}], 0",
                "mov rsp, {context}",
                "mov eax, 15",
                "syscall",
                "ud2",
                owner = in(reg) owner,
                context = in(reg) context,
                options(noreturn)
            )
        }
    }
}

const RCX: usize = area::PLACES[1];

/// Copied code comes back; decides where it goes on.
extern "C" fn dispatch() {
    // SAFETY: the thread in a burst has the engine.
    let engine = unsafe { &mut *ENGINE.load(Acquire) };
    let number = engine.area.number as usize;
    let [since, until] = [engine.area.resumed, engine.area.came_back]
        .map(|[low, high]| u64::from(high) << 32 | u64::from(low));
    engine.pace.since += until.saturating_sub(since);
    match engine.area.reason {
        reason if reason == Reason::Begin as u32 => engine.begin(engine.area.target),
        reason if reason == Reason::Direct as u32 => engine.direct(number),
        reason if reason == Reason::Indirect as u32 => engine.indirect(),
        reason if reason == Reason::Full as u32 => engine.full(number),
        reason if reason == Reason::Call as u32 => engine.before_call(number),
        reason if reason == Reason::Fault as u32 => engine.fault(),
        _ => engine.after_call(),
    }
}

/// The processor's clock.
fn ticks() -> u64 {
    // SAFETY: touches no memory.
    unsafe { std::arch::x86_64::_rdtsc() }
}

/// A thread's timer has fired: a burst begins when this returns, if there is none.
pub extern "C" fn handler(
    _signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    let area = OWNER.load(Acquire);
    // SAFETY: the kernel hands handlers both; of a timer's signal, the value is ours.
    let thread = unsafe { (*info).si_value().sival_ptr as usize as u32 };
    if area.is_null() || thread as usize >= THREADS || CLOSING.load(Relaxed) {
        return;
    }
    // SAFETY: only the owner's field, an atomic, until it is ours.
    let owner = unsafe { &(*area).owner };
    if owner.compare_exchange(0, system::thread(), Acquire, Relaxed).is_err() {
        return threads::next_burst(thread, 1);
    }
    // SAFETY: the area is ours now. The kernel's context is at least as long as ours.
    let began = unsafe { take_over(&mut *area, &mut *context.cast::<Context>(), thread) };
    if began.is_none() {
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
    context.registers[RIP] = unsafe { (*ENGINE.load(Acquire)).enter as u64 };
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
    area.context = *context;
    // SAFETY: as many bytes as the kernel says.
    unsafe { ptr::copy_nonoverlapping(state, area.state.0.as_mut_ptr(), bytes) };
    area.target = context.registers[RIP];
    area.reason = Reason::Begin as u32;
    area.number = thread;
    area.thread = thread;
    // SAFETY: written once, before the first timer.
    let enter = unsafe { (*ENGINE.load(Acquire)).enter };
    context.registers[RIP] = enter as u64;
    context.mask = !faults::stand_in(faulted);
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

/// No burst begins any more; waits until none is left, and everything is read. Natively.
pub fn close() {
    let (area, engine) = (OWNER.load(Acquire), ENGINE.load(Acquire));
    if area.is_null() || engine.is_null() || !threads::is_ours() {
        return;
    }
    // SAFETY: only the owner's field.
    let owner = unsafe { &(*area).owner };
    CLOSING.store(true, Release);
    for _ in 0..10_000 {
        if owner.compare_exchange(0, system::thread(), Acquire, Relaxed).is_ok() {
            // SAFETY: ours from here on, for good.
            return unsafe { (*engine).recorder.close() };
        }
        // SAFETY: touches no memory.
        unsafe { system::call(libc::SYS_sched_yield, [0; 6]) };
    }
}

/// How bursts ended, in words; to be asked after [`close`].
pub fn report() -> Option<String> {
    let engine = ENGINE.load(Acquire);
    if engine.is_null() || !threads::is_ours() {
        return None;
    }
    // SAFETY: nobody changes it any more.
    let [done, call, code, signal, fault, handler] = unsafe { (*engine).ends };
    Some(format!(
        "{done} bursts to their end; ended early: {call} at a system call that may wait or changes code, {code} at \
         code that is not of a file or cannot be copied, {signal} for a signal, {fault} at an \
         instruction that faults; not begun as the program handles SIGSYS or has a shadow stack: {handler}"
    ))
}
