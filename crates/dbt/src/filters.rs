//! The program's system call filters (seccomp(2)). They may kill it for a call of ours, so the engine is
//! switched off before one takes effect.

use crate::engine;
use crate::engine::threads::next;
use crate::status::{OffReason, catch};
use libc::{c_int, c_long, c_ulong};
use std::sync::atomic::AtomicUsize;

fn before_filter() {
    catch(|| engine::stop(OffReason::Seccomp));
}

/// Interposes prctl(2), which can install a seccomp filter.
///
/// # Safety
/// The same conditions as for prctl(2).
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
    // SAFETY: the C library's own function, if there is one, takes these; it reads fewer for most options.
    unsafe {
        let next = std::mem::transmute::<usize, Option<Prctl>>(next(&NEXT, c"prctl"));
        next.map_or(-1, |next| next(option, second, third, fourth, fifth))
    }
}

/// Interposes syscall(2), which can install a seccomp filter.
///
/// # Safety
/// The same conditions as for syscall(2), and for the call.
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
    // SAFETY: the C library's own function, if there is one, takes these. The kernel ignores arguments that
    // the call does not have.
    unsafe {
        let next = std::mem::transmute::<usize, Option<Syscall>>(next(&NEXT, c"syscall"));
        next.map_or(-1, |next| next(number, first, second, third, fourth, fifth, sixth))
    }
}
