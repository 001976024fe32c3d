//! Backing stores: the places that evicted pages go to, and the time that transfers take.

pub mod disk;
pub mod network;
