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
//! 1. **Hardware**: implement [`hardware::Mmu`]. `touch` walks [`hardware::accesses::Accesses`] until they
//!    are done, until one faults, or until the time limit. It charges no time: it reports picoseconds. If
//!    several kernels should run on it, implement [`hardware::PageTables`] too. For models of reclaim and
//!    of paging, [`hardware::flat::Flat`] is hardware without costs.
//! 2. **Policy**: implement [`historic::kernel::Kernel`] for that hardware. Every method acts on the rest
//!    of the machine through a [`historic::cx::Cx`] only. It can `charge` CPU time to a row of the budget,
//!    `count` events and `wake` a channel. It can `wait` until a time or on a channel, under a row of the
//!    wall ledger. It also has `latency`, `jitter` and `fail`. The engine retries a fault at once, or after
//!    its wait. A kernel owns its store; a disk only computes `wait` times.
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
