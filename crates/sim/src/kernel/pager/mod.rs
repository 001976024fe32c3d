//! Network memory.

pub mod memory;
