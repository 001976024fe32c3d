//! Bursts: after its timer's signal a thread goes on in translations of its code, for a while.
//!
//! Invariants. One thread at a time is in translated code. `ThreadState::owner` names it, and it alone uses
//! [`Engine`]. Translated code runs with all signals blocked, so no handler of the program ever sees an
//! address in it. A burst ends early when a signal is pending and when an instruction faults ([`faults`]). It
//! ends between two instructions of the program, by rt_sigreturn(2). All registers and the signal mask are
//! then the program's, as if there had been no burst.

mod dispatch;
mod faults;
mod schedule;
mod signals;
mod stages;
pub mod threads;

use crate::cache::{CacheKind, CodeCache};
use crate::emit::Emitter;
use crate::log_drain::{self, LogDrain};
use crate::maps::Maps;
use crate::recorder::{Recorder, SLOW};
use crate::status::{self, Inside, OffReason, status};
use crate::stubs::{self, Stubs};
use crate::system;
use crate::thread_state::{self, ExtendedState, SignalContext, ThreadState};
use crate::translate::Translator;
use dispatch::*;
use schedule::{Pace, SamplingSchedule};
use signals::*;
pub use signals::{handler, leaves_soon};
use std::arch::asm;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering::*};
use threads::{Polls, THREADS};

/// The length of bursts and the share of time that they take.
#[derive(Debug, Clone, Copy)]
pub struct SamplingConfig {
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
    pub stress: Option<StressConfig>,
}

/// A schedule for stress tests: many short bursts of random length.
#[derive(Debug, Clone, Copy)]
pub struct StressConfig {
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
enum BurstStage {
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
pub enum BurstEnd {
    Done,
    Call,
    Code,
    Signal,
    Fault,
    Handler,
}

/// A system call that the engine makes in a burst.
#[derive(Debug, Clone, Copy, Default)]
struct PendingCall {
    next: u64,
    unmaps: Option<(u64, u64)>,
}

/// The progress of the sampling: the burst, and the threads' distances to their next bursts.
struct SamplingState {
    stage: BurstStage,
    /// Instructions that are left of the stage, and that it has executed.
    left: i64,
    executed: u64,
    /// Instructions of all bursts, and of counting translations.
    total: u64,
    between: u64,
    pace: Pace,
    /// The thread's CPU time when it last entered counting translations or was polled there.
    between_ns: u64,
    /// The distances to the next burst, by thread number.
    schedules: Vec<SamplingSchedule>,
    /// The start of the burst, and the mean length of bursts.
    began_ns: u64,
    mean_ns: u64,
    /// The length of the burst's warm-up, in instructions.
    warm: u64,
    rng_state: u64,
    polls: Option<Polls>,
}

impl SamplingState {
    fn new() -> SamplingState {
        SamplingState {
            stage: BurstStage::Out,
            left: 0,
            executed: 0,
            total: 0,
            between: 0,
            pace: Pace::default(),
            between_ns: 0,
            schedules: vec![SamplingSchedule::default(); THREADS],
            began_ns: 0,
            mean_ns: 2_000_000,
            warm: 0,
            rng_state: system::now_ns(libc::CLOCK_MONOTONIC) | 1,
            polls: None,
        }
    }
}

/// The dynamic binary translator, as the thread in translated code uses it.
pub struct Engine {
    pub thread_state: &'static mut ThreadState,
    /// The caches of logging and of counting translations, by [`CacheKind`].
    caches: [CodeCache; 2],
    kind: CacheKind,
    translator: Translator,
    maps: Maps,
    recorder: Recorder,
    config: SamplingConfig,
    sampling: SamplingState,
    stubs: Stubs,
    log_drain: LogDrain,
    /// The signal frames, by thread number.
    frames: *mut SignalFrame,
    pending: PendingCall,
    /// The address at which the program can go on natively with the thread state's context. None in the
    /// middle of a block.
    safe: Option<u64>,
    /// The number of returns from translated code; a test's [`StressConfig::panic_at`] needs it.
    return_count: u64,
}

/// A thread's own signal frame. The thread leaves translated code by returning from it.
#[repr(C)]
struct SignalFrame {
    state: ExtendedState,
    context: SignalContext,
}

static ENGINE: AtomicPtr<Engine> = AtomicPtr::new(ptr::null_mut());
static OWNER: AtomicPtr<ThreadState> = AtomicPtr::new(ptr::null_mut());
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
    pub fn start(recorder: Recorder, config: SamplingConfig) -> Result<(), OffReason> {
        let (thread_state, addresses, code) = thread_state::make().ok_or(OffReason::NoMemory)?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let bytes = THREADS * size_of::<SignalFrame>();
        let frames = system::map(bytes, protection, libc::MAP_32BIT).ok_or(OffReason::NoMemory)?;
        const AVX: u64 = 4;
        let state =
            enabled_state().filter(|state| state & AVX != 0).ok_or(OffReason::NoAvx)? & !TILES;
        // SAFETY: the code's part of the memory is ours, and longer than the stubs.
        let mut out = unsafe { Emitter::new(code.start) };
        let log_drain = log_drain::make(&mut out, addresses, recorder.sides(), SLOW);
        log_drain.ends_full(thread_state);
        let stubs = stubs::make(&mut out, addresses, state, log_drain.take, dispatch);
        let start = out.at().next_multiple_of(64);
        let middle = ((start + code.end) / 2).next_multiple_of(64);
        let mut caches = [
            CodeCache::new(CacheKind::Logging, addresses, start..middle),
            CodeCache::new(CacheKind::Counting, addresses, middle..code.end),
        ];
        caches.iter_mut().for_each(|cache| cache.clear(thread_state, &stubs));
        OWNER.store(thread_state, Release);
        let engine = Engine {
            thread_state,
            caches,
            kind: CacheKind::Logging,
            translator: Translator::new(stubs, log_drain),
            maps: Maps::new(),
            recorder,
            config,
            sampling: SamplingState::new(),
            stubs,
            log_drain,
            frames: frames as *mut SignalFrame,
            pending: PendingCall::default(),
            safe: None,
            return_count: 0,
        };
        ENGINE.store(Box::into_raw(Box::new(engine)), Release);
        Ok(())
    }

