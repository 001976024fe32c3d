//! Recording all of a program: its threads take turns, and are in copies all the time.
//!
//! A system call that may wait is made by code of the thread's own, with all that the program has in the
//! processor and with its signals, while it is another thread's turn; handlers of signals that come then run natively.
//! So does code that cannot be copied, until the thread's timer fires. A signal that comes at other times lets the
//! thread leave where the program is, and come again at once, in the program's handler.

use super::{
    AWAY_NS, CLOSING, ENGINE, Engine, Frame, OWNER, RCX, Stage, THREAD_FRAMES, TURN, Why, faulted,
};
use crate::area::{PLACES, RIP};
use crate::emit::Emitter;
use crate::faults;
use crate::stubs::{self, FrameAddresses};
use crate::system;
use crate::threads;
use std::arch::asm;
use std::sync::atomic::Ordering::*;

/// Of the code for a thread's system calls.
pub const CALL_BYTES: usize = 512;
/// A turn that others wait for.
const TURN_NS: u64 = 5_000_000;
/// System calls from one look for signals to the next.
const CALLS: u64 = 16;

/// Whether a thread makes a system call, or runs a handler in one: its stack is not above where it was.
pub fn is_out(thread: u32, stack_pointer: u64) -> bool {
    // SAFETY: made before any timer; a thread asks for its own.
    let frame = unsafe { &*THREAD_FRAMES.load(Acquire).add(thread as usize) };
    frame.is_out && stack_pointer <= frame.stack_pointer
}

impl Engine {
    fn frame(&mut self) -> &'static mut Frame {
        // SAFETY: as many as threads have numbers; a thread uses its own, in its turn.
        unsafe { &mut *self.frames.add(self.area.thread as usize) }
    }

    /// A thread comes, at `pc`: for the first time, from a signal, or from code that it ran natively.
    pub(super) fn begin_whole(&mut self, pc: u64) {
        if faults::are_of_calls() || threads::has_shadow_stack() {
            self.leave(pc, Why::Handler);
        }
        let thread = self.area.thread;
        let frame = self.frame();
        frame.is_out = false;
        if std::mem::replace(&mut frame.owner, system::thread()) == frame.owner {
            self.recorder.switch(thread);
        } else {
            self.way().since_ns = 0;
            self.recorder.new_thread(thread);
        }
        self.area.fs = threads::fs_base();
        frame.fs = self.area.fs;
        let since_ns = std::mem::take(&mut self.way().since_ns);
        if since_ns > 0 {
            self.away_ns += system::now_ns(libc::CLOCK_THREAD_CPUTIME_ID) - since_ns;
        }
        if since_ns > 0 || self.total == 0 {
            self.look_at_maps();
            self.recorder.mapping(0, 0);
        }
        self.goes_on();
        self.go(pc);
    }

    /// A turn begins, with an empty log.
    fn goes_on(&mut self) {
        self.stage = Stage::Counted;
        self.left = i64::MAX;
        self.turn_ns = 0;
        self.empty_log();
    }

    /// Whether others have waited for long.
    pub(super) fn is_turn_over(&mut self) -> bool {
        if !TURN.is_wanted() {
            return false;
        }
        let now = system::now_ns(libc::CLOCK_MONOTONIC);
        if self.turn_ns == 0 {
            self.turn_ns = now;
        }
        now - self.turn_ns > TURN_NS
    }

    /// Not at each system call.
    pub(super) fn must_look(&mut self) -> bool {
        self.had += 1;
        self.had.is_multiple_of(CALLS)
    }

    /// A system call that may wait.
    pub(super) fn wait(&mut self) -> ! {
        let number = self.pending.number as i64;
        if CLOSING.load(Relaxed) {
            self.leave(self.pending.at, Why::Done);
        }
        self.take_log();
        let is_last =
            matches!(number, libc::SYS_execve | libc::SYS_execveat | libc::SYS_exit_group);
        self.recorder.publish(is_last);
        self.pending.changes_code = matches!(
            number,
            libc::SYS_mmap | libc::SYS_munmap | libc::SYS_mremap | libc::SYS_mprotect
        );
        self.pending.stands_back = number == libc::SYS_rt_sigaction;
        if self.pending.stands_back {
            faults::stand_back(faulted);
        }
        let at = self.call_of_thread();
        let frame = self.frame();
        frame.pending = self.pending;
        frame.stack_pointer = self.area.context.registers[PLACES[4]];
        frame.is_out = true;
        self.depart(at as u64)
    }

    /// The code for the calling thread's system calls.
    fn call_of_thread(&mut self) -> usize {
        let thread = self.area.thread;
        let at = self.calls + thread as usize * CALL_BYTES;
        // SAFETY: each thread has as many bytes; zeros are no code that we write.
        if unsafe { *(at as *const u8) } == 0 {
            let frame = self.frame();
            let addresses = FrameAddresses {
                registers: &raw const frame.context.registers as u32,
                mask: &raw const frame.context.mask as u32,
                state: &raw const frame.state as u32,
                stack: frame.stack_end() as u32,
            };
            // SAFETY: as above, in this thread's turn.
            let mut out = unsafe { Emitter::new(at) };
            stubs::call_of_thread(&mut out, self.addresses, addresses, self.state, (woken, thread));
            debug_assert!(out.at() <= at + CALL_BYTES);
        }
        at
    }

    /// What a call has changed of the memory.
    pub(super) fn tell_mapped(&mut self, result: i64) {
        let context = &self.area.context.registers;
        let (first, second) = (context[PLACES[7]], context[PLACES[6]]);
        match self.pending.number as i64 {
            libc::SYS_mmap if result > 0 => self.recorder.mapping(result as u64, second),
            libc::SYS_mremap if result > 0 => {
                self.recorder.mapping(result as u64, context[PLACES[2]]);
            }
            libc::SYS_brk if first != 0 => self.recorder.mapping(0, 0),
            _ => {}
        }
        if self.pending.changes_code {
            self.look_at_maps();
        }
        if self.pending.stands_back {
            self.area.mask = !(faults::stand_in(faulted) | threads::poll_bit());
        }
    }

    /// The end of [`Engine::leave`].
    pub(super) fn leave_whole(&mut self, pc: u64, why: Why) -> ! {
        let thread = self.area.thread;
        self.recorder.publish(false);
        let is_return = why == Why::Call && self.pending.number as i64 == libc::SYS_rt_sigreturn;
        // Signals that were blocked by the program may keep us out otherwise.
        self.area.context.mask &= !threads::begin_bit();
        match why {
            Why::Signal if !CLOSING.load(Relaxed) => {
                let mask = self.area.context.mask | threads::begin_bit();
                threads::make_own(threads::waiting_signals() & !mask);
                threads::come(thread);
            }
            Why::Call if is_return => {
                self.area.context.mask |= threads::begin_bit();
                threads::come(thread);
            }
            _ => {
                self.way().since_ns = system::now_ns(libc::CLOCK_THREAD_CPUTIME_ID);
                threads::next_burst(thread, AWAY_NS);
            }
        }
        self.depart(pc)
    }
}

