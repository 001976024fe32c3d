//! The signals that begin and end bursts: those of our timers, and faults.

use super::faults;
use super::threads::{self, Sent};
use super::*;
use crate::status::{Inside, catch};
use crate::system;
use crate::thread_state::{self, RIP, Reason, STATE_BYTES, SignalContext, ThreadState};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering::*};

/// Makes the next counting block trap, or lets it run: protects the page that it reads.
pub(super) fn stop_counting(thread_state: *const ThreadState, stop: bool) {
    // SAFETY: takes only the address of a field.
    let counts = unsafe { &raw const (*thread_state).counts } as usize;
    let protection = if stop { libc::PROT_NONE } else { libc::PROT_READ } as usize;
    let arguments = [counts, size_of::<thread_state::CountConstants>(), protection, 0, 0, 0];
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
    let (sent, context) = unsafe { (threads::sent(info), &mut *context.cast::<SignalContext>()) };
    let thread_state = OWNER.load(Acquire);
    if thread_state.is_null() {
        return;
    }
    // SAFETY: touches only the owner's field, an atomic.
    let owner = unsafe { &(*thread_state).owner };
    let is_in_cache = owner.load(Relaxed) == system::thread();
    match sent {
        Some(Sent::Poll) if is_in_cache => {
            faults::replace_handlers(handle_fault);
            stop_counting(thread_state, true);
        }
        Some(Sent::Begin(thread)) if !is_in_cache => {
            let inside = Inside::enter();
            if inside.is_some()
                && catch(|| timer_expired(thread_state, owner, context, thread)).is_none()
            {
                let _ = owner.compare_exchange(system::thread(), 0, Release, Relaxed);
            }
        }
        _ => {}
    }
}

/// Makes the calling thread leave translated code soon. Returns false if it runs natively.
pub fn leaves_soon() -> bool {
    let thread_state = OWNER.load(Acquire);
    // SAFETY: touches only the owner's field, an atomic.
    let is_in_cache = !thread_state.is_null()
        && unsafe { (*thread_state).owner.load(Relaxed) } == system::thread();
    if is_in_cache {
        IS_CANCELLED.store(true, Relaxed);
        faults::replace_handlers(handle_fault);
        stop_counting(thread_state, true);
    }
    is_in_cache
}

/// Handles a thread's timer: a burst begins when the handler returns, unless another thread is in one.
pub(super) fn timer_expired(
    thread_state: *mut ThreadState,
    owner: &AtomicU32,
    context: &mut SignalContext,
    thread: u32,
) {
    if context.is_on_alternative_stack() {
        // Our signal stack cannot replace the alternative stack while the program uses it.
        ended(BurstEnd::Signal);
        return threads::next_burst(thread, AWAY_NS);
    }
    if owner.compare_exchange(0, system::thread(), Acquire, Relaxed).is_err() {
        WANTED.store(true, Relaxed);
        return threads::try_again(thread);
    }
    // SAFETY: the thread state is ours now.
    if unsafe { take_over(&mut *thread_state, context, thread) }.is_none() {
        owner.store(0, Release);
    }
}

/// Replaces the program's handlers of faults while there is a burst.
pub(super) extern "C" fn handle_fault(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    let thread_state = OWNER.load(Acquire);
    // SAFETY: touches only the owner's field, an atomic; there is a thread state because there was a burst.
    if unsafe { (*thread_state).owner.load(Relaxed) } != system::thread() {
        return faults::call_program_handler(signal, info, context);
    }
    // SAFETY: the kernel passes both to handlers. This thread is in the burst, so the thread state is its own.
    let (thread_state, context, code) =
        unsafe { (&mut *thread_state, &mut *context.cast::<SignalContext>(), (*info).si_code) };
    if code <= 0 {
        // A process has sent the signal. It stays pending until the burst is over, which is soon.
        context.mask |= 1 << (signal - 1);
        return faults::send_again(signal, info);
    }
    thread_state.target = context.registers[RIP];
    thread_state.reason = Reason::Fault as u32;
    // SAFETY: the engine was written once, before the first timer.
    context.registers[RIP] = unsafe { (*ENGINE.load(Acquire)).stubs.enter as u64 };
}

/// Makes the thread go on in a burst. Returns none if the kernel saved extended state in an unknown form.
pub(super) unsafe fn take_over(
    thread_state: &mut ThreadState,
    context: &mut SignalContext,
    thread: u32,
) -> Option<()> {
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
    unsafe { ptr::copy_nonoverlapping(state, thread_state.state.0.as_mut_ptr(), bytes) };
    // SAFETY: the engine was written once, before the first timer.
    let enter = unsafe { (*ENGINE.load(Acquire)).stubs.enter };
    let mask = !(faults::replace_handlers(handle_fault) | threads::signal_bit());
    thread_state.context = *context;
    let [_, flags, stack_bytes] = &mut thread_state.context.stack;
    if *stack_bytes == 0 {
        // The kernel may report a stack of no bytes as enabled, but does not accept one.
        *flags = libc::SS_DISABLE as u64;
    }
    thread_state.state_bytes = bytes;
    thread_state.target = context.registers[RIP];
    thread_state.reason = Reason::Begin as u32;
    thread_state.thread = thread;
    context.registers[RIP] = enter as u64;
    context.mask = mask;
    // The program's stack may be too small for a signal frame. And while we run on our own stack, the kernel
    // would deliver signals on the program's alternative stack, which is in use.
    let signal_stack = &raw const thread_state.signal_stack;
    context.stack = [signal_stack as u64, 0, size_of_val(&thread_state.signal_stack) as u64];
    Some(())
}
