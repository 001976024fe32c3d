//! Records the pages that unmodified programs use, and simulates their TLB misses while they run.
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
//! Engines (a Valgrind tool, a QEMU plugin, a preloaded library) know no TLB. They drop the accesses
//! that no TLB could notice ([`filter`]) and write the others as [`stream`] records. A
//! [`stream::Consumer`] takes the records. [`simulate::Simulation`] feeds the TLB model of `pagetax-sim`
//! for several machines and page sizes at once. [`pages::RecordAdapter`] reports each thread's pages to a
//! [`pages::PageObserver`]: a [`trace`], miss curves, a prediction. A trace later reports the same pages
//! again.
//!
//! Invariants: a dropped access never changes a count. The program's output, exit status and signals are
//! its own. Modelled figures are never called measured.
#![deny(unsafe_code)]

pub mod bursts;
pub mod config;
pub mod counters;
pub mod curves;
pub mod dependent_loads;
pub mod documents;
pub mod engine;
pub mod filter;
pub mod forecast;
pub mod heatmap;
pub mod known_tlbs;
pub mod listing;

pub mod native;
pub mod pages;
pub mod places;
pub mod predict;
pub mod profile;
pub mod ring;
pub mod sampled;
pub mod session;
pub mod simulate;
pub mod stream;
pub mod summary;
pub mod symbols;
pub mod toolchain;
pub mod trace;
