//! Memory that the C library reaches in the child of a fork before our handler runs there, and at the start of the
//! threads that the handler starts. Nobody serves faults then, so it must be here when the process forks.
//!
//! This is what its variables, and those of the forking thread, point to: streams, the locale, the state of its name
//! service, the neighbours in its lists of threads. Which variables these are differs from version to version; so
//! all of them count that hold an address of paged memory. Further, the stack of the forking thread.

use crate::objects::c_variables;
use crate::paged::Paged;
use crate::streams::Streams;
use crate::threads::next;
use std::ops::Range;
use std::sync::atomic::AtomicUsize;

const PAGE: usize = 4096;
/// How far behind an address the C library may read: twice its largest structure of this kind, a locale's.
const REACH: usize = 2048;
/// What our handler may need of a stack, and what has been used of it by the functions that lead to it.
const STACK_BELOW: usize = 96 << 10;
const STACK_ABOVE: usize = 16 << 10;

/// Brings all of it back; returns the pages that could be brought. They stay as long as nothing is evicted.
pub fn bring(paged: &Paged, streams: &Streams) -> Vec<usize> {
    let mut pages: Vec<usize> = streams.places().into_iter().map(page_of).collect();
    for variables in c_variables().chain(thread_variables()) {
        pages.extend(
            words(&variables)
                .filter(|word| paged.contains(*word))
                .flat_map(|word| [page_of(word), page_of(word + REACH)]),
        );
    }
    let here = std::ptr::from_ref(&pages) as usize;
    pages.extend((page_of(here - STACK_BELOW)..here + STACK_ABOVE).step_by(PAGE));
    pages.sort_unstable();
    pages.dedup();
    pages.retain(|page| paged.contains(*page) && bring_page(paged, *page));
    pages
}

fn page_of(at: usize) -> usize {
    at / PAGE * PAGE
}

/// Whether a page is here, now. An address may be stale, and its memory not accessible: then nobody reaches it.
fn bring_page(paged: &Paged, page: usize) -> bool {
    // SAFETY: a direct system call that changes no bytes, and fails where there is nothing to read.
    let populate = || unsafe { libc::madvise(page as *mut _, PAGE, libc::MADV_POPULATE_READ) };
    paged.is_here(page as *const u8) || populate() == 0
}

/// All words of a range of variables, which others may be changing.
fn words(range: &Range<usize>) -> impl Iterator<Item = usize> {
    let first = range.start.next_multiple_of(size_of::<usize>());
    let last = range.end.saturating_sub(size_of::<usize>() - 1);
    // SAFETY: inside variables that are mapped as long as the process lives.
    (first..last)
        .step_by(size_of::<usize>())
        .map(|at| unsafe { (at as *const usize).read_volatile() })
}

/// The C library's own variables of the calling thread.
#[cfg(target_arch = "x86_64")]
fn thread_variables() -> Option<Range<usize>> {
    static SIZE: AtomicUsize = AtomicUsize::new(0);
    /// Where debuggers look for the size of the structure; at least so much of it there is.
    const SIZE_AT_LEAST: usize = 1024;
    let size = next(c"_thread_db_sizeof_pthread", &SIZE) as *const u32;
    // SAFETY: the C library's constant of that name is such a number.
    let bytes = if size.is_null() { SIZE_AT_LEAST } else { unsafe { size.read() as usize } };
    let start: usize;
    // SAFETY: reads the thread's pointer to its own structure, which the ABI puts there.
    unsafe { std::arch::asm!("mov {}, fs:0", out(reg) start, options(nostack, readonly)) };
    Some(start..start + bytes)
}

/// Not known where the thread's structure does not begin at the thread's pointer.
#[cfg(not(target_arch = "x86_64"))]
fn thread_variables() -> Option<Range<usize>> {
    None
}