/// A thread comes back from a system call, on its own stack; its registers are in its frame.
extern "C" fn woken(thread: u32) -> ! {
    // SAFETY: the calling thread's own.
    let frame = unsafe { &mut *THREAD_FRAMES.load(Acquire).add(thread as usize) };
    frame.is_out = false;
    if !threads::is_ours() {
        forked(frame);
    }
    TURN.take();
    // SAFETY: both were made before any thread came, and it is our turn.
    let engine = unsafe { &mut *ENGINE.load(Acquire) };
    // SAFETY: as above.
    unsafe { (*OWNER.load(Acquire)).owner.store(frame.owner, Relaxed) };
    let bytes = engine.area.state_bytes;
    engine.area.context = frame.context;
    engine.area.state.0[..bytes].copy_from_slice(&frame.state.0[..bytes]);
    engine.area.thread = thread;
    engine.area.fs = frame.fs;
    engine.pending = frame.pending;
    engine.recorder.switch(thread);
    engine.goes_on();
    engine.after_call();
    let go_on = engine.stubs.go_on;
    // SAFETY: code that lets the program go on where `after_call` has said.
    unsafe { asm!("jmp {go_on}", go_on = in(reg) go_on, options(noreturn)) }
}

/// The one thread of a forked process goes on natively.
fn forked(frame: &mut Frame) -> ! {
    faults::stand_back(faulted);
    frame.context.registers[RIP] = frame.pending.next;
    frame.context.registers[RCX] = frame.pending.next;
    let context = &raw const frame.context;
    // SAFETY: as when a thread leaves copies.
    unsafe {
        asm!("mov rsp, {context}", "mov eax, 15", "syscall", "ud2", context = in(reg) context, options(noreturn))
    }
}

/// What there is to say at the end: what ran natively, and why.
pub fn report(engine: &Engine) -> String {
    let [_, call, code, _, fault, handler] = engine.ends;
    format!(
        "{} ms of CPU time were native and are not recorded; threads went there {call} times at a system call, {code} at \
         code that is made at run time or cannot be copied, {fault} at an instruction that faults, {handler} as the program \
         handles SIGSYS or has a shadow stack; instructions recorded: {}",
        engine.away_ns / 1_000_000,
        engine.total
    )
}
