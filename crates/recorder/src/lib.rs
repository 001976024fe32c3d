//! TLB misses of unmodified programs, on any simulated machine, while they run.
//!
//! ```text
//!  program under an engine                      pagetax, on another CPU
//!  ┌──────────────────────────┐   shared    ┌───────────────────────────────────────────┐
//!  │ every access → page      │   memory    │ stream: records → Consumer                │
//!  │ filter, inlined → record ├───rings────▶│   simulate: places → configs → sim's TLBs   │
//!  └──────────────────────────┘             │   (or a trace)                            │
//!   engines/: C, built at first use         └───────────────────────────────────────────┘
//! ```
//!
//! The engines (a Valgrind tool, a QEMU plugin) know no TLB. They drop the accesses that no TLB could
//! notice ([`filter`]) and write the rest as [`stream`] records. Whatever takes the stream is a
//! [`stream::Consumer`]: [`simulate::Simulation`] feeds the TLB model of `pagetax-sim`, the only one
//! there is, for several machines and page sizes at once. [`pages::Live`] tells whatever takes
//! [`pages::Pages`] (a [`trace`], miss curves) which pages each thread goes to; a trace tells them again.
//!
//! Invariants: dropping an access never changes a count; the program's output, exit status and
//! signals are its own; what is modelled is never called measured.
#![deny(unsafe_code)]

pub mod bursts;
pub mod chase;
pub mod config;
pub mod counters;
pub mod curves;
pub mod engine;
pub mod filter;
pub mod forecast;
pub mod listing;

pub mod native;
pub mod pages;
pub mod places;
pub mod predict;
pub mod profile;
pub mod ring;
pub mod session;
pub mod simulate;
pub mod stream;
pub mod summary;
pub mod symbols;
pub mod toolchain;
pub mod trace;
