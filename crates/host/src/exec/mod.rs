//! Runs plans natively: the machines `host` and `null`.
//!
//! The null machine does everything that the host machine does, threads, forks, streams and pacing,
//! except for the memory itself, so that its readings are what the harness costs. They are reported,
//! never subtracted.

mod control;
mod failure;
mod figures;
mod machine;
mod memory;
mod network;
mod pace;
mod run;
mod touch;
mod watch;
mod worker;

pub use machine::{HostMachine, NullMachine};
pub(crate) use memory::{file_directory, mapping_len};
