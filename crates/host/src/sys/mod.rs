//! Every raw system call and ioctl, and the raw accesses to memory: thin, safe to call, no policy.
//!
//! Invariant: the only unsafe code of this crate is here. What these modules give out cannot break
//! memory safety whatever the caller does; each unsafe block says why.

pub mod mapping;
pub mod numa;
pub mod pagemap;
pub mod perf;
pub mod probe;
pub mod process;
pub mod ptrace;
pub mod remote;
pub mod shared;
pub mod signal;
