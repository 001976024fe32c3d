//! Huge pages for a process's own heap and stack, now and as they grow. The preload library uses this for
//! unmodified programs, and the C interface for programs that ask.
//!
//! Invariants: the program does and prints the same as without this library. So the code uses only libc and
//! raw system calls, does not allocate or panic, and keeps errno. malloc and mmap are interposed ([`malloc`],
//! [`mmap`]). Until something is asked for, they only pass calls on.

pub mod heap;
pub mod selection;
pub mod stack;
pub mod system;

mod bss;
mod growth;
mod malloc;
mod mmap;
mod next;

/// Reasons why a page size is not available.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// The system has no pages of this size, or does not give them by advice.
    NoSuchSize,
    /// The administrator has set pages of this size to `never`.
    SwitchedOff,
    /// The stack's limit, in bytes, is too small for such pages.
    StackLimit(u64),
    /// A system call failed with this errno.
    Failed(i32),
}

/// Checks that advice gets pages of this size.
fn offered(page_bytes: u64) -> Result<(), Refused> {
    match system::offer(page_bytes) {
        system::Offer::Advised => Ok(()),
        system::Offer::Never => Err(Refused::SwitchedOff),
        system::Offer::None => Err(Refused::NoSuchSize),
    }
}

/// Advises page sizes in bytes, where available; 0 leaves a part alone. The constructor that `pagetax build`
/// links into a program calls this with the program's own sizes.
#[unsafe(no_mangle)]
pub extern "C" fn pagetax_advise(heap_page_bytes: u64, stack_page_bytes: u64) {
    let errno = system::errno();
    let _ = stack::advise(stack_page_bytes);
    let _ = heap::advise(heap_page_bytes);
    system::set_errno(errno);
}
