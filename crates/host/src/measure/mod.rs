//! Measurements of the machine and of programs.

pub mod backed_memory;
pub mod budget;
pub mod calibrate;
#[cfg(test)]
mod captured;
pub mod doctor;
pub mod environment;
pub mod fault_log;
pub mod fragmentation;
pub mod hatstat;
pub mod kswapd;
pub mod live;
pub mod perf;
pub mod ranking;
pub mod speed_probe;
pub mod stacks;
pub mod system;
pub(in crate::measure) mod thread_events;
pub mod tlb_events;
pub mod top;
pub mod trial;
