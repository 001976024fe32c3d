//! Memory that must be resident when the process forks. The C library touches it in the child
//! before our handler runs there, and when the handler starts threads. Until then no thread of the
//! child serves faults.
//!
//! This is the memory that the C library's variables, and those of the forking thread, point to:
//! streams, the locale, the state of the name service, the neighbours in lists of threads. The set
//! of variables differs between versions. So every variable counts that holds an address of paged
//! memory. The stack of the forking thread counts as well.

use crate::objects::c_variables;
use crate::paged::Paged;
use crate::streams::Streams;
use std::ops::Range;

const PAGE: usize = 4096;
/// The distance behind an address that the C library may read: twice the size of its largest
/// structure of this kind, the locale.
const REACH: usize = 2048;
/// The stack that our handler may need, and the stack in use by the functions that lead to it.
const STACK_BELOW: usize = 96 << 10;
const STACK_ABOVE: usize = 16 << 10;

/// Makes all of it resident. Returns the pages for which that worked. They stay resident while
/// eviction is stopped.
pub fn make_resident(paged: &Paged, streams: &Streams) -> Vec<usize> {
    let mut pages: Vec<usize> = streams.addresses().into_iter().map(page_of).collect();
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
    pages.retain(|page| paged.contains(*page) && make_page_resident(paged, *page));
    pages
}

fn page_of(at: usize) -> usize {
    at / PAGE * PAGE
}

/// Makes a page resident. Returns false if its memory is inaccessible: a stale address, which no
/// thread follows.
fn make_page_resident(paged: &Paged, page: usize) -> bool {
    // SAFETY: a direct system call that changes no bytes, and fails if the memory is inaccessible.
    let populate = || unsafe { libc::madvise(page as *mut _, PAGE, libc::MADV_POPULATE_READ) };
    paged.is_resident(page as *const u8) || populate() == 0
}

/// Returns all words of a range of variables. Other threads may be changing them.
fn words(range: &Range<usize>) -> impl Iterator<Item = usize> {
    let first = range.start.next_multiple_of(size_of::<usize>());
    let last = range.end.saturating_sub(size_of::<usize>() - 1);
    // SAFETY: inside variables, which stay mapped as long as the process lives.
    (first..last)
        .step_by(size_of::<usize>())
        .map(|at| unsafe { (at as *const usize).read_volatile() })
}

/// Returns the C library's own variables of the calling thread: its `struct pthread`.
#[cfg(target_arch = "x86_64")]
fn thread_variables() -> Option<Range<usize>> {
    use crate::threads::next;
    use std::sync::atomic::AtomicUsize;
    static SIZE: AtomicUsize = AtomicUsize::new(0);
    /// A lower bound of the size, for a C library without the symbol that debuggers read.
    const SIZE_AT_LEAST: usize = 1024;
    let size = next(c"_thread_db_sizeof_pthread", &SIZE) as *const u32;
    // SAFETY: the C library's constant of that name is such a number.
    let bytes = if size.is_null() { SIZE_AT_LEAST } else { unsafe { size.read() as usize } };
    let start: usize;
    // SAFETY: reads the thread's pointer to its own structure, at the place that the ABI gives.
    unsafe { std::arch::asm!("mov {}, fs:0", out(reg) start, options(nostack, readonly)) };
    Some(start..start + bytes)
}

/// Returns `None`: on other architectures the structure does not begin at the thread pointer.
#[cfg(not(target_arch = "x86_64"))]
fn thread_variables() -> Option<Range<usize>> {
    None
}
