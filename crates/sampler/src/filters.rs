//! System call filters (seccomp(2)) of the program: they may kill it for a call that we make. So the engine is switched off
//! before one takes effect.

use crate::burst;
use crate::status::{Off, catch};
use crate::threads::next;
use libc::{c_int, c_long, c_ulong};
use std::sync::atomic::AtomicUsize;

fn before_filter() {
    catch(|| burst::stop(Off::Seccomp));
}

/// prctl(2).
///
/// # Safety
/// As of prctl(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn prctl(
    option: c_int,
    second: c_ulong,
    third: c_ulong,
    fourth: c_ulong,
    fifth: c_ulong,
) -> c_int {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    type Prctl = unsafe extern "C" fn(c_int, c_ulong, c_ulong, c_ulong, c_ulong) -> c_int;
    if option == libc::PR_SET_SECCOMP {
        before_filter();
    }
    // SAFETY: the C library's own function, if it has one, takes these, fewer of them for most options.
    unsafe {
        let next = std::mem::transmute::<usize, Option<Prctl>>(next(&NEXT, c"prctl"));
        next.map_or(-1, |next| next(option, second, third, fourth, fifth))
    }
}

/// syscall(2).
///
/// # Safety
/// As of syscall(2), and of the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syscall(
    number: c_long,
    first: c_ulong,
    second: c_ulong,
    third: c_ulong,
    fourth: c_ulong,
    fifth: c_ulong,
    sixth: c_ulong,
) -> c_long {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    type Syscall = unsafe extern "C" fn(
        c_long,
        c_ulong,
        c_ulong,
        c_ulong,
        c_ulong,
        c_ulong,
        c_ulong,
    ) -> c_long;
    let sets_filter = number == libc::SYS_seccomp
        || number == libc::SYS_prctl && first == libc::PR_SET_SECCOMP as c_ulong;
    if sets_filter {
        before_filter();
    }
    // SAFETY: the C library's own function, if it has one, takes these; what the caller has not given is not looked at.
    unsafe {
        let next = std::mem::transmute::<usize, Option<Syscall>>(next(&NEXT, c"syscall"));
        next.map_or(-1, |next| next(number, first, second, third, fourth, fifth, sixth))
    }
}
