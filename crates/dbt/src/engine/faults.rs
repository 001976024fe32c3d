//! Faults of instructions in a burst, in programs that handle such signals themselves.
//!
//! A handler of the program must not see an address of a translation, nor registers that a translation has
//! borrowed. So our handler replaces the program's handlers during a burst. A fault in a translation ends the
//! burst at the program's instruction. This faults again, natively, and the program's handler sees only that
//! fault. For threads that are not in the burst, our handler calls the program's.

use super::threads::{self, Handler};
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const SIGNALS: [i32; 5] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP];

/// The program's actions while ours replace them, by index in [`SIGNALS`].
static ACTIONS: [[AtomicU64; 4]; 5] = [const { [const { AtomicU64::new(0) }; 4] }; 5];

/// Replaces the program's handlers. Returns the signals of the replaced ones.
pub fn replace_handlers(ours: Handler) -> u64 {
    let mut set = 0;
    for (signal, kept) in SIGNALS.iter().zip(&ACTIONS) {
        let mut theirs = threads::action(*signal);
        // A SIGSEGV stops counting translations, so its handler is always replaced.
        if theirs[0] <= 1 && *signal != libc::SIGSEGV {
            continue;
        }
        set |= 1 << (signal - 1);
        // A process that was forked during a burst inherits our handler.
        if theirs[0] == ours as usize as u64 {
            continue;
        }
        kept.iter().zip(theirs).for_each(|(kept, word)| kept.store(word, Relaxed));
        if theirs[0] <= 1 {
            theirs = threads::our_action();
        }
        let [_, flags, restorer, mask] = theirs;
        let flags = (flags | libc::SA_SIGINFO as u64) & !(libc::SA_RESETHAND as u32 as u64);
        threads::set_action(*signal, &[ours as usize as u64, flags, restorer, mask]);
    }
    set
}

/// Restores the program's handlers, except where it has set another one meanwhile.
pub fn restore_handlers(ours: Handler) {
    for (nth, signal) in SIGNALS.iter().enumerate() {
        if threads::action(*signal)[0] == ours as usize as u64 {
            stand_back_for(nth);
        }
    }
}

fn stand_back_for(nth: usize) {
    let kept = ACTIONS[nth].each_ref().map(|word| word.load(Relaxed));
    threads::set_action(SIGNALS[nth], &kept);
}

/// Calls the program's handler, or lets the default action happen.
pub fn call_program_handler(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let Some(nth) = SIGNALS.iter().position(|of| *of == signal) else { return };
    let [handler, flags, ..] = ACTIONS[nth].each_ref().map(|word| word.load(Relaxed));
    if flags & libc::SA_RESETHAND as u32 as u64 != 0 {
        threads::set_action(signal, &[0; 4]);
    }
    if handler <= 1 {
        // The instruction faults again, without our handler.
        stand_back_for(nth);
        // SAFETY: the kernel passes a siginfo to handlers.
        if unsafe { (*info).si_code } <= 0 {
            send_again(signal, info);
        }
    } else {
        // SAFETY: the program has set a handler of this type, or of one with fewer arguments, which the
        // calling convention allows.
        let handler = unsafe { std::mem::transmute::<usize, Handler>(handler as usize) };
        handler(signal, info, context);
    }
}

/// Sends the calling thread a signal again that a process has sent.
pub fn send_again(signal: libc::c_int, info: *mut libc::siginfo_t) {
    threads::send(signal as isize, info as usize);
}

/// Returns true if the program handles SIGSYS. Its handler would see a call of ours at another address than
/// its own.
pub fn are_of_calls() -> bool {
    threads::action(libc::SIGSYS)[0] > 1
}
