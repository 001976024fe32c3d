//! Runs of plans on this Linux machine, with real system calls and readings of the kernel's counters.
//!
//! Invariant: all unsafe code is in [`sys`]. However a run ends, it leaves nothing behind.
#![deny(unsafe_code)]

#[cfg(test)]
#[path = "../tests/alone/mod.rs"]
mod alone;
pub mod cache;
pub mod launch;
pub mod measure;
pub mod pages;
pub mod procfs;
pub mod run;
#[allow(unsafe_code)]
pub mod sys;
