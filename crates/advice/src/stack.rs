//! Large pages for the main thread's stack.
//!
//! Advice given to a stack that is still small is lost when it grows, so the stack is first grown
//! to its limit, by touching its lowest address, and then advised as a whole. Only address space is
//! taken by this: pages come when they are used.

use crate::{Refused, offered, system};

/// An unlimited stack is grown to this size only.
const STACK_BYTES_MAX: u64 = 64 << 20;
/// Left below the limit, which counts arguments and environment too.
const MARGIN_BYTES: u64 = 128 << 10;

/// Advises pages of this size. 0 leaves the stack alone. The main thread calls it.
pub fn advise(page_bytes: u64) -> Result<(), Refused> {
    let advice = match page_bytes {
        0 => return Ok(()),
        base if base == system::base_page() => libc::MADV_NOHUGEPAGE,
        _ => {
            offered(page_bytes)?;
            libc::MADV_HUGEPAGE
        }
    };
    let size = size_limit();
    if advice == libc::MADV_HUGEPAGE && size < 2 * page_bytes {
        return Err(Refused::StackLimit(size));
    }
    let top = top().ok_or(Refused::Failed(libc::ENOSYS))?;
    let lowest = (top - size) & !(system::base_page() - 1);
    if !reaches(lowest) {
        return Err(Refused::Failed(system::errno()));
    }
    // SAFETY: the range is the stack, which is mapped; the advice changes no contents.
    match unsafe { libc::madvise(lowest as *mut _, (top - lowest) as usize, advice) } {
        0 => Ok(()),
        _ => Err(Refused::Failed(system::errno())),
    }
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

/// Whether the stack reaches down to this address, which starts a page; grows it if it does not.
///
/// Grown by having the kernel write a byte there. Where the stack cannot grow that far, the call
/// fails; a store of our own would end the program.
fn reaches(lowest: u64) -> bool {
    let page = system::base_page() as usize;
    // SAFETY: msync without MS_SYNC does nothing but tell whether the page is mapped. If it is not,
    // nobody uses it, and the write can harm nobody.
    unsafe {
        libc::msync(lowest as *mut _, page, libc::MS_ASYNC) == 0
            || libc::syscall(libc::SYS_getrandom, lowest, 1, libc::GRND_NONBLOCK) == 1
    }
}
