//! libpagetax: page sizes for programs that ask, by the interface of Solaris 9, in C
//! (`include/pagetax.h`) and in Rust (the functions of this module).
//!
//! Invariants: structures, codes and errno values are the original's; an argument that is wrong is
//! found before anything is changed. Sizes are those of madvise(2): transparent huge
//! pages that are not switched off. hugetlb pages are excluded, so a program that takes the largest size
//! gets it.
//!
//! The C interface to regions of network memory; the Rust interface is [`pagetax_remote`].
//!
//! Linked into a program, the library also interposes malloc and mmap. So a heap stays on large pages as it
//! grows ([`pagetax_interpose`]).

mod c;
mod information;
mod range;
mod remote;

pub use information::{Answers, Request, information};

use pagetax_host::pages::{Mode, PageSettings};
use pagetax_interpose::{Refused, heap, stack, system};

/// The memory that advice applies to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Addresses: start and length in bytes, multiples of the page size.
    Range(usize, usize),
    /// bss and heap, now and as it grows. Call it first in main, before other threads start.
    Heap,
    /// The main thread's stack; only the main thread may ask.
    Stack,
}

/// The reason for which advice was refused; each variant is an errno.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdviceError {
    /// EINVAL: no such page size, addresses that are no multiples, protections that differ in a page.
    Invalid,
    /// ENOMEM: not mapped throughout.
    NotMapped,
    /// EAGAIN: the system lacks the resources.
    NoResources,
}

impl AdviceError {
    /// Returns the value for errno.
    pub fn errno(self) -> i32 {
        match self {
            AdviceError::Invalid => libc::EINVAL,
            AdviceError::NotMapped => libc::ENOMEM,
            AdviceError::NoResources => libc::EAGAIN,
        }
    }
}

impl std::fmt::Display for AdviceError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::io::Error::from_raw_os_error(self.errno()).fmt(f)
    }
}

impl std::error::Error for AdviceError {}

impl From<Refused> for AdviceError {
    fn from(refused: Refused) -> AdviceError {
        match refused {
            Refused::NoSuchSize | Refused::SwitchedOff | Refused::StackLimit(_) => {
                AdviceError::Invalid
            }
            Refused::Failed(_) => AdviceError::NoResources,
        }
    }
}

/// Returns the page sizes that [`advise`] accepts, in bytes, smallest first.
pub fn page_sizes() -> Vec<usize> {
    let settings = PageSettings::host();
    let on = |size: &_| matches!(settings.of_size(*size), Some(Mode::Always | Mode::Madvise));
    let large = settings.sizes().into_iter().filter(on).map(|size| size.bytes() as usize);
    [system::base_page() as usize].into_iter().chain(large).collect()
}

/// Asks for pages of this size; 0 leaves the choice to the system.
pub fn advise(part: Part, page_bytes: usize) -> Result<(), AdviceError> {
    if page_bytes != 0 && !page_sizes().contains(&page_bytes) {
        return Err(AdviceError::Invalid);
    }
    match part {
        Part::Range(start, bytes) => range::advise(start, bytes, page_bytes),
        Part::Stack => Ok(stack::advise(page_bytes as u64)?),
        Part::Heap => {
            heap::advise(page_bytes as u64)?;
            range::advise_heap_so_far(page_bytes)
        }
    }
}