    /// Evicts all translations if some of the code that they come from has been unmapped.
    fn check_maps(&mut self) {
        if !self.maps.look() {
            self.caches.iter_mut().for_each(|cache| cache.clear(self.thread_state, &self.stubs));
        }
    }

    /// Sets whether the next counting block traps.
    fn stop_counting(&mut self, stop: bool) {
        stop_counting(self.thread_state, stop);
    }

    fn cache(&mut self) -> &mut CodeCache {
        &mut self.caches[self.kind as usize]
    }

    /// Goes on in the translation of `pc`, or natively if it cannot be translated.
    fn enter_translation(&mut self, pc: u64) {
        match self.block(pc) {
            Some(number) => self.resume(number),
            None => self.leave(pc, BurstEnd::Code),
        }
    }

    fn resume(&mut self, number: usize) {
        let entry = self.cache().entry(number) as u64;
        (self.thread_state.resume, self.thread_state.resume_counting) = match self.kind {
            CacheKind::Logging => (entry, 0),
            CacheKind::Counting => (self.stubs.counting.resume as u64, entry),
        };
    }

    fn block(&mut self, pc: u64) -> Option<usize> {
        if let Some(number) = self.cache().find(pc) {
            return Some(number);
        }
        let bytes = self.maps.code_at(pc)?;
        if !self.cache().has_room() {
            self.drain_log();
            self.caches[self.kind as usize].clear(self.thread_state, &self.stubs);
        }
        self.translator.block(&mut self.caches[self.kind as usize], pc, bytes)
    }
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
    let (thread_state, engine) = (OWNER.load(Acquire), ENGINE.load(Acquire));
    if thread_state.is_null() || engine.is_null() || !threads::is_ours() {
        return;
    }
    status::close_soon();
    // getppid(2) ends the burst if we are in one, as no burst makes this call.
    // SAFETY: touches no memory.
    unsafe { system::call(libc::SYS_getppid, [0; 6]) };
    for nth in 0..TRIES {
        // SAFETY: touches only the owner's field, an atomic.
        let owner = unsafe { &(*thread_state).owner };
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
pub fn stop(why: OffReason) {
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
