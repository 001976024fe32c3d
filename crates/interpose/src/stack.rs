//! Huge pages for the main thread's stack.
//!
//! The stack loses advice that it got while it was small when it grows. So it first grows to its limit, by a
//! write to its lowest address, and is then advised as a whole. This takes only address space: pages are
//! allocated on use.

use crate::{Refused, offered, system};

/// The size to which an unlimited stack grows.
const STACK_BYTES_MAX: u64 = 64 << 20;
/// The room that is left below the limit, which also covers arguments and environment.
const MARGIN_BYTES: u64 = 128 << 10;

/// Advises pages of this size in bytes for the stack; 0 leaves the stack alone. Only the main thread may call
/// it.
///
/// # Errors
/// [`Refused`] if the size is not available, the stack's limit is too small, or a system call fails.
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

/// Returns the end of the stack's mapping. The kernel puts the executable's name at the top of the stack.
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

/// Grows the stack to this address, the start of a page. Returns false if it cannot grow that far.
///
/// The kernel writes the byte that makes the stack grow. If the stack cannot grow, the call fails; a store of
/// our own would end the program.
fn reaches(lowest: u64) -> bool {
    let page = system::base_page() as usize;
    // SAFETY: msync with MS_ASYNC only checks that the page is mapped. If it is not, nobody uses it, so the
    // write does no harm.
    unsafe {
        libc::msync(lowest as *mut _, page, libc::MS_ASYNC) == 0
            || libc::syscall(libc::SYS_getrandom, lowest, 1, libc::GRND_NONBLOCK) == 1
    }
}
