//! Raw system calls, ioctls and memory accesses behind thin safe functions without policy.
//!
//! Invariant: this crate has no other unsafe code. Callers of these modules cannot break memory safety,
//! and each unsafe block states why.

pub mod cpuid;
pub mod mapping;
pub mod numa;
pub mod pagemap;
pub mod perf;
pub mod place;
pub mod probe;
pub mod process;
pub mod ptrace;
pub mod remote;
pub mod shared;
pub mod signal;
