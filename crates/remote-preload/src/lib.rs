//! libpagetax_remote_preload.so: network memory for unmodified, dynamically linked programs.
//!
//! `pagetax remote` preloads it. It replaces malloc and its family, and mmap and its family for
//! large private anonymous maps. Their memory comes from one paged region
//! ([`pagetax_remote::pager`]).
//!
//! Invariants: the pager's threads never touch paged memory. So all Rust code of this library
//! allocates from a heap of its own ([`private`]). The C library's allocations on behalf of the
//! pager's threads, and the loader's, come from that heap too ([`threads`], [`heap`]). The pager
//! makes system calls directly, and its threads have descriptors of their own ([`agent`]). No call
//! of the program makes this code panic. A program that cannot be paged ends with a line that shows
//! why.
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
    thread_count::watch_this_thread();
    paged::start_if_configured();
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
