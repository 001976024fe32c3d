//! Native runs of plans: the machines `host` and `null`.
//!
//! The null machine does all that the host machine does, except for the memory: threads, forks, streams
//! and pacing. Its readings are the harness's own cost. Reports show them and never subtract them.

mod call_times;
mod control;
mod execution;
mod failure;
mod figures;
pub mod guard;
mod lockable;
mod machine;
mod memory;
mod network;
mod pace;
mod touch;
mod watch;
mod worker;

pub use machine::{HostMachine, NullMachine, OpenNetwork};
pub(crate) use memory::file_directory;
