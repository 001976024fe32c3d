//! Historic systems: their kernels, backing stores and schedulers, run by a deterministic engine.

pub mod cx;
pub mod engine;
pub mod kernel;
pub mod machine;
pub mod reproduce;
pub mod sched;
pub mod store;
