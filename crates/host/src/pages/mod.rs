//! Page sizes of commands and of running processes: what is asked for, how it is brought about,
//! whether it took, and how to undo it.
//!
//! Two ways in. A [`Mechanism`] is what `diagnose` tries on a command. [`Advice`] is what
//! `pagetax ppgsz` asks for, by part: for a command it becomes a [`launch`] plan, for a process
//! ([`target`]) a [`change`] of the pages that are there, repeated by a [`follow`] sweep; a
//! [`verdict`] tells what became of it.
//!
//! Invariants: settings of the system are changed by [`Changed`] alone, which puts back what it
//! found, by way of the [`journal`]; a process is changed only through a [`target::Target`], which refuses those that must be
//! left alone; no byte of a program is ever written.

pub mod change;
pub mod documents;
pub mod follow;
pub mod inject;
pub mod journal;
pub mod launch;
pub mod mechanism;
pub mod pagemap;
pub mod parts;
pub mod remap;
mod settings;
pub mod target;
pub mod text;
mod tunables;
pub mod verdict;

pub use mechanism::{Mechanism, Recipe, Unavailable};
pub(crate) use settings::selected;
pub use settings::{Changed, Mode, PageSettings, Setting};
pub use tunables::with_tunable;
pub use verdict::{Verdict, judge};
