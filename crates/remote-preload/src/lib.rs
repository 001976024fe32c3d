//! libpagetax_remote_preload.so: network memory for unmodified, dynamically linked programs.
//!
//! Preloaded by `pagetax remote`, it takes the places of malloc and its family, and of mmap and its
//! family for large private anonymous maps, and gives out memory of one region that is paged
//! ([`pagetax_remote::pager`]).
//!
//! Invariants: the pager's threads never touch paged memory. So: all Rust code of this library
//! allocates from a heap of its own ([`private`]); the C library's allocations on behalf of the pager's
//! threads go there too ([`threads`]); the pager makes system calls directly. Nothing here panics on
//! what a program does. A program that cannot be paged is told why and does not run.
#![allow(unsafe_code)]

mod descriptors;
mod forks;
mod heap;
mod maps;
mod paged;
mod private;
mod space;
mod streams;
mod threads;

/// Runs before main and before any thread of the program.
#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = constructor;

extern "C" fn constructor() {
    let _internal = threads::Internal::enter();
    forks::register_ours();
    paged::start_as_told();
}

/// Runs when the program exits by itself.
#[used]
#[unsafe(link_section = ".fini_array")]
static DESTRUCTOR: extern "C" fn() = destructor;

extern "C" fn destructor() {
    let _internal = threads::Internal::enter();
    paged::say_stats();
    paged::give_up_at_end();
}

/// Says a line on stderr: the program's own output stays what it is.
pub(crate) fn say(line: &str) {
    say_to(libc::STDERR_FILENO, line);
}

pub(crate) fn say_to(file: libc::c_int, line: &str) {
    let text = format!("pagetax remote: {line}\n");
    // SAFETY: writes the bytes of a live string. If the file is closed there is nobody to tell.
    unsafe { libc::syscall(libc::SYS_write, file, text.as_ptr(), text.len()) };
}

/// Sets errno, and returns what C functions return on failure.
pub(crate) fn fail<T>(errno: libc::c_int, result: T) -> T {
    // SAFETY: the location is valid for the calling thread for as long as it lives.
    unsafe { *libc::__errno_location() = errno };
    result
}
