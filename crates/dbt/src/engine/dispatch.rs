//! The dispatcher: decides where the program goes on when translated code returns control.

use super::faults;
use super::threads;
use super::*;
use crate::cache::CacheKind;
use crate::calls::{self, Decision};
use crate::heap;
use crate::status::{self, catch, status};
use crate::system;
use crate::thread_state::{self, RIP, Reason, SLOTS};
use std::arch::asm;
use std::sync::atomic::Ordering::*;

impl Engine {
    pub(super) fn direct(&mut self, exit: usize) {
        let to = self.cache().exits[exit].to;
        let before = self.cache().blocks.len();
        self.enter_translation(to);
        let cache = self.cache();
        // Unless `go` has cleared the cache, this exit with it.
        if let Some(number) = cache.find(to).filter(|_| cache.blocks.len() >= before) {
            cache.link(exit, number);
        }
    }

    pub(super) fn indirect(&mut self, is_return: bool) {
        let to = self.thread_state.target;
        self.enter_translation(to);
        let (cache, thread_state) = (&mut self.caches[self.kind as usize], &mut *self.thread_state);
        match cache.find(to) {
            _ if is_return => cache.link_return(thread_state, to),
            Some(number) => cache.link_jump(thread_state, number),
            None => {}
        }
    }

    pub(super) fn full(&mut self, number: usize) {
        let pc = self.cache().blocks[number].start;
        self.drain_log();
        match self.is_over() {
            Some(BurstEnd::Done) => self.done(pc),
            Some(why) => self.leave(pc, why),
            None => self.resume(number),
        }
    }

    pub(super) fn before_call(&mut self, number: usize) {
        let block = self.cache().blocks[number];
        let next = block.start + u64::from(block.bytes);
        self.pending = PendingCall { next, unmaps: None };
        if calls::asks_for_large_pages(&self.thread_state.context) {
            self.expect_large();
        }
        match calls::decide(&self.thread_state.context, &self.maps) {
            Decision::Leave => self.leave(next - 2, BurstEnd::Call),
            Decision::Run => self.make_call(),
            Decision::Unmap(range) => {
                self.pending.unmaps = Some((range.start, range.end - range.start));
                self.make_call();
            }
            Decision::Try(place) => {
                let argument = self.thread_state.context.registers[place];
                self.thread_state.context.registers[place] = 0;
                let result = calls::make(&self.thread_state.context);
                self.thread_state.context.registers[place] = argument;
                match result {
                    0 if argument != 0 => self.leave(next - 2, BurstEnd::Call),
                    _ => self.called(result),
                }
            }
        }
    }

    pub(super) fn make_call(&mut self) {
        let result = calls::make(&self.thread_state.context);
        self.called(result);
    }

    /// Completes a system call with `result`. Sets rcx and r11 as the syscall instruction does.
    pub(super) fn called(&mut self, result: i64) {
        let registers = &mut self.thread_state.context.registers;
        registers[calls::RAX] = result as u64;
        registers[R11] = registers[thread_state::FLAGS];
        registers[RCX] = self.pending.next;
        self.safe = Some(self.pending.next);
        self.after_call();
    }

    /// Makes the code that drains logs check the filter of large pages, too.
    pub(super) fn expect_large(&mut self) {
        self.drain_log();
        if self.recorder.expect_large() {
            self.translator.set_filters(self.recorder.sides());
            self.caches[CacheKind::Logging as usize].clear(self.thread_state, &self.stubs);
        }
    }

    pub(super) fn after_call(&mut self) {
        let PendingCall { next, unmaps } = self.pending;
        let result = self.thread_state.context.registers[calls::RAX] as i64;
        if let (Some((start, length)), true, CacheKind::Logging) = (unmaps, result >= 0, self.kind)
        {
            self.drain_log();
            self.recorder.gone(start, length);
        }
        // The kernel has sent SIGPIPE or SIGXFSZ, which must be delivered now.
        if [-i64::from(libc::EPIPE), -i64::from(libc::EFBIG)].contains(&result) {
            self.leave(next, BurstEnd::Signal);
        }
        if self.must_leave() {
            self.leave(next, BurstEnd::Signal);
        }
        self.enter_translation(next);
    }

    /// Handles a fault of a translated instruction: the program repeats the instruction natively.
    pub(super) fn fault(&mut self, is_known: bool) {
        let at = self.thread_state.target as usize;
        let copy = self.cache().block_at(at);
        if let (Some((number, 0)), CacheKind::Counting) = (copy, self.kind) {
            if is_known {
                self.safe = Some(self.cache().blocks[number].start);
                return self.poll(number);
            }
            self.thread_state.resume = self.stubs.counting.fault as u64;
            return;
        }
        let state = copy.and_then(|(number, place)| {
            let start = self.cache().blocks[number].start;
            let bytes = self.maps.code_at(start)?;
            let cache = &mut self.caches[self.kind as usize];
            self.translator.state_at(cache, start, bytes, place)
        });
        let is_ours = state.is_none_or(|state| !state.has_vector);
        if self.kind == CacheKind::Counting && is_ours && !is_known {
            self.thread_state.resume = self.stubs.counting.fault as u64;
            return;
        }
        let Some(state) = state else {
            // The fault was not in a translation: let the program's handler have it.
            faults::restore_handlers(handle_fault);
            self.thread_state.resume = at as u64;
            return;
        };
        for number in state.borrowed().map(usize::from) {
            self.thread_state.context.registers[thread_state::PLACES[number]] =
                self.thread_state.spilled[number];
        }
        self.safe = Some(state.instruction);
        // The block has not filled its frame: drop the frame.
        self.thread_state.position += 8 * SLOTS as u64;
        self.leave(state.instruction, BurstEnd::Fault);
    }

