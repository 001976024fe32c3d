//! Page sizes of commands: which mechanisms there are, what they need of the system, and how to
//! apply one by hand.
//!
//! Invariant: nothing is changed here but by [`Changed`], which puts back what it found.

mod mechanism;
mod settings;
mod tunables;

pub use mechanism::{Mechanism, MechanismError, Recipe, Unavailable};
pub use settings::{Changed, Mode, PageSettings, Setting};
pub use tunables::with_tunable;
