//! Page sizes of commands and of running processes: sets them, proves them and undoes them.
//!
//! Requests are in the grammar of [`pagetax_core::page_size`]. `diagnose` and `whatif` try a [`Mechanism`] on
//! a command. For `pagetax ppgsz` a request becomes a [`launch`] plan of a command, or a [`change`] of a
//! running process ([`target`]), which [`follow`] sweeps repeat. A [`verdict`] shows the result.
//!
//! Invariants: only [`Changed`] changes settings of the system; it restores them, by way of the [`journal`].
//! A process is changed only through a [`target::Target`], which refuses those that must be left alone. No
//! byte of a program is ever written.

pub mod change;
pub mod documents;
pub mod follow;
pub mod inject;
pub mod journal;
pub mod launch;
pub mod mechanism;
pub mod only;
pub mod pagemap;
pub mod parts;
pub mod remap;
mod settings;
pub mod target;
pub mod text;
mod tunables;
pub mod verdict;
pub mod why;

pub use mechanism::{Mechanism, Recipe, Unavailable};
pub(crate) use settings::selected;
pub use settings::{Changed, Mode, PageSettings, Setting, base_page};
pub use tunables::with_tunable;
pub use verdict::{Verdict, judge};
