//! Real memory servers and a client, while everything happens to them that can happen to servers and
//! networks.

mod network;
mod network_faults;
mod pages;
mod processes;
mod rights;
#[path = "../serve/mod.rs"]
mod serve;
