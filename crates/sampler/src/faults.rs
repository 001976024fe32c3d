//! Instructions that fault in a burst, of programs that handle such signals themselves.
//!
//! A handler of the program's must not see an address of a copy, nor registers that a copy has borrowed. So while a
//! burst lasts, ours stands in for each of theirs. A fault in a copy ends the burst at the program's
//! instruction, which faults again, natively, and the program's handler sees that alone. Threads that
//! are not in the burst are handed on to it.

use crate::threads;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const SIGNALS: [i32; 5] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP];

/// The program's actions while ours stand in for them, by signal as above.
static ACTIONS: [[AtomicU64; 4]; 5] = [const { [const { AtomicU64::new(0) }; 4] }; 5];

pub type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut c_void);

/// Stands in for the program's handlers; of which signals.
pub fn stand_in(ours: Handler) -> u64 {
    let mut set = 0;
    for (signal, kept) in SIGNALS.iter().zip(&ACTIONS) {
        let mut theirs = threads::action(*signal);
        // Counting copies are stopped by a fault.
        if theirs[0] <= 1 && *signal != libc::SIGSEGV {
            continue;
        }
        set |= 1 << (signal - 1);
        // A process that was forked in a burst has ours.
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

/// The program's handlers are back, but where it has set another meanwhile.
pub fn stand_back(ours: Handler) {
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

/// Does what the program's handler does.
pub fn hand_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let Some(nth) = SIGNALS.iter().position(|of| *of == signal) else { return };
    let [handler, flags, ..] = ACTIONS[nth].each_ref().map(|word| word.load(Relaxed));
    if flags & libc::SA_RESETHAND as u32 as u64 != 0 {
        threads::set_action(signal, &[0; 4]);
    }
    if handler <= 1 {
        // It happens again.
        stand_back_for(nth);
        // SAFETY: the kernel hands handlers its reason.
        if unsafe { (*info).si_code } <= 0 {
            send_again(signal, info);
        }
    } else {
        // SAFETY: the program has set a handler of this type, or of one with fewer arguments, which the
        // calling convention lets be.
        let handler = unsafe { std::mem::transmute::<usize, Handler>(handler as usize) };
        handler(signal, info, context);
    }
}

/// Lets the calling thread have a signal once more, that somebody has sent.
pub fn send_again(signal: libc::c_int, info: *mut libc::siginfo_t) {
    threads::send(signal as isize, info as usize);
}

/// Whether the program handles what system calls may raise, whose copies are not where they are.
pub fn are_of_calls() -> bool {
    threads::action(libc::SIGSYS)[0] > 1
}
