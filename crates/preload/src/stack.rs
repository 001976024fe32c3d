//! Large pages for the main thread's stack.
//!
//! Advice given to a stack that is still small is lost when it grows, so the stack is first grown
//! to its limit, by touching its lowest address, and then advised as a whole. Only address space is
//! taken by this: pages come when they are used.

use crate::log::{Decimal, Log};
use crate::system::{self, Offer};

/// An unlimited stack is grown to this size only.
const STACK_BYTES_MAX: u64 = 64 << 20;
/// Left below the limit, which counts arguments and environment too.
const MARGIN_BYTES: u64 = 128 << 10;

/// Advises pages of this size. 0 leaves the stack alone.
pub fn advise(page_bytes: u64, log: &Log) {
    let Some(top) = top() else { return log.line(&[b"stack: cannot find its top"]) };
    let advice = match page_bytes {
        0 => return,
        base if base == system::base_page() => libc::MADV_NOHUGEPAGE,
        _ => match system::offer(page_bytes) {
            Offer::Advised => libc::MADV_HUGEPAGE,
            offer => return refuse(b"stack", page_bytes, offer, log),
        },
    };
    let size = size_limit();
    if advice == libc::MADV_HUGEPAGE && size < 2 * page_bytes {
        let limit = Decimal::of(size >> 10);
        return log.line(&[
            b"stack: its limit of ",
            limit.digits(),
            b" KiB is too small for such pages",
        ]);
    }
    let lowest = (top - size) & !(system::base_page() - 1);
    if !grow_to(lowest) {
        return log.line(&[b"stack: cannot grow it to its limit"]);
    }
    // SAFETY: the range is the stack, which is mapped; the advice changes no contents.
    let failed = unsafe { libc::madvise(lowest as *mut _, (top - lowest) as usize, advice) != 0 };
    if failed {
        log.line(&[b"stack: advice failed, errno ", Decimal::of(system::errno() as u64).digits()]);
    }
}

/// Logs why a size cannot be had.
pub fn refuse(what: &[u8], page_bytes: u64, offer: Offer, log: &Log) {
    let size = Decimal::of(page_bytes >> 10);
    let why: &[u8] = match offer {
        Offer::Never => b" KiB pages are switched off (transparent_hugepage: never)",
        _ => b" KiB: invalid page size on this system",
    };
    log.line(&[what, b": ", size.digits(), why]);
}

/// The end of the stack's mapping. The kernel puts the executable's name at its very top.
fn top() -> Option<u64> {
    // SAFETY: getauxval has no preconditions.
    let name = unsafe { libc::getauxval(libc::AT_EXECFN) };
    let page = system::base_page();
    (name != 0).then_some((name | (page - 1)) + 1)
}

fn size_limit() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure is valid for the call.
    unsafe { libc::getrlimit(libc::RLIMIT_STACK, &mut limit) };
    limit.rlim_cur.min(STACK_BYTES_MAX).saturating_sub(MARGIN_BYTES)
}

/// Has the kernel write a byte at the lowest address. Where the stack cannot grow that far, the call
/// fails; a store of our own would end the program.
fn grow_to(lowest: u64) -> bool {
    // SAFETY: either nothing is mapped there, and the call fails, or the address is in the stack,
    // below everything that is in use: `size_limit` leaves room for what main has on it already.
    unsafe { libc::syscall(libc::SYS_getrandom, lowest, 1, libc::GRND_NONBLOCK) == 1 }
}