    /// Ends the burst. The program goes on at `pc`, natively.
    pub(super) fn leave(&mut self, pc: u64, why: BurstEnd) -> ! {
        match self.sampling.stage {
            BurstStage::Out => {}
            BurstStage::Between => self.drain_counter(),
            BurstStage::Warming | BurstStage::Counted => self.drain_log(),
        }
        if why != BurstEnd::Done && self.sampling.stage != BurstStage::Between {
            ended(why);
        }
        if why != BurstEnd::Done && self.sampling.stage == BurstStage::Counted {
            self.draw_next_burst();
        }
        self.end_polls();
        self.enter_stage(BurstStage::Out, 0);
        let thread = self.thread_state.thread;
        self.schedule().since_ns = system::now_ns(libc::CLOCK_THREAD_CPUTIME_ID);
        // Until the program has its own alternative stack again, no timer may fire.
        threads::block_signals();
        threads::next_burst(thread, self.config.stress.map_or(AWAY_NS, |stress| stress.gap_ns));
        self.resume_natively(pc)
    }

    /// Lets the program go on at `pc`, natively. Its signals stay blocked until then.
    pub(super) fn resume_natively(&mut self, pc: u64) -> ! {
        self.thread_state.context.registers[RIP] = pc;
        faults::restore_handlers(handle_fault);
        if IS_CANCELLED.swap(false, Relaxed) {
            threads::cancel_again();
        }
        // SAFETY: there is a frame for each thread number, and only this thread uses this one.
        let frame = unsafe { &mut *self.frames.add(self.thread_state.thread as usize) };
        let bytes = self.thread_state.state_bytes;
        frame.context = self.thread_state.context;
        frame.context.state = &raw const frame.state as u64;
        frame.state.0[..bytes].copy_from_slice(&self.thread_state.state.0[..bytes]);
        // SAFETY: rt_sigreturn takes the context that the kernel gave us, with other values of registers.
        // Once `owner` is 0, another thread may use all of the thread state, and the stack. Only this thread's frame
        // is safe.
        unsafe {
            asm!(
                "mov rsp, {context}",
                "mov dword ptr [{owner}], 0",
                "mov eax, 15",
                "syscall",
                "ud2",
                context = in(reg) &raw const frame.context,
                owner = in(reg) self.thread_state.owner.as_ptr(),
                options(noreturn)
            )
        }
    }
}

/// Indices into [`SignalContext::registers`].
pub(super) const R11: usize = thread_state::PLACES[11];
pub(super) const RCX: usize = thread_state::PLACES[1];

/// Counts a burst that has ended or did not begin.
pub(super) fn ended(why: BurstEnd) {
    status().ends[why as usize].fetch_add(1, Relaxed);
}

impl Engine {
    /// Decides where translated code goes on after it returned control.
    pub(super) fn dispatch(&mut self) {
        let (reason, number) = (self.thread_state.reason, self.thread_state.number as usize);
        self.safe = self.program_at(reason, number);
        if let (true, Some(pc)) = (status::has_failed(), self.safe) {
            self.give_up(pc);
        }
        self.return_count += 1;
        if self.config.stress.is_some_and(|stress| stress.panic_at == self.return_count) {
            panic!("asked for by a test");
        }
        match reason {
            _ if heap::is_short() => panic!("no memory is left for the engine"),
            reason if reason == Reason::Begin as u32 => self.begin(self.thread_state.target),
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
    pub(super) fn program_at(&self, reason: u32, number: usize) -> Option<u64> {
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
                Some(self.thread_state.target)
            }
            _ => None,
        }
    }

    /// Recovers from a panic. The program goes on natively, now or at the next return of its translated code.
    pub(super) fn recover(&mut self) {
        stop_counting(self.thread_state, false);
        if let Some(pc) = self.safe {
            self.give_up(pc);
        }
        let at = self.thread_state.target;
        (self.thread_state.resume, self.thread_state.resume_counting) =
            match self.thread_state.reason {
                reason if reason == Reason::FaultKnown as u32 => {
                    (self.stubs.counting.resume as u64, at)
                }
                _ => (at, at),
            };
    }

    /// Lets the program go on at `pc` and records nothing more.
    pub(super) fn give_up(&mut self, pc: u64) -> ! {
        self.end_polls();
        threads::block_signals();
        self.resume_natively(pc)
    }
}

/// Receives control from translated code, by way of the stubs.
pub(super) extern "C" fn dispatch() {
    let engine = ENGINE.load(Acquire);
    // SAFETY: the thread in the burst owns the engine, and the second use begins after the first has ended.
    unsafe {
        if catch(|| (*engine).dispatch()).is_none() {
            (*engine).recover();
        }
    }
}
