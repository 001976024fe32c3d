//! Backing stores: where pages come from and go to that do not fit in memory, and how long it takes.

pub mod disk;
pub mod network;
