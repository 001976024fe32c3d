//! Backing stores: where pages go that do not fit in memory.

pub mod network;
