//! libpagetax_remote_preload.so: network memory for unmodified, dynamically linked programs.
//!
//! Preloaded by `pagetax remote`, it takes the places of malloc and its family, and of mmap and its
//! family for large private anonymous maps, and gives out memory of one region that is paged
//! ([`pagetax_remote::pager`]).
//!
//! Invariants: the pager's threads never touch paged memory. So: all Rust code of this library
//! allocates from a heap of its own ([`private`]); the C library's allocations on behalf of the pager's
//! threads, and the loader's, go there too ([`threads`], [`heap`]); the pager makes system calls directly. The
//! pager's threads have descriptors of their own ([`agent`]). Nothing here panics on what a program does. A program that cannot be paged is told why and does not run.
#![allow(unsafe_code)]

mod agent;
#[cfg(target_arch = "x86_64")]
mod clones;
mod fork_resident;
mod forks;
mod heap;
mod local;
mod maps;
mod objects;
mod paged;
mod private;
mod space;
mod stderr;
mod streams;
mod thread_count;
mod threads;

/// Runs before main and before any thread of the program.
#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = constructor;

extern "C" fn constructor() {
    let _internal = threads::Internal::enter();
    stderr::note();
    objects::find();
    forks::register_ours();
    thread_count::notice_end();
    paged::start_as_told();
}

/// Runs when the program exits by itself.
#[used]
#[unsafe(link_section = ".fini_array")]
static DESTRUCTOR: extern "C" fn() = destructor;

extern "C" fn destructor() {
    let _internal = threads::Internal::enter();
    paged::end();
}

/// Sets errno, and returns what C functions return on failure.
pub(crate) fn fail<T>(errno: libc::c_int, result: T) -> T {
    // SAFETY: the location is valid for the calling thread for as long as it lives.
    unsafe { *libc::__errno_location() = errno };
    result
}
