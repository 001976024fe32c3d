//! How a process puts its own heap and stack on large pages, now and as they grow. What the preload
//! library does to unmodified programs, and the C interface for those that ask.
//!
//! Invariants: the program does and prints what it would have. So: libc and raw system calls only,
//! nothing that allocates or panics, and errno as it was. malloc and mmap are interposed ([`malloc`],
//! [`mmap`]); until something is asked for, they only pass calls on.

pub mod heap;
pub mod stack;
pub mod system;

mod bss;
mod growth;
mod malloc;
mod mmap;
mod next;

/// Why a page size cannot be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// The system has no such pages, or they cannot be had by advice.
    NoSuchSize,
    /// Set to `never`.
    SwitchedOff,
    /// The stack's limit, in bytes, has no room for such pages.
    StackLimit(u64),
    /// A system call failed with this errno.
    Failed(i32),
}

/// Whether pages of this size are given to those who advise; why not, if not.
fn offered(page_bytes: u64) -> Result<(), Refused> {
    match system::offer(page_bytes) {
        system::Offer::Advised => Ok(()),
        system::Offer::Never => Err(Refused::SwitchedOff),
        system::Offer::None => Err(Refused::NoSuchSize),
    }
}

/// For programs that carry their sizes themselves (`pagetax cc`): called by a constructor. What is
/// refused is left as it is; 0 leaves a part alone.
#[unsafe(no_mangle)]
pub extern "C" fn pagetax_advise(heap_page_bytes: u64, stack_page_bytes: u64) {
    let errno = system::errno();
    let _ = stack::advise(stack_page_bytes);
    let _ = heap::advise(heap_page_bytes);
    system::set_errno(errno);
}
