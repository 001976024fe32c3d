//! Runs of plans on this Linux machine, with real system calls and readings of the kernel's counters.
//!
//! Invariant: all unsafe code is in [`sys`]. However a run ends, it leaves nothing behind.
#![deny(unsafe_code)]

#[cfg(test)]
#[path = "../tests/alone/mod.rs"]
mod alone;
pub mod at_hand;
pub mod budget;
pub mod cache;
pub mod calibrate;
pub mod doctor;
pub mod environment;
pub mod exec;
pub mod guard;
pub mod installed;
pub mod pagemap;
pub mod pagesize;
pub mod perf;
pub mod preload;
pub mod procfs;
pub mod program;
pub mod stacks;
#[allow(unsafe_code)]
pub mod sys;
pub mod tlb_events;
pub mod trial;
