//! The pager's only unsafe room: userfaultfd, its memory, and where its threads run.
//!
//! Invariant: nothing given out here can touch memory other than the mappings that this module made
//! for the pager, whatever the caller does.
#![allow(unsafe_code)]

pub mod lock;
pub mod memory;
pub mod threads;
pub mod uffd;
