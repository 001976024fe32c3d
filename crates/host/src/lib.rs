//! Runs plans on this Linux machine with real system calls, and measures with the kernel's counters.
//!
//! Invariant: all unsafe code is in [`sys`]. No run leaves anything behind, however it ends.
#![deny(unsafe_code)]

#[cfg(test)]
#[path = "../tests/alone/mod.rs"]
mod alone;
pub mod cache;
pub mod code_folder;
pub mod launch;
pub mod measure;
pub mod pages;
pub mod procfs;
pub mod run;
#[allow(unsafe_code)]
pub mod sys;
