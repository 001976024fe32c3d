//! Simulated machines: any job on translation hardware + kernel paging policy + backing store, on a
//! virtual clock.
//!
//! ```text
//!              Plan                                    Sink (core::machine)
//!               │                                        ▲ counters, phases, series, budget, tables
//!   ┌───────────▼────────────────────────────────────────┴──────┐
//!   │ engine: tasks as cursors over the plan's operations,      │
//!   │         n CPUs, a scheduler, integer nanoseconds          │
//!   └───┬──────────────────────────────┬────────────────────────┘
//!       │ touch a run of accesses      │ fault, map, lock, fork, exit, switch, kernel threads
//!       ▼                              ▼
//!   trait Mmu  ◄──── PTEs ────  trait Kernel<M: Mmu> ────► store (disk, network)
//! ```
//!
//! # Adding a machine
//!
//! 1. **Hardware**: implement [`hardware::Mmu`]: `touch` walks [`hardware::accesses::Accesses`] until they are done,
//!    until one faults, or until the time limit, and never charges time itself: it reports
//!    picoseconds. If kernels of several kinds should run on it, implement [`hardware::PageTables`] too.
//!    [`hardware::flat::Flat`] is hardware that costs nothing: for models of reclaim and of paging.
//! 2. **Policy**: implement [`historic::kernel::Kernel`] for that hardware. Every method gets a [`historic::cx::Cx`], the
//!    only way to act on the rest of the world: `charge` CPU time to a row of the budget, `count`
//!    events, `wait` (until a time, or on a channel) under a row of the wall ledger, `wake` a channel,
//!    `latency`, `jitter`, `fail`. A fault that needs no waiting is retried at once; one that waits is
//!    retried after. A kernel owns its store; a disk is a place where `wait` times come from.
//! 3. **Model**: `machines/NAME.toml`, read through [`model::Model`], each constant with its unit and
//!    source; add it to the list in [`models`], and its kernel to the match in [`historic::machine`].
//!
//! # Invariants
//!
//! - Integers, one seeded generator, no hashing order: equal seeds give byte-identical reports in any
//!   build on any number of cores.
//! - Every nanosecond of CPU and of wall time is charged to a row: "unexplained" is exactly 0.
//! - Nothing hangs: a run that passes its stated cap of virtual time or of steps ends in
//!   [`pagetax_core::machine::RunError::Capped`].
#![forbid(unsafe_code)]

pub mod hardware;
pub mod historic;
pub mod model;
pub mod models;
pub mod tally;
