//! System calls that another process makes on our behalf.

#[cfg(not(target_arch = "x86_64"))]
mod elsewhere;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(not(target_arch = "x86_64"))]
pub use elsewhere::{NoThread as Stopped, with_fork, with_stopped};
#[cfg(target_arch = "x86_64")]
pub use x86_64::{Stopped, with_fork, with_stopped};

/// The duration of a stop.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stop {
    /// The wall time of the stop.
    pub wall_ns: u64,
    /// The part of it in which the thread and its tracer waited for a CPU. They take turns, so the two waits
    /// rarely overlap.
    pub cpu_wait_ns: u64,
}
