//! The core types of pagetax: Job, Plan, Machine, Sample, Report, Budget.
//!
//! Invariant: no I/O, no unsafe code, no clock. Everything is a pure function of its input, so tests
//! need no machine. All other crates depend on this one, and it depends on none of them.
// Not `forbid`: `network_memory` declares one unsafe trait. No module has unsafe code.
#![deny(unsafe_code)]

pub mod access;
pub mod address_pattern;
pub mod bill;
pub mod budget;
pub mod calibration;
pub mod catalog;
pub mod cause;
pub mod compare;
pub mod counter;
pub mod diagnosis;
pub mod document;
pub mod exit;
pub mod explain;
pub mod expression;
pub mod finding;
pub mod hatstat;
pub mod job;
pub mod live_tax;
pub mod load;
pub mod local_level;
pub mod machine;
pub mod network_memory;
pub mod page_size;
pub mod plan;
pub mod quantity;
pub mod ranking;
pub mod replay;
pub mod report;
pub mod sequential;
pub mod shares;
pub mod stats;
pub mod sweep;
pub mod system_stat;
pub mod threshold;
pub mod top;
pub mod trapstat;
pub mod units;
